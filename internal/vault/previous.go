package vault

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/vault/history"
)

// PreviousVersion names the previous version of an object's credential, while it is readable.
type PreviousVersion = history.PreviousVersion

// deletePrevious deletes all previous versions of the credential that row names.
func deletePrevious(tx store.Tx, tenant authz.TenantID, uid string, row *ownerRow) error {
	return row.Previous.Delete(tx, tenant, uid, row.Credential)
}

// previousVersions ends the previous versions whose time is over.
type previousVersions struct {
	store  store.Store
	guard  *guard.Guard
	owners ownerRows
	now    func() time.Time
}

// endBatch bounds how many previous versions one transaction ends.
const endBatch = 64

// endDue deletes the previous versions whose end is reached and returns their number.
func (v *previousVersions) endDue(ctx context.Context) (int, error) {
	n, err := store.Sweep(ctx, v.store, history.Due(v.now()), endBatch, v.end)
	if err != nil {
		return n, fmt.Errorf("ending previous versions: %w", err)
	}
	return n, nil
}

// end deletes a row of the index of ends, with the previous version that it names if the object's row
// agrees. When somebody has changed one of these rows, nothing is readable, and the row of the index
// stays until they are mended.
func (v *previousVersions) end(tx store.Tx, due []byte) (gone bool, err error) {
	tenant, uid := history.ParseEndKey(due)
	row, err := v.owners.get(tx, tenant, uid)
	if errors.Is(err, fault.Internal) {
		row, err = nil, nil // without the object's row nothing is readable
	}
	var stored []byte
	if row != nil && row.Previous != nil && string(history.EndKey(row.Previous.Until, tenant, uid)) == string(due) {
		if stored, err = tx.Get(history.PreviousKey(tenant, row.Credential, row.Previous.Version)); err == nil && stored != nil {
			err = deletePrevious(tx, tenant, uid, row)
		}
	}
	if state.IsRefused(err) {
		return false, nil
	}
	if err == nil {
		err = tx.Delete(due)
	}
	if err != nil || stored == nil {
		return err == nil, err // a version that was deleted with its credential has an entry
	}
	version := row.Previous.Version
	row.Previous = nil
	if err := v.owners.put(tx, tenant, uid, row); err != nil {
		return false, err
	}
	return true, appendEvent(v.guard, tx, audit.Event{
		Type: audit.CredentialVersionEnded, Outcome: audit.Success,
		Principal:  authz.Principal{Tenant: tenant, Kind: authz.System, ID: "latticekeep"},
		Resource:   audit.Resource{Type: audit.CredentialResource, ID: row.Credential},
		Attributes: map[string]string{audit.AttributeVersion: strconv.FormatUint(version, 10)},
	})
}
