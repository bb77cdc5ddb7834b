// Package identity knows the tenants and turns a credential that a caller
// presents into a [authz.Principal].
//
// An API key is 256 random bits. Only a keyed hash of it is stored, together
// with the version of the hash's key, and it is looked up by that hash: no
// comparison depends on where two keys differ.
package identity

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha512"
	"encoding/base32"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/frame"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Service is safe for concurrent use. [Open] makes it.
type Service struct {
	store store.Store
	log   *audit.Log
	keys  *keyring.Ring
	now   func() time.Time
}

// Rows, each with the keyring's MAC in front: a tenant; an API key under its hash, and the hash under the key's id;
// the tenant of a namespace.
type tenantRow struct {
	CreatedAt time.Time `json:"created_at"`
}

type apiKeyRow struct {
	ID        string         `json:"id"`
	Tenant    authz.TenantID `json:"tenant"`
	Scopes    []authz.Scope  `json:"scopes"`
	CreatedAt time.Time      `json:"created_at"`
}

func tenantKey(id authz.TenantID) []byte { return []byte("tenant/" + string(id)) }

func namespaceKey(clusterUID, namespaceUID string) []byte {
	return []byte("namespace/" + clusterUID + "/" + namespaceUID)
}

// hashVersion is that of the API-key hash key; it stands in the row's key, so
// that keys hashed under different versions are found side by side.
const hashVersion = "1"

func apiKeyKey(hash string) []byte { return []byte("apikey/hash/" + hashVersion + "/" + hash) }

func apiKeyIDKey(id string) []byte { return []byte("apikey/id/" + id) }

const (
	apiKeyPrefix   = "lk_live_"
	apiKeyIDPrefix = "key"
	apiKeyBytes    = 32
)

var encoding = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)

var errUnauthenticated = fault.New(fault.Unauthenticated, "a valid API key is required")

// Authenticate returns the principal that an API key stands for. Errors:
// fault.Unauthenticated for every key that is not one, fault.Unavailable.
func (s *Service) Authenticate(ctx context.Context, apiKey string) (authz.Principal, error) {
	body, ok := strings.CutPrefix(apiKey, apiKeyPrefix)
	raw, err := encoding.DecodeString(body)
	if !ok || err != nil || len(raw) != apiKeyBytes || encoding.EncodeToString(raw) != body {
		return authz.Principal{}, errUnauthenticated
	}
	var row apiKeyRow
	err = s.store.View(ctx, func(r store.Reader) error {
		key := apiKeyKey(s.hash(raw))
		b, err := r.Get(key)
		if err != nil {
			return err
		}
		if b == nil {
			return errUnauthenticated
		}
		return s.decode(key, b, &row)
	})
	if err != nil {
		return authz.Principal{}, fmt.Errorf("looking up an API key: %w", err)
	}
	return authz.Principal{Tenant: row.Tenant, Kind: authz.APIKey, ID: row.ID, Scopes: row.Scopes}, nil
}

// encode returns a row that only this deployment can have written, since a row
// decides whose secrets a caller may see.
func (s *Service) encode(key []byte, row any) ([]byte, error) {
	b, err := json.Marshal(row)
	if err != nil {
		return nil, err
	}
	return s.keys.SealRow(key, b), nil
}

func (s *Service) decode(key, stored []byte, row any) error {
	b, err := s.keys.OpenRow(key, stored)
	if err != nil {
		return err
	}
	return json.Unmarshal(b, row)
}

func (s *Service) hash(key []byte) string {
	h := hmac.New(sha512.New, s.keys.APIKeyHash())
	h.Write(frame.Join("latticekeep/api-key/v1", key))
	return hex.EncodeToString(h.Sum(nil)[:32])
}

// newTenant is a tenant that is not stored yet.
type newTenant struct {
	id  authz.TenantID
	row []byte
	set *keyring.NewSet
}

