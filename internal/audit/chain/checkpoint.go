package chain

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/mod/sumdb/tlog"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/entries"
	"github.com/latticekeep/latticekeep/internal/store"
)

// NewestCheckpoint returns the newest checkpoint after verifying it. Error: fault.Unavailable when
// there is none yet.
func (ch *Chain) NewestCheckpoint(ctx context.Context) (signed []byte, c audit.Checkpoint, err error) {
	err = ch.Store.View(ctx, func(r store.Reader) error {
		signed, c, err = ch.ReadCheckpoint(r)
		return err
	})
	if err == nil && signed == nil {
		err = ErrNoCheckpoint
	}
	if err != nil {
		return nil, audit.Checkpoint{}, fmt.Errorf("reading the newest checkpoint: %w", err)
	}
	return signed, c, nil
}

// ReadCheckpoint returns the newest checkpoint. Before the first checkpoint it returns a nil note
// and no error. Error: audit.ErrDamagedLog when the checkpoint does not verify or belongs to
// another chain.
func (ch *Chain) ReadCheckpoint(r store.Reader) (signed []byte, c audit.Checkpoint, err error) {
	row, err := r.Get(audit.CheckpointKey)
	if err != nil || row == nil {
		return nil, audit.Checkpoint{}, err
	}
	known := ch.Followed.Load()
	if known != nil && bytes.Equal(known.Signed, row) {
		return bytes.Clone(row), known.Checkpoint, nil
	}
	signed = bytes.Clone(row)
	c, err = audit.ParseCheckpoint(signed, ch.Key)
	if err != nil || c.ChainID != ch.ChainID {
		return nil, audit.Checkpoint{}, audit.ErrDamagedLog
	}
	ch.NoteCheckpoint(signed, c)
	return signed, c, nil
}

// NoteCheckpoint keeps a verified checkpoint as the newest one, unless a newer one is known.
func (ch *Chain) NoteCheckpoint(signed []byte, c audit.Checkpoint) {
	if known := ch.Followed.Load(); known == nil || c.Head().Newer(known.Head()) {
		ch.Followed.CompareAndSwap(known, &Followed{Signed: signed, Checkpoint: c})
	}
}

// FindLossOf returns what the database lacks of the log that a checkpoint describes. The checkpoint
// is verified, or zero for none. It returns nil when the log contains the checkpoint or the loss
// was accepted. Errors: fault.Unavailable, and fault.Internal when only data derived from the chain
// is damaged.
func (ch *Chain) FindLossOf(r store.Reader, s LogState, c audit.Checkpoint) (*audit.RollbackError, error) {
	if c == (audit.Checkpoint{}) || slices.ContainsFunc(s.losses, func(a audit.AcceptedLoss) bool { return a.Covers(c) }) {
		return nil, nil
	}
	if c.Sequence > s.Head.Sequence && c.Epoch >= s.Epoch().Number {
		return &audit.RollbackError{LostFrom: s.Head.Sequence + 1, LostTo: c.Sequence, Hash: c.Hash, Epoch: c.Epoch}, nil
	}
	same := c.Sequence <= s.Head.Sequence
	if same {
		var err error
		if same, err = ch.hasCheckpoint(r, s.epochs, c); err != nil {
			return nil, err
		}
	}
	if same {
		return nil, nil
	}
	return &audit.RollbackError{LostTo: c.Sequence, Hash: c.Hash, Epoch: c.Epoch}, nil
}

// FindOwnLoss returns what the log lacks of its own newest checkpoint. Other damage is not treated
// as a loss. Error: audit.ErrDamagedLog when the checkpoint cannot be read.
func (ch *Chain) FindOwnLoss(r store.Reader, s LogState) (*audit.RollbackError, error) {
	_, c, err := ch.ReadCheckpoint(r)
	if err != nil || c.Size == 0 {
		return nil, err
	}
	if has, err := HasCheckpointEntry(r, s.Head, c); has || err != nil {
		return nil, err
	}
	lost, err := ch.FindLossOf(r, s, c)
	return lost, audit.IgnoreDamage(err)
}

