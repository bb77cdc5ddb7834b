package keeper

import (
	"context"
	"encoding/binary"
	"fmt"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/chain"
	"github.com/latticekeep/latticekeep/internal/audit/entries"
	"github.com/latticekeep/latticekeep/internal/store"
)

// cleanRows is the maximum number of entries that one transaction removes.
const cleanRows = 256

// removeDerived removes the rows that only an entry needs. All older entries must be gone.
func removeDerived(tx store.Tx, row []byte) error {
	if first, ok := audit.RowBatch(row); ok && binary.BigEndian.Uint32(row[13:])+1 == binary.BigEndian.Uint32(row[9:]) {
		if err := tx.Delete(audit.BatchKey(first)); err != nil { // last entry of its group
			return err
		}
	}
	at, err := audit.DecodeStoredEntry(row, audit.NoSignature)
	if err != nil {
		return nil // damaged since it was archived: the other rows stay, and nobody reads them
	}
	if err := removeCurrent(tx, at.Entry); err != nil {
		return err
	}
	tenant, n := at.Entry.TenantID, at.Entry.TenantSequence
	if n > 1 { // the previous index row stayed while it was the newest
		if err := tx.Delete(audit.TenantKey(tenant, n-1)); err != nil {
			return err
		}
	}
	if n%audit.BlockSize == 0 {
		if err := tx.Delete(audit.SummaryKey(tenant, audit.BlockOf(n))); err != nil {
			return err
		}
	}
	newer, err := tx.Get(audit.TenantKey(tenant, n+1))
	if err != nil || newer == nil {
		return err
	}
	return tx.Delete(audit.TenantKey(tenant, n))
}

// removeCurrent removes the row that names the current version of a credential, together with the
// entry that records its deletion. From then on the base does not list the credential.
func removeCurrent(tx store.Tx, e *audit.Entry) error {
	if e.EventType != audit.CredentialDeleted || e.Outcome != audit.Success || e.Resource.Type != audit.CredentialResource {
		return nil
	}
	key := audit.CurrentKey(e.TenantID, e.Resource.ID)
	row, err := tx.Get(key)
	if err != nil || row == nil || audit.SequenceOf(row) > e.Sequence { // the credential exists again
		return err
	}
	return tx.Delete(key)
}

// removeArchived removes the archived entries up to made, and the rows that only they need: index
// rows and summaries of their tenants, and signatures of their groups. The newest index row of each
// tenant stays, because the tenant's next entry continues from it. The caller must have verified
// the segment that ends at made. Entries that another process archives in the meantime are left to
// that process.
func removeArchived(ctx context.Context, l *chain.Chain, made uint64) error {
	for more := true; more; {
		err := l.Store.Update(ctx, func(tx store.Tx) error {
			to, err := l.CutTo(tx)
			if err != nil {
				return err
			}
			n, err := entries.Remove(tx, min(to, made), cleanRows, func(_, row []byte) error { return removeDerived(tx, row) })
			more = n == cleanRows
			return err
		})
		if err != nil {
			return fmt.Errorf("removing entries that are in the archive: %w", err)
		}
	}
	return nil
}
