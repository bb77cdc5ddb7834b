package transit

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/store"
)

func TestKeysAreListedOldestFirst(t *testing.T) {
	f := newFixture(t, time.Minute)
	f.create(f.b, "theirs", 30)
	var want []string
	for i := range 5 {
		f.mu.Lock()
		f.clock = f.clock.Add(time.Second)
		f.mu.Unlock()
		want = append(want, f.create(f.a, fmt.Sprint("key ", i), 0).ID)
	}
	for _, page := range []struct{ offset, limit, from, to int }{
		{0, 10, 0, 5}, {0, 2, 0, 2}, {2, 2, 2, 4}, {4, 2, 4, 5}, {5, 2, 5, 5}, {900, 2, 5, 5}, {1, int(^uint(0) >> 1), 1, 5},
	} {
		keys, total, err := f.Keys(t.Context(), f.a, page.offset, page.limit)
		must(t, err)
		var got []string
		for _, k := range keys {
			got = append(got, k.ID)
		}
		if total != 5 || keys == nil || !slices.Equal(got, want[page.from:page.to]) {
			t.Errorf("%+v: %v of %d", page, got, total)
		}
	}
	keys, _, err := f.Keys(t.Context(), f.a, 0, 1)
	must(t, err)
	k := keys[0]
	if k.Name != "key 0" || k.Version != 1 || k.RotationDays != 90 || k.Default || !k.CreatedAt.Equal(k.RotatedAt) || !k.NextRotation.Equal(k.CreatedAt.AddDate(0, 0, 90)) {
		t.Errorf("%+v", k)
	}
}

func TestKeysArePagedByACursor(t *testing.T) {
	f := newFixture(t, time.Minute)
	theirs := f.create(f.b, "theirs", 30)
	var want []string
	for i := range 5 {
		if i != 2 { // two keys have the same time
			f.advanceBy(time.Second)
		}
		want = append(want, f.create(f.a, fmt.Sprint("key ", i), 0).ID)
	}
	slices.Sort(want[1:3])
	for limit, pages := range map[int]int{1: 5, 2: 3, 4: 2, 5: 1, 100: 1} {
		var got []string
		n := 0
		for cursor := ""; ; {
			keys, next, err := f.KeysAfter(t.Context(), f.a, cursor, limit)
			must(t, err)
			for _, k := range keys {
				got = append(got, k.ID)
			}
			n++
			if cursor = next; next == "" {
				break
			}
		}
		if !slices.Equal(got, want) || n != pages {
			t.Errorf("pages of %d: %v on %d pages, want %v", limit, got, n, want)
		}
	}
	if keys, next, err := f.KeysAfter(t.Context(), f.a, want[4], 1); err != nil || len(keys) != 0 || next != "" {
		t.Errorf("after the last: %v %q %v", keys, next, err)
	}
	for _, bad := range []string{theirs.ID, authz.NewID(idPrefix), "x", strings.ToUpper(want[0])} {
		entries := f.leaves(f.a, func() {
			if keys, next, err := f.KeysAfter(t.Context(), f.a, bad, 1); !errors.Is(err, fault.Invalid) || keys != nil || next != "" {
				t.Errorf("%s: %v %v", bad, keys, err)
			}
		})
		if len(entries) != 0 { // the HTTP layer records invalid requests
			t.Error(entries)
		}
	}
	for _, limit := range []int{0, -1} {
		if _, _, err := f.KeysAfter(t.Context(), f.a, "", limit); !errors.Is(err, fault.Invalid) {
			t.Errorf("pages of %d: %v", limit, err)
		}
	}
	if _, _, err := f.Keys(t.Context(), f.a, -1, 1); !errors.Is(err, fault.Invalid) {
		t.Error(err)
	}
}

