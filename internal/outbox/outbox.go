// Package outbox hands on what waits in rows of the store: a mail, or the delivery of a webhook.
//
// # Model
//
// A caller puts a row in the transaction of the change that it reports ([Outbox.Put]), so there is a
// row exactly if there is that change. [Outbox.Run] gives each row to a [Deliver], which says what
// becomes of it. No request waits for another system.
//
// # Invariants
//
//   - A row survives a restart. One of the running replicas delivers it, at least once. It is delivered
//     twice only if a process crashes between the delivery and its commit, or stands still there for
//     longer than an attempt. If a replica crashes while it has claimed a row, another one delivers it
//     after twice the time of an attempt.
//   - Many rows that fail do not hold up a new one.
//
// The package knows nothing of what the rows mean.
package outbox

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Config says which rows are delivered, and when. All fields are required.
type Config struct {
	Store    store.Store
	Noun     string // what a row is, in the log: "mail"
	Retrying string // line of the log for an attempt that failed
	GivingUp string // line of the log for a row that is given up
	Rows     string // begins the keys of the rows, before the id
	Attempts string // begins the keys of the rows of [attempt], before the id
	Timeout  time.Duration
	Parallel int                            // rows delivered at the same time
	Wait     func(failed int) time.Duration // time to the next attempt after so many that failed, at least 1
	Longest  time.Duration                  // the longest Wait
	Now      func() time.Time
}

// Item is a row to be delivered.
type Item struct {
	ID     string
	Key    []byte
	Row    []byte
	Failed int // earlier attempts that failed
}

// Deliver tries a row once. It gives up when ctx ends. Calls are concurrent.
type Deliver func(ctx context.Context, i Item) Outcome

// Outcome is what an attempt ended with.
type Outcome struct {
	Err   error     // why it failed; nil: the row is delivered
	Final bool      // if Err is set: no later attempt can succeed, so the row is given up
	Quiet bool      // if Err is nil: nothing was delivered, and the row only goes
	Made  time.Time // when the row was made; zero if that is not known
	Kind  string    // kind of the row, for the log
	// Note is part of the transaction that stores the outcome; nil for nothing to store.
	Note func(tx store.Tx) error
}

const (
	firstRetry   = time.Second // after a failure of the store
	pollInterval = time.Minute // finds rows without a call of Notify
	passSize     = 32          // rows per pass, so new ones do not wait long behind many that fail
	countSize    = 1024        // rows that a pass counts
)

// Outbox keeps rows until they are delivered. It is safe for concurrent use.
type Outbox struct {
	config Config
	wake   chan struct{} // capacity 1

	mu    sync.Mutex // guards stats
	stats Stats
}

// New returns the outbox of a store.
func New(c Config) *Outbox { return &Outbox{config: c, wake: make(chan struct{}, 1)} }

// Stats says how the deliveries go. The counts are those of this process.
type Stats struct {
	Queued                   int       // rows at the last look; from countSize on perhaps more
	Oldest                   time.Time // when the oldest row was made that this process failed to deliver; zero for none
	Sent, Postponed, GivenUp uint64    // attempts by result
}

// Stats returns the present state.
func (o *Outbox) Stats() Stats {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.stats
}

func (o *Outbox) note(change func(*Stats)) {
	o.mu.Lock()
	defer o.mu.Unlock()
	change(&o.stats)
}

// Notify tells [Outbox.Run] that a row was stored. It never blocks. Without it the row is delivered
// within a minute.
func (o *Outbox) Notify() {
	select {
	case o.wake <- struct{}{}:
	default: // Run has an unread notice already
	}
}

// Key returns the key of a row.
func (c Config) Key(id string) []byte { return []byte(c.Rows + id) }

func (c Config) attemptKey(id string) []byte { return []byte(c.Attempts + id) }

// Put stores a row that no attempt was made at. After the commit, the caller calls [Outbox.Notify], so
// it is delivered at once.
func (o *Outbox) Put(tx store.Tx, id string, row []byte) error {
	return errors.Join(tx.Put(o.config.Key(id), row), tx.Delete(o.config.attemptKey(id)))
}

