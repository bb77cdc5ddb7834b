package audit

import (
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// history is three days of one tenant, an entry each hour, of two types by a
// user, an API key and another user, and beside it that of another tenant.
func history(t *testing.T) (f *fixture, began time.Time, all []Event) {
	f = newFixture(t)
	began = f.now()
	actors := []authz.Principal{{Kind: authz.User, ID: "usr_a"}, {Kind: authz.APIKey, ID: "key_a"}, {Kind: authz.User, ID: "usr_b"}}
	for hour := range 72 {
		e := Event{Type: CredentialUnsealed, Outcome: Success, Principal: actors[hour%3], Resource: Resource{ID: fmt.Sprint(hour), Type: CredentialResource}}
		if hour%2 == 0 {
			e.Type = UserSignedIn
		}
		if hour%5 == 0 {
			e.Outcome = Denied // denied and failed entries are found like others
		}
		e.Principal.Tenant = tenantB
		f.record(e)
		e.Principal.Tenant = tenantA
		f.record(e)
		all = append(all, e)
		f.advance(time.Hour)
	}
	return f, began, all
}

// pages reads all pages of a query and returns the hours found.
func (f *fixture) pages(q Query) (hours []string) {
	f.t.Helper()
	asking := principal(tenantA)
	asking.ID = "key_asking"
	for n := 0; ; n++ {
		entries, next, err := f.log.Query(f.t.Context(), asking, q)
		if err != nil {
			f.t.Fatal(err)
		}
		for _, e := range entries {
			if e.TenantID != string(tenantA) {
				f.t.Fatal("another tenant's entry")
			}
			if e.EventType != AuditRead {
				hours = append(hours, e.Resource.ID)
			}
		}
		if len(entries) > q.Limit || n > 1000 {
			f.t.Fatal("a page too large, or no end")
		}
		if q.Cursor = next; next == "" {
			return hours
		}
	}
}

// Every combination of filters, in pages of every size, is what a loop over all
// entries would select.
func TestFiltersCombine(t *testing.T) {
	f, began, all := history(t)
	at := func(hour int, off time.Duration) time.Time {
		return began.Add(time.Duration(hour)*time.Hour + off).Truncate(time.Microsecond)
	}
	ranges := []struct {
		name     string
		from, to time.Time
	}{
		{name: "all of it"},
		{name: "from", from: at(60, 0)},
		{name: "to", to: at(12, 0)},
		{name: "a day", from: at(24, 0), to: at(48, -time.Microsecond)},
		{name: "the bounds of an hour", from: at(30, 0), to: at(30, 0)},
		{name: "between two hours", from: at(30, time.Microsecond), to: at(31, -time.Microsecond)},
		{name: "before it all", to: at(0, -time.Microsecond)},
		{name: "after it all", from: at(1000, 0)},
		{name: "the wrong way round", from: at(40, 0), to: at(30, 0)},
	}
	for _, r := range ranges {
		for _, eventType := range []string{"", string(CredentialUnsealed), string(UserSignedIn), "NO_SUCH"} {
			for _, user := range []string{"", "usr_a", "usr_b", "key_a", "usr_"} {
				var want []string
				for hour, e := range slices.Backward(all) {
					when := at(hour, 0)
					if (eventType == "" || eventType == string(e.Type)) && (user == "" || user == e.Principal.ID) &&
						!when.Before(r.from) && (r.to.IsZero() || !when.After(r.to)) {
						want = append(want, e.Resource.ID)
					}
				}
				for _, limit := range []int{2, 7, 100} {
					got := f.pages(Query{EventType: eventType, UserID: user, From: r.from, To: r.to, Limit: limit})
					if !slices.Equal(got, want) {
						t.Errorf("%s, type %q, user %q, pages of %d: %v, want %v", r.name, eventType, user, limit, got, want)
					}
				}
			}
		}
	}
	if _, err := f.verify(); err != nil {
		t.Fatal(err)
	}
}

// A page that was begun goes on where it stopped, whatever is written meanwhile.
func TestACursorHoldsItsPlace(t *testing.T) {
	f, began, all := history(t)
	q := Query{Limit: 10, To: began.Add(71 * time.Hour)}
	first, next, err := f.log.Query(t.Context(), principal(tenantA), q)
	if err != nil || len(first) != 10 || first[0].Resource.ID != "71" {
		t.Fatal(first, err)
	}
	f.fill(5)
	f.record(all[0])
	q.Cursor = next
	second, _, err := f.log.Query(t.Context(), principal(tenantA), q)
	if err != nil || len(second) != 10 || second[0].Resource.ID != "61" {
		t.Fatal(second, err)
	}
	q.From = began.Add(62 * time.Hour) // the cursor is already behind it
	if rest, next, err := f.log.Query(t.Context(), principal(tenantA), q); err != nil || len(rest) != 0 || next != "" {
		t.Fatal(rest, next, err)
	}
}

func TestForeignCursorsAreRefusedOrShowNothingForeign(t *testing.T) {
	f, _, _ := history(t)
	for _, cursor := range []string{"x", "AAAA", "AAAAAAAAAAE=", "AAAAAAAAAAAA"} {
		if _, _, err := f.log.Query(t.Context(), principal(tenantA), Query{Limit: 1, Cursor: cursor}); fault.Of(err) != fault.Invalid {
			t.Errorf("%q: %v", cursor, err)
		}
	}
	for _, position := range [][]byte{{0, 0, 0, 0, 0, 0, 0, 0}, {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}} {
		entries, _, err := f.log.Query(t.Context(), principal(tenantA), Query{Limit: 100, Cursor: base64.RawURLEncoding.EncodeToString(position)})
		if err != nil {
			t.Error(err)
		}
		for _, e := range entries {
			if e.TenantID != string(tenantA) {
				t.Error("another tenant's entry")
			}
		}
	}
}

// A range that ended long ago is found without a look at all that came after.
func TestAnEndedRangeIsSoughtAndNotScanned(t *testing.T) {
	f, began, _ := history(t)
	counting := &countingReader{}
	err := f.store.View(t.Context(), func(r store.Reader) error {
		counting.Reader = r
		q := Query{To: began.Add(2 * time.Hour), Limit: 100}
		rng, err := q.until(counting, string(tenantA), store.Prefix(tenantPrefix(string(tenantA))))
		if err != nil {
			return err
		}
		rng.Reverse = true
		entries, _, err := q.run(r, tenantA, rng)
		if len(entries) != 3 {
			t.Errorf("%d entries", len(entries))
		}
		return err
	})
	if err != nil || counting.gets > 7 { // log2 of 72
		t.Error(counting.gets, err)
	}
}

type countingReader struct {
	store.Reader
	gets int
}

func (r *countingReader) Get(key []byte) ([]byte, error) {
	r.gets++
	return r.Reader.Get(key)
}

func TestTheLastChangeOfACredentialIsNamed(t *testing.T) {
	f := newFixture(t)
	const id = "cred_x"
	f.sealed(tenantA, id, "1", "d")
	for _, what := range []EventType{CredentialRotated, CredentialReencrypted} {
		f.record(Event{Type: what, Outcome: Success, Principal: principal(tenantA), Resource: Resource{ID: id, Type: CredentialResource}})
		f.record(Event{Type: CredentialUnsealed, Outcome: Success, Principal: principal(tenantA), Resource: Resource{ID: id, Type: CredentialResource}})
		f.record(Event{Type: CredentialSealed, Outcome: Denied, Principal: principal(tenantA), Resource: Resource{ID: id, Type: CredentialResource}})
		err := f.store.View(t.Context(), func(r store.Reader) error {
			got, err := LastChange(r, tenantA, id)
			if got != what {
				t.Errorf("%s, want %s", got, what)
			}
			if _, err := LastChange(r, tenantB, id); err == nil {
				t.Error("another tenant's credential has a change")
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

func TestVisitShowsEntriesOfTypesThatHold(t *testing.T) {
	f := newFixture(t)
	for i := range 3 {
		id := fmt.Sprint("key-", i)
		f.record(Event{Type: SealingKeyCreated, Outcome: Success, Principal: principal(tenantA), Resource: Resource{Type: SealingKeyResource, ID: id}})
		f.record(Event{Type: SealingKeyRetired, Outcome: Denied, Principal: principal(tenantA), Resource: Resource{Type: SealingKeyResource, ID: id}})
		f.record(Event{Type: SealingKeyCreated, Outcome: Success, Principal: principal(tenantB), Resource: Resource{Type: SealingKeyResource, ID: "other"}})
		f.record(Event{Type: SealingKeyListed, Outcome: Success, Principal: principal(tenantA), Resource: Resource{Type: SealingKeyResource}})
	}
	visit := func() (seen string, err error) {
		err = f.log.Visit(t.Context(), tenantA, func(e *Entry) {
			seen += fmt.Sprint(e.EventType, " ", e.Outcome, " ", e.Resource.ID, "; ")
		}, SealingKeyCreated, SealingKeyRetired)
		return seen, err
	}
	want := ""
	for i := range 3 {
		want += fmt.Sprintf("SEALING_KEY_CREATED success key-%d; SEALING_KEY_RETIRED denied key-%[1]d; ", i)
	}
	if seen, err := visit(); err != nil || seen != want {
		t.Errorf("%s %v", seen, err)
	}
	// Entry 3 is of SEALING_KEY_RETIRED, and 6 another tenant's.
	for name, change := range map[string]func(row []byte) []byte{
		"changed":  func(row []byte) []byte { return bytes.Replace(row, []byte("denied"), []byte("success"), 1) },
		"unsigned": func(row []byte) []byte { row[1] ^= 1; return row },
		"missing":  func([]byte) []byte { return nil },
		"another's": func([]byte) (row []byte) {
			_ = f.store.View(t.Context(), func(r store.Reader) error {
				b, err := r.Get(entryKey(2))
				row = bytes.Clone(b)
				return err
			})
			return row
		},
	} {
		err := f.store.Update(t.Context(), func(tx store.Tx) error {
			kept, err := tx.Get(entryKey(3))
			if err != nil {
				return err
			}
			kept = bytes.Clone(kept)
			if err := tx.Put(entryKey(3), change(bytes.Clone(kept))); err != nil {
				return err
			}
			return tx.Put([]byte("kept"), kept)
		})
		if err != nil {
			t.Fatal(err)
		}
		if seen, err := visit(); !errors.Is(err, fault.Internal) {
			t.Errorf("%s: %s %v", name, seen, err)
		}
		err = f.store.Update(t.Context(), func(tx store.Tx) error {
			kept, err := tx.Get([]byte("kept"))
			return errors.Join(err, tx.Put(entryKey(3), bytes.Clone(kept)))
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}
