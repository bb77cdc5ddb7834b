package admission

import (
	"context"
	"sync"
	"time"
)

// slots bound the reviews in hand, and those of each address.
type slots struct {
	all chan struct{}

	mu sync.Mutex
	of map[string]*share // of the addresses that hold a slot or wait for one
}

// share is what one address may have.
type share struct {
	slots chan struct{}
	users int // who hold one of them or wait for it
}

func newSlots() *slots {
	return &slots{all: make(chan struct{}, maxReviews), of: make(map[string]*share)}
}

// take takes a slot for source, which it waits for a little, first among those of the same address.
func (s *slots) take(ctx context.Context, source string, patience time.Duration) bool {
	timer := time.NewTimer(patience)
	defer timer.Stop()
	own := s.use(source)
	for _, c := range []chan struct{}{own.slots, s.all} {
		select {
		case c <- struct{}{}:
			continue
		case <-timer.C:
		case <-ctx.Done():
		}
		if c == s.all {
			<-own.slots
		}
		s.leave(source)
		return false
	}
	return true
}

// give gives a slot of source back.
func (s *slots) give(source string) {
	<-s.all
	s.mu.Lock()
	own := s.of[source]
	s.mu.Unlock()
	<-own.slots
	s.leave(source)
}

func (s *slots) use(source string) *share {
	s.mu.Lock()
	defer s.mu.Unlock()
	own := s.of[source]
	if own == nil {
		own = &share{slots: make(chan struct{}, maxOwnReviews)}
		s.of[source] = own
	}
	own.users++
	return own
}

func (s *slots) leave(source string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	own := s.of[source]
	if own.users--; own.users == 0 {
		delete(s.of, source)
	}
}
