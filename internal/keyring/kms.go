package keyring

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/internal/store"
)

// KMS wraps keys of up to 32 bytes outside the store. Unwrap opens only what was wrapped for the
// same context. Both may take long and fail. ID is stable and reveals nothing about the key. The
// caller owns all slices.
type KMS interface {
	ID() string
	Wrap(ctx context.Context, keyContext string, key []byte) ([]byte, error)
	Unwrap(ctx context.Context, keyContext string, wrapped []byte) ([]byte, error)
}

// Config of a [Ring]. Zero fields mean the defaults.
type Config struct {
	// Previous are the previous KMS keys. They open the sets that [Ring.Rewrap] has not moved to the
	// current key yet. None of them wraps.
	Previous []KMS
	// CacheTTL is how long an unwrapped set may be used without asking the KMS again. Zero means
	// one call per operation.
	CacheTTL time.Duration
	Now      func() time.Time // default: time.Now
}

// DefaultCacheTTL is the cache time of a deployment that configures none.
const DefaultCacheTTL = 5 * time.Minute

// loadTimeout bounds one wrapping or unwrapping, so a hanging KMS is an error within a second.
const loadTimeout = 900 * time.Millisecond

// kmsKeys knows which KMS key each set is under, and which KMS keys were given up.
type kmsKeys struct {
	store  store.Store
	kms    KMS // the current one
	config Config
}

// checkKMSKeys checks that the configuration names the KMS key of every set. It does not check
// whether those KMS keys still answer.
func (r *kmsKeys) checkKMSKeys(ctx context.Context) error {
	keys, err := r.KMSKeys(ctx, time.Time{})
	if err != nil {
		return err
	}
	for _, k := range keys.Keys {
		switch {
		case k.State == KMSKeyUnknown && k.Sets > 0:
			return fault.New(fault.Invalid, fmt.Sprintf("%d of the stored keys are under KMS key %s, which is not configured (kms.url is %s): name the key it was made with in kms.url or, "+
				"to move away from it, in kms.former; if it was destroyed after latticekeep kms rewrap, this is a database or a backup from before, which nothing opens any more", k.Sets, k.ID, r.kms.ID()))
		case k.State == KMSKeyCurrent && k.GivenUp:
			return errGivenUp
		}
	}
	return nil
}

// kmsKeyOf returns the id of the KMS key that a wrapping key is under, and "" if the row is
// damaged.
func (r *kmsKeys) kmsKeyOf(w wrappedKey) string {
	id, _ := kms.KeyOf(w.blob)
	return id
}

// configured returns the KMS key with that id, and nil if the configuration does not name it.
func (r *kmsKeys) configured(id string) KMS {
	if r.kms.ID() == id {
		return r.kms
	}
	for _, previous := range r.config.Previous {
		if previous.ID() == id {
			return previous
		}
	}
	return nil
}

// kmsOf returns the KMS key that opens a wrapping key. For a row that names none it returns the
// current one, which refuses it. Error: fault.Unavailable if the key is not configured, as on a
// replica with an old configuration.
func (r *kmsKeys) kmsOf(w wrappedKey) (KMS, error) {
	id := r.kmsKeyOf(w)
	if id == "" {
		return r.kms, nil
	}
	if kms := r.configured(id); kms != nil {
		return kms, nil
	}
	return nil, unavailable("unwrapping keys", fmt.Errorf("they are under KMS key %s, which %w (kms.url is %s): "+
		"name it in kms.url, or in kms.former to move away from it", id, errUnnamedKMSKey, r.kms.ID()))
}

// TryKMS has the KMS open the deployment's own wrapping key, and forgets it. asked reports whether the
// KMS was the question: it is not when the store does not answer.
func (r *kmsKeys) TryKMS(ctx context.Context) (asked bool, err error) {
	var w wrappedKey
	err = r.store.View(ctx, func(rd store.Reader) error {
		version, err := currentVersion(rd, authz.SystemTenant)
		if err == nil {
			w, err = readWrappedKey(rd, authz.SystemTenant, version)
		}
		return err
	})
	if err != nil {
		return false, fmt.Errorf("reading keys: %w", err)
	}
	kms, err := r.kmsOf(w)
	if err != nil {
		return true, err
	}
	ctx, cancel := context.WithTimeout(ctx, loadTimeout)
	defer cancel()
	key, err := kms.Unwrap(ctx, keyContext(w.owner, w.version, wrapping), w.blob)
	clear(key)
	if err != nil {
		return true, unavailable("unwrapping keys", err)
	}
	return true, nil
}

