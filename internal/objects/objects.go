// Package objects keeps what is larger or lives longer than the database:
// reports, archived segments of the log, anchored checkpoints.
//
// A [Bucket] is a folder (file:///var/lib/latticekeep/reports) or a bucket of a
// cloud (s3://, gs://), with the query parameters of openS3 and openGCS;
// `prefix=a/b/` keeps everything below a prefix. Credentials never stand in the
// URL: they come from each cloud's default chain (environment, configuration
// files, the identity of the machine or pod).
//
// What is promised: an object is there as a whole or not at all, and when
// [Bucket.Put] has returned nil it is durable; that an object is not there is
// said only of a bucket that is. Every call ends in bounded time, but for those
// on a folder whose file system hangs. Calls of a cloud are repeated when it asks
// for that; nothing is logged.
package objects

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
)

const (
	callTimeout     = 30 * time.Second // limit for a call that moves no object
	transferTimeout = 5 * time.Minute
)

// Bucket is an open bucket, safe for concurrent use.
type Bucket struct {
	cloud  cloud   // nil: the bucket is a folder
	prefix string  // prefix of names in the cloud
	folder *folder // nil: the bucket is a cloud's
	signer *signer // nil: this service signs no URLs
}

// Open opens the bucket of a URL. A folder is made when it is absent, for this
// user alone, and [Bucket.Made] says so; a cloud is asked nothing yet. o is for
// the URLs of a folder's objects. Errors: fault.Invalid for a URL, options or
// credentials of a form that cannot work, fault.Unavailable for a folder that
// cannot be made.
func Open(ctx context.Context, rawURL string, o SigningOptions) (*Bucket, error) {
	return open(ctx, rawURL, func(u *url.URL) (*Bucket, error) { return makeFolder(u, o) })
}

// OpenExisting opens the bucket of a URL for somebody who reads what is there: a
// folder is not made when it is absent, and nothing in it is touched. Errors: as
// of [Open], and fault.NotFound for a folder that is not there.
func OpenExisting(ctx context.Context, rawURL string) (*Bucket, error) {
	return open(ctx, rawURL, existingFolder)
}

