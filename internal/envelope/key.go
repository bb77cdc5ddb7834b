package envelope

import (
	"crypto/rand"
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

// SealKey encrypts a key (a seed or a MAC key, at most 64 KiB) with wrappingKey (32 bytes). context
// says which key of which owner it is; the blob opens with this context only. The result is version
// ‖ salt ‖ nonce ‖ ciphertext, 61 bytes longer than key. The salt gives each blob its own AES key,
// so GCM does not limit the number of blobs.
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
