package reader_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
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

func TestAReplayGoesOnWhereItEnded(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Log.SetSigning(writer.SignBatches)
	f.Fill(30)
	var seen []uint64
	visit := func(e *audit.Entry) error {
		seen = append(seen, e.TenantSequence)
		return nil
	}
	at, err := f.Log.Replay(t.Context(), audittest.TenantA, reader.ReplayPoint{}, 15, visit)
	if err != nil || at.Sequence > 15 || len(seen) == 0 || at.TenantSequence != seen[len(seen)-1] {
		t.Fatal(at, seen, err)
	}
	if again, err := f.Log.Replay(t.Context(), audittest.TenantA, at, 15, visit); err != nil || again != at {
		t.Fatal(again, err)
	}
	f.Fill(3)
	if at, err = f.Log.Replay(t.Context(), audittest.TenantA, at, 0, visit); err != nil || len(seen) != 22 {
		t.Fatal(at, seen, err)
	}
	for i, n := range seen {
		if n != uint64(i+1) {
			t.Fatal(seen)
		}
	}
	if none, err := f.Log.Replay(t.Context(), "ten_none", reader.ReplayPoint{}, 0, visit); err != nil || none != (reader.ReplayPoint{}) {
		t.Fatal(none, err)
	}
	stop := errors.New("stop")
	if _, err := f.Log.Replay(t.Context(), audittest.TenantA, reader.ReplayPoint{}, 0, func(*audit.Entry) error { return stop }); !errors.Is(err, stop) {
		t.Fatal(err)
	}
	at.Hash = audit.ZeroHash // a point in another history
	f.Fill(3)
	if _, err := f.Log.Replay(t.Context(), audittest.TenantA, at, 0, visit); err == nil || fault.Of(err) != fault.Internal {
		t.Fatal(err)
	}
}

func TestAReplayOfEntriesThatDoNotHoldFails(t *testing.T) {
	for name, change := range map[string]func(tx store.Tx) error{
		"an entry that is missing": func(tx store.Tx) error { return tx.Delete(audit.EntryKey(5)) },
		"one that is missing from the index": func(tx store.Tx) error {
			return tx.Delete(audittest.PositionIn(tx, 5))
		},
		"one that was changed": func(tx store.Tx) error {
			row := audittest.Get(tx, audit.EntryKey(5))
			row[len(row)-3] ^= 1
			return tx.Put(audit.EntryKey(5), row)
		},
		"a last one with another's signature": func(tx store.Tx) error {
			row := audittest.Get(tx, audit.EntryKey(9))
			row[100] ^= 1
			return tx.Put(audit.EntryKey(9), row)
		},
		"another tenant's": func(tx store.Tx) error {
			return tx.Put(audittest.PositionIn(tx, 5), audittest.Get(tx, audit.TenantKey(string(audittest.TenantB), 1)))
		},
	} {
		f := audittest.NewFixture(t)
		for range 8 {
			f.Record(audit.Event{Type: audit.AuditRead, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantA)})
		}
		f.Record(audit.Event{Type: audit.AuditRead, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantB)})
		if err := f.Store.Update(t.Context(), change); err != nil {
			t.Fatal(err)
		}
		if _, err := f.Log.Replay(t.Context(), audittest.TenantA, reader.ReplayPoint{}, 0, func(*audit.Entry) error { return nil }); err == nil || fault.Of(err) != fault.Internal {
			t.Errorf("%s: %v", name, err)
		}
	}
}
