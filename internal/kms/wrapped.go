package kms

import (
	"crypto/subtle"
	"encoding/binary"
	"errors"

	"github.com/latticekeep/latticekeep/internal/frame"
)

const (
	// version is followed by the length of the key's id (two bytes), the id and the service's ciphertext.
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
	// ErrForeign is what [Key.Unwrap] returns for what the key does not open.
	ErrForeign = errors.New("the KMS key does not open this: it was wrapped by another key or for another purpose, or is damaged")
	errForm    = errors.New("this is no wrapped key of this release")
)

func (w wrapped) marshal() []byte {
	b := make([]byte, 0, 3+len(w.key)+len(w.ciphertext))
	b = append(b, version)
	b = binary.BigEndian.AppendUint16(b, uint16(len(w.key)))
	b = append(b, w.key...)
	return append(b, w.ciphertext...)
}

// parseWrapped reads what marshal wrote, which is the only form.
func parseWrapped(b []byte) (wrapped, error) {
	if len(b) < 3 || b[0] != version {
		return wrapped{}, errForm
	}
	n := int(binary.BigEndian.Uint16(b[1:]))
	rest := b[3:]
	if n == 0 || n > maxID || len(rest) <= n || len(rest)-n > maxCiphertext {
		return wrapped{}, errForm
	}
	for _, c := range rest[:n] {
		if c <= ' ' || c > '~' {
			return wrapped{}, errForm
		}
	}
	return wrapped{string(rest[:n]), rest[n:]}, nil
}

// KeyOf returns the id of the KMS key that wrapped b. ok is false when b is not a wrapped key.
func KeyOf(b []byte) (id string, ok bool) {
	w, err := parseWrapped(b)
	return w.key, err == nil
}

// Renamed returns what a key of another id would have wrapped, if it were the same
// key by another name. b is what [Key.Wrap] returned.
func Renamed(b []byte, id string) ([]byte, error) {
	w, err := parseWrapped(b)
	if err != nil {
		return nil, err
	}
	return wrapped{id, w.ciphertext}.marshal(), nil
}

// bind returns what a service encrypts: the key with its context. Not every service takes
// associated data, so the context is part of the plaintext.
func bind(keyContext string, key []byte) []byte {
	return frame.Join("latticekeep/kms/v2", []byte(keyContext), key)
}

// unbind returns the key of what bind returned for the same context.
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
