package app

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/latticekeep/latticekeep/api/v1alpha1"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/backup"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/internal/sealing"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
)

func mustRun(t *testing.T, args ...string) string {
	t.Helper()
	out, err := run(t, args...)
	if err != nil {
		t.Fatalf("%s: %v", args[0], err)
	}
	return out
}

// original is a deployment that has been backed up, and is stopped.
type original struct {
	dir, key, file  string // data directory, KMS key, backup
	chain, identity string
	ids             []string // of credentials that were sealed before the backup
	manifest        *v1alpha1.SealedCredential
	entries         uint64
}

const sealedValue = "what git keeps and only this deployment opens"

// newOriginal runs a server that eight clients seal at, and takes a backup of it
// meanwhile, over the network.
func newOriginal(t *testing.T) original {
	t.Helper()
	o := original{dir: filepath.Join(t.TempDir(), "data"), file: filepath.Join(t.TempDir(), "all.backup")}
	o.key = filepath.Join(o.dir, kmsKeyFile)
	stderr := make(said, 100_000)
	server := startWith(t, Config{DataDir: o.dir, Stderr: stderr})
	text := stderr.await(t, "SYSTEM_KEY=")
	find := func(pattern string) string {
		found := regexp.MustCompile(pattern).FindStringSubmatch(text)
		if found == nil {
			t.Fatalf("%s is not in %s", pattern, text)
		}
		return found[1]
	}
	o.identity, o.chain = find(`identity: (\w{64})`), find(`chain: (\w{64})`)
	systemKey := filepath.Join(t.TempDir(), "system.key")
	writeFile(t, systemKey, []byte(find(`SYSTEM_KEY=(lk_live_\w+)`)+"\n"))

	manifest := mustRun(t, "seal", "--url", server.BaseURL, "--identity", o.identity, "--name", "db", "--namespace", "default", "--type", "database",
		"--from-literal", "password="+sealedValue)
	var err error
	if o.manifest, err = decodeSealedCredential([]byte(manifest)); err != nil {
		t.Fatal(err)
	}
	o.ids = []string{server.sealed("s3cret-before")}

	var stop atomic.Bool
	var clients sync.WaitGroup
	started := make(chan struct{}, 8)
	for client := range 8 {
		clients.Go(func() {
			for n := 0; !stop.Load(); n++ {
				body := fmt.Sprintf(`{"name":"n","credential_type":"t","values":{"v":"s3cret-%d-%d"},"ttl_days":30}`, client, n)
				status, answer, err := call(server.ready, "POST", "/api/v2/vault/seal", body)
				if err == nil && status == http.StatusCreated && n%3 == 2 {
					status, _, err = call(server.ready, "DELETE", "/api/v2/vault/"+answer["credential_id"].(string), "")
				}
				if err != nil || status >= 300 {
					t.Errorf("sealing: %d %v", status, err)
					return
				}
				if n == 3 {
					started <- struct{}{}
				}
			}
		})
	}
	for range 8 {
		<-started
	}
	out := mustRun(t, "backup", "--url", server.BaseURL, "--api-key-file", systemKey, "--output", o.file)
	for _, want := range []string{"chain: " + o.chain, "identity: " + o.identity, "KMS key is not in it"} {
		if !strings.Contains(out, want) {
			t.Errorf("backup does not say %q: %s", want, out)
		}
	}
	stop.Store(true)
	clients.Wait()
	server.end()
	report, err := verifyDataDir(t.Context(), o.dir, audit.Options{})
	if err != nil {
		t.Fatal(err)
	}
	o.entries = report.Entries
	return o
}

// sealed seals a value and returns the credential's id.
func (r *running) sealed(value string) string {
	r.t.Helper()
	status, answer := r.call("POST", "/api/v2/vault/seal", fmt.Sprintf(`{"name":"n","credential_type":"t","values":{"v":%q},"ttl_days":30}`, value))
	if status != http.StatusCreated {
		r.t.Fatal(status, answer)
	}
	return answer["credential_id"].(string)
}

