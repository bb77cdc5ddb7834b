package reader_test

import (
	"errors"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/audittest"
)

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
