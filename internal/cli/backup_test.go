package cli

import (
	"bytes"
	"io"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"filippo.io/age"

	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/buildinfo"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/internal/offline"
	"github.com/latticekeep/latticekeep/internal/sealing"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/test/machine"
)

// mustRun runs a command that has to succeed. It runs it again for a minute while a server on a busy
// machine answers 503, which asks for that.
func mustRun(t *testing.T, args ...string) string {
	t.Helper()
	out, err := run(t, args...)
	for end := time.Now().Add(time.Minute); err != nil && strings.Contains(err.Error(), "answered 503") && time.Now().Before(end); out, err = run(t, args...) {
		t.Logf("%s: %v", args[0], err)
		time.Sleep(100 * time.Millisecond) // The answer 503 asks for a pause.
	}
	if err != nil {
		t.Fatalf("%s: %v", args[0], err)
	}
	return out
}

// A backup that is taken while eight clients seal contains everything that was acknowledged before:
// credentials, the log, and the sealing keys that open the values in git.
func TestABackupOfARunningServerIsRestoredElsewhere(t *testing.T) {
	o := newOriginal(t)
	info, err := os.Stat(o.file)
	if err != nil || info.Mode() != 0o600 {
		t.Fatal(info.Mode(), err)
	}
	content, err := os.ReadFile(o.file)
	if err != nil {
		t.Fatal(err)
	}
	key, err := os.ReadFile(o.key)
	if err != nil {
		t.Fatal(err)
	}
	inside := decrypted(t, o.to, content)
	for _, secret := range []string{"s3cret", sealedValue} {
		if bytes.Contains(inside, []byte(secret)) {
			t.Errorf("the backup has the plaintext %s inside", secret)
		}
	}
	for _, known := range []string{"credential/", "audit/", o.ids[0], strings.TrimSpace(string(key)), buildinfo.Version()} {
		if !bytes.Contains(inside, []byte(known)) || bytes.Contains(content, []byte(known)) {
			t.Errorf("%s is not inside, or outside", known)
		}
	}
	if left, err := filepath.Glob(filepath.Join(filepath.Dir(o.file), "*")); err != nil || len(left) != 2 {
		t.Errorf("beside the backup and its signature there are %v", left)
	}

	// The volume is lost with the KMS key on it. The identity alone restores the backup.
	restoredKey := filepath.Join(t.TempDir(), "kms.key")
	dir := filepath.Join(t.TempDir(), "new", "data")
	out := mustRun(t, "restore", "--input", o.file, "--identity-file", o.to.file, "--data-dir", dir, "--fingerprint", o.chain, "--identity", o.identity,
		"--kms-key-out", restoredKey)
	if got, err := os.ReadFile(restoredKey); err != nil || !bytes.Equal(got, key) {
		t.Error("the KMS key is another one: ", err)
	}
	if info, err := os.Stat(restoredKey); err != nil || info.Mode() != 0o600 {
		t.Error(info.Mode(), err)
	}
	for _, want := range []string{"restored: ", "head: ", "as pinned", "The KMS key of the backup is in " + restoredKey} {
		if !strings.Contains(out, want) {
			t.Errorf("restore does not say %q: %s", want, out)
		}
	}
	if left, err := filepath.Glob(filepath.Join(dir, "*")); err != nil || len(left) != 1 {
		t.Errorf("the data directory has %v", left)
	}
	report, err := offline.VerifyDataDir(t.Context(), dir, verify.Options{Fingerprint: o.chain})
	if err != nil || !report.Pinned || report.Entries == 0 || report.Entries > o.entries {
		t.Fatal(report.Entries, o.entries, err)
	}
	if got := o.open(t, dir); got != sealedValue {
		t.Errorf("the manifest opens as %q", got)
	}
	if err := os.Rename(restoredKey, filepath.Join(dir, offline.KMSKeyFileName)); err != nil {
		t.Fatal(err)
	}
	server := start(t, dir)
	for _, id := range o.ids {
		if status, answer := server.call("GET", "/api/v2/vault/"+id, ""); status != http.StatusOK || answer["values"].(map[string]any)["v"] != "s3cret-before" {
			t.Error(status, answer)
		}
	}
	server.sealed("and it goes on")
	server.end()
	if _, err := offline.VerifyDataDir(t.Context(), dir, verify.Options{Fingerprint: o.chain}); err != nil {
		t.Error(err)
	}
}

