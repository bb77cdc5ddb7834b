package vault

import (
	"fmt"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/vault/listing"
)

// The summary counts credentials that nobody has read for a time, the longest unread first. It leaves out new
// credentials and those of objects and of other tenants, and its read is bounded.
func TestTheSummaryKnowsWhatNobodyReads(t *testing.T) {
	f := newFixture(t, time.Minute)
	f.index()
	var ids []string
	for i := range 8 {
		ids = append(ids, f.sealFor(f.a, fmt.Sprint("old/", i), "t", 400).ID)
	}
	f.object("shop", "owned", 0, 400, 0)
	f.sealFor(f.b, "foreign", "t", 400)
	f.sealFor(f.a, "expires", "t", 10)
	unread := func(p int) *listing.Unread {
		t.Helper()
		sum, damaged, err := Summarize(t.Context(), f.vault, f.a, listing.Asked{Soon: 7 * day, Unread: time.Duration(p) * day})
		must(t, err)
		if damaged != 0 || !sum.Complete {
			t.Fatalf("%d %+v", damaged, sum)
		}
		return sum.Unread
	}
	if u := unread(90); u.Count != 0 || !u.Complete {
		t.Errorf("at once: %+v", u)
	}
	f.advance(50 * day)
	_, err := f.vault.Read(t.Context(), f.a, ByID(ids[0]))
	must(t, err)
	f.advance(50 * day)
	f.sealFor(f.a, "new", "t", 400)
	u := unread(90)
	if u.Count != 7 || !u.Complete || len(u.Oldest) != listing.MaxUnread || u.Oldest[0].ID == ids[0] {
		t.Errorf("after 100 days: %+v", u)
	}
	for _, c := range u.Oldest {
		if c.Owned || !c.LastRead.IsZero() || c.ID == ids[0] {
			t.Errorf("%+v", c)
		}
	}
	f.advance(41 * day)
	if u := unread(90); u.Count != 8 {
		t.Errorf("90 days after a read: %+v", u)
	}
	if sum, err := f.vault.Summary(t.Context(), f.a, 7*day); err != nil || sum.Unread != nil {
		t.Errorf("not asked: %+v %v", sum.Unread, err)
	}
	var first string
	w, err := f.measured(func() error {
		sum, _, err := Summarize(t.Context(), f.vault, f.a, listing.Asked{Soon: 7 * day, Unread: 90 * day})
		first = sum.Unread.Oldest[0].ID
		return err
	})
	if err != nil || w.entries != 0 || first == "" {
		t.Errorf("%+v %v", w, err)
	}
}

// However many credentials nobody reads, the owners of at most a thousand are read, and too many reads tell
// nothing.
func TestWhatNobodyReadsIsBounded(t *testing.T) {
	f := newUnboundFixture(t, time.Minute)
	f.fill(1300)
	f.advance(0)
	f.store.gets.Store(0)
	sum, _, err := Summarize(t.Context(), f.vault, f.a, listing.Asked{Soon: day, Unread: -time.Hour}) // as of an hour from now, all are old
	must(t, err)
	if u := sum.Unread; u == nil || u.Complete || u.Count != 1000 || len(u.Oldest) != listing.MaxUnread {
		t.Errorf("%+v", u)
	}
	if n := f.store.gets.Load(); n > 2100 {
		t.Errorf("%d reads of rows", n)
	}
	f.vault.summaryBudget.Records = 1
	c, d := f.sealFor(f.a, "c", "t", 30), f.sealFor(f.a, "d", "t", 30)
	for _, id := range []string{c.ID, d.ID} {
		_, err := f.vault.Read(t.Context(), f.a, ByID(id))
		must(t, err)
	}
	if sum, _, err := Summarize(t.Context(), f.vault, f.a, listing.Asked{Soon: day, Unread: 90 * day}); err != nil || sum.Unread != nil {
		t.Errorf("%+v %v", sum, err)
	}
}
