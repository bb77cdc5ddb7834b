// Package gate admits every request of the REST interface before an endpoint sees it, and writes
// every answer, in both versions.
//
// The checks run in one fixed order. So a request that breaks several rules always gets the same
// answer, and a caller without the scope learns nothing about what it sent. The OpenAPI documents
// state the order of the answers. The work has nearly the same order, but the caller is looked up
// first, because its tenant or its address decides which rate counts. For a ServiceAccount, the scope
// check asks its cluster, and then counts the rate of its tenant. The OpenAPI document of a version
// defines the input of an operation; package authz defines what it requires of the caller.
//
// A call of a known principal leaves exactly one audit entry. The service that carried it out or
// refused it writes the entry, or the gate does if the call never reached the service. Repeated answers of
// 304 are the exception: one entry an hour counts them. The gate
// counts strangers by address and records them once a minute. It does the same, by UID, with
// ServiceAccounts in what their cluster does not permit.
//
// The gate overwrites request bodies after the call and answers after they are written. It cannot
// overwrite the strings that JSON decoding makes of them: Go offers no way to. What services keep
// longer is [secret.Bytes].
package gate

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"runtime"
	"runtime/debug"

	"github.com/gin-gonic/gin"
	"golang.org/x/sync/semaphore"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/state"
)

// New returns a gate. It returns an error for an invalid origin.
func New(c Config) (*Gate, error) {
	c.Limits = c.Limits.withDefaults()
	tenants, addresses, accounts := c.limiters()
	g := &Gate{
		config: c, tenants: tenants, addresses: addresses, accounts: accounts,
		origins: http.NewCrossOriginProtection(), entrance: newEntrance(c.InFlight), bodies: newBodies(debug.SetMemoryLimit(-1)),
		parsing: semaphore.NewWeighted(int64(max(1, runtime.GOMAXPROCS(0)/2))),
	}
	g.streams, g.endStreams = context.WithCancel(context.Background())
	if c.Origin != "" {
		if err := g.origins.AddTrustedOrigin(c.Origin); err != nil {
			return nil, fmt.Errorf("trusting the public URL's origin: %w", err)
		}
	}
	return g, nil
}

// Checks returns the middleware for a version's endpoints.
//
//nolint:contextcheck // the handler has the context of its request
func (v *Version) Checks() gin.HandlerFunc {
	return func(c *gin.Context) {
		op := v.operations[c.Request.Method+" "+c.FullPath()]
		call := &Call{gate: v.gate, version: v, operation: op, answer: c.Writer.Header(), connection: c.Request.Context()}
		c.Set(callKey, call)
		if op.waits() && v.gate.entrance.full() { // before any other work
			v.refuseShed(c)
			c.Abort()
			return
		}
		defer call.countRefused()
		defer call.release()
		err := call.admit(c) // reading the body has a time limit of its own
		if err == nil {
			// From here on most answers take at most a second, even if something hangs.
			ctx, cancel := context.WithTimeout(c.Request.Context(), max(op.Patience, v.gate.config.Limits.Patience))
			defer cancel()
			c.Request = c.Request.WithContext(ctx)
			if err = call.standing(); err == nil {
				err = call.enter(ctx)
			}
			defer call.leave()
			if err == nil {
				err = call.check(c)
			}
		}
		if err != nil {
			call.fail(c, err)
			c.Abort()
			return
		}
		c.Next()
	}
}

// admit authenticates the caller, counts the request and reads its body.
func (call *Call) admit(c *gin.Context) error {
	// The principal is looked up first, so that no memory is held for the body of a stranger, or of a
	// caller without the scope, which is refused later. A body that is too large is still answered first.
	unknown := call.authenticate(c)
	usage, uncounted := call.count(c)
	call.exceeded = usage.Exceeded
	body, err := call.readBody(c, unknown == nil && uncounted == nil && !usage.Exceeded && call.mayHaveScope())
	call.body = body
	if err := cmp.Or(err, uncounted, call.limited(c, usage)); err != nil {
		return err
	}
	if errors.Is(unknown, fault.Unauthenticated) {
		call.gate.recordStranger(c, audit.AccessRefused)
	}
	return unknown
}

