package identity

import (
	"cmp"
	"errors"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity/records"
	"github.com/latticekeep/latticekeep/internal/identity/tenant"
	"github.com/latticekeep/latticekeep/internal/identity/ticket"
	"github.com/latticekeep/latticekeep/internal/identity/token"
	"github.com/latticekeep/latticekeep/internal/store"
)

// APIKey describes an API key. The key itself is shown once, when it is made: 256 random bits
// behind a prefix.
type APIKey struct {
	ID, Name   string
	Tenant     authz.TenantID
	Scopes     []authz.Scope // in the order of authz.TenantScopes, then system:admin
	CreatedAt  time.Time
	ExpiresAt  time.Time // zero: never
	LastUsedAt time.Time // precise to about a minute; zero: never
	CreatedBy  string    // id of the principal

	user string // id of the user who answers for it
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
	maxAPIKeys     = 1000 // per tenant
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
	return tenant.ValidateName(r.Name)
}

// Each row starts with the keyring's MAC. An API key is stored under its hash, the hash under
// tenant and id, and the time of the last use under the id. Releases before names and expiry wrote
// rows without these fields.
type apiKeyRow struct {
	ID        string         `json:"id"`
	Tenant    authz.TenantID `json:"tenant"`
	Name      string         `json:"name,omitempty"`
	Scopes    []authz.Scope  `json:"scopes"`
	CreatedAt time.Time      `json:"created_at"`
	CreatedBy string         `json:"created_by,omitempty"`
	ExpiresAt time.Time      `json:"expires_at,omitzero"`
	User      string         `json:"user,omitempty"` // id of the user who answers for it, also through a chain of API keys
}

// apiKeyName identifies an API key in the list of its tenant.
type apiKeyName struct {
	Tenant authz.TenantID
	ID     string
}

// hashVersion is the version of the API-key hash key. It is part of the row's key, so keys hashed
// under different versions can be found side by side.
const hashVersion = "1"

func apiKeyKey(hash string) []byte { return []byte("apikey/hash/" + hashVersion + "/" + hash) }

func apiKeysPrefix(tenant authz.TenantID) []byte {
	return []byte("apikey/tenant/" + string(tenant) + "/")
}

func apiKeyNameKey(n apiKeyName) []byte { return append(apiKeysPrefix(n.Tenant), n.ID...) }

func apiKeyUsedKey(id string) []byte { return []byte("apikey/used/" + id) }

// grants owns the rows of API keys and invitations.
type grants struct {
	*deps
	tickets *ticket.Store
}

func (s *grants) apiKeyHash(raw []byte) string { return s.rows.Hash("latticekeep/api-key/v1", raw) }

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

