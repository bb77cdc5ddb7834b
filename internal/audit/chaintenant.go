package audit

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"sort"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// extent returns the first and the last tenant sequence of a tenant's entries in the database. If
// there are none, the first is larger than the last. The first is above 1 after older entries have
// moved to the archive. Rows of these entries may still be in the database, and extent ignores
// them.
func (ch *Chain) extent(r store.Reader, tenant string) (low, high uint64, err error) {
	low = 1
	rng := store.Prefix(tenantPrefix(tenant))
	err = r.Scan(rng, func(key, _ []byte) bool {
		low = binary.BigEndian.Uint64(key[len(key)-8:])
		return false
	})
	if err != nil {
		return 0, 0, err
	}
	newest, err := lastOf(r, tenant)
	if err != nil {
		return 0, 0, err
	}
	high = newest.sequence
	cut, err := ch.cutTo(r)
	if err != nil || cut == 0 {
		return low, high, err
	}
	low, err = firstRow(r, tenant, low, high, func(row indexRow) bool { return row.sequence > cut })
	return low, high, err
}

// firstRow returns the first tenant sequence from low to high for whose row wanted returns true,
// and high + 1 if there is none. If wanted is true for a row, it must be true for all later ones.
func firstRow(r store.Reader, tenant string, low, high uint64, wanted func(indexRow) bool) (uint64, error) {
	var err error
	n := sort.Search(int(high+1-low), func(i int) bool {
		if err != nil {
			return true
		}
		var row indexRow
		row, err = readIndexRow(r, tenant, low+uint64(i))
		return err != nil || wanted(row)
	})
	return low + uint64(n), err
}

func readIndexRow(r store.Reader, tenant string, tenantSequence uint64) (indexRow, error) {
	b, err := r.Get(tenantKey(tenant, tenantSequence))
	if err != nil {
		return indexRow{}, err
	}
	return decodeIndexRow(b)
}

// readRows returns the entries that rows of a tenant's index name, in the order of the rows. Error:
// errDamagedLog when an entry is not the one that its row names.
func readRows(r store.Reader, tenant string, rows []indexRow) ([]stored, error) {
	found := make([]stored, 0, len(rows))
	for len(rows) > 0 {
		run := runOf(rows)
		read, err := readRun(r, rows[:run])
		if err != nil {
			return nil, err
		}
		for i, e := range read {
			if e.entry.link() != rows[i].link || e.entry.TenantID != tenant {
				return nil, errDamagedLog
			}
		}
		found, rows = append(found, read...), rows[run:]
	}
	return found, nil
}

// runOf returns how many of the first rows, newest first, are so close together that one scan over
// them costs less than a read for each.
func runOf(rows []indexRow) int {
	const between = 4
	n := 1
	for n < len(rows) && rows[n].sequence < rows[n-1].sequence && rows[n-1].sequence-rows[n].sequence <= between {
		n++
	}
	return n
}

// readRun reads the entries of a run of rows, newest first.
func readRun(r store.Reader, rows []indexRow) ([]stored, error) {
	if len(rows) == 1 {
		e, err := storedEntry(r, rows[0].sequence)
		if fault.Of(err) == fault.NotFound {
			err = errDamagedLog
		}
		return []stored{e}, err
	}
	kept := make([][]byte, 0, len(rows))
	rng := store.Range{From: entryKey(rows[len(rows)-1].sequence), To: entryKey(rows[0].sequence + 1), Reverse: true}
	err := r.Scan(rng, func(key, value []byte) bool {
		if bytes.Equal(key, entryKey(rows[len(kept)].sequence)) {
			kept = append(kept, bytes.Clone(value))
		}
		return len(kept) < len(rows)
	})
	if err != nil {
		return nil, fmt.Errorf("reading audit entries: %w", err)
	}
	if len(kept) < len(rows) {
		return nil, errDamagedLog // an entry is missing
	}
	found := make([]stored, len(rows))
	var of uint64 // first entry of the group in batch
	var batch []byte
	for i, row := range kept {
		if first, grouped := rowBatch(row); grouped && (batch == nil || first != of) {
			if batch, err = r.Get(batchKey(first)); err != nil {
				return nil, fmt.Errorf("reading the signature of audit entries: %w", err)
			}
			of, batch = first, bytes.Clone(batch)
		}
		if found[i], err = decodeStored(row, batch); err != nil || found[i].entry.Sequence != rows[i].sequence {
			return nil, errDamagedLog
		}
	}
	return found, nil
}

// findSequence looks up the entry with a sequence among the entries of a tenant. It reads the same
// number of rows whether the entry exists or not, and no rows of other tenants, so its duration
// reveals nothing about their entries.
func findSequence(ch *Chain, r store.Reader, tenant string, sequence uint64) (row indexRow, found bool, err error) {
	low, high, err := ch.extent(r, tenant)
	if err != nil || low > high {
		return indexRow{}, false, err
	}
	// The answer is among the n rows from low on. Each round halves n.
	for n := high - low + 1; ; n -= n / 2 {
		middle := low + n/2
		at, err := readIndexRow(r, tenant, middle)
		if err != nil {
			return indexRow{}, false, err
		}
		if at.sequence <= sequence {
			low, row = middle, at
		}
		if n == 1 {
			return row, row.sequence == sequence && sequence > 0, nil
		}
	}
}

// Current returns the receipt of the entry that made the credential's current version. The status
// of the credential's owner shows it.
func Current(r store.Reader, tenant authz.TenantID, credential string) (Receipt, error) {
	b, err := r.Get(currentKey(string(tenant), credential))
	if err != nil {
		return Receipt{}, err
	}
	k, err := decodeLink(b)
	if err != nil || k.sequence == 0 {
		return Receipt{}, errors.Join(errDamagedLog, err)
	}
	return Receipt{k.sequence, hex.EncodeToString(k.hash[:])}, nil
}

// LastChange returns the type of the event that made the current version of a credential.
func LastChange(r store.Reader, tenant authz.TenantID, credential string) (EventType, error) {
	at, err := Current(r, tenant, credential)
	if err != nil {
		return "", err
	}
	e, err := readEntry(r, at.Sequence)
	if err != nil {
		return "", err
	}
	if e.Hash != at.Hash || e.TenantID != string(tenant) || e.Resource.ID != credential || !e.EventType.changesVersion() {
		return "", errDamagedLog
	}
	return e.EventType, nil
}
