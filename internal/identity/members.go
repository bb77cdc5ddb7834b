package identity

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/mail"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Invitation is a role in a tenant that is offered to the owner of an address.
type Invitation struct {
	ID                   string
	Email                string // canonical
	Role                 authz.Role
	CreatedAt, ExpiresAt time.Time
}

const (
	invitationIDPrefix = "inv"
	maxInvitations     = 100 // of one tenant at a time
)

var (
	errRole         = fault.New(fault.Invalid, "the role is one of owner, admin, member and auditor")
	errMember       = fault.New(fault.NotFound, "there is no such member: list the members for those there are")
	errInvitation   = fault.New(fault.NotFound, "there is no such invitation: list the members for those there are")
	errRoleBeyond   = fault.New(fault.Forbidden, "nobody grants more than they hold, and only owners make, change and remove owners")
	errLastOwner    = fault.New(fault.Conflict, "this is the last owner of the tenant: make another one first")
	errUnverified   = fault.New(fault.Forbidden, "inviting others takes a verified e-mail address: verify yours first")
	errSystemTenant = fault.New(fault.Forbidden, "the system itself has no members: use a tenant's API key")
	errInvitations  = fault.New(fault.Conflict, "100 invitations are open: revoke those that nobody will accept")
)

type invitationRow struct {
	Email     string     `json:"email"`
	Role      authz.Role `json:"role"`
	CreatedAt time.Time  `json:"created_at"`
	ExpiresAt time.Time  `json:"expires_at"`
}

func invitationsPrefix(tenant authz.TenantID) []byte {
	return []byte("invitation/" + string(tenant) + "/")
}

func invitationKey(tenant authz.TenantID, id string) []byte {
	return append(invitationsPrefix(tenant), id...)
}

func (r invitationRow) invitation(id string) Invitation {
	return Invitation{id, r.Email, r.Role, r.CreatedAt, r.ExpiresAt}
}

// member is a user as its tenant's list has it.
type member struct {
	account
	row userRow
}

