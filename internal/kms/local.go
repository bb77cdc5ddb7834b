package kms

import (
	"bytes"
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
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"github.com/latticekeep/latticekeep/internal/durable"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/frame"
)

const (
	keySize    = 32
	filePrefix = "latticekeep-kms-key-1:"
)

// local is an AES-256-GCM key in a file.
type local struct {
	aead     cipher.AEAD
	id, path string
}

// CreateLocal writes a new key to path, which must not exist, with mode 0600. After a crash the
// file is either complete or absent.
func CreateLocal(path string) error {
	var key [keySize]byte
	_, _ = rand.Read(key[:]) // never fails
	defer clear(key[:])
	temp, err := durable.WriteTemp(path, filepath.Base(path)+".new-*", 0o600, []byte(formatFile(key[:])))
	if err == nil {
		defer os.Remove(temp)
		// Unlike a rename, a link never replaces a key. durable.MoveNew also works without links, but
		// a crash in between would leave an empty file, with which the service does not start.
		err = os.Link(temp, path)
	}
	if err == nil {
		err = durable.SyncFolder(filepath.Dir(path))
	}
	if err != nil {
		return fmt.Errorf("creating the key file: %w", durable.ExplainRefusal(filepath.Dir(path), err))
	}
	return nil
}

// OpenLocal reads the key at path. It rejects a file that others than its owner and group can
// access, and a file that is not a key file.
func OpenLocal(path string) (*Key, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fault.Wrap(fault.Invalid, "the KMS key file does not exist: name the key that this data directory was made with", err)
	} else if err != nil {
		return nil, fault.Wrap(fault.Unavailable, "the KMS key file cannot be read", durable.ExplainRefusal(path, err))
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, fault.Wrap(fault.Unavailable, "the KMS key file cannot be read", err)
	}
	if !info.Mode().IsRegular() {
		return nil, fault.New(fault.Invalid, "the KMS key file is not a regular file")
	}
	// A pod has a group of its own, and kubelet gives it the owner's access: a Secret gets mode
	// 0440, a file in a volume 0660.
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
	return newLocal(key, path)
}

// ParseLocal returns the key for the content of a key file, in the form that [CreateLocal] writes.
// The key has no file. Error: fault.Invalid.
func ParseLocal(text []byte) (*Key, error) {
	key, err := parseFile(text)
	if err != nil {
		return nil, err
	}
	defer clear(key)
	return newLocal(key, "")
}

// formatFile returns the content of a key file. parseFile accepts no other form.
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

func newLocal(key []byte, path string) (*Key, error) {
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, fmt.Errorf("preparing the KMS key: %w", err)
	}
	aead, err := cipher.NewGCMWithRandomNonce(block)
	if err != nil {
		return nil, fmt.Errorf("preparing the KMS key: %w", err)
	}
	sum := sha3.Sum256(frame.Join("latticekeep/kms-key-id/v1", key))
	id := "local:" + hex.EncodeToString(sum[:16])
	return &Key{id: id, service: &local{aead, id, path}, logger: slog.New(slog.DiscardHandler)}, nil
}

// localLabel is the associated data of version 2, which has the context in the plaintext. It
// separates the two versions under one key.
var localLabel = frame.Join("latticekeep/kms/local/v2")

func (l *local) encrypt(_ context.Context, plaintext []byte) ([]byte, error) {
	return l.aead.Seal(nil, nil, plaintext, localLabel), nil //nolint:gosec // the AEAD makes the nonce
}

func (l *local) decrypt(_ context.Context, ciphertext []byte) ([]byte, error) {
	plaintext, err := l.aead.Open(nil, nil, ciphertext, localLabel)
	if err != nil {
		return nil, ErrForeign
	}
	return plaintext, nil
}

// destroy overwrites the file before it removes it, so that the key does not remain in a free
// block. It leaves the file alone if it holds another key by now.
func (l *local) destroy(context.Context) (Destruction, error) {
	zeros := make([]byte, len(formatFile(make([]byte, keySize))))
	now, err := OpenLocal(l.path)
	switch content, _ := os.ReadFile(l.path); {
	case errors.Is(err, fs.ErrNotExist): // destroyed earlier, and the answer was lost
		return Destruction{Left: leftOfAFile}, nil
	case bytes.Equal(content, zeros): // overwritten earlier, but not removed
	case err != nil:
		return Destruction{}, err
	case now.id != l.id:
		return Destruction{}, fault.New(fault.Conflict, "the KMS key file holds another key now: it is left as it is")
	}
	f, err := os.OpenFile(l.path, os.O_WRONLY, 0)
	if err != nil {
		return Destruction{}, fault.Wrap(fault.Forbidden, "the KMS key file cannot be overwritten and removed: do it where it comes from", err)
	}
	_, err = f.Write(zeros)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil { // the key may be partly gone
		return Destruction{}, fault.Wrap(fault.Unavailable, "the KMS key file cannot be overwritten: look at its disk, and retry", err)
	}
	left := leftOfAFile
	if err := os.Remove(l.path); err != nil { // fails when this file alone is a mount
		left = "the file itself, overwritten, which cannot be removed; " + left
	}
	if err := durable.SyncFolder(filepath.Dir(l.path)); err != nil {
		return Destruction{}, fault.Wrap(fault.Unavailable, "the KMS key file was overwritten, and its folder cannot be synced: look at its disk, and retry", err)
	}
	return Destruction{Left: left}, nil
}

const leftOfAFile = "copies and backups of the key file, snapshots of its disk, and what a flash disk keeps of overwritten blocks"

func (l *local) close() error { return nil }
