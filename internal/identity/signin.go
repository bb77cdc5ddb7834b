package identity

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"strconv"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity/email"
	"github.com/latticekeep/latticekeep/internal/identity/password"
	"github.com/latticekeep/latticekeep/internal/identity/records"
	"github.com/latticekeep/latticekeep/internal/identity/throttle"
	"github.com/latticekeep/latticekeep/internal/identity/ticket"
	"github.com/latticekeep/latticekeep/internal/mail"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
)

// signIns checks and replaces passwords.
type signIns struct {
	*deps
	users     *users
	sessions  *sessions
	tickets   *ticket.Store
	throttle  *throttle.Throttle
	outbox    *mail.Outbox
	passwords *password.Hasher
}

// SignIn begins a session of the user with that address and password. It does the same work and
// gives the same answer for an unknown address, a wrong password and an account that must wait
// after failures. Errors: fault.Unauthenticated, fault.Unavailable.
func (s *signIns) SignIn(ctx context.Context, from authz.Principal, address string, given secret.Bytes) (Tokens, error) {
	if err := s.guard.Ready(ctx); err != nil {
		return Tokens{}, err
	}
	canonical, err := email.Canonical(address)
	if err != nil {
		canonical = "" // matches no account
	}
	asked := s.users.emailHash(canonical)
	var l login
	var waits bool
	err = s.store.View(ctx, func(r store.Reader) (err error) {
		var err2 error
		l, err = s.users.findLogin(r, canonical)
		waits, err2 = s.throttle.Waits(r, asked, s.now())
		return errors.Join(err, err2)
	})
	if err != nil {
		return Tokens{}, fmt.Errorf("looking up an account: %w", err)
	}
	right, err := s.passwords.Matches(ctx, l.hash, given)
	if err != nil {
		return Tokens{}, fmt.Errorf("checking a password: %w", err)
	}
	if !right && !waits {
		if waits, err = s.throttle.Fail(ctx, asked, s.now()); err != nil {
			return Tokens{}, fmt.Errorf("counting a wrong password: %w", err)
		}
	}
	if !right || waits {
		return Tokens{}, s.refuseSignIn(ctx, asked, from, l.account, waits)
	}
	tokens, err := s.beginSession(ctx, from, l)
	if waits := errors.Is(err, errWaits); waits || state.IsRefused(err) {
		return Tokens{}, s.refuseSignIn(ctx, asked, from, l.account, waits)
	}
	if err != nil {
		return Tokens{}, fmt.Errorf("beginning a session: %w", err)
	}
	return tokens, nil
}

var errSignIn = fault.New(fault.Unauthenticated, "the e-mail address or the password is wrong: after several failures, wait before trying again")

// refuseSignIn records a failed sign-in in the history of the account's tenant, or the system's if
// there is no account. A wait after failures has its own reason, also for an address without an
// account. So the history shows that there were many guesses, however fast they come.
func (s *signIns) refuseSignIn(ctx context.Context, asked string, from authz.Principal, a account, waits bool) error {
	if a.Tenant != "" {
		from.Tenant = a.Tenant
	}
	reason := reasonCredentials
	if waits {
		reason = reasonSlowed
	}
	return s.refuseAbout(ctx, asked, from, audit.UserSignedIn, audit.UserResource, reason, errSignIn)
}

// errWaits never leaves the package. It means that the account's failures began a wait meanwhile.
var errWaits = errors.New("the account waits after failures")

// beginSession begins a session for a caller who gave the right password, unless the account must
// wait by now. Error: errWaits.
func (s *signIns) beginSession(ctx context.Context, from authz.Principal, l login) (Tokens, error) {
	now, asked := s.now().UTC(), s.users.emailHash(l.row.Email)
	n := sessionName{l.User, authz.NewID(sessionIDPrefix)}
	refresh, selector, secretHash := s.sessions.newRefresh(nil)
	row := sessionRow{
		Tenant: l.Tenant, CreatedAt: now, LastUsedAt: now, ExpiresAt: now.Add(sessionLifetime), Selector: selector, Secret: secretHash,
		Device: from.Device, Address: from.SourceIP,
	}
	e := audit.Event{
		Type: audit.UserSignedIn, Outcome: audit.Success, Principal: l.principal(from),
		Resource: audit.Resource{Type: audit.SessionResource, ID: n.ID},
	}
	err := s.rows.Commit(ctx, e, func(tx store.Tx, _ *audit.Event) error {
		user, _, found, err := s.sessions.findHolder(tx, l.account)
		if err != nil {
			return err
		} else if !found || user.Password != l.row.Password { // changed meanwhile
			return records.Refuse(reasonCredentials, errSignIn)
		}
		if waits, err := s.throttle.Waits(tx, asked, now); err != nil || waits {
			return cmp.Or(err, errWaits)
		}
		return errors.Join(s.throttle.Forget(tx, asked), s.sessions.endSurplus(tx, l.User, now), s.rows.Put(tx, sessionKey(n), row), s.rows.Put(tx, selectorKey(selector), n))
	})
	if err != nil {
		return Tokens{}, err
	}
	return s.sessions.tokens(n, row, refresh, now)
}

