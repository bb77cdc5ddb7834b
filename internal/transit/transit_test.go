package transit

import (
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/store"
)

func TestWhatWasEncryptedDecrypts(t *testing.T) {
	f := newFixture(t, time.Minute)
	k := f.create(f.a, "payments", 30)
	for _, keyID := range []string{"", k.ID} {
		for _, data := range []string{"", "x", "correct horse", strings.Repeat("ü", MaxData/2)} {
			c := f.encrypt(f.a, keyID, data)
			f.mustOpen(f.a, "", c, data)
			f.mustOpen(f.a, c.KeyID, c, data)
			joined, err := c.MarshalBinary()
			must(t, err)
			parsed, err := ParseCiphertext(joined)
			must(t, err)
			if parsed.KeyID != c.KeyID || parsed.KeyVersion != 1 {
				t.Fatal(parsed.KeyID, parsed.KeyVersion)
			}
			clear(joined)
			f.mustOpen(f.a, "", parsed, data)
			f.mustOpen(f.a, "", Ciphertext{KEM: c.KEM, Nonce: c.Nonce, Data: c.Data}, data)
		}
	}
	f.verify()
}

// The joined form of the largest item must fit into a request as base64.
func TestTheLargestCiphertextFitsIntoARequest(t *testing.T) {
	f := newFixture(t, time.Minute)
	joined, err := f.encrypt(f.a, "", strings.Repeat("a", MaxData)).MarshalBinary()
	must(t, err)
	if n := base64.StdEncoding.EncodedLen(len(joined)); n > 1<<20-1024 {
		t.Fatal(n)
	}
}

func TestTheDefaultKeyIsMadeOnceAtFirstNeed(t *testing.T) {
	f := newFixture(t, time.Minute)
	var wg sync.WaitGroup
	var mu sync.Mutex
	ids := map[string]bool{}
	entries := f.leaves(f.a, func() {
		for range 8 {
			wg.Go(func() {
				c := f.encrypt(f.a, "", "data")
				mu.Lock()
				defer mu.Unlock()
				ids[c.KeyID] = true
			})
		}
		wg.Wait()
	})
	if len(ids) != 1 || len(entries) != 9 {
		t.Fatalf("%d default keys, %d entries", len(ids), len(entries))
	}
	made := slices.DeleteFunc(slices.Clone(entries), func(e audit.Entry) bool { return e.EventType != audit.KeyCreated })
	if len(made) != 1 || made[0].Actor.Type != string(authz.System) || made[0].RequestID != "req" {
		t.Fatal(made)
	}
	keys, total, err := f.Keys(t.Context(), f.a, 0, 10)
	if err != nil || total != 1 || !keys[0].Default || !ids[keys[0].ID] || keys[0].RotationDays != DefaultRotationDays {
		t.Fatal(keys, total, err)
	}
	if other := f.encrypt(f.b, "", "data"); ids[other.KeyID] {
		t.Fatal("two tenants share a default key")
	}
}

