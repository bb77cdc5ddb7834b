package audit

import (
	"slices"
	"testing"

	"github.com/latticekeep/latticekeep/internal/fault"
)

// A tail skips entries that were archived before it read them. It stops reading a log that has lost
// entries.
func TestATailGoesOnWhereTheDatabaseDoes(t *testing.T) {
	f := newFixture(t)
	a, _ := f.folder()
	zero := uint64(0)
	tail, err := f.log.Tail(t.Context(), principal(tenantA), &zero)
	if err != nil {
		t.Fatal(err)
	}
	f.old()
	if _, err := (&Cutter{Log: f.log.Log, Reader: f.log.Reader, Archive: a, Keep: keep}).Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	left := f.sequencesOf(tenantA)
	if got := drain(t, tail); len(left) == 0 || left[0] < 50 || !slices.Equal(got, left) {
		t.Errorf("%v, want %v", got, left)
	}
	if again, err := f.log.Tail(t.Context(), principal(tenantA), &zero); err != nil || !slices.Equal(drain(t, again)[:len(left)], left) {
		t.Error(err)
	}
	f.log.Halt(&RollbackError{LostTo: 1 << 40, Epoch: 1, Place: "a test"})
	if _, err := tail.Next(t.Context()); fault.Of(err) != fault.Unavailable {
		t.Error(err)
	}
}
