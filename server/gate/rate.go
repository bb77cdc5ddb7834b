package gate

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/http"
	"strconv"
	"time"

	"github.com/gin-gonic/gin"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/quota"
)

// Rates are requests a minute.
type Rates struct {
	V1      int // of a tenant; default 1000
	V2      int // of a tenant; default 5000
	Address int // of strangers from one address; default 1000

	Registrations int // of those, registrations; default 30
}

func (r Rates) withDefaults() Rates {
	orElse := func(n *int, otherwise int) {
		if *n == 0 {
			*n = otherwise
		}
	}
	orElse(&r.V1, 1000)
	orElse(&r.V2, 5000)
	orElse(&r.Address, 1000)
	orElse(&r.Registrations, 30)
	return r
}

// limit is what the caller's tenant may use of the version.
func (call *Call) limit() int {
	own, rate := call.Caller.Limits.V2, call.gate.config.Rates.V2
	if call.version.scheme == BearerKey {
		own, rate = call.Caller.Limits.V1, call.gate.config.Rates.V1
	}
	if own > 0 {
		return own
	}
	return rate
}

// count takes one request from the bucket of the caller's tenant, or from that
// of a stranger's address. A known caller never pays for its neighbours.
func (call *Call) count(c *gin.Context) quota.Usage {
	var u quota.Usage
	if source := audit.Source(c.ClientIP()); call.Caller.Kind == authz.Stranger {
		u = call.gate.addresses.Take(source, call.gate.config.Rates.Address)
		if call.operation.Registers && !u.Exceeded { // what a registration leaves, nothing removes
			u = call.gate.addresses.Take("register/"+source, call.gate.config.Rates.Registrations)
		}
	} else {
		u = call.gate.tenants.Take(call.version.name+"/"+string(call.Caller.Tenant), call.limit())
	}
	show(c, u)
	return u
}

// ShowRate puts the bucket of the caller's address on a response that nothing
// is counted for, or not yet.
func (g *Gate) ShowRate(c *gin.Context) {
	show(c, g.addresses.Peek(audit.Source(c.ClientIP()), g.config.Rates.Address))
}

// CountStranger takes a request that reached no operation from the bucket of
// its address and returns the refusal if that is used up.
func (g *Gate) CountStranger(c *gin.Context) error {
	u := g.addresses.Take(audit.Source(c.ClientIP()), g.config.Rates.Address)
	show(c, u)
	if !u.Exceeded {
		return nil
	}
	g.recordStranger(c, audit.RateLimited)
	return &tooMany{u.Reset.Sub(g.config.Now())}
}

func show(c *gin.Context, u quota.Usage) {
	h := c.Writer.Header()
	h.Set("X-RateLimit-Limit", strconv.Itoa(u.Limit))
	h.Set("X-RateLimit-Remaining", strconv.Itoa(u.Remaining))
	h.Set("X-RateLimit-Reset", strconv.FormatInt(u.Reset.Unix(), 10))
}

// limited returns the refusal of a request over its limit, which leaves one
// entry per caller and minute.
func (call *Call) limited(c *gin.Context, u quota.Usage) error {
	if !u.Exceeded {
		return nil
	}
	if p := call.Caller.Principal; p.Kind == authz.Stranger {
		call.gate.recordStranger(c, audit.RateLimited)
	} else {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(c.Request.Context()), patience)
		defer cancel()
		_ = call.gate.config.Audit.Limited(ctx, p)
	}
	return &tooMany{u.Reset.Sub(call.gate.config.Now())}
}

// tooMany is the 429, with the time until the bucket is new.
type tooMany struct{ wait time.Duration }

func (*tooMany) Error() string { return "rate limit exceeded: wait as long as Retry-After says" }

// jitter spreads what callers do when their minute is over.
const jitter = 5 // seconds

// retryAfter puts the header on a 429. In v2 it is jittered.
func (v *Version) retryAfter(c *gin.Context, err error) {
	var t *tooMany
	seconds := 1
	if errors.As(err, &t) {
		seconds = max(1, int((t.wait+time.Second-1)/time.Second))
	}
	if v.scheme == KeyOrUser {
		seconds += rand.IntN(jitter + 1)
	}
	c.Header("Retry-After", strconv.Itoa(seconds))
}

func isTooMany(code int) bool { return code == http.StatusTooManyRequests }
