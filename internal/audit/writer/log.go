// Package writer adds entries to the log. A [Log] appends events to transactions and turns them
// into entries in the store's commit hook, a [Detector] halts it when entries are lost, and a
// [Follower] derives tree, summaries and checkpoints from what was committed.
package writer

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/chain"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
)

// New returns a log that can serve as the store's commit hook but has no store and no key yet.
// [Log.Use] sets both. There are two steps because the key is in the store, and the store needs its
// hook when it is opened. The state st is bound to the log; nil binds nothing.
func New(now func() time.Time, st *state.State) *Log {
	ch := new(chain.Chain)
	d := newDetector(ch)
	return &Log{Now: now, state: st, Chain: ch, Detector: d, heads: heads{chain: ch, detector: d}}
}

var errNotEquipped = errors.New("the log has no key yet")

// Log writes the entries of one deployment's chain. Only packages of internal/audit may use its
// exported fields (TestImportsDoNotReachIntoTheLog): services go through a guard or a reader.
type Log struct {
	Chain   *chain.Chain
	signer  *dualsig.PrivateKey
	keyID   string
	public  string // base64 of the signer's public key
	Now     func() time.Time
	batches atomic.Bool // see [SignBatches]

	heads      heads
	denials    denials       // while the disk is full
	state      *state.State  // nil: the log stands alone
	stateEpoch atomic.Uint64 // epoch of the log when the state was read
	Detector   *Detector
	spare      []byte // buffer for the rows of a commit, reused by the next commit

	OnAcceptance func(ctx context.Context) // called after a rollback is accepted; nil: not set
}

// Use sets the store, the signing key and the id of the chain. It must be called once, before the
// first event. Error: fault.Internal when the stored head is not the last entry, or when that entry
// is not signed with this key.
func (l *Log) Use(ctx context.Context, s store.Store, signer *dualsig.PrivateKey, chainID string) error {
	l.Chain.Store, l.Chain.Key, l.Chain.ChainID = s, signer.Public(), chainID
	l.signer, l.keyID = signer, signer.Public().ID()
	l.public = base64.StdEncoding.EncodeToString(signer.Public().Bytes())
	head, err := l.Chain.VerifiedHead(ctx)
	if err != nil {
		return fmt.Errorf("reading the head of the chain: %w", err)
	}
	l.heads.beginAt(head)
	l.Detector.seen.Store(&head)
	return nil
}

// BindState gives the state that is bound to the log its key, the deployment's hash key, and reads
// it. It must be called after Use and before the first event, again after an error. Error: fault.Internal when the
// state in the store is not that of the log.
func (l *Log) BindState(ctx context.Context, key []byte) error {
	if l.state == nil {
		return nil
	}
	l.stateEpoch.Store(l.Detector.seen.Load().Epoch)
	return l.state.Use(ctx, l.Chain.Store, key)
}

// BindsState reports whether a state is bound to the log.
func (l *Log) BindsState() bool { return l.state != nil }

// Ready returns nil when an entry could be written now. Callers ask before they look anything up
// for a request, so that no work is done that cannot be recorded.
func (l *Log) Ready(ctx context.Context) error {
	if err := l.CheckHistory(ctx); err != nil {
		return err
	}
	if err := l.state.Halted(); err != nil {
		return err
	}
	return l.Chain.Store.Ready(ctx)
}

// CheckHistory returns the error for callers while the log is halted, and nil otherwise. When entries
// may be lost, it looks first.
func (l *Log) CheckHistory(ctx context.Context) error {
	if l.Detector.suspected.Load() {
		if _, err := l.Detector.CheckForRollback(ctx); err != nil {
			return err
		}
	}
	return l.Detector.CheckNotHalted()
}

// CheckNotHalted returns the error for callers while nobody can be served, and nil otherwise: while
// the log is halted, or a stored row of the deployment itself is not the one that the log commits to.
func (l *Log) CheckNotHalted() error {
	if err := l.Detector.CheckNotHalted(); err != nil {
		return err
	}
	return l.state.Halted()
}

// Halt makes [Log.Ready], [Log.Append] and every commit fail with fault.Unavailable. The halt ends
// when Halt is called with nil or, if the reason is an [audit.RollbackError], when the loss is
// accepted.
func (l *Log) Halt(reason error) { l.Detector.Halt(reason) }

// HaltedBy returns why the log takes no entries. It returns nil while the log takes entries.
func (l *Log) HaltedBy() error { return l.Detector.HaltedBy() }

// ChainID returns the id of the chain, as its first entry names it.
func (l *Log) ChainID() string { return l.Chain.ChainID }

