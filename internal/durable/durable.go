// Package durable writes files that survive a crash. A file is complete under its name or absent,
// and its content is on disk when the function returns.
package durable

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// WriteNew writes a file with mode 0600. It fails with fs.ErrExist if the file exists.
func WriteNew(path string, content []byte) (err error) {
	if err := CheckAbsent(path); err != nil {
		return err
	}
	temp, err := WriteTemp(path, filepath.Base(path)+".new-*", 0o600, content)
	if err != nil {
		return fmt.Errorf("writing %s: %w", filepath.Base(path), err)
	}
	if err := MoveNew(temp, path); err != nil {
		_ = os.Remove(temp)
		return fmt.Errorf("writing %s: %w", filepath.Base(path), err)
	}
	return nil
}

// Write writes a file with mode 0600. It replaces a file or link of that name.
func Write(path string, content []byte) error {
	temp, err := WriteTemp(path, filepath.Base(path)+".new-*", 0o600, content)
	if err == nil {
		err = moveOver(temp, path)
	}
	if err != nil {
		return fmt.Errorf("writing %s: %w", filepath.Base(path), err)
	}
	return nil
}

// Replace replaces the content of an existing file and keeps its mode. It follows a link and
// replaces the target.
func Replace(path string, content []byte) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("replacing %s: %w", path, err)
		}
	}()
	target, err := filepath.EvalSymlinks(path)
	if err != nil {
		return err
	}
	info, err := os.Stat(target)
	if err != nil {
		return err
	}
	temp, err := WriteTemp(target, "."+filepath.Base(target)+".*", info.Mode().Perm(), content)
	if err != nil {
		return err
	}
	return moveOver(temp, target)
}

// MoveOver renames a file that is synced to path, and replaces what is there.
func MoveOver(from, path string) error { return moveOver(from, path) }

// moveOver renames a temporary file to path, or removes it when that fails.
func moveOver(temp, path string) error {
	if err := os.Rename(temp, path); err != nil {
		_ = os.Remove(temp)
		return err
	}
	return SyncFolder(filepath.Dir(path))
}

// WriteTemp writes and syncs a temporary file in the folder of path, whose name has a random part
// in place of the * in pattern. When it fails, it leaves no file.
func WriteTemp(path, pattern string, mode fs.FileMode, content []byte) (name string, err error) {
	f, err := os.CreateTemp(filepath.Dir(path), pattern)
	if err != nil {
		return "", err
	}
	_, err = f.Write(content)
	if mode != 0o600 { // a file of that mode is left alone: some file systems refuse to set one
		err = errors.Join(err, f.Chmod(mode))
	}
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		_ = os.Remove(f.Name())
		return "", err
	}
	return f.Name(), nil
}

// CheckAbsent fails if path exists.
func CheckAbsent(path string) error {
	_, err := os.Lstat(path)
	switch {
	case err == nil:
		return existsError{path}
	case !errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("looking for %s: %w", path, err)
	}
	return nil
}

type existsError struct{ path string }

func (e existsError) Error() string {
	return e.path + " exists already, and nothing is ever overwritten: choose another name"
}

func (existsError) Is(target error) bool { return target == fs.ErrExist }

// MoveNew renames a file within a file system. It never replaces a file.
func MoveNew(from, to string) error {
	err := link(from, to) // unlike a rename, a link does not replace a file
	switch {
	case err == nil:
		err = os.Remove(from)
	case !errors.Is(err, fs.ErrExist): // some file systems have no links
		if err = claim(to); err == nil {
			if err = os.Rename(from, to); err != nil {
				err = errors.Join(err, os.Remove(to))
			}
		}
	}
	if err != nil {
		return fmt.Errorf("naming %s: %w", filepath.Base(to), err)
	}
	if err := SyncFolder(filepath.Dir(to)); err != nil {
		return fmt.Errorf("syncing the folder of %s: %w", filepath.Base(to), err)
	}
	return nil
}

var link = os.Link // tests replace it

// claim makes an empty file, so that only one of several processes gets the name. A crash before
// the rename leaves the empty file.
func claim(path string) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, fs.ErrExist) {
		return existsError{path}
	} else if err != nil {
		return err
	}
	return f.Close()
}

// SyncFolder makes the names in a folder durable.
func SyncFolder(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
