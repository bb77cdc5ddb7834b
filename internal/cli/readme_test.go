package cli

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
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

// paste runs commands in a new folder that has bin/latticekeep, the server's .latticekeep and no
// profile. Standard input is the API key. It returns what they print. A command that fails fails the
// test.
func (r *running) paste(script string, environment ...string) string {
	r.t.Helper()
	dir := r.t.TempDir()
	must(r.t, os.MkdirAll(filepath.Join(dir, "bin"), 0o755))
	program, err := os.Executable()
	must(r.t, err)
	must(r.t, os.Symlink(program, filepath.Join(dir, "bin", "latticekeep")))
	must(r.t, os.Symlink(r.DataDir, filepath.Join(dir, ".latticekeep")))
	cmd := exec.CommandContext(r.t.Context(), "bash", "-euo", "pipefail", "-c", script)
	cmd.Dir, cmd.Env = dir, append(append(os.Environ(), "XDG_CONFIG_HOME="+filepath.Join(dir, "settings")), environment...)
	cmd.Stdin = strings.NewReader(r.APIKey + "\n")
	printed, err := cmd.CombinedOutput()
	if err != nil {
		r.t.Fatalf("%v\n%s", err, printed)
	}
	return string(printed)
}

// The commands that README.md and docs/get-started/command-line.md tell readers to paste after
// `make run` work.
func TestTheToursWithTheCommandLineWork(t *testing.T) {
	server := start(t, t.TempDir())
	defer server.end()
	for page, tour := range map[string]struct {
		heading string
		prints  []string
	}{
		"README.md": {"### With the command line", []string{"\ns3cret\n", "CREDENTIAL_UNSEALED", "ok: the log of tenant"}},
		"docs/get-started/command-line.md": {"## A tour", []string{
			"hello app2\n", "\nuser=app2\n", " reencrypted ", "shop/settings is in the trash", "\nhello\n", "\nvalid\n", "\nlk_live_", "CREDENTIAL_UNSEALED", "ok: the log of tenant", "logged out",
		}},
	} {
		commands := pasted(t, page, tour.heading, "bin/latticekeep login --url ")
		printed := server.paste(strings.ReplaceAll(commands, "http://127.0.0.1:8200", server.BaseURL))
		for _, want := range tour.prints {
			if !strings.Contains(printed, want) {
				t.Errorf("the tour of %s does not print %q:\n%s", page, want, printed)
			}
		}
	}
}

// The commands that docs/get-started/rest.md tells readers to paste after `make run` work. Every line
// runs, and every status other than success is an error. What a block begins with is in the answers
// to the blocks before it.
func TestTheTourWithRESTWorks(t *testing.T) {
	curl, err := exec.LookPath("curl")
	if err != nil {
		t.Skip("curl is not on the PATH, and the tour uses it")
	}
	server := start(t, t.TempDir())
	defer server.end()
	// For a person the e-mail has arrived before the next command, so the script waits for it.
	const prelude = `cat() { until compgen -G "${@: -1}" >/dev/null; do :; done; command cat $*; }; curl() { "$CURL" --fail-with-body --show-error "$@"; }` + "\n"
	environment, printed := []string{"CURL=" + curl, "BASE=" + server.BaseURL, "KEY=" + server.APIKey}, ""
	for _, block := range []struct{ heading, first, found string }{
		{"## A tour of the API", "export BASE=", ""},
		{"### A credential by its id", "export ID=", `"credential_id":"(cred_[a-z2-7]+)"`},
		{"### A named key by its id", "export KEY_ID=", `"key_id":"(tkey_[a-z2-7]+)","name":"orders"`},
		{"### A user", "export MAILED=", `"(lk_verify_[a-z2-7]+)"`},
		{"### Signed in", "export TOKEN=", `"access_token":"([^"]+)"`},
	} {
		if block.found != "" {
			found := regexp.MustCompile(block.found).FindStringSubmatch(printed)
			if found == nil {
				t.Fatalf("what %s needs is not printed before it:\n%s", block.first, printed)
			}
			environment = append(environment, strings.TrimPrefix(block.first, "export ")+found[1])
		}
		printed += server.paste(prelude+afterFirst(pasted(t, "docs/get-started/rest.md", block.heading, block.first)), environment...)
	}
	for _, want := range []string{`"password":"n3w"`, `"data":"hello"`, `"valid":true`, `"kty":"AKP"`, `"re_encrypted_versions":1`, `"status":"trial"`, `"CREDENTIAL_UNSEALED"`} {
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
		pasted(t, "README.md", "### With kubectl", "printf s3cret | kubectl create secret")+
		pasted(t, "docs/get-started/kubectl.md", "## Seal, apply, look", "printf s3cret | kubectl create secret"),
		"KUBECONFIG="+plane.Kubeconfig, "IDENTITY="+identity)
	if strings.Count(printed, "sealedcredential.latticekeep.dev/db condition met") != 2 {
		t.Errorf("the tours do not end with a credential that is ready:\n%s", printed)
	}
}
