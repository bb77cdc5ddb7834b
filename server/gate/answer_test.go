package gate

import (
	"errors"
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
)

// The table of kinds and statuses, written out on its own.
func TestEveryKindHasItsStatus(t *testing.T) {
	v1, v2 := &Version{schema: 400}, &Version{schema: 422}
	for kind, want := range map[fault.Kind]int{
		fault.Internal: 500, fault.Invalid: 422, fault.Unauthenticated: 401, fault.Forbidden: 403, fault.NotFound: 404,
		fault.Conflict: 409, fault.Exhausted: 429, fault.Unavailable: 503, fault.Kind(200): 500,
	} {
		if got := v2.status(kind); got != want {
			t.Errorf("%v: %d", kind, got)
		}
		if kind == fault.Invalid {
			want = 400
		}
		if got := v1.status(kind); got != want {
			t.Errorf("v1, %v: %d", kind, got)
		}
	}
}

func TestDefectsOutagesAndStrangersGetNoMoreThanTheKind(t *testing.T) {
	v := &Version{schema: 422}
	for _, kind := range []fault.Kind{fault.Internal, fault.Unauthenticated, fault.Exhausted, fault.Unavailable} {
		err := fmt.Errorf("unsealing: %w", fault.Wrap(kind, "row 7 of the table", errors.New("page 3")))
		if _, message := v.describe(err); message != kind.Error() {
			t.Errorf("%v: %q", kind, message)
		}
	}
	for kind, code := range map[fault.Kind]int{fault.Invalid: 422, fault.Forbidden: 403, fault.NotFound: 404, fault.Conflict: 409} {
		err := fmt.Errorf("sealing: %w", fault.Wrap(kind, "the name is empty", errors.New("page 3")))
		if got, message := v.describe(err); got != code || message != "the name is empty" {
			t.Errorf("%d %q", got, message)
		}
	}
	if code, message := v.describe(errors.New("page 3")); code != 500 || message != "internal error" {
		t.Errorf("%d %q", code, message)
	}
}

func TestRefusalsKeepTheirStatus(t *testing.T) {
	v := &Version{schema: 422}
	for want, err := range map[int]error{
		http.StatusBadRequest:      BadRequest("m"),
		http.StatusNotFound:        Refusal(http.StatusNotFound, "m"),
		http.StatusTooManyRequests: &tooMany{time.Second},
	} {
		if got, _ := v.describe(fmt.Errorf("asking: %w", err)); got != want {
			t.Errorf("%v: %d", err, got)
		}
	}
	var r *refusal
	if errors.As(Refusal(http.StatusBadRequest, "m"), &r) {
		t.Error("a refusal that has its entry would get another")
	}
}
