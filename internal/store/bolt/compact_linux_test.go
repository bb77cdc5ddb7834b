package bolt

import (
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/disktest"
)

// Without room for both files nothing is written. With room the new file has a reserve of its own.
func TestACompactionNeedsRoomForBothFiles(t *testing.T) {
	dir := disktest.Mount(t, disktest.Ext4, 160<<20)
	path := filepath.Join(dir, "data", "db")
	must(t, os.Mkdir(filepath.Dir(path), 0o700))
	o := withReserve(4 << 20)
	o.pace = quick()
	s := open(t, path, o)
	must(t, s.Update(t.Context(), func(tx store.Tx) error {
		return errors.Join(tx.Put([]byte("kept"), marked("kept", 4<<20)), tx.Put([]byte("gone"), marked("gone", 20<<20)))
	}))
	remove(t, s, "gone")
	must(t, s.Scrubbed(t.Context()))
	want := contents(t, s)
	free := disktest.Fill(t, dir)
	_, _, err := s.Compact(t.Context())
	wantKind(t, err, fault.Unavailable)
	if !errors.Is(err, errLacksRoom) || !strings.Contains(err.Error(), "MB are needed and 0 MB are free. Make the volume larger") {
		t.Error(err)
	}
	alone(t, path)
	free()

	before, after, err := s.Compact(t.Context())
	must(t, err)
	if before < 28<<20 || after > 12<<20 {
		t.Errorf("from %d to %d bytes", before, after)
	}
	put(t, s, "later", nil)
	want["later"] = ""
	u, err := s.Usage(t.Context())
	must(t, err)
	info, err := os.Stat(path)
	must(t, err)
	if blocks := info.Sys().(*syscall.Stat_t).Blocks * 512; u.Reserve != 4<<20 || u.Reserved || blocks < 8<<20 {
		t.Errorf("%+v in %d bytes of blocks", u, blocks)
	}
	if !maps.Equal(contents(t, s), want) {
		t.Error("the rows are not the same")
	}
	must(t, s.Close())
	alone(t, path)
	sound(t, path)
}

// A compaction that meets a disk that others have filled leaves it as it was.
func TestACompactionEndsWhenTheDiskIsFull(t *testing.T) {
	dir := disktest.Mount(t, disktest.Tmpfs, 160<<20)
	path := filepath.Join(dir, "data", "db")
	must(t, os.Mkdir(filepath.Dir(path), 0o700))
	var a at
	s := open(t, path, Options{pace: quick(), fault: a.fault})
	for i := range 12 {
		put(t, s, strings.Repeat("k", i+1), marked("row", 1<<20))
	}
	must(t, s.Scrubbed(context.Background()))
	want := contents(t, s)
	filled := false
	a.set(func(step string, do func() error) error {
		if step == "copy" && !filled {
			filled = true
			disktest.Fill(t, dir)
		}
		return do()
	})
	_, _, err := s.Compact(t.Context())
	if !filled || fault.Of(err) != fault.Unavailable {
		t.Error(filled, err)
	}
	alone(t, path)
	if !maps.Equal(contents(t, s), want) {
		t.Error("the rows are not the same")
	}
}
