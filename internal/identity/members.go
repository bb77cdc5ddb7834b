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
	"github.com/latticekeep/latticekeep/internal/identity/access"
	"github.com/latticekeep/latticekeep/internal/identity/email"
	"github.com/latticekeep/latticekeep/internal/identity/password"
	"github.com/latticekeep/latticekeep/internal/identity/records"
	"github.com/latticekeep/latticekeep/internal/identity/tenant"
	"github.com/latticekeep/latticekeep/internal/identity/ticket"
	"github.com/latticekeep/latticekeep/internal/mail"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
)

var (
	errRole            = fault.New(fault.Invalid, "the role is one of owner, admin, member, limited and auditor")
	errMember          = fault.New(fault.NotFound, "there is no such member: list the members for those there are")
	errRoleBeyond      = fault.New(fault.Forbidden, "nobody grants more than they hold, and only owners make, change and remove owners")
	errLastOwner       = fault.New(fault.Conflict, "this is the last owner of the tenant: make another one first")
	errSystemTenant    = fault.New(fault.Forbidden, "the system itself has no members: use a tenant's API key")
	errInvitation      = fault.New(fault.NotFound, "there is no such invitation: list the members for those there are")
	errInvitations     = fault.New(fault.Conflict, "100 invitations are open: revoke those that nobody will accept")
	errInvitationMails = fault.New(fault.Conflict, "100 invitations were sent within an hour: try again later")
	errInvitedRecently = fault.New(fault.Conflict, "an invitation was sent a moment ago: wait a minute before sending another")
)

