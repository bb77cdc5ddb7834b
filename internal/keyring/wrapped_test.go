package keyring

import (
	"bytes"
	"errors"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

func TestAMovedKeyOpensOnlyWhereItBelongs(t *testing.T) {
	m := newMoving(t, 0)
	m.rewrap(t, m.ring, time.Time{})
	rows := m.wrappedRows(t)
	find := func(owner authz.TenantID, version uint32) string {
		for row := range rows {
			if strings.HasPrefix(row, string(keyRow(owner, version, wrapping))) {
				return row
			}
		}
		t.Fatal("no row")
		return ""
	}
	one, two, other := find(tenant, 1), find(tenant, 2), find(secondTenant, 1)
	relabelled := bytes.Clone(rows[one])
	copy(relabelled[3:], m.former.ID())
	tampered := bytes.Clone(rows[one])
	tampered[len(tampered)-1] ^= 1
	for name, blob := range map[string][]byte{
		"of another version": rows[two], "of another tenant": rows[other], "of the deployment": rows[find(authz.SystemTenant, 1)],
		"named after another key": relabelled, "tampered with": tampered, "cut": rows[one][:len(rows[one])-1], "empty": {}, "without a key": rows[one][:41],
	} {
		m.put(t, func(tx store.Tx) error { return tx.Put([]byte(one), blob) })
		if _, err := m.ring.Version(t.Context(), tenant, 1); err == nil {
			t.Errorf("%s: it opens", name)
		}
	}
	m.put(t, func(tx store.Tx) error { return tx.Put([]byte(one), rows[one]) })
	if _, err := m.ring.Version(t.Context(), tenant, 1); err != nil {
		t.Fatal(err)
	}
	// If a set has two rows, the keyring does not guess which one counts.
	m.put(t, func(tx store.Tx) error { return tx.Put(keyRow(tenant, 1, wrapping), rows[one]) })
	if _, err := m.ring.Version(t.Context(), tenant, 1); !errors.Is(err, fault.Internal) {
		t.Error("two rows:", err)
	}
	for _, name := range []string{"/0", "/" + strings.Repeat("0", 16), "/" + strings.Repeat("0", 15) + "A", "s"} {
		m.put(t, func(tx store.Tx) error {
			return errors.Join(tx.Delete(keyRow(tenant, 1, wrapping)), tx.Delete([]byte(one)), tx.Put(append(keyRow(tenant, 1, wrapping), name...), rows[one]))
		})
		if _, err := m.ring.Version(t.Context(), tenant, 1); !errors.Is(err, fault.Internal) {
			t.Errorf("a row of another name, %q: %v", name, err)
		}
		m.put(t, func(tx store.Tx) error { return tx.Delete(append(keyRow(tenant, 1, wrapping), name...)) })
	}
	if _, err := m.ring.Version(t.Context(), tenant, 1); !errors.Is(err, fault.Internal) {
		t.Error("no row:", err)
	}
}

// A replica with an old configuration reports the missing key as soon as it asks the KMS again.
func TestAReplicaWithoutTheNewKeySaysWhichIsMissing(t *testing.T) {
	m := newMoving(t, 0)
	behind := m.open(t, m.former)
	behind.config.CacheTTL = time.Minute
	use := func() error { _, err := behind.Current(t.Context(), secondTenant); return err }
	if err := use(); err != nil {
		t.Fatal(err)
	}
	m.rewrap(t, m.ring, time.Time{})
	m.clock.Add(59)
	if err := use(); err != nil {
		t.Error("within the cache time:", err)
	}
	m.clock.Add(2)
	if err := use(); !errors.Is(err, fault.Unavailable) || !strings.Contains(err.Error(), m.current.ID()) || !strings.Contains(err.Error(), "kms.former") {
		t.Error("after it:", err)
	}
	keys := m.counts(t, behind, time.Time{})
	if len(keys.Keys) != 2 || keys.Keys[1] != (KMSKey{ID: m.current.ID(), State: KMSKeyUnknown, Sets: 4}) {
		t.Errorf("%+v", keys)
	}
}

func TestAKeyIsGivenUpOnlyWhenNothingIsUnderItAndThenForGood(t *testing.T) {
	m := newMoving(t, 0)
	giveUp := func(id string) error {
		return m.store.Update(t.Context(), func(tx store.Tx) error { return m.ring.GiveUp(tx, id) })
	}
	behind := m.open(t, m.former)
	late, err := behind.NewSet(t.Context(), "ten_dddddddddddddddddddddddddd", 1)
	if err != nil {
		t.Fatal(err)
	}
	back, err := m.open(t, m.former, m.current).Rewrap(t.Context(), m.now().Add(time.Hour))
	if err != nil || back.Err != nil || len(back.moves) != 4 {
		t.Fatal(err)
	}
	if err := giveUp(m.former.ID()); !errors.Is(err, fault.Conflict) {
		t.Error("while sets are under it:", err)
	}
	if err := giveUp(m.current.ID()); !errors.Is(err, fault.Conflict) {
		t.Error("the current one, while nothing is under it yet:", err)
	}
	m.moveSome(t, func(w wrappedKey) bool { return w.owner != secondTenant })
	if err := giveUp(m.former.ID()); !errors.Is(err, fault.Conflict) {
		t.Error("while one set is under it:", err)
	}
	m.rewrap(t, m.ring, time.Time{})
	if err := giveUp(m.current.ID()); !errors.Is(err, fault.Conflict) {
		t.Error("the current one:", err)
	}
	for range 2 {
		if err := giveUp(m.former.ID()); err != nil {
			t.Fatal(err)
		}
	}
	if keys := m.counts(t, m.ring, time.Time{}); keys.Keys[0].GivenUp || !keys.Keys[1].GivenUp {
		t.Errorf("%+v", keys)
	}
	rows := m.wrappedRows(t)
	if err := m.store.Update(t.Context(), late.Put); !errors.Is(err, fault.Unavailable) {
		t.Error("a new set under it:", err)
	}
	back.moves[0].from = wrappedKey{}
	if err := m.store.Update(t.Context(), func(tx store.Tx) error { _, err := back.Put(tx); return err }); !errors.Is(err, fault.Unavailable) {
		t.Error("moved back under it:", err)
	}
	if !maps.EqualFunc(rows, m.wrappedRows(t), bytes.Equal) {
		t.Error("rows changed")
	}
	if _, err := Open(t.Context(), m.store, m.former, Config{Previous: []KMS{m.current}}); !errors.Is(err, fault.Invalid) || !strings.Contains(fault.Message(err), "given up") {
		t.Error("named in kms.url again:", err)
	}
}
