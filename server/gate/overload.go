package gate

import (
	"bytes"
	"context"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/gin-gonic/gin"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fair"
	"github.com/latticekeep/latticekeep/internal/secret"
)

// These placeholders stand in an answer that is encoded in advance.
const (
	anyID   = "<id>"
	anyTime = "<time>"
)

// encodeShed encodes in advance the answer to a request refused because too many wait. There may be
// very many such requests, and their answers differ in two fields only.
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

// Load is the current load of a gate.
type Load struct {
	InFlight int // requests being carried out
	Waiting  int
	Shed     uint64 // requests refused so far

	OverAddress, OverTenant uint64 // requests beyond the rate of an address or of a tenant so far
}

// Load returns the current load, for metrics.
func (g *Gate) Load() Load {
	e := g.entrance
	e.mu.Lock()
	defer e.mu.Unlock()
	return Load{InFlight: e.in, Waiting: e.line.Len(), Shed: e.shed, OverAddress: g.overAddress.Load(), OverTenant: g.overTenant.Load()}
}

// waits reports whether requests of an operation wait in line. Operations that recover, administer
// and watch the server do not wait. Neither do long operations, because few of them run at the same
// time.
func (op *operation) waits() bool {
	scope, _ := authz.Required(op.Action)
	return op.Patience == 0 && !slices.Contains(authz.SystemScopes(), scope)
}

// These are the limits of the bodies in memory. Carrying out a request takes several times the size
// of its body: parsed, decoded, encrypted, and encoded again. A tenth of the memory limit leaves room
// for that, and for what the server keeps.
const (
	bodyShare       = 10        // part of the memory limit of the Go runtime that all bodies may have
	minBodies       = 4 << 20   // bytes of all bodies, at least
	maxBodies       = 192 << 20 // bytes of all bodies, at most, and without a memory limit
	longestBodyWait = 100 * time.Millisecond

	// bodyGrace is how long a body may take to arrive, or an answer to be taken, before the request is
	// broken off for another one. Without such need it may take as long as the server allows.
	bodyGrace = 5 * time.Second

	// answerGrace is the least time that an answer has, because it tells of work that was done. A caller
	// who waits for memory still gets it in time.
	answerGrace = longestBodyWait / 2
)

// newBodies bounds the bytes of all bodies.
func newBodies(memoryLimit int64) *fair.Pool[string] {
	return fair.NewPool[string](min(max(memoryLimit/bodyShare, minBodies), maxBodies), bodyGrace)
}

// reserve reserves memory for a body before it is read, and waits for it if there is none. Small
// bodies, which are most, need none. While the body arrives, and while the answer is sent, the request
// may be broken off for another one. Error: ErrOverloaded.
func (call *Call) reserve(c *gin.Context, size int64) (err error) {
	if size <= smallBody {
		return nil
	}
	ctx, cancel := context.WithTimeout(c.Request.Context(), longestBodyWait)
	defer cancel()
	connection := http.NewResponseController(c.Writer)
	call.memory, err = call.gate.bodies.Acquire(ctx, call.source(), size, func() { _ = connection.SetReadDeadline(time.Unix(1, 0)) })
	if err != nil {
		return call.overloaded()
	}
	return nil
}

// source is who shares memory with the caller: its tenant, or for a ServiceAccount without one its host.
func (call *Call) source() string {
	if call.Caller.Kind == authz.Stranger {
		return authz.Source(call.Caller.SourceIP)
	}
	return string(call.Caller.Tenant)
}

func (call *Call) overloaded() error {
	call.gate.entrance.countShed()
	return ErrOverloaded
}

// settle says that the body has arrived. Error: ErrOverloaded if it was broken off.
func (call *Call) settle() error {
	if call.memory == nil || call.memory.Settle() {
		return nil
	}
	return call.overloaded()
}

// dispose overwrites the body, which has been read. Memory stays reserved for the answer.
func (call *Call) dispose(c *gin.Context) {
	secret.Bytes(call.body).Zero()
	if call.memory != nil {
		connection := http.NewResponseController(c.Writer)
		call.memory.Offer(answerGrace, func() { _ = connection.SetWriteDeadline(time.Unix(1, 0)) })
	}
}

// release returns the memory of the body, after the answer is sent.
func (call *Call) release() {
	secret.Bytes(call.body).Zero()
	if call.memory != nil {
		call.memory.Release()
		call.memory = nil
	}
}

// enter is [entrance.enter] for an admitted request. No request holds a place while its body
// arrives.
func (call *Call) enter(ctx context.Context) error {
	if !call.operation.waits() {
		return nil
	}
	err := call.gate.entrance.enter(ctx)
	call.inside = err == nil
	return err
}

// leave frees the call's place when the call is over, or earlier if only a long answer is left to
// send.
func (call *Call) leave() {
	if call.inside {
		call.inside = false
		call.gate.entrance.leave()
	}
}
