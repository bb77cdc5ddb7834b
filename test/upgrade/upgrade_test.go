package upgrade

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	bolt "go.etcd.io/bbolt"

	"github.com/latticekeep/latticekeep/api/client"
	v1 "github.com/latticekeep/latticekeep/api/openapi/v1"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/cli"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store/format"
	"github.com/latticekeep/latticekeep/test/machine"
)

// fixture is an unpacked copy that a test may change.
type fixture struct {
	dir   string
	known Known
	log   bytes.Buffer // of the servers that have ended
}

func unpack(t *testing.T) *fixture {
	t.Helper()
	f := &fixture{dir: t.TempDir()}
	text, err := os.ReadFile("testdata/known.json")
	check(t, err, "reading what is known")
	check(t, json.Unmarshal(text, &f.known), "reading what is known")
	packed, err := os.Open("testdata/fixture.tar.gz")
	check(t, err, "opening the fixture")
	defer packed.Close()
	zipped, err := gzip.NewReader(packed)
	check(t, err, "opening the fixture")
	for files := tar.NewReader(zipped); ; {
		header, err := files.Next()
		if errors.Is(err, io.EOF) {
			return f
		}
		check(t, err, "unpacking the fixture")
		path := f.path(header.Name)
		check(t, os.MkdirAll(filepath.Dir(path), 0o700), "unpacking the fixture")
		content, err := io.ReadAll(files)
		check(t, err, "unpacking the fixture")
		check(t, os.WriteFile(path, content, 0o600), "unpacking the fixture")
	}
}

func (f *fixture) path(name string) string { return filepath.Join(f.dir, name) }

func check(t *testing.T, err error, doing string) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s: %v", doing, err)
	}
}

// run runs a command of the program, which must succeed, and returns its output.
func run(t *testing.T, args ...string) string {
	t.Helper()
	var stdout, stderr bytes.Buffer
	cmd := cli.Command()
	cmd.SetArgs(args)
	cmd.SetOut(&stdout)
	cmd.SetErr(&stderr)
	if err := cmd.ExecuteContext(t.Context()); err != nil {
		t.Fatalf("latticekeep %s: %v\n%s", strings.Join(args, " "), err, stderr.Bytes())
	}
	return stdout.String()
}

// serve runs a production server on the data directory until the test ends or stop is called.
func (f *fixture) serve(t *testing.T) (url string, stop func()) {
	t.Helper()
	// With these settings nothing that the test needs expires or rotates, whenever the test runs.
	config := fmt.Sprintf(`
listen: 127.0.0.1:0
publicURL: http://127.0.0.1:8200
dataDir: %q
systemKeyFile: %q
kms: {url: "file://%s"}
sealing: {keyLifetime: 0s}
registration: {closed: true}
audit:
  anchor: {bucket: "file://%s"}
  retention: {keep: 2000000h, archive: "file://%s"}
`, f.path("data"), f.path("system.key"), f.path("keys/kms-2.key"), f.path("anchors"), f.path("archive"))
	check(t, os.WriteFile(f.path("config.yaml"), []byte(config), 0o600), "writing the configuration")
	ctx, cancel := context.WithCancel(t.Context())
	stdout, line := io.Pipe()
	f.log.Reset()
	done := make(chan error, 1)
	go func() {
		cmd := cli.Command()
		cmd.SetArgs([]string{"server", "--config", f.path("config.yaml")})
		cmd.SetOut(line)
		cmd.SetErr(&f.log)
		err := cmd.ExecuteContext(ctx)
		line.CloseWithError(errors.Join(err, io.EOF))
		done <- err
	}()
	stopped := false
	stop = func() {
		t.Helper()
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-done; err != nil {
			t.Errorf("the server ended with %v", err)
		}
		if t.Failed() {
			t.Logf("the log of the server:\n%s", f.log.Bytes())
		}
	}
	t.Cleanup(stop)
	var ready struct {
		BaseURL  string `json:"base_url"`
		Identity string `json:"identity"`
		Chain    string `json:"chain"`
	}
	check(t, json.NewDecoder(stdout).Decode(&ready), "starting on the data directory")
	if ready.Identity != f.known.Identity || ready.Chain != f.known.Chain {
		t.Errorf("the server has identity %s and chain %s, want %s and %s", ready.Identity, ready.Chain, f.known.Identity, f.known.Chain)
	}
	return ready.BaseURL, stop
}

