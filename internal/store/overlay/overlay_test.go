package overlay

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"testing"

	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
)

var errDrop = errors.New("dropped")

// An overlay answers as a transaction of the store does, whatever was written, and leaves no row behind.
func TestAnOverlayIsATransaction(t *testing.T) {
	s, err := bolt.Open(filepath.Join(t.TempDir(), "o.db"), bolt.Options{})
	must(t, err)
	t.Cleanup(func() { _ = s.Close() })
	key := func(i int) []byte { return fmt.Appendf(nil, "k/%02d", i) }
	for round := range uint64(200) {
		must(t, s.Update(t.Context(), func(tx store.Tx) error {
			for i := range 20 {
				if err := errors.Join(tx.Delete(key(i))); err != nil {
					return err
				}
				if i*7%3 == int(round%3) {
					if err := tx.Put(key(i), fmt.Append(nil, round, i)); err != nil {
						return err
					}
				}
			}
			return nil
		}))
		before := dump(t, s)
		var want, got []string
		err := s.Update(t.Context(), func(tx store.Tx) error {
			want = acts(t, tx, rand.New(rand.NewPCG(round, 1)), key)
			return errDrop
		})
		if !errors.Is(err, errDrop) {
			t.Fatal(err)
		}
		must(t, s.View(t.Context(), func(r store.Reader) error {
			got = acts(t, New(r), rand.New(rand.NewPCG(round, 1)), key)
			return nil
		}))
		if !slices.Equal(got, want) {
			t.Fatalf("round %d:\n%q, want\n%q", round, got, want)
		}
		if after := dump(t, s); !slices.Equal(after, before) {
			t.Fatalf("round %d left %q of %q", round, after, before)
		}
	}
}

// acts reads and writes at random, and returns what it saw.
func acts(t *testing.T, tx store.Tx, random *rand.Rand, key func(int) []byte) (saw []string) {
	t.Helper()
	for range 30 {
		k := key(random.IntN(22))
		switch random.IntN(4) {
		case 0:
			must(t, tx.Put(k, fmt.Append(nil, random.IntN(100))[:random.IntN(2)]))
		case 1:
			must(t, tx.Delete(k))
		case 2:
			value, err := tx.Get(k)
			must(t, err)
			saw = append(saw, fmt.Sprintf("%s=%q %v", k, value, value == nil))
		default:
			r := store.Range{From: key(random.IntN(10)), Reverse: random.IntN(2) == 0}
			if random.IntN(3) > 0 {
				r.To = key(10 + random.IntN(12))
			}
			left, inside := random.IntN(25), random.IntN(3)
			must(t, tx.Scan(r, func(k, v []byte) bool {
				saw = append(saw, fmt.Sprintf("%s:%q", k, v))
				switch other := key(random.IntN(22)); {
				case inside == 1:
					must(t, tx.Put(other, []byte("within")))
				case inside == 2:
					must(t, tx.Delete(other))
				}
				left--
				return left > 0
			}))
		}
	}
	return saw
}

func dump(t *testing.T, s store.Store) (all []string) {
	t.Helper()
	must(t, s.View(t.Context(), func(r store.Reader) error {
		return r.Scan(store.Range{}, func(k, v []byte) bool {
			all = append(all, fmt.Sprintf("%q=%q", k, v))
			return true
		})
	}))
	return all
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
