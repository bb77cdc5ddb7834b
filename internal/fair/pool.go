package fair

import (
	"container/list"
	"context"
	"sync"
	"time"
)

// Pool lends units, such as bytes of memory, to callers with a key. Callers of the key that has the
// fewest units are served first. If too few units are free, loans are called in until there are enough:
// first the longest of the key that has the most, while that is more than the caller's key would then have,
// and then those that were there for longer than a grace. So no keys can keep out another one, however
// slowly their callers work. It is safe for concurrent use.
type Pool[K comparable] struct {
	grace time.Duration

	mu     sync.Mutex
	again  *time.Timer // serves once an offered loan can be called in; nil: none was needed yet
	free   int64
	coming int64              // units of loans that were called in and are not released yet
	keys   map[K]*borrower[K] // keys that have loans or wait for some
}

// borrower is what one key has.
type borrower[K comparable] struct {
	units    int64
	callable list.List // list of *Loan[K] that can be called in, longest first
	waiting  list.List // list of *Loan[K] that are not granted yet, longest first
}

// Loan is what a caller has of a [Pool].
type Loan[K comparable] struct {
	pool    *Pool[K]
	key     K
	units   int64
	granted chan struct{} // closed

	// The mutex of the pool guards these.
	since     time.Time     // when it began to wait, was granted or was offered
	notBefore time.Time     // earliest time at which it is called in
	place     *list.Element // in callable, or nil
	callIn    func()
	calledIn  bool
}

// NewPool returns a pool of units. A loan has the grace before it is called in for a caller whose key
// has no less.
func NewPool[K comparable](units int64, grace time.Duration) *Pool[K] {
	return &Pool[K]{grace: grace, free: units, keys: make(map[K]*borrower[K])}
}

// Acquire waits for units. From then on the loan can be called in: callIn is called at most once, must
// not block, and must make the caller call [Loan.Release] soon. Acquire returns the error of ctx when
// ctx ends during the wait.
func (p *Pool[K]) Acquire(ctx context.Context, key K, units int64, callIn func()) (*Loan[K], error) {
	l := &Loan[K]{pool: p, key: key, units: units, granted: make(chan struct{}), since: time.Now(), callIn: callIn}
	p.mu.Lock()
	own := p.keys[key]
	if own == nil {
		own = new(borrower[K])
		p.keys[key] = own
	}
	place := own.waiting.PushBack(l)
	p.serve()
	p.mu.Unlock()

	select {
	case <-l.granted:
		return l, nil
	case <-ctx.Done():
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-l.granted: // just now
		return l, nil
	default:
	}
	own.waiting.Remove(place)
	p.forget(key)
	p.serve()
	return nil, ctx.Err()
}

// Settle says that the loan cannot be called in from now on. It reports false if it already was.
func (l *Loan[K]) Settle() bool {
	l.pool.mu.Lock()
	defer l.pool.mu.Unlock()
	l.settle()
	return !l.calledIn
}

// Offer says that the loan can be called in again, after a time at the earliest: see [Pool.Acquire].
func (l *Loan[K]) Offer(after time.Duration, callIn func()) {
	l.pool.mu.Lock()
	defer l.pool.mu.Unlock()
	if l.place == nil && !l.calledIn {
		l.callIn = callIn
		l.offer(after)
		l.pool.serve()
	}
}

// Release returns the units. Call it once.
func (l *Loan[K]) Release() {
	p := l.pool
	p.mu.Lock()
	defer p.mu.Unlock()
	l.settle()
	if l.calledIn {
		p.coming -= l.units
	}
	p.free += l.units
	p.keys[l.key].units -= l.units
	p.forget(l.key)
	p.serve()
}

func (l *Loan[K]) offer(after time.Duration) {
	l.since = time.Now()
	l.notBefore = l.since.Add(after)
	l.place = l.pool.keys[l.key].callable.PushBack(l)
}

func (l *Loan[K]) settle() {
	if l.place != nil {
		l.pool.keys[l.key].callable.Remove(l.place)
		l.place = nil
	}
}

// forget drops a key that has nothing and waits for nothing.
func (p *Pool[K]) forget(key K) {
	if own := p.keys[key]; own.units == 0 && own.waiting.Len() == 0 {
		delete(p.keys, key)
	}
}

// serve grants what it can, and calls in loans for the next caller.
func (p *Pool[K]) serve() {
	for {
		next := p.next()
		if next == nil {
			return
		}
		if p.free < next.units {
			p.callLoans(next)
			return
		}
		own := p.keys[next.key]
		own.waiting.Remove(own.waiting.Front())
		own.units += next.units
		p.free -= next.units
		next.offer(0)
		close(next.granted)
	}
}

// next returns the caller to serve: the first of the key that has least.
func (p *Pool[K]) next() (next *Loan[K]) {
	var least int64
	for _, b := range p.keys {
		front := b.waiting.Front()
		if front == nil {
			continue
		}
		first := front.Value.(*Loan[K])
		if next == nil || b.units < least || b.units == least && first.since.Before(next.since) {
			next, least = first, b.units
		}
	}
	return next
}

// callLoans calls in loans until there will be enough for a caller, if there are such loans. If some
// can only be called in later, it serves again then.
func (p *Pool[K]) callLoans(next *Loan[K]) {
	for p.free+p.coming < next.units {
		l, left := p.victim(next)
		if l == nil {
			if left > 0 {
				p.serveIn(left)
			}
			return
		}
		l.settle()
		l.calledIn = true
		p.coming += l.units
		l.callIn()
	}
}

func (p *Pool[K]) serveIn(left time.Duration) {
	if p.again != nil {
		p.again.Stop()
	}
	p.again = time.AfterFunc(left, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.serve()
	})
}

// victim returns the loan to call in for a caller, or nil and, if there will be one, the time until then.
func (p *Pool[K]) victim(next *Loan[K]) (l *Loan[K], left time.Duration) {
	now := time.Now()
	var ofMost, longest *Loan[K]
	most := p.keys[next.key].units + next.units
	for _, b := range p.keys {
		first, wait := b.first(now)
		if first == nil {
			if wait > 0 && b.units > most && (left == 0 || wait < left) {
				left = wait
			}
			continue
		}
		if b.units > most || ofMost != nil && b.units == most && first.since.Before(ofMost.since) {
			ofMost, most = first, b.units
		}
		if longest == nil || first.since.Before(longest.since) {
			longest = first
		}
	}
	if ofMost == nil && longest != nil && now.Sub(longest.since) >= p.grace {
		return longest, 0
	}
	return ofMost, left
}

// first returns the longest loan that can be called in now, or nil and the time until there is one.
func (b *borrower[K]) first(now time.Time) (first *Loan[K], left time.Duration) {
	for e := b.callable.Front(); e != nil; e = e.Next() {
		l := e.Value.(*Loan[K])
		wait := l.notBefore.Sub(now)
		if wait <= 0 {
			return l, 0
		}
		if left == 0 || wait < left {
			left = wait
		}
	}
	return nil, left
}
