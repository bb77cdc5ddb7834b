package identity

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/mail"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/store"
)

// User is a person in a tenant. An e-mail address belongs to at most one user
// of the whole deployment.
type User struct {
	ID            string
	Tenant        authz.TenantID
	Email         string // canonical
	Role          authz.Role
	EmailVerified bool
	CreatedAt     time.Time
}

const userIDPrefix = "usr"

// trialPeriod is how long a tenant that registered itself may do everything.
const trialPeriod = 14 * 24 * time.Hour

// verifyPeriod is how long an address is kept for a user who has not verified
// it. After that whoever proves to own it, by an invitation, takes it over.
const verifyPeriod = 48 * time.Hour

// readTimeout bounds a read, so that one that cannot be recorded is refused
// within a second whatever hangs.
const readTimeout = 900 * time.Millisecond

var (
	errEmailTaken   = fault.New(fault.Conflict, "this e-mail address has an account already: sign in, or reset its password")
	errRegistration = fault.New(fault.Forbidden, "registration is closed: ask the operator of this service for an account")
	errTrialEnded   = fault.New(fault.Forbidden, "the trial has ended and the tenant is read-only: ask the operator of this service to activate it")
	errNoSession    = fault.New(fault.Unauthenticated, "the session is over: sign in again")
)

// Reasons in audit entries.
const (
	reasonClosed      = "registration_closed"
	reasonTaken       = "email_taken"
	reasonTrialEnded  = string(authz.TrialEnded)
	reasonCredentials = "wrong_credentials" // unknown and wrong password alike
	reasonSlowed      = audit.ReasonSlowedDown
	reasonPassword    = "wrong_password"
	reasonUnknown     = "no_such_account" // or one that was mailed a moment ago
	reasonNoSession   = "no_such_session"
	reasonReused      = "reused"
	reasonNoMember    = "no_such_member"
	reasonUnverified  = "email_not_verified"
	reasonRole        = "role_beyond_own"
	reasonLastOwner   = "last_owner"
	reasonSystem      = "system_tenant"
)

// Rows, each with the keyring's MAC in front: a user, under its tenant; whose
// an e-mail address is, under the hash of the address; a password hash, under
// a key of its own for each password, so that the former one is wiped.
type userRow struct {
	Email     string     `json:"email"`
	Role      authz.Role `json:"role"`
	Verified  bool       `json:"verified"`
	Password  string     `json:"password"` // id of its row
	CreatedAt time.Time  `json:"created_at"`
}

// account names a user; a tenant's API keys and the deployment have none.
type account struct {
	Tenant authz.TenantID `json:"tenant"`
	User   string         `json:"user"`
}

func usersPrefix(tenant authz.TenantID) []byte { return []byte("user/row/" + string(tenant) + "/") }

func userKey(a account) []byte { return append(usersPrefix(a.Tenant), a.User...) }

func emailKey(hash string) []byte { return []byte("user/email/" + hash) }

func passwordKey(user, password string) []byte {
	return []byte("user/password/" + user + "/" + password)
}

func (s *Service) emailHash(canonical string) string {
	return s.keyedHash("latticekeep/email/v1", []byte(canonical))
}

func (r userRow) user(a account) User {
	return User{ID: a.User, Tenant: a.Tenant, Email: r.Email, Role: r.Role, EmailVerified: r.Verified, CreatedAt: r.CreatedAt}
}

// get reads a row into v and reports whether there is one.
func (s *Service) get(r store.Reader, key []byte, v any) (bool, error) {
	b, err := r.Get(key)
	if err != nil || b == nil {
		return false, err
	}
	return true, s.decode(key, b, v)
}

func (s *Service) put(tx store.Tx, key []byte, v any) error {
	b, err := s.encode(key, v)
	if err != nil {
		return err
	}
	return tx.Put(key, b)
}

// login is what a sign-in is decided by.
type login struct {
	account
	row  userRow
	hash string // of the password, in PHC form; empty for no user
}

// decoy is a user that is in no store. Its rows are decoded where those of an
// unknown address would be. The zero value is ready.
type decoy struct {
	once                sync.Once
	account, user, hash sealedRow
	err                 error
}

