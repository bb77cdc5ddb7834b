// Package entries reads the entries of the log from the store. It is the only place that knows in
// which rows an entry lies, so that everybody else deals with the row of one entry, as package audit
// describes it. A new entry has a row of its own. Once it is closed, a [Block] moves it into a row
// with its neighbours, a pack, which takes less of the store. An entry is in one of the two.
//
// The package verifies nothing. The row that comes out of a pack is the one that went in, so it is
// verified as before.
package entries

import (
	"bytes"
	"context"
	"crypto/sha3"
	"errors"
	"fmt"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/store"
)

// ReadRow returns the row of an entry, and nil if the entry does not exist. The row is empty if it is
// in a pack and damaged. It is valid only inside the closure of r.
func ReadRow(r store.Reader, sequence uint64) ([]byte, error) {
	row, err := r.Get(audit.EntryKey(sequence))
	if err == nil && row == nil && sequence > 0 && sequence <= audit.MaxInteger {
		block, place := blockOf(sequence)
		var b []byte
		if b, err = r.Get(PackKey(block)); b != nil {
			p, damaged := decode(b)
			if damaged != nil {
				return []byte{}, err
			}
			row = p.row(place)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("reading an audit entry: %w", err)
	}
	return row, nil
}

// Scan calls visit for the row of each entry in a range of [audit.EntryRange], in the order of the
// keys, until visit returns false. A row of a pack that is damaged is empty. A pack that cannot be
// decoded at all is one such row, of its first sequence in the range. Keys and rows are valid only
// inside the closure of r. visit must not write.
func Scan(r store.Reader, rng store.Range, visit func(key, row []byte) bool) error {
	c := newPackCursor(r, rng)
	var bad error
	more := true
	packedBefore := func(key []byte) { // nil: all of them
		for more && bad == nil {
			var sequence uint64
			sequence, bad = c.peek()
			at := audit.EntryKey(sequence)
			if sequence == 0 || bad != nil || key != nil && (bytes.Compare(at, key) < 0) == rng.Reverse {
				return
			}
			more = visit(at, c.take(sequence))
		}
	}
	err := r.Scan(rng, func(key, row []byte) bool {
		packedBefore(key)
		more = more && bad == nil && visit(key, row)
		return more
	})
	if err == nil {
		packedBefore(nil)
	}
	return errors.Join(err, bad)
}

// ReadRows returns copies of the row of an entry and of the row of its group. The row is nil if the
// entry does not exist; the batch is nil if the entry has no group.
func ReadRows(r store.Reader, sequence uint64) (row, batch []byte, err error) {
	if row, err = ReadRow(r, sequence); err != nil {
		return nil, nil, err
	}
	row = bytes.Clone(row)
	if first, ok := audit.RowBatch(row); ok {
		if batch, err = r.Get(audit.BatchKey(first)); err != nil {
			return nil, nil, fmt.Errorf("reading the signature of audit entries: %w", err)
		}
	}
	return row, bytes.Clone(batch), nil
}

// ReadStored is [Read] without encoding the signature as text.
func ReadStored(r store.Reader, sequence uint64) (audit.StoredEntry, error) {
	row, batch, err := ReadRows(r, sequence)
	switch {
	case err != nil:
		return audit.StoredEntry{}, err
	case row == nil:
		return audit.StoredEntry{}, audit.ErrNoEntry
	}
	e, err := audit.DecodeStoredEntry(row, batch)
	if err != nil || e.Entry.Sequence != sequence {
		return audit.StoredEntry{}, audit.ErrDamagedLog
	}
	return e, nil
}

// Read returns the whole entry, unverified. Errors: audit.ErrNoEntry, or fault.Internal if the row
// does not hold that entry.
func Read(r store.Reader, sequence uint64) (*audit.Entry, error) {
	e, err := ReadStored(r, sequence)
	if err != nil {
		return nil, err
	}
	return e.SignedEntry(), nil
}

// ReadRequired reads an entry that must exist. Error: audit.ErrDamagedLog if it is missing.
func ReadRequired(r store.Reader, sequence uint64) (audit.StoredEntry, error) {
	e, err := ReadStored(r, sequence)
	if errors.Is(err, audit.ErrNoEntry) {
		err = audit.ErrDamagedLog
	}
	return e, err
}

// ReadHash returns the hash of a stored entry without checking the signature. Errors:
// audit.ErrNoEntry, audit.ErrDamagedLog for a row that holds no entry.
func ReadHash(r store.Reader, sequence uint64) (hash [32]byte, err error) {
	row, err := ReadRow(r, sequence)
	switch {
	case err != nil:
		return hash, err
	case row == nil:
		return hash, audit.ErrNoEntry
	}
	core, _, err := audit.SplitRow(row)
	if err != nil {
		return hash, audit.ErrDamagedLog
	}
	return sha3.Sum256(core), nil
}

// ReadNewest returns the highest sequence that has an entry, 0 for none.
func ReadNewest(r store.Reader) (newest uint64, err error) {
	rows := audit.EntryRange
	rows.Reverse = true
	err = Scan(r, rows, func(key, _ []byte) bool {
		newest = keySequence(key)
		return false
	})
	return newest, err
}

// keySequence returns the sequence that the key of an entry's row names.
func keySequence(key []byte) uint64 { return audit.SequenceOf(key[len(audit.EntryRange.From):]) }

// Exist reports whether a range of [audit.EntryRange] has an entry.
func Exist(r store.Reader, rng store.Range) (found bool, err error) {
	err = Scan(r, rng, func(_, _ []byte) bool {
		found = true
		return false
	})
	return found, err
}

// Row is the row of an entry, with the row of its group if it has one.
type Row struct{ Key, Row, Batch []byte }

// A page bounds the rows that one snapshot reads, as in [audit.ScanAll].
const pageBytes = 4 << 20

// ScanAll visits the rows of the entries in a range of [audit.EntryRange], in order, in snapshots of
// one page each.
func ScanAll(ctx context.Context, s store.Store, rng store.Range, visit func(Row) error) error {
	for {
		var page []Row
		more := false
		err := s.View(ctx, func(r store.Reader) (err error) {
			page, more, err = readPage(r, rng)
			return err
		})
		if err != nil {
			return err
		}
		for _, e := range page { // the snapshot has ended, so visit may be slow
			if err := visit(e); err != nil {
				return err
			}
		}
		if !more {
			return nil
		}
		rng.From = append(bytes.Clone(page[len(page)-1].Key), 0)
	}
}

// readPage returns copies of the first rows of the range, and reports whether there may be more.
func readPage(r store.Reader, rng store.Range) (page []Row, more bool, err error) {
	size := 0
	err = Scan(r, rng, func(key, row []byte) bool {
		page = append(page, Row{Key: bytes.Clone(key), Row: bytes.Clone(row)})
		size += len(row)
		more = len(page) == audit.PageRows || size >= pageBytes
		return !more
	})
	if err != nil {
		return nil, false, err
	}
	var first uint64
	var batch []byte
	for i := range page {
		of, ok := audit.RowBatch(page[i].Row)
		if !ok {
			continue
		}
		if batch == nil || of != first {
			if batch, err = r.Get(audit.BatchKey(of)); err != nil {
				return nil, false, fmt.Errorf("reading the signature of audit entries: %w", err)
			}
			first, batch = of, bytes.Clone(batch)
		}
		page[i].Batch = batch
	}
	return page, more, nil
}
