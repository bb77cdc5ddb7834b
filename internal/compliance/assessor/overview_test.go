package assessor

import (
	"slices"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/test/story"
)

// An overview has the scores that are given one by one, the failing controls of the tenant, and the denials
// of each day. It writes nothing.
func TestAnOverviewAgreesWithTheScores(t *testing.T) {
	w := newWorld(t)
	w.Began().Registered()
	w.Renewed("cred_a", 30)
	w.After(50 * compliance.Day)
	denied := audit.Event{Type: audit.CredentialUnsealed, Outcome: audit.Denied, Principal: story.Client, Resource: audit.Resource{Type: audit.CredentialResource, ID: "cred_a"}}
	for i := range 3 {
		w.Record(denied)
		if i == 0 {
			w.After(2 * compliance.Day)
		}
	}
	want := make(map[compliance.Framework]compliance.Assessment)
	for _, f := range compliance.Frameworks() {
		want[f] = w.score(f, 0)
	}
	before := len(w.entries(story.Owner.Tenant))
	o, err := w.service.Overview(t.Context(), story.Owner, 5)
	check(t, err)
	if n := len(w.entries(story.Owner.Tenant)); n != before {
		t.Errorf("it writes %d entries", n-before)
	}
	if !slices.Equal(o.Denials, []int{0, 0, 1, 0, 2}) || o.Waiting.Denials != 3 {
		t.Errorf("%v, %d wait", o.Denials, o.Waiting.Denials)
	}
	failing := 0
	for i, f := range compliance.Frameworks() {
		a, s, mine := want[f], o.Scores[i], 0
		for _, c := range a.Controls {
			if c.Result == compliance.Fail && slices.ContainsFunc(c.Probes, func(p compliance.ProbeResult) bool {
				return p.Result == compliance.Fail && p.Responsible == compliance.TheTenant
			}) {
				mine++
			}
		}
		if failing += mine; s.Framework != f || s.Score == nil || *s.Score != *a.Score || s.Failing != mine || s.Covered != a.Coverage.Percent || s.Provisional != a.Provisional {
			t.Errorf("%s: %+v, want %v, %d failing", f, s, *a.Score, mine)
		}
	}
	if failing == 0 {
		t.Error("the test has no failing control")
	}
}

// While the chain does not hold, an overview has no score and no failing control.
func TestAnOverviewWithholdsWhatIsNotVerified(t *testing.T) {
	other := story.Owner
	other.Tenant = story.Theirs
	for name, sequence := range map[string]uint64{"an entry of the tenant": 3, "an entry of another one": 2} {
		w := newWorld(t)
		w.Tell(audit.AuditRead, audit.Success, other, audit.Resource{Type: audit.LogResource}).Began().ReadLog().ReadLog()
		w.tamper(sequence)
		o, err := w.service.Overview(t.Context(), story.Owner, 5)
		if (err == nil) != (sequence == 2) {
			t.Errorf("%s: %v", name, err)
		}
		for _, s := range o.Scores {
			if s.Score != nil || s.Failing != 0 {
				t.Errorf("%s: %+v", name, s)
			}
		}
	}
}
