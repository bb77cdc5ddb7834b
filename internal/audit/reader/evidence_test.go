package reader_test

import (
	"slices"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/test/audittest"
)

func TestTenantsAreThoseOfTheLog(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Fill(30)
	got, err := f.Log.Tenants(t.Context())
	if want := []authz.TenantID{authz.SystemTenant, audittest.TenantA, audittest.TenantB}; err != nil || !slices.Equal(got, want) {
		t.Errorf("%v %v, want %v", got, err, want)
	}
	entries := f.Entries()
	last := entries[len(entries)-1]
	for _, c := range []struct {
		behind, to uint64
		want       int
	}{{0, 0, 0}, {0, 1, 1}, {0, audit.MaxInteger, 3}, {last.Sequence, audit.MaxInteger, 0}, {last.Sequence - 1, audit.MaxInteger, 1}} {
		if got, err := f.Log.TenantsWithin(t.Context(), c.behind, c.to); err != nil || len(got) != c.want {
			t.Errorf("behind %d to %d: %v %v, want %d", c.behind, c.to, got, err, c.want)
		}
	}
}
