package postgres

import (
	"errors"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/latticekeep/latticekeep/internal/store"
)

// group is the set of requests that share one physical commit. Requests can join until the group
// has the lock on the head for the first time, however long that takes. So the longer the wait, the
// more requests share the commit.
type group struct {
	requests []*request    // queue.mu guards requests and commit until the group is shut
	commit   bool          // commit even when nothing changed, because Ready has sent a probe
	raises   bool          // a former attempt wrote a row that keeps some release away; only the writer uses it
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

// awaited reports whether any caller still waits for the group.
func (g *group) awaited() bool {
	return slices.ContainsFunc(g.requests, func(r *request) bool { return r.state.Load() != gone })
}

// queue gathers requests into the group that the writer takes next.
type queue struct {
	mu      sync.Mutex
	pending *group        // nil when nobody waits
	wake    chan struct{} // wakes the writer: a request is pending
}

func (q *queue) enqueue(r *request, commit bool) *group {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.pending == nil {
		q.pending = &group{back: make(chan struct{}), done: make(chan struct{})}
		poke(q.wake)
	}
	q.pending.requests = append(q.pending.requests, r)
	q.pending.commit = q.pending.commit || commit
	return q.pending
}

// withdraw removes r from g, so cancelled requests do not pile up while the database hangs.
func (q *queue) withdraw(g *group, r *request) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.pending == g {
		g.requests = slices.DeleteFunc(g.requests, func(other *request) bool { return other == r })
	}
}

// take returns the waiting group, which is not shut yet.
func (q *queue) take() *group {
	gather(func() int {
		q.mu.Lock()
		defer q.mu.Unlock()
		if q.pending == nil {
			return 0
		}
		return len(q.pending.requests)
	})
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.pending
}

// shut stops further requests from joining g.
func (q *queue) shut(g *group) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.pending == g {
		q.pending = nil
	}
}

// members returns the requests of the group that are not gone.
func (q *queue) members(g *group) map[*request]struct{} {
	q.mu.Lock()
	defer q.mu.Unlock()
	all := make(map[*request]struct{}, len(g.requests))
	for _, r := range g.requests {
		if r.wants != nil && r.state.Load() != gone {
			all[r] = struct{}{}
		}
	}
	return all
}