func TestEveryCallLeavesOneEntry(t *testing.T) {
	f := newFixture(t, time.Minute)
	k := f.create(f.a, "payments", 30)
	c := f.encrypt(f.a, k.ID, "data")
	f.encrypt(f.a, "", "so that the default key is there")
	f.encrypt(f.b, "", "and another tenant's")
	bad := c
	bad.Nonce = flip(c.Nonce, 0)
	signed, err := f.Sign(t.Context(), f.b, []secret.Bytes{secret.Bytes("data")})
	must(t, err)
	unknown := authz.NewID(idPrefix)
	nobody := f.a
	nobody.Scopes = nil
	ended := f.a
	ended.ReadOnly = true

	type result struct {
		event   audit.EventType
		outcome audit.Outcome
		id      string
		reason  string
	}
	for name, call := range map[string]struct {
		do   func() error
		want error
		result
	}{
		"encrypt": {func() error {
			_, err := f.Encrypt(t.Context(), f.a, k.ID, make([]secret.Bytes, 3))
			return err
		}, nil, result{audit.DataEncrypted, audit.Success, k.ID, ""}},
		"encrypt, unknown key": {func() error {
			_, err := f.Encrypt(t.Context(), f.a, unknown, make([]secret.Bytes, 1))
			return err
		}, fault.NotFound, result{audit.DataEncrypted, audit.Denied, unknown, "no_such_key"}},
		"encrypt, foreign key": {func() error {
			_, err := f.Encrypt(t.Context(), f.b, k.ID, make([]secret.Bytes, 1))
			return err
		}, fault.NotFound, result{audit.DataEncrypted, audit.Denied, k.ID, "no_such_key"}},
		"encrypt, not allowed": {func() error {
			_, err := f.Encrypt(t.Context(), nobody, k.ID, make([]secret.Bytes, 1))
			return err
		}, fault.Forbidden, result{audit.DataEncrypted, audit.Denied, "", "missing_scope"}},
		"encrypt, trial ended": {func() error {
			_, err := f.Encrypt(t.Context(), ended, k.ID, make([]secret.Bytes, 1))
			return err
		}, fault.Forbidden, result{audit.DataEncrypted, audit.Denied, "", "trial_ended"}},
		"decrypt": {func() error {
			_, err := f.Decrypt(t.Context(), f.a, "", []Ciphertext{c})
			return err
		}, nil, result{audit.DataDecrypted, audit.Success, k.ID, ""}},
		"decrypt, trial ended": {func() error {
			_, err := f.Decrypt(t.Context(), ended, k.ID, []Ciphertext{c})
			return err
		}, nil, result{audit.DataDecrypted, audit.Success, k.ID, ""}},
		"decrypt, changed": {func() error {
			_, err := f.Decrypt(t.Context(), f.a, "", []Ciphertext{c, bad})
			return err
		}, nil, result{audit.DataDecrypted, audit.Failure, k.ID, "does_not_open"}},
		"decrypt, no ciphertext": {func() error {
			_, err := f.Decrypt(t.Context(), f.a, "", []Ciphertext{{}})
			return err
		}, nil, result{audit.DataDecrypted, audit.Failure, "", "does_not_open"}},
		"decrypt, foreign key": {func() error {
			_, err := f.Decrypt(t.Context(), f.b, k.ID, []Ciphertext{c})
			return err
		}, fault.NotFound, result{audit.DataDecrypted, audit.Denied, k.ID, "no_such_key"}},
		"rewrap": {func() error {
			_, err := f.Rewrap(t.Context(), f.a, k.ID, c)
			return err
		}, nil, result{audit.DataRewrapped, audit.Success, k.ID, ""}},
		"rewrap, changed": {func() error {
			_, err := f.Rewrap(t.Context(), f.a, k.ID, bad)
			return err
		}, ErrDecrypt, result{audit.DataRewrapped, audit.Failure, k.ID, "does_not_open"}},
		"rewrap, foreign key": {func() error {
			_, err := f.Rewrap(t.Context(), f.b, k.ID, c)
			return err
		}, fault.NotFound, result{audit.DataRewrapped, audit.Denied, k.ID, "no_such_key"}},
		"sign, as the other": {func() error { // nobody rotates this tenant's keys here
			_, err := f.Sign(t.Context(), f.b, make([]secret.Bytes, 2))
			return err
		}, nil, result{audit.DataSigned, audit.Success, signed[0].KeyID, ""}},
		"verify, as the other": {func() error {
			_, err := f.Verify(t.Context(), f.b, []Signed{{secret.Bytes("data"), signed[0].PQC, signed[0].HMAC}})
			return err
		}, nil, result{audit.DataVerified, audit.Success, "", ""}},
		"verify, nothing": {func() error {
			_, err := f.Verify(t.Context(), f.a, []Signed{{}})
			return err
		}, nil, result{audit.DataVerified, audit.Success, "", ""}},
		"public keys": {func() error {
			_, err := f.PublicKeys(t.Context(), f.a)
			return err
		}, nil, result{audit.PublicKeyRead, audit.Success, string(f.a.Tenant), ""}},
		"keys": {func() error {
			_, _, err := f.Keys(t.Context(), f.a, 0, 10)
			return err
		}, nil, result{audit.KeyListed, audit.Success, "", ""}},
		"keys after a cursor": {func() error {
			_, _, err := f.KeysAfter(t.Context(), f.a, k.ID, 10)
			return err
		}, nil, result{audit.KeyListed, audit.Success, "", ""}},
		"key": {func() error {
			_, _, err := f.Key(t.Context(), f.a, k.ID)
			return err
		}, nil, result{audit.KeyListed, audit.Success, k.ID, ""}},
		"key, foreign": {func() error {
			_, _, err := f.Key(t.Context(), f.b, k.ID)
			return err
		}, fault.NotFound, result{audit.KeyListed, audit.Denied, k.ID, "no_such_key"}},
		"rotate": {func() error {
			_, _, err := f.RotateKey(t.Context(), f.a, k.ID, false)
			return err
		}, nil, result{audit.KeyRotated, audit.Success, k.ID, ""}},
		"rotate and encrypt anew": {func() error {
			_, _, err := f.RotateKey(t.Context(), f.a, k.ID, true)
			return err
		}, nil, result{audit.KeyRotated, audit.Success, k.ID, ""}},
		"rotate, foreign key": {func() error {
			_, _, err := f.RotateKey(t.Context(), f.b, k.ID, true)
			return err
		}, fault.NotFound, result{audit.KeyRotated, audit.Denied, k.ID, "no_such_key"}},
		"rotate, malformed id": {func() error {
			_, _, err := f.RotateKey(t.Context(), f.b, "../"+k.ID, true)
			return err
		}, fault.NotFound, result{audit.KeyRotated, audit.Denied, "", "no_such_key"}},
	} {
		t.Run(name, func(t *testing.T) {
			whose := f.a
			if strings.Contains(name, "foreign") || strings.Contains(name, "malformed") || strings.Contains(name, "as the other") {
				whose = f.b
			}
			var err error
			entries := f.leaves(whose, func() { err = call.do() })
			if !errors.Is(err, call.want) {
				t.Fatal(err)
			}
			if len(entries) != 1 {
				t.Fatalf("%d entries", len(entries))
			}
			e := entries[0]
			got := result{e.EventType, e.Outcome, e.Resource.ID, e.Attributes["reason"]}
			if got != call.result || e.Actor.ID != whose.ID {
				t.Errorf("%+v by %s, want %+v", got, e.Actor.ID, call.result)
			}
		})
	}
	f.verify()
}

