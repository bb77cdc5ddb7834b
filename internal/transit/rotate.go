package transit

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/store"
)

var (
	errMoved = fault.New(fault.Conflict, "the key changed meanwhile: retry")
	errWorn  = fault.New(fault.Forbidden, "the key has 4096 versions, which is the most: make a new key and rewrap with it")
)

// RotateKey gives a key a new version, which encrypts from now on. The earlier versions keep
// decrypting. With rewrap the tenant first gets a new wrapping key, every version of this key is
// encrypted again under it, and the seeds under the old wrapping key are deleted. rewrapped is the
// number of versions that were encrypted again. Errors: fault.Forbidden, also for a key with the
// maximal number of versions; fault.NotFound; fault.Unavailable.
func (t *Transit) RotateKey(ctx context.Context, p authz.Principal, id string, rewrap bool) (key Key, rewrapped int, err error) {
	if err := t.guard.Admit(ctx, p, authz.RotateKey); err != nil {
		return Key{}, 0, err
	}
	e := audit.Event{Type: audit.KeyRotated, Principal: p, Resource: audit.Resource{Type: audit.KeyResource, ID: validID(id)}}
	for range maxAttempts {
		keys, err := t.current(ctx, p.Tenant)
		if err != nil {
			return Key{}, 0, err
		}
		var old *namedKey
		err = t.store.View(ctx, func(rd store.Reader) (err error) {
			old, err = t.get(rd, p.Tenant, validID(id))
			return err
		})
		switch {
		case errors.Is(err, fault.Internal):
			return Key{}, 0, t.guard.Refuse(ctx, e, audit.Failure, reasonIntegrity, err)
		case err != nil:
			return Key{}, 0, fmt.Errorf("reading a key: %w", err)
		case old == nil:
			return Key{}, 0, t.guard.Refuse(ctx, e, audit.Denied, reasonMissing, errNoKey)
		case old.Version >= maxVersions:
			return Key{}, 0, t.guard.Refuse(ctx, e, audit.Denied, reasonLimit, errWorn)
		}
		next, err := t.rotate(ctx, p, old, keys, rewrap)
		switch {
		case errors.Is(err, fault.Conflict):
			continue
		case errors.Is(err, fault.Internal):
			return Key{}, 0, t.guard.Refuse(ctx, e, audit.Failure, reasonIntegrity, err)
		case err != nil:
			return Key{}, 0, err
		}
		if rewrap {
			rewrapped = int(old.Version)
		}
		return next.public(), rewrapped, nil
	}
	return Key{}, 0, fault.Wrap(fault.Unavailable, fault.Unavailable.Error(), errMoved)
}

// rotate creates the version after old and records p as the principal. Errors: fault.Conflict when
// the key or the tenant's keys changed meanwhile, fault.Internal when rewrap meets a damaged seed,
// fault.Unavailable.
func (t *Transit) rotate(ctx context.Context, p authz.Principal, old *namedKey, keys *keySet, rewrap bool) (*namedKey, error) {
	next := *old
	next.Version++
	next.RotatedAt = t.stamp()
	next.NextRotation = next.RotatedAt.AddDate(0, 0, next.RotationDays)
	e := next.event(audit.KeyRotated, p)
	wrapper := keys.Keys
	var m *move
	if rewrap {
		var err error
		if m, err = t.newMove(ctx, old, keys); err != nil {
			return nil, err
		}
		defer m.to.Wrapping.Zero()
		wrapper = m.to
		e.Attributes["re_encrypted"] = strconv.Itoa(len(m.from))
		e.Attributes["wrapping_version"] = number(wrapper.Version)
	}
	seed, err := next.newSeed(wrapper)
	if err != nil {
		return nil, err
	}
	err = t.store.Update(ctx, func(tx store.Tx) error {
		current, err := t.get(tx, old.tenant, old.id)
		if err != nil {
			return err
		}
		if current == nil || current.Version != old.Version {
			return errMoved
		}
		if m != nil {
			if err := m.put(tx, old); err != nil {
				return err
			}
		}
		return errors.Join(next.putSeed(tx, seed), t.put(tx, old, &next), t.append(tx, e))
	})
	if err != nil {
		return nil, fmt.Errorf("rotating a key: %w", err)
	}
	return &next, nil
}

// move encrypts the seeds of all versions of a key again, under a new wrapping key of the tenant.
type move struct {
	set   *keyring.NewSet
	to    *keyring.Keys
	from  []*seedRow
	moved []*seedRow
}

