package audit

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"io"

	"github.com/latticekeep/latticekeep/internal/fault"
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

// segment returns the object of a segment, whose Hash and Digest it fills in. It
// verifies what it writes as the options say. Error: a [Broken], of which there is
// no object.
func (c *Cutter) segment(ctx context.Context, s *Segment, o Options) ([]byte, error) {
	var out bytes.Buffer
	zip, digest := gzip.NewWriter(&out), newLineDigest() // without a time: the same entries compress the same
	v := NewVerifier(o)
	if err := c.Reader.exportRange(ctx, io.MultiWriter(zip, digest), v, s.From, s.To); err != nil {
		return nil, err
	}
	if err := zip.Close(); err != nil {
		return nil, fmt.Errorf("compressing a segment: %w", err)
	}
	s.Hash, s.Digest = v.head.hash, digest.sum()
	return out.Bytes(), nil
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

// verifySegment checks the object of a segment as an export that goes on from the
// options' base, and returns what is known at its end.
func verifySegment(data []byte, s Segment, o Options) (report Report, base *Base, err error) {
	digest := newLineDigest()
	err = unzip(data, func(lines io.Reader) error {
		var v *Verifier
		if v, report, err = verifyExport(io.TeeReader(lines, digest), o); err != nil {
			return err
		}
		base, err = v.Base()
		return err
	})
	switch {
	case err != nil:
		return Report{}, nil, err
	case report.From != s.From || report.Sequence != s.To || base.head.hash != s.Hash:
		return Report{}, nil, &Broken{s.From, fmt.Sprintf("the segment has entries %d to %d, and is to have those from %d to %d", report.From, report.Sequence, s.From, s.To)}
	case digest.sum() != s.Digest:
		return Report{}, nil, &Broken{s.From, "the segment has other bytes than were archived, such as another signature that verifies too"}
	}
	return report, base, nil
}

// VerifyArchive checks the segments of a log, which are all from the first on, as
// one log, and returns what is known at their end: a whole chain, if the options'
// fingerprint or public key is pinned this one. The options' base and range are
// not used; Since only when it lies in a segment. Errors: a [Broken], also for an
// object that is missing or no segment; those of the archive.
func VerifyArchive(ctx context.Context, a Archive, segments []Segment, o Options) (total Report, base *Base, err error) {
	since := o.Since
	o.Base, o.Tenant, o.From, o.To = nil, false, 0, 0
	for i, s := range segments {
		data, err := a.Get(ctx, s.Name)
		if errors.Is(err, fault.NotFound) {
			return Report{}, nil, &Broken{s.From, "the archive lacks the object " + s.Name}
		}
		if err != nil {
			return Report{}, nil, fmt.Errorf("reading %s: %w", s.Name, err)
		}
		o.Since = nil
		if c, err := peekCheckpoint(since); err == nil && s.From <= c.Sequence && c.Sequence <= s.To {
			o.Since = since
		}
		report, next, err := verifySegment(data, s, o)
		if _, broken := IsBroken(err); err != nil && !broken {
			err = &Broken{s.From, "the object " + s.Name + " cannot be read: " + err.Error()}
		}
		if err != nil {
			return Report{}, nil, err
		}
		report.Entries += total.Entries
		if i > 0 {
			report.From, report.Since = total.From, cmp.Or(report.Since, total.Since)
		}
		total, base, o.Base = report, next, next
	}
	return total, base, nil
}

// VerifyWithArchive checks a whole log from its first entry on, of which the
// oldest entries are in the archive: these, then the store as [VerifyStore] does,
// and that the one goes on where the other ends. Errors: of both.
func VerifyWithArchive(ctx context.Context, s store.Store, a Archive, o Options) (Report, error) {
	var segments []Segment
	err := s.View(ctx, func(r store.Reader) (err error) {
		segments, err = Segments(r)
		return err
	})
	if errors.Is(err, errDamagedLog) {
		return Report{}, &Broken{1, "what the log says to be in the archive is damaged"}
	}
	if err != nil {
		return Report{}, err
	}
	archived, base, err := VerifyArchive(ctx, a, segments, o)
	if err != nil {
		return Report{}, err
	}
	stored, err := readBase(ctx, s)
	if err != nil {
		return Report{}, err
	}
	if !base.equal(stored) {
		return Report{}, &Broken{max(archived.Sequence, 1), "what the archive comes to is not what the log goes on from"}
	}
	o.From, o.To = 0, 0
	report, err := VerifyStore(ctx, s, o)
	if err == nil && base != nil {
		report.From, report.Entries = archived.From, report.Entries+archived.Entries
	}
	return report, err
}

// equal reports whether both say the same. Either may be nil.
func (b *Base) equal(other *Base) bool {
	if b == nil || other == nil || b == other {
		return b == other
	}
	ours, err1 := b.json()
	theirs, err2 := other.json()
	return errors.Join(err1, err2) == nil && bytes.Equal(ours, theirs)
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