// contentsOf returns every row of a data directory.
func contentsOf(t *testing.T, dir string) map[string]string {
	t.Helper()
	s, err := bolt.Open(filepath.Join(dir, databaseFile), bolt.Options{ReadOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	rows := map[string]string{}
	if err := audit.ScanAll(t.Context(), s, store.Range{}, func(key, value []byte) error {
		rows[string(key)] = string(value)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return rows
}

// A backup that is taken while eight clients seal holds, elsewhere, everything
// that was acknowledged before: credentials, the log, and the sealing keys that
// open what is in git.
func TestABackupOfARunningServerIsRestoredElsewhere(t *testing.T) {
	o := newOriginal(t)
	info, err := os.Stat(o.file)
	if err != nil || info.Mode() != 0o600 {
		t.Fatal(info.Mode(), err)
	}
	content, err := os.ReadFile(o.file)
	if err != nil || bytes.Contains(content, []byte("s3cret")) || bytes.Contains(content, []byte(sealedValue)) {
		t.Fatal("the backup holds plaintext: ", err)
	}
	key, err := os.ReadFile(o.key)
	if err != nil || bytes.Contains(content, bytes.TrimSpace(key)) {
		t.Fatal("the backup holds the KMS key: ", err)
	}

	dir := filepath.Join(t.TempDir(), "new", "data")
	out := mustRun(t, "restore", "--input", o.file, "--data-dir", dir, "--fingerprint", o.chain, "--identity", o.identity, "--kms-key-file", o.key)
	for _, want := range []string{"restored: ", "head: ", "as pinned", "The KMS key opens it."} {
		if !strings.Contains(out, want) {
			t.Errorf("restore does not say %q: %s", want, out)
		}
	}
	if left, err := filepath.Glob(filepath.Join(dir, "*")); err != nil || len(left) != 1 {
		t.Errorf("the data directory has %v", left)
	}
	report, err := verifyDataDir(t.Context(), dir, audit.Options{Fingerprint: o.chain})
	if err != nil || !report.Pinned || report.Entries == 0 || report.Entries > o.entries {
		t.Fatal(report.Entries, o.entries, err)
	}
	if got := o.open(t, dir); got != sealedValue {
		t.Errorf("the manifest opens as %q", got)
	}
	writeFile(t, filepath.Join(dir, kmsKeyFile), key)
	server := start(t, dir)
	for _, id := range o.ids {
		if status, answer := server.call("GET", "/api/v2/vault/"+id, ""); status != http.StatusOK || answer["values"].(map[string]any)["v"] != "s3cret-before" {
			t.Error(status, answer)
		}
	}
	server.sealed("and it goes on")
	server.end()
	if _, err := verifyDataDir(t.Context(), dir, audit.Options{Fingerprint: o.chain}); err != nil {
		t.Error(err)
	}
}

// open opens the manifest with the keys of a data directory.
func (o original) open(t *testing.T, dir string) string {
	t.Helper()
	s, err := bolt.Open(filepath.Join(dir, databaseFile), bolt.Options{ReadOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	keys, err := openKeys(t.Context(), s, o.key)
	if err != nil {
		t.Fatal(err)
	}
	values, err := sealing.Open(o.manifest, func(id string) (*envelope.SealingKey, error) { return keys.SealingKey(t.Context(), id) })
	if err != nil {
		t.Fatal(err)
	}
	return string(values["password"])
}

// The two ways of taking a backup record and refuse as they should.
func TestABackupOfAStoppedServerIsAllOfIt(t *testing.T) {
	dir := t.TempDir()
	server := start(t, dir)
	server.sealed("value")
	file := filepath.Join(t.TempDir(), "all.backup")
	if _, err := run(t, "backup", "--data-dir", dir, "--output", file); err == nil || !strings.Contains(err.Error(), "--url") {
		t.Errorf("a running server was backed up from its files: %v", err)
	}
	if _, err := run(t, "backup", "--url", server.BaseURL, "--api-key", server.APIKey, "--output", file); err == nil || !strings.Contains(err.Error(), "403") {
		t.Errorf("a tenant's key took a backup: %v", err)
	}
	server.end()
	if left, err := os.ReadDir(filepath.Dir(file)); err != nil || len(left) != 0 {
		t.Errorf("a backup that failed leaves %v", left)
	}
	mustRun(t, "backup", "--data-dir", dir, "--output", file)
	before, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := run(t, "backup", "--data-dir", dir, "--output", file); err == nil || !strings.Contains(err.Error(), "nothing is ever overwritten") {
		t.Error(err)
	}
	if after, err := os.ReadFile(file); err != nil || !bytes.Equal(after, before) {
		t.Error("the file was overwritten: ", err)
	}
	copied := t.TempDir()
	mustRun(t, "restore", "--input", file, "--data-dir", copied)
	if !maps.Equal(contentsOf(t, copied), contentsOf(t, dir)) {
		t.Error("the rows differ")
	}
	if _, err := run(t, "restore", "--input", file, "--data-dir", copied); err == nil || !strings.Contains(err.Error(), "exists already") {
		t.Errorf("a database was restored over another: %v", err)
	}
}

// In a cluster there is no file to name: the backup comes through a connection.
func TestABackupIsRestoredFromStandardInput(t *testing.T) {
	dir := small(t)
	file := filepath.Join(t.TempDir(), "all.backup")
	mustRun(t, "backup", "--data-dir", dir, "--output", file)
	whole, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	restore := func(in []byte, target string) error {
		cmd := Command()
		cmd.SetArgs([]string{"restore", "--input", "-", "--data-dir", target})
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
}

// small makes a deployment with one credential and returns its directory.
func small(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	server := start(t, dir)
	server.sealed("value")
	server.end()
	return dir
}

// nothingRestored fails when there is anything in dir that a server would take
// for a deployment.
func nothingRestored(t *testing.T, what, dir string) {
	t.Helper()
	if left, err := filepath.Glob(filepath.Join(dir, "*")); err != nil || len(left) != 0 {
		t.Errorf("%s leaves %v", what, left)
	}
}

func TestWhatIsNoWholeBackupOfTheDeploymentIsRefused(t *testing.T) {
	dir, foreign := small(t), small(t)
	file := filepath.Join(t.TempDir(), "all.backup")
	out := mustRun(t, "backup", "--data-dir", dir, "--output", file)
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
		"appended":   {append(change(bytes.Clone), '\n'), nil, "follows"},
		"reordered":  {rewritten(t, dir, whole, reorder), nil, "changed"},
		"log cut":    {resigned(t, dir, dir, "audit/entry/"), nil, "sequence"},
		"row gone":   {resigned(t, dir, dir, "credential/"), nil, "has no row"},
		"chain":      {whole, []string{"--fingerprint", strings.Repeat("0", 64)}, "not the pinned one"},
		"identity":   {whole, []string{"--identity", strings.Repeat("0", 64)}, "not the pinned one"},
		"unpinned":   {whole, []string{"--fingerprint", ""}, "empty"},
		"own rows":   {resigned(t, dir, foreign, ""), []string{"--identity", identity}, "not the pinned one"},
		"own rows 2": {resigned(t, dir, foreign, ""), []string{"--kms-key-file", filepath.Join(dir, kmsKeyFile)}, "somebody else"},
	} {
		t.Run(name, func(t *testing.T) {
			input, target := filepath.Join(t.TempDir(), "in"), t.TempDir()
			writeFile(t, input, c.content)
			args := append([]string{"restore", "--input", input, "--data-dir", target}, c.args...)
			if _, err := run(t, args...); err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("%v, want %q", err, c.says)
			}
			nothingRestored(t, "it", target)
		})
	}
	target := t.TempDir()
	mustRun(t, "restore", "--input", file, "--data-dir", target, "--fingerprint", chain, "--identity", identity)
}

// rows is what a backup copies.
type rows []row

type row struct{ key, value []byte }

func (r rows) Copy(_ context.Context, emit func(key, value []byte) error) error {
	for _, p := range r {
		if err := emit(p.key, p.value); err != nil {
			return err
		}
	}
	return nil
}

func rowsOf(t *testing.T, file []byte) (backup.Header, rows) {
	t.Helper()
	in, err := backup.NewReader(bytes.NewReader(file))
	if err != nil {
		t.Fatal(err)
	}
	var all rows
	if _, err := in.Rows(func(key, value []byte) error {
		all = append(all, row{bytes.Clone(key), bytes.Clone(value)})
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return in.Header, all
}

// rewritten changes the rows of a backup and keeps its end.
func rewritten(t *testing.T, dir string, file []byte, change func(rows) rows) []byte {
	t.Helper()
	h, all := rowsOf(t, file)
	b := signedBy(t, dir, h, change(all))
	const end = 32 + 3309 // hash and signature
	return append(b[:len(b)-end:len(b)-end], file[len(file)-end:]...)
}

func reorder(r rows) rows { r[1], r[2] = r[2], r[1]; return r }

// resigned is a backup of the rows of dir, without the first whose key has the
// prefix, that the identity of another deployment has signed.
func resigned(t *testing.T, dir, signer, without string) []byte {
	t.Helper()
	var file bytes.Buffer
	if err := backupDataDir(t.Context(), dir, filepath.Join(dir, kmsKeyFile), &file); err != nil {
		t.Fatal(err)
	}
	h, all := rowsOf(t, file.Bytes())
	for i, r := range all {
		if without != "" && bytes.HasPrefix(r.key, []byte(without)) {
			all = append(all[:i:i], all[i+1:]...)
			break
		}
	}
	return signedBy(t, signer, h, all)
}

func signedBy(t *testing.T, dir string, h backup.Header, all rows) []byte {
	t.Helper()
	s, err := bolt.Open(filepath.Join(dir, databaseFile), bolt.Options{ReadOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	keys, err := openKeys(t.Context(), s, filepath.Join(dir, kmsKeyFile))
	if err != nil {
		t.Fatal(err)
	}
	h.Identity = keys.Identity()
	var b bytes.Buffer
	if err := backup.Write(t.Context(), &b, all, h, keys.SignBackup); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// A KMS key that does not open what was restored is named, and costs nothing:
// the right one opens it.
func TestAWrongKMSKeyDoesNotCostTheData(t *testing.T) {
	dir := small(t)
	file, other := filepath.Join(t.TempDir(), "all.backup"), filepath.Join(t.TempDir(), "other.key")
	mustRun(t, "backup", "--data-dir", dir, "--output", file)
	if err := kms.CreateLocal(other); err != nil {
		t.Fatal(err)
	}
	target := t.TempDir()
	out, err := run(t, "restore", "--input", file, "--data-dir", target, "--kms-key-file", other)
	if err == nil || !strings.Contains(err.Error(), "does not open it; the data is whole") || !strings.Contains(out, "restored: ") {
		t.Fatalf("%s, %v", out, err)
	}
	s, err := bolt.Open(filepath.Join(target, databaseFile), bolt.Options{ReadOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	k, err := kms.OpenLocal(filepath.Join(dir, kmsKeyFile))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := keyring.Open(t.Context(), s, k, keyring.Config{}); err != nil {
		t.Error(err)
	}
}

// A restore that is killed in the middle leaves no database, and nothing in the
// way of the next one.
func TestAKilledRestoreLeavesNothingThatLooksRestored(t *testing.T) {
	program := filepath.Join(t.TempDir(), "latticekeep") // under this name the test binary is the program
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(self, program); err != nil {
		t.Fatal(err)
	}
	dir := small(t)
	file := filepath.Join(t.TempDir(), "all.backup")
	mustRun(t, "backup", "--data-dir", dir, "--output", file)
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	pipe, target := filepath.Join(t.TempDir(), "pipe"), t.TempDir()
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, part := range []int{100, len(content) / 2, len(content) - 1} {
		cmd := exec.Command(program, "restore", "--input", pipe, "--data-dir", target)
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
		if _, err := os.Stat(filepath.Join(target, databaseFile)); !os.IsNotExist(err) {
			t.Errorf("after %d bytes there is a database: %v", part, err)
		}
	}
	mustRun(t, "restore", "--input", file, "--data-dir", target)
	if left, err := filepath.Glob(filepath.Join(target, "*")); err != nil || len(left) != 1 {
		t.Errorf("the data directory has %v", left)
	}
}

// Two restores into one directory, or a restore beside a server that starts, do
// not get in each other's way.
func TestARestoreHasTheDirectoryForItself(t *testing.T) {
	dir := small(t)
	file := filepath.Join(t.TempDir(), "all.backup")
	mustRun(t, "backup", "--data-dir", dir, "--output", file)
	target := t.TempDir()
	lock, err := lockDataDir(target)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	if _, err := run(t, "restore", "--input", file, "--data-dir", target); err == nil || !strings.Contains(err.Error(), "another restore") {
		t.Error(err)
	}
	nothingRestored(t, "it", target)
}
