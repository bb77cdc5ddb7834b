package writer

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/chain"
	"github.com/latticekeep/latticekeep/internal/audit/entries"
	"github.com/latticekeep/latticekeep/internal/fault"
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
	newest := f.log.Newest()
	if f := f.log.Chain.Followed.Load(); f != nil {
		return newest - min(newest, f.Sequence)
	}
	return newest
}

// Follow brings everything derived from the chain up to the current head. It returns the
// checkpoint, which may be for a later entry. Errors: fault.Unavailable, also for a log without
// entries; fault.Internal if the chain or the derived data are damaged. It signs nothing about a
// damaged log.
func (f *Follower) Follow(ctx context.Context) (audit.Checkpoint, error) {
	head, err := f.log.Chain.StoredHead(ctx)
	if err == nil && f.log.Detector.lostEntries() {
		if lost, failed := f.log.Detector.CheckForRollback(ctx); lost || failed != nil {
			err = cmp.Or(failed, f.log.Detector.CheckNotHalted(), error(audit.ErrDamagedLog))
		}
	}
	for err == nil {
		var c audit.Checkpoint
		c, err = f.step(ctx)
		switch {
		case errors.Is(err, errOutrun):
			err = nil
			if _, c, failed := f.log.Chain.NewestCheckpoint(ctx); failed == nil && c.Sequence >= head.Sequence {
				return c, nil // the other process has done the work
			}
		case audit.IsDamage(err):
			if _, failed := f.log.Detector.CheckForRollback(ctx); failed != nil {
				err = failed
			}
		case err == nil && c.Sequence >= head.Sequence:
			return c, nil
		}
	}
	return audit.Checkpoint{}, fmt.Errorf("following the chain: %w", err)
}

// errOutrun means that the checkpoint has changed since the step began.
var errOutrun = errors.New("another has followed the chain meanwhile")

// step derives the data of as many entries after the newest checkpoint as one transaction takes. It
// returns the checkpoint that is the newest afterwards. Error: errOutrun.
func (f *Follower) step(ctx context.Context) (audit.Checkpoint, error) {
	s, err := f.begin(ctx)
	if err != nil {
		return audit.Checkpoint{}, err
	}
	if s.head.Sequence == s.from.Sequence {
		f.log.Detector.noteHead(s.from.Head())
		return s.from, nil
	}
	var c audit.Checkpoint
	if err = s.read(ctx, f.log.Chain.Store); err == nil {
		c, err = s.checkpoint(f.log.Chain)
	}
	if err != nil {
		return audit.Checkpoint{}, f.unlessOutrun(ctx, s, err)
	}
	signed, err := audit.SignCheckpoint(c, f.log.signer)
	if err != nil {
		return audit.Checkpoint{}, err
	}
	err = f.log.Chain.Store.Update(ctx, func(tx store.Tx) error { return s.write(tx, signed) })
	if err != nil {
		return audit.Checkpoint{}, err
	}
	f.log.Chain.NoteCheckpoint(signed, c)
	f.log.Detector.noteHead(c.Head())
	return c, nil
}

