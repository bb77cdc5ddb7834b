package keeper

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/fault"
)

// BucketAnchor keeps the newest checkpoint in a bucket, as the object anchor/<chain id>/checkpoint.
// A bucket cannot compare before it writes. If two processes write at the same time, the later
// write wins. This does no harm while both use the same database.
type BucketAnchor struct {
	bucket audit.Archive
	folder string
}

// maxNote is the maximum length in bytes of a note in an anchor. A signed checkpoint has a few KiB.
// The limit keeps other writers to the anchor from making the keeper read large objects.
const maxNote = 64 << 10

// NewBucketAnchor returns the anchor in a bucket for the log of a chain.
func NewBucketAnchor(chainID string, b audit.Archive) *BucketAnchor {
	return &BucketAnchor{b, "anchor/" + chainID + "/"}
}

// Name implements [Anchor].
func (p *BucketAnchor) Name() string { return "bucket" }

// Load implements [Anchor]. If the object is longer than maxNote and the bucket can read
// partially, Load returns only its first maxNote+1 bytes, which are too long as well.
func (p *BucketAnchor) Load(ctx context.Context) (note []byte, err error) {
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
		note = []byte{} // an empty object is a malformed note, not an empty anchor
	}
	return note, err
}

// Save implements [Anchor].
func (p *BucketAnchor) Save(ctx context.Context, note []byte) error {
	return p.bucket.Put(ctx, p.folder+"checkpoint", note)
}

// SetAside implements [Anchor]. The object is named refused-<SHA-256>, so that equal notes are
// kept once.
func (p *BucketAnchor) SetAside(ctx context.Context, note []byte) error {
	sum := sha256.Sum256(note)
	return p.bucket.Put(ctx, p.folder+"refused-"+hex.EncodeToString(sum[:]), note)
}
