package postgres

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// pool holds the sessions that read. An outage empties it.
type pool struct {
	server *server
	slots  chan struct{} // one element for each session in use
	waits  atomic.Uint64
	waited atomic.Int64 // nanoseconds

	mu     sync.Mutex
	idle   []*conn
	closed bool
}

// get returns a session, within ctx. fresh asks for a new one, because the idle ones may have died
// together.
func (p *pool) get(ctx context.Context, fresh bool) (*conn, error) {
	if err := p.take(ctx); err != nil {
		return nil, err
	}
	p.mu.Lock()
	if fresh {
		p.drain()
	}
	if n := len(p.idle); n > 0 {
		c := p.idle[n-1]
		p.idle = p.idle[:n-1]
		p.mu.Unlock()
		return c, nil
	}
	p.mu.Unlock()
	c, err := p.server.connect(ctx, reading)
	if err != nil {
		<-p.slots
		p.server.lostContact(err)
		return nil, err
	}
	return c, nil
}

// put takes back a session that has no transaction open, and ends any other.
func (p *pool) put(c *conn) {
	p.mu.Lock()
	keep := !p.closed && !c.pg.IsClosed() && c.pg.TxStatus() == 'I'
	if keep {
		p.idle = append(p.idle, c)
	}
	p.mu.Unlock()
	if !keep {
		c.kill()
	}
	<-p.slots
}

// drain ends the idle sessions. The caller holds mu.
func (p *pool) drain() {
	for _, c := range p.idle {
		c.kill()
	}
	p.idle = nil
}

func (p *pool) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	p.drain()
}

// ask returns the number that a query answers.
func (p *pool) ask(ctx context.Context, query string, fresh bool) (int64, error) {
	c, err := p.get(ctx, fresh)
	if err != nil {
		return 0, err
	}
	defer p.put(c)
	r := c.pg.ExecParams(ctx, query, nil, nil, nil, nil).Read()
	if r.Err != nil {
		return 0, r.Err
	}
	if len(r.Rows) != 1 || len(r.Rows[0]) != 1 {
		return 0, errors.New("PostgreSQL answers with no number")
	}
	return strconv.ParseInt(string(r.Rows[0][0]), 10, 64)
}

// Stats says how the connections that read are used, and how often the server was lost.
type Stats struct {
	Limit, Used, Idle int
	Waits             uint64        // how often a connection was asked for while all were used
	Waited            time.Duration // sum of these waits
	Reachable         bool          // the server was reached at the last attempt
	Outages           uint64        // how often it was lost
}

func (p *pool) stats() Stats {
	p.mu.Lock()
	defer p.mu.Unlock()
	return Stats{Limit: cap(p.slots), Used: len(p.slots), Idle: len(p.idle), Waits: p.waits.Load(), Waited: time.Duration(p.waited.Load())}
}

// take takes a slot, within ctx.
func (p *pool) take(ctx context.Context) error {
	select {
	case p.slots <- struct{}{}:
		return nil
	default:
	}
	p.waits.Add(1)
	began := time.Now()
	defer func() { p.waited.Add(int64(time.Since(began))) }()
	select {
	case p.slots <- struct{}{}:
		return nil
	case <-ctx.Done():
		return &failure{ctx.Err(), down}
	}
}
