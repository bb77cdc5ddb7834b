package commits

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/commit"
)

// placeKey is the key of the row that names the log of a store.
var placeKey = []byte("backup/commits")

// Place is where in a log the commits go on that a backup does not have.
type Place struct {
	Log     [16]byte
	Segment uint64   // what follows comes after this segment
	Digest  [32]byte // digest of the segment's statement; zeroes when Segment is 0
}

// row is the content of the row.
type row struct {
	Log     string `json:"log"`
	Segment uint64 `json:"segment,omitempty"`
	Digest  string `json:"digest,omitempty"`
}

func (p Place) encode() ([]byte, error) {
	r := row{Log: hex.EncodeToString(p.Log[:]), Segment: p.Segment}
	if p.Segment > 0 {
		r.Digest = hex.EncodeToString(p.Digest[:])
	}
	return json.Marshal(r)
}

// ReadPlace reads the place from a store. There is none in a store whose commits were never shipped,
// or when the row is damaged.
func ReadPlace(r store.Reader) (p Place, there bool, err error) {
	b, err := r.Get(placeKey)
	if err != nil || b == nil {
		return p, false, err
	}
	var content row
	if json.Unmarshal(b, &content) != nil {
		return p, false, nil
	}
	log, err1 := hex.DecodeString(content.Log)
	digest, err2 := hex.DecodeString(content.Digest)
	p.Segment = content.Segment
	if err1 != nil || err2 != nil || copy(p.Log[:], log) != len(p.Log) || len(log) != len(p.Log) ||
		p.Segment > 0 && (copy(p.Digest[:], digest) != len(p.Digest) || len(digest) != len(p.Digest)) {
		return Place{}, false, nil
	}
	return p, true, nil
}

// headOf returns the head after rows have changed. get returns the new value of a row, or nil when it
// has not changed.
func headOf(before commit.Head, get func(key []byte) []byte) commit.Head {
	if b := get(audit.HeadKey); b != nil {
		if p, err := audit.DecodePosition(b); err == nil {
			before.Sequence, before.Hash = p.Sequence, p.Hash
		}
	}
	if number, commitment, ok := state.HeadOf(get(state.HeadKey)); ok {
		before.State, before.Commitment = number, commitment
	}
	return before
}

// headAfter returns the head after a record.
func headAfter(before commit.Head, rows []commit.Row) commit.Head {
	return headOf(before, func(key []byte) []byte {
		for _, r := range rows {
			if bytes.Equal(r.Key, key) {
				return r.Value
			}
		}
		return nil
	})
}

// ReadHead returns the head of a store.
func ReadHead(r store.Reader) (h commit.Head, err error) {
	h = headOf(h, func(key []byte) []byte {
		b, failed := r.Get(key)
		if failed != nil {
			err = failed
		}
		return b
	})
	return h, err
}

// position is what the store keeps for the shipper beside its list: the end of what was shipped.
type position struct {
	Segment uint64
	Digest  [32]byte
	At      uint64
	Head    commit.Head
}

func (p position) encode() []byte {
	b := append(binary.BigEndian.AppendUint64(nil, p.Segment), p.Digest[:]...)
	return p.Head.Append(binary.BigEndian.AppendUint64(b, p.At))
}

func decodePosition(b []byte) (p position, ok bool) {
	if len(b) != 8+32+8+commit.HeadSize {
		return p, false
	}
	p.Segment = binary.BigEndian.Uint64(b)
	copy(p.Digest[:], b[8:])
	p.At = binary.BigEndian.Uint64(b[40:])
	p.Head = commit.ParseHead(b[48:])
	return p, true
}
