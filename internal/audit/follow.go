package audit

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/latticekeep/latticekeep/internal/store"
)

// What is derived from the chain follows it: tiles, the newest checkpoint and
// the summaries of tenants' blocks are written after the entries, by steps that
// each are one transaction and bring all three from one sequence to a later
// one. A step is computed outside and compares, when it writes, that the
// checkpoint is still the one it began with: so a crash leaves either all of a
// step or nothing, and of two that follow at the same time one begins again. No two
// of one size are ever given out that say different things.

const (
	// A step takes so many entries and so many summaries at the most.
	stepEntries   = 2048
	stepSummaries = 64
)

// Lag returns by how many sequences the newest checkpoint that this process has
// seen is behind the newest entry that it has written, or seen another write. It
// reads nothing.
func (f *Follower) Lag() uint64 {
	var newest uint64
	if p := f.log.heads.written.latest.Load(); p != nil {
		newest = p.head.sequence
	}
	if seen := f.log.rollbacks.seen.Load(); seen != nil {
		newest = max(newest, seen.sequence)
	}
	if f := f.log.chain.followed.Load(); f != nil {
		return newest - min(newest, f.Sequence)
	}
	return newest
}

// Follow brings all that is derived from the chain to the newest entry that there
// is now, and returns the checkpoint, which may be of a later one. Errors:
// fault.Unavailable, also for a log without entries; fault.Internal when the
// chain or what was derived does not hold, of which nothing is signed.
func (f *Follower) Follow(ctx context.Context) (Checkpoint, error) {
	head, err := f.log.chain.storedHead(ctx)
	if err == nil && f.log.rollbacks.lostEntries() {
		if lost, failed := f.log.rollbacks.checkForRollback(ctx); lost || failed != nil {
			err = cmp.Or(failed, f.log.rollbacks.checkNotHalted(), error(errDamagedLog))
		}
	}
	for err == nil {
		var c Checkpoint
		c, err = f.step(ctx)
		switch {
		case errors.Is(err, errOutrun):
			err = nil
			if _, c, failed := f.log.chain.NewestCheckpoint(ctx); failed == nil && c.Sequence >= head.sequence {
				return c, nil // which the other has done
			}
		case damaged(err):
			if _, failed := f.log.rollbacks.checkForRollback(ctx); failed != nil {
				err = failed
			}
		case err == nil && c.Sequence >= head.sequence:
			return c, nil
		}
	}
	return Checkpoint{}, fmt.Errorf("following the chain: %w", err)
}

// errOutrun says that the checkpoint has changed since a step began.
var errOutrun = errors.New("another has followed the chain meanwhile")

// step derives what comes after the newest checkpoint, for as many entries as one
// transaction takes, and returns the checkpoint that is then the newest. Error:
// errOutrun.
func (f *Follower) step(ctx context.Context) (Checkpoint, error) {
	s, err := f.begin(ctx)
	if err != nil {
		return Checkpoint{}, err
	}
	if s.head.sequence == s.from.Sequence {
		f.log.rollbacks.noteHead(s.from.Head())
		return s.from, nil
	}
	var c Checkpoint
	if err = s.read(ctx, f.log.chain.store); err == nil {
		c, err = s.checkpoint(f.log.chain)
	}
	if err != nil {
		return Checkpoint{}, f.unlessOutrun(ctx, s, err)
	}
	signed, err := SignCheckpoint(c, f.log.signer)
	if err != nil {
		return Checkpoint{}, err
	}
	err = f.log.chain.store.Update(ctx, func(tx store.Tx) error { return s.write(tx, signed) })
	if err != nil {
		return Checkpoint{}, err
	}
	if known := f.log.chain.followed.Load(); known == nil || c.Head().newer(known.Head()) {
		f.log.chain.followed.CompareAndSwap(known, &followed{signed, c})
	}
	f.log.rollbacks.noteHead(c.Head())
	return c, nil
}

// unlessOutrun returns the damage that a step has found, or errOutrun when somebody
// has followed, and may have archived, what it was reading.
func (f *Follower) unlessOutrun(ctx context.Context, s step, err error) error {
	if !damaged(err) {
		return err
	}
	var now []byte
	failed := f.log.chain.store.View(ctx, func(r store.Reader) error {
		row, err := r.Get(checkpointKey)
		now = bytes.Clone(row)
		return err
	})
	if failed == nil && !bytes.Equal(now, s.signed) {
		return errOutrun
	}
	return cmp.Or(failed, err)
}

// step is the work of one.
type step struct {
	signed []byte // the checkpoint that it begins with, and what it says
	from   Checkpoint
	head   link // of the chain, when it began
	epochs []epoch
	tree   *treeBuilder

	at        link   // the entry that was read last
	newest    stored // the same
	summaries []summary
}

type summary struct{ key, value []byte }

