package identity

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// APIKey is what is known of an API key. The key itself is shown once, when it
// is made: 256 random bits behind a prefix.
type APIKey struct {
	ID, Name   string
	Tenant     authz.TenantID
	Scopes     []authz.Scope // in the order of authz.TenantScopes
	CreatedAt  time.Time
	ExpiresAt  time.Time // zero: never
	LastUsedAt time.Time // to the minute or so; zero: never
	CreatedBy  string    // id of the principal

	user string // who answers for it
}

// APIKeyRequest asks for an API key.
type APIKeyRequest struct {
	Name          string // 1 to 255 bytes
	Scopes        []authz.Scope
	ExpiresInDays int // 1 to 3650; zero: never
}

const (
	apiKeyPrefix   = "lk_live_"
	apiKeyIDPrefix = "key"
	apiKeyBytes    = 32
	maxAPIKeyDays  = 3650
	maxAPIKeys     = 1000 // of one tenant at a time
)

var (
	errScopes       = fault.New(fault.Invalid, "an API key has at least one scope, and only such as there are")
	errAPIKeyDays   = fault.New(fault.Invalid, "an API key expires in 1 to 3650 days, or never")
	errScopesBeyond = fault.New(fault.Forbidden, "nobody gives an API key more than they hold: ask for fewer scopes")
	errAPIKey       = fault.New(fault.NotFound, "there is no such API key: list the API keys for those there are")
	errAPIKeys      = fault.New(fault.Conflict, "the tenant has 1000 API keys: revoke those that nobody uses")
)

// Reasons in audit entries.
const (
	reasonScopes         = "scopes_beyond_own"
	reasonNoAPIKey       = "no_such_api_key"
	reasonTooManyAPIKeys = "too_many_api_keys"
)

func (r APIKeyRequest) check() error {
	known := append(authz.TenantScopes(), authz.SystemAdmin)
	unknown := func(s authz.Scope) bool { return !slices.Contains(known, s) }
	switch {
	case len(r.Scopes) == 0 || slices.ContainsFunc(r.Scopes, unknown):
		return errScopes
	case r.ExpiresInDays < 0 || r.ExpiresInDays > maxAPIKeyDays:
		return errAPIKeyDays
	}
	return checkName(r.Name)
}

// Rows, each with the keyring's MAC in front: an API key under its hash; the
// hash under tenant and id; when it was last used, under the id. A release that
// knew no names and no expiry wrote rows without them.
type apiKeyRow struct {
	ID        string         `json:"id"`
	Tenant    authz.TenantID `json:"tenant"`
	Name      string         `json:"name,omitempty"`
	Scopes    []authz.Scope  `json:"scopes"`
	CreatedAt time.Time      `json:"created_at"`
	CreatedBy string         `json:"created_by,omitempty"`
	ExpiresAt time.Time      `json:"expires_at,omitzero"`
	User      string         `json:"user,omitempty"` // who answers for it, whatever API keys it was made by
}

// apiKeyName is where an API key is listed.
type apiKeyName struct {
	Tenant authz.TenantID
	ID     string
}

// hashVersion is that of the API-key hash key; it stands in the row's key, so
// that keys hashed under different versions are found side by side.
const hashVersion = "1"

func apiKeyKey(hash string) []byte { return []byte("apikey/hash/" + hashVersion + "/" + hash) }

func apiKeysPrefix(tenant authz.TenantID) []byte {
	return []byte("apikey/tenant/" + string(tenant) + "/")
}

func apiKeyNameKey(n apiKeyName) []byte { return append(apiKeysPrefix(n.Tenant), n.ID...) }

func apiKeyUsedKey(id string) []byte { return []byte("apikey/used/" + id) }

func (s *Service) apiKeyHash(raw []byte) string { return s.keyedHash("latticekeep/api-key/v1", raw) }

func (r apiKeyRow) expired(now time.Time) bool { return r.apiKey(time.Time{}).expired(now) }

func (k APIKey) expired(now time.Time) bool { return !k.ExpiresAt.IsZero() && !now.Before(k.ExpiresAt) }

func (r apiKeyRow) apiKey(used time.Time) APIKey {
	return APIKey{r.ID, r.Name, r.Tenant, r.Scopes, r.CreatedAt, r.ExpiresAt, used, r.CreatedBy, r.User}
}

// newAPIKey is an API key that is not stored yet.
type newAPIKey struct {
	key, hash string
	row       apiKeyRow
}

