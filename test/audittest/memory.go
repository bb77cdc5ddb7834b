package audittest

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/test/storetest"
)

// Memory is an in-memory store: a sorted list of rows. A copy shares the values of its original.
type Memory struct{ Rows []audit.Row }

// CopyStore copies all rows of a store into memory.
func CopyStore(t testing.TB, s store.Store) *Memory {
	t.Helper()
	m := new(Memory)
	err := audit.ScanAll(context.Background(), s, store.Range{}, func(key, value []byte) error {
		m.Rows = append(m.Rows, audit.Row{Key: key, Value: value})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// With returns a changed copy.
func (m *Memory) With(change func(tx store.Tx) error) *Memory {
	c := &Memory{slices.Clone(m.Rows)}
	if err := c.Update(context.Background(), change); err != nil {
		panic(err)
	}
	return c
}

// Find returns the index of a row, or where it would be.
func (m *Memory) Find(key []byte) (int, bool) {
	return slices.BinarySearchFunc(m.Rows, string(key), func(r audit.Row, key string) int { return strings.Compare(string(r.Key), key) })
}

func (m *Memory) View(_ context.Context, fn func(store.Reader) error) error { return fn(MemoryTx{m}) }

func (m *Memory) Update(_ context.Context, fn func(store.Tx) error) error { return fn(MemoryTx{m}) }

func (m *Memory) Ready(context.Context) error { return nil }

func (m *Memory) Close() error { return nil }

// Tx returns a transaction that changes m itself.
func (m *Memory) Tx() MemoryTx { return MemoryTx{m} }

// MemoryTx is a transaction of a [Memory], without isolation.
type MemoryTx struct{ m *Memory }

func (tx MemoryTx) Get(key []byte) ([]byte, error) {
	if i, ok := tx.m.Find(key); ok {
		return tx.m.Rows[i].Value[:len(tx.m.Rows[i].Value):len(tx.m.Rows[i].Value)], nil
	}
	return nil, nil
}

func (tx MemoryTx) Scan(rng store.Range, visit func(key, value []byte) bool) error {
	from, _ := tx.m.Find(rng.From)
	to := len(tx.m.Rows)
	if rng.To != nil {
		to, _ = tx.m.Find(rng.To)
	}
	if from >= to {
		return nil
	}
	rows := slices.Clone(tx.m.Rows[from:to])
	if rng.Reverse {
		slices.Reverse(rows)
	}
	for _, r := range rows {
		if !visit(r.Key, r.Value) {
			return nil
		}
	}
	return nil
}

func (tx MemoryTx) Put(key, value []byte) error {
	r := audit.Row{Key: slices.Clone(key), Value: append([]byte{}, value...)}
	if i, ok := tx.m.Find(key); ok {
		tx.m.Rows[i] = r
	} else {
		tx.m.Rows = slices.Insert(tx.m.Rows, i, r)
	}
	return nil
}

func (tx MemoryTx) Delete(key []byte) error {
	if i, ok := tx.m.Find(key); ok {
		tx.m.Rows = slices.Delete(tx.m.Rows, i, i+1)
	}
	return nil
}

func (tx MemoryTx) Enqueue(any) {}

func (tx MemoryTx) Wrote([]byte) bool { return false }

func (tx MemoryTx) Written([]byte, func([]byte, bool)) error { return nil }

func (tx MemoryTx) OnCommit(func()) {}

func mustOpen(t testing.TB, path string, hook store.Hook) store.Store {
	t.Helper()
	s, err := bolt.Open(path, bolt.Options{Hook: hook})
	if err != nil {
		t.Fatal(err)
	}
	return Rehearsing(t, s)
}

// CountingStore counts the reads of Views by the kind of row.
type CountingStore struct {
	store.Store
	Gets, Scans map[string]int
}

func (s *CountingStore) String() string { return fmt.Sprint(s.Gets, s.Scans) }

func (s *CountingStore) View(ctx context.Context, fn func(store.Reader) error) error {
	s.Gets, s.Scans = make(map[string]int), make(map[string]int)
	return s.Store.View(ctx, func(r store.Reader) error { return fn(rowKinds{r, s}) })
}

// Between calls a function before one of the Views of a store.
type Between struct {
	store.Store
	Views atomic.Int64
	At    int64
	Do    func() error
}

func (s *Between) View(ctx context.Context, closure func(store.Reader) error) error {
	if s.Views.Add(1) == s.At {
		if err := s.Do(); err != nil {
			return err
		}
	}
	return s.Store.View(ctx, closure)
}

type rowKinds struct {
	store.Reader
	*CountingStore
}

func kindOfRow(key []byte) string { return strings.Join(strings.SplitN(string(key), "/", 3)[:2], "/") }

func (r rowKinds) Get(key []byte) ([]byte, error) {
	r.Gets[kindOfRow(key)]++
	return r.Reader.Get(key)
}

func (r rowKinds) Scan(rng store.Range, visit func(key, value []byte) bool) error {
	return r.Reader.Scan(rng, func(key, value []byte) bool {
		r.Scans[kindOfRow(key)]++
		return visit(key, value)
	})
}

// Rehearsing runs every closure of Update twice, except where time is measured.
func Rehearsing(t testing.TB, s store.Database) store.Store {
	if _, benchmark := t.(*testing.B); benchmark {
		if embedded, is := s.(*bolt.Store); is { // a server writes ahead, too
			if err := embedded.WriteAhead(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		return s
	}
	return storetest.Rehearsing(s)
}
