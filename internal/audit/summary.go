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

// A summary says which entries in a block of a tenant's entries have an event type or an actor. So
// a query with a filter reads the index rows of the matching entries only. A block is 256
// consecutive tenant sequences; the first block begins at 1. A block gets its summary once it is
// full and followed. A block without a summary is read row by row. A query compares the entries
// that a summary names with their index rows. It does not find entries that a summary fails to
// name: a forged summary can hide entries from a query, as a forged index can. The verification of
// the store computes both again and reveals that.
//
// Encoded: version 1, then for each distinct key, ascending: the key as u32, the number of entries
// less one as one byte, and their places in the block as one byte each, ascending.
const (
	BlockSize      = 256
	summaryVersion = 1
)

// BlockOf returns the block of a tenant sequence. Both count from the tenant's first entry, which
// has sequence 1 and block 0.
func BlockOf(tenantSequence uint64) uint64 { return (tenantSequence - 1) / BlockSize }

// EndOf returns the last tenant sequence of a block.
func EndOf(block uint64) uint64 { return (block + 1) * BlockSize }

// SummaryKey returns the key of the summary of a tenant's block.
func SummaryKey(tenant string, block uint64) []byte {
	return binary.BigEndian.AppendUint64([]byte("audit/summary/"+tenant+"/"), block)
}

// SummaryRange holds all summaries.
var SummaryRange = store.Prefix([]byte("audit/summary/"))

// TypeKey returns the summary key of an event type. If the keys of two values collide, a query only
// reads some rows that do not match.
func TypeKey(t EventType) uint32 { return summaryKeyOf("type", string(t)) }

// ActorKey returns the summary key of an actor's id, as [TypeKey] does for types.
func ActorKey(actor string) uint32 { return summaryKeyOf("actor", actor) }

func summaryKeyOf(kind, value string) uint32 {
	sum := sha256.Sum256(frame.Join("latticekeep/audit-summary/v1", []byte(kind), []byte(value)))
	return binary.BigEndian.Uint32(sum[:])
}

// SummaryOf returns the summary of a block from its index rows, in their order. If there are fewer
// than 256, the first rows of the block are missing because they were archived before the block was
// full.
func SummaryOf(rows []IndexRow) []byte {
	places := make(map[uint32][]byte)
	for i, row := range rows {
		place := byte(BlockSize - len(rows) + i)
		for _, key := range []uint32{TypeKey(row.EventType), ActorKey(row.Actor)} {
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

// SummaryAgrees reports whether a stored summary agrees with the last rows of its block, given in
// their order. About entries whose rows were removed since the summary was made, the summary may
// say anything.
func SummaryAgrees(stored []byte, rows []IndexRow) bool {
	if len(rows) == BlockSize {
		return bytes.Equal(stored, SummaryOf(rows))
	}
	left := allPlaces.From(BlockSize - len(rows))
	want := make(map[uint32]PlaceSet)
	ok := eachKey(SummaryOf(rows), func(key uint32, at PlaceSet) { want[key] = at })
	return eachKey(stored, func(key uint32, at PlaceSet) {
		if at.and(left) != want[key] {
			ok = false
		}
		delete(want, key)
	}) && ok && len(want) == 0
}

// PlaceSet is a set of places in a block.
type PlaceSet [BlockSize / 64]uint64

var allPlaces = PlaceSet{^uint64(0), ^uint64(0), ^uint64(0), ^uint64(0)}

func (s *PlaceSet) add(place byte) { s[place/64] |= 1 << (place % 64) }

func (s PlaceSet) and(t PlaceSet) PlaceSet {
	for i := range s {
		s[i] &= t[i]
	}
	return s
}

func (s PlaceSet) or(t PlaceSet) PlaceSet {
	for i := range s {
		s[i] |= t[i]
	}
	return s
}

// From returns the places at or after a place.
func (s PlaceSet) From(place int) PlaceSet {
	for i := range s {
		s[i] = s[i] >> max(0, place-64*i) << max(0, place-64*i)
	}
	return s
}

// To returns the places at or before a place.
func (s PlaceSet) To(place int) PlaceSet {
	for i := range s {
		s[i] = s[i] << max(0, 64*i+63-place) >> max(0, 64*i+63-place)
	}
	return s
}

// Places returns all places, ascending.
func (s PlaceSet) Places() (all []int) {
	for i, of := range s {
		for ; of != 0; of &= of - 1 {
			all = append(all, 64*i+bits.TrailingZeros64(of))
		}
	}
	return all
}

// Last removes and returns the largest place. It returns false for the empty set.
func (s *PlaceSet) Last() (int, bool) {
	for i := len(s) - 1; i >= 0; i-- {
		if n := bits.Len64(s[i]); n > 0 {
			s[i] &^= 1 << (n - 1)
			return 64*i + n - 1, true
		}
	}
	return 0, false
}

// eachKey visits the keys of a summary. It reports whether the summary is well-formed and in its
// only spelling. It may visit some keys of a malformed summary.
func eachKey(summary []byte, visit func(key uint32, at PlaceSet)) bool {
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
		var at PlaceSet
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

// VisitPlaces calls visit with each key of a summary and its places, in one pass. It reports whether the
// summary is well-formed; the visits of a malformed one do not count.
func VisitPlaces(summary []byte, visit func(key uint32, at PlaceSet)) bool {
	return eachKey(summary, visit)
}

// Len returns the number of places.
func (s PlaceSet) Len() (n int) {
	for _, of := range s {
		n += bits.OnesCount64(of)
	}
	return n
}

// PlacesOf returns the places in a block that have all of the keys and one of oneOf, by its summary; none is no
// condition. It returns false if the summary is malformed.
func PlacesOf(summary []byte, keys, oneOf []uint32) (at PlaceSet, ok bool) {
	at = allPlaces
	if len(oneOf) > 0 {
		if at, ok = PlacesOfAny(summary, oneOf); !ok {
			return PlaceSet{}, false
		}
	}
	for _, key := range keys {
		of, ok := lookUp(summary, key)
		if !ok {
			return PlaceSet{}, false
		}
		at = at.and(of)
	}
	return at, len(summary) > 0 && summary[0] == summaryVersion
}

// PlacesOfAny returns the places in a block that have any of the keys, by its summary. It returns
// false if the summary is malformed.
func PlacesOfAny(summary []byte, keys []uint32) (at PlaceSet, ok bool) {
	for _, key := range keys {
		of, ok := lookUp(summary, key)
		if !ok {
			return PlaceSet{}, false
		}
		at = at.or(of)
	}
	return at, len(summary) > 0 && summary[0] == summaryVersion
}

// lookUp returns the places in a block that have a key. In a malformed summary, it may notice
// errors only before that key.
func lookUp(summary []byte, key uint32) (at PlaceSet, ok bool) {
	if len(summary) == 0 || summary[0] != summaryVersion {
		return PlaceSet{}, false
	}
	for rest := summary[1:]; len(rest) > 0; {
		if len(rest) < 6 || len(rest) < 6+int(rest[4]) {
			return PlaceSet{}, false
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
