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

// Segment is a part of the log that lies in the archive, as the object
//
//	audit/<chain id>/<from>-<to>-<hash>.jsonl.gz
//
// with both sequences in 20 digits and the first 16 of the hash of the entry To: an
// export of the range, which ends with the checkpoint of its last entry, compressed
// with gzip. It is verified as an export is, going on from what the segments before
// came to. The hash is in the name because there may be two histories of a range,
// one that a database knows which was restored and one that is lost but for its
// archive.
type Segment struct {
	From, To uint64   // sequences of its first and last entry
	Hash     [32]byte // of the entry To, SHA3-256
	Digest   [32]byte // SHA-256 of the lines of its entries; the closing line is signed anew each time that it is written
	Name     string   // of the object
}

func segmentName(chainID string, s Segment) string {
	return fmt.Sprintf("audit/%s/%020d-%020d-%x.jsonl.gz", chainID, s.From, s.To, s.Hash[:8])
}

func archiveKey(from uint64) []byte {
	return binary.BigEndian.AppendUint64([]byte("audit/archive/"), from)
}

var archiveRange = store.Prefix([]byte("audit/archive/"))

// segmentHeader is what stands before the name in a row: u64 To, Hash, Digest.
const segmentHeader = 8 + 32 + 32

func (s Segment) encode() []byte {
	b := binary.BigEndian.AppendUint64(make([]byte, 0, segmentHeader+len(s.Name)), s.To)
	b = append(b, s.Hash[:]...)
	b = append(b, s.Digest[:]...)
	return append(b, s.Name...)
}

func decodeSegment(key, value []byte) (Segment, error) {
	if len(key) != len(archiveRange.From)+8 || len(value) <= segmentHeader {
		return Segment{}, errDamagedLog
	}
	s := Segment{
		From: sequenceOf(key[len(archiveRange.From):]), To: sequenceOf(value),
		Hash: [32]byte(value[8:]), Digest: [32]byte(value[40:]), Name: string(value[segmentHeader:]),
	}
	if s.From == 0 || s.To < s.From || s.To > maxInteger {
		return Segment{}, errDamagedLog
	}
	return s, nil
}

// Segments returns what is in the archive, oldest first; none when the whole log
// is in the database.
func Segments(r store.Reader) ([]Segment, error) {
	var segments []Segment
	var bad error
	err := r.Scan(archiveRange, func(key, value []byte) bool {
		var s Segment
		if s, bad = decodeSegment(key, value); bad == nil && len(segments) > 0 && s.From <= segments[len(segments)-1].To {
			bad = errDamagedLog
		}
		segments = append(segments, s)
		return bad == nil
	})
	if err = errors.Join(err, bad); err != nil {
		return nil, fmt.Errorf("reading what is in the archive: %w", err)
	}
	return segments, nil
}

// newestSegment returns the zero Segment when there is none.
func newestSegment(r store.Reader) (s Segment, err error) {
	newest := archiveRange
	newest.Reverse = true
	var bad error
	err = r.Scan(newest, func(key, value []byte) bool {
		s, bad = decodeSegment(key, value)
		return false
	})
	return s, errors.Join(err, bad)
}

// segmentBytes ends a segment that has long entries before it has as many as it could: a segment is
// put together and compressed in memory.
const segmentBytes = 64 << 20

// MaxSegment bounds the lines of a segment, in bytes: many times what ends one, since the group
// that is begun by then is in it whole. An object can be compressed from as much as it
// likes by whoever may write to the archive.
const MaxSegment = 16 * segmentBytes

// unzip reads what [Log.segment] returned: one stream, all of which is to be read,
// and nothing behind it.
func unzip(data []byte, read func(lines io.Reader) error) error {
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
	if n, err := zip.Read(make([]byte, 1)); n > 0 || err != io.EOF || in.Len() > 0 {
		return errors.New("reading a segment: it goes on after its end")
	}
	return nil
}

// lineDigest is SHA-256 over all lines that are written to it but the last. None may
// be longer than one of an export.
type lineDigest struct {
	hash hash.Hash
	line []byte // the last one, as far as it was written
	full bool   // it ended
}

var errLongLine = errors.New("reading a segment: a line is too long for an entry")

func newLineDigest() *lineDigest { return &lineDigest{hash: sha256.New()} }

func (d *lineDigest) Write(b []byte) (int, error) {
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
		if len(d.line)+end > maxLine {
			return 0, errLongLine
		}
		d.line, rest = append(d.line, rest[:end]...), rest[end:]
	}
	return len(b), nil
}

func (d *lineDigest) sum() [32]byte { return [32]byte(d.hash.Sum(nil)) }

// Archive keeps objects by name. Put returns when the object is durable; Get's
// error is fault.NotFound when there is none.
type Archive interface {
	Put(ctx context.Context, name string, data []byte) error
	Get(ctx context.Context, name string) ([]byte, error)
}

// maxLine bounds one line of an export: an entry is a few KiB.
const maxLine = 1 << 20

// isOf reports whether an entry says that the segment was archived.
func (s Segment) isOf(e *Entry) bool {
	return e.number(attributeFrom) == s.From && e.number(attributeTo) == s.To &&
		e.Attributes[attributeObject] == s.Name && e.Attributes[attributeSHA256] == hex.EncodeToString(s.Digest[:])
}
