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

// InvalidParameter turns a fault.Invalid of a service into a 400. It is for operations without a
// body, which have no other input that could be invalid.
func InvalidParameter(err error) error {
	if fault.Of(err) == fault.Invalid {
		return BadRequest(fault.Message(err))
	}
	return err
}

// status returns the HTTP status of a kind. This is the only such table.
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

// describe returns the status of err and the details for the caller. A defect, an outage and an
// unauthenticated request get the generic message of their kind, so that their causes cannot be
// told apart.
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

// fail answers with the envelope of err. Only the log gets err itself.
func (v *Version) fail(c *gin.Context, err error) {
	_ = c.Error(err)
	code, details := v.describe(err)
	if c.Request.Context().Err() != nil && code == http.StatusInternalServerError {
		// The caller is gone or the time is up. A failure caused by that is not a defect.
		code, details = http.StatusServiceUnavailable, fault.Unavailable.Error()
	}
	switch {
	case isTooMany(code):
		v.retryAfter(c, err)
	case code == http.StatusUnauthorized:
		c.Writer.Header()["Www-Authenticate"] = challenges[v.scheme]
	}
	v.Write(c, code, v.envelope(Problem{
		Code: code, Message: generic(code), Details: details,
		RequestID: requestID(c), Timestamp: v.now(),
	}))
}

// Refuse answers a request that reaches no operation.
func (v *Version) Refuse(c *gin.Context, err error) { v.fail(c, err) }

// generic returns the generic message of a status, which goes with the details.
func generic(code int) string {
	if code == http.StatusRequestEntityTooLarge {
		return "Payload Too Large" // RFC 9110 says Content; proxies commonly say Payload
	}
	return http.StatusText(code)
}

// Document is an answer in a format of its own, whose bytes are sent as they are.
type Document struct {
	ContentType string
	Bytes       []byte // overwritten after it is sent
}

// answers holds buffers for encoding. They begin large enough for most answers, because a buffer that
// grows leaves its content behind in memory, where it cannot be cleared. A larger one is not reused.
var answers = sync.Pool{New: func() any { return bytes.NewBuffer(make([]byte, 0, maxKeptAnswer)) }}

const maxKeptAnswer = 32 << 10

// Write answers with body as JSON, or with the bytes of a [Document]. It sends nothing before all
// of the answer is encoded.
func (v *Version) Write(c *gin.Context, code int, body any) {
	if d, ok := body.(Document); ok {
		defer clear(d.Bytes)
		c.Header("Content-Length", strconv.Itoa(len(d.Bytes)))
		c.Data(code, d.ContentType, d.Bytes)
		return
	}
	b := answers.Get().(*bytes.Buffer)
	defer func() {
		clear(b.Bytes()) // may hold plaintext
		if b.Cap() <= maxKeptAnswer {
			b.Reset()
			answers.Put(b)
		}
	}()
	if err := encode(b, body); err != nil {
		// Only a defect leads here, and an error envelope always encodes.
		v.fail(c, fault.Wrap(fault.Internal, "internal error", err))
		return
	}
	send(c, code, b.Bytes())
}

// encode writes body as JSON, with a newline for users of a terminal.
func encode(b *bytes.Buffer, body any) error {
	if err := json.MarshalWrite(b, body, json.Deterministic(true)); err != nil {
		return err
	}
	return b.WriteByte('\n')
}

// send answers with encoded JSON.
func send(c *gin.Context, code int, encoded []byte) {
	c.Header("Content-Length", strconv.Itoa(len(encoded)))
	c.Data(code, "application/json; charset=utf-8", encoded)
}

// now returns the time of an answer.
func (v *Version) now() string { return v.gate.config.Now().UTC().Format(time.RFC3339) }
