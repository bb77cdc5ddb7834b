package audit

import (
	"errors"
	"math"
	"testing"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// A log whose tail was cut finds out from its own checkpoint, without an anchor. It continues when
// the loss is accepted.
func TestALogThatIsBehindItsOwnCheckpointIsRefused(t *testing.T) {
	for name, sizes := range map[string][3]int{
		"within a tile":              {20, 16, 21},
		"across tiles and a block":   {900, 300, 901},
		"to the edge of a tile":      {700, 512, 701},
		"to one below of an edge":    {700, 511, 701},
		"of the first block alone":   {300, 2, 301},
		"one entry":                  {9, 9, 10},
		"all that a tenant ever did": {30, 1, 31},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			f.fill(sizes[0])
			before := f.follow()
			f.cutTail(uint64(sizes[1]))
			a := anchoredAt(f)
			a.refused(uint64(sizes[1])+1, uint64(sizes[2]))
			if _, err := f.log.Follow(t.Context()); err == nil {
				t.Error("the follower goes on")
			}
			p, err := f.log.Verify(t.Context())
			if err != nil || p.Status != ProofBroken || p.Broken.Sequence != uint64(sizes[1])+1 {
				t.Errorf("the live proof: %+v, %v", p, err)
			}
			if r := a.accept(); r.LostTo != before.Sequence || r.Epoch != 2 {
				t.Errorf("%+v", r)
			}
			if err := f.log.Ready(t.Context()); err != nil {
				t.Error(err)
			}
			if p, err := f.log.Verify(t.Context()); err != nil || p.Status != ProofVerified {
				t.Errorf("the live proof of what is accepted: %+v, %v", p, err)
			}
			if _, err := a.verify(); err != nil {
				t.Error("before the tree follows:", err)
			}
			a.fill(5)
			if c := f.follow(); c.Epoch != 2 || c.Size != int64(sizes[1])+6 {
				t.Errorf("%+v", c)
			}
			f.followsTo(int64(sizes[1]) + 6)
			f.restart()
			anchoredAt(f).goesOn()
			if _, err := f.log.ProveInclusion(t.Context(), principal(tenantA), before.Sequence+2, 0); err != nil && !errors.Is(err, fault.NotFound) {
				t.Error(err)
			}
		})
	}
}

// The follower finds out, too, if nothing else has looked.
func TestTheFollowerRefusesALogBehindItsOwnCheckpoint(t *testing.T) {
	f := newFixture(t)
	f.fill(20)
	f.follow()
	f.cutTail(15)
	if _, err := f.log.Follow(t.Context()); !errors.Is(err, errDamagedLog) {
		t.Error(err)
	}
	var lost *RollbackError
	if !errors.As(f.log.HaltedBy(), &lost) || lost.LostFrom != 16 || lost.LostTo != 21 {
		t.Fatal(f.log.HaltedBy())
	}
	if _, err := f.log.Follow(t.Context()); !errors.Is(err, fault.Unavailable) {
		t.Error(err)
	}
	if err := f.log.Record(t.Context(), Event{Type: AuditRead, Outcome: Success, Principal: principal(tenantA)}); !errors.Is(err, fault.Unavailable) {
		t.Error("an entry was written:", err)
	}
	anchoredAt(f).accept()
	f.follow()
	f.followsTo(16)
}

// Writing other entries in place of the removed ones does not help an attacker.
func TestALogThatLeavesItsOwnCheckpointIsRefused(t *testing.T) {
	f := newFixture(t)
	f.fill(300)
	f.follow()
	f.cutTail(270)
	f.fill(100) // as by a release that did not check
	f.restart()
	a := anchoredAt(f)
	a.refused(0, 301)
	if p, err := f.log.Verify(t.Context()); err != nil || p.Status != ProofBroken {
		t.Errorf("the live proof: %+v, %v", p, err)
	}
	if r := a.accept(); r.LostFrom != 371 || r.LostTo != 370 || r.Sequence != 371 {
		t.Errorf("%+v", r)
	}
	f.follow()
	f.followsTo(371)
	f.restart()
	anchoredAt(f).goesOn()
}

// If both an anchor and the database know of a loss, the larger loss counts, and one acceptance
// covers both.
func TestTheDatabaseAndAPlaceKnowOfALoss(t *testing.T) {
	for name, ahead := range map[string]bool{"the place knows less": false, "the place knows more": true} {
		t.Run(name, func(t *testing.T) {
			f, place := newFixture(t), &shelf{name: "place"}
			a := anchoredAt(f, place)
			a.fill(19)
			a.keep() // checkpoint at 20, head at 21
			kept := f.copied()
			if ahead {
				a.fill(10)
				a.keep()
			} else {
				f.fill(3)
				f.follow()
				kept = f.copied()
			}
			g := f.opened(kept)
			g.follow()
			g.cutTail(15)
			b := anchoredAt(g, place)
			to := uint64(24)
			if ahead {
				to = 31
			}
			b.refused(16, to)
			if r := b.accept(); r.LostTo != to {
				t.Errorf("%+v", r)
			}
			b.fill(2)
			b.keep()
			b.keep()
			if err := b.log.HaltedBy(); err != nil {
				t.Error(err)
			}
			b.goesOn()
		})
	}
}

