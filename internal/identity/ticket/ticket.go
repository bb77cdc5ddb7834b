// Package ticket keeps the tokens that are mailed to people: each proves once, within its lifetime,
// that its bearer reads the mail of an address. What a ticket is good for is up to its caller.
package ticket

import (
	"errors"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity/records"
	"github.com/latticekeep/latticekeep/internal/identity/token"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Kind is the purpose of a mailed token.
type Kind string

// These are the kinds.
const (
	Verify Kind = "verify"
	Reset  Kind = "reset"
	Invite Kind = "invite"
)

// lifetimes is how long tickets are valid.
var lifetimes = map[Kind]time.Duration{
	Verify: 48 * time.Hour,
	Reset:  time.Hour,
	Invite: 7 * 24 * time.Hour,
}

// MailInterval is how long an address is not mailed the same kind of ticket again, so nobody's
// mailbox can be flooded. Anybody can ask for a reset, and a newer token replaces the older one.
// resetInterval is the time in which no new request replaces a reset token.
const (
	MailInterval  = time.Minute
	resetInterval = 15 * time.Minute
)

// ErrInvalid is the one answer to a mailed token that is unknown, used, replaced, expired or of
// another kind. It is a fault.Invalid and writes no entry.
var ErrInvalid = fault.New(fault.Invalid, "the token is not valid, or not any more: request a new one")

// Subject is the user or the invitation that a ticket is about. It has at most one ticket of each
// kind.
type Subject struct {
	Tenant authz.TenantID `json:"tenant"`
	User   string         `json:"user"` // an invitation's id if the kind is Invite
}

// row is a ticket, stored under the hash of its token. Another row of its subject holds that hash.
type row struct {
	Subject
	CreatedAt time.Time `json:"created_at"`
	ExpiresAt time.Time `json:"expires_at"`
}

func hashKey(k Kind, hash string) []byte { return []byte("ticket/hash/" + string(k) + "/" + hash) }

func subjectKey(k Kind, subject string) []byte {
	return []byte("ticket/of/" + string(k) + "/" + subject)
}

// Ticket is one that is not stored yet.
type Ticket struct {
	Token                string // as mailed
	CreatedAt, ExpiresAt time.Time

	kind    Kind
	hash    string
	subject Subject
}

const tokenBytes = 32

func (k Kind) prefix() string { return "lk_" + string(k) + "_" }

// Store owns the rows of tickets.
type Store struct {
	rows *records.Store
	now  func() time.Time
}

// NewStore returns the tickets that are among rows.
func NewStore(rows *records.Store, now func() time.Time) *Store { return &Store{rows, now} }

func (s *Store) hash(k Kind, raw []byte) string {
	return s.rows.Hash("latticekeep/ticket/"+string(k)+"/v1", raw)
}

// New makes a ticket for a subject.
func (s *Store) New(k Kind, subject Subject) *Ticket {
	text, raw := token.New(k.prefix(), tokenBytes)
	now := s.now().UTC()
	return &Ticket{text, now, now.Add(lifetimes[k]), k, s.hash(k, raw), subject}
}

// Put stores t in place of its subject's previous one.
func (s *Store) Put(tx store.Tx, t *Ticket) error {
	return errors.Join(s.Drop(tx, t.kind, t.subject.User), s.rows.Put(tx, subjectKey(t.kind, t.subject.User), t.hash),
		s.rows.Put(tx, hashKey(t.kind, t.hash), row{t.subject, t.CreatedAt, t.ExpiresAt}))
}

// Drop makes a subject's ticket worthless.
func (s *Store) Drop(tx store.Tx, k Kind, subject string) error {
	var hash string
	found, err := s.rows.Get(tx, subjectKey(k, subject), &hash)
	if err != nil || !found {
		return err
	}
	return errors.Join(tx.Delete(hashKey(k, hash)), tx.Delete(subjectKey(k, subject)))
}

// DropUser makes all tickets of a user worthless.
func (s *Store) DropUser(tx store.Tx, user string) error {
	return errors.Join(s.Drop(tx, Verify, user), s.Drop(tx, Reset, user))
}

// Find returns the subject of a mailed token. Error: ErrInvalid.
func (s *Store) Find(r store.Reader, k Kind, mailed string, now time.Time) (Subject, error) {
	raw := token.Parse(k.prefix(), mailed, tokenBytes)
	if raw == nil {
		return Subject{}, ErrInvalid
	}
	var t row
	found, err := s.rows.Get(r, hashKey(k, s.hash(k, raw)), &t)
	if state.IsRefused(err) || err == nil && (!found || !now.Before(t.ExpiresAt)) {
		err = ErrInvalid
	}
	return t.Subject, err
}

// IsRecent reports whether the subject's ticket was made a moment ago. It does so for rows that
// somebody has changed too: no ticket can replace them.
func (s *Store) IsRecent(r store.Reader, k Kind, subject string, now time.Time) (bool, error) {
	interval := MailInterval
	if k == Reset {
		interval = resetInterval
	}
	var hash string
	var t row
	_, err1 := s.rows.Get(r, subjectKey(k, subject), &hash)
	found, err2 := s.rows.Get(r, hashKey(k, hash), &t) // always read: an account without a ticket must take the same work
	err := errors.Join(err1, err2)
	if state.IsRefused(err) {
		return true, nil
	}
	return found && now.Before(t.CreatedAt.Add(interval)), err
}
