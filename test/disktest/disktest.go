// Package disktest makes small file systems and fills them.
package disktest

import (
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
)

// Kind is a file system.
type Kind string

// The kinds that every Linux kernel can make.
const (
	Tmpfs Kind = "tmpfs"
	Ext4  Kind = "ext4"
)

// Mount returns an empty folder on a file system of its own with about size bytes. It skips the test
// where none can be mounted.
func Mount(t testing.TB, kind Kind, size int64) string {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("only root mounts a small file system")
	}
	dir := filepath.Join(t.TempDir(), "volume")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	run := func(name string, args ...string) {
		t.Helper()
		if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
			t.Skipf("a small file system cannot be made here: %s: %v: %s", name, err, out)
		}
	}
	if kind == Tmpfs {
		run("mount", "-t", "tmpfs", "-o", "mode=700,size="+strconv.FormatInt(size, 10), "tmpfs", dir)
	} else {
		image := filepath.Join(filepath.Dir(dir), "image")
		f, err := os.Create(image)
		if err == nil {
			err = errors.Join(f.Truncate(size), f.Close())
		}
		if err != nil {
			t.Fatal(err)
		}
		run("mkfs.ext4", "-q", "-m", "0", image)
		run("mount", "-t", "ext4", "-o", "loop", image, dir)
	}
	// Later cleanups of the test run before this one, so nothing has a file open any more.
	t.Cleanup(func() {
		if out, err := exec.Command("umount", dir).CombinedOutput(); err != nil {
			t.Errorf("unmounting: %v: %s", err, out)
		}
	})
	return dir
}

// Fill uses up the file system of dir, and returns a function that frees what it used.
func Fill(t testing.TB, dir string) (free func()) {
	t.Helper()
	path := filepath.Join(dir, "filling")
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for size := int64(1 << 20); size >= 1; size /= 4 {
		for err == nil {
			_, err = io.CopyN(f, zeroes{}, size)
			err = errors.Join(err, f.Sync()) // with delayed allocation, only a sync finds the disk full
		}
		if !errors.Is(err, syscall.ENOSPC) {
			t.Fatal(err)
		}
		err = nil
	}
	return func() {
		t.Helper()
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
}

type zeroes struct{}

func (zeroes) Read(p []byte) (int, error) { clear(p); return len(p), nil }
