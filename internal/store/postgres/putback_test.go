package postgres

import (
	"testing"

	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/pgtest"
)

// A restored database that has been written to since may reach the same fence. The rows in memory
// belong to another commit.
func TestTheCacheIsOfOneCommitAndNotOfItsNumber(t *testing.T) {
	url := pgtest.Shared(t).URL()
	s, err := Open(t.Context(), url, Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	key := []byte("key")
	for range 2 * trusting { // so that the store relies on the cache
		if err := s.Update(t.Context(), func(tx store.Tx) error { return tx.Put(key, []byte("now")) }); err != nil {
			t.Fatal(err)
		}
	}
	answers(t, url, "UPDATE latticekeep_kv SET value = 'before'; UPDATE latticekeep_head SET commit_id = 'another'")
	var read string
	err = s.Update(t.Context(), func(tx store.Tx) error {
		value, err := tx.Get(key)
		read = string(value)
		return err
	})
	if err != nil || read != "before" {
		t.Fatalf("%q, %v", read, err)
	}
}
