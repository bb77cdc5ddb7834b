package gate

import (
	"cmp"
	"context"
	"errors"
	"math/rand/v2"
	"net/http"
	"net/netip"
	"strconv"
	"time"

	"github.com/gin-gonic/gin"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/quota"
)

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

// lendingPatience is how long a request waits to be counted: within a second it is
// answered that there is no answer.
const lendingPatience = 500 * time.Millisecond

// limiters are what requests are counted by, of all replicas if there is a lender.
// Buckets of strangers are lent a row of the database each, so that there are fewer.
func (c Config) limiters() (tenants, addresses, accounts *quota.Limiter) {
	if c.Lender == nil {
		return quota.New(c.Now), quota.New(c.Now), quota.New(c.Now)
	}
	return quota.NewShared(c.Lender, "tenant", 0), quota.NewShared(c.Lender, "address", maxLentAddresses), quota.NewShared(c.Lender, "account", 0)
}

// maxLentAddresses is how many strangers' addresses a replica counts by themselves in
// a minute, where that takes a row of the database each. Of those that come later it
// counts the networks, and then all of them together.
const maxLentAddresses = 8192

// networks are the buckets that an address is counted in when there is no room for
// one of its own.
func networks(address string) []string {
	ip, err := netip.ParseAddr(address)
	if err != nil {
		return nil
	}
	bits := 48
	if ip = ip.Unmap(); ip.Is4() {
		bits = 16
	}
	network, _ := ip.Prefix(bits) // both lengths are fine
	return []string{network.Masked().String()}
}

// borrow counts a request.
func borrow(ctx context.Context, l *quota.Limiter, bucket string, limit int, wider ...string) (quota.Usage, error) {
	ctx, cancel := context.WithTimeout(ctx, lendingPatience)
	defer cancel()
	return l.Borrow(ctx, bucket, limit, wider...)
}

// takeOfAddress counts a request of a stranger.
func (g *Gate) takeOfAddress(ctx context.Context, address string) (quota.Usage, error) {
	return borrow(ctx, g.addresses, audit.Source(address), g.config.Rates.Address, networks(address)...)
}

// count takes one request from the bucket of the caller's tenant, or from that
// of a stranger's address. A known caller never pays for its neighbours. Of a
// ServiceAccount it only looks whether too much was refused to it: what its
// cluster permits is counted once that is known, and what not when it is over.
// Error: fault.Unavailable, when it cannot be counted.
func (call *Call) count(c *gin.Context) (u quota.Usage, err error) {
	ctx, g, address := c.Request.Context(), call.gate, c.ClientIP()
	switch call.Caller.Kind {
	case authz.Stranger:
		u, err = g.takeOfAddress(ctx, address)
		if call.operation.Registers && err == nil && !u.Exceeded { // what a registration leaves, nothing removes
			u, err = borrow(ctx, g.addresses, "register/"+audit.Source(address), g.config.Rates.Registrations)
		}
	case authz.ServiceAccount:
		ctx, cancel := context.WithTimeout(ctx, lendingPatience)
		defer cancel()
		u, err = g.accounts.Check(ctx, call.Caller.ID, g.config.Rates.Address)
	default:
		u, err = call.takeOfTenant(ctx)
	}
	show(c.Writer.Header(), u)
	return u, err
}

func (call *Call) takeOfTenant(ctx context.Context) (quota.Usage, error) {
	return borrow(ctx, call.gate.tenants, call.version.name+"/"+string(call.Caller.Tenant), call.limit())
}

// countPermitted counts a call that the cluster permits for the tenant.
func (call *Call) countPermitted(ctx context.Context) error {
	u, err := call.takeOfTenant(ctx)
	show(call.answer, u)
	call.exceeded = u.Exceeded
	return cmp.Or(err, call.overRate(ctx, u))
}

// countRefused counts a ServiceAccount's call that was not permitted, for
// whatever reason but that the cluster could not be asked. To hang up is no way
// around it.
func (call *Call) countRefused() {
	if call.Caller.Kind == authz.ServiceAccount && !call.permitted && !call.unreviewed {
		_, _ = borrow(context.Background(), call.gate.accounts, call.Caller.ID, call.gate.config.Rates.Address) // it was refused already
	}
}

// ShowRate puts the bucket of the caller's address on a response that nothing
// is counted for, or not yet.
func (g *Gate) ShowRate(c *gin.Context) { show(c.Writer.Header(), g.peekOfAddress(c.ClientIP())) }

func (g *Gate) peekOfAddress(address string) quota.Usage {
	return g.addresses.Peek(audit.Source(address), g.config.Rates.Address, networks(address)...)
}

// addressUsedUp reports whether nothing more is done for strangers of an address in
// this minute. Who is known does not depend on it.
func (g *Gate) addressUsedUp(address string) bool { return g.peekOfAddress(address).Remaining == 0 }

// CountStranger takes a request that reached no operation from the bucket of
// its address and returns the refusal if that is used up. Nothing is given out there,
// so that one which cannot be counted is answered like any other.
func (g *Gate) CountStranger(c *gin.Context) error {
	u, err := g.takeOfAddress(c.Request.Context(), c.ClientIP())
	show(c.Writer.Header(), u)
	if err != nil || !u.Exceeded {
		return nil
	}
	g.recordStranger(c, audit.RateLimited)
	return &tooMany{u.Wait}
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
		return &tooMany{u.Wait}
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
	_ = call.gate.config.Guard.RecordRateLimit(ctx, call.Caller.Principal)
	return &tooMany{u.Wait}
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

// stranger is who asks before it is known who it is.
func stranger(c *gin.Context) authz.Principal {
	return authz.Principal{Tenant: authz.SystemTenant, Kind: authz.Stranger, RequestID: requestID(c), SourceIP: c.ClientIP()}
}

// recordStranger leaves an entry of a request without a principal, unless its
// source has one in this minute. The answer is the same whether that works or
// not.
func (g *Gate) recordStranger(c *gin.Context, event audit.EventType) {
	g.recordRefusal(c.Request.Context(), stranger(c), event)
}

func (g *Gate) recordRefusal(ctx context.Context, p authz.Principal, event audit.EventType) {
	// Not under the request's own context: that ends when the stranger hangs up.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	_ = g.config.Guard.RecordRefusal(ctx, audit.Source(p.SourceIP), audit.Event{
		Type: event, Outcome: audit.Denied, Principal: p, Resource: audit.Resource{Type: audit.InterfaceResource},
	})
}