func (s *Service) newTenant(ctx context.Context) (*newTenant, error) {
	t := &newTenant{id: authz.TenantID(authz.NewID("ten"))}
	var err error
	if t.row, err = s.encode(tenantKey(t.id), tenantRow{s.now().UTC()}); err != nil {
		return nil, err
	}
	if t.set, err = s.keys.NewSet(ctx, t.id, 1); err != nil {
		return nil, fmt.Errorf("making a tenant's keys: %w", err)
	}
	return t, nil
}

func (s *Service) putTenant(tx store.Tx, t *newTenant) error {
	_, err := s.log.Append(tx, audit.Event{
		Type: audit.TenantCreated, Outcome: audit.Success, Principal: System(t.id),
		Resource: audit.Resource{Type: audit.TenantResource, ID: string(t.id)},
	})
	return errors.Join(err, t.set.Put(tx), tx.Put(tenantKey(t.id), t.row))
}

// System is the deployment acting in a tenant of its own accord.
func System(tenant authz.TenantID) authz.Principal {
	return authz.Principal{Tenant: tenant, Kind: authz.System, ID: "latticekeep", Scopes: authz.TenantScopes()}
}

// newAPIKey is an API key that is not stored yet.
type newAPIKey struct {
	id, key, hash string
	row           apiKeyRow
}

func (s *Service) newAPIKey(tenant authz.TenantID, scopes []authz.Scope) *newAPIKey {
	raw := make([]byte, apiKeyBytes)
	_, _ = rand.Read(raw) // never fails
	id := authz.NewID(apiKeyIDPrefix)
	return &newAPIKey{
		id: id, key: apiKeyPrefix + encoding.EncodeToString(raw), hash: s.hash(raw),
		row: apiKeyRow{ID: id, Tenant: tenant, Scopes: scopes, CreatedAt: s.now().UTC()},
	}
}

func (s *Service) putAPIKey(tx store.Tx, k *newAPIKey) error {
	b, err := s.encode(apiKeyKey(k.hash), k.row)
	if err != nil {
		return err
	}
	_, err = s.log.Append(tx, apiKeyEvent(audit.APIKeyCreated, k.row.Tenant, k.id))
	byID := apiKeyIDKey(k.id)
	return errors.Join(err, tx.Put(byID, s.keys.SealRow(byID, []byte(k.hash))), tx.Put(apiKeyKey(k.hash), b))
}

func (s *Service) revokeAPIKey(tx store.Tx, tenant authz.TenantID, id string) error {
	b, err := tx.Get(apiKeyIDKey(id))
	if err != nil || b == nil {
		return err
	}
	hash, err := s.keys.OpenRow(apiKeyIDKey(id), b)
	if err != nil {
		return err
	}
	key := apiKeyKey(string(hash))
	_, err = s.log.Append(tx, apiKeyEvent(audit.APIKeyRevoked, tenant, id))
	return errors.Join(err, tx.Delete(key), tx.Delete(apiKeyIDKey(id)))
}

func apiKeyEvent(t audit.EventType, tenant authz.TenantID, id string) audit.Event {
	return audit.Event{
		Type: t, Outcome: audit.Success, Principal: System(tenant),
		Resource: audit.Resource{Type: audit.APIKeyResource, ID: id},
	}
}

// devRow remembers what `server --dev` made: its tenant stays, its key is
// replaced at each start.
type devRow struct {
	Tenant authz.TenantID `json:"tenant"`
	KeyID  string         `json:"key_id"`
}

var devKey = []byte("dev")

