// Package keyring keeps the keys of every tenant and of the deployment.
//
// The model: an owner (a tenant, or the deployment as [authz.SystemTenant])
// has numbered versions of a set of keys. The wrapping key of a set is stored
// only as ciphertext of the KMS; every other key of the set is stored under
// the wrapping key. A set that was unwrapped is cached as one, for at most the
// configured time, so that what came out of a wrapping key expires with it.
//
// The deployment's audit, identity and API-key hash keys are the exception:
// they are unwrapped at start and live with the process, so that a denial can
// be recorded while the KMS is down.
//
// The stored form of a wrapping key says which KMS key it is under, so that a
// deployment moves to another one set by set while it serves ([Ring.Rewrap]).
// The wrapping key stays the same: only its wrapping changes, and caches hold.
package keyring

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/store"
)

// KMS wraps keys of up to 32 bytes outside the store. Unwrap opens only what
// was wrapped for the same context. Both may take long and fail; ID is stable
// and tells nothing of the key. The caller owns all slices.
type KMS interface {
	ID() string
	Wrap(ctx context.Context, keyContext string, key []byte) ([]byte, error)
	Unwrap(ctx context.Context, keyContext string, wrapped []byte) ([]byte, error)
}

// Config of a [Ring]. Zero fields take the defaults.
type Config struct {
	// Former are keys that still open the sets which [Ring.Rewrap] has not moved
	// under the current one yet. None of them wraps.
	Former []KMS
	// CacheTTL is how long an unwrapped set may be used without asking the KMS
	// again. Zero means one call per operation.
	CacheTTL time.Duration
	Now      func() time.Time // default time.Now
}

// DefaultCacheTTL is the cache time of a deployment that configures none.
const DefaultCacheTTL = 5 * time.Minute

// Keys is one version of a tenant's set, unwrapped. It is read-only and shared.
type Keys struct {
	Version  uint32
	Wrapping secret.Bytes // 32 bytes
	Signing  *dualsig.Key // nil in the deployment's own set

	mu       sync.Mutex
	sealing  map[string]*envelope.SealingKey // by wrapped private key; only in the deployment's set
	messages map[string]*envelope.KEMKey     // by context
}

// Ring gives out keys. It is safe for concurrent use.
type Ring struct {
	store      store.Store
	kms        KMS
	config     Config
	deployment deployment
	unnamed    string // id of the KMS key of stored forms that name none

	audit      *dualsig.PrivateKey
	identity   *dualsig.PrivateKey
	apiKeyHash secret.Bytes
	tokenKey   secret.Bytes

	reportURLKey secret.Bytes

	flight singleflight.Group
	mu     sync.Mutex
	cache  map[cacheKey]cached

	published *published // under mu
}

type cacheKey struct {
	owner   authz.TenantID
	version uint32
}

type cached struct {
	keys    *Keys
	expires time.Time
}

// purpose is what a key of a set is for.
type purpose string

const (
	wrapping purpose = "wrapping"
	signing  purpose = "signing"  // ML-DSA-65 seed: credential records, encrypted data, data that callers sign
	mac      purpose = "mac"      // HMAC-SHA-512 beside it, for all three
	auditing purpose = "audit"    // ML-DSA-65 seed of the chain
	identity purpose = "identity" // ML-DSA-65 seed of sealing-key documents
	// The HMAC key of whatever is stored as a keyed hash or under a MAC, each with a label of its own: API keys, rows, names of
	// credentials, idempotency keys and their requests, e-mail addresses, refresh tokens and mailed tickets. The key of access
	// tokens is derived from it.
	apiKeyHash purpose = "api-key-hash"
)

// sizes of the keys of a tenant's set and of the deployment's, in bytes.
var (
	tenantSet     = map[purpose]int{signing: dualsig.SeedSize, mac: dualsig.MACKeySize}
	deploymentSet = map[purpose]int{auditing: dualsig.SeedSize, identity: dualsig.SeedSize, apiKeyHash: 64}
)

const wrappingKeySize = 32

func setOf(owner authz.TenantID) map[purpose]int {
	if owner == authz.SystemTenant {
		return deploymentSet
	}
	return tenantSet
}

func setPrefix(owner authz.TenantID, version uint32) []byte {
	return fmt.Appendf(nil, "key/%s/%08x/", owner, version)
}

// keyRow is that of a key of a set; a wrapping key that was moved under another
// KMS key has another one, see [wrappedKey].
func keyRow(owner authz.TenantID, version uint32, p purpose) []byte {
	return append(setPrefix(owner, version), p...)
}

func currentRow(owner authz.TenantID) []byte { return fmt.Appendf(nil, "key/%s/current", owner) }

// keyContext is what a stored key is bound to, under the KMS and under the
// wrapping key alike.
func keyContext(owner authz.TenantID, version uint32, p purpose) string {
	return fmt.Sprintf("%s/%d/%s", owner, version, p)
}

// NewSet is a freshly made version of an owner's keys, wrapped and not stored.
type NewSet struct {
	owner   authz.TenantID
	version uint32
	kmsKey  string // id of the key that wraps it
	rows    map[string][]byte
}

