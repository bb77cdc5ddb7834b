package keyring

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/store"
)

// deployment is the first row of a store: whose it is.
type deployment struct {
	Format  int    `json:"format"` // of the whole store
	ChainID string `json:"chain_id"`
	KMSKey  string `json:"kms_key"` // id of the KMS key that the deployment's own set is under

	// UnnamedKMSKey is the id of the key under which wrapping keys are whose stored form names none, once that is no longer KMSKey.
	UnnamedKMSKey string `json:"unnamed_kms_key,omitempty"`
}

// storeFormat is the only store format there is so far.
const storeFormat = 1

var deploymentRow = []byte("deployment")

// Open returns the ring of a store that holds a deployment. Errors:
// fault.NotFound for an empty store, which [Create] fills; fault.Invalid for a
// store with a set under a KMS key that is neither the current one nor a former
// one of the configuration, and for a current key that was given up.
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
	r := &Ring{store: s, kms: kms, config: c, deployment: d, cache: make(map[cacheKey]cached)}
	r.unnamed = cmp.Or(d.UnnamedKMSKey, d.KMSKey)
	return r
}

// checkKMSKeys finds out whether each set could be opened: which KMS key it is
// under, not whether that still answers.
func (r *Ring) checkKMSKeys(ctx context.Context) error {
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
