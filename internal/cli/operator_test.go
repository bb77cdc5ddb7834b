package cli

import (
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/internal/app"
	"github.com/latticekeep/latticekeep/internal/sealing"
	"github.com/latticekeep/latticekeep/test/kubetest"
)

// startOperator runs a server with its operator and returns once it has printed its line.
func startOperator(t *testing.T, kubeconfig string) (*running, said) {
	t.Helper()
	stderr := make(said, 10_000) // more than a test makes
	return startWith(t, app.DevConfig{Kubeconfig: kubeconfig, Stderr: stderr}), stderr
}

// identityOf returns the fingerprint that a server prints when it starts.
func identityOf(t *testing.T, stderr said) string {
	t.Helper()
	_, rest, _ := strings.Cut(stderr.await(t, "\nidentity: "), "\nidentity: ")
	return strings.Fields(rest)[0]
}

func (r *running) checkServes() {
	r.t.Helper()
	if status, answer := r.call("POST", "/api/v2/vault/seal", sealBody); status != http.StatusCreated {
		r.t.Error(status, answer)
	}
}

func TestAnAPIServerThatIsDownDoesNotEndTheHTTPService(t *testing.T) {
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	const nobody = `{"apiVersion":"v1","kind":"Config","current-context":"c","contexts":[{"name":"c","context":{"cluster":"c"}}],
"clusters":[{"name":"c","cluster":{"server":"https://127.0.0.1:1"}}]}`
	if err := os.WriteFile(kubeconfig, []byte(nobody), 0o600); err != nil {
		t.Fatal(err)
	}
	r, stderr := startOperator(t, kubeconfig)
	for _, wait := range []string{"in=1s", "in=2s"} {
		if text := stderr.await(t, "operator stopped"); !strings.Contains(text, wait) || !strings.Contains(text, "does the kubeconfig name it?") {
			t.Errorf("%q, want %s and the remedy", text, wait)
		}
		r.checkServes()
	}
	r.end()
}

func TestAnUnreadableKubeconfigIsRefused(t *testing.T) {
	_, err := run(t, "server", "--dev", "--listen", "127.0.0.1:0", "--kubeconfig", filepath.Join(t.TempDir(), "none"))
	if err == nil || !strings.Contains(err.Error(), "reading the kubeconfig") {
		t.Fatal(err)
	}
}

// The operator begins to work once the cause of its failure is fixed. The server needs no restart.
func TestTheOperatorWaitsForItsCluster(t *testing.T) {
	t.Parallel()
	plane := kubetest.ForTest(t)
	kubectl := func(args ...string) string {
		t.Helper()
		out, err := plane.Kubectl(t.Context(), args...).CombinedOutput()
		if err != nil {
			t.Fatalf("kubectl %v: %v\n%s", args, err, out)
		}
		return string(out)
	}
	claimedBy := func(identity string) {
		t.Helper()
		kubectl("wait", "--for=create", "--timeout=60s", "-n", "latticekeep-system", "configmap/latticekeep-sealing-key")
		document, err := sealing.ParseDocument([]byte(kubectl("get", "configmap", "-n", "latticekeep-system", "latticekeep-sealing-key",
			"-o", `jsonpath={.data.sealing-key\.json}`)))
		if err != nil {
			t.Fatal(err)
		}
		if err := document.CheckIdentity(identity); err != nil {
			t.Fatal(err)
		}
	}

	kubectl("delete", "-k", "../../config/crd")
	first, stderr := startOperator(t, plane.Kubeconfig)
	identity := identityOf(t, stderr)
	stderr.await(t, "kubectl apply -k config/crd")
	first.checkServes()
	kubectl("apply", "-k", "../../config/crd")
	claimedBy(identity)

	second, stderr := startOperator(t, plane.Kubeconfig)
	successor := identityOf(t, stderr)
	stderr.await(t, "kubectl delete configmap -n latticekeep-system latticekeep-sealing-key")
	second.checkServes()
	first.end()
	stderr.await(t, "kubectl delete configmap") // the claim of a stopped server remains
	claimedBy(identity)
	kubectl("delete", "configmap", "-n", "latticekeep-system", "latticekeep-sealing-key")
	claimedBy(successor)
	second.end()
}
