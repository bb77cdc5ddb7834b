package reader_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/chain"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/audittest"
)

// threeDays returns a log of three days. One tenant has an entry each hour, of two types, by a
// user, an API key and another user. Another tenant has entries, too.
func threeDays(t *testing.T) (f *audittest.Fixture, began time.Time, all []audit.Event) {
	f = audittest.NewFixture(t)
	began = f.Now()
	actors := []authz.Principal{{Kind: authz.User, ID: "usr_a"}, {Kind: authz.APIKey, ID: "key_a"}, {Kind: authz.User, ID: "usr_b"}}
	for hour := range 72 {
		e := audit.Event{Type: audit.CredentialUnsealed, Outcome: audit.Success, Principal: actors[hour%3], Resource: audit.Resource{ID: fmt.Sprint(hour), Type: audit.CredentialResource}}
		if hour%2 == 0 {
			e.Type = audit.UserSignedIn
		}
		if hour%5 == 0 {
			e.Outcome = audit.Denied // denied and failed entries are found like others
		}
		e.Principal.Tenant = audittest.TenantB
		f.Record(e)
		e.Principal.Tenant = audittest.TenantA
		f.Record(e)
		all = append(all, e)
		f.Advance(time.Hour)
	}
	return f, began, all
}

// pageSizes are the limits that tables of queries are run with.
func pageSizes() []int {
	if testing.Short() {
		return []int{7}
	}
	return []int{1, 2, 7, 100}
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
		for _, eventType := range []string{"", string(audit.CredentialUnsealed), string(audit.UserSignedIn), "NO_SUCH"} {
			for _, user := range []string{"", "usr_a", "usr_b", "key_a", "usr_"} {
				var want []string
				for hour, e := range slices.Backward(all) {
					when := at(hour, 0)
					if (eventType == "" || eventType == string(e.Type)) && (user == "" || user == e.Principal.ID) &&
						!when.Before(r.from) && (r.to.IsZero() || !when.After(r.to)) {
						want = append(want, e.Resource.ID)
					}
				}
				for _, limit := range pageSizes() {
					got := pages(f, reader.Query{EventType: eventType, UserID: user, From: r.from, To: r.to, Limit: limit})
					if !slices.Equal(got, want) {
						t.Errorf("%s, type %q, user %q, pages of %d: %v, want %v", r.name, eventType, user, limit, got, want)
					}
				}
			}
		}
	}
	if _, err := f.Verify(); err != nil {
		t.Fatal(err)
	}
}

// The next page continues where the previous one ended, whatever is written meanwhile.
func TestACursorHoldsItsPlace(t *testing.T) {
	f, began, all := threeDays(t)
	q := reader.Query{Limit: 10, To: began.Add(71 * time.Hour)}
	first, next, err := f.Log.Query(t.Context(), audittest.Principal(audittest.TenantA), q)
	if err != nil || len(first) != 10 || first[0].Resource.ID != "71" {
		t.Fatal(first, err)
	}
	f.Fill(5)
	f.Record(all[0])
	q.Cursor = next
	second, _, err := f.Log.Query(t.Context(), audittest.Principal(audittest.TenantA), q)
	if err != nil || len(second) != 10 || second[0].Resource.ID != "61" {
		t.Fatal(second, err)
	}
	q.From = began.Add(62 * time.Hour) // the cursor is already below it
	if rest, next, err := f.Log.Query(t.Context(), audittest.Principal(audittest.TenantA), q); err != nil || len(rest) != 0 || next != "" {
		t.Fatal(rest, next, err)
	}
}

func TestForeignCursorsAreRefusedOrShowNothingForeign(t *testing.T) {
	f, _, _ := threeDays(t)
	for _, cursor := range []string{"x", "AAAA", "AAAAAAAAAAE=", "AAAAAAAAAAAA"} {
		if _, _, err := f.Log.Query(t.Context(), audittest.Principal(audittest.TenantA), reader.Query{Limit: 1, Cursor: cursor}); fault.Of(err) != fault.Invalid {
			t.Errorf("%q: %v", cursor, err)
		}
	}
	for _, position := range [][]byte{{0, 0, 0, 0, 0, 0, 0, 0}, {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}} {
		entries, _, err := f.Log.Query(t.Context(), audittest.Principal(audittest.TenantA), reader.Query{Limit: 100, Cursor: base64.RawURLEncoding.EncodeToString(position)})
		if err != nil {
			t.Error(err)
		}
		for _, e := range entries {
			if e.TenantID != string(audittest.TenantA) {
				t.Error("another tenant's entry")
			}
		}
	}
}

