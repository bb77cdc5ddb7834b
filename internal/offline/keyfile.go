package offline

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/kms"
)

// KeyFile is an opened KMS key and its file. path is empty when the key is not a file.
type KeyFile struct{ path, id string }

// KeyFilesOf returns the files of the keys. urls[i] is the URL that opened keys[i]. some reports
// whether any key is a file.
func KeyFilesOf(keys []*kms.Key, urls []string) (files []KeyFile, some bool) {
	for i, k := range keys {
		path, ok := KMSFile(urls[i])
		files, some = append(files, KeyFile{path, k.ID()}), some || ok
	}
	return files, some
}

// ReadKeyFiles returns the key files of the KMS keys in use, the current one first, for a backup.
// It returns nil when no key is a file. Each file must hold the key that opened it at the start, in
// case it was replaced since. use describes the known previous keys: a key that was given up is
// left out, and so is one whose file is missing and under which nothing is wrapped.
func ReadKeyFiles(keys []KeyFile, use map[string]keyring.KMSKey) (files [][]byte, err error) {
	for i, k := range keys {
		of, known := use[k.id]
		if i > 0 && (k.path == "" || of.GivenUp) {
			continue
		}
		var text []byte
		if k.path != "" {
			text, err = readKeyFile(k.path, k.id)
			if i > 0 && known && of.Sets == 0 && errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err != nil {
				return nil, err
			}
		}
		files = append(files, text)
	}
	if len(files) == 1 && files[0] == nil {
		return nil, nil
	}
	return files, nil
}

// readKeyFile reads the file of the key with this id.
func readKeyFile(path, id string) ([]byte, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("reading the KMS key: %w", err)
	}
	k, err := kms.ParseLocal(text)
	switch {
	case err != nil:
		return nil, fmt.Errorf("reading %s: %w", filepath.Base(path), err)
	case k.ID() != id:
		return nil, fmt.Errorf("%s holds another key than the one that is in use: put that back", filepath.Base(path))
	}
	return text, nil
}

// KMSKeysOfBackup returns the KMS keys of a backup. current is nil when the current key was not a
// file.
func KMSKeysOfBackup(files [][]byte) (current keyring.KMS, former []keyring.KMS, err error) {
	for i, file := range files {
		if len(file) == 0 {
			continue
		}
		k, err := kms.ParseLocal(file)
		if err != nil {
			return nil, nil, err
		}
		if i == 0 {
			current = k
		} else {
			former = append(former, k)
		}
	}
	return current, former, nil
}
