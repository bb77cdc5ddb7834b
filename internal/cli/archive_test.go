package cli

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/entries"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/keeper"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/objects"
	"github.com/latticekeep/latticekeep/internal/offline"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/machine"
	"github.com/latticekeep/latticekeep/test/s3test"
)

// archive moves all entries of a stopped store but the newest ones to a bucket, as the server does when
// they are old enough. It packs them first, as the server does. It returns the last sequence that moved.
func (e *estate) archive(at, bucket string) (to uint64) {
	e.t.Helper()
	ctx := e.t.Context()
	d := offline.Deployment{Store: at, KeyFile: e.keyFile()}
	began := time.Now() // what is written from now on stays
	bound := state.New(nil)
	log := writer.New(time.Now, bound)
	must(e.t, d.WithWritableStore(ctx, log.Commit, func(s store.Database) error {
		return d.WithKeys(ctx, s, nil, func(keys *keyring.Ring) error {
			must(e.t, log.Use(ctx, s, keys.Audit(), keys.ChainID()))
			must(e.t, log.BindState(ctx, keys.APIKeyHash()))
			b, err := objects.Open(ctx, bucket, objects.SigningOptions{})
			must(e.t, err)
			defer b.Close()
			_, err = writer.NewFollower(log).Follow(ctx)
			must(e.t, err)
			_, err = (&keeper.Packer{Log: log, Fresh: 2}).Pack(ctx, 1<<20)
			must(e.t, err)
			c := &keeper.Cutter{
				Log: log, Reader: reader.New(log, guard.New(log)), Archive: b, Keep: 24 * time.Hour,
				Now: func() time.Time { return began.Add(48 * time.Hour) },
			}
			if n, err := c.Run(ctx); err != nil || n < 10 {
				e.t.Fatalf("archived %d: %v", n, err)
			}
			base, err := log.Chain.ReadBase(ctx)
			must(e.t, err)
			to = base.Sequence()
			must(e.t, audit.ScanAll(ctx, s, entries.PackRange, func(key, _ []byte) error {
				e.t.Errorf("the pack %x is left", key)
				return nil
			}))
			return nil
		})
	}))
	return to
}

// A deployment whose archive is gone starts, serves, and verifies from its database on. Everything that
// needs the archive says so.
func TestAStartAndAVerificationHoldWithTheArchiveGone(t *testing.T) {
	server := s3test.ForTest(t)
	archive, err := server.Bucket("archive")
	must(t, err)
	e, at := newEstate(t, fmt.Sprintf("audit: {retention: {archive: %q}}\n", archive))
	kms, pem, export := e.keyFile(), filepath.Join(t.TempDir(), "audit.pem"), filepath.Join(t.TempDir(), "log.jsonl")
	mustRun(t, "audit", "export", "--store", at, "--kms-key-file", kms, "--output", export, "--public-key-out", pem)
	old := entryOf(t, export, string(audit.CredentialSealed))
	stopped := func(more ...string) string {
		t.Helper()
		return mustRun(t, append([]string{"audit", "verify", "--store", at, "--kms-key-file", kms, "--public-key", pem}, more...)...)
	}
	if out := stopped(); !strings.Contains(out, "ok: the whole log") || strings.Contains(out, "not verified") {
		t.Error(out)
	}
	var to uint64
	for range 3 { // several cuts, with entries in between
		to = e.archive(at, archive)
		url, end := e.serve(at)
		e.seal(url, 10)
		end()
	}
	if out := stopped("--archive", archive); !strings.Contains(out, "ok: the whole log") || strings.Contains(out, "not verified") {
		t.Error(out)
	}
	part := fmt.Sprintf("not verified: entries 1 to %d, which are in the archive", to)
	for _, gone := range []bool{false, true} {
		var log machine.Log
		e.log = &log
		if gone {
			must(t, server.RemoveBucket("archive"))
		}
		e.readOld(at, archive, pem, old, to, gone)
		told := 0
		if gone {
			told = 1
		}
		if n := strings.Count(log.String(), "the archive of the audit log"); n != told {
			t.Errorf("gone %t: the server tells %d times of it: %s", gone, n, log.String())
		}
		if out := stopped(); !strings.Contains(out, part) || !strings.Contains(out, fmt.Sprintf(" %d live credentials", len(e.ids))) {
			t.Error(out)
		}
		if out := mustRun(t, "doctor", "--store", at, "--kms-key-file", kms); !strings.Contains(out, "all is well") || !strings.Contains(out, part) {
			t.Error(out)
		}
	}
	if out, err := run(t, "audit", "verify", "--store", at, "--archive", archive); err == nil {
		t.Error("an archive that is gone verifies:", out)
	}
	// With a new bucket of that name, the archive goes on.
	if _, err := server.Bucket("archive"); err != nil {
		t.Fatal(err)
	}
	e.archive(at, archive)
	e.whole(at)
}

