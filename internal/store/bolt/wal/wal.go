// Package wal is the write-ahead log of the embedded store: a file beside the database in which a
// commit is one record, written in sequence and synced once. The store applies the records to the
// database later, many at a time.
//
// A record begins at a multiple of [BlockSize], so that no write touches the blocks of an earlier
// one:
//
//	magic ‖ u32(CRC-32C of all that follows) ‖ u32(length of the commit) ‖ log ‖ previous ‖ id ‖ commit
//
// log is the random id of the file, which the database knows too. So no value of a row looks like a
// record. previous and id are the random ids of the commit before and of this one. All three have 16
// bytes. commit is a [commit.Record] of one commit, with a zero head. Records are numbered without a
// gap. Once all are applied, the next one is written at the beginning again, over earlier ones; so a
// file also has records that are applied already, which their numbers tell.
//
// The package encrypts nothing: the file has the same rows as the database, and is as secret.
package wal

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/latticekeep/latticekeep/internal/durable"
	"github.com/latticekeep/latticekeep/internal/store/commit"
	"github.com/latticekeep/latticekeep/internal/volume"
)

const (
	// BlockSize is the size in bytes of what a device writes as a whole, or a multiple of it.
	BlockSize = 4096

	// MaxSize bounds the file.
	MaxSize = 16 << 20

	product    = "LKWAL"
	magic      = product + "\x00\x00\x01"
	headerSize = len(magic) + 4 + 4 + 3*16

	step  = 1 << 20     // the file grows by so much
	spare = 4 << 20     // the volume keeps this free for others
	again = time.Second // pause between attempts to grow
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// ID is the random id of a log or of a commit.
type ID = [16]byte

// Record is one commit.
type Record struct {
	Log, Previous, ID ID
	commit.Record
}

// Encode returns the bytes of the record, up to the end of a block.
func (r Record) Encode() []byte {
	b := append(make([]byte, 0, blocks(headerSize+r.Size())*BlockSize), magic...)
	b = append(b, make([]byte, 8)...)
	for _, id := range []ID{r.Log, r.Previous, r.ID} {
		b = append(b, id[:]...)
	}
	b = r.Append(b)
	head := b[len(magic):]
	binary.BigEndian.PutUint32(head[4:], uint32(len(b)-headerSize))
	binary.BigEndian.PutUint32(head, crc32.Checksum(head[4:], castagnoli))
	return b[:blocks(len(b))*BlockSize] // the rest of what was made is zero
}

func blocks(n int) int { return (n + BlockSize - 1) / BlockSize }

// Parse reads the record at the beginning of b, and returns how many blocks it takes; 0 when there
// is no whole record. The rows share the memory of b.
func Parse(b []byte) (r Record, size int) {
	if len(b) < headerSize || string(b[:len(magic)]) != magic {
		return r, 0
	}
	head := b[len(magic):]
	end := headerSize + int(binary.BigEndian.Uint32(head[4:]))
	if end > len(b) || crc32.Checksum(b[len(magic)+4:end], castagnoli) != binary.BigEndian.Uint32(head) {
		return r, 0
	}
	copy(r.Log[:], head[8:])
	copy(r.Previous[:], head[24:])
	copy(r.ID[:], head[40:])
	made, rest, err := commit.Parse(b[headerSize:end])
	if err != nil || len(rest) > 0 || made.First != made.Last || made.Last != made.At {
		return r, 0
	}
	r.Record = made
	return r, blocks(end)
}

// ErrGap means that a commit is missing between the database and the records, or between two
// records.
var ErrGap = errors.New("a commit is missing")

// ErrNewer means that the file has another version of this format.
var ErrNewer = errors.New("the write-ahead log has a version that this program does not read")

// State is what a database knows of its log.
type State struct {
	Log     ID
	Applied uint64 // number of the newest commit of the log that the database has
	Newest  ID     // id of the newest commit that the database has, of the log or not
}

// After returns the records of the file at path that follow a state of the database, in their order.
// Errors: fs.ErrNotExist without a file, [ErrGap] when the records do not follow, [ErrNewer].
func After(path string, s State) ([]Record, error) {
	b, err := read(path)
	if err != nil {
		return nil, err
	}
	// No value of a row lies in the first block's header.
	if bytes.HasPrefix(b, []byte(product)) && !bytes.HasPrefix(b, []byte(magic)) {
		return nil, ErrNewer
	}
	if first, size := Parse(b); size > 0 && first.Log != s.Log {
		return nil, fmt.Errorf("%w: it is another log", ErrGap)
	}
	found := []Record{}
	for len(b) > 0 {
		r, size := Parse(b)
		if size > 0 && r.Log == s.Log && r.Last > s.Applied {
			found = append(found, r)
		}
		b = b[min(max(size, 1)*BlockSize, len(b)):]
	}
	slices.SortFunc(found, func(a, b Record) int { return cmp.Compare(a.Last, b.Last) })
	for i, r := range found {
		if r.Last != s.Applied+1+uint64(i) || r.Previous != s.Newest {
			return nil, fmt.Errorf("%w before number %d", ErrGap, r.Last)
		}
		s.Newest = r.ID
	}
	return found, nil
}

func read(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, MaxSize))
	if err != nil {
		return nil, fmt.Errorf("reading the write-ahead log: %w", err)
	}
	return b, nil
}