// Delete deletes a row. An attempt in progress may still deliver it.
func (o *Outbox) Delete(tx store.Tx, id string) error {
	return errors.Join(tx.Delete(o.config.Key(id)), tx.Delete(o.config.attemptKey(id)))
}

// Next returns when the next attempt at a row is made; zero: at once, or it is being made.
func (o *Outbox) Next(r store.Reader, id string) (time.Time, error) {
	stored, err := r.Get(o.config.attemptKey(id))
	var a attempt
	if err != nil || stored == nil || json.Unmarshal(stored, &a) != nil {
		return time.Time{}, err
	}
	return a.Next, nil
}

// Queued returns how many rows wait in a store under a prefix; from 1,024 on perhaps more. Error:
// fault.Unavailable.
func Queued(ctx context.Context, s store.Store, prefix string) (n int, err error) {
	err = s.View(ctx, func(r store.Reader) error {
		n = 0
		return r.Scan(store.Prefix([]byte(prefix)), func(_, _ []byte) bool {
			n++
			return n < countSize
		})
	})
	return n, err
}

// Run delivers what is in the outbox until ctx ends. It may run in several replicas on one store: one
// of them delivers each row. It logs and retries failures of a delivery and of the store.
func (o *Outbox) Run(ctx context.Context, logger *slog.Logger, deliver Deliver) {
	c := o.Courier(logger, deliver)
	for ctx.Err() == nil {
		wait, err := c.Pass(ctx)
		if err != nil && ctx.Err() == nil {
			c.logger.Error("the "+o.config.Noun+" outbox cannot be used; retrying", "in", firstRetry, "error", err)
			wait = firstRetry
		}
		if wait <= 0 {
			continue
		}
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
		case <-o.wake:
		case <-timer.C:
		}
		timer.Stop()
	}
}

// Courier is the state of one Run.
type Courier struct {
	*Outbox
	logger    *slog.Logger
	send      Deliver
	watched   sightings
	restarted bool // true until a pass finds no row due

	mu    sync.Mutex
	tries map[string]try // keyed by id; only rows that failed in this replica
}

type try struct {
	failures int
	next     time.Time
	created  time.Time // when the row was made; zero if that is not known
}

// Courier returns the state of a Run, for a caller that makes its passes itself. A nil logger is the
// default one.
func (o *Outbox) Courier(logger *slog.Logger, deliver Deliver) *Courier {
	if logger == nil {
		logger = slog.Default()
	}
	return &Courier{Outbox: o, logger: logger, send: deliver, watched: make(sightings), restarted: true, tries: make(map[string]try)}
}

// letter is a row of the outbox.
type letter struct {
	Item
	attempt []byte // row of attempts; nil before the first
}

// Pass tries the rows that are due. It returns how long Run may wait for the next pass if nobody calls
// Notify.
func (c *Courier) Pass(ctx context.Context) (time.Duration, error) {
	due, wait, err := c.due(ctx)
	if err != nil {
		return 0, err
	}
	var group errgroup.Group
	group.SetLimit(c.config.Parallel)
	for _, l := range due {
		group.Go(func() error {
			c.deliver(ctx, l)
			return nil
		})
	}
	_ = group.Wait() // deliver handles failures itself
	if len(due) > 0 {
		return 0, nil // other rows may be due by now
	}
	return wait, nil
}

// due returns up to passSize rows that may be tried now. If there are none, wait is the time until one
// may be.
func (c *Courier) due(ctx context.Context) (due []letter, wait time.Duration, err error) {
	now := c.config.Now()
	wait = pollInterval
	there := make(map[string]bool)
	queued := 0
	err = c.config.Store.View(ctx, func(r store.Reader) error {
		var failed error
		due, queued = nil, 0 // a View may run its closure again
		err := r.Scan(store.Prefix([]byte(c.config.Rows)), func(key, row []byte) bool {
			if queued++; len(due) == passSize {
				return queued < countSize
			}
			l := letter{Item: Item{ID: strings.TrimPrefix(string(key), c.config.Rows), Key: bytes.Clone(key)}}
			var stored []byte
			if stored, failed = r.Get(c.config.attemptKey(l.ID)); failed != nil {
				return false
			}
			l.attempt = bytes.Clone(stored)
			there[l.ID] = true
			if left := max(c.next(l.ID).Sub(now), c.watched.wait(c.config, l, now, c.restarted)); left > 0 {
				wait = min(wait, left)
				return true
			}
			l.Row = bytes.Clone(row)
			due = append(due, l)
			return true
		})
		return errors.Join(err, failed)
	})
	if err != nil {
		return nil, 0, fmt.Errorf("reading the outbox: %w", err)
	}
	c.note(func(s *Stats) { s.Queued, s.Oldest = queued, c.oldest() })
	if len(due) < passSize { // the scan has seen all rows
		c.forget(there)
		c.restarted = c.restarted && len(due) > 0
	}
	return due, wait, nil
}