func connect(t *testing.T, url string, options ...client.Option) *client.Client {
	t.Helper()
	options = append(options, client.WithHTTPClient(&http.Client{Transport: machine.Patient{RoundTripper: http.DefaultTransport}}))
	c, err := client.New(url, options...)
	check(t, err, "making a client")
	return c
}

// TestTheLogOfAnEarlierCommitVerifies compares the data directory with the records of the earlier
// commit, without a server.
func TestTheLogOfAnEarlierCommitVerifies(t *testing.T) {
	f := unpack(t)
	checkpoint, export := f.path("checkpoint.txt"), f.path("export.jsonl")
	check(t, os.WriteFile(checkpoint, []byte(f.known.Checkpoint), 0o600), "keeping the checkpoint")
	run(t, "audit", "verify", "--data-dir", f.path("data"), "--archive", "file://"+f.path("archive"),
		"--fingerprint", f.known.Chain, "--since", checkpoint)
	run(t, "audit", "export", "--data-dir", f.path("data"), "--kms-key-file", f.path("keys/kms-2.key"), "--output", export)
	run(t, "audit", "verify", "--file", export, "--archive", "file://"+f.path("archive"), "--fingerprint", f.known.Chain)
}

// TestADataDirectoryOfAnEarlierCommitIsServed reads everything that the earlier commit stored and
// that does not expire, and changes some of it.
func TestADataDirectoryOfAnEarlierCommitIsServed(t *testing.T) {
	f := unpack(t)
	url, stop := f.serve(t)
	system := connect(t, url, client.WithAPIKey(f.known.SystemKey))
	tenants := tenantsAt(t, f, url)
	t.Run("credentials", func(t *testing.T) { f.unsealAll(t, tenants) })
	t.Run("data", func(t *testing.T) { f.decryptAll(t, tenants) })
	t.Run("identities", func(t *testing.T) { f.signIn(t, url, system) })
	t.Run("sealing keys", func(t *testing.T) { f.openManifest(t, url, system) })
	t.Run("logs and scores", func(t *testing.T) { f.readLogs(t, tenants) })
	stop()
	run(t, "audit", "verify", "--data-dir", f.path("data"), "--archive", "file://"+f.path("archive"), "--fingerprint", f.known.Chain)
}

// TestTheRowsOfAnEarlierCommitAreBoundToTheLog serves the data directory while its rows are being
// bound, and after. From then on the earlier commit refuses the store.
func TestTheRowsOfAnEarlierCommitAreBoundToTheLog(t *testing.T) {
	f := unpack(t)
	url, stop := f.serve(t)
	system := connect(t, url, client.WithAPIKey(f.known.SystemKey))
	tenants := tenantsAt(t, f, url)
	bound := f.waitUntilBound(t, system)
	if bound.Attributes["earlier_replays"] != "not_excluded" || bound.Attributes["wrong_macs"] != "0" {
		t.Errorf("the entry does not say that earlier replays are not excluded, and all MACs right: %v", bound)
	}
	f.unsealAll(t, tenants)
	f.decryptAll(t, tenants)
	f.signIn(t, url, system)
	stop()
	url, stop = f.serve(t)
	f.decryptAll(t, tenantsAt(t, f, url))
	stop()
	db, err := bolt.Open(f.path("data/latticekeep.db"), 0o600, nil)
	check(t, err, "opening the database")
	check(t, db.Update(func(tx *bolt.Tx) error {
		rows := tx.Bucket([]byte("latticekeep/store/v1"))
		if row := rows.Get([]byte("deployment")); !bytes.Contains(row, []byte(`"format":2`)) || !format.Raised(rows.Get(format.Row)) {
			t.Errorf("the earlier commit takes the store for its own: %s, %s", row, rows.Get(format.Row))
		}
		if err := rows.Delete([]byte("state/head")); err != nil {
			return err
		}
		return rows.Delete([]byte("state/building"))
	}), "removing the rows of the state")
	check(t, db.Close(), "closing the database")
	cmd := cli.Command()
	cmd.SetArgs([]string{"server", "--config", f.path("config.yaml")})
	if err := cmd.ExecuteContext(t.Context()); err == nil || !strings.Contains(err.Error(), "the rows of the state are not there") {
		t.Errorf("a store without the rows of its state starts with %v", err)
	}
}

