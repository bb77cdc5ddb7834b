package state

import (
	"bytes"
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/sha512"
	"fmt"
	"hash"
	"sync"

	"github.com/latticekeep/latticekeep/internal/frame"
)

// Sizes of the parts of a record in bytes. A group of 72 bits and a row of 64 bits collide by
// accident with a probability below 10⁻⁷ among ten million rows. A tag of 112 bits is guessed with
// 2⁻¹¹² for each row that is put into the store.
const (
	groupSize  = 10 // number of the family (1) ‖ keyed hash of the group's prefix (9)
	idSize     = 18 // group ‖ keyed hash of the key (8)
	tagSize    = 14 // keyed hash of key and value
	recordSize = idSize + tagSize
)

// id names a row without telling its key. The rows of a group are neighbours.
type id [idSize]byte

func (i id) group() []byte { return i[:groupSize] }

func (i id) compare(o id) int { return bytes.Compare(i[:], o[:]) }

// tag stands for the value of a row. The zero tag means that the row is absent.
type tag [tagSize]byte

var absent tag

// record is what the state knows of a row.
type record struct {
	id  id
	tag tag
}

func (r record) append(b []byte) []byte { return append(append(b, r.id[:]...), r.tag[:]...) }

func recordAt(b []byte) (r record) {
	copy(r.id[:], b)
	copy(r.tag[:], b[idSize:])
	return r
}

// hasher computes ids, tags and the MAC of the head, with keys that are derived from the one that
// hashes API keys.
type hasher struct{ ids, tags, heads *sync.Pool }

// newHasher derives the keys. The root key is the deployment's hash key.
func newHasher(root []byte) (*hasher, error) {
	var keys [3][]byte
	for i, label := range []string{"latticekeep/state-ids/v1", "latticekeep/state-tags/v1", "latticekeep/state-heads/v1"} {
		key, err := hkdf.Key(sha512.New, root, nil, string(frame.Join(label)), 32)
		if err != nil {
			return nil, fmt.Errorf("deriving the key of %s: %w", label, err)
		}
		keys[i] = key
	}
	pool := func(key []byte) *sync.Pool {
		return &sync.Pool{New: func() any { return hmac.New(sha256.New, key) }}
	}
	return &hasher{ids: pool(keys[0]), tags: pool(keys[1]), heads: pool(keys[2])}, nil
}

// sum returns the MAC over a frame.
func sum(pool *sync.Pool, label string, fields ...[]byte) (out [sha256.Size]byte) {
	h := pool.Get().(hash.Hash)
	h.Reset()
	frame.Write(h, label, fields...)
	h.Sum(out[:0])
	pool.Put(h)
	return out
}

// group returns the first part of the ids of a group: that of the rows whose keys begin with a
// prefix.
func (h *hasher) group(family byte, prefix []byte) (g [groupSize]byte) {
	s := sum(h.ids, "latticekeep/state-group/v1", prefix)
	g[0] = family
	copy(g[1:], s[:])
	return g
}

// id returns the id of a row.
func (h *hasher) id(f Family, key []byte) (i id) {
	prefix := f.GroupOf(key)
	if prefix == nil {
		prefix = key
	}
	g := h.group(f.Number, prefix)
	copy(i[:], g[:])
	s := sum(h.ids, "latticekeep/state-row/v1", key)
	copy(i[groupSize:], s[:])
	return i
}

// tag returns the tag of a value. A nil value means that the row is absent.
func (h *hasher) tag(key, value []byte) (t tag) {
	if value == nil {
		return absent
	}
	s := sum(h.tags, "latticekeep/state-value/v1", key, value)
	copy(t[:], s[:])
	return t
}

// record returns the record of a row.
func (h *hasher) record(f Family, key, value []byte) record {
	return record{h.id(f, key), h.tag(key, value)}
}
