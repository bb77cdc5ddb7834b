package vault

import (
	"bytes"
	"errors"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/vault/record"
)

func zeroed(values map[string]secret.Bytes) bool {
	for _, value := range values {
		if slices.ContainsFunc(value, func(b byte) bool { return b != 0 }) {
			return false
		}
	}
	return true
}

func TestGeneratedValuesFollowThoseBefore(t *testing.T) {
	f := newFixture(t, time.Minute)
	op := f.operator()
	var seen, given, made map[string]secret.Bytes
	generate := func(expect uint64, next map[string]string) *Owned {
		t.Helper()
		o, err := f.vault.Generate(t.Context(), op, uid, expect, f.desired(nil, "a"), func(previous map[string]secret.Bytes) (map[string]secret.Bytes, error) {
			seen, given, made = nil, previous, secrets(next)
			if previous != nil {
				seen = secrets(plain(previous))
				made["kept"] = previous["kept"] // produce may return a value that it got
			}
			return made, nil
		})
		must(t, err)
		if !zeroed(given) || !zeroed(made) {
			t.Fatal("values are left in memory")
		}
		return o
	}
	first := generate(0, map[string]string{"p": "1", "kept": "k"})
	if seen != nil || first.Version != 1 || f.last(f.a).EventType != audit.CredentialSealed {
		t.Fatal(plain(seen), first.Version, f.last(f.a).EventType)
	}
	second := generate(1, map[string]string{"p": "2"})
	if !maps.Equal(plain(seen), map[string]string{"p": "1", "kept": "k"}) || second.ID != first.ID || second.Version != 2 {
		t.Fatal(plain(seen), second)
	}
	if e := f.last(f.a); e.EventType != audit.CredentialRotated || second.Audit.Sequence != e.Sequence || second.Previous != nil {
		t.Fatalf("%+v", e)
	}
	generate(2, map[string]string{"p": "2"})
	if e := f.last(f.a); e.EventType != audit.CredentialReencrypted {
		t.Fatalf("the same values are recorded as %s", e.EventType)
	}
	got, err := f.vault.Read(t.Context(), f.a, ByID(first.ID))
	must(t, err)
	if !maps.Equal(plain(got.Values), map[string]string{"p": "2", "kept": "k"}) {
		t.Fatal(plain(got.Values))
	}
	f.advance(31 * day) // the credential has expired, and the object still exists
	generate(3, map[string]string{"p": "3"})
	if seen == nil {
		t.Fatal("an expired version was not opened")
	}
	f.verify()
}

func TestWhatIsLostIsGeneratedFromNothing(t *testing.T) {
	for name, c := range map[string]struct {
		lose   func(f *fixture, o *Owned) error
		failed bool // opening finds the damage and is recorded
	}{
		"deleted": {lose: func(f *fixture, o *Owned) error {
			system := f.a
			system.Kind = authz.System
			return f.vault.Delete(t.Context(), system, o.ID)
		}},
		"junk": {lose: func(f *fixture, o *Owned) error {
			f.tamper(func(tx store.Tx) error { return tx.Put(record.Key(f.a.Tenant, o.ID, 1), []byte("junk")) })
			return nil
		}},
		"a flipped byte": {failed: true, lose: func(f *fixture, _ *Owned) error {
			keys, records := f.rows("credential/")
			records[0][len(records[0])/3] ^= 1
			f.tamper(func(tx store.Tx) error { return tx.Put(keys[0], records[0]) })
			return nil
		}},
	} {
		f := newUnboundFixture(t, time.Minute)
		op := f.operator()
		o := f.generate(op, 0, 0, login)
		must(t, c.lose(f, o))
		called := false
		d := f.desired(nil, "a")
		d.Overlap = time.Hour
		again, err := f.vault.Generate(t.Context(), op, uid, 1, d, func(previous map[string]secret.Bytes) (map[string]secret.Bytes, error) {
			called = true
			if previous != nil {
				t.Errorf("%s: it was opened", name)
			}
			if e := f.last(f.a); c.failed && (e.Outcome != audit.Failure || e.Attributes[audit.AttributeReason] != reasonIntegrity) {
				t.Errorf("%s: recorded as %+v", name, e)
			}
			return secrets(map[string]string{"p": "new"}), nil
		})
		must(t, err)
		if e := f.last(f.a); !called || again.ID != o.ID || again.Version != 2 || again.Previous != nil || e.EventType != audit.CredentialSealed {
			t.Errorf("%s: %+v, recorded as %s", name, again, e.EventType)
		}
		if keys, _ := f.rows("former"); len(keys) != 0 {
			t.Errorf("%s: what is lost is kept: %q", name, keys)
		}
		f.verify()
	}
}

