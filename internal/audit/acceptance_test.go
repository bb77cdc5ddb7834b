package audit

import (
	"context"
	"testing"
)

// Another replica accepts a loss at any moment of a check that finds the loss in the database and
// in a place, which knows less or more than the database. The next check ends the halt, without
// another visit to the place.
func TestAnAcceptanceMayCrossAnyLook(t *testing.T) {
	for name, ahead := range map[string]bool{"the place knows less": false, "the place knows more": true} {
		t.Run(name, func(t *testing.T) {
			for at := int64(1); ; at++ {
				f, place := newFixture(t), &shelf{name: "place"}
				a := anchoredAt(f, place)
				a.fill(19)
				a.keep() // checkpoint 20; the entry about it is 21
				if f.fill(3); ahead {
					a.keep()
				}
				f.follow()
				g := f.opened(f.copied())
				g.cutTail(15)
				if ahead {
					row := g.rowsOf(only(checkpointKey))[string(checkpointKey)]
					c, err := ParseCheckpoint(row, f.log.signer.Public())
					if err != nil || c.Sequence < 24 {
						t.Fatal(c, err)
					}
				}
				other := g.another(g.store)
				NewAnchorKeeper(other.Log, other.guard, []AnchorPlace{place}, AnchorOptions{Logger: quiet(), Now: g.now})
				b := anchoredAt(g, place)
				accepted := false
				s := &between{Store: g.store, at: at, do: func() error {
					_, err := other.AcceptRollback(context.Background(), rollbackAdmin, "a test")
					accepted = true
					return err
				}}
				g.log.chain.store = s
				b.keeper.visit(t.Context(), b.keeper.places[0], lookOnly)
				b.keeper.checkDatabase(t.Context())
				g.log.chain.store = g.store
				if !accepted {
					break
				}
				if _, err := g.log.rollbacks.checkForRollback(t.Context()); err != nil {
					t.Fatal(err)
				}
				if err := g.log.HaltedBy(); err != nil {
					t.Errorf("accepted before look %d: %v", at, err)
				}
			}
		})
	}
}

// An acceptance that names the place with the newest checkpoint covers places with older ones, also
// for a replica that checks them later.
func TestAReplicaThatLooksLaterKnowsWhatWasAccepted(t *testing.T) {
	replicas := newReplicas(t, 2)
	a, b := replicas[0], replicas[1]
	older := a.read()
	early, late := &shelf{name: "early"}, &shelf{name: "late"}
	for _, s := range []*shelf{early, late} {
		for range 5 {
			a.append(AuditRead, tenantA)
		}
		if _, err := a.log.Follow(t.Context()); err != nil {
			t.Fatal(err)
		}
		s.put(newestOf(t, a.log))
	}
	a.put(older)
	stranger := a.replica(t, a.log.signer) // writes other entries with the same sequences
	for range 20 {
		stranger.append(AuditRead, tenantA)
	}
	NewAnchorKeeper(a.log.Log, a.log.guard, []AnchorPlace{early, late}, AnchorOptions{Logger: quiet()})
	if r, err := a.log.AcceptRollback(t.Context(), admin(), "a test"); err != nil || r.LostTo != r.LostFrom-1 {
		t.Fatal(r, err)
	}
	k := NewAnchorKeeper(b.log.Log, b.log.guard, []AnchorPlace{early, late}, AnchorOptions{Logger: quiet()})
	if err := k.Check(t.Context()); err != nil {
		t.Error(err)
	}
	b.append(AuditRead, tenantA)
	b.verified(t)
}
