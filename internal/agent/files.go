package agent

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/delivery"
)

// The layout is that of the kubelet's own volumes, which programs that watch files know: the files are in a
// folder of their own, dataLink leads to it, and the names that readers open lead through dataLink. So a
// rename of dataLink replaces all files in one step.
const (
	dataLink = "..data"
	nextLink = "..data_next"
	stamp    = "..2006_01_02_15_04_05.000000000"
)

// write replaces the files in a folder by these. A reader sees all of the previous files or all of the new ones,
// as long as it opens them through the same dataLink, and never a part of one. leftover says why previous files are
// still there, though these have replaced them.
func write(dir *os.Root, files []delivery.File, now time.Time) (leftover, err error) {
	top := make(map[string]bool)
	for _, f := range files {
		name, _, _ := strings.Cut(f.Path, "/")
		top[name] = true
	}
	for name := range top {
		if info, err := dir.Lstat(name); err == nil && info.Mode().Type() != fs.ModeSymlink {
			return nil, fmt.Errorf("%s is in the way in --into and was not made by an agent: remove it, or give the files another folder", name)
		}
	}
	folder := now.UTC().Format(stamp)
	if err := dir.Mkdir(folder, 0o755); err != nil {
		return nil, fmt.Errorf("making a folder for the files: %w", err)
	}
	if err := fill(dir, folder, files); err != nil {
		_ = dir.RemoveAll(folder)
		return nil, fmt.Errorf("writing the files: %w", err)
	}
	previous, _ := dir.Readlink(dataLink) // none at the first time
	if err := replaceLink(dir, folder, dataLink); err != nil {
		_ = dir.RemoveAll(folder)
		return nil, fmt.Errorf("putting the files in their place: %w", err)
	}
	var errs []error
	for name := range top {
		if target, err := dir.Readlink(name); err != nil || target != path.Join(dataLink, name) {
			errs = append(errs, replaceLink(dir, path.Join(dataLink, name), name))
		}
	}
	return tidy(dir, top, folder, previous), errors.Join(errs...)
}

// fill writes the files into a new folder.
func fill(dir *os.Root, folder string, files []delivery.File) error {
	for _, f := range files {
		name := path.Join(folder, f.Path)
		if err := dir.MkdirAll(path.Dir(name), 0o755); err != nil {
			return err
		}
		if err := dir.WriteFile(name, f.Content, 0o600); err != nil {
			return err
		}
		if err := dir.Chmod(name, f.Mode); err != nil { // whatever the umask is
			return err
		}
	}
	return nil
}

func replaceLink(dir *os.Root, target, name string) error {
	if err := dir.Remove(nextLink); err != nil && !errors.Is(err, fs.ErrNotExist) { // left by an agent that was killed
		return err
	}
	if err := dir.Symlink(target, nextLink); err != nil {
		return err
	}
	return dir.Rename(nextLink, name)
}

// tidy removes the links to files that are gone, and the folders of previous files, also of an agent that was
// killed. previous is the last one of these.
func tidy(dir *os.Root, top map[string]bool, folder, previous string) error {
	all, err := fs.ReadDir(dir.FS(), ".")
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range all {
		name := e.Name()
		switch {
		case e.IsDir() && (name == previous || isStamp(name)) && name != folder:
			errs = append(errs, dir.RemoveAll(name))
		case e.Type() == fs.ModeSymlink && !top[name] && name != dataLink:
			if target, err := dir.Readlink(name); err == nil && target == path.Join(dataLink, name) {
				errs = append(errs, dir.Remove(name))
			}
		}
	}
	return errors.Join(errs...)
}

func isStamp(name string) bool {
	_, err := time.Parse(stamp, name)
	return err == nil
}
