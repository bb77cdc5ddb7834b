package identity

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
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

// users owns the rows of users, of their addresses and of their passwords.
type users struct {
	*deps
	tenants   *tenant.Store
	sessions  *sessions
	tickets   *ticket.Store
	grants    *grants
	outbox    *mail.Outbox
	passwords *password.Hasher
	decoy     decoy

	registrationClosed bool
}

// CloseRegistration refuses all registrations of tenants. It must be called before the service is
// used.
func (s *users) CloseRegistration() { s.registrationClosed = true }

// VerifyEmail records that the user of a mailed token receives mail at its address. Errors:
// ErrTicket, fault.Unavailable.
func (s *users) VerifyEmail(ctx context.Context, from authz.Principal, mailed string) error {
	now := s.now()
	err := s.rows.Commit(ctx, userEvent(audit.EmailVerified, from), func(tx store.Tx, e *audit.Event) error {
		subject, err := s.tickets.Find(tx, ticket.Verify, mailed, now)
		if err != nil {
			return err
		}
		a := account(subject)
		row, err := s.mustUser(tx, a)
		if err != nil {
			return err
		}
		*e = userEvent(audit.EmailVerified, a.principal(from))
		row.Verified = true
		return errors.Join(s.rows.Put(tx, userKey(a), row), s.tickets.Drop(tx, ticket.Verify, a.User))
	})
	if err != nil {
		return fmt.Errorf("verifying an e-mail address: %w", err)
	}
	return nil
}

// mustUser reads a user that a ticket names. Error: ErrTicket if the user was removed, because its
// tickets went with it.
func (s *users) mustUser(r store.Reader, a account) (row userRow, err error) {
	found, err := s.rows.Get(r, userKey(a), &row)
	if err == nil && !found {
		err = ErrTicket
	}
	return row, err
}

// ResendVerification mails the user a new token, unless its address is verified or it was mailed
// one a moment ago. Errors: fault.Forbidden, fault.Unavailable.
func (s *users) ResendVerification(ctx context.Context, p Caller) error {
	if err := s.guard.Admit(ctx, p.Principal, authz.ResendVerification); err != nil {
		return err
	}
	a := accountOf(p.Principal)
	var user userRow
	err := s.store.View(ctx, func(r store.Reader) (err error) {
		_, err = s.rows.Get(r, userKey(a), &user)
		return err
	})
	if err != nil {
		return fmt.Errorf("reading a user: %w", err)
	}
	t := s.tickets.New(ticket.Verify, ticket.Subject(a))
	post, err := s.outbox.Prepare(ctx, mail.Message{Kind: mail.VerifyEmail, To: user.Email, Token: t.Token})
	if err != nil {
		return fmt.Errorf("preparing a mail: %w", err)
	}
	err = s.rows.Commit(ctx, userEvent(audit.VerificationRequested, p.Principal), func(tx store.Tx, e *audit.Event) error {
		var row userRow
		found, err1 := s.rows.Get(tx, userKey(a), &row)
		recent, err2 := s.tickets.IsRecent(tx, ticket.Verify, a.User, t.CreatedAt)
		if err := errors.Join(err1, err2); err != nil {
			return err
		}
		if !found {
			return records.Refuse(reasonNoSession, errNoSession)
		}
		send := !row.Verified && !recent
		e.Attributes = map[string]string{"sent": strconv.FormatBool(send)}
		if !send {
			return nil
		}
		return errors.Join(s.tickets.Put(tx, t), post.Put(tx))
	})
	if err != nil {
		return fmt.Errorf("requesting a verification: %w", err)
	}
	s.outbox.Notify()
	return nil
}

// trialPeriod is how long a tenant that registered itself may do everything.
const trialPeriod = 14 * 24 * time.Hour

// verifyPeriod is how long an address is reserved for a user who has not verified it. After that,
// another person who proves ownership by an invitation takes it over.
const verifyPeriod = 48 * time.Hour

func (s *users) emailHash(canonical string) string {
	return s.rows.Hash("latticekeep/email/v1", []byte(canonical))
}

// login is the user and the password hash that decide a sign-in.
type login struct {
	account
	row  userRow
	hash string // PHC string of the password; empty when there is no user
}

// decoy is a user that no store holds. findLogin decodes its rows for an unknown address, so
// sign-ins take the same work for unknown and known addresses. The zero value is ready.
type decoy struct {
	once                sync.Once
	account, user, hash records.Sealed
	err                 error
}

// decoyUser returns the user that stands for an unknown address.
func (s *users) decoyUser() (*decoy, error) {
	d := &s.decoy
	d.once.Do(func() {
		a := account{tenant.NewID(), authz.NewID(userIDPrefix)}
		row := userRow{Email: "name@example.com", Role: authz.Member, Password: authz.NewID(passwordIDPrefix), CreatedAt: s.now().UTC()}
		seal := func(key []byte, v any) records.Sealed {
			sealed, err := s.rows.Seal(key, v)
			d.err = errors.Join(d.err, err)
			return sealed
		}
		d.account = seal(emailKey(s.emailHash(row.Email)), a)
		d.user = seal(userKey(a), row)
		d.hash = seal(passwordKey(a.User, row.Password), password.Unmatchable())
	})
	return d, d.err
}

