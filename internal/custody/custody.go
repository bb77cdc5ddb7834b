// Package custody administers the KMS keys that wrap all other keys: which there
// are, how a deployment moves from one to another while it serves, and how a former
// one is destroyed.
//
// What must stay true:
//   - moving is done in steps, each of which either happened or did not, so that
//     it can be broken off, repeated and done by two callers at once;
//   - a KMS key is not destroyed while anything is under it, and nothing is put
//     under it once its destruction was asked for, by no other process either;
//   - every call leaves an entry in the audit log before it answers: of what moved,
//     in the same transaction; of a destruction, before it is asked for.
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
	reasonOneKey  = "needed_by_another_name" // or it cannot be told whether it is
	reasonRefused = "not_destroyed"          // the KMS did not do it, or cannot be asked
)

// Attributes of audit entries.
const (
	attributeCount = "count"
	attributeFrom  = "from" // id of a KMS key
	attributeTo    = "to"
	attributeSets  = "sets" // how many were moved, decimal
)

// Options of a [Service]. Both are required.
type Options struct {
	// Destroy has the KMS destroy a former key, by its id. It may be asked again.
	Destroy func(ctx context.Context, id string) (kms.Destruction, error)
	Now     func() time.Time
}

// Service is safe for concurrent use.
type Service struct {
	store   store.Store
	guard   *audit.Guard
	keys    *keyring.Ring
	options Options
}

// New returns the custody of the keys in s.
func New(s store.Store, guard *audit.Guard, keys *keyring.Ring, o Options) *Service {
	return &Service{s, guard, keys, o}
}

func keyEvent(what audit.EventType, p authz.Principal, id string) audit.Event {
	return audit.Event{Type: what, Outcome: audit.Success, Principal: p, Resource: audit.Resource{Type: audit.KMSKeyResource, ID: id}}
}

// List returns the KMS keys and how many sets are under each. Errors:
// fault.Forbidden, fault.Unavailable.
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

// maxAhead is how much later than this machine's time a caller may say that it is:
// clocks differ.
const maxAhead = 10 * time.Minute

var errFuture = fault.New(fault.Invalid, "wrapped_before lies in the future: give the time at which the run began, or checked_at of the list of KMS keys")

// Moved is what a [Service.Rewrap] did, and what there is to do.
type Moved struct {
	keyring.KMSKeys
	Sets int // that it moved
}

// Rewrap moves as many sets as fit into part of a second under the current KMS
// key: those under another one and, if before is not zero, those that were not
// moved since. Repeat it until nothing remains. Errors: fault.Forbidden;
// fault.Invalid for a time in the future; fault.Unavailable when a KMS or the store
// does not answer, and fault.Internal when what is left is damaged: then nothing
// was moved, and nothing is lost.
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

// Destroy has the KMS destroy a former key, and returns what becomes of it. What
// was copied while sets were under it (backups, snapshots, the write-ahead log of a
// database) opens nowhere any more from then on. Errors: fault.Forbidden;
// fault.NotFound for a key that is not configured; fault.Conflict for the current
// key, also by another name, for one that nothing was moved from, while a set is
// under it, and when the KMS refuses; fault.Unavailable.
//
// The key is given up before the KMS is asked. When that refuses, this is taken
// back; when it is not known what the KMS did, it stays until a repeated call
// finds out.
func (s *Service) Destroy(ctx context.Context, p authz.Principal, id string) (d kms.Destruction, err error) {
	if err := s.guard.Admit(ctx, p, authz.DestroyKMSKey); err != nil {
		return d, err
	}
	former, err := s.keys.FormerKMSKey(id)
	switch {
	case err != nil:
		return d, s.guard.Refuse(ctx, keyEvent(audit.KMSKeyDestroyed, p, id), audit.Denied, reasonCurrent, err)
	case !former: // what it is called is recorded of known keys only
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
	// It is the KMS that refuses this process, and not this process its caller.
	return d, fault.Wrap(fault.Conflict, "the key-management service did not destroy the key: "+fault.Message(err), err)
}

// distinct refuses a former key that is a needed one by another name. Of a key that
// was given up that was found out before, and it may open nothing any more.
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
	case fault.Forbidden, fault.Invalid: // the mistake is this process's, not its caller's
		return fault.Wrap(fault.Conflict, "it cannot be found out whether this is a KMS key that is needed, by another name: "+fault.Message(err), err)
	}
	return err
}

// recordTime is how long a failure waits to be recorded when its caller's time is
// over.
const recordTime = 900 * time.Millisecond
