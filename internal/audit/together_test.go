package audit

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/store"
)

// If another process follows and archives the entries that a step is reading, the step does not
// report damage.
func TestAStepThatIsArchivedUnderneathFindsNoDamage(t *testing.T) {
	outrun := 0
	for at := int64(1); ; at++ {
		f := newFixture(t)
		a, _ := f.folder()
		f.old()
		other := f.another(f.store)
		s := &between{Store: f.store, at: at, do: func() error {
			_, err := (&Cutter{Log: other.Log, Reader: other.Reader, Archive: a, Keep: keep, most: 20}).Run(t.Context())
			return err
		}}
		f.log.chain.store = s
		if _, err := f.log.step(t.Context()); errors.Is(err, errOutrun) {
			outrun++
		} else if err != nil {
			t.Errorf("archived before look %d: %v", at, err)
		}
		f.log.chain.store = f.store
		if _, err := f.log.Follow(t.Context()); err != nil {
			t.Errorf("archived before look %d: %v", at, err)
		}
		if s.views.Load() < at {
			break
		}
	}
	if outrun == 0 {
		t.Error("no step was outrun")
	}
}

// Two processes archive at once. Each removes only what it has read back itself, even if the other
// has archived more by then.
func TestWhatAnotherArchivesIsNotRemovedForIt(t *testing.T) {
	f := newFixture(t)
	a, _ := f.folder()
	f.old()
	f.follow()
	other := f.another(f.store)
	theirs := &Cutter{Log: other.Log, Reader: other.Reader, Archive: a}
	// The first segment of c is archived, and its entries are still there.
	f.log.chain.store = &failing{Store: f.store, at: 2}
	c := &Cutter{Log: f.log.Log, Reader: f.log.Reader, Archive: a, Keep: keep, most: 20}
	if _, err := c.Run(t.Context()); err == nil {
		t.Fatal("it did not fail")
	}
	f.log.chain.store = f.store
	first := f.segments()[0]
	newest, found, err := theirs.leftOver(t.Context())
	if err != nil || !found || newest != first {
		t.Fatal(newest, found, err)
	}
	// The other process has read the segment back. Before it removes the entries, c archives
	// another segment.
	f.log.chain.store = &failing{Store: f.store, at: 4} // Updates: removal of the first segment, checkpoint, cut, removal of the second
	if _, err := c.Run(t.Context()); err == nil {
		t.Fatal("it did not fail")
	}
	f.log.chain.store = f.store
	if n := len(f.segments()); n != 2 {
		t.Fatalf("%d segments", n)
	}
	if err := theirs.removeArchived(t.Context(), newest.To); err != nil {
		t.Fatal(err)
	}
	if n := len(f.rowsOf(store.Range{From: entryKey(first.To + 1), To: entryKey(f.segments()[1].To + 1)})); n == 0 {
		t.Error("entries were removed on the word of another process")
	}
	if _, err := c.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	f.clean()
}

// All processes share one row of verified progress: the best of any process. There is none after a
// process has found the log broken.
func TestReplicasKeepWhatIsVerifiedTogether(t *testing.T) {
	f := newFixture(t)
	a, b := f.log, f.another(f.store)
	verify := func(l *parts) {
		t.Helper()
		if p, err := l.Verify(t.Context()); err != nil || p.Status != ProofVerified {
			t.Fatal(p, err)
		}
	}
	keeps := func(l *parts) {
		t.Helper()
		if err := l.keepProgress(t.Context(), 1); err != nil {
			t.Fatal(err)
		}
	}
	row := func() []byte { return f.rowsOf(only(verifiedKey))[string(verifiedKey)] }
	verify(a)
	f.fill(3)
	verify(b)
	keeps(b)
	better := row()
	keeps(a)
	if !bytes.Equal(row(), better) {
		t.Error("what is verified further is written over")
	}
	f.fill(3)
	verify(a)
	f.advance(time.Second)
	a.LiveVerifier.since = f.now()
	keeps(a)
	if bytes.Equal(row(), better) {
		t.Error("what rests on a later pass is not kept")
	}
	b.noteBroken(&Broken{Sequence: 3, Reason: "a test"})
	keeps(b)
	if row() != nil {
		t.Error("what was verified of a broken log is kept")
	}
	f.fill(3)
	verify(a)
	keeps(a)
	if row() != nil {
		t.Error("it is kept on the word of a process that has not looked at all of it since")
	}
	a.LiveVerifier.since = f.now().Add(time.Second)
	keeps(a)
	if row() == nil {
		t.Error("nothing is kept after a later pass")
	}
}

// inside lets another process act while one reads an anchor.
type inside struct {
	AnchorPlace
	do func()
}

func (p *inside) Load(ctx context.Context) ([]byte, error) {
	note, err := p.AnchorPlace.Load(ctx)
	if do := p.do; do != nil {
		p.do = nil
		do()
	}
	return note, err
}

// If two replicas find an anchor empty at the same time, one of them starts it.
func TestAPlaceIsBegunOnce(t *testing.T) {
	f, place := newFixture(t), &shelf{name: "place"}
	f.follow()
	other := f.another(f.store)
	second := NewAnchorKeeper(other.Log, other.guard, []AnchorPlace{&seat{shelf: place}}, AnchorOptions{Logger: quiet(), Now: f.now})
	a := f.anchoredAt(&inside{AnchorPlace: &seat{shelf: place}, do: func() { second.visit(t.Context(), second.places[0], writeFirst) }})
	a.keeper.visit(t.Context(), a.keeper.places[0], writeFirst)
	a.checkBegun(0, "place 1")
	a.checkStates(PlaceOK)
	if n := len(place.saved); n != 1 {
		t.Errorf("%d writes", n)
	}
}
