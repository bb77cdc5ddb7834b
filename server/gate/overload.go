package gate

import (
	"bytes"
	"container/list"
	"context"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/gin-gonic/gin"

	"github.com/latticekeep/latticekeep/internal/authz"
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

// Stand-ins in an answer that is encoded before.
const (
	anyID   = "<id>"
	anyTime = "<time>"
)

// encodeShed encodes the answer to a request that is refused because too many wait:
// there are as many of those as anybody sends, and all are alike but for two fields.
func (v *Version) encodeShed() error {
	code, details := v.describe(ErrOverloaded)
	var b bytes.Buffer
	err := encode(&b, v.envelope(Problem{Code: code, Message: generic(code), Details: details, RequestID: anyID, Timestamp: anyTime}))
	v.shed = b.String()
	return err
}

// refuseShed is [Version.fail] with ErrOverloaded.
func (v *Version) refuseShed(c *gin.Context) {
	_ = c.Error(ErrOverloaded)
	text := strings.Replace(v.shed, anyID, requestID(c), 1)
	text = strings.Replace(text, anyTime, v.now(), 1)
	send(c, http.StatusServiceUnavailable, []byte(text))
}

// Load is what a gate is doing.
type Load struct {
	InFlight int // requests that are carried out
	Waiting  int
	Shed     uint64 // refused so far
}

// Load is for metrics.
func (g *Gate) Load() Load {
	e := g.entrance
	e.mu.Lock()
	defer e.mu.Unlock()
	return Load{InFlight: e.in, Waiting: e.line.Len(), Shed: e.shed}
}

// waits reports whether an operation is one of those that wait in line. Those by
// which a server is brought back and looked after go past, and those that take long,
// of which few are carried out at a time anyway.
func (op *operation) waits() bool {
	scope, _ := authz.Required(op.Action)
	return op.Patience == 0 && scope != authz.SystemAdmin
}

// enter is [entrance.enter] of a request that was admitted: nobody holds a place
// while its body is on the way.
func (call *Call) enter(ctx context.Context) error {
	if !call.operation.waits() {
		return nil
	}
	err := call.gate.entrance.enter(ctx, len(call.body))
	call.inside = err == nil
	return err
}

// leave makes room for the next one, when the call is over or, before that, when
// what is left of it is an answer that takes long.
func (call *Call) leave() {
	if call.inside {
		call.inside = false
		call.gate.entrance.leave()
	}
}
