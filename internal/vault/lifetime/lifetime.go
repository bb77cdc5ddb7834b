// Package lifetime says how long an expired credential can be renewed, and erases it after that.
//
// A credential in the trash is one that expired at the moment at which its version was sealed, so it is
// renewed and erased like any other that has expired. What an object owns, or has left behind, is not
// erased: the object may come back.
package lifetime

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/vault/mac"
	"github.com/latticekeep/latticekeep/internal/vault/record"
)

// Grace is how long a credential can be renewed after it has expired.
const Grace = 28 * 24 * time.Hour

// SinceKey is the key of the row that says since when the database's credentials are erased at all:
// those that had expired before an upgrade have their grace after it.
const SinceKey = "lifetime/since"

// Rows are the rows of credentials.
type Rows interface {
	// IsObjects reports whether an object owns a credential, or has left it behind.
	IsObjects(rd store.Reader, tenant authz.TenantID, id string) (bool, error)
	// Remove deletes all rows of a credential.
	Remove(tx store.Tx, tenant authz.TenantID, id string) error
}

// Eraser erases the credentials whose grace is over.
type Eraser struct {
	store store.Store
	guard *guard.Guard
	macs  mac.Rows
	rows  Rows
	now   func() time.Time

	sweeping sync.Mutex
	next     []byte // key at which the next Sweep begins
}

// New returns an eraser of the credentials in a store.
func New(s store.Store, guard *guard.Guard, macs mac.Rows, rows Rows, now func() time.Time) *Eraser {
	return &Eraser{store: s, guard: guard, macs: macs, rows: rows, now: now}
}

// since returns the time in the row [SinceKey], or now if there is none.
func (e *Eraser) since(rd store.Reader) (t time.Time, stored bool, err error) {
	row, err := mac.Get[time.Time](e.macs, rd, []byte(SinceKey))
	if errors.Is(err, fault.Internal) { // a damaged row delays only
		row, err = nil, nil
	}
	if err != nil || row == nil {
		return e.now(), false, err
	}
	return *row, true, nil
}

// Until returns until when a credential can be renewed.
func (e *Eraser) Until(rd store.Reader, r *record.Record) (time.Time, error) {
	from, _, err := e.since(rd)
	if err == nil && r.ExpiresAt.After(from) {
		from = r.ExpiresAt
	}
	return from.Add(Grace), err
}

// Bounds of one Sweep.
const (
	sweepRows  = 1000 // looked at
	sweepBytes = 16 << 20
	sweepBatch = 100 // erased
)

// Sweep looks at some credentials, erases those whose grace is over, and returns their number. The
// next one goes on where it ended.
func (e *Eraser) Sweep(ctx context.Context) (int, error) {
	e.sweeping.Lock()
	defer e.sweeping.Unlock()
	due, next, err := e.due(ctx)
	if err == nil && len(due) > 0 {
		err = e.store.Update(ctx, func(tx store.Tx) error {
			for _, r := range due {
				if err := e.erase(tx, r); err != nil {
					return err
				}
			}
			return nil
		})
	}
	if err != nil {
		return 0, fmt.Errorf("erasing expired credentials: %w", err)
	}
	e.next = next
	return len(due), nil
}

// due returns the credentials to erase among those at and after e.next, and the key that follows. With
// an empty key it begins again.
func (e *Eraser) due(ctx context.Context) (due []*record.Record, next []byte, err error) {
	begun := false
	err = e.store.View(ctx, func(rd store.Reader) error {
		due, next = nil, nil
		var bad error
		if _, begun, bad = e.since(rd); bad != nil || !begun {
			return bad
		}
		rng := store.Prefix([]byte("credential/"))
		if e.next != nil {
			rng.From = e.next
		}
		rows, size := 0, 0
		err := rd.Scan(rng, func(key, value []byte) bool {
			if rows == sweepRows || size > sweepBytes || len(due) == sweepBatch {
				next = bytes.Clone(key)
				return false
			}
			rows, size = rows+1, size+len(value)
			r, err := record.ViewAt(key, value)
			if err != nil {
				return true // its expiry is not known
			}
			r = &record.Record{Tenant: r.Tenant, ID: r.ID, ExpiresAt: r.ExpiresAt}
			is, err := e.isDue(rd, r)
			if state.IsRefused(err) {
				is, err = false, nil
			}
			if is {
				due = append(due, r)
			}
			bad = err
			return bad == nil
		})
		return errors.Join(err, bad)
	})
	if err == nil && !begun {
		err = e.store.Update(ctx, func(tx store.Tx) error {
			return mac.Put(e.macs, tx, []byte(SinceKey), e.now().UTC())
		})
	}
	return due, next, err
}

// isDue reports whether the grace of a credential is over, and no object owns it.
func (e *Eraser) isDue(rd store.Reader, r *record.Record) (bool, error) {
	if e.now().Before(r.ExpiresAt.Add(Grace)) {
		return false, nil
	}
	until, err := e.Until(rd, r)
	if err != nil || e.now().Before(until) {
		return false, err
	}
	owned, err := e.rows.IsObjects(rd, r.Tenant, r.ID)
	return !owned && err == nil, err
}

// erase deletes a credential with an entry, unless it was renewed or deleted meanwhile.
func (e *Eraser) erase(tx store.Tx, seen *record.Record) error {
	r, err := record.Find(tx, seen.Tenant, seen.ID)
	if errors.Is(err, fault.Internal) {
		return nil
	}
	if err != nil || r == nil {
		return err
	}
	if due, err := e.isDue(tx, r); err != nil || !due {
		return err
	}
	_, err = e.guard.Append(tx, audit.Event{
		Type: audit.CredentialDeleted, Outcome: audit.Success, Principal: authz.SystemPrincipal(r.Tenant),
		Resource:   audit.Resource{Type: audit.CredentialResource, ID: r.ID},
		Attributes: map[string]string{audit.AttributeExpiresAt: r.ExpiresAt.Format(time.RFC3339Nano)},
	})
	return errors.Join(e.rows.Remove(tx, r.Tenant, r.ID), err)
}
