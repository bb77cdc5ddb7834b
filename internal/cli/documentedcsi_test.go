package cli

import (
	"encoding/base64"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/latticekeep/latticekeep/internal/delivery"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity"
	"github.com/latticekeep/latticekeep/test/servertest"
)

// The driver's own chart takes the values of the guide, and a cluster with its resources takes the guide's objects.
func followCSI(f *documented) {
	c := f.cluster()
	root, err := filepath.Abs("../..")
	must(f.T, err)
	f.set("PATH", root+"/bin/tools:"+os.Getenv("PATH"))
	version, chart := csiDriverChart(f.T)
	f.pass("helm repo add ", "the repository is outside; the module of the driver has the chart of its version")
	f.runAs("helm install csi-secrets-store", []string{"helm install", "helm template", "secrets-store-csi-driver/secrets-store-csi-driver --version " + version, chart},
		"  tokenRequests:\n  - audience: latticekeep\n", `"--enable-secret-rotation=true"`, `"--rotation-poll-interval=2m"`)
	c.kubectl(`{"apiVersion":"v1","kind":"Secret","metadata":{"name":"latticekeep-tls","namespace":"latticekeep-system"},"stringData":{"ca.crt":"a certificate"}}`, "apply", "-f", "-")
	f.run("kubectl get secret latticekeep-tls")
	if got := readText(f.T, f.path("ca.crt")); got != "a certificate" {
		f.Errorf("%q", got)
	}
	f.run("kubectl create configmap latticekeep-ca", "created")
	c.kubectl("", "label", "--overwrite", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
	f.run("kubectl label --overwrite namespace latticekeep-system", "labeled")
	f.runAs("helm upgrade latticekeep", []string{"helm upgrade", "helm template", "charts/latticekeep", root + "/charts/latticekeep", "--reset-then-reuse-values ", ""}, "\n  name: latticekeep-csi-provider\n")

	c.kubectl(`{"apiVersion":"v1","kind":"Namespace","metadata":{"name":"shop","labels":{"pod-security.kubernetes.io/enforce":"restricted"}}}`, "apply", "-f", "-")
	c.kubectl("", "apply", "-f", chart+"/crds")
	c.kubectl("", "wait", "--for=condition=Established", "crd/secretproviderclasses.secrets-store.csi.x-k8s.io")
	text := manifest(f.T, f.page, "kind: SecretProviderClass")
	if out := c.kubectl(text, "apply", "-f", "-"); !strings.Contains(out, "secretproviderclass.secrets-store.csi.x-k8s.io/ledger created") ||
		!strings.Contains(out, "pod/ledger-csi created") || strings.Contains(out, "Warning") {
		f.Error(out)
	}
	for object := range strings.SplitSeq(text, "\n---\n") {
		var class struct {
			Spec struct{ Parameters struct{ Files string } }
		}
		must(f.T, yaml.Unmarshal([]byte(object), &class))
		if files := class.Spec.Parameters.Files; files != "" {
			if _, err := delivery.Parse(files, 0o444); err != nil {
				f.Error(err)
			}
		}
	}

	if out := f.runAs("helm upgrade latticekeep", []string{"helm upgrade", "helm template", "charts/latticekeep", root + "/charts/latticekeep", "--reset-then-reuse-values ", ""}, "\n  name: latticekeep\n"); strings.Contains(out, "csi-provider") {
		f.Error("the provider is still there")
	}
	f.run("kubectl label --overwrite namespace latticekeep-system", "labeled")
}

// csiDriverChart returns the version of the driver's module, and the folder of its chart there.
func csiDriverChart(t *testing.T) (version, chart string) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "go", "list", "-m", "-f", "{{.Version}} {{.Dir}}", "sigs.k8s.io/secrets-store-csi-driver").Output()
	must(t, err)
	version, dir, _ := strings.Cut(strings.TrimSpace(string(out)), " ")
	return strings.TrimPrefix(version, "v"), filepath.Join(dir, "charts/secrets-store-csi-driver")
}

// The guide shows the text of a denial as a pod gets it.
func TestTheGuideOfCSIShowsADenial(t *testing.T) {
	s := servertest.Start(t)
	token := "eyJhbGciOiJSUzI1NiIsImtpZCI6ImsifQ." + base64.RawURLEncoding.EncodeToString([]byte(`{"sub":"system:serviceaccount:shop:ledger-csi"}`)) + ".c2ln"
	pods := s.UsePods(s.Tenant)
	pods.Accounts[token] = identity.ServiceAccount{Cluster: "cluster", Namespace: "shop", NamespaceUID: "shop-uid", Name: "ledger-csi", UID: "account", Pod: "pod"}
	pods.Allow(servertest.AllowNothing)
	from, err := delivery.NewServer(s.URL, "")
	must(t, err)
	_, denied := from.Read(t.Context(), token, "ledger")
	_, block, _ := strings.Cut(readText(t, "../../docs/guides/csi.md"), "```text\n")
	block, _, _ = strings.Cut(block, "```")
	if shown, want := strings.Join(strings.Fields(block), " "), fault.Message(denied); shown != want {
		t.Errorf("the guide shows\n%s\nand a pod gets\n%s", shown, want)
	}
}
