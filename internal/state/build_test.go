package state_test

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
)

// binding binds rows that all have a right MAC.
func binding(record func(tx store.Tx) error) state.Binding {
	return state.Binding{
		Verify: func(_, _ []byte) error { return nil },
		Record: func(tx store.Tx, _ uint64) error { return record(tx) },
	}
}

// A row whose MAC is wrong is named and counted, also when the build is interrupted. It is bound as
// it is, so that it stops neither the build nor the deployment.
func TestABuildNamesRowsWithAWrongMAC(t *testing.T) {
	f := newFixture(t)
	rows := map[string][]byte{"credential/t/c/1": []byte("bad, and without a MAC"), "key/t/00000001/mac": []byte("bad, and without a MAC")}
	want := map[string]int{}
	for i := range 1000 {
		rows[fmt.Sprintf("user/email/%d", i)] = []byte("good")
	}
	for _, key := range []string{"apikey/hash/1/a", "key/t/00000001/public", "tenant/system", "user/email/5", "user/email/999"} { // of several commits, also the last one
		rows[key] = []byte("bad")
		want[key]++
	}
	f.must(f.update(audit.APIKeyCreated, rows))
	gone := make(map[string][]byte)
	for key := range f.own() {
		gone[key] = nil
	}
	f.tamper(gone)
	f.must(f.reopen())

	got := map[string]int{}
	var total uint64
	interrupted := errors.New("interrupted")
	b := state.Binding{
		Verify: func(_, value []byte) error {
			if bytes.HasPrefix(value, []byte("bad")) {
				return errors.New("wrong")
			}
			return nil
		},
		Report: func(e *state.RowError) {
			got[string(e.Key)]++
			if f, _ := state.FamilyOf(e.Key); e.Reason != state.Damaged || e.Family != f.Prefix {
				t.Errorf("%+v", e)
			}
		},
		Record: func(store.Tx, uint64) error { return interrupted },
	}
	if err := f.state.Build(t.Context(), f.raw, b); !errors.Is(err, interrupted) {
		t.Fatal(err)
	}
	f.must(f.reopen())
	for key := range got {
		got[key] = 1 // those of the interrupted commit are reported again
	}
	first := len(got)
	b.Record = func(tx store.Tx, wrong uint64) error {
		total = wrong
		_, err := f.log.Append(tx, event(audit.StateCommitted))
		return err
	}
	f.must(f.state.Build(t.Context(), f.raw, b))
	for key := range got {
		got[key] = 1
	}
	if !f.state.Complete() || !maps.Equal(got, want) || total != uint64(len(want)) || first == 0 {
		t.Errorf("complete %v, %d rows with a wrong MAC: %v", f.state.Complete(), total, got)
	}
	f.check()
	f.must(f.state.CheckOwn(t.Context(), f.raw))
	if len(f.refused) > 0 || f.state.Halted() != nil {
		t.Errorf("refused %v, halted by %v", f.refused, f.state.Halted())
	}
	for key := range f.own() {
		if key == "state/building" || key == "state/building-wrong" {
			t.Errorf("%s is left", key)
		}
	}
}
