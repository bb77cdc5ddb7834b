package reader_test

import (
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/audittest"
)

// Nobody hides the entry of a state by changing what is derived from the entries.
func TestFindStateReadsTheEntriesThemselves(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Group(4)
	if found, err := f.Log.FindState(t.Context()); found != 0 || err != nil {
		t.Fatal(found, err)
	}
	e := audit.Event{
		Type: audit.StateCommitted, Outcome: audit.Success, Principal: authz.SystemPrincipal(authz.SystemTenant),
		Attributes: map[string]string{audit.AttributeState: "00"},
	}
	if err := f.Log.Record(t.Context(), e); err != nil {
		t.Fatal(err)
	}
	f.Group(3)
	derived := func(tx store.Tx, rng store.Range) {
		var keys [][]byte
		if err := tx.Scan(rng, func(key, _ []byte) bool { keys = append(keys, key); return true }); err != nil {
			t.Fatal(err)
		}
		for _, key := range keys {
			if err := tx.Delete(key); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := f.Store.Update(t.Context(), func(tx store.Tx) error {
		derived(tx, audit.TenantRange)
		derived(tx, audit.SummaryRange)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if found, err := f.Log.FindState(t.Context()); found != 6 || err != nil {
		t.Fatal(found, err)
	}
	if err := f.Store.Update(t.Context(), func(tx store.Tx) error { return tx.Delete(audit.EntryKey(6)) }); err != nil {
		t.Fatal(err)
	}
	if found, err := f.Log.FindState(t.Context()); err == nil {
		t.Fatal("without the entry:", found)
	}
}
