// Package connections bounds the open connections of a listener, so that neither strangers nor one
// tenant keep out others by holding connections open.
//
// As long as there are few connections, nobody is bounded. Under pressure an address, or a /64 network
// of IPv6, may have so many connections of strangers, and beyond that loses those that wait longest
// for a request. When the listener is full, the stranger that waits longest is ended for each new
// connection. Connections on which a valid credential was shown are ended last: when a full listener
// has no stranger, the tenant with the most connections loses the one that waits longest. Connections
// of trusted proxies are never ended.
package connections

import (
	"container/list"
	"context"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"sync"

	"github.com/latticekeep/latticekeep/internal/authz"
)

// Options says how many connections there may be.
type Options struct {
	// Most is how many connections the listener should have. From three quarters of it on there is
	// pressure. 0 sets no bound, and means that there always is pressure.
	Most int
	// PerAddress is how many connections an address, or a /64 network of IPv6, may have under
	// pressure, without those that showed a credential.
	PerAddress int
	// Trusted are the addresses of proxies, which are not bounded.
	Trusted []netip.Prefix
}

// Reason is why a connection was ended.
type Reason string

// The reasons.
const (
	Crowded Reason = "address" // its address had as many as it may under pressure
	Full    Reason = "full"    // the listener was full, and it was a stranger
	Largest Reason = "tenant"  // the listener was full without strangers, and its tenant had the most
)

// Listener is a net.Listener whose connections are bounded. The server on it must call [Follow] and
// [InContext]. It is safe for concurrent use.
type Listener struct {
	net.Listener
	options Options

	mu        sync.Mutex
	proxies   int                        // connections of trusted proxies
	known     int                        // connections that showed a credential
	tenants   map[authz.TenantID]*holder // holders of those
	addresses map[string]*holder         // holders of strangers, by [authz.Source]
	strangers holder                     // all strangers together
	closed    map[Reason]int
}

// holder has the connections of one tenant, or of strangers, longest without a change in front.
type holder struct{ idle, busy list.List }

func (h *holder) connections() int { return h.idle.Len() + h.busy.Len() }

// longest returns the connection that waits longest for a request, or else whose request has been
// served longest, or nil.
func (h *holder) longest() *conn {
	front := h.idle.Front()
	if front == nil {
		front = h.busy.Front()
	}
	if front == nil {
		return nil
	}
	return front.Value.(*conn)
}

func (h *holder) add(c *conn, idle bool) place {
	in := &h.busy
	if idle {
		in = &h.idle
	}
	return place{in, in.PushBack(c)}
}

// place is where a connection stands in a list.
type place struct {
	in *list.List
	at *list.Element
}

func (p place) leave() { p.in.Remove(p.at) }

// conn is one connection.
type conn struct {
	net.Conn
	listener *Listener
	source   string
	tenant   authz.TenantID // tenant of the credential that was shown; empty for strangers and proxies
	proxy    bool
	ended    bool

	holder *holder
	own    place // in its holder
	shared place // a stranger's among all strangers
}

// Listen bounds the connections of l.
func Listen(l net.Listener, o Options) *Listener {
	return &Listener{
		Listener: l, options: o, closed: make(map[Reason]int),
		tenants: make(map[authz.TenantID]*holder), addresses: make(map[string]*holder),
	}
}

// Accept implements net.Listener.
func (l *Listener) Accept() (net.Conn, error) {
	for {
		accepted, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		c := &conn{Conn: accepted, listener: l}
		if at, err := netip.ParseAddrPort(accepted.RemoteAddr().String()); err == nil {
			address := at.Addr().Unmap().WithZone("")
			c.source, c.proxy = authz.Source(address.String()), l.trusts(address)
		}
		victim := l.admit(c)
		if victim != nil {
			_ = victim.Conn.Close() // its server notices
		}
		if victim != c {
			return c, nil
		}
	}
}

func (l *Listener) trusts(address netip.Addr) bool {
	return slices.ContainsFunc(l.options.Trusted, func(p netip.Prefix) bool { return p.Contains(address) })
}

// admit counts a new connection, and returns the one that must be closed for it, which may be itself.
func (l *Listener) admit(c *conn) (victim *conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if c.proxy {
		l.proxies++
		return nil
	}
	victim, reason := l.victim(c)
	if victim != nil {
		l.closed[reason]++
	}
	if victim == c {
		return c
	}
	if victim != nil {
		victim.forget()
	}
	c.enter(true)
	return victim
}

