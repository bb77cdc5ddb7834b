package audit

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"

	"github.com/latticekeep/latticekeep/internal/fault"
)

// BucketPlace keeps the newest checkpoint in a bucket, as the object
// anchor/<chain id>/checkpoint. A bucket cannot compare before it writes: of two
// processes that write at the same time the later one wins, which harms nothing
// as long as both have one database.
type BucketPlace struct {
	bucket Archive
	folder string
}

// maxNote is how long a note may be that a place keeps: a signed checkpoint is a
// few KiB, and who else can write there is not to decide how much is read.
const maxNote = 64 << 10

// NewBucketPlace returns the place of the log of a chain in a bucket.
func NewBucketPlace(chainID string, b Archive) *BucketPlace {
	return &BucketPlace{b, "anchor/" + chainID + "/"}
}

// Name implements [AnchorPlace].
func (p *BucketPlace) Name() string { return "bucket" }

// Load implements [AnchorPlace]. Of what is too long for a note it returns the
// beginning, which is too long too.
func (p *BucketPlace) Load(ctx context.Context) (note []byte, err error) {
	if b, ok := p.bucket.(interface {
		GetStart(ctx context.Context, name string, n int) ([]byte, error)
	}); ok {
		note, err = b.GetStart(ctx, p.folder+"checkpoint", maxNote+1)
	} else {
		note, err = p.bucket.Get(ctx, p.folder+"checkpoint")
	}
	if errors.Is(err, fault.NotFound) {
		return nil, nil
	}
	if err == nil && note == nil {
		note = []byte{} // an empty object is none of this log
	}
	return note, err
}

// Save implements [AnchorPlace].
func (p *BucketPlace) Save(ctx context.Context, note []byte) error {
	return p.bucket.Put(ctx, p.folder+"checkpoint", note)
}

// SetAside implements [AnchorPlace]: as refused-<SHA-256>, so that the same note
// is kept once.
func (p *BucketPlace) SetAside(ctx context.Context, note []byte) error {
	sum := sha256.Sum256(note)
	return p.bucket.Put(ctx, p.folder+"refused-"+hex.EncodeToString(sum[:]), note)
}
