package postgres

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// copyPage is the number of rows per read, and copyWait the limit for one read.
const (
	copyPage = 128
	copyWait = 30 * time.Second
)

var errSlowCopy = fault.New(fault.Unavailable,
	"the copy took longer than an hour and was given up, since PostgreSQL keeps what is deleted meanwhile: write it to a faster disk or network")

// Copy implements [store.Database]. It reads one snapshot in a session of its own, and calls emit
// between the fetches. After copyLimit it closes the session, even while emit is busy. If the
// process was stopped, the server ends the session after it has idled for copyLimit.
func (s *Store) Copy(ctx context.Context, emit func(key, value []byte) error) error {
	if !s.enter() {
		return errClosed()
	}
	defer s.leave()
	if !s.copying.CompareAndSwap(false, true) {
		return fault.New(fault.Conflict, "another copy of the store is being made: wait until it is done")
	}
	defer s.copying.Store(false)
	if err := ctx.Err(); err != nil {
		return ended(err)
	}
	c, err := s.server.connect(ctx, tending)
	if err != nil {
		return answer(err)
	}
	defer c.kill()
	var late atomic.Bool
	limit := time.AfterFunc(s.opts.copyLimit, func() {
		late.Store(true)
		_ = c.pg.Conn().Close()
	})
	defer limit.Stop()
	before := []step{{statement: snapshot}}
	for rest, more := (store.Range{}), true; more; {
		a := &ask{rg: rest, limit: copyPage}
		if err := c.read(copyWait, before, []*ask{a}); err != nil {
			if late.Load() {
				return errSlowCopy
			}
			return answer(err)
		}
		before = nil
		for _, row := range a.rows {
			if err := ctx.Err(); err != nil {
				return ended(err)
			}
			if late.Load() {
				return errSlowCopy
			}
			if err := emit(row.key, row.value); err != nil {
				return err
			}
			rest = after(rest, row.key)
		}
		more = len(a.rows) == copyPage
	}
	return nil
}
