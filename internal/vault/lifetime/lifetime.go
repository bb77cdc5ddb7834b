// Package lifetime has a tenant reminded of what expires soon, says how long an expired credential can be
// renewed, and erases it after that.
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
	"slices"
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

// RunKey is the key of the row that says how long the deployment has looked after lifetimes.
const RunKey = "lifetime/run"

// run is a time without a long pause. Whatever expired before it has its grace from its beginning on:
// before an upgrade, during an outage, or after the time of a backup that was restored.
type run struct {
	Since time.Time `json:"since"`
	Seen  time.Time `json:"seen"` // the last Sweep of a new day
}

// maxPause is the longest time between two sweeps of one run.
const maxPause = 2 * day

// Rows are the rows of credentials.
type Rows interface {
	// IsObjects reports whether an object owns a credential, or has left it behind.
	IsObjects(rd store.Reader, tenant authz.TenantID, id string) (bool, error)
	// Remove deletes all rows of a credential.
	Remove(tx store.Tx, tenant authz.TenantID, id string) error
}

// Keeper looks after the lifetimes of credentials.
type Keeper struct {
	store store.Store
	guard *guard.Guard
	macs  mac.Rows
	rows  Rows
	now   func() time.Time

	// Remind prepares what tells a tenant that some of its credentials expire soon, and returns what stores
	// it. Nil: nobody is reminded.
	Remind func(ctx context.Context, tenant authz.TenantID, soon Find) (put func(store.Tx) error, err error)

	sweeping sync.Mutex
	next     []byte // key at which the next Sweep begins
}

// NewKeeper returns the keeper of the credentials in a store.
func NewKeeper(s store.Store, guard *guard.Guard, macs mac.Rows, rows Rows, now func() time.Time) *Keeper {
	return &Keeper{store: s, guard: guard, macs: macs, rows: rows, now: now}
}

// run returns the present run, and whether the row is to be written.
func (k *Keeper) run(rd store.Reader) (r run, stale bool, err error) {
	now := k.now().UTC()
	row, err := mac.Get[run](k.macs, rd, []byte(RunKey))
	switch {
	case err != nil && !errors.Is(err, fault.Internal): // a damaged row only delays
		return run{}, false, err
	case row == nil || err != nil || now.Sub(row.Seen) > maxPause:
		return run{now, now}, true, nil
	case now.Sub(row.Seen) >= day:
		return run{row.Since, now}, true, nil
	}
	return *row, false, nil
}

