package envelope_test

import (
	"bytes"
	"crypto/mlkem"
	"crypto/sha3"
	"testing"

	"github.com/latticekeep/latticekeep/internal/envelope"
)

const messageContext = "\x00\x00\x00\x05ten_x" + "\x00\x00\x00\x07tkey_yz" + "\x00\x00\x00\x08\x00\x00\x00\x00\x00\x00\x01\x02"

// messageKeys derives the data key and the commitment as docs/formats.md defines them.
func messageKeys(t *testing.T, public *mlkem.EncapsulationKey768, shared, salt, kem []byte) (key, commitment []byte) {
	t.Helper()
	hash := sha3.Sum256(public.Bytes())
	info := "\x00\x00\x00\x1alatticekeep/message/key/v1" + messageContext + "\x00\x00\x00\x20" + string(hash[:]) + "\x00\x00\x04\x40" + string(kem)
	derived := expand(t, shared, salt, info, 64)
	return derived[:32], derived[32:]
}

const messageAAD = "\x00\x00\x00\x1blatticekeep/message/data/v1" + messageContext

func TestMessageOpensFromTheDocumentation(t *testing.T) {
	seed := bytes.Repeat([]byte{7}, 64)
	ours, err := envelope.NewKEMKey(seed)
	if err != nil {
		t.Fatal(err)
	}
	m, err := ours.Seal(envelope.MessageContext{Tenant: "ten_x", KeyID: "tkey_yz", Version: 258}, []byte("the data"))
	if err != nil {
		t.Fatal(err)
	}
	theirs, err := mlkem.NewDecapsulationKey768(seed)
	if err != nil {
		t.Fatal(err)
	}
	shared, err := theirs.Decapsulate(m.KEM)
	if err != nil {
		t.Fatal(err)
	}
	key, commitment := messageKeys(t, theirs.EncapsulationKey(), shared, m.Salt[:], m.KEM)
	if !bytes.Equal(commitment, m.Commitment[:]) {
		t.Fatal("the commitment differs")
	}
	plaintext, err := gcm(t, key).Open(nil, m.Nonce[:], m.Ciphertext, []byte(messageAAD))
	if err != nil || string(plaintext) != "the data" {
		t.Fatalf("%q, %v", plaintext, err)
	}
}

func TestMessageMadeFromTheDocumentationOpens(t *testing.T) {
	seed := bytes.Repeat([]byte{7}, 64)
	theirs, err := mlkem.NewDecapsulationKey768(seed)
	if err != nil {
		t.Fatal(err)
	}
	shared, kem := theirs.EncapsulationKey().Encapsulate()
	m := &envelope.Message{KEM: kem, Salt: [32]byte{1}, Nonce: [12]byte{2}}
	key, commitment := messageKeys(t, theirs.EncapsulationKey(), shared, m.Salt[:], kem)
	m.Commitment = [32]byte(commitment)
	m.Ciphertext = gcm(t, key).Seal(nil, m.Nonce[:], []byte("the data"), []byte(messageAAD))
	ours, err := envelope.NewKEMKey(seed)
	if err != nil {
		t.Fatal(err)
	}
	plaintext, err := ours.Open(envelope.MessageContext{Tenant: "ten_x", KeyID: "tkey_yz", Version: 258}, m)
	if err != nil || string(plaintext) != "the data" {
		t.Fatalf("%d bytes, %v", len(plaintext), err)
	}
}
