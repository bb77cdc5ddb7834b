package envelope_test

import (
	"bytes"
	"crypto/mlkem"
	"crypto/sha3"
	"testing"

	"github.com/latticekeep/latticekeep/internal/envelope"
)

// etcdParameters is what docs/formats.md says of one algorithm, from the standard library.
type etcdParameters struct {
	algorithm, framed string // framed has the length before it
	kemLength         string // length of the KEM ciphertext
	public            []byte
	encapsulate       func() (shared, kem []byte)
	decapsulate       func(kem []byte) ([]byte, error)
}

func etcdAlgorithms(t *testing.T, seed []byte) []etcdParameters {
	t.Helper()
	small, err := mlkem.NewDecapsulationKey768(seed)
	if err != nil {
		t.Fatal(err)
	}
	large, err := mlkem.NewDecapsulationKey1024(seed)
	if err != nil {
		t.Fatal(err)
	}
	return []etcdParameters{
		{"ML-KEM-768", "\x00\x00\x00\x0aML-KEM-768", "\x00\x00\x04\x40", small.EncapsulationKey().Bytes(), small.EncapsulationKey().Encapsulate, small.Decapsulate},
		{"ML-KEM-1024", "\x00\x00\x00\x0bML-KEM-1024", "\x00\x00\x06\x20", large.EncapsulationKey().Bytes(), large.EncapsulationKey().Encapsulate, large.Decapsulate},
	}
}

// keys derives the AES key and the commitment as docs/formats.md defines them, and the associated
// data.
func (p etcdParameters) keys(t *testing.T, shared, mixed, salt, kem []byte) (key, commitment, aad []byte) {
	t.Helper()
	hash := sha3.Sum256(p.public)
	fields := p.framed + "\x00\x00\x00\x043-ab" + "\x00\x00\x00\x20" + string(hash[:]) + p.kemLength + string(kem)
	derived := expand(t, append(bytes.Clone(shared), mixed...), salt, "\x00\x00\x00\x1clatticekeep/etcd-seed/key/v1"+fields, 64)
	return derived[:32], derived[32:], []byte("\x00\x00\x00\x1dlatticekeep/etcd-seed/data/v1" + fields)
}

func TestEtcdSeedOpensFromTheDocumentation(t *testing.T) {
	seed, mixed := bytes.Repeat([]byte{7}, 64), bytes.Repeat([]byte{8}, 32)
	for _, p := range etcdAlgorithms(t, seed) {
		ours, err := envelope.NewEtcdKey(envelope.KEM(p.algorithm), seed, mixed)
		if err != nil || !bytes.Equal(ours.PublicKey(), p.public) {
			t.Fatalf("%s: another public key (%v)", p.algorithm, err)
		}
		ciphertext, kem, err := ours.Wrap("3-ab", []byte("the seed"))
		if err != nil || ciphertext[0] != 1 || len(ciphertext) != 1+32+32+12+len("the seed")+16 {
			t.Fatalf("%s: %d bytes, %v", p.algorithm, len(ciphertext), err)
		}
		shared, err := p.decapsulate(kem)
		if err != nil {
			t.Fatal(err)
		}
		key, commitment, aad := p.keys(t, shared, mixed, ciphertext[1:33], kem)
		if !bytes.Equal(commitment, ciphertext[33:65]) {
			t.Fatalf("%s: the commitment differs", p.algorithm)
		}
		plaintext, err := gcm(t, key).Open(nil, ciphertext[65:77], ciphertext[77:], aad)
		if err != nil || string(plaintext) != "the seed" {
			t.Errorf("%s: %q, %v", p.algorithm, plaintext, err)
		}
	}
}

func TestEtcdSeedMadeFromTheDocumentationOpens(t *testing.T) {
	seed, mixed := bytes.Repeat([]byte{7}, 64), bytes.Repeat([]byte{8}, 32)
	for _, p := range etcdAlgorithms(t, seed) {
		ours, err := envelope.NewEtcdKey(envelope.KEM(p.algorithm), seed, mixed)
		if err != nil {
			t.Fatal(err)
		}
		salt, nonce := bytes.Repeat([]byte{1}, 32), bytes.Repeat([]byte{2}, 12)
		// The second is made with the public key alone.
		for _, secret := range [][]byte{mixed, make([]byte, 32)} {
			shared, kem := p.encapsulate()
			key, commitment, aad := p.keys(t, shared, secret, salt, kem)
			ciphertext := bytes.Join([][]byte{{1}, salt, commitment, nonce, gcm(t, key).Seal(nil, nonce, []byte("the seed"), aad)}, nil)
			plaintext, err := ours.Open("3-ab", ciphertext, kem)
			if isRight := bytes.Equal(secret, mixed); isRight != (err == nil && string(plaintext) == "the seed") {
				t.Errorf("%s with the right secret (%v): %q, %v", p.algorithm, isRight, plaintext, err)
			}
		}
	}
}