// newMove makes the tenant's next keys and encrypts the seeds again. It stores nothing; put does.
func (t *Transit) newMove(ctx context.Context, key *namedKey, current *keySet) (*move, error) {
	m := new(move)
	err := t.store.View(ctx, func(rd store.Reader) (err error) {
		m.from, err = seeds(rd, key.tenant, key.id)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("reading a key's versions: %w", err)
	}
	if len(m.from) != int(key.Version) {
		// The commit also compares versions, and so finds a version that was added meanwhile.
		return nil, t.incomplete(ctx, key)
	}
	if m.set, m.to, err = t.keys.NextSet(ctx, key.tenant, current.Version+1); err != nil {
		return nil, fmt.Errorf("making the tenant's next keys: %w", err)
	}
	for _, seed := range m.from {
		blob, err := current.moveSeed(ctx, key, m.to, seed)
		if err != nil {
			m.to.Wrapping.Zero()
			return nil, err
		}
		m.moved = append(m.moved, &seedRow{seed.version, m.to.Version, blob})
	}
	return m, nil
}

// incomplete returns errMoved for a key that was rotated since it was read, and errDamaged for a
// key that lacks a seed.
func (t *Transit) incomplete(ctx context.Context, key *namedKey) error {
	var now *namedKey
	err := t.store.View(ctx, func(rd store.Reader) (err error) {
		now, err = t.get(rd, key.tenant, key.id)
		return err
	})
	switch {
	case err != nil:
		return fmt.Errorf("reading a key: %w", err)
	case now == nil || now.Version != key.Version:
		return errMoved
	}
	return errDamaged
}

func (s *keySet) moveSeed(ctx context.Context, key *namedKey, to *keyring.Keys, seed *seedRow) ([]byte, error) {
	wrapper, err := s.at(ctx, seed.wrapping)
	if err != nil {
		return nil, err
	}
	blob, err := wrapper.MoveMessageKey(to, seedContext(key.tenant, key.id, seed.version), seed.blob)
	if err != nil {
		return nil, fmt.Errorf("encrypting a key's version again: %w", err)
	}
	return blob, nil
}

// put stores the tenant's next keys and replaces the old seeds by the moved ones. The error is
// fault.Conflict when the tenant's keys were rotated meanwhile.
func (m *move) put(tx store.Tx, key *namedKey) error {
	if err := m.set.Put(tx); err != nil {
		return err
	}
	for i, old := range m.from {
		if err := tx.Delete(seedKey(key.tenant, key.id, old.version, old.wrapping)); err != nil {
			return err
		}
		if err := key.putSeed(tx, m.moved[i]); err != nil {
			return err
		}
	}
	return nil
}

// RotateDue rotates every due key of every tenant and returns their number. A damaged key does not
// stop the others. A tenant whose keys cannot be unwrapped is skipped until the next call. After
// two such tenants in a row RotateDue stops, because the KMS or the store is probably down. It also
// stops when ctx ends.
func (t *Transit) RotateDue(ctx context.Context) (n int, err error) {
	now := t.now()
	until := dueRange
	until.To = dueKey(&namedKey{keyRow: keyRow{NextRotation: now.Add(time.Microsecond)}}) // the range excludes its end, so a key due now is inside
	var rows [][]byte
	err = audit.ScanAll(ctx, t.store, until, func(key, _ []byte) error {
		rows = append(rows, key)
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("reading which keys are due: %w", err)
	}
	var errs []error
	passed := make(map[authz.TenantID]bool)
	inARow := 0
	for _, row := range rows {
		if ctx.Err() != nil {
			return n, errors.Join(append(errs, ctx.Err())...)
		}
		tenant, id := parseDue(row)
		if passed[tenant] {
			continue
		}
		rotated, err := t.rotateDue(ctx, row, tenant, id)
		errs = append(errs, err)
		if rotated {
			n, inARow = n+1, 0
		}
		if errors.Is(err, fault.Unavailable) {
			passed[tenant] = true
			if inARow++; inARow == 2 {
				break
			}
		}
	}
	return n, errors.Join(errs...)
}

// rotateDue rotates the key of a due row, or removes a row that is no longer valid.
func (t *Transit) rotateDue(ctx context.Context, row []byte, tenant authz.TenantID, id string) (bool, error) {
	var key *namedKey
	err := t.store.View(ctx, func(rd store.Reader) (err error) {
		key, err = t.get(rd, tenant, id)
		return err
	})
	if err != nil {
		return false, fmt.Errorf("reading a key that is due: %w", err)
	}
	if key == nil || !key.due(t.now()) || string(dueKey(key)) != string(row) {
		return false, t.dropDue(ctx, row, tenant, id)
	}
	keys, err := t.current(ctx, tenant)
	if err != nil {
		return false, err
	}
	_, err = t.rotate(ctx, deployment(authz.Principal{Tenant: tenant}), key, keys, false)
	if errors.Is(err, fault.Conflict) { // another replica rotated it
		return false, nil
	}
	return err == nil, err
}

// dropDue removes a due row, unless the key's own row still agrees with it.
func (t *Transit) dropDue(ctx context.Context, row []byte, tenant authz.TenantID, id string) error {
	err := t.store.Update(ctx, func(tx store.Tx) error {
		key, err := t.get(tx, tenant, id)
		if err != nil {
			return err
		}
		if key != nil && key.Version < maxVersions && string(dueKey(key)) == string(row) {
			return nil
		}
		return tx.Delete(row)
	})
	if err != nil {
		return fmt.Errorf("removing a row of a key that is not due: %w", err)
	}
	return nil
}
