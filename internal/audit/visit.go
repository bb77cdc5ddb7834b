package audit

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"slices"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Visit calls visit with the successful entries of a tenant that have one of the types, oldest
// first. The types must be events of sealing keys. Visit verifies all entries in the database. For
// archived entries, it uses the copies in the base, which lack hash and signature. It reads the
// entries of these types, the tenant's summaries, and the index rows of blocks without a summary.
// Error: fault.Internal for a damaged log.
func (rd *Reader) Visit(ctx context.Context, tenant authz.TenantID, visit func(*Entry), types ...EventType) error {
	base, err := rd.chain.archivedTo(ctx)
	for err == nil {
		found, bad := rd.find(ctx, string(tenant), base, types)
		before := base
		if base, err = rd.chain.archivedTo(ctx); err != nil {
			break
		}
		if !base.equal(before) {
			continue // some entries were archived before they were read
		}
		if bad != nil {
			return bad
		}
		for _, e := range found {
			visit(e)
		}
		return nil
	}
	return err
}

// sweepBlocks and sweepEntries bound what one snapshot of a sweep reads.
const (
	sweepBlocks  = 1024
	sweepEntries = 256
)

// find returns a tenant's entries of the types, oldest first: first the ones that the base keeps,
// then those in the database, which it verifies.
func (rd *Reader) find(ctx context.Context, tenant string, base *Base, types []EventType) (found []*Entry, err error) {
	if base != nil {
		found = append(found, base.kept...)
	}
	s := typeSweep{chain: rd.chain, tenant: tenant, types: types, next: 1}
	for _, t := range types {
		s.keys = append(s.keys, typeKey(t))
	}
	for more := true; more && err == nil; {
		s.found = nil
		err = rd.chain.store.View(ctx, func(r store.Reader) error {
			more, err = s.step(r)
			return err
		})
		for _, e := range s.found { // outside the snapshot
			if err == nil && !e.verify(rd.chain.key, nil) {
				err = errDamagedLog
			}
		}
		found = append(found, s.found...)
	}
	return slices.DeleteFunc(found, func(e *Entry) bool {
		return e.TenantID != tenant || e.Outcome != Success || !slices.Contains(types, e.EventType)
	}), err
}

// typeSweep reads the entries of a tenant that have one of the types, oldest first.
type typeSweep struct {
	chain  *Chain
	tenant string
	types  []EventType
	keys   []uint32
	next   uint64   // next tenant sequence to read
	found  []*Entry // entries found by the last step
}

// step continues in one snapshot, and reports whether there is more to read.
func (s *typeSweep) step(r store.Reader) (more bool, err error) {
	low, high, err := s.chain.extent(r, s.tenant)
	if err != nil {
		return false, err
	}
	s.next = max(s.next, low)
	for blocks := sweepBlocks; s.next <= high; {
		if blocks <= 0 || len(s.found) >= sweepEntries {
			return true, nil
		}
		before := s.next
		n, err := s.bySummaries(r, high, blocks)
		if err != nil {
			return false, err
		}
		if s.next == before {
			if err := s.byRows(r, min(high, endOf(blockOf(s.next)))); err != nil {
				return false, err
			}
			n = 1
		}
		blocks -= n
	}
	return false, nil
}

// bySummaries reads the entries that summaries name, until it meets a block without a summary. It
// returns the number of blocks that it covered.
func (s *typeSweep) bySummaries(r store.Reader, high uint64, most int) (blocks int, err error) {
	var named []uint64
	next, bad := s.next, false
	rng := store.Range{From: summaryKey(s.tenant, blockOf(next)), To: summaryKey(s.tenant, blockOf(high)+1)}
	err = r.Scan(rng, func(key, value []byte) bool {
		block := blockOf(next)
		if next > high || binary.BigEndian.Uint64(key[len(key)-8:]) != block {
			return false
		}
		at, ok := placesOfAny(value, s.keys)
		if !ok {
			bad = true
			return false
		}
		start := endOf(block) + 1 - blockSize
		for _, place := range at.from(int(next - start)).places() {
			named = append(named, start+uint64(place))
		}
		next = endOf(block) + 1
		blocks++
		return blocks < most && len(named) < sweepEntries
	})
	if bad {
		err = cmp.Or(err, error(errDamagedLog))
	}
	for _, n := range named {
		if err != nil || n > high {
			break
		}
		var row indexRow
		if row, err = readIndexRow(r, s.tenant, n); err == nil {
			err = s.readEntryAt(r, n, row)
		}
	}
	s.next = next
	return blocks, err
}

// byRows reads the entries that the index names, up to the tenant sequence to.
func (s *typeSweep) byRows(r store.Reader, to uint64) error {
	type numbered struct {
		n uint64
		indexRow
	}
	var rows []numbered
	var bad error
	rng := store.Range{From: tenantKey(s.tenant, s.next), To: tenantKey(s.tenant, to+1)}
	err := r.Scan(rng, func(key, value []byte) bool {
		var row indexRow
		if row, bad = decodeIndexRow(value); bad == nil && !bytes.Equal(key, tenantKey(s.tenant, s.next)) {
			bad = errDamagedLog // a row is missing
		}
		if bad != nil {
			return false
		}
		if slices.Contains(s.types, row.eventType) {
			rows = append(rows, numbered{s.next, row})
		}
		s.next++
		return true
	})
	if err == nil && bad == nil && s.next <= to {
		bad = errDamagedLog
	}
	if err := cmp.Or(err, bad); err != nil {
		return err
	}
	for _, row := range rows {
		if err := s.readEntryAt(r, row.n, row.indexRow); err != nil {
			return err
		}
	}
	return nil
}

// readEntryAt reads the entry at a tenant sequence, given its index row, if it has one of the
// types.
func (s *typeSweep) readEntryAt(r store.Reader, n uint64, row indexRow) error {
	if !slices.Contains(s.types, row.eventType) {
		return nil // the summary keys of two types collide
	}
	e, err := readEntry(r, row.sequence)
	if fault.Of(err) == fault.NotFound || err == nil && (e.link() != row.link || e.TenantID != s.tenant || e.TenantSequence != n) {
		err = errDamagedLog
	}
	if err == nil {
		s.found = append(s.found, e)
	}
	return err
}