// RequestPasswordReset mails the user of an address a token that sets a new password. For an
// address without an account, and for one that was mailed a moment ago, it does the same work and
// drops the mail. That is recorded like the refusal of a stranger. Error: fault.Unavailable.
func (s *signIns) RequestPasswordReset(ctx context.Context, from authz.Principal, address string) error {
	if err := s.guard.Ready(ctx); err != nil {
		return err
	}
	canonical, err := email.Canonical(address)
	if err != nil {
		canonical = "" // matches no account
	}
	var l login
	var recent bool
	now := s.now()
	err = s.store.View(ctx, func(r store.Reader) (err error) {
		var err2 error
		l, err = s.users.findLogin(r, canonical)
		recent, err2 = s.tickets.IsRecent(r, ticket.Reset, l.User, now)
		return errors.Join(err, err2)
	})
	if err != nil {
		return fmt.Errorf("looking up an account: %w", err)
	}
	t := s.tickets.New(ticket.Reset, ticket.Subject(l.account))
	message := mail.Message{Kind: mail.ResetPassword, Token: t.Token}
	if l.User != "" && !recent {
		message.To = l.row.Email
	}
	post, err := s.outbox.Prepare(ctx, message)
	if err != nil {
		return fmt.Errorf("preparing a mail: %w", err)
	}
	if message.To == "" {
		if err := s.store.Update(ctx, post.Put); err != nil {
			return fmt.Errorf("requesting a password reset: %w", err)
		}
		s.outbox.Notify()
		return s.refuseStranger(ctx, from, audit.PasswordResetRequested, audit.UserResource, reasonUnknown, nil)
	}
	e := audit.Event{
		Type: audit.PasswordResetRequested, Outcome: audit.Success, Principal: from,
		Resource: audit.Resource{Type: audit.UserResource, ID: l.User},
	}
	e.Principal.Tenant = l.Tenant // from is a stranger, but the entry belongs in the tenant's history
	err = s.rows.Commit(ctx, e, func(tx store.Tx, _ *audit.Event) error {
		var row userRow
		found, err1 := s.rows.Get(tx, userKey(l.account), &row)
		recent, err2 := s.tickets.IsRecent(tx, ticket.Reset, l.User, now)
		if err := errors.Join(err1, err2); err != nil {
			return err
		}
		if !found || recent { // removed or mailed meanwhile
			return records.Refuse(reasonUnknown, errUnsent)
		}
		return errors.Join(s.tickets.Put(tx, t), post.Put(tx))
	})
	if err != nil && !errors.Is(err, errUnsent) {
		return fmt.Errorf("requesting a password reset: %w", err)
	}
	s.outbox.Notify()
	return nil
}

// errUnsent never leaves the package, because all requests for a reset get the same answer.
var errUnsent = errors.New("the account is gone, or was mailed a moment ago")

// ResetPassword gives the user of a mailed token a new password and ends all its sessions. It also
// verifies the address. Before that an unverified account could make no API key and no invitation.
// Errors: fault.Invalid, including ErrTicket; fault.Unavailable.
func (s *signIns) ResetPassword(ctx context.Context, from authz.Principal, mailed string, next secret.Bytes) error {
	if err := password.Validate(next); err != nil {
		return err
	}
	now := s.now()
	var l login
	err := s.store.View(ctx, func(r store.Reader) error { // before the expensive hash
		a, err := s.tickets.Find(r, ticket.Reset, mailed, now)
		if err != nil {
			return err
		}
		l, err = s.users.readLogin(r, account(a))
		return err
	})
	if state.IsRefused(err) {
		err = ErrTicket
	}
	if err != nil {
		return fmt.Errorf("resetting a password: %w", err)
	}
	err = s.setPassword(ctx, userEvent(audit.PasswordReset, l.principal(from)), l, next, "", func(tx store.Tx, row *userRow) (map[string]string, error) {
		if _, err := s.tickets.Find(tx, ticket.Reset, mailed, now); err != nil || row.Verified {
			return nil, err
		}
		row.Verified = true
		return map[string]string{"email_verified": "true"}, s.tickets.Drop(tx, ticket.Verify, l.User)
	})
	if err != nil {
		return fmt.Errorf("resetting a password: %w", err)
	}
	return nil
}

