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
	for to, want := range map[uint64]int{0: 0, 1: 1, maxInteger: 3} {
		if got, err := f.log.TenantsUpTo(t.Context(), to); err != nil || len(got) != want {
			t.Errorf("up to %d: %v %v, want %d", to, got, err, want)
		}
	}
}
