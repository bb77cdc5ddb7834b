package keyring

import (
	"bytes"
	"context"
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

// Keys is one version of a tenant's set, unwrapped. It is read-only and shared.
type Keys struct {
	Version  uint32
	Wrapping secret.Bytes // 32 bytes
	Signing  *dualsig.Key // nil in the deployment's own set

	mu       sync.Mutex
	sealing  map[string]*envelope.SealingKey // keyed by wrapped private key; only in the deployment's set
	messages map[string]*envelope.KEMKey     // keyed by context
}

type cacheKey struct {
	owner   authz.TenantID
	version uint32
}

type cached struct {
	keys    *Keys
	expires time.Time
}

// NewSet is a new version of an owner's keys, wrapped and not stored.
type NewSet struct {
	owner   authz.TenantID
	version uint32
	kmsKey  string // id of the KMS key that wraps it
	rows    map[string][]byte
}

// sets makes, opens and caches the sets of tenants and of the deployment.
type sets struct {
	*kmsKeys
	own *deploymentKeys

	flight singleflight.Group
	mu     sync.Mutex
	cache  map[cacheKey]cached
}

// NewSet makes the given version of an owner's keys: 1 for a new tenant, or the current version
// plus one for a rotation. It calls the KMS and stores nothing; [NewSet.Put] does, in the caller's
// transaction.
func (r *sets) NewSet(ctx context.Context, owner authz.TenantID, version uint32) (*NewSet, error) {
	set, keys, err := r.NextSet(ctx, owner, version)
	if err != nil {
		return nil, err
	}
	keys.Wrapping.Zero()
	return set, nil
}

// NextSet is [Ring.NewSet] for a caller that puts other keys under the new wrapping key in the same
// transaction. It also returns the unwrapped set. Nobody else has it, and the caller zeroes its
// wrapping key.
func (r *sets) NextSet(ctx context.Context, owner authz.TenantID, version uint32) (*NewSet, *Keys, error) {
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
		set.rows[string(row)] = r.own.SealRow(row, keys.Signing.Public().Bytes())
	}
	return set, keys, nil
}

// newKeys parses an unwrapped set and zeroes the plaintext that is not needed afterwards.
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
		plain[p].Zero() // parsed, or kept by the deployment's own keys
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

// Put stores the set and makes it the current one. It overwrites nothing, so a current version that
// was rolled back cannot destroy the keys of later ones. Errors: fault.Conflict if the owner's
// current version is not the one before, fault.Internal if keys of this version exist already,
// fault.Unavailable if the KMS key that wraps the set was given up meanwhile.
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

// Current returns the current version of a tenant's keys. Errors: fault.NotFound for an unknown
// tenant, fault.Unavailable if the KMS does not answer.
func (r *sets) Current(ctx context.Context, owner authz.TenantID) (*Keys, error) {
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

// Version returns one version of a tenant's keys. Errors as for [Ring.Current].
func (r *sets) Version(ctx context.Context, owner authz.TenantID, version uint32) (*Keys, error) {
	key := cacheKey{owner, version}
	r.mu.Lock()
	hit, ok := r.cache[key]
	r.mu.Unlock()
	if ok && r.config.Now().Before(hit.expires) {
		return hit.keys, nil
	}
	// One call per set is in flight, however many callers wait for it. A caller that gives up does
	// not cancel the call for the others.
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

func (r *sets) load(ctx context.Context, key cacheKey) (*Keys, error) {
	asked := r.config.Now() // the cache time counts from before the KMS answered
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
		// Lookups check the clock. The timer only frees the memory of a set that nobody asks for.
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

// CacheTTL returns how long an unwrapped set may be used without asking the KMS again.
func (r *sets) CacheTTL() time.Duration { return r.config.CacheTTL }

// Cached returns how many sets are cached, and when the KMS was asked for the oldest of them; the
// zero time when there are none. An expired set counts until its memory is freed.
func (r *sets) Cached() (n int, oldest time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, entry := range r.cache {
		if asked := entry.expires.Add(-r.config.CacheTTL); oldest.IsZero() || asked.Before(oldest) {
			oldest = asked
		}
	}
	return len(r.cache), oldest
}

// unwrap reads a set and opens every key in it.
func (r *sets) unwrap(ctx context.Context, owner authz.TenantID, version uint32) (map[purpose]secret.Bytes, error) {
	stored, err := r.readSet(ctx, owner, version)
	if err != nil {
		return nil, fmt.Errorf("reading keys: %w", err)
	}
	return r.openSet(ctx, stored)
}

// storedSet is a set as the store holds it.
type storedSet struct {
	wrappedKey
	blobs map[purpose][]byte // under the wrapping key
}

func (r *sets) readSet(ctx context.Context, owner authz.TenantID, version uint32) (set storedSet, err error) {
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

// openSet opens every key of a set: the wrapping key with its KMS key, the others with the wrapping
// key.
func (r *sets) openSet(ctx context.Context, set storedSet) (map[purpose]secret.Bytes, error) {
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

// PublicKey is the public half of one version of a tenant's signing keys as it is published: its
// encoding and the id of the encoding. It is not parsed.
type PublicKey struct {
	Version uint32
	ID      string
	Bytes   []byte // 1952 bytes
}

// publicRow returns the key of the row that holds a public signing key under the row MAC. With it,
// publishing all public keys unwraps no set.
func publicRow(owner authz.TenantID, version uint32) []byte { return keyRow(owner, version, "public") }

// PublicKeys returns the public keys of every version of a tenant's signing keys, newest first.
// Errors as for [Ring.Current], and fault.Internal for a row that is not ours.
func (r *sets) PublicKeys(ctx context.Context, owner authz.TenantID) ([]PublicKey, error) {
	var rows [][]byte // newest first
	err := r.store.View(ctx, func(rd store.Reader) error {
		current, err := currentVersion(rd, owner)
		if err != nil {
			return err
		}
		for version := current; version > 0; version-- {
			key := publicRow(owner, version)
			b, err := rd.Get(key)
			if err == nil {
				b, err = r.own.OpenRow(key, b)
			}
			if err != nil {
				return err
			}
			rows = append(rows, bytes.Clone(b))
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("reading public keys: %w", err)
	}
	if len(rows) == 0 {
		return nil, fault.New(fault.NotFound, "the tenant has no keys")
	}
	keys := make([]PublicKey, len(rows))
	for i, row := range rows {
		id, err := dualsig.PublicKeyID(row)
		if err != nil {
			return nil, errDamaged
		}
		keys[i] = PublicKey{uint32(len(rows) - i), id, row}
	}
	return keys, nil
}
