package keyring

import (
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/memory"
	"github.com/latticekeep/latticekeep/test/machine"
)

func TestATenantTakesTheMemoryThatTheFormulaSays(t *testing.T) {
	const tenants = 50
	f := newFixture(t, time.Hour)
	var ids []authz.TenantID
	for range tenants {
		id := authz.TenantID(authz.NewID("ten"))
		set, err := f.ring.NewSet(t.Context(), id, 1)
		if err != nil {
			t.Fatal(err)
		}
		f.put(t, set.Put)
		ids = append(ids, id)
	}
	took := machine.Heap(func() *Ring {
		r := newRing(f.store, f.kms, Config{CacheTTL: time.Hour, Now: f.now}, f.ring.deployment)
		for _, id := range ids {
			if _, err := r.Version(t.Context(), id, 1); err != nil {
				t.Fatal(err)
			}
		}
		return r
	})
	machine.CheckHeap(t, tenants, took, memory.Deployment{Tenants: tenants}.Need()-memory.Deployment{}.Need())
}
