// Package token makes and reads the tokens that callers present: random ones, which stand for a row
// of the store, and access tokens, which are signed. Nothing is stored here.
package token

import (
	"crypto/rand"
	"encoding/base32"
	"strings"
)

var encoding = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)

// New returns the token of n random bytes, and these bytes.
func New(prefix string, n int) (token string, raw []byte) {
	raw = make([]byte, n)
	_, _ = rand.Read(raw) // never fails
	return Format(prefix, raw), raw
}

// Format returns the one spelling of a token: the prefix, and the bytes in base32.
func Format(prefix string, raw []byte) string { return prefix + encoding.EncodeToString(raw) }

// Parse returns the n bytes of a token in its one spelling, and nil for anything else.
func Parse(prefix, token string, n int) []byte {
	body, ok := strings.CutPrefix(token, prefix)
	if !ok || len(body) != encoding.EncodedLen(n) {
		return nil
	}
	raw, err := encoding.DecodeString(body)
	if err != nil || len(raw) != n || encoding.EncodeToString(raw) != body {
		return nil
	}
	return raw
}
