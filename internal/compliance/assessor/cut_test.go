package assessor

import (
	"bytes"
	"context"
	"errors"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/keeper"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/objects"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/test/storetest"
	"github.com/latticekeep/latticekeep/test/story"
)

// restart opens the store and the log again, as a new process does.
func (w *world) restart() {
	w.t.Helper()
	check(w.t, w.store.Close())
	l := writer.New(func() time.Time { return w.Clock }, nil)
	s, err := bolt.Open(w.path, bolt.Options{Hook: l.Commit})
	check(w.t, err)
	w.t.Cleanup(func() { _ = s.Close() })
	w.log, w.store = l, storetest.Rehearsing(s)
	check(w.t, l.Use(w.t.Context(), viewed{w.store, w}, w.signer, "chain_test"))
	w.verifier = verify.NewLiveVerifier(l)
	w.service = w.newService()
}

// milestones returns the keys of a tenant's stored milestones.
func (w *world) milestones(tenant authz.TenantID) (keys [][]byte) {
	w.t.Helper()
	check(w.t, w.store.View(w.t.Context(), func(r store.Reader) error {
		return r.Scan(store.Prefix(milestonePrefix(tenant)), func(key, _ []byte) bool {
			keys = append(keys, bytes.Clone(key))
			return true
		})
	}))
	return keys
}

// Scores after a cut are the same as without a cut, in this process and in the next one.
func TestScoresOutliveTheEntriesTheyComeFrom(t *testing.T) {
	w := newWorld(t)
	bucket, err := objects.Open(t.Context(), "file://"+filepath.Join(t.TempDir(), "archive"), objects.SigningOptions{})
	check(t, err)
	t.Cleanup(func() { _ = bucket.Close() })
	cutter := func() *keeper.Cutter {
		return &keeper.Cutter{Log: w.log, Reader: reader.New(w.log, guard.New(w.log)), Archive: bucket, Keep: 20 * 24 * time.Hour, Before: w.service.Persist}
	}
	system := authz.Principal{Tenant: authz.SystemTenant, Kind: authz.System, ID: "latticekeep"}
	w.After(time.Minute).Tell(audit.BackupTaken, audit.Success, system, audit.Resource{Type: audit.BackupResource})
	backup := w.Clock
	w.After(time.Minute).Tell(audit.BackupTaken, audit.Denied, system, audit.Resource{Type: audit.BackupResource})
	lastBackup := func(step string) {
		t.Helper()
		if at, err := w.service.LastOf(t.Context(), authz.SystemTenant, audit.BackupTaken); err != nil || !at.Equal(backup) {
			t.Errorf("%s: the last backup is of %v, want %v: %v", step, at, backup, err)
		}
		if at, err := w.service.LastOf(t.Context(), story.Ours, audit.BackupTaken); err != nil || !at.IsZero() {
			t.Errorf("%s: the tenant's last backup is of %v: %v", step, at, err)
		}
	}
	lastBackup("at the beginning")
	w.Story.Good()
	check(t, w.service.AssessAll(t.Context()))
	whole := w.entries(story.Ours) // all entries ever written
	remember := func() {
		for _, e := range w.entries(story.Ours) {
			if e.Sequence > whole[len(whole)-1].Sequence {
				whole = append(whole, e)
			}
		}
	}
	cut := func() {
		t.Helper()
		remember()
		n, err := cutter().Run(t.Context())
		check(t, err)
		first := w.entries(story.Ours)[0]
		if n == 0 || first.TenantSequence == 1 {
			t.Fatalf("%d entries were cut, and the first one is %d", n, first.TenantSequence)
		}
	}
	judged := func(step string, head uint64) {
		t.Helper()
		got := w.score(compliance.SOC2, head)
		if head == 0 {
			remember()
		}
		want, err := compliance.Derive(w.service.catalogues[compliance.SOC2], sequence(whole), got.Head.Sequence)
		check(t, err)
		if got.Proof.Status != compliance.Verified || got.Score == nil {
			t.Fatalf("%s: %s %+v", step, got.Reason, got.Proof)
		}
		got.Proof, want.Proof = compliance.Proof{}, compliance.Proof{}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%s: as of %d\n%+v\nwithout a cut\n%+v", step, got.Head.Sequence, got, want)
		}
	}

	cut()
	archived, err := reader.New(w.log, guard.New(w.log)).Archived(t.Context())
	check(t, err)
	left := slices.IndexFunc(whole, func(e *audit.Entry) bool { return e.Sequence > archived })
	lastBackup("behind the cut")
	judged("at once", 0)
	for _, e := range whole[left:] {
		judged("at each entry that is left", e.Sequence)
	}
	w.Days(1).Version(audit.CredentialRotated, "cred_a", 60).ReadLog()
	middle := w.score(compliance.SOC2, 0).Head
	w.restart()
	judged("after a restart", 0)
	judged("after a restart, behind the newest", middle.Sequence)
	_, err = w.service.Report(t.Context(), story.Owner, compliance.SOC2, middle.Sequence, compliance.PDF, compliance.About{})
	check(t, err)
	days, err := w.service.History(t.Context(), story.Owner, compliance.SOC2)
	check(t, err)
	if len(days) != 2 {
		t.Errorf("the history is %v", days)
	}
	for _, head := range []uint64{whole[0].Sequence, whole[left-1].Sequence} {
		_, err := w.service.Score(t.Context(), story.Owner, compliance.SOC2, head)
		if _, err2 := w.service.Report(t.Context(), story.Owner, compliance.SOC2, head, compliance.PDF, compliance.About{}); fault.Of(err) != fault.NotFound || fault.Of(err2) != fault.NotFound ||
			!strings.Contains(fault.Message(err), "archived: choose one of its later entries") {
			t.Errorf("as of %d, which is archived: %v, %v", head, err, err2)
		}
	}

	w.Days(30).Renewed("cred_b", 90).ReadLog()
	check(t, w.service.AssessAll(t.Context()))
	cut()
	w.restart()
	judged("after the second cut", 0)
	w.Days(30).ReadLog()
	check(t, w.service.AssessAll(t.Context()))
	cut()
	judged("after the third", 0)
	w.restart()
	lastBackup("after the third")
	if keys := w.milestones(story.Ours); len(keys) != 2 { // one of this cut and one of the previous cut, which was valid until then
		t.Errorf("evidence is stored as of %d heads", len(keys))
	}
	if _, err := w.service.Score(t.Context(), story.Owner, compliance.SOC2, middle.Sequence); fault.Of(err) != fault.NotFound {
		t.Errorf("a head that is archived by now: %v", err)
	}
}

