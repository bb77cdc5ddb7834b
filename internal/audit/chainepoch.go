package audit

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/mod/sumdb/tlog"

	"github.com/latticekeep/latticekeep/internal/store"
)

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

// epochs returns the epochs of the log, ascending, as far as they were accepted;
// the first one always was.
func (ch *Chain) epochs(r store.Reader) ([]epoch, error) {
	head, err := readHead(r)
	if err != nil {
		return nil, err
	}
	epochs, _, err := ch.accepted(r, head)
	return epochs, err
}

// accepted returns the epochs of the database, as far as the entries that begin
// them say so: they are signed. By a row alone whoever replaces the database by an
// older one could accept that himself, and whoever adds one have the entries behind
// it signed as another epoch's. So a row that no entry agrees with is none, and is
// no error: without the row of an epoch that there is, its entries do not fit.
func (ch *Chain) accepted(r store.Reader, head link) (epochs []epoch, losses []acceptedLoss, err error) {
	rows, err := epochRows(r)
	if err != nil {
		return nil, nil, err
	}
	epochs = []epoch{{number: 1, first: 1}}
	for _, row := range rows {
		former := epochs[len(epochs)-1]
		if !row.follows(former) || row.first > head.sequence {
			continue
		}
		loss := row.after(former)
		e, err := readEntry(r, row.first)
		switch {
		case errors.Is(err, errNoEntry):
			base, err := ch.baseIn(r)
			if err != nil && !damaged(err) {
				return nil, nil, err
			}
			if err != nil || base == nil || !slices.Contains(base.epochs, row.epoch) {
				continue // it is not in the archive either
			}
		case damaged(err):
			continue
		case err != nil:
			return nil, nil, err
		case !loss.isOf(e) || !e.verify(ch.key, nil):
			continue
		default:
			loss.anchored, loss.hash = e.number(attributeAnchored), e.Attributes[attributeAnchoredHash]
		}
		epochs, losses = append(epochs, row.epoch), append(losses, loss)
	}
	return epochs, losses, nil
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

// recentRows reads what is read to go on from another process's head, of which most
// tenants' newest entries are, without asking for it again.
type recentRows struct {
	store.Reader
	entries []row // newest first
	memo    memo  // of groups, most of which have several of these
}

// mostRecent is no more than what a scan gets from any store at once.
const mostRecent = 16

// Get implements [store.Reader].
func (r *recentRows) Get(key []byte) ([]byte, error) {
	for _, e := range r.entries {
		if bytes.Equal(e.key, key) {
			return e.value, nil
		}
	}
	return r.Reader.Get(key)
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

// checkSigned fails unless what a row says is signed: by the entry that it names or, when
// that is archived or the row says that there is none, by the base. The memo may be
// nil. Error: errDamagedLog.
func (ch *Chain) checkSigned(r store.Reader, tenant string, p tenantHead, m *memo) error {
	if p.sequence > 0 {
		e, err := storedEntry(r, p.last.sequence)
		switch {
		case err == nil && p.of(e.entry, tenant) && e.verify(ch.key, m):
			return nil
		case err == nil:
			return errDamagedLog
		case !errors.Is(err, errNoEntry):
			return err
		}
	}
	base, err := ch.baseIn(r)
	if err != nil {
		return err
	}
	var archived tenantHead
	if base != nil && base.tenants[tenant] != nil {
		archived = tenantHead{base.tenants[tenant].sequence, base.tenants[tenant].last}
	}
	if archived != p {
		return errDamagedLog
	}
	return nil
}

func (ch *Chain) logState(r store.Reader) (s logState, err error) {
	if s.head, err = readHead(r); err == nil {
		s.epochs, s.losses, err = ch.accepted(r, s.head)
	}
	return s, err
}

// logState is where the log stands in a snapshot.
type logState struct {
	head   link
	epochs []epoch
	losses []acceptedLoss
	seen   Head // by this process before
}

func (s logState) epoch() epoch { return s.epochs[len(s.epochs)-1] }

func (ch *Chain) storedHead(ctx context.Context) (head link, err error) {
	err = ch.store.View(ctx, func(r store.Reader) error {
		head, err = readHead(r)
		return err
	})
	if err == nil && head.sequence == 0 {
		err = errNoCheckpoint
	}
	return head, err
}