// NewSet makes the given version of a tenant's keys: 1 for a new tenant, one
// more than the current version to rotate. It calls the KMS and stores
// nothing; [NewSet.Put] does, in the caller's transaction.
func (r *Ring) NewSet(ctx context.Context, owner authz.TenantID, version uint32) (*NewSet, error) {
	set, keys, err := r.NextSet(ctx, owner, version)
	if err != nil {
		return nil, err
	}
	keys.Wrapping.Zero()
	return set, nil
}

// NextSet is [Ring.NewSet] for who puts other keys under the new wrapping key
// in the same transaction: it returns the set unwrapped as well. Nobody else
// has it, and the caller zeroes its wrapping key.
func (r *Ring) NextSet(ctx context.Context, owner authz.TenantID, version uint32) (*NewSet, *Keys, error) {
	ctx, cancel := context.WithTimeout(ctx, loadTimeout)
	defer cancel()
	set, plain, err := newSet(ctx, r.kms, owner, version)
	if err != nil {
		return nil, nil, err
	}
	keys, err := newKeys(owner, version, plain)
	if err != nil {
		return nil, nil, err
	}
	if keys.Signing != nil {
		row := publicRow(owner, version)
		set.rows[string(row)] = r.SealRow(row, keys.Signing.Public().Bytes())
	}
	return set, keys, nil
}

// newKeys parses an unwrapped set and zeroes what is then not needed.
func newKeys(owner authz.TenantID, version uint32, plain map[purpose]secret.Bytes) (*Keys, error) {
	keys := &Keys{
		Version: version, Wrapping: plain[wrapping],
		sealing: make(map[string]*envelope.SealingKey), messages: make(map[string]*envelope.KEMKey),
	}
	if owner != authz.SystemTenant {
		var err error
		if keys.Signing, err = dualsig.NewKey(version, plain[signing], plain[mac]); err != nil {
			return nil, fmt.Errorf("parsing signing keys: %w", err)
		}
	}
	for p := range setOf(owner) {
		plain[p].Zero() // parsed, or the deployment's: not needed here
	}
	return keys, nil
}

func newSet(ctx context.Context, kms KMS, owner authz.TenantID, version uint32) (*NewSet, map[purpose]secret.Bytes, error) {
	plain := map[purpose]secret.Bytes{wrapping: random(wrappingKeySize)}
	wrapped, err := kms.Wrap(ctx, keyContext(owner, version, wrapping), plain[wrapping])
	if err != nil {
		return nil, nil, unavailable("wrapping a new key", err)
	}
	set := &NewSet{owner, version, kms.ID(), map[string][]byte{string(keyRow(owner, version, wrapping)): wrapped}}
	for p, size := range setOf(owner) {
		plain[p] = random(size)
		blob, err := envelope.SealKey(plain[wrapping], keyContext(owner, version, p), plain[p])
		if err != nil {
			return nil, nil, fmt.Errorf("sealing a new key: %w", err)
		}
		set.rows[string(keyRow(owner, version, p))] = blob
	}
	return set, plain, nil
}

// Put stores the set and makes it the current one. It overwrites nothing: a
// current version that was rolled back must not cost the keys of later ones.
// Errors: fault.Conflict when the owner's current version is not the one before,
// fault.Internal when there are keys of this version already, fault.Unavailable
// when the KMS key that wraps it was given up meanwhile.
func (s *NewSet) Put(tx store.Tx) error {
	current, err := currentVersion(tx, s.owner)
	if err != nil {
		return err
	}
	if current+1 != s.version {
		return fault.New(fault.Conflict, "the keys were rotated meanwhile: retry")
	}
	if err := checkInUse(tx, s.kmsKey); err != nil {
		return err
	}
	taken := false
	err = tx.Scan(store.Prefix(setPrefix(s.owner, s.version)), func(_, _ []byte) bool {
		taken = true
		return false
	})
	if err != nil {
		return err
	}
	if taken {
		return errDamaged
	}
	for key, value := range s.rows {
		if err := tx.Put([]byte(key), value); err != nil {
			return err
		}
	}
	return tx.Put(currentRow(s.owner), binary.BigEndian.AppendUint32(nil, s.version))
}

func currentVersion(r store.Reader, owner authz.TenantID) (uint32, error) {
	b, err := r.Get(currentRow(owner))
	if err != nil || b == nil {
		return 0, err
	}
	if len(b) != 4 {
		return 0, errDamaged
	}
	return binary.BigEndian.Uint32(b), nil
}

func random(n int) secret.Bytes {
	b := make(secret.Bytes, n)
	_, _ = rand.Read(b) // never fails
	return b
}

var errDamaged = fault.New(fault.Internal, "the stored keys are damaged: restore a backup")

func unavailable(what string, err error) error {
	return fault.Wrap(fault.Unavailable, "the key-management service cannot be used now: retry, and check it if this lasts", fmt.Errorf("%s: %w", what, err))
}

// ChainID names the deployment's audit chain.
func (r *Ring) ChainID() string { return r.deployment.ChainID }

