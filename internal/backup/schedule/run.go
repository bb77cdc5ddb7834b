package schedule

import (
	"context"
	"errors"
	"time"
)

// Run takes backups when they are due, until ctx ends.
func (s *Schedule) Run(ctx context.Context) {
	tick := time.NewTicker(look)
	defer tick.Stop()
	var begun <-chan struct{}
	if s.commits != nil {
		begun = s.commits.Begun()
		select {
		case <-s.commits.Tried(): // so that the first backup is one that its log goes on after
		case <-ctx.Done():
		}
	}
	for {
		_ = s.RunOnce(ctx) // it has logged the error
		select {
		case <-tick.C:
		case <-begun:
		case <-ctx.Done():
			return
		}
	}
}

// RunOnce takes a backup if one is due and no other replica takes it. While the audit log is halted
// nothing can be written, and the halt is already logged. It logs and counts what fails.
func (s *Schedule) RunOnce(ctx context.Context) error {
	if s.Log.HaltedBy() != nil {
		return nil
	}
	c, err := s.claim(ctx)
	if err != nil || c == nil {
		if err != nil && ctx.Err() == nil {
			s.failed(ctx, Take, "looking whether a backup is due failed; retrying", err, "in", look)
		}
		return err
	}
	working, stopRenewing := s.renew(ctx, c)
	written, err := s.take(working, c)
	if err == nil {
		err = s.finish(working, c, written)
	}
	if err != nil {
		if lost := context.Cause(working); errors.Is(lost, errTakenOver) {
			err = lost
		}
		stopRenewing()
		pause := s.giveUp(ctx, c, err)
		if ctx.Err() == nil {
			s.failed(ctx, Take, "taking a backup failed; retrying", err, "in", pause)
		}
		return err
	}
	defer written.Wipe()
	s.Logger.InfoContext(ctx, "took a backup", "object", c.Attempt)
	err = s.verify(working, c, written)
	stopRenewing()
	switch {
	case err != nil && ctx.Err() == nil:
		s.failed(ctx, Verify, "a backup was taken, but could not be restored and verified; none is deleted meanwhile", err, "object", c.Attempt)
	case err == nil:
		s.Logger.InfoContext(ctx, "restored the backup into a scratch store and verified it", "object", c.Attempt)
		if err = s.expire(ctx, c); err != nil && ctx.Err() == nil {
			s.failed(ctx, Delete, "deleting old backups failed; retrying after the next backup", err)
		}
	}
	return err
}

func (s *Schedule) failed(ctx context.Context, step Step, message string, err error, attrs ...any) {
	s.mu.Lock()
	s.failures[step]++
	s.mu.Unlock()
	s.Logger.ErrorContext(ctx, message, append(attrs, "error", err)...)
}