// waitUntilBound returns the entry with which the rows are bound to the log.
func (f *fixture) waitUntilBound(t *testing.T, system *client.Client) v2.AuditEntry {
	t.Helper()
	for {
		list, err := system.V2.QueryAuditLog(t.Context(), &v2.QueryAuditLogParams{From: new(f.known.MadeAt), EventType: new(v2.EventTypeSTATECOMMITTED)})
		check(t, err, "reading the log")
		if len(list.Entries) > 0 {
			return list.Entries[0]
		}
	}
}

// TestRowsThatWereDamagedBeforeTheUpgradeAreNamed changes rows under a MAC, also one of the deployment
// itself, before this release binds them.
func TestRowsThatWereDamagedBeforeTheUpgradeAreNamed(t *testing.T) {
	f := unpack(t)
	damaged := map[string]string{} // key by family
	db, err := bolt.Open(f.path("data/latticekeep.db"), 0o600, nil)
	check(t, err, "opening the database")
	check(t, db.Update(func(tx *bolt.Tx) error {
		rows := tx.Bucket([]byte("latticekeep/store/v1"))
		for _, family := range []string{"transit/version/", "invitation/", "dev"} {
			key, value := rows.Cursor().Seek([]byte(family))
			if !bytes.HasPrefix(key, []byte(family)) {
				t.Fatalf("the fixture has no row of %s", family)
			}
			value = bytes.Clone(value)
			value[len(value)-1] ^= 1
			damaged[family] = fmt.Sprintf("%q", key)
			if err := rows.Put(bytes.Clone(key), value); err != nil {
				return err
			}
		}
		return nil
	}), "damaging rows")
	check(t, db.Close(), "closing the database")

	url, stop := f.serve(t)
	system := connect(t, url, client.WithAPIKey(f.known.SystemKey))
	if bound := f.waitUntilBound(t, system); bound.Attributes["wrong_macs"] != fmt.Sprint(len(damaged)) {
		t.Errorf("of %d damaged rows the entry has %q", len(damaged), bound.Attributes["wrong_macs"])
	}
	prometheus, err := system.V2.CreateAPIKey(t.Context(), v2.CreateAPIKeyRequest{Name: "prometheus", Scopes: []v2.Scope{v2.ScopeMetricsRead}})
	check(t, err, "making a key for the metrics")
	reader := connect(t, url, client.WithAPIKey(prometheus.ApiKey))
	var metrics string
	for metrics == "" || strings.Contains(metrics, "latticekeep_state_scanned_timestamp_seconds 0\n") { // the build is before the first scan
		metrics, err = reader.V2.GetMetrics(t.Context())
		check(t, err, "reading the metrics")
	}
	f.decryptAll(t, tenantsAt(t, f, url)) // the others are served
	stop()
	for family, key := range damaged {
		if sample := fmt.Sprintf("latticekeep_state_rows_refused_total{family=%q,reason=\"damaged\"} 1\n", family); !strings.Contains(metrics, sample) {
			t.Errorf("the metrics lack %s", sample)
		}
		found := 0
		for text := range strings.Lines(f.log.String()) {
			var line struct{ Level, Family, Row, Reason string }
			if json.Unmarshal([]byte(text), &line) == nil && line.Level == "ERROR" && line.Row == key && line.Family == family && line.Reason == "damaged" {
				found++
			}
		}
		if found != 1 {
			t.Errorf("the log names %s %d times", key, found)
		}
	}
	var found bytes.Buffer
	doctor := cli.Command()
	doctor.SetArgs([]string{"doctor", "--data-dir", f.path("data"), "--kms-key-file", f.path("keys/kms-2.key")})
	doctor.SetOut(&found)
	doctor.SetErr(io.Discard)
	if err := doctor.ExecuteContext(t.Context()); cli.ExitStatus(err) != 1 {
		t.Errorf("doctor ends with %v", err)
	}
	if n := strings.Count(found.String(), "its MAC is wrong"); n != len(damaged) {
		t.Errorf("doctor names %d of %d rows: %s", n, len(damaged), found.String())
	}
	for _, key := range damaged {
		if !strings.Contains(found.String(), key) {
			t.Errorf("doctor does not name %s", key)
		}
	}
}

// tenantsAt returns a client for each tenant.
func tenantsAt(t *testing.T, f *fixture, url string) map[string]*client.Client {
	tenants := map[string]*client.Client{}
	for tenant, key := range f.known.APIKeys {
		tenants[tenant] = connect(t, url, client.WithAPIKey(key))
	}
	return tenants
}

