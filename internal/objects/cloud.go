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
// same for a missing bucket and for an object that the caller may not read; first distinguishes
// these cases.
type cloud interface {
	put(ctx context.Context, name string, data []byte, k kind) error
	read(ctx context.Context, name string) (body io.ReadCloser, size int64, err error)
	size(ctx context.Context, name string) (int64, error)
	// first returns the first name, in bytewise order, that begins with prefix, and "" for none.
	first(ctx context.Context, prefix string) (string, error)
	delete(ctx context.Context, name string) error
	// sign returns a URL that reads the object until the lifetime ends.
	sign(ctx context.Context, name string, lifetime time.Duration) (string, error)
}

// kind holds the HTTP headers that a cloud sends with an object.
type kind struct {
	contentType        string
	contentDisposition string
}