// mayHaveScope reports whether the caller may have the scope of the operation. The cluster decides that
// for a ServiceAccount later.
func (call *Call) mayHaveScope() bool {
	return call.Caller.ServiceAccount != nil || call.Caller.Kind == authz.Stranger || call.operation.Action == "" ||
		call.Caller.Denies(call.operation.Action) == ""
}

// standing refuses the call if the audit log is halted because the database lost entries, or if a
// stored row of the deployment itself was changed: an answer could be out of date.
func (call *Call) standing() error {
	if call.operation.Recovers {
		return nil
	}
	return call.gate.config.Guard.CheckNotHalted()
}

// check checks an admitted request against its operation.
func (call *Call) check(c *gin.Context) error {
	if !call.byHeader {
		if err := call.gate.origins.Check(c.Request); err != nil {
			return call.refuse(c, "cross_origin", &refusal{http.StatusForbidden, "cross-origin requests with cookies are refused"})
		}
	}
	op := call.operation
	if err := call.authorize(c); err != nil {
		return err
	}
	if len(call.body) > 0 {
		if err := op.checkContentType(c.Request.Header); err != nil {
			return err
		}
	}
	// Parsed JSON takes many times its size in memory, and time to parse.
	if len(call.body) > smallBody {
		if call.gate.parsing.Acquire(c.Request.Context(), 1) != nil {
			return fault.Unavailable
		}
		defer call.gate.parsing.Release(1)
	}
	plain := op.shape.holds(call.body) // if true, the body is valid
	if len(call.body) > 0 && !plain {
		if err := checkJSON(call.body); err != nil {
			return err
		}
	}
	query, err := url.ParseQuery(c.Request.URL.RawQuery)
	if err != nil {
		err = BadRequest("the query string is malformed")
	} else {
		err = op.checkParameters(c.Request, query)
	}
	if err != nil {
		return op.badQuery(err)
	}
	if plain {
		return nil
	}
	return op.checkBody(call.body)
}

// authorize checks the caller's scope.
func (call *Call) authorize(c *gin.Context) error {
	op := call.operation
	switch {
	case call.Caller.ServiceAccount != nil && op.Reviews:
		return nil
	case call.Caller.ServiceAccount != nil:
		return call.Review(c.Request.Context(), "", c.Param(op.Object))
	case op.Action == "" || call.Caller.Kind == authz.Stranger:
		return nil
	}
	scope, _ := authz.Required(op.Action)
	if op.Recovers && call.gate.config.Guard.HaltedBy() != nil && call.Caller.Denies(op.Action) != "" {
		call.nameMissingScope(scope)
		return fault.New(fault.Forbidden, "access denied") // a halted log takes no entry until a permitted caller succeeds
	}
	err := call.gate.config.Guard.Authorize(c.Request.Context(), call.Caller.Principal, op.Action)
	if fault.Of(err) == fault.Forbidden {
		call.nameMissingScope(scope)
	}
	return err
}

// refuse records the denial of a known caller and returns refused.
func (call *Call) refuse(c *gin.Context, reason string, refused error) error {
	if call.Caller.Kind == authz.Stranger || call.operation.Action == "" {
		return refused
	}
	return cmp.Or(call.gate.config.Guard.RecordAttempt(c.Request.Context(), call.Caller.Principal, call.operation.Action, audit.Denied, reason), refused)
}

// Answer carries out an operation whose checks have passed. It answers with status and what do
// returns, or with the envelope of the error.
func Answer(c *gin.Context, status int, do func(context.Context, *Call) (any, error)) {
	call := c.MustGet(callKey).(*Call)
	answer, err := do(c.Request.Context(), call)
	if later, ok := answer.(Later); ok && err == nil {
		answer, err = call.wait(c, later)
	}
	call.leave() // a slow reader of the answer holds no place
	call.dispose(c)
	if err != nil {
		call.fail(c, err)
		return
	}
	switch made := answer.(type) {
	case Created:
		status, answer = http.StatusCreated, made.Answer
	case NotModified:
		c.Header("ETag", made.EntityTag)
		c.Status(http.StatusNotModified)
		c.Writer.WriteHeaderNow()
		return
	}
	call.version.Write(c, status, answer)
}

