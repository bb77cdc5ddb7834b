package audit

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/mod/sumdb/tlog"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// followed is the newest checkpoint that this process has seen.
type followed struct {
	signed []byte
	Checkpoint
}

var errNoCheckpoint = fault.New(fault.Unavailable, "the log has no checkpoint yet: ask again in a second")

// NewestCheckpoint returns the newest checkpoint after verifying it. Error: fault.Unavailable when
// there is none yet.
func (ch *Chain) NewestCheckpoint(ctx context.Context) (signed []byte, c Checkpoint, err error) {
	err = ch.store.View(ctx, func(r store.Reader) error {
		signed, c, err = ch.checkpointIn(r)
		return err
	})
	if err == nil && signed == nil {
		err = errNoCheckpoint
	}
	if err != nil {
		return nil, Checkpoint{}, fmt.Errorf("reading the newest checkpoint: %w", err)
	}
	return signed, c, nil
}

// checkpointIn returns the newest checkpoint. Before the first checkpoint it returns a nil note and
// no error. Error: errDamagedLog when the checkpoint does not verify or belongs to another chain.
func (ch *Chain) checkpointIn(r store.Reader) (signed []byte, c Checkpoint, err error) {
	row, err := r.Get(checkpointKey)
	if err != nil || row == nil {
		return nil, Checkpoint{}, err
	}
	known := ch.followed.Load()
	if known != nil && bytes.Equal(known.signed, row) {
		return bytes.Clone(row), known.Checkpoint, nil
	}
	signed = bytes.Clone(row)
	c, err = ParseCheckpoint(signed, ch.key)
	if err != nil || c.ChainID != ch.chainID {
		return nil, Checkpoint{}, errDamagedLog
	}
	if known == nil || c.Head().newer(known.Head()) {
		ch.followed.CompareAndSwap(known, &followed{signed, c})
	}
	return signed, c, nil
}

// lostOf returns what the database lacks of the log that a checkpoint describes. The checkpoint is
// verified, or zero for none. It returns nil when the log contains the checkpoint or the loss was
// accepted. Errors: fault.Unavailable, and fault.Internal when only data derived from the chain is
// damaged.
func (ch *Chain) lostOf(r store.Reader, s logState, c Checkpoint) (*RollbackError, error) {
	if c == (Checkpoint{}) || slices.ContainsFunc(s.losses, func(a acceptedLoss) bool { return a.covers(c) }) {
		return nil, nil
	}
	if c.Sequence > s.head.sequence && c.Epoch >= s.epoch().number {
		return &RollbackError{LostFrom: s.head.sequence + 1, LostTo: c.Sequence, Hash: c.Hash, Epoch: c.Epoch}, nil
	}
	same := c.Sequence <= s.head.sequence
	if same {
		var err error
		if same, err = ch.goesThrough(r, s.epochs, c); err != nil {
			return nil, err
		}
	}
	if same {
		return nil, nil
	}
	return &RollbackError{LostTo: c.Sequence, Hash: c.Hash, Epoch: c.Epoch}, nil
}

// lostOfOwn returns what the log lacks of its own newest checkpoint. Other damage is not treated as
// a loss. Error: errDamagedLog when the checkpoint cannot be read.
func (ch *Chain) lostOfOwn(r store.Reader, s logState) (*RollbackError, error) {
	_, c, err := ch.checkpointIn(r)
	if err != nil || c.Size == 0 {
		return nil, err
	}
	if has, err := hasEntryOf(r, s.head, c); has || err != nil {
		return nil, err
	}
	lost, err := ch.lostOf(r, s, c)
	return lost, unlessDamage(err)
}

// goesThrough reports whether the log has the entry of a checkpoint and had the tree of the
// checkpoint at that entry. The checkpoint must not be above the head. An entry that cannot be read
// counts as a different one, because an attacker who forks a log may damage the entry that shows
// it.
func (ch *Chain) goesThrough(r store.Reader, epochs []epoch, c Checkpoint) (bool, error) {
	index, ok := indexOf(epochs, c.Sequence)
	if !ok || index+1 != c.Size || epochOf(epochs, c.Sequence).number != c.Epoch {
		return false, nil
	}
	e, err := readEntry(r, c.Sequence)
	switch {
	case errors.Is(err, errNoEntry):
		// The entry may be in the archive. Then the tree has its leaf.
		same, err := ch.treeHolds(r, index, c)
		if damaged(err) {
			return false, nil
		}
		return same, err
	case damaged(err):
		return false, nil
	case err != nil:
		return false, err
	case e.link().hash != c.Hash:
		return false, nil
	}
	if _, newest, err := ch.checkpointIn(r); err != nil || newest.Size < c.Size {
		return true, err // the tree is not derived that far yet
	}
	return ch.treeHolds(r, index, c)
}

// treeHolds reports whether the tree has the root and the last leaf of a checkpoint. Error:
// errDamagedLog when the tree is smaller than the checkpoint's.
func (ch *Chain) treeHolds(r store.Reader, index int64, c Checkpoint) (bool, error) {
	_, newest, err := ch.checkpointIn(r)
	if err != nil {
		return false, err
	}
	if newest.Size < c.Size {
		return false, errDamagedLog
	}
	t := treeView{r: r, newest: newest, hashes: tiles{r}.hashes(newest.Size, newest.Root)}
	root, err := t.rootAt(c.Size)
	if err != nil || root != c.Root {
		return false, err
	}
	leaf, err := t.hashes.ReadHashes([]int64{tlog.StoredHashIndex(0, index)})
	if err != nil {
		return false, treeError(err)
	}
	return leaf[0] == tlog.Hash(leafHash(c.Hash)), nil
}

// hasEntryOf reports whether the log has the entry of a checkpoint. If so, it has all earlier
// entries of the checkpoint too, because each entry names the one before it. Then only derived data
// can be wrong.
func hasEntryOf(r store.Reader, head link, c Checkpoint) (bool, error) {
	if c.Sequence > head.sequence {
		return false, nil
	}
	e, err := readEntry(r, c.Sequence)
	if errors.Is(err, errNoEntry) || damaged(err) {
		return false, nil
	}
	return err == nil && e.link().hash == c.Hash, err
}
