package vault

import (
	"bytes"
	"os"
	"path/filepath"
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

func TestEveryFuzzTargetHasSeeds(t *testing.T) {
	for _, target := range []string{"FuzzDecodeRecord", "FuzzDecodeValues"} {
		seeds, err := filepath.Glob(filepath.Join("testdata", "fuzz", target, "*"))
		if err != nil || len(seeds) == 0 {
			t.Errorf("%s has no seeds: %v", target, err)
		}
		for _, seed := range seeds {
			if info, err := os.Stat(seed); err != nil || info.Size() == 0 {
				t.Errorf("%s is empty", seed)
			}
		}
	}
}
