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
	// followEvery is how often [Log.KeepFollowing] looks at the store. What nobody has
	// followed from one look to the next is followed then: so that a step and its
	// commit are done within a second, and of many replicas one does it.
	followEvery = 400 * time.Millisecond

	// damagedPause comes after an attempt that found the log damaged, which
	// reads as much as a step does and is not mended by trying again.
	damagedPause = time.Minute

	// lastStep bounds what is still followed after the end was asked for.
	lastStep = 5 * time.Second
)

// Follower brings what is derived from the chain to its newest entry: the tiles of the tree, the
// summaries and the newest checkpoint. It has no state but the log's.
type Follower struct{ log *Log }

// NewFollower returns a follower of a log.
func NewFollower(l *Log) *Follower { return &Follower{l} }

// storeState is what a look at the store shows.
type storeState struct {
	head     uint64
	epoch    uint64
	followed Checkpoint // the zero one when there is none, or it is damaged
	lost     bool       // of what this process has seen
}

// readState looks whether there is something to follow, whoever has written it, and
// whether all is still there that this process has seen.
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
			return unlessDamage(err) // the follower tells
		}
		// What is signed, or this process has written itself, need not be verified.
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

// KeepFollowing calls [Log.Follow] until ctx ends, and once more then. The newest
// checkpoint is at most a second behind the entries, whichever process writes them,
// and what another accepts or this one finds to be lost is known within the same
// time. While nothing is written, nothing is but looked at.
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

// followLoop is what KeepFollowing knows from one look to the next.
type followLoop struct {
	*Follower
	logger  *slog.Logger
	before  storeState
	refused bool      // the log, for what it lacks
	failed  string    // the kind of trouble that was logged
	pause   time.Time // the log was found damaged, and is looked into again then
}

// lacking reports whether the log is refused for entries that are lost.
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
		return // who asks for something is told
	}
	before := f.before
	f.before = g
	refused := f.refused || f.lacking()
	if g.lost || refused {
		_, _ = f.log.rollbacks.checkForRollback(ctx)
	}
	f.refused = f.lacking()
	if g.epoch != before.epoch && before.epoch > 0 || refused && !f.refused {
		f.log.noteAcceptance(ctx) // somebody has accepted what was lost, or put it back
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
	case err == nil, errors.Is(err, errNoCheckpoint): // of the empty log there is nothing to follow
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
