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
	"github.com/latticekeep/latticekeep/internal/identity/records"
	"github.com/latticekeep/latticekeep/internal/identity/tenant"
	"github.com/latticekeep/latticekeep/internal/identity/token"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Session begins with a sign-in and continues with every refresh.
type Session struct {
	ID         string
	Current    bool // the caller's own session
	CreatedAt  time.Time
	LastUsedAt time.Time // sign-in or newest refresh
	ExpiresAt  time.Time

	Device  string // program and system of the newest use, in a few words; empty if neither is known
	Address string // client's address at the newest use; empty for sessions of earlier releases
}

// Tokens are the two tokens of a session. They are shown once.
type Tokens struct {
	Access         string
	AccessExpires  time.Time
	Refresh        string
	RefreshExpires time.Time // the end of the session; a refresh does not extend it
}

const (
	sessionIDPrefix = "ses"
	sessionLifetime = 7 * 24 * time.Hour
	maxSessions     = 100 // per user; one more ends the oldest
)

// A refresh token has two parts: a selector, which names the session and stays, and a secret, which
// every use replaces. A selector with any secret but the newest means that a token was used twice.
// Somebody has copied it, so the session ends. In this way no used token has to be stored.
const (
	refreshPrefix = "lk_refresh_"
	selectorBytes = 16
	refreshBytes  = selectorBytes + 32
	selectorLabel = "latticekeep/refresh-selector/v1"
	refreshLabel  = "latticekeep/refresh-secret/v1"
)

// sessionRow is a session, stored under its user. Another row maps the hash of its selector to its
// name.
type sessionRow struct {
	Tenant     authz.TenantID `json:"tenant"`
	CreatedAt  time.Time      `json:"created_at"`
	LastUsedAt time.Time      `json:"last_used_at"`
	ExpiresAt  time.Time      `json:"expires_at"`
	Selector   string         `json:"selector"` // hashed, like Secret
	Secret     string         `json:"secret"`
	Device     string         `json:"device,omitempty"` // earlier releases wrote neither this nor Address
	Address    string         `json:"address,omitempty"`
}

// sessionName identifies the row of a session.
type sessionName struct {
	User string `json:"user"`
	ID   string `json:"id"`
}

func sessionsPrefix(user string) []byte { return []byte("session/row/" + user + "/") }

func sessionKey(n sessionName) []byte { return append(sessionsPrefix(n.User), n.ID...) }

func selectorKey(hash string) []byte { return []byte("session/selector/" + hash) }

// sessions owns the rows of sessions.
type sessions struct {
	*deps
	tenants *tenant.Store
	access  *token.Signer
}

// newRefresh returns a refresh token for a selector, and the hashes of both its parts. Without a
// selector it makes a new one.
func (s *sessions) newRefresh(selector []byte) (refresh, selectorHash, secretHash string) {
	_, raw := token.New(refreshPrefix, refreshBytes)
	copy(raw, selector)
	selectorHash, secretHash = s.refreshHashes(raw)
	return token.Format(refreshPrefix, raw), selectorHash, secretHash
}

func (s *sessions) refreshHashes(raw []byte) (selector, secret string) {
	return s.rows.Hash(selectorLabel, raw[:selectorBytes]), s.rows.Hash(refreshLabel, raw[selectorBytes:])
}