// Audit is the key of the audit chain.
func (r *Ring) Audit() *dualsig.PrivateKey { return r.audit }

// Identity is the deployment's identity key, which signs its public documents.
func (r *Ring) Identity() *dualsig.PublicKey { return r.identity.Public() }

// APIKeyHash is the HMAC key under which API keys and everything else that is
// stored as a keyed hash are stored, each with a label of its own.
func (r *Ring) APIKeyHash() secret.Bytes { return r.apiKeyHash }

// Current returns the newest version of a tenant's keys. Errors:
// fault.NotFound for an unknown tenant, fault.Unavailable when the KMS does
// not answer.
func (r *Ring) Current(ctx context.Context, owner authz.TenantID) (*Keys, error) {
	var version uint32
	err := r.store.View(ctx, func(rd store.Reader) (err error) {
		version, err = currentVersion(rd, owner)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("reading the current key version: %w", err)
	}
	if version == 0 {
		return nil, fault.New(fault.NotFound, "the tenant has no keys")
	}
	return r.Version(ctx, owner, version)
}

// loadTimeout bounds one wrapping or unwrapping, so that a hanging KMS is an error within
// a second.
const loadTimeout = 900 * time.Millisecond

// Version returns one version of a tenant's keys. Errors as for [Ring.Current].
func (r *Ring) Version(ctx context.Context, owner authz.TenantID, version uint32) (*Keys, error) {
	key := cacheKey{owner, version}
	r.mu.Lock()
	hit, ok := r.cache[key]
	r.mu.Unlock()
	if ok && r.config.Now().Before(hit.expires) {
		return hit.keys, nil
	}
	// One call in flight per set, whoever waits for it; a caller that gives up
	// does not take the others' answer with it.
	flight := r.flight.DoChan(fmt.Sprintf("%s/%d", owner, version), func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), loadTimeout)
		defer cancel()
		return r.load(ctx, key)
	})
	select {
	case result := <-flight:
		keys, _ := result.Val.(*Keys)
		return keys, result.Err
	case <-ctx.Done():
		return nil, unavailable("unwrapping keys", ctx.Err())
	}
}

func (r *Ring) load(ctx context.Context, key cacheKey) (*Keys, error) {
	asked := r.config.Now() // the time counts from before the KMS answered
	plain, err := r.unwrap(ctx, key.owner, key.version)
	if err != nil {
		return nil, err
	}
	keys, err := newKeys(key.owner, key.version, plain)
	if err != nil {
		return nil, err
	}
	if ttl := r.config.CacheTTL; ttl > 0 {
		entry := cached{keys, asked.Add(ttl)}
		r.mu.Lock()
		r.cache[key] = entry
		r.mu.Unlock()
		// Lookups go by the clock; this lets go of a set that nobody asks for.
		time.AfterFunc(ttl, func() {
			r.mu.Lock()
			defer r.mu.Unlock()
			if r.cache[key] == entry {
				delete(r.cache, key)
			}
		})
	}
	return keys, nil
}

// unwrap reads a set and opens every key of it.
func (r *Ring) unwrap(ctx context.Context, owner authz.TenantID, version uint32) (map[purpose]secret.Bytes, error) {
	stored, err := r.readSet(ctx, owner, version)
	if err != nil {
		return nil, fmt.Errorf("reading keys: %w", err)
	}
	return r.openSet(ctx, stored)
}

// storedSet is a set as it is stored.
type storedSet struct {
	wrappedKey
	blobs map[purpose][]byte // under the wrapping key
}

func (r *Ring) readSet(ctx context.Context, owner authz.TenantID, version uint32) (set storedSet, err error) {
	set.blobs = make(map[purpose][]byte)
	err = r.store.View(ctx, func(rd store.Reader) (err error) {
		if set.wrappedKey, err = readWrappedKey(rd, owner, version); err != nil {
			return err
		}
		for p := range setOf(owner) {
			b, err := rd.Get(keyRow(owner, version, p))
			if err != nil {
				return err
			}
			if b == nil {
				return errDamaged
			}
			set.blobs[p] = bytes.Clone(b)
		}
		return nil
	})
	return set, err
}

// openSet opens every key of a set, the first with the KMS key that it is under.
func (r *Ring) openSet(ctx context.Context, set storedSet) (map[purpose]secret.Bytes, error) {
	kms, err := r.kmsOf(set.wrappedKey)
	if err != nil {
		return nil, err
	}
	key, err := kms.Unwrap(ctx, keyContext(set.owner, set.version, wrapping), set.blob)
	if err != nil {
		return nil, unavailable("unwrapping keys", err)
	}
	if len(key) != wrappingKeySize {
		return nil, errDamaged
	}
	plain := map[purpose]secret.Bytes{wrapping: key}
	for p, size := range setOf(set.owner) {
		if plain[p], err = envelope.OpenKey(key, keyContext(set.owner, set.version, p), set.blobs[p]); err != nil || len(plain[p]) != size {
			return nil, errDamaged
		}
	}
	return plain, nil
}
