// Package keyring keeps the keys of every tenant and of the deployment.
//
// # Model
//
// An owner is a tenant, or the deployment as [authz.SystemTenant]. It has numbered versions of a
// set of keys. The wrapping key of a set is stored only as ciphertext of the KMS. Every other key
// of the set is stored under the wrapping key. An unwrapped set is cached as one unit, for at most
// the configured time, so every key from it expires together with its wrapping key.
//
// The deployment's audit, identity and API-key hash keys are the exception. They are unwrapped at
// start and live with the process, so a refusal can be recorded while the KMS is down.
//
// The stored form of a wrapping key names the KMS key that wraps it, so a deployment can move to
// another KMS key set by set while it serves ([Ring.Rewrap]). The wrapping key stays the same. Only
// its wrapping changes, and caches stay valid.
package keyring

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/format"
)

// Ring holds the keys of a deployment. It is safe for concurrent use.
type Ring struct {
	*deploymentKeys
	*kmsKeys
	*sets
	*sealingKeys
	deployment deployment
}

// ChainID returns the name of the deployment's audit chain.
func (r *Ring) ChainID() string { return r.deployment.ChainID }

// Open returns the ring of a store that holds a deployment. Errors: fault.NotFound for an empty
// store, which [Create] fills; fault.Invalid for a store with a set under a KMS key that is neither
// the current nor a previous one of the configuration, and for a current key that was given up;
// fault.Unavailable for a store of a newer release.
func Open(ctx context.Context, s store.Store, kms KMS, c Config) (*Ring, error) {
	var d deployment
	var f format.Format
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
		if f, err = format.Read(r); err != nil {
			return err
		}
		version, err = currentVersion(r, authz.SystemTenant)
		return err
	})
	switch {
	case err != nil:
		return nil, fmt.Errorf("reading the deployment: %w", err)
	case !found:
		return nil, fault.New(fault.NotFound, "the store holds no deployment yet")
	}
	if err := errors.Join(f.CheckDeployment(d.Format), f.CheckReader()); err != nil {
		return nil, err
	}
	r := newRing(s, kms, c, d)
	if err := r.checkKMSKeys(ctx); err != nil {
		return nil, err
	}
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
	own := new(deploymentKeys)
	keys := &kmsKeys{store: s, kms: kms, config: c}
	sets := &sets{kmsKeys: keys, own: own, cache: make(map[cacheKey]cached)}
	r := &Ring{
		deploymentKeys: own, kmsKeys: keys, sets: sets,
		sealingKeys: &sealingKeys{store: s, now: c.Now, own: own, sets: sets},
		deployment:  d,
	}
	return r
}

// First is what a new deployment stores first.
type First struct {
	row []byte
	set *NewSet
}

// Create makes the keys of a new deployment and its ring. It stores nothing; [First.Put] does.
func Create(ctx context.Context, s store.Store, kms KMS, c Config) (*Ring, *First, error) {
	d := deployment{Format: format.DeploymentFirst, ChainID: authz.NewID("chain"), KMSKey: kms.ID()}
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

// Put stores the deployment. Error: fault.Conflict if the store has one already.
func (f *First) Put(tx store.Tx) error {
	if err := f.set.Put(tx); err != nil {
		return err
	}
	if err := format.PutFirst(tx); err != nil {
		return err
	}
	return tx.Put(deploymentRow, f.row)
}

// Made reports whether a store holds a deployment.
func Made(ctx context.Context, s store.Store) (made bool, err error) {
	err = s.View(ctx, func(r store.Reader) error {
		b, err := r.Get(deploymentRow)
		made = b != nil
		return err
	})
	if err != nil {
		return false, fmt.Errorf("looking for a deployment: %w", err)
	}
	return made, nil
}
