package audit

import (
	"io"

	"golang.org/x/mod/sumdb/tlog"

	"github.com/latticekeep/latticekeep/internal/dualsig"
)

const (
	MaxMemo        = maxMemo
	SegmentHeader  = segmentHeader
	SummaryVersion = summaryVersion
)

var (
	AllPlaces   = allPlaces
	ErrLongLine = errLongLine
)

func (p BatchProof) Encode(signature []byte) []byte { return p.encode(signature) }

func DecodeSegment(key, value []byte) (Segment, error) { return decodeSegment(key, value) }

func UnzipAtMost(data []byte, most int64, read func(lines io.Reader) error) error {
	return unzipAtMost(data, most, read)
}

func EachKey(summary []byte, visit func(key uint32, at PlaceSet)) bool {
	return eachKey(summary, visit)
}

// Buffered returns the length of the line that is not complete yet.
func (d *LineDigest) Buffered() int { return len(d.line) }

func (b *TreeBuilder) Encode() []byte { return b.encode() }

func DecodeTree(in []byte) (*TreeBuilder, error) { return decodeTree(in) }

func TileData(hashes []tlog.Hash) []byte { return tileData(hashes) }

// Len returns the number of groups that are remembered.
func (m *Memo) Len() int { return len(m.groups) }

func (m *Memo) Verify(key *dualsig.PublicKey, n uint32, root [32]byte, signature []byte) bool {
	return m.verify(key, n, root, signature)
}
