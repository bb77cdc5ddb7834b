package cli

import (
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

const pluginFiles = "../../config/kms-plugin/"

// The files that are shipped differ from what the guide shows in nothing.
func TestTheGuideOfTheKMSPluginShowsWhatIsShipped(t *testing.T) {
	const page = "docs/guides/kms-plugin.md"
	guide := readText(t, "../../"+page)
	read := readText(t, pluginFiles+"encryption-read.yaml")
	if shown := strings.TrimPrefix(manifest(t, page, "kind: EncryptionConfiguration"), "\n"); shown != read {
		t.Errorf("the guide shows\n%s\nand encryption-read.yaml is\n%s", shown, read)
	}
	lines := strings.SplitAfter(read, "\n")
	head, identity, kms := strings.Join(lines[:5], ""), lines[5], lines[6]
	for file, want := range map[string]string{"encryption-write.yaml": head + kms + identity, "encryption-only.yaml": head + kms} {
		if got := readText(t, pluginFiles+file); got != want {
			t.Errorf("%s is\n%s\nand not\n%s", file, got, want)
		}
	}
	for _, file := range []string{"latticekeep-kms-plugin.service", "static-pod.yaml", "encryption-read.yaml", "encryption-write.yaml", "encryption-only.yaml"} {
		if !strings.Contains(guide, file) {
			t.Errorf("the guide does not name %s", file)
		}
	}
	for part, in := range map[string]string{"/run/latticekeep/kms.sock": kms, "mountPath: /run/latticekeep}": guide, "--dir /etc/latticekeep/kms-plugin": guide} {
		if !strings.Contains(in, part) {
			t.Errorf("%q is not in\n%s", part, in)
		}
	}
}

// Both ways to run the plugin serve the same files at the same socket, as root without capabilities.
func TestTheWaysToRunTheKMSPluginAreTheSameAndHardened(t *testing.T) {
	var pod corev1.Pod
	if err := yaml.UnmarshalStrict([]byte(readText(t, pluginFiles+"static-pod.yaml")), &pod); err != nil {
		t.Fatal(err)
	}
	container := pod.Spec.Containers[0]
	want := strings.Fields("kms-plugin serve --dir /etc/latticekeep/kms-plugin --socket /run/latticekeep/kms.sock")
	if !slices.Equal(container.Args, want) {
		t.Errorf("the pod runs %q, not %q", container.Args, want)
	}
	unit := strings.Split(readText(t, pluginFiles+"latticekeep-kms-plugin.service"), "\n")
	for _, line := range []string{
		"ExecStart=/usr/local/bin/latticekeep " + strings.Join(want, " "), "ReadWritePaths=/etc/latticekeep/kms-plugin", "RuntimeDirectory=latticekeep",
		"CapabilityBoundingSet=", "NoNewPrivileges=yes", "LimitCORE=0", "MemorySwapMax=0", "ProtectSystem=strict",
	} {
		if !slices.Contains(unit, line) {
			t.Errorf("the unit does not say %s", line)
		}
	}
	security := container.SecurityContext
	if !*security.ReadOnlyRootFilesystem || *security.AllowPrivilegeEscalation || *security.RunAsUser != 0 || !slices.Equal(security.Capabilities.Drop, []corev1.Capability{"ALL"}) ||
		pod.Spec.SecurityContext.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault || *pod.Spec.AutomountServiceAccountToken || !pod.Spec.HostNetwork {
		t.Errorf("the pod is not hardened: %+v, %+v", pod.Spec.SecurityContext, security)
	}
	if memory := container.Resources; !memory.Requests.Memory().Equal(*memory.Limits.Memory()) {
		t.Error("kubelet may swap out a pod whose limit of memory is not what it requests")
	}
}
