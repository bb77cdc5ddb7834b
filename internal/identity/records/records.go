// Package records reads and writes the rows of a deployment's identities, and commits a change of
// them together with its audit entry. It does not know what the rows mean: the packages that own
// them do.
//
// Each row starts with the keyring's MAC, since a row decides whose secrets a caller may see.
package records

import (
	"crypto/hmac"
	"crypto/sha512"
	"encoding/hex"
	"encoding/json"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/frame"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Store is safe for concurrent use.
type Store struct {
	store store.Store
	guard *guard.Guard
	keys  *keyring.Ring
}

// New returns the records that s keeps. Their changes are recorded through guard.
func New(s store.Store, guard *guard.Guard, keys *keyring.Ring) *Store {
	return &Store{s, guard, keys}
}

// Sealed is a row as the store holds it.
type Sealed struct{ key, value []byte }

// Seal returns a row with a MAC that only this deployment can make.
func (s *Store) Seal(key []byte, row any) (Sealed, error) {
	b, err := json.Marshal(row)
	if err != nil {
		return Sealed{}, err
	}
	return Sealed{key, s.keys.SealRow(key, b)}, nil
}

// Decode reads what the store holds under a key into row. Error: fault.Internal for a row that this
// deployment did not write there.
func (s *Store) Decode(key, stored []byte, row any) error {
	b, err := s.keys.OpenRow(key, stored)
	if err != nil {
		return err
	}
	return json.Unmarshal(b, row)
}

// Get reads a row and reports whether it exists.
func (s *Store) Get(r store.Reader, key []byte, row any) (bool, error) {
	b, err := r.Get(key)
	if err != nil || b == nil {
		return false, err
	}
	return true, s.Decode(key, b, row)
}

// GetOr is Get, but decodes the row other if there is none, so both cases do the same work.
func (s *Store) GetOr(r store.Reader, key []byte, other Sealed, row any) (bool, error) {
	b, err := r.Get(key)
	if err != nil {
		return false, err
	}
	if b == nil {
		return false, s.Decode(other.key, other.value, row)
	}
	return true, s.Decode(key, b, row)
}

// Put writes a row.
func (s *Store) Put(tx store.Tx, key []byte, row any) error {
	sealed, err := s.Seal(key, row)
	if err != nil {
		return err
	}
	return tx.Put(key, sealed.value)
}

// Hash returns a MAC of b as lower-case hex, so rows can be searched for b without revealing b to a
// reader of the database. Each label serves one kind of b.
func (s *Store) Hash(label string, b []byte) string {
	h := hmac.New(sha512.New, s.keys.APIKeyHash())
	h.Write(frame.Join(label, b))
	return hex.EncodeToString(h.Sum(nil)[:sha512.Size256])
}

// ReadTimeout bounds a read, so a read that cannot be recorded is refused within a second even when
// the store hangs.
const ReadTimeout = 900 * time.Millisecond

// ErrDamaged is the error of a row that another row names and that does not exist.
var ErrDamaged = fault.New(fault.Internal, "the stored identities are damaged: find the row with latticekeep doctor, and restore a backup")
