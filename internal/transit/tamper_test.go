package transit

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
)

func flip(b []byte, i int) []byte {
	b = bytes.Clone(b)
	b[i] ^= 1
	return b
}

func TestAChangedByteOfACiphertextFails(t *testing.T) {
	f := newFixture(t, time.Minute)
	c := f.encrypt(f.a, "", "data")
	for name, part := range map[string]func(*Ciphertext) *[]byte{
		"KEM":   func(c *Ciphertext) *[]byte { return &c.KEM },
		"nonce": func(c *Ciphertext) *[]byte { return &c.Nonce },
		"data":  func(c *Ciphertext) *[]byte { return &c.Data },
	} {
		var batch []Ciphertext
		for i := 0; i < len(*part(&c)); i += 1 + i/40 { // every byte of the short parts and the header, and many of the rest
			changed := c
			*part(&changed) = flip(*part(&c), i)
			batch = append(batch, changed)
		}
		for _, resized := range [][]byte{nil, (*part(&c))[1:], append(bytes.Clone(*part(&c)), 0)} {
			changed := c
			*part(&changed) = resized
			batch = append(batch, changed)
		}
		for n := 0; n < len(batch); n += MaxItems {
			some := batch[n:min(n+MaxItems, len(batch))]
			opened, err := f.Decrypt(t.Context(), f.a, "", some)
			must(t, err)
			for i, o := range opened {
				if o.Err != ErrDecrypt || o.Data != nil {
					t.Errorf("%s: change %d opened (%v)", name, n+i, o.Err)
				}
			}
		}
	}
	f.mustOpen(f.a, "", c, "data")
}

func TestACiphertextOpensOnlyForItsTenantAndKey(t *testing.T) {
	f := newFixture(t, time.Minute)
	one, two := f.create(f.a, "one", 30), f.create(f.a, "two", 30)
	c := f.encrypt(f.a, one.ID, "data")
	d := f.encrypt(f.a, one.ID, "other")
	f.encrypt(f.b, "", "so that the other tenant has keys")
	f.mustNotOpen(f.b, "", c, "another tenant")
	f.mustNotOpen(f.a, two.ID, c, "another key named")
	for name, change := range map[string]func(c *Ciphertext){
		"another key in the header": func(c *Ciphertext) {
			id, ok := authz.IDBytes(idPrefix, two.ID)
			if !ok {
				t.Fatal(two.ID)
			}
			copy(c.Data[1:], id[:])
		},
		"another version in the header":  func(c *Ciphertext) { c.Data[1+idSize+3]++ },
		"KEM of another":                 func(c *Ciphertext) { c.KEM = d.KEM },
		"nonce of another":               func(c *Ciphertext) { c.Nonce = d.Nonce },
		"salt and commitment of another": func(c *Ciphertext) { copy(c.Data[1+idSize+4:headerSize], d.Data[1+idSize+4:]) },
		"signature of another":           func(c *Ciphertext) { copy(c.Data[headerSize:], d.Data[headerSize:headerSize+dualsig.DualSize]) },
		"ciphertext of another":          func(c *Ciphertext) { copy(c.Data[headerSize+dualsig.DualSize:], d.Data[headerSize+dualsig.DualSize:]) },
		"signed by a version of keys to come": func(c *Ciphertext) {
			binary.BigEndian.PutUint32(c.Data[headerSize+1:], 2)
		},
		"signed by version zero": func(c *Ciphertext) { binary.BigEndian.PutUint32(c.Data[headerSize+1:], 0) },
	} {
		changed := Ciphertext{KEM: c.KEM, Nonce: c.Nonce, Data: bytes.Clone(c.Data)}
		change(&changed)
		f.mustNotOpen(f.a, "", changed, name)
	}
	f.mustOpen(f.a, one.ID, c, "data")
}

