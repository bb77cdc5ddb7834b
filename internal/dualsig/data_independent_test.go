package dualsig_test

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha3"
	"crypto/sha512"
	"testing"

	"github.com/latticekeep/latticekeep/internal/dualsig"
)

func TestDataSignatureVerifiesFromTheDocumentation(t *testing.T) {
	macKey := bytes.Repeat([]byte{2}, 64)
	k, err := dualsig.NewKey(0x01020304, bytes.Repeat([]byte{1}, 32), macKey)
	if err != nil {
		t.Fatal(err)
	}
	pqc, tag, err := k.SignData([]byte("data"))
	if err != nil {
		t.Fatal(err)
	}
	if !verifyIndependently(t, k.Public().Bytes(), "", []byte("data"), pqc) {
		t.Error("the ML-DSA-65 signature does not verify elsewhere over the data alone")
	}
	id := sha3.Sum256([]byte("\x00\x00\x00\x09ML-DSA-65" + "\x00\x00\x07\xa0" + string(k.Public().Bytes())))
	h := hmac.New(sha512.New, macKey)
	h.Write([]byte("\x00\x00\x00\x1dlatticekeep/data-signature/v1" + "\x00\x00\x00\x16ML-DSA-65+HMAC-SHA-512" + "\x00\x00\x00\x04\x01\x02\x03\x04" +
		"\x00\x00\x00\x20" + string(id[:]) + "\x00\x00\x00\x04data" + "\x00\x00\x0c\xed" + string(pqc)))
	if want := append([]byte{1, 1, 2, 3, 4}, h.Sum(nil)...); !bytes.Equal(tag, want) {
		t.Errorf("tag %x, want %x", tag, want)
	}
}
