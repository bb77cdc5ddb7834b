package reader

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/chain"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// errNotRead is the one answer for all entries that a tenant cannot read.
var errNotRead = fault.New(fault.NotFound, "the tenant has no entry with this sequence, or it is in the archive only: whoever runs the server can read it there")

// ReadEntry returns an entry of p's tenant. The read itself is recorded before ReadEntry returns.
// Errors: fault.Forbidden; fault.NotFound, the same for entries of other tenants, for entries that
// never existed and for those that the database no longer has; fault.Unavailable.
func (rd *Reader) ReadEntry(ctx context.Context, p authz.Principal, sequence uint64) (audit.Entry, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	if err := rd.guard.Admit(ctx, p, authz.ReadAudit); err != nil {
		return audit.Entry{}, err
	}
	var e []audit.StoredEntry
	err := rd.chain.Store.View(ctx, func(r store.Reader) error {
		row, found, err := chain.FindSequence(rd.chain, r, string(p.Tenant), sequence)
		if err == nil && found {
			e, err = chain.ReadRows(r, string(p.Tenant), []audit.IndexRow{row})
		}
		return err
	})
	if err != nil {
		return audit.Entry{}, fmt.Errorf("reading an audit entry: %w", err)
	}
	if len(e) == 0 {
		if err := rd.guard.RecordAttempt(ctx, p, authz.ReadAudit, audit.Denied, reasonNoEntry); err != nil {
			return audit.Entry{}, err
		}
		return audit.Entry{}, errNotRead
	}
	err = rd.guard.Record(ctx, audit.Event{
		Type: audit.AuditRead, Outcome: audit.Success, Principal: p, Resource: audit.Resource{Type: audit.LogResource},
		Attributes: map[string]string{audit.AttributeSequence: strconv.FormatUint(sequence, 10)},
	})
	if err != nil {
		return audit.Entry{}, err
	}
	return *e[0].SignedEntry(), nil
}

// Tail reads the entries of a tenant as they are written. Only one goroutine may use it.
type Tail struct {
	chain  *chain.Chain
	guard  *guard.Guard
	tenant string
	next   uint64 // next tenant sequence to read
}

// tailPage is the maximum number of entries that [Tail.Next] returns.
const tailPage = 64

// Tail returns a tail of p's tenant. It begins after the sequence in after, or with the next entry
// written if after is nil. The opening is recorded, and that entry is the first one that a tail
// without after reads. Later reads are not recorded. The caller must check whether p may still
// read. Errors: fault.Forbidden, fault.Unavailable.
func (rd *Reader) Tail(ctx context.Context, p authz.Principal, after *uint64) (*Tail, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	if err := rd.guard.Admit(ctx, p, authz.ReadAudit); err != nil {
		return nil, err
	}
	t := &Tail{chain: rd.chain, guard: rd.guard, tenant: string(p.Tenant)}
	err := rd.chain.Store.View(ctx, func(r store.Reader) error {
		low, high, err := rd.chain.Extent(r, t.tenant)
		if err != nil {
			return err
		}
		t.next = high + 1
		if after != nil {
			t.next, err = chain.FirstRow(r, t.tenant, low, high, func(row audit.IndexRow) bool { return row.Sequence > *after })
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("looking where the entries come: %w", err)
	}
	err = rd.guard.Record(ctx, audit.Event{
		Type: audit.AuditRead, Outcome: audit.Success, Principal: p, Resource: audit.Resource{Type: audit.LogResource}, Attributes: map[string]string{audit.AttributeTail: "true"},
	})
	if err != nil {
		return nil, err
	}
	return t, nil
}

// Next returns the next entries, oldest first, from any process. It returns none if there are none
// yet. Errors: fault.Unavailable, also if the log has lost entries, because nobody knows which of
// those were read.
func (t *Tail) Next(ctx context.Context) (entries []audit.Entry, err error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	if err := t.guard.CheckNotHalted(); err != nil {
		return nil, err
	}
	err = t.chain.Store.View(ctx, func(r store.Reader) error {
		entries, err = t.page(r)
		if !errors.Is(err, audit.ErrDamagedLog) {
			return err
		}
		low, _, failed := t.chain.Extent(r, t.tenant)
		if failed != nil || low <= t.next {
			return err
		}
		t.next = low // earlier entries were archived before they were read
		entries, err = t.page(r)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("reading the newest entries: %w", err)
	}
	if n := len(entries); n > 0 {
		t.next = entries[n-1].TenantSequence + 1
	}
	return entries, nil
}

func (t *Tail) page(r store.Reader) ([]audit.Entry, error) {
	var rows []audit.IndexRow
	var bad error
	rng := store.Prefix(audit.TenantPrefix(t.tenant))
	rng.From = audit.TenantKey(t.tenant, t.next)
	err := r.Scan(rng, func(key, value []byte) bool {
		var row audit.IndexRow
		if row, bad = audit.DecodeIndexRow(value); bad == nil && !bytes.Equal(key, audit.TenantKey(t.tenant, t.next+uint64(len(rows)))) {
			bad = audit.ErrDamagedLog // a row is missing
		}
		if bad == nil {
			rows = append(rows, row)
		}
		return bad == nil && len(rows) < tailPage
	})
	if err != nil || bad != nil {
		return nil, errors.Join(err, bad)
	}
	slices.Reverse(rows)
	found, err := chain.ReadRows(r, t.tenant, rows)
	if err != nil {
		return nil, err
	}
	slices.Reverse(found)
	entries := make([]audit.Entry, len(found))
	for i, e := range found {
		if e.Entry.TenantSequence != t.next+uint64(i) {
			return nil, audit.ErrDamagedLog
		}
		entries[i] = *e.SignedEntry()
	}
	return entries, nil
}
