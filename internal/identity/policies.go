package identity

import (
	"errors"
	"slices"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity/access"
	"github.com/latticekeep/latticekeep/internal/identity/apikey"
	"github.com/latticekeep/latticekeep/internal/identity/records"
	"github.com/latticekeep/latticekeep/internal/store"
)

var (
	errBeyondPaths = fault.New(fault.Forbidden, "your policies do not allow all paths, so you give the role limited only: bind policies to the user then")
)

// userAccess returns what limits a user. A limited user has a binding; should it be missing, the user
// may do nothing.
func (d *deps) userAccess(r store.Reader, a account, role authz.Role) (authz.Access, error) {
	limits, err := d.policies.Of(r, a.Tenant, a.User)
	if err == nil && role == authz.Limited && !limits.IsLimited() {
		limits = authz.Nothing()
	}
	return limits, err
}

// currentRights is grantor for package access.
func (s *grants) currentRights(r store.Reader, p authz.Principal, a authz.Action) (authz.Principal, error) {
	by, err := s.grantor(r, p, a)
	return by.Principal, err
}

// subject reads a user or an API key for package access.
func (s *grants) subject(r store.Reader, tenant authz.TenantID, id string) (is access.Subject, found bool, err error) {
	if authz.ValidID(userIDPrefix, id) {
		var row userRow
		a := account{tenant, id}
		if found, err = s.rows.Get(r, userKey(a), &row); err != nil || !found {
			return is, false, err
		}
		is.Principal = authz.Principal{Tenant: tenant, Kind: authz.User, ID: id, Scopes: row.Role.Scopes()}
		is.Role, is.Resource = row.Role, audit.Resource{Type: audit.UserResource, ID: id}
		is.Principal.Access, err = s.userAccess(r, a, row.Role)
		return is, true, err
	}
	if !authz.ValidID(apikey.IDPrefix, id) {
		return is, false, nil
	}
	row, found, err := s.apiKeys.Find(r, apikey.Name{Tenant: tenant, ID: id})
	if err == nil && !found { // a revoked key whose policies limit the keys that it made
		row.ID = id
		found, err = s.policies.IsBound(r, tenant, id)
	}
	if err != nil || !found {
		return is, false, err
	}
	is.Principal = authz.Principal{Tenant: tenant, Kind: authz.APIKey, ID: id, Scopes: row.Scopes}
	is.Resource = audit.Resource{Type: audit.APIKeyResource, ID: id}
	is.Principal.Access, err = s.policies.Of(r, tenant, row.Limiters()...)
	return is, true, err
}

// withdraw deletes the invitations of a user or an API key, and of keys that it made, that would let
// somebody reach all paths.
func (s *grants) withdraw(tx store.Tx, tenant authz.TenantID, subject string) (map[string]string, error) {
	return s.revokeGrants(tx, tenant, func(g grant) bool {
		return (g.user == subject || slices.Contains(g.keys, subject)) && g.role != authz.Limited && takesPaths(g.role)
	})
}

// takesPaths reports whether a role has a scope that policies narrow: those of the vault, and the names in
// the log.
func takesPaths(role authz.Role) bool {
	narrowed := func(s authz.Scope) bool {
		return s == authz.VaultRead || s == authz.VaultWrite || s == authz.AuditNames
	}
	return slices.ContainsFunc(role.Scopes(), narrowed)
}

// requireWithin refuses to give a role with which a user reaches paths that p does not reach. user is
// empty for one who is invited.
func (s *members) requireWithin(r store.Reader, p authz.Principal, user string, role authz.Role) error {
	if !p.Access.IsLimited() || !takesPaths(role) {
		return nil
	}
	within := role == authz.Limited
	if user != "" && role != authz.Owner {
		bound, err := s.policies.Of(r, p.Tenant, user)
		if err != nil {
			return err
		}
		for _, policy := range bound {
			within = p.Access.Covers(policy)
		}
	}
	if !within {
		return records.Refuse(access.ReasonBeyond, errBeyondPaths)
	}
	return nil
}

// bindRole makes the binding of a user fit a role that it gets: a limited user has one, and an owner
// none.
func (s *members) bindRole(tx store.Tx, a account, role authz.Role) error {
	switch role {
	case authz.Limited:
		return s.policies.Limit(tx, a.Tenant, a.User, s.now())
	case authz.Owner:
		return s.policies.Forget(tx, a.Tenant, a.User)
	}
	return nil
}

// keysOf returns the API keys among those who limit one.
func keysOf(limiters []string) []string {
	return slices.DeleteFunc(slices.Clone(limiters), func(id string) bool { return !authz.ValidID(apikey.IDPrefix, id) })
}

// makers returns which API keys limit a new one besides the grantor, which the new key names itself.
// Those that are gone and had no policy limit nothing.
func (s *grants) makers(r store.Reader, by grantor) (makers []string, err error) {
	for _, id := range by.makers {
		bound, err1 := s.policies.IsBound(r, by.Tenant, id)
		exists, err2 := r.Get(apikey.NameKey(apikey.Name{Tenant: by.Tenant, ID: id}))
		if err := errors.Join(err1, err2); err != nil {
			return nil, err
		}
		if id != by.ID && (bound || exists != nil) {
			makers = append(makers, id)
		}
	}
	return makers, nil
}

// deleteKey deletes an API key and reports whether it existed. Bindings of API keys that are gone go as
// well, except those that still limit a key.
func (s *grants) deleteKey(tx store.Tx, n apikey.Name) (bool, error) {
	row, found, err := s.apiKeys.Find(tx, n)
	if err != nil || !found {
		return false, err
	}
	if err := s.past.Keep(tx, n.Tenant, audit.APIKeyResource, n.ID, row.Name); err != nil {
		return true, err
	}
	if _, err := s.apiKeys.Delete(tx, n); err != nil {
		return true, err
	}
	var bound []string
	for _, id := range keysOf(row.Limiters()) {
		is, err := s.policies.IsBound(tx, n.Tenant, id)
		if err != nil {
			return true, err
		}
		if is {
			bound = append(bound, id)
		}
	}
	if len(bound) == 0 {
		return true, nil
	}
	keys, err := s.apiKeys.Of(tx, n.Tenant)
	for _, id := range bound {
		if !slices.ContainsFunc(keys, func(k APIKey) bool { return slices.Contains(k.Limiters, id) }) {
			err = errors.Join(err, s.policies.Forget(tx, n.Tenant, id))
		}
	}
	return true, err
}
