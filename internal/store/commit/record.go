// Package commit defines the record of a commit: which rows the commit changed, when, and what the
// newest entry of the audit log was after it. Records in their order, applied to the state of an
// earlier commit, make the state of a later one.
//
// A record names rows and no file, bucket or page. Its rows have their final values, so a record may
// be applied again. It is not encrypted, signed or checked: whoever keeps records does that.
//
// Most records are of one commit. A record can stand for several commits in a row when their single
// states are no longer known, as after the process was killed. Its rows then have the values of a
// commit that may be later than the last of them, and the state is only whole again with a later
// record ([Record.Whole]).
package commit

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/latticekeep/latticekeep/internal/store"
)

// Record is what one commit changed, or several in a row.
type Record struct {
	First, Last uint64    // numbers of the commits; the first commit of a log has number 1
	At          uint64    // commit whose values the rows have; Last or a later one
	Time        time.Time // when Last was committed: UTC, whole microseconds
	Head        Head      // after At; known from the rows, or the one before
	Rows        []Row
}

// Row is a row with its new value.
type Row struct {
	Key   []byte
	Value []byte // nil: the row was deleted
}

// Head says what the newest entry of the audit log and the newest change of the state are. The zero
// value is that of a store without entries.
type Head struct {
	Sequence   uint64
	Hash       [32]byte
	State      uint64   // number of the newest change; 0 while the store keeps no state
	Commitment [32]byte // commitment of that change
}

// Whole reports whether the rows are those of one commit, Last, once the record is applied. It is not
// when the rows have values of a later commit, which changed other rows, too.
func (r Record) Whole() bool { return r.At == r.Last }

// MaxValue is the maximal length of a value in bytes, as in a backup.
const MaxValue = 32 << 20

const (
	version = 1

	tagEnd    = 0
	tagPut    = 1
	tagDelete = 2

	// HeadSize is the length of an encoded head in bytes.
	HeadSize  = 8 + 32 + 8 + 32
	fixedSize = 1 + 4*8 + HeadSize

	maxMicros = 253402300799_999999 // the end of the year 9999
)

// Append appends the bytes of the head: u64(sequence) ‖ hash ‖ u64(state) ‖ commitment.
func (h Head) Append(b []byte) []byte {
	b = append(binary.BigEndian.AppendUint64(b, h.Sequence), h.Hash[:]...)
	return append(binary.BigEndian.AppendUint64(b, h.State), h.Commitment[:]...)
}

// ParseHead reads the HeadSize bytes of a head.
func ParseHead(b []byte) (h Head) {
	h.Sequence = binary.BigEndian.Uint64(b)
	copy(h.Hash[:], b[8:])
	h.State = binary.BigEndian.Uint64(b[40:])
	copy(h.Commitment[:], b[48:])
	return h
}

// Size returns about how many bytes the record takes.
func (r Record) Size() int {
	n := fixedSize + 1
	for _, row := range r.Rows {
		n += row.size()
	}
	return n
}

func (r Row) size() int { return 7 + len(r.Key) + len(r.Value) }

// Append appends the bytes of the record:
//
//	u8(version) ‖ u64(first) ‖ u64(last) ‖ u64(at) ‖ u64(Unix microseconds) ‖ head ‖ row … ‖ 0x00
//
// and a row is as in a backup. It panics for a record that no store makes.
func (r Record) Append(b []byte) []byte {
	if err := r.check(); err != nil {
		panic("encoding a commit: " + err.Error())
	}
	b = append(b, version)
	for _, n := range []uint64{r.First, r.Last, r.At, uint64(r.Time.UnixMicro())} {
		b = binary.BigEndian.AppendUint64(b, n)
	}
	b = r.Head.Append(b)
	for _, row := range r.Rows {
		tag := byte(tagPut)
		if row.Value == nil {
			tag = tagDelete
		}
		b = append(binary.BigEndian.AppendUint16(append(b, tag), uint16(len(row.Key))), row.Key...)
		if row.Value != nil {
			b = append(binary.BigEndian.AppendUint32(b, uint32(len(row.Value))), row.Value...)
		}
	}
	return append(b, tagEnd)
}

func (r Record) check() error {
	switch micros := r.Time.UnixMicro(); {
	case r.First == 0 || r.First > r.Last || r.Last > r.At:
		return fmt.Errorf("it is of the commits %d to %d as of %d", r.First, r.Last, r.At)
	case micros < 0 || micros > maxMicros:
		return errors.New("its time is out of range")
	}
	for _, row := range r.Rows {
		if len(row.Key) == 0 || len(row.Key) > store.MaxKeySize || len(row.Value) > MaxValue {
			return fmt.Errorf("it has a row of %d and %d bytes", len(row.Key), len(row.Value))
		}
	}
	return nil
}

var errCut = errors.New("a record is cut off")

// Parse reads the record at the beginning of b and returns what follows. The rows share the memory
// of b. It accepts exactly what Append produces.
func Parse(b []byte) (r Record, rest []byte, err error) {
	if len(b) < fixedSize {
		return r, nil, errCut
	}
	if b[0] != version {
		return r, nil, fmt.Errorf("a record has version %d, which this program does not read: use a newer release", b[0])
	}
	number := func(i int) uint64 { return binary.BigEndian.Uint64(b[1+8*i:]) }
	micros := number(3)
	if micros > maxMicros {
		return r, nil, errors.New("a record has no valid time")
	}
	r = Record{First: number(0), Last: number(1), At: number(2), Time: time.UnixMicro(int64(micros)).UTC(), Head: ParseHead(b[1+4*8:])}
	for b = b[fixedSize:]; ; {
		if len(b) == 0 {
			return r, nil, errCut
		}
		tag := b[0]
		b = b[1:]
		var row Row
		switch tag {
		case tagEnd:
			if err := r.check(); err != nil {
				return r, nil, fmt.Errorf("a record is not valid: %w", err)
			}
			return r, b, nil
		case tagPut, tagDelete:
		default:
			return r, nil, fmt.Errorf("a record has a row of kind %d", tag)
		}
		if len(b) < 2 {
			return r, nil, errCut
		}
		if row.Key, b, err = take(b[2:], uint64(binary.BigEndian.Uint16(b))); err != nil {
			return r, nil, err
		}
		if tag == tagPut {
			if len(b) < 4 {
				return r, nil, errCut
			}
			if row.Value, b, err = take(b[4:], uint64(binary.BigEndian.Uint32(b))); err != nil {
				return r, nil, err
			}
		}
		r.Rows = append(r.Rows, row)
	}
}

// take splits b after n bytes. What it takes is never nil.
func take(b []byte, n uint64) (taken, rest []byte, err error) {
	if n > uint64(len(b)) {
		return nil, nil, errCut
	}
	return b[:n:n], b[n:], nil
}
