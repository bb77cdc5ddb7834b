package metrics

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/latticekeep/latticekeep/internal/fault"
)

// service is a KMS key whose calls have the result err.
type service struct{ err error }

func (s *service) ID() string { return "key" }

func (s *service) Wrap(context.Context, string, []byte) ([]byte, error) { return nil, s.err }

func (s *service) Unwrap(context.Context, string, []byte) ([]byte, error) { return nil, s.err }

// counts returns the calls of the KMS that are not 0, as "operation result count".
func counts(t *testing.T, c *Calls) string {
	t.Helper()
	registry := prometheus.NewRegistry()
	registry.MustRegister(c.Collectors()...)
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == "latticekeep_kms_calls_total" && m.GetCounter().GetValue() > 0 {
				lines = append(lines, fmt.Sprint(m.GetLabel()[0].GetValue(), " ", m.GetLabel()[1].GetValue(), " ", m.GetCounter().GetValue()))
			}
		}
	}
	return strings.Join(lines, ", ")
}

// Nobody is woken because a caller hung up.
func TestCallsOfTheKMSAreCountedByWhatBecameOfThem(t *testing.T) {
	ended, end := context.WithCancel(t.Context())
	end()
	for _, tc := range []struct {
		ctx  context.Context
		err  error
		want string
	}{
		{t.Context(), nil, "ok"},
		{ended, nil, "ok"},
		{t.Context(), fault.Wrap(fault.Unavailable, "retry", errors.New("timeout")), "unavailable"},
		{ended, fault.Unavailable, "cancelled"},
		{t.Context(), fmt.Errorf("asking: %w", fault.Forbidden), "refused"},
		{t.Context(), errors.New("garbage"), "failed"},
	} {
		c := NewCalls()
		key := c.MeasureKMS(&service{tc.err})
		if _, err := key.Wrap(tc.ctx, "", nil); !errors.Is(err, tc.err) {
			t.Errorf("%v: the caller gets %v", tc.err, err)
		}
		_, _ = key.Unwrap(tc.ctx, "", nil)
		_, _ = key.Unwrap(tc.ctx, "", nil)
		if got, want := counts(t, c), fmt.Sprintf("unwrap %[1]s 2, wrap %[1]s 1", tc.want); got != want {
			t.Errorf("%v: %s, want %s", tc.err, got, want)
		}
	}
}
