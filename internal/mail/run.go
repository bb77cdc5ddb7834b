package mail

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
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Transport hands a mail on. Send returns nil once another system is responsible for the mail, an
// error that wraps [ErrRefused] if no later attempt can succeed, and any other error if one may. It
// gives up when ctx ends. An error quotes neither the address nor the text. Calls are concurrent.
type Transport interface {
	Send(ctx context.Context, e Envelope) error
}

const (
	firstRetry, lastRetry = time.Second, time.Hour // the wait after a failure doubles from first to last
	sendTimeout           = 30 * time.Second
	pollInterval          = time.Minute // finds mails without a call of Notify
	parallel              = 4           // mails sent at the same time
	passSize              = 32          // mails per pass, so new mails do not wait long behind many that fail
	countSize             = 1024        // mails that a pass counts
)

// Queued returns how many mails wait in a store; from 1,024 on perhaps more. Error: fault.Unavailable.
func Queued(ctx context.Context, s store.Store) (n int, err error) {
	err = s.View(ctx, func(r store.Reader) error {
		n = 0
		return r.Scan(store.Prefix([]byte(rowPrefix)), func(_, _ []byte) bool {
			n++
			return n < countSize
		})
	})
	if err != nil {
		return 0, fmt.Errorf("counting the mails that wait: %w", err)
	}
	return n, nil
}

