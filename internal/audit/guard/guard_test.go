package guard_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/test/audittest"
)

func TestAStrangerIsRecordedOnceAMinute(t *testing.T) {
	r := guard.NewMinuteLimit(guard.MaxStrangers)
	now := time.Date(2026, 11, 21, 10, 0, 5, 0, time.UTC)
	count := func(group, source string) (n int) {
		for range 100 {
			if r.First(group, authz.Source(source), now) {
				n++
			}
		}
		return n
	}
	if count("a", "192.0.2.1") != 1 || count("a", "192.0.2.2") != 1 || count("a", "192.0.2.1") != 0 {
		t.Error("not once per source")
	}
	if count("a", "2001:db8::1") != 1 || count("a", "2001:db8::2") != 0 || count("a", "2001:db8:0:1::1") != 1 {
		t.Error("not once per IPv6 network")
	}
	if count("b", "192.0.2.1") != 1 {
		t.Error("a refusal of one type hides one of another")
	}
	now = now.Add(time.Minute)
	if count("a", "192.0.2.1") != 1 {
		t.Error("not once per minute")
	}
	recorded := 1
	for i := range 10 * guard.MaxStrangers {
		if r.First("a", fmt.Sprint("source ", i), now) {
			recorded++
		}
	}
	if recorded != guard.MaxStrangers {
		t.Errorf("%d recorded in a minute, however many the sources", recorded)
	}
	if count("b", "192.0.2.9") != 1 {
		t.Error("many sources of one type hide another")
	}
}

func TestPrincipalsOverTheirLimitAreAllRecorded(t *testing.T) {
	r := guard.NewMinuteLimit(0)
	now := time.Date(2026, 11, 21, 10, 0, 5, 0, time.UTC)
	for i := range 10 * guard.MaxStrangers {
		if !r.First("a", fmt.Sprint("principal ", i), now) {
			t.Fatal("principal", i, "has no entry")
		}
	}
	if r.First("a", "principal 1", now) {
		t.Error("not once per minute")
	}
}

func TestWhatIsRepeatedIsRecordedOnceAMinuteAndNeverNot(t *testing.T) {
	f := audittest.NewFixture(t)
	event := audit.Event{
		Type: audit.ManifestChecked, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantA), Resource: audit.Resource{Type: audit.ManifestResource},
		Attributes: map[string]string{"verdict": "accepted"},
	}
	record := func(ctx context.Context, e audit.Event, want uint64) {
		t.Helper()
		before, _ := f.Progress()
		if err := f.Log.Guard.RecordOncePerMinute(ctx, e); (err == nil) != (ctx.Err() == nil) {
			t.Error(err)
		}
		if after, _ := f.Progress(); after-before != want {
			t.Errorf("%d entries of %+v, want %d", after-before, e, want)
		}
	}
	ended, end := context.WithCancel(t.Context())
	end()
	record(ended, event, 0)
	record(t.Context(), event, 1) // the event before it could not be recorded
	record(t.Context(), event, 0)
	for _, change := range []func(*audit.Event){
		func(e *audit.Event) { e.Principal.Tenant = audittest.TenantB },
		func(e *audit.Event) { e.Principal.ID = "other" },
		func(e *audit.Event) { e.Principal.Pod = "other" },
		func(e *audit.Event) { e.Outcome = audit.Denied },
		func(e *audit.Event) { e.Attributes = map[string]string{"verdict": "malformed"} },
	} {
		other := event
		change(&other)
		record(t.Context(), other, 1)
		record(t.Context(), other, 0)
	}
	f.Advance(time.Minute)
	record(t.Context(), event, 1)
}

func TestAnAttemptIsRecordedOnceAPeriodAndNeverNot(t *testing.T) {
	for period, record := range map[time.Duration]func(*guard.Guard, context.Context, authz.Principal, authz.Action, audit.Outcome, string) error{
		time.Minute: (*guard.Guard).RecordAttemptOncePerMinute, time.Hour: (*guard.Guard).RecordAttemptOncePerHour,
	} {
		f := audittest.NewFixture(t)
		f.Advance(period - time.Duration(f.Now().UnixNano())%period) // to the beginning of a period
		attempt := func(ctx context.Context, id string, want uint64) {
			t.Helper()
			p := audittest.Principal(audittest.TenantA)
			p.ID = id
			before, _ := f.Progress()
			if err := record(f.Log.Guard, ctx, p, authz.ListCredentials, audit.Denied, string(authz.MissingScope)); (err == nil) != (ctx.Err() == nil) {
				t.Error(err)
			}
			if after, _ := f.Progress(); after-before != want {
				t.Errorf("%s: %d entries, want %d", period, after-before, want)
			}
		}
		ended, end := context.WithCancel(t.Context())
		end()
		attempt(ended, "a", 0)
		attempt(t.Context(), "a", 1) // the attempt before it could not be recorded
		attempt(t.Context(), "b", 1)
		f.Advance(period - 1)
		attempt(t.Context(), "a", 0)
		f.Advance(1)
		attempt(t.Context(), "a", 1)
	}
}