// Until returns until when a credential can be renewed.
func (k *Keeper) Until(rd store.Reader, r *record.Record) (time.Time, error) {
	present, _, err := k.run(rd)
	from := present.Since
	if r.ExpiresAt.After(from) {
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

// Sweep looks at some credentials, erases those whose grace is over, and returns their number. It reminds
// the tenants of those that expire soon. The next one goes on where it ended.
func (k *Keeper) Sweep(ctx context.Context) (int, error) {
	k.sweeping.Lock()
	defer k.sweeping.Unlock()
	err := k.goOn(ctx)
	if err != nil {
		return 0, fmt.Errorf("noting that expired credentials are looked for: %w", err)
	}
	found, next, err := k.look(ctx)
	if err != nil {
		return 0, fmt.Errorf("looking for expired credentials: %w", err)
	}
	k.next = next // what fails now is tried again when the next round comes here, and holds up nobody else
	n := 0
	for _, r := range found.due {
		if bad := k.store.Update(ctx, func(tx store.Tx) error { return k.erase(tx, r) }); bad != nil {
			err = errors.Join(err, fmt.Errorf("erasing an expired credential: %w", bad))
			continue
		}
		n++
	}
	for tenant := range found.soon {
		if bad := k.remind(ctx, tenant); bad != nil {
			err = errors.Join(err, fmt.Errorf("reminding a tenant of what expires: %w", bad))
		}
	}
	return n, err
}

// goOn writes the row of the present run once a day.
func (k *Keeper) goOn(ctx context.Context) error {
	var stale bool
	err := k.store.View(ctx, func(rd store.Reader) (err error) {
		_, stale, err = k.run(rd)
		return err
	})
	if err != nil || !stale {
		return err
	}
	return k.store.Update(ctx, func(tx store.Tx) error {
		present, stale, err := k.run(tx)
		if err != nil || !stale {
			return err
		}
		return mac.Put(k.macs, tx, []byte(RunKey), present)
	})
}

// found is what one look at credentials finds.
type found struct {
	due  []*record.Record        // their grace is over
	soon map[authz.TenantID]bool // they are to be reminded
}

// look looks at the credentials at and after k.next, and returns the key that follows. With an empty key
// it begins again.
func (k *Keeper) look(ctx context.Context) (f found, next []byte, err error) {
	err = k.store.View(ctx, func(rd store.Reader) error {
		f, next = found{soon: make(map[authz.TenantID]bool)}, nil
		rng := store.Prefix([]byte("credential/"))
		if k.next != nil {
			rng.From = k.next
		}
		rows, size := 0, 0
		var bad error
		err := rd.Scan(rng, func(key, value []byte) bool {
			if rows == sweepRows || size > sweepBytes || len(f.due) == sweepBatch {
				next = bytes.Clone(key)
				return false
			}
			rows, size = rows+1, size+len(value)
			r, err := record.ViewAt(key, value)
			if err != nil {
				return true // its expiry is not known
			}
			bad = k.add(&f, rd, &record.Record{Tenant: r.Tenant, ID: r.ID, SealedAt: r.SealedAt, ExpiresAt: r.ExpiresAt})
			return bad == nil
		})
		return errors.Join(err, bad)
	})
	return f, next, err
}

// add adds a credential to f, if there is something to do.
func (k *Keeper) add(f *found, rd store.Reader, r *record.Record) error {
	due, err := k.isDue(rd, r)
	soon := false
	if err == nil && k.Remind != nil && !f.soon[r.Tenant] {
		soon, err = k.isSoon(rd, r, k.now())
	}
	switch {
	case state.IsRefused(err): // somebody has changed the row of its object
		return nil
	case err != nil:
		return err
	case due:
		f.due = append(f.due, r)
	case soon:
		f.soon[r.Tenant] = true
	}
	return nil
}

// isDue reports whether the grace of a credential is over, and no object owns it.
func (k *Keeper) isDue(rd store.Reader, r *record.Record) (bool, error) {
	if k.now().Before(r.ExpiresAt.Add(Grace)) {
		return false, nil
	}
	until, err := k.Until(rd, r)
	if err != nil || k.now().Before(until) {
		return false, err
	}
	owned, err := k.rows.IsObjects(rd, r.Tenant, r.ID)
	return !owned && err == nil, err
}

// erase deletes a credential with an entry, unless it was renewed or deleted meanwhile.
func (k *Keeper) erase(tx store.Tx, seen *record.Record) error {
	r, err := record.Find(tx, seen.Tenant, seen.ID)
	if errors.Is(err, fault.Internal) {
		return nil
	}
	if err != nil || r == nil {
		return err
	}
	if due, err := k.isDue(tx, r); err != nil || !due {
		return err
	}
	_, err = k.guard.Append(tx, audit.Event{
		Type: audit.CredentialDeleted, Outcome: audit.Success, Principal: authz.SystemPrincipal(r.Tenant),
		Resource:   audit.Resource{Type: audit.CredentialResource, ID: r.ID},
		Attributes: map[string]string{audit.AttributeExpiresAt: r.ExpiresAt.Format(time.RFC3339Nano)},
	})
	return errors.Join(k.rows.Remove(tx, r.Tenant, r.ID), err)
}

const day = 24 * time.Hour

// remindBefore says how long before a credential expires its tenant is reminded.
var remindBefore = []time.Duration{30 * day, 7 * day, day}

// remindEvery is the least time between two reminders of a tenant. It is half of the last of remindBefore, so
// that one of it never comes too late.
const remindEvery = day / 2

// remindLate is how long after such a moment a reminder still goes out, for example after an outage.
const remindLate = 7 * day

// RemindedFamily begins the keys of the rows that say when a tenant was reminded last.
const RemindedFamily = "lifetime/reminded/"

func (k *Keeper) reminded(rd store.Reader, tenant authz.TenantID) (time.Time, error) {
	row, err := mac.Get[time.Time](k.macs, rd, []byte(RemindedFamily+string(tenant)))
	if errors.Is(err, fault.Internal) { // a damaged row costs one more mail
		row, err = nil, nil
	}
	if err != nil || row == nil || row.Sub(k.now()) > remindEvery { // written by a clock that ran ahead
		return time.Time{}, err
	}
	return *row, nil
}

// Soon is a credential of which its tenant is reminded.
type Soon struct {
	ID        string
	ExpiresAt time.Time
	Days      int // one of remindBefore, as days: it expires within so many
}

// Find finds the credentials of which a tenant is reminded, those that expire first at the beginning.
type Find func(context.Context) ([]Soon, error)

// came returns the last of the moments of remindBefore that came after a time, as days; 0 for none. A
// moment that was there already when the version was sealed does not count.
func came(r *record.Record, since, now time.Time) (days int) {
	if !now.Before(r.ExpiresAt) {
		return 0
	}
	for _, before := range remindBefore {
		if at := r.ExpiresAt.Add(-before); at.After(r.SealedAt) && at.After(since) && !at.After(now) {
			days = int(before / day)
		}
	}
	return days
}

// isSoon reports whether the tenant of a credential is to be reminded of it: one of the moments of
// remindBefore came after the last reminder, which is at least remindEvery ago.
func (k *Keeper) isSoon(rd store.Reader, r *record.Record, now time.Time) (bool, error) {
	if came(r, now.Add(-remindLate), now) == 0 {
		return false, nil
	}
	last, err := k.reminded(rd, r.Tenant)
	if err != nil || now.Sub(last) < remindEvery || came(r, last, now) == 0 {
		return false, err
	}
	of, err := k.rows.IsObjects(rd, r.Tenant, r.ID)
	return !of && err == nil, err
}

// find returns the credentials of which a tenant is reminded now. It reads all of its credentials,
// some at a time.
func (k *Keeper) find(ctx context.Context, tenant authz.TenantID, now time.Time) ([]Soon, error) {
	all := []Soon{}
	for rng := store.Prefix(record.TenantPrefix(tenant)); rng.From != nil; {
		var some []Soon
		var next []byte
		err := k.store.View(ctx, func(rd store.Reader) (err error) {
			some, next, err = k.findSome(rd, rng, now)
			return err
		})
		if err != nil {
			return nil, fmt.Errorf("looking for what expires soon: %w", err)
		}
		all = append(all, some...)
		rng.From = next
	}
	slices.SortFunc(all, func(a, b Soon) int { return a.ExpiresAt.Compare(b.ExpiresAt) })
	return all, nil
}

// findSome looks at the first credentials of a range, and returns the key that follows.
func (k *Keeper) findSome(rd store.Reader, rng store.Range, now time.Time) (some []Soon, next []byte, err error) {
	rows, size := 0, 0
	var bad error
	err = rd.Scan(rng, func(key, value []byte) bool {
		if rows == sweepRows || size > sweepBytes {
			next = bytes.Clone(key)
			return false
		}
		rows, size = rows+1, size+len(value)
		r, err := record.ViewAt(key, value)
		if err != nil {
			return true // its expiry is not known
		}
		soon, err := k.isSoon(rd, r, now)
		switch {
		case state.IsRefused(err): // somebody has changed the row of its object
		case err != nil:
			bad = err
		case soon:
			some = append(some, Soon{r.ID, r.ExpiresAt, came(r, now.Add(-remindLate), now)})
		}
		return bad == nil
	})
	return some, next, errors.Join(err, bad)
}

// remind stores what reminds a tenant, unless another replica has.
func (k *Keeper) remind(ctx context.Context, tenant authz.TenantID) error {
	at := k.now() // one time for what is found and for the mark, or a moment in between would be in neither
	put, err := k.Remind(ctx, tenant, func(ctx context.Context) ([]Soon, error) { return k.find(ctx, tenant, at) })
	if err != nil {
		return err
	}
	return k.store.Update(ctx, func(tx store.Tx) error {
		last, err := k.reminded(tx, tenant)
		if err != nil || at.Sub(last) < remindEvery {
			return err
		}
		return errors.Join(put(tx), mac.Put(k.macs, tx, []byte(RemindedFamily+string(tenant)), at.UTC()))
	})
}
