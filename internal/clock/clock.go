// Package clock gives a process the time of a database that it shares with
// others, whose own clocks may be minutes apart.
//
// What is written down with a time in one process and compared with the time in
// another (how long a ticket counts, which minute a request is of) is right only
// if both go by one clock. That is the database's, asked now and then: between
// two answers its time is told by the process's monotonic clock, so that setting
// the wall clock moves nothing. A measurement is wrong by at most half of what
// the question took.
//
// What does not hold: a database that moves to a machine whose clock is another
// one takes its time along with it, and a virtual machine that was suspended
// tells the time from before until the next answer.
package clock

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
)

// Clock is safe for concurrent use.
type Clock struct {
	ask   func(context.Context) (time.Time, error)
	local func() time.Time

	mu     sync.Mutex
	shared time.Time // at local time at
	at     time.Time // zero before the first answer
}

// New returns a clock that tells the local time until the first [Clock.Measure].
// local is time.Now if it is nil.
func New(ask func(context.Context) (time.Time, error), local func() time.Time) *Clock {
	if local == nil {
		local = time.Now
	}
	return &Clock{ask: ask, local: local}
}

// Now returns the shared time. It asks nobody.
func (c *Clock) Now() time.Time {
	now := c.local()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.at.IsZero() {
		return now
	}
	return c.shared.Add(now.Sub(c.at))
}

// Measure asks for the shared time. Error: fault.Unavailable; then the clock goes
// on as before.
func (c *Clock) Measure(ctx context.Context) error {
	asked := c.local()
	told, err := c.ask(ctx)
	answered := c.local()
	if err != nil {
		return fault.Wrap(fault.Unavailable, "the database does not tell its time: retry", fmt.Errorf("asking for the time: %w", err))
	}
	if apart := told.Sub(answered).Abs(); apart > believable {
		return fault.Wrap(fault.Unavailable, "the clocks of the database and of this machine are more than an hour apart: set the wrong one right",
			fmt.Errorf("they are %s apart", apart.Round(time.Second)))
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if answered.After(c.at) { // answers may overtake each other
		c.shared, c.at = told.UTC().Add(answered.Sub(asked)/2), answered
	}
	return nil
}

// Fresh is [Clock.Measure], unless the last answer is younger than age.
func (c *Clock) Fresh(ctx context.Context, age time.Duration) error {
	c.mu.Lock()
	at := c.at
	c.mu.Unlock()
	if !at.IsZero() && c.local().Sub(at) < age {
		return nil
	}
	return c.Measure(ctx)
}

// Ahead returns how far the shared time is ahead of the wall clock of this
// machine; it is negative if that is fast.
func (c *Clock) Ahead() time.Duration { return c.Now().Round(0).Sub(c.local().Round(0)) }

// believable is how far the clocks of the database and of this machine may be
// apart: beyond it one of them is wrong, nobody can say which, and what would be
// written with its time cannot be taken back.
const believable = time.Hour

const (
	every     = 10 * time.Second
	timeout   = 2 * time.Second
	tolerable = 2 * time.Second // a smaller difference of the clocks is not logged
)

// Follow measures until ctx ends. That the wall clock of this machine is wrong is
// logged when it begins, since logs and metrics are written with its time, and
// so is that it is right again.
func (c *Clock) Follow(ctx context.Context, logger *slog.Logger) {
	logger = cmp.Or(logger, slog.Default())
	tick := time.NewTicker(every)
	defer tick.Stop()
	wrong := false
	for {
		asking, cancel := context.WithTimeout(ctx, timeout)
		err := c.Measure(asking)
		cancel()
		if err == nil { // callers of Fresh report a database that does not answer
			ahead := c.Ahead()
			switch is := ahead.Abs() > tolerable; {
			case is && !wrong:
				logger.Warn("the clock of this machine differs from the database's, whose time counts: set it right", "database_ahead", ahead.Round(time.Millisecond))
			case wrong && !is:
				logger.Info("the clock of this machine is right again")
			}
			wrong = ahead.Abs() > tolerable
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}
