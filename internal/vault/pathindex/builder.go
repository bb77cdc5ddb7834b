package pathindex

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/format"
	"github.com/latticekeep/latticekeep/internal/vault/record"
)

// complete is the key of the row that says that all credentials have their rows.
var complete = []byte("credential-paths")

// IsComplete reports whether all credentials have their rows.
func IsComplete(rd store.Reader) (bool, error) {
	row, err := rd.Get(complete)
	return row != nil, err
}

// Builder makes the rows of a store that an earlier release has written.
type Builder struct {
	Store store.Store
	// Ready reports whether all processes that use the database read [format.Paths].
	Ready  func(context.Context) (bool, error)
	Logger *slog.Logger
}

const (
	retryEvery = 30 * time.Second
	batch      = 500 // credentials of a transaction
)

// Run builds the index, unless it is complete. It waits for replicas of earlier releases to end, and
// retries until ctx ends.
func (b *Builder) Run(ctx context.Context) {
	failed := ""
	for {
		done, err := b.Build(ctx)
		switch {
		case done || ctx.Err() != nil:
			return
		case err == nil:
			failed = ""
		case failed != err.Error():
			failed = err.Error()
			b.Logger.WarnContext(ctx, "the names of credentials could not be indexed; retrying", "in", retryEvery, "error", err)
		}
		timer := time.NewTimer(retryEvery)
		select {
		case <-ctx.Done():
		case <-timer.C:
		}
		timer.Stop()
	}
}

// Build makes the rows, and reports whether the index is complete. First it keeps releases away that
// would write records without rows.
func (b *Builder) Build(ctx context.Context) (done bool, err error) {
	err = b.Store.View(ctx, func(rd store.Reader) (err error) {
		done, err = IsComplete(rd)
		return err
	})
	if done || err != nil {
		return done, err
	}
	if ready, err := b.Ready(ctx); err != nil || !ready {
		return false, err
	}
	err = b.Store.Update(ctx, func(tx store.Tx) error { return format.Raise(tx, format.Paths, format.Paths) })
	if err != nil {
		return false, fmt.Errorf("raising the format of the store: %w", err)
	}
	rng := store.Prefix([]byte(record.Family))
	for more := true; more; {
		var next []byte
		err := b.Store.Update(ctx, func(tx store.Tx) (err error) {
			next, err = add(tx, rng)
			if err == nil && next == nil {
				err = tx.Put(complete, []byte("1"))
			}
			return err
		})
		if err != nil {
			return false, fmt.Errorf("indexing the names of credentials: %w", err)
		}
		rng.From, more = next, next != nil
	}
	return true, nil
}

// add puts the rows of the first records of a range, and returns where it goes on, or nil at the end.
func add(tx store.Tx, rng store.Range) (next []byte, err error) {
	var keys [][]byte
	n := 0
	err = tx.Scan(rng, func(key, value []byte) bool {
		if n++; n > batch {
			next = bytes.Clone(key)
			return false
		}
		if r, err := record.ViewAt(key, value); err == nil { // a damaged one has no name
			keys = append(keys, Key(r.Tenant, r.Name, r.ID))
		}
		return true
	})
	for _, key := range keys {
		if err == nil {
			err = tx.Put(key, []byte{})
		}
	}
	return next, err
}
