package v2

import (
	"context"
	"errors"
	"testing"

	"github.com/latticekeep/latticekeep/internal/fault"
)

// A tenant's next one waits for the one before, and no longer than its caller; no
// other tenant does.
func TestTenantsComputeOneByOne(t *testing.T) {
	var all turns
	done, err := all.take(t.Context(), "ten_a")
	if err != nil {
		t.Fatal(err)
	}
	other, err := all.take(t.Context(), "ten_b")
	if err != nil {
		t.Fatal("another tenant waits:", err)
	}
	other()
	gone, leave := context.WithCancel(t.Context())
	leave()
	if _, err := all.take(gone, "ten_a"); !errors.Is(err, fault.Unavailable) {
		t.Error("two of one tenant:", err)
	}
	done()
	if done, err = all.take(t.Context(), "ten_a"); err != nil {
		t.Fatal(err)
	}
	done()
	if len(all.queues) != 0 {
		t.Errorf("%d tenants are remembered", len(all.queues))
	}
}

func TestReportsAreNamedByTheirType(t *testing.T) {
	for name, want := range map[string]string{
		"soc2-1-a.pdf": "application/pdf", "soc2-1-a.oscal.json": "application/json", "soc2-1-a.pdf.sig": "application/octet-stream", "a": "application/octet-stream",
	} {
		if got := reportType(name); got != want {
			t.Errorf("%s: %s", name, got)
		}
	}
}
