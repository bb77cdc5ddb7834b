package entries

import (
	"bytes"
	"encoding/binary"
	"math/bits"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/store"
)

// packCursor walks the packed entries of a range. It reads a pack when it comes to it.
type packCursor struct {
	r         store.Reader
	low, high uint64 // sequences that are yet to come; none if low is above high
	reverse   bool

	loaded  bool
	block   uint64 // block of the loaded pack
	pack    pack
	damaged bool // the pack cannot be decoded
}

func newPackCursor(r store.Reader, rng store.Range) packCursor {
	c := packCursor{r: r, low: sequenceFrom(rng.From), high: audit.MaxInteger, reverse: rng.Reverse}
	if rng.To != nil {
		c.high = sequenceFrom(rng.To) - 1
	}
	return c
}

// sequenceFrom returns the first sequence whose row has this key or a later one.
func sequenceFrom(key []byte) uint64 {
	switch prefix := audit.EntryRange.From; {
	case bytes.Compare(key, audit.EntryKey(1)) <= 0:
		return 1
	case bytes.Compare(key, audit.EntryKey(audit.MaxInteger)) > 0:
		return audit.MaxInteger + 1
	case len(key) > len(prefix)+8:
		return binary.BigEndian.Uint64(key[len(prefix):]) + 1
	default:
		var sequence [8]byte
		copy(sequence[:], key[len(prefix):])
		return binary.BigEndian.Uint64(sequence[:])
	}
}

// peek returns the sequence of the next entry, and 0 at the end.
func (c *packCursor) peek() (uint64, error) {
	for c.low <= c.high {
		block, place := blockOf(c.low)
		if c.reverse {
			block, place = blockOf(c.high)
		}
		if !c.loaded || c.block != block {
			if err := c.load(block); err != nil {
				return 0, err
			}
			continue
		}
		if !c.damaged {
			if place = c.pack.nextFrom(place, c.reverse); place < 0 {
				c.leave(block)
				continue
			}
		}
		sequence := sequenceOf(block, place)
		if sequence < c.low || sequence > c.high {
			break
		}
		return sequence, nil
	}
	return 0, nil
}

// take returns the row of the entry whose sequence peek has returned, and goes on to the next.
func (c *packCursor) take(sequence uint64) []byte {
	block, place := blockOf(sequence)
	switch {
	case c.damaged:
		c.leave(block)
		return []byte{}
	case c.reverse:
		c.high = sequence - 1
	default:
		c.low = sequence + 1
	}
	return c.pack.row(place)
}

// leave goes on behind a block.
func (c *packCursor) leave(block uint64) {
	if c.reverse {
		c.high = block * BlockSize
	} else {
		c.low = sequenceOf(block+1, 0)
	}
}

// load reads the pack of a block or, if there is none, the next one there is, and goes on to it.
func (c *packCursor) load(block uint64) error {
	row, err := c.r.Get(PackKey(block))
	if err != nil {
		return err
	}
	if row == nil {
		if block, row, err = c.next(block); row == nil || err != nil {
			c.low, c.high = 1, 0
			return err
		}
		if c.reverse {
			c.high = min(c.high, sequenceOf(block, BlockSize-1))
		} else {
			c.low = max(c.low, sequenceOf(block, 0))
		}
	}
	c.pack, err = decode(row)
	c.loaded, c.block, c.damaged = true, block, err != nil
	return nil
}

// next returns the pack that comes after a block.
func (c *packCursor) next(block uint64) (at uint64, row []byte, err error) {
	last, _ := blockOf(c.high)
	rng := store.Range{From: PackKey(block + 1), To: PackKey(last + 1)}
	if c.reverse {
		first, _ := blockOf(c.low)
		rng = store.Range{From: PackKey(first), To: PackKey(block), Reverse: true}
	}
	err = c.r.Scan(rng, func(key, value []byte) bool {
		if !IsPackKey(key) {
			return true // a verification reports it
		}
		at, row = binary.BigEndian.Uint64(key[len(PackRange.From):]), value
		return false
	})
	return at, row, err
}

// nextFrom returns the first place at or after a place that has an item, or at or before it, and -1
// if there is none.
func (p *pack) nextFrom(place int, reverse bool) int {
	if reverse {
		return bits.Len32(p.places&(1<<(place+1)-1)) - 1
	}
	if left := p.places >> place << place; left != 0 {
		return bits.TrailingZeros32(left)
	}
	return -1
}
