package identity

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/identity/records"
	"github.com/latticekeep/latticekeep/internal/identity/tenant"
	"github.com/latticekeep/latticekeep/internal/identity/token"
	"github.com/latticekeep/latticekeep/internal/store"
)

// apiKeys makes, lists and revokes API keys, and authenticates their callers.
type apiKeys struct {
	*deps
	tenants *tenant.Store
	grants  *grants
	cache   records.Cache[apiKeyRow]
	used    lastUses
}

// CreateAPIKey makes an API key of p's tenant and returns it. The key cannot be read again. When p
// is an API key that expires, the new key expires no later. Errors: fault.Invalid; fault.Forbidden
// for scopes that p does not hold and for a user whose address is not verified;
// fault.Unauthenticated for a principal that was removed meanwhile; fault.Conflict for too many
// keys; fault.Unavailable.
func (s *apiKeys) CreateAPIKey(ctx context.Context, p authz.Principal, r APIKeyRequest) (APIKey, string, error) {
	if err := s.guard.Admit(ctx, p, authz.CreateAPIKey); err != nil {
		return APIKey{}, "", err
	}
	if err := r.check(); err != nil {
		return APIKey{}, "", err
	}
	if !p.Holds(r.Scopes) || !grantable(p.Tenant, r.Scopes) {
		return APIKey{}, "", s.deny(ctx, p, authz.CreateAPIKey, reasonScopes, errScopesBeyond)
	}
	return s.createAPIKey(ctx, p, p.Tenant, r)
}

// CreateTenantAPIKey makes an API key of any tenant for the deployment's operator, who may hold
// fewer scopes than the key. Its entry is in that tenant's history and names p. Errors:
// fault.Invalid, fault.Forbidden, fault.NotFound, fault.Conflict for too many keys,
// fault.Unavailable.
func (s *apiKeys) CreateTenantAPIKey(ctx context.Context, p authz.Principal, id authz.TenantID, r APIKeyRequest) (APIKey, string, error) {
	if err := s.guard.Admit(ctx, p, authz.CreateTenantAPIKey); err != nil {
		return APIKey{}, "", err
	}
	if err := r.check(); err != nil {
		return APIKey{}, "", err
	}
	switch {
	case !tenant.Valid(id):
		return APIKey{}, "", s.deny(ctx, p, authz.CreateTenantAPIKey, tenant.ReasonNotFound, tenant.ErrNotFound)
	case !grantable(id, r.Scopes):
		return APIKey{}, "", s.deny(ctx, p, authz.CreateTenantAPIKey, reasonScopes, errScopesBeyond)
	}
	return s.createAPIKey(ctx, p, id, r)
}

// grantable reports whether a key of the tenant may carry the scopes at all.
func grantable(tenant authz.TenantID, scopes []authz.Scope) bool {
	return tenant == authz.SystemTenant || !slices.Contains(scopes, authz.SystemAdmin)
}

func (s *apiKeys) createAPIKey(ctx context.Context, p authz.Principal, tenant authz.TenantID, r APIKeyRequest) (APIKey, string, error) {
	k := s.grants.newAPIKey(tenant, p.ID, r)
	expires := k.row.ExpiresAt
	err := s.rows.Commit(ctx, apiKeyEvent(audit.APIKeyCreated, p, ""), func(tx store.Tx, e *audit.Event) error {
		if err := s.tenants.Check(tx, tenant); err != nil {
			return err
		}
		if tenant == p.Tenant { // for another tenant, no user answers for the key
			by, err := s.grants.grantor(tx, p, authz.CreateAPIKey)
			if err != nil {
				return err
			}
			if !by.Holds(k.row.Scopes) {
				return records.Refuse(reasonScopes, errScopesBeyond)
			}
			k.row.User, k.row.ExpiresAt = by.user, by.bound(expires)
		}
		n := 0
		err := tx.Scan(store.Prefix(apiKeysPrefix(tenant)), func(_, _ []byte) bool { n++; return true })
		if err != nil {
			return err
		}
		if n >= maxAPIKeys {
			return records.Refuse(reasonTooManyAPIKeys, errAPIKeys)
		}
		e.Resource.ID, e.Attributes = k.row.ID, k.row.attributes()
		e.Principal.Tenant = tenant
		return s.grants.putAPIKey(tx, k)
	})
	if err != nil {
		return APIKey{}, "", fmt.Errorf("creating an API key: %w", err)
	}
	return k.row.apiKey(time.Time{}), k.key, nil
}

