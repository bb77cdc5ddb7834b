package audit

import (
	"errors"
	"testing"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Damaged rows of a tenant fail at most the commit in which other replicas find the damage while
// another process writes.
func TestADamagedTenantIsItsOwnTroubleAmongReplicas(t *testing.T) {
	replicas := newReplicas(t, 2)
	a, b := replicas[0], replicas[1]
	for range aloneAfter + 2 {
		a.append(AuditRead, tenantA)
	}
	a.append(AuditRead, tenantB)
	a.put(a.read().with(func(tx store.Tx) error { return tx.Put(tenantKey(string(tenantB), 1), []byte("junk")) }))
	b.append(AuditRead, tenantA)
	both := func() error {
		return a.Update(t.Context(), func(tx store.Tx) error {
			_, err := a.log.Append(tx, Event{Type: AuditRead, Outcome: Success, Principal: principal(tenantA)})
			if err == nil {
				_, err = a.log.Append(tx, Event{Type: AuditRead, Outcome: Success, Principal: principal(tenantB)})
			}
			return err
		})
	}
	if err := both(); !errors.Is(err, fault.Internal) {
		t.Fatal(err)
	}
	a.append(AuditRead, tenantA)
	if err := a.Update(t.Context(), func(tx store.Tx) error {
		_, err := a.log.Append(tx, Event{Type: AuditRead, Outcome: Success, Principal: principal(tenantB)})
		if err == nil {
			t.Error("the tenant's own event is let in")
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
}
