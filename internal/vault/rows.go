package vault

import (
	"bytes"
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

// appendEvent is [guard.Guard.Append] for callers that do not need the receipt.
func appendEvent(guard *guard.Guard, tx store.Tx, e audit.Event) error {
	_, err := guard.Append(tx, e)
	return err
}
