// Package volume asks the file system for what Go's os package does not: the room that is left,
// blocks for a file before they are written, and which bytes of a file were written at all.
package volume

import (
	"context"
	"errors"
	"io"
	"os"
)

// OfPath is [Of] for the volume on which path is.
func OfPath(path string) (size, free int64, keeps bool, err error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, 0, false, err
	}
	defer f.Close()
	return Of(f)
}

// eraseBytes is how much Erase writes between two syncs, so that those of others need not wait for
// all of it.
const eraseBytes = 32 << 20

// Erase overwrites the data of f with zeroes and syncs them, until ctx ends. It does nothing where
// the file system would write the zeroes to another place.
func Erase(ctx context.Context, f *os.File) error {
	if _, _, keeps, err := Of(f); err == nil && !keeps {
		return nil
	}
	zeroes, unsynced := make([]byte, 1<<20), 0
	for next := int64(0); ; {
		at, end, err := NextData(f, next)
		if errors.Is(err, io.EOF) {
			return f.Sync()
		}
		if err != nil {
			return err
		}
		for next = at; next < end; {
			if err := ctx.Err(); err != nil {
				return err
			}
			n, err := f.WriteAt(zeroes[:min(int64(len(zeroes)), end-next)], next)
			if err != nil {
				return err
			}
			next += int64(n)
			if unsynced += n; unsynced >= eraseBytes {
				unsynced = 0
				if err := f.Sync(); err != nil {
					return err
				}
			}
		}
	}
}
