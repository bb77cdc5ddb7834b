package identity

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity/email"
	"github.com/latticekeep/latticekeep/internal/identity/password"
	"github.com/latticekeep/latticekeep/internal/identity/records"
	"github.com/latticekeep/latticekeep/internal/identity/ticket"
	"github.com/latticekeep/latticekeep/internal/mail"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/store"
)

var (
	errInvitation      = fault.New(fault.NotFound, "there is no such invitation: list the members for those there are")
	errInvitations     = fault.New(fault.Conflict, "100 invitations are open: revoke those that nobody will accept")
	errInvitationMails = fault.New(fault.Conflict, "100 invitations were sent within an hour: try again later")
	errInvitedRecently = fault.New(fault.Conflict, "an invitation was sent a moment ago: wait a minute before sending another")
)

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
	if err := s.readyForMembers(ctx, p, authz.InviteMember); err != nil {
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
	post, err := s.outbox.Prepare(ctx, mail.Message{Kind: mail.Invite, To: address, Token: t.Token})
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
		e.Resource.ID, row.User = id, by.user
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

// mayInvite decides whether the grantor may make an invitation. It returns the invitations that the
// new one replaces: the expired ones and a previous one to the same address.
func (s *members) mayInvite(r store.Reader, by grantor, row invitationRow) (stale []Invitation, err error) {
	if err := s.someoneAnswers(r, by); err != nil {
		return nil, err
	}
	if err := s.mayGrant(r, by.Principal, row.Role); err != nil {
		return nil, err
	}
	if _, err := s.users.holder(r, row.Email, row.CreatedAt, true); errors.Is(err, errEmailTaken) {
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

// someoneAnswers refuses an API key of a tenant in which no user has verified an address. A
// stranger registered that tenant, no matter who made the key. A tenant without users belongs to
// the operator and is allowed.
func (s *members) someoneAnswers(r store.Reader, by grantor) error {
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
		tenant, err = s.tenants.readTenant(r, invited.Tenant)
		return err
	}
	if err := s.store.View(ctx, find); err != nil {
		return User{}, Tenant{}, fmt.Errorf("looking up an invitation: %w", err)
	}
	u, err := s.users.newUser(ctx, invited.Tenant, row.Email, row.Role, chosen)
	if err != nil {
		return User{}, Tenant{}, err
	}
	u.row.Verified = true
	err = s.rows.Commit(ctx, userEvent(audit.MemberJoined, u.as(from)), func(tx store.Tx, e *audit.Event) error {
		if err := find(tx); err != nil {
			return err
		}
		if tenant.readOnly(now) {
			return s.refuseJoin(e, from, reasonTrialEnded, errTrialEnded)
		}
		if err := s.users.putNewUser(tx, u); errors.Is(err, errEmailTaken) {
			return s.refuseJoin(e, from, reasonTaken, errEmailTaken)
		} else if err != nil {
			return err
		}
		e.Attributes = map[string]string{"invitation": invited.User, "role": string(row.Role)}
		return s.grants.deleteInvitation(tx, invited.Tenant, invited.User)
	})
	if err != nil {
		return User{}, Tenant{}, fmt.Errorf("accepting an invitation: %w", err)
	}
	return u.row.user(u.account), tenant, nil
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
	if err := s.readyForMembers(ctx, p, authz.RevokeInvitation); err != nil {
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
