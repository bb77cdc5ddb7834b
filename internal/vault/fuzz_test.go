package vault

import (
	"bytes"
	"testing"
)

func FuzzDecodeRecord(f *testing.F) {
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := decodeRecord(b)
		if err != nil {
			return
		}
		if !bytes.Equal(r.encode(), b) {
			t.Fatal("decode and encode differ")
		}
		_ = r.digest()
		_, _, _ = r.keyVersions()
	})
}

func FuzzDecodeValues(f *testing.F) {
	f.Fuzz(func(t *testing.T, b []byte) {
		values, err := decodeValues(b)
		if err == nil && !bytes.Equal(encodeValues(values), b) {
			t.Fatal("decode and encode differ")
		}
	})
}
