package postgres

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/store"
)

// TestWhoIsNotAnsweredEndsWithItsContext begins to answer each read but never finishes. A read must
// not return the partial answer, which another goroutine may still be writing.
func TestWhoIsNotAnsweredEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	s := &Store{}
	s.loader.s, s.loader.busy = s, true
	r := &round{s: s, wake: make(chan struct{}, 1)}
	m := &member{s: s, ctx: ctx, round: r, limit: time.NewTimer(time.Hour)}
	rehearsed := &rehearsal{s: s, ctx: ctx}
	begin := func() (begun int) {
		s.rounds.mu.Lock()
		defer s.rounds.mu.Unlock()
		s.loader.mu.Lock()
		defer s.loader.mu.Unlock()
		for _, a := range append(r.asks, s.loader.asks...) {
			a.value, a.rows = []byte("half"), []row{{key: []byte("half")}}
			begun++
		}
		return begun
	}
	reads := map[string]func() (int, error){
		"Get of a View":       func() (int, error) { v, err := m.get([]byte("k")); return len(v), err },
		"Scan of a View":      func() (int, error) { rows, err := m.page(store.Range{}, 1); return len(rows), err },
		"Get of a rehearsal":  func() (int, error) { v, err := rehearsed.get([]byte("k")); return len(v), err },
		"Scan of a rehearsal": func() (int, error) { rows, err := rehearsed.page(store.Range{}, 1); return len(rows), err },
	}
	ended := make(chan struct{})
	for name, read := range reads {
		go func() {
			if n, err := read(); n != 0 || !errors.Is(err, context.Canceled) {
				t.Errorf("%s: %d, %v", name, n, err)
			}
			ended <- struct{}{}
		}()
	}
	eventually(t, "not all have asked", func() bool { return begin() == len(reads) })
	cancel()
	for range reads {
		<-ended
	}
}
