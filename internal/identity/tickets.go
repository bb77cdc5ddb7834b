package identity

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"strconv"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/mail"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/store"
)

// ticketKind is what a mailed token is good for.
type ticketKind string

const (
	verifyTicket ticketKind = "verify"
	resetTicket  ticketKind = "reset"
	inviteTicket ticketKind = "invite"
)

// lifetimes of tickets.
var lifetimes = map[ticketKind]time.Duration{
	verifyTicket: 48 * time.Hour,
	resetTicket:  time.Hour,
	inviteTicket: 7 * 24 * time.Hour,
}

// mailInterval is how long an address is not mailed the same kind of ticket
// again, so that nobody's mailbox can be filled. Anybody can ask for a reset,
// and a newer token replaces the older: resetInterval is how long that one
// counts whatever others ask for.
const (
	mailInterval  = time.Minute
	resetInterval = 15 * time.Minute
)

// ErrTicket is the one answer to a mailed token that is not good for what it
// is presented for: unknown, used, replaced, expired or of another kind. It is
// a fault.Invalid and writes no entry.
var ErrTicket = fault.New(fault.Invalid, "the token is not valid, or not any more: request a new one")

// ticketRow is a ticket under the hash of its token. A subject, which is a user
// or an invitation, has at most one of a kind: that one's hash is a row too.
type ticketRow struct {
	account             // User is an invitation's id when the kind is invite
	CreatedAt time.Time `json:"created_at"`
	ExpiresAt time.Time `json:"expires_at"`
}

func ticketKey(k ticketKind, hash string) []byte {
	return []byte("ticket/hash/" + string(k) + "/" + hash)
}

func ticketOfKey(k ticketKind, subject string) []byte {
	return []byte("ticket/of/" + string(k) + "/" + subject)
}

// ticket is one that is not stored yet.
type ticket struct {
	kind        ticketKind
	token, hash string
	row         ticketRow
}

const tokenBytes = 32

// randomToken returns prefix and n random bytes in base32.
func randomToken(prefix string, n int) (token string, raw []byte) {
	raw = make([]byte, n)
	_, _ = rand.Read(raw) // never fails
	return prefix + encoding.EncodeToString(raw), raw
}

// parseToken returns the n bytes of a token in its one spelling, and nil for
// anything else.
func parseToken(prefix, token string, n int) []byte {
	body, ok := strings.CutPrefix(token, prefix)
	if !ok || len(body) != encoding.EncodedLen(n) {
		return nil
	}
	raw, err := encoding.DecodeString(body)
	if err != nil || len(raw) != n || encoding.EncodeToString(raw) != body {
		return nil
	}
	return raw
}

func (k ticketKind) prefix() string { return "lk_" + string(k) + "_" }

func (s *Service) ticketHash(k ticketKind, raw []byte) string {
	return s.keyedHash("latticekeep/ticket/"+string(k)+"/v1", raw)
}

// newTicket makes a ticket for a subject of a tenant.
func (s *Service) newTicket(k ticketKind, subject account) *ticket {
	token, raw := randomToken(k.prefix(), tokenBytes)
	now := s.now().UTC()
	return &ticket{k, token, s.ticketHash(k, raw), ticketRow{subject, now, now.Add(lifetimes[k])}}
}

// putTicket stores t in the place of its subject's former one.
func (s *Service) putTicket(tx store.Tx, t *ticket) error {
	return errors.Join(s.dropTicket(tx, t.kind, t.row.User),
		s.put(tx, ticketOfKey(t.kind, t.row.User), t.hash), s.put(tx, ticketKey(t.kind, t.hash), t.row))
}

// dropTicket makes a subject's ticket worthless.
func (s *Service) dropTicket(tx store.Tx, k ticketKind, subject string) error {
	var hash string
	found, err := s.get(tx, ticketOfKey(k, subject), &hash)
	if err != nil || !found {
		return err
	}
	return errors.Join(tx.Delete(ticketKey(k, hash)), tx.Delete(ticketOfKey(k, subject)))
}

func (s *Service) dropTickets(tx store.Tx, user string) error {
	return errors.Join(s.dropTicket(tx, verifyTicket, user), s.dropTicket(tx, resetTicket, user))
}

// findTicket returns whom a token is for. Error: ErrTicket.
func (s *Service) findTicket(r store.Reader, k ticketKind, token string, now time.Time) (account, error) {
	raw := parseToken(k.prefix(), token, tokenBytes)
	if raw == nil {
		return account{}, ErrTicket
	}
	var row ticketRow
	found, err := s.get(r, ticketKey(k, s.ticketHash(k, raw)), &row)
	if err == nil && (!found || !now.Before(row.ExpiresAt)) {
		err = ErrTicket
	}
	return row.account, err
}

// recent reports whether the subject's ticket was made a moment ago.
func (s *Service) recent(r store.Reader, k ticketKind, subject string, now time.Time) (bool, error) {
	interval := mailInterval
	if k == resetTicket {
		interval = resetInterval
	}
	var hash string
	var row ticketRow
	_, err1 := s.get(r, ticketOfKey(k, subject), &hash)
	found, err2 := s.get(r, ticketKey(k, hash), &row) // read in any case: the same work for an account that has none
	return found && now.Before(row.CreatedAt.Add(interval)), errors.Join(err1, err2)
}

