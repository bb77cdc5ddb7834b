package audit

import (
	"bytes"
	"cmp"
	"context"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"math"
	"sort"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Query selects entries of the asking principal's tenant; zero fields select
// all. From and To are inclusive.
type Query struct {
	EventType string
	UserID    string // the actor's id
	From, To  time.Time
	Limit     int    // at least 1
	Cursor    string // from the page before; empty for the newest entries
}

// readTimeout bounds a query, so that one that cannot be recorded is refused
// within a second whatever hangs.
const readTimeout = 900 * time.Millisecond

// maxLooks bounds the rows and summaries that one query looks at. A page may then
// hold fewer entries than the limit and still name a next one. Summaries reach
// over four million entries within it.
const maxLooks = 16_384

// Query returns entries of p's tenant, newest first, and the cursor of the
// next page, empty after the last. The read is itself recorded before it
// returns. Errors: fault.Forbidden, fault.Invalid for a foreign cursor,
// fault.Unavailable.
func (l *Log) Query(ctx context.Context, p authz.Principal, q Query) (entries []Entry, next string, err error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	if err := l.Ready(ctx); err != nil {
		return nil, "", err
	}
	if err := l.Authorize(ctx, p, authz.ReadAudit); err != nil {
		return nil, "", err
	}
	before, err := q.before()
	if err != nil {
		return nil, "", err
	}
	err = l.store.View(ctx, func(r store.Reader) error {
		entries, next, err = q.run(l, r, string(p.Tenant), before)
		return err
	})
	if err != nil {
		return nil, "", fmt.Errorf("querying the audit log: %w", err)
	}
	err = l.Record(ctx, Event{
		Type: AuditRead, Outcome: Success, Principal: p, Resource: Resource{Type: LogResource},
	})
	if err != nil {
		return nil, "", err
	}
	return entries, next, nil
}

// A cursor is the tenant sequence that the page before ended with, u64.
func cursor(tenantSequence uint64) string {
	return base64.RawURLEncoding.EncodeToString(binary.BigEndian.AppendUint64(nil, tenantSequence))
}

// before returns the tenant sequence that the page is to end before.
func (q Query) before() (uint64, error) {
	if q.Cursor == "" {
		return math.MaxUint64, nil
	}
	b, err := base64.RawURLEncoding.DecodeString(q.Cursor)
	if err != nil || len(b) != 8 || base64.RawURLEncoding.EncodeToString(b) != q.Cursor { // it has one spelling
		return 0, fault.New(fault.Invalid, "the cursor is not one of this list: start again without it")
	}
	return binary.BigEndian.Uint64(b), nil
}

func (q Query) run(l *Log, r store.Reader, tenant string, before uint64) (entries []Entry, next string, err error) {
	low, high, err := q.bounds(l, r, tenant, before)
	if err != nil {
		return nil, "", err
	}
	s := search{r: r, tenant: tenant, q: q, low: low, looks: maxLooks}
	rest, err := s.run(high)
	if err != nil {
		return nil, "", fmt.Errorf("searching the index: %w", err)
	}
	if rest >= low {
		next = cursor(rest + 1)
	}
	entries = make([]Entry, 0, len(s.found))
	for _, row := range s.found {
		e, err := readEntry(r, row.sequence)
		if fault.Of(err) == fault.NotFound || err == nil && (e.link() != row.link || e.TenantID != tenant) {
			return nil, "", errDamagedLog
		}
		if err != nil {
			return nil, "", err
		}
		entries = append(entries, *e)
	}
	return entries, next, nil
}

// bounds returns the first and the last tenant sequence that the page may hold; the
// first is the larger one when there is none. Times never decrease along the chain,
// so that binary searches find where they begin and end.
func (q Query) bounds(l *Log, r store.Reader, tenant string, before uint64) (low, high uint64, err error) {
	low, high, err = l.extent(r, tenant)
	if err != nil {
		return 0, 0, err
	}
	if !q.To.IsZero() {
		after, err := firstRow(r, tenant, low, high, func(row indexRow) bool { return time.UnixMicro(row.micros).After(q.To) })
		if err != nil {
			return 0, 0, err
		}
		high = after - 1
	}
	if !q.From.IsZero() {
		low, err = firstRow(r, tenant, low, high, func(row indexRow) bool { return !time.UnixMicro(row.micros).Before(q.From) })
	}
	return low, min(high, max(before, 1)-1), err
}

// extent returns the first and the last tenant sequence of a tenant's entries that
// are in the database: the first is the larger one when there are none. It is above
// 1 once older entries are in the archive only, of which there may be rows that
// nobody has removed yet.
func (l *Log) extent(r store.Reader, tenant string) (low, high uint64, err error) {
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
	cut, err := l.cutTo(r)
	if err != nil || cut == 0 {
		return low, high, err
	}
	low, err = firstRow(r, tenant, low, high, func(row indexRow) bool { return row.sequence > cut })
	return low, high, err
}

// firstRow returns the first tenant sequence from low to high whose row is what is
// wanted, given that all after it are too; high + 1 when none is.
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

// search goes through the index of a tenant, newest first.
type search struct {
	r      store.Reader
	tenant string
	q      Query
	low    uint64 // the first tenant sequence to look at
	looks  int    // that are left
	found  []indexRow
}

// run looks from a tenant sequence down, and returns the next one that it would look
// at: one below low when it has seen all.
func (s *search) run(n uint64) (uint64, error) {
	keys := s.q.keys()
	for n >= s.low && s.wanted() > 0 {
		bottom := s.low
		if len(keys) > 0 {
			below, err := s.bySummaries(n, keys)
			if err != nil {
				return 0, err
			}
			if below < n {
				n = below
				continue
			}
			bottom = max(bottom, endOf(blockOf(n))+1-blockSize) // what is before it may have a summary
		}
		var err error
		if n, err = s.byRows(n, bottom); err != nil {
			return 0, err
		}
	}
	return n, nil
}

// wanted returns how many more entries the page takes, 0 when enough was looked at.
func (s *search) wanted() int {
	if s.looks <= 0 {
		return 0
	}
	return s.q.Limit - len(s.found)
}

// keys returns those of summaries that an entry must have.
func (q Query) keys() (keys []uint32) {
	if q.EventType != "" {
		keys = append(keys, typeKey(EventType(q.EventType)))
	}
	if q.UserID != "" {
		keys = append(keys, actorKey(q.UserID))
	}
	return keys
}

func (q Query) matches(row indexRow) bool {
	return (q.EventType == "" || q.EventType == string(row.eventType)) && (q.UserID == "" || q.UserID == row.actor)
}

// byRows looks at each row from n down to bottom.
func (s *search) byRows(n, bottom uint64) (uint64, error) {
	var bad error
	rng := store.Range{From: tenantKey(s.tenant, bottom), To: tenantKey(s.tenant, n+1), Reverse: true}
	err := s.r.Scan(rng, func(key, value []byte) bool {
		var row indexRow
		if row, bad = decodeIndexRow(value); bad != nil {
			return false
		}
		if !bytes.Equal(key, tenantKey(s.tenant, n)) {
			bad = errDamagedLog // a row is missing
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
		bad = errDamagedLog
	}
	return n, cmp.Or(err, bad)
}

// bySummaries looks at the entries from n down that summaries name, as far as there
// are summaries without a gap. It returns n when the block of n has none.
func (s *search) bySummaries(n uint64, keys []uint32) (uint64, error) {
	var named []uint64
	wanted, below, bad := s.wanted(), n, false
	rng := store.Range{From: summaryKey(s.tenant, blockOf(s.low)), To: summaryKey(s.tenant, blockOf(n)+1), Reverse: true}
	err := s.r.Scan(rng, func(key, value []byte) bool {
		block := blockOf(below)
		if binary.BigEndian.Uint64(key[len(key)-8:]) != block {
			return false
		}
		at, ok := placesOf(value, keys)
		if !ok {
			bad = true
			return false
		}
		s.looks--
		start := endOf(block) + 1 - blockSize
		at = at.to(int(below - start))
		if s.low > start {
			at = at.from(int(s.low - start))
		}
		for len(named) < wanted {
			place, ok := at.last()
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
		return 0, errDamagedLog
	}
	for _, n := range named {
		row, err := readIndexRow(s.r, s.tenant, n)
		if err != nil {
			return 0, err
		}
		if s.q.matches(row) {
			s.found = append(s.found, row)
		}
	}
	return below, nil
}

// LastChange returns the type of the event that gave a credential its current
// version.
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
