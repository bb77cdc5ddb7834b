package kmsplugin

import (
	"crypto/sha3"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	"github.com/latticekeep/latticekeep/internal/canonical"
	"github.com/latticekeep/latticekeep/internal/durable"
)

// record is the content of newest.json: the newest key set that the plugin of this node has loaded.
type record struct {
	Version  int    `json:"version"`
	KeySet   string `json:"key_set"` // id
	Revision uint64 `json:"revision"`
	KeyID    string `json:"key_id"` // key id of the current generation
	Digest   string `json:"digest"` // SHA3-256 of the file, in hexadecimal digits
}

// readRecord returns nil if there is no record.
func readRecord(dir string) (*record, error) {
	b, err := readFile(filepath.Join(dir, recordFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil //nolint:nilnil // no record is an answer
	}
	r := new(record)
	if err == nil {
		err = canonical.Decode(b, r)
	}
	if err == nil {
		err = checkVersion(r.Version)
	}
	if err != nil {
		return nil, fmt.Errorf("reading the record of the newest key set: %w", err)
	}
	return r, nil
}

// checkNotOlder refuses a key set that is older than the record, or another one.
func (r *record) checkNotOlder(s *KeySet, digest string) error {
	const remedy = "copy the newest keyset.json to this node"
	switch {
	case r == nil:
		return nil
	case s.ID != r.KeySet:
		return fmt.Errorf("this is key set %s, and this node has served %s: %s, or remove %s if the key set was replaced on purpose", s.ID, r.KeySet, remedy, recordFile)
	case s.Revision < r.Revision:
		return fmt.Errorf("the key set has revision %d, and this node has loaded revision %d: %s", s.Revision, r.Revision, remedy)
	case s.Revision == r.Revision && digest != r.Digest:
		return fmt.Errorf("the key set is another one of revision %d than this node has loaded, so it was changed in two places: %s, and change it in one place only", s.Revision, remedy)
	}
	i := slices.IndexFunc(s.Generations, func(g Generation) bool { return g.KeyID == r.KeyID })
	switch {
	case i < 0:
		return fmt.Errorf("the key set lacks the generation %s, under which this node has written, so it was changed from an older copy: %s", r.KeyID, remedy)
	case s.current().Number < s.Generations[i].Number:
		return fmt.Errorf("the current generation of the key set is %d, and this node has served generation %d: %s", s.current().Number, s.Generations[i].Number, remedy)
	}
	return nil
}

func (r *record) write(dir string) error {
	b, err := canonical.Encode(r)
	if err != nil {
		return err
	}
	return durable.Write(filepath.Join(dir, recordFile), b)
}

func newRecord(s *KeySet, digest string) *record {
	return &record{formatVersion, s.ID, s.Revision, s.current().KeyID, digest}
}

// readKeySet reads the key set of a directory, and checks that it is not older than its record.
func readKeySet(dir string) (s *KeySet, file []byte, err error) {
	file, err = readFile(filepath.Join(dir, keySetFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil, fmt.Errorf("there is no key set: make the first one with latticekeep kms-plugin init, or copy %s from another node: %w", keySetFile, err)
	} else if err != nil {
		return nil, nil, fmt.Errorf("reading key set: %w", err)
	}
	if s, err = ParseKeySet(file); err != nil {
		return nil, nil, err
	}
	r, err := readRecord(dir)
	if err == nil {
		err = r.checkNotOlder(s, digestOf(file))
	}
	return s, file, err
}

// digestOf returns the SHA3-256 of a key set file in hexadecimal digits.
func digestOf(b []byte) string {
	sum := sha3.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// claimDir locks a directory of the plugin until the file is closed.
func claimDir(dir string) (*os.File, error) {
	path := filepath.Join(dir, "serve.lock")
	lock, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW, 0o600)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("there is no directory %s: make it with latticekeep kms-plugin init, or kms-plugin node: %w", dir, err)
	} else if err != nil {
		return nil, fmt.Errorf("locking the directory: %w", durable.ExplainRefusal(path, err))
	}
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		_ = lock.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, fmt.Errorf("another plugin serves from %s: stop it, or give another --dir", dir)
		}
		return nil, fmt.Errorf("locking the directory: %w", err)
	}
	return lock, nil
}