func (f *Follower) begin(ctx context.Context) (s step, err error) {
	since := *f.log.rollbacks.seen.Load()
	var lost *RollbackError
	err = f.log.chain.store.View(ctx, func(r store.Reader) error {
		if s.signed, s.from, err = f.log.chain.checkpointIn(r); err != nil {
			return err
		}
		if s.head, err = readHead(r); err != nil {
			return err
		}
		if s.epochs, _, err = f.log.chain.accepted(r, s.head); err != nil {
			return err
		}
		if lost, err = f.log.chain.lacks(r, Head{s.head, s.epochs[len(s.epochs)-1].number}, since); err != nil {
			return err
		}
		s.tree, err = tiles{r}.builder(s.from.Size, s.from.Root)
		return err
	})
	s.at = link{sequence: s.from.Sequence, hash: s.from.Hash}
	switch {
	case err != nil:
		return step{}, err
	case lost != nil:
		return step{}, errDamagedLog // what is there may be another log than the one that has checkpoints
	case s.head.sequence < s.from.Sequence, s.head.sequence == s.from.Sequence && s.head.hash != s.from.Hash:
		return step{}, errDamagedLog // entries that have a checkpoint are gone, or are others
	}
	return s, nil
}

// read goes along the chain. It checks sequences and links, so that what the last
// signature says of the last entry holds for all of them.
func (s *step) read(ctx context.Context, db store.Store) error {
	n := 0
	rng := store.Range{From: entryKey(s.from.Sequence + 1), To: entryKey(s.head.sequence + 1)}
	err := scanEntries(ctx, db, rng, func(row entryRow) error {
		e, err := decodeStored(row.row, row.batch)
		if err != nil {
			return errDamagedLog
		}
		if err := s.add(row.key, e); err != nil {
			return err
		}
		if e.entry.TenantSequence%blockSize == 0 {
			made, err := summarize(ctx, db, e.entry.TenantID, blockOf(e.entry.TenantSequence))
			if err != nil {
				return err
			}
			s.summaries = append(s.summaries, made)
		}
		if n++; n == stepEntries || len(s.summaries) == stepSummaries {
			return errFull
		}
		return nil
	})
	switch {
	case errors.Is(err, errFull):
		return nil
	case err != nil:
		return err
	case s.at.sequence != s.head.sequence:
		return errDamagedLog // the last entries are missing
	}
	return nil
}

var errFull = errors.New("the step is full")

func (s *step) add(key []byte, e stored) error {
	index, ok := indexOf(s.epochs, e.entry.Sequence)
	if !ok || !s.beginsWith(e.entry) || index != s.tree.size || e.entry.PreviousHash != s.at.previous() || !bytes.Equal(key, entryKey(e.entry.Sequence)) {
		return errDamagedLog
	}
	s.tree.add(e.hash)
	s.at, s.newest = e.entry.link(), e
	return nil
}

// beginsWith reports whether an entry begins an epoch exactly if it says so.
func (s *step) beginsWith(e *Entry) bool {
	for i, began := range s.epochs[1:] {
		if began.first == e.Sequence {
			return began.after(s.epochs[i]).isOf(e)
		}
	}
	return !e.begins()
}

// checkpoint returns what is to be signed once the last entry read is known to be
// the log's own.
func (s *step) checkpoint(ch *Chain) (Checkpoint, error) {
	if s.at.sequence == s.head.sequence && s.at != s.head || !s.newest.verify(ch.key, nil) {
		return Checkpoint{}, errDamagedLog
	}
	return Checkpoint{
		ChainID: ch.chainID, Epoch: epochOf(s.epochs, s.at.sequence).number,
		Size: s.tree.size, Root: s.tree.root(),
		Sequence: s.at.sequence, Hash: s.at.hash, Time: s.newest.entry.Time(),
	}, nil
}

func (s *step) write(tx store.Tx, signed []byte) error {
	now, err := tx.Get(checkpointKey)
	if err != nil {
		return err
	}
	if !bytes.Equal(now, s.signed) {
		return errOutrun
	}
	// Nor is anything signed of entries that were there when the step read them, and
	// in whose place an older copy of the database was put.
	hash, err := hashOf(tx, s.at.sequence)
	if errors.Is(err, errNoEntry) || err == errDamagedLog || err == nil && hash != s.at.hash {
		return errOutrun
	}
	if err != nil {
		return err
	}
	for _, t := range slices.Concat(s.tree.filled, s.tree.partial()) {
		if s.from.Size>>(tileHeight*t.level) == s.tree.size>>(tileHeight*t.level) {
			continue // of this level nothing was added
		}
		if err := tx.Put(tileKey(t.level, t.index), t.data); err != nil {
			return err
		}
	}
	for _, b := range s.summaries {
		if err := tx.Put(b.key, b.value); err != nil {
			return err
		}
	}
	return tx.Put(checkpointKey, signed)
}

// summarize makes the summary of a full block.
func summarize(ctx context.Context, db store.Store, tenant string, block uint64) (summary, error) {
	var rows []indexRow
	damaged := false
	rng := store.Range{From: tenantKey(tenant, endOf(block)+1-blockSize), To: tenantKey(tenant, endOf(block)+1)}
	last := rng.To
	rng.Reverse = true
	err := db.View(ctx, func(r store.Reader) error {
		return r.Scan(rng, func(key, value []byte) bool {
			row, err := decodeIndexRow(value)
			// The newest rows of the block are there, whatever was cut.
			damaged = err != nil || binary.BigEndian.Uint64(key[len(key)-8:])+1 != binary.BigEndian.Uint64(last[len(last)-8:])
			last = key
			rows = append(rows, row)
			return !damaged
		})
	})
	if err != nil {
		return summary{}, err
	}
	if damaged || len(rows) == 0 {
		return summary{}, errDamagedLog
	}
	slices.Reverse(rows)
	return summary{summaryKey(tenant, block), summaryOf(rows)}, nil
}
