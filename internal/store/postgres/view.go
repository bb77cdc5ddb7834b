package postgres

import (
	"bytes"
	"context"
	"sync"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Views
//
// Views share snapshots. A View joins a round with its first read, before the round's transaction
// has begun. So the snapshot is taken after the View began, and shows every commit that any replica
// had acknowledged by then. Reads that the members of a round ask for at the same time travel
// together, the first ones with BEGIN. Only one round begins at a time, and Views that arrive
// meanwhile gather in the next. So the number of rounds adapts to the load.

// rounds assigns Views to rounds.
type rounds struct {
	server *server
	pool   *pool
	head   []byte // Options.Head

	mu      sync.Mutex
	forming *round
	opening bool // a round is beginning; it then starts the next one
}

// round is one snapshot. Its goroutine owns the session.
type round struct {
	in      *rounds
	head    *ask   // ask of rounds.head; sent together with BEGIN
	asks    []*ask // unsent asks; rounds.mu guards it, members and err
	members int
	err     error         // answers all further asks; nil while the round works
	wake    chan struct{} // there are asks, or no members are left
}

// member is a View, the base of its reader.
type member struct {
	in    *rounds
	ctx   context.Context
	round *round
	limit *time.Timer
}

// viewer hides the methods that write.
type viewer struct{ store.Reader }

var errSlow = fault.Outage(fault.ReasonTimeout, "the read took longer than two seconds: ask for less at once", nil)

func (m *member) get(key []byte) ([]byte, error) {
	a, err := m.do(newGet(key))
	if err != nil {
		return nil, err // the round may still be writing into a
	}
	return a.value, nil
}

func (m *member) page(rg store.Range, limit int) ([]row, error) {
	a, err := m.do(newPage(rg, limit))
	if err != nil {
		return nil, err
	}
	return a.rows, nil
}

// do returns a when it is answered, or the round's own ask for the same.
func (m *member) do(a *ask) (*ask, error) {
	a, err := m.send(a)
	if err != nil {
		return nil, err
	}
	select {
	case <-a.done:
		return a, a.err
	case <-m.ctx.Done():
		return nil, ended(m.ctx.Err())
	case <-m.limit.C:
		return nil, errSlow
	}
}

// send queues a in the View's round. It first joins a round if the View has none.
func (m *member) send(a *ask) (*ask, error) {
	in := m.in
	in.mu.Lock()
	defer in.mu.Unlock()
	if m.round == nil {
		if in.server.down.Load() {
			return nil, errRecovering
		}
		if in.forming == nil {
			in.forming = &round{in: in, wake: make(chan struct{}, 1)}
			if in.head != nil {
				in.forming.head = newGet(in.head)
				in.forming.asks = []*ask{in.forming.head}
			}
			if !in.opening {
				in.opening = true
				go in.forming.run()
			}
		}
		m.round = in.forming
		m.round.members++
	}
	if m.round.head != nil && bytes.Equal(a.key, in.head) {
		return m.round.head, nil
	}
	if m.round.err != nil {
		return nil, m.round.err
	}
	m.round.asks = append(m.round.asks, a)
	poke(m.round.wake)
	return a, nil
}

func (m *member) end() {
	m.limit.Stop()
	if m.round == nil {
		return
	}
	m.in.mu.Lock()
	defer m.in.mu.Unlock()
	if m.round.members--; m.round.members == 0 {
		poke(m.round.wake)
	}
}

// run begins the snapshot and serves the members until the last has left.
func (r *round) run() {
	c, err := r.open()
	r.next()
	if err != nil {
		r.fail(err)
		return
	}
	for {
		asks, left := r.take()
		if left {
			break
		}
		if len(asks) == 0 {
			<-r.wake
			continue
		}
		if err := c.read(readWait, nil, asks); err != nil {
			r.in.server.suspect(c, err)
			r.fail(err)
			tell(asks, err)
			break
		}
		tell(asks, nil)
	}
	if !c.pg.IsClosed() {
		_ = c.run(readWait, []step{{statement: rollback}}) // put checks what has become of the session
	}
	r.in.pool.put(c)
}

// open begins the snapshot together with the first asks. No member has seen any of its data before,
// so open can replace a dead session once.
func (r *round) open() (c *conn, err error) {
	ctx, cancel := context.WithTimeout(r.in.server.life, viewLimit)
	defer cancel()
	var asks []*ask
	for try := range 2 {
		if c, err = r.in.pool.get(ctx, try > 0); err != nil {
			break
		}
		if asks == nil {
			asks = r.close()
		}
		if err = c.read(readWait, []step{{statement: snapshot}}, asks); err == nil {
			tell(asks, nil)
			return c, nil
		}
		r.in.pool.put(c)
		if k, _ := kindOf(err); k != lost || c.late {
			r.in.server.suspect(c, err)
			break
		}
	}
	if asks == nil {
		asks = r.close()
	}
	tell(asks, err)
	return nil, err
}

// close lets no further View join, after those that can run have joined, and returns the first
// asks.
func (r *round) close() []*ask {
	in := r.in
	gather(func() int {
		in.mu.Lock()
		defer in.mu.Unlock()
		return len(r.asks)
	})
	in.mu.Lock()
	defer in.mu.Unlock()
	in.forming = nil
	asks := r.asks
	r.asks = nil
	return asks
}

// next starts the round that formed meanwhile.
func (r *round) next() {
	in := r.in
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.opening = in.forming != nil; in.opening {
		go in.forming.run()
	}
}

// take returns the queued asks. left reports that no member is left.
func (r *round) take() (asks []*ask, left bool) {
	in := r.in
	in.mu.Lock()
	waiting := len(r.asks)
	in.mu.Unlock()
	if waiting > 0 {
		gather(func() int {
			in.mu.Lock()
			defer in.mu.Unlock()
			return len(r.asks)
		})
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	asks, r.asks = r.asks, nil
	return asks, r.members == 0
}

// fail answers all further asks with err.
func (r *round) fail(err error) {
	in := r.in
	in.mu.Lock()
	r.err = err
	asks := r.asks
	r.asks = nil
	in.mu.Unlock()
	tell(asks, err)
}