// oldest returns when the oldest row was made that failed in this replica.
func (c *Courier) oldest() (at time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, t := range c.tries {
		if !t.created.IsZero() && (at.IsZero() || t.created.Before(at)) {
			at = t.created
		}
	}
	return at
}

// forget removes the state of rows that are no longer in the outbox.
func (c *Courier) forget(there map[string]bool) {
	maps.DeleteFunc(c.watched, func(id string, _ sighting) bool { return !there[id] })
	c.mu.Lock()
	defer c.mu.Unlock()
	maps.DeleteFunc(c.tries, func(id string, _ try) bool { return !there[id] })
}

func (c *Courier) next(id string) time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.tries[id].next
}

// deliver tries one row, unless another replica has claimed it, and then removes it, gives up on it or
// postpones it. Its timeout begins before the claim, so a process that was stopped after the claim
// finds the timeout over.
func (c *Courier) deliver(ctx context.Context, l letter) {
	sending, cancel := context.WithTimeout(ctx, c.config.Timeout)
	defer cancel()
	switch claimed, err := c.claim(sending, &l); {
	case err != nil:
		c.postpone(ctx, l, Outcome{Err: err})
		return
	case !claimed:
		return
	}
	switch out := c.send(sending, l.Item); {
	case out.Err == nil:
		if !out.Quiet {
			c.note(func(s *Stats) { s.Sent++ })
		}
		c.remove(ctx, l, out)
	case out.Final:
		c.note(func(s *Stats) { s.GivenUp++ })
		c.logger.Error(c.config.GivingUp, c.config.Noun, l.ID, "kind", out.Kind, "why", out.Err)
		c.remove(ctx, l, out)
	default:
		c.postpone(ctx, l, out)
	}
}

// postpone makes a row wait for its next attempt in any replica. If that cannot be stored, this
// replica still remembers it, and the others end the claim by watching it.
func (c *Courier) postpone(ctx context.Context, l letter, out Outcome) {
	storing, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.config.Timeout)
	defer cancel()
	if ctx.Err() != nil { // the end of Run is no failure of the row
		_ = c.release(storing, l, attempt{Failures: l.Failed}, nil)
		return
	}
	c.mu.Lock()
	failures := max(l.Failed, c.tries[l.ID].failures) + 1
	wait := c.config.Wait(failures)
	next := try{failures, c.config.Now().Add(wait), out.Made}
	c.tries[l.ID] = next
	c.mu.Unlock()
	c.note(func(s *Stats) { s.Postponed++ })
	failed := c.release(storing, l, attempt{Failures: failures, Next: next.next.UTC()}, out.Note)
	c.logger.Warn(c.config.Retrying, c.config.Noun, l.ID, "kind", out.Kind, "in", wait, "error", errors.Join(out.Err, failed))
}

// remove deletes a finished row, even if ctx has ended meanwhile. Otherwise it would be delivered
// twice. One that this replica gives up on goes only if no other one has taken it over.
func (c *Courier) remove(ctx context.Context, l letter, out Outcome) {
	deleting, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.config.Timeout)
	defer cancel()
	err := c.config.Store.Update(deleting, func(tx store.Tx) error {
		now, err := tx.Get(c.config.attemptKey(l.ID))
		if err != nil || out.Final && !bytes.Equal(now, l.attempt) { // another replica took it over, or it was put again
			return err
		}
		return errors.Join(c.Delete(tx, l.ID), out.in(tx))
	})
	if err != nil {
		c.postpone(ctx, l, Outcome{Err: fmt.Errorf("removing a %s from the outbox: %w", c.config.Noun, err), Made: out.Made})
		return
	}
	c.mu.Lock()
	delete(c.tries, l.ID)
	c.mu.Unlock()
}