// Forged rows of epochs change nothing that is signed, and an acceptance removes them.
func TestForgedEpochsAreNoEpochs(t *testing.T) {
	for name, row := range map[string]struct{ key, value []byte }{
		"at the next entry":  {epochKey(7), epoch{7, 11, 10}.encode()},
		"above the head":     {epochKey(2), epoch{2, 500, 10}.encode()},
		"at an entry":        {epochKey(2), epoch{2, 5, 4}.encode()},
		"the first":          {epochKey(1), epoch{1, 1, 0}.encode()},
		"backwards":          {epochKey(3), epoch{3, 0, 4}.encode()},
		"of no size":         {epochKey(3), epoch{3, 9, 0}.encode()},
		"too large":          {epochKey(3), epoch{3, math.MaxUint64, 4}.encode()},
		"the last there is":  {epochKey(math.MaxUint64), epoch{math.MaxUint64, 11, 10}.encode()},
		"cut short":          {epochKey(2), make([]byte, 15)},
		"under another key":  {append(epochKey(2), 0), make([]byte, 16)},
		"between two epochs": {epochKey(2), epoch{2, 31, 12}.encode()},
	} {
		t.Run(name, func(t *testing.T) {
			f, place := newFixture(t), &shelf{name: "place"}
			a := anchoredAt(f, place)
			a.fill(9)
			a.keep()
			g := f.opened(f.copied())
			if err := g.store.Update(t.Context(), func(tx store.Tx) error { return tx.Put(row.key, row.value) }); err != nil {
				t.Fatal(err)
			}
			b := anchoredAt(g, place)
			if err := b.keeper.Check(t.Context()); err != nil {
				t.Fatal(err)
			}
			b.fill(1)
			if c := b.follow(); c.Epoch != 1 {
				t.Errorf("it was signed: %+v", c)
			}
			b.keep()
			b.keep()
			if err := b.log.HaltedBy(); err != nil {
				t.Error(err)
			}
			if broken, ok := IsBroken(func() error { _, err := b.verify(); return err }()); !ok {
				t.Error("the row is not reported:", broken)
			}
			if _, err := b.log.ProveInclusion(t.Context(), principal(tenantA), 3, 0); err != nil && !errors.Is(err, fault.NotFound) {
				t.Error(err)
			}
			if r := b.rollBack(12, 40); r.Epoch != 2 || r.LostTo != 40 {
				t.Errorf("%+v", r)
			}
			b.goesOn()
			if epochs := b.epochs(); len(epochs) != 2 || epochs[1].number != 2 {
				t.Error(epochs)
			}
		})
	}
}

// An acceptance without its epoch row is reported.
func TestAnEpochWithoutItsRowIsDamage(t *testing.T) {
	f := newFixture(t)
	f.fill(9)
	f.follow()
	f.rollBack(10, 10) // skips no sequence
	if err := f.store.Update(t.Context(), func(tx store.Tx) error { return tx.Delete(epochKey(2)) }); err != nil {
		t.Fatal(err)
	}
	f.fill(1)
	if _, err := f.log.Follow(t.Context()); !errors.Is(err, errDamagedLog) {
		t.Error(err)
	}
}

// A forged epoch row does not accept a loss.
func TestAForgedEpochAcceptsNothing(t *testing.T) {
	f := newFixture(t)
	f.fill(9)
	f.behind(RollbackError{LostFrom: 11, LostTo: 20, Epoch: 1, Place: "a test"})
	if err := f.store.Update(t.Context(), func(tx store.Tx) error { return tx.Put(epochKey(9), epoch{9, 21, 10}.encode()) }); err != nil {
		t.Fatal(err)
	}
	if r, err := f.log.AcceptRollback(t.Context(), admin(), "because"); err != nil || r.Epoch != 2 || r.Sequence != 21 {
		t.Error(r, err)
	}
}

// Damage of derived rows is no loss of entries. It stops the follower, but not the log.
func TestDamagedRowsAreNoLoss(t *testing.T) {
	for name, change := range map[string]func(tx store.Tx) error{
		"an epoch's": func(tx store.Tx) error { return tx.Delete(epochKey(2)) },
		"a tile":     func(tx store.Tx) error { return tx.Put(tileKey(0, 0), make([]byte, 32)) },
	} {
		f := newFixture(t)
		f.fill(9)
		f.rollBack(10, 20)
		f.fill(3)
		f.follow()
		if err := f.store.Update(t.Context(), change); err != nil {
			t.Fatal(err)
		}
		f.fill(1)
		if _, err := f.log.Follow(t.Context()); !errors.Is(err, errDamagedLog) {
			t.Errorf("%s: %v", name, err)
		}
		if err := errors.Join(anchoredAt(f).keeper.Check(t.Context()), f.log.Ready(t.Context())); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if name == "an epoch's" {
			f.behind(RollbackError{LostFrom: 26, LostTo: 40, Epoch: 2, Place: "a test"})
			if _, err := f.log.AcceptRollback(t.Context(), admin(), "because"); !errors.Is(err, errDamagedLog) {
				t.Error("an epoch begins whose size is not known:", err)
			}
		}
	}
}
