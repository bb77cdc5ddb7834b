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

// WriteNew writes a file that must not exist, with mode 0600, and returns when it
// is durable.
func WriteNew(path string, content []byte) (err error) {
	if err := CheckAbsent(path); err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".new-*") // mode 0600
	if err != nil {
		return fmt.Errorf("creating %s: %w", filepath.Base(path), err)
	}
	_, err = f.Write(content)
	if err = errors.Join(err, f.Sync(), f.Close()); err == nil {
		err = MoveNew(f.Name(), path)
	}
	if err != nil {
		_ = os.Remove(f.Name())
		return fmt.Errorf("writing %s: %w", filepath.Base(path), err)
	}
	return nil
}

// CheckAbsent fails when there is something at path.
func CheckAbsent(path string) error {
	_, err := os.Lstat(path)
	switch {
	case err == nil:
		return fmt.Errorf("%s exists already, and nothing is ever overwritten: choose another name", path)
	case !errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("looking for %s: %w", path, err)
	}
	return nil
}

// MoveNew gives a file on the same file system another name, durably, and never
// replaces one.
func MoveNew(from, to string) error {
	err := os.Link(from, to) // unlike a rename it does not replace
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
	d, err := os.Open(filepath.Dir(to))
	if err != nil {
		return fmt.Errorf("syncing the folder of %s: %w", filepath.Base(to), err)
	}
	return errors.Join(d.Sync(), d.Close())
}

// Replace puts text in the place of a file that exists, at once and durably, and keeps its mode. What a link leads to
// is replaced, not the link.
func Replace(path string, text []byte) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("replacing %s: %w", path, err)
		}
	}()
	real, err := filepath.EvalSymlinks(path)
	if err != nil {
		return err
	}
	info, err := os.Stat(real)
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(real), "."+filepath.Base(real)+".*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(f.Name())
		}
	}()
	_, err = f.Write(text)
	if err = errors.Join(err, f.Chmod(info.Mode().Perm()), f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), real); err != nil {
		return err
	}
	d, err := os.Open(filepath.Dir(real))
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
