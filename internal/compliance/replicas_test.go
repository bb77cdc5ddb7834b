package compliance

import (
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/objects"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Whoever finds that the day's entries are missing while another replica writes them
// writes none.
func TestReplicasAssessATenantOnce(t *testing.T) {
	w := newWorld(t)
	w.began().days(2)
	fixed := w.goodState()
	var overtaken atomic.Bool
	w.state = func() State { // is asked once the fold is caught up
		if overtaken.CompareAndSwap(false, true) {
			check(t, w.newService().AssessAll(t.Context()))
		}
		return fixed
	}
	before := len(w.entries(ours))
	check(t, w.service.AssessAll(t.Context()))
	if n := len(w.entries(ours)) - before; n != 2 || w.recorded(ours) != 1 {
		t.Errorf("%d entries, and scores %d times", n, w.recorded(ours))
	}

	w.days(1)
	replicas := []*Service{w.service, w.newService(), w.newService()}
	before = len(w.entries(ours))
	var wg sync.WaitGroup
	for _, s := range replicas {
		wg.Go(func() { check(t, s.AssessAll(t.Context())) })
	}
	wg.Wait()
	if n := len(w.entries(ours)) - before; n != 2 || w.recorded(ours) != 2 {
		t.Errorf("%d entries, and scores %d times", n, w.recorded(ours))
	}
	for i, s := range replicas { // and all of them know it
		days, err := s.History(t.Context(), owner, SOC2)
		if check(t, err); len(days) != 2 {
			t.Errorf("replica %d: %v", i, days)
		}
	}
}

// Scores on demand at the same time record a changed state once, and a row that
// somebody wrote to say that it was recorded keeps nobody from it.
func TestAChangedStateIsRecordedOnce(t *testing.T) {
	w := newWorld(t)
	w.began().days(2)
	w.score(SOC2, 0)
	changed := w.goodState()
	changed.Transport = TransportPlaintext
	states := func() (n int) {
		for _, e := range w.entries(ours) {
			if e.EventType == audit.ComplianceAssessed {
				n++
			}
		}
		return n
	}
	before := states()
	var overtaken atomic.Bool
	w.state = func() State {
		if overtaken.CompareAndSwap(false, true) {
			_, err := w.newService().Score(t.Context(), owner, SOC2, 0)
			check(t, err)
		}
		return changed
	}
	if w.score(SOC2, 0); states() != before+1 {
		t.Errorf("%d times", states()-before)
	}
	changed.Transport = TransportTLS13
	check(t, w.store.Update(t.Context(), func(tx store.Tx) error {
		return tx.Put(statedKey(ours), []byte("it was recorded, believe me"))
	}))
	if w.score(SOC2, 0); states() != before+2 {
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
	ahead := row(statedKey(ours)) // ours, and of a state that the log does not end with
	changed.Transport = TransportPlaintext
	w.score(SOC2, 0)
	check(t, w.store.Update(t.Context(), func(tx store.Tx) error { return tx.Put(statedKey(ours), ahead) }))
	changed.Transport = TransportTLS13
	if w.score(SOC2, 0); states() != before+4 {
		t.Errorf("%d times", states()-before)
	}
}

// What a replica has in memory goes on behind entries that another one has archived
// meanwhile.
func TestEvidenceInMemoryGoesOnBehindTheCutOfAnotherReplica(t *testing.T) {
	w := newWorld(t)
	bucket, err := objects.Open(t.Context(), "file://"+filepath.Join(t.TempDir(), "archive"), objects.SigningOptions{})
	check(t, err)
	t.Cleanup(func() { _ = bucket.Close() })
	w.began().readLog()
	behind := w.newService() // gathers now, and then not until all of that is archived
	_, err = behind.Score(t.Context(), owner, SOC2, 0)
	check(t, err)
	w.days(40).readLog().days(40).readLog()
	cutter := audit.Cutter{Log: w.log, Reader: audit.NewReader(w.log, audit.NewGuard(w.log)), Archive: bucket, Keep: 20 * 24 * time.Hour, Before: w.service.Persist}
	n, err := cutter.Run(t.Context())
	check(t, err)
	if n == 0 {
		t.Fatal("nothing was cut")
	}
	want := w.score(SOC2, 0)
	got, err := behind.Score(t.Context(), owner, SOC2, want.Head.Sequence)
	check(t, err)
	if got.Score == nil || want.Score == nil || *got.Score != *want.Score || got.Proof.Status != Verified {
		t.Errorf("%s %+v, want %+v", got.Reason, got.Proof, want.Proof)
	}
	check(t, behind.Persist(t.Context(), want.Head.Sequence))
	if at, err := behind.LastOf(t.Context(), ours, audit.AuditRead); err != nil || at.IsZero() {
		t.Error(at, err)
	}
}