// The HTTP layer answers invalid requests and also records them.
func TestInvalidRequestsLeaveNoEntry(t *testing.T) {
	f := newFixture(t, time.Minute)
	long := []secret.Bytes{make(secret.Bytes, MaxData+1)}
	for name, do := range map[string]func() error{
		"data too long":        func() error { _, err := f.Encrypt(t.Context(), f.a, "", long); return err },
		"nothing to encrypt":   func() error { _, err := f.Encrypt(t.Context(), f.a, "", nil); return err },
		"too many to encrypt":  func() error { _, err := f.Encrypt(t.Context(), f.a, "", make([]secret.Bytes, 101)); return err },
		"nothing to decrypt":   func() error { _, err := f.Decrypt(t.Context(), f.a, "", nil); return err },
		"too many to decrypt":  func() error { _, err := f.Decrypt(t.Context(), f.a, "", make([]Ciphertext, 101)); return err },
		"too long to sign":     func() error { _, err := f.Sign(t.Context(), f.a, long); return err },
		"nothing to verify":    func() error { _, err := f.Verify(t.Context(), f.a, nil); return err },
		"too long to verify":   func() error { _, err := f.Verify(t.Context(), f.a, []Signed{{Data: long[0]}}); return err },
		"no name":              func() error { _, err := f.CreateKey(t.Context(), f.a, "", 1); return err },
		"a long name":          func() error { _, err := f.CreateKey(t.Context(), f.a, strings.Repeat("n", 256), 1); return err },
		"control characters":   func() error { _, err := f.CreateKey(t.Context(), f.a, "a\nb", 1); return err },
		"not UTF-8":            func() error { _, err := f.CreateKey(t.Context(), f.a, "\xff", 1); return err },
		"a negative period":    func() error { _, err := f.CreateKey(t.Context(), f.a, "n", -1); return err },
		"a period of an age":   func() error { _, err := f.CreateKey(t.Context(), f.a, "n", 3651); return err },
		"a page before any":    func() error { _, _, err := f.Keys(t.Context(), f.a, -1, 1); return err },
		"a page without limit": func() error { _, _, err := f.Keys(t.Context(), f.a, 0, 0); return err },
		"no page at all":       func() error { _, _, err := f.KeysAfter(t.Context(), f.a, "", 0); return err },
		"another list's page":  func() error { _, _, err := f.KeysAfter(t.Context(), f.a, "x", 1); return err },
	} {
		entries := f.leaves(f.a, func() {
			if err := do(); !errors.Is(err, fault.Invalid) {
				t.Errorf("%s: %v", name, err)
			}
		})
		if len(entries) != 0 {
			t.Errorf("%s: %d entries", name, len(entries))
		}
	}
}

