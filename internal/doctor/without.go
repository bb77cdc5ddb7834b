package doctor

import (
	"bytes"
	"context"
	"slices"

	"github.com/latticekeep/latticekeep/internal/store"
)

// withoutRows is a store that is read as if some rows were missing.
type withoutRows struct {
	store.Store
	keys [][]byte
}

// View implements [store.Store].
func (s withoutRows) View(ctx context.Context, fn func(store.Reader) error) error {
	return s.Store.View(ctx, func(r store.Reader) error { return fn(readerWithout{r, s}) })
}

func (s withoutRows) has(key []byte) bool {
	return slices.ContainsFunc(s.keys, func(k []byte) bool { return bytes.Equal(k, key) })
}

type readerWithout struct {
	store.Reader
	s withoutRows
}

// Get implements [store.Reader].
func (r readerWithout) Get(key []byte) ([]byte, error) {
	if r.s.has(key) {
		return nil, nil
	}
	return r.Reader.Get(key)
}

// Scan implements [store.Reader].
func (r readerWithout) Scan(rg store.Range, visit func(key, value []byte) bool) error {
	return r.Reader.Scan(rg, func(key, value []byte) bool { return r.s.has(key) || visit(key, value) })
}