type sealedRow struct{ key, value []byte }

func (s *Service) nobody() (*decoy, error) {
	d := &s.decoy
	d.once.Do(func() {
		a := account{authz.TenantID(authz.NewID(tenantIDPrefix)), authz.NewID(userIDPrefix)}
		row := userRow{Email: "name@example.com", Role: authz.Member, Password: authz.NewID(passwordIDPrefix), CreatedAt: s.now().UTC()}
		seal := func(key []byte, v any) sealedRow {
			value, err := s.encode(key, v)
			d.err = errors.Join(d.err, err)
			return sealedRow{key, value}
		}
		d.account = seal(emailKey(s.emailHash(row.Email)), a)
		d.user = seal(userKey(a), row)
		d.hash = seal(passwordKey(a.User, row.Password), newHash().String())
	})
	return d, d.err
}

// findLogin reads the user of an address, with the same reads and decoding
// whether there is one or not.
func (s *Service) findLogin(r store.Reader, canonical string) (login, error) {
	d, err := s.nobody()
	if err != nil {
		return login{}, err
	}
	var l login
	known, err1 := s.getOr(r, emailKey(s.emailHash(canonical)), d.account, &l.account)
	user, err2 := s.getOr(r, userKey(l.account), d.user, &l.row)
	hash, err3 := s.getOr(r, passwordKey(l.User, l.row.Password), d.hash, &l.hash)
	switch err := errors.Join(err1, err2, err3); {
	case err != nil:
		return login{}, err
	case !known:
		return login{}, nil
	case !user || !hash:
		return login{}, errDamaged
	}
	return l, nil
}

// getOr is get, but decodes another row when there is none.
func (s *Service) getOr(r store.Reader, key []byte, other sealedRow, v any) (bool, error) {
	b, err := r.Get(key)
	if err != nil {
		return false, err
	}
	if b == nil {
		return false, s.decode(other.key, other.value, v)
	}
	return true, s.decode(key, b, v)
}

// readLogin reads a user and its password's hash; the one is empty when the
// other is.
func (s *Service) readLogin(r store.Reader, a account) (l login, err error) {
	l.account = a
	_, err1 := s.get(r, userKey(a), &l.row)
	_, err2 := s.get(r, passwordKey(a.User, l.row.Password), &l.hash)
	return l, errors.Join(err1, err2)
}

// newUser is a user that is not stored yet.
type newUser struct {
	account
	row  userRow
	hash string
}

func (s *Service) newUser(ctx context.Context, tenant authz.TenantID, email string, role authz.Role, password secret.Bytes) (*newUser, error) {
	hash, err := s.passwords.hash(ctx, password)
	if err != nil {
		return nil, err
	}
	u := &newUser{account: account{tenant, authz.NewID(userIDPrefix)}, hash: hash}
	u.row = userRow{Email: email, Role: role, Password: authz.NewID(passwordIDPrefix), CreatedAt: s.now().UTC()}
	return u, nil
}

const passwordIDPrefix = "pwd"

// putNewUser stores u. Error: errEmailTaken, and then nothing is written.
func (s *Service) putNewUser(tx store.Tx, u *newUser) error {
	lapsed, err := s.holder(tx, u.row.Email, u.row.CreatedAt, u.row.Verified)
	if err == nil && lapsed != nil {
		err = s.displace(tx, *lapsed)
	}
	if err != nil {
		return err
	}
	return errors.Join(s.put(tx, emailKey(s.emailHash(u.row.Email)), u.account), s.put(tx, userKey(u.account), u.row),
		s.put(tx, passwordKey(u.User, u.row.Password), u.hash))
}