// Dev returns the tenant of a development server, made at its first start, and
// a new API key with all tenant scopes; the key of the start before is
// revoked.
func (s *Service) Dev(ctx context.Context) (authz.TenantID, string, error) {
	var row *devRow
	read := func(r store.Reader) error {
		row = nil
		b, err := r.Get(devKey)
		if err != nil || b == nil {
			return err
		}
		return s.decode(devKey, b, &row)
	}
	if err := s.store.View(ctx, read); err != nil {
		return "", "", fmt.Errorf("reading the development tenant: %w", err)
	}
	var fresh *newTenant
	var tenant authz.TenantID
	if row == nil {
		var err error
		if fresh, err = s.newTenant(ctx); err != nil {
			return "", "", err
		}
		tenant = fresh.id
	} else {
		tenant = row.Tenant
	}
	key := s.newAPIKey(tenant, authz.TenantScopes())
	err := s.store.Update(ctx, func(tx store.Tx) error {
		if fresh != nil {
			if err := s.putTenant(tx, fresh); err != nil {
				return err
			}
		} else if err := s.revokeAPIKey(tx, tenant, row.KeyID); err != nil {
			return err
		}
		if err := s.putAPIKey(tx, key); err != nil {
			return err
		}
		b, err := s.encode(devKey, devRow{tenant, key.id})
		if err != nil {
			return err
		}
		return tx.Put(devKey, b)
	})
	if err != nil {
		return "", "", fmt.Errorf("making the development key: %w", err)
	}
	return tenant, key.key, nil
}

// NamespaceTenant returns the tenant of a Kubernetes namespace, which it makes
// when the namespace is new. A namespace is known by its UID: one that was
// made again under an old name is a new tenant. Error: fault.Unavailable.
func (s *Service) NamespaceTenant(ctx context.Context, clusterUID, namespaceUID string) (authz.TenantID, error) {
	key := namespaceKey(clusterUID, namespaceUID)
	var tenant authz.TenantID
	read := func(r store.Reader) (authz.TenantID, error) {
		b, err := r.Get(key)
		if err == nil {
			b, err = s.keys.OpenRow(key, b)
		}
		return authz.TenantID(b), err
	}
	err := s.store.View(ctx, func(r store.Reader) (err error) {
		tenant, err = read(r)
		return err
	})
	if err != nil {
		return "", fmt.Errorf("reading a namespace's tenant: %w", err)
	}
	if tenant != "" {
		return tenant, nil
	}
	fresh, err := s.newTenant(ctx)
	if err != nil {
		return "", err
	}
	err = s.store.Update(ctx, func(tx store.Tx) (err error) {
		if tenant, err = read(tx); err != nil || tenant != "" { // made meanwhile
			return err
		}
		tenant = fresh.id
		if err := s.putTenant(tx, fresh); err != nil {
			return err
		}
		return s.mapNamespace(tx, clusterUID, namespaceUID, tenant)
	})
	if err != nil {
		return "", fmt.Errorf("making a namespace's tenant: %w", err)
	}
	return tenant, nil
}

// MapNamespace makes a namespace part of an existing tenant.
func (s *Service) MapNamespace(ctx context.Context, clusterUID, namespaceUID string, tenant authz.TenantID) error {
	err := s.store.Update(ctx, func(tx store.Tx) error {
		key := namespaceKey(clusterUID, namespaceUID)
		b, err := tx.Get(key)
		if err != nil || bytes.Equal(b, s.keys.SealRow(key, []byte(tenant))) {
			return err
		}
		return s.mapNamespace(tx, clusterUID, namespaceUID, tenant)
	})
	if err != nil {
		return fmt.Errorf("mapping a namespace to a tenant: %w", err)
	}
	return nil
}

func (s *Service) mapNamespace(tx store.Tx, clusterUID, namespaceUID string, tenant authz.TenantID) error {
	_, err := s.log.Append(tx, audit.Event{
		Type: audit.NamespaceMapped, Outcome: audit.Success, Principal: System(tenant),
		Resource:   audit.Resource{Type: audit.TenantResource, ID: string(tenant)},
		Attributes: map[string]string{"cluster_uid": clusterUID, "namespace_uid": namespaceUID},
	})
	key := namespaceKey(clusterUID, namespaceUID)
	return errors.Join(err, tx.Put(key, s.keys.SealRow(key, []byte(tenant))))
}
