package envelope

import (
	"bytes"
	"testing"
)

func FuzzParseCredential(f *testing.F) {
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := ParseCredential(b)
		if err != nil {
			return
		}
		again, err := c.MarshalBinary()
		if err != nil || !bytes.Equal(again, b) {
			t.Fatalf("parse and marshal changed %d bytes to %d (%v)", len(b), len(again), err)
		}
	})
}

// Only the golden parts open.
func FuzzOpenCredential(f *testing.F) {
	g := loadGolden(f).Credential
	f.Fuzz(func(t *testing.T, body, wrap []byte) {
		_, _ = WrapKeyVersion(wrap)
		c, err := ParseCredential(body)
		if err != nil {
			return
		}
		plaintext, err := OpenCredential(g.WrappingKey, g.Context, c, wrap)
		if err != nil {
			if err != ErrOpen || plaintext != nil {
				t.Fatalf("%d bytes with %v", len(plaintext), err)
			}
			return
		}
		if !bytes.Equal(body, g.Body) || !bytes.Equal(wrap, g.Wrap) {
			t.Fatal("a forgery opened")
		}
	})
}

func FuzzOpenKey(f *testing.F) {
	g := loadGolden(f).Key
	f.Fuzz(func(t *testing.T, blob []byte) {
		key, err := OpenKey(g.WrappingKey, g.Context, blob)
		if err != nil {
			if err != ErrOpen || key != nil {
				t.Fatalf("%d bytes with %v", len(key), err)
			}
			return
		}
		if !bytes.Equal(blob, g.Blob) {
			t.Fatal("a forgery opened")
		}
	})
}

func fuzzSuite(hybrid bool) Suite {
	if hybrid {
		return SuiteMLKEM768X25519
	}
	return SuiteMLKEM768
}

// Anyone can make a value that opens (HPKE base mode), but not by changing an existing one.
func FuzzOpenValue(f *testing.F) {
	values := loadGolden(f).Values
	keys := map[Suite]*SealingKey{}
	for _, v := range values {
		k, err := ParseSealingKey(v.Header.Suite, v.Seed)
		if err != nil {
			f.Fatal(err)
		}
		keys[v.Header.Suite] = k
	}
	f.Fuzz(func(t *testing.T, hybrid bool, data []byte) {
		for _, v := range values {
			if v.Header.Suite != fuzzSuite(hybrid) {
				continue
			}
			plaintext, err := keys[v.Header.Suite].OpenValue(v.Header, v.Key, v.SealedAt, data)
			switch {
			case err == nil && !bytes.Equal(data, v.Data):
				t.Fatal("a changed value opened")
			case err != nil && (err != ErrOpen || plaintext != nil):
				t.Fatalf("%d bytes with %v", len(plaintext), err)
			}
		}
	})
}

func FuzzParseSealingKeys(f *testing.F) {
	f.Fuzz(func(t *testing.T, hybrid bool, b []byte) {
		if public, err := ParseSealingPublicKey(fuzzSuite(hybrid), b); err == nil && !bytes.Equal(public.Bytes(), b) {
			t.Fatal("the public key changed")
		}
		if private, err := ParseSealingKey(fuzzSuite(hybrid), b); err == nil {
			if again, err := private.Bytes(); err != nil || !bytes.Equal(again, b) {
				t.Fatalf("the seed changed (%v)", err)
			}
		}
	})
}
