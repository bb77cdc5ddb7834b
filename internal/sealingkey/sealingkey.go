// Package sealingkey administers the keys that SealedCredential values are sealed
// for, and answers for manifests what only their private halves can tell.
//
// There is one current key, which is published; a new one takes its place on
// demand or when it has become old ([Service.RotateDue]). The earlier ones keep
// opening, until they are retired: nobody can see every git repository, so a
// private key is archived and never destroyed, and can be restored.
//
// What must stay true:
//   - a key that an object needs is not retired, and neither is any key while it
//     cannot be told whether an object needs it;
//   - of two rotations at the same time one happens;
//   - what is wrong with values that do not open is never told: not by an answer,
//     and not by what is done on the way. A plaintext is neither shown, nor
//     compared, nor decided upon, and is zeroed;
//   - every call leaves one entry in the audit log before it answers, in the
//     same transaction as the change if it made one; of the checks of one pod
//     with one verdict, the first in each minute does.
//
// Who writes to the database can put back the row of a key from before it was
// retired, or the name of an earlier current key. [Service.Verify] holds both
// against the audit log, and is asked when the deployment is opened: so that is
// found, unless entries were taken out of the log, which latticekeep audit verify
// finds.
package sealingkey

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strconv"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/sealing"
	"github.com/latticekeep/latticekeep/internal/store"
)

// suite of the keys that are made.
const suite = envelope.SuiteMLKEM768X25519

// Reasons in audit entries.
const (
	reasonMissing  = "no_such_sealing_key"
	reasonCurrent  = "current_key"
	reasonNeeded   = "key_needed"
	reasonUnknown  = "use_unknown" // it could not be told whether an object needs the key
	reasonConflict = "conflict"
	reasonOpen     = "does_not_open"
)

// Attributes of entries.
const (
	attributeCount   = "count"
	attributeFrom    = "from_key"
	attributeTo      = "to_key"
	attributeVerdict = "verdict"
)

// Options of a [Service]. InUse and Now are required.
type Options struct {
	// InUse tells how many objects have values that are sealed for a key, by its
	// id. It must know of every object or fail.
	InUse  func(context.Context) (map[string]int, error)
	Policy sealing.Policy // what manifests are checked against
	Now    func() time.Time
}

// Service is safe for concurrent use.
type Service struct {
	store   store.Store
	guard   *audit.Guard
	reader  *audit.Reader
	keys    *keyring.Ring
	options Options
	values  *semaphore.Weighted // bounds the work on values
	reviews *semaphore.Weighted // bounds that of the checks by pods, which come from the webhook
}

// New returns the sealing keys in s.
func New(s store.Store, guard *audit.Guard, reader *audit.Reader, keys *keyring.Ring, o Options) *Service {
	// Opening up to 64 values keeps a core busy for long, so only a few callers do it at a time. A
	// webhook that waits too long lets everything pass, so pods do not queue behind tenants.
	return &Service{
		store: s, guard: guard, reader: reader, keys: keys, options: o,
		values: semaphore.NewWeighted(halfOfTheCores()), reviews: semaphore.NewWeighted(halfOfTheCores()),
	}
}

func halfOfTheCores() int64 { return int64(max(1, runtime.GOMAXPROCS(0)/2)) }

// Key is a sealing key and how many objects have values that are sealed for it.
type Key struct {
	keyring.SealingKeyInfo
	Objects int
}

func keyEvent(what audit.EventType, p authz.Principal, id string) audit.Event {
	return audit.Event{Type: what, Outcome: audit.Success, Principal: p, Resource: audit.Resource{Type: audit.SealingKeyResource, ID: id}}
}

// errUse is of a deployment that cannot tell what its objects need.
func errUse(cause error) error {
	return fault.Wrap(fault.Unavailable, "it cannot be told now which objects need which sealing key: retry", cause)
}

// Survey returns all sealing keys, the current one first and then the newest
// first. It is the process's own view, for its metrics, and asks nobody's leave.
// Errors: fault.Unavailable, fault.Internal for damaged keys.
func (s *Service) Survey(ctx context.Context) ([]Key, error) {
	found, err := s.keys.SealingKeys(ctx)
	if err != nil {
		return nil, err
	}
	use, err := s.options.InUse(ctx)
	if err != nil {
		return nil, errUse(err)
	}
	keys := make([]Key, len(found))
	for i, k := range found {
		keys[i] = Key{k, use[k.ID]}
	}
	return keys, nil
}

