// Package statetest lets a test hold its store against the state, change rows as somebody does who
// has no key, and fail on a false alarm. Only tests import it.
package statetest

import (
	"context"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Watch receives the rows that a state refuses. It fails the test when one of them was not tampered
// with.
type Watch struct {
	t        testing.TB
	mu       sync.Mutex
	tampered []string
	refused  []*state.RowError
}

// New returns a watch for a test.
func New(t testing.TB) *Watch { return &Watch{t: t} }

// State returns a new state, for a store that is opened or opened again.
func (w *Watch) State() *state.State { return state.New(w.report) }

func (w *Watch) report(e *state.RowError) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.refused = append(w.refused, e)
	if !slices.ContainsFunc(w.tampered, func(key string) bool { return strings.HasPrefix(key, string(e.Key)) }) {
		w.t.Errorf("a false alarm: %v", e)
	}
}

// Refused returns the rows that were refused since the last call.
func (w *Watch) Refused() []*state.RowError {
	w.mu.Lock()
	defer w.mu.Unlock()
	refused := w.refused
	w.refused = nil
	return refused
}

// Tamper changes rows of a store without its guard.
func (w *Watch) Tamper(ctx context.Context, raw store.Store, change func(tx store.Tx) error) error {
	return raw.Update(ctx, func(tx store.Tx) error { return change(&tamperTx{tx, w}) })
}

// tamperTx tells the watch which rows change.
type tamperTx struct {
	store.Tx
	watch *Watch
}

func (t *tamperTx) note(key []byte) {
	t.watch.mu.Lock()
	defer t.watch.mu.Unlock()
	t.watch.tampered = append(t.watch.tampered, string(key))
}

// Put implements [store.Tx].
func (t *tamperTx) Put(key, value []byte) error {
	t.note(key)
	return t.Tx.Put(key, value)
}

// Delete implements [store.Tx].
func (t *tamperTx) Delete(key []byte) error {
	t.note(key)
	return t.Tx.Delete(key)
}
