package kms

import (
	"crypto/subtle"
	"encoding/binary"
	"errors"

	"github.com/latticekeep/latticekeep/internal/frame"
)

const (
	// version is the first byte. The length of the key's id (two bytes), the id and the service's
	// ciphertext follow.
	version = 2

	maxID         = 1024
	maxCiphertext = 64 << 10
)

// wrapped is a key as it is stored.
type wrapped struct {
	key        string // id of the KMS key
	ciphertext []byte
}

var (
	// ErrForeign is the error of [Key.Unwrap] for text that the key does not open.
	ErrForeign = errors.New("the KMS key does not open this: it was wrapped by another key or for another purpose, or is damaged")
	// ErrForm is the error of [Key.Unwrap] for bytes that no key has wrapped.
	ErrForm = errors.New("this is no wrapped key of this release")
)

func (w wrapped) marshal() []byte {
	b := make([]byte, 0, 3+len(w.key)+len(w.ciphertext))
	b = append(b, version)
	b = binary.BigEndian.AppendUint16(b, uint16(len(w.key)))
	b = append(b, w.key...)
	return append(b, w.ciphertext...)
}

// parseWrapped parses the output of marshal and accepts no other form.
func parseWrapped(b []byte) (wrapped, error) {
	if len(b) < 3 || b[0] != version {
		return wrapped{}, ErrForm
	}
	n := int(binary.BigEndian.Uint16(b[1:]))
	rest := b[3:]
	if n == 0 || n > maxID || len(rest) <= n || len(rest)-n > maxCiphertext {
		return wrapped{}, ErrForm
	}
	for _, c := range rest[:n] {
		if c <= ' ' || c > '~' {
			return wrapped{}, ErrForm
		}
	}
	return wrapped{string(rest[:n]), rest[n:]}, nil
}

// KeyOf returns the id of the KMS key that wrapped b. ok is false when b is not a wrapped key.
func KeyOf(b []byte) (id string, ok bool) {
	w, err := parseWrapped(b)
	return w.key, err == nil
}

// Renamed returns b with the id of its key replaced, for a key that has got another name. b is the
// output of [Key.Wrap].
func Renamed(b []byte, id string) ([]byte, error) {
	w, err := parseWrapped(b)
	if err != nil {
		return nil, err
	}
	return wrapped{id, w.ciphertext}.marshal(), nil
}

// bind returns the plaintext for a service: the key with its context. The context is part of the
// plaintext because not every service supports associated data.
func bind(keyContext string, key []byte) []byte {
	return frame.Join("latticekeep/kms/v2", []byte(keyContext), key)
}

// unbind returns the key from the output of bind for the same context.
func unbind(keyContext string, plaintext []byte) ([]byte, error) {
	n := len(bind(keyContext, nil))
	if len(plaintext) < n {
		return nil, ErrForeign
	}
	want := bind(keyContext, plaintext[n:])
	defer clear(want)
	if subtle.ConstantTimeCompare(want, plaintext) != 1 {
		return nil, ErrForeign
	}
	return append([]byte(nil), plaintext[n:]...), nil
}
