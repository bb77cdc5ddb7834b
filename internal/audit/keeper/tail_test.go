package keeper

import (
	"slices"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/test/audittest"
)

// A tail skips entries that were archived before it read them. It stops reading a log that has lost
// entries.
func TestATailGoesOnWhereTheDatabaseDoes(t *testing.T) {
	f := audittest.NewFixture(t)
	a, _ := f.Folder()
	zero := uint64(0)
	tail, err := f.Log.Tail(t.Context(), audittest.Principal(audittest.TenantA), &zero)
	if err != nil {
		t.Fatal(err)
	}
	f.Old()
	if _, err := (&Cutter{Log: f.Log.Log, Reader: f.Log.Reader, Archive: a, Keep: audittest.Keep}).Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	left := f.SequencesOf(audittest.TenantA)
	if got := audittest.Drain(t, tail); len(left) == 0 || left[0] < 50 || !slices.Equal(got, left) {
		t.Errorf("%v, want %v", got, left)
	}
	if again, err := f.Log.Tail(t.Context(), audittest.Principal(audittest.TenantA), &zero); err != nil || !slices.Equal(audittest.Drain(t, again)[:len(left)], left) {
		t.Error(err)
	}
	f.Log.Halt(&audit.RollbackError{LostTo: 1 << 40, Epoch: 1, Source: "a test"})
	if _, err := tail.Next(t.Context()); fault.Of(err) != fault.Unavailable {
		t.Error(err)
	}
}