// APIKeys returns the API keys of p's tenant, oldest first, including expired ones. Errors:
// fault.Forbidden, fault.Unavailable.
func (s *apiKeys) APIKeys(ctx context.Context, p authz.Principal) ([]APIKey, error) {
	ctx, cancel := context.WithTimeout(ctx, records.ReadTimeout)
	defer cancel()
	if err := s.guard.Admit(ctx, p, authz.ListAPIKeys); err != nil {
		return nil, err
	}
	unwritten := s.used.all() // read before the rows, so every use is in one of the two
	var list []APIKey
	err := s.store.View(ctx, func(r store.Reader) (err error) {
		list, err = s.grants.apiKeysOf(r, p.Tenant)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("listing API keys: %w", err)
	}
	for i, k := range list {
		if used := unwritten[apiKeyName{k.Tenant, k.ID}]; used.After(k.LastUsedAt) {
			list[i].LastUsedAt = used
		}
	}
	e := apiKeyEvent(audit.APIKeyListed, p, "")
	e.Attributes = map[string]string{"count": strconv.Itoa(len(list))}
	if err := s.guard.Record(ctx, e); err != nil {
		return nil, err
	}
	return list, nil
}

// RevokeAPIKey deletes an API key of p's tenant, which takes effect from the next request on.
// Errors: fault.Forbidden, fault.NotFound, fault.Unavailable.
func (s *apiKeys) RevokeAPIKey(ctx context.Context, p authz.Principal, id string) error {
	if err := s.guard.Admit(ctx, p, authz.RevokeAPIKey); err != nil {
		return err
	}
	e := apiKeyEvent(audit.APIKeyRevoked, p, "")
	if authz.ValidID(apiKeyIDPrefix, id) {
		e.Resource.ID = id
	}
	err := s.rows.Commit(ctx, e, func(tx store.Tx, e *audit.Event) error {
		found, err := s.grants.deleteAPIKey(tx, apiKeyName{p.Tenant, e.Resource.ID})
		if err == nil && !found {
			err = records.Refuse(reasonNoAPIKey, errAPIKey)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("revoking an API key: %w", err)
	}
	return nil
}

// lastUses keeps the uses of API keys that are not written yet, because a commit for each request
// costs more than most requests do. The zero value is ready.
type lastUses struct {
	mu sync.Mutex
	at map[apiKeyName]time.Time
}

func (u *lastUses) note(n apiKeyName, now time.Time) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.at == nil {
		u.at = make(map[apiKeyName]time.Time)
	}
	if now.After(u.at[n]) {
		u.at[n] = now.UTC()
	}
}

func (u *lastUses) all() map[apiKeyName]time.Time {
	u.mu.Lock()
	defer u.mu.Unlock()
	return maps.Clone(u.at)
}

// written removes the uses up to the given times.
func (u *lastUses) written(at map[apiKeyName]time.Time) {
	u.mu.Lock()
	defer u.mu.Unlock()
	maps.DeleteFunc(u.at, func(n apiKeyName, t time.Time) bool { return !t.After(at[n]) })
}

// FlushLastUsed writes when API keys were last used. It is called regularly and when the service
// stops. A crash loses only the uses since the last call. Error: fault.Unavailable.
func (s *apiKeys) FlushLastUsed(ctx context.Context) error {
	uses := s.used.all()
	if len(uses) == 0 {
		return nil
	}
	err := s.store.Update(ctx, func(tx store.Tx) error {
		for n, at := range uses {
			b, err := tx.Get(apiKeyNameKey(n))
			if err != nil {
				return err
			}
			if b == nil {
				continue // revoked since
			}
			var previous time.Time // a damaged row is overwritten
			if _, err := s.rows.Get(tx, apiKeyUsedKey(n.ID), &previous); err == nil && !at.After(previous) {
				continue // another replica's is newer
			}
			if err := s.rows.Put(tx, apiKeyUsedKey(n.ID), at); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("writing last uses: %w", err)
	}
	s.used.written(uses)
	return nil
}

// Authenticate returns the caller that an API key stands for. Errors: fault.Unauthenticated for a
// malformed, unknown, revoked or expired key; fault.Unavailable.
func (s *apiKeys) Authenticate(ctx context.Context, apiKey string) (Caller, error) {
	raw := token.Parse(apiKeyPrefix, apiKey, apiKeyBytes)
	if raw == nil {
		return Caller{}, errUnauthenticated
	}
	now := s.now()
	hash := apiKeyKey(s.grants.apiKeyHash(raw))
	var row apiKeyRow
	var tenant Tenant
	err := s.store.View(ctx, func(r store.Reader) (err error) {
		var found bool
		if row, found, err = s.cache.Get(s.rows, r, hash); err != nil {
			return err
		} else if !found || row.expired(now) {
			return errUnauthenticated
		}
		tenant, err = s.tenants.Read(r, row.Tenant)
		return err
	})
	if err != nil {
		return Caller{}, fmt.Errorf("looking up an API key: %w", err)
	}
	s.used.note(apiKeyName{row.Tenant, row.ID}, now)
	return Caller{
		Principal: authz.Principal{Tenant: row.Tenant, Kind: authz.APIKey, ID: row.ID, Scopes: row.Scopes, ReadOnly: tenant.ReadOnly(now)},
		Limits:    tenant.Limits,
	}, nil
}
