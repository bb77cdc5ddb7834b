// Package custody administers the KMS keys that wrap all other keys: it lists them, moves a
// deployment from one to another while it serves, and destroys a previous one.
//
// # Invariants
//
//   - A move happens in steps, and each step happens completely or not at all. So a move can be
//     interrupted, repeated, and done by two callers at once.
//   - A KMS key is not destroyed while a set is under it. After its destruction was requested, no
//     process puts a set under it.
//   - Every call writes an entry to the audit log before it answers. The entry of a move is in the
//     same transaction. The entry of a destruction comes before the request to the KMS.
package custody

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Reasons in audit entries.
const (
	reasonMissing = "no_such_kms_key"
	reasonCurrent = "current_key"
	reasonNeeded  = "key_needed"
	reasonOneKey  = "needed_by_another_name" // or this cannot be tested
	reasonRefused = "not_destroyed"          // the KMS refused, or does not answer
)

// Attributes of audit entries.
const (
	attributeCount = "count"
	attributeFrom  = "from" // id of a KMS key
	attributeTo    = "to"
	attributeSets  = "sets" // number of sets that were moved, decimal
)

// Options of a [Service]. Both are required.
type Options struct {
	// Destroy asks the KMS to destroy a previous key, by its id. It must be safe to repeat.
	Destroy func(ctx context.Context, id string) (kms.Destruction, error)
	Now     func() time.Time
}

// Service is safe for concurrent use.
type Service struct {
	store   store.Store
	guard   *guard.Guard
	keys    *keyring.Ring
	options Options
}

// New returns the custody of the keys in s.
func New(s store.Store, guard *guard.Guard, keys *keyring.Ring, o Options) *Service {
	return &Service{s, guard, keys, o}
}

func keyEvent(what audit.EventType, p authz.Principal, id string) audit.Event {
	return audit.Event{Type: what, Outcome: audit.Success, Principal: p, Resource: audit.Resource{Type: audit.KMSKeyResource, ID: id}}
}

// List returns the KMS keys and the number of sets under each. Errors: fault.Forbidden,
// fault.Unavailable.
func (s *Service) List(ctx context.Context, p authz.Principal) (keyring.KMSKeys, error) {
	if err := s.guard.Admit(ctx, p, authz.ListKMSKeys); err != nil {
		return keyring.KMSKeys{}, err
	}
	found, err := s.keys.KMSKeys(ctx, time.Time{})
	if err != nil {
		return keyring.KMSKeys{}, err
	}
	e := keyEvent(audit.KMSKeyListed, p, "")
	e.Attributes = map[string]string{attributeCount: strconv.Itoa(len(found.Keys))}
	return found, s.guard.Record(ctx, e)
}

// maxAhead is how far a caller's time may be ahead of this machine's, because clocks differ.
const maxAhead = 10 * time.Minute

var errFuture = fault.New(fault.Invalid, "wrapped_before lies in the future: give the time at which the run began, or checked_at of the list of KMS keys")

// Moved is the result of a [Service.Rewrap], with what remains.
type Moved struct {
	keyring.KMSKeys
	Sets int // number of sets that this call moved
}

// Rewrap moves as many sets as fit into part of a second under the current KMS key: the sets under
// another key and, if before is not zero, those that were last moved before that time or never.
// Callers repeat it until nothing remains. Errors: fault.Forbidden; fault.Invalid for a time in the
// future; fault.Unavailable if a KMS or the store does not answer; fault.Internal if the remaining
// sets are damaged. After an error of the move, nothing was moved. An error while counting what
// remains comes with the number of moved sets. No error loses anything.
func (s *Service) Rewrap(ctx context.Context, p authz.Principal, before time.Time) (Moved, error) {
	if err := s.guard.Admit(ctx, p, authz.RewrapKeys); err != nil {
		return Moved{}, err
	}
	if before.After(s.options.Now().Add(maxAhead)) {
		return Moved{}, errFuture
	}
	prepared, err := s.keys.Rewrap(ctx, before)
	if err != nil {
		return Moved{}, err
	}
	var sets int
	err = s.store.Update(ctx, func(tx store.Tx) error {
		sets = 0
		moved, err := prepared.Put(tx)
		if err != nil {
			return err
		}
		for _, from := range slices.Sorted(maps.Keys(moved)) {
			sets += moved[from]
			if err := s.append(tx, p, from, prepared.To, moved[from]); err != nil {
				return err
			}
		}
		if sets == 0 && prepared.Err == nil {
			return s.append(tx, p, "", prepared.To, 0)
		}
		return nil
	})
	if err != nil {
		return Moved{}, fmt.Errorf("moving keys to another KMS key: %w", err)
	}
	if sets == 0 && prepared.Err != nil {
		return Moved{}, prepared.Err
	}
	left, err := s.keys.KMSKeys(ctx, before)
	return Moved{left, sets}, err
}

