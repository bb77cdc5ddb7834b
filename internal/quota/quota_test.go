package quota

import (
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

func TestABucketIsFullAfterItsLimitAndNewTheNextMinute(t *testing.T) {
	now := time.Date(2026, 11, 21, 10, 0, 59, 0, time.UTC)
	l := New(func() time.Time { return now })
	for i := range 3 {
		if u := l.Take("a", 3); u.Exceeded || u.Remaining != 2-i || u.Limit != 3 || !u.Reset.Equal(now.Add(time.Second)) {
			t.Fatal(i, u)
		}
	}
	for range 2 {
		if u := l.Take("a", 3); !u.Exceeded || u.Remaining != 0 {
			t.Fatal(u)
		}
	}
	if u := l.Take("b", 3); u.Exceeded {
		t.Fatal("another bucket is full too:", u)
	}
	now = now.Add(time.Second)
	if u := l.Peek("a", 3); u.Exceeded || u.Remaining != 3 {
		t.Fatal(u)
	}
	l.Take("a", 3)
	now = now.Add(-time.Minute)
	if u := l.Peek("a", 3); u.Remaining != 2 {
		t.Fatal("a clock set back gives a minute twice:", u)
	}
	now = now.Add(-time.Hour)
	if u := l.Take("a", 3); u.Remaining != 2 || u.Reset.Sub(now) > time.Minute {
		t.Fatal("a clock that was far ahead locks everybody out:", u)
	}
}

func TestParallelRequestsNeverExceedTheLimit(t *testing.T) {
	now := time.Now()
	l := New(func() time.Time { return now })
	var passed atomic.Int64
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for range 100 {
				if !l.Take("a", 1000).Exceeded {
					passed.Add(1)
				}
			}
		})
	}
	wg.Wait()
	if passed.Load() != 1000 {
		t.Fatal(passed.Load())
	}
}

func TestAFloodOfBucketsSharesOne(t *testing.T) {
	now := time.Now()
	l := New(func() time.Time { return now })
	for i := range maxBuckets {
		l.Take(strconv.Itoa(i), 10)
	}
	for range 10 {
		l.Take("x", 10)
	}
	if u := l.Take("y", 10); !u.Exceeded {
		t.Fatal(u)
	}
	if u := l.Take("5", 10); u.Exceeded {
		t.Fatal("a bucket from before is lost:", u)
	}
	if len(l.buckets) > maxBuckets+1 {
		t.Fatal(len(l.buckets))
	}
}
