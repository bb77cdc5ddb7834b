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

// sweepBatches reads the keys of rng in batches of at most n, passes each batch to remove in a
// transaction, and returns the number of keys. remove must delete the rows.
func sweepBatches(ctx context.Context, s store.Store, rng store.Range, n int, remove func(tx store.Tx, keys [][]byte) error) (total int, err error) {
	for {
		var keys [][]byte
		err := s.View(ctx, func(rd store.Reader) error {
			return rd.Scan(rng, func(key, _ []byte) bool {
				keys = append(keys, bytes.Clone(key))
				return len(keys) < n
			})
		})
		if err == nil && len(keys) > 0 {
			err = s.Update(ctx, func(tx store.Tx) error { return remove(tx, keys) })
		}
		if err != nil {
			return total, err
		}
		if total += len(keys); len(keys) < n {
			return total, nil
		}
	}
}

// appendEvent is [guard.Guard.Append] for callers that do not need the receipt.
func appendEvent(guard *guard.Guard, tx store.Tx, e audit.Event) error {
	_, err := guard.Append(tx, e)
	return err
}
