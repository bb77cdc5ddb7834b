package keeper

import (
	"context"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/audittest"
)

// Two processes archive at once. Each removes only what it has read back itself, even if the other
// has archived more by then.
func TestWhatAnotherArchivesIsNotRemovedForIt(t *testing.T) {
	f := audittest.NewFixture(t)
	a, _ := f.Folder()
	f.Old()
	f.Follow()
	other := f.Another(f.Store)
	theirs := &Cutter{Log: other.Log, Reader: other.Reader, Archive: a}
	// The first segment of c is archived, and its entries are still there.
	f.Log.Chain.Store = &failing{Store: f.Store, at: 2}
	c := &Cutter{Log: f.Log.Log, Reader: f.Log.Reader, Archive: a, Keep: audittest.Keep, most: 20}
	if _, err := c.Run(t.Context()); err == nil {
		t.Fatal("it did not fail")
	}
	f.Log.Chain.Store = f.Store
	first := f.Segments()[0]
	newest, found, err := theirs.leftOver(t.Context())
	if err != nil || !found || newest != first {
		t.Fatal(newest, found, err)
	}
	// The other process has read the segment back. Before it removes the entries, c archives
	// another segment.
	f.Log.Chain.Store = &failing{Store: f.Store, at: 4} // Updates: removal of the first segment, checkpoint, cut, removal of the second
	if _, err := c.Run(t.Context()); err == nil {
		t.Fatal("it did not fail")
	}
	f.Log.Chain.Store = f.Store
	if n := len(f.Segments()); n != 2 {
		t.Fatalf("%d segments", n)
	}
	if err := theirs.removeArchived(t.Context(), newest.To); err != nil {
		t.Fatal(err)
	}
	if n := len(f.RowsOf(store.Range{From: audit.EntryKey(first.To + 1), To: audit.EntryKey(f.Segments()[1].To + 1)})); n == 0 {
		t.Error("entries were removed on the word of another process")
	}
	if _, err := c.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	f.Clean()
}

// inside lets another process act while one reads an anchor.
type inside struct {
	Anchor
	do func()
}

func (p *inside) Load(ctx context.Context) ([]byte, error) {
	note, err := p.Anchor.Load(ctx)
	if do := p.do; do != nil {
		p.do = nil
		do()
	}
	return note, err
}

// If two replicas find an anchor empty at the same time, one of them starts it.
func TestAPlaceIsBegunOnce(t *testing.T) {
	f, place := audittest.NewFixture(t), &shelf{name: "place"}
	f.Follow()
	other := f.Another(f.Store)
	second := NewAnchorKeeper(other.Log, other.Guard, []Anchor{&seat{shelf: place}}, AnchorOptions{Logger: quiet(), Now: f.Now})
	a := anchoredAt(f, &inside{Anchor: &seat{shelf: place}, do: func() { second.visit(t.Context(), second.anchors[0], writeFirst) }})
	a.keeper.visit(t.Context(), a.keeper.anchors[0], writeFirst)
	a.checkBegun(0, "place 1")
	a.checkStates(AnchorOK)
	if n := len(place.saved); n != 1 {
		t.Errorf("%d writes", n)
	}
}
