package envelope_test

// This file opens what the package sealed with only the standard library and docs/formats.md. Every
// byte that is hashed or authenticated is written out here.

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/hpke"
	"crypto/mlkem"
	"crypto/sha3"
	"crypto/sha512"
	"encoding/hex"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/envelope"
)

func gcm(t *testing.T, key []byte) cipher.AEAD {
	t.Helper()
	block, err := aes.NewCipher(key)
	if err != nil {
		t.Fatal(err)
	}
	aead, err := cipher.NewGCM(block)
	if err != nil {
		t.Fatal(err)
	}
	return aead
}

func expand(t *testing.T, secret, salt []byte, info string, n int) []byte {
	t.Helper()
	key, err := hkdf.Key(sha512.New, secret, salt, info, n)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func TestCredentialOpensFromTheDocumentation(t *testing.T) {
	wrappingKey := bytes.Repeat([]byte{5}, 32)
	credential, wrap, err := envelope.SealCredential(wrappingKey, 0x01020304, envelope.Context{Tenant: "ten_x", ID: "cred_yz", Version: 258}, []byte("the value"))
	if err != nil {
		t.Fatal(err)
	}
	body, err := credential.MarshalBinary()
	if err != nil {
		t.Fatal(err)
	}
	if body[0] != 1 || len(body) != 1+32+1088+32+12+len("the value")+16 || len(wrap) != 129 || !bytes.Equal(wrap[:5], []byte{1, 1, 2, 3, 4}) {
		t.Fatalf("body %d bytes, version %d; wrap %d bytes, header %x", len(body), body[0], len(wrap), wrap[:5])
	}
	salt, kem, commitment, nonce, ciphertext := body[1:33], body[33:1121], body[1121:1153], body[1153:1165], body[1165:]

	const context = "\x00\x00\x00\x05ten_x" + "\x00\x00\x00\x07cred_yz" + "\x00\x00\x00\x08\x00\x00\x00\x00\x00\x00\x01\x02"
	w := expand(t, wrappingKey, salt, "\x00\x00\x00\x22latticekeep/credential/wrap-key/v1"+context, 32)
	seed, err := gcm(t, w).Open(nil, wrap[5:17], wrap[17:], []byte("\x00\x00\x00\x1elatticekeep/credential/wrap/v1"+context+"\x00\x00\x00\x05\x01\x01\x02\x03\x04"))
	if err != nil {
		t.Fatalf("opening the wrap: %v", err)
	}
	if len(seed) != 96 {
		t.Fatalf("the wrap holds %d bytes", len(seed))
	}
	key, err := mlkem.NewDecapsulationKey768(seed[:64])
	if err != nil {
		t.Fatal(err)
	}
	shared, err := key.Decapsulate(kem)
	if err != nil {
		t.Fatal(err)
	}
	hash := sha3.Sum256(key.EncapsulationKey().Bytes())
	info := "\x00\x00\x00\x1dlatticekeep/credential/key/v1" + context + "\x00\x00\x00\x20" + string(hash[:]) + "\x00\x00\x04\x40" + string(kem)
	derived := expand(t, append(shared, seed[64:]...), salt, info, 64)
	if !bytes.Equal(derived[32:], commitment) {
		t.Fatal("the commitment differs")
	}
	plaintext, err := gcm(t, derived[:32]).Open(nil, nonce, ciphertext, []byte("\x00\x00\x00\x1elatticekeep/credential/data/v1"+context))
	if err != nil || string(plaintext) != "the value" {
		t.Fatalf("opening the ciphertext: %q, %v", plaintext, err)
	}
}

func TestKeyOpensFromTheDocumentation(t *testing.T) {
	wrappingKey := bytes.Repeat([]byte{6}, 32)
	blob, err := envelope.SealKey(wrappingKey, "ten_x/mac/1", []byte("the key"))
	if err != nil {
		t.Fatal(err)
	}
	if blob[0] != 1 || len(blob) != 1+32+12+len("the key")+16 {
		t.Fatalf("%d bytes, version %d", len(blob), blob[0])
	}
	const context = "\x00\x00\x00\x0bten_x/mac/1"
	w := expand(t, wrappingKey, blob[1:33], "\x00\x00\x00\x1blatticekeep/key/wrap-key/v1"+context, 32)
	key, err := gcm(t, w).Open(nil, blob[33:45], blob[45:], []byte("\x00\x00\x00\x17latticekeep/key/wrap/v1"+context))
	if err != nil || string(key) != "the key" {
		t.Fatalf("%q, %v", key, err)
	}
}

func TestValueOpensFromTheDocumentation(t *testing.T) {
	at := time.Unix(0x68b58a40, 0)
	for _, suite := range []struct {
		name, framed string
		kem          hpke.KEM
		enc          int
		keyLength    string
	}{
		{"MLKEM768-X25519", "\x00\x00\x00\x0fMLKEM768-X25519", hpke.MLKEM768X25519(), 1120, "\x00\x00\x04\xc0"},
		{"MLKEM768", "\x00\x00\x00\x08MLKEM768", hpke.MLKEM768(), 1088, "\x00\x00\x04\xa0"},
	} {
		for _, scope := range []struct{ name, framed string }{
			{"Strict", "\x00\x00\x00\x06Strict" + "\x00\x00\x00\x04shop" + "\x00\x00\x00\x02db"},
			{"Namespace", "\x00\x00\x00\x09Namespace" + "\x00\x00\x00\x04shop" + "\x00\x00\x00\x00"},
			{"Cluster", "\x00\x00\x00\x07Cluster" + "\x00\x00\x00\x00" + "\x00\x00\x00\x00"},
		} {
			private, err := suite.kem.GenerateKey()
			if err != nil {
				t.Fatal(err)
			}
			publicBytes := private.PublicKey().Bytes()
			hash := sha3.Sum256([]byte(suite.framed + suite.keyLength + string(publicBytes)))
			id := hex.EncodeToString(hash[:])

			public, err := envelope.ParseSealingPublicKey(envelope.Suite(suite.name), publicBytes)
			if err != nil || public.ID() != id {
				t.Fatalf("%s: key id %s, want %s (%v)", suite.name, public.ID(), id, err)
			}
			data, err := public.SealValue(envelope.Header{Suite: envelope.Suite(suite.name), KeyID: id, Scope: envelope.Scope(scope.name), Namespace: "shop", Name: "db", CredentialType: "tls"},
				"tls.key", at, []byte("the value"))
			if err != nil {
				t.Fatal(err)
			}
			info := "\x00\x00\x00\x20latticekeep/sealed-value/info/v1" + "\x00\x00\x00\x01\x01" + suite.framed + "\x00\x00\x00\x40" + id + scope.framed + "\x00\x00\x00\x03tls"
			aad := "\x00\x00\x00\x1flatticekeep/sealed-value/aad/v1" + "\x00\x00\x00\x07tls.key" + "\x00\x00\x00\x08\x00\x00\x00\x00\x68\xb5\x8a\x40"
			recipient, err := hpke.NewRecipient(data[1:1+suite.enc], private, hpke.HKDFSHA512(), hpke.AES256GCM(), []byte(info))
			if err != nil {
				t.Fatal(err)
			}
			plaintext, err := recipient.Open([]byte(aad), data[1+suite.enc:])
			if err != nil || string(plaintext) != "the value" || data[0] != 1 {
				t.Errorf("%s, %s: version %d, %q, %v", suite.name, scope.name, data[0], plaintext, err)
			}
		}
	}
}
