package dualsig

import (
	"bytes"
	"testing"
)

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
