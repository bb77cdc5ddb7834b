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

// readEpochs caches the epoch rows that were read last and the newest epoch. An entry confirmed
// each of the rows.
type readEpochs struct {
	rows   []byte
	newest epoch
}

// epochNow returns the number of the epoch of the head. It reads and verifies the entries that
// begin epochs only when the rows have changed.
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

// epochs returns the accepted epochs of the log in ascending order. The first epoch needs no
// acceptance.
func (ch *Chain) epochs(r store.Reader) ([]epoch, error) {
	head, err := readHead(r)
	if err != nil {
		return nil, err
	}
	epochs, _, err := ch.accepted(r, head)
	return epochs, err
}

// accepted returns the epochs that the entries at their beginning confirm, and the losses that
// these entries accept. Rows are not signed, but entries are. If a row alone counted, anyone who
// replaces the database with an older copy could accept the loss himself, and anyone who adds a row
// could have later entries signed as another epoch's. So accepted ignores a row that no entry
// confirms, without an error. If the row of a real epoch is missing, the entries of that epoch do
// not fit.
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

// foreignHead verifies a head that another process has written, and returns it with the rows of the
// newest entries. The head's entry must be the first of these rows. The rows are read in one scan,
// so a remote store can send them together with the head.
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

// recentRows answers reads from the newest entries before it asks the store. Continuing from
// another process's head needs the newest entries of tenants, and most of them are among these.
type recentRows struct {
	store.Reader
	entries []row // newest first
	memo    memo  // remembers groups, which often have several of these entries
}

// mostRecent is small enough for one page of a scan in every store.
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

// has reports whether the log has an entry, either in the database or, as the tree shows, in the
// archive.
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

// lacks returns what a log that ends with head lacks of a log that ended with since. It returns nil
// when the log contains since, or when a later epoch began after it: with the epoch, somebody
// accepted the loss.
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

// checkSigned checks that a signature covers what a tenant's row says. The entry that the row names
// covers it. If that entry is archived, or the row names none, the base must agree with the row.
// The memo may be nil. Error: errDamagedLog.
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

// logState is the state of the log in a snapshot.
type logState struct {
	head   link
	epochs []epoch
	losses []acceptedLoss
	seen   Head // newest entry that this process had seen before
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
