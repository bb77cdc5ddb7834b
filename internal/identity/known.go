package identity

import (
	"bytes"
	"sync"

	"github.com/latticekeep/latticekeep/internal/store"
)

// maxKnown bounds the rows of one kind that are remembered.
const maxKnown = 4096

// known are rows of one kind as they were last decoded. Each is still read for every
// request; the same bytes under the same key are not verified and decoded again. What
// a row holds is shared: nobody changes it. The zero value is ready.
type known[T any] struct {
	mu   sync.RWMutex
	rows map[string]decoded[T]
}

type decoded[T any] struct {
	stored []byte
	row    T
}

// get reads the row of a key.
func (k *known[T]) get(s *Service, r store.Reader, key []byte) (row T, found bool, err error) {
	stored, err := r.Get(key)
	if err != nil || stored == nil {
		return row, false, err
	}
	k.mu.RLock()
	last, ok := k.rows[string(key)]
	k.mu.RUnlock()
	if ok && bytes.Equal(last.stored, stored) {
		return last.row, true, nil
	}
	if err := s.decode(key, stored, &row); err != nil {
		return row, true, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.rows == nil || len(k.rows) >= maxKnown {
		k.rows = make(map[string]decoded[T])
	}
	k.rows[string(key)] = decoded[T]{bytes.Clone(stored), row}
	return row, true, nil
}
