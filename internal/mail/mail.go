// Package mail delivers the product's mails: their rows in an outbox, and the transports that empty
// it.
//
// # Model
//
// A [Message] says what happened and to whom, and carries the token of that mail. [Outbox.Prepare]
// seals it under the deployment's wrapping key. [Pending.Put] stores it in the transaction of the
// change that it reports, so there is a mail exactly if there is that change. [Outbox.Run] renders
// the stored mail, hands it to a [Transport] and deletes it. No request waits for a mail server.
//
// # Invariants
//
//   - A stored mail is sent as package outbox says: at least once, and a second time only under the
//     same Message-ID.
//   - Address and token are in the database as ciphertext only, and in no log line, error or
//     metric. Those identify mails by id.
//   - A text contains nothing that a user wrote, but for the organisation and the inviter in an
//     invitation: one short line each, of which nothing makes a link. It links only to the configured
//     public URL, and no header but To has anything of a user.
//
// The package makes no tokens and knows no users. It reports a mail that could not be delivered
// only in the log and in [Outbox.Stats].
package mail

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/outbox"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Outbox keeps mails until they are sent. It is safe for concurrent use.
type Outbox struct {
	*outbox.Outbox
	keys *keyring.Ring
	now  func() time.Time
}

// Stats says how the sending of mails goes.
type Stats = outbox.Stats

const (
	firstRetry, lastRetry = time.Second, time.Hour // the wait after a failure doubles from first to last
	sendTimeout           = 30 * time.Second
	parallel              = 4 // mails sent at the same time
)

// wait returns the time to the next attempt after some that failed.
func wait(failed int) time.Duration {
	if failed > 12 { // beyond this, the doubled second exceeds an hour
		return lastRetry
	}
	return min(firstRetry<<(failed-1), lastRetry)
}

// NewOutbox returns the outbox of a store. A nil now means time.Now.
func NewOutbox(s store.Store, keys *keyring.Ring, now func() time.Time) *Outbox {
	if now == nil {
		now = time.Now
	}
	return &Outbox{outbox.New(outbox.Config{
		Store: s, Noun: "mail", Retrying: "a mail could not be sent; retrying", GivingUp: "giving up on a mail", Rows: rowPrefix, Attempts: "mail-attempt/",
		Timeout: sendTimeout, Parallel: parallel, Wait: wait, Longest: lastRetry, Now: now,
	}), keys, now}
}

// Pending is a mail that is sealed and not stored yet.
type Pending struct{ key, row []byte }

// rowPrefix comes before the mail's id. A row consists of the version of the wrapping key (four
// bytes, big endian) and the sealed message, which is bound to the row's key.
const (
	rowPrefix = "mail/"
	idPrefix  = "mail"
)

func contextOf(key []byte) string { return string(key) }

// Prepare seals a message. It stores nothing; [Pending.Put] does, in the caller's transaction.
// Error: fault.Unavailable if the KMS or the store does not answer.
func (o *Outbox) Prepare(ctx context.Context, m Message) (*Pending, error) {
	if _, known := templates[m.Kind]; !known {
		return nil, fmt.Errorf("preparing a mail: there is no kind %q", m.Kind)
	}
	keys, err := o.keys.Current(ctx, authz.SystemTenant)
	if err != nil {
		return nil, fmt.Errorf("preparing a mail: %w", err)
	}
	plain, err := json.Marshal(stored{m.Kind, m.To, m.Token, m.Invitation, o.now().UTC()})
	if err != nil {
		return nil, fmt.Errorf("preparing a mail: %w", err)
	}
	defer secret.Bytes(plain).Zero()
	key := []byte(rowPrefix + authz.NewID(idPrefix))
	blob, err := envelope.SealKey(keys.Wrapping, contextOf(key), plain)
	if err != nil {
		return nil, fmt.Errorf("preparing a mail: %w", err)
	}
	return &Pending{key: key, row: encodeRow(keys.Version, blob)}, nil
}

// Put stores the mail. After the commit, the caller calls [outbox.Outbox.Notify], so the mail is sent at
// once.
func (p *Pending) Put(tx store.Tx) error { return tx.Put(p.key, p.row) }

func encodeRow(version uint32, blob []byte) []byte {
	return append(binary.BigEndian.AppendUint32(nil, version), blob...)
}

func decodeRow(row []byte) (version uint32, blob []byte, ok bool) {
	if len(row) < 4 {
		return 0, nil, false
	}
	return binary.BigEndian.Uint32(row), row[4:], true
}
