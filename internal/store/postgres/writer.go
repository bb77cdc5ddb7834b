package postgres

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// How long a group is retried. patience applies when the group was in progress as the database was
// lost, so that it survives a restart of the database. impatience applies when it began later, so
// that requests are refused soon.
const (
	patience   = 5 * time.Second
	impatience = 500 * time.Millisecond
	pause      = 50 * time.Millisecond // between two attempts
	hopeless   = 2 * time.Second       // after the writer has waited for so long, others do not wait for it; longer than idleLimit
)

// group is the set of requests that share one physical commit. Requests can join until the group
// has the lock on the head for the first time, however long that takes. So the longer the wait, the
// more requests share the commit.
type group struct {
	requests []*request    // Store.mu guards requests and commit until the group is shut
	commit   bool          // commit even when nothing changed, because Ready has sent a probe
	tx       *tx           // transaction of the current attempt; set before the first turn
	back     chan struct{} // a request returns the turn
	phase    sync.Mutex    // held while closures and the hook run
	done     chan struct{} // closed when err is final
	err      error         // fails all members
}

// request is one Update. Its closure runs in its caller's goroutine while the writer waits, so a
// panic keeps its stack and ends only the caller. It runs again in each attempt of the group.
type request struct {
	state atomic.Int32
	turn  chan struct{} // the writer gives the turn
	wants *wants
	err   error
}

// The states of a request. The writer moves it from queued or ran to running. Its caller moves it
// from running to ran, and from queued or ran to gone, which is final.
const (
	queued int32 = iota
	running
	ran
	gone
)

// errExited is the result of a closure that did not return.
var errExited = errors.New("the closure panicked or exited")

var errUnconfirmed = "the store did not confirm the write in time: look whether it happened before trying again"

// Update implements [store.Store].
func (s *Store) Update(ctx context.Context, fn func(store.Tx) error) error {
	if s.opts.ReadOnly {
		return fault.Wrap(fault.Internal, fault.Internal.Error(), errors.New("the database was opened for reading only"))
	}
	if err := ctx.Err(); err != nil {
		return ended(err)
	}
	if !s.enter() {
		return errClosed()
	}
	defer s.leave()
	return s.submit(ctx, &request{turn: make(chan struct{}, 1), wants: s.rehearse(ctx, fn)}, false, fn)
}

func (s *Store) submit(ctx context.Context, r *request, commit bool, fn func(store.Tx) error) error {
	if err := ctx.Err(); err != nil {
		return ended(err)
	}
	g := s.enqueue(r, commit)
	late := time.NewTimer(impatience)
	defer late.Stop()
	for {
		select {
		case <-r.turn:
			r.run(g, fn)
		case <-g.done:
			if g.err != nil {
				return g.err
			}
			return r.err
		case <-late.C:
			if (s.down.Load() || s.hangs(hopeless)) && r.state.CompareAndSwap(queued, gone) {
				s.withdraw(g, r)
				return errRecovering
			}
			late.Reset(impatience)
		case <-ctx.Done():
			if r.state.CompareAndSwap(queued, gone) {
				s.withdraw(g, r)
				return ended(ctx.Err())
			}
			if !r.state.CompareAndSwap(ran, gone) {
				<-r.turn // the writer has just given the turn
				r.run(g, fn)
				continue
			}
			// The hook may still be writing into the events of fn.
			g.phase.Lock()
			g.phase.Unlock() //nolint:staticcheck // an empty section waits
			select {
			case <-g.done:
				if g.err != nil {
					return g.err
				}
				return r.err
			default:
				return fault.Wrap(fault.Unavailable, errUnconfirmed, ctx.Err())
			}
		}
	}
}

// run runs the closure for the current attempt.
func (r *request) run(g *group, fn func(store.Tx) error) {
	r.err = errExited
	next := gone
	defer func() {
		r.state.Store(next)
		g.back <- struct{}{}
	}()
	r.err = fn(g.tx)
	next = ran
}

func (s *Store) enqueue(r *request, commit bool) *group {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pending == nil {
		s.pending = &group{back: make(chan struct{}), done: make(chan struct{})}
		poke(s.wake)
	}
	s.pending.requests = append(s.pending.requests, r)
	s.pending.commit = s.pending.commit || commit
	return s.pending
}

// withdraw removes r from g, so cancelled requests do not pile up while the database hangs.
func (s *Store) withdraw(g *group, r *request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pending == g {
		g.requests = slices.DeleteFunc(g.requests, func(q *request) bool { return q == r })
	}
}

// write is the writer goroutine. It runs until the last request has left after Close.
func (s *Store) write() {
	defer close(s.stopped)
	for {
		select {
		case <-s.wake:
		case <-s.life.Done():
			if s.session != nil {
				s.session.kill()
			}
			return
		}
		if g := s.takeGroup(); g != nil {
			s.serve(g)
		}
	}
}

