package envelope

import (
	"bytes"
	"crypto/aes"
	"crypto/rand"
	"crypto/subtle"
	"encoding/binary"
	"fmt"
	"math"
	"testing"

	"github.com/cloudflare/circl/kem/mlkem/mlkem768"
)

var testContext = Context{Tenant: "ten_a", ID: "cred_1", Version: 7}

func testKey(fill byte) []byte { return bytes.Repeat([]byte{fill}, KeySize) }

func flip(b []byte, i int) []byte {
	b = bytes.Clone(b)
	b[i] ^= 1
	return b
}

func mustSeal(t testing.TB, plaintext []byte) (*Credential, []byte) {
	t.Helper()
	body, wrap, err := SealCredential(testKey(1), 3, testContext, plaintext)
	if err != nil {
		t.Fatal(err)
	}
	return body, wrap
}

func mustNotOpen(t testing.TB, what string, key []byte, c Context, body *Credential, wrap []byte) {
	t.Helper()
	if got, err := OpenCredential(key, c, body, wrap); err != ErrOpen || got != nil {
		t.Errorf("%s: OpenCredential = %d bytes, %v; want ErrOpen", what, len(got), err)
	}
}

func TestCredentialOpensToWhatWasSealed(t *testing.T) {
	for _, n := range []int{0, 1, 15, 16, 17, 1024, 1 << 20} {
		plaintext := make([]byte, n)
		rand.Read(plaintext)
		body, wrap := mustSeal(t, plaintext)
		encoded, err := body.MarshalBinary()
		if err != nil {
			t.Fatal(err)
		}
		parsed, err := ParseCredential(encoded)
		if err != nil {
			t.Fatal(err)
		}
		again, err := parsed.MarshalBinary()
		if err != nil || !bytes.Equal(again, encoded) {
			t.Fatalf("%d bytes: parse and marshal changed the encoding (%v)", n, err)
		}
		got, err := OpenCredential(testKey(1), testContext, parsed, wrap)
		if err != nil || !bytes.Equal(got, plaintext) {
			t.Fatalf("%d bytes: opened to %d bytes, %v", n, len(got), err)
		}
		if v, err := WrapKeyVersion(wrap); err != nil || v != 3 {
			t.Fatalf("WrapKeyVersion = %d, %v", v, err)
		}
	}
}

func TestEverySealUsesFreshRandomness(t *testing.T) {
	a, wrapA := mustSeal(t, []byte("same"))
	b, wrapB := mustSeal(t, []byte("same"))
	if a.Salt == b.Salt || a.Nonce == b.Nonce || a.Commitment == b.Commitment || bytes.Equal(a.KEM, b.KEM) ||
		bytes.Equal(a.Ciphertext, b.Ciphertext) || bytes.Equal(wrapA[5:wrapHeader], wrapB[5:wrapHeader]) || bytes.Equal(wrapA[wrapHeader:], wrapB[wrapHeader:]) {
		t.Fatal("two seals of one plaintext share a random part")
	}
	mustNotOpen(t, "the wrap of another seal of the same version", testKey(1), testContext, a, wrapB)
}

func TestParsedCredentialSharesNoMemory(t *testing.T) {
	body, wrap := mustSeal(t, []byte("value"))
	encoded, _ := body.MarshalBinary()
	parsed, err := ParseCredential(encoded)
	if err != nil {
		t.Fatal(err)
	}
	clear(encoded)
	if got, err := OpenCredential(testKey(1), testContext, parsed, wrap); err != nil || string(got) != "value" {
		t.Fatalf("after clearing the input: %q, %v", []byte(got), err)
	}
}

func TestSwappedRowsDoNotOpen(t *testing.T) {
	body, wrap := mustSeal(t, []byte("value"))
	otherKey, _, err := SealCredential(testKey(2), 3, testContext, []byte("value"))
	if err != nil {
		t.Fatal(err)
	}
	relabelled := bytes.Clone(wrap)
	binary.BigEndian.PutUint32(relabelled[1:], 4)
	newest := testContext
	newest.Version++

	mustNotOpen(t, "another tenant", testKey(1), Context{"ten_b", testContext.ID, 7}, body, wrap)
	mustNotOpen(t, "another id", testKey(1), Context{testContext.Tenant, "cred_2", 7}, body, wrap)
	mustNotOpen(t, "an older version under the newest number", testKey(1), newest, body, wrap)
	mustNotOpen(t, "tenant and id joined elsewhere", testKey(1), Context{"ten_acred", "_1", 7}, body, wrap)
	mustNotOpen(t, "another wrapping key", testKey(2), testContext, body, wrap)
	mustNotOpen(t, "the body of another key", testKey(1), testContext, otherKey, wrap)
	mustNotOpen(t, "another wrapping key version", testKey(1), testContext, body, relabelled)
}