// entryOf returns the first entry of a type in an export.
func entryOf(t *testing.T, file, eventType string) *audit.Entry {
	t.Helper()
	for line := range strings.Lines(readText(t, file)) {
		if strings.Contains(line, `"event_type":"`+eventType+`"`) {
			e, err := audit.ParseEntry([]byte(strings.TrimSuffix(line, "\n")))
			must(t, err)
			return e
		}
	}
	t.Fatal("no such entry")
	return nil
}

// readOld asks a server on the store for everything that looks at old entries, such as the entry old
// of the tenant. Those up to the sequence `to` are archived. gone says that the bucket is gone.
func (e *estate) readOld(at, archive, pem string, old *audit.Entry, to uint64, gone bool) {
	t := e.t
	t.Helper()
	url, end := e.serve(at)
	defer end()
	c := e.connect(url, e.tenant)
	for i, id := range e.ids {
		if got, err := c.UnsealCredential(t.Context(), id); err != nil || got.Values["v"] != fmt.Sprint("s3cret-", i) {
			t.Fatalf("credential %d: %v", i, err)
		}
	}
	readable := "1"
	if gone {
		readable = "0" // for which there is an alert
	}
	made, err := e.connect(url, e.systemKey()).CreateAPIKey(t.Context(), v2.CreateAPIKeyRequest{Name: "prometheus", Scopes: []v2.Scope{"metrics:read"}})
	must(t, err)
	metrics := e.get(url+"/metrics", made.ApiKey)
	for _, want := range []string{"archive_readable " + readable, "retention_entries 1e+06", "retention_seconds 7.776e+06", "stored_entries "} {
		if !strings.Contains(metrics, "\nlatticekeep_audit_"+want) {
			t.Errorf("the metrics lack %q", want)
		}
	}
	e.get(url+"/readyz", "")

	// The entry itself is in the archive. The tree stays, so the entry is proved with its hash.
	if _, err := c.GetAuditEntry(t.Context(), int64(old.Sequence)); err == nil || !strings.Contains(err.Error(), "in the archive only") {
		t.Error("an archived entry:", err)
	}
	if _, err := c.ProveInclusion(t.Context(), &v2.ProveInclusionParams{Sequence: int64(old.Sequence)}); err == nil || !strings.Contains(err.Error(), "in the archive only is proved with its hash and the tiles") {
		t.Error("the proof of an archived entry:", err)
	}
	width := int(old.Sequence)
	tile, err := c.GetTile(t.Context(), "0", 0, &v2.GetTileParams{Width: &width})
	must(t, err)
	hash, err := old.Digest()
	must(t, err)
	if leaf := audit.LeafHash(hash); !bytes.Equal(leaf[:], tile[32*(width-1):]) {
		t.Error("the tree no longer has the archived entry")
	}

	system := []string{"--url", url, "--api-key", e.systemKey()}
	whole := append([]string{"audit", "verify", "--whole"}, system...)
	if out := mustRun(t, whole...); !strings.Contains(out, "ok: ") || !strings.Contains(out, fmt.Sprintf("not verified: entries 1 to %d, which are in the archive, as entry ", to)) {
		t.Error(out)
	}
	if out, err := run(t, append(whole, "--archive", archive)...); gone == (err == nil) || !gone && !strings.Contains(out, "ok: the whole log") {
		t.Errorf("with --archive: %s %v", out, err)
	}
	if out := mustRun(t, "audit", "verify", "--url", url, "--api-key", e.tenant); !strings.Contains(out, "ok: the log of tenant") || !strings.Contains(out, "not verified: the tenant's first ") {
		t.Error(out)
	}
	file := filepath.Join(t.TempDir(), "log.jsonl")
	mustRun(t, append([]string{"audit", "export", "--whole", "--output", file}, system...)...)
	if out, err := run(t, "audit", "verify", "--file", file, "--public-key", pem); err == nil || !strings.Contains(err.Error(), "--archive") {
		t.Error("an export that begins behind the archive:", out, err)
	}
}

// get returns the body of an answer with status 200.
func (e *estate) get(url, key string) string {
	e.t.Helper()
	r, err := http.NewRequestWithContext(e.t.Context(), http.MethodGet, url, nil)
	must(e.t, err)
	if key != "" {
		r.Header.Set("X-API-Key", key)
	}
	answer, err := http.DefaultClient.Do(r)
	must(e.t, err)
	defer answer.Body.Close()
	b, err := io.ReadAll(answer.Body)
	if err != nil || answer.StatusCode != http.StatusOK {
		e.t.Errorf("%s: %s %s %v", url, answer.Status, b, err)
	}
	return string(b)
}
