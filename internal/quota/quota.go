// Package quota counts requests in fixed minutes of UTC.
//
// A limiter keeps the counts of the current minute in memory and nothing else, so
// that a restart begins a minute anew. Where several processes share a limit, each
// has what it borrowed of it from a [Lender]: some requests at a time, fewer the
// less is left, so that the limit is never exceeded, one process alone can use all
// of it, and a request costs no write. A process that ends or sits idle loses what
// it has borrowed and not used, at most an eighth of what was left then.
//
// The package does not say who shares a bucket or what the limit is: its callers
// do.
package quota

import (
	"context"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/latticekeep/latticekeep/internal/fault"
)

// Usage is the state of a bucket after a request.
type Usage struct {
	Limit     int
	Remaining int           // never negative; with a lender, what others took since it was asked last is not known
	Reset     time.Time     // when the minute ends
	Wait      time.Duration // until then
	Exceeded  bool          // this request was over the limit
}

// maxBuckets bounds the memory of a minute. Beyond it new buckets are counted
// together, so that a flood from many addresses limits itself.
const maxBuckets = 100_000

// Limiter is safe for concurrent use.
type Limiter struct {
	now    func() time.Time
	most   int    // buckets, of each width
	lender Lender // nil: all is counted here
	kind   string // names the buckets to the lender
	asking *semaphore.Weighted

	mu      sync.Mutex
	minute  time.Time
	buckets map[string]*bucket
	before  map[string]*bucket // of the minute before
}

// bucket is what is known of one in this minute.
type bucket struct {
	used int // here

	// Of a bucket that is borrowed from:
	left    int // borrowed and not used
	lent    int // lent to all replicas at the last question
	limit   int // when it was asked last
	chunk   int // how many were asked for last
	last    int // how many were lent then
	dry     bool
	waiting int
	flight  *flight // nil: nobody is asking
}

// flight is a question to the lender.
type flight struct {
	done chan struct{}
	err  error // once done
}

// New returns a limiter in which nothing is taken, and which shares nothing.
func New(now func() time.Time) *Limiter { return &Limiter{now: now, most: maxBuckets} }

// NewShared returns a limiter that borrows what it gives out, for buckets of a kind
// that no other limiter of the lender has: of at most `most` buckets a minute, or of
// a hundred thousand for 0.
func NewShared(l Lender, kind string, most int) *Limiter {
	if most == 0 {
		most = maxBuckets
	}
	return &Limiter{now: l.Now, most: most, lender: l, kind: kind, asking: semaphore.NewWeighted(atOnce)}
}

// Take counts one request in the bucket of a limiter that shares nothing. Beyond the
// most buckets that a minute may have, a new one is counted in the first of the wider
// ones that there is, or that there is room for, and else in one for all.
func (l *Limiter) Take(name string, limit int, wider ...string) Usage {
	return l.count(1, limit, name, wider)
}

// Borrow is Take of a limiter that may share its buckets. Error: fault.Unavailable
// when nothing can be borrowed, or not while ctx lasts; then the request is not
// counted, and must not be served.
func (l *Limiter) Borrow(ctx context.Context, name string, limit int, wider ...string) (Usage, error) {
	if l.lender == nil {
		return l.count(1, limit, name, wider), nil
	}
	return l.borrow(ctx, 1, limit, name, wider)
}

// Check counts nothing, and reports whether a request would be over the limit.
// Errors as of Borrow.
func (l *Limiter) Check(ctx context.Context, name string, limit int, wider ...string) (Usage, error) {
	if l.lender == nil {
		return l.count(0, limit, name, wider), nil
	}
	return l.borrow(ctx, 0, limit, name, wider)
}

// Peek returns the state of the bucket as far as it is known here. It asks nobody.
func (l *Limiter) Peek(name string, limit int, wider ...string) Usage {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := l.begin()
	b := l.known(name, wider)
	if b == nil {
		b = &bucket{limit: limit}
	}
	return l.usage(b, limit, now)
}

// begin starts a new minute if it is time to, and returns the time.
func (l *Limiter) begin() time.Time {
	now := l.now()
	minute := now.UTC().Truncate(time.Minute)
	switch {
	case l.lender != nil:
		// The lender knows what was given out in a minute, also in one that comes again.
		if !minute.Equal(l.minute) {
			l.turn(minute)
		}
	case minute.After(l.minute), l.minute.Sub(minute) > time.Minute:
		// A clock that is set back a little does not give a minute twice; one that
		// was far ahead and is corrected does not lock everybody out until then.
		l.turn(minute)
	}
	return now
}

func (l *Limiter) turn(minute time.Time) {
	l.minute, l.before, l.buckets = minute, l.buckets, make(map[string]*bucket)
}

func (l *Limiter) known(name string, wider []string) *bucket {
	if b := l.buckets[name]; b != nil || len(l.buckets) < l.most {
		return b
	}
	for _, w := range wider {
		if b := l.buckets[w]; b != nil {
			return b
		}
	}
	return l.buckets[""]
}

// of returns a request's bucket and its name.
func (l *Limiter) of(name string, wider []string) (*bucket, string) {
	add := func(name string) (*bucket, string) {
		b := new(bucket)
		if former := l.before[name]; former != nil {
			b.chunk = former.used / 8
		}
		l.buckets[name] = b
		return b, name
	}
	names := append([]string{name}, wider...)
	for i, n := range names {
		if b := l.buckets[n]; b != nil {
			return b, n
		}
		if len(l.buckets) < l.most*(i+1) {
			return add(n)
		}
	}
	if b := l.buckets[""]; b != nil {
		return b, ""
	}
	return add("")
}