func (f *fixture) unsealAll(t *testing.T, tenants map[string]*client.Client) {
	for _, c := range f.known.Credentials {
		if time.Now().After(c.ExpiresAt) {
			t.Logf("%s expired at %s and is not served any more", c.Name, c.ExpiresAt)
			continue
		}
		got, err := tenants[c.Tenant].V2.UnsealCredentialVersion(t.Context(), c.ID, c.Version)
		if err != nil || !maps.Equal(got.Values, c.Values) || got.Name != c.Name {
			t.Errorf("%s in version %d does not unseal to its values: %v", c.Name, c.Version, err)
		}
		versions, err := tenants[c.Tenant].V2.ListCredentialVersions(t.Context(), c.ID)
		if err != nil || int64(len(versions.Versions)) < c.Version {
			t.Errorf("the versions of %s are %+v, %v; want at least %d", c.Name, versions, err, c.Version)
		}
	}
	for _, c := range f.known.Deleted {
		if _, err := tenants[c.Tenant].V2.UnsealCredential(t.Context(), c.ID); !errors.Is(err, client.ErrForbidden) {
			t.Errorf("the deleted credential %s unseals with the error %v", c.Name, err)
		}
	}
	for tenant, c := range tenants {
		list, err := c.V2.ListCredentials(t.Context(), nil)
		check(t, err, "listing credentials")
		for _, want := range f.known.Credentials {
			if want.Tenant == tenant && !slices.ContainsFunc(list.Credentials, func(c v2.Credential) bool { return c.CredentialId == want.ID }) {
				t.Errorf("%s is not in the list of its tenant", want.Name)
			}
		}
	}
	last := f.known.Credentials[len(f.known.Credentials)-1]
	c := tenants[last.Tenant]
	if got, err := c.V2.UnsealCredentialByName(t.Context(), last.Name); err != nil || !maps.Equal(got.Values, last.Values) {
		t.Errorf("%s does not unseal by its name: %v", last.Name, err)
	}
	rotated, err := c.V2.RotateCredential(t.Context(), last.ID)
	check(t, err, "rotating a credential")
	if got, err := c.V2.UnsealCredential(t.Context(), last.ID); err != nil || got.Version != last.Version+1 || !maps.Equal(got.Values, last.Values) {
		t.Errorf("after its rotation to version %d, %s does not unseal to its values: %v", rotated.Version, last.Name, err)
	}
}

func (f *fixture) decryptAll(t *testing.T, tenants map[string]*client.Client) {
	for i, c := range f.known.Ciphertexts {
		var got string
		switch c.Interface {
		case 1:
			answer, err := tenants[c.Tenant].V1.DecryptData(t.Context(), v1.DecryptRequest{EncryptedData: c.Data, KeyId: c.Key})
			check(t, err, "decrypting")
			got = answer.Data
		case 2:
			answer, err := tenants[c.Tenant].V2.DecryptData(t.Context(), v2.DecryptRequest{CiphertextData: c.Data, CiphertextKem: c.KEM, Nonce: c.Nonce})
			check(t, err, "decrypting")
			got = answer.Data
		}
		if got != c.Plaintext {
			t.Errorf("ciphertext %d decrypts to %q, want %q", i, got, c.Plaintext)
		}
	}
	for i, s := range f.known.Signatures {
		answer, err := tenants[s.Tenant].V2.VerifyData(t.Context(), v2.VerifyRequest{Data: s.Data, PqcSignature: s.PQC, HmacSignature: s.HMAC})
		if err != nil || !answer.Valid {
			t.Errorf("signature %d does not verify: %v", i, err)
		}
	}
}

func (f *fixture) signIn(t *testing.T, url string, system *client.Client) {
	for _, u := range f.known.Users {
		c := connect(t, url)
		_, err := c.V2.Login(t.Context(), v2.LoginRequest{Email: u.Email, Password: u.Password})
		check(t, err, "signing in as "+u.Email)
		account, err := c.V2.GetAccount(t.Context())
		if err != nil || string(account.User.Role) != u.Role || account.Tenant.TenantId != u.Tenant {
			t.Errorf("%s has the account %+v, %v", u.Email, account, err)
		}
		if u.Role == "owner" {
			members, err := c.V2.ListMembers(t.Context())
			if err != nil || len(members.Members) != len(f.known.Users) {
				t.Errorf("the members are %+v, %v; want %d", members, err, len(f.known.Users))
			}
		}
	}
	revoked := connect(t, url, client.WithAPIKey(f.known.RevokedKey))
	if _, err := revoked.V2.ListCredentials(t.Context(), nil); !errors.Is(err, client.ErrUnauthenticated) {
		t.Errorf("a revoked API key is answered %v", err)
	}
	list, err := system.V2.ListTenants(t.Context(), nil)
	check(t, err, "listing tenants")
	for tenant := range f.known.APIKeys {
		if !slices.ContainsFunc(list.Tenants, func(l v2.Tenant) bool { return l.TenantId == tenant }) {
			t.Errorf("the tenant %s is not in the list", tenant)
		}
	}
}

