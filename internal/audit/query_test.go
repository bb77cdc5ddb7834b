package audit

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// threeDays returns a log of three days. One tenant has an entry each hour, of two types, by a
// user, an API key and another user. Another tenant has entries, too.
func threeDays(t *testing.T) (f *fixture, began time.Time, all []Event) {
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

// For every combination of filters and every page size, a query finds what a loop over all entries
// selects.
func TestFiltersCombine(t *testing.T) {
	f, began, all := threeDays(t)
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

// The next page continues where the previous one ended, whatever is written meanwhile.
func TestACursorHoldsItsPlace(t *testing.T) {
	f, began, all := threeDays(t)
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
	q.From = began.Add(62 * time.Hour) // the cursor is already below it
	if rest, next, err := f.log.Query(t.Context(), principal(tenantA), q); err != nil || len(rest) != 0 || next != "" {
		t.Fatal(rest, next, err)
	}
}

func TestForeignCursorsAreRefusedOrShowNothingForeign(t *testing.T) {
	f, _, _ := threeDays(t)
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

// A query finds a range in the past without reading the entries after or before it.
func TestARangeIsSoughtAndNotScanned(t *testing.T) {
	f, began, _ := threeDays(t)
	counting := &countingReader{}
	err := f.store.View(t.Context(), func(r store.Reader) error {
		counting.Reader = r
		q := Query{From: began.Add(30 * time.Hour).Truncate(time.Microsecond), To: began.Add(32 * time.Hour), Limit: 100}
		low, high, err := q.bounds(f.log.chain, counting, string(tenantA), math.MaxUint64)
		if low != 31 || high != 33 {
			t.Errorf("from %d to %d", low, high)
		}
		return err
	})
	if err != nil || counting.gets > 14 || counting.scans != 2 { // log2 of 72, twice, and the base; both ends
		t.Error(counting.gets, counting.scans, err)
	}
}

type countingReader struct {
	store.Reader
	gets, scans int
}

func (r *countingReader) Scan(rng store.Range, visit func(key, value []byte) bool) error {
	r.scans++
	return r.Reader.Scan(rng, visit)
}

func (r *countingReader) Get(key []byte) ([]byte, error) {
	r.gets++
	return r.Reader.Get(key)
}

// searchPages runs all pages of a query and returns the IDs that it finds.
func searchPages(f *fixture, q Query) (ids []string, pages int) {
	f.t.Helper()
	for {
		err := f.store.View(context.Background(), func(r store.Reader) error {
			before, err := q.before()
			if err != nil {
				return err
			}
			entries, next, err := q.run(f.log.chain, r, string(tenantA), before)
			for _, e := range entries {
				ids = append(ids, e.Resource.ID)
			}
			if len(entries) > q.Limit {
				f.t.Errorf("%d entries on a page of %d", len(entries), q.Limit)
			}
			pages, q.Cursor = pages+1, next
			return err
		})
		if err != nil {
			f.t.Fatal(err)
		}
		if q.Cursor == "" {
			return ids, pages
		}
	}
}

// A query finds what a loop over all entries finds: with all summaries, with some, with none, and
// in a log that is not followed to its end.
func TestSummariesChangeNothingInWhatIsFound(t *testing.T) {
	f := newFixture(t)
	began := f.now().Truncate(time.Microsecond)
	of := func(i int) (EventType, string) {
		eventType, actor := []EventType{UserSignedIn, CredentialUnsealed, KeyListed}[i%3], []string{"usr_a", "usr_b"}[i/3%2]
		switch {
		case i == 700 || i == 1:
			eventType = KeyRotated // rare
		case i%2 == 0 && eventType == KeyListed:
			actor = "usr_even" // never has UserSignedIn
		}
		return eventType, actor
	}
	all := f.crowd(1500, of)
	f.follow()
	all = append(all, f.crowd(700, func(i int) (EventType, string) { return of(i + 1500) })...) // no summaries yet
	check := func(name string) {
		t.Helper()
		for _, eventType := range []EventType{"", UserSignedIn, KeyListed, KeyRotated, "NO_SUCH"} {
			for _, actor := range []string{"", "usr_a", "usr_even", "usr_none"} {
				for _, hours := range [][2]int{{}, {3, 3}, {5, 14}, {0, 2}, {17, 0}, {23, 30}} {
					q := Query{EventType: string(eventType), UserID: actor}
					var want []string
					if hours[0] > 0 {
						q.From = began.Add(time.Duration(hours[0]) * time.Hour)
					}
					if hours[1] > 0 {
						q.To = began.Add(time.Duration(hours[1]) * time.Hour)
					}
					for i, is := range slices.Backward(all) {
						at := i / 100 // hours: a commit has a hundred entries
						if (eventType == "" || string(eventType) == is.EventType) && (actor == "" || actor == is.UserID) &&
							at >= hours[0] && (q.To.IsZero() || at <= hours[1]) {
							want = append(want, fmt.Sprint(i%1500))
						}
					}
					for _, q.Limit = range []int{1000, 37} {
						if got, _ := searchPages(f, q); !slices.Equal(got, want) {
							t.Fatalf("%s, %+v: %d found, want %d", name, q, len(got), len(want))
						}
					}
				}
			}
		}
	}
	check("followed in part")
	f.follow()
	check("all summaries")
	for block := range uint64(8) {
		if block%3 == 1 {
			err := f.store.Update(t.Context(), func(tx store.Tx) error { return tx.Delete(summaryKey(string(tenantA), block)) })
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	check("some summaries")
	f.forget()
	check("no summaries")
	f.follow()
	// The oldest entries are only in the archive: their rows and some summaries are gone.
	err := f.store.Update(t.Context(), func(tx store.Tx) error {
		for n := uint64(1); n <= 300; n++ {
			row, err := readIndexRow(tx, string(tenantA), n)
			if err != nil {
				return err
			}
			if err := errors.Join(tx.Delete(tenantKey(string(tenantA), n)), tx.Delete(entryKey(row.sequence))); err != nil {
				return err
			}
		}
		return tx.Delete(summaryKey(string(tenantA), 0))
	})
	if err != nil {
		t.Fatal(err)
	}
	for i := range 300 {
		all[i] = Query{}
	}
	checkLeft := func() {
		for _, eventType := range []EventType{UserSignedIn, KeyRotated} {
			var want []string
			for i, is := range slices.Backward(all) {
				if string(eventType) == is.EventType {
					want = append(want, fmt.Sprint(i%1500))
				}
			}
			if got, _ := searchPages(f, Query{EventType: string(eventType), Limit: 100}); !slices.Equal(got, want) {
				t.Errorf("after a cut, %s: %d found, want %d", eventType, len(got), len(want))
			}
		}
		if got, _ := searchPages(f, Query{Limit: 100}); len(got) != 1900 {
			t.Errorf("after a cut: %d", len(got))
		}
	}
	checkLeft()
}

// A filter that matches nothing, one that matches rarely, and two frequent ones that never match
// together read summaries, and index rows only of the last block.
func TestAFilterReadsSummariesInPlaceOfRows(t *testing.T) {
	f := newFixture(t)
	f.crowd(256*20+30, func(i int) (EventType, string) {
		if i == 2000 {
			return KeyRotated, "usr_a"
		}
		return []EventType{UserSignedIn, CredentialUnsealed}[i%2], []string{"usr_a", "usr_b"}[i%2]
	})
	f.follow()
	for _, q := range []Query{
		{EventType: "NO_SUCH"},
		{UserID: "usr_none"},
		{EventType: string(KeyRotated)},
		{EventType: string(UserSignedIn), UserID: "usr_b"},
	} {
		q.Limit = 20
		err := f.store.View(t.Context(), func(r store.Reader) error {
			rows := &rowCounter{Reader: r}
			_, next, err := q.run(f.log.chain, rows, string(tenantA), math.MaxUint64)
			if next != "" || rows.index > 30+5 || rows.summaries > 21 { // one more, to find that the last block has none
				t.Errorf("%+v read %d rows of the index and %d summaries, and goes on with %q", q, rows.index, rows.summaries, next)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

// rowCounter counts the rows that are read.
type rowCounter struct {
	store.Reader
	index, summaries int
}

func (r *rowCounter) count(key []byte) {
	switch {
	case bytes.HasPrefix(key, []byte("audit/tenant/")):
		r.index++
	case bytes.HasPrefix(key, []byte("audit/summary/")):
		r.summaries++
	}
}

func (r *rowCounter) Get(key []byte) ([]byte, error) {
	r.count(key)
	return r.Reader.Get(key)
}

func (r *rowCounter) Scan(rng store.Range, visit func(key, value []byte) bool) error {
	return r.Reader.Scan(rng, func(key, value []byte) bool {
		r.count(key)
		return visit(key, value)
	})
}

// A query that would read too much ends its page early, and its cursor continues.
func TestAPageEndsWhenEnoughWasLookedAt(t *testing.T) {
	f := newFixture(t)
	f.crowd(maxLooks+500, func(i int) (EventType, string) {
		if i == 40 {
			return KeyRotated, "usr_a"
		}
		return UserSignedIn, "usr_a"
	})
	q := Query{EventType: string(KeyRotated), Limit: 20}
	if ids, pages := searchPages(f, q); pages != 2 || !slices.Equal(ids, []string{"40"}) {
		t.Errorf("%d pages without summaries: %v", pages, ids)
	}
	f.follow()
	if ids, pages := searchPages(f, q); pages != 1 || !slices.Equal(ids, []string{"40"}) {
		t.Errorf("%d pages with summaries: %v", pages, ids)
	}
}

// A query compares the entries that a summary names with their rows. A summary that names too many
// does not add entries that do not match.
func TestASummaryThatNamesTooMuchShowsNothingMore(t *testing.T) {
	f := newFixture(t)
	f.crowd(300, func(i int) (EventType, string) { return []EventType{UserSignedIn, KeyListed}[i%2], "usr_a" })
	f.follow()
	all := make([]indexRow, blockSize)
	for i := range all {
		all[i].eventType = KeyListed
	}
	if err := f.store.Update(t.Context(), func(tx store.Tx) error { return tx.Put(summaryKey(string(tenantA), 0), summaryOf(all)) }); err != nil {
		t.Fatal(err)
	}
	for _, limit := range []int{10, 1000} {
		if ids, _ := searchPages(f, Query{EventType: string(KeyListed), Limit: limit}); len(ids) != 150 {
			t.Errorf("%d found in pages of %d", len(ids), limit)
		}
	}
}

// If a summary is malformed, or an index row or an entry is missing, the query reports damage and
// returns nothing.
func TestADamagedIndexIsReported(t *testing.T) {
	f := newFixture(t)
	f.crowd(600, func(int) (EventType, string) { return UserSignedIn, "usr_a" })
	f.follow()
	for name, change := range map[string]func(tx store.Tx) error{
		"a summary": func(tx store.Tx) error { return tx.Put(summaryKey(string(tenantA), 1), []byte{9}) },
		"a row":     func(tx store.Tx) error { return tx.Delete(tenantKey(string(tenantA), 300)) },
		"an entry":  func(tx store.Tx) error { return tx.Delete(entryKey(400)) },
	} {
		for _, q := range []Query{{Limit: 600}, {Limit: 600, EventType: string(UserSignedIn)}} {
			if name == "a summary" && q.EventType == "" {
				continue
			}
			undo := errors.New("undo")
			err := f.store.Update(t.Context(), func(tx store.Tx) error {
				if err := change(tx); err != nil {
					return err
				}
				_, _, err := q.run(f.log.chain, tx, string(tenantA), math.MaxUint64)
				if !errors.Is(err, fault.Internal) {
					t.Errorf("%s, %+v: %v", name, q, err)
				}
				return undo
			})
			if !errors.Is(err, undo) {
				t.Fatal(err)
			}
		}
	}
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
		want += fmt.Sprintf("SEALING_KEY_CREATED success key-%d; ", i) // denied events are not shown, but checked like the rest
	}
	if seen, err := visit(); err != nil || seen != want {
		t.Errorf("%s %v", seen, err)
	}
	// Entry 3 has the type SEALING_KEY_RETIRED, and entry 6 belongs to another tenant.
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

// BenchmarkQuery runs queries that are hard to answer on a log of a million entries of one tenant,
// in pages of 100. It reports the 99th percentile of the time: once for the search alone, and once
// with the record of the query, which is a commit. It runs only with go test -bench, because it has
// to write and follow the log first.
func BenchmarkQuery(b *testing.B) {
	const n = 1_000_000
	f := longLog(b, n, tenantA)
	first, last := f.now().Add(-500*time.Second), f.now()
	for _, q := range []struct {
		name string
		Query
	}{
		{"no filter", Query{}},
		{"a frequent type", Query{EventType: string(DataEncrypted)}},
		{"a frequent actor", Query{UserID: "usr_7"}},
		{"a type of each block", Query{EventType: string(CredentialRotated)}},
		{"a rare type", Query{EventType: string(CredentialDeleted)}},
		{"a rare actor", Query{UserID: "usr_rare"}},
		{"a type that was once", Query{EventType: string(KeyRotated)}},
		{"no such type", Query{EventType: string(MemberRemoved)}},
		{"no such actor", Query{UserID: "usr_none"}},
		{"frequent but never together", Query{EventType: string(DataEncrypted), UserID: "usr_1"}},
		{"together", Query{EventType: string(DataEncrypted), UserID: "usr_2"}},
		{"a range", Query{From: first.Add(100 * time.Second), To: first.Add(101 * time.Second)}},
		{"nothing in a range", Query{EventType: string(MemberRemoved), From: first.Add(10 * time.Second), To: last.Add(-10 * time.Second)}},
		{"a range after all", Query{From: last.Add(time.Hour)}},
		{"a range before all", Query{To: first.Add(-time.Hour)}},
		{"the last page", Query{Cursor: cursor(90)}},
		{"behind a cursor, rare", Query{EventType: string(KeyRotated), Cursor: cursor(n - 10_000)}},
	} {
		q.Limit = 100
		b.Run(q.name, func(b *testing.B) {
			var search, whole []time.Duration
			for b.Loop() {
				began := time.Now()
				err := f.store.View(b.Context(), func(r store.Reader) error {
					before, err := q.before()
					if err == nil {
						_, _, err = q.run(f.log.chain, r, string(tenantA), before)
					}
					return err
				})
				if err != nil {
					b.Fatal(err)
				}
				search = append(search, time.Since(began))
				began = time.Now()
				if _, _, err := f.log.Query(b.Context(), principal(tenantA), q.Query); err != nil {
					b.Fatal(err)
				}
				whole = append(whole, time.Since(began))
			}
			b.ReportMetric(p99(search).Seconds()*1000, "ms-p99-search")
			b.ReportMetric(p99(whole).Seconds()*1000, "ms-p99")
		})
	}
}
