package postgres

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"time"
)

// pool holds the sessions that read. An outage empties it.
type pool struct {
	server *server
	slots  chan struct{} // one element for each session in use

	mu     sync.Mutex
	idle   []*conn
	closed bool
}

// get returns a session, within ctx. fresh asks for a new one, because the idle ones may have died
// together.
func (p *pool) get(ctx context.Context, fresh bool) (*conn, error) {
	select {
	case p.slots <- struct{}{}:
	case <-ctx.Done():
		return nil, &failure{ctx.Err(), down}
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

// time returns the time of the server's clock.
func (p *pool) time(ctx context.Context, fresh bool) (time.Time, error) {
	c, err := p.get(ctx, fresh)
	if err != nil {
		return time.Time{}, err
	}
	defer p.put(c)
	r := c.pg.ExecParams(ctx, "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint", nil, nil, nil, nil).Read()
	if r.Err != nil {
		return time.Time{}, r.Err
	}
	if len(r.Rows) != 1 || len(r.Rows[0]) != 1 {
		return time.Time{}, errors.New("PostgreSQL does not tell its time")
	}
	micros, err := strconv.ParseInt(string(r.Rows[0][0]), 10, 64)
	return time.UnixMicro(micros).UTC(), err
}
