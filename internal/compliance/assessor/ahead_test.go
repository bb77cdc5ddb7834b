package assessor

import (
	"testing"

	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/test/story"
)

// A visitor of a long log gets an answer at once, and the background gathers. The next one has all of it.
func TestNobodyWaitsForALongLog(t *testing.T) {
	w := newWorld(t)
	w.Began()
	w.many(1000)
	s := w.service.evidence
	s.near = 100
	check(t, s.turns.Acquire(t.Context(), 1)) // the background gets no turn yet
	for range 2 {
		if _, err := w.service.Waiting(t.Context(), story.Owner); fault.Of(err) != fault.Unavailable {
			t.Fatal(err)
		}
		if _, err := w.service.Overview(t.Context(), story.Owner, 5); fault.Of(err) != fault.Unavailable {
			t.Fatal(err)
		}
	}
	if n := s.newest.peek(story.Ours).evidence.Count; n != 0 {
		t.Fatalf("visitors have gathered %d entries", n)
	}
	done, _ := s.ahead.Load(story.Ours)
	s.turns.Release(1)
	<-done.(chan struct{})
	if _, runs := s.ahead.Load(story.Ours); runs {
		t.Error("the background goes on")
	}
	w.many(50) // a visitor reads those
	waiting, err := w.service.Waiting(t.Context(), story.Owner)
	check(t, err)
	if want := w.entries(story.Ours); waiting.To != want[len(want)-1].TenantSequence-1 { // and the visit is an entry
		t.Errorf("it counts up to %d of %d", waiting.To, len(want))
	}
}

// The work of each minute keeps up with the tenants in memory, and with no others.
func TestTheEvidenceOfVisitorsKeepsUp(t *testing.T) {
	w := newWorld(t)
	w.Began().Days(2)
	check(t, w.service.AssessAll(t.Context()))
	visited, unvisited := w.service, w.newService()
	unvisited.agenda.postpone(story.Ours, w.Clock.Add(compliance.Day))
	w.many(100)
	check(t, visited.AssessAll(t.Context()))
	check(t, unvisited.AssessAll(t.Context()))
	if e, all := visited.evidence.newest.peek(story.Ours).evidence, w.entries(story.Ours); e.Last.Sequence != all[len(all)-1].Sequence {
		t.Errorf("it stands at entry %d, the log at %d", e.Last.Sequence, all[len(all)-1].Sequence)
	}
	if unvisited.evidence.newest.peek(story.Ours) != nil {
		t.Error("a tenant that nobody visits is in memory")
	}
}
