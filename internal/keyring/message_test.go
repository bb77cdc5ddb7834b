package keyring

import (
	"bytes"
	"crypto/hkdf"
	"crypto/sha512"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

func TestTheTokenKeyIsTheSameAfterEveryStartAndNoOtherKey(t *testing.T) {
	f := newFixture(t, time.Minute)
	again, err := Open(t.Context(), f.store, f.kms, Config{})
	if err != nil {
		t.Fatal(err)
	}
	key := f.ring.TokenKey()
	if len(key) != 64 || !bytes.Equal(key, again.TokenKey()) || bytes.Equal(key, f.ring.APIKeyHash()) {
		t.Fatal("another token key")
	}
	// This is the derivation of docs/formats.md, with the frame written out.
	documented, err := hkdf.Key(sha512.New, f.ring.APIKeyHash(), nil, "\x00\x00\x00\x1blatticekeep/access-token/v1", 64)
	if err != nil || !bytes.Equal(key, documented) {
		t.Fatal("not the documented token key", err)
	}
	if other := newFixture(t, time.Minute).ring.TokenKey(); bytes.Equal(key, other) {
		t.Fatal("two deployments share a token key")
	}
}

func (f *fixture) current(t *testing.T) *Keys {
	t.Helper()
	keys, err := f.ring.Current(t.Context(), tenant)
	if err != nil {
		t.Fatal(err)
	}
	return keys
}

func (f *fixture) nextSet(t *testing.T, version uint32) *Keys {
	t.Helper()
	set, keys, err := f.ring.NextSet(t.Context(), tenant, version)
	if err != nil {
		t.Fatal(err)
	}
	f.put(t, set.Put)
	return keys
}

func TestAMessageKeyOpensOnlyForItsContextAndLivesAsLongAsItsSet(t *testing.T) {
	f := newFixture(t, time.Minute)
	keys := f.current(t)
	blob, err := keys.NewMessageKey("transit/a/1")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := keys.MessageKey("transit/a/2", blob); !errors.Is(err, fault.Internal) {
		t.Fatal("opened for another context:", err)
	}
	short, err := envelope.SealKey(keys.Wrapping, "transit/a/3", make([]byte, 32))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := keys.MessageKey("transit/a/3", short); !errors.Is(err, fault.Internal) {
		t.Fatal("a key of another size:", err)
	}
	first, err := keys.MessageKey("transit/a/1", blob)
	if err != nil {
		t.Fatal(err)
	}
	if second, err := f.current(t).MessageKey("transit/a/1", blob); err != nil || second != first {
		t.Fatal("parsed again within the time:", err)
	}
	f.clock.Add(61)
	if later, err := f.current(t).MessageKey("transit/a/1", blob); err != nil || later == first {
		t.Fatal("outlived the wrapping key it came out of:", err)
	}
}

func TestASetKeepsABoundedNumberOfMessageKeys(t *testing.T) {
	keys := newFixture(t, time.Minute).current(t)
	for i := range maxMessageKeys + 10 {
		context := fmt.Sprint("transit/a/", i)
		blob, err := keys.NewMessageKey(context)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := keys.MessageKey(context, blob); err != nil {
			t.Fatal(err)
		}
	}
	if n := len(keys.messages); n > maxMessageKeys {
		t.Fatal(n)
	}
}

func TestAMessageKeyMovesToTheNextSet(t *testing.T) {
	f := newFixture(t, time.Minute)
	old := f.current(t)
	blob, err := old.NewMessageKey("transit/a/1")
	if err != nil {
		t.Fatal(err)
	}
	next := f.nextSet(t, 2)
	moved, err := old.MoveMessageKey(next, "transit/a/1", blob)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := old.MoveMessageKey(next, "transit/a/2", blob); !errors.Is(err, fault.Internal) {
		t.Fatal("moved to another context:", err)
	}
	current := f.current(t)
	if current.Version != 2 || current.Signing.Public().ID() != next.Signing.Public().ID() {
		t.Fatal("the stored set is not the one that was returned")
	}
	if _, err := current.MessageKey("transit/a/1", blob); err == nil {
		t.Fatal("the old blob opens under the new wrapping key")
	}
	before, err := old.MessageKey("transit/a/1", blob)
	if err != nil {
		t.Fatal(err)
	}
	after, err := current.MessageKey("transit/a/1", moved)
	if err != nil {
		t.Fatal(err)
	}
	m, err := before.Seal(envelope.MessageContext{}, []byte("v"))
	if err != nil {
		t.Fatal(err)
	}
	if got, err := after.Open(envelope.MessageContext{}, m); err != nil || string(got) != "v" {
		t.Fatal("another key after the move:", err)
	}
}

func TestPublicKeysOfAllVersionsAreReadWithoutUnwrapping(t *testing.T) {
	f := newFixture(t, 0)
	f.nextSet(t, 2)
	f.nextSet(t, 3)
	want := map[uint32]*dualsig.PublicKey{}
	for v := uint32(1); v <= 3; v++ {
		keys, err := f.ring.Version(t.Context(), tenant, v)
		if err != nil {
			t.Fatal(err)
		}
		want[v] = keys.Signing.Public()
	}
	check := func() {
		t.Helper()
		f.kms.calls.Store(0)
		list, err := f.ring.PublicKeys(t.Context(), tenant)
		if err != nil || len(list) != 3 || f.kms.calls.Load() != 0 {
			t.Fatal(len(list), f.kms.calls.Load(), err)
		}
		for i, k := range list {
			if k.Version != uint32(3-i) || k.ID != want[k.Version].ID() || !bytes.Equal(k.Bytes, want[k.Version].Bytes()) {
				t.Errorf("at %d: version %d", i, k.Version)
			}
		}
	}
	check()

	if _, err := f.ring.PublicKeys(t.Context(), "ten_none"); !errors.Is(err, fault.NotFound) {
		t.Error(err)
	}
	f.put(t, func(tx store.Tx) error {
		b, err := tx.Get(publicRow(tenant, 1))
		if err != nil {
			return err
		}
		return tx.Put(publicRow(tenant, 3), b)
	})
	if _, err := f.ring.PublicKeys(t.Context(), tenant); !errors.Is(err, fault.Internal) {
		t.Error("a row of another version:", err)
	}
}

func TestPublicKeysThatAreNoneAreDamage(t *testing.T) {
	f := newFixture(t, time.Minute)
	row := publicRow(tenant, 1)
	for _, content := range [][]byte{{}, make([]byte, dualsig.PublicKeySize-1), make([]byte, dualsig.PublicKeySize+1)} {
		f.put(t, func(tx store.Tx) error { return tx.Put(row, f.ring.SealRow(row, content)) })
		if _, err := f.ring.PublicKeys(t.Context(), tenant); !errors.Is(err, fault.Internal) {
			t.Errorf("%d bytes: %v", len(content), err)
		}
	}
}
