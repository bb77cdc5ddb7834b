package identity

import (
	"cmp"
	"errors"
	"slices"
	"strconv"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity/apikey"
	"github.com/latticekeep/latticekeep/internal/identity/records"
	"github.com/latticekeep/latticekeep/internal/identity/ticket"
	"github.com/latticekeep/latticekeep/internal/store"
)

// grants owns the rows of API keys and invitations.
type grants struct {
	*deps
	tickets *ticket.Store
	apiKeys *apikey.Store
}

func apiKeyEvent(t audit.EventType, p authz.Principal, id string) audit.Event {
	return audit.Event{Type: t, Outcome: audit.Success, Principal: p, Resource: audit.Resource{Type: audit.APIKeyResource, ID: id}}
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
	makers  []string  // API keys by which the grantor was made, if it is one
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
		limits, err := s.userAccess(r, accountOf(p), row.Role)
		if err != nil {
			return grantor{}, err
		}
		by.user, by.Scopes, by.Access = p.ID, row.Role.Scopes(), limits
	case authz.APIKey:
		switch row, found, err := s.apiKeys.Find(r, apikey.Name{Tenant: p.Tenant, ID: p.ID}); {
		case err != nil:
			return grantor{}, err
		case !found:
			return grantor{}, records.Refuse(reasonNoAPIKey, errUnauthenticated)
		default:
			limits, err := s.policies.Of(r, p.Tenant, row.Limiters()...)
			if err != nil {
				return grantor{}, err
			}
			by.user, by.Scopes, by.Access = row.User, row.Scopes, limits
			by.expires, by.makers = row.ExpiresAt, keysOf(row.Limiters())
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
	keys   []string   // ids of the API keys that limited whoever invited
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
	keys, err1 := s.apiKeys.Of(tx, tenant)
	invitations, err2 := s.invitationsOf(tx, tenant)
	err := errors.Join(err1, err2)
	if err != nil {
		return nil, err
	}
	revoked, withdrawn := 0, 0
	for _, k := range keys {
		if which(grant{k.User, k.Scopes, "", nil}) {
			revoked++
			_, failed := s.deleteKey(tx, apikey.Name{Tenant: tenant, ID: k.ID})
			err = errors.Join(err, failed)
		}
	}
	for _, i := range invitations {
		if which(grant{i.user, i.Role.Scopes(), i.Role, i.keys}) {
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
	keys []string
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
	Keys      []string   `json:"keys,omitempty"` // ids of the API key that invited and of those that made it
}

func invitationsPrefix(tenant authz.TenantID) []byte {
	return []byte("invitation/" + string(tenant) + "/")
}

func invitationKey(tenant authz.TenantID, id string) []byte {
	return append(invitationsPrefix(tenant), id...)
}

func (r invitationRow) invitation(id string) Invitation {
	return Invitation{id, r.Email, r.Role, r.CreatedAt, r.ExpiresAt, r.User, r.Keys}
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
