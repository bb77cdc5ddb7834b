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

// The follower derives tiles, the newest checkpoint and the summaries of tenants' blocks from the
// entries. It writes them after the entries, in steps. Each step is one transaction and brings all
// three from one sequence to a later one. A step is computed outside the transaction. When it
// writes, it checks that the checkpoint is still the one that it began with. So a crash leaves
// either all of a step or nothing, and if two processes follow at the same time, one of them begins
// again. Two checkpoints of one size never contradict each other.

const (
	// A step takes at most this many entries and summaries.
	stepEntries   = 2048
	stepSummaries = 64
)

// Lag returns how many sequences the newest checkpoint known to this process lags behind the newest
// entry that this process has written or seen. It reads nothing from the store.
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

// Follow brings everything derived from the chain up to the current head. It returns the
// checkpoint, which may be for a later entry. Errors: fault.Unavailable, also for a log without
// entries; fault.Internal if the chain or the derived data are damaged. It signs nothing about a
// damaged log.
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
				return c, nil // the other process has done the work
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

// errOutrun means that the checkpoint has changed since the step began.
var errOutrun = errors.New("another has followed the chain meanwhile")

// step derives the data of as many entries after the newest checkpoint as one transaction takes. It
// returns the checkpoint that is the newest afterwards. Error: errOutrun.
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

// unlessOutrun returns err. If err is damage and another process has followed since the step began,
// it returns errOutrun, because that process may have archived what the step was reading.
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

// step is the work of one transaction of the follower.
type step struct {
	signed []byte // the checkpoint that the step begins with
	from   Checkpoint
	head   link // head of the chain when the step began
	epochs []epoch
	tree   *treeBuilder

	at        link   // the entry that was read last
	newest    stored // the same entry
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
		return step{}, errDamagedLog // the store may hold another log than the one with the checkpoints
	case s.head.sequence < s.from.Sequence, s.head.sequence == s.from.Sequence && s.head.hash != s.from.Hash:
		return step{}, errDamagedLog // entries that have a checkpoint are missing or were replaced
	}
	return s, nil
}

// read reads the entries of the step. It checks sequences and links, so the signature of the last
// entry vouches for all of them.
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

// beginsWith reports whether the entry begins an epoch exactly if the log's epochs say so.
func (s *step) beginsWith(e *Entry) bool {
	for i, began := range s.epochs[1:] {
		if began.first == e.Sequence {
			return began.after(s.epochs[i]).isOf(e)
		}
	}
	return !e.begins()
}

// checkpoint returns the checkpoint to sign. It first verifies the signature of the last entry.
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
	// Someone may have put an older copy of the database in place since the step read its entries.
	// Nothing is signed about entries that are no longer there.
	hash, err := hashOf(tx, s.at.sequence)
	if errors.Is(err, errNoEntry) || errors.Is(err, errDamagedLog) || err == nil && hash != s.at.hash {
		return errOutrun
	}
	if err != nil {
		return err
	}
	for _, t := range slices.Concat(s.tree.filled, s.tree.partial()) {
		if s.from.Size>>(tileHeight*t.level) == s.tree.size>>(tileHeight*t.level) {
			continue // this level has not grown
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

// summarize returns the summary of a full block.
func summarize(ctx context.Context, db store.Store, tenant string, block uint64) (summary, error) {
	var rows []indexRow
	damaged := false
	rng := store.Range{From: tenantKey(tenant, endOf(block)+1-blockSize), To: tenantKey(tenant, endOf(block)+1)}
	last := rng.To
	rng.Reverse = true
	err := db.View(ctx, func(r store.Reader) error {
		return r.Scan(rng, func(key, value []byte) bool {
			row, err := decodeIndexRow(value)
			// The newest rows of the block exist, whatever a cut removed.
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
