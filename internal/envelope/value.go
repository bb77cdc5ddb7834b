package envelope

import (
	"bytes"
	"crypto/hpke"
	"crypto/sha3"
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	"github.com/latticekeep/latticekeep/internal/frame"
	"github.com/latticekeep/latticekeep/internal/secret"
)

const (
	labelValueInfo = "latticekeep/sealed-value/info/v1"
	labelValue     = "latticekeep/sealed-value/aad/v1"
)

// Suite names the key encapsulation of a sealing key. Both suites use HKDF-SHA-512 and AES-256-GCM
// as the other two parts of the HPKE suite.
type Suite string

const (
	// SuiteMLKEM768X25519 is the default. It is as strong as the stronger of its two parts.
	SuiteMLKEM768X25519 Suite = "MLKEM768-X25519"
	// SuiteMLKEM768 has no classical part.
	SuiteMLKEM768 Suite = "MLKEM768"
)

// HPKE identifiers (RFC 9180 §7, draft-ietf-hpke-pq). Sealed values in git outlive every release,
// so the numbers are fixed here and do not depend on a library's defaults.
const (
	kdfHKDFSHA512 = 0x0003
	aeadAES256GCM = 0x0002

	kemMLKEM768X25519 = 0x647a
	kemMLKEM768       = 0x0041
)

// kem returns the suite's KEM and the length of its encapsulated key in bytes.
func (s Suite) kem() (hpke.KEM, int, error) {
	switch s {
	case SuiteMLKEM768X25519:
		k, err := hpke.NewKEM(kemMLKEM768X25519)
		return k, 1088 + 32, err
	case SuiteMLKEM768:
		k, err := hpke.NewKEM(kemMLKEM768)
		return k, 1088, err
	}
	return nil, 0, errors.New("unknown suite")
}

func kdfAndAEAD() (hpke.KDF, hpke.AEAD, error) {
	kdf, err := hpke.NewKDF(kdfHKDFSHA512)
	if err != nil {
		return nil, nil, err
	}
	aead, err := hpke.NewAEAD(aeadAES256GCM)
	return kdf, aead, err
}

// Scope says how far a sealed value may be moved.
type Scope string

const (
	ScopeStrict    Scope = "Strict"    // only this name in this namespace
	ScopeNamespace Scope = "Namespace" // any name in this namespace
	ScopeCluster   Scope = "Cluster"   // anywhere the sealing key is used
)

// Header is the data that every value of one SealedCredential is bound to.
type Header struct {
	Suite                           Suite
	KeyID                           string // names the sealing key, see [SealingPublicKey.ID]
	Scope                           Scope
	Namespace, Name, CredentialType string
}

// info returns the HPKE info of h. It fails when h does not name this suite and key id. Parts of
// the name that the scope leaves free are empty. The scope itself is bound, so it cannot be widened
// later.
func (h Header) info(s Suite, keyID string) ([]byte, error) {
	if h.Suite != s {
		return nil, errors.New("the header names another suite than the key's")
	}
	if h.KeyID != keyID {
		return nil, errors.New("the header names another sealing key")
	}
	switch h.Scope {
	case ScopeStrict:
		if h.Name == "" || h.Namespace == "" {
			return nil, errors.New("scope Strict needs a namespace and a name")
		}
	case ScopeNamespace:
		if h.Namespace == "" {
			return nil, errors.New("scope Namespace needs a namespace")
		}
		h.Name = ""
	case ScopeCluster:
		h.Name, h.Namespace = "", ""
	default:
		return nil, errors.New("unknown scope")
	}
	return frame.Join(labelValueInfo, []byte{version}, []byte(h.Suite), []byte(h.KeyID), []byte(h.Scope),
		[]byte(h.Namespace), []byte(h.Name), []byte(h.CredentialType)), nil
}

// valueAAD returns the associated data of one value. Manifests carry whole seconds, so a value
// sealed with a fraction could never be opened. valueAAD therefore refuses fractions.
func valueAAD(key string, sealedAt time.Time) ([]byte, error) {
	if sealedAt.Nanosecond() != 0 {
		return nil, errors.New("sealedAt is not a whole second")
	}
	return frame.Join(labelValue, []byte(key), frame.Uint64(uint64(sealedAt.Unix()))), nil
}

// SealingKey is a private key that opens the values of SealedCredentials. It is safe for concurrent
// use. The zero value opens nothing.
type SealingKey struct {
	key    hpke.PrivateKey
	public *SealingPublicKey
}

// GenerateSealingKey returns a new key for s.
func GenerateSealingKey(s Suite) (*SealingKey, error) {
	kem, _, err := s.kem()
	if err != nil {
		return nil, fmt.Errorf("generating sealing key: %w", err)
	}
	key, err := kem.GenerateKey()
	if err != nil {
		return nil, fmt.Errorf("generating sealing key: %w", err)
	}
	return newSealingKey(s, key), nil
}

// ParseSealingKey returns the key with the seed b: 32 bytes for MLKEM768-X25519, 64 bytes (d ‖ z,
// FIPS 203 §7.1) for MLKEM768.
func ParseSealingKey(s Suite, b []byte) (*SealingKey, error) {
	kem, _, err := s.kem()
	if err != nil {
		return nil, fmt.Errorf("parsing sealing key: %w", err)
	}
	// The KEM checks the length. In one suite it keeps the slice that it gets, so it gets a copy.
	key, err := kem.NewPrivateKey(bytes.Clone(b))
	if err != nil {
		return nil, fmt.Errorf("parsing sealing key: %w", err)
	}
	return newSealingKey(s, key), nil
}