func (f *fixture) openManifest(t *testing.T, url string, system *client.Client) {
	list, err := system.V2.ListSealingKeys(t.Context())
	check(t, err, "listing sealing keys")
	var got []SealingKey
	for _, k := range list.SealingKeys {
		got = append(got, SealingKey{k.KeyId, string(k.State)})
	}
	if !slices.Equal(got, f.known.Sealing.Keys) {
		t.Errorf("the sealing keys are %v, want %v", got, f.known.Sealing.Keys)
	}
	manifest := f.path("manifest.yaml")
	check(t, os.WriteFile(manifest, []byte(f.known.Sealing.Manifest), 0o600), "writing the manifest")
	run(t, "reseal", manifest, "--url", url, "--identity", f.known.Identity, "--api-key", f.known.Backup.APIKey)
	if resealed, err := os.ReadFile(manifest); err != nil || string(resealed) == f.known.Sealing.Manifest {
		t.Errorf("the manifest was not sealed for the newest key: %v", err)
	}
	keys, err := system.V2.ListKMSKeys(t.Context())
	if err != nil || len(keys.KmsKeys) == 0 {
		t.Errorf("the KMS keys are %+v, %v", keys, err)
	}
}

func (f *fixture) readLogs(t *testing.T, tenants map[string]*client.Client) {
	for tenant, c := range tenants {
		if account, err := c.V2.GetAccount(t.Context()); err != nil || account.Tenant.TenantId != tenant {
			t.Errorf("an API key of %s has the account %+v, %v", tenant, account, err)
		}
	}
	tenant := f.known.Signatures[0].Tenant
	c := tenants[tenant]
	entries, err := c.V2.QueryAuditLog(t.Context(), &v2.QueryAuditLogParams{From: new(f.known.MadeAt.Add(-time.Hour)), EventType: new(v2.EventTypeCREDENTIALDELETED)})
	if err != nil || len(entries.Entries) != len(f.known.Deleted) {
		t.Errorf("the log has the deletions %+v, %v", entries, err)
	}
	if _, err := c.V2.GetComplianceScore(t.Context(), &v2.GetComplianceScoreParams{Framework: v2.FrameworkSoc2}); err != nil {
		t.Errorf("computing a score: %v", err)
	}
}

// TestABackupOfAnEarlierCommitIsRestored restores the backup and serves its content.
func TestABackupOfAnEarlierCommitIsRestored(t *testing.T) {
	f := unpack(t)
	check(t, os.RemoveAll(f.path("data")), "removing the data directory")
	run(t, "restore", "--input", f.path("first.backup"), "--identity-file", f.path("backup.identity"), "--data-dir", f.path("data"),
		"--fingerprint", f.known.Chain, "--identity", f.known.Identity, "--kms-key-out", f.path("restored.key"))
	check(t, os.Rename(f.path("restored.key"), f.path("keys/kms-2.key")), "taking the key of the backup")
	check(t, os.RemoveAll(f.path("anchors")), "removing the anchors, which know a longer log")
	check(t, os.Mkdir(f.path("anchors"), 0o700), "making a folder for anchors")
	url, _ := f.serve(t)
	want := f.known.Backup.Credential
	got, err := connect(t, url, client.WithAPIKey(f.known.Backup.APIKey)).V2.UnsealCredential(t.Context(), want.ID)
	if time.Now().Before(want.ExpiresAt) && (err != nil || !maps.Equal(got.Values, want.Values)) {
		t.Errorf("the restored credential does not unseal to its values: %v", err)
	}
}

