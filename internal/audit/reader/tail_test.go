package reader_test

import (
	"fmt"
	"slices"
	"strconv"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/audittest"
)

// A query for outcomes and resources, with any other filter and any page size, finds what a loop
// over all entries selects.
func TestWhatOnlyEntriesSayIsFoundToo(t *testing.T) {
	f, _, all := threeDays(t)
	for _, outcome := range []audit.Outcome{audit.Success, audit.Denied, audit.Failure} {
		for _, resource := range []string{"", "35", "36", "none"} {
			for _, eventType := range []string{"", string(audit.UserSignedIn)} {
				for _, user := range []string{"", "usr_b"} {
					var want []string
					for _, e := range slices.Backward(all) {
						if outcome == e.Outcome && (resource == "" || resource == e.Resource.ID) &&
							(eventType == "" || eventType == string(e.Type)) && (user == "" || user == e.Principal.ID) {
							want = append(want, e.Resource.ID)
						}
					}
					for _, limit := range pageSizes() {
						got := pages(f, reader.Query{Outcome: outcome, ResourceID: resource, EventType: eventType, UserID: user, Limit: limit})
						if !slices.Equal(got, want) {
							t.Errorf("%s of %q, type %q, user %q, pages of %d: %v, want %v", outcome, resource, eventType, user, limit, got, want)
						}
					}
				}
			}
		}
	}
}