// members administers the users of a tenant and the invitations to it.
type members struct {
	*deps
	tenants *tenant.Store
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

// admitForMembers is [guard.Guard.Admit] for an action on members. It refuses the system's own
// tenant, which has no members.
func (s *members) admitForMembers(ctx context.Context, p authz.Principal, a authz.Action) error {
	if err := s.guard.Admit(ctx, p, a); err != nil {
		return err
	}
	if p.Tenant == authz.SystemTenant {
		return s.deny(ctx, p, a, reasonSystem, errSystemTenant)
	}
	return nil
}

// people returns the users of a tenant and its API keys that work, both oldest first.
func (s *members) people(r store.Reader, tenant authz.TenantID) (all []access.Named, err error) {
	users, err := s.membersOf(r, tenant)
	if err != nil {
		return nil, err
	}
	keys, err := s.grants.apiKeys.Of(r, tenant)
	for _, m := range users {
		all = append(all, access.Named{ID: m.User, Name: m.row.Email})
	}
	for _, k := range keys {
		if !k.Pending && !k.Expired(s.now()) {
			all = append(all, access.Named{ID: k.ID, Name: k.Name})
		}
	}
	return all, err
}

// Members returns the users of p's tenant and the open invitations, both oldest first. Errors:
// fault.Forbidden, fault.Unavailable.
func (s *members) Members(ctx context.Context, p authz.Principal) ([]User, []Invitation, error) {
	ctx, cancel := context.WithTimeout(ctx, records.ReadTimeout)
	defer cancel()
	users, open, err := s.MembersUnrecorded(ctx, p)
	if err != nil {
		return nil, nil, err
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

// MembersUnrecorded is [Service.Members] for a caller that records the read itself.
func (s *members) MembersUnrecorded(ctx context.Context, p authz.Principal) ([]User, []Invitation, error) {
	ctx, cancel := context.WithTimeout(ctx, records.ReadTimeout)
	defer cancel()
	if err := s.admitForMembers(ctx, p, authz.ListMembers); err != nil {
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
	return users, open, nil
}

// requireGrantable refuses a role that p can neither give nor take away: one with scopes that p
// does not hold, or the owner's role unless p is an owner. In a tenant without an owner, as an
// operator makes it, anyone who holds the owner's scopes may make the first one. The deployment itself
// repeats what was decided before a rollback.
func (s *members) requireGrantable(r store.Reader, p authz.Principal, roles ...authz.Role) error {
	if p.Kind == authz.System {
		return nil
	}
	for _, role := range roles {
		if !p.Holds(role.Scopes()) {
			return records.Refuse(reasonRole, errRoleBeyond)
		}
		if role != authz.Owner {
			continue
		}
		owners, err := s.ownerAddresses(r, p.Tenant)
		if err != nil {
			return err
		}
		if isOwner, err := s.isOwner(r, p); err != nil {
			return err
		} else if len(owners) > 0 && !isOwner {
			return records.Refuse(reasonRole, errRoleBeyond)
		}
	}
	return nil
}

// ownerAddresses returns the addresses of a tenant's owners.
func (s *members) ownerAddresses(r store.Reader, tenant authz.TenantID) (addresses []string, err error) {
	members, err := s.membersOf(r, tenant)
	for _, m := range members {
		if m.owns() {
			addresses = append(addresses, m.row.Email)
		}
	}
	return addresses, err
}

// RemindOwners prepares a mail to each owner of a tenant that credentials expire soon. The result stores
// them.
func (s *members) RemindOwners(ctx context.Context, tenant authz.TenantID) (put func(store.Tx) error, err error) {
	var owners []string
	err = s.store.View(ctx, func(r store.Reader) (err error) {
		owners, err = s.ownerAddresses(r, tenant)
		return err
	})
	var mails []*mail.Pending
	for _, address := range owners {
		if err != nil {
			break
		}
		var m *mail.Pending
		m, err = s.outbox.Prepare(ctx, mail.Message{Kind: mail.ExpiresSoon, To: address})
		mails = append(mails, m)
	}
	return func(tx store.Tx) (err error) {
		for _, m := range mails {
			err = errors.Join(err, m.Put(tx))
		}
		return err
	}, err
}

// isOwner reports whether p is an owner of its tenant.
func (s *members) isOwner(r store.Reader, p authz.Principal) (bool, error) {
	var row userRow
	if p.Kind != authz.User {
		return false, nil
	}
	found, err := s.rows.Get(r, userKey(accountOf(p)), &row)
	return found && row.Role == authz.Owner, err
}

// requireAnotherOwner refuses to remove or demote the last owner, unless the deployment itself does.
func (s *members) requireAnotherOwner(r store.Reader, p authz.Principal, leaving member) error {
	if !leaving.owns() || p.Kind == authz.System {
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
	if err := s.admitForMembers(ctx, p, authz.ChangeMember); err != nil {
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
		if err := s.requireGrantable(tx, p, touched...); err != nil {
			return err
		}
		if role != authz.Owner {
			if err := s.requireAnotherOwner(tx, p, m); err != nil {
				return err
			}
		}
		if err := s.requireWithin(tx, p, m.User, role); err != nil {
			return err
		}
		if err := s.bindRole(tx, m.account, role); err != nil {
			return err
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
	if err := s.admitForMembers(ctx, p, authz.RemoveMember); err != nil {
		return err
	}
	err := s.rows.Commit(ctx, memberEvent(audit.MemberRemoved, p, id), func(tx store.Tx, e *audit.Event) error {
		m, err := s.findMember(tx, e)
		if err != nil {
			return err
		}
		if m.owns() {
			if err := s.requireGrantable(tx, p, m.row.Role); err != nil {
				return err
			}
		}
		if err := s.requireAnotherOwner(tx, p, m); err != nil {
			return err
		}
		e.Attributes, err = s.grants.revokeGrants(tx, m.Tenant, answeredBy(m.User))
		return errors.Join(err, s.users.deleteUser(tx, m.account, m.row))
	})
	if err != nil {
		return fmt.Errorf("removing a member: %w", err)
	}
	return nil
}

// Reasons in audit entries.
const (
	reasonNoInvitation   = "no_such_invitation"
	reasonTooManyInvite  = "too_many_invitations"
	reasonTooManyMails   = "too_many_mails"
	reasonRecentlyMailed = "mailed_a_moment_ago"
)

// invitedRow counts a tenant's invitations apart from their rows, so revoking them does not make
// room for more mails.
type invitedRow struct {
	Since time.Time `json:"since"`
	Count int       `json:"count"`
}

func invitedKey(tenant authz.TenantID) []byte { return []byte("invited/" + string(tenant)) }

// Invite mails the owner of an address a token that makes it a member of p's tenant. It replaces an
// open invitation to the same address. Errors: fault.Invalid; fault.Forbidden; fault.Conflict for
// an address that has an account or was invited a moment ago, and for too many invitations;
// fault.Unavailable.
func (s *members) Invite(ctx context.Context, p authz.Principal, address string, role authz.Role) (Invitation, error) {
	if err := s.admitForMembers(ctx, p, authz.InviteMember); err != nil {
		return Invitation{}, err
	}
	address, err := email.Canonical(address)
	if err != nil {
		return Invitation{}, err
	}
	if !slices.Contains(authz.Roles(), role) {
		return Invitation{}, errRole
	}
	id := authz.NewID(invitationIDPrefix)
	t := s.tickets.New(ticket.Invite, ticket.Subject{Tenant: p.Tenant, User: id})
	row := invitationRow{Email: address, Role: role, CreatedAt: t.CreatedAt, ExpiresAt: t.ExpiresAt}
	about, err := s.invitationOf(ctx, p, role)
	if err != nil {
		return Invitation{}, err
	}
	post, err := s.outbox.Prepare(ctx, mail.Message{Kind: mail.Invite, To: address, Token: t.Token, Invitation: about})
	if err != nil {
		return Invitation{}, fmt.Errorf("preparing a mail: %w", err)
	}
	e := audit.Event{
		Type: audit.MemberInvited, Outcome: audit.Success, Principal: p,
		Resource: audit.Resource{Type: audit.InvitationResource}, Attributes: map[string]string{"role": string(role)},
	}
	err = s.rows.Commit(ctx, e, func(tx store.Tx, e *audit.Event) error {
		by, err := s.grants.grantor(tx, p, authz.InviteMember)
		if err != nil {
			return err
		}
		stale, err := s.mayInvite(tx, by, row)
		if err != nil {
			return err
		}
		invited, err := s.countInvitation(tx, p.Tenant, row.CreatedAt)
		if err != nil {
			return err
		}
		e.Resource.ID, row.User, row.Keys = id, by.user, by.makers
		for _, old := range stale {
			err = errors.Join(err, s.grants.deleteInvitation(tx, p.Tenant, old.ID))
		}
		return errors.Join(err, s.rows.Put(tx, invitationKey(p.Tenant, id), row), s.rows.Put(tx, invitedKey(p.Tenant), invited),
			s.tickets.Put(tx, t), post.Put(tx))
	})
	if err != nil {
		return Invitation{}, fmt.Errorf("inviting a member: %w", err)
	}
	s.outbox.Notify()
	return row.invitation(id), nil
}

// invitationOf returns what a mail says about an invitation by p.
func (s *members) invitationOf(ctx context.Context, p authz.Principal, role authz.Role) (mail.Invitation, error) {
	var to tenant.Tenant
	var by userRow
	err := s.store.View(ctx, func(r store.Reader) (err error) {
		if to, err = s.tenants.Read(r, p.Tenant); err == nil && p.Kind == authz.User {
			_, err = s.rows.Get(r, userKey(accountOf(p)), &by)
		}
		return err
	})
	if err != nil {
		return mail.Invitation{}, fmt.Errorf("reading who invites: %w", err)
	}
	return mail.Invitation{Organisation: to.Name, Inviter: by.Email, Role: string(role)}, nil
}

// mayInvite decides whether the grantor may make an invitation. It returns the invitations that the
// new one replaces: the expired ones and a previous one to the same address.
func (s *members) mayInvite(r store.Reader, by grantor, row invitationRow) (stale []Invitation, err error) {
	if err := s.requireVerifiedUser(r, by); err != nil {
		return nil, err
	}
	if err := cmp.Or(s.requireGrantable(r, by.Principal, row.Role), s.requireWithin(r, by.Principal, "", row.Role)); err != nil {
		return nil, err
	}
	if _, err := s.users.lapsedHolder(r, row.Email, row.CreatedAt, true); errors.Is(err, errEmailTaken) {
		return nil, records.Refuse(reasonTaken, errEmailTaken)
	} else if err != nil {
		return nil, err
	}
	all, err := s.grants.invitationsOf(r, by.Tenant)
	if err != nil {
		return nil, err
	}
	for _, i := range all {
		if i.Email == row.Email && row.CreatedAt.Before(i.CreatedAt.Add(ticket.MailInterval)) {
			return nil, records.Refuse(reasonRecentlyMailed, errInvitedRecently)
		}
		if i.Email == row.Email || !row.CreatedAt.Before(i.ExpiresAt) {
			stale = append(stale, i)
		}
	}
	if len(all)-len(stale) >= maxInvitations {
		return nil, records.Refuse(reasonTooManyInvite, errInvitations)
	}
	return stale, nil
}

// requireVerifiedUser refuses an API key of a tenant in which no user has verified an address. A
// stranger registered that tenant, no matter who made the key. A tenant without users belongs to
// the operator and is allowed.
func (s *members) requireVerifiedUser(r store.Reader, by grantor) error {
	if by.Kind != authz.APIKey {
		return nil
	}
	members, err := s.membersOf(r, by.Tenant)
	if err != nil {
		return err
	}
	if len(members) > 0 && !slices.ContainsFunc(members, func(m member) bool { return m.row.Verified }) {
		return records.Refuse(reasonUnverified, errUnverified)
	}
	return nil
}

// countInvitation returns the tenant's count increased by one. Error: a refusal.
func (s *members) countInvitation(r store.Reader, tenant authz.TenantID, now time.Time) (row invitedRow, err error) {
	if _, err := s.rows.Get(r, invitedKey(tenant), &row); err != nil {
		return row, err
	}
	if !now.Before(row.Since.Add(invitationPeriod)) {
		row = invitedRow{Since: now}
	}
	if row.Count >= maxInvitationMails {
		return row, records.Refuse(reasonTooManyMails, errInvitationMails)
	}
	row.Count++
	return row, nil
}

// AcceptInvitation makes the bearer of an invitation's token a user of the tenant, with a verified
// address. Errors: fault.Invalid, including ErrTicket; fault.Conflict for an address that got an
// account meanwhile; fault.Forbidden when the tenant's trial has ended; fault.Unavailable.
func (s *members) AcceptInvitation(ctx context.Context, from authz.Principal, mailed string, chosen secret.Bytes) (User, Tenant, error) {
	if err := password.Validate(chosen); err != nil {
		return User{}, Tenant{}, err
	}
	now := s.now()
	var invited ticket.Subject
	var row invitationRow
	var tenant Tenant
	find := func(r store.Reader) (err error) {
		var found bool
		row = invitationRow{} // the transaction calls find again
		if invited, err = s.tickets.Find(r, ticket.Invite, mailed, now); err != nil {
			return err
		}
		if found, err = s.rows.Get(r, invitationKey(invited.Tenant, invited.User), &row); err != nil {
			return err
		} else if !found {
			return ErrTicket
		}
		tenant, err = s.tenants.Read(r, invited.Tenant)
		return err
	}
	err := s.store.View(ctx, find)
	if state.IsRefused(err) {
		err = ErrTicket
	}
	if err != nil {
		return User{}, Tenant{}, fmt.Errorf("looking up an invitation: %w", err)
	}
	u, err := s.users.newUser(ctx, invited.Tenant, row.Email, row.Role, chosen)
	if err != nil {
		return User{}, Tenant{}, err
	}
	u.row.Verified = true
	err = s.rows.Commit(ctx, userEvent(audit.MemberJoined, u.principal(from)), func(tx store.Tx, e *audit.Event) error {
		if err := find(tx); err != nil {
			return err
		}
		if tenant.ReadOnly(now) {
			return s.refuseJoin(e, from, reasonTrialEnded, errTrialEnded)
		}
		if lapsed, err := s.lapsed(tx, invited.Tenant, row); err != nil {
			return err
		} else if lapsed {
			return s.refuseJoin(e, from, reasonRole, ErrTicket)
		}
		if err := s.users.putNewUser(tx, u); errors.Is(err, errEmailTaken) {
			return s.refuseJoin(e, from, reasonTaken, errEmailTaken)
		} else if err != nil {
			return err
		}
		e.Attributes = map[string]string{"invitation": invited.User, "role": string(row.Role)}
		if err := s.bindRole(tx, u.account, row.Role); err != nil {
			return err
		}
		return s.grants.deleteInvitation(tx, invited.Tenant, invited.User)
	})
	if err != nil {
		return User{}, Tenant{}, fmt.Errorf("accepting an invitation: %w", err)
	}
	return u.row.user(u.account), tenant, nil
}

// lapsed reports whether an invitation can no longer be accepted, because it makes an owner, no user
// answers for it, and the tenant has an owner meanwhile. Such an invitation is an operator's, who may
// make only the first owner.
func (s *members) lapsed(r store.Reader, tenant authz.TenantID, row invitationRow) (bool, error) {
	if row.Role != authz.Owner || row.User != "" {
		return false, nil
	}
	owners, err := s.ownerAddresses(r, tenant)
	return len(owners) > 0, err
}

// refuseJoin returns a refusal whose entry names no user, since none was made.
func (s *members) refuseJoin(e *audit.Event, from authz.Principal, reason string, err error) error {
	from.Tenant = e.Principal.Tenant
	e.Principal, e.Resource.ID = from, ""
	return records.Refuse(reason, err)
}

// RevokeInvitation makes an invitation's token worthless. Errors: fault.Forbidden, fault.NotFound,
// fault.Unavailable.
func (s *members) RevokeInvitation(ctx context.Context, p authz.Principal, id string) error {
	if err := s.admitForMembers(ctx, p, authz.RevokeInvitation); err != nil {
		return err
	}
	e := audit.Event{
		Type: audit.InvitationRevoked, Outcome: audit.Success, Principal: p, Resource: audit.Resource{Type: audit.InvitationResource},
	}
	if authz.ValidID(invitationIDPrefix, id) {
		e.Resource.ID = id
	}
	err := s.rows.Commit(ctx, e, func(tx store.Tx, e *audit.Event) error {
		if b, err := tx.Get(invitationKey(p.Tenant, e.Resource.ID)); err != nil {
			return err
		} else if b == nil {
			return records.Refuse(reasonNoInvitation, errInvitation)
		}
		return s.grants.deleteInvitation(tx, p.Tenant, e.Resource.ID)
	})
	if err != nil {
		return fmt.Errorf("revoking an invitation: %w", err)
	}
	return nil
}