// Created is an answer with the status 201, whatever the operation's status is.
type Created struct{ Answer any }

// Principal returns the caller.
func (call *Call) Principal() authz.Principal { return call.Caller.Principal }

// HasBody reports whether a request with an optional body has one.
func (call *Call) HasBody() bool { return len(call.body) > 0 }

// Fail answers a request whose parameters the generated code could not read.
func (v *Version) Fail(c *gin.Context, _ error, _ int) {
	call := c.MustGet(callKey).(*Call)
	call.fail(c, call.operation.badQuery(BadRequest("a parameter of the path or the query is malformed")))
}

// ErrSigned is the answer to every invalid signed URL, whatever the cause.
var ErrSigned = fault.New(fault.Forbidden, "access denied")

// badQuery returns the refusal of a query with the error err.
func (op *operation) badQuery(err error) error {
	if op.Signed {
		return ErrSigned
	}
	return err
}

// fail answers with the envelope of err. It records an invalid request of a known principal, and one
// that met a changed row, which have no entry yet.
func (call *Call) fail(c *gin.Context, err error) {
	var r *refusal
	unrecorded := fault.Of(err) == fault.Invalid || errors.As(err, &r) && r.unrecorded()
	if call.exceeded { // a caller over its rate gets one entry a minute
		unrecorded = false
	}
	reason := "invalid_request"
	if state.IsRefused(err) {
		unrecorded, reason = true, "integrity"
	}
	if unrecorded && call.operation.Action != "" && call.Caller.ID != "" {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(c.Request.Context()), call.gate.config.Limits.Patience)
		defer cancel()
		attempt := call.gate.config.Guard.RecordAttempt
		if call.Caller.Kind == authz.ServiceAccount && !call.permitted {
			attempt = call.gate.config.Guard.RecordAttemptOncePerMinute
		}
		failed := attempt(ctx, call.Caller.Principal, call.operation.Action, audit.Failure, reason)
		if call.operation.Recovers && call.gate.config.Guard.HaltedBy() != nil {
			failed = nil // a halted log takes no entry; the caller gets the original error
		}
		err = cmp.Or(failed, err)
	}
	call.version.fail(c, err)
}

// readBody reads the whole body, because the size of a chunked body shows only then. It returns the
// body if keep is set. Error: ErrOverloaded if there is no memory for it.
func (call *Call) readBody(c *gin.Context, keep bool) (body []byte, err error) {
	most, refused := int64(maxBody), &refusal{http.StatusRequestEntityTooLarge, "the request body is larger than 1 MiB"}
	if call.operation.Auth != Required {
		most, refused = maxPublicBody, &refusal{http.StatusRequestEntityTooLarge, "the request body is larger than 16 KiB"}
	}
	if c.Request.ContentLength > most {
		return nil, refused // net/http closes a connection with an unread body
	}
	limited := http.MaxBytesReader(c.Writer, c.Request.Body, most)
	var full error
	switch {
	case !keep:
	case c.Request.ContentLength >= 0:
		if full = call.reserve(c, c.Request.ContentLength); full == nil {
			body = make([]byte, c.Request.ContentLength)
			_, err = io.ReadFull(limited, body)
		}
	default:
		if body, err = io.ReadAll(io.LimitReader(limited, smallBody)); err != nil || len(body) < smallBody {
			break
		}
		if full = call.reserve(c, most); full == nil {
			var rest []byte
			rest, err = io.ReadAll(limited)
			body = append(body, rest...)
		}
	}
	if !keep || full != nil {
		_, err = io.Copy(io.Discard, limited)
	} else if err := call.settle(); err != nil {
		return body, err
	}
	var tooLarge *http.MaxBytesError
	if errors.As(err, &tooLarge) {
		return body, refused
	}
	if err != nil {
		return body, BadRequest("the request body ended early")
	}
	return body, full
}
