package envelope

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha512"
	"fmt"

	"github.com/latticekeep/latticekeep/internal/frame"
	"github.com/latticekeep/latticekeep/internal/secret"
)

const (
	labelKeyWrapKey = "latticekeep/key/wrap-key/v1"
	labelKeyWrap    = "latticekeep/key/wrap/v1"

	keyHeader = 1 + saltSize + nonceSize
	maxKey    = 64 << 10
)

// SealKey encrypts a key (a seed, a MAC key; at most 64 KiB) with wrappingKey
// (32 bytes). context says which key of which owner it is, and opens nothing else.
// The result is version ‖ salt ‖ nonce ‖ ciphertext, 61 bytes more than key; the
// salt gives each blob an AES key of its own, so their number is not limited by GCM.
func SealKey(wrappingKey []byte, context string, key []byte) ([]byte, error) {
	var random [saltSize + nonceSize]byte
	rand.Read(random[:]) // never fails: crypto/rand ends the program instead
	return sealKey(wrappingKey, context, key, &random)
}

func sealKey(wrappingKey []byte, context string, key []byte, random *[saltSize + nonceSize]byte) ([]byte, error) {
	if len(key) > maxKey {
		return nil, fmt.Errorf("sealing key: over %d bytes", maxKey)
	}
	salt, nonce := random[:saltSize], random[saltSize:]
	wrapper, err := deriveGCM(wrappingKey, salt, frame.Join(labelKeyWrapKey, []byte(context)))
	if err != nil {
		return nil, fmt.Errorf("sealing key: %w", err)
	}
	blob := make([]byte, 0, keyHeader+len(key)+tagSize)
	blob = append(append(blob, version), random[:]...)
	return wrapper.Seal(blob, nonce, key, frame.Join(labelKeyWrap, []byte(context))), nil
}

// OpenKey returns the key in blob, or [ErrOpen].
func OpenKey(wrappingKey []byte, context string, blob []byte) (secret.Bytes, error) {
	if len(blob) < keyHeader+tagSize || len(blob) > keyHeader+maxKey+tagSize || blob[0] != version {
		return nil, ErrOpen
	}
	salt, nonce := blob[1:1+saltSize], blob[1+saltSize:keyHeader]
	wrapper, err := deriveGCM(wrappingKey, salt, frame.Join(labelKeyWrapKey, []byte(context)))
	if err != nil {
		return nil, ErrOpen
	}
	key, err := wrapper.Open(make([]byte, 0, len(blob)-keyHeader-tagSize), nonce, blob[keyHeader:], frame.Join(labelKeyWrap, []byte(context)))
	if err != nil {
		return nil, ErrOpen
	}
	return key, nil
}

// derive is HKDF-SHA-512 (RFC 5869). It fails when n is over 16320 bytes.
func derive(input, salt, info []byte, n int) ([]byte, error) {
	return hkdf.Key(sha512.New, input, salt, string(info), n)
}

// deriveGCM returns AES-256-GCM under the key that HKDF-SHA-512 derives from
// wrappingKey (32 bytes) with salt and info.
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

// newGCM returns AES-256-GCM with a 12-byte nonce and a 16-byte tag. The length is
// checked here because aes.NewCipher would make AES-128 of a shorter key.
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
