package assessor

import (
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/keeper"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/internal/objects"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/story"
)

// A replica that finds the day's entries missing while another replica writes them does not write
// them again.
func TestReplicasAssessATenantOnce(t *testing.T) {
	w := newWorld(t)
	w.Began().Days(2)
	fixed := w.GoodState()
	var overtaken atomic.Bool
	w.state = func() compliance.State { // called when the fold is caught up
		if overtaken.CompareAndSwap(false, true) {
			check(t, w.newService().AssessAll(t.Context()))
		}
		return fixed
	}
	before := len(w.entries(story.Ours))
	check(t, w.service.AssessAll(t.Context()))
	if n := len(w.entries(story.Ours)) - before; n != 2 || w.recorded(story.Ours) != 1 {
		t.Errorf("%d entries, and scores %d times", n, w.recorded(story.Ours))
	}

	w.Days(1)
	replicas := []*Service{w.service, w.newService(), w.newService()}
	before = len(w.entries(story.Ours))
	var wg sync.WaitGroup
	for _, s := range replicas {
		wg.Go(func() { check(t, s.AssessAll(t.Context())) })
	}
	wg.Wait()
	if n := len(w.entries(story.Ours)) - before; n != 2 || w.recorded(story.Ours) != 2 {
		t.Errorf("%d entries, and scores %d times", n, w.recorded(story.Ours))
	}
	for i, s := range replicas { // and all replicas know it
		days, err := s.History(t.Context(), story.Owner, compliance.SOC2)
		if check(t, err); len(days) != 2 {
			t.Errorf("replica %d: %v", i, days)
		}
	}
}

// Concurrent scores on demand record a changed state once. A forged row that claims a recorded
// state does not prevent this.
func TestAChangedStateIsRecordedOnce(t *testing.T) {
	w := newWorld(t)
	w.Began().Days(2)
	w.score(compliance.SOC2, 0)
	changed := w.GoodState()
	changed.Transport = compliance.TransportPlaintext
	states := func() (n int) {
		for _, e := range w.entries(story.Ours) {
			if e.EventType == audit.ComplianceAssessed {
				n++
			}
		}
		return n
	}
	before := states()
	var overtaken atomic.Bool
	w.state = func() compliance.State {
		if overtaken.CompareAndSwap(false, true) {
			_, err := w.newService().Score(t.Context(), story.Owner, compliance.SOC2, 0)
			check(t, err)
		}
		return changed
	}
	if w.score(compliance.SOC2, 0); states() != before+1 {
		t.Errorf("%d times", states()-before)
	}
	changed.Transport = compliance.TransportTLS13
	check(t, w.store.Update(t.Context(), func(tx store.Tx) error {
		return tx.Put(statedKey(story.Ours), []byte("it was recorded, believe me"))
	}))
	if w.score(compliance.SOC2, 0); states() != before+2 {
		t.Errorf("%d times", states()-before)
	}
	row := func(key []byte) (row []byte) {
		check(t, w.store.View(t.Context(), func(r store.Reader) (err error) {
			b, err := r.Get(key)
			row = append(row, b...)
			return err
		}))
		return row
	}
	ahead := row(statedKey(story.Ours)) // a valid row for a state that is not the last one in the log
	changed.Transport = compliance.TransportPlaintext
	w.score(compliance.SOC2, 0)
	check(t, w.store.Update(t.Context(), func(tx store.Tx) error { return tx.Put(statedKey(story.Ours), ahead) }))
	changed.Transport = compliance.TransportTLS13
	if w.score(compliance.SOC2, 0); states() != before+4 {
		t.Errorf("%d times", states()-before)
	}
}

// A replica's evidence in memory continues after another replica has archived entries.
func TestEvidenceInMemoryGoesOnBehindTheCutOfAnotherReplica(t *testing.T) {
	w := newWorld(t)
	bucket, err := objects.Open(t.Context(), "file://"+filepath.Join(t.TempDir(), "archive"), objects.SigningOptions{})
	check(t, err)
	t.Cleanup(func() { _ = bucket.Close() })
	w.Began().ReadLog()
	behind := w.newService() // gathers now, and then not until all of this is archived
	_, err = behind.Score(t.Context(), story.Owner, compliance.SOC2, 0)
	check(t, err)
	w.Days(40).ReadLog().Days(40).ReadLog()
	cutter := keeper.Cutter{Log: w.log, Reader: reader.New(w.log, guard.New(w.log)), Archive: bucket, Keep: 20 * 24 * time.Hour, Before: w.service.Persist}
	n, err := cutter.Run(t.Context())
	check(t, err)
	if n == 0 {
		t.Fatal("nothing was cut")
	}
	want := w.score(compliance.SOC2, 0)
	got, err := behind.Score(t.Context(), story.Owner, compliance.SOC2, want.Head.Sequence)
	check(t, err)
	if got.Score == nil || want.Score == nil || *got.Score != *want.Score || got.Proof.Status != compliance.Verified {
		t.Errorf("%s %+v, want %+v", got.Reason, got.Proof, want.Proof)
	}
	check(t, behind.Persist(t.Context(), want.Head.Sequence))
	if at, err := behind.LastOf(t.Context(), story.Ours, audit.AuditRead); err != nil || at.IsZero() {
		t.Error(at, err)
	}
}
