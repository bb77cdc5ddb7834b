package reader

import (
	"bytes"
	"context"
	"errors"
	"fmt"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Tenants returns the tenants that have entries in the log, including the system's own, in the
// order of their IDs.
func (rd *Reader) Tenants(ctx context.Context) (tenants []authz.TenantID, err error) {
	return rd.TenantsWithin(ctx, 0, audit.MaxInteger)
}

// TenantsWithin returns, like [Reader.Tenants], the tenants that have an entry in the database
// after the sequence behind and up to the sequence to, inclusive.
func (rd *Reader) TenantsWithin(ctx context.Context, behind, to uint64) (tenants []authz.TenantID, err error) {
	rest := audit.TenantRange
	for more := true; more; {
		more = false
		var tenant []byte
		var first audit.IndexRow
		err := rd.chain.Store.View(ctx, func(r store.Reader) error {
			var bad error
			// Read the rows of one tenant up to its first entry after the sequence behind.
			err := r.Scan(rest, func(key, value []byte) bool {
				var of []byte
				of, _, more = bytes.Cut(key[len(audit.TenantRange.From):], []byte("/"))
				if tenant != nil && !bytes.Equal(of, tenant) {
					return false
				}
				if tenant == nil {
					tenant = bytes.Clone(of)
				}
				first, bad = audit.DecodeIndexRow(value)
				return bad == nil && first.Sequence <= behind
			})
			return errors.Join(err, bad)
		})
		if err != nil {
			return nil, fmt.Errorf("listing the tenants of the log: %w", err)
		}
		if !more {
			break
		}
		if first.Sequence > behind && first.Sequence <= to {
			tenants = append(tenants, authz.TenantID(tenant))
		}
		rest.From = store.Prefix(audit.TenantPrefix(string(tenant))).To
	}
	return tenants, nil
}

// NewestOf returns the tenant sequence of a tenant's newest entry, 0 for a tenant without entries in the
// database. Error: fault.Unavailable.
func (rd *Reader) NewestOf(ctx context.Context, tenant authz.TenantID) (tenantSequence uint64, err error) {
	err = rd.chain.Store.View(ctx, func(r store.Reader) error {
		_, tenantSequence, err = rd.chain.Extent(r, string(tenant))
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("reading the newest entry of a tenant: %w", err)
	}
	return tenantSequence, nil
}

// Archived returns the sequence up to which entries are only in the archive, 0 if none is. Error:
// fault.Unavailable.
func (rd *Reader) Archived(ctx context.Context) (to uint64, err error) {
	err = rd.chain.Store.View(ctx, func(r store.Reader) error {
		to, err = rd.chain.CutTo(r)
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("looking up what is archived: %w", err)
	}
	return to, nil
}

// Last returns a tenant's newest successful entry of a type, or nil if the database has none. It
// serves the service itself, so the read is not recorded. Errors: fault.Internal for a damaged log,
// fault.Unavailable.
func (rd *Reader) Last(ctx context.Context, tenant authz.TenantID, t audit.EventType) (*audit.Entry, error) {
	q := Query{EventType: string(t), Limit: 1}
	for {
		before, err := q.before()
		if err != nil {
			return nil, err
		}
		var entries []audit.Entry
		err = rd.chain.Store.View(ctx, func(r store.Reader) error {
			entries, q.Cursor, err = q.run(rd.chain, r, string(tenant), before)
			return err
		})
		if err != nil {
			return nil, fmt.Errorf("reading the last %s: %w", t, err)
		}
		if len(entries) == 1 && entries[0].Outcome == audit.Success {
			return &entries[0], nil
		}
		if q.Cursor == "" {
			return nil, nil
		}
	}
}
