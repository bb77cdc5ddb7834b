// Package envelope encrypts credentials in three layers, messages to a named key, the keyring's
// keys, the values of a SealedCredential, and the seeds of kube-apiserver.
//
// A credential is sealed under a fresh ML-KEM-768 key pair (layer 1). The tenant's wrapping key
// wraps the seed of this pair and 32 random bytes (layer 2). The key for AES-256-GCM (layer 3) is
// derived from the shared secret and those 32 bytes together. So breaking ML-KEM alone opens
// nothing, and neither does the database without the wrapping key. A message is encapsulated to a
// key pair that many messages share ([KEMKey]). A value of a SealedCredential is one HPKE message
// to the deployment's sealing key. A seed of kube-apiserver is encapsulated to a key pair, and mixed
// with a secret, of one generation of a key set ([EtcdKey]).
//
// What must stay true:
//   - keys are stored as seeds, and every length is checked before a primitive gets the input, so
//     no input makes this package panic;
//   - a commitment to the data key is compared before AES-GCM uses the key, because one GCM
//     ciphertext can be made to open under two keys;
//   - every failure gives the same [ErrOpen] after the same operations;
//   - everything derived or authenticated has its own label (docs/formats.md specifies the bytes).
//
// The package is pure: it uses no store, clock or context. It does not say who sealed something
// (see dualsig), does not decide who may open it, and does not keep keys.
package envelope

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha512"
	"crypto/subtle"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/cloudflare/circl/kem/mlkem/mlkem768"

	"github.com/latticekeep/latticekeep/internal/frame"
	"github.com/latticekeep/latticekeep/internal/secret"
)

// ErrOpen is the only answer when something does not open, whatever the reason.
var ErrOpen = errors.New("envelope does not open")

// KeySize is the size in bytes of every wrapping key.
const KeySize = 32

// Sizes in bytes, and the first byte of every blob of this package.
const (
	version = 1

	saltSize  = 32
	nonceSize = 12
	tagSize   = 16

	seedSize  = mlkem768.KeySeedSize // d ‖ z, FIPS 203 §7.1
	extraSize = 32                   // r, mixed with the shared secret

	commitmentSize = 32

	credentialHeader = 1 + saltSize + mlkem768.CiphertextSize + commitmentSize + nonceSize
	wrapHeader       = 1 + 4 + nonceSize
	wrapSize         = wrapHeader + seedSize + extraSize + tagSize

	// maxPlaintext is far above the largest plaintext that a caller accepts, and far below the
	// limits of AES-GCM and of a frame.
	maxPlaintext = 16 << 20
)

// Labels of the frames. Each has one purpose.
const (
	labelDataKey = "latticekeep/credential/key/v1"
	labelData    = "latticekeep/credential/data/v1"
	labelWrapKey = "latticekeep/credential/wrap-key/v1"
	labelWrap    = "latticekeep/credential/wrap/v1"
)

// Context says what a credential's ciphertext belongs to. The envelope does not store it: the
// caller that opens it states the expected one.
type Context struct {
	Tenant, ID string
	Version    uint64
}

func (c Context) frame(label string, more ...[]byte) []byte {
	fields := [][]byte{[]byte(c.Tenant), []byte(c.ID), frame.Uint64(c.Version)}
	return frame.Join(label, append(fields, more...)...)
}

// Credential is the body of a sealed credential, which the record's signature covers. The wrap is
// stored beside it and has its own associated data, so a new wrapping key needs no new signature.
type Credential struct {
	Salt       [saltSize]byte
	KEM        []byte // ML-KEM-768 ciphertext, 1088 bytes
	Commitment [commitmentSize]byte
	Nonce      [nonceSize]byte
	Ciphertext []byte // AES-256-GCM ciphertext with its 16-byte tag
}

// credentialRandom holds all random bytes of one seal, drawn at once.
type credentialRandom struct {
	seed      [seedSize + extraSize]byte // content of the wrap: d ‖ z ‖ r
	message   [mlkem768.EncapsulationSeedSize]byte
	salt      [saltSize]byte
	nonce     [nonceSize]byte
	wrapNonce [nonceSize]byte
}

const credentialRandomSize = seedSize + extraSize + mlkem768.EncapsulationSeedSize + saltSize + 2*nonceSize

func (r *credentialRandom) set(b *[credentialRandomSize]byte) {
	rest := b[:]
	for _, part := range [][]byte{r.seed[:], r.message[:], r.salt[:], r.nonce[:], r.wrapNonce[:]} {
		rest = rest[copy(part, rest):]
	}
}

