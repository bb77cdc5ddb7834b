package cli

import (
	"regexp"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

const pluginFiles = "../../config/kms-plugin/"

func followKMSPlugin(f *documented) {
	f.bind("awskms:///arn:aws:kms:eu-central-1:111122223333:key/1234abcd-12ab-34cd-56ef-1234567890ab?region=eu-central-1", "file://"+f.path("kms-plugin/kms.key"))
	f.bind("/etc/latticekeep", f.dir)
	second := []string{"--dir /etc/latticekeep/kms-plugin", "--dir " + f.path("cp-2")}
	f.run("mkdir -m 0700 -p /etc/latticekeep/kms-plugin")
	f.run("(umask 077; printf 'latticekeep-kms-key-1:")
	f.run("latticekeep kms-plugin init", "key set ")
	f.runAs("latticekeep kms-plugin node", second)
	f.run("latticekeep kms-plugin add-node", "revision 2")
	const oneNode = "it needs a second machine"
	f.pass("scp ", oneNode)
	f.pass("ssh ", oneNode)

	const unit = "it needs systemd as the first process"
	f.pass("cp config/kms-plugin/latticekeep-kms-plugin.service", unit)
	f.pass("systemctl daemon-reload", unit)
	f.pass("systemctl enable --now", unit)
	f.onNode("cp config/kms-plugin/static-pod.yaml /etc/kubernetes/manifests/latticekeep-kms-plugin.yaml",
		"sed 's#latticekeep/latticekeep:0.1.0#localhost/latticekeep:e2e#' config/kms-plugin/static-pod.yaml >/etc/kubernetes/manifests/latticekeep-kms-plugin.yaml\n")
	f.onNode("kubectl wait --for=create", "kubectl wait --for=create pod/latticekeep-kms-plugin-node --namespace kube-system --timeout=5m\n")
	f.onNode("kubectl wait --for=condition=Ready", "kubectl wait --for=condition=Ready pod/latticekeep-kms-plugin-node --namespace kube-system --timeout=5m\n")
	f.onNode("kubectl logs ", "kubectl logs latticekeep-kms-plugin-node --namespace kube-system\n")
	for _, same := range []string{
		"mkdir -p /etc/kubernetes/encryption\n",
		"cp config/kms-plugin/encryption-*.yaml /etc/kubernetes/encryption/\n",
	} {
		f.onNode(strings.TrimSpace(same), same)
	}
	f.onNode("kubectl --server https://cp-1:6443 get --raw '/readyz?verbose' | grep kms", "kubectl get --raw '/readyz?verbose' | grep kms\n[+]kms-providers ok\n")
	f.onNode("kubectl get secrets --all-namespaces -o json | kubectl replace -f -", "kubectl get secrets --all-namespaces -o json | kubectl replace -f -\n")
	f.run("latticekeep kms-plugin show")
	f.onNode("kubectl --server https://cp-1:6443 --namespace kube-system create", "kubectl --namespace kube-system create secret generic key-id-check\n")
	f.onNode("kubectl --server https://cp-1:6443 --namespace kube-system delete", "kubectl --namespace kube-system delete secret key-id-check\n")
	f.onNode("kubectl --server https://cp-1:6443 get --raw /metrics | grep 'apiserver_envelope_encryption_key_id_hash_total.*HASH.*to_storage'",
		"kubectl get --raw /metrics | grep 'apiserver_envelope_encryption_key_id_hash_total.*HASH.*to_storage'\n")
	_, query, _ := strings.Cut(f.left[0], "/v3/kv/range")
	f.onNode("curl ", "curl --silent --show-error --fail --unix-socket <folder>/etcd.sock http://etcd/v3/kv/range "+strings.Join(strings.Fields(query), " ")+"\n")

	const elsewhere = "TestTheKMSPluginServesARealAPIServer and the tests of internal/cli/kmsplugin run it"
	for _, begin := range []string{"rotate", "acknowledge", "promote", "show", "acknowledge", "retire", "remove-node"} {
		f.pass("latticekeep kms-plugin "+begin+" --dir", elsewhere)
	}

	recipient := regexp.MustCompile(`age1pq1\w+`).FindString(f.run("latticekeep backup keygen", "age1pq1"))
	f.runAs("latticekeep kms-plugin backup", []string{"age1pq1…", recipient}, "revision 2")
	f.runAs("latticekeep kms-plugin restore", []string{
		"--dir /etc/latticekeep/kms-plugin", "--dir " + f.path("restored"),
		"awskms:///arn:aws:kms:eu-central-1:111122223333:key/5678efab-56ef-78ab-90cd-567890abcdef?region=eu-central-1", "file://" + f.path("kms-plugin/kms.key"),
	}, "revision 3")
	for _, begin := range []string{"verify-log --dir", "verify-log --key-set", "ship-log --dir"} {
		f.pass("latticekeep kms-plugin "+begin, elsewhere)
	}
}

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
