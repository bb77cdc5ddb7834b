package store

import (
	"bytes"
	"testing"
)

func TestPrefixCoversExactlyTheKeysThatBeginWithIt(t *testing.T) {
	keys := [][]byte{{}, {0}, {'a'}, []byte("a\x00"), []byte("a\xff\xff"), []byte("b"), {0xfe, 0xff}, {0xff}, {0xff, 0}, {0xff, 0xff}, {0xff, 0xff, 0xff}}
	for _, p := range keys {
		r := Prefix(p)
		for _, k := range keys {
			in := bytes.Compare(k, r.From) >= 0 && (r.To == nil || bytes.Compare(k, r.To) < 0)
			if in != bytes.HasPrefix(k, p) {
				t.Errorf("prefix %x, key %x: in range %v", p, k, in)
			}
		}
	}
}

func TestPrefixLeavesItsInputAlone(t *testing.T) {
	p := []byte("a\xff")
	Prefix(p)
	if string(p) != "a\xff" {
		t.Fatalf("input became %q", p)
	}
}