// CheckKMS checks that the KMS keys are those of every set of a store, and that the deployment's own
// wrapping key opens. It keeps no key. Errors: fault.Invalid for keys that are not those of the store,
// and those of the KMS.
func CheckKMS(ctx context.Context, s store.Store, current KMS, previous []KMS) error {
	r := &kmsKeys{store: s, kms: current, config: Config{Previous: previous}}
	if err := r.checkKMSKeys(ctx); err != nil {
		return err
	}
	_, err := r.TryKMS(ctx)
	return err
}

var errUnnamedKMSKey = errors.New("this server is not configured with")

// KMSKeyState says what a KMS key is for.
type KMSKeyState string

// The states: the current key wraps, a previous key ("former") only opens, and an unknown key is
// not in the configuration.
const (
	KMSKeyCurrent  KMSKeyState = "current"
	KMSKeyPrevious KMSKeyState = "former"
	KMSKeyUnknown  KMSKeyState = "unknown"
)

// KMSKey describes a KMS key.
type KMSKey struct {
	ID      string
	State   KMSKeyState
	Sets    int  // how many are under this key
	GivenUp bool // see [Ring.GiveUp]
}

// KMSKeys lists the KMS keys that are configured or that sets are under: the current one first,
// then by state and id.
type KMSKeys struct {
	Keys      []KMSKey
	Remaining int // sets that [Ring.Rewrap] would move
	Damaged   int // sets whose KMS key cannot be read
}

// KMSKeys counts the sets by the KMS key that they are under. Remaining counts the sets that are
// under another key than the current one, or that were last moved before the given time or never.
// With a zero time no set of the current key counts. Error: fault.Unavailable.
func (r *kmsKeys) KMSKeys(ctx context.Context, before time.Time) (KMSKeys, error) {
	states := map[string]*KMSKey{r.kms.ID(): {ID: r.kms.ID(), State: KMSKeyCurrent}}
	for _, previous := range r.config.Previous {
		if id := previous.ID(); states[id] == nil {
			states[id] = &KMSKey{ID: id, State: KMSKeyPrevious}
		}
	}
	var keys KMSKeys
	err := r.eachWrappedKey(ctx, func(w wrappedKey) {
		id := r.kmsKeyOf(w)
		if id == "" {
			keys.Damaged++
			return
		}
		if states[id] == nil {
			states[id] = &KMSKey{ID: id, State: KMSKeyUnknown}
		}
		states[id].Sets++
		if r.moves(w, before) {
			keys.Remaining++
		}
	})
	if err != nil {
		return KMSKeys{}, err
	}
	err = r.store.View(ctx, func(rd store.Reader) error {
		for _, k := range states {
			b, err := rd.Get(givenUpRow(k.ID))
			if err != nil {
				return err
			}
			k.GivenUp = b != nil
		}
		return nil
	})
	if err != nil {
		return KMSKeys{}, fmt.Errorf("reading which KMS keys were given up: %w", err)
	}
	for _, k := range states {
		keys.Keys = append(keys.Keys, *k)
	}
	slices.SortFunc(keys.Keys, func(a, b KMSKey) int { // the names of the states sort in this order, too
		return strings.Compare(string(a.State)+a.ID, string(b.State)+b.ID)
	})
	return keys, nil
}

// moves reports whether [Ring.Rewrap] moves a wrapping key.
func (r *kmsKeys) moves(w wrappedKey, before time.Time) bool {
	id := r.kmsKeyOf(w)
	return id != "" && (id != r.kms.ID() || !before.IsZero() && w.movedAt < before.UnixMicro())
}

// pageSize is the number of rows that one View reads, because a View lasts two seconds at most.
const pageSize = 4096

