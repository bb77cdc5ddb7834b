package postgres

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// copyPage is how many rows are read at a time, copyWait how long that may take,
// and copyLimit how long all of it: PostgreSQL keeps what is deleted meanwhile.
const (
	copyPage  = 128
	copyWait  = 30 * time.Second
	copyLimit = time.Hour
)

var errSlowCopy = fault.New(fault.Unavailable,
	"the copy took longer than an hour and was given up, since PostgreSQL keeps what is deleted meanwhile: write it to a faster disk or network")

// Copy implements [store.Database]. It reads one snapshot in a session of its own,
// between whose fetches emit takes the time it needs. After copyLimit the session
// is closed, even while emit is busy; that of a process that was stopped is ended by
// the server when it has idled for so long.
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
	c, err := s.connect(ctx, tending)
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
