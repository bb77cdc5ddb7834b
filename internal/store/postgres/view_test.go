package postgres

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/postgres/rowcache"
)

// TestWhoIsNotAnsweredEndsWithItsContext begins to answer each read but never finishes. A read must
// not return the partial answer, which another goroutine may still be writing.
func TestWhoIsNotAnsweredEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	rounds := &rounds{}
	loader := &loader{server: &server{}, cache: &rowcache.Cache{}, busy: true}
	r := &round{in: rounds, wake: make(chan struct{}, 1)}
	m := &member{in: rounds, ctx: ctx, round: r, limit: time.NewTimer(time.Hour)}
	rehearsed := &rehearsal{loader: loader, ctx: ctx}
	begin := func() (begun int) {
		rounds.mu.Lock()
		defer rounds.mu.Unlock()
		loader.mu.Lock()
		defer loader.mu.Unlock()
		for _, a := range append(r.asks, loader.asks...) {
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
