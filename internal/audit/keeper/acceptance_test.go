package keeper

import (
	"context"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/test/audittest"
)

// Another replica accepts a loss at any moment of a check that finds the loss in the database and
// in a place, which knows less or more than the database. The next check ends the halt, without
// another visit to the place.
func TestAnAcceptanceMayCrossAnyLook(t *testing.T) {
	for name, ahead := range map[string]bool{"the place knows less": false, "the place knows more": true} {
		t.Run(name, func(t *testing.T) {
			for at := int64(1); ; at++ {
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
