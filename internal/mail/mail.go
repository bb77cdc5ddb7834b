// Package mail delivers the product's mails: an outbox in the store, and the transports that empty
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
//   - A stored mail survives a restart. One of the running replicas sends it, at least once. It is
//     sent twice, under the same Message-ID, only if a process crashes between sending and
//     deleting, or stands still there for longer than a minute. If a replica crashes while it has
//     claimed a mail, another one sends the mail a minute later.
//   - Address and token are in the database as ciphertext only, and in no log line, error or
//     metric. Those identify mails by id.
//   - A text contains nothing that a user wrote (no name, no tenant) and links only to the
//     configured public URL.
//
// The package makes no tokens and knows no users. It reports a mail that could not be delivered
// only in the log and in [Outbox.Stats].
package mail

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"sync"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Outbox keeps mails until they are sent. It is safe for concurrent use.
type Outbox struct {
	store store.Store
	keys  *keyring.Ring
	now   func() time.Time
	wake  chan struct{} // capacity 1

	mu    sync.Mutex // guards stats
	stats Stats
}

// Stats says how the sending of mails goes. The counts are those of this process.
type Stats struct {
	Queued                   int       // mails in the outbox at the last look; from countSize on perhaps more
	Oldest                   time.Time // when the oldest mail was made that this process failed to send; zero for none
	Sent, Postponed, GivenUp uint64    // attempts by result
}

// Stats returns the present state.
func (o *Outbox) Stats() Stats {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.stats
}

func (o *Outbox) note(change func(*Stats)) {
	o.mu.Lock()
	defer o.mu.Unlock()
	change(&o.stats)
}

// NewOutbox returns the outbox of a store. A nil now means time.Now.
func NewOutbox(s store.Store, keys *keyring.Ring, now func() time.Time) *Outbox {
	if now == nil {
		now = time.Now
	}
	return &Outbox{store: s, keys: keys, now: now, wake: make(chan struct{}, 1)}
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
	plain, err := json.Marshal(stored{m.Kind, m.To, m.Token, o.now().UTC()})
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

// Put stores the mail. After the commit, the caller calls [Outbox.Notify], so the mail is sent at
// once.
func (p *Pending) Put(tx store.Tx) error { return tx.Put(p.key, p.row) }

// Notify tells [Outbox.Run] that a mail was stored. It never blocks. Without it the mail is sent
// within a minute.
func (o *Outbox) Notify() {
	select {
	case o.wake <- struct{}{}:
	default: // Run has an unread notice already
	}
}

func encodeRow(version uint32, blob []byte) []byte {
	return append(binary.BigEndian.AppendUint32(nil, version), blob...)
}

func decodeRow(row []byte) (version uint32, blob []byte, ok bool) {
	if len(row) < 4 {
		return 0, nil, false
	}
	return binary.BigEndian.Uint32(row), row[4:], true
}
