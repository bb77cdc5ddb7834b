package keeper

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/entries"
	"github.com/latticekeep/latticekeep/internal/store"
)

// resume removes entries that an earlier run archived. It first makes sure that they are still in
// the archive.
func (c *Cutter) resume(ctx context.Context) error {
	newest, found, err := c.leftOver(ctx)
	if err != nil || !found {
		return err
	}
	data, err := c.Archive.Get(ctx, newest.Name)
	if err != nil {
		return fmt.Errorf("reading %s before its entries are removed: %w", newest.Name, err)
	}
	digest := audit.NewLineDigest()
	err = audit.Unzip(data, func(lines io.Reader) error {
		_, err := io.Copy(digest, lines)
		return err
	})
	if err != nil || digest.Sum() != newest.Digest {
		return fmt.Errorf("reading %s before its entries are removed: %w", newest.Name, errAltered)
	}
	return c.removeArchived(ctx, newest.To)
}

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

// leftOver reports whether archived entries are still in the database, and returns the newest
// segment. Error: audit.ErrDamagedLog when that segment does not end where the signed base ends: an
// unsigned row alone is no reason to remove entries.
func (c *Cutter) leftOver(ctx context.Context) (newest audit.Segment, found bool, err error) {
	var row []byte
	err = c.Log.Chain.Store.View(ctx, func(r store.Reader) error {
		if newest, err = audit.NewestSegment(r); err != nil || newest.To == 0 {
			return err
		}
		found, err = entries.Exist(r, store.Range{From: audit.EntryRange.From, To: audit.EntryKey(newest.To + 1)})
		if err == nil && found {
			row, err = r.Get(audit.BaseKey)
			row = bytes.Clone(row)
		}
		return err
	})
	if err != nil || !found {
		return audit.Segment{}, false, err
	}
	base, err := c.Log.Chain.ParseOwnBase(row)
	if err != nil {
		return audit.Segment{}, false, err
	}
	if base.Sequence() != newest.To || base.Head.Hash != newest.Hash {
		return audit.Segment{}, false, audit.ErrDamagedLog
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
		err := c.Log.Chain.Store.Update(ctx, func(tx store.Tx) error {
			to, err := c.Log.Chain.CutTo(tx)
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
