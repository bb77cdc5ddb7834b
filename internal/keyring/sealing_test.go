package keyring

import (
	"bytes"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// contentOf returns the content of a new key's row.
func contentOf(t *testing.T, r *Ring, key *NewSealingKey) (row sealingRow) {
	t.Helper()
	b, err := r.OpenRow(sealingKeyRow(key.ID), key.row)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, &row); err != nil {
		t.Fatal(err)
	}
	return row
}

// plainRow returns a row without its MAC.
func plainRow(t *testing.T, row sealingRow) []byte {
	t.Helper()
	b, err := json.Marshal(row)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func (f *fixture) sealingKey(t *testing.T) *NewSealingKey {
	t.Helper()
	key, err := f.ring.NewSealingKey(t.Context(), envelope.SuiteMLKEM768X25519)
	if err != nil {
		t.Fatal(err)
	}
	f.put(t, key.Put)
	f.clock.Add(1)
	return key
}

func (f *fixture) states(t *testing.T) string {
	t.Helper()
	keys, err := f.ring.SealingKeys(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var states []string
	for _, k := range keys {
		states = append(states, string(k.State))
		if k.RetiredAt.IsZero() != (k.State != SealingKeyRetired) || k.CreatedAt.IsZero() || len(k.ID) != 64 || k.Suite == "" {
			t.Errorf("key %+v", k)
		}
	}
	return strings.Join(states, " ")
}

func (f *fixture) retire(t *testing.T, id string) {
	t.Helper()
	c, err := f.ring.RetireSealingKey(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	f.put(t, c.Put)
}

func TestARetiredSealingKeyIsArchivedAndCanBeRestored(t *testing.T) {
	f := newFixture(t, time.Minute)
	first, second := f.sealingKey(t), f.sealingKey(t)
	third := f.sealingKey(t)
	if got := f.states(t); got != "current earlier earlier" {
		t.Fatal(got)
	}
	keys, err := f.ring.SealingKeys(t.Context())
	if err != nil || keys[0].ID != third.ID || keys[1].ID != second.ID || keys[2].ID != first.ID {
		t.Fatalf("not the newest first: %v %v", keys, err)
	}
	before, err := f.ring.SealingKey(t.Context(), first.ID) // puts the key into the cache
	if err != nil {
		t.Fatal(err)
	}
	f.retire(t, first.ID)
	if got := f.states(t); got != "current earlier retired" {
		t.Fatal(got)
	}
	if _, err := f.ring.SealingKey(t.Context(), first.ID); !errors.Is(err, ErrRetired) || fault.Of(err) != fault.NotFound ||
		!strings.Contains(fault.Message(err), "retired") {
		t.Fatalf("a retired key: %v", err)
	}
	if _, err := f.ring.SealingKey(t.Context(), strings.Repeat("0", 64)); errors.Is(err, ErrRetired) || fault.Of(err) != fault.NotFound {
		t.Fatalf("an unknown key: %v", err)
	}
	f.clock.Add(10)
	again, err := f.ring.RetireSealingKey(t.Context(), first.ID)
	if err != nil || again.Changes() || f.now().Sub(again.Key.RetiredAt) < 10*time.Second {
		t.Fatalf("retired twice: %+v %v", again, err)
	}
	f.put(t, again.Put)
	restored, err := f.ring.RestoreSealingKey(t.Context(), first.ID)
	if err != nil || !restored.Changes() || restored.Key.State != SealingKeyEarlier {
		t.Fatalf("restored: %+v %v", restored, err)
	}
	f.put(t, restored.Put)
	after, err := f.ring.SealingKey(t.Context(), first.ID)
	if err != nil || after.Public().ID() != before.Public().ID() {
		t.Fatal(err)
	}
	if c, err := f.ring.RestoreSealingKey(t.Context(), third.ID); err != nil || c.Changes() || c.Key.State != SealingKeyCurrent {
		t.Fatalf("restoring the current key: %+v %v", c, err)
	}
}

func TestOnlyKeysOutOfUseAreRetired(t *testing.T) {
	f := newFixture(t, time.Minute)
	first := f.sealingKey(t)
	if _, err := f.ring.RetireSealingKey(t.Context(), first.ID); fault.Of(err) != fault.Conflict {
		t.Fatalf("the current key: %v", err)
	}
	if _, err := f.ring.RetireSealingKey(t.Context(), strings.Repeat("0", 64)); fault.Of(err) != fault.NotFound {
		t.Fatalf("no key: %v", err)
	}
	if _, err := f.ring.RestoreSealingKey(t.Context(), ""); fault.Of(err) != fault.NotFound {
		t.Fatalf("no id: %v", err)
	}
	second := f.sealingKey(t)
	retire, err := f.ring.RetireSealingKey(t.Context(), first.ID)
	if err != nil {
		t.Fatal(err)
	}
	// Meanwhile the key has become the current one again, as after a restored backup.
	f.put(t, func(tx store.Tx) error { return tx.Put(currentSealingRow, first.current) })
	if err := f.store.Update(t.Context(), retire.Put); fault.Of(err) != fault.Conflict {
		t.Fatalf("retired although it is current: %v", err)
	}
	f.put(t, func(tx store.Tx) error { return tx.Put(currentSealingRow, second.current) })
	f.put(t, retire.Put)
	if err := f.store.Update(t.Context(), retire.Put); fault.Of(err) != fault.Conflict {
		t.Fatalf("a change that was made already: %v", err)
	}
}

func TestOfTwoNewSealingKeysOneIsPublished(t *testing.T) {
	f := newFixture(t, time.Minute)
	first := f.sealingKey(t)
	var made []*NewSealingKey
	for range 2 {
		key, err := f.ring.NewSealingKey(t.Context(), envelope.SuiteMLKEM768X25519)
		if err != nil {
			t.Fatal(err)
		}
		made = append(made, key)
	}
	f.put(t, func(tx store.Tx) error { return made[0].PutAfter(tx, first.ID) })
	err := f.store.Update(t.Context(), func(tx store.Tx) error { return made[1].PutAfter(tx, first.ID) })
	if fault.Of(err) != fault.Conflict {
		t.Fatal(err)
	}
	if got := f.states(t); got != "current earlier" {
		t.Fatal(got)
	}
}

// An attacker who can write the store but has no key can neither retire a key unseen nor restore a
// retired one.
func TestTheStateOfASealingKeyCannotBeForged(t *testing.T) {
	f := newFixture(t, time.Minute)
	first := f.sealingKey(t)
	f.sealingKey(t)
	get := func() (b []byte) {
		t.Helper()
		err := f.store.View(t.Context(), func(r store.Reader) error {
			row, err := r.Get(sealingKeyRow(first.ID))
			b = bytes.Clone(row)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	if _, err := f.ring.SealingKey(t.Context(), first.ID); err != nil { // in the cache, which must not help the attacker
		t.Fatal(err)
	}
	inUse := contentOf(t, f.ring, first)
	f.retire(t, first.ID)
	stored := get()
	var retired sealingRow
	if err := json.Unmarshal(stored[rowMACSize:], &retired); err != nil {
		t.Fatal(err)
	}
	withoutTime := retired
	withoutTime.RetiredAt = time.Time{}
	retiredPlain := inUse
	retiredPlain.RetiredAt = f.now()
	for name, row := range map[string][]byte{
		"restored under the old MAC":          append(bytes.Clone(stored[:rowMACSize]), plainRow(t, withoutTime)...),
		"restored without a MAC":              plainRow(t, withoutTime),
		"retired without a MAC":               plainRow(t, retiredPlain),
		"retired under the MAC of the former": append(bytes.Clone(first.row[:rowMACSize]), plainRow(t, retiredPlain)...),
		"cut":                                 stored[:len(stored)-1],
		"empty":                               {},
	} {
		f.put(t, func(tx store.Tx) error { return tx.Put(sealingKeyRow(first.ID), row) })
		if _, err := f.ring.SealingKey(t.Context(), first.ID); !errors.Is(err, fault.Internal) {
			t.Errorf("%s: %v", name, err)
		}
	}
	f.put(t, func(tx store.Tx) error { return tx.Put(sealingKeyRow(first.ID), stored) })
	if _, err := f.ring.SealingKey(t.Context(), first.ID); !errors.Is(err, ErrRetired) {
		t.Fatal(err)
	}
}

func TestRetiringNeedsTheKMSAndSurvivesItsReturn(t *testing.T) {
	f := newFixture(t, 0)
	first := f.sealingKey(t)
	f.sealingKey(t)
	f.kms.down.Store(true)
	if _, err := f.ring.RetireSealingKey(t.Context(), first.ID); fault.Of(err) != fault.Unavailable {
		t.Fatal(err)
	}
	if keys, err := f.ring.SealingKeys(t.Context()); err != nil || slices.ContainsFunc(keys, func(k SealingKeyInfo) bool { return k.State == SealingKeyRetired }) {
		t.Fatalf("%v %v", keys, err)
	}
	f.kms.down.Store(false)
	f.retire(t, first.ID)
}

// An attacker who can write the store can put back the name of an earlier key. It is not published
// once it is retired.
func TestARetiredKeyIsNotPublished(t *testing.T) {
	f := newFixture(t, time.Minute)
	first := f.sealingKey(t)
	if _, err := f.ring.SealingDocument(t.Context()); err != nil { // puts the document into the cache
		t.Fatal(err)
	}
	f.sealingKey(t)
	f.retire(t, first.ID)
	f.put(t, func(tx store.Tx) error { return tx.Put(currentSealingRow, first.current) })
	_, err := f.ring.SealingDocument(t.Context())
	if !errors.Is(err, ErrRetired) || fault.Of(err) != fault.Internal || !strings.Contains(fault.Message(err), "latticekeep sealing-key rotate") {
		t.Errorf("published: %v", err)
	}
	if id, err := f.ring.CurrentSealingKey(t.Context()); err != nil || id != first.ID {
		t.Error(id, err)
	}
	if got := f.states(t); got != "earlier retired" {
		t.Error(got)
	}
	third, err := f.ring.NewSealingKey(t.Context(), envelope.SuiteMLKEM768X25519)
	if err != nil {
		t.Fatal(err)
	}
	f.put(t, func(tx store.Tx) error { return third.PutAfter(tx, first.ID) })
	if document, err := f.ring.SealingDocument(t.Context()); err != nil || document.Key().ID() != third.ID {
		t.Error("the remedy does not help:", err)
	}
}
