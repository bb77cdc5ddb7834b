package envelope

import (
	"crypto/rand"
	"crypto/subtle"
	"errors"
	"fmt"

	"github.com/cloudflare/circl/kem/mlkem/mlkem768"

	"github.com/latticekeep/latticekeep/internal/frame"
	"github.com/latticekeep/latticekeep/internal/secret"
)

const (
	labelMessageKey  = "latticekeep/message/key/v1"
	labelMessageData = "latticekeep/message/data/v1"

	// KEMSeedSize is the size of the seed of a [KEMKey]: d ‖ z, FIPS 203 §7.1.
	KEMSeedSize = seedSize
	// KEMCiphertextSize is the size of an ML-KEM-768 ciphertext.
	KEMCiphertextSize = mlkem768.CiphertextSize
)

// KEMKey is one version of a named key: an ML-KEM-768 key pair that many messages are encrypted to.
// It is safe for concurrent use. The zero value seals and opens nothing.
type KEMKey struct {
	public  *mlkem768.PublicKey
	private *mlkem768.PrivateKey
	hash    [32]byte // H(ek), SHA3-256 of the encapsulation key
}

// NewKEMKey derives the key pair from its 64-byte seed. It does not keep the slice.
func NewKEMKey(seed []byte) (*KEMKey, error) {
	if len(seed) != KEMSeedSize {
		return nil, fmt.Errorf("deriving ML-KEM-768 key: seed has %d bytes, not %d", len(seed), KEMSeedSize)
	}
	k := new(KEMKey)
	k.public, k.private = mlkem768.NewKeyFromSeed(seed)
	var expanded [mlkem768.PrivateKeySize]byte
	defer clear(expanded[:])
	k.private.Pack(expanded[:])
	copy(k.hash[:], expanded[mlkem768.PrivateKeySize-2*32:]) // expanded ends in H(ek) ‖ z, FIPS 203 §6.1
	return k, nil
}

// MessageContext says which version of which tenant's key a message is for. The message does not
// store it: the caller that opens it states the expected one.
type MessageContext struct {
	Tenant, KeyID string
	Version       uint32
}

func (c MessageContext) frame(label string, more ...[]byte) []byte {
	fields := [][]byte{[]byte(c.Tenant), []byte(c.KeyID), frame.Uint64(uint64(c.Version))}
	return frame.Join(label, append(fields, more...)...)
}

// Message is data encrypted to a [KEMKey]. Every message has its own shared secret and salt, so GCM
// does not limit the number of messages per key.
type Message struct {
	Salt       [saltSize]byte
	KEM        []byte // ML-KEM-768 ciphertext, 1088 bytes
	Commitment [commitmentSize]byte
	Nonce      [nonceSize]byte
	Ciphertext []byte // AES-256-GCM ciphertext with its 16-byte tag
}

// messageRandom holds all random bytes of one message, drawn at once: ML-KEM message ‖ salt ‖
// nonce.
type messageRandom [mlkem768.EncapsulationSeedSize + saltSize + nonceSize]byte

// Seal encrypts plaintext to the key. It fails only on a zero key or a plaintext above 16 MiB.
func (k *KEMKey) Seal(c MessageContext, plaintext []byte) (*Message, error) {
	var random messageRandom
	defer clear(random[:])
	rand.Read(random[:]) // never fails: crypto/rand ends the program instead
	return k.seal(c, plaintext, &random)
}

func (k *KEMKey) seal(c MessageContext, plaintext []byte, random *messageRandom) (*Message, error) {
	if k == nil || k.public == nil {
		return nil, errors.New("sealing message: no key")
	}
	if len(plaintext) > maxPlaintext {
		return nil, fmt.Errorf("sealing message: plaintext is over %d bytes", maxPlaintext)
	}
	m := &Message{KEM: make([]byte, mlkem768.CiphertextSize)}
	encapsulation, rest := random[:mlkem768.EncapsulationSeedSize], random[mlkem768.EncapsulationSeedSize:]
	copy(m.Nonce[:], rest[copy(m.Salt[:], rest):])

	var ss [mlkem768.SharedKeySize]byte
	defer clear(ss[:])
	k.public.EncapsulateTo(m.KEM, ss[:], encapsulation)
	var key [KeySize]byte
	defer clear(key[:])
	if err := k.derive(&key, &m.Commitment, &ss, m, c); err != nil {
		return nil, fmt.Errorf("sealing message: %w", err)
	}
	data, err := newGCM(key[:])
	if err != nil {
		return nil, fmt.Errorf("sealing message: %w", err)
	}
	m.Ciphertext = data.Seal(nil, m.Nonce[:], plaintext, c.frame(labelMessageData))
	return m, nil
}

// Open returns the plaintext of m, or [ErrOpen]. As in [OpenCredential], it returns early only for
// wrong lengths, and every other failure costs the same operations.
func (k *KEMKey) Open(c MessageContext, m *Message) (secret.Bytes, error) {
	if k == nil || k.private == nil || m == nil || len(m.KEM) != mlkem768.CiphertextSize ||
		len(m.Ciphertext) < tagSize || len(m.Ciphertext) > maxPlaintext+tagSize {
		return nil, ErrOpen
	}
	// A changed KEM ciphertext gives a random secret (FIPS 203 §6.3), which the commitment exposes.
	var ss [mlkem768.SharedKeySize]byte
	defer clear(ss[:])
	k.private.DecapsulateTo(ss[:], m.KEM)

	var key, none [KeySize]byte
	defer clear(key[:])
	var commitment [commitmentSize]byte
	if err := k.derive(&key, &commitment, &ss, m, c); err != nil {
		return nil, ErrOpen
	}
	ok := subtle.ConstantTimeCompare(commitment[:], m.Commitment[:])
	// A key that does not match the commitment is replaced by zeros before GCM runs.
	subtle.ConstantTimeCopy(1-ok, key[:], none[:])

	data, err := newGCM(key[:])
	if err != nil {
		return nil, ErrOpen
	}
	plaintext := make([]byte, 0, len(m.Ciphertext)-tagSize)
	plaintext, err = data.Open(plaintext, m.Nonce[:], m.Ciphertext, c.frame(labelMessageData))
	if ok&asInt(err == nil) != 1 {
		clear(plaintext)
		return nil, ErrOpen
	}
	return plaintext, nil
}

// derive sets key and commitment to the 64 bytes of HKDF-SHA-512 over the shared secret, bound to
// the public key, the KEM ciphertext and the context.
func (k *KEMKey) derive(key *[KeySize]byte, commitment *[commitmentSize]byte, ss *[mlkem768.SharedKeySize]byte, m *Message, c MessageContext) error {
	output, err := derive(ss[:], m.Salt[:], c.frame(labelMessageKey, k.hash[:], m.KEM), KeySize+commitmentSize)
	if err != nil {
		return err
	}
	copy(commitment[:], output[copy(key[:], output):])
	clear(output)
	return nil
}