func TestABatchAnswersEachItemByItself(t *testing.T) {
	f := newFixture(t, time.Minute)
	k := f.create(f.a, "other", 30)
	data := make([]secret.Bytes, MaxItems)
	for i := range data {
		data[i] = fmt.Append(nil, "item ", i)
	}
	c, err := f.Encrypt(t.Context(), f.a, "", data)
	must(t, err)
	c[7].Data = flip(c[7].Data, len(c[7].Data)-1)
	c[50] = Ciphertext{}
	c[99] = f.encrypt(f.a, k.ID, "item 99") // another key of the tenant
	var opened []Opened
	entries := f.leaves(f.a, func() {
		opened, err = f.Decrypt(t.Context(), f.a, "", c)
		must(t, err)
	})
	for i, o := range opened {
		if bad := i == 7 || i == 50; bad != (o.Err != nil) || !bad && string(o.Data) != fmt.Sprint("item ", i) {
			t.Errorf("item %d: %v", i, o.Err)
		}
	}
	if len(entries) != 1 || entries[0].Attributes["count"] != "100" || entries[0].Attributes["failed"] != "2" || entries[0].Resource.ID != "" {
		t.Fatalf("%+v", entries)
	}
	opened, err = f.Decrypt(t.Context(), f.a, c[0].KeyID, c[98:])
	must(t, err)
	if opened[0].Err != nil || opened[1].Err != ErrDecrypt {
		t.Error("a ciphertext of another key opened for the key that was named:", opened[1].Err)
	}
}

func TestAPlaintextThatCannotBeRecordedIsNotReturned(t *testing.T) {
	f := newFixture(t, time.Minute)
	c := f.encrypt(f.a, "", "data")
	for _, where := range []string{"before", "at the commit"} {
		fail := &f.db.full
		if where == "at the commit" {
			fail = &f.db.refuse
		}
		fail.Store(true)
		opened, err := f.Decrypt(t.Context(), f.a, "", []Ciphertext{c})
		if !errors.Is(err, fault.Unavailable) || opened != nil {
			t.Errorf("decrypt, full %s: %v", where, err)
		}
		if sealed, err := f.Encrypt(t.Context(), f.a, "", make([]secret.Bytes, 1)); !errors.Is(err, fault.Unavailable) || sealed != nil {
			t.Errorf("encrypt, full %s: %v", where, err)
		}
		if again, err := f.Rewrap(t.Context(), f.a, "", c); !errors.Is(err, fault.Unavailable) || again.Data != nil {
			t.Errorf("rewrap, full %s: %v", where, err)
		}
		if signed, err := f.Sign(t.Context(), f.a, make([]secret.Bytes, 1)); !errors.Is(err, fault.Unavailable) || signed != nil {
			t.Errorf("sign, full %s: %v", where, err)
		}
		if valid, err := f.Verify(t.Context(), f.a, make([]Signed, 1)); !errors.Is(err, fault.Unavailable) || valid != nil {
			t.Errorf("verify, full %s: %v", where, err)
		}
		if keys, err := f.PublicKeys(t.Context(), f.a); !errors.Is(err, fault.Unavailable) || keys != nil {
			t.Errorf("public keys, full %s: %v", where, err)
		}
		if keys, _, err := f.Keys(t.Context(), f.a, 0, 1); !errors.Is(err, fault.Unavailable) || keys != nil {
			t.Errorf("keys, full %s: %v", where, err)
		}
		if _, versions, err := f.Key(t.Context(), f.a, c.KeyID); !errors.Is(err, fault.Unavailable) || versions != nil {
			t.Errorf("key, full %s: %v", where, err)
		}
		fail.Store(false)
	}
	f.mustOpen(f.a, "", c, "data")
}

