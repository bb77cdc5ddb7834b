package assessor

import (
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/test/story"
)

func TestAssessAllDoesWhatIsDue(t *testing.T) {
	w := newWorld(t)
	w.Began()
	other := story.Owner
	other.Tenant = story.Theirs
	w.Tell(audit.AuditRead, audit.Success, other, audit.Resource{Type: audit.LogResource})
	fixed := w.GoodState()
	w.state = func() compliance.State { return fixed }
	began := make(map[authz.TenantID]int)
	for _, tenant := range []authz.TenantID{story.Ours, story.Theirs, authz.SystemTenant} {
		began[tenant] = len(w.entries(tenant))
	}
	made := func(step string, want int) {
		t.Helper()
		check(t, w.service.AssessAll(t.Context()))
		check(t, w.newService().AssessAll(t.Context())) // after a restart
		w.After(time.Minute)
		check(t, w.service.AssessAll(t.Context()))
		for tenant, n := range began {
			if got := len(w.entries(tenant)) - n; got != want {
				t.Errorf("%s: %s has %d entries of it, want %d", step, tenant, got, want)
			}
		}
	}
	made("at the beginning", 0)
	w.After(24*time.Hour - 3*time.Minute)
	made("when it is almost a day old", 0)
	w.After(time.Minute)
	made("when it is a day old", 2) // 2026-03-03, at nine
	w.After(14 * time.Hour)
	made("late on that day", 2)
	w.After(time.Hour)
	made("soon after midnight", 4)
	fixed.Transport = compliance.TransportPlaintext
	made("after a change of the state on that day", 4)
	w.Days(3)
	made("three days later", 6)
	last := w.entries(story.Ours)[began[story.Ours]+5]
	if last.EventType != audit.ComplianceScored || len(last.Attributes) != 1+len(compliance.Frameworks()) {
		t.Errorf("%+v", last)
	}
	for _, f := range compliance.Frameworks() {
		days, err := w.service.History(t.Context(), story.Owner, f)
		check(t, err)
		a := w.score(f, uintOf(t, last.Attributes["head"]))
		if len(days) != 3 || days[2] != (compliance.DayScore{Date: "2026-03-07", Score: *a.Score, Sequence: a.Head.Sequence}) || last.Attributes[string(f)] != fmt.Sprintf("%.1f", *a.Score) {
			t.Errorf("%s: %v, want %v of %v", f, days, *a.Score, last.Attributes)
		}
	}
}

func uintOf(t *testing.T, s string) uint64 {
	t.Helper()
	n, err := strconv.ParseUint(s, 10, 64)
	check(t, err)
	return n
}

// Requests for a score do not replace the daily scores: neither a refused nor a successful one
// keeps the deployment from recording its own.
func TestRequestsDoNotStandForTheDay(t *testing.T) {
	w := newWorld(t)
	w.Began().Days(2)
	nobody := story.Owner
	nobody.Scopes = nil
	if _, err := w.service.Score(t.Context(), nobody, compliance.SOC2, 0); fault.Of(err) != fault.Forbidden {
		t.Error(err)
	}
	w.score(compliance.SOC2, 0)
	before := len(w.entries(story.Ours))
	check(t, w.service.AssessAll(t.Context()))
	if got := len(w.entries(story.Ours)) - before; got != 1 { // the state of the day is recorded already
		t.Errorf("%d entries", got)
	}
	days, err := w.service.History(t.Context(), story.Owner, compliance.GDPR)
	check(t, err)
	if len(days) != 1 {
		t.Error(days)
	}
}

// recorded returns how often the deployment has recorded a tenant's scores.
func (w *world) recorded(tenant authz.TenantID) (n int) {
	w.t.Helper()
	for _, e := range w.entries(tenant) {
		if e.EventType == audit.ComplianceScored {
			n++
		}
	}
	return n
}

// A tenant whose evidence is in use is assessed later, and does not delay the others.
func TestAssessAllPassesOverWhoIsBusy(t *testing.T) {
	for _, busy := range []authz.TenantID{story.Ours, story.Theirs, authz.SystemTenant} {
		w := newWorld(t)
		w.Began()
		other := story.Owner
		other.Tenant = story.Theirs
		w.Tell(audit.AuditRead, audit.Success, other, audit.Resource{Type: audit.LogResource}).Days(2)
		_, leave, err := w.service.evidence.acquire(t.Context(), busy)
		check(t, err)
		w.service.patience = 300 * time.Millisecond
		for range 100 { // a slow machine needs more than one call
			check(t, w.service.AssessAll(t.Context()))
			if w.recorded(story.Ours)+w.recorded(story.Theirs)+w.recorded(authz.SystemTenant) >= 2 {
				break
			}
		}
		for _, tenant := range []authz.TenantID{story.Ours, story.Theirs, authz.SystemTenant} {
			if want := map[bool]int{true: 0, false: 1}[tenant == busy]; w.recorded(tenant) != want {
				t.Errorf("%s is busy, and %s has %d scores, want %d", busy, tenant, w.recorded(tenant), want)
			}
		}
		leave()
		w.service.patience = defaultPatience
		check(t, w.service.AssessAll(t.Context()))
		if w.recorded(busy) != 1 {
			t.Errorf("%s is not busy any more, and has %d scores", busy, w.recorded(busy))
		}
	}
}

// A call ends without an error when its time is up. The next call continues with the remaining
// tenants.
func TestAssessAllHasABudget(t *testing.T) {
	w := newWorld(t)
	w.Began()
	other := story.Owner
	other.Tenant = story.Theirs
	w.Tell(audit.AuditRead, audit.Success, other, audit.Resource{Type: audit.LogResource}).Days(2)
	tenants, err := reader.New(w.log, guard.New(w.log)).Tenants(t.Context())
	check(t, err)
	_, leave, err := w.service.evidence.acquire(t.Context(), tenants[0])
	check(t, err)
	defer leave()
	w.service.assessTime, w.service.patience = 200*time.Millisecond, time.Hour
	check(t, w.service.AssessAll(t.Context())) // the whole call waits for the first tenant
	for _, tenant := range tenants {
		if n := w.recorded(tenant); n != 0 {
			t.Errorf("%s has %d scores: there was time", tenant, n)
		}
	}
	for range 100 { // one call is enough, except on a slow machine
		check(t, w.service.AssessAll(t.Context()))
		if w.recorded(tenants[1])+w.recorded(tenants[2]) == 2 {
			return
		}
	}
	t.Error("the first one keeps the others from their turn")
}
