package store

import (
	"bytes"
	"context"
)

// Sweep reads the keys of rng in batches of at most n, and passes each key of a batch to sweep
// in one transaction. sweep deletes the row, or leaves it for the next sweep and returns false.
// Sweep returns the number of deleted rows.
func Sweep(ctx context.Context, s Store, rng Range, n int, sweep func(tx Tx, key []byte) (bool, error)) (total int, err error) {
	for {
		var keys [][]byte
		swept := 0
		err := s.View(ctx, func(rd Reader) error {
			return rd.Scan(rng, func(key, _ []byte) bool {
				keys = append(keys, bytes.Clone(key))
				return len(keys) < n
			})
		})
		if err == nil && len(keys) > 0 {
			err = s.Update(ctx, func(tx Tx) error {
				swept = 0
				for _, key := range keys {
					gone, err := sweep(tx, key)
					if err != nil {
						return err
					}
					if gone {
						swept++
					}
				}
				return nil
			})
		}
		if err != nil {
			return total, err
		}
		if total += swept; len(keys) < n {
			return total, nil
		}
		rng.From = append(keys[n-1], 0)
	}
}
