package progress

import (
	"io"
	"strings"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"
)

// slow takes a second for each byte.
type slow struct{ io.Reader }

func (s slow) Read(b []byte) (int, error) {
	time.Sleep(time.Second)
	return s.Reader.Read(b)
}

// A line a second says how far a command is, and the last one that it is at the end.
func TestReaderShowsHowFarItIs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for total, want := range map[int64]string{
			4: "0.0 of 0.0 MB read (25%)\n0.0 of 0.0 MB read (50%)\n0.0 of 0.0 MB read (75%)\n0.0 of 0.0 MB read (100%)\n0.0 of 0.0 MB read (100%)\n",
			0: strings.Repeat("0.0 MB read\n", 5),
		} {
			var b strings.Builder
			text, err := io.ReadAll(New(&b, true).Reader(slow{iotest.OneByteReader(strings.NewReader("abcd"))}, "read", total))
			if string(text) != "abcd" || err != nil || b.String() != want {
				t.Errorf("%q, %v, %q, want %q", text, err, b.String(), want)
			}
		}
		var b strings.Builder
		p := New(&b, true)
		if _, err := io.ReadAll(p.Reader(strings.NewReader(strings.Repeat("x", 2_500_000)), "written", 5_000_000)); err != nil || b.String() != "2.5 of 5.0 MB written (50%)\n" {
			t.Errorf("%v, %q", err, b.String())
		}
	})
}

// Without a terminal nothing is shown, and the reader is the caller's.
func TestNobodyIsShownProgressUnasked(t *testing.T) {
	var b strings.Builder
	p := New(&b, false)
	r := strings.NewReader("abcd")
	if p.Reader(r, "read", 4) != io.Reader(r) {
		t.Error("there is a reader of progress")
	}
	p.AddOf("entries")
	p.EndOf("entries")
	if b.Len() > 0 {
		t.Errorf("shown: %q", b.String())
	}
}
