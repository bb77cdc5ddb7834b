package app

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/latticekeep/latticekeep/internal/clock"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store/postgres"
)

// sharedClock tells the time of the database that replicas share. It is made
// before the store is, whose hook tells the time of entries by it.
type sharedClock struct {
	*clock.Clock
	store atomic.Pointer[postgres.Store]
}

func newSharedClock() *sharedClock {
	c := new(sharedClock)
	c.Clock = clock.New(func(ctx context.Context) (time.Time, error) {
		s := c.store.Load()
		if s == nil {
			return time.Time{}, fault.New(fault.Unavailable, "the database is not open yet")
		}
		return s.Time(ctx)
	}, nil)
	return c
}

// of has the clock tell the time of a store.
func (c *sharedClock) of(ctx context.Context, s *postgres.Store) error {
	c.store.Store(s)
	return c.Measure(ctx)
}
