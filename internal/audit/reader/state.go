package reader

import (
	"context"
	"encoding/hex"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/store"
)

// FindState returns the sequence of an entry that commits to a state, and 0 when there is none. It
// reads every entry up to the head, each of which names the hash of the one before, and nothing that
// is only derived from the entries: somebody who writes the database cannot hide one. Archived
// entries have no state unless the base keeps one that has. Error: audit.ErrDamagedLog.
func (rd *Reader) FindState(ctx context.Context) (sequence uint64, err error) {
	head, err := rd.chain.VerifiedHead(ctx)
	if err != nil || head.Sequence == 0 {
		return 0, err
	}
	base, err := rd.chain.ArchivedTo(ctx)
	if err != nil {
		return 0, err
	}
	rng, previous := store.Range{From: audit.EntryKey(1), To: audit.EntryKey(head.Sequence + 1)}, audit.ZeroHash
	if base != nil {
		for _, e := range base.Kept {
			if e.Attributes[audit.AttributeState] != "" {
				return e.Sequence, nil
			}
		}
		rng.From, previous = audit.EntryKey(base.Head.Sequence+1), base.Head.PreviousHash()
	}
	err = audit.ScanEntries(ctx, rd.chain.Store, rng, func(row audit.EntryRow) error {
		e, err := audit.DecodeStoredEntry(row.Row, row.Batch)
		if err != nil || e.Entry.PreviousHash != previous {
			return audit.ErrDamagedLog
		}
		if sequence == 0 && e.Entry.Attributes[audit.AttributeState] != "" {
			sequence = e.Entry.Sequence
		}
		previous = e.Entry.Hash
		return nil
	})
	if err == nil && previous != hex.EncodeToString(head.Hash[:]) {
		err = audit.ErrDamagedLog
	}
	return sequence, err
}