// A query finds a range in the past without reading the entries after or before it.
func TestARangeIsSoughtAndNotScanned(t *testing.T) {
	f, began, _ := threeDays(t)
	counting := &countingReader{}
	err := f.Store.View(t.Context(), func(r store.Reader) error {
		counting.Reader = r
		q := reader.Query{From: began.Add(30 * time.Hour).Truncate(time.Microsecond), To: began.Add(32 * time.Hour), Limit: 100}
		low, high, err := q.Bounds(f.Log.Chain, counting, string(audittest.TenantA), math.MaxUint64)
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
func searchPages(f *audittest.Fixture, q reader.Query) (ids []string, pages int) {
	f.T.Helper()
	for {
		err := f.Store.View(context.Background(), func(r store.Reader) error {
			before, err := q.Before()
			if err != nil {
				return err
			}
			entries, next, err := q.Run(f.Log.Chain, r, string(audittest.TenantA), before)
			for _, e := range entries {
				ids = append(ids, e.Resource.ID)
			}
			if len(entries) > q.Limit {
				f.T.Errorf("%d entries on a page of %d", len(entries), q.Limit)
			}
			pages, q.Cursor = pages+1, next
			return err
		})
		if err != nil {
			f.T.Fatal(err)
		}
		if q.Cursor == "" {
			return ids, pages
		}
	}
}

// A query finds what a loop over all entries finds: with all summaries, with some, with none, and
// in a log that is not followed to its end.
func TestSummariesChangeNothingInWhatIsFound(t *testing.T) {
	f := audittest.NewFixture(t)
	began := f.Now().Truncate(time.Microsecond)
	of := func(i int) (audit.EventType, string) {
		eventType, actor := []audit.EventType{audit.UserSignedIn, audit.CredentialUnsealed, audit.KeyListed}[i%3], []string{"usr_a", "usr_b"}[i/3%2]
		switch {
		case i == 700 || i == 1:
			eventType = audit.KeyRotated // rare
		case i%2 == 0 && eventType == audit.KeyListed:
			actor = "usr_even" // never has UserSignedIn
		}
		return eventType, actor
	}
	all := f.Crowd(1500, of)
	f.Follow()
	all = append(all, f.Crowd(700, func(i int) (audit.EventType, string) { return of(i + 1500) })...) // no summaries yet
	check := func(name string) {
		t.Helper()
		for _, eventType := range []audit.EventType{"", audit.UserSignedIn, audit.KeyListed, audit.KeyRotated, "NO_SUCH"} {
			for _, actor := range []string{"", "usr_a", "usr_even", "usr_none"} {
				for n, hours := range [][2]int{{}, {3, 3}, {5, 14}, {0, 2}, {17, 0}, {23, 30}} {
					q := reader.Query{EventType: string(eventType), UserID: actor, Category: []audit.Category{"", audit.Changes, audit.Secrets}[n%3]}
					var want []string
					if hours[0] > 0 {
						q.From = began.Add(time.Duration(hours[0]) * time.Hour)
					}
					if hours[1] > 0 {
						q.To = began.Add(time.Duration(hours[1]) * time.Hour)
					}
					for i, is := range slices.Backward(all) {
						at := i / 100 // hours: a commit has a hundred entries
						in := q.Category == "" || slices.Contains(q.Category.Types(), audit.EventType(is.EventType))
						if in && (eventType == "" || string(eventType) == is.EventType) && (actor == "" || actor == is.UserID) &&
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
	f.Follow()
	check("all summaries")
	for block := range uint64(8) {
		if block%3 == 1 {
			err := f.Store.Update(t.Context(), func(tx store.Tx) error { return tx.Delete(audit.SummaryKey(string(audittest.TenantA), block)) })
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	check("some summaries")
	f.Forget()
	check("no summaries")
	f.Follow()
	// The oldest entries are only in the archive: their rows and some summaries are gone.
	err := f.Store.Update(t.Context(), func(tx store.Tx) error {
		for n := uint64(1); n <= 300; n++ {
			row, err := chain.ReadIndexRow(tx, string(audittest.TenantA), n)
			if err != nil {
				return err
			}
			if err := errors.Join(tx.Delete(audit.TenantKey(string(audittest.TenantA), n)), tx.Delete(audit.EntryKey(row.Sequence))); err != nil {
				return err
			}
		}
		return tx.Delete(audit.SummaryKey(string(audittest.TenantA), 0))
	})
	if err != nil {
		t.Fatal(err)
	}
	for i := range 300 {
		all[i] = reader.Query{}
	}
	checkLeft := func() {
		for _, eventType := range []audit.EventType{audit.UserSignedIn, audit.KeyRotated} {
			var want []string
			for i, is := range slices.Backward(all) {
				if string(eventType) == is.EventType {
					want = append(want, fmt.Sprint(i%1500))
				}
			}
			if got, _ := searchPages(f, reader.Query{EventType: string(eventType), Limit: 100}); !slices.Equal(got, want) {
				t.Errorf("after a cut, %s: %d found, want %d", eventType, len(got), len(want))
			}
		}
		if got, _ := searchPages(f, reader.Query{Limit: 100}); len(got) != 1900 {
			t.Errorf("after a cut: %d", len(got))
		}
	}
	checkLeft()
}

// A filter that matches nothing, one that matches rarely, and two frequent ones that never match
// together read summaries, and index rows only of the last block.
func TestAFilterReadsSummariesInPlaceOfRows(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Crowd(256*20+30, func(i int) (audit.EventType, string) {
		if i == 2000 {
			return audit.KeyRotated, "usr_a"
		}
		return []audit.EventType{audit.UserSignedIn, audit.CredentialUnsealed}[i%2], []string{"usr_a", "usr_b"}[i%2]
	})
	f.Follow()
	for _, q := range []reader.Query{
		{EventType: "NO_SUCH"},
		{UserID: "usr_none"},
		{EventType: string(audit.KeyRotated)},
		{EventType: string(audit.UserSignedIn), UserID: "usr_b"},
	} {
		q.Limit = 20
		err := f.Store.View(t.Context(), func(r store.Reader) error {
			rows := &rowCounter{Reader: r}
			_, next, err := q.Run(f.Log.Chain, rows, string(audittest.TenantA), math.MaxUint64)
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
	f := audittest.NewFixture(t)
	f.Crowd(reader.MaxLooks+500, func(i int) (audit.EventType, string) {
		if i == 40 {
			return audit.KeyRotated, "usr_a"
		}
		return audit.UserSignedIn, "usr_a"
	})
	q := reader.Query{EventType: string(audit.KeyRotated), Limit: 20}
	if ids, pages := searchPages(f, q); pages != 2 || !slices.Equal(ids, []string{"40"}) {
		t.Errorf("%d pages without summaries: %v", pages, ids)
	}
	f.Follow()
	if ids, pages := searchPages(f, q); pages != 1 || !slices.Equal(ids, []string{"40"}) {
		t.Errorf("%d pages with summaries: %v", pages, ids)
	}
}

// A query compares the entries that a summary names with their rows. A summary that names too many
// does not add entries that do not match.
func TestASummaryThatNamesTooMuchShowsNothingMore(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Crowd(300, func(i int) (audit.EventType, string) {
		return []audit.EventType{audit.UserSignedIn, audit.KeyListed}[i%2], "usr_a"
	})
	f.Follow()
	all := make([]audit.IndexRow, audit.BlockSize)
	for i := range all {
		all[i].EventType = audit.KeyListed
	}
	if err := f.Store.Update(t.Context(), func(tx store.Tx) error {
		return tx.Put(audit.SummaryKey(string(audittest.TenantA), 0), audit.SummaryOf(all))
	}); err != nil {
		t.Fatal(err)
	}
	for _, limit := range []int{10, 1000} {
		if ids, _ := searchPages(f, reader.Query{EventType: string(audit.KeyListed), Limit: limit}); len(ids) != 150 {
			t.Errorf("%d found in pages of %d", len(ids), limit)
		}
	}
}

// If a summary is malformed, or an index row or an entry is missing, the query reports damage and
// returns nothing.
func TestADamagedIndexIsReported(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Crowd(600, func(int) (audit.EventType, string) { return audit.UserSignedIn, "usr_a" })
	f.Follow()
	for name, change := range map[string]func(tx store.Tx) error{
		"a summary": func(tx store.Tx) error { return tx.Put(audit.SummaryKey(string(audittest.TenantA), 1), []byte{9}) },
		"a row":     func(tx store.Tx) error { return tx.Delete(audit.TenantKey(string(audittest.TenantA), 300)) },
		"an entry":  func(tx store.Tx) error { return tx.Delete(audit.EntryKey(400)) },
	} {
		for _, q := range []reader.Query{{Limit: 600}, {Limit: 600, EventType: string(audit.UserSignedIn)}} {
			if name == "a summary" && q.EventType == "" {
				continue
			}
			undo := errors.New("undo")
			err := f.Store.Update(t.Context(), func(tx store.Tx) error {
				if err := change(tx); err != nil {
					return err
				}
				_, _, err := q.Run(f.Log.Chain, tx, string(audittest.TenantA), math.MaxUint64)
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
	f := audittest.NewFixture(t)
	const id = "cred_x"
	f.Sealed(audittest.TenantA, id, "1", "d")
	for _, what := range []audit.EventType{audit.CredentialRotated, audit.CredentialReencrypted} {
		f.Record(audit.Event{Type: what, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantA), Resource: audit.Resource{ID: id, Type: audit.CredentialResource}})
		f.Record(audit.Event{Type: audit.CredentialUnsealed, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantA), Resource: audit.Resource{ID: id, Type: audit.CredentialResource}})
		f.Record(audit.Event{Type: audit.CredentialSealed, Outcome: audit.Denied, Principal: audittest.Principal(audittest.TenantA), Resource: audit.Resource{ID: id, Type: audit.CredentialResource}})
		err := f.Store.View(t.Context(), func(r store.Reader) error {
			got, err := chain.LastChange(r, audittest.TenantA, id)
			if got != what {
				t.Errorf("%s, want %s", got, what)
			}
			if _, err := chain.LastChange(r, audittest.TenantB, id); err == nil {
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
	f := audittest.NewFixture(t)
	for i := range 3 {
		id := fmt.Sprint("key-", i)
		f.Record(audit.Event{Type: audit.SealingKeyCreated, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantA), Resource: audit.Resource{Type: audit.SealingKeyResource, ID: id}})
		f.Record(audit.Event{Type: audit.SealingKeyRetired, Outcome: audit.Denied, Principal: audittest.Principal(audittest.TenantA), Resource: audit.Resource{Type: audit.SealingKeyResource, ID: id}})
		f.Record(audit.Event{Type: audit.SealingKeyCreated, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantB), Resource: audit.Resource{Type: audit.SealingKeyResource, ID: "other"}})
		f.Record(audit.Event{Type: audit.SealingKeyListed, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantA), Resource: audit.Resource{Type: audit.SealingKeyResource}})
	}
	visit := func() (seen string, err error) {
		err = f.Log.Visit(t.Context(), audittest.TenantA, func(e *audit.Entry) {
			seen += fmt.Sprint(e.EventType, " ", e.Outcome, " ", e.Resource.ID, "; ")
		}, audit.SealingKeyCreated, audit.SealingKeyRetired)
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
			_ = f.Store.View(t.Context(), func(r store.Reader) error {
				b, err := r.Get(audit.EntryKey(2))
				row = bytes.Clone(b)
				return err
			})
			return row
		},
	} {
		err := f.Store.Update(t.Context(), func(tx store.Tx) error {
			kept, err := tx.Get(audit.EntryKey(3))
			if err != nil {
				return err
			}
			kept = bytes.Clone(kept)
			if err := tx.Put(audit.EntryKey(3), change(bytes.Clone(kept))); err != nil {
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
		err = f.Store.Update(t.Context(), func(tx store.Tx) error {
			kept, err := tx.Get([]byte("kept"))
			return errors.Join(err, tx.Put(audit.EntryKey(3), bytes.Clone(kept)))
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
	f := audittest.LongLog(b, n, audittest.TenantA)
	first, last := f.Now().Add(-500*time.Second), f.Now()
	for _, q := range []struct {
		name string
		reader.Query
	}{
		{"no filter", reader.Query{}},
		{"a frequent type", reader.Query{EventType: string(audit.DataEncrypted)}},
		{"a frequent actor", reader.Query{UserID: "usr_7"}},
		{"a type of each block", reader.Query{EventType: string(audit.CredentialRotated)}},
		{"a rare type", reader.Query{EventType: string(audit.CredentialDeleted)}},
		{"a rare actor", reader.Query{UserID: "usr_rare"}},
		{"a type that was once", reader.Query{EventType: string(audit.KeyRotated)}},
		{"no such type", reader.Query{EventType: string(audit.MemberRemoved)}},
		{"no such actor", reader.Query{UserID: "usr_none"}},
		{"frequent but never together", reader.Query{EventType: string(audit.DataEncrypted), UserID: "usr_1"}},
		{"together", reader.Query{EventType: string(audit.DataEncrypted), UserID: "usr_2"}},
		{"a range", reader.Query{From: first.Add(100 * time.Second), To: first.Add(101 * time.Second)}},
		{"nothing in a range", reader.Query{EventType: string(audit.MemberRemoved), From: first.Add(10 * time.Second), To: last.Add(-10 * time.Second)}},
		{"a range after all", reader.Query{From: last.Add(time.Hour)}},
		{"a range before all", reader.Query{To: first.Add(-time.Hour)}},
		{"the last page", reader.Query{Cursor: reader.Cursor(90)}},
		{"behind a cursor, rare", reader.Query{EventType: string(audit.KeyRotated), Cursor: reader.Cursor(n - 10_000)}},
	} {
		q.Limit = 100
		b.Run(q.name, func(b *testing.B) {
			var search, whole []time.Duration
			for b.Loop() {
				began := time.Now()
				err := f.Store.View(b.Context(), func(r store.Reader) error {
					before, err := q.Before()
					if err == nil {
						_, _, err = q.Run(f.Log.Chain, r, string(audittest.TenantA), before)
					}
					return err
				})
				if err != nil {
					b.Fatal(err)
				}
				search = append(search, time.Since(began))
				began = time.Now()
				if _, _, err := f.Log.Query(b.Context(), audittest.Principal(audittest.TenantA), q.Query); err != nil {
					b.Fatal(err)
				}
				whole = append(whole, time.Since(began))
			}
			b.ReportMetric(audittest.P99(search).Seconds()*1000, "ms-p99-search")
			b.ReportMetric(audittest.P99(whole).Seconds()*1000, "ms-p99")
		})
	}
}

// A summary names the entries that a loop over the block finds.
func TestASummaryNamesTheEntriesThatMatch(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for _, shape := range [][2]int{{1, 1}, {3, 2}, {60, 256}, {256, 3}} {
		rows := audittest.Block(random, shape[0], shape[1])
		summary := audit.SummaryOf(rows)
		for _, q := range []reader.Query{{EventType: "TYPE_0"}, {UserID: "usr_1"}, {EventType: "TYPE_2", UserID: "usr_0"}, {EventType: "usr_0"}, {UserID: "TYPE_0"}, {}} {
			at, ok := audit.PlacesOf(summary, q.Keys(), nil)
			var got, want []int
			for place, more := at.Last(); more; place, more = at.Last() {
				got = append(got, place)
			}
			for i, row := range slices.Backward(rows) {
				if q.Matches(row) {
					want = append(want, i)
				}
			}
			if !ok || !slices.Equal(got, want) {
				t.Errorf("%v, %+v: %v, want %v", shape, q, got, want)
			}
		}
	}
}