func TestAGenerationThatFailsDoesNothing(t *testing.T) {
	f := newFixture(t, 0)
	op := f.operator()
	f.generate(op, 0, 0, login)
	before := f.verify().Entries
	rows := func() int { keys, _ := f.rows(""); return len(keys) }
	had := rows()
	errNoEntropy := errors.New("no entropy")
	var given, made map[string]secret.Bytes
	fails := func(values map[string]string, err error) func(map[string]secret.Bytes) (map[string]secret.Bytes, error) {
		return func(previous map[string]secret.Bytes) (map[string]secret.Bytes, error) {
			given, made = previous, secrets(values)
			return made, err
		}
	}
	for name, c := range map[string]struct {
		expect  uint64
		produce func(map[string]secret.Bytes) (map[string]secret.Bytes, error)
		want    error
	}{
		"no values could be made":   {1, fails(login, errNoEntropy), errNoEntropy},
		"none were made":            {1, fails(nil, nil), fault.Invalid},
		"their keys are not":        {1, fails(map[string]string{"a b": "x"}, nil), fault.Invalid},
		"another version was meant": {2, nil, fault.Conflict},
		"the first was meant":       {0, nil, fault.Conflict},
	} {
		given, made = nil, nil
		o, err := f.vault.Generate(t.Context(), op, uid, c.expect, f.desired(nil, "a"), c.produce)
		if !errors.Is(err, c.want) || o != nil {
			t.Errorf("%s: %v", name, err)
		}
		if !zeroed(given) || !zeroed(made) {
			t.Errorf("%s: values are left in memory", name)
		}
	}
	f.kms.down.Store(true)
	if _, err := f.vault.Generate(t.Context(), op, uid, 1, f.desired(nil, "a"), nil); !errors.Is(err, fault.Unavailable) {
		t.Errorf("without the KMS: %v", err)
	}
	f.kms.down.Store(false)
	f.store.full.Store(true)
	if _, err := f.vault.Generate(t.Context(), op, uid, 1, f.desired(nil, "a"), nil); !errors.Is(err, fault.Unavailable) {
		t.Errorf("with a full disk: %v", err)
	}
	f.store.full.Store(false)
	if f.verify().Entries != before || rows() != had {
		t.Error("something was written")
	}
	weak := op
	weak.Scopes = []authz.Scope{authz.VaultRead}
	if _, err := f.vault.Generate(t.Context(), weak, uid, 1, f.desired(nil, "a"), nil); !errors.Is(err, fault.Forbidden) {
		t.Errorf("without the scope: %v", err)
	}
	if e := f.last(f.a); e.EventType != audit.CredentialSealed || e.Outcome != audit.Denied {
		t.Errorf("%+v", e)
	}
}

