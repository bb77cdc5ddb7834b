package audit

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
)

// memory is an in-memory store: a sorted list of rows. A copy shares the values of its original.
type memory struct{ rows []row }

func copyStore(t testing.TB, s store.Store) *memory {
	t.Helper()
	m := new(memory)
	err := ScanAll(context.Background(), s, store.Range{}, func(key, value []byte) error {
		m.rows = append(m.rows, row{key, value})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// with returns a changed copy.
func (m *memory) with(change func(tx store.Tx) error) *memory {
	c := &memory{slices.Clone(m.rows)}
	if err := c.Update(context.Background(), change); err != nil {
		panic(err)
	}
	return c
}

func (m *memory) find(key []byte) (int, bool) {
	return slices.BinarySearchFunc(m.rows, string(key), func(r row, key string) int { return strings.Compare(string(r.key), key) })
}

func (m *memory) View(_ context.Context, fn func(store.Reader) error) error { return fn(memoryTx{m}) }

func (m *memory) Update(_ context.Context, fn func(store.Tx) error) error { return fn(memoryTx{m}) }

func (m *memory) Ready(context.Context) error { return nil }

func (m *memory) Close() error { return nil }

type memoryTx struct{ m *memory }

func (tx memoryTx) Get(key []byte) ([]byte, error) {
	if i, ok := tx.m.find(key); ok {
		return tx.m.rows[i].value[:len(tx.m.rows[i].value):len(tx.m.rows[i].value)], nil
	}
	return nil, nil
}

func (tx memoryTx) Scan(rng store.Range, visit func(key, value []byte) bool) error {
	from, _ := tx.m.find(rng.From)
	to := len(tx.m.rows)
	if rng.To != nil {
		to, _ = tx.m.find(rng.To)
	}
	if from >= to {
		return nil
	}
	rows := slices.Clone(tx.m.rows[from:to])
	if rng.Reverse {
		slices.Reverse(rows)
	}
	for _, r := range rows {
		if !visit(r.key, r.value) {
			return nil
		}
	}
	return nil
}

func (tx memoryTx) Put(key, value []byte) error {
	r := row{slices.Clone(key), append([]byte{}, value...)}
	if i, ok := tx.m.find(key); ok {
		tx.m.rows[i] = r
	} else {
		tx.m.rows = slices.Insert(tx.m.rows, i, r)
	}
	return nil
}

func (tx memoryTx) Delete(key []byte) error {
	if i, ok := tx.m.find(key); ok {
		tx.m.rows = slices.Delete(tx.m.rows, i, i+1)
	}
	return nil
}

func (tx memoryTx) Enqueue(any) {}

func (tx memoryTx) OnCommit(func()) {}

func mustOpen(t testing.TB, path string, hook store.Hook) store.Store {
	t.Helper()
	s, err := bolt.Open(path, bolt.Options{Hook: hook})
	if err != nil {
		t.Fatal(err)
	}
	return rehearsing(t, s)
}

// countingStore counts the reads of Views by the kind of row.
type countingStore struct {
	store.Store
	gets, scans map[string]int
}

func (s *countingStore) String() string { return fmt.Sprint(s.gets, s.scans) }

func (s *countingStore) View(ctx context.Context, fn func(store.Reader) error) error {
	s.gets, s.scans = make(map[string]int), make(map[string]int)
	return s.Store.View(ctx, func(r store.Reader) error { return fn(rowKinds{r, s}) })
}

// between calls a function before one of the Views of a store.
type between struct {
	store.Store
	views atomic.Int64
	at    int64
	do    func() error
}

func (s *between) View(ctx context.Context, closure func(store.Reader) error) error {
	if s.views.Add(1) == s.at {
		if err := s.do(); err != nil {
			return err
		}
	}
	return s.Store.View(ctx, closure)
}
