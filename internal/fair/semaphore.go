// Package fair shares what is scarce between callers with a key, such as a tenant or an address, so
// that a flood from one key does not block the others: [Semaphore] bounds how many work at the same
// time, and [Pool] lends out units such as bytes of memory. Where keys need no separation,
// golang.org/x/sync/semaphore is enough.
package fair

import (
	"context"
	"sync"

	"golang.org/x/sync/semaphore"
)

// Semaphore bounds callers in total and per key. It is safe for concurrent use.
type Semaphore[K comparable] struct {
	all    *semaphore.Weighted // nil: no bound
	perKey int64

	mu   sync.Mutex
	keys map[K]*keySemaphore // keys of callers that hold the semaphore or wait for it
}

// keySemaphore bounds the callers of one key.
type keySemaphore struct {
	*semaphore.Weighted
	users int // callers who hold the semaphore or wait for it
}

// NewSemaphore returns a semaphore that at most total callers hold at a time, and at most perKey
// callers with the same key. A total of 0 bounds only the callers with the same key.
func NewSemaphore[K comparable](total, perKey int) *Semaphore[K] {
	s := &Semaphore[K]{perKey: int64(perKey), keys: make(map[K]*keySemaphore)}
	if total > 0 {
		s.all = semaphore.NewWeighted(int64(total))
	}
	return s
}

// Acquire waits for a slot, first among the callers with the same key and then among all. A caller
// that need not wait succeeds even if ctx has ended. Acquire returns the error of ctx when ctx ends
// during the wait; the caller then holds nothing.
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

// Release lets the next caller proceed. Call it once after each successful Acquire, with the same
// key.
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
