package audit

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/latticekeep/latticekeep/internal/store"
)

// cleanRows is the maximum number of entries that one transaction removes.
const cleanRows = 256

// removeEntry removes an entry and the rows that only it needs. All older entries must be gone.
func removeEntry(tx store.Tx, key, row []byte) error {
	if err := tx.Delete(key); err != nil {
		return err
	}
	if first, ok := rowBatch(row); ok && binary.BigEndian.Uint32(row[13:])+1 == binary.BigEndian.Uint32(row[9:]) {
		if err := tx.Delete(batchKey(first)); err != nil { // last entry of its group
			return err
		}
	}
	at, err := decodeStored(row, noSignature)
	if err != nil {
		return nil // damaged since it was archived: the other rows stay, and nobody reads them
	}
	if err := removeCurrent(tx, at.entry); err != nil {
		return err
	}
	tenant, n := at.entry.TenantID, at.entry.TenantSequence
	if n > 1 { // the previous index row stayed while it was the newest
		if err := tx.Delete(tenantKey(tenant, n-1)); err != nil {
			return err
		}
	}
	if n%blockSize == 0 {
		if err := tx.Delete(summaryKey(tenant, blockOf(n))); err != nil {
			return err
		}
	}
	newer, err := tx.Get(tenantKey(tenant, n+1))
	if err != nil || newer == nil {
		return err
	}
	return tx.Delete(tenantKey(tenant, n))
}

// removeCurrent removes the row that names the current version of a credential, together with the
// entry that records its deletion. From then on the base does not list the credential.
func removeCurrent(tx store.Tx, e *Entry) error {
	if e.EventType != CredentialDeleted || e.Outcome != Success || e.Resource.Type != CredentialResource {
		return nil
	}
	key := currentKey(e.TenantID, e.Resource.ID)
	row, err := tx.Get(key)
	if err != nil || row == nil || sequenceOf(row) > e.Sequence { // the credential exists again
		return err
	}
	return tx.Delete(key)
}

// leftOver reports whether archived entries are still in the database, and returns the newest
// segment. Error: errDamagedLog when that segment does not end where the signed base ends: an
// unsigned row alone is no reason to remove entries.
func (c *Cutter) leftOver(ctx context.Context) (newest Segment, found bool, err error) {
	var row []byte
	err = c.Log.chain.store.View(ctx, func(r store.Reader) error {
		if newest, err = newestSegment(r); err != nil || newest.To == 0 {
			return err
		}
		err := r.Scan(store.Range{From: entryRange.From, To: entryKey(newest.To + 1)}, func(_, _ []byte) bool {
			found = true
			return false
		})
		if err == nil && found {
			row, err = r.Get(baseKey)
			row = bytes.Clone(row)
		}
		return err
	})
	if err != nil || !found {
		return Segment{}, false, err
	}
	base, err := c.Log.chain.ownBase(row)
	if err != nil {
		return Segment{}, false, err
	}
	if base.Sequence() != newest.To || base.head.hash != newest.Hash {
		return Segment{}, false, errDamagedLog
	}
	return newest, true, nil
}

// removeArchived removes the archived entries up to made, and the rows that only they need: index
// rows and summaries of their tenants, and signatures of their groups. The newest index row of each
// tenant stays, because the tenant's next entry continues from it. The caller must have verified
// the segment that ends at made. Entries that another process archives in the meantime are left to
// that process.
func (c *Cutter) removeArchived(ctx context.Context, made uint64) error {
	for more := true; more; {
		err := c.Log.chain.store.Update(ctx, func(tx store.Tx) error {
			to, err := c.Log.chain.cutTo(tx)
			if err != nil {
				return err
			}
			to = min(to, made)
			n := 0
			var bad error
			err = tx.Scan(store.Range{From: entryRange.From, To: entryKey(to + 1)}, func(key, row []byte) bool {
				bad = removeEntry(tx, bytes.Clone(key), bytes.Clone(row))
				n++
				return bad == nil && n < cleanRows
			})
			more = n == cleanRows
			return errors.Join(err, bad)
		})
		if err != nil {
			return fmt.Errorf("removing entries that are in the archive: %w", err)
		}
	}
	return nil
}
