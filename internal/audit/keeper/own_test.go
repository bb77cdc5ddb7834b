package keeper

import (
	"errors"
	"math"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/audittest"
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
			f := audittest.NewFixture(t)
			f.Fill(sizes[0])
			before := f.Follow()
			f.CutTail(uint64(sizes[1]))
			a := anchoredAt(f)
			a.refused(uint64(sizes[1])+1, uint64(sizes[2]))
			if _, err := f.Log.Follow(t.Context()); err == nil {
				t.Error("the follower goes on")
			}
			p, err := f.Log.Verify(t.Context())
			if err != nil || p.Status != verify.ProofBroken || p.Broken.Sequence != uint64(sizes[1])+1 {
				t.Errorf("the live proof: %+v, %v", p, err)
			}
			if r := a.accept(); r.LostTo != before.Sequence || r.Epoch != 2 {
				t.Errorf("%+v", r)
			}
			if err := f.Log.Ready(t.Context()); err != nil {
				t.Error(err)
			}
			if p, err := f.Log.Verify(t.Context()); err != nil || p.Status != verify.ProofVerified {
				t.Errorf("the live proof of what is accepted: %+v, %v", p, err)
			}
			if _, err := a.Verify(); err != nil {
				t.Error("before the tree follows:", err)
			}
			a.Fill(5)
			if c := f.Follow(); c.Epoch != 2 || c.Size != int64(sizes[1])+6 {
				t.Errorf("%+v", c)
			}
			f.FollowsTo(int64(sizes[1]) + 6)
			f.Restart()
			anchoredAt(f).goesOn()
			if _, err := f.Log.ProveInclusion(t.Context(), audittest.Principal(audittest.TenantA), before.Sequence+2, 0); err != nil && !errors.Is(err, fault.NotFound) {
				t.Error(err)
			}
		})
	}
}

// The follower finds out, too, if nothing else has looked.
func TestTheFollowerRefusesALogBehindItsOwnCheckpoint(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Fill(20)
	f.Follow()
	f.CutTail(15)
	if _, err := f.Log.Follow(t.Context()); !errors.Is(err, audit.ErrDamagedLog) {
		t.Error(err)
	}
	var lost *audit.RollbackError
	if !errors.As(f.Log.HaltedBy(), &lost) || lost.LostFrom != 16 || lost.LostTo != 21 {
		t.Fatal(f.Log.HaltedBy())
	}
	if _, err := f.Log.Follow(t.Context()); !errors.Is(err, fault.Unavailable) {
		t.Error(err)
	}
	if err := f.Log.Record(t.Context(), audit.Event{Type: audit.AuditRead, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantA)}); !errors.Is(err, fault.Unavailable) {
		t.Error("an entry was written:", err)
	}
	anchoredAt(f).accept()
	f.Follow()
	f.FollowsTo(16)
}

// Writing other entries in place of the removed ones does not help an attacker.
func TestALogThatLeavesItsOwnCheckpointIsRefused(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Fill(300)
	f.Follow()
	f.CutTail(270)
	f.Fill(100) // as by a release that did not check
	f.Restart()
	a := anchoredAt(f)
	a.refused(0, 301)
	if p, err := f.Log.Verify(t.Context()); err != nil || p.Status != verify.ProofBroken {
		t.Errorf("the live proof: %+v, %v", p, err)
	}
	if r := a.accept(); r.LostFrom != 371 || r.LostTo != 370 || r.Sequence != 371 {
		t.Errorf("%+v", r)
	}
	f.Follow()
	f.FollowsTo(371)
	f.Restart()
	anchoredAt(f).goesOn()
}

// If both an anchor and the database know of a loss, the larger loss counts, and one acceptance
// covers both.
func TestTheDatabaseAndAPlaceKnowOfALoss(t *testing.T) {
	for name, ahead := range map[string]bool{"the place knows less": false, "the place knows more": true} {
		t.Run(name, func(t *testing.T) {
			f, place := audittest.NewFixture(t), &shelf{name: "place"}
			a := anchoredAt(f, place)
			a.Fill(19)
			a.keep() // checkpoint at 20, head at 21
			kept := f.Copied()
			if ahead {
				a.Fill(10)
				a.keep()
			} else {
				f.Fill(3)
				f.Follow()
				kept = f.Copied()
			}
			g := f.Opened(kept)
			g.Follow()
			g.CutTail(15)
			b := anchoredAt(g, place)
			to := uint64(24)
			if ahead {
				to = 31
			}
			b.refused(16, to)
			if r := b.accept(); r.LostTo != to {
				t.Errorf("%+v", r)
			}
			b.Fill(2)
			b.keep()
			b.keep()
			if err := b.Log.HaltedBy(); err != nil {
				t.Error(err)
			}
			b.goesOn()
		})
	}
}

