package gate

import (
	"context"
	"errors"
	"io"
	"net/http"
	"time"

	"github.com/gin-gonic/gin"
)

// stalled is the time after which a long answer is broken off if the caller accepts no byte.
const stalled = time.Minute

// Stream answers with bytes of a content type as they become available, however long that takes. As
// in [Answer], begin has a second, and its error is answered with an envelope. begin returns write,
// which writes the answer; the context of write ends with the gate's streams. If write fails after
// the first byte, Stream breaks the connection, so that the caller cannot mistake a part for the
// whole.
func Stream(c *gin.Context, contentType string, begin func(context.Context, *Call) (write func(context.Context, io.Writer) error, err error)) {
	lasting := context.WithoutCancel(c.Request.Context()) // a write fails if the caller is gone
	answerWith(lasting, c, &stream{c: c, contentType: contentType}, begin)
}

// Follow is [Stream] for an answer that mostly waits. It sends each write at once, and the context
// also ends when the caller disconnects.
func Follow(c *gin.Context, contentType string, begin func(context.Context, *Call) (write func(context.Context, io.Writer) error, err error)) {
	answerWith(c.MustGet(callKey).(*Call).connection, c, &stream{c: c, contentType: contentType, flush: true}, begin)
}

//nolint:contextcheck // begin and a refusal have the context of the request, which does not last
func answerWith(lasting context.Context, c *gin.Context, out *stream, begin func(context.Context, *Call) (write func(context.Context, io.Writer) error, err error)) {
	call := c.MustGet(callKey).(*Call)
	write, err := begin(c.Request.Context(), call)
	if err != nil {
		call.fail(c, err)
		return
	}
	call.leave()
	call.release() // the answer may take hours
	ctx, cancel := context.WithCancel(lasting)
	defer cancel()
	defer context.AfterFunc(call.gate.streams, cancel)()

	out.deadline = http.NewResponseController(c.Writer)
	_ = out.deadline.SetReadDeadline(time.Time{}) // the request has arrived completely
	err = write(ctx, out)
	switch {
	case err == nil:
	case !c.Writer.Written():
		call.fail(c, err)
	default:
		_ = c.Error(err).SetType(gin.ErrorTypeRender)
		_ = out.deadline.SetWriteDeadline(time.Unix(1, 0)) // prevents net/http from writing the end of the answer
	}
}

// stream sets a time limit for every write instead of one for the whole answer.
type stream struct {
	c           *gin.Context
	contentType string
	flush       bool
	deadline    *http.ResponseController
}

func (s *stream) Write(b []byte) (int, error) {
	if !s.c.Writer.Written() {
		s.c.Header("Content-Type", s.contentType)
	}
	if err := s.deadline.SetWriteDeadline(time.Now().Add(stalled)); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return 0, err
	}
	n, err := s.c.Writer.Write(b)
	if err == nil && s.flush {
		if err = s.deadline.Flush(); errors.Is(err, http.ErrNotSupported) {
			err = nil
		}
	}
	return n, err
}

// EndStreams breaks off all streamed answers, including later ones. The server calls it before it
// stops.
func (g *Gate) EndStreams() { g.endStreams() }
