package reader_test

import (
	"slices"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/test/audittest"
)

// Activity counts what a loop over all entries counts, with and without summaries. It counts as many days as its
// looks allow.
func TestActivityCountsTheEntriesOfEachDay(t *testing.T) {
	f := audittest.NewFixture(t)
	types := []audit.EventType{audit.CredentialUnsealed, audit.AuditRead, audit.CredentialSealed, audit.DataDecrypted, audit.AccountRead, audit.PolicyBound, audit.UserSignedIn}
	of := func(i int) (audit.EventType, string) { return types[(i*i+i/7)%len(types)], "usr_a" }
	began := f.Now().UTC()
	rows := f.Crowd(256*30+77, of)
	f.Advance(49 * time.Hour) // days without an entry
	rows = append(rows, f.Crowd(50, of)...)
	now := f.Now().Add(-time.Hour)
	want := func(days int) []reader.Day {
		all := make([]reader.Day, days)
		for i := range all {
			all[i].Start = now.UTC().Truncate(24*time.Hour).AddDate(0, 0, i+1-days)
		}
		for _, row := range rows {
			at := slices.IndexFunc(all, func(d reader.Day) bool { return row.From.UTC().Truncate(24 * time.Hour).Equal(d.Start) })
			switch kind := audit.EventType(row.EventType); {
			case at < 0:
			case slices.Contains(audit.Secrets.Types(), kind):
				all[at].Secrets++
			case slices.Contains(audit.Changes.Types(), kind):
				all[at].Changes++
			}
		}
		return all
	}
	check := func(what string) {
		t.Helper()
		for _, days := range []int{1, 2, 3, 4, 5, 7, 30} {
			got, whole, err := f.Log.Activity(t.Context(), audittest.TenantA, now, days)
			if err != nil || !whole && days < 30 && what != "without summaries" {
				t.Fatal(what, days, whole, err)
			}
			if all := want(days); !slices.Equal(got, all[days-len(got):]) || whole && len(got) != days {
				t.Errorf("%s, %d days: %v, want %v", what, days, got, all)
			}
		}
	}
	check("without summaries")
	f.Follow()
	check("with summaries")
	if got := want(30); got[29-int(now.Sub(began)/(24*time.Hour))].Secrets == 0 {
		t.Fatalf("the test counts nothing: %v", got)
	}
	all, whole, left, err := f.Log.CountDays(t.Context(), audittest.TenantA, now, 30, reader.ActivityLooks)
	if used := reader.ActivityLooks - left; err != nil || !whole || len(all) != 30 || used != 30+len(rows)%256 { // a summary for each block that is full, and the rows of the newest
		t.Errorf("%d looks for %d entries: %v %v", used, len(rows), whole, err)
	}
	for looks := 1; looks < 400; looks += 13 {
		got, whole, left, err := f.Log.CountDays(t.Context(), audittest.TenantA, now, 30, looks)
		if err != nil || left < 0 || len(got) == 0 {
			t.Fatal(looks, left, err)
		}
		complete := want(30)
		if !slices.Equal(got[1:], complete[31-len(got):]) || len(got) > 1 && !slices.Equal(got, complete[30-len(got):]) {
			t.Errorf("%d looks: %v", looks, got)
		}
		if whole != (len(got) == 30) {
			t.Errorf("%d looks: whole %v with %d days", looks, whole, len(got))
		}
	}
	if days, whole, err := f.Log.Activity(t.Context(), "ten_none", now, 30); err != nil || !whole || len(days) != 30 || days[3].Secrets != 0 {
		t.Errorf("of nobody: %v %v %v", days, whole, err)
	}
}