func TestAKeyTellsWhenItsVersionsWereMade(t *testing.T) {
	f := newFixture(t, time.Minute)
	k := f.create(f.a, "payments", 30)
	made := []time.Time{f.now()}
	for i := range 3 {
		f.advance(1)
		f.rotate(f.a, k.ID, i == 1)
		made = append(made, f.now())
	}
	is := func(when string, want ...time.Time) { // oldest first
		t.Helper()
		key, versions, err := f.Key(t.Context(), f.a, k.ID)
		must(t, err)
		if listed, _, err := f.Keys(t.Context(), f.a, 0, 1); err != nil || key != listed[0] {
			t.Errorf("%s: %+v, listed as %+v (%v)", when, key, listed, err)
		}
		for i, v := range versions {
			at := want[len(want)-1-i]
			if v.Number != key.Version-uint32(i) || v.Current != (i == 0) || !v.CreatedAt.Equal(at) {
				t.Errorf("%s: %+v, want %v", when, v, at)
			}
		}
		if len(versions) != len(want) {
			t.Errorf("%s: %d versions", when, len(versions))
		}
	}
	is("rotated", made...)
	entries := f.leaves(f.a, func() { is("again", made...) })
	if e := entries[0]; e.EventType != audit.KeyListed || e.Outcome != audit.Success || e.Resource.ID != k.ID || e.Attributes["count"] != "4" {
		t.Errorf("%+v", e)
	}
	f.advance(30)
	if n, err := f.RotateDue(t.Context()); n != 1 || err != nil {
		t.Fatal(n, err)
	}
	is("rotated since", append(made, f.now())...)
	for range MaxKeyVersions {
		f.rotate(f.a, k.ID, false)
	}
	key, versions, err := f.Key(t.Context(), f.a, k.ID)
	if err != nil || key.Version != 105 || len(versions) != MaxKeyVersions || versions[99].Number != 6 || !versions[99].CreatedAt.Equal(f.now()) {
		t.Errorf("%+v, the last of %d: %+v (%v)", key, len(versions), versions[len(versions)-1], err)
	}
	f.verify()
}

func TestAKeyThatIsNotThereIsOneCase(t *testing.T) {
	f := newFixture(t, time.Minute)
	own, foreign := f.create(f.a, "own", 30), f.create(f.b, "foreign", 30)
	for name, id := range map[string]string{
		"foreign": foreign.ID, "never existing": authz.NewID(idPrefix), "malformed": "x", "empty": "", "upper case": strings.ToUpper(own.ID),
		"of another kind": authz.NewID("cred"),
	} {
		entries := f.leaves(f.a, func() {
			if key, versions, err := f.Key(t.Context(), f.a, id); err != errNoKey || key != (Key{}) || versions != nil {
				t.Errorf("%s: %+v %v %v", name, key, versions, err)
			}
		})
		if len(entries) != 1 || entries[0].Outcome != audit.Denied || entries[0].Attributes["reason"] != reasonMissing || entries[0].EventType != audit.KeyListed {
			t.Errorf("%s: recorded as %+v", name, entries)
		}
	}
	weak := f.a
	weak.Scopes = []authz.Scope{authz.KeysWrite}
	if _, _, err := f.Key(t.Context(), weak, own.ID); !errors.Is(err, fault.Forbidden) {
		t.Error(err)
	}
	if _, _, err := f.KeysAfter(t.Context(), weak, "", 1); !errors.Is(err, fault.Forbidden) {
		t.Error(err)
	}
}

