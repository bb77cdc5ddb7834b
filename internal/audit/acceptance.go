package audit

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"sort"
	"strconv"
	"time"

	"golang.org/x/mod/sumdb/tlog"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// maxReason is the longest reason for accepting a rollback, in bytes of printable ASCII.
const maxReason = 200

var (
	errReason = fault.New(fault.Invalid, "the reason has 1 to 200 printable ASCII characters: say why the entries were lost")

	// errOneByOne is returned when another acceptance is in progress, when more is lost than the
	// caller accepts, or while the last entries before the halt are still being committed.
	errOneByOne = fault.New(fault.Unavailable, fault.Unavailable.Error())

	errNothingLost = fault.New(fault.Conflict, "no rollback is to be accepted: the log is not behind a checkpoint that is kept elsewhere")
)

func validReason(s string) bool {
	for i := range len(s) {
		if s[i] < ' ' || s[i] > '~' {
			return false
		}
	}
	return len(s) >= 1 && len(s) <= maxReason
}

// acceptRollback begins a new epoch above the lost entries that a [RollbackError] names, and ends
// the halt. It does not check whether p may do this: [Guard.AcceptRollback] does. Errors:
// fault.Invalid for the reason, fault.Conflict when nothing was lost, fault.Unavailable.
func (l *Log) acceptRollback(ctx context.Context, p authz.Principal, reason string) (Rollback, error) {
	if err := l.chain.store.Ready(ctx); err != nil {
		return Rollback{}, err
	}
	if !validReason(reason) {
		return Rollback{}, errReason
	}
	// Another replica may have found a loss that this one has not looked for yet. Looking now lets
	// one acceptance cover every known loss.
	l.rollbacks.mu.Lock()
	look := l.rollbacks.askPlaces
	l.rollbacks.mu.Unlock()
	if look != nil {
		look(ctx)
	}
	if _, err := l.rollbacks.checkForRollback(ctx); err != nil {
		return Rollback{}, err
	}
	was := l.rollbacks.halted.Load()
	var lost *RollbackError
	if was == nil || !errors.As(was.reason, &lost) {
		return Rollback{}, errNothingLost
	}
	a := &acceptance{lost: *lost}
	p.Tenant = authz.SystemTenant // verification accepts this entry only from the system tenant
	var receipt *Receipt
	var done bool
	err := l.chain.store.Update(ctx, func(tx store.Tx) error {
		receipt, done = nil, false
		epochs, err := l.chain.epochs(tx)
		if err != nil {
			return err
		}
		if newest := epochs[len(epochs)-1]; newest.number > lost.Epoch && newest.first > lost.LostTo {
			done = true // accepted before, but the answer did not arrive
			return nil
		}
		receipt, err = l.append(tx, Event{
			Type: RollbackAccepted, Outcome: Success, Principal: p,
			Resource:   Resource{Type: ChainResource, ID: l.chain.chainID},
			Attributes: map[string]string{AttributeReason: reason},
		}, a)
		return err
	})
	if err != nil {
		return Rollback{}, fmt.Errorf("accepting a rollback: %w", err)
	}
	l.rollbacks.halted.CompareAndSwap(was, nil)
	_, _ = l.rollbacks.checkForRollback(ctx) // on an error, the follower checks again
	l.noteAcceptance(ctx)
	if done {
		return Rollback{}, errNothingLost
	}
	a.made.Receipt = *receipt
	return a.made, nil
}

// noteAcceptance tells the verification of the running log that a loss was accepted.
func (l *Log) noteAcceptance(ctx context.Context) {
	if l.onAcceptance != nil {
		l.onAcceptance(ctx)
	}
}

// beginEpoch chooses the epoch that follows the head, and returns the sequence of its first entry.
// It removes epoch rows that no entry accepts, and data derived from lost entries.
func (a *acceptance) beginEpoch(l *Log, tx store.Tx, head link) (first uint64, err error) {
	epochs, _, err := l.chain.accepted(tx, head)
	if err != nil {
		return 0, err
	}
	index, ok := indexOf(epochs, head.sequence)
	first = max(a.lost.LostTo, head.sequence) + 1
	if !ok || first > maxInteger {
		return 0, errDamagedLog
	}
	rows, err := epochRows(tx)
	if err != nil {
		return 0, err
	}
	for _, row := range rows {
		if slices.Contains(epochs[1:], row.epoch) {
			continue
		}
		if err := tx.Delete(row.key); err != nil {
			return 0, err
		}
	}
	if err := l.takeBack(tx, epochs, head); err != nil {
		return 0, err
	}
	number := max(a.lost.Epoch, epochs[len(epochs)-1].number) + 1
	a.epoch = epoch{number, first, index + 1}
	a.made = Rollback{Epoch: number, LostFrom: head.sequence + 1, LostTo: first - 1}
	return first, tx.Put(epochKey(number), a.epoch.encode())
}

// describe adds to the first entry of the epoch which loss it accepts.
func (a *acceptance) describe(e *Entry) {
	number := func(n uint64) string { return strconv.FormatUint(n, 10) }
	e.add(attributeEpoch, number(a.made.Epoch))
	e.add(attributeLostFrom, number(a.made.LostFrom))
	e.add(attributeLostTo, number(a.made.LostTo))
	e.add(attributeAnchored, number(a.lost.LostTo))
	e.add(attributeAnchoredHash, hex.EncodeToString(a.lost.Hash[:]))
}

