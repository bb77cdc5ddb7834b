package charts_test

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"github.com/latticekeep/latticekeep/config/crd"
	"github.com/latticekeep/latticekeep/test/kubetest"
)

const crdName = "sealedcredentials.latticekeep.dev"

// templateBefore is how the chart had the CRD in its manifest.
const templateBefore = `
{{- if .Values.crd.install }}
{{- $crd := .Files.Get "files/crd.yaml" | fromYaml }}
{{- $_ := set $crd.metadata.annotations "helm.sh/resource-policy" "keep" }}
{{- $_ := set $crd.metadata "labels" (include "latticekeep.metadata" (list . "") | fromYaml).labels }}
{{ toYaml $crd }}
{{- end }}
`

// crdBefore is the CRD of that chart: v1alpha1 alone, and no number.
func crdBefore(t *testing.T) []byte {
	t.Helper()
	o := objects(t, string(crd.YAML))[0]
	o.SetAnnotations(map[string]string{"controller-gen.kubebuilder.io/version": "v0.23.0"})
	alpha := field(t, &o, "spec", "versions").([]any)[0].(map[string]any)
	alpha["storage"] = true
	delete(alpha, "deprecated")
	delete(alpha, "deprecationWarning")
	check := unstructured.SetNestedSlice(o.Object, []any{alpha}, "spec", "versions")
	text, err := yaml.Marshal(o.Object)
	if check != nil || err != nil {
		t.Fatal(check, err)
	}
	return text
}

