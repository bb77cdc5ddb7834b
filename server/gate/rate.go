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
	"github.com/latticekeep/latticekeep/internal/identity"
	"github.com/latticekeep/latticekeep/internal/quota"
)

func (l Limits) withDefaults() Limits {
	return Limits{
		V1: cmp.Or(l.V1, 1000), V2: cmp.Or(l.V2, 5000), Address: cmp.Or(l.Address, 1000),
		Registrations: cmp.Or(l.Registrations, 30), Patience: cmp.Or(l.Patience, 900*time.Millisecond),
	}
}

// EffectiveLimits returns the caller's limits of both versions, in requests per minute: those of its
// tenant, or the defaults.
func (call *Call) EffectiveLimits() identity.Limits {
	own, rates := call.Caller.Limits, call.gate.config.Limits
	return identity.Limits{V1: cmp.Or(own.V1, rates.V1), V2: cmp.Or(own.V2, rates.V2)}
}

// limit returns the caller's limit for this version.
func (call *Call) limit() int {
	limits := call.EffectiveLimits()
	if call.version.scheme == BearerKey {
		return limits.V1
	}
	return limits.V2
}

// lendingPatience is how long a request waits to be counted. It leaves time to report a failure
// within a second.
const lendingPatience = 500 * time.Millisecond

// limiters returns the limiters of requests. With a Lender they count the requests of all replicas.
// Each bucket of a stranger then takes a row in the database, so their number is bounded.
func (c Config) limiters() (tenants, addresses, accounts *quota.Limiter) {
	if c.Lender == nil {
		return quota.New(c.Now), quota.New(c.Now), quota.New(c.Now)
	}
	return quota.NewShared(c.Lender, "tenant", 0), quota.NewShared(c.Lender, "address", maxLentAddresses), quota.NewShared(c.Lender, "account", 0)
}

// maxLentAddresses is how many addresses of strangers a replica counts separately in a minute, if
// each takes a row in the database. It counts further addresses by network, and then all together.
const maxLentAddresses = 8192

// networks returns the wider bucket that counts an address when there is no room for its own: a /16
// of IPv4 or a /48 of IPv6.
func networks(address string) []string {
	ip, err := netip.ParseAddr(address)
	if err != nil {
		return nil
	}
	bits := 48
	if ip = ip.Unmap(); ip.Is4() {
		bits = 16
	}
	network, _ := ip.Prefix(bits) // both lengths are valid
	return []string{network.Masked().String()}
}

// borrow counts a request in a bucket. It waits at most lendingPatience.
func borrow(ctx context.Context, l *quota.Limiter, bucket string, limit int, wider ...string) (quota.Usage, error) {
	ctx, cancel := context.WithTimeout(ctx, lendingPatience)
	defer cancel()
	return l.Borrow(ctx, bucket, limit, wider...)
}

// takeOfAddress counts a request of a stranger by its address.
func (g *Gate) takeOfAddress(ctx context.Context, address string) (quota.Usage, error) {
	return borrow(ctx, g.addresses, authz.Source(address), g.config.Limits.Address, networks(address)...)
}

// count counts a request in the bucket of the caller's tenant, or in that of a stranger's address.
// So strangers at its address never use up a known caller's limit. For a ServiceAccount, count only
// checks whether too many of its requests were refused: countPermitted and countRefused count its
// requests later. Error: fault.Unavailable if the request cannot be counted.
func (call *Call) count(c *gin.Context) (u quota.Usage, err error) {
	ctx, g, address := c.Request.Context(), call.gate, c.ClientIP()
	switch call.Caller.Kind {
	case authz.Stranger:
		u, err = g.takeOfAddress(ctx, address)
		if call.operation.Registers && err == nil && !u.Exceeded { // nothing removes what a registration creates
			u, err = borrow(ctx, g.addresses, "register/"+authz.Source(address), g.config.Limits.Registrations)
		}
	case authz.ServiceAccount:
		ctx, cancel := context.WithTimeout(ctx, lendingPatience)
		defer cancel()
		u, err = g.accounts.Check(ctx, call.Caller.ID, g.config.Limits.Address)
	default:
		u, err = call.takeOfTenant(ctx)
	}
	show(c.Writer.Header(), u)
	return u, err
}

func (call *Call) takeOfTenant(ctx context.Context) (quota.Usage, error) {
	return borrow(ctx, call.gate.tenants, call.version.name+"/"+string(call.Caller.Tenant), call.limit())
}

// countPermitted counts for the tenant a call that the cluster permits.
func (call *Call) countPermitted(ctx context.Context) error {
	u, err := call.takeOfTenant(ctx)
	show(call.answer, u)
	call.exceeded = u.Exceeded
	return cmp.Or(err, call.overRate(ctx, u))
}