// newAPIKey makes a key for the request r, which the caller has checked.
func (s *grants) newAPIKey(tenant authz.TenantID, by string, r APIKeyRequest) *newAPIKey {
	key, raw := token.New(apiKeyPrefix, apiKeyBytes)
	k := &newAPIKey{key: key, hash: s.apiKeyHash(raw)}
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

func (s *grants) putAPIKey(tx store.Tx, k *newAPIKey) error {
	return errors.Join(s.rows.Put(tx, apiKeyNameKey(k.name()), k.hash), s.rows.Put(tx, apiKeyKey(k.hash), k.row))
}

// findAPIKey reads a key and reports whether it exists.
func (s *grants) findAPIKey(r store.Reader, n apiKeyName) (row apiKeyRow, found bool, err error) {
	var hash string
	if found, err := s.rows.Get(r, apiKeyNameKey(n), &hash); err != nil || !found {
		return row, false, err
	}
	if found, err = s.rows.Get(r, apiKeyKey(hash), &row); err == nil && !found {
		err = records.ErrDamaged
	}
	return row, found, err
}

// deleteAPIKey deletes a key and reports whether it existed.
func (s *grants) deleteAPIKey(tx store.Tx, n apiKeyName) (bool, error) {
	var hash string
	if found, err := s.rows.Get(tx, apiKeyNameKey(n), &hash); err != nil || !found {
		return false, err
	}
	return true, errors.Join(tx.Delete(apiKeyKey(hash)), tx.Delete(apiKeyNameKey(n)), tx.Delete(apiKeyUsedKey(n.ID)))
}

// apiKeysOf reads a tenant's keys, oldest first.
func (s *grants) apiKeysOf(r store.Reader, tenant authz.TenantID) (all []APIKey, err error) {
	var bad error
	err = r.Scan(store.Prefix(apiKeysPrefix(tenant)), func(key, value []byte) bool {
		var hash string
		var row apiKeyRow
		var used time.Time
		if bad = s.rows.Decode(key, value, &hash); bad != nil {
			return false
		}
		if found, err := s.rows.Get(r, apiKeyKey(hash), &row); err != nil || !found {
			bad = cmp.Or(err, records.ErrDamaged)
			return false
		}
		if _, bad = s.rows.Get(r, apiKeyUsedKey(row.ID), &used); bad != nil {
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

// attributes returns the attributes of the entry that records the new key.
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

// An API key and an invitation give access on the word of a user. That word must not outlive the
// user's own rights. So each names the user who answers for it, also through a chain of API keys,
// and is revoked when that user is removed or may no longer grant it.

var errDenied = fault.New(fault.Forbidden, "access denied")

// grantor is the principal that makes an API key or an invitation, as the storing transaction reads
// it. A principal that was removed, revoked or given a lower role since its request was admitted
// can make none.
type grantor struct {
	authz.Principal
	user    string    // id of the user who answers; empty for the operator's own
	expires time.Time // the grantor's own expiry if it is an API key; zero: never
}

// grantor reads the current rights of p. Error: a refusal.
func (s *grants) grantor(r store.Reader, p authz.Principal, a authz.Action) (grantor, error) {
	by := grantor{Principal: p}
	switch p.Kind {
	case authz.User:
		var row userRow
		switch found, err := s.rows.Get(r, userKey(accountOf(p)), &row); {
		case err != nil:
			return grantor{}, err
		case !found:
			return grantor{}, records.Refuse(reasonNoSession, errNoSession)
		case !row.Verified: // only a verified address shows who answers
			return grantor{}, records.Refuse(reasonUnverified, errUnverified)
		}
		by.user, by.Scopes = p.ID, row.Role.Scopes()
	case authz.APIKey:
		switch row, found, err := s.findAPIKey(r, apiKeyName{p.Tenant, p.ID}); {
		case err != nil:
			return grantor{}, err
		case !found:
			return grantor{}, records.Refuse(reasonNoAPIKey, errUnauthenticated)
		default:
			by.user, by.Scopes, by.expires = row.User, row.Scopes, row.ExpiresAt
		}
	}
	if why := by.Denies(a); why != "" {
		return grantor{}, records.Refuse(string(why), errDenied)
	}
	return by, nil
}

// bound returns the earlier of t and the expiry of g. A zero time means never.
func (g grantor) bound(t time.Time) time.Time {
	if !g.expires.IsZero() && (t.IsZero() || g.expires.Before(t)) {
		return g.expires
	}
	return t
}

// grant is an API key, or an invitation to a role.
type grant struct {
	user   string // id of the user who answers for it
	scopes []authz.Scope
	role   authz.Role // empty for an API key
}

// exceeds reports whether a user of the role could not have given g: an API key with scopes beyond
// the role, or an invitation when the role may not invite at all or not to g's role.
func (g grant) exceeds(role authz.Role) bool {
	holder := authz.Principal{Scopes: role.Scopes()}
	switch {
	case !holder.Holds(g.scopes):
		return true
	case g.role == "":
		return false
	}
	return !holder.Holds([]authz.Scope{authz.AccountAdmin}) || g.role == authz.Owner && role != authz.Owner
}

// answeredBy returns a filter for the grants that a user answers for.
func answeredBy(user string) func(grant) bool { return func(g grant) bool { return g.user == user } }

// revokeGrants deletes the API keys and invitations of a tenant for which the function which
// returns true. It returns how many there were as attributes of an entry.
func (s *grants) revokeGrants(tx store.Tx, tenant authz.TenantID, which func(grant) bool) (map[string]string, error) {
	keys, err1 := s.apiKeysOf(tx, tenant)
	invitations, err2 := s.invitationsOf(tx, tenant)
	err := errors.Join(err1, err2)
	if err != nil {
		return nil, err
	}
	revoked, withdrawn := 0, 0
	for _, k := range keys {
		if which(grant{k.user, k.Scopes, ""}) {
			revoked++
			_, failed := s.deleteAPIKey(tx, apiKeyName{tenant, k.ID})
			err = errors.Join(err, failed)
		}
	}
	for _, i := range invitations {
		if which(grant{i.user, i.Role.Scopes(), i.Role}) {
			withdrawn++
			err = errors.Join(err, s.deleteInvitation(tx, tenant, i.ID))
		}
	}
	return map[string]string{"api_keys_revoked": strconv.Itoa(revoked), "invitations_revoked": strconv.Itoa(withdrawn)}, err
}

// Invitation offers the owner of an address a role in a tenant.
type Invitation struct {
	ID                   string
	Email                string // canonical
	Role                 authz.Role
	CreatedAt, ExpiresAt time.Time

	user string // id of the user who answers for it
}

const (
	invitationIDPrefix = "inv"
	maxInvitations     = 100       // open at a time, per tenant
	maxInvitationMails = 100       // per tenant and invitationPeriod
	invitationPeriod   = time.Hour // begins with the first mail
)

type invitationRow struct {
	Email     string     `json:"email"`
	Role      authz.Role `json:"role"`
	CreatedAt time.Time  `json:"created_at"`
	ExpiresAt time.Time  `json:"expires_at"`
	User      string     `json:"user,omitempty"` // id of the user who answers for it
}

func invitationsPrefix(tenant authz.TenantID) []byte {
	return []byte("invitation/" + string(tenant) + "/")
}

func invitationKey(tenant authz.TenantID, id string) []byte {
	return append(invitationsPrefix(tenant), id...)
}

func (r invitationRow) invitation(id string) Invitation {
	return Invitation{id, r.Email, r.Role, r.CreatedAt, r.ExpiresAt, r.User}
}

func (s *grants) invitationsOf(r store.Reader, tenant authz.TenantID) (all []Invitation, err error) {
	prefix := invitationsPrefix(tenant)
	var bad error
	err = r.Scan(store.Prefix(prefix), func(key, value []byte) bool {
		var row invitationRow
		if bad = s.rows.Decode(key, value, &row); bad != nil {
			return false
		}
		all = append(all, row.invitation(string(key[len(prefix):])))
		return true
	})
	slices.SortFunc(all, func(a, b Invitation) int {
		return cmp.Or(a.CreatedAt.Compare(b.CreatedAt), cmp.Compare(a.ID, b.ID))
	})
	return all, errors.Join(err, bad)
}

func (s *grants) deleteInvitation(tx store.Tx, tenant authz.TenantID, id string) error {
	return errors.Join(s.tickets.Drop(tx, ticket.Invite, id), tx.Delete(invitationKey(tenant, id)))
}
