// Package quota counts requests in fixed minutes of UTC.
//
// A limiter keeps the counts of the current minute in memory and nothing else,
// so that a restart begins a minute anew. It does not say who shares a bucket
// or what the limit is: its callers do.
package quota

import (
	"sync"
	"time"
)

// Usage is the state of a bucket after a request.
type Usage struct {
	Limit     int
	Remaining int       // never negative
	Reset     time.Time // when the minute ends
	Exceeded  bool      // this request was over the limit
}

// maxBuckets bounds the memory of a minute. Beyond it all new buckets are one,
// so that a flood from many addresses limits itself.
const maxBuckets = 100_000

// Limiter is safe for concurrent use.
type Limiter struct {
	now func() time.Time

	mu     sync.Mutex
	minute time.Time
	taken  map[string]int
}

// New returns a limiter in which nothing is taken.
func New(now func() time.Time) *Limiter { return &Limiter{now: now} }

// Take counts one request in the bucket.
func (l *Limiter) Take(bucket string, limit int) Usage { return l.count(bucket, limit, 1) }

// Peek returns the state of the bucket and counts nothing.
func (l *Limiter) Peek(bucket string, limit int) Usage { return l.count(bucket, limit, 0) }

func (l *Limiter) count(bucket string, limit, n int) Usage {
	minute := l.now().UTC().Truncate(time.Minute)
	l.mu.Lock()
	defer l.mu.Unlock()
	// A clock that is set back a little does not give a minute twice; one that
	// was far ahead and is corrected does not lock everybody out until then.
	if minute.After(l.minute) || l.minute.Sub(minute) > time.Minute {
		l.minute, l.taken = minute, make(map[string]int)
	}
	if _, known := l.taken[bucket]; !known && len(l.taken) >= maxBuckets {
		bucket = ""
	}
	used := l.taken[bucket]
	exceeded := used+n > limit
	if n > 0 && !exceeded {
		used += n
		l.taken[bucket] = used
	}
	return Usage{Limit: limit, Remaining: max(0, limit-used), Reset: l.minute.Add(time.Minute), Exceeded: exceeded}
}
