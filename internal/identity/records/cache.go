package records

import (
	"bytes"
	"sync"

	"github.com/latticekeep/latticekeep/internal/store"
)

// maxCached bounds the rows of one kind in a cache.
const maxCached = 4096

// Cache holds rows of one kind as they were last decoded. Every request still reads the row. The
// cache only saves verifying and decoding the same bytes under the same key again. Rows are shared,
// so nobody may change what they hold. The zero value is ready.
type Cache[T any] struct {
	mu   sync.RWMutex
	rows map[string]decoded[T]
}

type decoded[T any] struct {
	stored []byte
	row    T
}

// Get reads the row of a key and reports whether it exists.
func (c *Cache[T]) Get(s *Store, r store.Reader, key []byte) (row T, found bool, err error) {
	stored, err := r.Get(key)
	if err != nil || stored == nil {
		return row, false, err
	}
	c.mu.RLock()
	last, ok := c.rows[string(key)]
	c.mu.RUnlock()
	if ok && bytes.Equal(last.stored, stored) {
		return last.row, true, nil
	}
	if err := s.Decode(key, stored, &row); err != nil {
		return row, true, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.rows == nil || len(c.rows) >= maxCached {
		c.rows = make(map[string]decoded[T])
	}
	c.rows[string(key)] = decoded[T]{bytes.Clone(stored), row}
	return row, true, nil
}