// List is [Service.Survey] for p. Errors: fault.Forbidden, and those of Survey.
func (s *Service) List(ctx context.Context, p authz.Principal) ([]Key, error) {
	if err := s.guard.Admit(ctx, p, authz.ListSealingKeys); err != nil {
		return nil, err
	}
	keys, err := s.Survey(ctx)
	if err != nil {
		return nil, err
	}
	e := keyEvent(audit.SealingKeyListed, p, "")
	e.Attributes = map[string]string{attributeCount: strconv.Itoa(len(keys))}
	return keys, s.guard.Record(ctx, e)
}

// Rotate makes a new key and publishes it. Errors: fault.Forbidden,
// fault.Conflict when another rotation came first, fault.Unavailable.
func (s *Service) Rotate(ctx context.Context, p authz.Principal) (Key, error) {
	if err := s.guard.Admit(ctx, p, authz.RotateSealingKey); err != nil {
		return Key{}, err
	}
	former, err := s.keys.CurrentSealingKey(ctx) // maybe one that cannot be published
	if err != nil {
		return Key{}, err
	}
	id, err := s.rotate(ctx, p, former)
	if errors.Is(err, fault.Conflict) {
		return Key{}, s.guard.Refuse(ctx, keyEvent(audit.SealingKeyCreated, p, ""), audit.Failure, reasonConflict, err)
	}
	if err != nil {
		return Key{}, err
	}
	return s.key(ctx, id)
}

// RotateDue makes a new key when the current one is older than lifetime; never
// when lifetime is 0. The entry is the deployment's. Error: fault.Unavailable, or
// fault.Internal for a damaged key.
func (s *Service) RotateDue(ctx context.Context, lifetime time.Duration) (rotated bool, err error) {
	if lifetime <= 0 {
		return false, nil
	}
	document, err := s.keys.SealingDocument(ctx)
	if err != nil || s.options.Now().Before(document.CreatedAt().Add(lifetime)) {
		return false, err
	}
	_, err = s.rotate(ctx, authz.Principal{Tenant: authz.SystemTenant, Kind: authz.System, ID: "latticekeep"}, document.Key().ID())
	if errors.Is(err, fault.Conflict) {
		return false, nil // it has been replaced meanwhile
	}
	return err == nil, err
}

// rotate makes the key after former, whose id it is. Error: fault.Conflict when
// that is no longer the current one.
func (s *Service) rotate(ctx context.Context, p authz.Principal, former string) (id string, err error) {
	key, err := s.keys.NewSealingKey(ctx, suite)
	if err != nil {
		return "", err
	}
	err = s.store.Update(ctx, func(tx store.Tx) error {
		if err := key.PutAfter(tx, former); err != nil {
			return err
		}
		_, err := s.guard.Append(tx, keyEvent(audit.SealingKeyCreated, p, key.ID))
		return err
	})
	if err != nil {
		return "", fmt.Errorf("rotating the sealing key: %w", err)
	}
	return key.ID, nil
}

// key returns a key that was just made: nothing is sealed for it yet.
func (s *Service) key(ctx context.Context, id string) (Key, error) {
	found, err := s.keys.SealingKeys(ctx)
	if err != nil {
		return Key{}, err
	}
	for _, k := range found {
		if k.ID == id {
			return Key{SealingKeyInfo: k}, nil
		}
	}
	return Key{}, fault.New(fault.Internal, "internal error")
}

// Retire takes a key out of use: what is sealed for it is refused from now on.
// Errors: fault.Forbidden, fault.NotFound, fault.Conflict for the current key and
// for one that an object needs, fault.Unavailable, also when it cannot be told
// whether an object does.
func (s *Service) Retire(ctx context.Context, p authz.Principal, id string) (Key, error) {
	if err := s.guard.Admit(ctx, p, authz.RetireSealingKey); err != nil {
		return Key{}, err
	}
	e := keyEvent(audit.SealingKeyRetired, p, validID(id))
	c, err := s.keys.RetireSealingKey(ctx, e.Resource.ID)
	switch {
	case errors.Is(err, fault.NotFound):
		return Key{}, s.guard.Refuse(ctx, e, audit.Denied, reasonMissing, err)
	case errors.Is(err, fault.Conflict):
		return Key{}, s.guard.Refuse(ctx, e, audit.Denied, reasonCurrent, err)
	case err != nil:
		return Key{}, err
	}
	use, err := s.options.InUse(ctx)
	if err != nil {
		return Key{}, s.guard.Refuse(ctx, e, audit.Failure, reasonUnknown, errUse(err))
	}
	if n := use[c.Key.ID]; n > 0 && c.Changes() {
		return Key{}, s.guard.Refuse(ctx, e, audit.Denied, reasonNeeded, fault.New(fault.Conflict,
			fmt.Sprintf("the key is still needed, objects that are sealed for it: %d; move their manifests to the current key (latticekeep reseal) and apply them first. "+
				"To see which: kubectl get sealedcredentials -A -o custom-columns=NAMESPACE:.metadata.namespace,NAME:.metadata.name,KEY:.spec.sealed.keyID | grep %s", n, c.Key.ID)))
	}
	if err := s.change(ctx, e, c); err != nil {
		return Key{}, err
	}
	return Key{c.Key, use[c.Key.ID]}, nil
}

