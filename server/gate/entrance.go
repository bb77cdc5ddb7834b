package gate

import (
	"container/list"
	"context"
	"runtime"
	"sync"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
)

// ErrOverloaded refuses a request because too many others are waiting. The request is neither
// carried out nor recorded.
var ErrOverloaded = fault.Outage(fault.ReasonOverload, fault.Unavailable.Error(), errTooManyWait{})

type errTooManyWait struct{}

func (errTooManyWait) Error() string { return "too many requests are waiting" }

// These are the limits of the entrance. Enough requests are carried out at the same time for the
// store to commit many together. A core handles about 250 requests per second, so carrying them out
// takes half of a request's time limit. Waiting takes less than that.
const (
	leastCarried   = 128 // minimum of requests carried out at the same time
	carriedPerCore = 32
	longestWait    = 250 * time.Millisecond
)

// An entrance limits the requests carried out at the same time, so that each gets its answer in
// time: a server that starts all of them finishes none. Other requests wait in line. Requests that
// arrive when the line is full are refused at once.
type entrance struct {
	carried, waiting int // maximum numbers of requests

	mu   sync.Mutex
	in   int
	line list.List // list of chan struct{}, oldest in front; admission of a request closes its channel
	shed uint64
}

// newEntrance returns an entrance that carries out n requests at the same time; 0 means a default
// for this machine.
func newEntrance(n int) *entrance {
	if n == 0 {
		n = max(leastCarried, carriedPerCore*runtime.GOMAXPROCS(0))
	}
	return &entrance{carried: n, waiting: 2 * n}
}

// full reports whether a new request must be refused, and counts it if so.
func (e *entrance) full() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.line.Len() < e.waiting {
		return false
	}
	e.shed++
	return true
}

// countShed counts a request that is refused before it comes to the entrance.
func (e *entrance) countShed() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.shed++
}

// enter waits until a request may be carried out. The caller must call leave afterwards. Error:
// ErrOverloaded.
func (e *entrance) enter(ctx context.Context) error {
	e.mu.Lock()
	if e.in < e.carried {
		e.in++
		e.mu.Unlock()
		return nil
	}
	if e.line.Len() >= e.waiting {
		e.shed++
		e.mu.Unlock()
		return ErrOverloaded
	}
	turn := make(chan struct{})
	place := e.line.PushBack(turn)
	e.mu.Unlock()

	timer := time.NewTimer(longestWait)
	defer timer.Stop()
	select {
	case <-turn:
		return nil
	case <-timer.C:
	case <-ctx.Done():
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	select {
	case <-turn: // admitted at the last moment
		return nil
	default:
	}
	e.line.Remove(place)
	e.shed++
	return ErrOverloaded
}

// leave admits the next waiting request, or frees the place.
func (e *entrance) leave() {
	e.mu.Lock()
	defer e.mu.Unlock()
	next := e.line.Front()
	if next == nil {
		e.in--
		return
	}
	close(e.line.Remove(next).(chan struct{}))
}
