package keyring

import (
	"crypto/hmac"
	"crypto/sha512"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/frame"
)

// rowMACSize is that of HMAC-SHA-512, cut to 256 bits.
const rowMACSize = 32

var errForeignRow = fault.New(fault.Internal, "a stored row was not written by this deployment: run latticekeep audit verify and restore a backup")

// SealRow returns content with a MAC in front that binds it to its key in the
// store: whoever can write the database but has no key cannot give a row other
// content, or move it to another key. It does not hide the content, and does
// not tell an earlier row of the same key from the current one.
func (r *Ring) SealRow(key, content []byte) []byte {
	return append(r.rowMAC(key, content), content...)
}

// OpenRow returns the content of a row that [Ring.SealRow] made for this key,
// sharing its memory, and nil for nil. Error: fault.Internal for any other row.
func (r *Ring) OpenRow(key, row []byte) ([]byte, error) {
	if row == nil {
		return nil, nil
	}
	if len(row) < rowMACSize || !hmac.Equal(row[:rowMACSize], r.rowMAC(key, row[rowMACSize:])) {
		return nil, errForeignRow
	}
	return row[rowMACSize:], nil
}

// rowMAC has a label of its own under the key that also hashes API keys.
func (r *Ring) rowMAC(key, content []byte) []byte {
	h := hmac.New(sha512.New, r.apiKeyHash)
	h.Write(frame.Join("latticekeep/row/v1", key, content))
	return h.Sum(nil)[:rowMACSize:rowMACSize]
}
