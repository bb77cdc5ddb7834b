package gate

import (
	"bytes"
	"errors"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/go-json-experiment/json"

	"github.com/latticekeep/latticekeep/internal/fault"
)

// InvalidParameter turns a service's complaint into a 400, for an operation
// without a body: it has no other input that could be invalid.
func InvalidParameter(err error) error {
	if fault.Of(err) == fault.Invalid {
		return BadRequest(fault.Message(err))
	}
	return err
}

// status is the one table from kinds to statuses.
func (v *Version) status(k fault.Kind) int {
	switch k {
	case fault.Invalid:
		return v.schema
	case fault.Unauthenticated:
		return http.StatusUnauthorized
	case fault.Forbidden:
		return http.StatusForbidden
	case fault.NotFound:
		return http.StatusNotFound
	case fault.Conflict:
		return http.StatusConflict
	case fault.Exhausted:
		return http.StatusTooManyRequests
	case fault.Unavailable:
		return http.StatusServiceUnavailable
	default:
		return http.StatusInternalServerError
	}
}

// describe returns the status of err and what a caller is told of it. The
// message of a defect, of an outage and of a request without a principal is
// that of the kind, so that no two failures can be told apart.
func (v *Version) describe(err error) (int, string) {
	var r *refusal
	var done *recorded
	var t *tooMany
	switch {
	case errors.As(err, &t):
		return http.StatusTooManyRequests, t.Error()
	case errors.As(err, &done):
		return done.status, done.message
	case errors.As(err, &r):
		return r.status, r.message
	}
	kind := fault.Of(err)
	switch kind {
	case fault.Invalid, fault.Forbidden, fault.NotFound, fault.Conflict:
		return v.status(kind), fault.Message(err)
	}
	return v.status(kind), kind.Error()
}

// fail answers with the envelope of err and leaves err itself to the log.
func (v *Version) fail(c *gin.Context, err error) {
	_ = c.Error(err)
	code, details := v.describe(err)
	if c.Request.Context().Err() != nil && code == http.StatusInternalServerError {
		// The caller is gone or the time is up, and what failed because of it
		// is no defect of ours.
		code, details = http.StatusServiceUnavailable, fault.Unavailable.Error()
	}
	if isTooMany(code) {
		v.retryAfter(c, err)
	}
	v.Write(c, code, v.envelope(Problem{
		Code: code, Message: generic(code), Details: details,
		RequestID: requestID(c), Timestamp: v.now(),
	}))
}

// Refuse answers a request that no operation will see.
func (v *Version) Refuse(c *gin.Context, err error) { v.fail(c, err) }

// generic is the message of a status that goes with details.
func generic(code int) string {
	if code == http.StatusRequestEntityTooLarge {
		return "Payload Too Large" // RFC 9110 says Content, users of proxies Payload
	}
	return http.StatusText(code)
}

// Document is an answer of its own format, whose bytes are sent as they are.
type Document struct {
	ContentType string
	Bytes       []byte // is overwritten afterwards
}

// answers are buffers that answers are encoded in; those kept are no larger than
// most answers are.
var answers = sync.Pool{New: func() any { return new(bytes.Buffer) }}

const maxKeptAnswer = 32 << 10

// Write answers with body as JSON, unless it is a [Document]. Nothing is sent before
// all of it is encoded.
func (v *Version) Write(c *gin.Context, code int, body any) {
	if d, ok := body.(Document); ok {
		defer clear(d.Bytes)
		c.Header("Content-Length", strconv.Itoa(len(d.Bytes)))
		c.Data(code, d.ContentType, d.Bytes)
		return
	}
	b := answers.Get().(*bytes.Buffer)
	defer func() {
		clear(b.Bytes()) // it may hold plaintext
		if b.Cap() <= maxKeptAnswer {
			b.Reset()
			answers.Put(b)
		}
	}()
	if err := encode(b, body); err != nil {
		// Only a defect gets here, and an error envelope always encodes.
		v.fail(c, fault.Wrap(fault.Internal, "internal error", err))
		return
	}
	send(c, code, b.Bytes())
}

// encode writes body as JSON, with a line's end for people at a terminal.
func encode(b *bytes.Buffer, body any) error {
	if err := json.MarshalWrite(b, body, json.Deterministic(true)); err != nil {
		return err
	}
	return b.WriteByte('\n')
}

// send answers with what is encoded.
func send(c *gin.Context, code int, encoded []byte) {
	c.Header("Content-Length", strconv.Itoa(len(encoded)))
	c.Data(code, "application/json; charset=utf-8", encoded)
}

// now is the time of an answer.
func (v *Version) now() string { return v.gate.config.Now().UTC().Format(time.RFC3339) }
