package cli

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/test/kubetest"
)

// pasted returns the commands below a heading of a page. Their first line begins with first.
func pasted(t *testing.T, page, heading, first string) string {
	t.Helper()
	text, err := os.ReadFile("../../" + page)
	if err != nil {
		t.Fatal(err)
	}
	_, block, found := strings.Cut(string(text), "\n"+heading+"\n")
	_, block, _ = strings.Cut(block, "```sh\n")
	block, _, ended := strings.Cut(block, "\n```")
	if !found || !ended || !strings.HasPrefix(block, first) {
		t.Fatalf("%s has no commands below %q that begin with %q", page, heading, first)
	}
	return block + "\n"
}

// afterFirst returns the lines after the first one.
func afterFirst(lines string) string {
	_, rest, _ := strings.Cut(lines, "\n")
	return rest
}

// paste runs commands in a new folder that has bin/latticekeep and the server's .latticekeep. It
// returns what they print. A command that fails fails the test.
func (r *running) paste(script string, environment ...string) string {
	r.t.Helper()
	dir := r.t.TempDir()
	must(r.t, os.MkdirAll(filepath.Join(dir, "bin"), 0o755))
	program, err := os.Executable()
	must(r.t, err)
	must(r.t, os.Symlink(program, filepath.Join(dir, "bin", "latticekeep")))
	must(r.t, os.Symlink(r.DataDir, filepath.Join(dir, ".latticekeep")))
	cmd := exec.CommandContext(r.t.Context(), "bash", "-euo", "pipefail", "-c", script)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), environment...)
	printed, err := cmd.CombinedOutput()
	if err != nil {
		r.t.Fatalf("%v\n%s", err, printed)
	}
	return string(printed)
}

// The commands that README.md and docs/get-started/rest.md tell readers to paste after `make run`
// work. Every line runs, and every status other than success is an error.
func TestTheToursOfTheDocumentationWork(t *testing.T) {
	curl, err := exec.LookPath("curl")
	if err != nil {
		t.Skip("curl is not on the PATH, and the tours use it")
	}
	server := start(t, t.TempDir())
	defer server.end()
	// For a person the e-mail has arrived before the next command, so the script waits for it.
	printed := server.paste(`ls() { until compgen -G "${@: -1}" >/dev/null; do :; done; command ls $*; }; curl() { "`+curl+`" --fail-with-body --show-error "$@"; }`+"\n"+
		afterFirst(pasted(t, "README.md", "### With REST", "export BASE="))+
		afterFirst(pasted(t, "docs/get-started/rest.md", "## A tour of the API", "export BASE=")),
		"BASE="+server.BaseURL, "KEY="+server.APIKey)
	for _, want := range []string{`"password":"n3w"`, `"data":"hello"`, `"valid":true`, `"kty":"AKP"`, `"re_encrypted_versions":1`, `"status":"trial"`, "ok: the log of tenant"} {
		if !strings.Contains(printed, want) {
			t.Errorf("the tour does not print %s:\n%s", want, printed)
		}
	}
}

// The commands that README.md and docs/get-started/kubectl.md tell readers to paste work on a
// cluster with an operator.
func TestTheToursWithKubectlWork(t *testing.T) {
	plane := kubetest.ForTest(t)
	server, stderr := startOperator(t, plane.Kubeconfig)
	defer server.end()
	identity := identityOf(t, stderr)
	printed := server.paste("kubectl wait --for=create --timeout=60s -n latticekeep-system configmap/latticekeep-sealing-key\n"+
		pasted(t, "README.md", "### With kubectl", "kubectl create secret")+
		pasted(t, "docs/get-started/kubectl.md", "## Seal, apply, look", "kubectl create secret"),
		"KUBECONFIG="+plane.Kubeconfig, "IDENTITY="+identity)
	if strings.Count(printed, "sealedcredential.latticekeep.dev/db condition met") != 2 {
		t.Errorf("the tours do not end with a credential that is ready:\n%s", printed)
	}
}