// chartBefore writes that chart to a folder.
func chartBefore(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "latticekeep")
	if err := os.CopyFS(dir, os.DirFS("latticekeep")); err != nil {
		t.Fatal(err)
	}
	for file, text := range map[string][]byte{"templates/crd.yaml": []byte(templateBefore), "files/crd.yaml": crdBefore(t)} {
		if err := os.WriteFile(filepath.Join(dir, file), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// A release is one of Helm in a cluster without pods, so its hooks do not run by themselves.
type release struct {
	t       *testing.T
	plane   *kubetest.ControlPlane
	program string
}

// helm runs a command of Helm on the release, without hooks.
func (r release) helm(args ...string) (string, error) {
	r.t.Helper()
	helm, err := filepath.Abs("../bin/tools/helm")
	if err != nil {
		r.t.Fatal(err)
	}
	cmd := exec.CommandContext(r.t.Context(), helm, append(args, "--namespace", namespace)...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+r.plane.Kubeconfig, "HOME="+r.t.TempDir())
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func (r release) mustHelm(args ...string) string {
	r.t.Helper()
	out, err := r.helm(args...)
	if err != nil {
		r.t.Fatalf("helm %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return out
}

// hook does what the hook before an installation and an upgrade does.
func (r release) hook() string {
	r.t.Helper()
	out, err := exec.CommandContext(r.t.Context(), r.program, "crd", "apply", "--kubeconfig", r.plane.Kubeconfig).CombinedOutput()
	if err != nil || bytes.Contains(out, []byte("warning")) {
		r.t.Fatalf("latticekeep crd apply: %v\n%s", err, out)
	}
	return string(out)
}

func (r release) crd() *unstructured.Unstructured {
	r.t.Helper()
	o := new(unstructured.Unstructured)
	if err := json.Unmarshal([]byte(must(r.t, r.plane, "", "get", "crd", crdName, "-o", "json", "--show-managed-fields")), &o.Object); err != nil {
		r.t.Fatal(err)
	}
	return o
}

// objects returns what nothing here may change.
func (r release) objects() string {
	r.t.Helper()
	out, err := r.plane.Kubectl(r.t.Context(), "get", "sealedcredentials.v1alpha1.latticekeep.dev", "-A",
		"-o", `jsonpath={range .items[*]}{.metadata.uid} {.metadata.generation} {.metadata.finalizers} {.spec}{"\n"}{end}`).Output() // without the warning
	if err != nil {
		r.t.Fatal(err)
	}
	return string(out)
}

func storedVersions(t *testing.T, o *unstructured.Unstructured) (all []string) {
	t.Helper()
	for _, v := range field(t, o, "status", "storedVersions").([]any) {
		all = append(all, v.(string))
	}
	return all
}

// The upgrade from a chart that has the CRD in its manifest, and every way on and back from there: the CRD and the objects stay.
func TestTheCRDLeavesTheManifestOfARelease(t *testing.T) {
	r := release{t, kubetest.ForTest(t), filepath.Join(t.TempDir(), "latticekeep")}
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", r.program, "..").CombinedOutput(); err != nil {
		t.Fatalf("building the program: %v\n%s", err, out)
	}
	must(t, r.plane, "", "create", "namespace", namespace)
	must(t, r.plane, "", "delete", "crd", crdName)
	common := []string{"--no-hooks", "--set", "webhook.enabled=false"} // nothing would answer there
	r.mustHelm(append([]string{"install", "latticekeep", chartBefore(t)}, common...)...)
	if err := r.plane.AwaitCRDs(t.Context()); err != nil {
		t.Fatal(err)
	}
	before := r.crd()
	if before.GetLabels()["app.kubernetes.io/managed-by"] != "Helm" || !slices.Equal(storedVersions(t, before), []string{"v1alpha1"}) {
		t.Fatalf("this is not the CRD of before: %s, stored %s", before.GetLabels(), storedVersions(t, before))
	}
	must(t, r.plane, deprecated(generated("default")), "create", "-f", "-")
	must(t, r.plane, "", "patch", "sealedcredential", "generated", "--type=merge", "-p", `{"metadata":{"finalizers":["example.org/x"]}}`)
	kept := r.objects()

	r.hook()
	r.mustHelm(append([]string{"upgrade", "latticekeep", "latticekeep"}, common...)...)
	after := r.crd()
	if after.GetUID() != before.GetUID() || r.objects() != kept || !slices.Equal(storedVersions(t, after), []string{"v1beta1"}) {
		t.Fatalf("the upgrade made another CRD, or changed objects:\n%s\n%s", kept, r.objects())
	}
	if strings.Contains(r.mustHelm("get", "manifest", "latticekeep"), "CustomResourceDefinition") {
		t.Error("the CRD is still in the manifest")
	}
	for _, m := range after.GetManagedFields() {
		if m.Manager == "helm" || m.Subresource == "" && (m.Manager != "latticekeep" || m.Operation != "Apply") {
			t.Errorf("%s (%s) has fields of the CRD", m.Manager, m.Operation)
		}
	}
	for label := range after.GetLabels() {
		t.Errorf("the label %s speaks of a release", label)
	}

	t.Run("another upgrade and back", func(t *testing.T) {
		r.t = t
		r.hook()
		r.mustHelm(append([]string{"upgrade", "latticekeep", "latticekeep", "--set", "replicas=0"}, common...)...)
		r.mustHelm("rollback", "latticekeep", "2", "--no-hooks")
		if r.crd().GetResourceVersion() != after.GetResourceVersion() || r.objects() != kept {
			t.Error("the CRD or the objects were written")
		}
	})
	t.Run("back to the chart of before", func(t *testing.T) {
		r.t = t
		// What Helm would put back lacks the version in which objects are stored. It is refused, whatever is forced.
		for _, flags := range [][]string{nil, {"--force-conflicts"}, {"--server-side=false"}} {
			if out, err := r.helm(append([]string{"rollback", "latticekeep", "1", "--no-hooks"}, flags...)...); err == nil {
				t.Errorf("with %q Helm put the CRD of before back: %s", flags, out)
			}
		}
		r.mustHelm(append([]string{"upgrade", "latticekeep", chartBefore(t), "--set", "crd.install=false"}, common...)...)
		if back := r.crd(); back.GetUID() != before.GetUID() || !reflect.DeepEqual(back.Object["spec"], after.Object["spec"]) || r.objects() != kept {
			t.Error("the CRD or the objects were changed")
		}
	})
	r.t = t
	t.Run("uninstall", func(t *testing.T) {
		r.t = t
		r.mustHelm("uninstall", "latticekeep", "--no-hooks")
		if r.crd().GetUID() != before.GetUID() || r.objects() != kept {
			t.Error("the CRD or the objects are gone")
		}
	})
}
