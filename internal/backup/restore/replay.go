package restore

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/latticekeep/latticekeep/internal/backup/commits"
	"github.com/latticekeep/latticekeep/internal/offline"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/commit"
	"github.com/latticekeep/latticekeep/internal/store/format"
)

// Replay applies the commits that the reader returns to a store, until the reader has no more. The
// store may be served afterwards only if the error is nil; it then has the state of the last commit.
// Replay fails once the store's mark has another id; an empty id needs no mark.
func Replay(ctx context.Context, s store.Store, r *commits.Reader, id string) error {
	for {
		next, err := r.Next(ctx)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("reading the log of commits: %w", err)
		}
		if err := apply(ctx, s, next, id); err != nil {
			return fmt.Errorf("applying the commits %d to %d: %w", next.First, next.Last, err)
		}
	}
}

// apply writes the rows of one record in as many transactions as a store takes.
func apply(ctx context.Context, s store.Store, c commit.Record, id string) error {
	for rows := c.Rows; len(rows) > 0; {
		n, size := 0, 0
		for ; n < len(rows) && n < offline.BatchRows && size < offline.BatchBytes; n++ {
			size += len(rows[n].Key) + len(rows[n].Value)
		}
		err := s.Update(ctx, func(tx store.Tx) error {
			if err := offline.CheckHolder(tx, id); err != nil {
				return err
			}
			for _, row := range rows[:n] {
				if err := put(tx, row.Key, row.Value); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
		rows = rows[n:]
	}
	return nil
}

// put writes a row of a backup or of a commit. It refuses that the store becomes one that only a newer
// release reads.
func put(tx store.Tx, key, value []byte) error {
	switch {
	case bytes.Equal(key, offline.MarkRow): // the mark belongs to the store that was copied
		return nil
	case value == nil:
		return tx.Delete(key)
	case bytes.Equal(key, format.Row):
		f, err := format.Parse(value)
		if err == nil {
			err = f.CheckReader()
		}
		if err != nil {
			return err
		}
	}
	return tx.Put(key, value)
}
