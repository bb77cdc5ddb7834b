package objects

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
)

// temporary is the ending of a file until it is whole.
const temporary = ".tmp"

// abandoned is the age from which a temporary file is one that a process left
// behind when it ended: far beyond the time that any call takes.
const abandoned = time.Hour

// folder is a bucket of files. A folder that is gone is not made anew.
type folder struct {
	path string
	made bool // it was absent, and this process made it
}

// folderOf returns the folder of a URL, whether it is there or not.
func folderOf(u *url.URL) (*folder, error) {
	if u.Host != "" || u.RawQuery != "" || !filepath.IsAbs(u.Path) || u.User != nil || u.Fragment != "" {
		return nil, fault.New(fault.Invalid, "the URL of a folder must be file:// and an absolute path, without parameters")
	}
	return &folder{path: filepath.Clean(u.Path)}, nil
}

// sweep removes what processes left behind that ended in the middle of a write.
func (f *folder) sweep() error {
	return filepath.WalkDir(f.path, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, temporary) {
			return err
		}
		info, err := d.Info()
		if err == nil && time.Since(info.ModTime()) > abandoned {
			err = os.Remove(path)
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil // renamed or removed meanwhile
		}
		return err
	})
}

// expire is [Bucket.Expire].
func (f *folder) expire(ctx context.Context, prefix string, before time.Time, most int64) (removed int, err error) {
	if err := f.check(); err != nil {
		return 0, err
	}
	type object struct {
		path string
		info fs.FileInfo
	}
	objects := make(map[string][]object) // objects that have not expired, keyed by folder
	remove := func(path string) error {
		err := os.Remove(path)
		if err == nil {
			removed++
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	}
	err = filepath.WalkDir(filepath.Join(f.path, filepath.FromSlash(prefix)), func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // nothing was ever put there, or it was removed meanwhile
		}
		if err != nil || d.IsDir() {
			return errors.Join(err, ctx.Err())
		}
		info, err := d.Info()
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil
		case err != nil:
			return err
		case info.ModTime().Before(before):
			return remove(path)
		case strings.HasSuffix(path, temporary): // somebody writes it
			return nil
		}
		objects[filepath.Dir(path)] = append(objects[filepath.Dir(path)], object{path, info})
		return nil
	})
	if err != nil {
		return removed, err
	}
	for _, all := range objects {
		slices.SortFunc(all, func(a, b object) int { return b.info.ModTime().Compare(a.info.ModTime()) }) // the newest first
		size := int64(0)
		for _, o := range all {
			if size += o.info.Size(); size > most {
				if err := remove(o.path); err != nil {
					return removed, err
				}
			}
		}
	}
	return removed, nil
}

// check returns nil when the folder is there.
func (f *folder) check() error {
	info, err := os.Stat(f.path)
	if err == nil && !info.IsDir() {
		err = errors.New("the bucket is not a folder")
	}
	return err
}

// put writes an object so that it is whole and durable before it has its name.
func (f *folder) put(ctx context.Context, name string, data []byte) error {
	if err := errors.Join(f.check(), f.leadsNowhere(name)); err != nil {
		return err
	}
	path := filepath.Join(f.path, filepath.FromSlash(name))
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	// Beside the object, since a rename needs one file system; with mode 0600.
	file, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*"+temporary)
	if err != nil {
		return err
	}
	_, err = file.Write(data)
	if err = errors.Join(err, file.Sync(), file.Close(), ctx.Err()); err == nil {
		err = os.Rename(file.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(file.Name()))
	}
	return f.sync(name)
}

// remove is [Bucket.Delete].
func (f *folder) remove(name string) error {
	dir, base, err := f.within(name)
	if err != nil {
		return err
	}
	if err = object(dir, base); err == nil {
		err = dir.Remove(base)
	}
	if err = errors.Join(err, dir.Close()); err != nil {
		return err
	}
	return f.sync(name)
}

// sync makes the names of an object and of the folders on the way to it durable.
func (f *folder) sync(name string) error {
	dir := filepath.Dir(filepath.Join(f.path, filepath.FromSlash(name)))
	for ; dir != f.path; dir = filepath.Dir(dir) {
		// A folder that is not there holds no name.
		if err := syncFolder(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return syncFolder(f.path)
}

func syncFolder(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

var errLinked = errors.New("what should be a folder of the bucket is a link or a file")

// within opens the folder that an object lies in, and returns its name there.
// Errors: fs.ErrNotExist, and errLinked for what leads elsewhere.
func (f *folder) within(name string) (dir *os.Root, base string, err error) {
	if dir, err = os.OpenRoot(f.path); err != nil {
		return nil, "", err
	}
	for {
		segment, rest, deeper := strings.Cut(name, "/")
		if !deeper {
			return dir, segment, nil
		}
		next, err := descend(dir, segment)
		if err = errors.Join(err, dir.Close()); err != nil {
			return nil, "", err
		}
		dir, name = next, rest
	}
}

func descend(dir *os.Root, name string) (*os.Root, error) {
	info, err := dir.Lstat(name)
	switch {
	case err != nil:
		return nil, err
	case !info.IsDir():
		return nil, errLinked
	}
	return dir.OpenRoot(name) // were it a link by now, it would lead to what is below dir
}

// object returns nil when an object lies under a name. Error: fs.ErrNotExist, also
// for what is no regular file, which a write replaces.
func object(dir *os.Root, base string) error {
	info, err := dir.Lstat(base)
	if err == nil && !info.Mode().IsRegular() {
		err = fs.ErrNotExist
	}
	return err
}

// read is [Bucket.Get].
func (f *folder) read(ctx context.Context, name string, take func(io.Reader, int64) ([]byte, error)) (data []byte, err error) {
	dir, base, err := f.within(name)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, dir.Close()) }()
	if err := object(dir, base); err != nil {
		return nil, err
	}
	// Were it a link by now, it would lead to what is below dir; a pipe does not hold us up.
	file, err := dir.OpenFile(base, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	info, err := file.Stat()
	switch {
	case err != nil:
		return nil, err
	case !info.Mode().IsRegular():
		return nil, fs.ErrNotExist
	}
	data, err = take(file, info.Size())
	return data, errors.Join(err, ctx.Err())
}

// exists is [Bucket.Exists].
func (f *folder) exists(name string) (bool, error) {
	dir, base, err := f.within(name)
	if err == nil {
		err = object(dir, base)
		err = errors.Join(err, dir.Close())
	}
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

// leadsNowhere returns nil when a write under the name stays in the bucket.
func (f *folder) leadsNowhere(name string) error {
	dir, _, err := f.within(name)
	if err == nil {
		err = dir.Close()
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil // it is made
	}
	return err
}

// touch has an object begin its life anew. One that cannot be touched ends early.
func (f *folder) touch(name string) {
	dir, base, err := f.within(name)
	if err != nil {
		return
	}
	if err := object(dir, base); err == nil {
		now := time.Now()
		_ = dir.Chtimes(base, now, now)
	}
	_ = dir.Close()
}
