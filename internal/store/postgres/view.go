package postgres

import (
	"context"
	"runtime"
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
	mu      sync.Mutex
	forming *round
	opening bool // a round is beginning; it then starts the next one
}

// round is one snapshot. Its goroutine owns the session.
type round struct {
	s       *Store
	asks    []*ask // unsent asks; rounds.mu guards it, members and err
	members int
	err     error         // answers all further asks; nil while the round works
	wake    chan struct{} // there are asks, or no members are left
}

// member is a View, the base of its reader.
type member struct {
	s     *Store
	ctx   context.Context
	round *round
	limit *time.Timer
}

// View implements [store.Store].
func (s *Store) View(ctx context.Context, fn func(store.Reader) error) error {
	if err := ctx.Err(); err != nil {
		return ended(err)
	}
	if !s.enter() {
		return errClosed()
	}
	defer s.leave()
	m := &member{s: s, ctx: ctx, limit: time.NewTimer(viewLimit)}
	defer m.end()
	deadline := s.opts.Now().Add(viewLimit)
	t := &tx{base: m, check: func() error {
		if err := ctx.Err(); err != nil {
			return ended(err)
		}
		if s.opts.Now().After(deadline) {
			return errSlow
		}
		return nil
	}}
	defer func() { t.check = over }()
	return fn(viewer{t})
}

// viewer hides the methods that write.
type viewer struct{ store.Reader }

var errSlow = fault.New(fault.Unavailable, "the read took longer than two seconds: ask for less at once")

func (m *member) get(key []byte) ([]byte, error) {
	a := newGet(key)
	if err := m.do(a); err != nil {
		return nil, err // the round may still be writing into a
	}
	return a.value, nil
}

func (m *member) page(rg store.Range, limit int) ([]row, error) {
	a := newPage(rg, limit)
	if err := m.do(a); err != nil {
		return nil, err
	}
	return a.rows, nil
}

func (m *member) do(a *ask) error {
	if err := m.send(a); err != nil {
		return err
	}
	select {
	case <-a.done:
		return a.err
	case <-m.ctx.Done():
		return ended(m.ctx.Err())
	case <-m.limit.C:
		return errSlow
	}
}

// send queues a in the View's round. It first joins a round if the View has none.
func (m *member) send(a *ask) error {
	in := &m.s.rounds
	in.mu.Lock()
	defer in.mu.Unlock()
	if m.round == nil {
		if m.s.down.Load() {
			return errRecovering
		}
		if in.forming == nil {
			in.forming = &round{s: m.s, wake: make(chan struct{}, 1)}
			if !in.opening {
				in.opening = true
				go in.forming.run()
			}
		}
		m.round = in.forming
		m.round.members++
	}
	if m.round.err != nil {
		return m.round.err
	}
	m.round.asks = append(m.round.asks, a)
	poke(m.round.wake)
	return nil
}

func (m *member) end() {
	m.limit.Stop()
	if m.round == nil {
		return
	}
	m.s.rounds.mu.Lock()
	defer m.s.rounds.mu.Unlock()
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
			r.s.suspect(c, err)
			r.fail(err)
			tell(asks, err)
			break
		}
		tell(asks, nil)
	}
	if !c.pg.IsClosed() {
		_ = c.run(readWait, []step{{statement: rollback}}) // put checks what has become of the session
	}
	r.s.pool.put(c)
}

// open begins the snapshot together with the first asks. No member has seen any of its data before,
// so open can replace a dead session once.
func (r *round) open() (c *conn, err error) {
	ctx, cancel := context.WithTimeout(r.s.life, viewLimit)
	defer cancel()
	var asks []*ask
	for try := range 2 {
		if c, err = r.s.pool.get(ctx, try > 0); err != nil {
			break
		}
		if asks == nil {
			asks = r.close()
		}
		if err = c.read(readWait, []step{{statement: snapshot}}, asks); err == nil {
			tell(asks, nil)
			return c, nil
		}
		r.s.pool.put(c)
		if k, _ := kindOf(err); k != lost || c.late {
			r.s.suspect(c, err)
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
	in := &r.s.rounds
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
	in := &r.s.rounds
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.opening = in.forming != nil; in.opening {
		go in.forming.run()
	}
}

// take returns the queued asks. left reports that no member is left.
func (r *round) take() (asks []*ask, left bool) {
	in := &r.s.rounds
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
	in := &r.s.rounds
	in.mu.Lock()
	r.err = err
	asks := r.asks
	r.asks = nil
	in.mu.Unlock()
	tell(asks, err)
}

func tell(asks []*ask, err error) {
	for _, a := range asks {
		a.err = err
		close(a.done)
	}
}

// longestGathering is about half the duration of a commit.
const longestGathering = 2 * time.Millisecond

// gather yields to other goroutines for as long as that makes a group grow, so that their requests
// travel with it. Yielding costs nothing when no goroutine can run, and does not wait for blocked
// ones. When very many can run, one turn lasts until all of them have run, so gather also stops
// after longestGathering.
func gather(size func() int) {
	const enough = 32 // turns without a new request; a turn takes well under a microsecond when nobody else can run
	began := time.Now()
	for last, idle := 0, 0; idle < enough && time.Since(began) < longestGathering; {
		runtime.Gosched()
		if n := size(); n > last {
			last, idle = n, 0
		} else {
			idle++
		}
	}
}

// suspect starts the recovery when err means more than the loss of one session.
func (s *Store) suspect(c *conn, err error) {
	if k, ok := kindOf(err); ok && (k == down || c.late) {
		s.lostContact(err)
	}
}