func TestKeysExpireWithTheWrappingKeyTheyCameOutOf(t *testing.T) {
	f := newFixture(t, 5*time.Minute)
	c := f.encrypt(f.a, "", "data")
	f.kms.down.Store(true)
	f.mustOpen(f.a, "", c, "data") // within the time limit
	f.advance(1)
	if _, err := f.Decrypt(t.Context(), f.a, "", []Ciphertext{c}); !errors.Is(err, fault.Unavailable) {
		t.Fatal("after the time:", err)
	}
	if _, err := f.Encrypt(t.Context(), f.a, "", make([]secret.Bytes, 1)); !errors.Is(err, fault.Unavailable) {
		t.Fatal(err)
	}
	if _, err := f.CreateKey(t.Context(), f.a, "n", 1); !errors.Is(err, fault.Unavailable) {
		t.Fatal(err)
	}
	if _, _, err := f.RotateKey(t.Context(), f.a, c.KeyID, true); !errors.Is(err, fault.Unavailable) {
		t.Fatal(err)
	}
	f.kms.down.Store(false)
	f.mustOpen(f.a, "", c, "data")
}

func TestNothingOfACallerStaysInTheFiles(t *testing.T) {
	f := newFixture(t, time.Minute)
	const canary = "canary-5d1c9a"
	k := f.create(f.a, "payments", 30)
	c := f.encrypt(f.a, k.ID, canary)
	f.mustOpen(f.a, "", c, canary)
	_, err := f.Rewrap(t.Context(), f.a, "", c)
	must(t, err)
	_, err = f.Sign(t.Context(), f.a, []secret.Bytes{secret.Bytes(canary)})
	must(t, err)
	if f.inFiles(canary) || f.inFiles(string(c.KEM[:32])) || f.inFiles(string(c.Data[headerSize:headerSize+64])) {
		t.Fatal("the store holds a caller's data")
	}
	for _, e := range f.entries(f.a) {
		b, err := e.JSON()
		must(t, err)
		if bytes.Contains(b, []byte(canary)) || bytes.Contains(b, []byte("payments")) {
			t.Errorf("%s holds data or a name", e.EventType)
		}
	}
}

// A damaged row fails every call that needs it, as damage and not as a missing key.
func TestADamagedKeyIsRecordedAsDamage(t *testing.T) {
	for _, prefix := range []string{"transit/seed/", "transit/key/", "transit/default/"} {
		f := newUnboundFixture(t, 0)
		c := f.encrypt(f.a, "", "data")
		f.tamper(func(tx store.Tx) error {
			var failed error
			err := tx.Scan(store.Prefix([]byte(prefix)), func(k, v []byte) bool {
				failed = tx.Put(k, flip(v, len(v)-1))
				return false
			})
			return errors.Join(err, failed)
		})
		entries := f.leaves(f.a, func() {
			if _, err := f.Encrypt(t.Context(), f.a, "", make([]secret.Bytes, 1)); !errors.Is(err, fault.Internal) {
				t.Errorf("%s: %v", prefix, err)
			}
		})
		if prefix == "transit/seed/" {
			entries = append(entries, f.leaves(f.a, func() { f.mustNotOpen(f.a, "", c, "damaged seed") })...)
			entries = append(entries, f.leaves(f.a, func() {
				if _, _, err := f.RotateKey(t.Context(), f.a, c.KeyID, true); !errors.Is(err, fault.Internal) {
					t.Error("rotated a damaged key:", err)
				}
			})...)
		}
		for _, e := range entries {
			if e.Outcome != audit.Failure || e.Attributes["reason"] != "integrity" {
				t.Errorf("%s: %s %s %v", prefix, e.EventType, e.Outcome, e.Attributes)
			}
		}
		if len(entries) == 0 {
			t.Error(prefix, "left no entry")
		}
	}
}
