// Package durable writes files that survive a crash: under their name they are whole, or they are
// not there, and what a function has written is on disk when it returns.
package durable

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// WriteNew writes a file with mode 0600. A file that exists is an error that is fs.ErrExist.
func WriteNew(path string, content []byte) (err error) {
	if err := CheckAbsent(path); err != nil {
		return err
	}
	temp, err := writeTemp(path, path+".new-*", 0o600, content)
	if err != nil {
		return fmt.Errorf("writing %s: %w", filepath.Base(path), err)
	}
	if err := MoveNew(temp, path); err != nil {
		_ = os.Remove(temp)
		return fmt.Errorf("writing %s: %w", filepath.Base(path), err)
	}
	return nil
}

// Replace puts content in the place of a file that exists, and keeps its mode. Of a link it replaces
// the file that the link leads to.
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
	temp, err := writeTemp(target, "."+filepath.Base(target)+".*", info.Mode().Perm(), content)
	if err != nil {
		return err
	}
	if err := os.Rename(temp, target); err != nil {
		_ = os.Remove(temp)
		return err
	}
	return SyncFolder(filepath.Dir(target))
}

// writeTemp writes a temporary file beside path, whole and synced.
func writeTemp(path, pattern string, mode fs.FileMode, content []byte) (name string, err error) {
	f, err := os.CreateTemp(filepath.Dir(path), filepath.Base(pattern))
	if err != nil {
		return "", err
	}
	_, err = f.Write(content)
	if err = errors.Join(err, f.Chmod(mode), f.Sync(), f.Close()); err != nil {
		_ = os.Remove(f.Name())
		return "", err
	}
	return f.Name(), nil
}

// CheckAbsent fails when there is something at path.
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

// MoveNew gives a file another name on the same file system, and never replaces a file.
func MoveNew(from, to string) error {
	err := os.Link(from, to) // unlike a rename, a link does not replace
	switch {
	case err == nil:
		err = os.Remove(from)
	case !errors.Is(err, fs.ErrExist): // not every file system has links
		if err = CheckAbsent(to); err == nil {
			err = os.Rename(from, to)
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

// SyncFolder makes the names in a folder durable.
func SyncFolder(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
