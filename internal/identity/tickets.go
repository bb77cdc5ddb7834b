package identity

import (
	"errors"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity/token"
	"github.com/latticekeep/latticekeep/internal/store"
)

// ticketKind is the purpose of a mailed token.
type ticketKind string

const (
	verifyTicket ticketKind = "verify"
	resetTicket  ticketKind = "reset"
	inviteTicket ticketKind = "invite"
)

// lifetimes is how long tickets are valid.
var lifetimes = map[ticketKind]time.Duration{
	verifyTicket: 48 * time.Hour,
	resetTicket:  time.Hour,
	inviteTicket: 7 * 24 * time.Hour,
}

// mailInterval is how long an address is not mailed the same kind of ticket again, so nobody's
// mailbox can be flooded. Anybody can ask for a reset, and a newer token replaces the older one.
// resetInterval is the time in which no new request replaces a reset token.
const (
	mailInterval  = time.Minute
	resetInterval = 15 * time.Minute
)

// ErrTicket is the one answer to a mailed token that is unknown, used, replaced, expired or of
// another kind. It is a fault.Invalid and writes no entry.
var ErrTicket = fault.New(fault.Invalid, "the token is not valid, or not any more: request a new one")

// ticketRow is a ticket, stored under the hash of its token. A subject is a user or an invitation.
// It has at most one ticket of each kind, and another row holds the hash of its token.
type ticketRow struct {
	account             // User is an invitation's id if the kind is invite
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

func (k ticketKind) prefix() string { return "lk_" + string(k) + "_" }

// tickets owns the rows of mailed tokens.
type tickets struct{ *records }

func (s *tickets) ticketHash(k ticketKind, raw []byte) string {
	return s.keyedHash("latticekeep/ticket/"+string(k)+"/v1", raw)
}

// newTicket makes a ticket for a subject of a tenant.
func (s *tickets) newTicket(k ticketKind, subject account) *ticket {
	text, raw := token.New(k.prefix(), tokenBytes)
	now := s.now().UTC()
	return &ticket{k, text, s.ticketHash(k, raw), ticketRow{subject, now, now.Add(lifetimes[k])}}
}

// putTicket stores t in place of its subject's previous one.
func (s *tickets) putTicket(tx store.Tx, t *ticket) error {
	return errors.Join(s.dropTicket(tx, t.kind, t.row.User),
		s.put(tx, ticketOfKey(t.kind, t.row.User), t.hash), s.put(tx, ticketKey(t.kind, t.hash), t.row))
}

// dropTicket makes a subject's ticket worthless.
func (s *tickets) dropTicket(tx store.Tx, k ticketKind, subject string) error {
	var hash string
	found, err := s.get(tx, ticketOfKey(k, subject), &hash)
	if err != nil || !found {
		return err
	}
	return errors.Join(tx.Delete(ticketKey(k, hash)), tx.Delete(ticketOfKey(k, subject)))
}

func (s *tickets) dropTickets(tx store.Tx, user string) error {
	return errors.Join(s.dropTicket(tx, verifyTicket, user), s.dropTicket(tx, resetTicket, user))
}

// findTicket returns the subject of a token. Error: ErrTicket.
func (s *tickets) findTicket(r store.Reader, k ticketKind, mailed string, now time.Time) (account, error) {
	raw := token.Parse(k.prefix(), mailed, tokenBytes)
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
func (s *tickets) recent(r store.Reader, k ticketKind, subject string, now time.Time) (bool, error) {
	interval := mailInterval
	if k == resetTicket {
		interval = resetInterval
	}
	var hash string
	var row ticketRow
	_, err1 := s.get(r, ticketOfKey(k, subject), &hash)
	found, err2 := s.get(r, ticketKey(k, hash), &row) // always read: an account without a ticket must take the same work
	return found && now.Before(row.CreatedAt.Add(interval)), errors.Join(err1, err2)
}