// Restore takes a retired key back into use, as an earlier one. Errors:
// fault.Forbidden, fault.NotFound, fault.Conflict, fault.Unavailable.
func (s *Service) Restore(ctx context.Context, p authz.Principal, id string) (Key, error) {
	if err := s.guard.Admit(ctx, p, authz.RestoreSealingKey); err != nil {
		return Key{}, err
	}
	e := keyEvent(audit.SealingKeyRestored, p, validID(id))
	c, err := s.keys.RestoreSealingKey(ctx, e.Resource.ID)
	if errors.Is(err, fault.NotFound) {
		return Key{}, s.guard.Refuse(ctx, e, audit.Denied, reasonMissing, err)
	}
	if err != nil {
		return Key{}, err
	}
	if err := s.change(ctx, e, c); err != nil {
		return Key{}, err
	}
	// A restored key is what helps in need, so it does not wait for this.
	use, err := s.options.InUse(ctx)
	if err != nil {
		return Key{}, errUse(err)
	}
	return Key{c.Key, use[c.Key.ID]}, nil
}

// change stores c and records it, also when the key is in that state already.
func (s *Service) change(ctx context.Context, e audit.Event, c *keyring.SealingKeyChange) error {
	err := s.store.Update(ctx, func(tx store.Tx) error {
		if err := c.Put(tx); err != nil {
			return err
		}
		_, err := s.guard.Append(tx, e)
		return err
	})
	if errors.Is(err, fault.Conflict) {
		return s.guard.Refuse(ctx, e, audit.Failure, reasonConflict, err)
	}
	if err != nil {
		return fmt.Errorf("changing a sealing key: %w", err)
	}
	return nil
}

// validID returns id when it can be a key's, and nothing otherwise: only such
// ids are looked up and recorded.
func validID(id string) string {
	if len(id) != 64 {
		return ""
	}
	for _, c := range []byte(id) {
		if (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return ""
		}
	}
	return id
}

// Verify holds the states of the sealing keys against the audit log. Errors:
// fault.Internal that names the first key whose state is not the one that was
// recorded last, and what to do; fault.Unavailable.
func (s *Service) Verify(ctx context.Context) error {
	keys, err := s.keys.SealingKeys(ctx)
	if err != nil {
		return err
	}
	current, err := s.keys.CurrentSealingKey(ctx)
	if err != nil {
		return err
	}
	newest, retired := "", make(map[string]bool)
	err = s.reader.Visit(ctx, authz.SystemTenant, func(e *audit.Entry) {
		switch {
		case e.Outcome != audit.Success:
		case e.EventType == audit.SealingKeyCreated:
			newest = e.Resource.ID
		default:
			retired[e.Resource.ID] = e.EventType == audit.SealingKeyRetired
		}
	}, audit.SealingKeyCreated, audit.SealingKeyRetired, audit.SealingKeyRestored)
	if err != nil {
		return fmt.Errorf("reading what was done with sealing keys: %w", err)
	}
	if current != newest {
		return doubt("sealing key %s is the one that is published, and the audit log says %s: make a new one (latticekeep sealing-key rotate)", current, newest)
	}
	for _, k := range keys {
		switch is := k.State == keyring.SealingKeyRetired; {
		case !is && retired[k.ID]:
			return doubt("sealing key %s opens, and the audit log says that it is retired: retire it again (latticekeep sealing-key retire)", k.ID)
		case is && !retired[k.ID]:
			return doubt("sealing key %s is retired, and the audit log says that it is not: restore it (latticekeep sealing-key restore)", k.ID)
		}
	}
	return nil
}

func doubt(format string, args ...any) error {
	return fault.New(fault.Internal, fmt.Sprintf(format, args...)+"; somebody has written to the database: run latticekeep audit verify")
}
