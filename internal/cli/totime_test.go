package cli

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/objects"
	"github.com/latticekeep/latticekeep/internal/offline"
	"github.com/latticekeep/latticekeep/test/s3test"
)

// rollbackSite is an estate whose backups are in a folder.
type rollbackSite struct {
	*estate
	at     string
	to     recipient
	bucket string
}

func newRollbackSite(t *testing.T) *rollbackSite {
	to := newRecipient(t)
	e, at := newEstate(t, fmt.Sprintf("backup: {recipients: [%s]}\naudit: {anchor: {bucket: \"file://%s\"}}\n", to.text, t.TempDir()))
	return &rollbackSite{estate: e, at: at, to: to, bucket: t.TempDir()}
}

// backUpAt takes a backup of the running server into the bucket, as one that began at a time.
func (s *rollbackSite) backUpAt(url string, began time.Time) {
	s.t.Helper()
	file := s.backUp(url, s.to)
	name := filepath.Join(s.bucket, "backup/chain", began.UTC().Format("20060102-150405")+".backup")
	must(s.t, os.MkdirAll(filepath.Dir(name), 0o700))
	must(s.t, os.Rename(file, name))
	must(s.t, os.Rename(file+".sig", name+".sig"))
}

// restore restores to a time, into a new data directory.
func (s *rollbackSite) restore(name string, at time.Time, more ...string) (string, error) {
	s.t.Helper()
	return run(s.t, append([]string{"restore", "--bucket", "file://" + s.bucket, "--identity-file", s.to.file, "--data-dir", s.path(name),
		"--to-time", at.UTC().Format(time.RFC3339)}, more...)...)
}

// shippingSite is an estate whose server takes backups and ships its commits to a real bucket.
type shippingSite struct {
	*estate
	at, bucketURL string
	to            recipient
	bucket        *objects.Bucket
	anchors       string // folder
}

func newShippingSite(t *testing.T) *shippingSite {
	t.Helper()
	to := newRecipient(t)
	bucketURL, err := s3test.ForTest(t).Bucket("backups")
	must(t, err)
	b, err := objects.Open(t.Context(), bucketURL, objects.SigningOptions{})
	must(t, err)
	t.Cleanup(func() { _ = b.Close() })
	anchors := t.TempDir()
	e, at := newEstate(t, fmt.Sprintf("backup: {recipients: [%s], bucket: %q}\naudit: {anchor: {bucket: \"file://%s\"}}\n", to.text, bucketURL, anchors))
	return &shippingSite{e, at, bucketURL, to, b, anchors}
}

// backups returns the names of the backups that have a signature.
func (s *shippingSite) backups() (names []string) {
	s.t.Helper()
	all, err := s.bucket.List(s.t.Context(), "backup/", 1000)
	must(s.t, err)
	for _, name := range all {
		if signed, ok := strings.CutSuffix(name, ".sig"); ok {
			names = append(names, signed)
		}
	}
	return names
}

// segments returns the names of the segments of the logs of commits.
func (s *shippingSite) segments() []string {
	s.t.Helper()
	all, err := s.bucket.List(s.t.Context(), "commits/", 1000)
	must(s.t, err)
	return all
}

// awaitSegment returns once there is another segment, so that the commits before have records of their own:
// those that were not shipped by the end of a server can be one record.
func (s *shippingSite) awaitSegment() {
	s.t.Helper()
	n := len(s.segments()) + 1
	patience := time.After(2 * time.Minute)
	for len(s.segments()) < n {
		select {
		case <-time.After(50 * time.Millisecond):
		case <-patience:
			s.t.Fatal("no commits were shipped")
		}
	}
}

// serveBackedUp serves, and returns once there are n backups.
func (s *shippingSite) serveBackedUp(n int) (url string, end func()) {
	s.t.Helper()
	url, end = s.serve(s.at)
	// An upload whose answer is lost on a busy machine is tried again by the client and found to be there
	// already. The server takes the next backup five minutes later.
	patience := time.After(8 * time.Minute)
	for len(s.backups()) < n {
		select {
		case <-time.After(50 * time.Millisecond):
		case <-patience:
			s.t.Fatal("no backup was taken")
		}
	}
	return url, end
}

func (s *shippingSite) restore(name string, at time.Time, more ...string) (string, error) {
	s.t.Helper()
	return run(s.t, append([]string{"restore", "--bucket", s.bucketURL, "--identity-file", s.to.file, "--data-dir", s.path(name),
		"--to-time", at.UTC().Format(time.RFC3339Nano)}, more...)...)
}

