package keeper

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/entries"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/format"
)

const (
	// freshEntries is the number of newest entries that keep rows of their own. Most reads, and all
	// that commits wait for, are of these.
	freshEntries = 4096

	// packBlocks is the number of blocks that one transaction packs, some 500 KB of rows. Commits wait
	// for it.
	packBlocks = 4

	// packEvery is the time between two passes.
	packEvery = 5 * time.Second

	// packShare is how many entries a pass may pack for each one that was closed since the pass before.
	// With more than one, those that an earlier release wrote are packed too, but no faster than new
	// entries use the pages that this frees: an embedded store reads all of its free pages whenever it
	// wipes deleted rows.
	packShare = 2
)

// Packer moves closed entries into packs: those that a checkpoint covers, but for the newest ones. A
// crash leaves each block either packed or not, and the next pass goes on. If several packers run on
// one database, only one of them packs a given block. A packer verifies nothing: a row comes out of
// its pack as it went in, sound or not.
type Packer struct {
	Log *writer.Log
	// Ready reports whether all processes that use the database read packs. Nil: they do. It is asked
	// at most once a minute: an older process cannot start once there is a pack.
	Ready  func(ctx context.Context) (bool, error)
	Logger *slog.Logger

	Fresh uint64 // number of newest entries that keep rows of their own; 0: 4096

	next   uint64 // the search for the next block starts here
	closed uint64 // newest closed entry of the pass before; 0 before the first
	due    uint64 // entries that may be packed

	asked    time.Time // when Ready last answered
	answered bool      // what it said
}

// Keep packs entries until ctx ends.
func (p *Packer) Keep(ctx context.Context) {
	failed := ""
	for {
		began := time.Now()
		err := p.pass(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case err == nil, p.Log.Detector.HaltedBy() != nil: // a halt is logged already, and ends by itself or by somebody's word
			failed = ""
		case failed != err.Error():
			failed = err.Error()
			p.Logger.WarnContext(ctx, "entries of the audit log could not be packed; retrying", "in", packEvery, "error", err)
		}
		pause(ctx, max(packEvery, time.Since(began)))
	}
}

// pass packs what has become due since the pass before.
func (p *Packer) pass(ctx context.Context) error {
	closed, err := p.closedTo(ctx)
	if err != nil {
		return err
	}
	if p.closed > 0 && closed > p.closed {
		p.due += packShare * (closed - p.closed)
	}
	p.closed = closed
	packed, err := p.Pack(ctx, p.due)
	p.due -= min(p.due, packed)
	return err
}

// Pack packs up to most closed entries, whole blocks only, and returns how many it has packed. It
// takes at most half of one core. Errors: fault.Unavailable, or why the log is halted.
func (p *Packer) Pack(ctx context.Context, most uint64) (packed uint64, err error) {
	closed, err := p.closedTo(ctx)
	if err != nil {
		return 0, err
	}
	for more := true; more && ctx.Err() == nil && packed+entries.BlockSize <= most; {
		began := time.Now()
		var found []*entries.Block
		n := int(min(packBlocks, (most-packed)/entries.BlockSize))
		err := p.Log.Chain.Store.View(ctx, func(r store.Reader) (err error) {
			found, p.next, err = entries.FindBlocks(r, p.next, closed, n)
			return err
		})
		if err != nil {
			return packed, fmt.Errorf("looking for entries to pack: %w", err)
		}
		more = len(found) == n
		found = slices.DeleteFunc(found, func(b *entries.Block) bool { return !b.Encode() })
		if len(found) == 0 {
			continue
		}
		if ready, err := p.ready(ctx); err != nil || !ready {
			p.next = 0
			return packed, err
		}
		done, err := p.put(ctx, found)
		if err != nil {
			p.next = 0 // some of these are still to be packed
			return packed, fmt.Errorf("packing entries: %w", err)
		}
		packed += done
		pause(ctx, time.Since(began))
	}
	return packed, nil
}

// askEvery is how long an answer of Ready holds.
const askEvery = time.Minute

func (p *Packer) ready(ctx context.Context) (ready bool, err error) {
	if p.Ready == nil {
		return true, nil
	}
	if !p.asked.IsZero() && time.Since(p.asked) < askEvery {
		return p.answered, nil
	}
	if ready, err = p.Ready(ctx); err == nil {
		p.asked, p.answered = time.Now(), ready
	}
	return ready, err
}

// closedTo returns the newest sequence that may be packed.
func (p *Packer) closedTo(ctx context.Context) (closed uint64, err error) {
	if err := p.Log.CheckNotHalted(); err != nil {
		return 0, err
	}
	err = p.Log.Chain.Store.View(ctx, func(r store.Reader) error {
		head, err := audit.ReadHead(r)
		if err != nil {
			return err
		}
		_, followed, err := p.Log.Chain.ReadCheckpoint(r)
		closed = min(followed.Sequence, head.Sequence-min(head.Sequence, cmp.Or(p.Fresh, freshEntries)))
		return err
	})
	return closed, err
}

// put replaces the rows of blocks by their packs, and returns how many entries these have. The first
// pack keeps releases away that do not read packs.
func (p *Packer) put(ctx context.Context, blocks []*entries.Block) (packed uint64, err error) {
	err = p.Log.Chain.Store.Update(ctx, func(tx store.Tx) error {
		packed = 0
		for _, b := range blocks {
			done, err := b.Put(tx)
			if err != nil {
				return err
			}
			if done {
				packed += entries.BlockSize
			}
		}
		if packed == 0 {
			return nil
		}
		return format.Raise(tx, format.Packs, format.Packs)
	})
	return packed, err
}

// pause waits for d or the end of ctx.
func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}
