package cli

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// pasted returns the commands below a heading of a page without the first line, which must begin
// with first.
func pasted(t *testing.T, page, heading, first string) string {
	t.Helper()
	text, err := os.ReadFile("../../" + page)
	if err != nil {
		t.Fatal(err)
	}
	_, block, found := strings.Cut(string(text), "\n"+heading+"\n")
	_, block, _ = strings.Cut(block, "```sh\n")
	block, _, ended := strings.Cut(block, "\n```")
	line, rest, _ := strings.Cut(block, "\n")
	if !found || !ended || !strings.HasPrefix(line, first) {
		t.Fatalf("%s has no commands below %q that begin with %q", page, heading, first)
	}
	return rest
}

// The commands that README.md and docs/get-started/rest.md tell readers to paste after `make run`
// work. Every line runs, and every status other than success is an error.
func TestTheToursOfTheDocumentationWork(t *testing.T) {
	curl, err := exec.LookPath("curl")
	if err != nil {
		t.Skip("curl is not on the PATH, and the tours use it")
	}
	tour := pasted(t, "README.md", "### With REST", "export BASE=") + "\n" +
		pasted(t, "docs/get-started/rest.md", "## A tour of the API", "export BASE=")

	server := start(t, t.TempDir())
	defer server.end()

	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "bin"), 0o755); err != nil {
		t.Fatal(err)
	}
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(program, filepath.Join(dir, "bin", "latticekeep")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(server.DataDir, filepath.Join(dir, ".latticekeep")); err != nil {
		t.Fatal(err)
	}
	// For a person the e-mail has arrived before the next command, so the script waits for it.
	script := `ls() { until compgen -G "${@: -1}" >/dev/null; do :; done; command ls $*; }; curl() { "` + curl + `" --fail-with-body --show-error "$@"; }` + "\n" + tour
	cmd := exec.CommandContext(t.Context(), "bash", "-euo", "pipefail", "-c", script)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "BASE="+server.BaseURL, "KEY="+server.APIKey)
	var printed bytes.Buffer
	cmd.Stdout, cmd.Stderr = &printed, &printed
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v\n%s", err, printed.Bytes())
	}
	for _, want := range []string{`"password":"n3w"`, `"data":"hello"`, `"valid":true`, `"kty":"AKP"`, `"re_encrypted_versions":1`, `"status":"trial"`, "ok: the log of tenant"} {
		if !bytes.Contains(printed.Bytes(), []byte(want)) {
			t.Errorf("the tour does not print %s:\n%s", want, printed.Bytes())
		}
	}
}
