package machine

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// MemoryGroup is a control group of Linux whose processes share a limit of memory. The kernel kills
// one of them when they need more.
type MemoryGroup struct {
	dir  string
	peak int64 // greatest anonymous memory that was seen
	end  func()
}

// NewMemoryGroup makes a group below that of the test, until the test ends. Error: why this machine
// has none to give, as without the rights of root.
func NewMemoryGroup(t testing.TB, limit int64) (*MemoryGroup, error) {
	t.Helper()
	parent, file, err := memoryGroup()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp(parent, "latticekeep-test-*")
	if err != nil {
		return nil, err
	}
	g := &MemoryGroup{dir: dir, end: func() {}}
	t.Cleanup(func() {
		g.end()
		if err := os.Remove(dir); err != nil { // its processes have ended
			t.Error("removing the control group: ", err)
		}
	})
	if err := os.WriteFile(filepath.Join(dir, file), []byte(strconv.FormatInt(limit, 10)), 0); err != nil {
		return nil, err
	}
	g.watch()
	return g, nil
}

// memoryGroup returns the folder of the group of this process, and the name of the file with a limit
// in it. It looks where the usual systems have it (cgroups(7)).
func memoryGroup() (dir, file string, err error) {
	f, err := os.Open("/proc/self/cgroup")
	if err != nil {
		return "", "", err
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		switch parts := strings.SplitN(lines.Text(), ":", 3); {
		case len(parts) != 3:
		case parts[1] == "memory":
			dir, file = filepath.Join("/sys/fs/cgroup/memory", parts[2]), "memory.limit_in_bytes"
		case parts[0] == "0" && file == "":
			dir, file = filepath.Join("/sys/fs/cgroup", parts[2]), "memory.max"
		}
	}
	if file == "memory.max" { // groups below this one have limits only if it says so, which one with processes must not
		_ = os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+memory"), 0)
	}
	if _, err := os.Stat(filepath.Join(dir, "cgroup.procs")); err != nil {
		return "", "", err
	}
	return dir, file, nil
}

// Below returns a command that runs its arguments as a command in the group.
func (g *MemoryGroup) Below() []string {
	return []string{"/bin/sh", "-c", `echo $$ >"$0" && exec "$@"`, filepath.Join(g.dir, "cgroup.procs")}
}

// Kills returns how many processes of the group the kernel has killed.
func (g *MemoryGroup) Kills(t testing.TB) int64 {
	t.Helper()
	for _, file := range []string{"memory.events", "memory.oom_control"} {
		if n, err := g.number(file, "oom_kill"); err == nil {
			return n
		}
	}
	t.Fatal("the group does not say how many processes were killed")
	return 0
}

// Anonymous returns the memory of the group's processes that is not a file's, in bytes.
func (g *MemoryGroup) Anonymous() (int64, error) {
	n, err := g.number("memory.stat", "total_rss") // version 1
	if err != nil {
		n, err = g.number("memory.stat", "anon")
	}
	return n, err
}

// Peak returns the greatest memory of the group's processes so far that was not a file's, in bytes.
// It looks every 20 ms, and forgets it.
func (g *MemoryGroup) Peak() int64 {
	g.end()
	defer g.watch()
	peak := g.peak
	g.peak = 0
	return peak
}

func (g *MemoryGroup) watch() {
	stop := make(chan struct{})
	var done sync.WaitGroup
	done.Go(func() {
		for tick := time.NewTicker(20 * time.Millisecond); ; {
			if n, err := g.Anonymous(); err == nil {
				g.peak = max(g.peak, n)
			}
			select {
			case <-tick.C:
			case <-stop:
				tick.Stop()
				return
			}
		}
	})
	g.end = func() { close(stop); done.Wait() }
}

// number returns the number behind a name in a file of the group.
func (g *MemoryGroup) number(file, name string) (int64, error) {
	text, err := os.ReadFile(filepath.Join(g.dir, file))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		if is, value, _ := strings.Cut(strings.TrimSpace(line), " "); is == name {
			return strconv.ParseInt(value, 10, 64)
		}
	}
	return 0, fmt.Errorf("%s has no %s", file, name)
}

// Heap returns the bytes that the result of create takes in the heap.
func Heap[T any](create func() T) int64 {
	var before, after runtime.MemStats
	runtime.GC()
	runtime.GC() // also what pools kept
	runtime.ReadMemStats(&before)
	made := create()
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&after)
	runtime.KeepAlive(made)
	return int64(after.HeapAlloc) - int64(before.HeapAlloc)
}

// CheckHeap compares what n things take in the heap with what is said to be needed for them, which may
// be up to twice as much.
func CheckHeap(t testing.TB, n int, took, needed int64) {
	t.Helper()
	t.Logf("%d take %d bytes each, and %d are said to be needed", n, took/int64(n), needed/int64(n))
	if took > needed || 2*took < needed {
		t.Errorf("%d take %d bytes, and the formula says %d", n, took, needed)
	}
}
