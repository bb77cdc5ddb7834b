package v2

import (
	"errors"
	"fmt"
	"testing"

	"github.com/latticekeep/latticekeep/internal/fault"
)

// The table of kinds and statuses, written out on its own.
func TestEveryKindHasItsStatus(t *testing.T) {
	for kind, want := range map[fault.Kind]int{
		fault.Internal: 500, fault.Invalid: 422, fault.Unauthenticated: 401, fault.Forbidden: 403, fault.NotFound: 404,
		fault.Conflict: 409, fault.Exhausted: 429, fault.Unavailable: 503, fault.Kind(200): 500,
	} {
		if got := status(kind); got != want {
			t.Errorf("%v: %d", kind, got)
		}
	}
}

func TestOnlyAnInvalidRequestGetsTheServicesOwnMessage(t *testing.T) {
	for _, kind := range []fault.Kind{
		fault.Internal, fault.Unauthenticated, fault.Forbidden, fault.NotFound, fault.Conflict, fault.Exhausted, fault.Unavailable,
	} {
		err := fmt.Errorf("unsealing: %w", fault.Wrap(kind, "row 7 of the table", errors.New("page 3")))
		if _, message := describe(err); message != kind.Error() {
			t.Errorf("%v: %q", kind, message)
		}
	}
	err := fmt.Errorf("sealing: %w", fault.Wrap(fault.Invalid, "the name is empty", errors.New("page 3")))
	if code, message := describe(err); code != 422 || message != "the name is empty" {
		t.Errorf("%d %q", code, message)
	}
	if code, message := describe(errors.New("page 3")); code != 500 || message != "internal error" {
		t.Errorf("%d %q", code, message)
	}
}
