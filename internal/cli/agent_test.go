package cli

import (
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/test/servertest"
)

// folderInMemory returns a folder in memory.
func folderInMemory(t *testing.T) string {
	t.Helper()
	if runtime.GOOS != "linux" {
		t.Skip("only on Linux there is a folder in memory for everybody")
	}
	dir, err := os.MkdirTemp("/dev/shm", "latticekeep-")
	if err != nil {
		t.Skip("no folder in memory can be written:", err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func TestAgentWritesFilesWithAnAPIKey(t *testing.T) {
	s := servertest.Start(t)
	s.Post("/api/v2/vault/seal", `{"name":"shop/db","credential_type":"t","values":{"user":"u","password":"s3cret"}}`).Want(t, http.StatusCreated)
	files := filepath.Join(t.TempDir(), "files.yaml")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(files, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	dir := folderInMemory(t)
	agent := func(more ...string) error {
		out, err := run(t, append([]string{"agent", "--url", s.URL, "--api-key", s.Key, "--files", files, "--into", dir}, more...)...)
		if strings.Contains(out, "s3cret") {
			t.Error(out)
		}
		return err
	}
	write("- {path: url, credential: shop/db, template: 'db://$(user):$(password)@db'}\n")
	if err := agent("--once"); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(filepath.Join(dir, "url")); err != nil || string(b) != "db://u:s3cret@db" {
		t.Errorf("%s %v", b, err)
	}
	if err := agent("--", "sh", "-c", `test "$(cat "$0")" = 'db://u:s3cret@db' && exit 7`, filepath.Join(dir, "url")); ExitStatus(err) != 7 {
		t.Error("the command's status:", err)
	}
	t.Setenv("LATTICEKEEP_API_KEY", s.Key)
	if err := agent("--", "sh", "-c", `test -z "$LATTICEKEEP_API_KEY" && test -n "$PATH"`); err != nil {
		t.Error("the command has the API key:", err)
	}
	for text, c := range map[string]struct {
		plan   string
		more   []string
		status int
	}{
		"files[0].path":       {"- {path: /url, credential: shop/db}", []string{"--once"}, 2},
		"it is not there":     {"- {path: url, credential: other}", []string{"--once"}, 4},
		"is not in memory":    {"- {path: url, credential: shop/db}", []string{"--once", "--into", t.TempDir()}, 2},
		"does not exist":      {"- {path: url, credential: shop/db}", []string{"--once", "--into", filepath.Join(dir, "none")}, 2},
		"starts no command":   {"- {path: url, credential: shop/db}", []string{"--once", "--", "true"}, 2},
		"needs a command":     {"- {path: url, credential: shop/db}", []string{"--on-change", "restart"}, 2},
		"--on-change takes":   {"- {path: url, credential: shop/db}", []string{"--on-change", "KILL", "--", "true"}, 2},
		"there is no program": {"- {path: url, credential: shop/db}", []string{"--", "no-such-program"}, 2},
		"does not answer":     {"- {path: url, credential: shop/db}", []string{"--once", "--timeout", "1ms", "--url", "http://127.0.0.1:1"}, 3},
		"accept the API key":  {"- {path: url, credential: shop/db}", []string{"--once", "--api-key", "ak_0"}, 4},
		"has no certificate":  {"- {path: url, credential: shop/db}", []string{"--once", "--ca-file", files}, 2},
		"exclude each other":  {"- {path: url, credential: shop/db}", []string{"--once", "--token-file", files}, 2},
	} {
		write(c.plan)
		if err := agent(c.more...); ExitStatus(err) != c.status || !strings.Contains(err.Error(), text) {
			t.Errorf("%s: status %d, %v", text, ExitStatus(err), err)
		}
	}
	write("- {path: all, credential: shop/db, format: env}")
	disk := t.TempDir()
	if err := agent("--once", "--into", disk, "--allow-disk"); err != nil {
		t.Error(err)
	}
}