// VerifyEmail notes that mail to a user's address arrives. Errors: ErrTicket,
// fault.Unavailable.
func (s *Service) VerifyEmail(ctx context.Context, from authz.Principal, token string) error {
	now := s.now()
	err := s.commit(ctx, userEvent(audit.EmailVerified, from), func(tx store.Tx, e *audit.Event) error {
		a, err := s.findTicket(tx, verifyTicket, token, now)
		if err != nil {
			return err
		}
		row, err := s.mustUser(tx, a)
		if err != nil {
			return err
		}
		*e = userEvent(audit.EmailVerified, a.as(from))
		row.Verified = true
		return errors.Join(s.put(tx, userKey(a), row), s.dropTicket(tx, verifyTicket, a.User))
	})
	if err != nil {
		return fmt.Errorf("verifying an e-mail address: %w", err)
	}
	return nil
}

// mustUser reads a user that a ticket or a session names. Error: ErrTicket when
// it is gone, with which its tickets went too.
func (s *Service) mustUser(r store.Reader, a account) (row userRow, err error) {
	found, err := s.get(r, userKey(a), &row)
	if err == nil && !found {
		err = ErrTicket
	}
	return row, err
}

// ResendVerification mails the user a new token, unless its address is verified
// or it was mailed one a moment ago. Errors: fault.Forbidden, fault.Unavailable.
func (s *Service) ResendVerification(ctx context.Context, p Caller) error {
	if err := s.guard.Admit(ctx, p.Principal, authz.ResendVerification); err != nil {
		return err
	}
	a := accountOf(p.Principal)
	var user userRow
	err := s.store.View(ctx, func(r store.Reader) (err error) {
		_, err = s.get(r, userKey(a), &user)
		return err
	})
	if err != nil {
		return fmt.Errorf("reading a user: %w", err)
	}
	t := s.newTicket(verifyTicket, a)
	post, err := s.outbox.Prepare(ctx, mail.Message{Kind: mail.VerifyEmail, To: user.Email, Token: t.token})
	if err != nil {
		return fmt.Errorf("preparing a mail: %w", err)
	}
	err = s.commit(ctx, userEvent(audit.VerificationRequested, p.Principal), func(tx store.Tx, e *audit.Event) error {
		var row userRow
		found, err1 := s.get(tx, userKey(a), &row)
		recent, err2 := s.recent(tx, verifyTicket, a.User, t.row.CreatedAt)
		if err := errors.Join(err1, err2); err != nil {
			return err
		}
		if !found {
			return refuse(reasonNoSession, errNoSession)
		}
		send := !row.Verified && !recent
		e.Attributes = map[string]string{"sent": strconv.FormatBool(send)}
		if !send {
			return nil
		}
		return errors.Join(s.putTicket(tx, t), post.Put(tx))
	})
	if err != nil {
		return fmt.Errorf("requesting a verification: %w", err)
	}
	s.outbox.Notify()
	return nil
}

// RequestPasswordReset mails the user of an address a token that sets a new
// password. For an address without an account, and for one that was mailed a
// moment ago, it does the same work and drops the mail; that is recorded like
// the refusal of a stranger. Error: fault.Unavailable.
func (s *Service) RequestPasswordReset(ctx context.Context, from authz.Principal, email string) error {
	if err := s.guard.Ready(ctx); err != nil {
		return err
	}
	canonical, err := canonicalEmail(email)
	if err != nil {
		canonical = "" // nobody's
	}
	var l login
	var recent bool
	now := s.now()
	err = s.store.View(ctx, func(r store.Reader) (err error) {
		var err2 error
		l, err = s.findLogin(r, canonical)
		recent, err2 = s.recent(r, resetTicket, l.User, now)
		return errors.Join(err, err2)
	})
	if err != nil {
		return fmt.Errorf("looking up an account: %w", err)
	}
	t := s.newTicket(resetTicket, l.account)
	message := mail.Message{Kind: mail.ResetPassword, Token: t.token}
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
	e.Principal.Tenant = l.Tenant // a stranger, but the tenant's own history
	err = s.commit(ctx, e, func(tx store.Tx, _ *audit.Event) error {
		var row userRow
		found, err1 := s.get(tx, userKey(l.account), &row)
		recent, err2 := s.recent(tx, resetTicket, l.User, now)
		if err := errors.Join(err1, err2); err != nil {
			return err
		}
		if !found || recent { // meanwhile
			return refuse(reasonUnknown, errUnsent)
		}
		return errors.Join(s.putTicket(tx, t), post.Put(tx))
	})
	if err != nil && !errors.Is(err, errUnsent) {
		return fmt.Errorf("requesting a password reset: %w", err)
	}
	s.outbox.Notify()
	return nil
}

// errUnsent stays inside: all requests of a reset are answered alike.
var errUnsent = errors.New("the account is gone, or was mailed a moment ago")