// An old seed or wrap must not open a version with other parts.
func TestMixedPartsDoNotOpen(t *testing.T) {
	a, wrap := mustSeal(t, []byte("value a"))
	b, _ := mustSeal(t, []byte("value b"))
	for name, mix := range map[string]func(c *Credential){
		"salt":       func(c *Credential) { c.Salt = b.Salt },
		"KEM":        func(c *Credential) { c.KEM = b.KEM },
		"commitment": func(c *Credential) { c.Commitment = b.Commitment },
		"nonce":      func(c *Credential) { c.Nonce = b.Nonce },
		"ciphertext": func(c *Credential) { c.Ciphertext = b.Ciphertext },
		"truncated":  func(c *Credential) { c.Ciphertext = c.Ciphertext[:len(c.Ciphertext)-1] },
		"extended":   func(c *Credential) { c.Ciphertext = append(bytes.Clone(c.Ciphertext), 0) },
	} {
		mixed := *a
		mix(&mixed)
		mustNotOpen(t, name, testKey(1), testContext, &mixed, wrap)
	}
}

func TestWrongLengthsAreErrorsNotPanics(t *testing.T) {
	body, wrap := mustSeal(t, []byte("value"))
	for n := range 80 {
		if n == KeySize {
			continue
		}
		if _, _, err := SealCredential(make([]byte, n), 1, testContext, nil); err == nil {
			t.Errorf("sealed with a wrapping key of %d bytes", n)
		}
		mustNotOpen(t, fmt.Sprint("wrapping key of ", n), make([]byte, n), testContext, body, wrap)
	}
	if _, _, err := SealCredential(nil, 1, Context{}, nil); err == nil {
		t.Error("sealed without a key")
	}
	if _, _, err := SealCredential(testKey(1), 1, testContext, make([]byte, maxPlaintext+1)); err == nil {
		t.Error("sealed more than the limit")
	}
	mustNotOpen(t, "nil body", testKey(1), testContext, nil, wrap)
	mustNotOpen(t, "zero body", testKey(1), testContext, new(Credential), wrap)
	mustNotOpen(t, "no wrap", testKey(1), testContext, body, nil)
	for n := range 2 * wrapSize {
		if n == wrapSize {
			continue
		}
		resized := make([]byte, n)
		copy(resized, wrap)
		mustNotOpen(t, fmt.Sprint("wrap of ", n), testKey(1), testContext, body, resized)
		if _, err := WrapKeyVersion(resized); err == nil {
			t.Errorf("read the key version of a wrap of %d bytes", n)
		}
	}
	for _, n := range []int{0, 1, 1087, 1089, 1184} {
		resized := *body
		resized.KEM = make([]byte, n)
		mustNotOpen(t, fmt.Sprint("KEM ciphertext of ", n), testKey(1), testContext, &resized, wrap)
		if _, err := resized.MarshalBinary(); err == nil {
			t.Errorf("marshalled a KEM ciphertext of %d bytes", n)
		}
	}
	for n := range tagSize {
		resized := *body
		resized.Ciphertext = make([]byte, n)
		mustNotOpen(t, fmt.Sprint("ciphertext of ", n), testKey(1), testContext, &resized, wrap)
		if _, err := resized.MarshalBinary(); err == nil {
			t.Errorf("marshalled a ciphertext of %d bytes", n)
		}
	}
	if _, err := (*Credential)(nil).MarshalBinary(); err == nil {
		t.Error("marshalled nothing")
	}
	encoded, _ := body.MarshalBinary()
	for n := range credentialHeader + tagSize {
		if _, err := ParseCredential(encoded[:n]); err == nil {
			t.Errorf("parsed %d bytes", n)
		}
	}
	if _, err := ParseCredential(make([]byte, credentialHeader+tagSize+maxPlaintext+1)); err == nil {
		t.Error("parsed more than the limit")
	}
	for _, v := range []byte{0, 2, 255} {
		encoded[0] = v
		if _, err := ParseCredential(encoded); err == nil {
			t.Errorf("parsed version %d", v)
		}
		wrap[0] = v
		if _, err := WrapKeyVersion(wrap); err == nil {
			t.Errorf("read a wrap of version %d", v)
		}
		mustNotOpen(t, fmt.Sprint("wrap version ", v), testKey(1), testContext, body, wrap)
	}
}

