package audit

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"sort"
	"time"

	"golang.org/x/mod/sumdb/tlog"

	"github.com/latticekeep/latticekeep/internal/store"
)

// The newest checkpoint in the database is signed evidence, too: a log that does
// not go on from it has lost entries, whoever removed them. So it is held against
// the entries as if it were kept in a place of its own, and the loss is accepted
// as any other one. What is derived from the entries is then taken back to those
// that are left.

// databasePlace is what a [RollbackError] calls the database.
const databasePlace = "the database"

// lostOfOwn returns what the log lacks of its own newest checkpoint. What is damaged
// otherwise is no loss. Error: errDamagedLog when that cannot be read.
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

// takeBack takes what is derived back to the last entry that the newest checkpoint
// and the log have in common, if the checkpoint knows others behind it.
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
	common, err := l.chain.common(tx, epochs, head, c)
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

// hasEntryOf reports whether the log has the entry of a checkpoint, and so, since
// each names the one before, all that it knows: what may be wrong is derived.
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

// common returns the checkpoint of the last entry that the tree of a checkpoint
// has as the log has it: the zero one when there is none. Error: errDamagedLog when
// the stored tree is not the checkpoint's.
func (ch *Chain) common(r store.Reader, epochs []epoch, head link, c Checkpoint) (Checkpoint, error) {
	index, ok := indexOf(epochs, head.sequence)
	if !ok {
		return Checkpoint{}, errDamagedLog
	}
	at, least := link{}, int64(0) // what is archived cannot be compared, and is not lost
	base, err := ch.baseIn(r)
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
	// Each entry names the one before, so that those in common come first.
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
		ChainID: ch.chainID, Epoch: epochOf(epochs, at.sequence).number, Size: size, Root: root,
		Sequence: at.sequence, Hash: at.hash, Time: time.UnixMicro(at.micros).UTC(),
	}, nil
}

// takeBackTree leaves the tiles of a checkpoint's tree, and no hash beside them.
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

// takeBackSummaries leaves the summaries of blocks that were full at an entry.
func takeBackSummaries(tx store.Tx, to uint64) error {
	err := deleteAll(tx, summaryRange, func(key []byte) (bool, error) {
		name := key[len(summaryRange.From):]
		n := len(name) - 9
		if n < 1 || name[n] != '/' {
			return false, nil // none, which a verification finds
		}
		row, err := tx.Get(tenantKey(string(name[:n]), endOf(binary.BigEndian.Uint64(name[n+1:]))))
		return row == nil || sequenceOf(row) > to, err
	})
	if err != nil {
		return fmt.Errorf("taking the summaries back: %w", err)
	}
	return nil
}

// deleteAll deletes the rows of a range that are meant, nil being all.
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