// SealCredential encrypts plaintext for c under a fresh ML-KEM-768 key pair, and wraps the pair's
// seed with wrappingKey (32 bytes). The wrap carries keyVersion, the version of wrappingKey.
// SealCredential fails only on a wrong key length or a plaintext above 16 MiB.
func SealCredential(wrappingKey []byte, keyVersion uint32, c Context, plaintext []byte) (body *Credential, wrap []byte, err error) {
	var b [credentialRandomSize]byte
	rand.Read(b[:]) // never fails: crypto/rand ends the program instead
	var random credentialRandom
	random.set(&b)
	clear(b[:])
	defer func() { random = credentialRandom{} }()
	return sealCredential(wrappingKey, keyVersion, c, plaintext, &random)
}

func sealCredential(wrappingKey []byte, keyVersion uint32, c Context, plaintext []byte, random *credentialRandom) (*Credential, []byte, error) {
	if len(wrappingKey) != KeySize {
		return nil, nil, fmt.Errorf("sealing credential: wrapping key has %d bytes, not %d", len(wrappingKey), KeySize)
	}
	if len(plaintext) > maxPlaintext {
		return nil, nil, fmt.Errorf("sealing credential: plaintext is over %d bytes", maxPlaintext)
	}
	body := &Credential{Salt: random.salt, Nonce: random.nonce, KEM: make([]byte, mlkem768.CiphertextSize)}

	var ss [mlkem768.SharedKeySize]byte
	defer clear(ss[:])
	pk, sk := mlkem768.NewKeyFromSeed(random.seed[:seedSize])
	pk.EncapsulateTo(body.KEM, ss[:], random.message[:])

	var key [KeySize]byte
	defer clear(key[:])
	if err := deriveDataKey(&key, &body.Commitment, &ss, random.seed[seedSize:], sk, body, c); err != nil {
		return nil, nil, fmt.Errorf("sealing credential: %w", err)
	}
	data, err := newGCM(key[:])
	if err != nil {
		return nil, nil, fmt.Errorf("sealing credential: %w", err)
	}
	body.Ciphertext = data.Seal(nil, body.Nonce[:], plaintext, c.frame(labelData))

	wrap := make([]byte, 1+4, wrapSize)
	wrap[0] = version
	binary.BigEndian.PutUint32(wrap[1:], keyVersion)
	wrapper, err := deriveGCM(wrappingKey, body.Salt[:], c.frame(labelWrapKey))
	if err != nil {
		return nil, nil, fmt.Errorf("wrapping seed: %w", err)
	}
	associated := c.frame(labelWrap, wrap)
	wrap = append(wrap, random.wrapNonce[:]...)
	return body, wrapper.Seal(wrap, random.wrapNonce[:], random.seed[:], associated), nil
}

// OpenCredential returns the plaintext of body, or [ErrOpen]. It returns early only for wrong
// lengths. Every other failure costs the same operations. So a changed wrap, a changed KEM
// ciphertext (which ML-KEM decapsulates to a random secret, FIPS 203 §6.3) and a changed ciphertext
// cannot be told apart.
func OpenCredential(wrappingKey []byte, c Context, body *Credential, wrap []byte) (secret.Bytes, error) {
	if len(wrappingKey) != KeySize || body.check() != nil || len(wrap) != wrapSize {
		return nil, ErrOpen
	}
	wrapper, err := deriveGCM(wrappingKey, body.Salt[:], c.frame(labelWrapKey))
	if err != nil {
		return nil, ErrOpen
	}
	// A wrap that does not open leaves a seed of zeros. The work continues with it, for equal cost.
	var seed [seedSize + extraSize]byte
	defer clear(seed[:])
	_, err = wrapper.Open(seed[:0], wrap[5:wrapHeader], wrap[wrapHeader:], c.frame(labelWrap, wrap[:5]))
	ok := asInt(err == nil) & subtle.ConstantTimeByteEq(wrap[0], version)

	var ss [mlkem768.SharedKeySize]byte
	defer clear(ss[:])
	_, sk := mlkem768.NewKeyFromSeed(seed[:seedSize])
	sk.DecapsulateTo(ss[:], body.KEM)

	var key, none [KeySize]byte
	defer clear(key[:])
	var commitment [commitmentSize]byte
	if err := deriveDataKey(&key, &commitment, &ss, seed[seedSize:], sk, body, c); err != nil {
		return nil, ErrOpen
	}
	ok &= subtle.ConstantTimeCompare(commitment[:], body.Commitment[:])
	// A key that does not match the commitment is replaced by zeros before GCM runs. GCM still
	// runs, so this failure costs as much as the others.
	subtle.ConstantTimeCopy(1-ok, key[:], none[:])

	data, err := newGCM(key[:])
	if err != nil {
		return nil, ErrOpen
	}
	plaintext := make([]byte, 0, len(body.Ciphertext)-tagSize)
	plaintext, err = data.Open(plaintext, body.Nonce[:], body.Ciphertext, c.frame(labelData))
	if ok&asInt(err == nil) != 1 {
		clear(plaintext)
		return nil, ErrOpen
	}
	return plaintext, nil
}

