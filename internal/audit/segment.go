package audit

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"

	"github.com/latticekeep/latticekeep/internal/store"
)

// Segment is a part of the log in the archive. Its object is
//
//	audit/<chain id>/<from>-<to>-<hash>.jsonl.gz
//
// Both sequences have 20 digits. The last part is the first 16 hex digits of the hash of the entry
// To. The content is an export of the range, which ends with the checkpoint of its last entry,
// compressed with gzip. It is verified like an export that continues from the previous segments.
// The hash is in the name because two histories of one range may exist: one in a restored database,
// and one that is lost except for its archive.
type Segment struct {
	From, To uint64   // sequences of its first and last entry
	Hash     [32]byte // hash of the entry To, SHA3-256
	// Digest is the SHA-256 of the lines of the entries. It leaves out the closing line, which gets
	// a new signature each time it is written.
	Digest [32]byte
	Name   string // object name
}

// SegmentName returns the object name of a segment.
func SegmentName(chainID string, s Segment) string {
	return fmt.Sprintf("audit/%s/%020d-%020d-%x.jsonl.gz", chainID, s.From, s.To, s.Hash[:8])
}

// ArchiveKey returns the key of the row of the segment that begins at from.
func ArchiveKey(from uint64) []byte {
	return binary.BigEndian.AppendUint64([]byte("audit/archive/"), from)
}

// ArchiveRange holds the rows of all segments.
var ArchiveRange = store.Prefix([]byte("audit/archive/"))

// segmentHeader is the length of the fields before the name in a row: u64 To, Hash, Digest.
const segmentHeader = 8 + 32 + 32

// Encode returns the row of the segment: u64 To, Hash, Digest, Name. From is in its key.
func (s Segment) Encode() []byte {
	b := binary.BigEndian.AppendUint64(make([]byte, 0, segmentHeader+len(s.Name)), s.To)
	b = append(b, s.Hash[:]...)
	b = append(b, s.Digest[:]...)
	return append(b, s.Name...)
}

func decodeSegment(key, value []byte) (Segment, error) {
	if len(key) != len(ArchiveRange.From)+8 || len(value) <= segmentHeader {
		return Segment{}, ErrDamagedLog
	}
	s := Segment{
		From: SequenceOf(key[len(ArchiveRange.From):]), To: SequenceOf(value),
		Hash: [32]byte(value[8:]), Digest: [32]byte(value[40:]), Name: string(value[segmentHeader:]),
	}
	if s.From == 0 || s.To < s.From || s.To > MaxInteger {
		return Segment{}, ErrDamagedLog
	}
	return s, nil
}

// Segments returns the archived segments, oldest first. It returns none if the whole log is in the
// database.
func Segments(r store.Reader) ([]Segment, error) {
	var segments []Segment
	var bad error
	err := r.Scan(ArchiveRange, func(key, value []byte) bool {
		var s Segment
		if s, bad = decodeSegment(key, value); bad == nil && len(segments) > 0 && s.From <= segments[len(segments)-1].To {
			bad = ErrDamagedLog
		}
		segments = append(segments, s)
		return bad == nil
	})
	if err = errors.Join(err, bad); err != nil {
		return nil, fmt.Errorf("reading what is in the archive: %w", err)
	}
	return segments, nil
}

// NewestSegment returns the newest segment, or the zero Segment if there is none.
func NewestSegment(r store.Reader) (s Segment, err error) {
	newest := ArchiveRange
	newest.Reverse = true
	var bad error
	err = r.Scan(newest, func(key, value []byte) bool {
		s, bad = decodeSegment(key, value)
		return false
	})
	return s, errors.Join(err, bad)
}

// SegmentBytes ends a segment of long entries early, in bytes, because a segment is built and
// compressed in memory.
const SegmentBytes = 64 << 20

// MaxSegment bounds the lines of a segment, in bytes. It is many times segmentBytes, because a
// segment always contains the whole last group. The bound is needed because anyone with write
// access to the archive can store an object that decompresses to any size.
const MaxSegment = 16 * SegmentBytes

// Unzip decompresses the object of a segment. The object must be one gzip stream with nothing after
// it, and read must read all of it.
func Unzip(data []byte, read func(lines io.Reader) error) error {
	return unzipAtMost(data, MaxSegment, read)
}

func unzipAtMost(data []byte, most int64, read func(lines io.Reader) error) error {
	in := bytes.NewReader(data)
	zip, err := gzip.NewReader(in)
	if err != nil {
		return fmt.Errorf("reading a segment: %w", err)
	}
	zip.Multistream(false)
	if err := read(io.LimitReader(zip, most)); err != nil {
		return err
	}
	if n, err := zip.Read(make([]byte, 1)); n > 0 || !errors.Is(err, io.EOF) || in.Len() > 0 {
		return errors.New("reading a segment: it goes on after its end")
	}
	return nil
}

// LineDigest computes the SHA-256 over all lines written to it except the last one. A line may not
// be longer than a line of an export.
type LineDigest struct {
	hash hash.Hash
	line []byte // the last line, as far as it is written
	full bool   // the last line is complete
}

var errLongLine = errors.New("reading a segment: a line is too long for an entry")

// NewLineDigest returns the digest of no lines.
func NewLineDigest() *LineDigest { return &LineDigest{hash: sha256.New()} }

// Write adds text, whose lines it may split. Error: a line is longer than [MaxLine].
func (d *LineDigest) Write(b []byte) (int, error) {
	for rest := b; len(rest) > 0; {
		if d.full {
			d.hash.Write(d.line)
			d.line, d.full = d.line[:0], false
		}
		end := bytes.IndexByte(rest, '\n') + 1
		d.full = end > 0
		if !d.full {
			end = len(rest)
		}
		if len(d.line)+end > MaxLine {
			return 0, errLongLine
		}
		d.line, rest = append(d.line, rest[:end]...), rest[end:]
	}
	return len(b), nil
}

// Sum returns the digest of all complete lines before the last one.
func (d *LineDigest) Sum() [32]byte { return [32]byte(d.hash.Sum(nil)) }

// Archive stores objects by name. Put returns when the object is durable. Get returns
// fault.NotFound if the object does not exist.
type Archive interface {
	Put(ctx context.Context, name string, data []byte) error
	Get(ctx context.Context, name string) ([]byte, error)
}

// MaxLine bounds one line of an export, in bytes. An entry has a few KiB.
const MaxLine = 1 << 20

// IsOf reports whether an entry records the archiving of this segment.
func (s Segment) IsOf(e *Entry) bool {
	return e.Number(AttributeFrom) == s.From && e.Number(AttributeTo) == s.To &&
		e.Attributes[AttributeObject] == s.Name && e.Attributes[AttributeSHA256] == hex.EncodeToString(s.Digest[:])
}