// Settle writes what the file at path has once more, and syncs it: after a sync that failed, what is
// read may be in memory alone.
func Settle(path string) error {
	b, err := read(path)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	if _, err = f.WriteAt(b, 0); err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// Discard wipes and removes the file at path, if there is one. Its records must have been applied.
// Where it cannot be wiped, it is removed all the same.
func Discard(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	info, err := f.Stat()
	if err == nil {
		err = wipe(f, info.Size())
	}
	return errors.Join(err, f.Close(), os.Remove(path), durable.SyncFolder(filepath.Dir(path)))
}

// Log is a file that takes records. It is for one goroutine.
type Log struct {
	file  *os.File
	size  int64     // up to where the file has blocks, written and synced once
	end   int64     // the next record goes here
	used  int64     // up to where records were written since the last Wipe
	tried time.Time // when the file could not grow
}

// Create makes an empty file at path with mode 0600. There must be none.
func Create(path string) (*Log, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	if err := durable.SyncFolder(filepath.Dir(path)); err != nil {
		return nil, errors.Join(err, f.Close(), os.Remove(path))
	}
	return &Log{file: f}, nil
}

// Reserve makes room for a record of n bytes, and reports whether there is. A file does not grow
// beyond [MaxSize], and leaves the volume some room.
func (l *Log) Reserve(n int) bool {
	end := l.end + int64(n)
	if end <= l.size {
		return true
	}
	to := min((end+step-1)/step*step, MaxSize)
	if end > MaxSize || !l.hasRoom(to) || time.Since(l.tried) < again {
		return false
	}
	if err := l.grow(to); err != nil {
		l.tried = time.Now()
		return false
	}
	return true
}

// hasRoom reports whether the volume has room for a file of that size, and some for others.
func (l *Log) hasRoom(size int64) bool {
	_, free, _, err := volume.Of(l.file)
	return errors.Is(err, errors.ErrUnsupported) || err == nil && free >= size-l.size+spare
}

// grow makes the file longer with zeroes: blocks that were written once need no change of the file's
// metadata when a record comes.
func (l *Log) grow(size int64) error {
	_, err := l.file.WriteAt(make([]byte, size-l.size), l.size)
	if err == nil {
		err = l.file.Sync()
	}
	if err != nil {
		return errors.Join(err, l.file.Truncate(l.size))
	}
	l.size = size
	return nil
}

// Append writes a record for which room was reserved, and syncs it. After an error it is not known
// whether it is in the file.
func (l *Log) Append(record []byte) error {
	l.used = max(l.used, l.end+int64(len(record)))
	if _, err := l.file.WriteAt(record, l.end); err != nil {
		return err
	}
	if err := volume.SyncData(l.file); err != nil {
		return err
	}
	l.end += int64(len(record))
	return nil
}

// Rewind lets the next record begin the file. All records must have been applied.
func (l *Log) Rewind() { l.end = 0 }

// Wipe overwrites all records with zeroes, and syncs that. They must have been applied.
func (l *Log) Wipe() error {
	if l.used == 0 {
		return nil
	}
	if err := wipe(l.file, l.used); err != nil {
		return err
	}
	l.end, l.used = 0, 0
	return nil
}

func wipe(f *os.File, size int64) error {
	zeroes := make([]byte, step)
	for at := int64(0); at < size; at += step {
		if _, err := f.WriteAt(zeroes[:min(step, size-at)], at); err != nil {
			return fmt.Errorf("wiping the write-ahead log: %w", err)
		}
	}
	if err := f.Sync(); err != nil {
		return fmt.Errorf("wiping the write-ahead log: %w", err)
	}
	return nil
}

// Close closes the file.
func (l *Log) Close() error { return l.file.Close() }
