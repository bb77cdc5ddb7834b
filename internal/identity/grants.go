package identity

import (
	"errors"
	"strconv"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// An API key and an invitation let someone in at another's word, and that word
// must not outlive the standing of whoever gave it. So each names the user who
// answers for it, through whatever chain of API keys it was made, and goes or
// stays with what that user may do.

var errDenied = fault.New(fault.Forbidden, "access denied")

// grantor is who makes an API key or an invitation, as the transaction that
// stores it finds it: someone who was removed, revoked or given another role
// since the request was let in makes none.
type grantor struct {
	authz.Principal
	user    string    // who answers for it; empty for the operator's own
	expires time.Time // when p is an API key that does; zero: never
}

// grantor reads what p is now. Error: a refusal.
func (s *Service) grantor(r store.Reader, p authz.Principal, a authz.Action) (grantor, error) {
	by := grantor{Principal: p}
	switch p.Kind {
	case authz.User:
		var row userRow
		switch found, err := s.get(r, userKey(accountOf(p)), &row); {
		case err != nil:
			return grantor{}, err
		case !found:
			return grantor{}, refuse(reasonNoSession, errNoSession)
		case !row.Verified: // whose address it is says who answers
			return grantor{}, refuse(reasonUnverified, errUnverified)
		}
		by.user, by.Scopes = p.ID, row.Role.Scopes()
	case authz.APIKey:
		switch row, found, err := s.findAPIKey(r, apiKeyName{p.Tenant, p.ID}); {
		case err != nil:
			return grantor{}, err
		case !found:
			return grantor{}, refuse(reasonNoAPIKey, errUnauthenticated)
		default:
			by.user, by.Scopes, by.expires = row.User, row.Scopes, row.ExpiresAt
		}
	}
	if why := by.Denies(a); why != "" {
		return grantor{}, refuse(string(why), errDenied)
	}
	return by, nil
}

// bound returns when something ends that would end at t, made by g.
func (g grantor) bound(t time.Time) time.Time {
	if !g.expires.IsZero() && (t.IsZero() || g.expires.Before(t)) {
		return g.expires
	}
	return t
}

// grant is an API key, or an invitation to a role.
type grant struct {
	user   string // who answers for it
	scopes []authz.Scope
	role   authz.Role // empty for an API key
}

// exceeds reports whether a user of the role could not have given g: an API key
// that can do more, or an invitation when the role invites nobody, or not to
// that role.
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

// of is the grants that a user answers for.
func of(user string) func(grant) bool { return func(g grant) bool { return g.user == user } }

// revokeGrants deletes the API keys and invitations of a tenant that which
// chooses, and returns their numbers as an entry's attributes.
func (s *Service) revokeGrants(tx store.Tx, tenant authz.TenantID, which func(grant) bool) (map[string]string, error) {
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
