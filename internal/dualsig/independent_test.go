package dualsig_test

// This file verifies signatures with another implementation of FIPS 204, over bytes written out by
// hand from docs/formats.md.

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha3"
	"crypto/sha512"
	"encoding/hex"
	"encoding/pem"
	"testing"

	"filippo.io/mldsa"
	mldsax509 "filippo.io/mldsa/x509"

	"github.com/latticekeep/latticekeep/internal/dualsig"
)

// verifyIndependently verifies an ML-DSA-65 signature without this package.
func verifyIndependently(t *testing.T, publicKey []byte, context string, msg, sig []byte) bool {
	t.Helper()
	key, err := mldsa.NewPublicKey(mldsa.MLDSA65(), publicKey)
	if err != nil {
		t.Fatal(err)
	}
	return mldsa.Verify(key, msg, sig, &mldsa.Options{Context: context}) == nil
}

func TestSingleSignatureVerifiesElsewhere(t *testing.T) {
	k, err := dualsig.NewPrivateKey(bytes.Repeat([]byte{1}, 32))
	if err != nil {
		t.Fatal(err)
	}
	for _, context := range []string{"", "latticekeep/audit/v1"} {
		sig, err := k.Sign(context, []byte("message"))
		if err != nil {
			t.Fatal(err)
		}
		if !verifyIndependently(t, k.Public().Bytes(), context, []byte("message"), sig) {
			t.Errorf("context %q: does not verify", context)
		}
		if verifyIndependently(t, k.Public().Bytes(), context+"x", []byte("message"), sig) {
			t.Errorf("context %q: verifies for another", context)
		}
	}
}

func TestSignatureMadeElsewhereVerifies(t *testing.T) {
	seed := bytes.Repeat([]byte{1}, 32)
	theirs, err := mldsa.NewPrivateKey(mldsa.MLDSA65(), seed)
	if err != nil {
		t.Fatal(err)
	}
	sig, err := theirs.Sign(nil, []byte("message"), &mldsa.Options{Context: "latticekeep/audit/v1"})
	if err != nil {
		t.Fatal(err)
	}
	ours, err := dualsig.NewPrivateKey(seed)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(ours.Public().Bytes(), theirs.PublicKey().Bytes()) {
		t.Fatal("one seed gives two public keys")
	}
	if !ours.Public().Verify("latticekeep/audit/v1", []byte("message"), sig) {
		t.Error("does not verify")
	}
}

func TestDualSignatureVerifiesFromTheDocumentation(t *testing.T) {
	macKey := bytes.Repeat([]byte{2}, 64)
	k, err := dualsig.NewKey(0x01020304, bytes.Repeat([]byte{1}, 32), macKey)
	if err != nil {
		t.Fatal(err)
	}
	sig, err := k.Sign("latticekeep/record/v1", []byte("message"))
	if err != nil {
		t.Fatal(err)
	}
	if len(sig) != 3378 || !bytes.Equal(sig[:5], []byte{1, 1, 2, 3, 4}) {
		t.Fatalf("%d bytes, header %x", len(sig), sig[:5])
	}
	pqc, tag := sig[5:5+3309], sig[5+3309:]

	id := sha3.Sum256([]byte("\x00\x00\x00\x09ML-DSA-65" + "\x00\x00\x07\xa0" + string(k.Public().Bytes())))
	if got := k.Public().ID(); got != hex.EncodeToString(id[:]) {
		t.Errorf("key id %s, want %x", got, id)
	}
	framed := "\x00\x00\x00\x1dlatticekeep/dual-signature/v1" + "\x00\x00\x00\x16ML-DSA-65+HMAC-SHA-512" + "\x00\x00\x00\x04\x01\x02\x03\x04" +
		"\x00\x00\x00\x20" + string(id[:]) + "\x00\x00\x00\x15latticekeep/record/v1" + "\x00\x00\x00\x07message"
	if !verifyIndependently(t, k.Public().Bytes(), "latticekeep/record/v1", []byte(framed), pqc) {
		t.Error("the ML-DSA-65 part does not verify")
	}
	h := hmac.New(sha512.New, macKey)
	h.Write([]byte("\x00\x00\x00\x21latticekeep/dual-signature/mac/v1"))
	h.Write([]byte{0, 0, 0, byte(len(framed))})
	h.Write([]byte(framed))
	h.Write([]byte{0, 0, 0x0c, 0xed})
	h.Write(pqc)
	if !hmac.Equal(h.Sum(nil), tag) {
		t.Error("the MAC differs")
	}
}

func TestPublicKeyFileIsReadElsewhere(t *testing.T) {
	k, err := dualsig.NewPrivateKey(bytes.Repeat([]byte{1}, 32))
	if err != nil {
		t.Fatal(err)
	}
	block, rest := pem.Decode(k.Public().MarshalPEM())
	if block == nil || block.Type != "PUBLIC KEY" || len(rest) != 0 {
		t.Fatal("not a PEM file of one public key")
	}
	parsed, err := mldsax509.ParsePKIXPublicKey(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	theirs, ok := parsed.(*mldsa.PublicKey)
	if !ok || theirs.Parameters() != mldsa.MLDSA65() || !bytes.Equal(theirs.Bytes(), k.Public().Bytes()) {
		t.Fatalf("read as %T", parsed)
	}
	der, err := mldsax509.MarshalPKIXPublicKey(theirs)
	if err != nil || !bytes.Equal(der, block.Bytes) {
		t.Fatalf("encoded otherwise elsewhere: %v", err)
	}
}
