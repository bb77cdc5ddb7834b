package dualsig

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha512"
	"encoding/binary"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/cloudflare/circl/sign/mldsa/mldsa65"
)

// contexts lists all contexts of signatures in the product, and two others.
var contexts = []string{
	"latticekeep/audit/v1", "latticekeep/record/v1", "latticekeep/sealing-key/v1", "latticekeep/checkpoint/v1", "latticekeep/message/v1",
	"latticekeep/audit/v2", "latticekeep/audit/v",
}

const recordContext = "latticekeep/record/v1"

func fill(n int, b byte) []byte { return bytes.Repeat([]byte{b}, n) }

func mustKey(t testing.TB, version uint32, seed, macKey byte) *Key {
	t.Helper()
	k, err := NewKey(version, fill(SeedSize, seed), fill(MACKeySize, macKey))
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func mustSign(t testing.TB, k *Key, context string, msg []byte) []byte {
	t.Helper()
	sig, err := k.Sign(context, msg)
	if err != nil {
		t.Fatal(err)
	}
	return sig
}

func join(parts ...[]byte) []byte { return bytes.Join(parts, nil) }

func TestDualSignatureHoldsForWhatWasSigned(t *testing.T) {
	k := mustKey(t, 258, 1, 2)
	for _, n := range []int{0, 1, 64, 100_000} {
		msg := fill(n, 7)
		sig := mustSign(t, k, recordContext, msg)
		if len(sig) != DualSize || !bytes.Equal(sig[:5], []byte{1, 0, 0, 1, 2}) {
			t.Fatalf("%d bytes, header %x", len(sig), sig[:5])
		}
		if !k.Verify(recordContext, msg, sig) {
			t.Errorf("a message of %d bytes does not verify", n)
		}
		if v, err := KeyVersion(sig); err != nil || v != 258 {
			t.Errorf("KeyVersion = %d, %v", v, err)
		}
		if k.Verify(recordContext, append(bytes.Clone(msg), 0), sig) {
			t.Error("an extended message verifies")
		}
	}
}

// Signing is hedged. With circl's deterministic signer two signatures of one message would be
// equal.
func TestTwoSignaturesOfOneMessageDiffer(t *testing.T) {
	k := mustKey(t, 1, 1, 2)
	private, err := NewPrivateKey(fill(SeedSize, 1))
	if err != nil {
		t.Fatal(err)
	}
	msg := []byte("message")
	a, b := mustSign(t, k, recordContext, msg), mustSign(t, k, recordContext, msg)
	if bytes.Equal(a, b) || !k.Verify(recordContext, msg, a) || !k.Verify(recordContext, msg, b) {
		t.Error("dual signatures are the same or do not verify")
	}
	a, err = private.Sign("", msg)
	if err != nil {
		t.Fatal(err)
	}
	b, err = private.Sign("", msg)
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Equal(a, b) || !private.Public().Verify("", msg, a) || !private.Public().Verify("", msg, b) {
		t.Error("single signatures are the same or do not verify")
	}
}

// Every combination of the two parts: only two valid parts verify. An attacker with one of the two
// keys makes the foreign parts, over the same bytes.
func TestBothPartsMustHold(t *testing.T) {
	k, msg := mustKey(t, 1, 1, 2), []byte("message")
	framed := k.frame(recordContext, msg)
	sign := func(key *PrivateKey) []byte {
		pqc := make([]byte, SignatureSize)
		if err := key.sign(recordContext, framed, true, pqc); err != nil {
			t.Fatal(err)
		}
		return pqc
	}
	stranger, err := NewPrivateKey(fill(SeedSize, 9))
	if err != nil {
		t.Fatal(err)
	}
	// macOver makes the MAC that belongs to pqc, with the framing of frame.Join.
	macOver := func(key byte, pqc []byte) []byte {
		u32 := func(n int) []byte { return binary.BigEndian.AppendUint32(nil, uint32(n)) }
		return mac(fill(MACKeySize, key), join(u32(len(labelMAC)), []byte(labelMAC), u32(len(framed)), framed, u32(len(pqc)), pqc))
	}
	valid, foreign := sign(k.private), sign(stranger)
	zeros := make([]byte, SignatureSize)
	for _, pqc := range []struct {
		name  string
		bytes []byte
		holds bool
	}{{"valid", valid, true}, {"flipped", join([]byte{valid[0] ^ 1}, valid[1:]), false}, {"foreign", foreign, false}, {"zero", zeros, false}} {
		for _, tag := range []struct {
			name  string
			bytes []byte
			holds bool
		}{
			{"valid", macOver(2, pqc.bytes), true},
			{"foreign", macOver(3, pqc.bytes), false},
			{"zero", make([]byte, MACSize), false},
			{"of the framed bytes alone", mac(fill(MACKeySize, 2), framed), false},
			{"of another signature", macOver(2, sign(k.private)), false},
		} {
			sig := join([]byte{1, 0, 0, 0, 1}, pqc.bytes, tag.bytes)
			if got, want := k.Verify(recordContext, msg, sig), pqc.holds && tag.holds; got != want {
				t.Errorf("ML-DSA-65 %s, MAC %s: %v, want %v", pqc.name, tag.name, got, want)
			}
		}
	}
}

func TestStrippedAndSwappedPartsDoNotHold(t *testing.T) {
	k, other := mustKey(t, 1, 1, 2), mustKey(t, 2, 3, 4)
	msg, msg2 := []byte("message"), []byte("another")
	sig, sig2, foreign := mustSign(t, k, recordContext, msg), mustSign(t, k, recordContext, msg2), mustSign(t, other, recordContext, msg)
	again := mustSign(t, k, recordContext, msg)
	header, pqc, tag := sig[:dualHeader], sig[dualHeader:dualHeader+SignatureSize], sig[dualHeader+SignatureSize:]

	for name, forged := range map[string][]byte{
		"nothing":                    nil,
		"header alone":               header,
		"ML-DSA-65 stripped":         join(header, tag),
		"MAC stripped":               join(header, pqc),
		"no header":                  join(pqc, tag),
		"swapped order":              join(header, tag, pqc),
		"ML-DSA-65 twice":            join(header, pqc, pqc)[:DualSize],
		"MAC twice":                  join(header, pqc, tag, tag),
		"signature twice":            join(sig, sig),
		"extended":                   join(sig, []byte{0}),
		"parts of two messages":      join(header, pqc, sig2[dualHeader+SignatureSize:]),
		"parts of two signatures":    join(header, pqc, again[dualHeader+SignatureSize:]),
		"MAC of another key":         join(header, pqc, foreign[dualHeader+SignatureSize:]),
		"ML-DSA-65 of another key":   join(header, foreign[dualHeader:dualHeader+SignatureSize], tag),
		"another message":            sig2,
		"another key":                foreign,
		"another version":            join([]byte{2}, sig[1:]),
		"version zero":               join([]byte{0}, sig[1:]),
		"another key version":        join([]byte{1, 0, 0, 0, 2}, sig[dualHeader:]),
		"another key's, our version": join(header, foreign[dualHeader:]),
	} {
		if k.Verify(recordContext, msg, forged) {
			t.Errorf("%s: verifies", name)
		}
	}
	for i := range sig {
		changed := bytes.Clone(sig)
		changed[i] ^= 1
		if k.Verify(recordContext, msg, changed) {
			t.Fatalf("verifies with byte %d changed", i)
		}
	}
	for n := range sig {
		if k.Verify(recordContext, msg, sig[:n]) {
			t.Fatalf("verifies cut to %d bytes", n)
		}
	}
	if !k.Verify(recordContext, msg, sig) || !k.Verify(recordContext, msg, again) {
		t.Error("the signatures themselves do not verify")
	}
}

// The version is bound and not only read. The same keys under another version make other
// signatures, even after the header is rewritten.
func TestKeyVersionIsBound(t *testing.T) {
	one, two := mustKey(t, 1, 1, 2), mustKey(t, 2, 1, 2)
	sig := mustSign(t, one, recordContext, []byte("message"))
	if two.Verify(recordContext, []byte("message"), sig) {
		t.Error("verifies under another version")
	}
	binary.BigEndian.PutUint32(sig[1:], 2)
	if two.Verify(recordContext, []byte("message"), sig) {
		t.Error("verifies under another version after rewriting the header")
	}
}

// Each part is bound to the other part's key, so one shared key is not enough.
func TestKeysAreBoundToEachOther(t *testing.T) {
	k := mustKey(t, 1, 1, 2)
	sig := mustSign(t, k, recordContext, []byte("message"))
	for name, other := range map[string]*Key{"another seed": mustKey(t, 1, 9, 2), "another MAC key": mustKey(t, 1, 1, 9)} {
		if other.Verify(recordContext, []byte("message"), sig) {
			t.Errorf("%s: verifies", name)
		}
	}
}

func TestEveryCrossUseOfAContextFails(t *testing.T) {
	k, msg := mustKey(t, 1, 1, 2), []byte("message")
	for _, signed := range contexts {
		dual := mustSign(t, k, signed, msg)
		single, err := k.private.Sign(signed, msg)
		if err != nil {
			t.Fatal(err)
		}
		for _, checked := range append([]string{""}, contexts...) {
			if got := k.Verify(checked, msg, dual); got != (checked == signed) {
				t.Errorf("dual, signed for %q, checked for %q: %v", signed, checked, got)
			}
			if got := k.Public().Verify(checked, msg, single); got != (checked == signed) {
				t.Errorf("single, signed for %q, checked for %q: %v", signed, checked, got)
			}
			if k.Public().Verify(checked, msg, dual[dualHeader:dualHeader+SignatureSize]) {
				t.Errorf("the ML-DSA-65 part for %q verifies alone for %q", signed, checked)
			}
		}
	}
}

func TestContextLengths(t *testing.T) {
	k, msg := mustKey(t, 1, 1, 2), []byte("message")
	for _, n := range []int{0, 1, 255, 256, 1000} {
		context := strings.Repeat("c", n)
		sig, err := k.Sign(context, msg)
		if (err == nil) != (n >= 1 && n <= 255) || (err == nil && !k.Verify(context, msg, sig)) {
			t.Errorf("dual, context of %d bytes: %v", n, err)
		}
		sig, err = k.private.Sign(context, msg)
		if (err == nil) != (n <= 255) || (err == nil && !k.Public().Verify(context, msg, sig)) {
			t.Errorf("single, context of %d bytes: %v", n, err)
		}
		if k.Verify(context, msg, nil) || k.Public().Verify(context, msg, make([]byte, SignatureSize)) {
			t.Errorf("context of %d bytes: junk verifies", n)
		}
	}
}

func TestWrongLengthsAndZeroValuesAreErrorsNotPanics(t *testing.T) {
	for n := range 130 {
		if _, err := NewPrivateKey(make([]byte, n)); (err == nil) != (n == SeedSize) {
			t.Errorf("seed of %d bytes: %v", n, err)
		}
		if _, err := NewKey(1, make([]byte, SeedSize), make([]byte, n)); (err == nil) != (n == MACKeySize) {
			t.Errorf("MAC key of %d bytes: %v", n, err)
		}
		if _, err := NewKey(1, make([]byte, n), make([]byte, MACKeySize)); (err == nil) != (n == SeedSize) {
			t.Errorf("dual key, seed of %d bytes: %v", n, err)
		}
	}
	for _, n := range []int{0, 1, 32, PublicKeySize - 1, PublicKeySize, PublicKeySize + 1, mldsa65.PrivateKeySize} {
		if _, err := ParsePublicKey(make([]byte, n)); (err == nil) != (n == PublicKeySize) {
			t.Errorf("public key of %d bytes: %v", n, err)
		}
		if _, err := NewPrivateKey(make([]byte, max(n, 33))); err == nil {
			t.Errorf("an expanded private key of %d bytes was accepted", n)
		}
	}
	public := mustKey(t, 1, 1, 2).Public()
	for _, n := range []int{0, 1, SignatureSize - 1, SignatureSize, SignatureSize + 1} {
		if public.Verify("", nil, make([]byte, n)) {
			t.Errorf("zeros of %d bytes verify", n)
		}
	}
	if _, err := KeyVersion(nil); err == nil {
		t.Error("read the key version of nothing")
	}
	k := mustKey(t, 1, 1, 2)
	long := make([]byte, maxMessage+1)
	if _, err := k.Sign(recordContext, long); err == nil {
		t.Error("signed more than the limit")
	}
	if k.Verify(recordContext, long, make([]byte, DualSize)) {
		t.Error("verified more than the limit")
	}

	junk := append([]byte{1}, make([]byte, DualSize-1)...) // a well-formed header of key version 0
	for _, k := range []*Key{nil, {}} {
		if _, err := k.Sign(recordContext, nil); err == nil {
			t.Error("a zero Key signs")
		}
		if k.Verify(recordContext, nil, junk) || k.Version() != 0 || k.Public() != nil {
			t.Error("a zero Key verifies or has properties")
		}
	}
	for _, k := range []*PrivateKey{nil, {}} {
		if _, err := k.Sign(recordContext, nil); err == nil {
			t.Error("a zero PrivateKey signs")
		}
		if k.Public() != nil {
			t.Error("a zero PrivateKey has a public key")
		}
	}
	for _, k := range []*PublicKey{nil, {}} {
		if k.Verify(recordContext, nil, make([]byte, SignatureSize)) || k.Bytes() != nil || k.ID() != "" || k.MarshalPEM() != nil {
			t.Error("a zero PublicKey verifies or has properties")
		}
	}
}

func TestKeysCopyWhatTheyAreGiven(t *testing.T) {
	seed, macKey := fill(SeedSize, 1), fill(MACKeySize, 2)
	k, err := NewKey(1, seed, macKey)
	if err != nil {
		t.Fatal(err)
	}
	sig := mustSign(t, k, recordContext, []byte("message"))
	clear(seed)
	clear(macKey)
	clear(k.Public().Bytes())
	if !k.Verify(recordContext, []byte("message"), sig) || !bytes.Equal(k.Public().Bytes(), mustKey(t, 1, 1, 2).Public().Bytes()) {
		t.Error("the key changed with its inputs or outputs")
	}
}

func TestKeysAreSafeForConcurrentUse(t *testing.T) {
	k := mustKey(t, 1, 1, 2)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			msg := fmt.Append(nil, i)
			for range 4 {
				sig, err := k.Sign(recordContext, msg)
				if err != nil || !k.Verify(recordContext, msg, sig) {
					t.Errorf("signer %d: %v", i, err)
				}
			}
		})
	}
	wg.Wait()
}