func (o Outcome) in(tx store.Tx) error {
	if o.Note == nil {
		return nil
	}
	return o.Note(tx)
}

// attempt records the attempts at a row, in a row of its own that does not exist before the first one.
// A replica claims a row there before it delivers it, so only one of several replicas does.
//
// A claim ends when its replica releases it. If the replica does not, the others watch the claim. They
// take it over when they have seen it unchanged for twice the time of an attempt. They measure that by
// their own clocks, because the clocks of other machines may be minutes apart.
type attempt struct {
	Claim    string    `json:"claim,omitempty"` // id of the attempt in progress, or of one whose process ended
	Failures int       `json:"failures,omitempty"`
	Next     time.Time `json:"next,omitzero"` // no attempt before this
}

// claimTime is the longest time of an attempt, plus as much again to store its outcome.
func (c Config) claimTime() time.Duration { return 2 * c.Timeout }

// sighting is a claim of another replica, and the time since which this replica has seen it.
type sighting struct {
	row   string
	since time.Time
}

// sightings are the watched claims of other replicas. Only [Outbox.Run] uses them.
type sightings map[string]sighting // keyed by id

// wait returns how long this replica must not deliver the row. After a restart it ignores the time of
// the next attempt, because the cause of the failure may be gone.
func (s sightings) wait(c Config, l letter, now time.Time, restarted bool) time.Duration {
	var a attempt
	if l.attempt == nil || json.Unmarshal(l.attempt, &a) != nil { // a damaged row delays nothing
		return 0
	}
	if a.Claim == "" {
		if restarted {
			return 0
		}
		return min(a.Next.Sub(now), c.Longest) // a longer wait was written by a wrong clock
	}
	seen, known := s[l.ID]
	if !known || seen.row != string(l.attempt) || now.Before(seen.since) {
		seen = sighting{string(l.attempt), now}
		s[l.ID] = seen
	}
	return seen.since.Add(c.claimTime()).Sub(now)
}

// claim reserves a row for this replica, unless another one was faster.
func (c *Courier) claim(ctx context.Context, l *letter) (claimed bool, err error) {
	var a attempt
	if l.attempt != nil && json.Unmarshal(l.attempt, &a) != nil {
		a = attempt{}
	}
	a.Claim, a.Next = authz.NewID("claim"), time.Time{}
	row, err := json.Marshal(a)
	if err != nil {
		return false, err
	}
	err = c.config.Store.Update(ctx, func(tx store.Tx) error {
		claimed = false
		waits, err := tx.Get(l.Key)
		if err != nil || waits == nil {
			return err
		}
		now, err := tx.Get(c.config.attemptKey(l.ID))
		if err != nil || !bytes.Equal(now, l.attempt) {
			return err
		}
		claimed = true
		return tx.Put(c.config.attemptKey(l.ID), row)
	})
	if err != nil {
		return false, fmt.Errorf("claiming a %s: %w", c.config.Noun, err)
	}
	if claimed {
		l.attempt, l.Failed = row, a.Failures
	}
	return claimed, nil
}

// release ends the claim on a row that was not delivered, unless another replica has taken it over.
func (c *Courier) release(ctx context.Context, l letter, a attempt, note func(store.Tx) error) error {
	row, err := json.Marshal(a)
	if err != nil {
		return err
	}
	err = c.config.Store.Update(ctx, func(tx store.Tx) error {
		now, err := tx.Get(c.config.attemptKey(l.ID))
		if err != nil || !bytes.Equal(now, l.attempt) {
			return err
		}
		return errors.Join(tx.Put(c.config.attemptKey(l.ID), row), Outcome{Note: note}.in(tx))
	})
	if err != nil {
		return fmt.Errorf("releasing a %s: %w", c.config.Noun, err)
	}
	return nil
}
