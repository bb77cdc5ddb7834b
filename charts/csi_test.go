package charts_test

import (
	"slices"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
)

const (
	csiProvider     = "latticekeep-csi-provider"
	csiProviderPath = podPath + ".containers[0]"
)

// typed returns an object of the chart in the type that Kubernetes has for it, and fails on a field that this does not know.
func typed[T any](t *testing.T, all []unstructured.Unstructured, kind, name string) *T {
	t.Helper()
	o, typed := find(all, kind, name), new(T)
	if o == nil {
		t.Fatalf("there is no %s %s", kind, name)
	}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructuredWithValidation(o.Object, typed, true); err != nil {
		t.Fatalf("%s %s: %v", kind, name, err)
	}
	return typed
}

func TestTheCSIProviderIsThereOnlyWhenItIsAskedFor(t *testing.T) {
	for _, kind := range []string{"DaemonSet", "ServiceAccount", "NetworkPolicy"} {
		if find(rendered(t), kind, csiProvider) != nil {
			t.Errorf("%s %s is there by default", kind, csiProvider)
		}
	}
}

// A container that is broken into is root, for the folder of the node, but has no capability, no token and nothing else to write to.
func TestTheCSIProviderHasNothingButItsSocket(t *testing.T) {
	all := renderedWith(t, "csiProvider: {enabled: true}")
	spec := typed[appsv1.DaemonSet](t, all, "DaemonSet", csiProvider).Spec.Template.Spec
	security := spec.Containers[0].SecurityContext
	if *security.AllowPrivilegeEscalation || !*security.ReadOnlyRootFilesystem || security.Privileged != nil || security.Capabilities.Add != nil ||
		!slices.Equal(security.Capabilities.Drop, []corev1.Capability{"ALL"}) || spec.SecurityContext.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault {
		t.Errorf("it is not hardened: %+v %+v", security, spec.SecurityContext)
	}
	if *spec.AutomountServiceAccountToken || spec.HostNetwork || spec.HostPID || spec.HostIPC {
		t.Error("it has a token, or a namespace of the node")
	}
	for _, mount := range spec.Containers[0].VolumeMounts {
		if mount.Name != "providers" && !mount.ReadOnly {
			t.Errorf("it can write to %s", mount.MountPath)
		}
	}
	for _, v := range spec.Volumes {
		switch {
		case v.HostPath != nil && v.HostPath.Path == "/var/run/secrets-store-csi-providers":
		case v.ConfigMap != nil && v.ConfigMap.Name == "latticekeep-ca" && len(v.ConfigMap.Items) == 1 && v.ConfigMap.Items[0].Key == "ca.crt": // a Secret would be readable for every kubelet
		default:
			t.Errorf("it has the volume %+v", v)
		}
	}
	for _, o := range all {
		subjects, _, _ := unstructured.NestedSlice(o.Object, "subjects")
		for _, s := range subjects {
			if s.(map[string]any)["name"] == csiProvider {
				t.Errorf("%s %s gives it rights", o.GetKind(), o.GetName())
			}
		}
	}
}

// Where connections are restricted, it reaches the server and nothing else, and nothing reaches it.
func TestTheCSIProviderConnectsToTheServerAlone(t *testing.T) {
	all := renderedWith(t, "csiProvider: {enabled: true}\nnetworkPolicy: {clients: [], egress: {enabled: true}}")
	spec := typed[networkingv1.NetworkPolicy](t, all, "NetworkPolicy", csiProvider).Spec
	if len(spec.PolicyTypes) != 2 || len(spec.Ingress) > 0 || len(spec.Egress) != 2 {
		t.Fatalf("it may %+v", spec)
	}
	labels := typed[appsv1.DaemonSet](t, all, "DaemonSet", csiProvider).Spec.Template.Labels
	for key, value := range spec.PodSelector.MatchLabels {
		if labels[key] != value {
			t.Errorf("its pods have %s=%s, and the policy is for %s", key, labels[key], value)
		}
	}
	labels = typed[appsv1.StatefulSet](t, all, "StatefulSet", "latticekeep").Spec.Template.Labels
	for key, value := range spec.Egress[1].To[0].PodSelector.MatchLabels {
		if labels[key] != value {
			t.Errorf("it may connect to pods with %s=%s, and the server has %s", key, value, labels[key])
		}
	}
	labels = typed[appsv1.DaemonSet](t, all, "DaemonSet", csiProvider).Spec.Template.Labels
	for key, value := range typed[networkingv1.NetworkPolicy](t, all, "NetworkPolicy", "latticekeep").Spec.Ingress[0].From[0].PodSelector.MatchLabels {
		if labels[key] != value {
			t.Errorf("the server takes connections of pods with %s=%s, and it has %s", key, value, labels[key])
		}
	}
}

func TestValuesOfTheCSIProviderReachTheirPlace(t *testing.T) {
	for _, tc := range []struct{ values, kind, name, path, want string }{
		{"", "DaemonSet", csiProvider, csiProviderPath + ".args", "[csi-provider, '--url=https://latticekeep." + namespace + ".svc:8200', --ca-file=/etc/latticekeep/ca/ca.crt, --socket=/providers/latticekeep.sock]"},
		{"socketFolder: /etc/a", "DaemonSet", csiProvider, podPath + `.volumes[?(@.name=="providers")].hostPath.path`, "/etc/a"},
		{"podLabels: {a: b}", "DaemonSet", csiProvider, templateLabel + ".a", "b"},
		{"podAnnotations: {a: b}", "DaemonSet", csiProvider, ".spec.template.metadata.annotations.a", "b"},
		{"resources: {limits: {cpu: 1}}", "DaemonSet", csiProvider, csiProviderPath + ".resources.limits.cpu", "1"},
		{"priorityClassName: system-node-critical", "DaemonSet", csiProvider, podPath + ".priorityClassName", "system-node-critical"},
		{"nodeSelector: {a: b}", "DaemonSet", csiProvider, podPath + ".nodeSelector", "{a: b}"},
		{"tolerations: [{operator: Exists}]", "DaemonSet", csiProvider, podPath + ".tolerations", "[{operator: Exists}]"},
		{"affinity: {nodeAffinity: {}}", "DaemonSet", csiProvider, podPath + ".affinity", "{nodeAffinity: {}}"},
		{"serviceAccount: {annotations: {a: b}}", "ServiceAccount", csiProvider, ".metadata.annotations.a", "b"},
		{"serviceAccount: {name: files}", "ServiceAccount", "files", ".automountServiceAccountToken", "false"},
		{"serviceAccount: {name: files}", "DaemonSet", csiProvider, podPath + ".serviceAccountName", "files"},
		{"serviceAccount: {create: false}", "ServiceAccount", csiProvider, ".metadata.name", ""},
	} {
		values := "csiProvider: {" + tc.values + "}"
		got, want := at(t, renderedWith(t, values, "--set", "csiProvider.enabled=true"), tc.kind, tc.name, tc.path), ""
		if tc.want != "" {
			want = asJSON(t, tc.want)
		}
		if got != want {
			t.Errorf("%s: %s of %s %s is\n%s\nwant\n%s", values, tc.path, tc.kind, tc.name, got, want)
		}
	}
}
