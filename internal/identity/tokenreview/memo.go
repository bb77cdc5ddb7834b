package tokenreview

import (
	"context"
	"crypto/sha256"
	"errors"
	"maps"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"
	"golang.org/x/sync/singleflight"

	"github.com/latticekeep/latticekeep/internal/fault"
)

const (
	lifetime = 10 * time.Second // how long an answer is remembered
	maxKnown = 10_000           // answers
	atOnce   = 16               // questions that the API server has before it

	// A caller waits for patience. A question is given up after that too if its
	// turn has not come; once it is asked, it may take as long as timeout, so that a
	// slow API server has answered when the caller tries again.
	patience = 400 * time.Millisecond
	timeout  = 2 * time.Second
)

// memo asks questions that cost something and remembers the answers for a while.
// The same question is asked once at a time, and few different ones are, so that
// what a flood of questions holds is its callers and nothing else. Only those
// who have got an answer take memory afterwards.
type memo[T any] struct {
	now     func() time.Time
	flights singleflight.Group
	asking  *semaphore.Weighted

	mu    sync.Mutex
	known map[digest]answer[T]
}

// digest of a question.
type digest = [sha256.Size]byte

type answer[T any] struct {
	value T
	until time.Time
}

func newMemo[T any](now func() time.Time) *memo[T] {
	return &memo[T]{now: now, asking: semaphore.NewWeighted(atOnce), known: make(map[digest]answer[T])}
}

// recall returns an answer that is remembered.
func (m *memo[T]) recall(question digest) (value T, ok bool) {
	now := m.now()
	m.mu.Lock()
	defer m.mu.Unlock()
	a, ok := m.known[question]
	if !ok || !now.Before(a.until) {
		return value, false
	}
	return a.value, true
}

// ask returns the answer that is remembered, or else what find returns. That is
// remembered for as long as lifetime and its own end allow, and errors are not. find
// goes on when the caller has given up. Error: find's, or fault.Unavailable.
func (m *memo[T]) ask(ctx context.Context, question digest, find func(context.Context) (T, time.Time, error)) (value T, err error) {
	if value, ok := m.recall(question); ok {
		return value, nil
	}
	waiting, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	flight := m.flights.DoChan(string(question[:]), func() (any, error) {
		var none T
		ctx := context.WithoutCancel(ctx)
		turn, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		if m.asking.Acquire(turn, 1) != nil {
			return none, unavailable(errors.New("too many questions are open"))
		}
		defer m.asking.Release(1)
		ctx, cancel = context.WithTimeout(ctx, timeout)
		defer cancel()
		found, end, err := find(ctx)
		if err == nil {
			m.remember(question, found, end)
		}
		return found, err
	})
	select {
	case result := <-flight:
		if result.Err != nil {
			return value, result.Err
		}
		return result.Val.(T), nil
	case <-waiting.Done():
		return value, unavailable(waiting.Err())
	}
}

// remember keeps an answer until the earlier of its lifetime and its end.
func (m *memo[T]) remember(question digest, value T, end time.Time) {
	now := m.now()
	until := now.Add(lifetime)
	if end.Before(until) {
		until = end
	}
	if !now.Before(until) {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.known) >= maxKnown {
		maps.DeleteFunc(m.known, func(_ digest, a answer[T]) bool { return !now.Before(a.until) })
	}
	if len(m.known) >= maxKnown {
		clear(m.known) // all are asked again: that costs less than to keep an order of them
	}
	m.known[question] = answer[T]{value, until}
}

// unavailable says that the API server has not answered, or not us.
func unavailable(err error) error {
	return fault.Wrap(fault.Unavailable, "the API server of the cluster cannot be asked: try again", err)
}