// holder reads who has a canonical address but does not keep it from one who
// proves to own it: nobody, or a user on trial whose time to verify it is over.
// Error: errEmailTaken.
func (s *Service) holder(r store.Reader, canonical string, now time.Time, proven bool) (*member, error) {
	var m member
	found, err := s.get(r, emailKey(s.emailHash(canonical)), &m.account)
	if err != nil || !found {
		return nil, err
	}
	switch found, err := s.get(r, userKey(m.account), &m.row); {
	case err != nil:
		return nil, err
	case !found:
		return nil, errDamaged
	case !proven || m.row.Verified || now.Before(m.row.CreatedAt.Add(verifyPeriod)):
		return nil, errEmailTaken
	}
	if t, err := s.readTenant(r, m.Tenant); err != nil {
		return nil, err
	} else if t.TrialEnds.IsZero() { // the operator knows who this is
		return nil, errEmailTaken
	}
	return &m, nil
}

// displace removes a user who lost its address to another, which its tenant's
// history tells.
func (s *Service) displace(tx store.Tx, m member) error {
	e := memberEvent(audit.MemberRemoved, System(m.Tenant), m.User)
	var err error
	if e.Attributes, err = s.revokeGrants(tx, m.Tenant, of(m.User)); err != nil {
		return err
	}
	e.Attributes["cause"] = reasonUnverified
	_, err = s.guard.Append(tx, e)
	return errors.Join(err, s.deleteUser(tx, m.account, m.row))
}

// deleteUser removes a user with all that is its own.
func (s *Service) deleteUser(tx store.Tx, a account, row userRow) error {
	_, err := s.endSessions(tx, a.User, "")
	return errors.Join(err, s.dropTickets(tx, a.User), tx.Delete(emailKey(s.emailHash(row.Email))),
		tx.Delete(passwordKey(a.User, row.Password)), tx.Delete(userKey(a)))
}

// as returns the user as the principal of a request that began without one.
func (a account) as(from authz.Principal) authz.Principal {
	return authz.Principal{Tenant: a.Tenant, Kind: authz.User, ID: a.User, RequestID: from.RequestID, SourceIP: from.SourceIP}
}

// accountOf returns the account of a principal that is a user.
func accountOf(p authz.Principal) account { return account{p.Tenant, p.ID} }

// refusal is an error that is recorded: the change is not made, its entry says
// denied and why, and the caller gets the error.
type refusal struct {
	reason string
	error
}

func (r *refusal) Unwrap() error { return r.error }

func refuse(reason string, err error) error { return &refusal{reason, err} }

// commit makes a change together with its one entry. A change that returns a
// refusal has written nothing.
func (s *Service) commit(ctx context.Context, e audit.Event, change func(tx store.Tx, e *audit.Event) error) error {
	var refused *refusal
	err := s.store.Update(ctx, func(tx store.Tx) error {
		refused = nil
		e := e
		if err := change(tx, &e); errors.As(err, &refused) {
			e.Outcome, e.Attributes = audit.Denied, map[string]string{audit.AttributeReason: refused.reason}
		} else if err != nil {
			return err
		}
		_, err := s.guard.Append(tx, e)
		return err
	})
	if err != nil {
		return err
	}
	if refused != nil {
		return refused
	}
	return nil
}

// deny records that p may not do a, and returns err.
func (s *Service) deny(ctx context.Context, p authz.Principal, a authz.Action, reason string, err error) error {
	if failed := s.guard.RecordAttempt(ctx, p, a, audit.Denied, reason); failed != nil {
		return failed
	}
	return err
}

// refuseStranger records, once per source and minute, that someone unknown was
// refused, and returns err. The entry is of the system's tenant unless from
// names another.
func (s *Service) refuseStranger(ctx context.Context, from authz.Principal, t audit.EventType, resource, reason string, err error) error {
	return s.refuseAbout(ctx, "", from, t, resource, reason, err)
}

// refuseAbout is refuseStranger, once also for each of what was asked for.
func (s *Service) refuseAbout(ctx context.Context, about string, from authz.Principal, t audit.EventType, resource, reason string, err error) error {
	failed := s.guard.RecordRefusal(ctx, audit.Source(from.SourceIP)+" "+about, audit.Event{
		Type: t, Outcome: audit.Denied, Principal: from, Resource: audit.Resource{Type: resource},
		Attributes: map[string]string{audit.AttributeReason: reason},
	})
	if failed != nil {
		return failed
	}
	return err
}

