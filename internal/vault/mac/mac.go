// Package mac reads and writes the vault's rows under a MAC with the deployment's key, and computes
// the keyed hashes that they are found by. It does not know what the rows mean. A row is bound to its
// key in the store, so it counts in no other place.
package mac

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha512"
	"encoding/hex"
	"encoding/json"
	"errors"

	"github.com/latticekeep/latticekeep/internal/frame"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/vault/record"
)

// Rows reads and writes rows. It is safe for concurrent use.
type Rows struct{ keys *keyring.Ring }

// New returns rows under the key of a deployment.
func New(keys *keyring.Ring) Rows { return Rows{keys} }

// KeyedHash returns a MAC of 32 bytes, so an index can be searched without revealing names or values
// to a reader of the database. Each label serves one kind of fields.
func (m Rows) KeyedHash(label string, fields ...[]byte) []byte {
	h := hmac.New(sha512.New, m.keys.APIKeyHash())
	frame.Write(h, label, fields...)
	return h.Sum(nil)[:32]
}

// KeyedHex is [Rows.KeyedHash] as lower-case hex.
func (m Rows) KeyedHex(label string, fields ...[]byte) string {
	return hex.EncodeToString(m.KeyedHash(label, fields...))
}

// Row is a row that is ready to be put.
type Row struct{ Key, Value []byte }

// PutAll writes rows.
func PutAll(tx store.Tx, rows []Row) error {
	for _, r := range rows {
		if err := tx.Put(r.Key, r.Value); err != nil {
			return err
		}
	}
	return nil
}

// DeleteAll deletes all rows under a prefix.
func DeleteAll(tx store.Tx, prefix []byte) error {
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

// Seal returns the row of a key with its content under a MAC.
func (m Rows) Seal(key, content []byte) Row { return Row{key, m.keys.SealRow(key, content)} }

// Open returns the content of a row. Error: fault.Internal for a row that was not written under the
// key.
func (m Rows) Open(key, stored []byte) ([]byte, error) { return m.keys.OpenRow(key, stored) }

// Get reads a JSON row. It returns nil when the row does not exist. Errors: those of [Decode] and of
// the store.
func Get[T any](m Rows, rd store.Reader, key []byte) (*T, error) {
	stored, err := rd.Get(key)
	if err != nil || stored == nil {
		return nil, err
	}
	return Decode[T](m, key, stored)
}

// Decode returns what a JSON row holds. Error: fault.Internal for a row that was not written under
// the key.
func Decode[T any](m Rows, key, stored []byte) (*T, error) {
	b, err := m.Open(key, stored)
	if err != nil {
		return nil, err
	}
	row := new(T)
	if err := json.Unmarshal(b, row); err != nil {
		return nil, record.ErrDamaged
	}
	return row, nil
}

// Put writes a JSON row.
func Put[T any](m Rows, tx store.Tx, key []byte, row T) error {
	r, err := Encode(m, key, row)
	if err != nil {
		return err
	}
	return tx.Put(r.Key, r.Value)
}

// Encode returns a JSON row.
func Encode[T any](m Rows, key []byte, row T) (Row, error) {
	b, err := json.Marshal(row)
	if err != nil {
		return Row{}, err
	}
	return m.Seal(key, b), nil
}
