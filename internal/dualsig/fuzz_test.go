package dualsig

import (
	"bytes"
	"os"
	"regexp"
	"testing"
)

// TestEveryFuzzTargetHasACorpus keeps the committed seeds, which a plain
// "go test" runs, from going missing or astray.
func TestEveryFuzzTargetHasACorpus(t *testing.T) {
	source, err := os.ReadFile("fuzz_test.go")
	if err != nil {
		t.Fatal(err)
	}
	targets := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^func (Fuzz\w+)\(`).FindAllSubmatch(source, -1) {
		targets[string(m[1])] = true
	}
	if len(targets) == 0 {
		t.Fatal("no fuzz target found")
	}
	for target := range targets {
		if seeds, err := os.ReadDir("testdata/fuzz/" + target); err != nil || len(seeds) == 0 {
			t.Errorf("%s has %d seeds (%v)", target, len(seeds), err)
		}
	}
	dirs, err := os.ReadDir("testdata/fuzz")
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range dirs {
		if !targets[d.Name()] {
			t.Errorf("testdata/fuzz/%s belongs to no target", d.Name())
		}
	}
}

func FuzzVerifyDual(f *testing.F) {
	g, k := loadGolden(f)
	f.Fuzz(func(t *testing.T, sig []byte) {
		v, err := KeyVersion(sig)
		if err == nil && len(sig) != DualSize {
			t.Fatalf("%d bytes have key version %d", len(sig), v)
		}
		if k.Verify(g.Context, []byte(g.Message), sig) && !bytes.Equal(sig, g.Dual) {
			t.Fatal("a forgery verifies")
		}
	})
}

func FuzzVerifySingle(f *testing.F) {
	g, k := loadGolden(f)
	f.Fuzz(func(t *testing.T, sig []byte) {
		if k.Public().Verify(g.Context, []byte(g.Message), sig) && !bytes.Equal(sig, g.Single) {
			t.Fatal("a forgery verifies")
		}
	})
}

func FuzzParsePublicKey(f *testing.F) {
	g, _ := loadGolden(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		k, err := ParsePublicKey(b)
		if err != nil {
			return
		}
		if !bytes.Equal(k.Bytes(), b) {
			t.Fatal("the key changed")
		}
		if k.Verify(g.Context, []byte(g.Message), g.Single) && !bytes.Equal(b, g.PublicKey) {
			t.Fatal("the golden signature verifies under another key")
		}
	})
}

func FuzzParsePEM(f *testing.F) {
	f.Fuzz(func(t *testing.T, b []byte) {
		if k, err := ParsePEM(b); err == nil && !bytes.Equal(k.MarshalPEM(), b) {
			t.Fatal("the file changed")
		}
	})
}