// takeGroup returns the waiting group, which is not shut yet.
func (s *Store) takeGroup() *group {
	gather(func() int {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.pending == nil {
			return 0
		}
		return len(s.pending.requests)
	})
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pending
}

// shut stops further requests from joining g.
func (s *Store) shut(g *group) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pending == g {
		s.pending = nil
	}
}

// serve attempts g until it is settled.
func (s *Store) serve(g *group) {
	defer close(g.done)
	bound := s.opts.patience
	if s.down.Load() {
		bound = impatience
	}
	var until time.Time
	for {
		retry, err := s.attempt(g, until)
		if err == nil {
			return
		}
		if _, ours := kindOf(err); !ours { // an error of the hook, or a final one
			g.err = err
			return
		}
		s.failed.Store(true)
		if !retry {
			g.err = answer(err)
			return
		}
		if k, _ := kindOf(err); k == down {
			s.lostContact(err)
		}
		if until.IsZero() {
			s.opts.Logger.Warn("a commit failed; retrying", "error", err)
			until = time.Now().Add(bound)
		}
		if time.Now().Add(pause).After(until) || !g.awaited() {
			g.err = answer(err)
			return
		}
		select {
		case <-time.After(pause):
		case <-s.life.Done():
		}
	}
}

// awaited reports whether any caller still waits for the group.
func (g *group) awaited() bool {
	return slices.ContainsFunc(g.requests, func(r *request) bool { return r.state.Load() != gone })
}

// forget ends the session of the writer. Nothing of its last transaction was committed, or commit
// settles the outcome next.
func (s *Store) forget() {
	if s.session != nil {
		s.session.kill()
		s.session = nil
	}
	s.cache.doubt()
}

// attempt runs a group once. retry means that nothing of the group was or will be committed, and
// that another attempt may succeed.
func (s *Store) attempt(g *group, until time.Time) (retry bool, err error) {
	l, err := s.lock(g)
	s.shut(g)
	if err != nil {
		return s.abandon(err), err
	}
	t := &tx{base: l, over: make(map[string][]byte), check: func() error { return nil }}
	err = s.runClosures(g, t, l)
	switch {
	case t.broken != nil:
		return s.abandon(t.broken), t.broken
	case err != nil || !g.commit && !t.changed():
		s.release()
		return false, err
	}
	return s.commit(l, t, until)
}

// abandon ends the transaction after a failure before the commit, and reports whether the group may
// be retried.
func (s *Store) abandon(err error) (retry bool) {
	k, ours := kindOf(err)
	if k == again || k == full {
		s.release()
	} else {
		s.forget()
	}
	return ours && k != broken && k != full
}

// release ends a transaction that wrote nothing, and with it the lock. If that fails, what was read
// under the lock is still right.
func (s *Store) release() {
	defer s.busy()()
	if err := s.session.run(s.opts.commitWait, []step{{statement: rollback}}); err != nil {
		s.opts.Logger.Warn("releasing the head failed", "error", err)
		s.forget()
	}
}

// runClosures gives each member its turn and then runs the hook.
func (s *Store) runClosures(g *group, t *tx, l *locked) error {
	g.phase.Lock()
	defer g.phase.Unlock()
	g.tx = t
	defer func() { t.check = over }()
	for _, r := range g.requests {
		if !r.state.CompareAndSwap(queued, running) && !r.state.CompareAndSwap(ran, running) {
			continue
		}
		m := t.mark()
		r.turn <- struct{}{}
		<-g.back
		if r.err != nil {
			t.undo(m)
		}
	}
	if t.broken == nil && t.changed() && s.opts.Hook != nil {
		l.hook = &wants{}
		if err := s.runHook(t); err != nil {
			return err
		}
		s.habits.note(l.hook)
	}
	return nil
}

func (s *Store) runHook(t *tx) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fault.Wrap(fault.Internal, fault.Internal.Error(), fmt.Errorf("the commit hook panicked: %v\n%s", p, debug.Stack()))
		}
	}()
	m := t.events[:len(t.events):len(t.events)] // ignore events that the hook enqueues
	if err := s.opts.Hook(t, m); err != nil {
		return fmt.Errorf("running the commit hook: %w", err)
	}
	return nil
}

// hangs reports whether the writer has waited for the database longer than limit.
func (s *Store) hangs(limit time.Duration) bool {
	since := s.busySince.Load()
	return since != 0 && s.opts.Now().Sub(time.Unix(0, since)) > limit
}

// busy marks the time during which the writer waits for the database.
func (s *Store) busy() (end func()) {
	s.busySince.Store(s.opts.Now().UnixNano())
	return func() { s.busySince.Store(0) }
}
