// Package fair bounds how many callers work on something at a time, in the order in which they came,
// and how many of those share a key, such as a tenant or an address: a flood from one of them does
// not keep the others out. Where nobody needs to be kept apart, golang.org/x/sync/semaphore is enough.
package fair

import (
	"context"
	"sync"

	"golang.org/x/sync/semaphore"
)

// Semaphore is safe for concurrent use.
type Semaphore[K comparable] struct {
	all    *semaphore.Weighted // nil: no bound
	perKey int64

	mu   sync.Mutex
	keys map[K]*keySemaphore // only of those who hold the semaphore or wait for it
}

// keySemaphore bounds the callers of one key.
type keySemaphore struct {
	*semaphore.Weighted
	users int // callers who hold the semaphore or wait for it
}

// NewSemaphore returns a semaphore that at most total callers hold at a time, and at most perKey of
// the same key. A total of 0 bounds only the callers of the same key.
func NewSemaphore[K comparable](total, perKey int) *Semaphore[K] {
	s := &Semaphore[K]{perKey: int64(perKey), keys: make(map[K]*keySemaphore)}
	if total > 0 {
		s.all = semaphore.NewWeighted(int64(total))
	}
	return s
}

// Acquire waits until the caller may go on, first among those of the same key and then among all.
// Who need not wait goes on even if ctx has ended. Error: that of ctx when it ends before; the
// caller holds nothing then.
func (s *Semaphore[K]) Acquire(ctx context.Context, key K) error {
	own := s.enter(key)
	if err := acquire(ctx, own.Weighted); err != nil {
		s.leave(key)
		return err
	}
	if s.all == nil {
		return nil
	}
	if err := acquire(ctx, s.all); err != nil {
		own.Release(1)
		s.leave(key)
		return err
	}
	return nil
}

// Release lets the next caller go on. It follows one successful Acquire with the same key.
func (s *Semaphore[K]) Release(key K) {
	if s.all != nil {
		s.all.Release(1)
	}
	s.leave(key).Release(1)
}

func acquire(ctx context.Context, s *semaphore.Weighted) error {
	if s.TryAcquire(1) {
		return nil
	}
	return s.Acquire(ctx, 1)
}

func (s *Semaphore[K]) enter(key K) *keySemaphore {
	s.mu.Lock()
	defer s.mu.Unlock()
	own := s.keys[key]
	if own == nil {
		own = &keySemaphore{Weighted: semaphore.NewWeighted(s.perKey)}
		s.keys[key] = own
	}
	own.users++
	return own
}

func (s *Semaphore[K]) leave(key K) *keySemaphore {
	s.mu.Lock()
	defer s.mu.Unlock()
	own := s.keys[key]
	if own.users--; own.users == 0 {
		delete(s.keys, key)
	}
	return own
}