func newSealingKey(s Suite, key hpke.PrivateKey) *SealingKey {
	return &SealingKey{key: key, public: newSealingPublicKey(s, key.PublicKey())}
}

// Bytes returns a copy of the seed that [ParseSealingKey] takes.
func (k *SealingKey) Bytes() (secret.Bytes, error) {
	if k == nil || k.key == nil {
		return nil, errors.New("encoding sealing key: no key")
	}
	b, err := k.key.Bytes()
	if err != nil {
		return nil, fmt.Errorf("encoding sealing key: %w", err)
	}
	return bytes.Clone(b), nil
}

// Public returns the public half, or nil for a zero key.
func (k *SealingKey) Public() *SealingPublicKey {
	if k == nil {
		return nil
	}
	return k.public
}

// OpenValue returns the plaintext of data that was sealed for h, key and sealedAt, or [ErrOpen].
func (k *SealingKey) OpenValue(h Header, key string, sealedAt time.Time, data []byte) (secret.Bytes, error) {
	if k == nil || k.key == nil {
		return nil, ErrOpen
	}
	info, err := h.info(k.public.suite, k.public.id)
	if err != nil {
		return nil, ErrOpen
	}
	aad, err := valueAAD(key, sealedAt)
	if err != nil {
		return nil, ErrOpen
	}
	kdf, aead, err := kdfAndAEAD()
	if err != nil {
		return nil, ErrOpen
	}
	_, encSize, err := k.public.suite.kem()
	if err != nil || len(data) < 1+encSize+tagSize || len(data) > 1+encSize+tagSize+maxPlaintext || data[0] != version {
		return nil, ErrOpen
	}
	recipient, err := hpke.NewRecipient(data[1:1+encSize], k.key, kdf, aead, info)
	if err != nil {
		return nil, ErrOpen
	}
	plaintext, err := recipient.Open(aad, data[1+encSize:])
	if err != nil {
		return nil, ErrOpen
	}
	return plaintext, nil
}

// SealingPublicKey is the public key that values are sealed for. It is safe for concurrent use. The
// zero value seals nothing.
type SealingPublicKey struct {
	suite   Suite
	key     hpke.PublicKey
	encoded []byte
	id      string
}

// ParseSealingPublicKey returns the public key encoded in b: 1216 bytes for MLKEM768-X25519, 1184
// for MLKEM768. The ML-KEM part must be reduced (FIPS 203 §7.2). A low-order X25519 part is refused
// when the key is used.
func ParseSealingPublicKey(s Suite, b []byte) (*SealingPublicKey, error) {
	kem, _, err := s.kem()
	if err != nil {
		return nil, fmt.Errorf("parsing public sealing key: %w", err)
	}
	key, err := kem.NewPublicKey(bytes.Clone(b))
	if err != nil {
		return nil, fmt.Errorf("parsing public sealing key: %w", err)
	}
	return newSealingPublicKey(s, key), nil
}

func newSealingPublicKey(s Suite, key hpke.PublicKey) *SealingPublicKey {
	encoded := key.Bytes()
	id := sha3.Sum256(frame.Join(string(s), encoded))
	return &SealingPublicKey{suite: s, key: key, encoded: encoded, id: hex.EncodeToString(id[:])}
}

// Suite returns the suite of the key, or "" for a zero key.
func (k *SealingPublicKey) Suite() Suite {
	if k == nil {
		return ""
	}
	return k.suite
}

// Bytes returns the encoding that [ParseSealingPublicKey] takes, or nil for a zero key.
func (k *SealingPublicKey) Bytes() []byte {
	if k == nil {
		return nil
	}
	return bytes.Clone(k.encoded)
}

// ID returns the SHA3-256 over the framed suite and key as 64 lower-case hexadecimal digits, or ""
// for a zero key.
func (k *SealingPublicKey) ID() string {
	if k == nil {
		return ""
	}
	return k.id
}

// SealValue encrypts the value of one data key, bound to h, key and sealedAt (a whole second). It
// returns version ‖ encapsulated key ‖ ciphertext. Each value is a separate message, so one can be
// replaced without knowing the others. HPKE base mode binds the value but does not say who sealed
// it.
func (k *SealingPublicKey) SealValue(h Header, key string, sealedAt time.Time, plaintext []byte) ([]byte, error) {
	if k == nil || k.key == nil {
		return nil, errors.New("sealing value: no public key")
	}
	if len(plaintext) > maxPlaintext {
		return nil, fmt.Errorf("sealing value: over %d bytes", maxPlaintext)
	}
	info, err := h.info(k.suite, k.id)
	if err != nil {
		return nil, fmt.Errorf("sealing value: %w", err)
	}
	aad, err := valueAAD(key, sealedAt)
	if err != nil {
		return nil, fmt.Errorf("sealing value: %w", err)
	}
	kdf, aead, err := kdfAndAEAD()
	if err != nil {
		return nil, fmt.Errorf("sealing value: %w", err)
	}
	enc, sender, err := hpke.NewSender(k.key, kdf, aead, info)
	if err != nil {
		return nil, fmt.Errorf("encapsulating to sealing key: %w", err)
	}
	ciphertext, err := sender.Seal(aad, plaintext)
	if err != nil {
		return nil, fmt.Errorf("sealing value: %w", err)
	}
	data := make([]byte, 0, 1+len(enc)+len(ciphertext))
	data = append(append(data, version), enc...)
	return append(data, ciphertext...), nil
}