// However many replicas believe that they lead and start a rotation, only one rotation happens.
func TestARotationIsGeneratedOnce(t *testing.T) {
	f := newFixture(t, time.Minute)
	f.generate(f.operator(), 0, 0, map[string]string{"p": "old"})
	var won atomic.Int64
	var wg sync.WaitGroup
	d := f.desired(nil, "a")
	d.Overlap = time.Hour
	for range 5 {
		wg.Go(func() {
			o, err := f.vault.Generate(t.Context(), f.operator(), uid, 1, d, f.makes(map[string]string{"p": "new"}))
			switch {
			case err == nil:
				won.Add(1)
				if o.Previous == nil || o.Previous.Version != 1 {
					t.Error(o.Previous)
				}
			case !errors.Is(err, fault.Conflict):
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if keys, _ := f.rows("former/"); won.Load() != 1 || len(keys) != 1 {
		t.Fatal(won.Load(), len(keys))
	}
	f.verify()
}

// A deletion is final: a rotation that was under way restores neither the credential nor its
// previous version.
func TestWhatIsDeletedMeanwhileStaysDeleted(t *testing.T) {
	f := newFixture(t, time.Minute)
	o := f.generate(f.operator(), 0, 0, login)
	d := f.desired(nil, "a")
	d.Overlap = time.Hour
	_, err := f.vault.Generate(t.Context(), f.operator(), uid, 1, d, func(map[string]secret.Bytes) (map[string]secret.Bytes, error) {
		system := f.a
		system.Kind = authz.System
		return secrets(map[string]string{"p": "new"}), f.vault.Delete(t.Context(), system, o.ID)
	})
	if !errors.Is(err, fault.Conflict) {
		t.Fatal(err)
	}
	for _, prefix := range []string{"credential/", "former"} {
		if keys, _ := f.rows(prefix); len(keys) != 0 {
			t.Errorf("%q", keys)
		}
	}
	f.verify()
}

func TestAnObjectsValuesAreReadForItsTarget(t *testing.T) {
	f := newUnboundFixture(t, 0)
	op := f.operator()
	o := f.generate(op, 0, 0, login)
	values, err := f.vault.UnsealOwned(t.Context(), op, uid, 1)
	must(t, err)
	if !maps.Equal(plain(values), login) {
		t.Fatal(plain(values))
	}
	e := f.last(f.a)
	if e.EventType != audit.CredentialUnsealed || e.Outcome != audit.Success || e.Resource.ID != o.ID || e.Actor.ID != uid ||
		e.Attributes["purpose"] != "target" || e.Attributes[audit.AttributeVersion] != "1" {
		t.Fatalf("%+v", e)
	}
	f.generate(op, 1, time.Hour, map[string]string{"p": "2"})
	entries := f.verify().Entries
	refused := func(when string, version uint64, want error) {
		t.Helper()
		if values, err := f.vault.UnsealOwned(t.Context(), op, uid, version); !errors.Is(err, want) || values != nil {
			t.Errorf("%s: %v", when, err)
		}
	}
	refused("the previous version", 1, fault.Conflict)
	refused("a version to come", 3, fault.Conflict)
	f.kms.down.Store(true)
	refused("without the KMS", 2, fault.Unavailable)
	f.kms.down.Store(false)
	f.store.full.Store(true)
	refused("with a full disk", 2, fault.Unavailable)
	f.store.full.Store(false)
	if f.verify().Entries != entries {
		t.Error("something was recorded")
	}
	opens := f.opens.Load()
	weak := op
	weak.Scopes = nil
	if _, err := f.vault.UnsealOwned(t.Context(), weak, uid, 2); !errors.Is(err, fault.Forbidden) || f.opens.Load() != opens {
		t.Error("without the scope:", err)
	}
	f.advance(30 * day)
	refused("when it has expired", 2, fault.Forbidden)
	if e := f.last(f.a); e.EventType != audit.CredentialUnsealed || e.Outcome != audit.Denied || e.Attributes[audit.AttributeReason] != reasonExpired {
		t.Errorf("%+v", e)
	}
	f.advance(-day)
	keys, records := f.rows("credential/")
	records[0][len(records[0])/3] ^= 1
	f.tamper(func(tx store.Tx) error { return tx.Put(keys[0], records[0]) })
	refused("when it is damaged", 2, fault.NotFound)
	if e := f.last(f.a); e.EventType != audit.CredentialUnsealed || e.Outcome != audit.Failure || e.Attributes[audit.AttributeReason] != reasonIntegrity {
		t.Errorf("%+v", e)
	}
	f.tamper(func(tx store.Tx) error { return tx.Delete(keys[0]) })
	refused("when it is missing", 2, fault.NotFound)
}

// When the log fails between the check and the entry, no values leave the vault.
func TestAReadForATargetThatCannotBeRecordedIsNone(t *testing.T) {
	f := newFixture(t, time.Minute)
	f.generate(f.operator(), 0, 0, login)
	opener := f.vault.opener
	var opened map[string]secret.Bytes
	f.vault.opener = func(r *record.Record, wrapping, signing *keyring.Keys) (map[string]secret.Bytes, error) {
		f.store.full.Store(true)
		values, err := opener(r, wrapping, signing)
		opened = values
		return values, err
	}
	values, err := f.vault.UnsealOwned(t.Context(), f.operator(), uid, 1)
	if !errors.Is(err, fault.Unavailable) || values != nil || len(opened) == 0 || !zeroed(opened) {
		t.Fatal(err)
	}
}

func TestSealingKeysAreCountedByWhatIsHeld(t *testing.T) {
	f := newFixture(t, time.Minute)
	apply := func(tenant authz.TenantID, id string, expect uint64, key string) {
		t.Helper()
		op, d := f.operator(), f.desired(login, "a")
		op.Tenant, op.ID, d.SealingKey = tenant, id, key
		_, err := f.vault.Apply(t.Context(), op, id, expect, d)
		must(t, err)
	}
	apply(f.a.Tenant, uid, 0, "k1")
	apply(f.a.Tenant, uid, 1, "k2")
	apply(f.a.Tenant, "second", 0, "k1")
	apply(f.b.Tenant, "third", 0, "k1")
	apply(f.b.Tenant, "generated", 0, "")
	apply(f.b.Tenant, "released", 0, "k3")
	released := f.operator()
	released.Tenant = f.b.Tenant
	must(t, f.end(released, "released", false))
	use, err := f.vault.SealingKeyUse(t.Context())
	must(t, err)
	if want := (map[string]int{"k1": 2, "k2": 1}); !maps.Equal(use, want) {
		t.Errorf("%v, want %v", use, want)
	}
	var row []byte
	f.tamper(func(tx store.Tx) (err error) {
		row, err = tx.Get(ownedKey(f.a.Tenant, uid))
		row = bytes.Clone(row)
		return errors.Join(err, tx.Delete(ownedKey(f.a.Tenant, uid)))
	})
	if use, err := f.vault.SealingKeyUse(t.Context()); !state.IsRefused(err) {
		t.Errorf("with a row that somebody else removed: %v, %v", use, err)
	}
	f.tamper(func(tx store.Tx) error { return tx.Put(ownedKey(f.a.Tenant, uid), row) })
	f.commit(func(tx store.Tx) error { return tx.Put(ownedKey(f.b.Tenant, "damaged"), []byte("junk")) })
	if use, err := f.vault.SealingKeyUse(t.Context()); !errors.Is(err, fault.Internal) {
		t.Errorf("with a damaged row: %v, %v", use, err)
	}
}
