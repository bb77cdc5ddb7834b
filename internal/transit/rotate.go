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

// RotateKey gives a key a new version, which encrypts from now on; the earlier
// ones keep decrypting. With rewrap the tenant first gets a new wrapping key, and
// every version of this key is encrypted anew under it; what lay under the old
// one is gone from the store. rewrapped is how many earlier versions that were.
// Errors: fault.Forbidden, also for a key of too many versions, fault.NotFound,
// fault.Unavailable.
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

// rotate makes the version after old and records it as p's doing. Errors:
// fault.Conflict when the key or the tenant's keys changed meanwhile,
// fault.Internal when rewrap meets a damaged seed, fault.Unavailable.
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

// move takes all versions of a key from the wrapping keys they lie under to a
// new one of the tenant.
type move struct {
	set   *keyring.NewSet
	to    *keyring.Keys
	from  []*seedRow
	moved []*seedRow
}

// newMove makes the tenant's next keys and encrypts the seeds anew. Nothing is
// stored before put.
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
		// One that was added meanwhile is met by the comparison at the commit too.
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

// incomplete tells a key that was rotated since it was read from one that lacks
// a seed.
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

// put stores the tenant's next keys and the moved seeds in the place of the old
// rows. Error: fault.Conflict when the tenant's keys were rotated meanwhile.
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

// RotateDue rotates every key of every tenant whose time has come, and returns
// how many there were. A damaged key does not keep the others from it, nor does a
// tenant whose keys cannot be unwrapped, which is passed over until the next
// time. Two such tenants in a row are taken for a KMS or a store that is down:
// that ends it, and so does ctx.
func (t *Transit) RotateDue(ctx context.Context) (n int, err error) {
	now := t.now()
	until := dueRange
	until.To = dueKey(&namedKey{keyRow: keyRow{NextRotation: now.Add(time.Microsecond)}}) // what is due now is due
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

// rotateDue rotates the key of a due row, or removes a row that holds no longer.
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
	if errors.Is(err, fault.Conflict) { // someone else did
		return false, nil
	}
	return err == nil, err
}

// dropDue removes a due row, unless it is its key's own after all.
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