// deriveDataKey sets key and commitment to the 64 bytes of HKDF-SHA-512 over ss ‖ r, bound to the
// public key, the KEM ciphertext and the context.
func deriveDataKey(key *[KeySize]byte, commitment *[commitmentSize]byte, ss *[mlkem768.SharedKeySize]byte, r []byte,
	sk *mlkem768.PrivateKey, body *Credential, c Context) error {
	// The expanded key ends in H(ek) ‖ z (FIPS 203 §6.1), so H(ek), the SHA3-256 of the
	// encapsulation key, need not be computed again.
	var expanded [mlkem768.PrivateKeySize]byte
	defer clear(expanded[:])
	sk.Pack(expanded[:])
	hash := expanded[mlkem768.PrivateKeySize-2*32:][:32]

	var input [mlkem768.SharedKeySize + extraSize]byte
	defer clear(input[:])
	copy(input[copy(input[:], ss[:]):], r)
	output, err := derive(input[:], body.Salt[:], c.frame(labelDataKey, hash, body.KEM), KeySize+commitmentSize)
	if err != nil {
		return err
	}
	copy(commitment[:], output[copy(key[:], output):])
	clear(output)
	return nil
}

func asInt(b bool) int {
	if b {
		return 1
	}
	return 0
}

// WrapKeyVersion returns the version of the wrapping key that opens wrap.
func WrapKeyVersion(wrap []byte) (uint32, error) {
	if len(wrap) != wrapSize || wrap[0] != version {
		return 0, errors.New("reading wrap: wrong length or unknown version")
	}
	return binary.BigEndian.Uint32(wrap[1:]), nil
}

// check returns an error for a nil body and for parts of a wrong length. No seal makes such a body.
func (c *Credential) check() error {
	switch {
	case c == nil:
		return errors.New("no credential body")
	case len(c.KEM) != mlkem768.CiphertextSize:
		return fmt.Errorf("KEM ciphertext has %d bytes, not %d", len(c.KEM), mlkem768.CiphertextSize)
	case len(c.Ciphertext) < tagSize || len(c.Ciphertext) > maxPlaintext+tagSize:
		return fmt.Errorf("ciphertext has %d bytes", len(c.Ciphertext))
	}
	return nil
}

// MarshalBinary returns version ‖ salt ‖ KEM ciphertext ‖ commitment ‖ nonce ‖ ciphertext. It fails
// when a part has a wrong length.
func (c *Credential) MarshalBinary() ([]byte, error) {
	if err := c.check(); err != nil {
		return nil, fmt.Errorf("encoding credential: %w", err)
	}
	b := make([]byte, 0, credentialHeader+len(c.Ciphertext))
	b = append(b, version)
	b = append(b, c.Salt[:]...)
	b = append(b, c.KEM...)
	b = append(b, c.Commitment[:]...)
	b = append(b, c.Nonce[:]...)
	return append(b, c.Ciphertext...), nil
}

// ParseCredential is the inverse of MarshalBinary. The result shares no memory with b.
func ParseCredential(b []byte) (*Credential, error) {
	if len(b) < credentialHeader+tagSize || len(b) > credentialHeader+maxPlaintext+tagSize {
		return nil, fmt.Errorf("decoding credential: %d bytes is not a credential's length", len(b))
	}
	if b[0] != version {
		return nil, fmt.Errorf("decoding credential: unknown version %d", b[0])
	}
	c := new(Credential)
	b = b[1:]
	b = b[copy(c.Salt[:], b):]
	c.KEM, b = bytes.Clone(b[:mlkem768.CiphertextSize]), b[mlkem768.CiphertextSize:]
	b = b[copy(c.Commitment[:], b):]
	b = b[copy(c.Nonce[:], b):]
	c.Ciphertext = bytes.Clone(b)
	return c, nil
}

// derive returns n bytes of HKDF-SHA-512 (RFC 5869). It fails when n is over 16320 bytes.
func derive(input, salt, info []byte, n int) ([]byte, error) {
	return hkdf.Key(sha512.New, input, salt, string(info), n)
}

// deriveGCM returns AES-256-GCM under the key that HKDF-SHA-512 derives from wrappingKey (32 bytes)
// with salt and info.
func deriveGCM(wrappingKey, salt, info []byte) (cipher.AEAD, error) {
	if len(wrappingKey) != KeySize {
		return nil, fmt.Errorf("wrapping key has %d bytes, not %d", len(wrappingKey), KeySize)
	}
	key, err := derive(wrappingKey, salt, info, KeySize)
	if err != nil {
		return nil, err
	}
	defer clear(key)
	return newGCM(key)
}

// newGCM returns AES-256-GCM with a 12-byte nonce and a 16-byte tag. It checks the length because
// aes.NewCipher would return AES-128 or AES-192 for a shorter key.
func newGCM(key []byte) (cipher.AEAD, error) {
	if len(key) != KeySize {
		return nil, fmt.Errorf("AES key has %d bytes, not %d", len(key), KeySize)
	}
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, err
	}
	return cipher.NewGCM(block)
}