// countRefused counts a ServiceAccount's call that was not permitted, unless the cluster gave no
// answer. A caller cannot avoid the count by hanging up.
func (call *Call) countRefused() {
	if call.Caller.Kind == authz.ServiceAccount && !call.permitted && !call.unreviewed {
		_, _ = borrow(context.Background(), call.gate.accounts, call.Caller.ID, call.gate.config.Limits.Address) // the call is refused in any case
	}
}

// ShowRate adds the usage of the caller's address to a response without counting the request.
func (g *Gate) ShowRate(c *gin.Context) { show(c.Writer.Header(), g.peekOfAddress(c.ClientIP())) }

func (g *Gate) peekOfAddress(address string) quota.Usage {
	return g.addresses.Peek(authz.Source(address), g.config.Limits.Address, networks(address)...)
}

// addressUsedUp reports whether the address has used up its limit for strangers in this minute.
// Known callers do not depend on it.
func (g *Gate) addressUsedUp(address string) bool { return g.peekOfAddress(address).Remaining == 0 }

// CountStranger counts a request that reached no operation in the bucket of its address. It returns
// the refusal if the bucket is used up. If it cannot count the request it returns nil, because such
// a request reveals nothing.
func (g *Gate) CountStranger(c *gin.Context) error {
	u, err := g.takeOfAddress(c.Request.Context(), c.ClientIP())
	show(c.Writer.Header(), u)
	if err != nil || !u.Exceeded {
		return nil
	}
	g.overAddress.Add(1)
	g.recordStranger(c, audit.RateLimited)
	return &tooMany{u.Wait}
}

func show(h http.Header, u quota.Usage) {
	h.Set("X-RateLimit-Limit", strconv.Itoa(u.Limit))
	h.Set("X-RateLimit-Remaining", strconv.Itoa(u.Remaining))
	h.Set("X-RateLimit-Reset", strconv.FormatInt(u.Reset.Unix(), 10))
}

// limited returns the refusal of a request over its limit. It records one entry per caller and
// minute.
func (call *Call) limited(c *gin.Context, u quota.Usage) error {
	if u.Exceeded && call.Caller.Kind == authz.Stranger {
		call.gate.overAddress.Add(1)
		call.gate.recordStranger(c, audit.RateLimited)
		return &tooMany{u.Wait}
	}
	return call.overRate(c.Request.Context(), u)
}

// overRate is limited for a known caller.
func (call *Call) overRate(ctx context.Context, u quota.Usage) error {
	if !u.Exceeded {
		return nil
	}
	call.gate.overTenant.Add(1)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), call.gate.config.Limits.Patience)
	defer cancel()
	_ = call.gate.config.Guard.RecordRateLimit(ctx, call.Caller.Principal)
	return &tooMany{u.Wait}
}

// tooMany is the error of a 429, with the time until the bucket is reset.
type tooMany struct{ wait time.Duration }

func (*tooMany) Error() string { return "rate limit exceeded: wait as long as Retry-After says" }

// jitter spreads the retries of callers after their minute is over.
const jitter = 5 // seconds

// retryAfter sets the header Retry-After of a 429. In v2 it adds jitter.
func (v *Version) retryAfter(c *gin.Context, err error) {
	var t *tooMany
	seconds := 1
	if errors.As(err, &t) {
		seconds = max(1, int((t.wait+time.Second-1)/time.Second))
	}
	if v.scheme == KeyOrUser {
		seconds += rand.IntN(jitter + 1) //nolint:gosec // spreads retries, hides nothing
	}
	c.Header("Retry-After", strconv.Itoa(seconds))
}

func isTooMany(code int) bool { return code == http.StatusTooManyRequests }

// stranger returns the principal of a caller that is not authenticated yet.
func stranger(c *gin.Context) authz.Principal {
	return authz.Principal{Tenant: authz.SystemTenant, Kind: authz.Stranger, RequestID: requestID(c), SourceIP: c.ClientIP()}
}

// recordStranger records a request without a principal, at most once a minute per source. The
// answer is the same whether recording succeeds or not.
func (g *Gate) recordStranger(c *gin.Context, event audit.EventType) {
	g.recordRefusal(c.Request.Context(), stranger(c), event)
}

func (g *Gate) recordRefusal(ctx context.Context, p authz.Principal, event audit.EventType) {
	// Do not use the request's own context: it ends when the stranger hangs up.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), g.config.Limits.Patience)
	defer cancel()
	_ = g.config.Guard.RecordRefusal(ctx, authz.Source(p.SourceIP), audit.Event{
		Type: event, Outcome: audit.Denied, Principal: p, Resource: audit.Resource{Type: audit.InterfaceResource},
	})
}