// Register makes a tenant on trial and its first owner, who is mailed a token
// that verifies the address. Errors: fault.Invalid, fault.Forbidden while
// registration is closed, fault.Conflict for an address that has an account,
// fault.Unavailable.
func (s *Service) Register(ctx context.Context, from authz.Principal, email string, password secret.Bytes, tenantName string) (User, Tenant, error) {
	if err := s.guard.Ready(ctx); err != nil {
		return User{}, Tenant{}, err
	}
	if s.registrationClosed {
		return User{}, Tenant{}, s.refuseStranger(ctx, from, audit.UserRegistered, audit.UserResource, reasonClosed, errRegistration)
	}
	email, err := canonicalEmail(email)
	if err := errors.Join(err, checkPassword(password), checkName(tenantName)); err != nil {
		return User{}, Tenant{}, err
	}
	u, tenant, err := s.register(ctx, from, email, password, tenantName)
	if errors.Is(err, errEmailTaken) {
		err = s.refuseStranger(ctx, from, audit.UserRegistered, audit.UserResource, reasonTaken, errEmailTaken)
	}
	if err != nil {
		return User{}, Tenant{}, fmt.Errorf("registering a user: %w", err)
	}
	return u, tenant, nil
}

func (s *Service) register(ctx context.Context, from authz.Principal, email string, password secret.Bytes, tenantName string) (User, Tenant, error) {
	err := s.store.View(ctx, func(r store.Reader) error { // before the work that a new account takes
		_, err := s.holder(r, email, s.now(), false)
		return err
	})
	if err != nil {
		return User{}, Tenant{}, err
	}
	tenant, err := s.newTenant(ctx, tenantName, s.now().Add(trialPeriod).UTC())
	if err != nil {
		return User{}, Tenant{}, err
	}
	tenant.by.RequestID, tenant.by.SourceIP = from.RequestID, from.SourceIP
	u, err := s.newUser(ctx, tenant.id, email, authz.Owner, password)
	if err != nil {
		return User{}, Tenant{}, err
	}
	ticket := s.newTicket(verifyTicket, u.account)
	post, err := s.outbox.Prepare(ctx, mail.Message{Kind: mail.VerifyEmail, To: email, Token: ticket.token})
	if err != nil {
		return User{}, Tenant{}, err
	}
	e := userEvent(audit.UserRegistered, u.as(from))
	err = s.commit(ctx, e, func(tx store.Tx, _ *audit.Event) error {
		if err := s.putNewUser(tx, u); err != nil {
			return err
		}
		return errors.Join(s.putTenant(tx, tenant), s.putTicket(tx, ticket), post.Put(tx))
	})
	if err != nil {
		return User{}, Tenant{}, err
	}
	s.outbox.Notify()
	return u.row.user(u.account), tenant.tenant(), nil
}

// userEvent is something that a user did to its own account.
func userEvent(t audit.EventType, p authz.Principal) audit.Event {
	return audit.Event{Type: t, Outcome: audit.Success, Principal: p, Resource: audit.Resource{Type: audit.UserResource, ID: p.ID}}
}

// Account returns the principal's tenant and, for a user, the user. Errors:
// fault.Forbidden, fault.Unavailable.
func (s *Service) Account(ctx context.Context, p Caller) (Tenant, *User, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	if err := s.guard.Admit(ctx, p.Principal, authz.ReadAccount); err != nil {
		return Tenant{}, nil, err
	}
	var tenant Tenant
	var user *User
	err := s.store.View(ctx, func(r store.Reader) (err error) {
		if tenant, err = s.readTenant(r, p.Tenant); err != nil || p.Kind != authz.User {
			return err
		}
		var row userRow
		if found, err := s.get(r, userKey(accountOf(p.Principal)), &row); err != nil {
			return err
		} else if !found {
			return errNoSession // removed since the request was authenticated
		}
		u := row.user(accountOf(p.Principal))
		user = &u
		return nil
	})
	if err != nil {
		return Tenant{}, nil, fmt.Errorf("reading an account: %w", err)
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
