package audit

import (
	"errors"
	"testing"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

func TestAReplayGoesOnWhereItEnded(t *testing.T) {
	f := newFixture(t)
	f.log.SetSigning(SignBatches)
	f.fill(30)
	var seen []uint64
	visit := func(e *Entry) error {
		seen = append(seen, e.TenantSequence)
		return nil
	}
	at, err := f.log.Replay(t.Context(), tenantA, ReplayPoint{}, 15, visit)
	if err != nil || at.Sequence > 15 || len(seen) == 0 || at.TenantSequence != seen[len(seen)-1] {
		t.Fatal(at, seen, err)
	}
	if again, err := f.log.Replay(t.Context(), tenantA, at, 15, visit); err != nil || again != at {
		t.Fatal(again, err)
	}
	f.fill(3)
	if at, err = f.log.Replay(t.Context(), tenantA, at, 0, visit); err != nil || len(seen) != 22 {
		t.Fatal(at, seen, err)
	}
	for i, n := range seen {
		if n != uint64(i+1) {
			t.Fatal(seen)
		}
	}
	if none, err := f.log.Replay(t.Context(), "ten_none", ReplayPoint{}, 0, visit); err != nil || none != (ReplayPoint{}) {
		t.Fatal(none, err)
	}
	stop := errors.New("stop")
	if _, err := f.log.Replay(t.Context(), tenantA, ReplayPoint{}, 0, func(*Entry) error { return stop }); !errors.Is(err, stop) {
		t.Fatal(err)
	}
	at.Hash = zeroHash // a point in another history
	f.fill(3)
	if _, err := f.log.Replay(t.Context(), tenantA, at, 0, visit); err == nil || fault.Of(err) != fault.Internal {
		t.Fatal(err)
	}
}

func TestAReplayOfEntriesThatDoNotHoldFails(t *testing.T) {
	for name, change := range map[string]func(tx store.Tx) error{
		"an entry that is missing": func(tx store.Tx) error { return tx.Delete(entryKey(5)) },
		"one that is missing from the index": func(tx store.Tx) error {
			return tx.Delete(positionIn(tx, 5))
		},
		"one that was changed": func(tx store.Tx) error {
			row := get(tx, entryKey(5))
			row[len(row)-3] ^= 1
			return tx.Put(entryKey(5), row)
		},
		"a last one with another's signature": func(tx store.Tx) error {
			row := get(tx, entryKey(9))
			row[100] ^= 1
			return tx.Put(entryKey(9), row)
		},
		"another tenant's": func(tx store.Tx) error {
			return tx.Put(positionIn(tx, 5), get(tx, tenantKey(string(tenantB), 1)))
		},
	} {
		f := newFixture(t)
		for range 8 {
			f.record(Event{Type: AuditRead, Outcome: Success, Principal: principal(tenantA)})
		}
		f.record(Event{Type: AuditRead, Outcome: Success, Principal: principal(tenantB)})
		if err := f.store.Update(t.Context(), change); err != nil {
			t.Fatal(err)
		}
		if _, err := f.log.Replay(t.Context(), tenantA, ReplayPoint{}, 0, func(*Entry) error { return nil }); err == nil || fault.Of(err) != fault.Internal {
			t.Errorf("%s: %v", name, err)
		}
	}
}
