package envelope

import (
	"crypto/rand"
	"crypto/sha3"
	"crypto/subtle"
	"errors"
	"fmt"

	"github.com/cloudflare/circl/kem"
	"github.com/cloudflare/circl/kem/mlkem/mlkem1024"
	"github.com/cloudflare/circl/kem/mlkem/mlkem768"

	"github.com/latticekeep/latticekeep/internal/frame"
	"github.com/latticekeep/latticekeep/internal/secret"
)

const (
	labelEtcdKey  = "latticekeep/etcd-seed/key/v1"
	labelEtcdData = "latticekeep/etcd-seed/data/v1"

	etcdHeader = 1 + saltSize + commitmentSize + nonceSize

	// EtcdSecretSize is the size of the secret of an [EtcdKey].
	EtcdSecretSize = extraSize
	// MaxEtcdSeed is the largest seed that an [EtcdKey] wraps. kube-apiserver's has 32 bytes, and
	// stores at most 1023 bytes of ciphertext.
	MaxEtcdSeed = 512
)

// KEM names the parameter set of an [EtcdKey] (FIPS 203 §8).
type KEM string

const (
	MLKEM768  KEM = "ML-KEM-768"
	MLKEM1024 KEM = "ML-KEM-1024"
)

func (a KEM) scheme() (kem.Scheme, error) {
	switch a {
	case MLKEM768:
		return mlkem768.Scheme(), nil
	case MLKEM1024:
		return mlkem1024.Scheme(), nil
	}
	return nil, fmt.Errorf("unknown algorithm %q: it is %s or %s", string(a), MLKEM768, MLKEM1024)
}

// EtcdKey wraps the seeds from which kube-apiserver derives the keys of what it writes to etcd. It
// is an ML-KEM key pair and a 32-byte secret, and both are needed to wrap and to open: a reader of
// the public key can make nothing that opens. It is safe for concurrent use. The zero value wraps
// and opens nothing.
type EtcdKey struct {
	algorithm KEM
	scheme    kem.Scheme
	public    kem.PublicKey
	private   kem.PrivateKey
	encoded   []byte   // encapsulation key
	hash      [32]byte // H(ek), SHA3-256 of the encapsulation key
	secret    [EtcdSecretSize]byte
}

// NewEtcdKey derives the key pair from its 64-byte seed (d ‖ z, FIPS 203 §7.1), and adds the 32-byte
// secret. It keeps neither slice.
func NewEtcdKey(a KEM, seed, mixed []byte) (*EtcdKey, error) {
	scheme, err := a.scheme()
	if err != nil {
		return nil, fmt.Errorf("deriving etcd key: %w", err)
	}
	if len(seed) != KEMSeedSize || len(mixed) != EtcdSecretSize {
		return nil, fmt.Errorf("deriving etcd key: seed has %d bytes and secret %d, not %d and %d", len(seed), len(mixed), KEMSeedSize, EtcdSecretSize)
	}
	k := &EtcdKey{algorithm: a, scheme: scheme, secret: [EtcdSecretSize]byte(mixed)}
	k.public, k.private = scheme.DeriveKeyPair(seed)
	if k.encoded, err = k.public.MarshalBinary(); err != nil {
		return nil, fmt.Errorf("deriving etcd key: %w", err)
	}
	k.hash = sha3.Sum256(k.encoded)
	return k, nil
}

// PublicKey returns a copy of the encapsulation key, or nil for a zero key.
func (k *EtcdKey) PublicKey() []byte {
	if k == nil {
		return nil
	}
	return append([]byte(nil), k.encoded...)
}

// Wrap encrypts a seed of at most 512 bytes for keyID, which names this key. ciphertext is version ‖
// salt ‖ commitment ‖ nonce ‖ AES-256-GCM ciphertext, 93 bytes longer than the seed. encapsulated
// is the ML-KEM ciphertext: 1088 bytes, or 1568 for ML-KEM-1024.
func (k *EtcdKey) Wrap(keyID string, seed []byte) (ciphertext, encapsulated []byte, err error) {
	var random messageRandom
	defer clear(random[:])
	rand.Read(random[:]) // never fails: crypto/rand ends the program instead
	return k.wrap(keyID, seed, &random)
}

