// Package frame is the only way to join bytes before they are hashed, signed, authenticated or used
// as input of a key derivation.
//
// A frame is a label followed by fields. The label and each field follow their length, so two
// different lists never give the same bytes. The label names the format and its version, and no two
// formats share one. A frame is only compared or passed to a primitive. Nothing parses it, and it
// is not a storage format.
package frame

import (
	"encoding/binary"
	"hash"
)

// Join returns len(label) ‖ label ‖ len(field) ‖ field ‖ …. Every length is four bytes, big-endian.
// A nil field equals an empty one. Label and fields must be shorter than 4 GiB; every caller's own
// limits are far below that.
func Join(label string, fields ...[]byte) []byte {
	n := 4 + len(label)
	for _, f := range fields {
		n += 4 + len(f)
	}
	b := make([]byte, 0, n)
	b = binary.BigEndian.AppendUint32(b, uint32(len(label)))
	b = append(b, label...)
	for _, f := range fields {
		b = binary.BigEndian.AppendUint32(b, uint32(len(f)))
		b = append(b, f...)
	}
	return b
}

// Write writes the bytes of [Join] to a hash, without a copy.
func Write(h hash.Hash, label string, fields ...[]byte) {
	var length [4]byte
	binary.BigEndian.PutUint32(length[:], uint32(len(label)))
	h.Write(length[:])
	h.Write([]byte(label))
	for _, f := range fields {
		binary.BigEndian.PutUint32(length[:], uint32(len(f)))
		h.Write(length[:])
		h.Write(f)
	}
}

// Uint64 returns v as eight bytes, big-endian. Every number in a frame has this form.
func Uint64(v uint64) []byte { return binary.BigEndian.AppendUint64(nil, v) }