// decrypted returns the content of a backup.
func decrypted(t *testing.T, r recipient, content []byte) []byte {
	t.Helper()
	f, err := os.Open(r.file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	all, err := age.ParseIdentities(f)
	if err != nil {
		t.Fatal(err)
	}
	in, err := age.Decrypt(bytes.NewReader(content), all...)
	if err != nil {
		t.Fatal(err)
	}
	inside, err := io.ReadAll(in)
	if err != nil {
		t.Fatal(err)
	}
	return inside
}

// open opens the manifest with the keys of a data directory.
func (o original) open(t *testing.T, dir string) string {
	t.Helper()
	s, err := bolt.Open(filepath.Join(dir, offline.DatabaseFile), bolt.Options{ReadOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	keys := openKeys(t, s, o.key)
	values, err := sealing.Open(o.manifest, func(id string) (*envelope.SealingKey, error) { return keys.SealingKey(t.Context(), id) })
	if err != nil {
		t.Fatal(err)
	}
	return string(values["password"])
}

// openKeys opens the keys of a store with a key file.
func openKeys(t *testing.T, s store.Store, keyFile string) *keyring.Ring {
	t.Helper()
	k, err := kms.OpenLocal(keyFile)
	if err != nil {
		t.Fatal(err)
	}
	keys, err := keyring.Open(t.Context(), s, k, keyring.Config{})
	if err != nil {
		t.Fatal(err)
	}
	return keys
}

// Backups of running and of stopped deployments record entries and refusals alike.
func TestABackupOfAStoppedServerIsAllOfIt(t *testing.T) {
	t.Parallel() // it mostly waits
	dir := t.TempDir()
	server := start(t, dir)
	server.sealed("value")
	file, to := filepath.Join(t.TempDir(), "all.backup"), newRecipient(t)
	if _, err := run(t, "backup", "--data-dir", dir, "--recipient", to.text, "--output", file); err == nil || !strings.Contains(err.Error(), "--url") {
		t.Errorf("a running server was backed up from its files: %v", err)
	}
	if _, err := run(t, "backup", "--url", server.BaseURL, "--api-key", server.APIKey, "--recipient", to.text, "--output", file); err == nil || !strings.Contains(err.Error(), "403") {
		t.Errorf("a tenant's key took a backup: %v", err)
	}
	server.end()
	if left, err := os.ReadDir(filepath.Dir(file)); err != nil || len(left) != 0 {
		t.Errorf("a backup that failed leaves %v", left)
	}
	mustRun(t, "backup", "--data-dir", dir, "--recipient", to.text, "--output", file)
	before, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{file, strings.TrimSuffix(file, ".backup")} { // the second name has only a signature
		if name != file {
			machine.WriteFile(t, name+".sig", nil)
		}
		if _, err := run(t, "backup", "--data-dir", dir, "--recipient", to.text, "--output", name); err == nil || !strings.Contains(err.Error(), "nothing is ever overwritten") {
			t.Error(err)
		}
	}
	if after, err := os.ReadFile(file); err != nil || !bytes.Equal(after, before) {
		t.Error("the file was overwritten: ", err)
	}
	copied := t.TempDir()
	mustRun(t, "restore", "--input", file, "--identity-file", to.file, "--data-dir", copied)
	if !maps.Equal(contentsOf(t, copied), contentsOf(t, dir)) {
		t.Error("the rows differ")
	}
	if _, err := run(t, "restore", "--input", file, "--identity-file", to.file, "--data-dir", copied); err == nil || !strings.Contains(err.Error(), "exists already") {
		t.Errorf("a database was restored over another: %v", err)
	}
}

// A backup can be restored from a pipe: in a cluster there is no file to name.
func TestABackupIsRestoredFromStandardInput(t *testing.T) {
	dir, to := small(t), newRecipient(t)
	file := backupOf(t, dir, to)
	whole, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	restore := func(in []byte, target string) error {
		cmd := Command()
		cmd.SetArgs([]string{"restore", "--input", "-", "--identity-file", to.file, "--data-dir", target})
		cmd.SetIn(bytes.NewReader(in))
		cmd.SetOut(io.Discard)
		return cmd.ExecuteContext(t.Context())
	}
	target := t.TempDir()
	if err := restore(whole[:len(whole)-1], target); err == nil || !strings.Contains(err.Error(), "cut off") {
		t.Error("a connection that broke:", err)
	}
	nothingRestored(t, "it", target)
	if err := restore(whole, target); err != nil {
		t.Fatal(err)
	}
	if !maps.Equal(contentsOf(t, target), contentsOf(t, dir)) {
		t.Error("the rows differ")
	}
	// The format that a server sends, with the statement at the end.
	statement, err := os.ReadFile(file + ".sig")
	if err != nil {
		t.Fatal(err)
	}
	if err := restore(append(bytes.Clone(whole), statement...), t.TempDir()); err != nil {
		t.Error(err)
	}
	nothing := t.TempDir()
	statement[100] ^= 1
	if err := restore(append(bytes.Clone(whole), statement...), nothing); err == nil || !strings.Contains(err.Error(), "signature") {
		t.Error("a statement that does not hold: ", err)
	}
	nothingRestored(t, "it", nothing)
}

// backupOf takes a backup of a data directory and returns its file.
func backupOf(t *testing.T, dir string, to recipient) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "all.backup")
	mustRun(t, "backup", "--data-dir", dir, "--recipient", to.text, "--output", file)
	return file
}

// small creates a deployment with one credential and returns its directory.
func small(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	server := start(t, dir)
	server.sealed("value")
	server.end()
	return dir
}

// nothingRestored fails if dir contains anything that a server would take for a deployment.
func nothingRestored(t *testing.T, what, dir string) {
	t.Helper()
	if left, err := filepath.Glob(filepath.Join(dir, "*")); err != nil || len(left) != 0 {
		t.Errorf("%s leaves %v", what, left)
	}
}

func TestWhatIsNoWholeBackupOfTheDeploymentIsRefused(t *testing.T) {
	dir, foreign, to, other := small(t), small(t), newRecipient(t), newRecipient(t)
	file := filepath.Join(t.TempDir(), "all.backup")
	out := mustRun(t, "backup", "--data-dir", dir, "--recipient-file", recipientFile(t, to), "--output", file)
	chain := regexp.MustCompile(`chain: (\w+)`).FindStringSubmatch(out)[1]
	identity := regexp.MustCompile(`identity: (\w+)`).FindStringSubmatch(out)[1]
	whole, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	change := func(do func(b []byte) []byte) []byte { return do(bytes.Clone(whole)) }
	for name, c := range map[string]struct {
		content []byte
		args    []string
		says    string
	}{
		"cut":        {change(func(b []byte) []byte { return b[:len(b)-1] }), nil, "cut off"},
		"half":       {change(func(b []byte) []byte { return b[:len(b)/2] }), nil, "cut off"},
		"empty":      {nil, nil, "not a backup"},
		"changed":    {change(func(b []byte) []byte { b[len(b)-10_000] ^= 1; return b }), nil, "changed"},
		"appended":   {append(change(bytes.Clone), '\n'), nil, "changed"},
		"log cut":    {resigned(t, dir, dir, "audit/entry/", to), nil, "sequence"},
		"row gone":   {resigned(t, dir, dir, "credential/", to), nil, "has no row"},
		"recipient":  {resigned(t, dir, dir, "", other), nil, "another recipient"},
		"former":     {[]byte("latticekeep-backup-1\n and so on"), nil, "earlier release"},
		"no key out": {resigned(t, dir, dir, "", to), []string{"--kms-key-out", filepath.Join(t.TempDir(), "kms.key")}, "not in this backup"},
		"key is out": {whole, []string{"--kms-key-out", file}, "nothing is ever overwritten"},
		"chain":      {whole, []string{"--fingerprint", strings.Repeat("0", 64)}, "not the pinned one"},
		"identity":   {whole, []string{"--identity", strings.Repeat("0", 64)}, "not the pinned one"},
		"unpinned":   {whole, []string{"--fingerprint", ""}, "empty"},
		"own rows":   {resigned(t, dir, foreign, "", to), []string{"--identity", identity}, "not the pinned one"},
		"own rows 2": {resigned(t, dir, foreign, "", to), []string{"--kms-key-file", filepath.Join(dir, offline.KMSKeyFileName)}, "somebody else"},
	} {
		t.Run(name, func(t *testing.T) {
			input, target := filepath.Join(t.TempDir(), "in"), t.TempDir()
			machine.WriteFile(t, input, c.content)
			args := append([]string{"restore", "--input", input, "--identity-file", to.file, "--data-dir", target}, c.args...)
			if _, err := run(t, args...); err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("%v, want %q", err, c.says)
			}
			nothingRestored(t, "it", target)
		})
	}
	target := t.TempDir()
	mustRun(t, "restore", "--input", file, "--identity-file", to.file, "--data-dir", target, "--fingerprint", chain, "--identity", identity)
}

