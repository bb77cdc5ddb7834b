// Package pages reads a bbolt file beside bbolt: its newest meta page, the list of its free pages,
// and what lies after the last page. The store needs these while it opens a file, because bbolt would
// panic or read beyond the end of a damaged one, and while it wipes free pages, which bbolt does not
// name. The package writes nothing.
package pages

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"os"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/volume"
)

// Messages about a file that cannot be used. They name the remedy.
const (
	Damaged   = "the database file is damaged: restore a backup"
	Foreign   = "the file is not a latticekeep database: choose another data directory or restore a backup"
	truncated = "the database file is truncated: restore a backup"
)

// Meta is a meta page of bbolt's file format, version 2. A page header of 16 bytes is followed by
// magic, version, page size and flags (4 bytes each), then root page, sequence, freelist page,
// number of pages, transaction and an FNV-1a checksum of all these (8 bytes each), in the byte
// order of the machine.
type Meta struct {
	Offset   int64 // position of Raw in the file
	Raw      []byte
	PageSize int64
	Freelist uint64 // page
	High     uint64 // first page after those in use
	TxID     uint64
}

const (
	HeaderSize = 16
	MetaSize   = 64
	metaMagic  = 0xED0CDAED
	noFreelist = 1<<64 - 1
)

// NewestMeta returns the meta page that a fresh start would use. Its error names the remedy when
// there is none or when the file is shorter than the meta page says.
func NewestMeta(f *os.File) (Meta, error) {
	info, err := f.Stat()
	if err != nil {
		return Meta{}, fmt.Errorf("reading file size: %w", err)
	}
	if info.Size() == 0 {
		return Meta{}, fault.New(fault.Internal, truncated)
	}
	newest, ok := readMeta(f, 0, 0)
	for size := int64(1 << 10); size <= 1<<16; size <<= 1 {
		if ok && size != newest.PageSize {
			continue // the first page says where the second one is
		}
		if m, valid := readMeta(f, size, size); valid && (!ok || m.TxID > newest.TxID) {
			newest, ok = m, true
			break
		}
	}
	switch {
	case !ok:
		return Meta{}, fault.Wrap(fault.Invalid, Foreign, errors.New("neither meta page is valid"))
	case newest.Freelist == noFreelist: // our files always have one; bbolt would now write it
		return Meta{}, fault.Wrap(fault.Invalid, Foreign, errors.New("the freelist is not in the file"))
	case newest.High > uint64(info.Size()/newest.PageSize):
		return Meta{}, fault.Wrap(fault.Internal, truncated, fmt.Errorf("%d bytes, %d pages of %d expected", info.Size(), newest.High, newest.PageSize))
	}
	return newest, nil
}

// readMeta reads the meta page at offset; pageSize is 0 while it is unknown.
func readMeta(f io.ReaderAt, offset, pageSize int64) (m Meta, valid bool) {
	m.Raw = make([]byte, MetaSize)
	m.Offset = offset + HeaderSize
	if _, err := f.ReadAt(m.Raw, m.Offset); err != nil {
		return m, false
	}
	u32, u64, b := binary.NativeEndian.Uint32, binary.NativeEndian.Uint64, m.Raw
	sum := fnv.New64a()
	sum.Write(b[:MetaSize-8])
	if u32(b) != metaMagic || u32(b[4:]) != 2 || u64(b[56:]) != sum.Sum64() {
		return m, false
	}
	m.PageSize = int64(u32(b[8:]))
	m.Freelist, m.High, m.TxID = u64(b[32:]), u64(b[40:]), u64(b[48:])
	return m, m.PageSize >= 1<<10 && m.PageSize <= 1<<16 && m.PageSize&(m.PageSize-1) == 0 &&
		(pageSize == 0 || pageSize == m.PageSize)
}

// FreePages lists the pages that nothing reachable from m uses.
func (m Meta) FreePages(f io.ReaderAt) ([]uint64, error) {
	count, at, err := m.freelistAt(f)
	if err != nil {
		return nil, err
	}
	b := make([]byte, 8*count)
	if _, err := f.ReadAt(b, at); err != nil {
		return nil, fmt.Errorf("reading freelist: %w", err)
	}
	free := make([]uint64, count)
	for i := range free {
		free[i] = binary.NativeEndian.Uint64(b[8*i:])
		if free[i] < 2 || free[i] >= m.High {
			return nil, fault.Wrap(fault.Internal, Damaged, fmt.Errorf("freelist has page %d", free[i]))
		}
	}
	return free, nil
}

// freelistAt returns the number of free pages, and where in the file their list begins.
func (m Meta) freelistAt(f io.ReaderAt) (count uint64, at int64, err error) {
	u64 := binary.NativeEndian.Uint64
	if m.Freelist >= m.High {
		return 0, 0, fault.Wrap(fault.Internal, Damaged, fmt.Errorf("the freelist is on page %d of %d", m.Freelist, m.High))
	}
	at = int64(m.Freelist) * m.PageSize
	b := make([]byte, HeaderSize+8)
	if _, err := f.ReadAt(b, at); err != nil {
		return 0, 0, fmt.Errorf("reading freelist: %w", err)
	}
	at += HeaderSize
	const freelistFlag, long = 0x10, 0xffff
	flags := binary.NativeEndian.Uint16(b[8:])
	if count = uint64(binary.NativeEndian.Uint16(b[10:])); count == long { // the first element is the count
		count = u64(b[HeaderSize:])
		at += 8
	}
	if flags != freelistFlag || count > m.High {
		return 0, 0, fault.Wrap(fault.Internal, Damaged, fmt.Errorf("freelist has flags %#x and %d pages", flags, count))
	}
	return count, at, nil
}

// WrittenTail lists the pages after the last one in use that something was written to. The others
// are the reserve, which is too long to be read each time.
func (m Meta) WrittenTail(f *os.File) (pages []uint64, err error) {
	next := m.High
	for {
		begin, end, err := volume.NextData(f, int64(next)*m.PageSize)
		if errors.Is(err, io.EOF) {
			return pages, nil
		}
		if err != nil {
			return nil, fmt.Errorf("looking for bytes after the last page: %w", err)
		}
		for next = max(next, uint64(begin/m.PageSize)); int64(next)*m.PageSize < end; next++ {
			pages = append(pages, next)
		}
	}
}

// Layout is what a file consists of, in bytes: pages in use, free pages and the unused tail.
type Layout struct{ Live, Free, Tail int64 }

// Size returns the size of the file.
func (l Layout) Size() int64 { return l.Live + l.Free + l.Tail }

// LayoutOf reads the newest meta page and the number of free pages. A commit may replace the freelist
// during the call, so a list that does not fit its meta page is read once more.
func LayoutOf(f *os.File) (Layout, error) {
	for retry := true; ; retry = false {
		info, err := f.Stat()
		if err != nil {
			return Layout{}, err
		}
		m, err := NewestMeta(f)
		if err != nil {
			return Layout{}, err
		}
		count, _, err := m.freelistAt(f)
		switch {
		case err == nil:
			used, free := int64(m.High)*m.PageSize, int64(count)*m.PageSize
			return Layout{Live: used - free, Free: free, Tail: info.Size() - used}, nil
		case !retry:
			return Layout{}, err
		}
	}
}
