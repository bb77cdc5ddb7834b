package reader

import (
	"bytes"
	"cmp"
	"context"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/chain"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Query selects entries of the principal's tenant. Zero fields select all. From and To are
// inclusive.
type Query struct {
	EventType  string
	Category   audit.Category
	UserID     string // actor ID
	ResourceID string
	Outcome    audit.Outcome
	From, To   time.Time
	Limit      int    // at least 1
	Cursor     string // cursor of the previous page; empty for the newest entries
}

// readTimeout bounds a query. A query that cannot be recorded is refused within a second, whatever
// hangs.
const readTimeout = 900 * time.Millisecond

// maxLooks bounds the rows and summaries that one query reads. A page may therefore hold fewer
// entries than the limit and still return a cursor. With summaries, the bound covers over four
// million entries.
const maxLooks = 16_384

// The index holds neither resources nor outcomes, so a query for them reads entries, entriesAtOnce
// at a time. Each entry counts as entryLooks. After half of the time, the page ends with the
// entries found so far.
const (
	entryLooks    = 8
	entriesAtOnce = 128
)

// Query returns entries of p's tenant, newest first, and the cursor of the next page, which is
// empty after the last page. The read itself is recorded before Query returns. Errors:
// fault.Forbidden, fault.Invalid for a cursor that Query did not return, fault.Unavailable.
func (rd *Reader) Query(ctx context.Context, p authz.Principal, q Query) (entries []audit.Entry, next string, err error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	if err := rd.guard.Admit(ctx, p, authz.ReadAudit); err != nil {
		return nil, "", err
	}
	if entries, next, err = rd.Unrecorded(ctx, p.Tenant, q); err != nil {
		return nil, "", err
	}
	err = rd.guard.Record(ctx, audit.Event{
		Type: audit.AuditRead, Outcome: audit.Success, Principal: p, Resource: audit.Resource{Type: audit.LogResource},
	})
	if err != nil {
		return nil, "", err
	}
	return entries, next, nil
}

// Unrecorded is [Reader.Query] of a tenant for a caller that has admitted the principal and records the
// read itself.
func (rd *Reader) Unrecorded(ctx context.Context, tenant authz.TenantID, q Query) (entries []audit.Entry, next string, err error) {
	before, err := q.before()
	if err != nil {
		return nil, "", err
	}
	half := time.Now().Add(readTimeout / 2)
	err = rd.chain.Store.View(ctx, func(r store.Reader) error {
		entries, next, err = q.page(rd.chain, r, string(tenant), before, func() bool { return time.Now().After(half) })
		return err
	})
	if err != nil {
		return nil, "", fmt.Errorf("querying the audit log: %w", err)
	}
	return entries, next, nil
}

// Activity counts a tenant's entries of the last days up to now, the oldest day first. It reads the
// tenant's summaries, the rows of blocks without one, and a few rows for the bounds of the days; no entries.
// When that is too much it returns false and leaves out the oldest days, which it has not counted whole. It is
// for a caller that has admitted the principal and records the read. Errors: audit.ErrDamagedLog,
// fault.Unavailable.
func (rd *Reader) Activity(ctx context.Context, tenant authz.TenantID, now time.Time, days int) (all []Day, whole bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	err = rd.chain.Store.View(ctx, func(r store.Reader) error {
		c := dayCounter{r: r, tenant: string(tenant), looks: activityLooks, kinds: make(map[uint32]audit.Category)}
		all, whole, err = c.count(rd.chain, now, days)
		return err
	})
	if err != nil {
		return nil, false, fmt.Errorf("counting the entries of days: %w", err)
	}
	return all, whole, nil
}

// cursor encodes the lowest tenant sequence that the page covers, as u64.
func cursor(tenantSequence uint64) string {
	return base64.RawURLEncoding.EncodeToString(binary.BigEndian.AppendUint64(nil, tenantSequence))
}

// before returns the tenant sequence that the page must stay below.
func (q Query) before() (uint64, error) {
	if q.Cursor == "" {
		return math.MaxUint64, nil
	}
	b, err := base64.RawURLEncoding.DecodeString(q.Cursor)
	if err != nil || len(b) != 8 || base64.RawURLEncoding.EncodeToString(b) != q.Cursor { // only one spelling is valid
		return 0, fault.New(fault.Invalid, "the cursor is not one of this list: start again without it")
	}
	return binary.BigEndian.Uint64(b), nil
}

func (q Query) run(ch *chain.Chain, r store.Reader, tenant string, before uint64) (entries []audit.Entry, next string, err error) {
	return q.page(ch, r, tenant, before, func() bool { return false })
}

// page is run with a deadline: when late returns true, it returns the entries found so far.
func (q Query) page(ch *chain.Chain, r store.Reader, tenant string, before uint64, late func() bool) (entries []audit.Entry, next string, err error) {
	low, high, err := q.bounds(ch, r, tenant, before)
	if err != nil {
		return nil, "", err
	}
	s := search{r: r, tenant: tenant, q: q, low: low, looks: maxLooks}
	entries = make([]audit.Entry, 0, q.Limit)
	for rest := high; ; {
		s.most, s.found = q.Limit-len(entries), s.found[:0]
		if q.inside() {
			s.most = entriesAtOnce
		}
		if rest, err = s.run(rest); err != nil {
			return nil, "", fmt.Errorf("searching the index: %w", err)
		}
		found, err := chain.ReadRows(r, tenant, s.found)
		if err != nil {
			return nil, "", err
		}
		for _, e := range found {
			if len(entries) == q.Limit {
				break
			}
			if q.holds(e.Entry) {
				entries = append(entries, *e.SignedEntry())
			}
		}
		switch {
		case len(entries) == q.Limit && q.inside():
			rest = entries[q.Limit-1].TenantSequence - 1 // the other entries that were read belong to the next page
		case q.inside():
			s.looks -= entryLooks * len(found)
			if rest >= low && s.looks > 0 && !late() {
				continue
			}
		}
		if rest >= low {
			next = cursor(rest + 1)
		}
		return entries, next, nil
	}
}

// inside reports whether the query has conditions that only the entries themselves can answer.
func (q Query) inside() bool { return q.ResourceID != "" || q.Outcome != "" }

// holds reports whether an entry meets these conditions.
func (q Query) holds(e *audit.Entry) bool {
	return (q.ResourceID == "" || q.ResourceID == e.Resource.ID) && (q.Outcome == "" || q.Outcome == e.Outcome)
}

// bounds returns the first and the last tenant sequence that the page may hold. If the page is
// empty, low is larger than high. Times never decrease along the chain, so binary searches find
// both.
func (q Query) bounds(ch *chain.Chain, r store.Reader, tenant string, before uint64) (low, high uint64, err error) {
	low, high, err = ch.Extent(r, tenant)
	if err != nil {
		return 0, 0, err
	}
	if !q.To.IsZero() {
		after, err := chain.FirstRow(r, tenant, low, high, func(row audit.IndexRow) bool { return time.UnixMicro(row.Micros).After(q.To) })
		if err != nil {
			return 0, 0, err
		}
		high = after - 1
	}
	if !q.From.IsZero() {
		low, err = chain.FirstRow(r, tenant, low, high, func(row audit.IndexRow) bool { return !time.UnixMicro(row.Micros).Before(q.From) })
	}
	return low, min(high, max(before, 1)-1), err
}

// search reads the index of a tenant, newest first.
type search struct {
	r      store.Reader
	tenant string
	q      Query
	low    uint64 // first tenant sequence to read
	looks  int    // remaining number of looks
	most   int    // number of rows to find
	found  []audit.IndexRow
}

// run reads the index from tenant sequence n down. It returns the next sequence to read, which is
// low-1 if it has read all.
func (s *search) run(n uint64) (uint64, error) {
	keys, types := s.q.keys(), s.q.typeKeys()
	for n >= s.low && s.wanted() > 0 {
		bottom := s.low
		if len(keys)+len(types) > 0 {
			below, err := s.bySummaries(n, keys, types)
			if err != nil {
				return 0, err
			}
			if below < n {
				n = below
				continue
			}
			bottom = max(bottom, audit.EndOf(audit.BlockOf(n))+1-audit.BlockSize) // an earlier block may have a summary
		}
		var err error
		if n, err = s.byRows(n, bottom); err != nil {
			return 0, err
		}
	}
	return n, nil
}

// wanted returns how many more rows to find, 0 after too many looks.
func (s *search) wanted() int {
	if s.looks <= 0 {
		return 0
	}
	return s.most - len(s.found)
}

// keys returns the summary keys that a matching entry has.
func (q Query) keys() (keys []uint32) {
	if q.EventType != "" {
		keys = append(keys, audit.TypeKey(audit.EventType(q.EventType)))
	}
	if q.UserID != "" {
		keys = append(keys, audit.ActorKey(q.UserID))
	}
	return keys
}

// typeKeys returns the summary keys of which a matching entry has one; none is no condition.
func (q Query) typeKeys() (keys []uint32) {
	for _, t := range q.Category.Types() {
		keys = append(keys, audit.TypeKey(t))
	}
	return keys
}

func (q Query) matches(row audit.IndexRow) bool {
	return (q.EventType == "" || q.EventType == string(row.EventType)) && (q.UserID == "" || q.UserID == row.Actor) &&
		(q.Category == "" || slices.Contains(q.Category.Types(), row.EventType))
}

// byRows reads each row from n down to bottom.
func (s *search) byRows(n, bottom uint64) (uint64, error) {
	var bad error
	rng := store.Range{From: audit.TenantKey(s.tenant, bottom), To: audit.TenantKey(s.tenant, n+1), Reverse: true}
	err := s.r.Scan(rng, func(key, value []byte) bool {
		var row audit.IndexRow
		if row, bad = audit.DecodeIndexRow(value); bad != nil {
			return false
		}
		if !bytes.Equal(key, audit.TenantKey(s.tenant, n)) {
			bad = audit.ErrDamagedLog // a row is missing
			return false
		}
		s.looks--
		n--
		if s.q.matches(row) {
			s.found = append(s.found, row)
		}
		return s.wanted() > 0
	})
	if err == nil && bad == nil && n >= bottom && s.wanted() > 0 {
		bad = audit.ErrDamagedLog
	}
	return n, cmp.Or(err, bad)
}

// bySummaries reads the entries from n down that summaries name, for all of keys and one of types, until it
// meets a block without a summary. It returns n if the block of n has none.
func (s *search) bySummaries(n uint64, keys, types []uint32) (uint64, error) {
	var named []uint64
	wanted, below, bad := s.wanted(), n, false
	rng := store.Range{From: audit.SummaryKey(s.tenant, audit.BlockOf(s.low)), To: audit.SummaryKey(s.tenant, audit.BlockOf(n)+1), Reverse: true}
	err := s.r.Scan(rng, func(key, value []byte) bool {
		block := audit.BlockOf(below)
		if binary.BigEndian.Uint64(key[len(key)-8:]) != block {
			return false
		}
		at, ok := audit.PlacesOf(value, keys, types)
		if !ok {
			bad = true
			return false
		}
		s.looks--
		start := audit.EndOf(block) + 1 - audit.BlockSize
		at = at.To(int(below - start))
		if s.low > start {
			at = at.From(int(s.low - start))
		}
		for len(named) < wanted {
			place, ok := at.Last()
			if !ok {
				break
			}
			named = append(named, start+uint64(place))
		}
		if len(named) == wanted {
			below = named[wanted-1] - 1
			return false
		}
		below = max(start, s.low) - 1
		return below >= s.low && s.looks > 0
	})
	if err != nil {
		return 0, err
	}
	if bad {
		return 0, audit.ErrDamagedLog
	}
	for _, n := range named {
		row, err := chain.ReadIndexRow(s.r, s.tenant, n)
		if err != nil {
			return 0, err
		}
		if s.q.matches(row) {
			s.found = append(s.found, row)
		}
	}
	return below, nil
}
