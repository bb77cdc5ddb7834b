package postgres

import (
	"context"
	"sync"
	"time"
)

// pool holds the sessions that read. An outage empties it.
type pool struct {
	s     *Store
	slots chan struct{} // one element for each session in use

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
	c, err := p.s.connect(ctx, reading)
	if err != nil {
		<-p.slots
		p.s.lostContact(err)
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

// The pauses between attempts to reach the server again grow from firstProbe to lastProbe.
const firstProbe, lastProbe = 100 * time.Millisecond, time.Second

// lostContact records that the server is unreachable and probes it in the background. Until a probe
// succeeds, requests are refused at once.
func (s *Store) lostContact(err error) {
	if !s.down.CompareAndSwap(false, true) {
		return
	}
	s.failed.Store(true)
	s.opts.Logger.Error("the database cannot be reached", "error", err)
	s.tasks.Go(func() {
		for pause := firstProbe; s.down.Load(); pause = min(2*pause, lastProbe) {
			c, err := s.connect(s.life, reading)
			if err == nil {
				c.kill()
				s.down.Store(false)
				s.opts.Logger.Info("the database can be reached again")
				return
			}
			select {
			case <-time.After(pause):
			case <-s.life.Done():
				return
			}
		}
	})
}
