package gate

import (
	"context"
	"net/http"
	"time"

	"github.com/gin-gonic/gin"
)

// NotModified is the answer 304 to a caller that has the representation with this entity tag already
// (RFC 9110 §15.4.5).
type NotModified struct{ EntityTag string }

// Later is an answer that comes after a wait. While it waits, the call holds no place among the requests
// that are carried out, and no memory.
type Later struct {
	// Wait returns when the answer is to be made. Its context ends when the caller disconnects and when
	// the server stops. An error is the answer.
	Wait func(context.Context) error
	// Then makes the answer, as the function of [Answer] does, in the time that an answer has.
	Then func(context.Context) (any, error)
}

// WaitedFor returns how long a request waited for its [Later] answer: as long as its caller wanted, which says
// nothing about the server.
func WaitedFor(c *gin.Context) time.Duration {
	if call, admitted := c.Value(callKey).(*Call); admitted {
		return call.waited
	}
	return 0
}

// wait waits for a later answer and makes it.
func (call *Call) wait(c *gin.Context, l Later) (any, error) {
	call.leave()
	call.release()
	connection := http.NewResponseController(c.Writer)
	_ = connection.SetReadDeadline(time.Time{}) // the request has arrived completely
	_ = connection.SetWriteDeadline(time.Time{})
	waiting, cancel := context.WithCancel(call.connection)
	defer cancel()
	defer context.AfterFunc(call.gate.streams, cancel)()
	begun := time.Now()
	err := l.Wait(waiting)
	call.waited = time.Since(begun)
	_ = connection.SetWriteDeadline(time.Now().Add(stalled))
	c.Request = c.Request.WithContext(call.connection) // its own context ended with the time of the request
	if err != nil {
		return nil, err
	}
	ctx, done := context.WithTimeout(call.connection, call.gate.config.Limits.Patience)
	defer done()
	if err := call.enter(ctx); err != nil {
		return nil, err
	}
	defer call.leave()
	return l.Then(ctx)
}
