package identity

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity/records"
	"github.com/latticekeep/latticekeep/internal/identity/ticket"
	"github.com/latticekeep/latticekeep/internal/mail"
	"github.com/latticekeep/latticekeep/internal/store"
)

var (
	errRole         = fault.New(fault.Invalid, "the role is one of owner, admin, member and auditor")
	errMember       = fault.New(fault.NotFound, "there is no such member: list the members for those there are")
	errRoleBeyond   = fault.New(fault.Forbidden, "nobody grants more than they hold, and only owners make, change and remove owners")
	errLastOwner    = fault.New(fault.Conflict, "this is the last owner of the tenant: make another one first")
	errUnverified   = fault.New(fault.Forbidden, "this takes a verified e-mail address: verify yours first")
	errSystemTenant = fault.New(fault.Forbidden, "the system itself has no members: use a tenant's API key")
)

// members administers the users of a tenant and the invitations to it.
type members struct {
	*deps
	tenants *tenants
	users   *users
	grants  *grants
	tickets *ticket.Store
	outbox  *mail.Outbox
}

func (s *members) membersOf(r store.Reader, tenant authz.TenantID) (all []member, err error) {
	prefix := usersPrefix(tenant)
	var bad error
	err = r.Scan(store.Prefix(prefix), func(key, value []byte) bool {
		m := member{account: account{tenant, string(key[len(prefix):])}}
		if bad = s.rows.Decode(key, value, &m.row); bad != nil {
			return false
		}
		all = append(all, m)
		return true
	})
	slices.SortFunc(all, func(a, b member) int {
		return cmp.Or(a.row.CreatedAt.Compare(b.row.CreatedAt), cmp.Compare(a.User, b.User))
	})
	return all, errors.Join(err, bad)
}

// readyForMembers is [audit.Guard.Admit] for an action on members. It refuses the system's own
// tenant, which has no members.
func (s *members) readyForMembers(ctx context.Context, p authz.Principal, a authz.Action) error {
	if err := s.guard.Admit(ctx, p, a); err != nil {
		return err
	}
	if p.Tenant == authz.SystemTenant {
		return s.deny(ctx, p, a, reasonSystem, errSystemTenant)
	}
	return nil
}

// Members returns the users of p's tenant and the open invitations, both oldest first. Errors:
// fault.Forbidden, fault.Unavailable.
func (s *members) Members(ctx context.Context, p authz.Principal) ([]User, []Invitation, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	if err := s.readyForMembers(ctx, p, authz.ListMembers); err != nil {
		return nil, nil, err
	}
	var members []member
	var open []Invitation
	err := s.store.View(ctx, func(r store.Reader) (err error) {
		var err2 error
		members, err = s.membersOf(r, p.Tenant)
		open, err2 = s.grants.invitationsOf(r, p.Tenant)
		return errors.Join(err, err2)
	})
	if err != nil {
		return nil, nil, fmt.Errorf("listing members: %w", err)
	}
	now := s.now()
	open = slices.DeleteFunc(open, func(i Invitation) bool { return !now.Before(i.ExpiresAt) })
	users := make([]User, len(members))
	for i, m := range members {
		users[i] = m.row.user(m.account)
	}
	err = s.guard.Record(ctx, audit.Event{
		Type: audit.MemberListed, Outcome: audit.Success, Principal: p, Resource: audit.Resource{Type: audit.UserResource},
		Attributes: map[string]string{"count": strconv.Itoa(len(users)), "invitations": strconv.Itoa(len(open))},
	})
	if err != nil {
		return nil, nil, err
	}
	return users, open, nil
}

// mayGrant refuses a role that p can neither give nor take away: one with scopes that p does not
// hold, or the owner's role unless p is an owner. In a tenant without an owner, as an operator
// makes it, anyone who holds the owner's scopes may make the first one.
func (s *members) mayGrant(r store.Reader, p authz.Principal, roles ...authz.Role) error {
	for _, role := range roles {
		if !p.Holds(role.Scopes()) {
			return records.Refuse(reasonRole, errRoleBeyond)
		}
		if role != authz.Owner {
			continue
		}
		members, err := s.membersOf(r, p.Tenant)
		if err != nil {
			return err
		}
		owned := slices.ContainsFunc(members, member.owns)
		self := slices.ContainsFunc(members, func(m member) bool { return m.owns() && p.Kind == authz.User && m.User == p.ID })
		if owned && !self {
			return records.Refuse(reasonRole, errRoleBeyond)
		}
	}
	return nil
}

