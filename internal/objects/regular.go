package objects

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"strings"
	"syscall"
	"time"
)

// Whoever else can write to the folder of a bucket does not lead us out of it: no
// link is followed below it, and nothing but a regular file is an object.

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
