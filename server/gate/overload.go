package gate

import (
	"bytes"
	"context"
	"net/http"
	"strings"

	"github.com/gin-gonic/gin"

	"github.com/latticekeep/latticekeep/internal/authz"
)

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
