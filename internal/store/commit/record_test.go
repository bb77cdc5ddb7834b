package commit_test

import (
	"bytes"
	"encoding/hex"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/store/commit"
)

func golden() []commit.Record {
	head := commit.Head{Sequence: 7, State: 3}
	for i := range head.Hash {
		head.Hash[i], head.Commitment[i] = byte(i), byte(0x80+i)
	}
	at := time.Date(2026, 11, 25, 22, 31, 5, 123456000, time.UTC)
	return []commit.Record{
		{First: 1, Last: 1, At: 1, Time: at, Head: head, Rows: []commit.Row{
			{Key: []byte("audit/head"), Value: []byte("seven")}, {Key: []byte("empty"), Value: []byte{}}, {Key: []byte("gone")},
		}},
		{First: 2, Last: 40, At: 41, Time: at.Add(time.Second)},
	}
}

// The bytes of a record never change: logs in buckets have them.
func TestARecordHasOneEncoding(t *testing.T) {
	var b []byte
	for _, r := range golden() {
		b = r.Append(b)
	}
	path := filepath.Join("testdata", "records.hex")
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got := hex.EncodeToString(b); got != strings.TrimSpace(string(text)) {
		t.Errorf("the records of %s are encoded as\n%s", path, got)
	}
	for _, want := range golden() {
		var got commit.Record
		if got, b, err = commit.Parse(b); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("read %+v, want %+v: %v", got, want, err)
		}
	}
	if len(b) != 0 {
		t.Errorf("%d bytes are left", len(b))
	}
}

func TestARecordIsWholeWhenItsRowsAreOfItsLastCommit(t *testing.T) {
	for i, want := range []bool{true, false} {
		if got := golden()[i].Whole(); got != want {
			t.Errorf("record %d is whole: %v", i, got)
		}
	}
}

func TestARecordThatIsCutOrChangedIsRefused(t *testing.T) {
	whole := golden()[0].Append(nil)
	for n := range whole {
		if r, _, err := commit.Parse(whole[:n]); err == nil {
			t.Errorf("the first %d bytes are read as %+v", n, r)
		}
	}
	for name, at := range map[string]int{"version": 0, "first": 8, "time": 25, "row": 113} {
		changed := bytes.Clone(whole)
		changed[at] ^= 0xff
		if r, _, err := commit.Parse(changed); err == nil {
			t.Errorf("with another %s it is read as %+v", name, r)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, r := range golden() {
		f.Add(r.Append(nil))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		r, rest, err := commit.Parse(b)
		if err != nil {
			return
		}
		if again := r.Append(nil); !bytes.Equal(again, b[:len(b)-len(rest)]) {
			t.Errorf("%x is read, and written as %x", b, again)
		}
	})
}