// Somebody who can write the database changes no time that is shown.
func TestAKeysTimesCannotBeChanged(t *testing.T) {
	for _, family := range []string{"transit/version/", "transit/key/"} {
		inBothStores(t, func(t *testing.T, f *fixture) {
			own := f.create(f.a, "own", 30)
			f.rotate(f.a, own.ID, false)
			f.rotate(f.a, own.ID, false)
			keys, values := f.rows(family)
			change := strings.NewReplacer("2026", "2025")
			f.tamper(func(tx store.Tx) error {
				for i := range keys {
					if err := tx.Put([]byte(keys[i]), []byte(change.Replace(values[i]))); err != nil {
						return err
					}
				}
				return nil
			})
			entries := f.leaves(f.a, func() {
				if key, versions, err := f.Key(t.Context(), f.a, own.ID); !f.isChanged(err) || key != (Key{}) || versions != nil {
					t.Errorf("a changed %s: %+v %v %v", family, key, versions, err)
				}
			})
			if !f.unbound { // server/gate records that a call met a row that somebody has changed
				if len(entries) != 0 {
					t.Errorf("a changed %s: recorded twice, as %+v", family, entries)
				}
				return
			}
			if len(entries) != 1 || entries[0].Outcome != audit.Failure || entries[0].Attributes["reason"] != reasonIntegrity {
				t.Errorf("a changed %s: recorded as %+v", family, entries)
			}
		})
	}
}

func TestATenantHasABoundedNumberOfKeys(t *testing.T) {
	f := newFixture(t, time.Minute)
	f.create(f.a, "one", 30)
	f.commit(func(tx store.Tx) error {
		for i := range MaxKeys - 1 {
			if err := tx.Put(keyKey(f.a.Tenant, fmt.Sprintf("row-%d", i)), []byte{0}); err != nil {
				return err
			}
		}
		return nil
	})
	entries := f.leaves(f.a, func() {
		if _, err := f.CreateKey(t.Context(), f.a, "one more", 30); !errors.Is(err, fault.Forbidden) || !strings.Contains(fault.Message(err), "1000 keys") {
			t.Error(err)
		}
	})
	if len(entries) != 1 || entries[0].Outcome != audit.Denied || entries[0].Attributes["reason"] != "limit" {
		t.Error(entries)
	}
	f.create(f.b, "another tenant's", 30)
	if _, total, err := f.Keys(t.Context(), f.a, 0, 10); err != nil || total != 1 {
		t.Error("damaged rows hide the others:", total, err)
	}
}

func TestARotatedKeyEncryptsWithItsNewVersionAndDecryptsAll(t *testing.T) {
	f := newFixture(t, time.Minute)
	k := f.create(f.a, "payments", 30)
	first := f.encrypt(f.a, k.ID, "first")
	f.advance(3)
	rotated, moved := f.rotate(f.a, k.ID, false)
	if rotated.Version != 2 || moved != 0 || !rotated.CreatedAt.Equal(k.CreatedAt) || !rotated.RotatedAt.Equal(f.now()) ||
		!rotated.NextRotation.Equal(f.now().AddDate(0, 0, 30)) || rotated.Name != "payments" {
		t.Fatalf("%+v, %d", rotated, moved)
	}
	second := f.encrypt(f.a, k.ID, "second")
	if first.KeyVersion != 1 || second.KeyVersion != 2 {
		t.Fatal(first.KeyVersion, second.KeyVersion)
	}
	f.mustOpen(f.a, k.ID, first, "first")
	f.mustOpen(f.a, k.ID, second, "second")
	again, err := f.Rewrap(t.Context(), f.a, k.ID, first)
	must(t, err)
	if again.KeyVersion != 2 || again.KeyID != k.ID {
		t.Fatal(again.KeyID, again.KeyVersion)
	}
	f.mustOpen(f.a, k.ID, again, "first")
	if again, err = f.Rewrap(t.Context(), f.a, "", first); err != nil || again.KeyVersion != 2 {
		t.Fatal("without naming the key:", again.KeyVersion, err)
	}
	f.verify()
}

