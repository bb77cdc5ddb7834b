package kms

import (
	"bytes"
	"encoding/hex"
	"errors"
	"strings"
	"testing"
)

// golden is a key of 32 bytes 7, wrapped by the key of 32 bytes 1 for the context ten_a/1/wrapping.
const (
	golden = "0200266c6f63616c3a66613638656334393661366437663466313162396165336634626134653035385dc556dc017156d9f899df3120113301391e0c" +
		"35b32134461c8c97a36fd93bdb6dcf8179bea84c850c7d954f9588a1875c341e3012017883ba1f2c56bef47b85e7f2ef9b9b133a8286a0646c1113c5" +
		"b5efc2c32247b072b75b78759c8185d6099972aba7a69d94b589b1"
)

// Every key that a release has wrapped must open for good.
func TestTheStoredFormOpens(t *testing.T) {
	k, err := newLocal(bytes.Repeat([]byte{1}, keySize), "")
	if err != nil {
		t.Fatal(err)
	}
	b, err := hex.DecodeString(golden)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := k.Unwrap(t.Context(), "ten_a/1/wrapping", b); err != nil || !bytes.Equal(got, secretKey) {
		t.Errorf("unwrapping the golden key: %v", err)
	}
	if _, err := k.Unwrap(t.Context(), "ten_a/2/wrapping", b); !errors.Is(err, ErrForeign) {
		t.Errorf("unwrapping it for another context: %v, want ErrForeign", err)
	}
	if id, ok := KeyOf(b); !ok || id != k.ID() {
		t.Errorf("it names %q, %v", id, ok)
	}
}

func TestAMalformedFormIsRefused(t *testing.T) {
	long := strings.Repeat("k", maxID+1)
	for name, b := range map[string]string{
		"empty": "", "version only": "\x02", "no length": "\x02\x00", "empty id": "\x02\x00\x00c", "id cut": "\x02\x00\x05abc", "no ciphertext": "\x02\x00\x01k",
		"version 1": "\x01\x00\x01kc", "version 3": "\x03\x00\x01kc", "a space in the id": "\x02\x00\x03a kc", "a control character in the id": "\x02\x00\x02a\nc", "an umlaut in the id": "\x02\x00\x02\xc3\xa4c",
		"a long id": "\x02\x04\x01" + long + "c", "a long ciphertext": "\x02\x00\x01k" + strings.Repeat("c", maxCiphertext+1),
	} {
		if _, err := parseWrapped([]byte(b)); err == nil {
			t.Errorf("%s was read", name)
		}
		if _, ok := KeyOf([]byte(b)); ok {
			t.Errorf("%s names a key", name)
		}
	}
}

func TestTheContextIsBoundByItsLength(t *testing.T) {
	for _, other := range []string{"ab", "a", "abcd", ""} {
		if _, err := unbind(other, bind("abc", []byte("key"))); !errors.Is(err, ErrForeign) {
			t.Errorf("%q: %v", other, err)
		}
	}
	plaintext := bind("abc", []byte("key"))
	for n := range plaintext {
		if _, err := unbind("abc", plaintext[:n]); err == nil {
			t.Errorf("cut to %d bytes", n)
		}
	}
	if _, err := unbind("abc", append(plaintext, 0)); err == nil {
		t.Error("with a byte more")
	}
}

func FuzzParseWrapped(f *testing.F) {
	f.Fuzz(func(t *testing.T, b []byte) {
		w, err := parseWrapped(b)
		if err != nil {
			return
		}
		if !bytes.Equal(w.marshal(), b) {
			t.Fatal("parse and marshal differ")
		}
	})
}
