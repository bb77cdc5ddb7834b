package storetest

import (
	"context"
	"errors"

	"github.com/latticekeep/latticekeep/internal/store"
)

var errRehearsed = errors.New("rehearsed: to be undone")

// Rehearse runs fn in an Update of s that is undone, like a backend that has to run the closure
// again. It ignores the result, even a panic, because only the following run counts.
func Rehearse(ctx context.Context, s store.Store, fn func(store.Tx) error) {
	_ = s.Update(ctx, func(tx store.Tx) (err error) {
		defer func() {
			_ = recover()
			err = errRehearsed
		}()
		return fn(tx)
	})
}

// Rehearsed is a database that runs every closure of Update twice: first in an Update that is
// undone, then for good. Other Updates may run between the two.
type Rehearsed struct{ store.Database }

// Rehearsing returns s with every Update rehearsed. A closure that cannot be run twice fails the
// tests that use it.
func Rehearsing(s store.Database) *Rehearsed { return &Rehearsed{s} }

// Update implements [store.Store].
func (s *Rehearsed) Update(ctx context.Context, fn func(store.Tx) error) error {
	Rehearse(ctx, s.Database, fn)
	return s.Database.Update(ctx, fn)
}

// Scrubbed waits until a backend that wipes deleted data has done so.
func (s *Rehearsed) Scrubbed(ctx context.Context) error {
	if wiping, ok := s.Database.(interface{ Scrubbed(context.Context) error }); ok {
		return wiping.Scrubbed(ctx)
	}
	return nil
}
