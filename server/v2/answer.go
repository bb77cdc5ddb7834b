package v2

import (
	"bytes"
	"errors"
	"net/http"
	"strconv"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/go-json-experiment/json"

	"github.com/latticekeep/latticekeep/internal/fault"
)

// RequestIDHeader carries the id of a request on its response. The server sets
// it before anything else runs; it is the one place where the id is kept.
const RequestIDHeader = "X-Request-ID"

func requestID(c *gin.Context) string { return c.Writer.Header().Get(RequestIDHeader) }

// refusal is an error of the transport: a status that no [fault.Kind] stands
// for. Its message is safe for the caller.
type refusal struct {
	status  int
	message string
}

func (r *refusal) Error() string { return r.message }

// NewRefusal returns the error of a request that reached no endpoint.
func NewRefusal(status int, message string) error { return &refusal{status, message} }

// status is the one table from kinds to statuses.
func status(k fault.Kind) int {
	switch k {
	case fault.Invalid:
		return http.StatusUnprocessableEntity
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

// describe returns what a caller is told of err. Only an invalid request gets
// the service's own message, which names the remedy; all others get that of the
// kind, so that no two failures of a kind can be told apart.
func describe(err error) (int, string) {
	var r *refusal
	if errors.As(err, &r) {
		return r.status, r.message
	}
	kind := fault.Of(err)
	if kind == fault.Invalid {
		return status(kind), fault.Message(err)
	}
	return status(kind), kind.Error()
}

// success begins the body of every successful answer.
type success struct {
	Success bool `json:"success"`
}

// errorBody is the error envelope of version 2.
type errorBody struct {
	Success bool        `json:"success"`
	Error   errorDetail `json:"error"`
}

type errorDetail struct {
	Code      int    `json:"code"`
	Message   string `json:"message"`
	RequestID string `json:"request_id"`
	Timestamp string `json:"timestamp"`
}

// Fail answers with the envelope of err and leaves err itself to the log.
func Fail(c *gin.Context, now time.Time, err error) {
	_ = c.Error(err)
	code, message := describe(err)
	if c.Request.Context().Err() != nil && code == http.StatusInternalServerError {
		// The caller is gone, so nobody reads this, and what failed because of
		// it is no defect of ours.
		code, message = http.StatusServiceUnavailable, fault.Unavailable.Error()
	}
	Write(c, now, code, errorBody{Error: errorDetail{
		Code:      code,
		Message:   message,
		RequestID: requestID(c),
		Timestamp: now.UTC().Format(time.RFC3339),
	}})
}

// Write answers with body as JSON. Nothing is sent before all of it is encoded.
func Write(c *gin.Context, now time.Time, code int, body any) {
	var b bytes.Buffer
	if err := json.MarshalWrite(&b, body, json.Deterministic(true)); err != nil {
		// Only a defect gets here, and an error envelope always encodes.
		Fail(c, now, fault.Wrap(fault.Internal, "internal error", err))
		return
	}
	b.WriteByte('\n')      // for people at a terminal
	defer clear(b.Bytes()) // it may hold plaintext
	c.Header("Content-Length", strconv.Itoa(b.Len()))
	c.Data(code, "application/json; charset=utf-8", b.Bytes())
}