// hasCheckpoint reports whether the log has the entry of a checkpoint and had the tree of the
// checkpoint at that entry. The checkpoint must not be above the head. An entry that cannot be read
// counts as a different one, because an attacker who forks a log may damage the entry that shows
// it.
func (ch *Chain) hasCheckpoint(r store.Reader, epochs []audit.Epoch, c audit.Checkpoint) (bool, error) {
	index, ok := audit.IndexOf(epochs, c.Sequence)
	if !ok || index+1 != c.Size || audit.EpochOf(epochs, c.Sequence).Number != c.Epoch {
		return false, nil
	}
	e, err := entries.Read(r, c.Sequence)
	switch {
	case errors.Is(err, audit.ErrNoEntry):
		// The entry may be in the archive. Then the tree has its leaf.
		same, err := ch.treeHasCheckpoint(r, index, c)
		if audit.IsDamage(err) {
			return false, nil
		}
		return same, err
	case audit.IsDamage(err):
		return false, nil
	case err != nil:
		return false, err
	case e.Position().Hash != c.Hash:
		return false, nil
	}
	if _, newest, err := ch.ReadCheckpoint(r); err != nil || newest.Size < c.Size {
		return true, err // the tree is not derived that far yet
	}
	return ch.treeHasCheckpoint(r, index, c)
}

// treeHasCheckpoint reports whether the tree has the root and the last leaf of a checkpoint. Error:
// audit.ErrDamagedLog when the tree is smaller than the checkpoint's.
func (ch *Chain) treeHasCheckpoint(r store.Reader, index int64, c audit.Checkpoint) (bool, error) {
	_, newest, err := ch.ReadCheckpoint(r)
	if err != nil {
		return false, err
	}
	if newest.Size < c.Size {
		return false, audit.ErrDamagedLog
	}
	t := TreeView{Reader: r, Newest: newest, Hashes: audit.Tiles{Reader: r}.Hashes(newest.Size, newest.Root)}
	root, err := t.RootAt(c.Size)
	if err != nil || root != c.Root {
		return false, err
	}
	leaf, err := t.Hashes.ReadHashes([]int64{tlog.StoredHashIndex(0, index)})
	if err != nil {
		return false, audit.TreeError(err)
	}
	return leaf[0] == tlog.Hash(audit.LeafHash(c.Hash)), nil
}

// HasCheckpointEntry reports whether the log has the entry of a checkpoint. If so, it has all
// earlier entries of the checkpoint too, because each entry names the one before it. Then only
// derived data can be wrong.
func HasCheckpointEntry(r store.Reader, head audit.Position, c audit.Checkpoint) (bool, error) {
	if c.Sequence > head.Sequence {
		return false, nil
	}
	e, err := entries.Read(r, c.Sequence)
	if errors.Is(err, audit.ErrNoEntry) || audit.IsDamage(err) {
		return false, nil
	}
	return err == nil && e.Position().Hash == c.Hash, err
}

// HasEntry reports whether the log has an entry, either in the database or, as the tree shows, in
// the archive.
func (ch *Chain) HasEntry(r store.Reader, at audit.Position) (bool, error) {
	hash, err := entries.ReadHash(r, at.Sequence)
	if !errors.Is(err, audit.ErrNoEntry) {
		return err == nil && hash == at.Hash, audit.IgnoreDamagedRows(err)
	}
	base, err := ch.BaseOf(r)
	if err != nil || base == nil || base.Sequence() < at.Sequence {
		return false, err
	}
	index, ok := audit.IndexOf(base.Epochs, at.Sequence)
	if !ok {
		return false, nil
	}
	_, newest, err := ch.ReadCheckpoint(r)
	if err != nil || newest.Size <= index {
		return false, err
	}
	leaf, err := audit.Tiles{Reader: r}.Hashes(newest.Size, newest.Root).ReadHashes([]int64{tlog.StoredHashIndex(0, index)})
	if err != nil {
		return false, audit.TreeError(err)
	}
	return leaf[0] == tlog.Hash(audit.LeafHash(at.Hash)), nil
}

