// Package frame is the one way bytes are joined before they are hashed, signed,
// authenticated or used as key-derivation input.
//
// A frame is a label followed by fields, each preceded by its length, so that two
// different lists never give the same bytes. The label names the format and its
// version; no two formats share one. A frame is only ever compared or fed to a
// primitive: nothing parses it, and it is not a storage format.
package frame

import (
	"encoding/binary"
	"hash"
)

// Join returns len(label) ‖ label ‖ len(field) ‖ field ‖ …, every length as four
// bytes, big endian. A nil field is the same as an empty one. Label and fields
// are shorter than 4 GiB, which every caller's own limit keeps far away.
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

// Write is [Join] into a hash, without the copy.
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

// Uint64 returns v as eight bytes, big endian: the form of every number in a frame.
func Uint64(v uint64) []byte { return binary.BigEndian.AppendUint64(nil, v) }
