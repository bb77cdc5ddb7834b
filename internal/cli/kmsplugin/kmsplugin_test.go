package kmsplugin

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/internal/cli/command"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/internal/kmsplugin"
)

// run runs a command line of latticekeep kms-plugin, without the word.
func run(t *testing.T, args ...string) (out, note string, err error) {
	t.Helper()
	cmd := NewCommand()
	cmd.SilenceErrors, cmd.SilenceUsage = true, true
	command.Strict(cmd)
	var stdout, stderr bytes.Buffer
	cmd.SetOut(&stdout)
	cmd.SetErr(&stderr)
	cmd.SetArgs(args)
	err = cmd.ExecuteContext(t.Context())
	return stdout.String(), stderr.String(), err
}

func mustRun(t *testing.T, args ...string) (out, note string) {
	t.Helper()
	out, note, err := run(t, args...)
	if err != nil {
		t.Fatalf("%v: %v", args, err)
	}
	return out, note
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func newKMS(t *testing.T, folder string) (url string) {
	t.Helper()
	path := filepath.Join(folder, "kms.key")
	if err := kms.CreateLocal(path); err != nil {
		t.Fatal(err)
	}
	return "file://" + path
}

func TestAKeySetOfTwoNodesIsMadeAndRotated(t *testing.T) {
	folder := t.TempDir()
	url, first, file := newKMS(t, folder), filepath.Join(folder, "cp-1"), filepath.Join(folder, "cp-2.json")
	mustRun(t, "init", "--dir", first, "--node", "cp-1", "--kms", url)
	identity, _ := mustRun(t, "node", "--dir", filepath.Join(folder, "cp-2"), "--node", "cp-2", "--kms", url)
	if strings.Contains(identity, "wrapped") {
		t.Errorf("the public part of a node has its key: %s", identity)
	}
	write(t, file, identity)
	mustRun(t, "add-node", "--dir", first, file)
	mustRun(t, "rotate", "--dir", first, "--algorithm", "ML-KEM-1024")
	if out, _ := mustRun(t, "show", "--dir", first); !strings.Contains(out, "node cp-2\n") || !strings.Contains(out, "pending  ML-KEM-1024") {
		t.Errorf("show: %s", out)
	}
	if _, _, err := run(t, "promote", "--dir", first); err == nil || !strings.Contains(err.Error(), "no acknowledgement from cp-1, cp-2") {
		t.Errorf("a promotion without acknowledgements: %v", err)
	}
	out, note := mustRun(t, "promote", "--dir", first, "--force")
	if !strings.Contains(note, "node cp-1 has not acknowledged") || !strings.Contains(note, "node cp-2 has not acknowledged") || !strings.Contains(out, "revision 4") {
		t.Errorf("a forced promotion: %s%s", out, note)
	}
}

func TestCommandLinesAreRefused(t *testing.T) {
	folder := t.TempDir()
	url, dir, file := newKMS(t, folder), filepath.Join(folder, "cp-1"), filepath.Join(folder, "file")
	mustRun(t, "init", "--dir", dir, "--node", "cp-1", "--kms", url)
	write(t, file, "{}\n")
	large := filepath.Join(folder, "large")
	write(t, large, strings.Repeat(" ", maxFile+1))
	other, keys := filepath.Join(folder, "x"), filepath.Join(dir, "keyset.json")
	for line, words := range map[string]string{
		"init --node x --kms " + url:                                       "--dir is needed",
		"init --dir " + other + " --node x":                                "--kms is needed",
		"init --dir " + other + " --kms " + url:                            "--node is needed",
		"init --dir " + other + " --node x --algorithm RSA --kms " + url:   "--algorithm takes ML-KEM-768 or ML-KEM-1024",
		"init --dir " + other + " --node X --kms " + url:                   "no name of a node",
		"init --dir " + other + " --node x --kms hashivault://u:p@k":       "must not have credentials",
		"init --dir " + dir + " --node cp-1 --kms " + url:                  "this node has a key set",
		"serve --dir " + dir:                                               "--socket is needed",
		"serve --dir " + dir + " --socket @latticekeep":                    "abstract socket",
		"serve --dir " + other + " --socket " + filepath.Join(folder, "s"): "kms-plugin init",
		"add-node --dir " + dir:                                            "needs FILE",
		"add-node --dir " + dir + " " + filepath.Join(folder, "none"):      "no such file",
		"add-node --dir " + dir + " " + file:                               "decoding a node's identity",
		"add-node --dir " + dir + " " + large:                              "is larger than 64 KiB",
		"rotate --dir " + dir + " --algorithm ML-KEM-512":                  "--algorithm takes",
		"rotate --dir " + dir + " --kms file:///nonexistent/key":           "does not exist",
		"acknowledge --dir " + dir:                                         "has not loaded revision 1",
		"promote --dir " + dir:                                             "no pending generation",
		"promote --dir " + dir + " " + file:                                "decoding an acknowledgement",
		"remove-node --dir " + dir:                                         "needs NAME",
		"remove-node --dir " + dir + " cp-9":                               "names no node",
		"retire --dir " + dir + " " + file:                                 "--etcd and --generation are needed",
		"retire --dir " + dir + " --etcd https://h " + file:                "--generation is needed",
		"retire --dir " + dir + " --etcd https://h --generation 1":         "needs FILE",
		"verify-log":                                                         "give either --dir, or --key-set and each FILE",
		"verify-log --dir " + dir + " " + file:                               "give either --dir, or --key-set and each FILE",
		"verify-log --key-set " + keys:                                       "give either --dir, or --key-set and each FILE",
		"verify-log --key-set " + file + " " + file:                          "decoding key set",
		"verify-log --key-set " + keys + " " + file:                          "decoding the first entry",
		"verify-log --key-set " + keys + " " + filepath.Join(folder, "none"): "no such file",
		"verify-log --dir " + dir:                                            "has no entry",
		"verify-log --dir " + other:                                          "kms-plugin init",
		"verify-log --dir " + dir + " --output xml":                          "--output takes one of",
		"show --dir " + dir + " --output xml":                                "--output takes one of",
		"show --dir " + other:                                                "kms-plugin init",
		"rotate --dir " + other:                                              "no such file",
	} {
		if _, _, err := run(t, strings.Fields(line)...); err == nil || !strings.Contains(err.Error(), words) {
			t.Errorf("%s: %v; want an error with %q", line, err, words)
		}
	}
}

func TestTheLogOfANodeIsVerified(t *testing.T) {
	folder, err := os.MkdirTemp("", "latticekeep-kms-") // short, for the path of the socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(folder) })
	url, dir := newKMS(t, folder), filepath.Join(folder, "cp-1")
	mustRun(t, "init", "--dir", dir, "--node", "cp-1", "--kms", url)
	ended, end := context.WithCancel(t.Context())
	end()
	for range 2 {
		if err := kmsplugin.Serve(ended, kmsplugin.Config{Dir: dir, Socket: filepath.Join(folder, "s")}); err != nil {
			t.Fatal(err)
		}
	}
	text, _ := mustRun(t, "verify-log", "--dir", dir)
	for _, words := range []string{"the log of node cp-1 verifies, by key set ", "\n1      20", "\n2      20", "2 starts, 0 seeds wrapped, 0 opened, 0 without an entry\n"} {
		if !strings.Contains(text, words) {
			t.Errorf("%q is not in %s", words, text)
		}
	}
	files, err := filepath.Glob(filepath.Join(dir, "log", "*", "*.jsonl"))
	if err != nil || len(files) != 1 {
		t.Fatal(files, err)
	}
	fromFiles, _ := mustRun(t, "verify-log", "--key-set", filepath.Join(dir, "keyset.json"), files[0])
	if fromFiles != text {
		t.Errorf("from the files: %s", fromFiles)
	}
	if out, _ := mustRun(t, "verify-log", "--dir", dir, "--output", "json"); !strings.Contains(out, `"last_hash": "`) || !strings.Contains(out, `"started": 2`) {
		t.Errorf("as JSON: %s", out)
	}
	b, err := os.ReadFile(files[0])
	if err != nil {
		t.Fatal(err)
	}
	write(t, files[0], strings.Replace(string(b), `"sequence":2`, `"sequence":3`, 1))
	if _, _, err := run(t, "verify-log", "--dir", dir); err == nil || command.Status(err) != command.StatusFailed || !strings.Contains(err.Error(), "does not follow entry 1") {
		t.Errorf("a changed log: %v", err)
	}
}
