package keyring

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/internal/store"
)

// givenUpRow says that a KMS key is to be destroyed: nothing is wrapped with it
// any more. It has no value.
func givenUpRow(id string) []byte { return []byte("kms/given-up/" + id) }

// movedFromRow says that a set was moved away from a KMS key, which is so a former
// one and not one that is to come. It has no value.
func movedFromRow(id string) []byte { return []byte("kms/moved-from/" + id) }

var (
	errGivenUp = fault.New(fault.Invalid, "the key in kms.url was given up by latticekeep kms rewrap --destroy-old: name the key that took its place, or a new one")
	errInUse   = fault.New(fault.Conflict, "stored keys are still under this KMS key: run latticekeep kms rewrap until none is")
	errUnclear = fault.New(fault.Conflict, "of some stored keys it cannot be told which KMS key they are under, since they are damaged: restore them from a backup first")
	errUnused  = fault.New(fault.Conflict, "nothing was ever moved from this KMS key, so it may be one that is to be used: a key is destroyed after latticekeep kms rewrap moved away from it")
	errOneKey  = fault.New(fault.Conflict, "this is another name of a KMS key that is needed, and both would be destroyed: take it out of kms.former")
)

// checkInUse refuses what a KMS key wrapped that was given up meanwhile: another
// process, whose configuration is behind, may still wrap with it.
func checkInUse(rd store.Reader, id string) error {
	b, err := rd.Get(givenUpRow(id))
	if err == nil && b != nil {
		err = unavailable("storing keys", errGivenUp)
	}
	return err
}

// FormerKMSKey reports whether the configuration names a key as a former one.
// Error: fault.Conflict for the current one.
func (r *Ring) FormerKMSKey(id string) (bool, error) {
	if id == r.kms.ID() {
		return false, fault.New(fault.Conflict, "the current KMS key is not destroyed: name another one in kms.url, this one in kms.former, and run latticekeep kms rewrap first")
	}
	return r.configured(id) != nil, nil
}

// GiveUp says for good that nothing is under a KMS key, so that it may be
// destroyed: no set is put under it from then on, by this process or another one.
// Error: fault.Conflict when it is the current one, or a set is under it, or that
// cannot be told of one, or no set was ever moved from it.
func (r *Ring) GiveUp(tx store.Tx, id string) error {
	if _, err := r.FormerKMSKey(id); err != nil {
		return err
	}
	used, unclear := false, false
	err := tx.Scan(keyRows, func(row, blob []byte) bool {
		if w, ok := parseWrappedKey(row, blob); ok {
			of := r.kmsKeyOf(w)
			used, unclear = used || of == id, unclear || of == ""
		}
		return !used
	})
	switch {
	case err != nil:
		return fmt.Errorf("reading which KMS keys are in use: %w", err)
	case used:
		return errInUse
	case unclear:
		return errUnclear
	}
	b, err := tx.Get(movedFromRow(id))
	if err != nil {
		return fmt.Errorf("reading what was moved from a KMS key: %w", err)
	}
	if b == nil {
		return errUnused
	}
	return tx.Put(givenUpRow(id), nil)
}

// TakeBack undoes [Ring.GiveUp] of a key that is not going to be destroyed.
func (r *Ring) TakeBack(tx store.Tx, id string) error { return tx.Delete(givenUpRow(id)) }

// CheckDistinct tries whether a former KMS key is one that is needed, by another
// name: an alias and a number, two addresses of one service, one key in two
// regions. Errors: fault.Conflict when it is, or when that cannot be found out;
// fault.Unavailable.
func (r *Ring) CheckDistinct(ctx context.Context, id string) error {
	former := r.configured(id)
	if former == nil {
		return fault.New(fault.NotFound, "the configuration names no such KMS key")
	}
	found, err := r.KMSKeys(ctx, time.Time{})
	if err != nil {
		return err
	}
	for _, k := range found.Keys {
		if other := r.configured(k.ID); k.ID != id && other != nil && (k.State == KMSKeyCurrent || k.Sets > 0) {
			if err := distinct(ctx, other, former); err != nil {
				return err
			}
		}
	}
	return nil
}

// distinct is nil when neither of two keys opens what the other one wraps.
func distinct(ctx context.Context, needed, former KMS) error {
	ctx, cancel := context.WithTimeout(ctx, distinctTime)
	defer cancel()
	if err := opensNot(ctx, former, needed); err != nil {
		return err
	}
	err := opensNot(ctx, needed, former)
	if errors.Is(err, fault.Forbidden) { // it may not wrap any more, and what the first try said is enough
		return nil
	}
	return err
}

// distinctTime is how long two keys have, in which each wraps and opens once.
const distinctTime = 4 * loadTimeout

// opensNot is nil when a key does not open what another one wraps. Errors are those
// of the KMS, or errOneKey.
func opensNot(ctx context.Context, k, by KMS) error {
	const name = "two KMS keys"
	value := make([]byte, 32)
	_, _ = rand.Read(value) // never fails
	wrapped, err := by.Wrap(ctx, name, value)
	if err != nil {
		return err
	}
	renamed, err := kms.Renamed(wrapped, k.ID())
	if err != nil {
		return err
	}
	_, err = k.Unwrap(ctx, name, renamed)
	switch {
	case err == nil:
		return errOneKey
	case errors.Is(err, kms.ErrForeign):
		return nil
	}
	return err
}
