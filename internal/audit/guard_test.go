package audit

import (
	"context"
	"fmt"
	"reflect"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
)

func TestAStrangerIsRecordedOnceAMinute(t *testing.T) {
	r := minuteLimit{most: maxStrangers}
	now := time.Date(2026, 11, 21, 10, 0, 5, 0, time.UTC)
	count := func(group, source string) (n int) {
		for range 100 {
			if r.first(group, Source(source), now) {
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
	for i := range 10 * maxStrangers {
		if r.first("a", fmt.Sprint("source ", i), now) {
			recorded++
		}
	}
	if recorded != maxStrangers {
		t.Errorf("%d recorded in a minute, however many the sources", recorded)
	}
	if count("b", "192.0.2.9") != 1 {
		t.Error("many sources of one type hide another")
	}
}

func TestPrincipalsOverTheirLimitAreAllRecorded(t *testing.T) {
	var r minuteLimit
	now := time.Date(2026, 11, 21, 10, 0, 5, 0, time.UTC)
	for i := range 10 * maxStrangers {
		if !r.first("a", fmt.Sprint("principal ", i), now) {
			t.Fatal("principal", i, "has no entry")
		}
	}
	if r.first("a", "principal 1", now) {
		t.Error("not once per minute")
	}
}

func TestWhatIsRepeatedIsRecordedOnceAMinuteAndNeverNot(t *testing.T) {
	f := newFixture(t)
	event := Event{
		Type: ManifestChecked, Outcome: Success, Principal: principal(tenantA), Resource: Resource{Type: ManifestResource},
		Attributes: map[string]string{"verdict": "accepted"},
	}
	record := func(ctx context.Context, e Event, want uint64) {
		t.Helper()
		before, _ := f.progress()
		if err := f.log.guard.RecordOncePerMinute(ctx, e); (err == nil) != (ctx.Err() == nil) {
			t.Error(err)
		}
		if after, _ := f.progress(); after-before != want {
			t.Errorf("%d entries of %+v, want %d", after-before, e, want)
		}
	}
	ended, end := context.WithCancel(t.Context())
	end()
	record(ended, event, 0)
	record(t.Context(), event, 1) // the event before it could not be recorded
	record(t.Context(), event, 0)
	for _, change := range []func(*Event){
		func(e *Event) { e.Principal.Tenant = tenantB },
		func(e *Event) { e.Principal.ID = "other" },
		func(e *Event) { e.Principal.Pod = "other" },
		func(e *Event) { e.Outcome = Denied },
		func(e *Event) { e.Attributes = map[string]string{"verdict": "malformed"} },
	} {
		other := event
		change(&other)
		record(t.Context(), other, 1)
		record(t.Context(), other, 0)
	}
	f.advance(time.Minute)
	record(t.Context(), event, 1)
}

func TestAnAttemptThatCouldNotBeRecordedIsTheNextTime(t *testing.T) {
	f := newFixture(t)
	attempt := func(ctx context.Context, want uint64) {
		t.Helper()
		before, _ := f.progress()
		if err := f.log.guard.RecordAttemptOncePerMinute(ctx, principal(tenantA), authz.ListCredentials, Denied, string(authz.MissingScope)); (err == nil) != (ctx.Err() == nil) {
			t.Error(err)
		}
		if after, _ := f.progress(); after-before != want {
			t.Errorf("%d entries, want %d", after-before, want)
		}
	}
	ended, end := context.WithCancel(t.Context())
	end()
	attempt(ended, 0)
	attempt(t.Context(), 1)
	attempt(t.Context(), 0)
}

// Whoever holds a log could accept a rollback without a permission and without a refusal in the log.
func TestOnlyAGuardAcceptsARollback(t *testing.T) {
	if _, ok := reflect.TypeFor[*Log]().MethodByName("AcceptRollback"); ok {
		t.Error("Log exports AcceptRollback, which checks no permission")
	}
}
