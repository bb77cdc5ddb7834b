package cli

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/app"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/backup"
	"github.com/latticekeep/latticekeep/internal/offline"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/test/machine"
)

// recipient is the recipient of the tests' backups, and the file of the identity that opens them.
type recipient struct{ text, file string }

func newRecipient(t *testing.T) recipient {
	t.Helper()
	file := filepath.Join(t.TempDir(), "backup.identity")
	return recipient{strings.TrimSpace(mustRun(t, "backup", "keygen", "--output", file)), file}
}

// identities returns the identities in the file.
func (r recipient) identities(t *testing.T) []backup.Identity {
	t.Helper()
	f, err := os.Open(r.file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	all, err := backup.ReadIdentities(f)
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// original is a deployment that has been backed up and is stopped.
type original struct {
	to              recipient
	dir, key, file  string // data directory, KMS key, backup
	chain, identity string
	ids             []string // ids of credentials that were sealed before the backup
	manifest        *v1beta1.SealedCredential
	entries         uint64
}

const sealedValue = "what git keeps and only this deployment opens"

// newOriginal runs a server while eight clients seal, and takes a backup of it over the network
// meanwhile.
func newOriginal(t *testing.T) original {
	t.Helper()
	o := original{to: newRecipient(t), dir: filepath.Join(t.TempDir(), "data"), file: filepath.Join(t.TempDir(), "all.backup")}
	o.key = filepath.Join(o.dir, offline.KMSKeyFileName)
	stderr := make(said, 100_000)
	server := startWith(t, app.DevConfig{DataDir: o.dir, Stderr: stderr})
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
	machine.WriteFile(t, systemKey, []byte(find(`SYSTEM_KEY=(lk_live_\w+)`)+"\n"))

	manifest := mustRun(t, "seal", "--url", server.BaseURL, "--identity", o.identity, "--name", "db", "--namespace", "default", "--type", "database",
		"--from-literal", "password="+sealedValue)
	var err error
	o.manifest = new(v1beta1.SealedCredential)
	if err := yaml.UnmarshalStrict([]byte(manifest), o.manifest); err != nil {
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
				status, answer, err := call(server.DevReady, "POST", "/api/v2/vault/seal", body)
				if err == nil && status == http.StatusCreated && n%3 == 2 {
					status, _, err = call(server.DevReady, "DELETE", "/api/v2/vault/"+answer["credential_id"].(string), "")
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
	out := mustRun(t, "backup", "--url", server.BaseURL, "--api-key-file", systemKey, "--recipient", o.to.text,
		"--identity", o.identity, "--verify-with", o.to.file, "--output", o.file)
	for _, want := range []string{"chain: " + o.chain, "identity: " + o.identity + " (the pinned one)", "KMS key is in it", "verified: the backup opens"} {
		if !strings.Contains(out, want) {
			t.Errorf("backup does not say %q: %s", want, out)
		}
	}
	stop.Store(true)
	clients.Wait()
	server.end()
	report, err := offline.VerifyDataDir(t.Context(), o.dir, verify.Options{})
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
	s, err := bolt.Open(filepath.Join(dir, offline.DatabaseFile), bolt.Options{ReadOnly: true})
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

// rows are the rows that a backup copies.
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

// resigned returns a backup of the rows of dir that the identity of another deployment signed. It
// lacks the KMS key and the first row whose key has the prefix without.
func resigned(t *testing.T, dir, signer, without string, to recipient) []byte {
	t.Helper()
	b := resignedWhole(t, dir, signer, without, to)
	return b[:len(b)-backup.StatementSize]
}

// resignedWhole is resigned with the statement at the end.
func resignedWhole(t *testing.T, dir, signer, without string, to recipient) []byte {
	t.Helper()
	file, err := os.ReadFile(backupOf(t, dir, to))
	if err != nil {
		t.Fatal(err)
	}
	in, err := backup.Open(bytes.NewReader(file), to.identities(t))
	if err != nil {
		t.Fatal(err)
	}
	var all rows
	if _, err := in.Rows(func(key, value []byte) error {
		if without != "" && bytes.HasPrefix(key, []byte(without)) {
			without = ""
			return nil
		}
		all = append(all, row{bytes.Clone(key), bytes.Clone(value)})
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	s, err := bolt.Open(filepath.Join(signer, offline.DatabaseFile), bolt.Options{ReadOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	keys := openKeys(t, s, filepath.Join(signer, offline.KMSKeyFileName))
	h := in.Header
	h.Identity = keys.Identity()
	var b bytes.Buffer
	if err := backup.Write(t.Context(), &b, all, h, nil, to.identities(t)[0].Recipient(), keys); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}
