package storetest

import (
	"bytes"
	"context"
	"testing"

	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Recorded is a database whose Updates must record what they decide.
type Recorded struct {
	store.Database
	t testing.TB
}

// RequireEntries returns s. A closure of Update that changes a row that decides who may see or do
// what, and enqueues no event, fails t.
func RequireEntries(t testing.TB, s store.Database) *Recorded { return &Recorded{s, t} }

// Update implements [store.Store].
func (s *Recorded) Update(ctx context.Context, fn func(store.Tx) error) error {
	return s.Database.Update(ctx, func(tx store.Tx) error {
		r := &recordedTx{Tx: tx, changed: map[string]bool{}}
		err := fn(r)
		if err == nil && !r.recorded {
			for key := range r.changed {
				s.t.Errorf("the row %q is changed without an audit entry", key)
			}
		}
		return err
	})
}

type recordedTx struct {
	store.Tx
	recorded bool
	changed  map[string]bool // keys of rows that decide
}

func (t *recordedTx) Enqueue(event any) {
	t.recorded = true
	t.Tx.Enqueue(event)
}

func (t *recordedTx) Put(key, value []byte) error {
	before, err := t.Get(key)
	if err != nil {
		return err
	}
	if before == nil || !bytes.Equal(before, value) {
		t.note(key)
	}
	return t.Tx.Put(key, value)
}

func (t *recordedTx) Delete(key []byte) error {
	before, err := t.Get(key)
	if err != nil {
		return err
	}
	if before != nil {
		t.note(key)
	}
	return t.Tx.Delete(key)
}

func (t *recordedTx) note(key []byte) {
	if f, ok := state.FamilyOf(key); !ok || f.Deciding {
		t.changed[string(key)] = true
	}
}
