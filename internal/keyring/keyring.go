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
package keyring

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"errors"
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

// deployment is the first row of a store: whose it is.
type deployment struct {
	Format  int    `json:"format"` // of the whole store
	ChainID string `json:"chain_id"`
	KMSKey  string `json:"kms_key"` // id of the KMS key that wraps the sets
}

// storeFormat is the only store format there is so far.
const storeFormat = 1

var deploymentRow = []byte("deployment")

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

func keyRow(owner authz.TenantID, version uint32, p purpose) []byte {
	return fmt.Appendf(nil, "key/%s/%08x/%s", owner, version, p)
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
	set := &NewSet{owner, version, map[string][]byte{string(keyRow(owner, version, wrapping)): wrapped}}
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
// fault.Internal when there are keys of this version already.
func (s *NewSet) Put(tx store.Tx) error {
	current, err := currentVersion(tx, s.owner)
	if err != nil {
		return err
	}
	if current+1 != s.version {
		return fault.New(fault.Conflict, "the keys were rotated meanwhile: retry")
	}
	for key, value := range s.rows {
		b, err := tx.Get([]byte(key))
		if err != nil {
			return err
		}
		if b != nil {
			return errDamaged
		}
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

// Open returns the ring of a store that holds a deployment. Errors:
// fault.NotFound for an empty store, which [Create] fills; fault.Invalid for a
// store that was made with another KMS key.
func Open(ctx context.Context, s store.Store, kms KMS, c Config) (*Ring, error) {
	var d deployment
	var version uint32
	found := false
	err := s.View(ctx, func(r store.Reader) error {
		b, err := r.Get(deploymentRow)
		if err != nil || b == nil {
			return err
		}
		found = true
		if err := json.Unmarshal(b, &d); err != nil {
			return errDamaged
		}
		version, err = currentVersion(r, authz.SystemTenant)
		return err
	})
	switch {
	case err != nil:
		return nil, fmt.Errorf("reading the deployment: %w", err)
	case !found:
		return nil, fault.New(fault.NotFound, "the store holds no deployment yet")
	case d.Format != storeFormat:
		return nil, fault.New(fault.Invalid, fmt.Sprintf("the store has format %d and this program reads %d: use the release that wrote it", d.Format, storeFormat))
	case d.KMSKey != kms.ID():
		return nil, fault.New(fault.Invalid, fmt.Sprintf("the data directory was made with KMS key %s and the configured one is %s: name the key it was made with", d.KMSKey, kms.ID()))
	}
	r := newRing(s, kms, c, d)
	plain, err := r.unwrap(ctx, authz.SystemTenant, version)
	if err != nil {
		return nil, fmt.Errorf("opening the deployment's keys: %w", err)
	}
	return r, r.take(plain)
}

func newRing(s store.Store, kms KMS, c Config, d deployment) *Ring {
	if c.Now == nil {
		c.Now = time.Now
	}
	return &Ring{store: s, kms: kms, config: c, deployment: d, cache: make(map[cacheKey]cached)}
}

// take keeps the keys that live with the process.
func (r *Ring) take(plain map[purpose]secret.Bytes) (err error) {
	var errs [4]error
	r.audit, errs[0] = dualsig.NewPrivateKey(plain[auditing])
	r.identity, errs[1] = dualsig.NewPrivateKey(plain[identity])
	r.apiKeyHash = plain[apiKeyHash]
	r.tokenKey, errs[2] = deriveKey(r.apiKeyHash, labelTokenKey)
	r.reportURLKey, errs[3] = deriveKey(r.apiKeyHash, labelReportURLKey)
	for _, p := range []purpose{wrapping, auditing, identity} {
		plain[p].Zero()
	}
	return errors.Join(errs[:]...)
}

// First is what a new deployment stores first.
type First struct {
	row []byte
	set *NewSet
}

// Create makes the keys of a new deployment and its ring. Nothing is stored
// before [First.Put].
func Create(ctx context.Context, s store.Store, kms KMS, c Config) (*Ring, *First, error) {
	d := deployment{Format: storeFormat, ChainID: authz.NewID("chain"), KMSKey: kms.ID()}
	row, err := json.Marshal(d)
	if err != nil {
		return nil, nil, err
	}
	set, plain, err := newSet(ctx, kms, authz.SystemTenant, 1)
	if err != nil {
		return nil, nil, err
	}
	r := newRing(s, kms, c, d)
	return r, &First{row, set}, r.take(plain)
}

// Put stores the deployment. Error: fault.Conflict when there is one.
func (f *First) Put(tx store.Tx) error {
	if err := f.set.Put(tx); err != nil {
		return err
	}
	return tx.Put(deploymentRow, f.row)
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
	set := setOf(owner)
	blobs := make(map[purpose][]byte)
	err := r.store.View(ctx, func(rd store.Reader) error {
		for _, p := range append([]purpose{wrapping}, keysOf(set)...) {
			b, err := rd.Get(keyRow(owner, version, p))
			if err != nil {
				return err
			}
			if b == nil {
				return errDamaged
			}
			blobs[p] = append([]byte(nil), b...)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("reading keys: %w", err)
	}
	key, err := r.kms.Unwrap(ctx, keyContext(owner, version, wrapping), blobs[wrapping])
	if err != nil {
		return nil, unavailable("unwrapping keys", err)
	}
	if len(key) != wrappingKeySize {
		return nil, errDamaged
	}
	plain := map[purpose]secret.Bytes{wrapping: key}
	for p, size := range set {
		if plain[p], err = envelope.OpenKey(key, keyContext(owner, version, p), blobs[p]); err != nil || len(plain[p]) != size {
			return nil, errDamaged
		}
	}
	return plain, nil
}

func keysOf(set map[purpose]int) []purpose {
	names := make([]purpose, 0, len(set))
	for p := range set {
		names = append(names, p)
	}
	return names
}