func TestPublicKeyIsTheSameAfterEveryEncoding(t *testing.T) {
	public := mustKey(t, 1, 1, 2).Public()
	parsed, err := ParsePublicKey(public.Bytes())
	if err != nil || !bytes.Equal(parsed.Bytes(), public.Bytes()) || parsed.ID() != public.ID() || len(public.ID()) != 64 {
		t.Fatalf("ParsePublicKey: %v", err)
	}
	file := public.MarshalPEM()
	parsed, err = ParsePEM(file)
	if err != nil || !bytes.Equal(parsed.Bytes(), public.Bytes()) || !bytes.Equal(parsed.MarshalPEM(), file) {
		t.Fatalf("ParsePEM: %v", err)
	}
	if other := mustKey(t, 1, 3, 2).Public(); other.ID() == public.ID() {
		t.Error("two keys have one id")
	}
}

func TestParsePEMTakesTheCanonicalFileOnly(t *testing.T) {
	file := mustKey(t, 1, 1, 2).Public().MarshalPEM()
	replace := func(from, to string) []byte { return bytes.Replace(file, []byte(from), []byte(to), 1) }
	for name, b := range map[string][]byte{
		"nothing":            nil,
		"not PEM":            []byte("key"),
		"another type":       bytes.ReplaceAll(file, []byte("PUBLIC KEY"), []byte("PRIVATE KEY")),
		"text before":        join([]byte("key\n"), file),
		"text after":         join(file, []byte("key\n")),
		"two keys":           join(file, file),
		"a header":           replace("KEY-----\n", "KEY-----\nA: b\n\n"),
		"no final line feed": file[:len(file)-1],
		"carriage returns":   bytes.ReplaceAll(file, []byte("\n"), []byte("\r\n")),
		"other columns":      bytes.Replace(file, file[90:91], append([]byte("\n"), file[90]), 1),
		"another algorithm":  replace("MIIHsjALBglghkgBZQMEAxID", "MIIHsjALBglghkgBZQMEAxED"), // ML-DSA-44
		"cut":                file[:len(file)/2],
	} {
		if bytes.Equal(b, file) {
			t.Fatalf("%s: nothing was changed", name)
		}
		if _, err := ParsePEM(b); err == nil {
			t.Errorf("%s: parsed", name)
		}
	}
}

// mac is HMAC-SHA-512 of the standard library.
func mac(key, msg []byte) []byte {
	h := hmac.New(sha512.New, key)
	h.Write(msg)
	return h.Sum(nil)
}
