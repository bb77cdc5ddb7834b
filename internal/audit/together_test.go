package audit

import (
	"context"
	"testing"

	"github.com/latticekeep/latticekeep/internal/store"
)

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
	a := anchoredAt(f, &inside{AnchorPlace: &seat{shelf: place}, do: func() { second.visit(t.Context(), second.places[0], writeFirst) }})
	a.keeper.visit(t.Context(), a.keeper.places[0], writeFirst)
	a.checkBegun(0, "place 1")
	a.checkStates(PlaceOK)
	if n := len(place.saved); n != 1 {
		t.Errorf("%d writes", n)
	}
}
