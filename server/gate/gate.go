// Package gate is the way that every request of the REST interface takes before
// an endpoint sees it, and that every answer takes back, in both versions.
//
// The checks run in one fixed order, so that a request that breaks several
// rules is always answered for the same one, and a caller without the scope
// learns nothing about what it sent: size of the body, authentication, rate (a
// stranger whose address is over it is told so, whatever it presents), scope (of a
// ServiceAccount: what its cluster allows, and then the rate of its tenant),
// content type, well-formed JSON, parameters, schema. What an operation takes comes from the OpenAPI document of
// its version; what it requires of the caller from authz.
//
// A call of a known principal leaves exactly one audit entry: that of the
// service which carried it out or refused it, and that of the gate when it never
// came so far. Strangers are counted by address and recorded once a minute. So is,
// by its UID, a ServiceAccount in what its cluster does not permit.
//
// Request bodies are overwritten after the call and answers after they were
// written. The strings that JSON decoding makes of them are not: Go offers no
// way to. What is kept any longer is [secret.Bytes] in the services.
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

	"github.com/gin-gonic/gin"
	"golang.org/x/sync/semaphore"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/secret"
)

// New returns a gate. Error: an origin that is none.
func New(c Config) (*Gate, error) {
	c.Rates = c.Rates.withDefaults()
	tenants, addresses, accounts := c.limiters()
	g := &Gate{
		config: c, tenants: tenants, addresses: addresses, accounts: accounts,
		origins: http.NewCrossOriginProtection(), entrance: newEntrance(c.InFlight),
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

// Checks returns the middleware of a version's endpoints.
func (v *Version) Checks() gin.HandlerFunc {
	return func(c *gin.Context) {
		op := v.operations[c.Request.Method+" "+c.FullPath()]
		call := &Call{gate: v.gate, version: v, operation: op, answer: c.Writer.Header(), connection: c.Request.Context()}
		c.Set(callKey, call)
		if op.waits() && v.gate.entrance.full() { // before anything is done for it
			v.refuseShed(c)
			c.Abort()
			return
		}
		defer call.countRefused()
		err := call.admit(c) // a body has its own time to arrive
		defer secret.Bytes(call.body).Zero()
		if err == nil {
			// From here on most answers take at most a second, whatever hangs.
			ctx, cancel := context.WithTimeout(c.Request.Context(), cmp.Or(op.Patience, patience))
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

// admit finds out who asks, counts the request and takes in its body.
func (call *Call) admit(c *gin.Context) error {
	// The principal is looked up first, so that no memory is held for the body
	// of a stranger; a body that is too large is answered before all the same.
	unknown := call.authenticate(c)
	usage, uncounted := call.count(c)
	call.exceeded = usage.Exceeded
	body, err := call.readBody(c, unknown == nil && uncounted == nil && !usage.Exceeded)
	call.body = body
	if err := cmp.Or(err, uncounted, call.limited(c, usage)); err != nil {
		return err
	}
	if errors.Is(unknown, fault.Unauthenticated) {
		call.gate.recordStranger(c, audit.AccessRefused)
	}
	return unknown
}

// standing is the refusal of a server whose database has lost part of the log: what
// it would answer may be of yesterday.
func (call *Call) standing() error {
	if call.operation.Recovers {
		return nil
	}
	if reason := call.gate.config.Guard.HaltedBy(); reason != nil {
		return fault.Wrap(fault.Unavailable, fault.Unavailable.Error(), reason)
	}
	return nil
}

// check holds an admitted request against its operation.
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
		if err := checkContentType(c.Request.Header); err != nil {
			return err
		}
	}
	// What JSON becomes in memory is many times its size, and takes its time.
	if len(call.body) > smallBody {
		if call.gate.parsing.Acquire(c.Request.Context(), 1) != nil {
			return fault.Unavailable
		}
		defer call.gate.parsing.Release(1)
	}
	plain := op.shape.holds(call.body) // then nothing is wrong with it
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

// authorize is the check of the caller's scope.
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
	if op.Recovers && call.gate.config.Guard.HaltedBy() != nil && call.Caller.Denies(op.Action) != "" {
		return fault.New(fault.Forbidden, "access denied") // no entry can be written until who may has carried it out
	}
	return call.gate.config.Guard.Authorize(c.Request.Context(), call.Caller.Principal, op.Action)
}

// refuse records that the caller, if it is known, may not.
func (call *Call) refuse(c *gin.Context, reason string, refused error) error {
	if call.Caller.Kind == authz.Stranger || call.operation.Action == "" {
		return refused
	}
	return cmp.Or(call.gate.config.Guard.RecordAttempt(c.Request.Context(), call.Caller.Principal, call.operation.Action, audit.Denied, reason), refused)
}

// Answer carries out an operation whose checks have passed and answers with
// the status and what do returns, or with the envelope of its error.
func Answer(c *gin.Context, status int, do func(context.Context, *Call) (any, error)) {
	call := c.MustGet(callKey).(*Call)
	answer, err := do(c.Request.Context(), call)
	call.leave() // whoever reads its answer slowly holds no place
	if err != nil {
		call.fail(c, err)
		return
	}
	call.version.Write(c, status, answer)
}

// Principal is who asks.
func (call *Call) Principal() authz.Principal { return call.Caller.Principal }

// HasBody reports whether the request came with a body, where it need not.
func (call *Call) HasBody() bool { return len(call.body) > 0 }

// Fail answers a request whose parameters the generated code could not read.
func (v *Version) Fail(c *gin.Context, _ error, _ int) {
	call := c.MustGet(callKey).(*Call)
	call.fail(c, call.operation.badQuery(BadRequest("a parameter of the path or the query is malformed")))
}

// ErrSigned is what a signed URL that does not hold is answered with, whatever the
// cause.
var ErrSigned = fault.New(fault.Forbidden, "access denied")

// badQuery is the refusal of a query that err says is wrong.
func (op *operation) badQuery(err error) error {
	if op.Signed {
		return ErrSigned
	}
	return err
}

// fail answers with the envelope of err. A known principal whose request was
// invalid has left no entry yet.
func (call *Call) fail(c *gin.Context, err error) {
	var r *refusal
	invalid := fault.Of(err) == fault.Invalid || errors.As(err, &r) && r.unrecorded()
	if call.exceeded { // one entry a minute is enough of a caller over its rate, whatever else is wrong
		invalid = false
	}
	if invalid && call.operation.Action != "" && call.Caller.ID != "" {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(c.Request.Context()), patience)
		defer cancel()
		attempt := call.gate.config.Guard.RecordAttempt
		if call.Caller.Kind == authz.ServiceAccount && !call.permitted {
			attempt = call.gate.config.Guard.RecordAttemptOncePerMinute
		}
		failed := attempt(ctx, call.Caller.Principal, call.operation.Action, audit.Failure, "invalid_request")
		if call.operation.Recovers && call.gate.config.Guard.HaltedBy() != nil {
			failed = nil // no entry can be written until this operation succeeds: its caller is told what is wrong
		}
		err = cmp.Or(failed, err)
	}
	call.version.fail(c, err)
}

// Bounds of a request's body. Nobody is known to an operation that everybody
// may call, and none of those takes more than an address and a password.
const (
	maxBody       = 1 << 20
	maxPublicBody = 16 << 10
	smallBody     = 16 << 10 // is parsed without waiting
)

// readBody reads the whole body, since how large a chunked body is shows only
// then, and returns it if it is to be kept.
func (call *Call) readBody(c *gin.Context, keep bool) (body []byte, err error) {
	most, refused := int64(maxBody), &refusal{http.StatusRequestEntityTooLarge, "the request body is larger than 1 MiB"}
	if call.operation.Auth != Required {
		most, refused = maxPublicBody, &refusal{http.StatusRequestEntityTooLarge, "the request body is larger than 16 KiB"}
	}
	if c.Request.ContentLength > most {
		return nil, refused // net/http will not keep a connection whose body was left unread
	}
	limited := http.MaxBytesReader(c.Writer, c.Request.Body, most)
	switch {
	case !keep:
		_, err = io.Copy(io.Discard, limited)
	case c.Request.ContentLength >= 0:
		body = make([]byte, c.Request.ContentLength)
		_, err = io.ReadFull(limited, body)
	default:
		body, err = io.ReadAll(limited)
	}
	var tooLarge *http.MaxBytesError
	if errors.As(err, &tooLarge) {
		return body, refused
	}
	if err != nil {
		return body, BadRequest("the request body ended early")
	}
	return body, nil
}