// failures returns one tampering per layer. Each must look like the others.
func failures(t testing.TB) map[string]func() error {
	body, wrap := mustSeal(t, make([]byte, 1024))
	open := func(c Context, body *Credential, wrap []byte) func() error {
		return func() error { _, err := OpenCredential(testKey(1), c, body, wrap); return err }
	}
	tampered := func(change func(*Credential)) *Credential {
		c := *body
		change(&c)
		return &c
	}
	return map[string]func() error{
		"wrap":         open(testContext, body, flip(wrap, wrapSize-1)),
		"wrap version": open(testContext, body, flip(wrap, 0)),
		"context":      open(Context{"ten_b", "cred_1", 7}, body, wrap),
		"salt":         open(testContext, tampered(func(c *Credential) { c.Salt[0] ^= 1 }), wrap),
		"KEM":          open(testContext, tampered(func(c *Credential) { c.KEM = flip(c.KEM, 0) }), wrap),
		"commitment":   open(testContext, tampered(func(c *Credential) { c.Commitment[31] ^= 1 }), wrap),
		"nonce":        open(testContext, tampered(func(c *Credential) { c.Nonce[0] ^= 1 }), wrap),
		"ciphertext":   open(testContext, tampered(func(c *Credential) { c.Ciphertext = flip(c.Ciphertext, 0) }), wrap),
		"tag":          open(testContext, tampered(func(c *Credential) { c.Ciphertext = flip(c.Ciphertext, 1024) }), wrap),
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

// Every step of opening allocates, so an early return shows as fewer allocations.
// BenchmarkFailuresTiming compares the times.
func TestAllFailuresDoTheSameWork(t *testing.T) {
	allocations := map[string]float64{}
	for name, fail := range failures(t) {
		if err := fail(); err != ErrOpen {
			t.Fatalf("%s: %v", name, err)
		}
		allocations[name] = leastAllocations(func() { _ = fail() })
	}
	for name, n := range allocations {
		if n != allocations["ciphertext"] {
			t.Errorf("%s fails with %v allocations, a tampered ciphertext with %v", name, n, allocations["ciphertext"])
		}
	}
}

// BenchmarkFailuresTiming shows that every failure takes equally long.
func BenchmarkFailuresTiming(b *testing.B) {
	for name, fail := range failures(b) {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				_ = fail()
			}
		})
	}
}

// A wrap that does not open leaves a seed of zeros. A body made for that seed passes every later
// check and must still not open.
func TestABodyForTheZeroSeedDoesNotOpen(t *testing.T) {
	var random credentialRandom
	body, wrap, err := sealCredential(testKey(1), 3, testContext, []byte("forged"), &random)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := OpenCredential(testKey(1), testContext, body, wrap); err != nil || string(got) != "forged" {
		t.Fatalf("the honest wrap: %v", err)
	}
	mustNotOpen(t, "broken wrap", testKey(1), testContext, body, flip(wrap, wrapSize-1))
}

// The version byte is checked and not only authenticated. A wrap of another version that is
// otherwise valid does not open here.
func TestAWellMadeWrapOfAnotherVersionDoesNotOpen(t *testing.T) {
	var random credentialRandom
	body, wrap, err := sealCredential(testKey(1), 3, testContext, nil, &random)
	if err != nil {
		t.Fatal(err)
	}
	wrapper, err := deriveGCM(testKey(1), body.Salt[:], testContext.frame(labelWrapKey))
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range []byte{version, version + 1} {
		made := wrapper.Seal(append([]byte{v}, wrap[1:wrapHeader]...), random.wrapNonce[:], random.seed[:], testContext.frame(labelWrap, append([]byte{v}, wrap[1:5]...)))
		if _, err := OpenCredential(testKey(1), testContext, body, made); (err == nil) != (v == version) {
			t.Errorf("wrap of version %d: %v", v, err)
		}
	}
}

