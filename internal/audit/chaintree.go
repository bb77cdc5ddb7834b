package audit

import (
	"context"
	"crypto/sha3"
	"fmt"

	"golang.org/x/mod/sumdb/tlog"

	"github.com/latticekeep/latticekeep/internal/store"
)

// treeView is a snapshot of the log up to its newest checkpoint.
type treeView struct {
	r      store.Reader
	signed []byte
	newest Checkpoint
	epochs []epoch
	cut    uint64          // entries up to this one are only in the archive
	hashes tlog.HashReader // tree hashes, each proven to be in the newest checkpoint's tree
}

// viewTree calls do with a view of the log. Error: fault.Unavailable before the first checkpoint.
func (ch *Chain) viewTree(ctx context.Context, do func(treeView) error) error {
	return ch.store.View(ctx, func(r store.Reader) error {
		signed, c, err := ch.checkpointIn(r)
		if err != nil {
			return err
		}
		if signed == nil {
			return errNoCheckpoint
		}
		epochs, err := ch.epochs(r)
		if err != nil {
			return err
		}
		cut, err := ch.cutTo(r)
		if err != nil {
			return err
		}
		return do(treeView{r, signed, c, epochs, cut, tiles{r}.hashes(c.Size, c.Root)})
	})
}

// indexOf returns the index of an entry in the newest checkpoint's tree.
func (s treeView) indexOf(sequence uint64) (int64, bool) {
	index, ok := indexOf(s.epochs, sequence)
	return index, ok && index >= 0 && index < s.newest.Size
}

// entry returns an entry that is in the database. Error: errNoEntry.
func (s treeView) entry(sequence uint64) (*Entry, error) {
	if sequence <= s.cut {
		return nil, errNoEntry
	}
	return readEntry(s.r, sequence)
}

// hashOf returns the hash of the row that the database has for an entry. The row may be forged:
// only the tree proves that the hash is the entry's. Error: errNoEntry.
func (s treeView) hashOf(sequence uint64) (hash [32]byte, err error) {
	if sequence <= s.cut {
		return hash, errNoEntry
	}
	row, err := s.r.Get(entryKey(sequence))
	switch {
	case err != nil:
		return hash, fmt.Errorf("reading an audit entry: %w", err)
	case row == nil:
		return hash, errNoEntry
	}
	core, _, err := splitRow(row)
	if err != nil {
		return hash, errDamagedLog
	}
	return sha3.Sum256(core), nil
}

// rootAt returns the root of the tree when it had the given size.
func (s treeView) rootAt(size int64) (tlog.Hash, error) {
	if size == s.newest.Size {
		return s.newest.Root, nil
	}
	root, err := tlog.TreeHash(size, s.hashes)
	return root, treeError(err)
}

// holds checks that the leaf at an index of the tree belongs to the entry with the given hash.
// Error: errDamagedLog when it does not.
func (s treeView) holds(index int64, entry [32]byte) error {
	leaf, err := s.hashes.ReadHashes([]int64{tlog.StoredHashIndex(0, index)})
	if err != nil {
		return treeError(err)
	}
	if leaf[0] != tlog.Hash(leafHash(entry)) {
		return errDamagedLog
	}
	return nil
}

func (s treeView) checkpointAt(sequence uint64) (Checkpoint, error) {
	index, ok := s.indexOf(sequence)
	if !ok {
		return Checkpoint{}, errNoEntry
	}
	e, err := s.entry(sequence)
	if err != nil {
		return Checkpoint{}, err
	}
	at := e.link()
	if err := s.holds(index, at.hash); err != nil {
		return Checkpoint{}, err
	}
	root, err := s.rootAt(index + 1)
	if err != nil {
		return Checkpoint{}, err
	}
	return Checkpoint{
		ChainID: s.newest.ChainID, Epoch: epochOf(s.epochs, sequence).number, Size: index + 1, Root: root,
		Sequence: sequence, Hash: at.hash, Time: e.Time(),
	}, nil
}
