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

// New returns a log that can serve as the store's commit hook but has no store and no key yet.
// [Log.Use] sets both. There are two steps because the key is in the store, and the store needs its
// hook when it is opened.
func New(now func() time.Time) *Log {
	ch := new(Chain)
	d := newDetector(ch)
	return &Log{now: now, chain: ch, rollbacks: d, heads: heads{chain: ch, rollbacks: d}}
}

var errNotEquipped = errors.New("the log has no key yet")

// Log writes the entries of one deployment's chain.
type Log struct {
	chain   *Chain
	signer  *dualsig.PrivateKey
	keyID   string
	public  string // base64 of the signer's public key
	now     func() time.Time
	batches atomic.Bool // see [SignBatches]

	heads     heads
	rollbacks *Detector
	spare     []byte // buffer for the rows of a commit, reused by the next commit

	onAcceptance func(ctx context.Context) // called after a rollback is accepted; nil: not set
}

// Use sets the store, the signing key and the id of the chain. It must be called once, before the
// first event. Error: fault.Internal when the stored head is not the last entry, or when that entry
// is not signed with this key.
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

// Ready returns nil when an entry could be written now. Callers ask before they look anything up
// for a request, so that no work is done that cannot be recorded.
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

// Halt makes [Log.Ready], [Log.Append] and every commit fail with fault.Unavailable. The halt ends
// when Halt is called with nil or, if the reason is a [RollbackError], when the loss is accepted.
func (l *Log) Halt(reason error) { l.rollbacks.Halt(reason) }

// HaltedBy returns why the log takes no entries. It returns nil while the log takes entries.
func (l *Log) HaltedBy() error { return l.rollbacks.HaltedBy() }

// ChainID returns the id of the chain, as its first entry names it.
func (l *Log) ChainID() string { return l.chain.chainID }

// Fingerprint returns the fingerprint of the log's chain, as the function [Fingerprint] computes
// it.
func (l *Log) Fingerprint() string { return Fingerprint(l.chain.chainID, l.chain.key.Bytes()) }

// Append adds the event to the caller's transaction. Errors: fault.Unavailable while the log takes
// no entries, and fault.Internal when the tenant's part of the log is damaged. The tenant's head is
// checked here, so damage fails this caller and not everyone whose events share the commit.
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
	r := new(Receipt) // new for each run: a closure that runs again appends again
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

// Signing selects what one signature of the log covers.
type Signing string

// The modes. One log may contain entries of both, and the mode may change at any time.
const (
	SignEntries Signing = "entry" // each entry has its own signature
	SignBatches Signing = "batch" // the entries of one commit share one, over their tree's root
)

// SetSigning sets how commits are signed from now on. The zero value means [SignEntries].
func (l *Log) SetSigning(s Signing) { l.batches.Store(s == SignBatches) }