// newAPIKey makes a key as r asks, which was checked.
func (s *Service) newAPIKey(tenant authz.TenantID, by string, r APIKeyRequest) *newAPIKey {
	raw := make([]byte, apiKeyBytes)
	_, _ = rand.Read(raw) // never fails
	k := &newAPIKey{key: apiKeyPrefix + encoding.EncodeToString(raw), hash: s.apiKeyHash(raw)}
	k.row = apiKeyRow{ID: authz.NewID(apiKeyIDPrefix), Tenant: tenant, Name: r.Name, CreatedAt: s.now().UTC(), CreatedBy: by}
	for _, scope := range append(authz.TenantScopes(), authz.SystemAdmin) {
		if slices.Contains(r.Scopes, scope) {
			k.row.Scopes = append(k.row.Scopes, scope)
		}
	}
	if r.ExpiresInDays > 0 {
		k.row.ExpiresAt = k.row.CreatedAt.AddDate(0, 0, r.ExpiresInDays)
	}
	return k
}

func (k *newAPIKey) name() apiKeyName { return apiKeyName{k.row.Tenant, k.row.ID} }

func (s *Service) putAPIKey(tx store.Tx, k *newAPIKey) error {
	return errors.Join(s.put(tx, apiKeyNameKey(k.name()), k.hash), s.put(tx, apiKeyKey(k.hash), k.row))
}

// findAPIKey reads a key and reports whether there is one.
func (s *Service) findAPIKey(r store.Reader, n apiKeyName) (row apiKeyRow, found bool, err error) {
	var hash string
	if found, err := s.get(r, apiKeyNameKey(n), &hash); err != nil || !found {
		return row, false, err
	}
	if found, err = s.get(r, apiKeyKey(hash), &row); err == nil && !found {
		err = errDamaged
	}
	return row, found, err
}

// deleteAPIKey reports whether there was such a key.
func (s *Service) deleteAPIKey(tx store.Tx, n apiKeyName) (bool, error) {
	var hash string
	if found, err := s.get(tx, apiKeyNameKey(n), &hash); err != nil || !found {
		return false, err
	}
	return true, errors.Join(tx.Delete(apiKeyKey(hash)), tx.Delete(apiKeyNameKey(n)), tx.Delete(apiKeyUsedKey(n.ID)))
}

// apiKeysOf reads a tenant's keys, the oldest first.
func (s *Service) apiKeysOf(r store.Reader, tenant authz.TenantID) (all []APIKey, err error) {
	var bad error
	err = r.Scan(store.Prefix(apiKeysPrefix(tenant)), func(key, value []byte) bool {
		var hash string
		var row apiKeyRow
		var used time.Time
		if bad = s.decode(key, value, &hash); bad != nil {
			return false
		}
		if found, err := s.get(r, apiKeyKey(hash), &row); err != nil || !found {
			bad = cmp.Or(err, errDamaged)
			return false
		}
		if _, bad = s.get(r, apiKeyUsedKey(row.ID), &used); bad != nil {
			return false
		}
		all = append(all, row.apiKey(used))
		return true
	})
	slices.SortFunc(all, func(a, b APIKey) int { return cmp.Or(a.CreatedAt.Compare(b.CreatedAt), cmp.Compare(a.ID, b.ID)) })
	return all, errors.Join(err, bad)
}

func apiKeyEvent(t audit.EventType, p authz.Principal, id string) audit.Event {
	return audit.Event{Type: t, Outcome: audit.Success, Principal: p, Resource: audit.Resource{Type: audit.APIKeyResource, ID: id}}
}

// attributes are what the entry of a new key says of it.
func (r apiKeyRow) attributes() map[string]string {
	scopes := make([]string, len(r.Scopes))
	for i, scope := range r.Scopes {
		scopes[i] = string(scope)
	}
	a := map[string]string{audit.AttributeScopes: strings.Join(scopes, " ")}
	if !r.ExpiresAt.IsZero() {
		a[audit.AttributeExpiresAt] = r.ExpiresAt.UTC().Format(time.RFC3339Nano)
	}
	if r.User != "" {
		a[audit.AttributeUser] = r.User
	}
	return a
}