// Fingerprint returns the fingerprint of the log's chain, as the function [audit.Fingerprint]
// computes it.
func (l *Log) Fingerprint() string { return audit.Fingerprint(l.Chain.ChainID, l.Chain.Key.Bytes()) }

// SignCheckpoint returns the signed note of a checkpoint of this log.
func (l *Log) SignCheckpoint(c audit.Checkpoint) ([]byte, error) {
	return audit.SignCheckpoint(c, l.signer)
}

// SignBase returns the row of a base of this log. Error: when the base belongs to another log.
func (l *Log) SignBase(b *audit.Base) ([]byte, error) { return b.Sign(l.signer, l.ChainID()) }

// SignVerified signs the progress of a verification of this log.
func (l *Log) SignVerified(message []byte) ([]byte, error) {
	return l.signer.Sign(audit.VerifiedContext, message)
}

// Append adds the event to the caller's transaction. Errors: fault.Unavailable while the log takes
// no entries, and fault.Internal when the tenant's part of the log is damaged. The tenant's head is
// checked here, so damage fails this caller and not everyone whose events share the commit.
func (l *Log) Append(tx store.Tx, e audit.Event) (*audit.Receipt, error) {
	if err := l.Detector.CheckNotHalted(); err != nil {
		return nil, err
	}
	return l.append(tx, e, nil)
}

func (l *Log) append(tx store.Tx, e audit.Event, a *acceptance) (*audit.Receipt, error) {
	if err := l.heads.checkTenantHead(tx, string(e.Principal.Tenant)); err != nil {
		return nil, fmt.Errorf("reading the tenant's last entry: %w", err)
	}
	r := new(audit.Receipt) // new for each run: a closure that runs again appends again
	tx.Enqueue(pending{e, r, a})
	return r, nil
}

// Record writes one event in a transaction of its own.
func (l *Log) Record(ctx context.Context, e audit.Event) error {
	return l.Chain.Store.Update(ctx, func(tx store.Tx) error {
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

// pending is an event on its way through a commit.
type pending struct {
	audit.Event
	receipt    *audit.Receipt
	acceptance *acceptance // set only for the event that begins an epoch
}

// Newest returns the sequence of the newest entry that this process has written or seen. It reads
// nothing from the store.
func (l *Log) Newest() uint64 {
	var newest uint64
	if p := l.heads.written.latest.Load(); p != nil {
		newest = p.head.Sequence
	}
	if seen := l.Detector.seen.Load(); seen != nil {
		newest = max(newest, seen.Sequence)
	}
	return newest
}

// OldestTime returns the time of the oldest entry that is in the database (see
// [chain.Chain.OldestTime]).
func (l *Log) OldestTime(ctx context.Context) (time.Time, error) { return l.Chain.OldestTime(ctx) }

// StoredEntries returns the number of entries in the database (see [chain.Chain.StoredEntries]).
func (l *Log) StoredEntries(ctx context.Context) (int64, error) { return l.Chain.StoredEntries(ctx) }

// ArchivedTo returns the base of the archived entries without its lists (see [chain.Chain.ArchivedTo]).
func (l *Log) ArchivedTo(ctx context.Context) (*audit.Base, error) {
	return l.Chain.ArchivedTo(ctx, "")
}

// Spared reports whether a full disk lets an event of the log go on: reads and removals, and a few
// denials of each principal. Rows that the service changes without an entry go on, too. It is for
// the store (bolt.Options).
func (l *Log) Spared(e any) bool {
	p, ok := e.(pending)
	switch {
	case !ok:
		return true // a row's change, which is committed with its entry
	case p.Outcome == audit.Success:
		return !p.Type.IsChange()
	}
	return l.denials.take(string(p.Principal.Tenant)+" "+p.Principal.ID, l.Now())
}

// Progress returns the sequence of the newest entry, and the number of entries of each kind that
// this process has committed. The counts are per process, for its metrics; the counts of several
// processes add up. Error: fault.Unavailable.
func (l *Log) Progress(ctx context.Context) (sequence uint64, written map[Kind]uint64, err error) {
	err = l.Chain.Store.View(ctx, func(r store.Reader) error {
		head, err := audit.ReadHead(r)
		if err != nil {
			return err
		}
		sequence = head.Sequence
		p := l.heads.written.latest.Load() // the hook stores the tally before its commit succeeds
		if p == nil {
			return nil
		}
		committed := p.head == head
		if !committed && p.head.Sequence < head.Sequence { // another process has written since, or in its place
			committed, err = l.Chain.HasEntry(r, p.head)
		}
		if written = p.before; committed {
			written = p.after
		}
		return audit.IgnoreDamagedRows(err)
	})
	if err != nil {
		return 0, nil, fmt.Errorf("reading the head of the chain: %w", err)
	}
	return sequence, written, nil
}