// findLogin reads the user of an address. It does the same reads and decoding whether the user
// exists or not.
func (s *users) findLogin(r store.Reader, canonical string) (login, error) {
	d, err := s.decoyUser()
	if err != nil {
		return login{}, err
	}
	var l login
	known, err1 := s.rows.GetOr(r, emailKey(s.emailHash(canonical)), d.account, &l.account)
	user, err2 := s.rows.GetOr(r, userKey(l.account), d.user, &l.row)
	hash, err3 := s.rows.GetOr(r, passwordKey(l.User, l.row.Password), d.hash, &l.hash)
	switch err := errors.Join(err1, err2, err3); {
	case state.IsRefused(err): // nobody can sign in with rows that somebody has changed
		return login{}, nil
	case err != nil:
		return login{}, err
	case !known:
		return login{}, nil
	case !user || !hash:
		return login{}, records.ErrDamaged
	}
	return l, nil
}

// readLogin reads a user and its password's hash. Both are empty if the user does not exist.
func (s *users) readLogin(r store.Reader, a account) (l login, err error) {
	l.account = a
	_, err1 := s.rows.Get(r, userKey(a), &l.row)
	_, err2 := s.rows.Get(r, passwordKey(a.User, l.row.Password), &l.hash)
	return l, errors.Join(err1, err2)
}

// newUser is a user that is not stored yet.
type newUser struct {
	account
	row  userRow
	hash string
}

func (s *users) newUser(ctx context.Context, tenant authz.TenantID, address string, role authz.Role, chosen secret.Bytes) (*newUser, error) {
	hash, err := s.passwords.Hash(ctx, chosen)
	if err != nil {
		return nil, err
	}
	u := &newUser{account: account{tenant, authz.NewID(userIDPrefix)}, hash: hash}
	u.row = userRow{Email: address, Role: role, Password: authz.NewID(passwordIDPrefix), CreatedAt: s.now().UTC()}
	return u, nil
}

// putNewUser stores u. If it returns errEmailTaken, it has written nothing.
func (s *users) putNewUser(tx store.Tx, u *newUser) error {
	lapsed, err := s.lapsedHolder(tx, u.row.Email, u.row.CreatedAt, u.row.Verified)
	if err == nil && lapsed != nil {
		err = s.removeLapsed(tx, *lapsed)
	}
	if err != nil {
		return err
	}
	return errors.Join(s.rows.Put(tx, emailKey(s.emailHash(u.row.Email)), u.account), s.rows.Put(tx, userKey(u.account), u.row),
		s.rows.Put(tx, passwordKey(u.User, u.row.Password), u.hash))
}

// lapsedHolder reads the user who has a canonical address but must give it up: a user on trial
// whose time to verify it is over, if proven says that another person has proven ownership. It
// returns nil if nobody has the address. Error: errEmailTaken for every other user.
func (s *users) lapsedHolder(r store.Reader, canonical string, now time.Time, proven bool) (*member, error) {
	var m member
	found, err := s.rows.Get(r, emailKey(s.emailHash(canonical)), &m.account)
	if err != nil || !found {
		return nil, err
	}
	switch found, err := s.rows.Get(r, userKey(m.account), &m.row); {
	case err != nil:
		return nil, err
	case !found:
		return nil, records.ErrDamaged
	case !proven || m.row.Verified || now.Before(m.row.CreatedAt.Add(verifyPeriod)):
		return nil, errEmailTaken
	}
	if t, err := s.tenants.Read(r, m.Tenant); err != nil {
		return nil, err
	} else if t.TrialEnds.IsZero() { // the operator knows this tenant
		return nil, errEmailTaken
	}
	return &m, nil
}

// removeLapsed removes a user who lost its address to another, and records that in its tenant's
// history.
func (s *users) removeLapsed(tx store.Tx, m member) error {
	e := memberEvent(audit.MemberRemoved, authz.SystemPrincipal(m.Tenant), m.User)
	var err error
	if e.Attributes, err = s.grants.revokeGrants(tx, m.Tenant, answeredBy(m.User)); err != nil {
		return err
	}
	e.Attributes["cause"] = reasonUnverified
	_, err = s.guard.Append(tx, e)
	return errors.Join(err, s.deleteUser(tx, m.account, m.row))
}

// deleteUser removes a user with its sessions, tickets, address, password, policies and memberships. The
// address is kept for readers of the log.
func (s *users) deleteUser(tx store.Tx, a account, row userRow) error {
	_, err := s.sessions.endSessions(tx, a.User, "")
	return errors.Join(err, s.past.Keep(tx, a.Tenant, audit.UserResource, a.User, row.Email), s.tickets.DropUser(tx, a.User), tx.Delete(emailKey(s.emailHash(row.Email))),
		tx.Delete(passwordKey(a.User, row.Password)), tx.Delete(userKey(a)), s.policies.Forget(tx, a.Tenant, a.User),
		s.policies.LeaveAll(tx, a.Tenant, a.User))
}

