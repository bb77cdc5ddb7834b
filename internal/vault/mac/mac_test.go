package mac

import (
	"bytes"
	"errors"
	"path/filepath"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func newRows(t *testing.T) Rows {
	t.Helper()
	dir := t.TempDir()
	must(t, kms.CreateLocal(filepath.Join(dir, "kms.key")))
	k, err := kms.OpenLocal(filepath.Join(dir, "kms.key"))
	must(t, err)
	s, err := bolt.Open(filepath.Join(dir, "vault.db"), bolt.Options{})
	must(t, err)
	t.Cleanup(func() { _ = s.Close() })
	keys, _, err := keyring.Create(t.Context(), s, k, keyring.Config{CacheTTL: time.Minute, Now: time.Now})
	must(t, err)
	return New(keys)
}

type row struct{ Name string }

func TestARowCountsOnlyInItsPlace(t *testing.T) {
	m := newRows(t)
	r, err := Encode(m, []byte("a"), row{"x"})
	must(t, err)
	if got, err := Decode[row](m, r.Key, r.Value); err != nil || *got != (row{"x"}) {
		t.Fatal(got, err)
	}
	changed := bytes.Clone(r.Value)
	changed[len(changed)-3] ^= 1
	other, err := Encode(newRows(t), r.Key, row{"x"})
	must(t, err)
	for name, c := range map[string]struct{ key, value []byte }{
		"another key": {[]byte("b"), r.Value}, "a changed byte": {r.Key, changed}, "short": {r.Key, r.Value[:8]},
		"another deployment": {r.Key, other.Value}, "no JSON": {r.Key, m.Seal(r.Key, []byte("x")).Value},
	} {
		if got, err := Decode[row](m, c.key, c.value); !errors.Is(err, fault.Internal) || got != nil {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
}

func TestAKeyedHashIsOfItsLabelAndFields(t *testing.T) {
	m, a, b := newRows(t), []byte("a"), []byte("b")
	seen := map[string]bool{
		m.KeyedHex("l", a, b): true, m.KeyedHex("m", a, b): true, m.KeyedHex("l", []byte("ab")): true,
		m.KeyedHex("l", b, a): true, newRows(t).KeyedHex("l", a, b): true,
	}
	if len(seen) != 5 || !seen[m.KeyedHex("l", a, b)] {
		t.Error(seen)
	}
}
