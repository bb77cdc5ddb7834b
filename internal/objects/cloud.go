package objects

import (
	"context"
	"io"
	"time"
)

// cloud is a bucket of a cloud, reached over its network. It is safe for concurrent use, its calls
// end with ctx, and a name is whatever the bucket calls the object, prefix included.
//
// read, size and delete return fs.ErrNotExist when there is no such object. A cloud may say so as
// well of a bucket that is gone and of an object that may not be read; first tells these apart.
type cloud interface {
	put(ctx context.Context, name string, data []byte, k kind) error
	read(ctx context.Context, name string) (body io.ReadCloser, size int64, err error)
	size(ctx context.Context, name string) (int64, error)
	// first returns the first name, in order of bytes, that begins with prefix, and "" for none.
	first(ctx context.Context, prefix string) (string, error)
	delete(ctx context.Context, name string) error
	// sign returns a URL that reads the object until lifetime is over.
	sign(ctx context.Context, name string, lifetime time.Duration) (string, error)
}

// kind is what an object's reader is told of it.
type kind struct {
	contentType        string
	contentDisposition string
}
