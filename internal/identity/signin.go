package identity

import (
	"cmp"
	"context"
	"errors"
	"fmt"

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
	if errors.Is(err, errWaits) {
		return Tokens{}, s.refuseSignIn(ctx, asked, from, l.account, true)
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
	row := sessionRow{l.Tenant, now, now, now.Add(sessionLifetime), selector, secretHash}
	e := audit.Event{
		Type: audit.UserSignedIn, Outcome: audit.Success, Principal: l.as(from),
		Resource: audit.Resource{Type: audit.SessionResource, ID: n.ID},
	}
	err := s.rows.Commit(ctx, e, func(tx store.Tx, _ *audit.Event) error {
		var user userRow
		if found, err := s.rows.Get(tx, userKey(l.account), &user); err != nil {
			return err
		} else if !found || user.Password != l.row.Password { // changed meanwhile
			return records.Refuse(reasonCredentials, errSignIn)
		}
		if waits, err := s.throttle.Waits(tx, asked, now); err != nil || waits {
			return cmp.Or(err, errWaits)
		}
		return errors.Join(s.throttle.Forget(tx, asked), s.sessions.makeRoom(tx, l.User, now), s.rows.Put(tx, sessionKey(n), row), s.rows.Put(tx, selectorKey(selector), n))
	})
	if err != nil {
		return Tokens{}, err
	}
	return s.sessions.tokens(n, row, refresh, now)
}
