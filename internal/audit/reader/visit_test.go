package reader_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/audittest"
)

// A visit shows what a loop over all entries finds, whichever blocks have summaries.
func TestSummariesChangeNothingInWhatIsVisited(t *testing.T) {
	f := audittest.NewFixture(t)
	of := func(i int) (audit.EventType, string) {
		switch {
		case i == 0, i == 255, i == 256, i == 900, i == 1599:
			return audit.KeyRotated, "usr_a"
		case i/256 == 2:
			return audit.UserSignedIn, "usr_a" // only these in a block; more than one step takes
		}
		return []audit.EventType{audit.UserSignedIn, audit.CredentialUnsealed, audit.CredentialListed}[i%3], "usr_b"
	}
	f.Crowd(1600, of)
	check := func(name string, low int) {
		t.Helper()
		for _, types := range [][]audit.EventType{{audit.KeyRotated}, {audit.KeyRotated, audit.CredentialListed}, {audit.UserSignedIn}, {audit.KeyListed}, {}} {
			var want []string
			for i := low; i < 1600; i++ {
				if is, _ := of(i); slices.Contains(types, is) {
					want = append(want, fmt.Sprint(i))
				}
			}
			if got, err := visited(f, types...); err != nil || !slices.Equal(got, want) {
				t.Errorf("%s, %v: %d are shown, want %d; %v", name, types, len(got), len(want), err)
			}
		}
	}
	check("no summaries", 0)
	f.Follow()
	check("all summaries", 0)
	remove := func(keys ...[]byte) {
		t.Helper()
		err := f.Store.Update(t.Context(), func(tx store.Tx) (err error) {
			for _, key := range keys {
				err = errors.Join(err, tx.Delete(key))
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	remove(audit.SummaryKey(string(audittest.TenantA), 1), audit.SummaryKey(string(audittest.TenantA), 4), audit.SummaryKey(string(audittest.TenantA), 5))
	check("some summaries", 0)
	for n := range uint64(300) { // the archived part
		remove(audit.TenantKey(string(audittest.TenantA), n+1))
	}
	remove(audit.SummaryKey(string(audittest.TenantA), 0))
	check("after a cut", 300)
	f.Forget()
	check("no summaries after a cut", 300)
}

// A start reads few rows of a long log: summaries, rows of the newest entries, and rows of the
// entries that it needs.
func TestAVisitReadsSummariesInPlaceOfRows(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Crowd(256*20+30, func(i int) (audit.EventType, string) {
		if i == 7 || i == 2000 {
			return audit.KeyRotated, "usr_a"
		}
		return audit.UserSignedIn, "usr_a"
	})
	f.Follow()
	rows := &audittest.CountingStore{Store: f.Store}
	err := rows.View(t.Context(), func(r store.Reader) error {
		found, more, err := reader.SweepOnce(f.Log.Chain, r, string(audittest.TenantA), audit.KeyRotated)
		if more || len(found) != 2 {
			t.Error(more, found)
		}
		return err
	})
	index, all := rows.Gets["audit/tenant"]+rows.Scans["audit/tenant"], rows.Gets["audit/summary"]+rows.Scans["audit/summary"]
	if err != nil || index > 30+2+2 || all > 20 || rows.Gets["audit/entry"] > 2 || rows.Scans["audit/entry"] > 0 {
		t.Errorf("%v: %s", err, rows)
	}
}

// A summary that names too many entries adds nothing. A malformed summary or a missing row is
// reported.
func TestAVisitReportsDamage(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Crowd(600, func(i int) (audit.EventType, string) {
		return []audit.EventType{audit.UserSignedIn, audit.KeyListed}[i%2], "usr_a"
	})
	f.Follow()
	whole := audittest.CopyStore(t, f.Store)
	all := make([]audit.IndexRow, audit.BlockSize)
	for i := range all {
		all[i].EventType = audit.KeyListed
	}
	f.Log.Chain.Store = whole.With(func(tx store.Tx) error {
		return tx.Put(audit.SummaryKey(string(audittest.TenantA), 0), audit.SummaryOf(all))
	})
	if ids, err := visited(f, audit.KeyListed); err != nil || len(ids) != 300 {
		t.Errorf("%d are shown, %v", len(ids), err)
	}
	for name, change := range map[string]func(store.Tx) error{
		"no summary":             func(tx store.Tx) error { return tx.Put(audit.SummaryKey(string(audittest.TenantA), 1), []byte{1, 0}) },
		"another version":        func(tx store.Tx) error { return tx.Put(audit.SummaryKey(string(audittest.TenantA), 1), []byte{9}) },
		"a named row is missing": func(tx store.Tx) error { return tx.Delete(audit.TenantKey(string(audittest.TenantA), 2)) },
		"a last row is missing":  func(tx store.Tx) error { return tx.Delete(audit.TenantKey(string(audittest.TenantA), 599)) },
		"a row is none":          func(tx store.Tx) error { return tx.Put(audit.TenantKey(string(audittest.TenantA), 599), []byte{1}) },
		"a row is another one's": func(tx store.Tx) error {
			return tx.Put(audit.TenantKey(string(audittest.TenantA), 2), audittest.Get(tx, audit.TenantKey(string(audittest.TenantA), 4)))
		},
	} {
		f.Log.Chain.Store = whole.With(change)
		_, err := visited(f, audit.KeyListed)
		if !errors.Is(err, fault.Internal) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// visited returns the resources that a visit of tenant A's entries shows, in order.
func visited(f *audittest.Fixture, types ...audit.EventType) (ids []string, err error) {
	err = f.Log.Visit(f.T.Context(), audittest.TenantA, func(e *audit.Entry) { ids = append(ids, e.Resource.ID) }, types...)
	return ids, err
}
