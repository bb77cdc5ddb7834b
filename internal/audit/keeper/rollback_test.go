package keeper

import (
	"bytes"
	"context"
	"errors"
	"math"
	"strings"
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

// Another replica accepts a loss at any moment of a check that finds the loss in the database and
// in a place, which knows less or more than the database. The next check ends the halt, without
// another visit to the place.
func TestAnAcceptanceMayCrossAnyLook(t *testing.T) {
	for name, ahead := range map[string]bool{"the place knows less": false, "the place knows more": true} {
		t.Run(name, func(t *testing.T) {
			for at := int64(1); ; at += int64(audittest.Stride(4)) {
				f, place := audittest.NewFixture(t), &shelf{name: "place"}
				a := anchoredAt(f, place)
				a.Fill(19)
				a.keep() // checkpoint 20; the entry about it is 21
				if f.Fill(3); ahead {
					a.keep()
				}
				f.Follow()
				g := f.Opened(f.Copied())
				g.CutTail(15)
				if ahead {
					row := g.RowsOf(audit.KeyRange(audit.CheckpointKey))[string(audit.CheckpointKey)]
					c, err := audit.ParseCheckpoint(row, f.Log.Signer.Public())
					if err != nil || c.Sequence < 24 {
						t.Fatal(c, err)
					}
				}
				other := g.Another(g.Store)
				NewAnchorKeeper(other.Log, other.Guard, []Anchor{place}, AnchorOptions{Logger: quiet(), Now: g.Now})
				b := anchoredAt(g, place)
				accepted := false
				s := &audittest.Between{Store: g.Store, At: at, Do: func() error {
					_, err := other.AcceptRollback(context.Background(), rollbackAdmin, "a test")
					accepted = true
					return err
				}}
				g.Log.Chain.Store = s
				b.keeper.visit(t.Context(), b.keeper.anchors[0], lookOnly)
				b.keeper.checkDatabase(t.Context())
				g.Log.Chain.Store = g.Store
				if !accepted {
					break
				}
				if _, err := g.Log.Detector.CheckForRollback(t.Context()); err != nil {
					t.Fatal(err)
				}
				if err := g.Log.HaltedBy(); err != nil {
					t.Errorf("accepted before look %d: %v", at, err)
				}
			}
		})
	}
}

// An acceptance that names the place with the newest checkpoint covers places with older ones, also
// for a replica that checks them later.
func TestAReplicaThatLooksLaterKnowsWhatWasAccepted(t *testing.T) {
	replicas := audittest.NewReplicas(t, 2)
	a, b := replicas[0], replicas[1]
	older := a.Read()
	early, late := &shelf{name: "early"}, &shelf{name: "late"}
	for _, s := range []*shelf{early, late} {
		for range 5 {
			a.Append(audit.AuditRead, audittest.TenantA)
		}
		if _, err := a.Log.Follow(t.Context()); err != nil {
			t.Fatal(err)
		}
		s.put(newestOf(t, a.Log))
	}
	a.Put(older)
	stranger := a.Replica(t, a.Log.Signer) // writes other entries with the same sequences
	for range 20 {
		stranger.Append(audit.AuditRead, audittest.TenantA)
	}
	NewAnchorKeeper(a.Log.Log, a.Log.Guard, []Anchor{early, late}, AnchorOptions{Logger: quiet()})
	if r, err := a.Log.AcceptRollback(t.Context(), audittest.Admin(), "a test"); err != nil || r.LostTo != r.LostFrom-1 {
		t.Fatal(r, err)
	}
	k := NewAnchorKeeper(b.Log.Log, b.Log.Guard, []Anchor{early, late}, AnchorOptions{Logger: quiet()})
	if err := k.Check(t.Context()); err != nil {
		t.Error(err)
	}
	b.Append(audit.AuditRead, audittest.TenantA)
	b.Verified(t)
}

func TestAnOlderDatabaseWritesNothingUntilTheLossIsAccepted(t *testing.T) {
	f, place := audittest.NewFixture(t), &shelf{name: "place"}
	a := anchoredAt(f, place)
	a.Fill(8)
	a.keep() // begins the place, with an entry
	backup := a.Copied()
	a.Fill(7)
	a.keep()
	kept := place.kept()

	b := anchoredAt(f.Opened(backup), place)
	b.refused(11, 17)
	b.keep()
	b.checkStates(AnchorRollback)
	if !bytes.Equal(place.kept(), kept) {
		t.Error("the anchor that shows the loss is written over")
	}
	if said := b.said.String(); strings.Count(said, "level=ERROR") != 1 || !strings.Contains(said, "lost_from=11") || !strings.Contains(said, "lost_to=17") || !strings.Contains(said, "the place") {
		t.Errorf("it is said:\n%s", said)
	}
	// Neither an older checkpoint of this log in the place nor an empty place ends the halt.
	for _, note := range [][]byte{nil, newestOf(t, b.Log)} {
		place.put(note)
		b.refused(11, 17)
	}
	place.put(kept)

	accepted := b.accept()
	if accepted.Epoch != 2 || accepted.LostFrom != 11 || accepted.LostTo != 17 || accepted.Sequence != 18 {
		t.Errorf("%+v", accepted)
	}
	// The process ends before the anchor is written again.
	anchoredAt(f.Opened(b.Copied()), place).goesOn()
	b.goesOn()
	b.keep()
	b.checkStates(AnchorOK)
	if c, err := audit.ParseCheckpoint(place.kept(), f.Log.Signer.Public()); err != nil || c.Epoch != 2 || c.Sequence < 18 {
		t.Errorf("%+v is kept, %v", c, err)
	}

	// Now the first database lacks entries.
	a = anchoredAt(f.Opened(f.Copied()), place)
	a.refused(18, 21)
	if r := a.accept(); r.Epoch != 3 {
		t.Errorf("%+v", r)
	}
	a.goesOn()
}

// While the place cannot be reached, the older database grows past the anchor.
func TestAForkIsFoundWhenTheAnchorIsReachedAgain(t *testing.T) {
	f, place := audittest.NewFixture(t), &shelf{name: "place"}
	a := anchoredAt(f, place)
	a.Fill(8)
	a.keep() // begins the place, with an entry
	backup := a.Copied()
	a.Fill(7)
	a.keep()
	kept := place.kept()

	place.err = fault.New(fault.Unavailable, "not now")
	b := anchoredAt(f.Opened(backup), place)
	b.goesOn()
	b.Fill(20)
	b.keep()
	b.checkStates(AnchorUnreachable)
	place.err = nil
	b.keep()
	b.checkStates(AnchorRollback)
	b.refused(0, 17)
	if !bytes.Equal(place.kept(), kept) {
		t.Error("the anchor that shows the fork is written over")
	}
	if r := b.accept(); r.Epoch != 2 || r.LostFrom != r.LostTo+1 {
		t.Errorf("%+v", r)
	}
	anchoredAt(f.Opened(b.Copied()), place).goesOn()
	b.goesOn()
	b.keep()
	b.checkStates(AnchorOK)

	// The first database is in an earlier epoch than the anchor, so it is halted although it has
	// more entries.
	a.Fill(100)
	anchoredAt(f.Opened(a.Copied()), place).refused(0, b.keeper.Status()[0].Sequence)
}

// The holder of the key may rewrite the log from some entry on. The anchor knows the original
// entry.
func TestARewrittenLogIsAFork(t *testing.T) {
	f, place := audittest.NewFixture(t), &shelf{name: "place"}
	f.Fill(9)
	backup := f.Copied()
	f.Fill(5)
	anchoredAt(f, place).keep()
	g := f.Opened(backup)
	g.Fill(50)
	anchoredAt(g, place).refused(0, 15)

	// An attacker gains nothing by making that entry unreadable or by claiming that it is archived.
	for _, change := range []func(store.Tx) error{
		func(tx store.Tx) error { return tx.Put(audit.EntryKey(15), []byte{1}) },
		func(tx store.Tx) error { return tx.Delete(audit.EntryKey(15)) },
	} {
		h := f.Opened(g.Copied())
		if err := h.Store.Update(t.Context(), change); err != nil {
			t.Fatal(err)
		}
		anchoredAt(h, place).refused(0, 15)
	}
}

// The row of an epoch is not signed. The entry that begins the epoch is.
func TestAnEpochThatNobodyAcceptedIsNone(t *testing.T) {
	f, place := audittest.NewFixture(t), &shelf{name: "place"}
	a := anchoredAt(f, place)
	a.Fill(8)
	a.keep() // begins the place, with an entry
	backup := a.Copied()
	a.Fill(7)
	a.keep()
	later := f.Copied()
	for name, row := range map[string][]byte{
		"above the head":        audit.Epoch{Number: 2, First: 18, Size: 10}.Encode(),
		"at another entry":      audit.Epoch{Number: 2, First: 9, Size: 8}.Encode(),
		"of no epoch":           {1},
		"with a signed head of": audit.Epoch{Number: 2, First: 18, Size: 10}.Encode(),
	} {
		g := f.Opened(audittest.CopyOf(t, backup))
		err := g.Store.Update(t.Context(), func(tx store.Tx) error {
			if name == "with a signed head of" { // an attacker may add it to an older database
				err := tx.Put(audit.CheckpointKey, audittest.SignedNote(t, f, audit.Checkpoint{ChainID: "chain_test", Epoch: 2, Size: 12, Sequence: 20, Time: f.Now()}))
				if err != nil {
					return err
				}
			}
			return tx.Put(audit.EpochKey(2), row)
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Log(name)
		to := uint64(17)
		if name == "with a signed head of" {
			to = 20 // the database's own checkpoint shows the loss
		}
		anchoredAt(g, place).refused(11, to)
	}
	anchoredAt(f.Opened(later), place).goesOn()
}

// Entries in the archive are not lost: the tree contains them.
func TestArchivedEntriesAreNoLoss(t *testing.T) {
	f, place := audittest.NewFixture(t), &shelf{name: "place"}
	a := anchoredAt(f, place)
	a.Fill(400)
	a.keep() // with an entry
	a.Fill(299)
	a.Follow()
	entry, err := f.Log.CheckpointAt(t.Context(), 401)
	if err != nil {
		t.Fatal(err)
	}
	var base *audit.Base
	cut := func(f *audittest.Fixture, to uint64) {
		t.Helper()
		v := verify.NewVerifier(verify.Options{PublicKey: f.Log.Signer.Public(), Base: base})
		err := v.AddRange(t.Context(), f.Store, store.Range{From: audit.EntryKey(v.Next()), To: audit.EntryKey(to + 1)})
		if err != nil {
			t.Fatal(err)
		}
		if base, err = v.Base(); err != nil {
			t.Fatal(err)
		}
		row := f.SignFormerBase(base)
		err = f.Store.Update(t.Context(), func(tx store.Tx) error {
			errs := []error{tx.Put(audit.BaseKey, row)}
			for s := uint64(1); s <= to; s++ {
				errs = append(errs, tx.Delete(audit.EntryKey(s)))
			}
			return errors.Join(errs...)
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	cut(f, 450)
	if err := anchoredAt(f.Opened(f.Copied()), place).keeper.Check(t.Context()); err != nil {
		t.Error(err)
	}
	// The entry that accepts a rollback may be archived, too.
	backup := f.Copied()
	a.Fill(50)
	a.keep()
	b := anchoredAt(f.Opened(backup), place)
	b.refused(702, 751)
	b.accept()
	b.Fill(20)
	b.Follow()
	cut(b.Fixture, 752)
	if err := anchoredAt(f.Opened(b.Copied()), place).keeper.Check(t.Context()); err != nil {
		t.Error(err)
	}
	// The leaf in the tree decides, and not the absence of the entry.
	for name, change := range map[string]func(*audit.Checkpoint){
		"as it was":     func(*audit.Checkpoint) {},
		"another entry": func(c *audit.Checkpoint) { c.Hash[0] ^= 1 },
		"another tree":  func(c *audit.Checkpoint) { c.Root[0] ^= 1 },
		"other tiles":   func(*audit.Checkpoint) {},
	} {
		c, g := entry, f.Opened(f.Copied())
		change(&c)
		if name == "other tiles" {
			err := g.Store.Update(t.Context(), func(tx store.Tx) error {
				row, err := tx.Get(audit.TileKey(0, 1))
				if err != nil {
					return err
				}
				row = bytes.Clone(row)
				row[0] ^= 1
				return tx.Put(audit.TileKey(0, 1), row)
			})
			if err != nil {
				t.Fatal(err)
			}
		}
		b := anchoredAt(g, &shelf{name: "place", note: audittest.SignedNote(t, f, c)})
		if err := b.keeper.Check(t.Context()); (err == nil) != (name == "as it was") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// The entry is the same, but the tree over the entries before it differs.
func TestAnotherTreeIsAFork(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Fill(9)
	c := f.Follow()
	c.Root[0] ^= 1
	f.Fill(9)
	f.Follow()
	anchoredAt(f, &shelf{name: "place", note: audittest.SignedNote(t, f, c)}).refused(0, 10)
}

// The place with the newest checkpoint decides, also when it becomes reachable later than others.
func TestThePlaceThatKnowsMostDecides(t *testing.T) {
	f := audittest.NewFixture(t)
	early, late, away := &shelf{name: "early"}, &shelf{name: "late"}, &shelf{name: "away"}
	a := anchoredAt(f, early)
	a.Fill(4)
	backup := a.Copied()
	a.Fill(5)
	a.keep() // with an entry
	a.Fill(4)
	anchoredAt(f, late).keep()
	a.Fill(4)
	anchoredAt(f, away).keep()
	away.err = fault.New(fault.Unavailable, "not now")

	b := anchoredAt(f.Opened(backup), early, late, away)
	b.refused(6, 15)
	b.checkStates(AnchorRollback, AnchorRollback, AnchorUnreachable)
	b.accept()
	b.goesOn()
	b.keep()
	b.checkStates(AnchorOK, AnchorOK, AnchorUnreachable)
	away.err = nil
	b.keep()
	b.checkStates(AnchorOK, AnchorOK, AnchorRollback)
	b.refused(0, 20)
	if r := b.accept(); r.Epoch != 3 {
		t.Errorf("%+v", r)
	}
	b.goesOn()
	b.keep()
	b.checkStates(AnchorOK, AnchorOK, AnchorOK)
}

// The acceptance names one of the checkpoints. It covers the other one, because both were known.
func TestAForkThatTwoPlacesKnowIsAcceptedOnce(t *testing.T) {
	f := audittest.NewFixture(t)
	early, late := &shelf{name: "early"}, &shelf{name: "late"}
	f.Fill(4)
	backup := f.Copied()
	f.Fill(5)
	anchoredAt(f, early).keep() // with an entry
	f.Fill(4)
	anchoredAt(f, late).keep()
	g := f.Opened(backup)
	g.Fill(40)
	b := anchoredAt(g, early, late)
	b.refused(0, 15)
	b.accept()
	b.goesOn()
	b.keep()
	b.checkStates(AnchorOK, AnchorOK)
}

// An acceptance may be committed while a check reports the loss that it accepts.
func TestAnAcceptanceIsNotTakenBackByALateLook(t *testing.T) {
	f, place := audittest.NewFixture(t), &shelf{name: "place"}
	a := anchoredAt(f, place)
	a.Fill(4)
	backup := a.Copied()
	a.Fill(5)
	a.keep()
	b := anchoredAt(f.Opened(backup), place)
	b.refused(6, 10)
	told := b.Log.HaltedBy()
	b.accept()
	b.Log.Halt(told) // a check that read the database earlier
	b.keep()
	if err := b.Log.HaltedBy(); err != nil {
		t.Errorf("it is refused still: %v", err)
	}
	b.goesOn()
}
