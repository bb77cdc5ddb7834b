package frame

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"testing"
	"testing/quick"
)

func TestJoinWritesLengthsBeforeEveryPart(t *testing.T) {
	got := Join("ab/v1", []byte("xyz"), nil, Uint64(258))
	want := []byte("\x00\x00\x00\x05ab/v1\x00\x00\x00\x03xyz\x00\x00\x00\x00\x00\x00\x00\x08\x00\x00\x00\x00\x00\x00\x01\x02")
	if !bytes.Equal(got, want) {
		t.Fatalf("Join = %q, want %q", got, want)
	}
}

func TestAHashIsWrittenWhatJoinReturns(t *testing.T) {
	same := func(label string, fields [][]byte) bool {
		h := sha256.New()
		Write(h, label, fields...)
		return [sha256.Size]byte(h.Sum(nil)) == sha256.Sum256(Join(label, fields...))
	}
	if err := quick.Check(same, nil); err != nil {
		t.Error(err)
	}
}

// Everything read back from the bytes was put there, so two different lists cannot give the same
// bytes.
func TestJoinCanBeReadBackOneWayOnly(t *testing.T) {
	split := func(b []byte) (parts [][]byte, ok bool) {
		for len(b) > 0 {
			if len(b) < 4 || uint64(len(b)-4) < uint64(binary.BigEndian.Uint32(b)) {
				return nil, false
			}
			n := binary.BigEndian.Uint32(b)
			parts, b = append(parts, b[4:4+n]), b[4+n:]
		}
		return parts, true
	}
	holds := func(label string, fields [][]byte) bool {
		parts, ok := split(Join(label, fields...))
		if !ok || len(parts) != 1+len(fields) || string(parts[0]) != label {
			return false
		}
		for i, f := range fields {
			if !bytes.Equal(parts[i+1], f) {
				return false
			}
		}
		return true
	}
	if err := quick.Check(holds, nil); err != nil {
		t.Fatal(err)
	}
}

func TestMovingABoundaryChangesTheFrame(t *testing.T) {
	frames := [][]byte{
		Join("a", []byte("bc")), Join("ab", []byte("c")), Join("abc"), Join("a", []byte("b"), []byte("c")),
		Join("a", []byte("bc"), nil), Join("a", nil, []byte("bc")), Join("", []byte("a"), []byte("bc")),
	}
	for i := range frames {
		for j := range i {
			if bytes.Equal(frames[i], frames[j]) {
				t.Errorf("frames %d and %d are the same", i, j)
			}
		}
	}
}