// Run sends what is in the outbox until ctx ends, and then returns nil. It may run in several
// replicas on one store: one of them sends each mail. It logs and retries failures of a mail, the
// mail server, the store or the KMS.
func (o *Outbox) Run(ctx context.Context, t Transport, opts Options) error {
	if t == nil || opts.PublicURL == "" || opts.From == "" {
		return errors.New("sending mails: transport, public URL and sender are required")
	}
	if opts.Logger == nil {
		opts.Logger = slog.Default()
	}
	c := newCourier(o, t, opts)
	for ctx.Err() == nil {
		wait, err := c.pass(ctx)
		if err != nil && ctx.Err() == nil {
			c.options.Logger.Error("the mail outbox cannot be used; retrying", "in", firstRetry, "error", err)
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
	return nil
}

// courier is the state of one Run.
type courier struct {
	*Outbox
	transport Transport
	options   Options
	watched   sightings
	restarted bool // true until a pass finds no mail due

	mu    sync.Mutex
	tries map[string]try // keyed by row key; only mails that failed in this replica
}

type try struct {
	failures int
	next     time.Time
	created  time.Time // when the mail was made; zero if it could not be opened
}

func newCourier(o *Outbox, t Transport, opts Options) *courier {
	return &courier{Outbox: o, transport: t, options: opts, watched: make(sightings), restarted: true, tries: make(map[string]try)}
}

// letter is a row of the outbox.
type letter struct {
	key, row []byte
	attempt  []byte // row of attempts; nil before the first
	failures int    // set by claim
	created  time.Time
}

func (l letter) id() string { return strings.TrimPrefix(string(l.key), rowPrefix) }

// pass tries the mails that are due. It returns how long Run may wait for the next pass if nobody
// calls Notify.
func (c *courier) pass(ctx context.Context) (time.Duration, error) {
	due, wait, err := c.due(ctx)
	if err != nil {
		return 0, err
	}
	var group errgroup.Group
	group.SetLimit(parallel)
	for _, l := range due {
		group.Go(func() error {
			c.deliver(ctx, l)
			return nil
		})
	}
	_ = group.Wait() // deliver handles failures itself
	if len(due) > 0 {
		return 0, nil // other mails may be due by now
	}
	return wait, nil
}

// due returns up to passSize mails that may be tried now. If there are none, wait is the time until
// one may be.
func (c *courier) due(ctx context.Context) (due []letter, wait time.Duration, err error) {
	now := c.now()
	wait = pollInterval
	there := make(map[string]bool)
	queued := 0
	err = c.store.View(ctx, func(r store.Reader) error {
		var failed error
		due, queued = nil, 0 // a View may run its closure again
		err := r.Scan(store.Prefix([]byte(rowPrefix)), func(key, row []byte) bool {
			if queued++; len(due) == passSize {
				return queued < countSize
			}
			l := letter{key: bytes.Clone(key)}
			var stored []byte
			if stored, failed = r.Get(l.attemptKey()); failed != nil {
				return false
			}
			l.attempt = bytes.Clone(stored)
			there[l.id()] = true
			if left := max(c.next(key).Sub(now), c.watched.wait(l, now, c.restarted)); left > 0 {
				wait = min(wait, left)
				return true
			}
			l.row = bytes.Clone(row)
			due = append(due, l)
			return true
		})
		return errors.Join(err, failed)
	})
	if err != nil {
		return nil, 0, fmt.Errorf("reading the outbox: %w", err)
	}
	c.note(func(s *Stats) { s.Queued, s.Oldest = queued, c.oldest() })
	if len(due) < passSize { // the scan has seen all mails
		c.forget(there)
		c.restarted = c.restarted && len(due) > 0
	}
	return due, wait, nil
}

// oldest returns when the oldest mail was made that failed in this replica.
func (c *courier) oldest() (at time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, t := range c.tries {
		if !t.created.IsZero() && (at.IsZero() || t.created.Before(at)) {
			at = t.created
		}
	}
	return at
}

// forget removes the state of mails that are no longer in the outbox.
func (c *courier) forget(there map[string]bool) {
	gone := func(id string) bool { return !there[id] }
	maps.DeleteFunc(c.watched, func(id string, _ sighting) bool { return gone(id) })
	c.mu.Lock()
	defer c.mu.Unlock()
	maps.DeleteFunc(c.tries, func(key string, _ try) bool { return gone(letter{key: []byte(key)}.id()) })
}

func (c *courier) next(key []byte) time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.tries[string(key)].next
}

// deliver tries one mail, unless another replica has claimed it, and then removes it, gives up on
// it or postpones it. Its timeout begins before the claim, so a process that was stopped after the
// claim finds the timeout over.
func (c *courier) deliver(ctx context.Context, l letter) {
	sending, cancel := context.WithTimeout(ctx, sendTimeout)
	defer cancel()
	m, err := c.open(ctx, l)
	l.created = m.CreatedAt
	if err == nil && m.To == "" {
		c.remove(ctx, l)
		return
	}
	switch claimed, failed := c.claim(sending, &l); {
	case failed != nil:
		c.postpone(ctx, l, "", failed)
		return
	case !claimed:
		return
	}
	switch {
	case errors.Is(err, envelope.ErrOpen):
		c.giveUp(ctx, l, "", "it was not sealed by this deployment, or is damaged")
		return
	case err != nil:
		c.postpone(ctx, l, "", err)
		return
	case c.now().Sub(m.CreatedAt) > min(maxAge, templates[m.Kind].lasts):
		c.giveUp(ctx, l, m.Kind, "it could not be delivered in time")
		return
	}
	switch err := c.transport.Send(sending, render(l.id(), m, c.options)); {
	case err == nil:
		c.note(func(s *Stats) { s.Sent++ })
		c.remove(ctx, l)
	case errors.Is(err, ErrRefused):
		c.giveUp(ctx, l, m.Kind, err.Error())
	default:
		c.postpone(ctx, l, m.Kind, err)
	}
}

// open returns the message of a row. Error: [envelope.ErrOpen] for a row that will never open.
func (c *courier) open(ctx context.Context, l letter) (stored, error) {
	version, blob, ok := decodeRow(l.row)
	if !ok {
		return stored{}, envelope.ErrOpen
	}
	keys, err := c.keys.Version(ctx, authz.SystemTenant, version)
	if err != nil {
		return stored{}, fmt.Errorf("opening a mail: %w", err)
	}
	plain, err := envelope.OpenKey(keys.Wrapping, contextOf(l.key), blob)
	if err != nil {
		return stored{}, err
	}
	defer plain.Zero()
	var m stored
	if err := json.Unmarshal(plain, &m); err != nil {
		return stored{}, envelope.ErrOpen
	}
	if _, known := templates[m.Kind]; !known {
		return stored{}, envelope.ErrOpen
	}
	return m, nil
}

// postpone makes a mail wait for its next attempt in any replica. If that cannot be stored, this
// replica still remembers it, and the others end the claim by watching it.
func (c *courier) postpone(ctx context.Context, l letter, kind Kind, err error) {
	storing, cancel := context.WithTimeout(context.WithoutCancel(ctx), sendTimeout)
	defer cancel()
	if ctx.Err() != nil { // the end of Run is no failure of the mail
		_ = c.release(storing, l, attempt{Failures: l.failures})
		return
	}
	c.mu.Lock()
	failures := max(l.failures, c.tries[string(l.key)].failures)
	wait := lastRetry
	if failures < 12 { // beyond this, the doubled second exceeds an hour
		wait = min(firstRetry<<failures, lastRetry)
	}
	next := try{failures + 1, c.now().Add(wait), l.created}
	c.tries[string(l.key)] = next
	c.mu.Unlock()
	c.note(func(s *Stats) { s.Postponed++ })
	failed := c.release(storing, l, attempt{Failures: next.failures, Next: next.next.UTC()})
	c.options.Logger.Warn("a mail could not be sent; retrying", "mail", l.id(), "kind", kind, "in", wait, "error", errors.Join(err, failed))
}

func (c *courier) giveUp(ctx context.Context, l letter, kind Kind, why string) {
	c.note(func(s *Stats) { s.GivenUp++ })
	c.options.Logger.Error("giving up on a mail", "mail", l.id(), "kind", kind, "why", why)
	c.remove(ctx, l)
}

// remove deletes a finished mail, even if ctx has ended meanwhile. Otherwise the mail would be sent
// twice.
func (c *courier) remove(ctx context.Context, l letter) {
	deleting, cancel := context.WithTimeout(context.WithoutCancel(ctx), sendTimeout)
	defer cancel()
	err := c.store.Update(deleting, func(tx store.Tx) error {
		return errors.Join(tx.Delete(l.key), tx.Delete(l.attemptKey()))
	})
	if err != nil {
		c.postpone(ctx, l, "", fmt.Errorf("removing a mail from the outbox: %w", err))
		return
	}
	c.mu.Lock()
	delete(c.tries, string(l.key))
	c.mu.Unlock()
}

// attempt records the attempts at a mail, in a row of its own that does not exist before the first
// one. A replica claims a mail there before it sends it, so only one of several replicas does.
//
// A claim ends when its replica releases it. If the replica does not, the others watch the claim.
// They take it over when they have seen it unchanged for claimTime. They measure that by their own
// clocks, because the clocks of other machines may be minutes apart.
type attempt struct {
	Claim    string    `json:"claim,omitempty"` // id of the attempt in progress, or of one whose process ended
	Failures int       `json:"failures,omitempty"`
	Next     time.Time `json:"next,omitzero"` // no attempt before this
}

// claimTime is the longest time of an attempt, plus as much again to store its outcome.
const claimTime = 2 * sendTimeout

const attemptPrefix = "mail-attempt/"

func (l letter) attemptKey() []byte { return []byte(attemptPrefix + l.id()) }

// sighting is a claim of another replica, and the time since which this replica has seen it.
type sighting struct {
	row   string
	since time.Time
}

// sightings are the watched claims of other replicas. Only [Outbox.Run] uses them.
type sightings map[string]sighting // keyed by mail id

// wait returns how long this replica must not send the mail. After a restart it ignores the time of
// the next attempt, because the cause of the failure may be gone.
func (s sightings) wait(l letter, now time.Time, restarted bool) time.Duration {
	var a attempt
	if l.attempt == nil || json.Unmarshal(l.attempt, &a) != nil { // a damaged row delays no mail
		return 0
	}
	if a.Claim == "" {
		if restarted {
			return 0
		}
		return min(a.Next.Sub(now), lastRetry) // a longer wait was written by a wrong clock
	}
	seen, known := s[l.id()]
	if !known || seen.row != string(l.attempt) || now.Before(seen.since) {
		seen = sighting{string(l.attempt), now}
		s[l.id()] = seen
	}
	return seen.since.Add(claimTime).Sub(now)
}

// claim reserves a mail for this replica, unless another one was faster.
func (c *courier) claim(ctx context.Context, l *letter) (claimed bool, err error) {
	var a attempt
	if l.attempt != nil && json.Unmarshal(l.attempt, &a) != nil {
		a = attempt{}
	}
	a.Claim, a.Next = authz.NewID("claim"), time.Time{}
	row, err := json.Marshal(a)
	if err != nil {
		return false, err
	}
	err = c.store.Update(ctx, func(tx store.Tx) error {
		claimed = false
		mail, err := tx.Get(l.key)
		if err != nil || mail == nil {
			return err
		}
		now, err := tx.Get(l.attemptKey())
		if err != nil || !bytes.Equal(now, l.attempt) {
			return err
		}
		claimed = true
		return tx.Put(l.attemptKey(), row)
	})
	if err != nil {
		return false, fmt.Errorf("claiming a mail: %w", err)
	}
	if claimed {
		l.attempt, l.failures = row, a.Failures
	}
	return claimed, nil
}

// release ends the claim on a mail that was not sent, unless another replica has taken it over.
func (c *courier) release(ctx context.Context, l letter, a attempt) error {
	row, err := json.Marshal(a)
	if err != nil {
		return err
	}
	err = c.store.Update(ctx, func(tx store.Tx) error {
		now, err := tx.Get(l.attemptKey())
		if err != nil || !bytes.Equal(now, l.attempt) {
			return err
		}
		return tx.Put(l.attemptKey(), row)
	})
	if err != nil {
		return fmt.Errorf("releasing a mail: %w", err)
	}
	return nil
}