// ResetPassword gives the user of a mailed token a new password and ends all
// its sessions. If the address was not verified it is now; until then the
// account can have made no API key and no invitation. Errors: fault.Invalid,
// which ErrTicket is one of, fault.Unavailable.
func (s *Service) ResetPassword(ctx context.Context, from authz.Principal, token string, next secret.Bytes) error {
	if err := checkPassword(next); err != nil {
		return err
	}
	now := s.now()
	var l login
	err := s.store.View(ctx, func(r store.Reader) error { // before the work of hashing
		a, err := s.findTicket(r, resetTicket, token, now)
		if err != nil {
			return err
		}
		l, err = s.readLogin(r, a)
		return err
	})
	if err != nil {
		return fmt.Errorf("resetting a password: %w", err)
	}
	err = s.setPassword(ctx, userEvent(audit.PasswordReset, l.as(from)), l, next, "", func(tx store.Tx, row *userRow) (map[string]string, error) {
		if _, err := s.findTicket(tx, resetTicket, token, now); err != nil || row.Verified {
			return nil, err
		}
		row.Verified = true
		return map[string]string{"email_verified": "true"}, s.dropTicket(tx, verifyTicket, l.User)
	})
	if err != nil {
		return fmt.Errorf("resetting a password: %w", err)
	}
	return nil
}

// setPassword replaces a user's password and ends its sessions but one. In the
// transaction, also comes first and may refuse, change the user's row and add
// attributes to the entry.
func (s *Service) setPassword(ctx context.Context, e audit.Event, l login, next secret.Bytes, keep string,
	also func(store.Tx, *userRow) (map[string]string, error)) error {
	hash, err := s.passwords.hash(ctx, next)
	if err != nil {
		return err
	}
	post, err := s.outbox.Prepare(ctx, mail.Message{Kind: mail.PasswordChanged, To: l.row.Email})
	if err != nil {
		return err
	}
	id := authz.NewID(passwordIDPrefix)
	err = s.commit(ctx, e, func(tx store.Tx, e *audit.Event) error {
		var row userRow
		found, err := s.get(tx, userKey(l.account), &row)
		if err != nil {
			return err
		}
		attributes, err := also(tx, &row)
		if err != nil {
			return err
		}
		if !found || row.Password != l.row.Password {
			return refuse(reasonPassword, errWrongPassword)
		}
		ended, err := s.endSessions(tx, l.User, keep)
		if err != nil {
			return err
		}
		e.Attributes = map[string]string{"sessions_ended": strconv.Itoa(ended)}
		maps.Copy(e.Attributes, attributes)
		former := row.Password
		row.Password = id
		return errors.Join(s.forget(tx, s.emailHash(l.row.Email)), s.forget(tx, l.User), s.dropTicket(tx, resetTicket, l.User), tx.Delete(passwordKey(l.User, former)),
			s.put(tx, passwordKey(l.User, id), hash), s.put(tx, userKey(l.account), row), post.Put(tx))
	})
	if err != nil {
		return err
	}
	s.outbox.Notify()
	return nil
}

// ChangePassword replaces the password of a user who knows the current one;
// its other sessions end. Errors: fault.Invalid, fault.Forbidden for a wrong
// current password, fault.Conflict, fault.Unavailable.
func (s *Service) ChangePassword(ctx context.Context, p Caller, current, next secret.Bytes) error {
	if err := s.guard.Admit(ctx, p.Principal, authz.ChangePassword); err != nil {
		return err
	}
	if err := checkPassword(next); err != nil {
		return err
	}
	// Counted apart from sign-ins: failures of strangers do not keep out who is in.
	var l login
	var waits bool
	err := s.store.View(ctx, func(r store.Reader) (err error) {
		var err2 error
		l, err = s.readLogin(r, accountOf(p.Principal))
		waits, err2 = s.waits(r, p.ID, s.now())
		return errors.Join(err, err2)
	})
	if err != nil {
		return fmt.Errorf("reading a password: %w", err)
	}
	right, err := s.passwords.check(ctx, l.hash, current)
	if err != nil {
		return fmt.Errorf("checking a password: %w", err)
	}
	now := s.now()
	if !right && !waits {
		if _, err := s.fail(ctx, l.User, now); err != nil {
			return fmt.Errorf("counting a wrong password: %w", err)
		}
	}
	if !right || waits {
		return s.deny(ctx, p.Principal, authz.ChangePassword, reasonPassword, errWrongPassword)
	}
	err = s.setPassword(ctx, userEvent(audit.PasswordChanged, p.Principal), l, next, p.Session,
		func(tx store.Tx, _ *userRow) (map[string]string, error) {
			waits, err := s.waits(tx, l.User, now)
			if err == nil && waits { // guessed at meanwhile
				err = refuse(reasonPassword, errWrongPassword)
			}
			return nil, err
		})
	if err != nil {
		return fmt.Errorf("changing a password: %w", err)
	}
	return nil
}

var errWrongPassword = fault.New(fault.Forbidden, "the current password is wrong: after several failures, wait before trying again")