// rows lists the prefixes of all row keys that the earlier commit and later ones write. For a kind
// of row that the fixture lacks, the value is the reason.
var rows = map[string]string{
	"apikey/hash/1/": "", "apikey/tenant/": "", "apikey/used/": "",
	"audit/anchor/": "", "audit/archive/": "", "audit/base": "", "audit/batch/": "", "audit/checkpoint": "", "audit/entry/": "",
	"audit/epoch/": "", "audit/head": "", "audit/summary/": "", "audit/tenant/": "", "audit/tile/": "", "audit/verified": "",
	"compliance/daily/": "", "compliance/head/": "", "compliance/state/": "", "compliance/stated/": "",
	"credential-indexed/3": "", "credential-name/": "", "credential-version/": "", "credential/": "",
	"deployment": "", "dev": "",
	"former-end/": "", "former/": "", "owned/": "", "owner/": "",
	"idempotency/due/": "", "idempotency/key/": "", "idempotency/request/": "",
	"invitation/": "", "invited/": "",
	"key/": "", "kms/given-up/": "", "kms/moved-from/": "",
	"mail-attempt/": "", "mail/": "",
	"namespace-name/": "", "namespace/": "", "tenant/": "",
	"sealing/current": "", "sealing/key/": "",
	"session/row/": "", "session/selector/": "", "slowdown/": "",
	"ticket/hash/invite/": "", "ticket/hash/reset/": "", "ticket/hash/verify/": "",
	"ticket/of/invite/": "", "ticket/of/reset/": "", "ticket/of/verify/": "",
	"transit/default/": "", "transit/due/": "", "transit/key/": "", "transit/seed/": "", "transit/version/": "",
	"user/email/": "", "user/password/": "", "user/row/": "",

	"quota/":       "only replicas on PostgreSQL borrow requests from the store, and the rows last a minute",
	"maintenance":  "a store with it is not served: a restore or migration is under way",
	"format":       "later than the fixture, which has format 1 without it",
	"state/":       "later than the fixture",
	"review-note/": "later than the fixture",
	"access/":      "later than the fixture",
	"released/":    "later than the fixture",
	"node-log/":    "later than the fixture",

	"kept/": "later than the fixture", "kept-rules/": "later than the fixture", "settings/": "later than the fixture", "details/": "later than the fixture", "last-read/": "later than the fixture", "past-name/": "later than the fixture", "lifetime/": "later than the fixture",
	"webhook/": "later than the fixture", "webhook-delivery/": "later than the fixture", "webhook-outbox/": "later than the fixture", "webhook-attempt/": "later than the fixture",
	"credential-path/": "later than the fixture: a start makes them of what is there", "credential-paths": "likewise",

	"backup/schedule": "later than the fixture",
	"backup/commits":  "later than the fixture",
}

// TestEveryKindOfRowHasAFixtureOrAReason fails if a kind of row was added, and neither a fixture
// that has it nor a reason.
func TestEveryKindOfRowHasAFixtureOrAReason(t *testing.T) {
	for _, f := range state.Families {
		covered := false
		for prefix := range rows {
			covered = covered || strings.HasPrefix(prefix, f.Prefix) || strings.HasPrefix(f.Prefix, prefix) && strings.HasSuffix(prefix, "/")
		}
		if !covered {
			t.Errorf("rows %s are in no fixture: add one beside those that are there, or give the reason", f.Prefix)
		}
	}
}

// TestTheFixtureHasEveryKindOfRow fails if the fixture lacks a kind of row that the other tests
// need.
func TestTheFixtureHasEveryKindOfRow(t *testing.T) {
	db, err := bolt.Open(unpack(t).path("data/latticekeep.db"), 0o600, &bolt.Options{ReadOnly: true})
	check(t, err, "opening the database")
	defer db.Close()
	found := map[string]int{}
	err = db.View(func(tx *bolt.Tx) error {
		return tx.Bucket([]byte("latticekeep/store/v1")).ForEach(func(key, _ []byte) error {
			for prefix := range rows {
				if rest, ok := strings.CutPrefix(string(key), prefix); ok && (rest == "" || strings.HasSuffix(prefix, "/")) {
					found[prefix]++
					return nil
				}
			}
			t.Errorf("the row %q is of no kind in the table", key)
			return nil
		})
	})
	check(t, err, "reading the rows")
	for prefix, reason := range rows {
		if (found[prefix] == 0) != (reason != "") {
			t.Errorf("the fixture has %d rows %s, and the table says %q", found[prefix], prefix, reason)
		}
	}
}