// append records that sets were moved.
func (s *Service) append(tx store.Tx, p authz.Principal, from, to string, sets int) error {
	e := keyEvent(audit.KMSRewrapped, p, to)
	e.Attributes = map[string]string{attributeTo: to, attributeSets: strconv.Itoa(sets)}
	if from != "" {
		e.Attributes[attributeFrom] = from
	}
	_, err := s.guard.Append(tx, e)
	return err
}

var errUnknown = fault.New(fault.NotFound, "the configuration names no such KMS key in kms.former: list the KMS keys to see which there are")

// Destroy asks the KMS to destroy a previous key, and returns how the destruction proceeds.
// Afterwards, no copy that was made while sets were under the key can be opened: backups,
// snapshots, or the write-ahead log of a database. Errors: fault.Forbidden; fault.NotFound for a
// key that is not configured; fault.Conflict for the current key, also by another name, for a key
// that nothing was moved from, while a set is under the key, and if the KMS refuses;
// fault.Unavailable.
//
// The key is given up before the KMS is asked. If the KMS refuses, that is taken back. If the
// result at the KMS is unknown, the key stays given up until a repeated call finds out.
func (s *Service) Destroy(ctx context.Context, p authz.Principal, id string) (d kms.Destruction, err error) {
	if err := s.guard.Admit(ctx, p, authz.DestroyKMSKey); err != nil {
		return d, err
	}
	isPrevious, err := s.keys.IsPreviousKMSKey(id)
	switch {
	case err != nil:
		return d, s.guard.Refuse(ctx, keyEvent(audit.KMSKeyDestroyed, p, id), audit.Denied, reasonCurrent, err)
	case !isPrevious: // entries contain the ids of known keys only
		return d, s.guard.Refuse(ctx, keyEvent(audit.KMSKeyDestroyed, p, ""), audit.Denied, reasonMissing, errUnknown)
	}
	e := keyEvent(audit.KMSKeyDestroyed, p, id)
	if err := s.distinct(ctx, id); err != nil {
		return d, s.guard.Refuse(ctx, e, audit.Denied, reasonOneKey, err)
	}
	err = s.store.Update(ctx, func(tx store.Tx) error {
		if err := s.keys.GiveUp(tx, id); err != nil {
			return err
		}
		_, err := s.guard.Append(tx, e)
		return err
	})
	if errors.Is(err, fault.Conflict) {
		return d, s.guard.Refuse(ctx, e, audit.Denied, reasonNeeded, err)
	}
	if err != nil {
		return d, fmt.Errorf("giving a KMS key up: %w", err)
	}
	if d, err = s.options.Destroy(ctx, id); err == nil {
		return d, nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), recordTime)
	defer cancel()
	switch fault.Of(err) {
	case fault.Unavailable, fault.Internal: // it may have been destroyed
		return d, s.guard.Refuse(ctx, e, audit.Failure, reasonRefused, err)
	}
	e.Outcome, e.Attributes = audit.Failure, map[string]string{audit.AttributeReason: reasonRefused}
	back := s.store.Update(ctx, func(tx store.Tx) error {
		if err := s.keys.TakeBack(tx, id); err != nil {
			return err
		}
		_, err := s.guard.Append(tx, e)
		return err
	})
	if back != nil {
		return d, fmt.Errorf("the key-management service did not destroy the key, and taking back that it was given up: %w", back)
	}
	// The KMS refuses this process. That is not a refusal of the caller.
	return d, fault.Wrap(fault.Conflict, "the key-management service did not destroy the key: "+fault.Message(err), err)
}

// distinct refuses a previous key that is another name of a needed one. It skips a key that was
// given up: that key has passed the test before, and may open nothing any more.
func (s *Service) distinct(ctx context.Context, id string) error {
	found, err := s.keys.KMSKeys(ctx, time.Time{})
	if err != nil {
		return err
	}
	for _, k := range found.Keys {
		if k.ID == id && k.GivenUp {
			return nil
		}
	}
	err = s.keys.CheckDistinct(ctx, id)
	switch fault.Of(err) {
	case fault.Forbidden, fault.Invalid: // this process made the mistake, not its caller
		return fault.Wrap(fault.Conflict, "it cannot be found out whether this is a KMS key that is needed, by another name: "+fault.Message(err), err)
	}
	return err
}

// recordTime is how long recording a failure may take after the caller's time is over.
const recordTime = 900 * time.Millisecond