// takeBack reduces derived data to the last entry that the newest checkpoint and the log have in
// common. It does so only if the log lacks the checkpoint's entry.
func (l *Log) takeBack(tx store.Tx, epochs []epoch, head link) error {
	signed, c, err := l.chain.checkpointIn(tx)
	if err != nil || signed == nil {
		return err
	}
	has, err := hasEntryOf(tx, head, c)
	if err != nil {
		return err
	}
	if has {
		if index, ok := indexOf(epochs, c.Sequence); ok && index+1 != c.Size {
			return errDamagedLog // the row of an epoch is missing
		}
		return nil
	}
	common, err := l.common(tx, epochs, head, c)
	if err != nil {
		return err
	}
	if common.Size == 0 {
		err = tx.Delete(checkpointKey)
	} else if signed, err = SignCheckpoint(common, l.signer); err == nil {
		err = tx.Put(checkpointKey, signed)
	}
	return errors.Join(err, takeBackTree(tx, common), takeBackSummaries(tx, common.Sequence))
}

// common returns the checkpoint of the last entry that is the same in the log and in the tree of c.
// It returns the zero checkpoint when there is none. Error: errDamagedLog when the stored tree is
// not the checkpoint's.
func (l *Log) common(r store.Reader, epochs []epoch, head link, c Checkpoint) (Checkpoint, error) {
	index, ok := indexOf(epochs, head.sequence)
	if !ok {
		return Checkpoint{}, errDamagedLog
	}
	at, least := link{}, int64(0) // archived entries cannot be compared, and are not lost
	base, err := l.chain.baseIn(r)
	if err != nil {
		return Checkpoint{}, err
	}
	if base != nil {
		at, least = base.head, base.tree.size
	}
	if most := min(c.Size, index+1); most < least {
		return Checkpoint{}, errDamagedLog
	}
	hashes := tiles{r}.hashes(c.Size, c.Root)
	var failed error
	// Each entry names the one before it, so the common entries come first and a binary search
	// finds the last one.
	n := sort.Search(int(min(c.Size, index+1)-least), func(i int) bool {
		leaf, err := hashes.ReadHashes([]int64{tlog.StoredHashIndex(0, least+int64(i))})
		if err != nil {
			failed = treeError(err)
			return true
		}
		e, err := readEntry(r, sequenceAt(epochs, least+int64(i)))
		if err != nil && !errors.Is(err, errNoEntry) && !damaged(err) {
			failed = err
		}
		return err != nil || leaf[0] != tlog.Hash(leafHash(e.link().hash))
	})
	size := least + int64(n)
	if failed != nil || size == 0 {
		return Checkpoint{}, failed
	}
	if n > 0 {
		e, err := readEntry(r, sequenceAt(epochs, size-1))
		if err != nil {
			return Checkpoint{}, err
		}
		at = e.link()
	}
	root, err := tlog.TreeHash(size, hashes)
	if err != nil {
		return Checkpoint{}, treeError(err)
	}
	return Checkpoint{
		ChainID: l.chain.chainID, Epoch: epochOf(epochs, at.sequence).number, Size: size, Root: root,
		Sequence: at.sequence, Hash: at.hash, Time: time.UnixMicro(at.micros).UTC(),
	}, nil
}

// takeBackTree removes all tiles and hashes that do not belong to a checkpoint's tree.
func takeBackTree(tx store.Tx, c Checkpoint) error {
	for level := range maxLevel + 1 {
		n := (c.Size>>(tileHeight*level) + tileWidth - 1) / tileWidth
		if err := deleteAll(tx, store.Range{From: tileKey(level, n), To: tileKey(level+1, 0)}, nil); err != nil {
			return fmt.Errorf("taking the tree back: %w", err)
		}
	}
	b, err := tiles{tx}.builder(c.Size, c.Root)
	if err != nil {
		return err
	}
	for _, t := range b.partial() {
		if err := tx.Put(tileKey(t.level, t.index), t.data); err != nil {
			return err
		}
	}
	return nil
}

// takeBackSummaries removes the summaries of blocks that were not full at an entry.
func takeBackSummaries(tx store.Tx, to uint64) error {
	err := deleteAll(tx, summaryRange, func(key []byte) (bool, error) {
		name := key[len(summaryRange.From):]
		n := len(name) - 9
		if n < 1 || name[n] != '/' {
			return false, nil // not a summary key; verification reports it
		}
		row, err := tx.Get(tenantKey(string(name[:n]), endOf(binary.BigEndian.Uint64(name[n+1:]))))
		return row == nil || sequenceOf(row) > to, err
	})
	if err != nil {
		return fmt.Errorf("taking the summaries back: %w", err)
	}
	return nil
}

// deleteAll deletes the rows of a range for which meant returns true. A nil function selects all
// rows.
func deleteAll(tx store.Tx, rng store.Range, meant func(key []byte) (bool, error)) error {
	var keys [][]byte
	err := tx.Scan(rng, func(key, _ []byte) bool {
		keys = append(keys, bytes.Clone(key))
		return true
	})
	for _, key := range keys {
		if err != nil {
			return err
		}
		remove := true
		if meant != nil {
			remove, err = meant(key)
		}
		if remove && err == nil {
			err = tx.Delete(key)
		}
	}
	return err
}
