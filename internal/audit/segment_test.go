package audit_test

import (
	"bytes"
	"encoding/hex"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/test/audittest"
)

func TestASegmentsRowHasOneForm(t *testing.T) {
	s := audit.Segment{From: 258, To: 515, Name: "audit/chain/x.jsonl.gz"}
	copy(s.Hash[:], bytes.Repeat([]byte{0xaa}, 32))
	copy(s.Digest[:], bytes.Repeat([]byte{0xbb}, 32))
	key := "61756469742f617263686976652f0000000000000102"
	row := "0000000000000203" + strings.Repeat("aa", 32) + strings.Repeat("bb", 32) + "61756469742f636861696e2f782e6a736f6e6c2e677a"
	if got := hex.EncodeToString(audit.ArchiveKey(s.From)); got != key {
		t.Errorf("key %s", got)
	}
	if got := hex.EncodeToString(s.Encode()); got != row {
		t.Errorf("row %s", got)
	}
	if got, err := audit.DecodeSegment(audit.ArchiveKey(258), s.Encode()); err != nil || got != s {
		t.Errorf("read back as %+v: %v", got, err)
	}
	for name, bad := range map[string]struct{ key, row []byte }{
		"a short key":     {audit.ArchiveKey(258)[:20], s.Encode()},
		"a long key":      {append(audit.ArchiveKey(258), 0), s.Encode()},
		"from 0":          {audit.ArchiveKey(0), s.Encode()},
		"to before from":  {audit.ArchiveKey(516), s.Encode()},
		"no name":         {audit.ArchiveKey(258), s.Encode()[:audit.SegmentHeader]},
		"a short row":     {audit.ArchiveKey(258), s.Encode()[:audit.SegmentHeader-1]},
		"an empty row":    {audit.ArchiveKey(258), nil},
		"beyond integers": {audit.ArchiveKey(258), append([]byte{0xff}, s.Encode()[1:]...)},
	} {
		if got, err := audit.DecodeSegment(bad.key, bad.row); err == nil {
			t.Errorf("%s is read as %+v", name, got)
		}
	}
}

func FuzzDecodeSegment(f *testing.F) {
	f.Add(audit.ArchiveKey(1), audit.Segment{From: 1, To: 2, Name: "a"}.Encode())
	f.Add([]byte("audit/archive/"), []byte{})
	f.Fuzz(func(t *testing.T, key, row []byte) {
		if s, err := audit.DecodeSegment(key, row); err == nil && (!bytes.Equal(audit.ArchiveKey(s.From)[len(audit.ArchiveRange.From):], key[len(audit.ArchiveRange.From):]) || !bytes.Equal(s.Encode(), row)) {
			t.Errorf("%x %x is read as %+v", key, row, s)
		}
	})
}

// Anyone with write access to the archive chooses what its objects decompress to.
func TestASegmentIsReadWithinBounds(t *testing.T) {
	long := bytes.Repeat([]byte("0"), audit.MaxLine)
	for name, lines := range map[string]string{"at once": string(long) + "\n", "without an end": string(long) + "0"} {
		if _, err := audit.NewLineDigest().Write([]byte(lines)); !errors.Is(err, audit.ErrLongLine) {
			t.Errorf("a long line, %s: %v", name, err)
		}
	}
	bomb := audit.NewLineDigest()
	if n, err := io.Copy(bomb, io.LimitReader(endless{}, 1<<30)); !errors.Is(err, audit.ErrLongLine) || bomb.Buffered() > audit.MaxLine {
		t.Errorf("of a line of 1 GiB %d bytes were taken, %d are kept: %v", n, bomb.Buffered(), err)
	}
	if n, err := audit.NewLineDigest().Write(append(long[1:], '\n')); n != audit.MaxLine || err != nil {
		t.Errorf("the longest line: %d, %v", n, err)
	}
	data := audittest.Zipped(bytes.Repeat([]byte("line\n"), 1000))
	for most, fits := range map[int64]bool{5000: true, 5001: true, 4999: false, 5: false} {
		var n int64
		err := audit.UnzipAtMost(data, most, func(lines io.Reader) (err error) { n, err = io.Copy(audit.NewLineDigest(), lines); return err })
		if n > most || fits != (err == nil) {
			t.Errorf("with a bound of %d, %d bytes were read: %v", most, n, err)
		}
	}
}

// endless is a line without an end.
type endless struct{}

func (endless) Read(b []byte) (int, error) {
	for i := range b {
		b[i] = '0'
	}
	return len(b), nil
}

// The digest covers all lines but the last, however they are split into writes.
func TestADigestLeavesOutTheClosingLine(t *testing.T) {
	want := audit.NewLineDigest()
	_, _ = want.Write([]byte("one\ntwo\nthree\n"))
	for size := 1; size < 14; size++ {
		d := audit.NewLineDigest()
		for rest := []byte("one\ntwo\nother\n"); len(rest) > 0; {
			n := min(size, len(rest))
			_, _ = d.Write(rest[:n])
			rest = rest[n:]
		}
		if d.Sum() != want.Sum() {
			t.Errorf("in pieces of %d it is %x", size, d.Sum())
		}
	}
	// Computed by: printf 'one\ntwo\n' | sha256sum
	if got := hex.EncodeToString(func() []byte { s := want.Sum(); return s[:] }()); got != "c3f9c8c283a2b1f2f1896f27a01cbe3cddc0c9d93f752e4639035a0f5b36f6e8" {
		t.Errorf("it is %s", got)
	}
}
