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
)

// newBodies bounds the bytes of all bodies, and those of one tenant to three quarters of that: a
// tenant that sends its bodies slowly leaves memory to the others.
func newBodies(memoryLimit int64) *fair.Semaphore[authz.TenantID] {
	most := min(max(memoryLimit/bodyShare, minBodies), maxBodies)
	return fair.NewSemaphore[authz.TenantID](int(most), int(most/4*3))
}

// reserve reserves memory for a body before it is read, and waits for it if there is none. Small
// bodies, which are most, need none. Error: ErrOverloaded.
func (call *Call) reserve(ctx context.Context, size int64) error {
	if size <= smallBody {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, longestBodyWait)
	defer cancel()
	if call.gate.bodies.AcquireN(ctx, call.Caller.Tenant, size) != nil {
		call.gate.entrance.countShed()
		return ErrOverloaded
	}
	call.reserved, call.reservedFor = size, call.Caller.Tenant
	return nil
}

// release returns the memory of the body, after the answer is sent.
func (call *Call) release() {
	secret.Bytes(call.body).Zero()
	if call.reserved > 0 {
		call.gate.bodies.ReleaseN(call.reservedFor, call.reserved)
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