// betweenSeconds returns a time that is later than what happened before the call, and earlier than what
// happens after it, in whole milliseconds.
func betweenSeconds() time.Time {
	time.Sleep(2 * time.Millisecond)
	at := time.Now()
	time.Sleep(2 * time.Millisecond)
	return at
}

// The log of commits leads to a time between two changes.
func TestARestoreToATimeBetweenTwoCommits(t *testing.T) {
	s := newShippingSite(t)
	url, end := s.serveBackedUp(1)
	c := s.connect(url, s.tenant)
	replace := func(value string) {
		t.Helper()
		_, err := c.ReplaceCredential(t.Context(), s.ids[0], v2.ReplaceRequest{Values: map[string]string{"v": value}})
		must(t, err)
	}
	before := time.Now()
	replace("first")
	at := betweenSeconds()
	replace("second")
	must(t, c.DeleteCredential(t.Context(), s.ids[1]))
	abandoned := betweenSeconds()
	replace("third")
	s.awaitSegment()
	end()
	shipped := len(s.segments())
	url, end = s.serve(s.at)
	c = s.connect(url, s.tenant)
	replace("fourth") // in a segment of its own
	end()
	url, end = s.serve(s.at) // so that the checkpoint is of after that
	checkpoint := s.path("checkpoint")
	must(t, os.WriteFile(checkpoint, []byte(mustRun(t, "audit", "checkpoint", "--url", url, "--api-key", s.systemKey())), 0o600))
	end()
	gap := betweenSeconds()

	out, err := s.restore("restored", at)
	must(t, err)
	for _, want := range []string{"last commit in it: ", "next state in the log: ", "taken away again: 1\n", "CREDENTIAL_DELETED " + s.ids[1], "lost: 3 CREDENTIAL_ROTATED"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	restored := offline.BoltScheme + s.path("restored")
	mustRun(t, "audit", "verify", "--store", restored)
	if out := mustRun(t, "doctor", "--store", restored, "--kms-key-file", s.keyFile()); !strings.HasPrefix(out, "ok") {
		t.Error(out)
	}
	unsealed := func(at, id string) string {
		t.Helper()
		url, end := s.serve(at) // ready, although the anchor knows more
		defer end()
		got, err := s.connect(url, s.tenant).UnsealCredential(t.Context(), id)
		if err != nil {
			return "none"
		}
		return got.Values["v"]
	}
	if out, err := s.restore("earlier", before); err != nil || !strings.Contains(out, "lost: 4 CREDENTIAL_ROTATED") {
		t.Error(out, err)
	}

	// Without a segment from after the time nobody knows what was deleted or revoked.
	segments := s.segments()
	last := segments[len(segments)-1]
	whole, err := s.bucket.Get(t.Context(), last)
	must(t, err)
	changed := bytes.Clone(whole)
	changed[len(changed)-1] ^= 1
	must(t, s.bucket.Put(t.Context(), last, changed))
	if _, err := s.restore("refused", time.Now()); err == nil || !strings.Contains(err.Error(), "in a gap of the log of commits") {
		t.Error("a time that a changed segment has: ", err)
	}
	if out, err := s.restore("unknown", at); err != nil || !strings.Contains(out, last) || !strings.Contains(out, "API_KEY_SUSPENDED") || !strings.Contains(out, "All sessions have ended") {
		t.Errorf("with a changed segment: %v\n%s", err, out)
	}

	must(t, s.bucket.Put(t.Context(), last, whole))

	// Whoever holds the bucket cuts off the end. There is still a commit from after the time.
	cut := make(map[string][]byte)
	for _, name := range segments[shipped:] {
		cut[name], err = s.bucket.Get(t.Context(), name)
		must(t, err)
		must(t, s.bucket.Delete(t.Context(), name))
	}
	if out, err := s.restore("cut", at, "--since", checkpoint); err != nil || !strings.Contains(out, "which the checkpoint of --since knows") ||
		!strings.Contains(out, "CREDENTIAL_DELETED "+s.ids[1]) || !strings.Contains(out, "All sessions have ended") {
		t.Errorf("with an end that was cut off: %v\n%s", err, out)
	}
	for name, content := range cut {
		must(t, s.bucket.Put(t.Context(), name, content))
	}
	if out, err := s.restore("not cut", at, "--since", checkpoint); err != nil || strings.Contains(out, "All sessions have ended") {
		t.Errorf("with the end that the checkpoint knows: %v\n%s", err, out)
	}
	foreign := s.path("foreign")
	must(t, os.WriteFile(foreign, []byte("latticekeep.dev/log/other/1\n"), 0o600))
	if _, err := s.restore("refused", at, "--since", foreign); err == nil || !strings.Contains(err.Error(), "is no checkpoint of this log") {
		t.Error("with a file that is no checkpoint:", err)
	}

	// The restored server begins another log with a backup. Between the two logs nothing is known, and of
	// what the rollback abandoned nobody knows what was taken away since. Nothing has served it before: a
	// server that is ended while it takes that backup leaves one that the next server takes away again.
	s.at = restored
	url, end = s.serveBackedUp(2)
	got, err := s.connect(url, s.tenant).UnsealCredential(t.Context(), s.ids[0])
	must(t, err)
	if got.Values["v"] != "first" {
		t.Errorf("the value is %q", got.Values["v"])
	}
	end()
	if _, err := s.restore("refused", gap); err == nil || !strings.Contains(err.Error(), "in a gap of the log of commits: a time up to ") {
		t.Error("a time between two logs: ", err)
	}
	if out, err := s.restore("again", at); err != nil || !strings.Contains(out, "CREDENTIAL_DELETED "+s.ids[1]) || !strings.Contains(out, "lost: 1 ROLLBACK_ACCEPTED") {
		t.Errorf("to the same time again: %v\n%s", err, out)
	}
	if out, err := s.restore("abandoned", abandoned); err != nil || !strings.Contains(out, "what happened since: unknown") {
		t.Errorf("to a time that was abandoned: %v\n%s", err, out)
	}
	if got := unsealed(restored, s.ids[1]); got != "none" {
		t.Errorf("the deleted value is %q", got)
	}
	must(t, os.Remove(s.path("system.key"))) // it is revoked, and a new one is written
	must(t, os.RemoveAll(s.anchors))         // they know the history of the other restored store
	must(t, os.Mkdir(s.anchors, 0o700))
	if got := unsealed(offline.BoltScheme+s.path("unknown"), s.ids[0]); got != "none" {
		t.Errorf("an API key that waits for an owner reads %q", got)
	}
}

// Another deployment, whose backups our identity does not open, has them in the same bucket.
func TestTheBackupsOfAnotherDeploymentAreNotOurs(t *testing.T) {
	s := newShippingSite(t)
	_, end := s.serveBackedUp(1)
	end()
	at := time.Now()
	_, chain, _ := strings.Cut(mustRun(t, "audit", "verify", "--store", s.at), "chain: ")
	chain, _, _ = strings.Cut(chain, "\n")
	for _, name := range []string{"backup/other/20261125-030000.backup", "backup/other/20261125-030000.backup.sig"} {
		must(t, s.bucket.Put(t.Context(), name, []byte("sealed for others")))
	}
	if _, err := s.restore("refused", at); err == nil || !strings.Contains(err.Error(), "name yours with --fingerprint") {
		t.Error("with the backups of two deployments:", err)
	}
	if out, err := s.restore("pinned", at, "--fingerprint", strings.Fields(chain)[0]); err != nil || !strings.Contains(out, "restored to: ") {
		t.Errorf("pinned: %v\n%s", err, out)
	}
}

// A credential that was deleted since stays deleted, a key that was revoked stays revoked, and the
// server starts on the result by itself, though its anchor knows more.
func TestARestoreToATimeKeepsAwayWhatWasTakenAway(t *testing.T) {
	s := newShippingSite(t)
	url, end := s.serveBackedUp(1)
	system := s.connect(url, s.systemKey())
	tenants, err := system.ListTenants(t.Context(), nil)
	must(t, err)
	leaked, err := system.CreateTenantAPIKey(t.Context(), tenants.Tenants[0].TenantId, v2.CreateAPIKeyRequest{Name: "leaked", Scopes: []v2.Scope{"vault:read"}})
	must(t, err)
	owner, err := system.CreateTenantAPIKey(t.Context(), tenants.Tenants[0].TenantId, v2.CreateAPIKeyRequest{Name: "admin", Scopes: []v2.Scope{"account:admin"}})
	must(t, err)
	at := betweenSeconds()
	c := s.connect(url, s.tenant)
	_, err = c.ReplaceCredential(t.Context(), s.ids[0], v2.ReplaceRequest{Values: map[string]string{"v": "a mistake"}})
	must(t, err)
	must(t, c.DeleteCredential(t.Context(), s.ids[1]))
	must(t, s.connect(url, owner.ApiKey).RevokeAPIKey(t.Context(), leaked.KeyId))
	s.awaitSegment()
	end()

	out, err := s.restore("restored", at)
	must(t, err)
	for _, want := range []string{"taken away again: 2\n", "API_KEY_REVOKED " + leaked.KeyId, "CREDENTIAL_DELETED " + s.ids[1], "lost: 1 CREDENTIAL_ROTATED", "what happened since: known up to entry "} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	if out, err = s.restore("revived", at, "--revive"); err != nil || !strings.Contains(out, "back, as --revive asks: 2\n") {
		t.Fatal(err, out)
	}
	restored := offline.BoltScheme + s.path("restored")
	mustRun(t, "audit", "verify", "--store", restored)
	if out := mustRun(t, "doctor", "--store", restored, "--kms-key-file", s.keyFile()); !strings.HasPrefix(out, "ok") {
		t.Error(out)
	}
	url, end = s.serve(restored) // ready: no loss is to be accepted
	c = s.connect(url, s.tenant)
	got, err := c.UnsealCredential(t.Context(), s.ids[0])
	must(t, err)
	if got.Values["v"] != "s3cret-0" {
		t.Errorf("the value is %q", got.Values["v"])
	}
	if _, err := c.UnsealCredential(t.Context(), s.ids[1]); err == nil {
		t.Error("the deleted credential is back")
	}
	if _, err := s.connect(url, leaked.ApiKey).UnsealCredential(t.Context(), s.ids[0]); err == nil {
		t.Error("the revoked key works")
	}
	end()

	url, end = s.serve(offline.BoltScheme + s.path("revived"))
	if _, err := s.connect(url, leaked.ApiKey).UnsealCredential(t.Context(), s.ids[1]); err != nil {
		t.Error("revived:", err)
	}
	end()
	if out, err := s.restore("again", at); err != nil || !strings.Contains(out, "and not further (another log of commits goes on at ") || !strings.Contains(out, "All sessions have ended") {
		t.Errorf("after a log that no backup names: %v\n%s", err, out)
	}

	// Whoever holds the bucket can hide what happened since.
	for _, name := range s.segments() {
		must(t, s.bucket.Delete(t.Context(), name))
	}
	out, err = s.restore("hidden", at)
	must(t, err)
	for _, want := range []string{"and not further (the log of commits has nothing from after the time)", "All sessions have ended", "API_KEY_SUSPENDED"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
}

func TestARestoreToATimeSaysWhyItCannot(t *testing.T) {
	s := newRollbackSite(t)
	url, end := s.serve(s.at)
	began := time.Now().Truncate(time.Second)
	s.backUpAt(url, began)
	end()
	at := began.Add(2 * time.Second)
	for time.Now().Before(at) {
		time.Sleep(10 * time.Millisecond)
	}
	if out, err := s.restore("no log", at); err != nil || !strings.Contains(out, "and not further (the newest backup has no log of commits)") || !strings.Contains(out, "All sessions have ended") {
		t.Errorf("without a log of commits: %v\n%s", err, out)
	}
	for name, c := range map[string]struct {
		at   time.Time
		more []string
		want string
	}{
		"before":    {began.Add(-time.Hour), nil, "before the first backup in the bucket: a time after " + began.UTC().Format(time.RFC3339)},
		"future":    {time.Now().Add(time.Hour), nil, "in the future"},
		"chain":     {at, []string{"--fingerprint", strings.Repeat("0", 64)}, "not the pinned one"},
		"wrong key": {at, []string{"--kms-key-file", otherKey(t)}, "opening the deployment's keys"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := s.restore("refused", c.at, c.more...)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q", err, c.want)
			}
			if exists(filepath.Join(s.path("refused"), offline.DatabaseFile)) || exists(filepath.Join(s.path("refused"), offline.DatabaseFile+".restore")) {
				t.Error("something was left")
			}
		})
	}
	for want, args := range map[string][]string{
		"point in time":               {"--bucket", "file:///x", "--to-time", "2026-11-25T00:00:00Z", "--store", "postgres://nobody@localhost/x"},
		"--follow need --bucket":      {"--input", "x", "--to-time", "2026-11-25T00:00:00Z"},
		"--bucket needs --to-time or": {"--bucket", "file:///x"},
		"--revive is for":             {"--input", "x", "--revive"},
		"give a time as":              {"--bucket", "file:///x", "--to-time", "yesterday"},
	} {
		if _, err := run(t, append([]string{"restore", "--identity-file", s.to.file}, append(args, storeFor(t, args)...)...)...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v, want %q", args, err, want)
		}
	}
}

// storeFor returns a data directory for arguments that name no store.
func storeFor(t *testing.T, args []string) []string {
	if slices.Contains(args, "--store") {
		return nil
	}
	return []string{"--data-dir", t.TempDir()}
}

// otherKey returns the file of a KMS key that is of no deployment.
func otherKey(t *testing.T) string {
	t.Helper()
	other, _ := newEstate(t, "")
	return other.keyFile()
}
