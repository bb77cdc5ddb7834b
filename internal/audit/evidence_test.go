package audit

import (
	"slices"
	"testing"

	"github.com/latticekeep/latticekeep/internal/authz"
)

func TestTenantsAreThoseOfTheLog(t *testing.T) {
	f := newFixture(t)
	f.fill(30)
	got, err := f.log.Tenants(t.Context())
	if want := []authz.TenantID{authz.SystemTenant, tenantA, tenantB}; err != nil || !slices.Equal(got, want) {
		t.Errorf("%v %v, want %v", got, err, want)
	}
	entries := f.entries()
	last := entries[len(entries)-1]
	for _, c := range []struct {
		behind, to uint64
		want       int
	}{{0, 0, 0}, {0, 1, 1}, {0, maxInteger, 3}, {last.Sequence, maxInteger, 0}, {last.Sequence - 1, maxInteger, 1}} {
		if got, err := f.log.TenantsWithin(t.Context(), c.behind, c.to); err != nil || len(got) != c.want {
			t.Errorf("behind %d to %d: %v %v, want %d", c.behind, c.to, got, err, c.want)
		}
	}
}
