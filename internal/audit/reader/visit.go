package reader

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/chain"
	"github.com/latticekeep/latticekeep/internal/audit/entries"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Visit calls visit with the successful entries of a tenant that have one of the types, oldest
// first. The types must be some that [audit.History.Replay] keeps. Visit verifies all entries in the database. For
// archived entries, it uses the copies in the base, which lack hash and signature. It reads the
// entries of these types, the tenant's summaries, and the index rows of blocks without a summary.
// Error: fault.Internal for a damaged log.
func (rd *Reader) Visit(ctx context.Context, tenant authz.TenantID, visit func(*audit.Entry), types ...audit.EventType) error {
	base, err := rd.chain.ArchivedTo(ctx, audit.KeptList)
	for err == nil {
		found, bad := rd.find(ctx, string(tenant), base, types)
		before := base
		if base, err = rd.chain.ArchivedTo(ctx, audit.KeptList); err != nil {
			break
		}
		if !base.Equal(before) {
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

// FindState returns the sequence of an entry that commits to a state, and 0 when there is none. It
// reads every entry up to the head, each of which names the hash of the one before, and nothing that
// is only derived from the entries: somebody who writes the database cannot hide one. Archived
// entries have no state unless the base keeps one that has. Error: audit.ErrDamagedLog.
func (rd *Reader) FindState(ctx context.Context) (sequence uint64, err error) {
	head, err := rd.chain.VerifiedHead(ctx)
	if err != nil || head.Sequence == 0 {
		return 0, err
	}
	base, err := rd.chain.ArchivedTo(ctx, audit.KeptList)
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
	err = entries.ScanAll(ctx, rd.chain.Store, rng, func(row entries.Row) error {
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

// sweepBlocks and sweepEntries bound what one snapshot of a sweep reads.
const (
	sweepBlocks  = 1024
	sweepEntries = 256
)

// find returns a tenant's entries of the types, oldest first: first the ones that the base keeps,
// then those in the database, which it verifies.
func (rd *Reader) find(ctx context.Context, tenant string, base *audit.Base, types []audit.EventType) (found []*audit.Entry, err error) {
	if base != nil {
		found = append(found, base.Kept...)
	}
	s := typeSweep{chain: rd.chain, tenant: tenant, types: types, next: 1}
	for _, t := range types {
		s.keys = append(s.keys, audit.TypeKey(t))
	}
	for more := true; more && err == nil; {
		s.found = nil
		err = rd.chain.Store.View(ctx, func(r store.Reader) error {
			more, err = s.step(r)
			return err
		})
		for _, e := range s.found { // outside the snapshot
			if err == nil && !e.Verify(rd.chain.Key, nil) {
				err = audit.ErrDamagedLog
			}
		}
		found = append(found, s.found...)
	}
	return slices.DeleteFunc(found, func(e *audit.Entry) bool {
		return e.TenantID != tenant || e.Outcome != audit.Success || !slices.Contains(types, e.EventType)
	}), err
}

// typeSweep reads the entries of a tenant that have one of the types, oldest first.
type typeSweep struct {
	chain  *chain.Chain
	tenant string
	types  []audit.EventType
	keys   []uint32
	next   uint64         // next tenant sequence to read
	found  []*audit.Entry // entries found by the last step
}

// step continues in one snapshot, and reports whether there is more to read.
func (s *typeSweep) step(r store.Reader) (more bool, err error) {
	low, high, err := s.chain.Extent(r, s.tenant)
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
			if err := s.byRows(r, min(high, audit.EndOf(audit.BlockOf(s.next)))); err != nil {
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
	rng := store.Range{From: audit.SummaryKey(s.tenant, audit.BlockOf(next)), To: audit.SummaryKey(s.tenant, audit.BlockOf(high)+1)}
	err = r.Scan(rng, func(key, value []byte) bool {
		block := audit.BlockOf(next)
		if next > high || binary.BigEndian.Uint64(key[len(key)-8:]) != block {
			return false
		}
		at, ok := audit.PlacesOfAny(value, s.keys)
		if !ok {
			bad = true
			return false
		}
		start := audit.EndOf(block) + 1 - audit.BlockSize
		for _, place := range at.From(int(next - start)).Places() {
			named = append(named, start+uint64(place))
		}
		next = audit.EndOf(block) + 1
		blocks++
		return blocks < most && len(named) < sweepEntries
	})
	if bad {
		err = cmp.Or(err, error(audit.ErrDamagedLog))
	}
	for _, n := range named {
		if err != nil || n > high {
			break
		}
		var row audit.IndexRow
		if row, err = chain.ReadIndexRow(r, s.tenant, n); err == nil {
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
		audit.IndexRow
	}
	var rows []numbered
	var bad error
	rng := store.Range{From: audit.TenantKey(s.tenant, s.next), To: audit.TenantKey(s.tenant, to+1)}
	err := r.Scan(rng, func(key, value []byte) bool {
		var row audit.IndexRow
		if row, bad = audit.DecodeIndexRow(value); bad == nil && !bytes.Equal(key, audit.TenantKey(s.tenant, s.next)) {
			bad = audit.ErrDamagedLog // a row is missing
		}
		if bad != nil {
			return false
		}
		if slices.Contains(s.types, row.EventType) {
			rows = append(rows, numbered{s.next, row})
		}
		s.next++
		return true
	})
	if err == nil && bad == nil && s.next <= to {
		bad = audit.ErrDamagedLog
	}
	if err := cmp.Or(err, bad); err != nil {
		return err
	}
	for _, row := range rows {
		if err := s.readEntryAt(r, row.n, row.IndexRow); err != nil {
			return err
		}
	}
	return nil
}

// readEntryAt reads the entry at a tenant sequence, given its index row, if it has one of the
// types.
func (s *typeSweep) readEntryAt(r store.Reader, n uint64, row audit.IndexRow) error {
	if !slices.Contains(s.types, row.EventType) {
		return nil // the summary keys of two types collide
	}
	e, err := entries.Read(r, row.Sequence)
	if fault.Of(err) == fault.NotFound || err == nil && (e.Position() != row.Position || e.TenantID != s.tenant || e.TenantSequence != n) {
		err = audit.ErrDamagedLog
	}
	if err == nil {
		s.found = append(s.found, e)
	}
	return err
}

// ReplayPoint is an entry of a tenant after which a replay continues. The zero value is the
// beginning.
type ReplayPoint struct {
	TenantSequence, Sequence uint64
	Hash                     string // lower-case hex
}

// errArchived rejects a replay from a point whose next entries are no longer in the database.
var errArchived = fault.New(fault.Conflict, "entries behind the given one are in the archive: replay from the beginning")

// Replay visits a tenant's entries after a point, up to the sequence to, oldest first; 0 means the
// newest. It returns the point of the last entry. It compares each entry with the previous one by
// the hash and the tenant's link, and verifies the signature of the last entry, which vouches for
// all of them. The results of visit count only if the error is nil. From the zero point, the replay
// begins with the first entry that is not archived. Errors: fault.Internal for entries that do not
// verify, fault.Conflict if some entries to visit are archived, fault.Unavailable, or the error of
// visit.
func (rd *Reader) Replay(ctx context.Context, tenant authz.TenantID, after ReplayPoint, to uint64, visit func(*audit.Entry) error) (ReplayPoint, error) {
	at, err := rd.replayFrom(ctx, tenant, after)
	if err != nil {
		return ReplayPoint{}, fmt.Errorf("replaying a tenant's entries: %w", err)
	}
	if to == 0 {
		to = audit.MaxInteger
	}
	var last *audit.StoredEntry
	for more := true; more; {
		var page []audit.StoredEntry
		err := rd.chain.Store.View(ctx, func(r store.Reader) (err error) {
			page, more, err = replayPage(r, string(tenant), at, to)
			return err
		})
		if err != nil {
			return ReplayPoint{}, fmt.Errorf("replaying a tenant's entries: %w", rd.orArchived(ctx, tenant, at, err))
		}
		for i := range page {
			e := page[i].Entry
			if e.TenantID != string(tenant) || e.TenantSequence != at.TenantSequence+1 || e.TenantPreviousHash != at.Hash || e.Sequence <= at.Sequence {
				return ReplayPoint{}, fmt.Errorf("replaying a tenant's entries: %w", audit.ErrDamagedLog)
			}
			at = ReplayPoint{e.TenantSequence, e.Sequence, e.Hash}
			if err := visit(e); err != nil {
				return ReplayPoint{}, err
			}
			last = &page[i]
		}
	}
	switch {
	case last == nil:
		return after, nil
	case !last.Verify(rd.chain.Key, nil):
		return ReplayPoint{}, fmt.Errorf("replaying a tenant's entries: %w", audit.ErrDamagedLog)
	}
	return at, nil
}

// orArchived returns err, or errArchived if the entries after the point are archived by now. In
// that case their absence is no damage.
func (rd *Reader) orArchived(ctx context.Context, tenant authz.TenantID, at ReplayPoint, err error) error {
	if !errors.Is(err, audit.ErrDamagedLog) {
		return err
	}
	archived, failed := rd.archived(ctx, tenant)
	if failed != nil {
		return failed
	}
	if archived != nil && archived.Sequence > at.TenantSequence {
		return errArchived
	}
	return err
}

// archived returns the end of the tenant's part that is archived, nil when none of it is.
func (rd *Reader) archived(ctx context.Context, tenant authz.TenantID) (t *audit.TenantState, err error) {
	err = rd.chain.Store.View(ctx, func(r store.Reader) error {
		t, err = rd.chain.ArchivedTenant(r, string(tenant))
		return err
	})
	return t, err
}

// replayFrom returns the point before the first entry to visit.
func (rd *Reader) replayFrom(ctx context.Context, tenant authz.TenantID, after ReplayPoint) (ReplayPoint, error) {
	archived, err := rd.archived(ctx, tenant)
	if err != nil {
		return ReplayPoint{}, err
	}
	if after == (ReplayPoint{}) {
		after.Hash = audit.ZeroHash
	}
	if archived == nil {
		return after, nil
	}
	switch {
	case after.TenantSequence >= archived.Sequence:
		return after, nil
	case after.TenantSequence > 0:
		return ReplayPoint{}, errArchived
	}
	return ReplayPoint{TenantSequence: archived.Sequence, Hash: archived.Hash}, nil
}

// replayPage reads some of a tenant's entries after a point.
func replayPage(r store.Reader, tenant string, at ReplayPoint, to uint64) (page []audit.StoredEntry, more bool, err error) {
	var sequences []uint64
	from := audit.TenantKey(tenant, at.TenantSequence+1)
	bad := false
	err = r.Scan(store.Range{From: from, To: store.Prefix(audit.TenantPrefix(tenant)).To}, func(key, value []byte) bool {
		row, err := audit.DecodeIndexRow(value)
		if bad = err != nil || len(key) != len(from) || binary.BigEndian.Uint64(key[len(key)-8:]) != at.TenantSequence+1+uint64(len(sequences)); bad {
			return false
		}
		if row.Sequence > to {
			return false
		}
		sequences = append(sequences, row.Sequence)
		more = len(sequences) == audit.PageRows
		return !more
	})
	if err == nil && bad {
		err = audit.ErrDamagedLog
	}
	for _, sequence := range sequences {
		if err != nil {
			return nil, false, err
		}
		var s audit.StoredEntry
		if s, err = entries.ReadRequired(r, sequence); err == nil {
			page = append(page, s)
		}
	}
	return page, more, err
}
