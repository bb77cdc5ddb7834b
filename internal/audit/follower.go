package audit

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

const (
	// followEvery is the interval at which [Follower.KeepFollowing] reads the state of the store.
	// It follows entries that were already there at the previous read and that no process has
	// followed since. So a step and its commit complete within a second, and usually only one of
	// many replicas does the work.
	followEvery = 400 * time.Millisecond

	// damagedPause follows an attempt that found the log damaged. Such an attempt reads as much as
	// a step, and a retry does not repair the log.
	damagedPause = time.Minute

	// lastStep bounds the work that is finished after ctx has ended.
	lastStep = 5 * time.Second
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
	followed Checkpoint // zero if there is none or it is damaged
	lost     bool       // the store lacks entries that this process has seen
}

// readState reads whether there are entries to follow, by any process, and whether the store still
// has everything that this process has seen.
func (f *Follower) readState(ctx context.Context) (g storeState, err error) {
	since, written := *f.log.rollbacks.seen.Load(), f.log.heads.written.latest.Load()
	var now Head
	err = f.log.chain.store.View(ctx, func(r store.Reader) error {
		head, err := readHead(r)
		if err != nil {
			return err
		}
		g.head = head.sequence
		if g.epoch, err = f.log.chain.epochNow(r, head); err != nil {
			return err
		}
		lost, err := f.log.chain.lacks(r, Head{head, g.epoch}, since)
		if g.lost = lost != nil; g.lost || err != nil {
			return err
		}
		_, g.followed, err = f.log.chain.checkpointIn(r)
		if err != nil {
			return unlessDamage(err) // Follow reports the damage
		}
		// Entries under a signed checkpoint, or written by this process, need no verification.
		if now = g.followed.Head(); now.newer(since) {
			hash, err := hashOf(r, now.sequence)
			if err != nil || hash != now.hash {
				now = Head{}
			}
		}
		if written != nil && written.head == head {
			now = Head{head, g.epoch}
		}
		return nil
	})
	if err == nil && now.sequence > 0 {
		f.log.rollbacks.noteHead(now)
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
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastStep)
			defer cancel()
			if f.Lag() > 0 {
				loop.follow(ctx)
			}
			return
		case <-tick.C:
		}
		loop.look(ctx)
	}
}

// followLoop is the state of KeepFollowing between two reads.
type followLoop struct {
	*Follower
	logger  *slog.Logger
	before  storeState
	refused bool      // the log was halted because it lacks entries
	failed  string    // message of the failure that was logged
	pause   time.Time // do not read a damaged log again before this time
}

// lacking reports whether the log is halted because entries are lost.
func (f *followLoop) lacking() bool {
	var lost *RollbackError
	return errors.As(f.log.rollbacks.HaltedBy(), &lost)
}

func (f *followLoop) look(ctx context.Context) {
	g, err := f.readState(ctx)
	switch {
	case damaged(err):
		if time.Now().After(f.pause) {
			f.follow(ctx)
		}
		return
	case err != nil:
		return // callers that use the store get the error
	}
	before := f.before
	f.before = g
	refused := f.refused || f.lacking()
	if g.lost || refused {
		_, _ = f.log.rollbacks.checkForRollback(ctx)
	}
	f.refused = f.lacking()
	if g.epoch != before.epoch && before.epoch > 0 || refused && !f.refused {
		f.log.noteAcceptance(ctx) // the loss was accepted, or the lost entries were restored
		f.pause = time.Time{}
	}
	if time.Now().Before(f.pause) && g.followed == before.followed {
		return
	}
	if f.failed != "" || g.followed.Sequence < before.head {
		f.follow(ctx)
	}
}

func (f *followLoop) follow(ctx context.Context) {
	_, err := f.Follow(ctx)
	f.pause = time.Time{}
	switch {
	case err == nil, errors.Is(err, errNoCheckpoint): // an empty log has nothing to follow
		if f.failed != "" {
			f.logger.Info("the audit log has checkpoints again")
		}
		f.failed = ""
		return
	case fault.Message(err) != f.failed && ctx.Err() == nil:
		f.failed = fault.Message(err)
		f.logger.Error("the newest entries of the audit log have no checkpoint", "error", err)
	}
	if damaged(err) {
		f.pause = time.Now().Add(damagedPause)
	}
}