// unlessOutrun returns err. If err is damage and another process has followed since the step began,
// it returns errOutrun, because that process may have archived what the step was reading.
func (f *Follower) unlessOutrun(ctx context.Context, s step, err error) error {
	if !audit.IsDamage(err) {
		return err
	}
	var now []byte
	failed := f.log.Chain.Store.View(ctx, func(r store.Reader) error {
		row, err := r.Get(audit.CheckpointKey)
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
	from   audit.Checkpoint
	head   audit.Position // head of the chain when the step began
	epochs []audit.Epoch
	tree   *audit.TreeBuilder

	at        audit.Position    // the entry that was read last
	newest    audit.StoredEntry // the same entry
	summaries []summary
}

type summary struct{ key, value []byte }

func (f *Follower) begin(ctx context.Context) (s step, err error) {
	since := *f.log.Detector.seen.Load()
	var lost *audit.RollbackError
	err = f.log.Chain.Store.View(ctx, func(r store.Reader) error {
		if s.signed, s.from, err = f.log.Chain.ReadCheckpoint(r); err != nil {
			return err
		}
		if s.head, err = audit.ReadHead(r); err != nil {
			return err
		}
		if s.epochs, _, err = f.log.Chain.AcceptedEpochs(r, s.head); err != nil {
			return err
		}
		if lost, err = f.log.Chain.FindLossSince(r, audit.Head{Position: s.head, Epoch: s.epochs[len(s.epochs)-1].Number}, since); err != nil {
			return err
		}
		s.tree, err = audit.Tiles{Reader: r}.Builder(s.from.Size, s.from.Root)
		return err
	})
	s.at = audit.Position{Sequence: s.from.Sequence, Hash: s.from.Hash}
	switch {
	case err != nil:
		return step{}, err
	case lost != nil:
		return step{}, audit.ErrDamagedLog // the store may hold another log than the one with the checkpoints
	case s.head.Sequence < s.from.Sequence, s.head.Sequence == s.from.Sequence && s.head.Hash != s.from.Hash:
		return step{}, audit.ErrDamagedLog // entries that have a checkpoint are missing or were replaced
	}
	return s, nil
}

// read reads the entries of the step. It checks sequences and links, so the signature of the last
// entry vouches for all of them.
func (s *step) read(ctx context.Context, db store.Store) error {
	n := 0
	rng := store.Range{From: audit.EntryKey(s.from.Sequence + 1), To: audit.EntryKey(s.head.Sequence + 1)}
	err := entries.ScanAll(ctx, db, rng, func(row entries.Row) error {
		e, err := audit.DecodeStoredEntry(row.Row, row.Batch)
		if err != nil {
			return audit.ErrDamagedLog
		}
		if err := s.add(row.Key, e); err != nil {
			return err
		}
		if e.Entry.TenantSequence%audit.BlockSize == 0 {
			made, err := summarize(ctx, db, e.Entry.TenantID, audit.BlockOf(e.Entry.TenantSequence))
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
	case s.at.Sequence != s.head.Sequence:
		return audit.ErrDamagedLog // the last entries are missing
	}
	return nil
}

var errFull = errors.New("the step is full")

func (s *step) add(key []byte, e audit.StoredEntry) error {
	index, ok := audit.IndexOf(s.epochs, e.Entry.Sequence)
	if !ok || !s.beginsWith(e.Entry) || index != s.tree.Size || e.Entry.PreviousHash != s.at.PreviousHash() || !bytes.Equal(key, audit.EntryKey(e.Entry.Sequence)) {
		return audit.ErrDamagedLog
	}
	s.tree.Add(e.Hash)
	s.at, s.newest = e.Entry.Position(), e
	return nil
}

// beginsWith reports whether the entry begins an epoch exactly if the log's epochs say so.
func (s *step) beginsWith(e *audit.Entry) bool {
	for i, began := range s.epochs[1:] {
		if began.First == e.Sequence {
			return began.LossAfter(s.epochs[i]).IsOf(e)
		}
	}
	return !e.Begins()
}

// checkpoint returns the checkpoint to sign. It first verifies the signature of the last entry.
func (s *step) checkpoint(ch *chain.Chain) (audit.Checkpoint, error) {
	if s.at.Sequence == s.head.Sequence && s.at != s.head || !s.newest.Verify(ch.Key, nil) {
		return audit.Checkpoint{}, audit.ErrDamagedLog
	}
	return audit.Checkpoint{
		ChainID: ch.ChainID, Epoch: audit.EpochOf(s.epochs, s.at.Sequence).Number,
		Size: s.tree.Size, Root: s.tree.Root(),
		Sequence: s.at.Sequence, Hash: s.at.Hash, Time: s.newest.Entry.Time(),
	}, nil
}

func (s *step) write(tx store.Tx, signed []byte) error {
	now, err := tx.Get(audit.CheckpointKey)
	if err != nil {
		return err
	}
	if !bytes.Equal(now, s.signed) {
		return errOutrun
	}
	// Someone may have put an older copy of the database in place since the step read its entries.
	// Nothing is signed about entries that are no longer there.
	hash, err := entries.ReadHash(tx, s.at.Sequence)
	if errors.Is(err, audit.ErrNoEntry) || errors.Is(err, audit.ErrDamagedLog) || err == nil && hash != s.at.Hash {
		return errOutrun
	}
	if err != nil {
		return err
	}
	for _, t := range slices.Concat(s.tree.Filled, s.tree.Partial()) {
		if s.from.Size>>(audit.TileHeight*t.Level) == s.tree.Size>>(audit.TileHeight*t.Level) {
			continue // this level has not grown
		}
		if err := tx.Put(audit.TileKey(t.Level, t.Index), t.Data); err != nil {
			return err
		}
	}
	for _, b := range s.summaries {
		if err := tx.Put(b.key, b.value); err != nil {
			return err
		}
	}
	return tx.Put(audit.CheckpointKey, signed)
}

// summarize returns the summary of a full block.
func summarize(ctx context.Context, db store.Store, tenant string, block uint64) (summary, error) {
	var rows []audit.IndexRow
	damaged := false
	rng := store.Range{From: audit.TenantKey(tenant, audit.EndOf(block)+1-audit.BlockSize), To: audit.TenantKey(tenant, audit.EndOf(block)+1)}
	last := rng.To
	rng.Reverse = true
	err := db.View(ctx, func(r store.Reader) error {
		return r.Scan(rng, func(key, value []byte) bool {
			row, err := audit.DecodeIndexRow(value)
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
		return summary{}, audit.ErrDamagedLog
	}
	slices.Reverse(rows)
	return summary{audit.SummaryKey(tenant, block), audit.SummaryOf(rows)}, nil
}

const (
	// followEvery is the interval at which [Follower.KeepFollowing] reads the state of the store.
	// It follows entries that were already there at the previous read and that no process has
	// followed since. So a step and its commit complete within a second, and usually only one of
	// many replicas does the work.
	followEvery = 400 * time.Millisecond

	// damagedPause follows an attempt that found the log damaged. Such an attempt reads as much as
	// a step, and a retry does not repair the log.
	damagedPause = time.Minute

	// LastStep bounds the work that is finished after ctx has ended.
	LastStep = 5 * time.Second
)

// Follower brings the data derived from the chain up to its newest entry: the tiles of the tree,
// the summaries and the newest checkpoint. It has no state of its own.
type Follower struct{ log *Log }

// NewFollower returns the follower of a log.
func NewFollower(l *Log) *Follower { return &Follower{l} }

// storeState is the state of the store that the follower loop compares between reads.
type storeState struct {
	head     uint64
	epoch    uint64
	followed audit.Checkpoint // zero if there is none or it is damaged
	lost     bool             // the store lacks entries that this process has seen
}

// readState reads whether there are entries to follow, by any process, and whether the store still
// has everything that this process has seen.
func (f *Follower) readState(ctx context.Context) (g storeState, err error) {
	since, written := *f.log.Detector.seen.Load(), f.log.heads.written.latest.Load()
	var now audit.Head
	err = f.log.Chain.Store.View(ctx, func(r store.Reader) error {
		head, err := audit.ReadHead(r)
		if err != nil {
			return err
		}
		g.head = head.Sequence
		if g.epoch, err = f.log.Chain.CurrentEpoch(r, head); err != nil {
			return err
		}
		lost, err := f.log.Chain.FindLossSince(r, audit.Head{Position: head, Epoch: g.epoch}, since)
		if g.lost = lost != nil; g.lost || err != nil {
			return err
		}
		_, g.followed, err = f.log.Chain.ReadCheckpoint(r)
		if err != nil {
			return audit.IgnoreDamage(err) // Follow reports the damage
		}
		// Entries under a signed checkpoint, or written by this process, need no verification.
		if now = g.followed.Head(); now.Newer(since) {
			hash, err := entries.ReadHash(r, now.Sequence)
			if err != nil || hash != now.Hash {
				now = audit.Head{}
			}
		}
		if written != nil && written.head == head {
			now = audit.Head{Position: head, Epoch: g.epoch}
		}
		return nil
	})
	if err == nil && now.Sequence > 0 {
		f.log.Detector.noteHead(now)
	}
	return g, err
}

// KeepFollowing calls [Follower.Follow] until ctx ends, and once more afterwards if the checkpoint
// lags. The newest checkpoint lags at most a second behind the entries, whichever process writes
// them. Within the same time, it notices losses that this process detects and losses that another
// process accepts. While nothing is written, it only reads.
func (f *Follower) KeepFollowing(ctx context.Context, logger *slog.Logger) {
	loop := followLoop{Follower: f, logger: logger}
	loop.follow(ctx)
	tick := time.NewTicker(followEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), LastStep)
			defer cancel()
			if f.Lag() > 0 {
				loop.follow(ctx)
			}
			return
		case <-tick.C:
		}
		loop.checkStore(ctx)
	}
}

// followLoop is the state of KeepFollowing between two reads.
type followLoop struct {
	*Follower
	logger      *slog.Logger
	before      storeState
	halted      bool      // the log was halted because it lacks entries
	failed      string    // message of the failure that was logged
	stateFailed string    // the same, of reading the state anew
	retryAfter  time.Time // do not read a damaged log again before this time
}

// readStateAnew has the state go on in an epoch that another process has begun.
func (f *followLoop) readStateAnew(ctx context.Context, g storeState) {
	switch err := f.log.state.Reload(ctx, f.log.Chain.Store, g.head); {
	case err == nil:
		f.log.stateEpoch.Store(g.epoch)
		f.stateFailed = ""
	case f.stateFailed != err.Error():
		f.stateFailed = err.Error()
		f.logger.ErrorContext(ctx, "the state of the stored rows cannot be read after an accepted loss, so rows are refused; retrying", "error", err)
	}
}

// isHaltedForLoss reports whether the log is halted because entries are lost.
func (f *followLoop) isHaltedForLoss() bool {
	var lost *audit.RollbackError
	return errors.As(f.log.Detector.HaltedBy(), &lost)
}

func (f *followLoop) checkStore(ctx context.Context) {
	g, err := f.readState(ctx)
	switch {
	case audit.IsDamage(err):
		if time.Now().After(f.retryAfter) {
			f.follow(ctx)
		}
		return
	case err != nil:
		return // callers that use the store get the error
	}
	before := f.before
	f.before = g
	refused := f.halted || f.isHaltedForLoss()
	if g.lost || refused {
		_, _ = f.log.Detector.CheckForRollback(ctx)
	}
	f.halted = f.isHaltedForLoss()
	if g.epoch != before.epoch && before.epoch > 0 || refused && !f.halted {
		f.log.noteAcceptance(ctx) // the loss was accepted, or the lost entries were restored
		f.retryAfter = time.Time{}
	}
	if g.epoch != f.log.stateEpoch.Load() && !g.lost && !f.halted {
		f.readStateAnew(ctx, g)
	}
	if time.Now().Before(f.retryAfter) && g.followed == before.followed {
		return
	}
	if f.failed != "" || g.followed.Sequence < before.head {
		f.follow(ctx)
	}
}

func (f *followLoop) follow(ctx context.Context) {
	_, err := f.Follow(ctx)
	f.retryAfter = time.Time{}
	switch {
	case err == nil, errors.Is(err, chain.ErrNoCheckpoint): // an empty log has nothing to follow
		if f.failed != "" {
			f.logger.Info("the audit log has checkpoints again")
		}
		f.failed = ""
		return
	case fault.Message(err) != f.failed && ctx.Err() == nil:
		f.failed = fault.Message(err)
		f.logger.Error("the newest entries of the audit log have no checkpoint", "error", err)
	}
	if audit.IsDamage(err) {
		f.retryAfter = time.Now().Add(damagedPause)
	}
}