// keepsOwner refuses to remove or demote the last owner.
func (s *members) keepsOwner(r store.Reader, leaving member) error {
	if !leaving.owns() {
		return nil
	}
	members, err := s.membersOf(r, leaving.Tenant)
	if err != nil {
		return err
	}
	if !slices.ContainsFunc(members, func(m member) bool { return m.owns() && m.User != leaving.User }) {
		return records.Refuse(reasonLastOwner, errLastOwner)
	}
	return nil
}

// findMember reads the member that an event names. Error: a refusal.
func (s *members) findMember(r store.Reader, e *audit.Event) (m member, err error) {
	m.account = account{e.Principal.Tenant, e.Resource.ID}
	found, err := s.rows.Get(r, userKey(m.account), &m.row)
	if err == nil && !found {
		err = records.Refuse(reasonNoMember, errMember)
	}
	return m, err
}

// ChangeMember gives a member another role, which takes effect from its next request on. It revokes
// the member's API keys and invitations that exceed the new role. Errors: fault.Invalid,
// fault.Forbidden, fault.NotFound, fault.Conflict for the last owner, fault.Unavailable.
func (s *members) ChangeMember(ctx context.Context, p authz.Principal, id string, role authz.Role) (User, error) {
	if err := s.readyForMembers(ctx, p, authz.ChangeMember); err != nil {
		return User{}, err
	}
	if !slices.Contains(authz.Roles(), role) {
		return User{}, errRole
	}
	var changed User
	err := s.rows.Commit(ctx, memberEvent(audit.MemberChanged, p, id), func(tx store.Tx, e *audit.Event) error {
		m, err := s.findMember(tx, e)
		if err != nil {
			return err
		}
		touched := []authz.Role{role}
		if m.owns() {
			touched = append(touched, authz.Owner)
		}
		if err := s.mayGrant(tx, p, touched...); err != nil {
			return err
		}
		if role != authz.Owner {
			if err := s.keepsOwner(tx, m); err != nil {
				return err
			}
		}
		beyond := func(g grant) bool { return g.user == m.User && g.exceeds(role) }
		if e.Attributes, err = s.grants.revokeGrants(tx, m.Tenant, beyond); err != nil {
			return err
		}
		e.Attributes["role"], e.Attributes["former_role"] = string(role), string(m.row.Role)
		m.row.Role = role
		changed = m.row.user(m.account)
		return s.rows.Put(tx, userKey(m.account), m.row)
	})
	if err != nil {
		return User{}, fmt.Errorf("changing a member: %w", err)
	}
	return changed, nil
}

// RemoveMember deletes a user of p's tenant, ends its sessions at once, and revokes the API keys
// and invitations that it answers for. Errors: fault.Forbidden, fault.NotFound, fault.Conflict for
// the last owner, fault.Unavailable.
func (s *members) RemoveMember(ctx context.Context, p authz.Principal, id string) error {
	if err := s.readyForMembers(ctx, p, authz.RemoveMember); err != nil {
		return err
	}
	err := s.rows.Commit(ctx, memberEvent(audit.MemberRemoved, p, id), func(tx store.Tx, e *audit.Event) error {
		m, err := s.findMember(tx, e)
		if err != nil {
			return err
		}
		if m.owns() {
			if err := s.mayGrant(tx, p, m.row.Role); err != nil {
				return err
			}
		}
		if err := s.keepsOwner(tx, m); err != nil {
			return err
		}
		e.Attributes, err = s.grants.revokeGrants(tx, m.Tenant, of(m.User))
		return errors.Join(err, s.users.deleteUser(tx, m.account, m.row))
	})
	if err != nil {
		return fmt.Errorf("removing a member: %w", err)
	}
	return nil
}