func (s *Service) membersOf(r store.Reader, tenant authz.TenantID) (all []member, err error) {
	prefix := usersPrefix(tenant)
	var bad error
	err = r.Scan(store.Prefix(prefix), func(key, value []byte) bool {
		m := member{account: account{tenant, string(key[len(prefix):])}}
		if bad = s.decode(key, value, &m.row); bad != nil {
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

func (s *Service) invitationsOf(r store.Reader, tenant authz.TenantID) (all []Invitation, err error) {
	prefix := invitationsPrefix(tenant)
	var bad error
	err = r.Scan(store.Prefix(prefix), func(key, value []byte) bool {
		var row invitationRow
		if bad = s.decode(key, value, &row); bad != nil {
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

func (s *Service) deleteInvitation(tx store.Tx, tenant authz.TenantID, id string) error {
	return errors.Join(s.dropTicket(tx, inviteTicket, id), tx.Delete(invitationKey(tenant, id)))
}

// readyForMembers is ready for an action on members, of which the system's own
// tenant has none.
func (s *Service) readyForMembers(ctx context.Context, p authz.Principal, a authz.Action) error {
	if err := s.ready(ctx, p, a); err != nil {
		return err
	}
	if p.Tenant == authz.SystemTenant {
		return s.deny(ctx, p, a, reasonSystem, errSystemTenant)
	}
	return nil
}

// Members returns the users of p's tenant and the open invitations, the oldest
// first. Errors: fault.Forbidden, fault.Unavailable.
func (s *Service) Members(ctx context.Context, p authz.Principal) ([]User, []Invitation, error) {
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
		open, err2 = s.invitationsOf(r, p.Tenant)
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
	err = s.log.Record(ctx, audit.Event{
		Type: audit.MemberListed, Outcome: audit.Success, Principal: p, Resource: audit.Resource{Type: audit.UserResource},
		Attributes: map[string]string{"count": strconv.Itoa(len(users)), "invitations": strconv.Itoa(len(open))},
	})
	if err != nil {
		return nil, nil, fmt.Errorf("recording a list: %w", err)
	}
	return users, open, nil
}

// mayGrant refuses a role that p cannot give or take: one with scopes that p
// does not hold, or an owner's unless p is one. A tenant without an owner, as
// an operator makes it, gets its first one from whoever administers it.
func (s *Service) mayGrant(r store.Reader, p authz.Principal, roles ...authz.Role) error {
	for _, role := range roles {
		if !p.Holds(role.Scopes()) {
			return refuse(reasonRole, errRoleBeyond)
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
			return refuse(reasonRole, errRoleBeyond)
		}
	}
	return nil
}

func (m member) owns() bool { return m.row.Role == authz.Owner }

// keepsOwner refuses to take the role from the last owner.
func (s *Service) keepsOwner(r store.Reader, leaving member) error {
	if !leaving.owns() {
		return nil
	}
	members, err := s.membersOf(r, leaving.Tenant)
	if err != nil {
		return err
	}
	if !slices.ContainsFunc(members, func(m member) bool { return m.owns() && m.User != leaving.User }) {
		return refuse(reasonLastOwner, errLastOwner)
	}
	return nil
}

// Invite mails the owner of an address a token that makes it a member of p's
// tenant. An invitation of the same address that is still open is replaced.
// Errors: fault.Invalid, fault.Forbidden, fault.Conflict for an address that
// has an account or too many open invitations, fault.Unavailable.
func (s *Service) Invite(ctx context.Context, p authz.Principal, email string, role authz.Role) (Invitation, error) {
	if err := s.readyForMembers(ctx, p, authz.InviteMember); err != nil {
		return Invitation{}, err
	}
	email, err := canonicalEmail(email)
	if err != nil {
		return Invitation{}, err
	}
	if !slices.Contains(authz.Roles(), role) {
		return Invitation{}, errRole
	}
	id := authz.NewID(invitationIDPrefix)
	t := s.newTicket(inviteTicket, account{p.Tenant, id})
	row := invitationRow{email, role, t.row.CreatedAt, t.row.ExpiresAt}
	post, err := s.outbox.Prepare(ctx, mail.Message{Kind: mail.Invite, To: email, Token: t.token})
	if err != nil {
		return Invitation{}, fmt.Errorf("preparing a mail: %w", err)
	}
	e := audit.Event{
		Type: audit.MemberInvited, Outcome: audit.Success, Principal: p,
		Resource: audit.Resource{Type: audit.InvitationResource}, Attributes: map[string]string{"role": string(role)},
	}
	err = s.commit(ctx, e, func(tx store.Tx, e *audit.Event) error {
		stale, err := s.mayInvite(tx, p, row)
		if err != nil {
			return err
		}
		e.Resource.ID = id
		for _, old := range stale {
			err = errors.Join(err, s.deleteInvitation(tx, p.Tenant, old.ID))
		}
		return errors.Join(err, s.put(tx, invitationKey(p.Tenant, id), row), s.putTicket(tx, t), post.Put(tx))
	})
	if err != nil {
		return Invitation{}, fmt.Errorf("inviting a member: %w", err)
	}
	s.outbox.Notify()
	return row.invitation(id), nil
}

// mayInvite decides whether p may make an invitation, and returns the ones that
// go when it is made: those that expired, and a former one of the address.
func (s *Service) mayInvite(r store.Reader, p authz.Principal, row invitationRow) (stale []Invitation, err error) {
	if p.Kind == authz.User {
		var self userRow
		if _, err := s.get(r, userKey(accountOf(p)), &self); err != nil {
			return nil, err
		}
		if !self.Verified {
			return nil, refuse(reasonUnverified, errUnverified)
		}
	}
	if err := s.mayGrant(r, p, row.Role); err != nil {
		return nil, err
	}
	if taken, err := r.Get(emailKey(s.emailHash(row.Email))); err != nil {
		return nil, err
	} else if taken != nil {
		return nil, refuse(reasonTaken, errEmailTaken)
	}
	all, err := s.invitationsOf(r, p.Tenant)
	if err != nil {
		return nil, err
	}
	for _, i := range all {
		if i.Email == row.Email || !row.CreatedAt.Before(i.ExpiresAt) {
			stale = append(stale, i)
		}
	}
	if len(all)-len(stale) >= maxInvitations {
		return nil, refuse(reasonTooManyInvite, errInvitations)
	}
	return stale, nil
}

// AcceptInvitation makes whoever holds an invitation's token a user of the
// tenant, with a verified address. Errors: fault.Invalid, which ErrTicket is
// one of, fault.Conflict for an address that has an account by now,
// fault.Forbidden when the tenant's trial has ended, fault.Unavailable.
func (s *Service) AcceptInvitation(ctx context.Context, from authz.Principal, token string, password secret.Bytes) (User, Tenant, error) {
	if err := checkPassword(password); err != nil {
		return User{}, Tenant{}, err
	}
	now := s.now()
	var invited account
	var row invitationRow
	var tenant Tenant
	find := func(r store.Reader) (err error) {
		var found bool
		if invited, err = s.findTicket(r, inviteTicket, token, now); err != nil {
			return err
		}
		if found, err = s.get(r, invitationKey(invited.Tenant, invited.User), &row); err != nil {
			return err
		} else if !found {
			return ErrTicket
		}
		tenant, err = s.readTenant(r, invited.Tenant)
		return err
	}
	if err := s.store.View(ctx, find); err != nil {
		return User{}, Tenant{}, fmt.Errorf("looking up an invitation: %w", err)
	}
	u, err := s.newUser(ctx, invited.Tenant, row.Email, row.Role, password)
	if err != nil {
		return User{}, Tenant{}, err
	}
	u.row.Verified = true
	err = s.commit(ctx, userEvent(audit.MemberJoined, u.as(from)), func(tx store.Tx, e *audit.Event) error {
		if err := find(tx); err != nil {
			return err
		}
		if tenant.readOnly(now) {
			return s.refuseJoin(e, from, reasonTrialEnded, errTrialEnded)
		}
		if taken, err := tx.Get(emailKey(s.emailHash(row.Email))); err != nil {
			return err
		} else if taken != nil {
			return s.refuseJoin(e, from, reasonTaken, errEmailTaken)
		}
		e.Attributes = map[string]string{"invitation": invited.User, "role": string(row.Role)}
		return errors.Join(s.putNewUser(tx, u), s.deleteInvitation(tx, invited.Tenant, invited.User))
	})
	if err != nil {
		return User{}, Tenant{}, fmt.Errorf("accepting an invitation: %w", err)
	}
	return u.row.user(u.account), tenant, nil
}

// refuseJoin names no user in the entry, since none was made.
func (s *Service) refuseJoin(e *audit.Event, from authz.Principal, reason string, err error) error {
	from.Tenant = e.Principal.Tenant
	e.Principal, e.Resource.ID = from, ""
	return refuse(reason, err)
}

// memberEvent is something that is done to a member, which is named only when
// the id is well formed.
func memberEvent(t audit.EventType, p authz.Principal, id string) audit.Event {
	e := audit.Event{Type: t, Outcome: audit.Success, Principal: p, Resource: audit.Resource{Type: audit.UserResource}}
	if authz.ValidID(userIDPrefix, id) {
		e.Resource.ID = id
	}
	return e
}

// findMember reads the member that an event names. Error: a refusal.
func (s *Service) findMember(r store.Reader, e *audit.Event) (m member, err error) {
	m.account = account{e.Principal.Tenant, e.Resource.ID}
	found, err := s.get(r, userKey(m.account), &m.row)
	if err == nil && !found {
		err = refuse(reasonNoMember, errMember)
	}
	return m, err
}

// ChangeMember gives a member another role, which counts from its next request
// on. Errors: fault.Invalid, fault.Forbidden, fault.NotFound, fault.Conflict
// for the last owner, fault.Unavailable.
func (s *Service) ChangeMember(ctx context.Context, p authz.Principal, id string, role authz.Role) (User, error) {
	if err := s.readyForMembers(ctx, p, authz.ChangeMember); err != nil {
		return User{}, err
	}
	if !slices.Contains(authz.Roles(), role) {
		return User{}, errRole
	}
	var changed User
	err := s.commit(ctx, memberEvent(audit.MemberChanged, p, id), func(tx store.Tx, e *audit.Event) error {
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
		e.Attributes = map[string]string{"role": string(role), "former_role": string(m.row.Role)}
		m.row.Role = role
		changed = m.row.user(m.account)
		return s.put(tx, userKey(m.account), m.row)
	})
	if err != nil {
		return User{}, fmt.Errorf("changing a member: %w", err)
	}
	return changed, nil
}

// RemoveMember deletes a user of p's tenant, whose sessions end at once.
// Errors: fault.Forbidden, fault.NotFound, fault.Conflict for the last owner,
// fault.Unavailable.
func (s *Service) RemoveMember(ctx context.Context, p authz.Principal, id string) error {
	if err := s.readyForMembers(ctx, p, authz.RemoveMember); err != nil {
		return err
	}
	err := s.commit(ctx, memberEvent(audit.MemberRemoved, p, id), func(tx store.Tx, e *audit.Event) error {
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
		return s.deleteUser(tx, m.account, m.row)
	})
	if err != nil {
		return fmt.Errorf("removing a member: %w", err)
	}
	return nil
}

// RevokeInvitation makes an invitation's token worthless. Errors:
// fault.Forbidden, fault.NotFound, fault.Unavailable.
func (s *Service) RevokeInvitation(ctx context.Context, p authz.Principal, id string) error {
	if err := s.readyForMembers(ctx, p, authz.RevokeInvitation); err != nil {
		return err
	}
	e := audit.Event{
		Type: audit.InvitationRevoked, Outcome: audit.Success, Principal: p, Resource: audit.Resource{Type: audit.InvitationResource},
	}
	if authz.ValidID(invitationIDPrefix, id) {
		e.Resource.ID = id
	}
	err := s.commit(ctx, e, func(tx store.Tx, e *audit.Event) error {
		if b, err := tx.Get(invitationKey(p.Tenant, e.Resource.ID)); err != nil {
			return err
		} else if b == nil {
			return refuse(reasonNoInvitation, errInvitation)
		}
		return s.deleteInvitation(tx, p.Tenant, e.Resource.ID)
	})
	if err != nil {
		return fmt.Errorf("revoking an invitation: %w", err)
	}
	return nil
}
