package audit

import (
	"fmt"
	"slices"
	"strconv"
	"testing"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// A query for outcomes and resources, with any other filter and any page size, finds what a loop
// over all entries selects.
func TestWhatOnlyEntriesSayIsFoundToo(t *testing.T) {
	f, _, all := threeDays(t)
	for _, outcome := range []Outcome{Success, Denied, Failure} {
		for _, resource := range []string{"", "35", "36", "none"} {
			for _, eventType := range []string{"", string(UserSignedIn)} {
				for _, user := range []string{"", "usr_b"} {
					var want []string
					for _, e := range slices.Backward(all) {
						if outcome == e.Outcome && (resource == "" || resource == e.Resource.ID) &&
							(eventType == "" || eventType == string(e.Type)) && (user == "" || user == e.Principal.ID) {
							want = append(want, e.Resource.ID)
						}
					}
					for _, limit := range []int{1, 7, 100} {
						got := f.pages(Query{Outcome: outcome, ResourceID: resource, EventType: eventType, UserID: user, Limit: limit})
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
	f := newFixture(t)
	const n = 3*maxLooks/entryLooks + 100
	f.crowd(n, func(int) (EventType, string) { return CredentialUnsealed, "usr_a" })
	f.follow()
	for resource, want := range map[string][]string{"none": nil, "17": {"17"}, strconv.Itoa(n - 1): {strconv.Itoa(n - 1)}} {
		got, pages := searchPages(f, Query{ResourceID: resource, Limit: 10})
		if !slices.Equal(got, want) || pages < 3 || pages > 5 {
			t.Errorf("%q: %v on %d pages", resource, got, pages)
		}
	}
	if got, pages := searchPages(f, Query{Outcome: Success, Limit: 100}); len(got) != n || pages != n/100+1 {
		t.Errorf("%d entries on %d pages", len(got), pages)
	}
	err := f.store.View(t.Context(), func(r store.Reader) error {
		_, high, err := f.log.chain.extent(r, string(tenantA))
		if err != nil {
			return err
		}
		looks := 0
		entries, next, err := Query{ResourceID: "none", Limit: 10}.page(f.log.chain, r, string(tenantA), high+1, func() bool { looks++; return looks == 2 })
		if len(entries) != 0 || next != cursor(high+1-2*entriesAtOnce) {
			t.Errorf("%d entries, and on with %q: when time is up it ends", len(entries), next)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestAnEntryIsReadByItsTenantAlone(t *testing.T) {
	f := newFixture(t)
	f.fill(40)
	f.group(3) // with one signature
	reader := principal(tenantA)
	reader.ID = "key_reader"
	for _, e := range f.entries() {
		got, err := f.log.ReadEntry(t.Context(), reader, e.Sequence)
		last := f.entries()
		read := last[len(last)-1]
		if read.EventType != AuditRead || read.Actor.ID != "key_reader" || len(last) == 0 {
			t.Fatalf("reading %d left %+v", e.Sequence, read)
		}
		if e.TenantID != string(tenantA) {
			if fault.Of(err) != fault.NotFound || got.Hash != "" || read.Outcome != Denied || read.Attributes[AttributeReason] != reasonNoEntry {
				t.Errorf("%d of %s: %v, recorded %+v", e.Sequence, e.TenantID, err, read)
			}
			continue
		}
		a, err1 := got.JSON()
		b, err2 := e.JSON()
		if err != nil || err1 != nil || err2 != nil || string(a) != string(b) || read.Outcome != Success || read.Attributes[attributeSequence] != fmt.Sprint(e.Sequence) {
			t.Errorf("%d: %v %v %v, recorded %+v\n%s\n%s", e.Sequence, err, err1, err2, read, a, b)
		}
	}
	for _, sequence := range []uint64{0, 1 << 40, 1<<64 - 1} {
		if _, err := f.log.ReadEntry(t.Context(), reader, sequence); fault.Of(err) != fault.NotFound {
			t.Errorf("%d: %v", sequence, err)
		}
	}
	reader.Scopes = nil
	if _, err := f.log.ReadEntry(t.Context(), reader, 2); fault.Of(err) != fault.Forbidden {
		t.Error(err)
	}
}

func TestATailReadsEveryEntryOfItsTenantOnce(t *testing.T) {
	f := newFixture(t)
	f.fill(3*tailPage + 5)
	other := f.another(f.store) // another process writes the entries that it reads
	open := func(after *uint64) *Tail {
		t.Helper()
		tail, err := other.Tail(t.Context(), principal(tenantA), after)
		if err != nil {
			t.Fatal(err)
		}
		return tail
	}
	old := f.sequencesOf(tenantA)
	middle, zero, newest, beyond := old[len(old)/2], uint64(0), old[len(old)-1], uint64(1)<<50
	fromNow, fromMiddle, fromStart, fromNewest, fromBeyond := open(nil), open(&middle), open(&zero), open(&newest), open(&beyond)
	tails := []struct {
		name  string
		tail  *Tail
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
		f.fill(tailPage)
		f.group(2)
		now := f.sequencesOf(tenantA)
		for i := range tails {
			of := &tails[i]
			if of.got = append(of.got, drain(t, of.tail)...); !slices.Equal(of.got, now[of.first:]) {
				t.Errorf("%s: %v, want %v", of.name, of.got, now[of.first:])
			}
		}
	}
}

// Opening a tail records one entry, which the tail reads first. Its reads record none.
func TestATailIsRecordedOnce(t *testing.T) {
	f := newFixture(t)
	f.fill(4)
	before := len(f.entries())
	tail, err := f.log.Tail(t.Context(), principal(tenantA), nil)
	if err != nil {
		t.Fatal(err)
	}
	entries, err := tail.Next(t.Context())
	if err != nil || len(entries) != 1 || entries[0].EventType != AuditRead || entries[0].Attributes[attributeTail] != "true" {
		t.Fatal(entries, err)
	}
	drain(t, tail)
	if n := len(f.entries()) - before; n != 1 {
		t.Errorf("%d entries", n)
	}
	p := principal(tenantA)
	p.Scopes = []authz.Scope{authz.KeysRead}
	if _, err := f.log.Tail(t.Context(), p, nil); fault.Of(err) != fault.Forbidden {
		t.Error(err)
	}
}

func TestATailTellsOfDamage(t *testing.T) {
	f := newFixture(t)
	zero := uint64(0)
	f.fill(12)
	tail, err := f.log.Tail(t.Context(), principal(tenantA), &zero)
	if err != nil {
		t.Fatal(err)
	}
	gone := f.sequencesOf(tenantA)[3]
	f.put(func(tx store.Tx) error { return tx.Delete(entryKey(gone)) })
	if _, err := tail.Next(t.Context()); fault.Of(err) != fault.Internal {
		t.Error("an entry is missing:", err)
	}
}
