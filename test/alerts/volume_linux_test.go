package alerts

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

// The data directory is on a volume of its own, which something else fills.
func diskFills(t *testing.T) []string {
	p := newPrometheus(t, time.Minute)
	p.volume = true
	const megabytes = 512
	volume := mount(t, megabytes)
	s := start(t, filepath.Join(volume, "data"), "")
	before := p.during(40*time.Minute, p.scraped(s, nil))
	filler := filepath.Join(volume, "filler")
	fill := func(left int64) {
		t.Helper()
		f, err := os.OpenFile(filler, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.Write(make([]byte, max(0, free(t, volume)-left))); err != nil {
			t.Fatal(err)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
	fill(megabytes << 20 / 10)
	filling := p.during(40*time.Minute, p.scraped(s, nil))
	fill(megabytes << 20 / 50)
	full := p.during(2*time.Minute, p.scraped(s, nil))
	fill(0)
	s.makeKey()
	await(t, s, "a change to be refused", func() bool { return s.seal() == http.StatusServiceUnavailable })
	refused := p.during(4*time.Minute, p.scraped(s, func() { s.seal() }))
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	awaitMetric(t, s, `latticekeep_serving{class="change"} 1`)
	after := p.during(5*time.Minute, p.scraped(s, nil))
	firing := p.firing("1")
	want(t, "before", firing(before))
	want(t, "with a tenth left", firing(filling), "LatticekeepDiskFilling")
	want(t, "with a fiftieth left", firing(full), "LatticekeepDiskFilling", "LatticekeepDiskFull")
	want(t, "after", firing(after))
	return want(t, "with nothing left", firing(refused), "LatticekeepDiskFilling", "LatticekeepDiskFull", "LatticekeepNotServing")
}

// mount returns a volume of its own in memory, until the end of the test. Only root may mount one.
func mount(t *testing.T, megabytes int) string {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("only root may mount a volume that fills")
	}
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%dm", megabytes)); err != nil {
		t.Skipf("mounting a volume that fills: %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, 0); err != nil {
			t.Errorf("unmounting %s: %v", dir, err)
		}
	})
	return dir
}

// free returns the bytes that may be written on the volume of a folder.
func free(t *testing.T, dir string) int64 {
	t.Helper()
	var s syscall.Statfs_t
	if err := syscall.Statfs(dir, &s); err != nil {
		t.Fatal(err)
	}
	return int64(s.Bavail) * s.Bsize
}
