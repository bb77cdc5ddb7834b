// Package quota counts requests in fixed minutes of UTC.
//
// A limiter keeps only the counts of the current minute, in memory, so a restart begins with empty
// counts. If several processes share a limit, each borrows parts of it from a [Lender]: some
// requests at a time, and fewer the less is left. So the limit is never exceeded, one process alone
// can use all of it, and most requests cost no write. A process that ends or is idle loses what it
// has borrowed and not used, at most an eighth of what was left then.
//
// The package does not decide who shares a bucket or what the limit is. Its callers do.
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
	Remaining int           // never negative; with a lender, ignores what other processes took since the last lease
	Reset     time.Time     // when the minute ends
	Wait      time.Duration // time until Reset
	Exceeded  bool          // this request was over the limit
}

// maxBuckets bounds the memory of a minute. Beyond it, new buckets are counted together, so a flood
// from many addresses limits itself.
const maxBuckets = 100_000

// Limiter is safe for concurrent use.
type Limiter struct {
	now    func() time.Time
	most   int    // bound on the buckets of each width
	lender Lender // nil: shares nothing
	kind   string // names the buckets to the lender
	asking *semaphore.Weighted

	mu      sync.Mutex
	minute  time.Time
	buckets map[string]*bucket
	before  map[string]*bucket // the previous minute's
}

// bucket is the state of one bucket in this minute.
type bucket struct {
	used int // requests counted in this process

	// The rest is for borrowed buckets only.
	left    int // borrowed and not used
	lent    int // lent to all processes at the last lease
	limit   int // limit of the last request
	chunk   int // how many the last lease asked for
	last    int // how many the last lease granted
	dry     bool
	waiting int
	flight  *flight // nil: no lease is being asked for
}

// flight is a request to the lender in progress.
type flight struct {
	done chan struct{}
	err  error // valid once done is closed
}

// New returns an empty limiter that shares nothing.
func New(now func() time.Time) *Limiter { return &Limiter{now: now, most: maxBuckets} }

// NewShared returns a limiter that borrows from a lender. No other limiter of the lender may have
// the same kind. most bounds the buckets of a minute; 0 means a hundred thousand.
func NewShared(l Lender, kind string, most int) *Limiter {
	if most == 0 {
		most = maxBuckets
	}
	return &Limiter{now: l.Now, most: most, lender: l, kind: kind, asking: semaphore.NewWeighted(atOnce)}
}

// Take counts one request in a bucket of a limiter that shares nothing. When the minute has its
// maximum of buckets, Take counts a new name in the first of the wider buckets that exists or has
// room, and otherwise in one bucket for all.
func (l *Limiter) Take(name string, limit int, wider ...string) Usage {
	return l.count(1, limit, name, wider)
}

// Borrow is Take for a limiter that may share its buckets. Error: fault.Unavailable if the lender
// fails or ctx ends first. Then the request is not counted, and must not be served.
func (l *Limiter) Borrow(ctx context.Context, name string, limit int, wider ...string) (Usage, error) {
	if l.lender == nil {
		return l.count(1, limit, name, wider), nil
	}
	return l.borrow(ctx, 1, limit, name, wider)
}

// Check counts nothing. It reports whether a request would be over the limit. Errors as for Borrow.
func (l *Limiter) Check(ctx context.Context, name string, limit int, wider ...string) (Usage, error) {
	if l.lender == nil {
		return l.count(0, limit, name, wider), nil
	}
	return l.borrow(ctx, 0, limit, name, wider)
}

// Peek returns the state of the bucket as this process knows it. It does not ask the lender.
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
		// The lender knows what it lent in a minute, also when a minute comes again.
		if !minute.Equal(l.minute) {
			l.turn(minute)
		}
	case minute.After(l.minute), l.minute.Sub(minute) > time.Minute:
		// If the clock is set back a little, no minute is given out twice. If a clock that was far
		// ahead is corrected, callers are not locked out until that time.
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

// of returns a request's bucket and the bucket's name.
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

// Lender gives out parts of limits that several processes share. It is safe for concurrent use.
type Lender interface {
	// Now returns the time that all borrowers share. It does no I/O.
	Now() time.Time
	// Lease lends part of what is left of the bucket's limit in this minute: at most want, fewer
	// the less is left, and at least one unless nothing is left. The borrower may use the lease
	// within the minute and gives nothing back. Error: fault.Unavailable. Then something may have
	// been lent, and is lost.
	Lease(ctx context.Context, bucket string, limit, want int) (Lease, error)
}

// Lease is a part of a limit that was lent.
type Lease struct {
	Minute  time.Time // the lease is valid in this minute
	Granted int       // 0: nothing is left
	Lent    int       // lent of the limit to all processes, including this lease
}

const (
	atOnce  = 64              // leases in progress per limiter, so a flood of strangers leaves the lender time for others
	timeout = 2 * time.Second // bounds a lease, which continues for others when a caller gives up

	// firstPart sets the first lease of a bucket that was not used in the previous minute: the
	// limit divided by firstPart. Each further lease asks for twice as much.
	firstPart = 64
)

var errUnlent = fault.Outage(fault.ReasonStore, "requests cannot be counted at the moment: retry", nil)

// borrow counts n requests against what is left, or else against a new lease.
func (l *Limiter) borrow(ctx context.Context, n, limit int, name string, wider []string) (Usage, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for {
		now := l.begin()
		b, name := l.of(name, wider)
		switch {
		case limit < b.limit:
			b.left = 0 // it was lent under the previous limit
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
				l.ask(b, name) // ask early, so the next requests need not wait
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
			err = fault.Outage(fault.ReasonStore, fault.Message(errUnlent), ctx.Err())
		}
		l.mu.Lock()
		b.waiting--
		if err == nil && ctx.Err() != nil {
			err = fault.Outage(fault.ReasonStore, fault.Message(errUnlent), ctx.Err())
		}
		if err != nil {
			return l.usage(b, limit, now), err
		}
	}
}

// ask starts a request to the lender, unless one is in progress for this bucket.
//
//nolint:contextcheck // the request is for all callers and outlasts this one
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

// take puts a lease into the bucket that asked for it in the minute asked. It puts a lease for
// another minute into that minute's bucket, and drops it if that minute is not the current one.
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