// Register makes a tenant on trial and its first owner, and mails the owner a token that verifies
// the address. Errors: fault.Invalid, fault.Forbidden while registration is closed, fault.Conflict
// for an address that has an account, fault.Unavailable.
func (s *users) Register(ctx context.Context, from authz.Principal, address string, chosen secret.Bytes, tenantName string) (User, Tenant, error) {
	if err := s.guard.Ready(ctx); err != nil {
		return User{}, Tenant{}, err
	}
	if s.registrationClosed {
		return User{}, Tenant{}, s.refuseStranger(ctx, from, audit.UserRegistered, audit.UserResource, reasonClosed, errRegistration)
	}
	address, err := email.Canonical(address)
	if err := errors.Join(err, password.Validate(chosen), tenant.ValidateName(tenantName)); err != nil {
		return User{}, Tenant{}, err
	}
	u, tenant, err := s.register(ctx, from, address, chosen, tenantName)
	if errors.Is(err, errEmailTaken) {
		err = s.refuseStranger(ctx, from, audit.UserRegistered, audit.UserResource, reasonTaken, errEmailTaken)
	}
	if err != nil {
		return User{}, Tenant{}, fmt.Errorf("registering a user: %w", err)
	}
	return u, tenant, nil
}

func (s *users) register(ctx context.Context, from authz.Principal, address string, chosen secret.Bytes, tenantName string) (User, Tenant, error) {
	err := s.store.View(ctx, func(r store.Reader) error { // before the expensive work for a new account
		_, err := s.lapsedHolder(r, address, s.now(), false)
		return err
	})
	if err != nil {
		return User{}, Tenant{}, err
	}
	tenant, err := s.tenants.New(ctx, tenantName, s.now().Add(trialPeriod).UTC())
	if err != nil {
		return User{}, Tenant{}, err
	}
	tenant.By.RequestID, tenant.By.SourceIP = from.RequestID, from.SourceIP
	u, err := s.newUser(ctx, tenant.ID, address, authz.Owner, chosen)
	if err != nil {
		return User{}, Tenant{}, err
	}
	t := s.tickets.New(ticket.Verify, ticket.Subject(u.account))
	post, err := s.outbox.Prepare(ctx, mail.Message{Kind: mail.VerifyEmail, To: address, Token: t.Token})
	if err != nil {
		return User{}, Tenant{}, err
	}
	e := userEvent(audit.UserRegistered, u.principal(from))
	err = s.rows.Commit(ctx, e, func(tx store.Tx, _ *audit.Event) error {
		if err := s.putNewUser(tx, u); err != nil {
			return err
		}
		return errors.Join(s.tenants.Put(tx, tenant), s.tickets.Put(tx, t), post.Put(tx))
	})
	if err != nil {
		return User{}, Tenant{}, err
	}
	s.outbox.Notify()
	return u.row.user(u.account), tenant.Tenant, nil
}

// Account returns the principal's tenant and, if it is a user, the user. Errors: fault.Forbidden,
// fault.Unavailable.
func (s *users) Account(ctx context.Context, p Caller) (Tenant, *User, error) {
	ctx, cancel := context.WithTimeout(ctx, records.ReadTimeout)
	defer cancel()
	tenant, user, err := s.AccountUnrecorded(ctx, p.Principal)
	if err != nil {
		return Tenant{}, nil, err
	}
	e := audit.Event{Type: audit.AccountRead, Outcome: audit.Success, Principal: p.Principal, Resource: audit.Resource{Type: audit.UserResource}}
	if user != nil {
		e.Resource.ID = user.ID
	}
	if err := s.guard.Record(ctx, e); err != nil {
		return Tenant{}, nil, err
	}
	return tenant, user, nil
}

// AccountUnrecorded is [Service.Account] for a caller that records the read itself.
func (s *users) AccountUnrecorded(ctx context.Context, p authz.Principal) (tenant Tenant, user *User, err error) {
	ctx, cancel := context.WithTimeout(ctx, records.ReadTimeout)
	defer cancel()
	if err := s.guard.Admit(ctx, p, authz.ReadAccount); err != nil {
		return Tenant{}, nil, err
	}
	err = s.store.View(ctx, func(r store.Reader) (err error) {
		if tenant, err = s.tenants.Read(r, p.Tenant); err != nil || p.Kind != authz.User {
			return err
		}
		var row userRow
		if found, err := s.rows.Get(r, userKey(accountOf(p)), &row); err != nil {
			return err
		} else if !found {
			return errNoSession // removed since the request was authenticated
		}
		u := row.user(accountOf(p))
		user = &u
		return nil
	})
	if err != nil {
		return Tenant{}, nil, fmt.Errorf("reading an account: %w", err)
	}
	return tenant, user, nil
}

// UserName returns the e-mail address of a user of the tenant, and "" if there is none with the id.
func (s *users) UserName(r store.Reader, tenant authz.TenantID, id string) (string, error) {
	if !authz.ValidID(userIDPrefix, id) {
		return "", nil
	}
	var row userRow
	_, err := s.rows.Get(r, userKey(account{tenant, id}), &row)
	return row.Email, err
}
