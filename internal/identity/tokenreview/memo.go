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
	atOnce   = 16               // open questions to the API server

	// patience is how long a caller waits for an answer, and how long a question waits for its
	// turn. After that, both give up. Once a question is asked, it may take as long as timeout, so
	// a slow API server has answered when the caller retries.
	patience = 400 * time.Millisecond
	timeout  = 2 * time.Second
)

// memo asks expensive questions and remembers the answers for a while. It asks the same question
// once at a time, and only a few different ones at a time, so a flood of questions costs memory
// only while its callers wait. Only answers without an error are kept afterwards.
type memo[T any] struct {
	now     func() time.Time
	flights singleflight.Group
	asking  *semaphore.Weighted

	mu    sync.Mutex
	known map[digest]answer[T]
}

// digest identifies a question.
type digest = [sha256.Size]byte

type answer[T any] struct {
	value T
	until time.Time
}

func newMemo[T any](now func() time.Time) *memo[T] {
	return &memo[T]{now: now, asking: semaphore.NewWeighted(atOnce), known: make(map[digest]answer[T])}
}

// recall returns a remembered answer.
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

// ask returns the remembered answer, or else the result of find. It remembers the result until
// lifetime or the result's own end, whichever is earlier, but never an error. find continues when
// the caller has given up. Error: find's, or fault.Unavailable.
func (m *memo[T]) ask(ctx context.Context, question digest, find func(context.Context) (T, time.Time, error)) (value T, err error) {
	if value, ok := m.recall(question); ok {
		return value, nil
	}
	waiting, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	flight := m.flights.DoChan(string(question[:]), func() (any, error) {
		var none T
		if value, ok := m.recall(question); ok { // a flight ended between the first look and this one
			return value, nil
		}
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

// remember keeps an answer until its lifetime or its end, whichever is earlier.
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
		clear(m.known) // asking all of them again costs less than keeping them in order
	}
	m.known[question] = answer[T]{value, until}
}

// unavailable returns the error for an API server that gave no usable answer.
func unavailable(err error) error {
	return fault.Outage(fault.ReasonCluster, "the API server of the cluster cannot be asked: try again", err)
}
