package audit

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/store"
)

// New returns a log that can serve as the store's commit hook but has no store
// and no key yet; [Log.Use] gives it both. Two steps, because the key is in
// the store and the store wants its hook when it is opened.
func New(now func() time.Time) *Log {
	ch := new(Chain)
	d := newDetector(ch)
	return &Log{now: now, chain: ch, rollbacks: d, heads: heads{chain: ch, rollbacks: d}}
}

var errNotEquipped = errors.New("the log has no key yet")

// Log takes the entries of the chain of one deployment.
type Log struct {
	chain   *Chain
	signer  *dualsig.PrivateKey
	keyID   string
	public  string // base64 of the signer's public key
	now     func() time.Time
	batches atomic.Bool // [SignBatches]

	heads     heads
	rollbacks *Detector
	spare     []byte // memory of the rows of the last commit, for the next commit

	onAcceptance func(ctx context.Context) // nil: nobody asked to be told
}

// Use must be called once, before the first event. Error: fault.Internal when
// the head that is stored is not the last entry, signed with this key.
func (l *Log) Use(ctx context.Context, s store.Store, signer *dualsig.PrivateKey, chainID string) error {
	l.chain.store, l.chain.key, l.chain.chainID = s, signer.Public(), chainID
	l.signer, l.keyID = signer, signer.Public().ID()
	l.public = base64.StdEncoding.EncodeToString(signer.Public().Bytes())
	head, err := l.chain.verifiedHead(ctx)
	if err != nil {
		return fmt.Errorf("reading the head of the chain: %w", err)
	}
	l.heads.beginAt(head)
	l.rollbacks.seen.Store(&head)
	return nil
}

// Ready reports whether an entry could be written now. It is asked before
// anything is looked up for a caller.
func (l *Log) Ready(ctx context.Context) error {
	if l.rollbacks.suspected.Load() {
		if _, err := l.rollbacks.checkForRollback(ctx); err != nil {
			return err
		}
	}
	if err := l.rollbacks.checkNotHalted(); err != nil {
		return err
	}
	return l.chain.store.Ready(ctx)
}

// Halt makes [Log.Ready], [Log.Append] and every commit fail with fault.Unavailable, until it is
// called with nil or, when the reason is a [RollbackError], until that is accepted.
func (l *Log) Halt(reason error) { l.rollbacks.Halt(reason) }

// HaltedBy returns why the log takes no entries, and nil when it does.
func (l *Log) HaltedBy() error { return l.rollbacks.HaltedBy() }

// ChainID returns the id of the chain, as its first entry names it.
func (l *Log) ChainID() string { return l.chain.chainID }

// Fingerprint returns that of the log's chain.
func (l *Log) Fingerprint() string { return Fingerprint(l.chain.chainID, l.chain.key.Bytes()) }

// Append lets the event join the caller's transaction. Errors: fault.Unavailable
// while the log takes no entries, and fault.Internal when the tenant's part of
// the log is damaged, which so fails this caller and not all that share its
// commit.
func (l *Log) Append(tx store.Tx, e Event) (*Receipt, error) {
	if err := l.rollbacks.checkNotHalted(); err != nil {
		return nil, err
	}
	return l.append(tx, e, nil)
}

func (l *Log) append(tx store.Tx, e Event, a *acceptance) (*Receipt, error) {
	if err := l.heads.checkTenantHead(tx, string(e.Principal.Tenant)); err != nil {
		return nil, fmt.Errorf("reading the tenant's last entry: %w", err)
	}
	r := new(Receipt) // of this run: a closure that runs again appends again
	tx.Enqueue(pending{e, r, a})
	return r, nil
}

// Record writes one event in a transaction of its own.
func (l *Log) Record(ctx context.Context, e Event) error {
	return l.chain.store.Update(ctx, func(tx store.Tx) error {
		_, err := l.Append(tx, e)
		return err
	})
}

// Signing says what one signature of the log covers.
type Signing string

// The modes. Entries of both stand in one log, and a log may change between
// them at any time.
const (
	SignEntries Signing = "entry" // each entry has its own
	SignBatches Signing = "batch" // the entries of one commit share one over the root of their tree
)

// SetSigning decides how the commits from now on are signed. The zero mode is
// [SignEntries].
func (l *Log) SetSigning(s Signing) { l.batches.Store(s == SignBatches) }
