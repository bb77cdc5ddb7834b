package client

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// Targets for errors.Is on an [*Error]. Each stands for the statuses that need the same reaction.
var (
	ErrNotModified        = errors.New("not modified")            // 304: what OtherThan names is still there
	ErrInvalid            = errors.New("invalid request")         // 400, 413, 415, 422: change the request
	ErrUnauthenticated    = errors.New("authentication required") // 401: use another key, or sign in again
	ErrForbidden          = errors.New("access denied")           // 403: needs another scope; in the vault also: there is no such credential
	ErrNotFound           = errors.New("not found")               // 404
	ErrConflict           = errors.New("conflict")                // 409
	ErrPreconditionFailed = errors.New("changed meanwhile")       // 412: read again, and repeat the change on what is there now
	ErrRateLimited        = errors.New("rate limit exceeded")     // 429: retry later, see Error.RetryAfter
	ErrUnavailable        = errors.New("temporarily unavailable") // 503: retry later; the outcome is unknown
)

// ErrNoAnswer is a target for errors.Is: the server could not be reached, or its answer ended early.
// The outcome of the call is unknown.
var ErrNoAnswer = errors.New("no answer")

// noAnswer marks an error of the connection.
type noAnswer struct{ error }

// Unwrap implements the errors package's interface.
func (e noAnswer) Unwrap() []error { return []error{ErrNoAnswer, e.error} }

// Error is a refusal or a failure that the server reported. A missing answer is [ErrNoAnswer].
type Error struct {
	Status     int           // HTTP status
	Code       int           // status in the body; differs from Status only when a proxy answered
	Message    string        // what went wrong and what to do; never repeats the request
	Details    string        // v1 only
	RequestID  string        // quote it when asking for help; the audit entry contains it
	RetryAfter time.Duration // pause that the server asked for; 0 for none
}

// Error returns the answer in one line.
func (e *Error) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "latticekeep answered %d: %s", e.Status, e.Message)
	if e.Details != "" {
		b.WriteString(": " + e.Details)
	}
	if e.RequestID != "" {
		b.WriteString(" (request " + e.RequestID + ")")
	}
	return b.String()
}

// Is reports whether target is the error that stands for the status.
func (e *Error) Is(target error) bool {
	switch e.Status {
	case http.StatusNotModified:
		return target == ErrNotModified
	case http.StatusBadRequest, http.StatusRequestEntityTooLarge, http.StatusUnsupportedMediaType, http.StatusUnprocessableEntity:
		return target == ErrInvalid
	case http.StatusUnauthorized:
		return target == ErrUnauthenticated
	case http.StatusForbidden:
		return target == ErrForbidden
	case http.StatusNotFound:
		return target == ErrNotFound
	case http.StatusConflict:
		return target == ErrConflict
	case http.StatusPreconditionFailed:
		return target == ErrPreconditionFailed
	case http.StatusTooManyRequests:
		return target == ErrRateLimited
	case http.StatusServiceUnavailable:
		return target == ErrUnavailable
	}
	return false
}

// errorOf returns the error of a response. A body that is not our envelope, such as a proxy's page,
// is described by its status alone.
func errorOf(r *http.Response, body []byte) *Error {
	var envelope struct {
		Error struct {
			Code      int    `json:"code"`
			Message   string `json:"message"`
			Details   string `json:"details"`
			RequestID string `json:"request_id"`
		} `json:"error"`
	}
	e := &Error{Status: r.StatusCode, RetryAfter: retryAfter(r)}
	if json.Unmarshal(body, &envelope) == nil {
		e.Code, e.Message, e.Details, e.RequestID = envelope.Error.Code, envelope.Error.Message, envelope.Error.Details, envelope.Error.RequestID
	}
	if e.Message == "" {
		e.Message = strings.ToLower(http.StatusText(r.StatusCode))
	}
	if e.RequestID == "" {
		e.RequestID = r.Header.Get("X-Request-ID")
	}
	return e
}

// retryAfter reads the Retry-After header (RFC 9110 §10.2.3). It returns 0 when there is none.
func retryAfter(r *http.Response) time.Duration {
	value := r.Header.Get("Retry-After")
	if seconds, err := strconv.ParseUint(value, 10, 31); err == nil {
		return time.Duration(seconds) * time.Second
	}
	if at, err := http.ParseTime(value); err == nil {
		return max(0, time.Until(at))
	}
	return 0
}
