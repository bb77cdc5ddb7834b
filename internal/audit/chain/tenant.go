package chain

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"sort"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/entries"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Extent returns the first and the last tenant sequence of a tenant's entries in the database. If
// there are none, the first is larger than the last. The first is above 1 after older entries have
// moved to the archive. Rows of these entries may still be in the database, and Extent ignores
// them.
func (ch *Chain) Extent(r store.Reader, tenant string) (low, high uint64, err error) {
	low = 1
	rng := store.Prefix(audit.TenantPrefix(tenant))
	err = r.Scan(rng, func(key, _ []byte) bool {
		low = binary.BigEndian.Uint64(key[len(key)-8:])
		return false
	})
	if err != nil {
		return 0, 0, err
	}
	newest, err := audit.ReadTenantHead(r, tenant)
	if err != nil {
		return 0, 0, err
	}
	high = newest.Sequence
	cut, err := ch.CutTo(r)
	if err != nil || cut == 0 {
		return low, high, err
	}
	low, err = FirstRow(r, tenant, low, high, func(row audit.IndexRow) bool { return row.Sequence > cut })
	return low, high, err
}

// FirstRow returns the first tenant sequence from low to high for whose row wanted returns true,
// and high + 1 if there is none. If wanted is true for a row, it must be true for all later ones.
func FirstRow(r store.Reader, tenant string, low, high uint64, wanted func(audit.IndexRow) bool) (uint64, error) {
	var err error
	n := sort.Search(int(high+1-low), func(i int) bool {
		if err != nil {
			return true
		}
		var row audit.IndexRow
		row, err = ReadIndexRow(r, tenant, low+uint64(i))
		return err != nil || wanted(row)
	})
	return low + uint64(n), err
}

// ReadIndexRow reads the index row of a tenant's entry. Errors: audit.ErrDamagedLog, also for a row
// that is missing, and errors of the store.
func ReadIndexRow(r store.Reader, tenant string, tenantSequence uint64) (audit.IndexRow, error) {
	b, err := r.Get(audit.TenantKey(tenant, tenantSequence))
	if err != nil {
		return audit.IndexRow{}, err
	}
	return audit.DecodeIndexRow(b)
}

// ReadRows returns the entries that rows of a tenant's index name, in the order of the rows. Error:
// audit.ErrDamagedLog when an entry is not the one that its row names.
func ReadRows(r store.Reader, tenant string, rows []audit.IndexRow) ([]audit.StoredEntry, error) {
	found := make([]audit.StoredEntry, 0, len(rows))
	for len(rows) > 0 {
		run := runOf(rows)
		read, err := readRun(r, rows[:run])
		if err != nil {
			return nil, err
		}
		for i, e := range read {
			if e.Entry.Position() != rows[i].Position || e.Entry.TenantID != tenant {
				return nil, audit.ErrDamagedLog
			}
		}
		found, rows = append(found, read...), rows[run:]
	}
	return found, nil
}

// runOf returns how many of the first rows, newest first, are so close together that one scan over
// them costs less than a read for each.
func runOf(rows []audit.IndexRow) int {
	const between = 4
	n := 1
	for n < len(rows) && rows[n].Sequence < rows[n-1].Sequence && rows[n-1].Sequence-rows[n].Sequence <= between {
		n++
	}
	return n
}

// readRun reads the entries of a run of rows, newest first.
func readRun(r store.Reader, rows []audit.IndexRow) ([]audit.StoredEntry, error) {
	if len(rows) == 1 {
		e, err := entries.ReadStored(r, rows[0].Sequence)
		if fault.Of(err) == fault.NotFound {
			err = audit.ErrDamagedLog
		}
		return []audit.StoredEntry{e}, err
	}
	kept := make([][]byte, 0, len(rows))
	rng := store.Range{From: audit.EntryKey(rows[len(rows)-1].Sequence), To: audit.EntryKey(rows[0].Sequence + 1), Reverse: true}
	err := entries.Scan(r, rng, func(key, value []byte) bool {
		if bytes.Equal(key, audit.EntryKey(rows[len(kept)].Sequence)) {
			kept = append(kept, bytes.Clone(value))
		}
		return len(kept) < len(rows)
	})
	if err != nil {
		return nil, fmt.Errorf("reading audit entries: %w", err)
	}
	if len(kept) < len(rows) {
		return nil, audit.ErrDamagedLog // an entry is missing
	}
	found := make([]audit.StoredEntry, len(rows))
	var of uint64 // first entry of the group in batch
	var batch []byte
	for i, row := range kept {
		if first, grouped := audit.RowBatch(row); grouped && (batch == nil || first != of) {
			if batch, err = r.Get(audit.BatchKey(first)); err != nil {
				return nil, fmt.Errorf("reading the signature of audit entries: %w", err)
			}
			of, batch = first, bytes.Clone(batch)
		}
		if found[i], err = audit.DecodeStoredEntry(row, batch); err != nil || found[i].Entry.Sequence != rows[i].Sequence {
			return nil, audit.ErrDamagedLog
		}
	}
	return found, nil
}

// FindSequence looks up the entry with a sequence among the entries of a tenant. It reads the same
// number of rows whether the entry exists or not, and no rows of other tenants, so its duration
// reveals nothing about their entries.
func FindSequence(ch *Chain, r store.Reader, tenant string, sequence uint64) (row audit.IndexRow, found bool, err error) {
	low, high, err := ch.Extent(r, tenant)
	if err != nil || low > high {
		return audit.IndexRow{}, false, err
	}
	// The answer is among the n rows from low on. Each round halves n.
	for n := high - low + 1; ; n -= n / 2 {
		middle := low + n/2
		at, err := ReadIndexRow(r, tenant, middle)
		if err != nil {
			return audit.IndexRow{}, false, err
		}
		if at.Sequence <= sequence {
			low, row = middle, at
		}
		if n == 1 {
			return row, row.Sequence == sequence && sequence > 0, nil
		}
	}
}

// Current returns the receipt of the entry that made the credential's current version. The status
// of the credential's owner shows it.
func Current(r store.Reader, tenant authz.TenantID, credential string) (audit.Receipt, error) {
	b, err := r.Get(audit.CurrentKey(string(tenant), credential))
	if err != nil {
		return audit.Receipt{}, err
	}
	k, err := audit.DecodePosition(b)
	if err != nil || k.Sequence == 0 {
		return audit.Receipt{}, errors.Join(audit.ErrDamagedLog, err)
	}
	return audit.Receipt{Sequence: k.Sequence, Hash: hex.EncodeToString(k.Hash[:])}, nil
}

// LastChange returns the type of the event that made the current version of a credential.
func LastChange(r store.Reader, tenant authz.TenantID, credential string) (audit.EventType, error) {
	at, err := Current(r, tenant, credential)
	if err != nil {
		return "", err
	}
	e, err := entries.Read(r, at.Sequence)
	if err != nil {
		return "", err
	}
	if e.Hash != at.Hash || e.TenantID != string(tenant) || e.Resource.ID != credential || !e.EventType.ChangesVersion() {
		return "", audit.ErrDamagedLog
	}
	return e.EventType, nil
}
