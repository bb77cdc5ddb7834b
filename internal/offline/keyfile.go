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

// KeyFile is a KMS key that was opened, and its file. path is empty when it is none.
type KeyFile struct{ path, id string }

// KeyFilesOf returns the files of keys, of which each was opened by the URL in its
// place.
func KeyFilesOf(keys []*kms.Key, urls []string) (files []KeyFile, some bool) {
	for i, k := range keys {
		path, ok := KMSFile(urls[i])
		files, some = append(files, KeyFile{path, k.ID()}), some || ok
	}
	return files, some
}

// ReadKeyFiles returns the key files among the KMS keys that are in use, the
// current one first, as a backup takes them, none when none is a file: those which open what is stored, and
// not what lies there since. use has the former ones of which something is known:
// what was given up is left out, and a file that is gone, if nothing is under it.
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

// KMSKeysOfBackup are the KMS keys that came with a backup. current is nil when that is no
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