// Every combination of the two signatures, valid or not: a ciphertext opens only when both are
// valid. The forgers have the public key and one of the tenant's secrets.
func TestBothSignaturesMustHoldBeforeAnythingIsDecrypted(t *testing.T) {
	f := newFixture(t, time.Minute)
	c := f.encrypt(f.a, "", "data")
	s, err := c.parse()
	must(t, err)
	signed, err := s.signed(f.a.Tenant)
	must(t, err)
	keys, err := f.keys.Current(t.Context(), f.a.Tenant)
	must(t, err)
	again, err := keys.Signing.Sign(messageContext, signed)
	must(t, err)
	elsewhere, err := keys.Signing.Sign("latticekeep/record/v1", signed)
	must(t, err)
	split := 1 + 4 + dualsig.SignatureSize
	for name, signature := range map[string][]byte{
		"ML-DSA-65 changed":       flip(s.signature, 5),
		"MAC changed":             flip(s.signature, len(s.signature)-1),
		"both changed":            flip(flip(s.signature, 5), len(s.signature)-1),
		"MAC of another":          append(bytes.Clone(s.signature[:split]), again[split:]...),
		"ML-DSA-65 of another":    append(bytes.Clone(again[:split]), s.signature[split:]...),
		"made for another use":    elsewhere,
		"nothing but the version": append([]byte{1, 0, 0, 0, 1}, make([]byte, dualsig.DualSize-5)...),
	} {
		forged := Ciphertext{KEM: c.KEM, Nonce: c.Nonce, Data: bytes.Clone(c.Data)}
		copy(forged.Data[headerSize:], signature)
		f.mustNotOpen(f.a, "", forged, name)
	}
	good := Ciphertext{KEM: c.KEM, Nonce: c.Nonce, Data: bytes.Clone(c.Data)}
	copy(good.Data[headerSize:], again)
	f.mustOpen(f.a, "", good, "data")
}

// An attacker with the encryption key but not the signing keys cannot make a ciphertext that opens.
func TestACiphertextThatNobodySignedDoesNotOpen(t *testing.T) {
	f := newFixture(t, time.Minute)
	k := f.create(f.a, "one", 30)
	keys, err := f.current(t.Context(), f.a.Tenant)
	must(t, err)
	key, seed, err := f.lookup(t.Context(), f.a.Tenant, k.ID)
	must(t, err)
	kem, err := keys.messageKey(t.Context(), key.id, seed)
	must(t, err)
	stranger, err := dualsig.NewKey(1, bytes.Repeat([]byte{1}, dualsig.SeedSize), bytes.Repeat([]byte{2}, dualsig.MACKeySize))
	must(t, err)
	for name, signing := range map[string]*dualsig.Key{"a stranger": stranger, "the tenant": keys.Signing} {
		c, err := (&sealingKey{f.a.Tenant, k.ID, 1, kem, signing}).seal([]byte("data"))
		must(t, err)
		if opened := f.decrypt(f.a, "", c).Err == nil; opened != (name == "the tenant") {
			t.Errorf("signed by %s: opened %v", name, opened)
		}
	}
}

// A row that was moved between tenants, keys or versions opens nothing.
func TestRowsCannotBeMoved(t *testing.T) {
	inBothStores(t, testRowsCannotBeMoved)
}

func testRowsCannotBeMoved(t *testing.T, f *fixture) {
	k, other := f.create(f.a, "one", 30), f.create(f.b, "theirs", 30)
	c := f.encrypt(f.a, k.ID, "data")
	f.rotate(f.a, k.ID, false)
	second := f.encrypt(f.a, k.ID, "second")
	move := func(from, to []byte) {
		f.tamper(func(tx store.Tx) error {
			b, err := tx.Get(from)
			if err != nil || b == nil {
				return fmt.Errorf("no row: %w", err)
			}
			return tx.Put(to, bytes.Clone(b))
		})
	}
	f.advance(1) // past the cache
	move(seedKey(f.a.Tenant, k.ID, 1, 1), seedKey(f.a.Tenant, k.ID, 2, 1))
	f.mustNotOpen(f.a, "", second, "version 1 in the place of version 2")
	f.mustOpen(f.a, "", c, "data")
	move(seedKey(f.a.Tenant, k.ID, 1, 1), seedKey(f.b.Tenant, k.ID, 1, 1))
	f.mustNotOpen(f.b, "", c, "a seed of another tenant")
	move(keyKey(f.a.Tenant, k.ID), keyKey(f.b.Tenant, k.ID))
	if _, err := f.Encrypt(t.Context(), f.b, k.ID, make([]secret.Bytes, 1)); !f.isChanged(err) {
		t.Error("a key of another tenant encrypts:", err)
	}
	move(keyKey(f.a.Tenant, k.ID), keyKey(f.b.Tenant, other.ID))
	keys, total, err := f.Keys(t.Context(), f.b, 0, 10)
	if total != 0 || f.unbound && err != nil || !f.unbound && !f.isChanged(err) {
		t.Errorf("listed %v (%v)", keys, err)
	}
}

