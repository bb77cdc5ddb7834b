package audit

import (
	"testing"
)

func FuzzDecodeRow(f *testing.F) {
	f.Fuzz(func(t *testing.T, row, batch []byte) {
		if at, err := DecodeStoredEntry(row, batch); err == nil {
			e := at.SignedEntry()
			if line, err := e.JSON(); err != nil {
				t.Fatal(err)
			} else if _, err := ParseEntry(line); err != nil {
				t.Fatal("a stored entry does not parse as an exported one")
			}
			if b, ok := DecodeBase64(e.Signature); !ok {
				t.Fatal("the signature of a stored entry is not base64")
			} else if _, _, ok := DecodeSignature(b); !ok {
				t.Fatal("the signature of a stored entry does not parse as an exported one")
			}
		}
		_, _ = DecodeIndexRow(row)
		_, _ = DecodePosition(row)
	})
}
