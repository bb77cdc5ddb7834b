package dualsig

import (
	"bytes"
	"crypto/sha3"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"

	"github.com/cloudflare/circl/sign/mldsa/mldsa65"

	"github.com/latticekeep/latticekeep/internal/frame"
)

// Sizes in bytes.
const (
	SeedSize      = 32   // ξ, FIPS 204 §6.1
	PublicKeySize = 1952 // FIPS 204 table 2
	SignatureSize = 3309 // an ML-DSA-65 signature alone

	maxContext = 255 // FIPS 204 §5.2
)

// PrivateKey makes ML-DSA-65 signatures. It is safe for concurrent use. The zero value signs
// nothing.
type PrivateKey struct {
	key    *mldsa65.PrivateKey
	public *PublicKey
}

// NewPrivateKey derives the key from its 32-byte seed ξ (FIPS 204 §6.1). Expanded keys are never
// accepted, because circl imports damaged ones without an error.
func NewPrivateKey(seed []byte) (*PrivateKey, error) {
	if len(seed) != SeedSize {
		return nil, fmt.Errorf("deriving ML-DSA-65 key: seed has %d bytes, not %d", len(seed), SeedSize)
	}
	s := [SeedSize]byte(seed)
	defer clear(s[:])
	public, private := mldsa65.NewKeyFromSeed(&s)
	return &PrivateKey{key: private, public: newPublicKey(public)}, nil
}

// Public returns the public key, or nil for a zero key.
func (k *PrivateKey) Public() *PublicKey {
	if k == nil {
		return nil
	}
	return k.public
}

// Sign returns a hedged ML-DSA-65 signature of msg (3309 bytes; FIPS 204 §5.2, algorithm 2).
// context has at most 255 bytes and names the use. It is empty only for signatures that any FIPS
// 204 verifier must accept without knowing a context.
func (k *PrivateKey) Sign(context string, msg []byte) ([]byte, error) {
	sig := make([]byte, SignatureSize)
	if err := k.sign(context, msg, true, sig); err != nil {
		return nil, err
	}
	return sig, nil
}

// sign writes the signature to sig, which has SignatureSize bytes. Only tests against vectors set
// hedged to false.
func (k *PrivateKey) sign(context string, msg []byte, hedged bool, sig []byte) error {
	if k == nil || k.key == nil {
		return errors.New("signing: no key")
	}
	if len(context) > maxContext {
		return fmt.Errorf("signing: context has %d bytes, over %d", len(context), maxContext)
	}
	if err := mldsa65.SignTo(k.key, msg, []byte(context), hedged, sig); err != nil {
		return fmt.Errorf("signing with ML-DSA-65: %w", err)
	}
	return nil
}

// PublicKey verifies ML-DSA-65 signatures. It is safe for concurrent use. The zero value verifies
// nothing.
type PublicKey struct {
	key     *mldsa65.PublicKey
	encoded []byte
	id      string
}

// ParsePublicKey returns the key encoded in b, 1952 bytes (FIPS 204 §7.2, algorithm 23). Every byte
// string of that length is a key.
func ParsePublicKey(b []byte) (*PublicKey, error) {
	if len(b) != PublicKeySize {
		return nil, fmt.Errorf("parsing ML-DSA-65 public key: %d bytes, not %d", len(b), PublicKeySize)
	}
	key := new(mldsa65.PublicKey)
	key.Unpack((*[PublicKeySize]byte)(b))
	return newPublicKey(key), nil
}

func newPublicKey(key *mldsa65.PublicKey) *PublicKey {
	encoded := key.Bytes()
	return &PublicKey{key: key, encoded: encoded, id: publicKeyID(encoded)}
}

func publicKeyID(encoded []byte) string {
	id := sha3.Sum256(frame.Join("ML-DSA-65", encoded))
	return hex.EncodeToString(id[:])
}

// PublicKeyID returns the id of an encoded public key, as [PublicKey.ID] does, without parsing the
// key.
func PublicKeyID(encoded []byte) (string, error) {
	if len(encoded) != PublicKeySize {
		return "", fmt.Errorf("naming ML-DSA-65 public key: %d bytes, not %d", len(encoded), PublicKeySize)
	}
	return publicKeyID(encoded), nil
}

// Bytes returns the encoding that [ParsePublicKey] takes, or nil for a zero key.
func (k *PublicKey) Bytes() []byte {
	if k == nil {
		return nil
	}
	return bytes.Clone(k.encoded)
}

// ID returns the key's fingerprint, or "" for a zero key. The fingerprint is the SHA3-256 over the
// framed algorithm and key, as 64 lower-case hexadecimal digits.
func (k *PublicKey) ID() string {
	if k == nil {
		return ""
	}
	return k.id
}

// Verify reports whether sig is this key's ML-DSA-65 signature of msg for context (FIPS 204 §5.3,
// algorithm 3).
func (k *PublicKey) Verify(context string, msg, sig []byte) bool {
	if k == nil || k.key == nil || len(context) > maxContext || len(sig) != SignatureSize {
		return false
	}
	return mldsa65.Verify(k.key, msg, []byte(context), sig)
}

// pemType and spkiHeader follow RFC 9881 §4: a SubjectPublicKeyInfo with id-ml-dsa-65
// (2.16.840.1.101.3.4.3.18), no parameters, and the key as the bit string. Every length in it is
// fixed, so the DER is this header followed by the key.
const (
	pemType    = "PUBLIC KEY"
	spkiHeader = "\x30\x82\x07\xb2" + "\x30\x0b\x06\x09\x60\x86\x48\x01\x65\x03\x04\x03\x12" + "\x03\x82\x07\xa1\x00"
)

// MarshalPEM returns the key as a PEM file (RFC 9881 §4), or nil for a zero key.
func (k *PublicKey) MarshalPEM() []byte {
	if k == nil || k.key == nil {
		return nil
	}
	return pem.EncodeToMemory(&pem.Block{Type: pemType, Bytes: append([]byte(spkiHeader), k.encoded...)})
}

// ParsePEM is the inverse of MarshalPEM. It accepts only the canonical file: 64 columns, line
// feeds, and no text around the block.
func ParsePEM(b []byte) (*PublicKey, error) {
	block, _ := pem.Decode(b)
	if block == nil || block.Type != pemType {
		return nil, fmt.Errorf("parsing public key: not a PEM block of type %s", pemType)
	}
	encoded, ok := bytes.CutPrefix(block.Bytes, []byte(spkiHeader))
	if !ok {
		return nil, errors.New("parsing public key: not an ML-DSA-65 key")
	}
	key, err := ParsePublicKey(encoded)
	if err != nil {
		return nil, err
	}
	if !bytes.Equal(key.MarshalPEM(), b) {
		return nil, errors.New("parsing public key: text around the key, headers, or other line breaks than PEM's own")
	}
	return key, nil
}