// recipientFile writes a recipient to a file.
func recipientFile(t *testing.T, r recipient) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "recipient")
	machine.WriteFile(t, path, []byte("# of the tests\n"+r.text+"\n"))
	return path
}

// A KMS key that does not open the restored data is reported, and the data stays: the right key
// opens it.
func TestAWrongKMSKeyDoesNotCostTheData(t *testing.T) {
	dir, to := small(t), newRecipient(t)
	file, other := backupOf(t, dir, to), filepath.Join(t.TempDir(), "other.key")
	if err := kms.CreateLocal(other); err != nil {
		t.Fatal(err)
	}
	target := t.TempDir()
	out, err := run(t, "restore", "--input", file, "--identity-file", to.file, "--data-dir", target, "--kms-key-file", other)
	if err == nil || !strings.Contains(err.Error(), "does not open it; the data is whole") || !strings.Contains(out, "restored: ") {
		t.Fatalf("%s, %v", out, err)
	}
	s, err := bolt.Open(filepath.Join(target, offline.DatabaseFile), bolt.Options{ReadOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	openKeys(t, s, filepath.Join(dir, offline.KMSKeyFileName))
}

// A restore that is killed midway leaves no database, and does not obstruct the next restore.
func TestAKilledRestoreLeavesNothingThatLooksRestored(t *testing.T) {
	program := filepath.Join(t.TempDir(), "latticekeep") // under this name the test binary is the program
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(self, program); err != nil {
		t.Fatal(err)
	}
	dir, to := small(t), newRecipient(t)
	file := backupOf(t, dir, to)
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	pipe, target := filepath.Join(t.TempDir(), "pipe"), t.TempDir()
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, part := range []int{100, len(content) / 2, len(content) - 1} {
		cmd := exec.Command(program, "restore", "--input", pipe, "--identity-file", to.file, "--data-dir", target)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		w, err := os.OpenFile(pipe, os.O_WRONLY, 0) // returns when the program reads
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(content[:part]); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Process.Kill(); err != nil { // it waits for the rest
			t.Fatal(err)
		}
		if err := cmd.Wait(); err == nil {
			t.Fatal("it ended by itself")
		}
		_ = w.Close()
		if _, err := os.Stat(filepath.Join(target, offline.DatabaseFile)); !os.IsNotExist(err) {
			t.Errorf("after %d bytes there is a database: %v", part, err)
		}
	}
	mustRun(t, "restore", "--input", file, "--identity-file", to.file, "--data-dir", target)
	if left, err := filepath.Glob(filepath.Join(target, "*")); err != nil || len(left) != 1 {
		t.Errorf("the data directory has %v", left)
	}
}

// Two restores into one directory exclude each other, and so do a restore and a starting server.
func TestARestoreHasTheDirectoryForItself(t *testing.T) {
	dir, to := small(t), newRecipient(t)
	file := backupOf(t, dir, to)
	target := t.TempDir()
	lock, err := offline.LockDataDir(target)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	if _, err := run(t, "restore", "--input", file, "--identity-file", to.file, "--data-dir", target); err == nil || !strings.Contains(err.Error(), "another restore") {
		t.Error(err)
	}
	nothingRestored(t, "it", target)
}