func TestEncryptingAKeyAnewMovesAllItsVersionsToANewWrappingKey(t *testing.T) {
	f := newFixture(t, time.Minute)
	k, other := f.create(f.a, "payments", 30), f.create(f.a, "other", 30)
	ciphertexts := map[string]Ciphertext{"1": f.encrypt(f.a, k.ID, "1"), "other": f.encrypt(f.a, other.ID, "other")}
	for _, v := range []string{"2", "3"} {
		f.rotate(f.a, k.ID, false)
		ciphertexts[v] = f.encrypt(f.a, k.ID, v)
	}
	prefix := string(seedsPrefix(f.a.Tenant, k.ID))
	_, before := f.rows(prefix)

	entries := f.leaves(f.a, func() {
		rotated, moved := f.rotate(f.a, k.ID, true)
		if rotated.Version != 4 || moved != 3 {
			t.Fatalf("%+v, %d", rotated, moved)
		}
	})
	if len(entries) != 1 || entries[0].EventType != audit.KeyRotated || entries[0].Attributes["re_encrypted"] != "3" ||
		entries[0].Attributes["wrapping_version"] != "2" || entries[0].Attributes["key_version"] != "4" {
		t.Fatalf("%+v", entries)
	}
	keys, after := f.rows(prefix)
	var want []string
	for v := uint32(1); v <= 4; v++ {
		want = append(want, string(seedKey(f.a.Tenant, k.ID, v, 2)))
	}
	if !slices.Equal(keys, want) {
		t.Fatal(keys)
	}
	for _, blob := range before {
		if slices.Contains(after, blob) {
			t.Error("a seed was not encrypted anew")
		}
	}
	ciphertexts["4"] = f.encrypt(f.a, k.ID, "4")
	f.advance(1) // past the cache, so everything comes from the rows
	for data, c := range ciphertexts {
		f.mustOpen(f.a, c.KeyID, c, data)
	}
	// The rows under the old wrapping key are gone from the files too.
	must(t, f.db.raw.Scrubbed(t.Context()))
	for _, blob := range before {
		if f.inFiles(blob[13:45]) {
			t.Fatal("what lay under the old wrapping key is still in the files")
		}
	}
	f.rotate(f.a, k.ID, true)
	f.mustOpen(f.a, k.ID, ciphertexts["1"], "1")
	f.verify()
}

func TestConcurrentRotationsAndEncryptionsLoseNothing(t *testing.T) {
	f := newFixture(t, time.Minute)
	k, other := f.create(f.a, "payments", 30), f.create(f.a, "other", 30)
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() { f.rotate(f.a, k.ID, i%2 == 0) })
		wg.Go(func() { f.rotate(f.a, other.ID, i%2 == 1) })
		wg.Go(func() {
			for n := range 5 {
				data := fmt.Sprint(i, n)
				f.mustOpen(f.a, "", f.encrypt(f.a, k.ID, data), data)
			}
		})
	}
	wg.Wait()
	for _, id := range []string{k.ID, other.ID} {
		keys, _ := f.rows(string(seedsPrefix(f.a.Tenant, id)))
		if len(keys) != 5 {
			t.Errorf("%d seeds of 5 versions", len(keys))
		}
	}
	f.verify()
}

func TestAKeyIsRotatedByItsPeriod(t *testing.T) {
	f := newFixture(t, time.Minute)
	daily, yearly, theirs := f.create(f.a, "daily", 1), f.create(f.a, "yearly", 365), f.create(f.b, "daily", 1)
	if n, err := f.RotateDue(t.Context()); n != 0 || err != nil {
		t.Fatal(n, err)
	}
	f.advance(1)
	beforeA, beforeB := len(f.entries(f.a)), len(f.entries(f.b))
	if n, err := f.RotateDue(t.Context()); n != 2 || err != nil {
		t.Fatal(n, err)
	}
	for id, entries := range map[string][]audit.Entry{daily.ID: f.entries(f.a)[beforeA:], theirs.ID: f.entries(f.b)[beforeB:]} {
		if len(entries) != 1 || entries[0].EventType != audit.KeyRotated || entries[0].Resource.ID != id || entries[0].Actor.Type != string(authz.System) {
			t.Errorf("%+v", entries)
		}
	}
	if n, err := f.RotateDue(t.Context()); n != 0 || err != nil {
		t.Fatal("twice:", n, err)
	}
	keys, _, err := f.Keys(t.Context(), f.a, 0, 10)
	must(t, err)
	for _, k := range keys {
		if want := map[string]uint32{daily.ID: 2, yearly.ID: 1}[k.ID]; k.Version != want {
			t.Errorf("%s has version %d, want %d", k.Name, k.Version, want)
		}
	}
	due, _ := f.rows("transit/due/")
	if len(due) != 3 {
		t.Errorf("%d due rows of 3 keys", len(due))
	}
	f.verify()
}