func open(ctx context.Context, rawURL string, openFolder func(*url.URL) (*Bucket, error)) (*Bucket, error) {
	u, err := url.Parse(rawURL)
	if err != nil {
		return nil, fault.New(fault.Invalid, "the URL of the bucket is malformed: give one such as s3://name?region=us-east-1")
	}
	var openCloud func(context.Context, *url.URL) (cloud, error)
	switch u.Scheme {
	case "file":
		return openFolder(u)
	case "s3":
		openCloud = openS3
	case "gs":
		openCloud = openGCS
	case "azblob":
		return nil, fault.New(fault.Invalid, "azblob:// is not supported any more: name a bucket by s3:// or gs://, or a folder by file://")
	default:
		return nil, fault.New(fault.Invalid, "the URL of the bucket must begin with file://, s3:// or gs://")
	}
	if u.Host == "" || u.User != nil {
		return nil, fault.New(fault.Invalid, "the URL of the bucket must name it after the scheme, without credentials: those come from the environment")
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	query := u.Query()
	prefix := query.Get("prefix")
	query.Del("prefix")
	u.RawQuery = query.Encode()
	c, err := openCloud(ctx, u)
	if err != nil {
		return nil, fault.Wrap(fault.Invalid, "the bucket cannot be opened: check the parameters of its URL and the cloud's credentials in the environment", err)
	}
	return &Bucket{cloud: c, prefix: prefix}, nil
}

// Made reports whether [Open] made the folder: it was not there. Nobody knows that
// of a cloud's bucket.
func (b *Bucket) Made() bool { return b.folder != nil && b.folder.made }

// Close ends the use of the bucket. Idle connections end by themselves.
func (b *Bucket) Close() error { return nil }

// Put writes an object, in place of a former one of the name. Errors:
// fault.Invalid for a name or size that is not allowed; fault.Unavailable, and
// then the former one is still there, or this one after all.
func (b *Bucket) Put(ctx context.Context, name string, data []byte) error {
	if err := checkName(name); err != nil {
		return err
	}
	if len(data) > MaxSize {
		return fault.New(fault.Invalid, "the object is larger than 256 MiB")
	}
	ctx, cancel := context.WithTimeout(ctx, transferTimeout)
	defer cancel()
	var err error
	if b.folder != nil {
		err = b.folder.put(ctx, name, data)
	} else {
		// Whoever follows a signed URL gets a file of this name, from every cloud.
		err = b.cloud.put(ctx, b.prefix+name, data, kind{contentType(name), `attachment; filename="` + path.Base(name) + `"`})
	}
	if err != nil {
		return unavailable(fmt.Errorf("writing %s: %w", name, err))
	}
	return nil
}

// contentType is what a cloud answers with.
func contentType(name string) string {
	switch path.Ext(name) {
	case ".pdf":
		return "application/pdf"
	case ".json":
		return "application/json"
	case ".gz":
		return "application/gzip"
	}
	return "application/octet-stream"
}

// Get reads an object. Errors: fault.NotFound when there is none of the name,
// fault.Invalid for a name that is not allowed, fault.Unavailable.
func (b *Bucket) Get(ctx context.Context, name string) ([]byte, error) {
	return b.get(ctx, name, whole)
}

// GetStart reads the first n bytes of an object, or all when it has no more, of
// whatever size it is. Errors: as of [Bucket.Get].
func (b *Bucket) GetStart(ctx context.Context, name string, n int) ([]byte, error) {
	return b.get(ctx, name, func(r io.Reader, _ int64) ([]byte, error) { return io.ReadAll(io.LimitReader(r, int64(n))) })
}

// get reads an object of some size as take does.
func (b *Bucket) get(ctx context.Context, name string, take func(r io.Reader, size int64) ([]byte, error)) ([]byte, error) {
	if err := checkName(name); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, transferTimeout)
	defer cancel()
	var data []byte
	var err error
	if b.folder != nil {
		data, err = b.folder.read(ctx, name, take)
	} else {
		data, err = b.read(ctx, name, take)
	}
	if err == nil {
		return data, nil
	}
	if errors.Is(err, fs.ErrNotExist) {
		if err2 := b.lacks(ctx, name); err2 != nil {
			return nil, unavailable(fmt.Errorf("reading %s: %w", name, errors.Join(err, err2)))
		}
		return nil, fault.Wrap(fault.NotFound, "the object does not exist", err)
	}
	return nil, unavailable(fmt.Errorf("reading %s: %w", name, err))
}

func (b *Bucket) read(ctx context.Context, name string, take func(io.Reader, int64) ([]byte, error)) (data []byte, err error) {
	r, size, err := b.cloud.read(ctx, b.prefix+name)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	return take(r, size)
}