// eachWrappedKey visits the wrapping key of every set. For a set that is made or removed during the
// call, either state may be seen. The blob is valid during the visit.
func (r *kmsKeys) eachWrappedKey(ctx context.Context, visit func(wrappedKey)) error {
	rest := keyRows
	for more := true; more; {
		more = false
		var last []byte
		var page []wrappedKey // a View may run its closure again
		err := r.store.View(ctx, func(rd store.Reader) error {
			n := 0
			last, page, more = nil, page[:0], false
			return rd.Scan(rest, func(row, blob []byte) bool {
				if w, ok := parseWrappedKey(row, blob); ok {
					w.blob = bytes.Clone(blob)
					page = append(page, w)
				}
				n++
				if more = n == pageSize; more {
					last = append(bytes.Clone(row), 0)
				}
				return !more
			})
		})
		if err != nil {
			return fmt.Errorf("reading which KMS keys are in use: %w", err)
		}
		for _, w := range page {
			visit(w)
		}
		rest.From = last
	}
	return nil
}

var (
	errGivenUp = fault.New(fault.Invalid, "the key in kms.url was given up by latticekeep kms rewrap --destroy-old: name the key that took its place, or a new one")
	errInUse   = fault.New(fault.Conflict, "stored keys are still under this KMS key: run latticekeep kms rewrap until none is")
	errUnclear = fault.New(fault.Conflict, "of some stored keys it cannot be told which KMS key they are under, since they are damaged: find them with latticekeep doctor, and restore a backup first")
	errUnused  = fault.New(fault.Conflict, "nothing was ever moved from this KMS key, so it may be one that is to be used: a key is destroyed after latticekeep kms rewrap moved away from it")
	errOneKey  = fault.New(fault.Conflict, "this is another name of a KMS key that is needed, and both would be destroyed: remove it from kms.former")
)

// checkInUse refuses to store what a KMS key wrapped if that key was given up meanwhile. Another
// process with an old configuration may still wrap with it.
func checkInUse(rd store.Reader, id string) error {
	b, err := rd.Get(givenUpRow(id))
	if err == nil && b != nil {
		err = unavailable("storing keys", errGivenUp)
	}
	return err
}

// IsPreviousKMSKey reports whether the configuration names a key as a previous one. Error:
// fault.Conflict for the current one.
func (r *kmsKeys) IsPreviousKMSKey(id string) (bool, error) {
	if id == r.kms.ID() {
		return false, fault.New(fault.Conflict, "the current KMS key is not destroyed: name another one in kms.url, this one in kms.former, and run latticekeep kms rewrap first")
	}
	return r.configured(id) != nil, nil
}

// GiveUp records that nothing is under a KMS key, so the key may be destroyed. From then on no
// process puts a set under it. Error: fault.Conflict if it is the current key, if a set is under it
// or may be, or if no set was ever moved from it.
func (r *kmsKeys) GiveUp(tx store.Tx, id string) error {
	if _, err := r.IsPreviousKMSKey(id); err != nil {
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

// TakeBack undoes [Ring.GiveUp] for a key that is not going to be destroyed.
func (r *kmsKeys) TakeBack(tx store.Tx, id string) error { return tx.Delete(givenUpRow(id)) }

// CheckDistinct tests that a previous KMS key is not another name of a key that is needed. One key
// can have several names: an alias and a number, two addresses of one service, two regions. Errors:
// fault.Conflict if it is such a name; fault.NotFound if it is not configured; fault.Unavailable,
// or the KMS's own, if the test fails.
func (r *kmsKeys) CheckDistinct(ctx context.Context, id string) error {
	previous := r.configured(id)
	if previous == nil {
		return fault.New(fault.NotFound, "the configuration names no such KMS key")
	}
	found, err := r.KMSKeys(ctx, time.Time{})
	if err != nil {
		return err
	}
	for _, k := range found.Keys {
		if other := r.configured(k.ID); k.ID != id && other != nil && (k.State == KMSKeyCurrent || k.Sets > 0) {
			if err := distinct(ctx, other, previous); err != nil {
				return err
			}
		}
	}
	return nil
}

// distinct returns nil if neither of two keys opens what the other one wraps.
func distinct(ctx context.Context, needed, previous KMS) error {
	ctx, cancel := context.WithTimeout(ctx, distinctTime)
	defer cancel()
	if err := opensNot(ctx, previous, needed); err != nil {
		return err
	}
	err := opensNot(ctx, needed, previous)
	if errors.Is(err, fault.Forbidden) { // a previous key may not be allowed to wrap; then the first test is enough
		return nil
	}
	return err
}

// distinctTime bounds the test of two keys, in which each wraps and opens once.
const distinctTime = 4 * loadTimeout

// opensNot returns nil if k does not open what by wraps. Errors: errOneKey, or the KMS's own.
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