func TestAKeyThatIsDueIsRotatedBeforeItEncrypts(t *testing.T) {
	f := newFixture(t, time.Minute)
	k := f.create(f.a, "daily", 1)
	first := f.encrypt(f.a, k.ID, "first")
	f.advance(400)
	entries := f.leaves(f.a, func() {
		c := f.encrypt(f.a, k.ID, "second")
		if c.KeyVersion != 2 {
			t.Fatal(c.KeyVersion)
		}
	})
	if len(entries) != 2 || entries[0].EventType != audit.KeyRotated || entries[0].Actor.Type != string(authz.System) ||
		entries[0].RequestID != "req" || entries[1].EventType != audit.DataEncrypted || entries[1].Attributes["key_version"] != "2" {
		t.Fatalf("%+v", entries)
	}
	f.mustOpen(f.a, k.ID, first, "first")
	if n, err := f.RotateDue(t.Context()); n != 0 || err != nil {
		t.Fatal("still in the index:", n, err)
	}
	f.advance(1)
	again, err := f.Rewrap(t.Context(), f.a, k.ID, first)
	if err != nil || again.KeyVersion != 3 {
		t.Fatal(again.KeyVersion, err)
	}
}

func TestADamagedDueKeyDoesNotKeepTheOthersFromRotating(t *testing.T) {
	inBothStores(t, testADamagedDueKey)
}

func testADamagedDueKey(t *testing.T, f *fixture) {
	bad, good := f.create(f.a, "bad", 1), f.create(f.a, "good", 1)
	f.tamper(func(tx store.Tx) error {
		stale := &namedKey{tenant: f.a.Tenant, id: authz.NewID(idPrefix), keyRow: keyRow{NextRotation: f.now()}}
		wrong := &namedKey{tenant: f.a.Tenant, id: good.ID, keyRow: keyRow{NextRotation: f.now()}}
		return errors.Join(tx.Put(keyKey(f.a.Tenant, bad.ID), []byte("damaged")),
			tx.Put(dueKey(stale), nil), tx.Put(dueKey(wrong), nil), tx.Put([]byte("transit/due/x"), nil))
	})
	if n, err := f.RotateDue(t.Context()); n != 0 || err != nil {
		t.Fatal("a row of the index alone rotated a key:", n, err)
	}
	f.advance(1)
	n, err := f.RotateDue(t.Context())
	if n != 1 || !f.isChanged(err) {
		t.Fatal(n, err)
	}
	due, _ := f.rows("transit/due/")
	if len(due) != 2+1 { // bad, good, and a malformed row that is never due
		t.Errorf("%q", due)
	}
}

func TestRotationsWaitForTheKMS(t *testing.T) {
	f := newFixture(t, 0)
	f.create(f.a, "daily", 1)
	f.create(f.a, "daily too", 1) // not tried, because its tenant's keys were unavailable
	f.create(f.b, "daily", 1)
	f.create(f.tenant(), "daily", 1) // not tried either: two tenants in a row are enough
	f.advance(1)
	f.kms.down.Store(true)
	f.kms.calls.Store(0)
	if n, err := f.RotateDue(t.Context()); n != 0 || !errors.Is(err, fault.Unavailable) || f.kms.calls.Load() != 2 {
		t.Fatal(n, f.kms.calls.Load(), err)
	}
	f.kms.down.Store(false)
	if n, err := f.RotateDue(t.Context()); n != 4 || err != nil {
		t.Fatal(n, err)
	}
}