// A row of one key or of an earlier version of the tenant's keys that somebody has put back, changed
// or removed keeps the ciphertexts that need it from opening, and no other.
func TestAChangedRowStopsOnlyWhatNeedsIt(t *testing.T) {
	f := newFixture(t, 0)
	k, other := f.create(f.a, "one", 30), f.create(f.a, "other", 30)
	c, beside := f.encrypt(f.a, k.ID, "data"), f.encrypt(f.a, other.ID, "beside")
	before, values := f.rows("transit/seed/" + string(f.a.Tenant) + "/" + k.ID + "/")
	f.rotate(f.a, k.ID, true)
	for what, row := range map[string]struct {
		key, value   string // no value: the row is removed
		needs, stays Ciphertext
		text         string
	}{
		"a seed put back under the earlier wrapping key": {before[0], values[0], c, beside, "data"},
		"a removed seed": {string(seedKey(f.a.Tenant, k.ID, 1, 2)), "", c, beside, "data"},
		"a changed seed": {string(seedKey(f.a.Tenant, k.ID, 1, 2)), values[0], c, beside, "data"},
		"earlier keys":   {"key/" + string(f.a.Tenant) + "/00000001/mac", "junk", beside, f.encrypt(f.a, k.ID, "beside"), "beside"},
	} {
		put := func(value string) {
			f.tamper(func(tx store.Tx) error {
				if value == "" {
					return tx.Delete([]byte(row.key))
				}
				return tx.Put([]byte(row.key), []byte(value))
			})
		}
		_, was := f.rows(row.key)
		put(row.value)
		entries := f.leaves(f.a, func() {
			opened, err := f.Decrypt(t.Context(), f.a, "", []Ciphertext{row.needs, row.stays})
			must(t, err)
			if opened[0].Err != ErrDecrypt || opened[0].Data != nil || opened[1].Err != nil || string(opened[1].Data) != "beside" {
				t.Errorf("%s: %v, %v", what, opened[0].Err, opened[1].Err)
			}
		})
		if len(entries) != 1 || entries[0].Outcome != audit.Failure || entries[0].Attributes[audit.AttributeReason] != reasonIntegrity {
			t.Errorf("%s: recorded as %+v", what, entries)
		}
		if len(f.watch.Refused()) == 0 {
			t.Errorf("%s: the state reports nothing", what)
		}
		put(strings.Join(was, ""))
		f.mustOpen(f.a, "", row.needs, row.text)
	}
}

// A tenant's keys that somebody has changed are refused like every other changed row, and are no
// defect of the service.
func TestChangedKeysOfATenantAreRefused(t *testing.T) {
	for _, purpose := range []string{"wrapping", "signing", "mac"} {
		for what, value := range map[string][]byte{"changed": []byte("junk"), "removed": nil} {
			f := newFixture(t, 0)
			f.encrypt(f.a, "", "data")
			f.tamper(func(tx store.Tx) error {
				key := []byte("key/" + string(f.a.Tenant) + "/00000001/" + purpose)
				if value == nil {
					return tx.Delete(key)
				}
				return tx.Put(key, value)
			})
			if _, err := f.Encrypt(t.Context(), f.a, "", make([]secret.Bytes, 1)); !state.IsRefused(err) {
				t.Errorf("%s, %s: %v", purpose, what, err)
			}
			f.encrypt(f.b, "", "another tenant's")
		}
	}
}

// Every failure costs the same reads, the same KMS calls and the same work. So a caller cannot tell
// what is wrong, or whether a key exists.
func TestWhatDoesNotDecryptCannotBeToldApart(t *testing.T) {
	f := newFixture(t, 0) // without a cache, every unwrapping is a call
	c := f.encrypt(f.a, "", "data")
	foreign := f.encrypt(f.b, "", "data")
	unknown := Ciphertext{KEM: c.KEM, Nonce: c.Nonce, Data: bytes.Clone(c.Data)}
	copy(unknown.Data[1:], bytes.Repeat([]byte{7}, idSize))
	version := Ciphertext{KEM: c.KEM, Nonce: c.Nonce, Data: bytes.Clone(c.Data)}
	version.Data[1+idSize+3] = 9
	ways := map[string]Ciphertext{
		"ciphertext changed": {KEM: c.KEM, Nonce: c.Nonce, Data: flip(c.Data, len(c.Data)-1)},
		"KEM changed":        {KEM: flip(c.KEM, 0), Nonce: c.Nonce, Data: c.Data},
		"MAC changed":        {KEM: c.KEM, Nonce: c.Nonce, Data: flip(c.Data, headerSize+dualsig.DualSize-1)},
		"of another tenant":  foreign,
		"of no key":          unknown,
		"of no version":      version,
		"cut":                {KEM: c.KEM, Nonce: c.Nonce, Data: c.Data[:100]},
		"empty":              {},
	}
	type cost struct{ views, reads, kms int64 }
	costs := map[string]cost{}
	for name, way := range ways {
		f.db.views.Store(0)
		f.db.gets.Store(0)
		f.kms.calls.Store(0)
		f.mustNotOpen(f.a, "", way, name)
		costs[name] = cost{f.db.views.Load(), f.db.gets.Load(), f.kms.calls.Load()}
	}
	for name, got := range costs {
		if got != costs["ciphertext changed"] {
			t.Errorf("%s costs %+v, a changed ciphertext %+v", name, got, costs["ciphertext changed"])
		}
	}
}

