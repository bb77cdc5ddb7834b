package gate

import (
	"context"
	"errors"
	"io"
	"net/http"
	"time"

	"github.com/gin-gonic/gin"
)

// stalled is how long a caller may take no byte of a long answer.
const stalled = time.Minute

// Stream answers with bytes of a content type as they come, however long that takes. begin is
// what [Answer] calls: it has a second, and its error is answered with an
// envelope. What it returns writes the answer; its context ends with the gate's
// streams. When it fails after the first byte the connection is broken, so that
// nobody takes what there is for whole.
func Stream(c *gin.Context, contentType string, begin func(context.Context, *Call) (write func(context.Context, io.Writer) error, err error)) {
	answerWith(c, &stream{c: c, contentType: contentType}, context.WithoutCancel(c.Request.Context()), begin) // a caller that is gone shows when it is written to
}

// Follow is [Stream] of an answer that mostly waits: the caller has each write at once,
// and the context also ends when the caller is gone.
func Follow(c *gin.Context, contentType string, begin func(context.Context, *Call) (write func(context.Context, io.Writer) error, err error)) {
	answerWith(c, &stream{c: c, contentType: contentType, flush: true}, c.MustGet(callKey).(*Call).connection, begin)
}

func answerWith(c *gin.Context, out *stream, lasting context.Context, begin func(context.Context, *Call) (write func(context.Context, io.Writer) error, err error)) {
	call := c.MustGet(callKey).(*Call)
	write, err := begin(c.Request.Context(), call)
	if err != nil {
		call.fail(c, err)
		return
	}
	call.leave()
	ctx, cancel := context.WithCancel(lasting)
	defer cancel()
	defer context.AfterFunc(call.gate.streams, cancel)()

	out.deadline = http.NewResponseController(c.Writer)
	_ = out.deadline.SetReadDeadline(time.Time{}) // the request is here: net/http need not give up waiting for it
	err = write(ctx, out)
	switch {
	case err == nil:
	case !c.Writer.Written():
		call.fail(c, err)
	default:
		_ = c.Error(err).SetType(gin.ErrorTypeRender)
		_ = out.deadline.SetWriteDeadline(time.Unix(1, 0)) // net/http then cannot write the end of the answer
	}
}

// stream gives every write its own time, in place of one for the whole answer.
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

// EndStreams breaks off answers that are being streamed, and all that begin
// afterwards: the server is about to end.
func (g *Gate) EndStreams() { g.endStreams() }