// Forged rows of epochs change nothing that is signed, and an acceptance removes them.
func TestForgedEpochsAreNoEpochs(t *testing.T) {
	for name, row := range map[string]struct{ key, value []byte }{
		"at the next entry":  {audit.EpochKey(7), audit.Epoch{Number: 7, First: 11, Size: 10}.Encode()},
		"above the head":     {audit.EpochKey(2), audit.Epoch{Number: 2, First: 500, Size: 10}.Encode()},
		"at an entry":        {audit.EpochKey(2), audit.Epoch{Number: 2, First: 5, Size: 4}.Encode()},
		"the first":          {audit.EpochKey(1), audit.Epoch{Number: 1, First: 1, Size: 0}.Encode()},
		"backwards":          {audit.EpochKey(3), audit.Epoch{Number: 3, First: 0, Size: 4}.Encode()},
		"of no size":         {audit.EpochKey(3), audit.Epoch{Number: 3, First: 9, Size: 0}.Encode()},
		"too large":          {audit.EpochKey(3), audit.Epoch{Number: 3, First: math.MaxUint64, Size: 4}.Encode()},
		"the last there is":  {audit.EpochKey(math.MaxUint64), audit.Epoch{Number: math.MaxUint64, First: 11, Size: 10}.Encode()},
		"cut short":          {audit.EpochKey(2), make([]byte, 15)},
		"under another key":  {append(audit.EpochKey(2), 0), make([]byte, 16)},
		"between two epochs": {audit.EpochKey(2), audit.Epoch{Number: 2, First: 31, Size: 12}.Encode()},
	} {
		t.Run(name, func(t *testing.T) {
			f, place := audittest.NewFixture(t), &shelf{name: "place"}
			a := anchoredAt(f, place)
			a.Fill(9)
			a.keep()
			g := f.Opened(f.Copied())
			if err := g.Store.Update(t.Context(), func(tx store.Tx) error { return tx.Put(row.key, row.value) }); err != nil {
				t.Fatal(err)
			}
			b := anchoredAt(g, place)
			if err := b.keeper.Check(t.Context()); err != nil {
				t.Fatal(err)
			}
			b.Fill(1)
			if c := b.Follow(); c.Epoch != 1 {
				t.Errorf("it was signed: %+v", c)
			}
			b.keep()
			b.keep()
			if err := b.Log.HaltedBy(); err != nil {
				t.Error(err)
			}
			if broken, ok := audit.IsBroken(func() error { _, err := b.Verify(); return err }()); !ok {
				t.Error("the row is not reported:", broken)
			}
			if _, err := b.Log.ProveInclusion(t.Context(), audittest.Principal(audittest.TenantA), 3, 0); err != nil && !errors.Is(err, fault.NotFound) {
				t.Error(err)
			}
			if r := b.RollBack(12, 40); r.Epoch != 2 || r.LostTo != 40 {
				t.Errorf("%+v", r)
			}
			b.goesOn()
			if epochs := b.Epochs(); len(epochs) != 2 || epochs[1].Number != 2 {
				t.Error(epochs)
			}
		})
	}
}

// An acceptance without its epoch row is reported.
func TestAnEpochWithoutItsRowIsDamage(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Fill(9)
	f.Follow()
	f.RollBack(10, 10) // skips no sequence
	if err := f.Store.Update(t.Context(), func(tx store.Tx) error { return tx.Delete(audit.EpochKey(2)) }); err != nil {
		t.Fatal(err)
	}
	f.Fill(1)
	if _, err := f.Log.Follow(t.Context()); !errors.Is(err, audit.ErrDamagedLog) {
		t.Error(err)
	}
}

// A forged epoch row does not accept a loss.
func TestAForgedEpochAcceptsNothing(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Fill(9)
	f.Log.Halt(&audit.RollbackError{LostFrom: 11, LostTo: 20, Epoch: 1, Source: "a test"})
	if err := f.Store.Update(t.Context(), func(tx store.Tx) error {
		return tx.Put(audit.EpochKey(9), audit.Epoch{Number: 9, First: 21, Size: 10}.Encode())
	}); err != nil {
		t.Fatal(err)
	}
	if r, err := f.Log.AcceptRollback(t.Context(), audittest.Admin(), "because"); err != nil || r.Epoch != 2 || r.Sequence != 21 {
		t.Error(r, err)
	}
}

// Damage of derived rows is no loss of entries. It stops the follower, but not the log.
func TestDamagedRowsAreNoLoss(t *testing.T) {
	for name, change := range map[string]func(tx store.Tx) error{
		"an epoch's": func(tx store.Tx) error { return tx.Delete(audit.EpochKey(2)) },
		"a tile":     func(tx store.Tx) error { return tx.Put(audit.TileKey(0, 0), make([]byte, 32)) },
	} {
		f := audittest.NewFixture(t)
		f.Fill(9)
		f.RollBack(10, 20)
		f.Fill(3)
		f.Follow()
		if err := f.Store.Update(t.Context(), change); err != nil {
			t.Fatal(err)
		}
		f.Fill(1)
		if _, err := f.Log.Follow(t.Context()); !errors.Is(err, audit.ErrDamagedLog) {
			t.Errorf("%s: %v", name, err)
		}
		if err := errors.Join(anchoredAt(f).keeper.Check(t.Context()), f.Log.Ready(t.Context())); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if name == "an epoch's" {
			f.Log.Halt(&audit.RollbackError{LostFrom: 26, LostTo: 40, Epoch: 2, Source: "a test"})
			if _, err := f.Log.AcceptRollback(t.Context(), audittest.Admin(), "because"); !errors.Is(err, audit.ErrDamagedLog) {
				t.Error("an epoch begins whose size is not known:", err)
			}
		}
	}
}
