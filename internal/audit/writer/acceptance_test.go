package writer_test

import (
	"errors"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/audittest"
)

// Damaged rows of a tenant fail at most the commit in which other replicas find the damage while
// another process writes.
func TestADamagedTenantIsItsOwnTroubleAmongReplicas(t *testing.T) {
	replicas := audittest.NewReplicas(t, 2)
	a, b := replicas[0], replicas[1]
	for range writer.AloneAfter + 2 {
		a.Append(audit.AuditRead, audittest.TenantA)
	}
	a.Append(audit.AuditRead, audittest.TenantB)
	a.Put(a.Read().With(func(tx store.Tx) error { return tx.Put(audit.TenantKey(string(audittest.TenantB), 1), []byte("junk")) }))
	b.Append(audit.AuditRead, audittest.TenantA)
	both := func() error {
		return a.Update(t.Context(), func(tx store.Tx) error {
			_, err := a.Log.Append(tx, audit.Event{Type: audit.AuditRead, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantA)})
			if err == nil {
				_, err = a.Log.Append(tx, audit.Event{Type: audit.AuditRead, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantB)})
			}
			return err
		})
	}
	if err := both(); !errors.Is(err, fault.Internal) {
		t.Fatal(err)
	}
	a.Append(audit.AuditRead, audittest.TenantA)
	if err := a.Update(t.Context(), func(tx store.Tx) error {
		_, err := a.Log.Append(tx, audit.Event{Type: audit.AuditRead, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantB)})
		if err == nil {
			t.Error("the tenant's own event is let in")
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
}
