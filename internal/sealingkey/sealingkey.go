// Package sealingkey manages the keys that SealedCredential values are sealed for. It also answers
// questions about manifests that need the private halves.
//
// One key is current, and it is published. A new key replaces it on demand or when it reaches its
// lifetime ([Service.RotateDue]). The earlier keys keep opening values until they are retired.
// Nobody can see every git repository, so a private key is archived and never destroyed, and a
// retired key can be restored.
//
// What must stay true:
//   - a key that an object needs is not retired, and no key is retired while it is unknown whether
//     an object needs it;
//   - of two rotations at the same time, one happens;
//   - neither an answer nor the work for it tells why values do not open. A plaintext is never
//     shown or compared, decides nothing, and is zeroed;
//   - every call leaves one entry in the audit log before it answers, in the transaction of its
//     change if it makes one. Of the checks of one pod with the same verdict, only the first in
//     each minute is recorded.
//
// An attacker who can write to the database can put back the row of a key from before it was
// retired, or the id of an earlier current key. [Service.Verify], which runs when the deployment is
// opened, compares both with the audit log and finds this, unless entries were also removed from
// the log. latticekeep audit verify finds removed entries, and latticekeep doctor the rows.
package sealingkey

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strconv"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/sealing"
	"github.com/latticekeep/latticekeep/internal/store"
)

// suite is the suite of new keys.
const suite = envelope.SuiteMLKEM768X25519

// Reasons in audit entries.
const (
	reasonMissing  = "no_such_sealing_key"
	reasonCurrent  = "current_key"
	reasonNeeded   = "key_needed"
	reasonUnknown  = "use_unknown" // it is unknown whether an object needs the key
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

// Options configures a [Service]. InUse and Now are required.
type Options struct {
	// InUse returns, for each id of a sealing key, how many objects have values that are sealed for
	// it. It must know every object or fail.
	InUse  func(context.Context) (map[string]int, error)
	Policy sealing.Policy // policy that manifests are checked against
	// Accepted finds the values that were accepted before. It is nil without a cluster.
	Accepted AcceptedValues
	Now      func() time.Time
}

// AcceptedValues returns, for each key, when the value was sealed that was last accepted for an
// object: the one with the UID of obj, or without a UID one with its namespace and name. It returns
// nil for an object that is unknown, or that p may not ask about.
type AcceptedValues func(ctx context.Context, p authz.Principal, obj *v1beta1.SealedCredential) (map[string]time.Time, error)

// Service is safe for concurrent use.
type Service struct {
	store   store.Store
	guard   *guard.Guard
	reader  *reader.Reader
	keys    *keyring.Ring
	options Options
	values  *semaphore.Weighted // bounds concurrent work on values
	reviews *semaphore.Weighted // bounds the checks by pods, which come from the webhook
}

// New returns a Service for the sealing keys in s.
func New(s store.Store, guard *guard.Guard, reader *reader.Reader, keys *keyring.Ring, o Options) *Service {
	// Opening up to 64 values keeps a core busy for long, so only a few callers do it at the same
	// time. A webhook that waits too long lets everything pass, so pods have their own semaphore
	// and do not queue behind tenants.
	return &Service{
		store: s, guard: guard, reader: reader, keys: keys, options: o,
		values: semaphore.NewWeighted(halfOfTheCores()), reviews: semaphore.NewWeighted(halfOfTheCores()),
	}
}

func halfOfTheCores() int64 { return int64(max(1, runtime.GOMAXPROCS(0)/2)) }

// Key is a sealing key and the number of objects with values that are sealed for it.
type Key struct {
	keyring.SealingKeyInfo
	Objects int
}

func keyEvent(what audit.EventType, p authz.Principal, id string) audit.Event {
	return audit.Event{Type: what, Outcome: audit.Success, Principal: p, Resource: audit.Resource{Type: audit.SealingKeyResource, ID: id}}
}

// errUse returns the error for a deployment that cannot find out which keys its objects need.
func errUse(cause error) error {
	return fault.Wrap(fault.Unavailable, "it cannot be told now which objects need which sealing key: retry", cause)
}

// Survey returns all sealing keys: the current one first, then the others, newest first. The
// process calls it for its metrics, and it checks no permission. Errors: fault.Unavailable,
// fault.Internal for damaged keys.
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

// Rotate creates a new key and publishes it. Errors: fault.Forbidden, fault.Conflict when another
// rotation came first, fault.Unavailable.
func (s *Service) Rotate(ctx context.Context, p authz.Principal) (Key, error) {
	if err := s.guard.Admit(ctx, p, authz.RotateSealingKey); err != nil {
		return Key{}, err
	}
	former, err := s.keys.CurrentSealingKey(ctx) // possibly one that cannot be published
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

// RotateDue creates a new key when the current one is older than lifetime. With a lifetime of 0 it
// does nothing. The entry names the deployment as the principal. Errors: fault.Unavailable,
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
		return false, nil // another replica rotated it meanwhile
	}
	return err == nil, err
}

// rotate creates the key after former, which is a key's id. The error is fault.Conflict when former
// is no longer current.
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

// key returns a key that was just created. No object has values sealed for it yet.
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

// Retire takes a key out of use: values sealed for it are refused from now on. Errors:
// fault.Forbidden; fault.NotFound; fault.Conflict for the current key and for a key that an object
// needs; fault.Unavailable, also when it is unknown whether an object needs it.
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

// Restore takes a retired key back into use, as an earlier key. Errors: fault.Forbidden,
// fault.NotFound, fault.Conflict, fault.Unavailable.
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
	// The key is restored before the objects are counted, because a restored key may be needed
	// urgently.
	use, err := s.options.InUse(ctx)
	if err != nil {
		return Key{}, errUse(err)
	}
	return Key{c.Key, use[c.Key.ID]}, nil
}

// change stores c and records it, also when the key already has that state.
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

// validID returns id when it has the form of a key's id, and "" otherwise. Only such ids are looked
// up and recorded.
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

// Verify compares the states of the sealing keys with the audit log. Errors: fault.Internal, which
// names the first key whose state is not the one recorded last, and the remedy; fault.Unavailable.
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
	return fault.New(fault.Internal, fmt.Sprintf(format, args...)+"; somebody has written to the database: stop the server and run latticekeep doctor")
}
