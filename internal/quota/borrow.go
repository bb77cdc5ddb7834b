package quota

import (
	"context"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
)

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
	timeout = 2 * time.Second // of a question, which goes on for others when a caller gives up

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
	if limit > b.limit { // which was lowered meanwhile
		return
	}
	b.left, b.last = b.left+lent.Granted, lent.Granted
	b.lent = max(b.lent, lent.Lent)
	b.dry = lent.Granted == 0 && limit == b.limit
}
