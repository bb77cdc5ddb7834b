package gate

import (
	"container/list"
	"context"
	"runtime"
	"sync"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
)

// ErrOverloaded is the refusal of a request that came when too many others were
// waiting already. Nothing was done for it and nothing is recorded of it.
var ErrOverloaded = fault.Wrap(fault.Unavailable, fault.Unavailable.Error(), errTooManyWait{})

type errTooManyWait struct{}

func (errTooManyWait) Error() string { return "too many requests are waiting" }

// Bounds of the entrance. What is carried out at a time is enough for the store to
// commit many requests together, and takes half of a request's time on a core that
// does 250 a second; what waits takes less than that.
const (
	leastCarried   = 128 // of requests that are carried out at a time
	carriedPerCore = 32
	longestWait    = 250 * time.Millisecond
	maxWaitingBody = 64 << 20 // bytes of all that wait
)

// An entrance lets so many requests in at a time that each has its answer in time,
// however many come: a server that begins with all of them finishes none. The others
// wait in line, and those that come when the line is full are refused at once.
type entrance struct {
	carried, waiting int // at most

	mu    sync.Mutex
	in    int
	line  list.List // of *waiter, the first to come in front
	bytes int       // of the bodies in line
	shed  uint64
}

type waiter struct {
	turn  chan struct{} // closed when it is let in
	bytes int
}

// newEntrance lets n in at a time; 0 means as many as are good for this machine.
func newEntrance(n int) *entrance {
	if n == 0 {
		n = max(leastCarried, carriedPerCore*runtime.GOMAXPROCS(0))
	}
	return &entrance{carried: n, waiting: 2 * n}
}

// full reports whether a request that comes now is refused, and counts it if so.
func (e *entrance) full() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.line.Len() < e.waiting {
		return false
	}
	e.shed++
	return true
}

// enter waits until the request, with a body of so many bytes, may be carried out;
// leave is called when it was. Error: ErrOverloaded.
func (e *entrance) enter(ctx context.Context, bytes int) error {
	e.mu.Lock()
	if e.in < e.carried {
		e.in++
		e.mu.Unlock()
		return nil
	}
	if e.line.Len() >= e.waiting || e.bytes+bytes > maxWaitingBody {
		e.shed++
		e.mu.Unlock()
		return ErrOverloaded
	}
	w := &waiter{make(chan struct{}), bytes}
	place := e.line.PushBack(w)
	e.bytes += bytes
	e.mu.Unlock()

	timer := time.NewTimer(longestWait)
	defer timer.Stop()
	select {
	case <-w.turn:
		return nil
	case <-timer.C:
	case <-ctx.Done():
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	select {
	case <-w.turn: // just now
		return nil
	default:
	}
	e.line.Remove(place)
	e.bytes -= bytes
	e.shed++
	return ErrOverloaded
}

// leave lets the next one in.
func (e *entrance) leave() {
	e.mu.Lock()
	defer e.mu.Unlock()
	next := e.line.Front()
	if next == nil {
		e.in--
		return
	}
	w := e.line.Remove(next).(*waiter)
	e.bytes -= w.bytes
	close(w.turn)
}