// Exists reports whether there is an object of the name. Errors: as of
// [Bucket.Get], but fault.NotFound.
func (b *Bucket) Exists(ctx context.Context, name string) (bool, error) {
	if err := checkName(name); err != nil {
		return false, err
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	var there bool
	var err error
	if b.folder != nil {
		there, err = b.folder.exists(name)
	} else {
		_, err = b.cloud.size(ctx, b.prefix+name)
		if there = err == nil; errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
	}
	if err == nil && !there {
		err = b.lacks(ctx, name)
	}
	if err != nil {
		return false, unavailable(fmt.Errorf("looking for %s: %w", name, err))
	}
	return there, nil
}

// lacks returns nil when the bucket is there and has no object of the name. The
// clouds say "not found" too of a bucket that is gone, of a host without an
// address, and of an object that may not be read.
func (b *Bucket) lacks(ctx context.Context, name string) error {
	if b.folder != nil {
		return b.folder.check()
	}
	first, err := b.cloud.first(ctx, b.prefix+name)
	if err != nil {
		return err
	}
	if first == b.prefix+name {
		return errors.New("it is there, but may not be read")
	}
	return nil
}

// Delete removes an object; that there is none is no error. Errors:
// fault.Invalid for a name that is not allowed, fault.Unavailable.
func (b *Bucket) Delete(ctx context.Context, name string) error {
	if err := checkName(name); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	var err error
	if b.folder != nil {
		err = b.folder.remove(name)
	} else {
		err = b.cloud.delete(ctx, b.prefix+name)
	}
	if errors.Is(err, fs.ErrNotExist) {
		err = b.lacks(ctx, name)
	}
	if err != nil {
		return unavailable(fmt.Errorf("deleting %s: %w", name, err))
	}
	return nil
}

// Expire removes the objects below a prefix, such as reports, that were written
// before a time and that nobody was given a URL of since ([Bucket.SignedURL]); and
// of all that lie in one folder the oldest ones, until the rest has at most so many
// bytes. It returns how many it removed. The time is the machine's, as that of
// files is. Errors: fault.Invalid for a prefix that is not allowed, and for a
// cloud's bucket, which forgets by rules of its own; fault.Unavailable.
func (b *Bucket) Expire(ctx context.Context, prefix string, before time.Time, most int64) (removed int, err error) {
	if err := checkName(prefix); err != nil {
		return 0, err
	}
	if b.folder == nil {
		return 0, fault.New(fault.Invalid, "objects expire in a folder alone: give the bucket a lifecycle rule")
	}
	if removed, err = b.folder.expire(ctx, prefix, before, most); err != nil {
		return removed, unavailable(fmt.Errorf("removing what has expired: %w", err))
	}
	return removed, nil
}

func makeFolder(u *url.URL, o SigningOptions) (*Bucket, error) {
	f, err := folderOf(u)
	if err != nil {
		return nil, err
	}
	signer, err := newSigner(o)
	if err != nil {
		return nil, err
	}
	f.made = errors.Is(f.check(), fs.ErrNotExist)
	if err := os.MkdirAll(f.path, 0o700); err != nil {
		return nil, unavailable(err)
	}
	if err := errors.Join(syncFolder(filepath.Dir(f.path)), f.sweep()); err != nil {
		return nil, unavailable(err)
	}
	return &Bucket{folder: f, signer: signer}, nil
}

func existingFolder(u *url.URL) (*Bucket, error) {
	f, err := folderOf(u)
	if err != nil {
		return nil, err
	}
	switch err := f.check(); {
	case errors.Is(err, fs.ErrNotExist):
		return nil, fault.Wrap(fault.NotFound, "the folder of the bucket does not exist: check its URL, and that its volume is mounted", err)
	case err != nil:
		return nil, unavailable(err)
	}
	return &Bucket{folder: f}, nil
}

// SignedURL returns a URL under which whoever has it can read the object, which
// need not exist yet, until the lifetime is over, which is from one second to
// seven days long. It keeps an object in a folder from [Bucket.Expire] as a write
// does. Errors: fault.Invalid for a name or lifetime that is not allowed,
// fault.Unavailable when the cloud's credentials cannot sign.
func (b *Bucket) SignedURL(ctx context.Context, name string, lifetime time.Duration) (string, error) {
	if err := checkName(name); err != nil {
		return "", err
	}
	if lifetime < time.Second || lifetime > maxLifetime {
		return "", fault.New(fault.Invalid, "the lifetime of a signed URL must be from one second to seven days")
	}
	if b.folder != nil {
		if b.signer == nil {
			return "", fault.Wrap(fault.Internal, "internal error", errors.New("the bucket was opened without a base for signed URLs"))
		}
		b.folder.touch(name) // so that it does not expire before its URL
		return b.signer.sign(name, lifetime), nil
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	u, err := b.cloud.sign(ctx, b.prefix+name, lifetime)
	if err != nil {
		return "", fault.Wrap(fault.Unavailable, "object storage signs no URL: give the service credentials that may sign",
			fmt.Errorf("signing a URL for %s: %w", name, err))
	}
	return u, nil
}

// Verify returns the name of the object that a URL of [Bucket.SignedURL] is for,
// which is read from the query alone. Error: fault.Forbidden, always the same,
// when the URL is not one of this bucket's or has ended.
func (b *Bucket) Verify(u *url.URL) (name string, err error) {
	if b.signer != nil {
		if name, ok := b.signer.verify(u); ok {
			return name, nil
		}
	}
	return "", fault.New(fault.Forbidden, "access denied")
}