func (l *Limiter) usage(b *bucket, limit int, now time.Time) Usage {
	remaining := limit - b.used
	if l.lender != nil {
		if remaining = b.left; !b.dry || limit > b.limit {
			remaining += max(0, limit-b.lent)
		}
	}
	reset := l.minute.Add(time.Minute)
	return Usage{Limit: limit, Remaining: max(0, remaining), Reset: reset, Wait: max(0, reset.Sub(now))}
}

func (l *Limiter) count(n, limit int, name string, wider []string) Usage {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := l.begin()
	b, _ := l.of(name, wider)
	exceeded := b.used >= limit
	if !exceeded {
		b.used += n
	}
	u := l.usage(b, limit, now)
	u.Exceeded = exceeded
	return u
}

// Lender gives out parts of limits that several processes share. It is safe for
// concurrent use.
type Lender interface {
	// Now is the time of all who borrow. It asks nobody.
	Now() time.Time
	// Lease lends some of what is left of the bucket's limit in this minute: at most
	// want, fewer the less is left, and at least one unless nothing is. What is lent
	// may be used within the minute and is not given back. Error: fault.Unavailable;
	// then something may have been lent, and is lost.
	Lease(ctx context.Context, bucket string, limit, want int) (Lease, error)
}

// Lease is what was lent.
type Lease struct {
	Minute  time.Time // the one that it is for
	Granted int       // 0: nothing is left
	Lent    int       // of the limit, to all, with this
}

const (
	atOnce  = 64              // questions of a limiter that the lender has before it, so that a flood of strangers leaves others their turn
	timeout = 2 * time.Second // bounds a question, which goes on for others when a caller gives up

	// What is asked for first, of a bucket that was not used in the minute before,
	// is this part of the limit. It doubles each time.
	firstPart = 64
)

var errUnlent = fault.New(fault.Unavailable, "requests cannot be counted at the moment: retry")

// borrow counts n requests, of what there is or else of what is lent for them.
func (l *Limiter) borrow(ctx context.Context, n, limit int, name string, wider []string) (Usage, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for {
		now := l.begin()
		b, name := l.of(name, wider)
		switch {
		case limit < b.limit:
			b.left = 0 // it was lent of a limit that is no more
		case limit > b.limit:
			b.dry = false
		}
		b.limit = limit
		if b.left > 0 || b.dry {
			exceeded := b.left == 0
			if !exceeded {
				b.left, b.used = b.left-n, b.used+n
			}
			if n > 0 && !b.dry && b.last >= 4 && b.left <= b.last/4 {
				l.ask(b, name) // so that the next ones need not wait
			}
			u := l.usage(b, limit, now)
			u.Exceeded = exceeded
			return u, nil
		}
		f := l.ask(b, name)
		b.waiting++
		l.mu.Unlock()
		var err error
		select {
		case <-f.done:
			err = f.err
		case <-ctx.Done():
			err = fault.Wrap(fault.Unavailable, fault.Message(errUnlent), ctx.Err())
		}
		l.mu.Lock()
		b.waiting--
		if err == nil && ctx.Err() != nil {
			err = fault.Wrap(fault.Unavailable, fault.Message(errUnlent), ctx.Err())
		}
		if err != nil {
			return l.usage(b, limit, now), err
		}
	}
}

// ask has the lender asked, unless it is being asked for this bucket.
func (l *Limiter) ask(b *bucket, name string) *flight {
	if b.flight != nil {
		return b.flight
	}
	b.chunk = max(1, min(2*b.chunk, b.limit), b.limit/firstPart)
	f := &flight{done: make(chan struct{})}
	b.flight = f
	limit, minute := b.limit, l.minute
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), timeout)
		defer cancel()
		var lent Lease
		err := errUnlent
		if l.asking.Acquire(ctx, 1) == nil {
			l.mu.Lock()
			want := max(b.chunk, b.waiting)
			l.mu.Unlock()
			lent, err = l.lender.Lease(ctx, l.kind+"/"+name, limit, want)
			l.asking.Release(1)
		}
		l.mu.Lock()
		defer l.mu.Unlock()
		if b.flight = nil; err == nil {
			l.take(b, name, minute, limit, lent)
		}
		f.err = err
		close(f.done)
	}()
	return f
}

// take puts what was lent into the bucket that was asked for in a minute. What is
// lent in another one is put where it belongs, or lost if that is over.
func (l *Limiter) take(b *bucket, name string, asked time.Time, limit int, lent Lease) {
	if !lent.Minute.Equal(asked) {
		l.begin()
		if !lent.Minute.Equal(l.minute) {
			return
		}
		if l.buckets[name] == nil {
			l.buckets[name] = new(bucket)
		}
		b = l.buckets[name]
		b.limit = limit
	}
	if limit > b.limit { // the limit was lowered meanwhile
		return
	}
	b.left, b.last = b.left+lent.Granted, lent.Granted
	b.lent = max(b.lent, lent.Lent)
	b.dry = lent.Granted == 0 && limit == b.limit
}
