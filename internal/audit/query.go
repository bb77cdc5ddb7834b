package audit

import (
	"bytes"
	"cmp"
	"context"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"slices"
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

// maxScan bounds the index rows that one query looks at. A page may then hold
// fewer entries than the limit and still name a next one.
const maxScan = 50_000

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
	rng := store.Prefix(tenantPrefix(string(p.Tenant)))
	rng.Reverse = true
	if q.Cursor != "" {
		before, err := base64.RawURLEncoding.DecodeString(q.Cursor)
		if err != nil || len(before) != 8 || base64.RawURLEncoding.EncodeToString(before) != q.Cursor { // it has one spelling
			return nil, "", fault.New(fault.Invalid, "the cursor is not one of this list: start again without it")
		}
		rng.To = append(tenantPrefix(string(p.Tenant)), before...)
	}
	err = l.store.View(ctx, func(r store.Reader) error {
		rng, err := q.until(r, string(p.Tenant), rng)
		if err == nil {
			entries, next, err = q.run(r, p.Tenant, rng)
		}
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

// until cuts off the range what is later than To: times never decrease along
// the chain, so that a binary search finds where.
func (q Query) until(r store.Reader, tenant string, rng store.Range) (store.Range, error) {
	if q.To.IsZero() {
		return rng, nil
	}
	n, _, err := lastOf(r, tenant)
	if err != nil {
		return rng, err
	}
	later := sort.Search(int(n), func(i int) bool {
		if err != nil {
			return true
		}
		var b []byte
		if b, err = r.Get(tenantKey(tenant, uint64(i)+1)); err != nil {
			return true
		}
		row, bad := decodeIndexRow(b)
		err = bad
		return bad != nil || time.UnixMicro(row.micros).After(q.To)
	})
	if to := tenantKey(tenant, uint64(later)+1); err == nil && bytes.Compare(to, rng.To) < 0 {
		rng.To = to
	}
	return rng, err
}

func (q Query) run(r store.Reader, tenant authz.TenantID, rng store.Range) (entries []Entry, next string, err error) {
	var found []uint64
	var bad error
	scanned := 0
	err = r.Scan(rng, func(key, value []byte) bool {
		row, err := decodeIndexRow(value)
		if err != nil {
			bad = err
			return false
		}
		at := time.UnixMicro(row.micros)
		if !q.From.IsZero() && at.Before(q.From) {
			next = "" // times never decrease along the chain: nothing older can match
			return false
		}
		if len(found) == q.Limit || scanned == maxScan {
			return false // there is more: next is the last row looked at
		}
		scanned++
		next = base64.RawURLEncoding.EncodeToString(key[len(key)-8:])
		if (q.EventType == "" || q.EventType == string(row.eventType)) &&
			(q.UserID == "" || q.UserID == row.actor) {
			found = append(found, row.sequence)
		}
		if binary.BigEndian.Uint64(key[len(key)-8:]) == 1 {
			next = "" // the tenant's first entry
		}
		return true
	})
	if err != nil || bad != nil {
		return nil, "", fmt.Errorf("scanning the index: %w", cmp.Or(err, bad))
	}
	entries = make([]Entry, 0, len(found))
	for _, sequence := range found {
		b, err := r.Get(entryKey(sequence))
		if err != nil {
			return nil, "", err
		}
		e, err := decodeRow(b)
		if err != nil || e.Sequence != sequence || e.TenantID != string(tenant) {
			return nil, "", errDamagedLog
		}
		entries = append(entries, *e)
	}
	return entries, next, nil
}

// Visit calls visit with the entries of a tenant that are of one of the types,
// oldest first, each after verifying its signature. Error: fault.Internal for a
// damaged one.
func (l *Log) Visit(ctx context.Context, tenant authz.TenantID, visit func(*Entry), types ...EventType) error {
	return ScanAll(ctx, l.store, store.Prefix(tenantPrefix(string(tenant))), func(_, value []byte) error {
		row, err := decodeIndexRow(value)
		if err != nil || !slices.Contains(types, row.eventType) {
			return err
		}
		var e *Entry
		err = l.store.View(ctx, func(r store.Reader) error {
			b, err := r.Get(entryKey(row.sequence))
			if err != nil {
				return err
			}
			if e, err = decodeRow(b); err != nil {
				return errDamagedLog
			}
			return nil
		})
		if err != nil {
			return err
		}
		if e.link() != row.link || e.TenantID != string(tenant) || !e.verify(l.signer.Public()) {
			return errDamagedLog
		}
		visit(e)
		return nil
	})
}

// LastChange returns the type of the event that gave a credential its current
// version.
func LastChange(r store.Reader, tenant authz.TenantID, credential string) (EventType, error) {
	at, err := Anchor(r, tenant, credential)
	if err != nil {
		return "", err
	}
	b, err := r.Get(entryKey(at.Sequence))
	if err != nil {
		return "", err
	}
	e, err := decodeRow(b)
	if err != nil || e.Hash != at.Hash || e.TenantID != string(tenant) || e.Resource.ID != credential || !e.EventType.changesVersion() {
		return "", errDamagedLog
	}
	return e.EventType, nil
}
