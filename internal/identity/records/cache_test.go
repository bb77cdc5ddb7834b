package records

import (
	"context"
	"errors"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
)

func newStore(t *testing.T) *Store {
	t.Helper()
	dir := t.TempDir()
	must(t, kms.CreateLocal(filepath.Join(dir, "kms.key")))
	k, err := kms.OpenLocal(filepath.Join(dir, "kms.key"))
	must(t, err)
	s, err := bolt.Open(filepath.Join(dir, "i.db"), bolt.Options{})
	must(t, err)
	t.Cleanup(func() { _ = s.Close() })
	keys, _, err := keyring.Create(t.Context(), s, k, keyring.Config{CacheTTL: time.Minute, Now: time.Now})
	must(t, err)
	return New(s, nil, keys)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

type row struct{ Name string }

// A cached row does not count once the store holds other bytes in its place, or none.
func TestACachedRowIsReadAnewEachTime(t *testing.T) {
	s := newStore(t)
	key := []byte("row/known")
	write := func(do func(tx store.Tx) error) {
		t.Helper()
		must(t, s.store.Update(t.Context(), do))
	}
	var rows Cache[row]
	get := func() (found row, ok bool, err error) {
		err = s.store.View(t.Context(), func(r store.Reader) (err error) {
			found, ok, err = rows.Get(s, r, key)
			return err
		})
		return found, ok, err
	}
	for _, name := range []string{"first", "first", "second"} {
		write(func(tx store.Tx) error { return s.Put(tx, key, row{name}) })
		for range 2 {
			if found, ok, err := get(); err != nil || !ok || found.Name != name {
				t.Fatal(found, ok, err)
			}
		}
	}
	write(func(tx store.Tx) error {
		b, err := tx.Get(key)
		if err != nil {
			return err
		}
		b = append([]byte(nil), b...)
		b[len(b)-1] ^= 1
		return tx.Put(key, b)
	})
	if _, _, err := get(); !errors.Is(err, fault.Internal) {
		t.Error("a row that was changed in the store:", err)
	}
	write(func(tx store.Tx) error { return tx.Delete(key) })
	if _, found, err := get(); err != nil || found {
		t.Error(found, err)
	}
}

func TestCachedRowsDoNotFillTheMemory(t *testing.T) {
	s := newStore(t)
	var rows Cache[row]
	err := s.store.Update(t.Context(), func(tx store.Tx) error {
		for i := range maxCached + 10 {
			key := []byte("row/" + strconv.Itoa(i))
			if err := s.Put(tx, key, row{"a"}); err != nil {
				return err
			}
			if _, found, err := rows.Get(s, tx, key); err != nil || !found {
				return errors.Join(err, context.Canceled)
			}
		}
		return nil
	})
	if err != nil || len(rows.rows) > maxCached {
		t.Error(len(rows.rows), err)
	}
}