// TestInvisibleSalamander makes one AES-GCM ciphertext that opens under two data keys, and a wrap
// for each. A holder of the wrapping key can do this. Only the key with the commitment opens it.
func TestInvisibleSalamander(t *testing.T) {
	dataKey := func(random *credentialRandom) (key [KeySize]byte, commitment [commitmentSize]byte, kem []byte) {
		pk, sk := mlkem768.NewKeyFromSeed(random.seed[:seedSize])
		var ss [mlkem768.SharedKeySize]byte
		body := &Credential{Salt: random.salt, KEM: make([]byte, mlkem768.CiphertextSize)}
		pk.EncapsulateTo(body.KEM, ss[:], random.message[:])
		if err := deriveDataKey(&key, &commitment, &ss, random.seed[seedSize:], sk, body, testContext); err != nil {
			t.Fatal(err)
		}
		return key, commitment, body.KEM
	}
	var one, two credentialRandom
	two.seed[seedSize] = 1 // the same key pair, another r
	_, wrapOne, err := sealCredential(testKey(1), 3, testContext, nil, &one)
	if err != nil {
		t.Fatal(err)
	}
	_, wrapTwo, err := sealCredential(testKey(1), 3, testContext, nil, &two)
	if err != nil {
		t.Fatal(err)
	}
	keyOne, commitment, kem := dataKey(&one)
	keyTwo, commitmentTwo, _ := dataKey(&two)

	body := &Credential{KEM: kem, Commitment: commitment}
	body.Ciphertext = twoKeyCiphertext(t, keyOne[:], keyTwo[:], body.Nonce[:], testContext.frame(labelData))
	for _, key := range [][]byte{keyOne[:], keyTwo[:]} {
		gcm, err := newGCM(key)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := gcm.Open(nil, body.Nonce[:], body.Ciphertext, testContext.frame(labelData)); err != nil {
			t.Fatalf("the crafted ciphertext does not open under both keys: %v", err)
		}
	}
	if _, err := OpenCredential(testKey(1), testContext, body, wrapOne); err != nil {
		t.Errorf("under the committed key: %v", err)
	}
	mustNotOpen(t, "under the other key", testKey(1), testContext, body, wrapTwo)
	body.Commitment = commitmentTwo
	mustNotOpen(t, "after swapping the commitment", testKey(1), testContext, body, wrapOne)
}

// twoKeyCiphertext returns two blocks and a tag that AES-GCM accepts under both keys. The second
// block c adds c·H² to the tag, so the function solves for c.
func twoKeyCiphertext(t *testing.T, k1, k2, nonce, aad []byte) []byte {
	t.Helper()
	tagOf := func(key, ciphertext []byte) (tag [16]byte, hashKey [16]byte) {
		gcm, err := newGCM(key)
		if err != nil {
			t.Fatal(err)
		}
		stream := gcm.Seal(nil, nonce, make([]byte, len(ciphertext)), nil)
		plaintext := make([]byte, len(ciphertext))
		subtle.XORBytes(plaintext, stream, ciphertext)
		copy(tag[:], gcm.Seal(nil, nonce, plaintext, aad)[len(ciphertext):])
		block, err := aes.NewCipher(key)
		if err != nil {
			t.Fatal(err)
		}
		block.Encrypt(hashKey[:], hashKey[:])
		return tag, hashKey
	}
	xor := func(a, b [16]byte) (c [16]byte) { subtle.XORBytes(c[:], a[:], b[:]); return c }
	ciphertext := make([]byte, 32)
	tag1, h1 := tagOf(k1, ciphertext)
	tag2, h2 := tagOf(k2, ciphertext)
	c := gfMul(xor(tag1, tag2), gfInverse(xor(gfMul(h1, h1), gfMul(h2, h2))))
	copy(ciphertext[16:], c[:])
	tag, _ := tagOf(k1, ciphertext)
	return append(ciphertext, tag[:]...)
}

// gfMul multiplies in GF(2^128) with GCM's bit order (NIST SP 800-38D §6.3).
func gfMul(x, y [16]byte) (z [16]byte) {
	for i := range 128 {
		if x[i/8]>>(7-i%8)&1 == 1 {
			subtle.XORBytes(z[:], z[:], y[:])
		}
		carry := y[15] & 1
		for j := 15; j > 0; j-- {
			y[j] = y[j]>>1 | y[j-1]<<7
		}
		y[0] = y[0]>>1 ^ carry*0xe1
	}
	return z
}

// gfInverse returns x^(2^128 - 2).
func gfInverse(x [16]byte) [16]byte {
	result := [16]byte{0x80} // the element one
	for range 127 {
		x = gfMul(x, x)
		result = gfMul(result, x)
	}
	return result
}
