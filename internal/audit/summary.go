package audit

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"maps"
	"math/bits"
	"slices"

	"github.com/latticekeep/latticekeep/internal/frame"
	"github.com/latticekeep/latticekeep/internal/store"
)

// A summary says of a block of a tenant's entries which of them have an event
// type or an actor, so that a query with a filter reads the index rows of the
// entries that match and of no others. There is one for each block of 256
// consecutive tenant sequences, the first of which begins at 1, once it is full
// and followed; a block without one is read row by row. What a summary names is
// held against the index row. What it fails to name is not found: a forged one
// can hide entries from a query, as a forged index can, and the verification of
// the store, which computes both anew, is what tells.
//
// As bytes: version 1, then for each distinct key, ascending, the key as u32, the
// number of entries less one as one byte, and their places in the block as a
// byte each, ascending.
const (
	blockSize      = 256
	summaryVersion = 1
)

func blockOf(tenantSequence uint64) uint64 { return (tenantSequence - 1) / blockSize }

// endOf returns the last tenant sequence of a block.
func endOf(block uint64) uint64 { return (block + 1) * blockSize }

func summaryKey(tenant string, block uint64) []byte {
	return binary.BigEndian.AppendUint64([]byte("audit/summary/"+tenant+"/"), block)
}

var summaryRange = store.Prefix([]byte("audit/summary/"))

// Keys of a summary. Two that come out the same make a query look at rows that
// do not match, and no more.
func typeKey(t EventType) uint32 { return summaryKeyOf("type", string(t)) }

func actorKey(actor string) uint32 { return summaryKeyOf("actor", actor) }

func summaryKeyOf(kind, value string) uint32 {
	sum := sha256.Sum256(frame.Join("latticekeep/audit-summary/v1", []byte(kind), []byte(value)))
	return binary.BigEndian.Uint32(sum[:])
}

// summaryOf returns the summary of a block, given its index rows in their order.
// If they are fewer than 256, the first ones of the block are gone: they were
// archived before the block was full.
func summaryOf(rows []indexRow) []byte {
	places := make(map[uint32][]byte)
	for i, row := range rows {
		place := byte(blockSize - len(rows) + i)
		for _, key := range []uint32{typeKey(row.eventType), actorKey(row.actor)} {
			if of := places[key]; len(of) == 0 || of[len(of)-1] != place {
				places[key] = append(of, place)
			}
		}
	}
	out := []byte{summaryVersion}
	for _, key := range slices.Sorted(maps.Keys(places)) {
		out = binary.BigEndian.AppendUint32(out, key)
		out = append(out, byte(len(places[key])-1))
		out = append(out, places[key]...)
	}
	return out
}

// summaryAgrees reports whether a stored summary is that of a block of which the
// last rows are given, in their order: of entries that were there when it was
// made, and whose rows are gone since, it may say anything.
func summaryAgrees(stored []byte, rows []indexRow) bool {
	if len(rows) == blockSize {
		return bytes.Equal(stored, summaryOf(rows))
	}
	left := allPlaces.from(blockSize - len(rows))
	want := make(map[uint32]placeSet)
	ok := eachKey(summaryOf(rows), func(key uint32, at placeSet) { want[key] = at })
	return eachKey(stored, func(key uint32, at placeSet) {
		if at.and(left) != want[key] {
			ok = false
		}
		delete(want, key)
	}) && ok && len(want) == 0
}

// placeSet is a set of places in a block.
type placeSet [blockSize / 64]uint64

var allPlaces = placeSet{^uint64(0), ^uint64(0), ^uint64(0), ^uint64(0)}

func (s *placeSet) add(place byte) { s[place/64] |= 1 << (place % 64) }

func (s placeSet) and(t placeSet) placeSet {
	for i := range s {
		s[i] &= t[i]
	}
	return s
}

func (s placeSet) or(t placeSet) placeSet {
	for i := range s {
		s[i] |= t[i]
	}
	return s
}

// from returns what is at a place or after it.
func (s placeSet) from(place int) placeSet {
	for i := range s {
		s[i] = s[i] >> max(0, place-64*i) << max(0, place-64*i)
	}
	return s
}

// to returns what is at a place or before it.
func (s placeSet) to(place int) placeSet {
	for i := range s {
		s[i] = s[i] << max(0, 64*i+63-place) >> max(0, 64*i+63-place)
	}
	return s
}

// places returns all of them, ascending.
func (s placeSet) places() (all []int) {
	for i, of := range s {
		for ; of != 0; of &= of - 1 {
			all = append(all, 64*i+bits.TrailingZeros64(of))
		}
	}
	return all
}

// last returns the largest place and takes it out; false of the empty set.
func (s *placeSet) last() (int, bool) {
	for i := len(s) - 1; i >= 0; i-- {
		if n := bits.Len64(s[i]); n > 0 {
			s[i] &^= 1 << (n - 1)
			return 64*i + n - 1, true
		}
	}
	return 0, false
}

// eachKey visits the keys of a summary and reports whether it is one, in its only
// spelling. It may visit some keys of one that is not.
func eachKey(summary []byte, visit func(key uint32, at placeSet)) bool {
	if len(summary) == 0 || summary[0] != summaryVersion {
		return false
	}
	for rest, before := summary[1:], int64(-1); len(rest) > 0; {
		if len(rest) < 6 || len(rest) < 6+int(rest[4]) {
			return false
		}
		key, places := binary.BigEndian.Uint32(rest), rest[5:6+int(rest[4])]
		if int64(key) <= before {
			return false
		}
		var at placeSet
		for i, place := range places {
			if i > 0 && place <= places[i-1] {
				return false
			}
			at.add(place)
		}
		visit(key, at)
		rest, before = rest[5+len(places):], int64(key)
	}
	return true
}

// placesOf returns where in a block all of the keys are, as its summary says; false
// when it is none.
func placesOf(summary []byte, keys []uint32) (at placeSet, ok bool) {
	at = allPlaces
	for _, key := range keys {
		of, ok := lookUp(summary, key)
		if !ok {
			return placeSet{}, false
		}
		at = at.and(of)
	}
	return at, len(summary) > 0 && summary[0] == summaryVersion
}

// placesOfAny returns where in a block any of the keys is, likewise.
func placesOfAny(summary []byte, keys []uint32) (at placeSet, ok bool) {
	for _, key := range keys {
		of, ok := lookUp(summary, key)
		if !ok {
			return placeSet{}, false
		}
		at = at.or(of)
	}
	return at, len(summary) > 0 && summary[0] == summaryVersion
}

// lookUp returns where in a block a key is. Of a summary that is none it may see
// no more than what comes before the key.
func lookUp(summary []byte, key uint32) (at placeSet, ok bool) {
	if len(summary) == 0 || summary[0] != summaryVersion {
		return placeSet{}, false
	}
	for rest := summary[1:]; len(rest) > 0; {
		if len(rest) < 6 || len(rest) < 6+int(rest[4]) {
			return placeSet{}, false
		}
		n := 6 + int(rest[4])
		if binary.BigEndian.Uint32(rest) == key {
			for _, place := range rest[5:n] {
				at.add(place)
			}
			break
		}
		rest = rest[n:]
	}
	return at, true
}