func (k *EtcdKey) wrap(keyID string, seed []byte, random *messageRandom) (ciphertext, encapsulated []byte, err error) {
	if k == nil || k.public == nil {
		return nil, nil, errors.New("wrapping etcd seed: no key")
	}
	if len(seed) > MaxEtcdSeed {
		return nil, nil, fmt.Errorf("wrapping etcd seed: over %d bytes", MaxEtcdSeed)
	}
	message, rest := random[:mlkem768.EncapsulationSeedSize], random[mlkem768.EncapsulationSeedSize:]
	salt, nonce := rest[:saltSize], rest[saltSize:]
	encapsulated, ss, err := k.scheme.EncapsulateDeterministically(k.public, message)
	if err != nil {
		return nil, nil, fmt.Errorf("wrapping etcd seed: %w", err)
	}
	defer clear(ss)
	var key [KeySize]byte
	defer clear(key[:])
	var commitment [commitmentSize]byte
	if err := k.derive(&key, &commitment, ss, salt, keyID, encapsulated); err != nil {
		return nil, nil, fmt.Errorf("wrapping etcd seed: %w", err)
	}
	data, err := newGCM(key[:])
	if err != nil {
		return nil, nil, fmt.Errorf("wrapping etcd seed: %w", err)
	}
	ciphertext = make([]byte, 0, etcdHeader+len(seed)+tagSize)
	ciphertext = append(append(append(append(ciphertext, version), salt...), commitment[:]...), nonce...)
	return data.Seal(ciphertext, nonce, seed, k.frame(labelEtcdData, keyID, encapsulated)), encapsulated, nil
}

// Open returns the seed in what [EtcdKey.Wrap] returned for keyID, or [ErrOpen]. As in
// [OpenCredential], it returns early only for wrong lengths, and every other failure costs the same
// operations.
func (k *EtcdKey) Open(keyID string, ciphertext, encapsulated []byte) (secret.Bytes, error) {
	if k == nil || k.private == nil || len(encapsulated) != k.scheme.CiphertextSize() ||
		len(ciphertext) < etcdHeader+tagSize || len(ciphertext) > etcdHeader+MaxEtcdSeed+tagSize {
		return nil, ErrOpen
	}
	salt, rest := ciphertext[1:1+saltSize], ciphertext[1+saltSize:]
	stated, nonce, sealed := rest[:commitmentSize], rest[commitmentSize:][:nonceSize], rest[commitmentSize+nonceSize:]
	// A changed KEM ciphertext gives a random secret (FIPS 203 §6.3), which the commitment exposes.
	ss, err := k.scheme.Decapsulate(k.private, encapsulated)
	if err != nil {
		return nil, ErrOpen
	}
	defer clear(ss)
	var key, none [KeySize]byte
	defer clear(key[:])
	var commitment [commitmentSize]byte
	if err := k.derive(&key, &commitment, ss, salt, keyID, encapsulated); err != nil {
		return nil, ErrOpen
	}
	ok := subtle.ConstantTimeByteEq(ciphertext[0], version) & subtle.ConstantTimeCompare(commitment[:], stated)
	// A key that does not match the commitment is replaced by zeros before GCM runs.
	subtle.ConstantTimeCopy(1-ok, key[:], none[:])

	data, err := newGCM(key[:])
	if err != nil {
		return nil, ErrOpen
	}
	seed := make([]byte, 0, len(sealed)-tagSize)
	seed, err = data.Open(seed, nonce, sealed, k.frame(labelEtcdData, keyID, encapsulated))
	if ok&asInt(err == nil) != 1 {
		clear(seed)
		return nil, ErrOpen
	}
	return seed, nil
}

// derive sets key and commitment to the 64 bytes of HKDF-SHA-512 over ss ‖ secret, bound to the
// algorithm, the key id, the public key and the KEM ciphertext.
func (k *EtcdKey) derive(key *[KeySize]byte, commitment *[commitmentSize]byte, ss, salt []byte, keyID string, encapsulated []byte) error {
	input := make([]byte, 0, len(ss)+EtcdSecretSize)
	input = append(append(input, ss...), k.secret[:]...)
	defer clear(input)
	output, err := derive(input, salt, k.frame(labelEtcdKey, keyID, encapsulated), KeySize+commitmentSize)
	if err != nil {
		return err
	}
	copy(commitment[:], output[copy(key[:], output):])
	clear(output)
	return nil
}

func (k *EtcdKey) frame(label, keyID string, encapsulated []byte) []byte {
	return frame.Join(label, []byte(k.algorithm), []byte(keyID), k.hash[:], encapsulated)
}