// endSurplus ends a user's expired sessions, and the oldest ones if there would be more than
// maxSessions.
func (s *sessions) endSurplus(tx store.Tx, user string, now time.Time) error {
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

// sessionsOf reads a user's sessions, oldest first.
func (s *sessions) sessionsOf(r store.Reader, user string) (all []namedSession, err error) {
	prefix := sessionsPrefix(user)
	var bad error
	err = r.Scan(store.Prefix(prefix), func(key, value []byte) bool {
		one := namedSession{name: sessionName{user, string(key[len(prefix):])}}
		if bad = s.rows.Decode(key, value, &one.row); bad != nil {
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

func (s *sessions) endSession(tx store.Tx, n sessionName, row sessionRow) error {
	return errors.Join(tx.Delete(sessionKey(n)), tx.Delete(selectorKey(row.Selector)))
}

// endSessions ends a user's sessions except keep, and returns how many.
func (s *sessions) endSessions(tx store.Tx, user, keep string) (ended int, err error) {
	all, err := s.sessionsOf(tx, user)
	for _, one := range all {
		if one.name.ID != keep {
			ended++
			err = errors.Join(err, s.endSession(tx, one.name, one.row))
		}
	}
	return ended, err
}

// presented is a refresh token with the session that it belongs to.
type presented struct {
	raw  []byte
	name sessionName
	row  sessionRow
	old  bool // the token was used before
}

// findSession reads the session of a refresh token. Error: errNoSession.
func (s *sessions) findSession(r store.Reader, refresh string, now time.Time) (p presented, err error) {
	if p.raw = token.Parse(refreshPrefix, refresh, refreshBytes); p.raw == nil {
		return p, errNoSession
	}
	selector, secretHash := s.refreshHashes(p.raw)
	if _, err := s.rows.Get(r, selectorKey(selector), &p.name); err != nil {
		return p, err
	}
	found, err := s.rows.Get(r, sessionKey(p.name), &p.row)
	if err == nil && (!found || !now.Before(p.row.ExpiresAt)) {
		err = errNoSession
	}
	p.old = subtle.ConstantTimeCompare([]byte(secretHash), []byte(p.row.Secret)) == 0
	return p, err
}

// findHolder reads the user and the tenant of a session, and reports whether the user exists. All
// tokens of the session are refused when somebody has changed one of these rows, so no token is given
// out then.
func (s *sessions) findHolder(r store.Reader, a account) (user userRow, t tenant.Tenant, found bool, err error) {
	if found, err = s.rows.Get(r, userKey(a), &user); err == nil && found {
		t, err = s.tenants.Read(r, a.Tenant)
	}
	return user, t, found, err
}

func (p presented) account() account { return account{p.row.Tenant, p.name.User} }

// Refresh exchanges a refresh token for new tokens. A token that was used before ends its session.
// Errors: fault.Unauthenticated, fault.Unavailable.
func (s *sessions) Refresh(ctx context.Context, from authz.Principal, refreshToken string) (Tokens, error) {
	now := s.now().UTC()
	raw := token.Parse(refreshPrefix, refreshToken, refreshBytes)
	if raw == nil {
		return Tokens{}, s.refuseStranger(ctx, from, audit.SessionRefreshed, audit.SessionResource, reasonNoSession, errNoSession)
	}
	refresh, _, secretHash := s.newRefresh(raw[:selectorBytes])
	var p presented
	err := s.redeem(ctx, from, audit.SessionRefreshed, refreshToken, now, func(tx store.Tx, was presented) error {
		if _, _, found, err := s.findHolder(tx, was.account()); err != nil {
			return err
		} else if !found {
			return errNoSession
		}
		p = was
		p.row.LastUsedAt, p.row.Secret = now, secretHash
		p.row.Device, p.row.Address = from.Device, from.SourceIP
		return s.rows.Put(tx, sessionKey(p.name), p.row)
	})
	if err != nil {
		return Tokens{}, fmt.Errorf("refreshing a session: %w", err)
	}
	return s.tokens(p.name, p.row, refresh, now)
}

// SignOutRefresh ends the session of a refresh token. Errors as for Refresh.
func (s *sessions) SignOutRefresh(ctx context.Context, from authz.Principal, refreshToken string) error {
	err := s.redeem(ctx, from, audit.UserSignedOut, refreshToken, s.now(), func(tx store.Tx, p presented) error {
		return s.endSession(tx, p.name, p.row)
	})
	if err != nil {
		return fmt.Errorf("signing out: %w", err)
	}
	return nil
}

// redeem makes a change for the bearer of a refresh token. A token that was used before ends its
// session instead.
func (s *sessions) redeem(ctx context.Context, from authz.Principal, t audit.EventType, refresh string, now time.Time,
	change func(store.Tx, presented) error) error {
	reused := false
	err := s.store.Update(ctx, func(tx store.Tx) error {
		reused = false
		p, err := s.findSession(tx, refresh, now)
		if err != nil {
			return err
		}
		e := audit.Event{
			Type: t, Outcome: audit.Success, Principal: p.account().principal(from),
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
	case errors.Is(err, errNoSession), state.IsRefused(err):
		return s.refuseStranger(ctx, from, t, audit.SessionResource, reasonNoSession, errNoSession)
	case err == nil && reused:
		return errNoSession
	}
	return err
}

// SignOut ends the caller's session. Errors: fault.Forbidden, fault.Unavailable.
func (s *sessions) SignOut(ctx context.Context, p Caller) error {
	if err := s.guard.Authorize(ctx, p.Principal, authz.SignOut); err != nil {
		return err
	}
	err := s.end(ctx, audit.UserSignedOut, p.Principal, sessionName{p.ID, p.Session})
	if errors.Is(err, fault.NotFound) {
		return nil // it ended meanwhile, so the caller has what it asked for
	}
	return err
}

// EndSession ends a session of the caller, which may be the current one. Errors: fault.Forbidden,
// fault.NotFound, fault.Unavailable.
func (s *sessions) EndSession(ctx context.Context, p Caller, id string) error {
	if err := s.guard.Authorize(ctx, p.Principal, authz.EndSession); err != nil {
		return err
	}
	return s.end(ctx, audit.SessionEnded, p.Principal, sessionName{p.ID, id})
}

func (s *sessions) end(ctx context.Context, t audit.EventType, p authz.Principal, n sessionName) error {
	now := s.now()
	e := audit.Event{Type: t, Outcome: audit.Success, Principal: p, Resource: audit.Resource{Type: audit.SessionResource}}
	if authz.ValidID(sessionIDPrefix, n.ID) {
		e.Resource.ID = n.ID
	}
	err := s.rows.Commit(ctx, e, func(tx store.Tx, e *audit.Event) error {
		n := sessionName{n.User, e.Resource.ID}
		var row sessionRow
		if found, err := s.rows.Get(tx, sessionKey(n), &row); err != nil {
			return err
		} else if !found || !now.Before(row.ExpiresAt) {
			return records.Refuse(reasonNoSession, errSessionGone)
		}
		return s.endSession(tx, n, row)
	})
	if err != nil {
		return fmt.Errorf("ending a session: %w", err)
	}
	return nil
}

var errSessionGone = fault.New(fault.NotFound, "there is no such session: list the sessions for those there are")

// Sessions returns the caller's sessions, oldest first. Errors: fault.Forbidden, fault.Unavailable.
func (s *sessions) Sessions(ctx context.Context, p Caller) ([]Session, error) {
	ctx, cancel := context.WithTimeout(ctx, records.ReadTimeout)
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
			list = append(list, Session{
				ID: one.name.ID, Current: one.name.ID == p.Session, CreatedAt: one.row.CreatedAt, LastUsedAt: one.row.LastUsedAt, ExpiresAt: one.row.ExpiresAt,
				Device: one.row.Device, Address: one.row.Address,
			})
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

// tokens signs an access token for a session and returns it with the refresh token.
func (s *sessions) tokens(n sessionName, row sessionRow, refresh string, now time.Time) (Tokens, error) {
	access, expires, err := s.access.Sign(n.User, n.ID, now, row.ExpiresAt)
	if err != nil {
		return Tokens{}, err
	}
	return Tokens{access, expires, refresh, row.ExpiresAt}, nil
}

// AuthenticateToken returns the user of an access token. Errors: fault.Unauthenticated for every
// token that is not valid or whose session is over; fault.Unavailable.
func (s *sessions) AuthenticateToken(ctx context.Context, accessToken string) (Caller, error) {
	user, session, err := s.access.Verify(accessToken)
	if err != nil || !authz.ValidID(userIDPrefix, user) || !authz.ValidID(sessionIDPrefix, session) {
		return Caller{}, token.ErrAccess
	}
	n := sessionName{user, session}
	now := s.now()
	var caller Caller
	err = s.store.View(ctx, func(r store.Reader) error {
		var session sessionRow
		if found, err := s.rows.Get(r, sessionKey(n), &session); err != nil {
			return err
		} else if !found || !now.Before(session.ExpiresAt) {
			return token.ErrAccess
		}
		a := account{session.Tenant, n.User}
		user, tenant, found, err := s.findHolder(r, a)
		if err != nil {
			return err
		} else if !found {
			return token.ErrAccess
		}
		limits, err := s.userAccess(r, a, user.Role)
		if err != nil {
			return err
		}
		caller = Caller{
			Principal: authz.Principal{
				Tenant: a.Tenant, Kind: authz.User, ID: a.User, Scopes: user.Role.Scopes(), Access: limits, ReadOnly: tenant.ReadOnly(now),
			},
			Session: n.ID, Limits: tenant.Limits,
		}
		return nil
	})
	if err != nil {
		return Caller{}, fmt.Errorf("looking up a session: %w", err)
	}
	return caller, nil
}
