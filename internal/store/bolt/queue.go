package bolt

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// longestGathering is about half the duration of a commit.
const longestGathering = 2 * time.Millisecond

// group is the set of requests that share one physical commit.
type group struct {
	requests []*request
	probe    bool          // commit even when nothing changed, with a row of the size of an entry
	tx       *tx           // set before the first turn
	back     chan struct{} // a request returns the turn
	ran      chan struct{} // closed after the closures and the hook
	done     chan struct{} // closed when err is final
	err      error         // fails all members
}

// request is one Update. Its closure runs in its caller's goroutine while the writer waits, so a
// panic keeps its stack and ends only the caller.
type request struct {
	started atomic.Bool   // set by the writer, which gives the turn, or by the caller, which withdraws
	turn    chan struct{} // the writer gives the turn
	err     error
}

// errExited is the result of a closure that did not return.
var errExited = errors.New("the closure panicked or exited")

// queue gathers requests into the group that the writer takes next.
type queue struct {
	now  func() time.Time
	wake chan struct{} // wakes the writer: a request is pending, or close was called

	turns chan func()   // what the writer runs between two groups
	ended chan struct{} // closed when the writer has ended

	mu      sync.Mutex
	pending *group // nil when nobody waits
	closed  bool
}

// submit waits until the group that fn joins is settled. With probe the group is one that probes the
// disk.
func (q *queue) submit(ctx context.Context, probe bool, fn func(store.Tx) error) error {
	g, r, err := q.enqueue(probe)
	if err != nil {
		return err
	}
	select {
	case <-r.turn:
	case <-g.done: // the group could not begin
		return g.err
	case <-ctx.Done():
		if r.started.CompareAndSwap(false, true) {
			q.withdraw(g, r)
			return ended(ctx.Err())
		}
		<-r.turn
	}
	r.run(g, fn)
	select {
	case <-g.done:
	case <-ctx.Done():
		// The hook may still be writing into the events of fn.
		<-g.ran
		select {
		case <-g.done:
		default:
			return fault.Outage(fault.ReasonStore, "the store did not confirm the write in time: look whether it happened before trying again", ctx.Err())
		}
	}
	if g.err != nil {
		return g.err
	}
	return r.err
}

func (r *request) run(g *group, fn func(store.Tx) error) {
	defer func() { g.back <- struct{}{} }()
	r.err = errExited
	r.err = fn(g.tx)
}

func (q *queue) enqueue(probe bool) (*group, *request, error) {
	r := &request{turn: make(chan struct{}, 1)}
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return nil, nil, errClosed()
	}
	g := q.forming()
	g.requests = append(g.requests, r)
	g.probe = g.probe || probe
	return g, r, nil
}

// probe lets the group that is forming probe the disk, and waits for nothing.
func (q *queue) probe() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if !q.closed {
		q.forming().probe = true
	}
}

// forming returns the pending group and begins one if there is none. The caller holds the lock.
func (q *queue) forming() *group {
	if q.pending == nil {
		q.pending = &group{back: make(chan struct{}), ran: make(chan struct{}), done: make(chan struct{})}
		poke(q.wake)
	}
	return q.pending
}

// withdraw removes r from g, so cancelled requests do not pile up while the disk hangs.
func (q *queue) withdraw(g *group, r *request) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.pending == g {
		g.requests = slices.DeleteFunc(g.requests, func(other *request) bool { return other == r })
	}
}

// take returns the pending group, and whether it is the last one.
//
// It first yields to other goroutines for as long as that makes the group grow: callers that have
// just been answered reach their next Update and join this group instead of the next. Yielding
// costs nothing when no goroutine can run, and does not wait for blocked ones. When very many can
// run, one turn lasts until all of them have run, so take also stops after longestGathering.
func (q *queue) take() (*group, bool) {
	const enough = 32 // turns without a new request; a turn takes well under a microsecond when nobody else can run
	began := q.now()
	for size, idle := 0, 0; idle < enough && q.now().Sub(began) < longestGathering; {
		runtime.Gosched()
		if n := q.queued(); n > size {
			size, idle = n, 0
		} else {
			idle++
		}
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	g := q.pending
	q.pending = nil
	return g, q.closed
}

// queued returns the size of the group that is forming.
func (q *queue) queued() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.pending == nil {
		return 0
	}
	return len(q.pending.requests)
}

// close refuses further requests and wakes the writer for the last group.
func (q *queue) close() {
	q.mu.Lock()
	q.closed = true
	q.mu.Unlock()
	poke(q.wake)
}

// turn runs do in the writer, between two groups and after a flush.
func (q *queue) turn(ctx context.Context, do func()) error {
	done := make(chan struct{})
	select {
	case q.turns <- func() { defer close(done); do() }:
		<-done
		return nil
	case <-q.ended:
		return errClosed()
	case <-ctx.Done():
		return ended(ctx.Err())
	}
}

// poke wakes the goroutine that waits on c, now or when it next waits.
func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