// FindLossSince returns what a log that ends with head lacks of a log that ended with since. It
// returns nil when the log contains since, or when a later epoch began after it: with the epoch,
// somebody accepted the loss.
func (ch *Chain) FindLossSince(r store.Reader, head, since audit.Head) (*audit.RollbackError, error) {
	if since.Sequence == 0 || since.Position == head.Position {
		return nil, nil
	}
	if since.Sequence <= head.Sequence {
		if has, err := ch.HasEntry(r, since.Position); has || err != nil {
			return nil, err
		}
	}
	if head.Epoch > since.Epoch {
		return nil, nil
	}
	lost := &audit.RollbackError{LostTo: since.Sequence, Hash: since.Hash, Epoch: since.Epoch, Source: audit.MemorySource}
	if head.Sequence < since.Sequence {
		lost.LostFrom = head.Sequence + 1
	}
	return lost, nil
}

// TreeView is a snapshot of the log up to its newest checkpoint.
type TreeView struct {
	Reader store.Reader
	Signed []byte
	Newest audit.Checkpoint
	Epochs []audit.Epoch
	cut    uint64          // entries up to this one are only in the archive
	Hashes tlog.HashReader // tree hashes, each proven to be in the newest checkpoint's tree
}

// ViewTree calls do with a view of the log. Error: fault.Unavailable before the first checkpoint.
func (ch *Chain) ViewTree(ctx context.Context, do func(TreeView) error) error {
	return ch.Store.View(ctx, func(r store.Reader) error {
		signed, c, err := ch.ReadCheckpoint(r)
		if err != nil {
			return err
		}
		if signed == nil {
			return ErrNoCheckpoint
		}
		epochs, err := ch.Epochs(r)
		if err != nil {
			return err
		}
		cut, err := ch.CutTo(r)
		if err != nil {
			return err
		}
		return do(TreeView{r, signed, c, epochs, cut, audit.Tiles{Reader: r}.Hashes(c.Size, c.Root)})
	})
}

// IndexOf returns the index of an entry in the newest checkpoint's tree.
func (s TreeView) IndexOf(sequence uint64) (int64, bool) {
	index, ok := audit.IndexOf(s.Epochs, sequence)
	return index, ok && index >= 0 && index < s.Newest.Size
}

// entry returns an entry that is in the database. Error: audit.ErrNoEntry.
func (s TreeView) entry(sequence uint64) (*audit.Entry, error) {
	if sequence <= s.cut {
		return nil, audit.ErrNoEntry
	}
	return entries.Read(s.Reader, sequence)
}

// HashOf returns the hash of the row that the database has for an entry. The row may be forged:
// only the tree proves that the hash is the entry's. Error: audit.ErrNoEntry.
func (s TreeView) HashOf(sequence uint64) (hash [32]byte, err error) {
	if sequence <= s.cut {
		return hash, audit.ErrNoEntry
	}
	return entries.ReadHash(s.Reader, sequence)
}

// RootAt returns the root of the tree when it had the given size.
func (s TreeView) RootAt(size int64) (tlog.Hash, error) {
	if size == s.Newest.Size {
		return s.Newest.Root, nil
	}
	root, err := tlog.TreeHash(size, s.Hashes)
	return root, audit.TreeError(err)
}

// checkLeaf checks that the leaf at an index of the tree belongs to the entry with the given hash.
// Error: audit.ErrDamagedLog when it does not.
func (s TreeView) checkLeaf(index int64, entry [32]byte) error {
	leaf, err := s.Hashes.ReadHashes([]int64{tlog.StoredHashIndex(0, index)})
	if err != nil {
		return audit.TreeError(err)
	}
	if leaf[0] != tlog.Hash(audit.LeafHash(entry)) {
		return audit.ErrDamagedLog
	}
	return nil
}

// CheckpointAt returns the checkpoint that the log had when an entry was its newest one.
func (s TreeView) CheckpointAt(sequence uint64) (audit.Checkpoint, error) {
	index, ok := s.IndexOf(sequence)
	if !ok {
		return audit.Checkpoint{}, audit.ErrNoEntry
	}
	e, err := s.entry(sequence)
	if err != nil {
		return audit.Checkpoint{}, err
	}
	at := e.Position()
	if err := s.checkLeaf(index, at.Hash); err != nil {
		return audit.Checkpoint{}, err
	}
	root, err := s.RootAt(index + 1)
	if err != nil {
		return audit.Checkpoint{}, err
	}
	return audit.Checkpoint{
		ChainID: s.Newest.ChainID, Epoch: audit.EpochOf(s.Epochs, sequence).Number, Size: index + 1, Root: root,
		Sequence: sequence, Hash: at.Hash, Time: e.Time(),
	}, nil
}
