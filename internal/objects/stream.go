package objects

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
)

// partSize is how much of an object one call to a cloud writes, and so how much memory an upload
// takes. S3 takes 10,000 parts, and so an object of up to 156 GiB.
const partSize = 16 << 20

// Upload writes an object of any size, from what write writes, and replaces a previous one with the
// same name. It keeps at most 16 MiB of it in memory. The object is absent, or the previous one, until
// write has returned nil and the rest is stored. What remains of an upload whose process was killed
// is no object: a folder is rid of it when it is opened an hour later, a cloud by its lifecycle rule
// for incomplete uploads. Each part takes bounded time. Errors: those of write; fault.Invalid for a
// name that is not allowed; fault.Unavailable.
func (b *Bucket) Upload(ctx context.Context, name string, write func(io.Writer) error) error {
	if err := checkName(name); err != nil {
		return err
	}
	if b.folder != nil {
		return b.folder.upload(ctx, name, write)
	}
	u, err := b.cloud.upload(ctx, b.prefix+name, kind{contentType(name), `attachment; filename="` + path.Base(name) + `"`})
	if err != nil {
		return unavailable(fmt.Errorf("writing %s: %w", name, err))
	}
	out := &parts{ctx: ctx, name: name, upload: u, held: make([]byte, 0, partSize)}
	if err = write(out); err == nil {
		err = out.flush(true) //nolint:contextcheck // parts holds ctx, since an io.Writer takes none
	}
	if err == nil {
		return nil
	}
	// Whether ctx has ended or not: the service keeps the parts until it is told.
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), callTimeout)
	defer cancel()
	if failed := u.abort(last); failed != nil {
		err = errors.Join(err, fmt.Errorf("giving up the upload of %s, whose parts stay in the bucket: %w", name, failed))
	}
	return err
}

// parts is a writer that passes on what is written in parts of partSize.
type parts struct {
	ctx    context.Context
	name   string
	upload upload
	held   []byte
}

// Write implements io.Writer.
func (p *parts) Write(b []byte) (n int, err error) {
	for n < len(b) {
		if len(p.held) == partSize { // more follows, so this is not the last part
			if err := p.flush(false); err != nil {
				return n, err
			}
		}
		m := min(partSize-len(p.held), len(b)-n)
		p.held = append(p.held, b[n:n+m]...)
		n += m
	}
	return n, nil
}

func (p *parts) flush(last bool) error {
	ctx, cancel := context.WithTimeout(p.ctx, transferTimeout)
	defer cancel()
	if err := p.upload.part(ctx, p.held, last); err != nil {
		return unavailable(fmt.Errorf("writing %s: %w", p.name, err))
	}
	p.held = p.held[:0]
	return nil
}

// Download passes an object of any size to read. A read that gets nothing for five minutes fails.
// Errors: those of read, and those of [Bucket.Get].
func (b *Bucket) Download(ctx context.Context, name string, read func(io.Reader) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stall := time.AfterFunc(transferTimeout, func() { cancel(errStalled) })
	defer stall.Stop()
	var reading error // what read returned
	_, err := b.get(ctx, name, func(r io.Reader, _ int64) ([]byte, error) {
		stall.Stop()
		if reading = read(stalling{r, stall}); reading != nil {
			reading = errors.Join(reading, context.Cause(ctx))
		}
		return nil, nil
	})
	if reading != nil {
		return reading
	}
	return err
}

var errStalled = fault.New(fault.Unavailable, "object storage has sent nothing for five minutes: try again")

// stalling is a reader whose timer runs while it waits.
type stalling struct {
	io.Reader
	stall *time.Timer
}

// Read implements io.Reader.
func (s stalling) Read(b []byte) (int, error) {
	s.stall.Reset(transferTimeout)
	defer s.stall.Stop()
	return s.Reader.Read(b)
}

// List returns the names of at most `most` objects that begin with prefix, in bytewise order. Errors:
// fault.Invalid for a prefix that is not allowed, fault.Unavailable.
func (b *Bucket) List(ctx context.Context, prefix string, most int) ([]string, error) {
	return b.ListAfter(ctx, prefix, "", most)
}

// ListAfter is [Bucket.List] of the names that come after another one, which need not exist.
func (b *Bucket) ListAfter(ctx context.Context, prefix, after string, most int) (names []string, err error) {
	if err := checkName(strings.TrimSuffix(prefix, "/")); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, transferTimeout)
	defer cancel()
	if b.folder != nil {
		names, err = b.folder.list(prefix, after, most)
	} else {
		if after != "" {
			after = b.prefix + after
		}
		names, err = b.cloud.list(ctx, b.prefix+prefix, after, most)
		for i, name := range names {
			names[i] = strings.TrimPrefix(name, b.prefix)
		}
	}
	if err != nil {
		return nil, unavailable(fmt.Errorf("listing %s: %w", prefix, err))
	}
	return names, nil
}

// upload writes an object as put does: under a temporary name until it is complete and synced.
func (f *folder) upload(ctx context.Context, name string, write func(io.Writer) error) error {
	path := filepath.Join(f.path, filepath.FromSlash(name))
	if err := f.prepare(name); err != nil {
		return unavailable(fmt.Errorf("writing %s: %w", name, err))
	}
	temp, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*"+temporary) // mode 0600
	if err != nil {
		return unavailable(fmt.Errorf("writing %s: %w", name, err))
	}
	out := &fileWriter{ctx: ctx, file: temp}
	err = write(out)
	if out.err != nil {
		err = unavailable(fmt.Errorf("writing %s: %w", name, out.err))
	}
	if err == nil {
		if err = errors.Join(temp.Sync(), temp.Close(), ctx.Err()); err == nil {
			err = os.Rename(temp.Name(), path)
		}
		if err == nil {
			err = f.sync(name)
		}
		if err != nil {
			err = unavailable(fmt.Errorf("writing %s: %w", name, err))
		}
	}
	if err != nil {
		_, _ = temp.Close(), os.Remove(temp.Name()) // it may have its name already
	}
	return err
}

// fileWriter writes to a file until ctx ends, and keeps its first error apart from those of whoever
// writes.
type fileWriter struct {
	ctx  context.Context
	file *os.File
	err  error
}

// Write implements io.Writer.
func (w *fileWriter) Write(b []byte) (n int, err error) {
	if err = w.ctx.Err(); err == nil {
		n, err = w.file.Write(b)
	}
	if w.err == nil {
		w.err = err
	}
	return n, err
}

// list implements [Bucket.List].
func (f *folder) list(prefix, after string, most int) (names []string, err error) {
	if err := f.check(); err != nil {
		return nil, err
	}
	dir, err := os.OpenRoot(f.path)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, dir.Close()) }()
	err = fs.WalkDir(dir.FS(), ".", func(name string, d fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil // removed meanwhile
		case err != nil:
			return err
		case d.IsDir():
			if inside := name + "/"; name != "." && !strings.HasPrefix(inside, prefix) && !strings.HasPrefix(prefix, inside) {
				return fs.SkipDir
			}
		case d.Type().IsRegular() && name > after && strings.HasPrefix(name, prefix) && checkName(name) == nil:
			names = append(names, name)
		}
		return nil
	})
	slices.Sort(names) // a walk has a/b before a.b
	return names[:min(len(names), most)], err
}
