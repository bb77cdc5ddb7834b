package storetest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"slices"
	"sync"
	"testing"
	"time"
)

// add adds n to the counter at key.
func add(tx store.Tx, key string, n uint64) (uint64, error) {
	v, err := tx.Get([]byte(key))
	if err != nil {
		return 0, err
	}
	if v != nil {
		n += binary.BigEndian.Uint64(v)
	}
	return n, tx.Put([]byte(key), binary.BigEndian.AppendUint64(nil, n))
}

// together runs n goroutines and fails the test with their errors.
func together(t *testing.T, n int, do func(i int) error) {
	t.Helper()
	var wg sync.WaitGroup
	errs := make([]error, n)
	for i := range n {
		wg.Go(func() { errs[i] = do(i) })
	}
	wg.Wait()
	must(t, errors.Join(errs...))
}

// Options are the properties that the suite requires of the store it opens.
type Options struct {
	Dir      string           // stores opened one after the other with the same Dir have the same data
	Hook     store.Hook       // may be nil
	Observer store.Observer   // may be nil
	Now      func() time.Time // measures Views and hanging commits; may be nil

	// Commit, unless nil, replaces each physical commit. do makes the real one. Commit may fail
	// before or after do, or block.
	Commit func(do func() error) error
}

// Open opens a store. The suite closes it.
type Open func(t *testing.T, o Options) store.Store

// start opens an empty store and closes it at the end of the test.
func start(t *testing.T, open Open, o Options) store.Store {
	t.Helper()
	if o.Dir == "" {
		o.Dir = t.TempDir()
	}
	s := open(t, o)
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("closing: %v", err)
		}
	})
	return s
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantKind(t *testing.T, err error, k fault.Kind) {
	t.Helper()
	if err == nil || fault.Of(err) != k {
		t.Fatalf("got %v, want the kind %q", err, k)
	}
}

// put writes pairs "key=value" in one Update.
func put(t *testing.T, s store.Store, pairs ...string) {
	t.Helper()
	must(t, s.Update(t.Context(), func(tx store.Tx) error {
		for _, p := range pairs {
			k, v, _ := bytes.Cut([]byte(p), []byte("="))
			if err := tx.Put(k, v); err != nil {
				return err
			}
		}
		return nil
	}))
}

// scan returns the pairs of r as "key=value".
func scan(r store.Reader, rg store.Range) ([]string, error) {
	var got []string
	err := r.Scan(rg, func(k, v []byte) bool {
		got = append(got, string(k)+"="+string(v))
		return true
	})
	return got, err
}

// all returns all pairs in the store.
func all(t *testing.T, s store.Store) []string {
	t.Helper()
	var got []string
	must(t, s.View(t.Context(), func(r store.Reader) (err error) {
		got, err = scan(r, store.Range{})
		return err
	}))
	return got
}

func wantAll(t *testing.T, s store.Store, want ...string) {
	t.Helper()
	if got := all(t, s); !slices.Equal(got, want) {
		t.Fatalf("the store has %q, want %q", got, want)
	}
}

func second(_ []byte, err error) error { return err }
