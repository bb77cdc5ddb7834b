// Package connections bounds the open connections of a listener, so that strangers who hold
// connections open do not keep out callers with a key.
//
// As long as there are few connections, nobody is bounded. Under pressure an address may have so many
// connections, and beyond that loses those that wait longest for a request. When the listener is
// full, the connection that waits longest is ended for each new one, whatever its address. A
// connection on which a valid credential was shown is never ended, and neither is that of a trusted
// proxy.
package connections

import (
	"container/list"
	"context"
	"net"
	"net/http"
	"net/netip"
	"sync"
)

// Options says how many connections there may be.
type Options struct {
	// Most is how many connections the listener should have. From three quarters of it on there is
	// pressure. 0 sets no bound, and means that there always is pressure.
	Most int
	// PerAddress is how many connections an address may have under pressure, without those that
	// showed a credential.
	PerAddress int
	// Trusted are the addresses of proxies, which are not bounded.
	Trusted []netip.Prefix
}

// Reason is why a connection was ended.
type Reason string

// The reasons.
const (
	Crowded Reason = "address" // its address had as many as it may under pressure
	Full    Reason = "full"    // the listener was full
)

// Listener is a net.Listener whose connections are bounded. The server on it must call [Follow] and
// [InContext]. It is safe for concurrent use.
type Listener struct {
	net.Listener
	options Options

	mu        sync.Mutex
	exempt    int                     // connections that are never ended
	addresses map[netip.Addr]*address // strangers only
	idle      list.List               // strangers that wait for a request, longest first
	busy      list.List               // strangers whose request is served, longest first
	closed    map[Reason]int
}

// address is what strangers of one address have.
type address struct {
	connections int
	idle        list.List // those that wait for a request, longest first
}

// conn is one connection.
type conn struct {
	net.Conn
	listener *Listener
	source   netip.Addr
	ended    bool

	of          *address      // nil for a connection that is never ended
	place, near *list.Element // a stranger's elements in idle or busy, and in its address's idle
}

// Listen bounds the connections of l.
func Listen(l net.Listener, o Options) *Listener {
	return &Listener{Listener: l, options: o, addresses: make(map[netip.Addr]*address), closed: make(map[Reason]int)}
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
			c.source = at.Addr().Unmap().WithZone("")
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

// admit counts a new connection, and returns the one that must be closed for it, which may be itself.
func (l *Listener) admit(c *conn) (victim *conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, proxy := range l.options.Trusted {
		if proxy.Contains(c.source) {
			l.exempt++
			return nil
		}
	}
	open, most := l.exempt+l.idle.Len()+l.busy.Len(), l.options.Most
	a := l.addresses[c.source]
	switch {
	case a != nil && a.connections >= l.options.PerAddress && open >= most/4*3:
		l.closed[Crowded]++
		front := a.idle.Front()
		if front == nil { // all of them are served, which the new one is not yet
			return c
		}
		victim = front.Value.(*conn)
	case most > 0 && open >= most:
		front := l.idle.Front()
		if front == nil {
			front = l.busy.Front()
		}
		if front != nil {
			l.closed[Full]++
			victim = front.Value.(*conn)
		}
	}
	if victim != nil {
		victim.forget()
	}
	if a = l.addresses[c.source]; a == nil {
		a = &address{}
		l.addresses[c.source] = a
	}
	a.connections++
	c.of = a
	c.enter(true)
	return victim
}

// enter gives a stranger its places.
func (c *conn) enter(idle bool) {
	if !idle {
		c.place = c.listener.busy.PushBack(c)
		return
	}
	c.place, c.near = c.listener.idle.PushBack(c), c.of.idle.PushBack(c)
}

// leave takes a stranger's places away.
func (c *conn) leave() {
	if c.near == nil {
		c.listener.busy.Remove(c.place)
		return
	}
	c.listener.idle.Remove(c.place)
	c.of.idle.Remove(c.near)
	c.near = nil
}

// forget no longer counts a connection.
func (c *conn) forget() {
	if c.ended {
		return
	}
	c.ended = true
	if c.of == nil {
		c.listener.exempt--
		return
	}
	c.leave()
	c.release()
}

// release takes a connection from those of its address.
func (c *conn) release() {
	if c.of.connections--; c.of.connections == 0 {
		delete(c.listener.addresses, c.source)
	}
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
	if own.ended || own.of == nil {
		return
	}
	own.leave()
	own.enter(state == http.StateIdle)
}

type contextKey struct{}

// InContext returns a context for the requests on a connection. It is for [http.Server.ConnContext].
func InContext(ctx context.Context, c net.Conn) context.Context {
	if own, is := of(c); is {
		return context.WithValue(ctx, contextKey{}, own)
	}
	return ctx
}

// Keep notes that a valid credential was shown on the connection of a request, which is never ended
// from then on. ctx is the context of the request.
func Keep(ctx context.Context) {
	c, is := ctx.Value(contextKey{}).(*conn)
	if !is {
		return
	}
	c.listener.mu.Lock()
	defer c.listener.mu.Unlock()
	if c.ended || c.of == nil {
		return
	}
	c.leave()
	c.release()
	c.of = nil
	c.listener.exempt++
}

// Counts are numbers of connections.
type Counts struct {
	Exempt, Idle, Busy int            // those that are never ended, and those of strangers
	Closed             map[Reason]int // those that were ended so far
}

// Counts returns the current numbers, for metrics.
func (l *Listener) Counts() Counts {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := Counts{Exempt: l.exempt, Idle: l.idle.Len(), Busy: l.busy.Len(), Closed: make(map[Reason]int, len(l.closed))}
	for reason, count := range l.closed {
		n.Closed[reason] = count
	}
	return n
}
