// Package objects keeps data that is larger or lives longer than the database: reports, archived
// segments of the log, anchored checkpoints, backups.
//
// A [Bucket] is a folder (file:///var/lib/latticekeep/reports) or a bucket of a cloud (s3://,
// gs://), with the query parameters of openS3 and openGCS. The parameter `prefix=a/b/` keeps
// everything below a prefix. The URL never contains credentials: they come from each cloud's
// default chain (environment, configuration files, the identity of the machine or pod).
//
// The package guarantees that an object is complete or absent, and that it is durable when
// [Bucket.Put] or [Bucket.Upload] has returned nil. It reports an object as absent only if the bucket itself exists.
// Every call ends in bounded time, except on a folder whose file system hangs; of [Bucket.Upload]
// and [Bucket.Download] each part does. Calls to a cloud are
// retried when the cloud asks for that. The package logs nothing.
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
	"slices"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/durable"
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
	folder *folder // nil: the bucket is in a cloud
	signer *signer // nil: this service signs no URLs
}

// Open opens the bucket of a URL. It creates a missing folder with access for this user alone, and
// [Bucket.Made] reports that. It does not contact a cloud yet. o configures the URLs of a folder's
// objects. Errors: fault.Invalid for a URL, options or credentials that cannot work,
// fault.Unavailable for a folder that cannot be created.
func Open(ctx context.Context, rawURL string, o SigningOptions) (*Bucket, error) {
	return open(ctx, rawURL, func(u *url.URL) (*Bucket, error) { return makeFolder(u, o) })
}

// OpenExisting opens the bucket of a URL for reading. It does not create a missing folder and
// changes nothing in it. It returns the errors of [Open], and fault.NotFound for a missing folder.
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
	if strings.Contains("/"+prefix, "/../") { // URLs with such a path lead elsewhere
		return nil, fault.New(fault.Invalid, "the parameter prefix of the bucket's URL must not contain ../: name the folder below the bucket, such as prefix=a/b/")
	}
	query.Del("prefix")
	u.RawQuery = query.Encode()
	c, err := openCloud(ctx, u)
	if err != nil {
		return nil, fault.Wrap(fault.Invalid, "the bucket cannot be opened: check the parameters of its URL and the cloud's credentials in the environment", err)
	}
	return &Bucket{cloud: c, prefix: prefix}, nil
}

// Made reports whether [Open] created the folder. It is always false for a cloud's bucket.
func (b *Bucket) Made() bool { return b.folder != nil && b.folder.made }

// Close does nothing. Idle connections end by themselves.
func (b *Bucket) Close() error { return nil }

// Put writes an object and replaces a previous one with the same name. Errors: fault.Invalid for a
// name or size that is not allowed; fault.Unavailable, after which the bucket holds either the
// previous object or this one.
func (b *Bucket) Put(ctx context.Context, name string, data []byte) error {
	return b.write(ctx, name, data, false)
}

// Create writes an object unless there is one with the same name. Of several callers, one succeeds.
// Errors: fault.Conflict when there is one, perhaps because an earlier call has succeeded without an
// answer; and those of [Bucket.Put].
func (b *Bucket) Create(ctx context.Context, name string, data []byte) error {
	return b.write(ctx, name, data, true)
}

func (b *Bucket) write(ctx context.Context, name string, data []byte, fresh bool) error {
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
		err = b.folder.put(ctx, name, data, fresh)
	} else {
		// A signed URL downloads as a file with this name, from every cloud.
		err = b.cloud.put(ctx, b.prefix+name, data, kind{contentType(name), `attachment; filename="` + path.Base(name) + `"`}, fresh)
	}
	switch {
	case fresh && errors.Is(err, fs.ErrExist):
		return fault.Wrap(fault.Conflict, "the object exists already", err)
	case err != nil:
		return unavailable(fmt.Errorf("writing %s: %w", name, err))
	}
	return nil
}

// contentType returns the content type for a name. A cloud sends it with the object.
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

// Get reads an object. Errors: fault.NotFound when there is no object with the name, fault.Invalid
// for a name that is not allowed, fault.Unavailable.
func (b *Bucket) Get(ctx context.Context, name string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, transferTimeout)
	defer cancel()
	return b.get(ctx, name, whole)
}

// GetStart reads the first n bytes of an object, or all of a shorter one. The object may have any
// size. It returns the errors of [Bucket.Get].
func (b *Bucket) GetStart(ctx context.Context, name string, n int) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, transferTimeout)
	defer cancel()
	return b.get(ctx, name, func(r io.Reader, _ int64) ([]byte, error) { return io.ReadAll(io.LimitReader(r, int64(n))) })
}

// get opens an object and reads it with take.
func (b *Bucket) get(ctx context.Context, name string, take func(r io.Reader, size int64) ([]byte, error)) ([]byte, error) {
	if err := checkName(name); err != nil {
		return nil, err
	}
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

// Exists reports whether an object with the name exists. It returns the errors of [Bucket.Get],
// except fault.NotFound.
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

// lacks returns nil when the bucket exists and has no object with the name. Clouds also answer "not
// found" for a missing bucket, for a host without an address, and for an object that the caller may
// not read.
func (b *Bucket) lacks(ctx context.Context, name string) error {
	if b.folder != nil {
		return b.folder.check()
	}
	first, err := b.cloud.list(ctx, b.prefix+name, "", 1)
	if err != nil {
		return err
	}
	if slices.Contains(first, b.prefix+name) {
		return errors.New("it is there, but may not be read")
	}
	return nil
}

// Delete removes an object. It returns nil when there is none. Errors: fault.Invalid for a name
// that is not allowed, fault.Unavailable.
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

// Expire removes the objects below a prefix, such as reports, that were neither written nor given a
// URL ([Bucket.SignedURL]) since the time before. Then it removes the oldest objects of each folder
// until the rest has at most `most` bytes. It returns the number of removed objects. Times are
// those of the machine's clock, as for files. Errors: fault.Invalid for a prefix that is not
// allowed, and for a cloud's bucket, which has its own rules for expiry; fault.Unavailable.
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
	if err := errors.Join(durable.SyncFolder(filepath.Dir(f.path)), f.sweep()); err != nil {
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

// SignedURL returns a URL that lets anybody who has it read the object until the lifetime ends. The
// object need not exist yet. The lifetime is from one second to seven days. For an object in a
// folder, the URL postpones [Bucket.Expire] like a write. Errors: fault.Invalid for a name or
// lifetime that is not allowed, fault.Unavailable when the cloud's credentials cannot sign.
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
		b.folder.touch(name) // so that the object does not expire before its URL
		return b.signer.sign(name, lifetime), nil
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	u, err := b.cloud.sign(ctx, b.prefix+name, lifetime)
	if err != nil {
		return "", fault.Outage(fault.ReasonObjects, "object storage signs no URL: give the service credentials that may sign",
			fmt.Errorf("signing a URL for %s: %w", name, err))
	}
	return u, nil
}

// Verify returns the name of the object for a URL of [Bucket.SignedURL]. It reads only the query.
// It always returns the same error, of kind fault.Forbidden, when the URL is not from this bucket
// or has expired.
func (b *Bucket) Verify(u *url.URL) (name string, err error) {
	if b.signer != nil {
		if name, ok := b.signer.verify(u); ok {
			return name, nil
		}
	}
	return "", fault.New(fault.Forbidden, "access denied")
}