// The log checks the permission itself, so a caller that goes around the guard gains nothing.
func TestTheLogAcceptsNoRollbackWithoutPermission(t *testing.T) {
	f := audittest.NewFixture(t)
	lost := &audit.RollbackError{LostTo: 10, Epoch: 1, Source: "a test"}
	f.Log.Halt(lost)
	if _, err := f.Log.Log.AcceptRollback(t.Context(), audittest.Principal(audittest.TenantA), "because"); !errors.Is(err, fault.Forbidden) {
		t.Errorf("got %v", err)
	}
	if !errors.Is(f.Log.HaltedBy(), lost) {
		t.Error("the halt ended")
	}
}

// A repetition that could not be recorded is not lost, and nobody is answered without an entry.
func TestRepetitionsAreCountedAndNeverLost(t *testing.T) {
	f := audittest.NewFixture(t)
	event := audit.Event{
		Type: audit.CredentialListed, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantA),
		Resource: audit.Resource{Type: audit.CredentialResource, ID: "a"}, Attributes: map[string]string{audit.AttributeVersion: "1"},
	}
	ended, end := context.WithCancel(t.Context())
	end()
	var want []string
	record := func(ctx context.Context, e audit.Event, repeats ...string) {
		t.Helper()
		if err := f.Log.Guard.RecordRepeated(ctx, e); err != nil && ctx.Err() == nil {
			t.Error(err)
		}
		want = append(want, repeats...)
		if got := repeatsOf(f); !slices.Equal(got, want) {
			t.Errorf("%v, want %v", got, want)
		}
	}
	if err := f.Log.Guard.RecordRepeated(ended, event); err == nil {
		t.Error("an answer without an entry")
	}
	record(t.Context(), event, "1")
	record(ended, event) // only counted
	for _, change := range []func(*audit.Event){
		func(e *audit.Event) { e.Principal.Tenant = audittest.TenantB },
		func(e *audit.Event) { e.Principal.ID = "other" },
		func(e *audit.Event) { e.Principal.Pod = "other" },
		func(e *audit.Event) { e.Resource.ID = "b" },
		func(e *audit.Event) { e.Attributes = map[string]string{audit.AttributeVersion: "2"} },
	} {
		other := event
		change(&other)
		record(t.Context(), other, "1")
	}
	f.Advance(time.Hour)
	record(ended, event)            // the entry is not written, and what was counted is kept
	record(t.Context(), event, "2") // itself, and that of the hour before; the failed one had no answer
	record(t.Context(), event)
	f.Advance(time.Hour)
	if err := f.Log.Guard.RecordRepetitions(ended, false); err == nil {
		t.Error("it says nothing of entries that are not written")
	}
	for range 2 { // the second finds nothing
		if err := f.Log.Guard.RecordRepetitions(t.Context(), false); err != nil {
			t.Error(err)
		}
	}
	record(t.Context(), event, "1", "1")
}

// A tenant with very many events leaves room for those of others: its own have an entry each beyond its bound.
func TestNoTenantTakesTheRoomForCounts(t *testing.T) {
	f := audittest.NewFixture(t)
	record := func(tenant authz.TenantID, id string) (entries uint64) {
		t.Helper()
		before, _ := f.Progress()
		err := f.Log.Guard.RecordRepeated(t.Context(), audit.Event{
			Type: audit.CredentialListed, Outcome: audit.Success, Principal: audittest.Principal(tenant),
			Resource: audit.Resource{Type: audit.CredentialResource, ID: id}, Attributes: map[string]string{audit.AttributeVersion: "1"},
		})
		if err != nil {
			t.Fatal(err)
		}
		after, _ := f.Progress()
		return after - before
	}
	for i := range guard.MaxRepeatsOfTenant {
		record(audittest.TenantA, fmt.Sprint(i))
	}
	for range 2 {
		if n := record(audittest.TenantA, "beyond"); n != 1 {
			t.Errorf("%d entries beyond the bound", n)
		}
	}
	if n := record(audittest.TenantA, "0") + record(audittest.TenantB, "a") + record(audittest.TenantB, "a"); n != 1 {
		t.Errorf("%d entries of what is counted", n)
	}
	f.Advance(time.Hour)
	if err := f.Log.Guard.RecordRepetitions(t.Context(), false); err != nil {
		t.Fatal(err)
	}
	if n := record(audittest.TenantA, "beyond") + record(audittest.TenantA, "beyond"); n != 1 {
		t.Errorf("%d entries in the next hour", n)
	}
}

// When a few tenants have filled what there is for all, the others are counted all the same, up to a few events each.
func TestAFewTenantsLeaveRoomForCounts(t *testing.T) {
	r := guard.NewRepeats()
	for tenant := range guard.MaxRepeats / guard.MaxRepeatsOfTenant {
		for i := range guard.MaxRepeatsOfTenant {
			if !r.Add(authz.TenantID(fmt.Sprint("many", tenant)), fmt.Sprint(tenant, i)) {
				t.Fatal("no room for event", i, "of tenant", tenant)
			}
		}
	}
	for i := range 100 {
		if !r.Add("few", fmt.Sprint("few", i)) {
			t.Fatal("no room for event", i, "of a tenant with few")
		}
	}
	if r.Add("few", "beyond") || r.Add("many0", "beyond") {
		t.Error("what is beyond all bounds is kept")
	}
}

// repeatsOf returns how many events the entries stand for, oldest first.
func repeatsOf(f *audittest.Fixture) (all []string) {
	for _, e := range f.Entries() {
		if n, ok := e.Attributes[audit.AttributeRepeats]; ok {
			all = append(all, n)
		}
	}
	return all
}
