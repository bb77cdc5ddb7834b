package identity

import (
	"cmp"
	"context"
	"crypto/subtle"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Session is what began with a sign-in and goes on with every refresh.
type Session struct {
	ID         string
	Current    bool // the one that asks
	CreatedAt  time.Time
	LastUsedAt time.Time // sign-in or newest refresh
	ExpiresAt  time.Time
}

// Tokens is what a session is carried by. They are shown once.
type Tokens struct {
	Access         string
	AccessExpires  time.Time
	Refresh        string
	RefreshExpires time.Time // the end of the session, which no refresh moves
}

const (
	sessionIDPrefix = "ses"
	sessionLifetime = 7 * 24 * time.Hour
	maxSessions     = 100 // of one user; a further one ends the oldest
)

// A refresh token is a selector, which names the session and stays, and a
// secret, which every use replaces. Whoever shows the selector with another
// secret than the newest shows a token that was used before: it was copied, and
// the session ends. So no used token has to be remembered.
const (
	refreshPrefix = "lk_refresh_"
	selectorBytes = 16
	refreshBytes  = selectorBytes + 32
	selectorLabel = "latticekeep/refresh-selector/v1"
	refreshLabel  = "latticekeep/refresh-secret/v1"
)

// sessionRow is a session under its user; what its selector hashes to names it
// in a row of its own.
type sessionRow struct {
	Tenant     authz.TenantID `json:"tenant"`
	CreatedAt  time.Time      `json:"created_at"`
	LastUsedAt time.Time      `json:"last_used_at"`
	ExpiresAt  time.Time      `json:"expires_at"`
	Selector   string         `json:"selector"` // both hashed
	Secret     string         `json:"secret"`
}

// sessionName is where a session's row stands.
type sessionName struct {
	User string `json:"user"`
	ID   string `json:"id"`
}

func sessionsPrefix(user string) []byte { return []byte("session/row/" + user + "/") }

func sessionKey(n sessionName) []byte { return append(sessionsPrefix(n.User), n.ID...) }

func selectorKey(hash string) []byte { return []byte("session/selector/" + hash) }

// newRefresh returns a refresh token for a selector, and the hashes of both its
// parts. No selector makes a new one.
func (s *Service) newRefresh(selector []byte) (token, selectorHash, secretHash string) {
	_, raw := randomToken("", refreshBytes)
	copy(raw, selector)
	selectorHash, secretHash = s.refreshHashes(raw)
	return refreshPrefix + encoding.EncodeToString(raw), selectorHash, secretHash
}

func (s *Service) refreshHashes(raw []byte) (selector, secret string) {
	return s.keyedHash(selectorLabel, raw[:selectorBytes]), s.keyedHash(refreshLabel, raw[selectorBytes:])
}

// SignIn begins a session of the user whom address and password name. For an
// unknown address, a wrong password and an account that is slowed down after
// failures it does the same work, and they are one answer. Errors:
// fault.Unauthenticated, fault.Unavailable.
func (s *Service) SignIn(ctx context.Context, from authz.Principal, email string, password secret.Bytes) (Tokens, error) {
	if err := s.guard.Ready(ctx); err != nil {
		return Tokens{}, err
	}
	canonical, err := canonicalEmail(email)
	if err != nil {
		canonical = "" // nobody's
	}
	asked := s.emailHash(canonical)
	var l login
	var waits bool
	err = s.store.View(ctx, func(r store.Reader) (err error) {
		var err2 error
		l, err = s.findLogin(r, canonical)
		waits, err2 = s.waits(r, asked, s.now())
		return errors.Join(err, err2)
	})
	if err != nil {
		return Tokens{}, fmt.Errorf("looking up an account: %w", err)
	}
	right, err := s.passwords.check(ctx, l.hash, password)
	if err != nil {
		return Tokens{}, fmt.Errorf("checking a password: %w", err)
	}
	if !right && !waits {
		if waits, err = s.fail(ctx, asked, s.now()); err != nil {
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

// refuseSignIn records a failed sign-in in the history of the tenant whose
// account it was tried on, if there is one. That the address is slowed down, which
// those that nobody has are too, has a reason of its own: however fast the guesses
// come, the history tells that there were many.
func (s *Service) refuseSignIn(ctx context.Context, asked string, from authz.Principal, a account, waits bool) error {
	if a.Tenant != "" {
		from.Tenant = a.Tenant
	}
	reason := reasonCredentials
	if waits {
		reason = reasonSlowed
	}
	return s.refuseAbout(ctx, asked, from, audit.UserSignedIn, audit.UserResource, reason, errSignIn)
}

// errWaits stays inside: the account was guessed at meanwhile.
var errWaits = errors.New("the account waits after failures")

// beginSession signs in who knows the password of an account, unless that waits by
// now. Error: errWaits.
func (s *Service) beginSession(ctx context.Context, from authz.Principal, l login) (Tokens, error) {
	now, asked := s.now().UTC(), s.emailHash(l.row.Email)
	n := sessionName{l.User, authz.NewID(sessionIDPrefix)}
	refresh, selector, secretHash := s.newRefresh(nil)
	row := sessionRow{l.Tenant, now, now, now.Add(sessionLifetime), selector, secretHash}
	e := audit.Event{
		Type: audit.UserSignedIn, Outcome: audit.Success, Principal: l.as(from),
		Resource: audit.Resource{Type: audit.SessionResource, ID: n.ID},
	}
	err := s.commit(ctx, e, func(tx store.Tx, _ *audit.Event) error {
		var user userRow
		if found, err := s.get(tx, userKey(l.account), &user); err != nil {
			return err
		} else if !found || user.Password != l.row.Password { // changed meanwhile
			return refuse(reasonCredentials, errSignIn)
		}
		if waits, err := s.waits(tx, asked, now); err != nil || waits {
			return cmp.Or(err, errWaits)
		}
		return errors.Join(s.forget(tx, asked), s.makeRoom(tx, l.User, now), s.put(tx, sessionKey(n), row), s.put(tx, selectorKey(selector), n))
	})
	if err != nil {
		return Tokens{}, err
	}
	return s.tokens(n, row, refresh, now)
}

// makeRoom removes a user's expired sessions, and the oldest of too many.
func (s *Service) makeRoom(tx store.Tx, user string, now time.Time) error {
	live, err := s.sessionsOf(tx, user)
	if err != nil {
		return err
	}
	for i, one := range live {
		if !now.Before(one.row.ExpiresAt) || i+maxSessions <= len(live) {
			err = errors.Join(err, s.endSession(tx, one.name, one.row))
		}
	}
	return err
}

type namedSession struct {
	name sessionName
	row  sessionRow
}

// sessionsOf reads a user's sessions, the oldest first.
func (s *Service) sessionsOf(r store.Reader, user string) (all []namedSession, err error) {
	prefix := sessionsPrefix(user)
	var bad error
	err = r.Scan(store.Prefix(prefix), func(key, value []byte) bool {
		one := namedSession{name: sessionName{user, string(key[len(prefix):])}}
		if bad = s.decode(key, value, &one.row); bad != nil {
			return false
		}
		all = append(all, one)
		return true
	})
	slices.SortFunc(all, func(a, b namedSession) int {
		return cmp.Or(a.row.CreatedAt.Compare(b.row.CreatedAt), cmp.Compare(a.name.ID, b.name.ID))
	})
	return all, errors.Join(err, bad)
}

func (s *Service) endSession(tx store.Tx, n sessionName, row sessionRow) error {
	return errors.Join(tx.Delete(sessionKey(n)), tx.Delete(selectorKey(row.Selector)))
}

// endSessions ends a user's sessions but the one to keep, and says how many.
func (s *Service) endSessions(tx store.Tx, user, keep string) (ended int, err error) {
	all, err := s.sessionsOf(tx, user)
	for _, one := range all {
		if one.name.ID != keep {
			ended++
			err = errors.Join(err, s.endSession(tx, one.name, one.row))
		}
	}
	return ended, err
}

// presented is what a refresh token came to.
type presented struct {
	raw  []byte
	name sessionName
	row  sessionRow
	old  bool // it was used before
}

// present reads the session of a refresh token. Error: errNoSession.
func (s *Service) present(r store.Reader, token string, now time.Time) (p presented, err error) {
	if p.raw = parseToken(refreshPrefix, token, refreshBytes); p.raw == nil {
		return p, errNoSession
	}
	selector, secretHash := s.refreshHashes(p.raw)
	if _, err := s.get(r, selectorKey(selector), &p.name); err != nil {
		return p, err
	}
	found, err := s.get(r, sessionKey(p.name), &p.row)
	if err == nil && (!found || !now.Before(p.row.ExpiresAt)) {
		err = errNoSession
	}
	p.old = subtle.ConstantTimeCompare([]byte(secretHash), []byte(p.row.Secret)) == 0
	return p, err
}

func (p presented) account() account { return account{p.row.Tenant, p.name.User} }

// Refresh returns new tokens for a refresh token, which is used up by it. A
// token that was used before ends its session. Errors: fault.Unauthenticated,
// fault.Unavailable.
func (s *Service) Refresh(ctx context.Context, from authz.Principal, refreshToken string) (Tokens, error) {
	now := s.now().UTC()
	raw := parseToken(refreshPrefix, refreshToken, refreshBytes)
	if raw == nil {
		return Tokens{}, s.refuseStranger(ctx, from, audit.SessionRefreshed, audit.SessionResource, reasonNoSession, errNoSession)
	}
	refresh, _, secretHash := s.newRefresh(raw[:selectorBytes])
	var p presented
	err := s.redeem(ctx, from, audit.SessionRefreshed, refreshToken, now, func(tx store.Tx, was presented) error {
		p = was
		p.row.LastUsedAt, p.row.Secret = now, secretHash
		return s.put(tx, sessionKey(p.name), p.row)
	})
	if err != nil {
		return Tokens{}, fmt.Errorf("refreshing a session: %w", err)
	}
	return s.tokens(p.name, p.row, refresh, now)
}

// SignOutRefresh ends the session of a refresh token. Errors as of Refresh.
func (s *Service) SignOutRefresh(ctx context.Context, from authz.Principal, refreshToken string) error {
	err := s.redeem(ctx, from, audit.UserSignedOut, refreshToken, s.now(), func(tx store.Tx, p presented) error {
		return s.endSession(tx, p.name, p.row)
	})
	if err != nil {
		return fmt.Errorf("signing out: %w", err)
	}
	return nil
}

// redeem makes a change that the bearer of a refresh token asks for. A token
// that was used before ends its session instead.
func (s *Service) redeem(ctx context.Context, from authz.Principal, t audit.EventType, token string, now time.Time,
	change func(store.Tx, presented) error) error {
	reused := false
	err := s.store.Update(ctx, func(tx store.Tx) error {
		reused = false
		p, err := s.present(tx, token, now)
		if err != nil {
			return err
		}
		e := audit.Event{
			Type: t, Outcome: audit.Success, Principal: p.account().as(from),
			Resource: audit.Resource{Type: audit.SessionResource, ID: p.name.ID},
		}
		if reused = p.old; reused {
			e.Type, e.Outcome = audit.SessionRefreshed, audit.Denied
			e.Attributes = map[string]string{audit.AttributeReason: reasonReused}
			err = s.endSession(tx, p.name, p.row)
		} else {
			err = change(tx, p)
		}
		_, failed := s.guard.Append(tx, e)
		return errors.Join(err, failed)
	})
	switch {
	case errors.Is(err, errNoSession):
		return s.refuseStranger(ctx, from, t, audit.SessionResource, reasonNoSession, errNoSession)
	case err == nil && reused:
		return errNoSession
	}
	return err
}

// SignOut ends the caller's session. Errors: fault.Forbidden, fault.Unavailable.
func (s *Service) SignOut(ctx context.Context, p Caller) error {
	if err := s.guard.Authorize(ctx, p.Principal, authz.SignOut); err != nil {
		return err
	}
	err := s.end(ctx, audit.UserSignedOut, p.Principal, p.Session)
	if errors.Is(err, fault.NotFound) {
		return nil // it ended meanwhile, which is what was asked for
	}
	return err
}

// EndSession ends a session of the caller, the current one too. Errors:
// fault.Forbidden, fault.NotFound, fault.Unavailable.
func (s *Service) EndSession(ctx context.Context, p Caller, id string) error {
	if err := s.guard.Authorize(ctx, p.Principal, authz.EndSession); err != nil {
		return err
	}
	return s.end(ctx, audit.SessionEnded, p.Principal, id)
}

func (s *Service) end(ctx context.Context, t audit.EventType, p authz.Principal, id string) error {
	now := s.now()
	e := audit.Event{Type: t, Outcome: audit.Success, Principal: p, Resource: audit.Resource{Type: audit.SessionResource}}
	if authz.ValidID(sessionIDPrefix, id) {
		e.Resource.ID = id
	}
	err := s.commit(ctx, e, func(tx store.Tx, e *audit.Event) error {
		n := sessionName{p.ID, e.Resource.ID}
		var row sessionRow
		if found, err := s.get(tx, sessionKey(n), &row); err != nil {
			return err
		} else if !found || !now.Before(row.ExpiresAt) {
			return refuse(reasonNoSession, errSessionGone)
		}
		return s.endSession(tx, n, row)
	})
	if err != nil {
		return fmt.Errorf("ending a session: %w", err)
	}
	return nil
}

var errSessionGone = fault.New(fault.NotFound, "there is no such session: list the sessions for those there are")

// Sessions returns the caller's sessions, the oldest first. Errors:
// fault.Forbidden, fault.Unavailable.
func (s *Service) Sessions(ctx context.Context, p Caller) ([]Session, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	if err := s.guard.Admit(ctx, p.Principal, authz.ListSessions); err != nil {
		return nil, err
	}
	var all []namedSession
	err := s.store.View(ctx, func(r store.Reader) (err error) {
		all, err = s.sessionsOf(r, p.ID)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("listing sessions: %w", err)
	}
	now := s.now()
	list := []Session{}
	for _, one := range all {
		if now.Before(one.row.ExpiresAt) {
			list = append(list, Session{one.name.ID, one.name.ID == p.Session, one.row.CreatedAt, one.row.LastUsedAt, one.row.ExpiresAt})
		}
	}
	err = s.guard.Record(ctx, audit.Event{
		Type: audit.SessionListed, Outcome: audit.Success, Principal: p.Principal,
		Resource:   audit.Resource{Type: audit.SessionResource},
		Attributes: map[string]string{"count": strconv.Itoa(len(list))},
	})
	if err != nil {
		return nil, err
	}
	return list, nil
}