// leastAllocations returns the fewest allocations of one call. Under the race detector pools lose items at random, so
// some calls allocate more.
func leastAllocations(do func()) float64 {
	least := math.Inf(1)
	for range 50 {
		least = min(least, testing.AllocsPerRun(1, do))
	}
	return least
}

// Every step of opening allocates, so a failure that returns early shows as fewer allocations.
func TestEveryFailureVerifiesAndDecapsulates(t *testing.T) {
	f := newFixture(t, time.Minute)
	c := f.encrypt(f.a, "", "data")
	keys, err := f.current(t.Context(), f.a.Tenant)
	must(t, err)
	other := c
	other.Data = bytes.Clone(c.Data)
	copy(other.Data[1:], bytes.Repeat([]byte{7}, idSize))
	allocations := map[string]float64{}
	for name, way := range map[string]Ciphertext{
		"changed": {KEM: c.KEM, Nonce: c.Nonce, Data: flip(c.Data, len(c.Data)-1)}, "no key": other, "malformed": {},
	} {
		m := f.newItem(way, keys.Keys, "")
		must(t, f.db.raw.View(t.Context(), func(rd store.Reader) error { return m.read(rd, f.a.Tenant) }))
		allocations[name] = leastAllocations(func() {
			if o, err := f.openItem(t.Context(), keys, &m); err != nil || o.Err != ErrDecrypt {
				t.Fatal(name, o.Err, err)
			}
		})
	}
	for name, n := range allocations {
		if n < 0.9*allocations["changed"] { // the decoy's key is ready, which saves a few allocations
			t.Errorf("%s fails with %v allocations, a changed ciphertext with %v", name, n, allocations["changed"])
		}
	}
}

// A malformed signature is verified in full, like a changed one: both checks run. A failure that
// skips one would show as fewer allocations.
func TestEverySignatureOfDataIsCheckedInFull(t *testing.T) {
	f := newFixture(t, time.Minute)
	data := make(secret.Bytes, 100<<10)
	signed, err := f.Sign(t.Context(), f.a, []secret.Bytes{data})
	must(t, err)
	pqc, tag := signed[0].PQC, signed[0].HMAC
	keys, err := f.current(t.Context(), f.a.Tenant)
	must(t, err)
	allocations := map[string]float64{}
	for name, s := range map[string]*Signed{
		"changed": {data, pqc, flip(tag, 68)}, "no tag": {data, pqc, nil}, "a cut tag": {data, pqc, tag[:68]},
		"a version to come": {data, pqc, flip(tag, 1)}, "version zero": {data, pqc, flip(tag, 4)}, "another format": {data, pqc, flip(tag, 0)},
		"no ML-DSA-65": {data, nil, tag}, "nothing": {data, nil, nil},
	} {
		allocations[name] = leastAllocations(func() {
			if valid, err := keys.verifyData(t.Context(), s); valid || err != nil {
				t.Fatal(name, valid, err)
			}
		})
	}
	for name, n := range allocations {
		if n < allocations["changed"] { // an error may take one more
			t.Errorf("%s fails with %v allocations, a changed signature with %v", name, n, allocations["changed"])
		}
	}
}

// The decoy's key handles everything that fails, so it must not open what a caller could make for
// it.
func TestTheDecoyBelongsToNobody(t *testing.T) {
	one, two := newDecoy(), newDecoy()
	if one.sealed.keyID == two.sealed.keyID || bytes.Equal(one.sealed.message.KEM, two.sealed.message.KEM) {
		t.Fatal("two decoys are alike")
	}
	f := newFixture(t, time.Minute)
	keys, err := f.keys.Current(t.Context(), f.a.Tenant)
	must(t, err)
	s := one.instead(keys)
	if v, err := dualsig.KeyVersion(s.signature); err != nil || v != keys.Version {
		t.Fatal(v, err)
	}
	if s.version == 0 || !authz.ValidID(idPrefix, s.keyID) || len(s.message.KEM) != envelope.KEMCiphertextSize {
		t.Fatal("the decoy does not look like a ciphertext")
	}
}
