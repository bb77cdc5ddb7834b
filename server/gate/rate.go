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
// of a stranger's address. A known caller never pays for its neighbours. Of a
// ServiceAccount it only looks whether too much was refused to it: what its
// cluster permits is counted once that is known, and what not when it is over.
func (call *Call) count(c *gin.Context) quota.Usage {
	var u quota.Usage
	source := audit.Source(c.ClientIP())
	switch call.Caller.Kind {
	case authz.Stranger:
		u = call.gate.addresses.Take(source, call.gate.config.Rates.Address)
		if call.operation.Registers && !u.Exceeded { // what a registration leaves, nothing removes
			u = call.gate.addresses.Take("register/"+source, call.gate.config.Rates.Registrations)
		}
	case authz.ServiceAccount:
		u = call.gate.accounts.Peek(call.Caller.ID, call.gate.config.Rates.Address)
		u.Exceeded = u.Remaining == 0
	default:
		u = call.takeOfTenant()
	}
	show(c.Writer.Header(), u)
	return u
}

func (call *Call) takeOfTenant() quota.Usage {
	return call.gate.tenants.Take(call.version.name+"/"+string(call.Caller.Tenant), call.limit())
}

// countPermitted counts a call that the cluster permits for the tenant.
func (call *Call) countPermitted(ctx context.Context) error {
	u := call.takeOfTenant()
	show(call.answer, u)
	call.exceeded = u.Exceeded
	return call.overRate(ctx, u)
}

// countRefused counts a ServiceAccount's call that was not permitted, for
// whatever reason but that the cluster could not be asked.
func (call *Call) countRefused() {
	if call.Caller.Kind == authz.ServiceAccount && !call.permitted && !call.unreviewed {
		call.gate.accounts.Take(call.Caller.ID, call.gate.config.Rates.Address)
	}
}

// ShowRate puts the bucket of the caller's address on a response that nothing
// is counted for, or not yet.
func (g *Gate) ShowRate(c *gin.Context) {
	show(c.Writer.Header(), g.addresses.Peek(audit.Source(c.ClientIP()), g.config.Rates.Address))
}

// addressUsedUp reports whether nothing more is done for strangers of an address in
// this minute. Who is known does not depend on it.
func (g *Gate) addressUsedUp(address string) bool {
	return g.addresses.Peek(audit.Source(address), g.config.Rates.Address).Remaining == 0
}

// CountStranger takes a request that reached no operation from the bucket of
// its address and returns the refusal if that is used up.
func (g *Gate) CountStranger(c *gin.Context) error {
	u := g.addresses.Take(audit.Source(c.ClientIP()), g.config.Rates.Address)
	show(c.Writer.Header(), u)
	if !u.Exceeded {
		return nil
	}
	g.recordStranger(c, audit.RateLimited)
	return &tooMany{u.Reset.Sub(g.config.Now())}
}

func show(h http.Header, u quota.Usage) {
	h.Set("X-RateLimit-Limit", strconv.Itoa(u.Limit))
	h.Set("X-RateLimit-Remaining", strconv.Itoa(u.Remaining))
	h.Set("X-RateLimit-Reset", strconv.FormatInt(u.Reset.Unix(), 10))
}

// limited returns the refusal of a request over its limit, which leaves one
// entry per caller and minute.
func (call *Call) limited(c *gin.Context, u quota.Usage) error {
	if u.Exceeded && call.Caller.Kind == authz.Stranger {
		call.gate.recordStranger(c, audit.RateLimited)
		return &tooMany{u.Reset.Sub(call.gate.config.Now())}
	}
	return call.overRate(c.Request.Context(), u)
}

// overRate is limited of a known caller.
func (call *Call) overRate(ctx context.Context, u quota.Usage) error {
	if !u.Exceeded {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	_ = call.gate.config.Audit.Limited(ctx, call.Caller.Principal)
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
