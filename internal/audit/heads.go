package audit

import (
	"bytes"
	"cmp"
	"crypto/sha3"
	"errors"
	"fmt"
	"maps"
	"sync"
	"sync/atomic"

	"golang.org/x/mod/sumdb/tlog"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Several processes may write one log: each has the key, and the store runs their
// hooks one after the other. So the head that a commit finds is the one that this
// process has proposed last, or the one before if that commit failed, or one that
// another process has written since. That is gone on from only when it is signed
// with the log's key and the log still has the newest entry that this process knows
// it to have had, or an epoch was accepted since: then entries may be missing.
// Whatever else is there was put in the place of the log, as an older copy of the
// database, or by hand: nothing is signed on top of it.

// Head is an entry that the store had, and the number of its epoch.
type Head struct {
	link
	epoch uint64
}

func (c Checkpoint) Head() Head {
	return Head{link{c.Sequence, c.Time.UnixMicro(), c.Hash}, c.Epoch}
}

// newer reports whether k comes later in the log than o.
func (k Head) newer(o Head) bool {
	return k.epoch > o.epoch || k.epoch == o.epoch && k.sequence > o.sequence
}

// noteHead keeps the newest entry that the store is known to have had.
func (d *Detector) noteHead(k Head) {
	for {
		before := d.seen.Load()
		if before != nil && !k.newer(*before) || d.seen.CompareAndSwap(before, &k) {
			return
		}
	}
}

// heads is what the hook knows of the head of the log and of the newest entries of tenants. Only the
// hook, which the store runs once at a time, uses the fields of the first block.
type heads struct {
	chain     *Chain
	rollbacks *Detector

	// The heads that the store may show at the next commit, unless another process
	// has written: the one before the last commit, should that have failed, or the
	// one after; and the positions of the tenants that either brought.
	committed, proposed               Head
	committedTenants, proposedTenants map[string]tenantHead
	ownCommits                        int         // how many commits of this process were the last ones
	recent                            *recentRows // of the commit that the hook is in; nil when nobody else has written

	sharedLately atomic.Bool // others have written lately
	knownTenants sync.Map    // by tenant: what it is known to have had
	readable     sync.Map    // tenants whose newest entry could be read once
	written      tally
}

// beginAt forgets all and begins at the head of the log.
func (h *heads) beginAt(head Head) {
	h.committed, h.proposed = head, head
	h.committedTenants, h.proposedTenants = make(map[string]tenantHead), nil
	h.knownTenants.Clear()
	h.readable.Clear()
}

// aloneAfter is after how many commits of this process, none of another between them, it
// counts as the only one that writes.
const aloneAfter = 16

// take returns the head that the commit goes on from, and decides what became of
// the last one of this process, for which the hook may have run more than once. If
// the commit accepts that entries are lost, a says which.
func (h *heads) take(tx store.Tx, a *acceptance) (Head, error) {
	h.recent = nil
	since := *h.rollbacks.seen.Load() // before the head is read: what was seen by now must be there
	head, err := readHead(tx)
	if err != nil {
		return Head{}, err
	}
	now, persisted, foreign := h.proposed, true, false
	switch head {
	case h.proposed.link:
	case h.committed.link:
		now, persisted = h.committed, false
		if _, err := hashOf(tx, head.sequence+1); !errors.Is(err, errNoEntry) {
			return Head{}, cmp.Or(err, error(errDamagedLog)) // of what failed nothing is there
		}
	default:
		foreign = true
		if now, h.recent, err = h.chain.foreignHead(tx, head); err != nil {
			return Head{}, err
		}
		if persisted = h.proposed != h.committed; persisted {
			if persisted, err = h.chain.has(tx, h.proposed.link); err != nil {
				return Head{}, err
			}
		}
		if persisted && !since.newer(h.proposed) {
			since = Head{} // nothing later is known
		}
	}
	if foreign || since.newer(now) {
		if err := h.rollbacks.goesOn(tx, now, since, a); err != nil {
			return Head{}, err
		}
	}
	if persisted {
		h.remember(h.proposedTenants, h.proposed.epoch)
	}
	switch {
	case foreign:
		clear(h.committedTenants) // which others may have moved on
		h.ownCommits = 0
		h.sharedLately.Store(true)
	case persisted:
		maps.Copy(h.committedTenants, h.proposedTenants)
		if h.ownCommits++; h.ownCommits == aloneAfter {
			h.sharedLately.Store(false)
		}
	}
	h.written.settle(persisted)
	h.committed, h.proposed, h.proposedTenants = now, now, nil
	h.rollbacks.noteHead(now)
	return now, nil
}

// foreignHead returns a head that another process has written, or says to have, and the rows
// of the newest entries. It is the first of these, which are asked for as such: a store
// that is far away then knows what to read with the head.
func (ch *Chain) foreignHead(r store.Reader, head link) (Head, *recentRows, error) {
	newest := entryRange
	newest.Reverse = true
	var rows recentRows
	err := r.Scan(newest, func(key, value []byte) bool {
		rows.entries = append(rows.entries, row{bytes.Clone(key), bytes.Clone(value)})
		return len(rows.entries) < mostRecent
	})
	if err != nil {
		return Head{}, nil, fmt.Errorf("reading the newest audit entry: %w", err)
	}
	rows.Reader = r
	e, err := storedEntry(&rows, head.sequence)
	if err != nil || !bytes.Equal(rows.entries[0].key, entryKey(head.sequence)) || e.entry.link() != head || !e.verify(ch.key, &rows.memo) {
		if err == nil || errors.Is(err, errNoEntry) {
			err = errDamagedLog
		}
		return Head{}, nil, err
	}
	number, err := ch.epochNow(r, head)
	return Head{head, number}, &rows, err
}

// goesOn fails when the log does not go on from what it is known to have had. Error:
// fault.Unavailable, with a [RollbackError].
func (d *Detector) goesOn(r store.Reader, head, since Head, a *acceptance) error {
	lost, err := d.chain.lacks(r, head, since)
	switch {
	case err != nil:
		return err
	case lost == nil, a != nil && a.lost.LostTo >= lost.LostTo:
		return nil
	case a != nil:
		return errOneByOne // more is lost than whoever accepts it knew
	}
	d.suspected.Store(true)
	return fault.Wrap(fault.Unavailable, fault.Unavailable.Error(), lost)
}

// memoryPlace is what a [RollbackError] calls what a process has seen itself.
const memoryPlace = "the memory of a replica"

// lacks returns what the log, which ends with the head, lacks of what it is known to
// have had: nil when it goes on from there, or has begun an epoch since, by which
// somebody accepted that entries are lost.
func (ch *Chain) lacks(r store.Reader, head, since Head) (*RollbackError, error) {
	if since.sequence == 0 || since.link == head.link {
		return nil, nil
	}
	if since.sequence <= head.sequence {
		if has, err := ch.has(r, since.link); has || err != nil {
			return nil, err
		}
	}
	if head.epoch > since.epoch {
		return nil, nil
	}
	lost := &RollbackError{LostTo: since.sequence, Hash: since.hash, Epoch: since.epoch, Place: memoryPlace}
	if head.sequence < since.sequence {
		lost.LostFrom = head.sequence + 1
	}
	return lost, nil
}

// has reports whether the log has an entry: in the database, or in the archive if
// the tree says so.
func (ch *Chain) has(r store.Reader, at link) (bool, error) {
	hash, err := hashOf(r, at.sequence)
	if !errors.Is(err, errNoEntry) {
		return err == nil && hash == at.hash, unlessDamaged(err)
	}
	base, err := ch.baseIn(r)
	if err != nil || base == nil || base.Sequence() < at.sequence {
		return false, err
	}
	index, ok := indexOf(base.epochs, at.sequence)
	if !ok {
		return false, nil
	}
	_, newest, err := ch.checkpointIn(r)
	if err != nil || newest.Size <= index {
		return false, err
	}
	leaf, err := tiles{r}.hashes(newest.Size, newest.Root).ReadHashes([]int64{tlog.StoredHashIndex(0, index)})
	if err != nil {
		return false, treeError(err)
	}
	return leaf[0] == tlog.Hash(leafHash(at.hash)), nil
}

// hashOf returns the hash of a stored entry, whoever signed it. Errors: errNoEntry,
// errDamagedLog for a row that is none.
func hashOf(r store.Reader, sequence uint64) (hash [32]byte, err error) {
	row, err := r.Get(entryKey(sequence))
	if err != nil {
		return hash, fmt.Errorf("reading an audit entry: %w", err)
	}
	if row == nil {
		return hash, errNoEntry
	}
	core, _, err := splitRow(row)
	if err != nil {
		return hash, errDamagedLog
	}
	return sha3.Sum256(core), nil
}

// readEpochs are the rows of epochs that were read last, all of which an entry
// agreed with, and the newest of them.
type readEpochs struct {
	rows   []byte
	newest epoch
}

// epochNow returns the number of the epoch that the head is in. The entries that
// begin epochs are read and verified only when the rows are others than before.
func (ch *Chain) epochNow(r store.Reader, head link) (uint64, error) {
	rows, err := epochRows(r)
	if err != nil || len(rows) == 0 {
		return 1, err
	}
	var text []byte
	for _, row := range rows {
		text = append(append(text, row.key...), row.encode()...)
	}
	if c := ch.epochsRead.Load(); c != nil && bytes.Equal(c.rows, text) && c.newest.first <= head.sequence {
		return c.newest.number, nil
	}
	epochs, _, err := ch.accepted(r, head)
	if err != nil {
		return 0, err
	}
	newest := epochs[len(epochs)-1]
	if len(epochs) == len(rows)+1 {
		ch.epochsRead.Store(&readEpochs{text, newest})
	}
	return newest.number, nil
}
