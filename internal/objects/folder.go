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

	"github.com/latticekeep/latticekeep/internal/durable"
	"github.com/latticekeep/latticekeep/internal/fault"
)

// temporary is the ending of a file that is still being written.
const temporary = ".tmp"

// abandoned is the age at which a temporary file counts as left behind by a process that ended. It
// is much longer than any call.
const abandoned = time.Hour

// folder is a bucket of files. A folder that disappears is not created again.
type folder struct {
	path string
	made bool // it was absent, and this process created it
}

// folderOf returns the folder of a URL. The folder need not exist.
func folderOf(u *url.URL) (*folder, error) {
	if u.Host != "" || u.RawQuery != "" || !filepath.IsAbs(u.Path) || u.User != nil || u.Fragment != "" {
		return nil, fault.New(fault.Invalid, "the URL of a folder must be file:// and an absolute path, without parameters")
	}
	return &folder{path: filepath.Clean(u.Path)}, nil
}

// sweep removes temporary files of processes that ended during a write.
func (f *folder) sweep() error {
	return filepath.WalkDir(f.path, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, temporary) {
			return err
		}
		info, err := d.Info()
		if err == nil && time.Since(info.ModTime()) > abandoned {
			err = os.Remove(path) //nolint:gosec // only the operator writes to the folder
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil // renamed or removed meanwhile
		}
		return err
	})
}

// expire implements [Bucket.Expire].
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
		case strings.HasSuffix(path, temporary): // another call is writing this file
			return nil
		}
		objects[filepath.Dir(path)] = append(objects[filepath.Dir(path)], object{path, info})
		return nil
	})
	if err != nil {
		return removed, err
	}
	for _, all := range objects {
		slices.SortFunc(all, func(a, b object) int { return b.info.ModTime().Compare(a.info.ModTime()) }) // newest first
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

// check returns nil when the folder exists.
func (f *folder) check() error {
	info, err := os.Stat(f.path)
	if err == nil && !info.IsDir() {
		err = errors.New("the bucket is not a folder")
	}
	return err
}

// put writes an object under a temporary name and syncs it before it renames it. With fresh it
// replaces none, and returns fs.ErrExist.
func (f *folder) put(ctx context.Context, name string, data []byte, fresh bool) error {
	if err := f.prepare(name); err != nil {
		return err
	}
	path := filepath.Join(f.path, filepath.FromSlash(name))
	temp, err := durable.WriteTemp(path, filepath.Base(path)+".*"+temporary, 0o600, data)
	if err != nil {
		return err
	}
	rename := os.Rename
	if fresh {
		rename = durable.MoveNew
	}
	if err = ctx.Err(); err == nil {
		err = rename(temp, path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(temp))
	}
	return f.sync(name)
}

// prepare creates the folder that an object is in.
func (f *folder) prepare(name string) error {
	if err := errors.Join(f.check(), f.leadsNowhere(name)); err != nil {
		return err
	}
	return os.MkdirAll(filepath.Dir(filepath.Join(f.path, filepath.FromSlash(name))), 0o700)
}

// remove implements [Bucket.Delete].
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

// sync makes the names of an object and of its parent folders durable.
func (f *folder) sync(name string) error {
	dir := filepath.Dir(filepath.Join(f.path, filepath.FromSlash(name)))
	for ; dir != f.path; dir = filepath.Dir(dir) {
		// A missing folder holds no name.
		if err := durable.SyncFolder(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return durable.SyncFolder(f.path)
}

var errLinked = errors.New("what should be a folder of the bucket is a link or a file")

// within opens the folder that contains an object, and returns the object's name in it. Errors:
// fs.ErrNotExist, and errLinked for a path that leads outside.
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
	return dir.OpenRoot(name) // if it has become a link meanwhile, it can only lead below dir
}

// object returns nil when base names an object. It returns fs.ErrNotExist also for anything but a
// regular file; a write replaces that.
func object(dir *os.Root, base string) error {
	info, err := dir.Lstat(base)
	if err == nil && !info.Mode().IsRegular() {
		err = fs.ErrNotExist
	}
	return err
}

// read implements [Bucket.Get].
func (f *folder) read(ctx context.Context, name string, take func(io.Reader, int64) ([]byte, error)) (data []byte, err error) {
	dir, base, err := f.within(name)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, dir.Close()) }()
	if err := object(dir, base); err != nil {
		return nil, err
	}
	// If it has become a link meanwhile, it can only lead below dir. O_NONBLOCK keeps a pipe from
	// blocking the call.
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

// exists implements [Bucket.Exists].
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

// leadsNowhere returns nil when a write under the name stays inside the bucket.
func (f *folder) leadsNowhere(name string) error {
	dir, _, err := f.within(name)
	if err == nil {
		err = dir.Close()
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil // the write creates it
	}
	return err
}

// touch renews the age of an object. If that fails, the object expires early.
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
