package entries

import (
	"bytes"
	"encoding/binary"
	"slices"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Block is a block whose entries have rows of their own.
type Block struct {
	number uint64
	rows   rows
	pack   []byte
}

// FindBlocks returns the first blocks with rows of their own that begin at the sequence from or
// later and end at the sequence limit or earlier, at most as many as most. next is where to go on.
func FindBlocks(r store.Reader, from, limit uint64, most int) (found []*Block, next uint64, err error) {
	first, place := blockOf(max(from, 1))
	if place > 0 {
		first++
	}
	end, _ := blockOf(min(limit, audit.MaxInteger) + 1) // not whole any more
	rng := store.Range{From: audit.EntryKey(sequenceOf(first, 0)), To: audit.EntryKey(sequenceOf(end, 0))}
	if first >= end {
		return nil, from, nil
	}
	next = sequenceOf(end, 0)
	var b *Block
	current := end
	err = r.Scan(rng, func(key, row []byte) bool {
		if len(key) != len(audit.EntryRange.From)+8 {
			return true // no entry; a verification reports it where it stands
		}
		block, place := blockOf(keySequence(key))
		if block != current {
			if len(found) == most {
				next = sequenceOf(block, 0)
				return false
			}
			current, b = block, &Block{number: block}
			found = append(found, b)
		}
		b.rows[place] = bytes.Clone(row)
		return true
	})
	return found, next, err
}

// Encode makes the pack of the block. It reports false for a block with a row that is not that of an
// entry, which stays as it is.
func (b *Block) Encode() bool {
	row, err := b.rows.encode()
	if err != nil {
		return false
	}
	p, err := decode(row)
	for i := range b.rows {
		if err != nil || !bytes.Equal(p.row(i), b.rows[i]) {
			return false
		}
	}
	b.pack = row
	return true
}

// Put puts the pack in the place of the rows, if these are still the ones that were found. So of
// several processes one packs the block, and nothing is packed that somebody has restored or
// archived meanwhile.
func (b *Block) Put(tx store.Tx) (done bool, err error) {
	there, err := tx.Get(PackKey(b.number))
	if err != nil || there != nil {
		return false, err
	}
	var now rows
	err = tx.Scan(store.Range{From: audit.EntryKey(sequenceOf(b.number, 0)), To: audit.EntryKey(sequenceOf(b.number+1, 0))}, func(key, row []byte) bool {
		if len(key) == len(audit.EntryRange.From)+8 {
			_, place := blockOf(keySequence(key))
			now[place] = row
		}
		return true
	})
	if err != nil || !slices.EqualFunc(now[:], b.rows[:], func(x, y []byte) bool { return (x == nil) == (y == nil) && bytes.Equal(x, y) }) {
		return false, err
	}
	if err := tx.Put(PackKey(b.number), b.pack); err != nil {
		return false, err
	}
	for i, row := range b.rows {
		if row == nil {
			continue
		}
		if err := tx.Delete(audit.EntryKey(sequenceOf(b.number, i))); err != nil {
			return false, err
		}
	}
	return true, nil
}

// Remove removes the oldest entries up to the sequence to, at most as many as most, and passes their
// keys and rows to removed, in order. It returns how many it has removed. A pack that has later
// entries too stays with those.
func Remove(tx store.Tx, to uint64, most int, removed func(key, row []byte) error) (n int, err error) {
	var oldest []Row
	err = Scan(tx, store.Range{From: audit.EntryRange.From, To: audit.EntryKey(to + 1)}, func(key, row []byte) bool {
		oldest = append(oldest, Row{Key: bytes.Clone(key), Row: bytes.Clone(row)})
		return len(oldest) < most
	})
	if err != nil || len(oldest) == 0 {
		return 0, err
	}
	for _, e := range oldest {
		if err := tx.Delete(e.Key); err != nil {
			return 0, err
		}
		if err := removed(e.Key, e.Row); err != nil {
			return 0, err
		}
	}
	return len(oldest), removePacked(tx, keySequence(oldest[len(oldest)-1].Key), to)
}

// removePacked removes the packed entries up to the sequence last. It removes a pack that cannot be
// decoded if all of its entries are to go, up to the sequence to.
func removePacked(tx store.Tx, last, to uint64) error {
	end, _ := blockOf(last)
	type change struct{ key, row []byte }
	var changes []change // a nil row deletes the pack
	err := tx.Scan(store.Range{From: PackRange.From, To: PackKey(end + 1)}, func(key, row []byte) bool {
		if !IsPackKey(key) {
			return true
		}
		block := binary.BigEndian.Uint64(key[len(PackRange.From):])
		c := change{key: bytes.Clone(key)}
		if p, err := decode(row); err != nil {
			if sequenceOf(block, BlockSize-1) > to {
				return true
			}
		} else {
			var left rows
			some := false
			for i := range left {
				if sequenceOf(block, i) > last {
					left[i] = p.row(i)
					some = some || left[i] != nil
				}
			}
			if some {
				if c.row, err = left.encode(); err != nil {
					return true // a damaged entry: the pack stays until all of it goes
				}
			}
		}
		changes = append(changes, c)
		return true
	})
	for _, c := range changes {
		switch {
		case err != nil:
		case c.row == nil:
			err = tx.Delete(c.key)
		default:
			err = tx.Put(c.key, c.row)
		}
	}
	return err
}
