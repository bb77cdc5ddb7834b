package app

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// What the README tells people to paste after `make run` works: every line of
// its tour, with an error for every status that is none of success.
func TestTheTourOfTheREADMEWorks(t *testing.T) {
	curl, err := exec.LookPath("curl")
	if err != nil {
		t.Skip("curl is not on the PATH, and the tour is made of it")
	}
	readme, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, tour, found := strings.Cut(string(readme), "## A tour of the API")
	_, tour, _ = strings.Cut(tour, "```\n")
	tour, _, ended := strings.Cut(tour, "\n```")
	first, tour, _ := strings.Cut(tour, "\n")
	if !found || !ended || !strings.HasPrefix(first, "export BASE=") {
		t.Fatal("the README has no tour that begins with an export")
	}

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
	// A person is slower than the mail.
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
