package identity

import (
	"context"
	"errors"
	"strconv"
	"testing"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// A cached row does not count once the store holds other bytes in its place, or none.
func TestACachedRowIsReadAnewEachTime(t *testing.T) {
	s := newService(t)
	key := tenantKey("ten_known")
	write := func(do func(tx store.Tx) error) {
		t.Helper()
		if err := s.store.Update(t.Context(), do); err != nil {
			t.Fatal(err)
		}
	}
	var rows rowCache[tenantRow]
	get := func() (row tenantRow, found bool, err error) {
		err = s.store.View(t.Context(), func(r store.Reader) (err error) {
			row, found, err = rows.get(s.records, r, key)
			return err
		})
		return row, found, err
	}
	for _, name := range []string{"first", "first", "second"} {
		write(func(tx store.Tx) error { return s.put(tx, key, tenantRow{Name: name}) })
		for range 2 {
			if row, found, err := get(); err != nil || !found || row.Name != name {
				t.Fatal(row, found, err)
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
	s := newService(t)
	var rows rowCache[tenantRow]
	err := s.store.Update(t.Context(), func(tx store.Tx) error {
		for i := range maxCached + 10 {
			key := tenantKey(authz.TenantID(strconv.Itoa(i)))
			if err := s.put(tx, key, tenantRow{Name: "a"}); err != nil {
				return err
			}
			if _, found, err := rows.get(s.records, tx, key); err != nil || !found {
				return errors.Join(err, context.Canceled)
			}
		}
		return nil
	})
	if err != nil || len(rows.rows) > maxCached {
		t.Error(len(rows.rows), err)
	}
}
