// Package clock gives a process the time of the database that it shares with other processes, whose
// own clocks may be minutes apart.
//
// Some times are written by one process and compared by another, such as the lifetime of a ticket
// or the minute of a request. The comparison is right only if both use one clock. That clock is the
// database's, which the process asks regularly. Between two answers the process measures with its
// monotonic clock, so setting the wall clock changes nothing. A measurement is wrong by at most
// half the time that the question took.
//
// There are two limits. If the database moves to a machine with another clock, its time jumps to
// that clock. A virtual machine that was suspended has an old time until the next answer.
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
	shared time.Time // the shared time when the local time was at
	at     time.Time // zero before the first answer
}

// New returns a clock that tells the local time until the first [Clock.Measure]. A nil local means
// time.Now.
func New(ask func(context.Context) (time.Time, error), local func() time.Time) *Clock {
	if local == nil {
		local = time.Now
	}
	return &Clock{ask: ask, local: local}
}

// Now returns the shared time. It does no I/O.
func (c *Clock) Now() time.Time {
	now := c.local()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.at.IsZero() {
		return now
	}
	return c.shared.Add(now.Sub(c.at))
}

// Measure asks for the shared time. Error: fault.Unavailable. Then the clock continues as before.
func (c *Clock) Measure(ctx context.Context) error {
	asked := c.local()
	told, err := c.ask(ctx)
	answered := c.local()
	if err != nil {
		return fault.Outage(fault.ReasonStore, "the database does not tell its time: retry", fmt.Errorf("asking for the time: %w", err))
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

// Ahead returns how far the shared time is ahead of the wall clock of this machine. It is negative
// if the wall clock is fast.
func (c *Clock) Ahead() time.Duration { return c.Now().Round(0).Sub(c.local().Round(0)) }

// believable is how far the clocks of the database and of this machine may be apart. Beyond it one
// of them is wrong, nobody can say which, and what is written with a wrong time cannot be taken
// back.
const believable = time.Hour

const (
	every     = 10 * time.Second
	timeout   = 2 * time.Second
	tolerable = 2 * time.Second // smaller differences of the clocks are not logged
)

// Follow measures until ctx ends. It logs when the wall clock of this machine becomes wrong,
// because logs and metrics are written with its time, and when the clock is right again.
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