// setPassword replaces a user's password and ends its sessions except keep. In the transaction it
// first calls also, which may refuse, change the user's row and return attributes for the entry.
func (s *signIns) setPassword(ctx context.Context, e audit.Event, l login, next secret.Bytes, keep string,
	also func(store.Tx, *userRow) (map[string]string, error)) error {
	hash, err := s.passwords.Hash(ctx, next)
	if err != nil {
		return err
	}
	post, err := s.outbox.Prepare(ctx, mail.Message{Kind: mail.PasswordChanged, To: l.row.Email})
	if err != nil {
		return err
	}
	id := authz.NewID(passwordIDPrefix)
	err = s.rows.Commit(ctx, e, func(tx store.Tx, e *audit.Event) error {
		var row userRow
		found, err := s.rows.Get(tx, userKey(l.account), &row)
		if err != nil {
			return err
		}
		attributes, err := also(tx, &row)
		if err != nil {
			return err
		}
		if !found || row.Password != l.row.Password {
			return records.Refuse(reasonPassword, errWrongPassword)
		}
		ended, err := s.sessions.endSessions(tx, l.User, keep)
		if err != nil {
			return err
		}
		e.Attributes = map[string]string{"sessions_ended": strconv.Itoa(ended)}
		maps.Copy(e.Attributes, attributes)
		previous := row.Password
		row.Password = id
		return errors.Join(s.throttle.Forget(tx, s.users.emailHash(l.row.Email)), s.throttle.Forget(tx, l.User), s.tickets.Drop(tx, ticket.Reset, l.User), tx.Delete(passwordKey(l.User, previous)),
			s.rows.Put(tx, passwordKey(l.User, id), hash), s.rows.Put(tx, userKey(l.account), row), post.Put(tx))
	})
	if err != nil {
		return err
	}
	s.outbox.Notify()
	return nil
}

// ChangePassword replaces the password of a user who knows the current one, and ends its other
// sessions. Errors: fault.Invalid, fault.Forbidden for a wrong current password, fault.Conflict,
// fault.Unavailable.
func (s *signIns) ChangePassword(ctx context.Context, p Caller, current, next secret.Bytes) error {
	if err := s.guard.Admit(ctx, p.Principal, authz.ChangePassword); err != nil {
		return err
	}
	if err := password.Validate(next); err != nil {
		return err
	}
	// These failures are counted apart from those of sign-ins, so strangers who guess cannot block
	// a signed-in user.
	var l login
	var waits bool
	err := s.store.View(ctx, func(r store.Reader) (err error) {
		var err2 error
		l, err = s.users.readLogin(r, accountOf(p.Principal))
		waits, err2 = s.throttle.Waits(r, p.ID, s.now())
		return errors.Join(err, err2)
	})
	if err != nil {
		return fmt.Errorf("reading a password: %w", err)
	}
	right, err := s.passwords.Matches(ctx, l.hash, current)
	if err != nil {
		return fmt.Errorf("checking a password: %w", err)
	}
	now := s.now()
	if !right && !waits {
		if _, err := s.throttle.Fail(ctx, l.User, now); err != nil {
			return fmt.Errorf("counting a wrong password: %w", err)
		}
	}
	if !right || waits {
		return s.deny(ctx, p.Principal, authz.ChangePassword, reasonPassword, errWrongPassword)
	}
	err = s.setPassword(ctx, userEvent(audit.PasswordChanged, p.Principal), l, next, p.Session,
		func(tx store.Tx, _ *userRow) (map[string]string, error) {
			waits, err := s.throttle.Waits(tx, l.User, now)
			if err == nil && waits { // guesses failed meanwhile, and the account must wait
				err = records.Refuse(reasonPassword, errWrongPassword)
			}
			return nil, err
		})
	if err != nil {
		return fmt.Errorf("changing a password: %w", err)
	}
	return nil
}

var errWrongPassword = fault.New(fault.Forbidden, "the current password is wrong: after several failures, wait before trying again")