// victim returns the connection that must be closed for c, if there must be one.
func (l *Listener) victim(c *conn) (*conn, Reason) {
	open, most := l.proxies+l.known+l.strangers.connections(), l.options.Most
	if h := l.addresses[c.source]; h != nil && h.connections() >= l.options.PerAddress && open >= most/4*3 {
		if front := h.idle.Front(); front != nil {
			return front.Value.(*conn), Crowded
		}
		return c, Crowded // all of them are served, which the new one is not yet
	}
	if most == 0 || open < most {
		return nil, ""
	}
	if longest := l.strangers.longest(); longest != nil {
		return longest, Full
	}
	largest := &l.strangers // has none
	for _, h := range l.tenants {
		if h.connections() > largest.connections() {
			largest = h
		}
	}
	return largest.longest(), Largest
}

// enter counts a connection for its tenant, or for its address and among strangers.
func (c *conn) enter(idle bool) {
	l := c.listener
	if c.tenant != "" {
		l.known++
		c.holder = holderOf(l.tenants, c.tenant)
	} else {
		c.holder = holderOf(l.addresses, c.source)
		c.shared = l.strangers.add(c, idle)
	}
	c.own = c.holder.add(c, idle)
}

// leave is the opposite of enter.
func (c *conn) leave() {
	l := c.listener
	c.own.leave()
	if c.tenant != "" {
		l.known--
		if c.holder.connections() == 0 {
			delete(l.tenants, c.tenant)
		}
		return
	}
	c.shared.leave()
	if c.holder.connections() == 0 {
		delete(l.addresses, c.source)
	}
}

// move notes whether a connection waits for a request.
func (c *conn) move(idle bool) {
	c.own.leave()
	c.own = c.holder.add(c, idle)
	if c.tenant == "" {
		c.shared.leave()
		c.shared = c.listener.strangers.add(c, idle)
	}
}

func holderOf[K comparable](all map[K]*holder, key K) *holder {
	h := all[key]
	if h == nil {
		h = new(holder)
		all[key] = h
	}
	return h
}

// forget no longer counts a connection.
func (c *conn) forget() {
	switch {
	case c.ended:
		return
	case c.proxy:
		c.listener.proxies--
	default:
		c.leave()
	}
	c.ended = true
}

// Close implements net.Conn.
func (c *conn) Close() error {
	c.listener.mu.Lock()
	c.forget()
	c.listener.mu.Unlock()
	return c.Conn.Close()
}

// of returns the connection of a listener that c is, with or without TLS.
func of(c net.Conn) (*conn, bool) {
	if encrypted, is := c.(interface{ NetConn() net.Conn }); is {
		c = encrypted.NetConn()
	}
	own, is := c.(*conn)
	return own, is
}

// Follow notes when a connection waits for a request. It is for [http.Server.ConnState].
func Follow(c net.Conn, state http.ConnState) {
	own, is := of(c)
	if !is || state != http.StateActive && state != http.StateIdle {
		return
	}
	own.listener.mu.Lock()
	defer own.listener.mu.Unlock()
	if own.ended || own.proxy {
		return
	}
	own.move(state == http.StateIdle)
}

type contextKey struct{}

// InContext returns a context for the requests on a connection. It is for [http.Server.ConnContext].
func InContext(ctx context.Context, c net.Conn) context.Context {
	if own, is := of(c); is {
		return context.WithValue(ctx, contextKey{}, own)
	}
	return ctx
}

// Keep notes that a valid credential of a tenant was shown on the connection of a request. The
// connection counts for the first such tenant from then on. ctx is the context of the request.
func Keep(ctx context.Context, tenant authz.TenantID) {
	c, is := ctx.Value(contextKey{}).(*conn)
	if !is || tenant == "" {
		return
	}
	c.listener.mu.Lock()
	defer c.listener.mu.Unlock()
	if c.ended || c.proxy || c.tenant != "" {
		return
	}
	c.leave()
	c.tenant = tenant
	c.enter(false)
}

// Counts are numbers of connections.
type Counts struct {
	Kept, Idle, Busy int            // those of proxies or with a credential, and those of strangers
	Closed           map[Reason]int // those that were ended so far
}

// Counts returns the current numbers, for metrics.
func (l *Listener) Counts() Counts {
	l.mu.Lock()
	defer l.mu.Unlock()
	return Counts{
		Kept: l.proxies + l.known, Idle: l.strangers.idle.Len(), Busy: l.strangers.busy.Len(), Closed: maps.Clone(l.closed),
	}
}
