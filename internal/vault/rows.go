package vault

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha512"
	"encoding/hex"
	"encoding/json"
	"errors"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/frame"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/vault/record"
)

// macRows reads and writes rows under a MAC with the deployment's key.
type macRows struct{ keys *keyring.Ring }

// keyedHash returns a MAC, so an index can be searched without revealing names or values to a
// reader of the database.
func (m macRows) keyedHash(label string, fields ...[]byte) []byte {
	h := hmac.New(sha512.New, m.keys.APIKeyHash())
	frame.Write(h, label, fields...)
	return h.Sum(nil)[:32]
}

func (m macRows) keyedHex(label string, fields ...[]byte) string {
	return hex.EncodeToString(m.keyedHash(label, fields...))
}

// getRow reads a JSON row under a MAC. It returns nil when the row does not exist.
func getRow[T any](m macRows, rd store.Reader, key []byte) (*T, error) {
	stored, err := rd.Get(key)
	if err != nil || stored == nil {
		return nil, err
	}
	return decodeRow[T](m, key, stored)
}

func decodeRow[T any](m macRows, key, stored []byte) (*T, error) {
	b, err := m.keys.OpenRow(key, stored)
	if err != nil {
		return nil, err
	}
	row := new(T)
	if err := json.Unmarshal(b, row); err != nil {
		return nil, record.ErrDamaged
	}
	return row, nil
}

func putRow[T any](m macRows, tx store.Tx, key []byte, row T) error {
	p, err := encodeRow(m, key, row)
	if err != nil {
		return err
	}
	return tx.Put(p.key, p.value)
}

func encodeRow[T any](m macRows, key []byte, row T) (pair, error) {
	b, err := json.Marshal(row)
	if err != nil {
		return pair{}, err
	}
	return pair{key, m.keys.SealRow(key, b)}, nil
}

// isDamaged reports whether an error is about what is stored: a row that cannot be decoded, or that is
// not the one that was written last.
func isDamaged(err error) bool { return errors.Is(err, fault.Internal) || state.IsRefused(err) }

// pair is a row that is ready to be put.
type pair struct{ key, value []byte }

func putRows(tx store.Tx, rows []pair) error {
	for _, p := range rows {
		if err := tx.Put(p.key, p.value); err != nil {
			return err
		}
	}
	return nil
}

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