// CreateAPIKey makes an API key of p's tenant and returns it, this once. When p
// is an API key that expires, the new one does so no later. Errors:
// fault.Invalid, fault.Forbidden for scopes that p does not hold and for a user
// whose address is not verified, fault.Unauthenticated for one who is gone by
// now, fault.Conflict for too many keys, fault.Unavailable.
func (s *Service) CreateAPIKey(ctx context.Context, p authz.Principal, r APIKeyRequest) (APIKey, string, error) {
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

// CreateTenantAPIKey makes an API key of any tenant for the deployment's
// operator, who may hold fewer scopes than the key. Its entry is in that
// tenant's history, and names p. Errors: fault.Invalid,
// fault.Forbidden, fault.NotFound, fault.Conflict for too many keys,
// fault.Unavailable.
func (s *Service) CreateTenantAPIKey(ctx context.Context, p authz.Principal, id authz.TenantID, r APIKeyRequest) (APIKey, string, error) {
	if err := s.guard.Admit(ctx, p, authz.CreateTenantAPIKey); err != nil {
		return APIKey{}, "", err
	}
	if err := r.check(); err != nil {
		return APIKey{}, "", err
	}
	switch {
	case !isTenant(id):
		return APIKey{}, "", s.deny(ctx, p, authz.CreateTenantAPIKey, reasonNoTenant, errTenant)
	case !grantable(id, r.Scopes):
		return APIKey{}, "", s.deny(ctx, p, authz.CreateTenantAPIKey, reasonScopes, errScopesBeyond)
	}
	return s.createAPIKey(ctx, p, id, r)
}

// grantable reports whether a key of the tenant may carry the scopes at all.
func grantable(tenant authz.TenantID, scopes []authz.Scope) bool {
	return tenant == authz.SystemTenant || !slices.Contains(scopes, authz.SystemAdmin)
}

func (s *Service) createAPIKey(ctx context.Context, p authz.Principal, tenant authz.TenantID, r APIKeyRequest) (APIKey, string, error) {
	k := s.newAPIKey(tenant, p.ID, r)
	expires := k.row.ExpiresAt
	err := s.commit(ctx, apiKeyEvent(audit.APIKeyCreated, p, ""), func(tx store.Tx, e *audit.Event) error {
		if _, err := s.findTenant(tx, tenant); err != nil {
			return err
		}
		if tenant == p.Tenant { // the operator's own for others are the tenant's
			by, err := s.grantor(tx, p, authz.CreateAPIKey)
			if err != nil {
				return err
			}
			if !by.Holds(k.row.Scopes) {
				return refuse(reasonScopes, errScopesBeyond)
			}
			k.row.User, k.row.ExpiresAt = by.user, by.bound(expires)
		}
		n := 0
		err := tx.Scan(store.Prefix(apiKeysPrefix(tenant)), func(_, _ []byte) bool { n++; return true })
		if err != nil {
			return err
		}
		if n >= maxAPIKeys {
			return refuse(reasonTooManyAPIKeys, errAPIKeys)
		}
		e.Resource.ID, e.Attributes = k.row.ID, k.row.attributes()
		e.Principal.Tenant = tenant
		return s.putAPIKey(tx, k)
	})
	if err != nil {
		return APIKey{}, "", fmt.Errorf("creating an API key: %w", err)
	}
	return k.row.apiKey(time.Time{}), k.key, nil
}

// APIKeys returns the API keys of p's tenant, expired ones included, the oldest
// first. Errors: fault.Forbidden, fault.Unavailable.
func (s *Service) APIKeys(ctx context.Context, p authz.Principal) ([]APIKey, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	if err := s.guard.Admit(ctx, p, authz.ListAPIKeys); err != nil {
		return nil, err
	}
	unwritten := s.used.all() // before the rows: a use is in one of the two
	var list []APIKey
	err := s.store.View(ctx, func(r store.Reader) (err error) {
		list, err = s.apiKeysOf(r, p.Tenant)
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

// RevokeAPIKey deletes an API key of p's tenant, which counts from the next
// request on. Errors: fault.Forbidden, fault.NotFound, fault.Unavailable.
func (s *Service) RevokeAPIKey(ctx context.Context, p authz.Principal, id string) error {
	if err := s.guard.Admit(ctx, p, authz.RevokeAPIKey); err != nil {
		return err
	}
	e := apiKeyEvent(audit.APIKeyRevoked, p, "")
	if authz.ValidID(apiKeyIDPrefix, id) {
		e.Resource.ID = id
	}
	err := s.commit(ctx, e, func(tx store.Tx, e *audit.Event) error {
		found, err := s.deleteAPIKey(tx, apiKeyName{p.Tenant, e.Resource.ID})
		if err == nil && !found {
			err = refuse(reasonNoAPIKey, errAPIKey)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("revoking an API key: %w", err)
	}
	return nil
}

// lastUses are the uses of API keys that are not written yet: a commit for each
// request would cost more than most requests. The zero value is ready.
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

// written forgets the uses up to those given.
func (u *lastUses) written(at map[apiKeyName]time.Time) {
	u.mu.Lock()
	defer u.mu.Unlock()
	maps.DeleteFunc(u.at, func(n apiKeyName, t time.Time) bool { return !t.After(at[n]) })
}

// FlushLastUsed writes when API keys were last used. It is called now and then,
// and when the service stops; what a crash loses is that. Error:
// fault.Unavailable.
func (s *Service) FlushLastUsed(ctx context.Context) error {
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
			var former time.Time // a damaged row is written anew
			if _, err := s.get(tx, apiKeyUsedKey(n.ID), &former); err == nil && !at.After(former) {
				continue // another replica's is newer
			}
			if err := s.put(tx, apiKeyUsedKey(n.ID), at); err != nil {
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
