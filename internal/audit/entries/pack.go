package entries

import (
	"bytes"
	"compress/flate"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math/bits"
	"slices"
	"sync"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/store"
)

// A pack is one row with the rows of a block, which is BlockSize consecutive sequences; the first
// block begins at 1. A block whose sequences are not all in the store, because an epoch skips some
// or older entries are archived, has a pack of the remaining ones. Signatures do not compress, and
// the canonical bytes of neighbours differ little. So the first row of a pack is stored as it is,
// and its canonical bytes are the dictionary with which those of each other row are compressed by
// themselves. One entry is read without reading its neighbours, and a changed byte damages one
// entry, unless it is in the dictionary.
//
// Encoded: version 1, u32 places (bit 1<<i is set for the i-th sequence of the block), for each place
// u32 length, then for each place an item of that length: u32 CRC-32C of the rest of the item, the
// row up to its canonical bytes, and those bytes, in DEFLATE in all items but the first. DEFLATE has
// several spellings of the same bytes; the checksum makes every changed byte a damaged entry. It is
// no protection: hashes and signatures of the entries are.
const (
	// BlockSize is the number of sequences in a block.
	BlockSize = 32

	packVersion = 1
	packHeader  = 1 + 4

	// maxCore bounds the canonical bytes of a packed entry, and so what a forged item inflates to.
	maxCore = 1 << 20
)

// PackRange holds all packs.
var PackRange = store.Prefix([]byte("audit/pack/"))

// PackKey returns the key of the pack of a block.
func PackKey(block uint64) []byte {
	return binary.BigEndian.AppendUint64([]byte("audit/pack/"), block)
}

// IsPackKey reports whether a key of [PackRange] is that of a block's pack.
func IsPackKey(key []byte) bool {
	n := len(PackRange.From)
	return len(key) == n+8 && binary.BigEndian.Uint64(key[n:]) <= audit.MaxInteger/BlockSize
}

// blockOf returns the block of a sequence, and the place of the sequence in the block.
func blockOf(sequence uint64) (block uint64, place int) {
	return (sequence - 1) / BlockSize, int((sequence - 1) % BlockSize)
}

// sequenceOf returns the sequence at a place of a block.
func sequenceOf(block uint64, place int) uint64 { return block*BlockSize + uint64(place) + 1 }

// rows are the rows of a block; nil where there is none.
type rows [BlockSize][]byte

var (
	errNoPack     = errors.New("the row is not a pack of entries")
	errUnpackable = errors.New("the row is not that of an entry")
	castagnoli    = crc32.MakeTable(crc32.Castagnoli)
)

// split returns the two parts of a row: what precedes the canonical bytes, and those.
func split(row []byte) (head, core []byte, err error) {
	core, _, err = audit.SplitRow(row)
	return row[:len(row)-len(core)], core, err
}

// encode returns the pack of at least one row. Error: errUnpackable.
func (r *rows) encode() ([]byte, error) {
	var places uint32
	var items bytes.Buffer
	var dictionary []byte
	var z *flate.Writer
	out := []byte{packVersion, 0, 0, 0, 0}
	for i, row := range r {
		if row == nil {
			continue
		}
		head, core, err := split(row)
		if err != nil || len(core) == 0 || len(core) > maxCore {
			return nil, errUnpackable
		}
		at := items.Len()
		items.Write([]byte{0, 0, 0, 0})
		items.Write(head)
		if dictionary == nil {
			dictionary = core
			items.Write(core)
		} else {
			if z == nil {
				z, err = flate.NewWriterDict(&items, flate.DefaultCompression, dictionary)
			} else {
				z.Reset(&items)
			}
			if err == nil {
				_, err = z.Write(core)
			}
			if err == nil {
				err = z.Close()
			}
			if err != nil {
				return nil, fmt.Errorf("compressing an audit entry: %w", err)
			}
		}
		item := items.Bytes()[at:]
		binary.BigEndian.PutUint32(item, crc32.Checksum(item[4:], castagnoli))
		places |= 1 << i
		out = binary.BigEndian.AppendUint32(out, uint32(len(item)))
	}
	binary.BigEndian.PutUint32(out[1:], places)
	return append(out, items.Bytes()...), nil
}

// pack is a decoded pack. It shares the memory of its row.
type pack struct {
	places uint32 // bits of the places with an item
	items  rows   // rows include their checksums; nil where there is none
	first  int    // place of the first item
}

// decode decodes a pack, but not its items. Error: errNoPack.
func decode(b []byte) (p pack, err error) {
	if len(b) < packHeader || b[0] != packVersion {
		return pack{}, errNoPack
	}
	places := binary.BigEndian.Uint32(b[1:])
	lengths := b[packHeader:]
	if places == 0 || len(lengths) < 4*bits.OnesCount32(places) {
		return pack{}, errNoPack
	}
	rest := lengths[4*bits.OnesCount32(places):]
	p.places, p.first = places, bits.TrailingZeros32(places)
	for ; places != 0; places &= places - 1 {
		n := binary.BigEndian.Uint32(lengths)
		lengths = lengths[4:]
		if n < 4 || uint64(n) > uint64(len(rest)) {
			return pack{}, errNoPack
		}
		p.items[bits.TrailingZeros32(places)], rest = rest[:n:n], rest[n:]
	}
	if len(rest) > 0 {
		return pack{}, errNoPack
	}
	return p, nil
}

// row returns the row at a place: nil if there is none, and an empty one if it is damaged.
func (p *pack) row(place int) []byte {
	if p.items[place] == nil {
		return nil
	}
	head, core, err := p.item(place)
	switch {
	case err != nil:
		return []byte{}
	case place == p.first:
		return p.items[place][4:]
	}
	_, dictionary, err := p.item(p.first)
	if err != nil {
		return []byte{}
	}
	z := inflaters.Get().(*inflater)
	defer inflaters.Put(z)
	if core, err = z.inflate(core, dictionary); err != nil {
		return []byte{}
	}
	return slices.Concat(head, core)
}

// item returns the two parts of an item, the second one still compressed. Error: when the item is
// damaged.
func (p *pack) item(place int) (head, rest []byte, err error) {
	item := p.items[place]
	if binary.BigEndian.Uint32(item) != crc32.Checksum(item[4:], castagnoli) {
		return nil, nil, errNoPack
	}
	return split(item[4:])
}

// inflater is a decompressor that is used again.
type inflater struct {
	in  bytes.Reader
	out bytes.Buffer
	z   io.ReadCloser
}

var inflaters = sync.Pool{New: func() any { return &inflater{z: flate.NewReader(nil)} }}

// inflate returns the canonical bytes of an item, until its next call.
func (i *inflater) inflate(compressed, dictionary []byte) ([]byte, error) {
	i.in.Reset(compressed)
	i.out.Reset()
	if err := i.z.(flate.Resetter).Reset(&i.in, dictionary); err != nil {
		return nil, err
	}
	n, err := i.out.ReadFrom(io.LimitReader(i.z, maxCore+1))
	if err == nil && (n > maxCore || i.in.Len() > 0) {
		err = errNoPack
	}
	return i.out.Bytes(), err
}
