package postgres

import (
	"context"
	"crypto/rand"
	"fmt"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/test/pgtest"
)

// callers is the number of concurrent requests.
const callers = 64

// together spreads b.N calls of do over the callers.
func together(b *testing.B, do func(i int) error) {
	b.Helper()
	b.ResetTimer()
	var next atomic.Int64
	var wg sync.WaitGroup
	for range callers {
		wg.Go(func() {
			for i := next.Add(1); i <= int64(b.N); i = next.Add(1) {
				if err := do(int(i)); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	b.StopTimer()
}

func key(kind string, i int) []byte { return fmt.Appendf(nil, "%s/%06d", kind, i) }

// known is the number of records before the measurement.
const known = 10_000

func fill(b *testing.B, s store.Store, value []byte) {
	b.Helper()
	for from := 0; from < known; from += 500 {
		err := s.Update(b.Context(), func(tx store.Tx) error {
			for i := from; i < from+500; i++ {
				for _, kind := range []string{"record", "name", "policy"} {
					if err := tx.Put(key(kind, i), value); err != nil {
						return err
					}
				}
			}
			return nil
		})
		if err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkStore compares this store with the embedded one. An update reads three rows and writes
// four of 5 KB; a view reads three.
func BenchmarkStore(b *testing.B) {
	value := make([]byte, 5<<10)
	rand.Read(value)
	hook := func(tx store.Tx, _ []any) error {
		_, err := bump(tx, "head")
		return err
	}
	open := map[string]func() (store.Database, error){
		"bolt": func() (store.Database, error) {
			return bolt.Open(filepath.Join(b.TempDir(), "db"), bolt.Options{Hook: hook})
		},
		"postgres": func() (store.Database, error) {
			return Open(b.Context(), pgtest.Shared(b).URL(), Options{Hook: hook})
		},
	}
	for _, name := range []string{"bolt", "postgres"} {
		s, err := open[name]()
		if err != nil {
			b.Fatal(err)
		}
		fill(b, s, value)
		read := func(r store.Reader, i int) error {
			for _, kind := range []string{"record", "name", "policy"} {
				if v, err := r.Get(key(kind, i*7919%known)); err != nil || v == nil {
					return fmt.Errorf("reading: %w", err)
				}
			}
			return nil
		}
		var created atomic.Int64
		b.Run("update/"+name, func(b *testing.B) {
			before := s.Commits()
			together(b, func(i int) error {
				n := int(created.Add(1))
				return s.Update(context.Background(), func(tx store.Tx) error {
					if err := read(tx, i); err != nil {
						return err
					}
					tx.Enqueue(i)
					for _, kind := range []string{"new-record", "new-version", "entry"} {
						if err := tx.Put(key(kind, n), value); err != nil {
							return err
						}
					}
					return tx.Put(key("record", i*7919%known), value)
				})
			})
			b.ReportMetric(float64(s.Commits()-before)/float64(b.N), "commits/op")
		})
		b.Run("view/"+name, func(b *testing.B) {
			together(b, func(i int) error {
				return s.View(context.Background(), func(r store.Reader) error { return read(r, i) })
			})
		})
		if err := s.Close(); err != nil {
			b.Error(err)
		}
	}
}
