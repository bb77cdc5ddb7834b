package vault

import (
	"bytes"
	"context"
	"errors"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
)

// isDamaged reports whether an error is about what is stored: a row that cannot be decoded, or that is
// not the one that was written last.
func isDamaged(err error) bool { return errors.Is(err, fault.Internal) || state.IsRefused(err) }

// deleteAll deletes all rows under a prefix.
func deleteAll(tx store.Tx, prefix []byte) error {
	var keys [][]byte
	err := tx.Scan(store.Prefix(prefix), func(key, _ []byte) bool {
		keys = append(keys, bytes.Clone(key))
		return true
	})
	if err != nil {
		return err
	}
	for _, key := range keys {
		err = errors.Join(err, tx.Delete(key))
	}
	return err
}

// sweepBatches reads the keys of rng in batches of at most n, and passes each key of a batch to sweep
// in one transaction. sweep deletes the row, or leaves it for the next sweep and returns false.
// sweepBatches returns the number of deleted rows.
func sweepBatches(ctx context.Context, s store.Store, rng store.Range, n int, sweep func(tx store.Tx, key []byte) (bool, error)) (total int, err error) {
	for {
		var keys [][]byte
		swept := 0
		err := s.View(ctx, func(rd store.Reader) error {
			return rd.Scan(rng, func(key, _ []byte) bool {
				keys = append(keys, bytes.Clone(key))
				return len(keys) < n
			})
		})
		if err == nil && len(keys) > 0 {
			err = s.Update(ctx, func(tx store.Tx) error {
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

// appendEvent is [guard.Guard.Append] for callers that do not need the receipt.
func appendEvent(guard *guard.Guard, tx store.Tx, e audit.Event) error {
	_, err := guard.Append(tx, e)
	return err
}