// A page that finds nothing reads a bounded number of entries, and the next page continues after
// them. This also holds for entries that are signed together, and between entries of other tenants.
func TestASearchInsideEntriesIsBounded(t *testing.T) {
	f := audittest.NewFixture(t)
	const n = 3*reader.MaxLooks/reader.EntryLooks + 100
	f.Crowd(n, func(int) (audit.EventType, string) { return audit.CredentialUnsealed, "usr_a" })
	f.Follow()
	for resource, want := range map[string][]string{"none": nil, "17": {"17"}, strconv.Itoa(n - 1): {strconv.Itoa(n - 1)}} {
		got, pages := searchPages(f, reader.Query{ResourceID: resource, Limit: 10})
		if !slices.Equal(got, want) || pages < 3 || pages > 5 {
			t.Errorf("%q: %v on %d pages", resource, got, pages)
		}
	}
	if got, pages := searchPages(f, reader.Query{Outcome: audit.Success, Limit: 100}); len(got) != n || pages != n/100+1 {
		t.Errorf("%d entries on %d pages", len(got), pages)
	}
	err := f.Store.View(t.Context(), func(r store.Reader) error {
		_, high, err := f.Log.Chain.Extent(r, string(audittest.TenantA))
		if err != nil {
			return err
		}
		looks := 0
		entries, next, err := reader.Query{ResourceID: "none", Limit: 10}.Page(f.Log.Chain, r, string(audittest.TenantA), high+1, func() bool { looks++; return looks == 2 })
		if len(entries) != 0 || next != reader.Cursor(high+1-2*reader.EntriesAtOnce) {
			t.Errorf("%d entries, and on with %q: when time is up it ends", len(entries), next)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestAnEntryIsReadByItsTenantAlone(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Fill(40)
	f.Group(3) // with one signature
	auditor := audittest.Principal(audittest.TenantA)
	auditor.ID = "key_reader"
	for _, e := range f.Entries() {
		got, err := f.Log.ReadEntry(t.Context(), auditor, e.Sequence)
		last := f.Entries()
		read := last[len(last)-1]
		if read.EventType != audit.AuditRead || read.Actor.ID != "key_reader" || len(last) == 0 {
			t.Fatalf("reading %d left %+v", e.Sequence, read)
		}
		if e.TenantID != string(audittest.TenantA) {
			if fault.Of(err) != fault.NotFound || got.Hash != "" || read.Outcome != audit.Denied || read.Attributes[audit.AttributeReason] != reader.ReasonNoEntry {
				t.Errorf("%d of %s: %v, recorded %+v", e.Sequence, e.TenantID, err, read)
			}
			continue
		}
		a, err1 := got.JSON()
		b, err2 := e.JSON()
		if err != nil || err1 != nil || err2 != nil || string(a) != string(b) || read.Outcome != audit.Success || read.Attributes[audit.AttributeSequence] != fmt.Sprint(e.Sequence) {
			t.Errorf("%d: %v %v %v, recorded %+v\n%s\n%s", e.Sequence, err, err1, err2, read, a, b)
		}
	}
	for _, sequence := range []uint64{0, 1 << 40, 1<<64 - 1} {
		if _, err := f.Log.ReadEntry(t.Context(), auditor, sequence); fault.Of(err) != fault.NotFound {
			t.Errorf("%d: %v", sequence, err)
		}
	}
	auditor.Scopes = nil
	if _, err := f.Log.ReadEntry(t.Context(), auditor, 2); fault.Of(err) != fault.Forbidden {
		t.Error(err)
	}
}

func TestATailReadsEveryEntryOfItsTenantOnce(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Fill(3*reader.TailPage + 5)
	other := f.Another(f.Store) // another process writes the entries that it reads
	open := func(after *uint64) *reader.Tail {
		t.Helper()
		tail, err := other.Tail(t.Context(), audittest.Principal(audittest.TenantA), after)
		if err != nil {
			t.Fatal(err)
		}
		return tail
	}
	old := f.SequencesOf(audittest.TenantA)
	middle, zero, newest, beyond := old[len(old)/2], uint64(0), old[len(old)-1], uint64(1)<<50
	fromNow, fromMiddle, fromStart, fromNewest, fromBeyond := open(nil), open(&middle), open(&zero), open(&newest), open(&beyond)
	tails := []struct {
		name  string
		tail  *reader.Tail
		first int // index of the first entry that it reads
		got   []uint64
	}{
		{name: "from now", tail: fromNow, first: len(old)},
		{name: "from the middle", tail: fromMiddle, first: len(old)/2 + 1},
		{name: "from the start", tail: fromStart},
		{name: "from the newest", tail: fromNewest, first: len(old)},
		{name: "from beyond", tail: fromBeyond, first: len(old) + 4}, // the entries of the other four tails come first
	}
	for range 3 {
		f.Fill(reader.TailPage)
		f.Group(2)
		now := f.SequencesOf(audittest.TenantA)
		for i := range tails {
			of := &tails[i]
			if of.got = append(of.got, audittest.Drain(t, of.tail)...); !slices.Equal(of.got, now[of.first:]) {
				t.Errorf("%s: %v, want %v", of.name, of.got, now[of.first:])
			}
		}
	}
}

// Opening a tail records one entry, which the tail reads first. Its reads record none.
func TestATailIsRecordedOnce(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Fill(4)
	before := len(f.Entries())
	tail, err := f.Log.Tail(t.Context(), audittest.Principal(audittest.TenantA), nil)
	if err != nil {
		t.Fatal(err)
	}
	entries, err := tail.Next(t.Context())
	if err != nil || len(entries) != 1 || entries[0].EventType != audit.AuditRead || entries[0].Attributes[audit.AttributeTail] != "true" {
		t.Fatal(entries, err)
	}
	audittest.Drain(t, tail)
	if n := len(f.Entries()) - before; n != 1 {
		t.Errorf("%d entries", n)
	}
	p := audittest.Principal(audittest.TenantA)
	p.Scopes = []authz.Scope{authz.KeysRead}
	if _, err := f.Log.Tail(t.Context(), p, nil); fault.Of(err) != fault.Forbidden {
		t.Error(err)
	}
}

func TestATailTellsOfDamage(t *testing.T) {
	f := audittest.NewFixture(t)
	zero := uint64(0)
	f.Fill(12)
	tail, err := f.Log.Tail(t.Context(), audittest.Principal(audittest.TenantA), &zero)
	if err != nil {
		t.Fatal(err)
	}
	gone := f.SequencesOf(audittest.TenantA)[3]
	f.Put(func(tx store.Tx) error { return tx.Delete(audit.EntryKey(gone)) })
	if _, err := tail.Next(t.Context()); fault.Of(err) != fault.Internal {
		t.Error("an entry is missing:", err)
	}
}

// pages reads all pages of a query and returns the hours of the entries found.
func pages(f *audittest.Fixture, q reader.Query) (hours []string) {
	f.T.Helper()
	asking := audittest.Principal(audittest.TenantA)
	asking.ID = "key_asking"
	for n := 0; ; n++ {
		entries, next, err := f.Log.Query(f.T.Context(), asking, q)
		if err != nil {
			f.T.Fatal(err)
		}
		for _, e := range entries {
			if e.TenantID != string(audittest.TenantA) {
				f.T.Fatal("another tenant's entry")
			}
			if e.EventType != audit.AuditRead {
				hours = append(hours, e.Resource.ID)
			}
		}
		if len(entries) > q.Limit || n > 1000 {
			f.T.Fatal("a page too large, or no end")
		}
		if q.Cursor = next; next == "" {
			return hours
		}
	}
}