func TestRotationsEndWithTheirContext(t *testing.T) {
	f := newFixture(t, 0)
	f.create(f.a, "daily", 1)
	f.create(f.b, "daily", 1)
	f.advance(1)
	ctx, end := context.WithCancel(t.Context())
	f.kms.asked = func() {
		f.db.views.Store(0) // first: nobody waits for this call once the context has ended
		end()
	}
	if n, err := f.RotateDue(ctx); n > 1 || !errors.Is(err, context.Canceled) {
		t.Fatal(n, err)
	}
	if n := f.db.views.Load(); n != 0 {
		t.Errorf("%d reads after the end", n)
	}
}

// A wrapping key that the KMS does not open looks like a KMS that is down, and stays so. Due keys
// of later tenants are rotated anyway.
func TestATenantWhoseKeysDoNotOpenDoesNotKeepTheOthersFromRotating(t *testing.T) {
	f := newFixture(t, 0)
	bad := f.tenant()
	f.create(bad, "daily", 1)
	f.create(bad, "daily too", 1)
	later := []authz.Principal{f.a, f.b}
	for _, p := range later {
		f.advanceBy(time.Second)
		f.create(p, "daily", 1)
	}
	f.commit(func(tx store.Tx) error {
		return tx.Put([]byte("key/"+string(bad.Tenant)+"/00000001/wrapping"), []byte("damaged"))
	})
	f.advance(2)
	f.kms.calls.Store(0)
	n, err := f.RotateDue(t.Context())
	if n != 2 || !errors.Is(err, fault.Unavailable) || f.kms.calls.Load() != 3 {
		t.Fatal(n, f.kms.calls.Load(), err)
	}
	for _, p := range later {
		keys, _, err := f.Keys(t.Context(), p, 0, 1)
		if err != nil || keys[0].Version != 2 {
			t.Error(keys, err)
		}
	}
}

func TestAKeyOfTooManyVersionsIsNotRotatedAnyMore(t *testing.T) {
	f := newFixture(t, time.Minute)
	k := f.create(f.a, "daily", 1)
	f.setVersion(k.ID, maxVersions-1)
	f.advance(1)
	if n, err := f.RotateDue(t.Context()); n != 1 || err != nil {
		t.Fatal(n, err)
	}
	f.advance(1)
	if n, err := f.RotateDue(t.Context()); n != 0 || err != nil {
		t.Fatal(n, err)
	}
	if due, _ := f.rows("transit/due/"); len(due) != 0 {
		t.Errorf("%q", due)
	}
	f.mustOpen(f.a, "", f.encrypt(f.a, k.ID, "data"), "data")
	entries := f.leaves(f.a, func() {
		if _, _, err := f.RotateKey(t.Context(), f.a, k.ID, false); !errors.Is(err, fault.Forbidden) {
			t.Fatal(err)
		}
	})
	if len(entries) != 1 || entries[0].Outcome != audit.Denied || entries[0].Attributes["reason"] != "limit" {
		t.Error(entries)
	}
}

// setVersion sets the version of a key, as if it had been rotated often.
func (f *fixture) setVersion(id string, version uint32) {
	f.t.Helper()
	f.commit(func(tx store.Tx) error {
		old, err := f.get(tx, f.a.Tenant, id)
		if err != nil {
			return err
		}
		next := *old
		next.Version = version
		return f.put(tx, old, &next)
	})
}

// A row that is older than the seeds must not cause a seed to be overwritten.
func TestARolledBackKeyOverwritesNoSeed(t *testing.T) {
	f := newFixture(t, time.Minute)
	k := f.create(f.a, "one", 30)
	f.rotate(f.a, k.ID, false)
	c := f.encrypt(f.a, k.ID, "second")
	f.setVersion(k.ID, 1)
	for _, rewrap := range []bool{false, true} {
		if _, _, err := f.RotateKey(t.Context(), f.a, k.ID, rewrap); !errors.Is(err, fault.Internal) {
			t.Errorf("encrypt anew %v: %v", rewrap, err)
		}
	}
	f.mustOpen(f.a, k.ID, c, "second")
}

