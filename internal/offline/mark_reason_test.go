package offline

import (
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/internal/fault"
)

// Strangers see the message of an error in /readyz?verbose. The log and the command line have all of it.
func TestStrangersDoNotLearnWhereTheOtherStoreIs(t *testing.T) {
	for _, state := range []string{Restoring, Receiving, Leaving, Moved, "of a newer release"} {
		err := (&Mark{State: state, Other: "postgres://db.internal/vault", Since: "2026-11-25T22:00:00Z"}).Err()
		if got := fault.Message(err); strings.Contains(got, "db.internal") || strings.Contains(got, "latticekeep ") || got == "" {
			t.Errorf("%s: strangers see %q", state, got)
		}
		if named := strings.Contains(err.Error(), "db.internal"); named != (state == Receiving || state == Leaving || state == Moved) {
			t.Errorf("%s: %v", state, err)
		}
	}
}
