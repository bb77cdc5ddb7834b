// Package kms holds the outermost of the three layers: the key that wraps
// every tenant's keys and never lies in the store.
//
// [Local] keeps it in a file on the same machine. That is one layer less than
// a key-management service, since who reads the disk reads both.
package kms

import (
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"crypto/sha3"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/frame"
)

const (
	keySize       = 32
	wrappedPrefix = 1 // version byte
	filePrefix    = "latticekeep-kms-key-1:"
)

// Local wraps keys with AES-256-GCM under one key from a file. It is safe for
// concurrent use.
type Local struct {
	aead cipher.AEAD
	id   string
}

// CreateLocal writes a new key to path, which must not exist, with mode 0600.
// After a crash the file is there whole or not at all.
func CreateLocal(path string) error {
	var key [keySize]byte
	_, _ = rand.Read(key[:]) // never fails
	defer clear(key[:])
	dir := filepath.Dir(path)
	f, err := os.CreateTemp(dir, filepath.Base(path)+".new-*") // mode 0600
	if err != nil {
		return fmt.Errorf("creating the key file: %w", err)
	}
	defer os.Remove(f.Name())
	_, err = f.WriteString(formatFile(key[:]))
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Link(f.Name(), path) // unlike a rename it never replaces a key
	}
	if err != nil {
		return fmt.Errorf("creating the key file: %w", err)
	}
	d, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("creating the key file: %w", err)
	}
	defer d.Close()
	return d.Sync()
}

// OpenLocal reads the key at path. It refuses a file that is open to others than
// its owner and group, and one that is not a key file.
func OpenLocal(path string) (*Local, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fault.Wrap(fault.Invalid, "the KMS key file does not exist: name the key that this data directory was made with", err)
	} else if err != nil {
		return nil, fault.Wrap(fault.Unavailable, "the KMS key file cannot be read", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, fault.Wrap(fault.Unavailable, "the KMS key file cannot be read", err)
	}
	if !info.Mode().IsRegular() {
		return nil, fault.New(fault.Invalid, "the KMS key file is not a regular file")
	}
	// In a pod the group is that of the pod alone, and kubelet gives it what the owner has: a Secret becomes 0440, a file of a volume 0660.
	if info.Mode().Perm()&0o007 != 0 {
		return nil, fault.New(fault.Invalid, fmt.Sprintf(
			"the KMS key file is open to others than its owner and group (mode %04o): run chmod 600 on it, and replace the key if it was exposed", info.Mode().Perm()))
	}
	var text [128]byte
	defer clear(text[:])
	n, err := f.Read(text[:])
	if err != nil && n == 0 {
		return nil, fault.Wrap(fault.Invalid, "the KMS key file is empty: restore it from where you keep it", err)
	}
	key, err := parseFile(text[:n])
	if err != nil {
		return nil, err
	}
	defer clear(key)
	return newLocal(key)
}

// formatFile returns the one form of a key file, which parseFile reads.
func formatFile(key []byte) string {
	return filePrefix + base64.StdEncoding.EncodeToString(key) + "\n"
}

func parseFile(text []byte) ([]byte, error) {
	encoded, ok := strings.CutPrefix(string(text), filePrefix)
	key, err := base64.StdEncoding.DecodeString(strings.TrimSuffix(encoded, "\n"))
	if !ok || err != nil || len(key) != keySize || formatFile(key) != string(text) {
		return nil, fault.New(fault.Invalid, "the KMS key file is not a latticekeep key: restore it from where you keep it")
	}
	return key, nil
}

func newLocal(key []byte) (*Local, error) {
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, fmt.Errorf("preparing the KMS key: %w", err)
	}
	aead, err := cipher.NewGCMWithRandomNonce(block)
	if err != nil {
		return nil, fmt.Errorf("preparing the KMS key: %w", err)
	}
	sum := sha3.Sum256(frame.Join("latticekeep/kms-key-id/v1", key))
	return &Local{aead: aead, id: "local:" + hex.EncodeToString(sum[:16])}, nil
}

// ID names the key without telling anything of it.
func (l *Local) ID() string { return l.id }

// Wrap encrypts a key for the given context: version byte, 12 bytes nonce,
// ciphertext with tag.
func (l *Local) Wrap(_ context.Context, keyContext string, key []byte) ([]byte, error) {
	return l.aead.Seal([]byte{wrappedPrefix}, nil, key, associatedData(keyContext)), nil
}

var errUnwrap = errors.New("the KMS key does not open this: it was wrapped by another key or for another purpose, or is damaged")

// Unwrap opens what [Local.Wrap] made for the same context.
func (l *Local) Unwrap(_ context.Context, keyContext string, wrapped []byte) ([]byte, error) {
	if len(wrapped) < 1 || wrapped[0] != wrappedPrefix {
		return nil, errUnwrap
	}
	key, err := l.aead.Open(nil, nil, wrapped[1:], associatedData(keyContext))
	if err != nil {
		return nil, errUnwrap
	}
	return key, nil
}

func associatedData(keyContext string) []byte {
	return frame.Join("latticekeep/kms/v1", []byte(keyContext))
}
