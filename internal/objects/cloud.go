package objects

import (
	"context"
	"io"
	"time"
)

// cloud is a bucket of a cloud, reached over its network. It is safe for concurrent use, and its
// calls end with ctx. A name is the name in the bucket, prefix included.
//
// read, size and delete return fs.ErrNotExist when there is no such object. A cloud may return the
// same for a missing bucket and for an object that the caller may not read; list distinguishes
// these cases.
type cloud interface {
	// put writes an object. With fresh it replaces none, and returns fs.ErrExist when there is one.
	put(ctx context.Context, name string, data []byte, k kind, fresh bool) error
	read(ctx context.Context, name string) (body io.ReadCloser, size int64, err error)
	size(ctx context.Context, name string) (int64, error)
	// upload begins an object that is written part by part. ctx bounds the call alone.
	upload(ctx context.Context, name string, k kind) (upload, error)
	// list returns at most `most` names that begin with prefix and come after another name, the first
	// ones in bytewise order.
	list(ctx context.Context, prefix, after string, most int) ([]string, error)
	delete(ctx context.Context, name string) error
	// sign returns a URL that reads the object until the lifetime ends.
	sign(ctx context.Context, name string, lifetime time.Duration) (string, error)
}

// upload is an object that is being written. Nobody sees it before its last part is stored.
type upload interface {
	// part writes the next part, which has partSize bytes unless it is the last one. With that the
	// object is complete and durable.
	part(ctx context.Context, data []byte, last bool) error
	// abort removes the parts that were written.
	abort(ctx context.Context) error
}

// kind holds the HTTP headers that a cloud sends with an object.
type kind struct {
	contentType        string
	contentDisposition string
}
