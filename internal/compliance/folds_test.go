package compliance

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

func TestEvidenceIsKeptAndNotBelieved(t *testing.T) {
	w := newWorld(t)
	w.story.good()
	fresh := w.newService()
	check(t, w.service.Persist(t.Context(), 20))
	check(t, w.service.Persist(t.Context(), 1<<53))
	f, leave, err := fresh.enter(t.Context(), ours)
	check(t, err)
	check(t, fresh.catchUp(t.Context(), f, 0))
	leave()
	if f.stored != f.evidence.TenantSequence || f.stored == 0 {
		t.Errorf("the stored state stands at %d, the log at %d", f.stored, f.evidence.TenantSequence)
	}
	whole, err := f.evidence.encode()
	check(t, err)
	key := stateKey(ours)
	var row []byte
	check(t, w.store.View(t.Context(), func(r store.Reader) (err error) {
		row, err = r.Get(key)
		row = bytes.Clone(row)
		return err
	}))
	// A state that stands before the newest one is not stored over it.
	old := w.newService()
	f, leave, err = old.enter(t.Context(), ours)
	check(t, err)
	f.evidence, err = old.asOf(t.Context(), ours, 10)
	check(t, err)
	if f.evidence.Last.Sequence != 10 {
		t.Fatalf("it stands at %d", f.evidence.Last.Sequence)
	}
	check(t, old.save(t.Context(), f))
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
		s := w.newService()
		f, leave, err := s.enter(t.Context(), ours)
		check(t, err)
		check(t, s.catchUp(t.Context(), f, 0))
		leave()
		if got, err := f.evidence.encode(); err != nil || !bytes.Equal(got, whole) {
			t.Errorf("%s: other evidence: %v", name, err)
		}
	}
	// One that is sealed, but of another log, does not go on.
	e := newEvidence()
	check(t, e.add(entryOf(audit.Event{Type: audit.AuditRead, Principal: owner}, start, 1)))
	b, err := e.encode()
	check(t, err)
	check(t, w.store.Update(t.Context(), func(tx store.Tx) error { return tx.Put(key, w.service.row(key, e.Last.Sequence, b)) }))
	s := w.newService()
	f, leave, err = s.enter(t.Context(), ours)
	check(t, err)
	defer leave()
	check(t, s.catchUp(t.Context(), f, 0))
	if got, err := f.evidence.encode(); err != nil || !bytes.Equal(got, whole) {
		t.Errorf("evidence of another log was taken: %v", err)
	}
}

func TestFoldGoesOnWhereItsTimeWasUp(t *testing.T) {
	w := newWorld(t)
	w.began()
	check(t, w.store.Update(t.Context(), func(tx store.Tx) error {
		for range 1300 {
			if _, err := w.log.Append(tx, audit.Event{Type: audit.DataEncrypted, Outcome: audit.Success, Principal: client, Resource: audit.Resource{Type: audit.DataResource}}); err != nil {
				return err
			}
		}
		return nil
	}))
	s := w.newService()
	s.milestone, s.saveEvery = 400, 1000
	f, leave, err := s.enter(t.Context(), ours)
	check(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	views := 0
	w.viewing = func() {
		if views++; views == 3 { // the base, a page, and then the time is up
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
	got, err := f.evidence.encode()
	check(t, err)
	for _, head := range []uint64{400, 402, 900, 1302} { // behind milestones, between and at them
		e, leave, err := s.past(t.Context(), ours, head)
		check(t, err)
		if e.Last.Sequence != head {
			t.Errorf("%d, want %d", e.Last.Sequence, head)
		}
		leave()
		if e, err = s.loadBefore(t.Context(), ours, head); err != nil || head > 401 && e == nil {
			t.Errorf("no milestone before %d: %v", head, err)
		}
	}
	// What was gathered up to the very end, and not proven, is not believed, as of
	// whichever entry.
	for _, to := range []uint64{0, 400} {
		f.unproven = true
		if err := s.catchUp(t.Context(), f, to); !errors.Is(err, errUnfinished) {
			t.Errorf("up to %d: %v", to, err)
		}
		check(t, s.catchUp(t.Context(), f, 0))
	}
	if again, err := f.evidence.encode(); err != nil || !bytes.Equal(again, got) {
		t.Error("other evidence", err)
	}
	leave()
}

func TestInterruptedFoldsComeToTheSame(t *testing.T) {
	for _, tell := range []func(*story) *story{(*story).good, (*story).bad} {
		s, straight := pure(t)
		tell(s)
		e := newEvidence()
		s = &story{clock: start, versions: make(map[string]int)}
		s.record = func(event audit.Event) {
			check(t, e.add(entryOf(event, s.clock, uint64(e.Count)+1)))
			b, err := e.encode()
			check(t, err)
			e, err = decodeEvidence(b)
			check(t, err)
		}
		tell(s)
		a, err := straight.encode()
		check(t, err)
		b, err := e.encode()
		check(t, err)
		if !bytes.Equal(a, b) {
			t.Errorf("interrupted:\n%s\nstraight:\n%s", b, a)
		}
	}
}

func TestFoldTakesOneTenantsEntriesInOrder(t *testing.T) {
	read := audit.Event{Type: audit.AuditRead, Principal: owner}
	other := read
	other.Principal.Tenant = theirs
	for name, entries := range map[string][]*audit.Entry{
		"not from the first": {entryOf(read, start, 2)},
		"with a gap":         {entryOf(read, start, 1), entryOf(read, start, 3)},
		"the same again":     {entryOf(read, start, 1), entryOf(read, start, 1)},
		"another tenant's":   {entryOf(read, start, 1), entryOf(other, start, 2)},
	} {
		if _, err := Derive(catalogues(t)[SOC2], sequence(entries), 0); fault.Of(err) != fault.Invalid {
			t.Errorf("%s: %v", name, err)
		}
	}
	one := []*audit.Entry{entryOf(read, start, 1)}
	for _, head := range []uint64{9, 11} {
		if _, err := Derive(catalogues(t)[SOC2], sequence(one), head); fault.Of(err) != fault.NotFound {
			t.Errorf("head %d: %v", head, err)
		}
	}
	if _, err := Derive(catalogues(t)[SOC2], sequence(nil), 0); fault.Of(err) != fault.NotFound {
		t.Error(err)
	}
}

func TestFoldsAreBounded(t *testing.T) {
	w := newWorld(t)
	for i := range 3 * maxFolds {
		_, leave, err := w.service.enter(t.Context(), authz.TenantID(fmt.Sprint("ten_", i)))
		check(t, err)
		leave()
		leave()
	}
	if n := len(w.service.folds.all); n != maxFolds {
		t.Errorf("%d folds", n)
	}
	_, leave, err := w.service.enter(t.Context(), ours)
	check(t, err)
	defer leave()
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := w.service.enter(ended, ours); fault.Of(err) != fault.Unavailable {
		t.Error(err)
	}
}