// A cut stores no evidence for a tenant that loses no entries.
func TestACutStoresTheEvidenceOfWhomItConcerns(t *testing.T) {
	w := newWorld(t)
	w.Began().ReadLog()
	to := w.entries(story.Ours)[1].Sequence
	other := story.Owner
	other.Tenant = story.Theirs
	w.Tell(audit.AuditRead, audit.Success, other, audit.Resource{Type: audit.LogResource}).ReadLog()
	_, err := w.service.Score(t.Context(), other, compliance.SOC2, 0) // so that there is something to store
	check(t, err)
	check(t, w.service.Persist(t.Context(), to))
	if n, m := len(w.milestones(story.Ours)), len(w.milestones(story.Theirs)); n != 1 || m != 0 {
		t.Errorf("the evidence of the one is stored as of %d heads, and of the other of %d", n, m)
	}
	check(t, w.store.View(t.Context(), func(r store.Reader) error {
		row, err := r.Get(stateKey(story.Theirs))
		if row != nil {
			t.Error("the evidence of a tenant that loses nothing was stored")
		}
		return err
	}))
	check(t, w.service.Persist(t.Context(), to+1))
	if m := len(w.milestones(story.Theirs)); m != 1 {
		t.Errorf("%d heads", m)
	}
}

// A cut does not happen when its preparation fails.
func TestNothingIsCutThatIsNotKept(t *testing.T) {
	w := newWorld(t)
	bucket, err := objects.Open(t.Context(), "file://"+filepath.Join(t.TempDir(), "archive"), objects.SigningOptions{})
	check(t, err)
	t.Cleanup(func() { _ = bucket.Close() })
	w.Story.Good()
	for _, before := range []func(context.Context, uint64) error{
		func(ctx context.Context, to uint64) error {
			ended, cancel := context.WithCancel(ctx)
			cancel()
			return w.service.Persist(ended, to)
		},
		func(ctx context.Context, to uint64) error {
			return errors.Join(w.service.Persist(ctx, to), errors.New("no"))
		},
	} {
		c := keeper.Cutter{Log: w.log, Reader: reader.New(w.log, guard.New(w.log)), Archive: bucket, Keep: 20 * 24 * time.Hour, Before: before}
		if n, err := c.Run(t.Context()); err == nil || n != 0 {
			t.Errorf("%d entries were cut: %v", n, err)
		}
	}
	if first := w.entries(story.Ours)[0]; first.TenantSequence != 1 {
		t.Errorf("the first entry is %d", first.TenantSequence)
	}
	for _, e := range w.entries(story.Ours) {
		if a := w.score(compliance.GDPR, e.Sequence); a.Score == nil || a.Head.Hash != e.Hash {
			t.Errorf("%d: %+v", e.Sequence, a.Proof)
		}
	}
}
