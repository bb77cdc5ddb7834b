package assessor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/story"
)

func TestEvidenceIsKeptAndNotBelieved(t *testing.T) {
	w := newWorld(t)
	w.Story.Good()
	fresh := w.newService()
	check(t, w.service.Persist(t.Context(), 20))
	check(t, w.service.Persist(t.Context(), 1<<53))
	f, leave, err := fresh.evidence.acquire(t.Context(), story.Ours)
	check(t, err)
	check(t, fresh.evidence.catchUp(t.Context(), f, 0))
	leave()
	if f.stored != f.evidence.TenantSequence || f.stored == 0 {
		t.Errorf("the stored state stands at %d, the log at %d", f.stored, f.evidence.TenantSequence)
	}
	whole, err := f.evidence.Encode()
	check(t, err)
	key := stateKey(story.Ours)
	var row []byte
	check(t, w.store.View(t.Context(), func(r store.Reader) (err error) {
		row, err = r.Get(key)
		row = bytes.Clone(row)
		return err
	}))
	// Older evidence is not stored over the newest.
	old := w.newService()
	f, leave, err = old.evidence.acquire(t.Context(), story.Ours)
	check(t, err)
	e, done, err := old.evidence.asOf(t.Context(), story.Ours, 10)
	check(t, err)
	f.evidence = e
	done()
	if f.evidence.Last.Sequence != 10 {
		t.Fatalf("it stands at %d", f.evidence.Last.Sequence)
	}
	check(t, old.evidence.saveNewest(t.Context(), f))
	leave()
	check(t, w.store.View(t.Context(), func(r store.Reader) error {
		now, err := r.Get(key)
		if !bytes.Equal(now, row) {
			t.Error("an older state was stored over a newer one")
		}
		return err
	}))
	for name, forged := range map[string][]byte{
		"as it was": row, "without a MAC": row[32:], "another byte": append(bytes.Clone(row[:len(row)-2]), 'x', '}'), "short": {1}, "empty": {},
	} {
		check(t, w.store.Update(t.Context(), func(tx store.Tx) error { return tx.Put(key, forged) }))
		s := w.newService().evidence
		f, leave, err := s.acquire(t.Context(), story.Ours)
		check(t, err)
		check(t, s.catchUp(t.Context(), f, 0))
		leave()
		if got, err := f.evidence.Encode(); err != nil || !bytes.Equal(got, whole) {
			t.Errorf("%s: other evidence: %v", name, err)
		}
	}
	// Evidence with a valid MAC but from another log is not continued.
	e = compliance.NewEvidence()
	check(t, e.Add(story.EntryOf(audit.Event{Type: audit.AuditRead, Principal: story.Owner}, story.Start, 1)))
	b, err := e.Encode()
	check(t, err)
	check(t, w.store.Update(t.Context(), func(tx store.Tx) error { return tx.Put(key, w.service.evidence.encode(key, e.Last.Sequence, b)) }))
	s := w.newService().evidence
	f, leave, err = s.acquire(t.Context(), story.Ours)
	check(t, err)
	defer leave()
	check(t, s.catchUp(t.Context(), f, 0))
	if got, err := f.evidence.Encode(); err != nil || !bytes.Equal(got, whole) {
		t.Errorf("evidence of another log was taken: %v", err)
	}
}

func TestFoldGoesOnWhereItsTimeWasUp(t *testing.T) {
	w := newWorld(t)
	w.Began()
	check(t, w.store.Update(t.Context(), func(tx store.Tx) error {
		for range 1300 {
			if _, err := w.log.Append(tx, audit.Event{Type: audit.DataEncrypted, Outcome: audit.Success, Principal: story.Client, Resource: audit.Resource{Type: audit.DataResource}}); err != nil {
				return err
			}
		}
		return nil
	}))
	s := w.newService().evidence
	s.milestone, s.saveEvery = 400, 1000
	f, leave, err := s.acquire(t.Context(), story.Ours)
	check(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	views := 0
	w.viewing = func() {
		if views++; views == 3 { // the base and a page; then the time is up
			cancel()
		}
	}
	if err := s.catchUp(ctx, f, 0); !errors.Is(err, errUnfinished) {
		t.Fatal(err)
	}
	w.viewing = nil
	n := f.evidence.TenantSequence
	if n == 0 || n >= 1301 || !f.unproven || f.stored != 0 {
		t.Errorf("it stands at %d, unproven %v, stored %d", n, f.unproven, f.stored)
	}
	check(t, s.catchUp(t.Context(), f, 0))
	if f.unproven || f.stored != 1301 || f.evidence.TenantSequence != 1301 {
		t.Errorf("it stands at %d, unproven %v, stored %d", f.evidence.TenantSequence, f.unproven, f.stored)
	}
	got, err := f.evidence.Encode()
	check(t, err)
	for _, head := range []uint64{400, 402, 900, 1302} { // after milestones, between them and at them
		e, leave, err := s.asOf(t.Context(), story.Ours, head)
		check(t, err)
		if e.Last.Sequence != head {
			t.Errorf("%d, want %d", e.Last.Sequence, head)
		}
		leave()
		if e, err = s.loadBefore(t.Context(), story.Ours, head); err != nil || head > 401 && e.Count == 0 {
			t.Errorf("no milestone before %d: %v", head, err)
		}
	}
	// Unproven evidence up to the very end is not trusted for any head.
	for _, to := range []uint64{0, 400} {
		f.unproven = true
		if err := s.catchUp(t.Context(), f, to); !errors.Is(err, errUnfinished) {
			t.Errorf("up to %d: %v", to, err)
		}
		check(t, s.catchUp(t.Context(), f, 0))
	}
	if again, err := f.evidence.Encode(); err != nil || !bytes.Equal(again, got) {
		t.Error("other evidence", err)
	}
	leave()
}

func TestFoldsAreBounded(t *testing.T) {
	w := newWorld(t)
	for i := range 3 * maxNewest {
		_, leave, err := w.service.evidence.acquire(t.Context(), authz.TenantID(fmt.Sprint("ten_", i)))
		check(t, err)
		leave()
		leave()
	}
	if n := len(w.service.evidence.newest.all); n != maxNewest {
		t.Errorf("%d folds", n)
	}
	_, leave, err := w.service.evidence.acquire(t.Context(), story.Ours)
	check(t, err)
	defer leave()
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := w.service.evidence.acquire(ended, story.Ours); fault.Of(err) != fault.Unavailable {
		t.Error(err)
	}
}