func TestSignaturesVerifyForTheirTenantAcrossVersions(t *testing.T) {
	f := newFixture(t, time.Minute)
	data := []secret.Bytes{secret.Bytes("one"), secret.Bytes("two"), {}}
	k := f.create(f.a, "k", 30)
	old, err := f.Sign(t.Context(), f.a, data)
	must(t, err)
	f.rotate(f.a, k.ID, true) // creates new signing keys for the tenant
	current, err := f.Sign(t.Context(), f.a, data)
	must(t, err)
	public, err := f.PublicKeys(t.Context(), f.a)
	must(t, err)
	if len(public) != 2 || public[0].Version != 2 || public[0].ID != current[0].KeyID || public[1].ID != old[0].KeyID || old[0].KeyID == current[0].KeyID {
		t.Fatal("the keys that signed are not the ones that are published, newest first")
	}
	var s []Signed
	for i := range data {
		if !parsed(t, public[0]).Verify("", data[i], current[i].PQC) || !parsed(t, public[1]).Verify("", data[i], old[i].PQC) {
			t.Errorf("item %d does not verify with the public key alone", i)
		}
		s = append(s, Signed{data[i], old[i].PQC, old[i].HMAC}, Signed{data[i], current[i].PQC, current[i].HMAC})
	}
	good := len(s)
	s = append(s,
		Signed{data[1], old[0].PQC, old[0].HMAC},
		Signed{data[0], old[0].PQC, current[0].HMAC},
		Signed{data[0], current[0].PQC, old[0].HMAC},
		Signed{data[0], nil, old[0].HMAC},
		Signed{data[0], old[0].PQC, nil},
		Signed{data[0], flip(old[0].PQC, 0), old[0].HMAC},
		Signed{data[0], old[0].PQC, flip(old[0].HMAC, 68)},
		Signed{data[0], old[0].PQC, append([]byte{1, 0, 0, 0, 9}, old[0].HMAC[5:]...)},
		Signed{data[0], old[0].PQC, append([]byte{1, 0, 0, 0, 0}, old[0].HMAC[5:]...)},
		Signed{},
	)
	var valid []bool
	entries := f.leaves(f.a, func() {
		valid, err = f.Verify(t.Context(), f.a, s)
		must(t, err)
	})
	for i, v := range valid {
		if v != (i < good) {
			t.Errorf("item %d: %v", i, v)
		}
	}
	if entries[0].Attributes["count"] != "16" || entries[0].Attributes["failed"] != "10" {
		t.Errorf("%v", entries[0].Attributes)
	}
	valid, err = f.Verify(t.Context(), f.b, s[:2])
	must(t, err)
	if valid[0] || valid[1] {
		t.Error("another tenant's signatures verify")
	}
}

func parsed(t *testing.T, k PublicKey) *dualsig.PublicKey {
	t.Helper()
	key, err := dualsig.ParsePublicKey(k.Bytes)
	must(t, err)
	return key
}

// Replicas that find keys due at the same time rotate each key once. The replicas that lose report
// no error.
func TestReplicasRotateADueKeyOnce(t *testing.T) {
	f := newFixture(t, time.Minute)
	f.create(f.a, "daily", 1)
	f.create(f.a, "daily too", 1)
	f.advance(1)
	before := len(f.entries(f.a))
	var rotated atomic.Int64
	var wg sync.WaitGroup
	for range 4 {
		replica := New(f.db, f.guard, f.keys, f.now)
		wg.Go(func() {
			n, err := replica.RotateDue(t.Context())
			must(t, err)
			rotated.Add(int64(n))
		})
	}
	wg.Wait()
	if n := len(f.entries(f.a)) - before; n != 2 || rotated.Load() != 2 {
		t.Errorf("%d keys rotated, %d entries", rotated.Load(), n)
	}
	f.verify()
}
