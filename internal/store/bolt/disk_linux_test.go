package bolt

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	bbolt "go.etcd.io/bbolt"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/volume"
	"github.com/latticekeep/latticekeep/test/disktest"
)

// A file size limit makes real writes fail, as a full disk does. It applies to the whole process,
// including the log of go test, so the test runs in a process of its own.
func TestAFullDiskIsSurvived(t *testing.T) {
	const child = "LATTICEKEEP_TEST_FULL_DISK"
	if os.Getenv(child) == "" {
		self, err := os.Executable()
		must(t, err)
		limited := exec.CommandContext(t.Context(), self, "-test.run=^"+t.Name()+"$", "-test.v")
		limited.Env = append(os.Environ(), child+"=1")
		out, err := limited.CombinedOutput()
		if err != nil || !bytes.Contains(out, []byte("--- PASS: "+t.Name())) {
			t.Fatalf("%v\n%s", err, out)
		}
		return
	}
	path := filepath.Join(t.TempDir(), "db")
	s := open(t, path, Options{pace: quick()})
	put(t, s, "before", []byte("1"))

	signal.Ignore(syscall.SIGXFSZ)
	defer signal.Reset(syscall.SIGXFSZ)
	var unlimited syscall.Rlimit
	must(t, syscall.Getrlimit(syscall.RLIMIT_FSIZE, &unlimited))
	limited := unlimited
	limited.Cur = 256 << 10
	must(t, syscall.Setrlimit(syscall.RLIMIT_FSIZE, &limited))
	defer func() { must(t, syscall.Setrlimit(syscall.RLIMIT_FSIZE, &unlimited)) }()

	for i := range 3 {
		err := s.Update(t.Context(), func(tx store.Tx) error { return tx.Put([]byte("big"), marked("big", 1<<20)) })
		wantKind(t, err, fault.Unavailable)
		if got := contents(t, s); !maps.Equal(got, map[string]string{"before": "1"}) {
			t.Fatalf("attempt %d left %v", i, len(got))
		}
	}
	must(t, syscall.Setrlimit(syscall.RLIMIT_FSIZE, &unlimited))
	must(t, s.Ready(t.Context()))
	put(t, s, "big", marked("big", 1<<20))
	remove(t, s, "big")
	must(t, s.Scrubbed(t.Context()))
	if found(t, path, "big") {
		t.Error("a failed commit left the value in the folder")
	}
	must(t, s.Close())
	sound(t, path)
}

// A descriptor that accepts no more writes simulates a disk that has become read-only.
func TestADiskThatRefusesWritesIsSurvived(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	s := open(t, path, Options{})
	put(t, s, "before", []byte("1"))
	must(t, s.Scrubbed(t.Context()))
	full, err := os.OpenFile("/dev/full", os.O_RDWR, 0)
	must(t, err)
	defer full.Close()
	must(t, syscall.Dup3(int(full.Fd()), int(s.writer.last.Fd()), 0))
	err = s.Update(t.Context(), func(tx store.Tx) error { return tx.Put([]byte("lost"), nil) })
	if fault.Of(err) != fault.Unavailable || !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
	must(t, s.Ready(t.Context()))
	put(t, s, "after", []byte("1"))
	if got := contents(t, s); !maps.Equal(got, map[string]string{"before": "1", "after": "1"}) {
		t.Fatalf("the store has %v", got)
	}
}

// eachDisk runs the test on small file systems of each kind.
func eachDisk(t *testing.T, test func(t *testing.T, dir string)) {
	for _, kind := range []disktest.Kind{disktest.Tmpfs, disktest.Ext4} {
		t.Run(string(kind), func(t *testing.T) { test(t, disktest.Mount(t, kind, 32<<20)) })
	}
}

// putEntries writes rows of the size of an entry until one does not fit.
func putEntries(s *Store, prefix string) (n int, err error) {
	for ; err == nil; n++ {
		err = s.Update(context.Background(), func(tx store.Tx) error {
			return tx.Put(fmt.Appendf(nil, "%s/%d", prefix, n), marked("entry", 6<<10))
		})
	}
	return n - 1, err
}

func TestReadyIsHonestOnAFullDisk(t *testing.T) {
	eachDisk(t, func(t *testing.T, dir string) {
		path := filepath.Join(dir, "db")
		s := open(t, path, Options{})
		free := disktest.Fill(t, dir)
		n, err := putEntries(s, "a")
		wantKind(t, err, fault.Unavailable)
		if !errors.Is(err, syscall.ENOSPC) {
			t.Error(err)
		}
		for range 3 {
			wantKind(t, s.Ready(t.Context()), fault.Unavailable)
		}
		// A start on the full disk does not know yet. The first probe tells.
		must(t, s.Close())
		later := time.Now()
		s = open(t, path, Options{Now: func() time.Time { return later }})
		_, err = putEntries(s, "b")
		wantKind(t, err, fault.Unavailable)
		wantKind(t, s.Ready(t.Context()), fault.Unavailable)

		free()
		must(t, s.Ready(t.Context()))
		put(t, s, "after", marked("after", 1<<20))
		if got := contents(t, s); len(got) < n+1 {
			t.Errorf("%d rows of at least %d", len(got), n+1)
		}
		must(t, s.Close())
		sound(t, path)
	})
}

// A store that nobody uses finds out that its disk takes no more.
func TestReadyProbesAnIdleStore(t *testing.T) {
	var f faults
	var skew atomic.Int64
	s := open(t, filepath.Join(t.TempDir(), "db"), Options{fault: f.step, Now: func() time.Time { return time.Now().Add(time.Duration(skew.Load())) }})
	// To the moved clock, work that began before the move hangs until it ends.
	later := func() {
		skew.Add(int64(probeAfter + time.Minute))
		eventually(t, "a healthy answer", func() bool { return s.Ready(t.Context()) == nil })
	}
	probe := func() (row string) {
		must(t, s.writer.last.view(func(tx *bbolt.Tx) error {
			if b := tx.Bucket([]byte(bucketProbe)); b != nil {
				row = string(b.Get([]byte(keyProbe)))
			}
			return nil
		}))
		return row
	}
	put(t, s, "a", nil)
	before := s.Commits()
	if probe() != "" {
		t.Error("a commit of a healthy store was a probe")
	}
	for range 2 { // the second one finds the result of the first
		later()
		before++
		eventually(t, "a probe", func() bool { return s.Commits() == before })
	}
	last := probe()
	if len(last) != probeSize {
		t.Errorf("a probe of %d bytes", len(last))
	}
	f.before.Store("commit", true)
	later()
	eventually(t, "the failure of a probe", func() bool { _, healthy := s.views.state(); return !healthy })
	wantKind(t, s.Ready(t.Context()), fault.Unavailable)
	f.before.Clear()
	must(t, s.Ready(t.Context()))
	if next := probe(); len(next) != probeSize || next == last {
		t.Error("after a failure, a commit was no probe")
	}
}

// What the file has grown by has blocks, so a full disk shows at the growth.
func TestTheFileIsNotSparse(t *testing.T) {
	eachDisk(t, func(t *testing.T, dir string) {
		path := filepath.Join(dir, "db")
		blocks := func() (size, allocated int64) {
			var st syscall.Stat_t
			must(t, syscall.Stat(path, &st))
			return st.Size, st.Blocks * 512
		}
		s := open(t, path, Options{})
		put(t, s, "a", marked("a", 2<<20))
		size, allocated := blocks()
		if size < 3<<20 || allocated < size {
			t.Errorf("the file has %d bytes and blocks for %d", size, allocated)
		}
		must(t, s.Close())
		// Earlier programs made files with holes.
		must(t, os.Truncate(path, size+8<<20))
		s = open(t, path, Options{})
		put(t, s, "b", marked("b", 2<<20))
		if size, allocated := blocks(); allocated < size {
			t.Errorf("the file has %d bytes and blocks for %d", size, allocated)
		}
	})
}

// event is what the closures of these tests enqueue.
type event struct{ removes bool }

func withReserve(size int64) Options {
	return Options{Reserve: size, Spared: func(e any) bool { return e.(event).removes }}
}

// record adds a row of the size of an entry. Only a removal is spared.
func record(s *Store, key string, removes bool) error {
	return s.Update(context.Background(), func(tx store.Tx) error {
		tx.Enqueue(event{removes})
		return tx.Put([]byte(key), marked("entry", 6<<10))
	})
}

// fillUntilReserved fills the disk and writes until changes are refused. It returns the number of
// rows.
func fillUntilReserved(t *testing.T, s *Store) (rows int) {
	t.Helper()
	for {
		err := record(s, fmt.Sprint("change/", rows), false)
		if err != nil {
			wantKind(t, err, fault.Unavailable)
			return rows
		}
		if rows++; rows > 10000 {
			t.Fatal("changes are never refused")
		}
	}
}

func TestTheReserveServesOnAFullDisk(t *testing.T) {
	eachDisk(t, func(t *testing.T, dir string) {
		path := filepath.Join(dir, "db")
		s := open(t, path, withReserve(1<<30)) // a sixteenth of 32 MiB, less what the file system takes
		usage := func() store.Usage {
			t.Helper()
			u, err := s.Usage(t.Context())
			must(t, err)
			return u
		}
		put(t, s, "first", nil)
		reserve := usage().Reserve
		if reserve < 1<<20 || reserve > 2<<20 || usage().Reserved {
			t.Fatalf("%+v at first", usage())
		}
		free := disktest.Fill(t, dir)
		changes := fillUntilReserved(t, s)
		must(t, s.Ready(t.Context()))
		if u := usage(); !u.Reserved || u.Reserve < reserve/2 {
			t.Errorf("%+v when changes are refused", u)
		}
		must(t, record(s, "removal/first", true))
		wantKind(t, record(s, "large", false), fault.Unavailable)

		// The process ends, and the next one finds the disk as full.
		must(t, s.Close())
		s = open(t, path, withReserve(1<<30))
		removals := 1
		for {
			must(t, s.Ready(t.Context()))
			wantKind(t, record(s, "after the start", false), fault.Unavailable)
			if err := record(s, fmt.Sprint("removal/", removals), true); err != nil {
				wantKind(t, err, fault.Unavailable)
				break
			}
			if removals++; removals > 1000 {
				t.Fatal("the reserve is endless")
			}
		}
		if removals < 50 {
			t.Errorf("the reserve held %d entries", removals)
		}
		before := s.Commits()
		for range 3 {
			wantKind(t, s.Ready(t.Context()), fault.Unavailable)
			wantKind(t, record(s, "nothing goes on", true), fault.Unavailable)
		}
		if s.Commits() != before {
			t.Error("a commit was tried that could not fit")
		}
		if got := contents(t, s); len(got) != 1+changes+removals {
			t.Errorf("%d rows, want %d", len(got), 1+changes+removals)
		}

		free()
		eventually(t, "a change after the disk had room", func() bool { return record(s, "change/after", false) == nil })
		must(t, s.Ready(t.Context()))
		if u := usage(); u.Reserved || u.Reserve != reserve {
			t.Errorf("%+v after the disk had room, want a reserve of %d", u, reserve)
		}
		must(t, s.Close())
		sound(t, path)
	})
}

// What removals free inside the file is room, too, even if the disk stays full.
func TestRemovalsEndTheReserve(t *testing.T) {
	eachDisk(t, func(t *testing.T, dir string) {
		s := open(t, filepath.Join(dir, "db"), withReserve(1<<30))
		put(t, s, "large", make([]byte, 10<<20))
		disktest.Fill(t, dir)
		fillUntilReserved(t, s)
		must(t, s.Update(t.Context(), func(tx store.Tx) error {
			tx.Enqueue(event{removes: true})
			return tx.Delete([]byte("large"))
		}))
		eventually(t, "a change after a removal", func() bool { return record(s, "change/after", false) == nil })
	})
}

// A process that is killed while it uses the reserve loses nothing, and the next one has the rest.
func TestAKillInTheReserveLosesNothing(t *testing.T) {
	const child = "LATTICEKEEP_TEST_RESERVE"
	if path := os.Getenv(child); path != "" {
		s, err := Open(path, withReserve(1<<30))
		must(t, err)
		for i := 0; ; i++ {
			if err := record(s, fmt.Sprint("removal/", i), true); err != nil {
				t.Fatal(err)
			}
			fmt.Println("done", i)
		}
	}
	eachDisk(t, func(t *testing.T, dir string) {
		path := filepath.Join(dir, "db")
		s := open(t, path, withReserve(1<<30))
		disktest.Fill(t, dir)
		changes := fillUntilReserved(t, s)
		must(t, s.Close())

		self, err := os.Executable()
		must(t, err)
		killed := exec.CommandContext(t.Context(), self, "-test.run=^TestAKillInTheReserveLosesNothing$")
		killed.Env = append(os.Environ(), child+"="+path)
		out, err := killed.StdoutPipe()
		must(t, err)
		must(t, killed.Start())
		done := 0
		for lines := bufio.NewScanner(out); lines.Scan(); {
			if strings.HasPrefix(lines.Text(), "done ") {
				if done++; done == 20 {
					must(t, killed.Process.Kill())
				}
			}
		}
		if err := killed.Wait(); done < 20 {
			t.Fatalf("%d removals were recorded: %v", done, err)
		}

		s = open(t, path, withReserve(1<<30))
		if got := contents(t, s); len(got) < changes+done || len(got) > changes+done+1 {
			t.Errorf("%d rows of %d changes and %d removals", len(got), changes, done)
		}
		must(t, s.Ready(t.Context()))
		must(t, record(s, "removal/after", true))
		wantKind(t, record(s, "change/after", false), fault.Unavailable)
		must(t, s.Close())
		sound(t, path)
	})
}

// What is below an overlay is unknown, so there the reserve is a threshold of what is free.
func TestTheReserveIsAThresholdWhereBlocksAreNotKept(t *testing.T) {
	below := disktest.Mount(t, disktest.Tmpfs, 32<<20)
	dir := filepath.Join(t.TempDir(), "overlay")
	must(t, os.Mkdir(dir, 0o700))
	layers := map[string]string{}
	for _, layer := range []string{"lowerdir", "upperdir", "workdir"} {
		layers[layer] = filepath.Join(below, layer)
		must(t, os.Mkdir(layers[layer], 0o700))
	}
	options := fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", layers["lowerdir"], layers["upperdir"], layers["workdir"])
	if out, err := exec.CommandContext(t.Context(), "mount", "-t", "overlay", "-o", options, "overlay", dir).CombinedOutput(); err != nil {
		t.Skipf("an overlay cannot be mounted here: %v: %s", err, out)
	}
	t.Cleanup(func() {
		if out, err := exec.Command("umount", dir).CombinedOutput(); err != nil {
			t.Errorf("unmounting: %v: %s", err, out)
		}
	})
	s := open(t, filepath.Join(dir, "db"), withReserve(1<<30))
	must(t, record(s, "change/before", false))

	other := filepath.Join(below, "other")
	for size := int64(24 << 20); record(s, "change", false) == nil; size += 256 << 10 {
		if size > 32<<20 {
			t.Fatal("changes are never refused")
		}
		must(t, os.WriteFile(other, make([]byte, size), 0o600))
	}
	must(t, s.Ready(t.Context()))
	must(t, record(s, "removal", true))
	must(t, os.Remove(other))
	eventually(t, "a change after the disk had room", func() bool { return record(s, "change/after", false) == nil })
}

// A change that is refused takes no room from the reads that are committed with it.
func TestARefusedChangeTakesNothingFromTheReserve(t *testing.T) {
	dir := disktest.Mount(t, disktest.Tmpfs, 64<<20)
	s := open(t, filepath.Join(dir, "db"), withReserve(1<<30))
	put(t, s, "first", nil)
	disktest.Fill(t, dir)
	fillUntilReserved(t, s)
	for i := range 3 {
		must(t, record(s, fmt.Sprint("removal/", i), true))
	}
	hold, in := make(chan struct{}), make(chan struct{})
	var read, refused error
	var wg sync.WaitGroup
	wg.Go(func() {
		_ = s.Update(context.Background(), func(store.Tx) error { close(in); <-hold; return nil })
	})
	<-in
	wg.Go(func() { read = record(s, "removal/x", true) })
	eventually(t, "queued", func() bool { return s.queue.queued() == 1 })
	wg.Go(func() {
		refused = s.Update(context.Background(), func(tx store.Tx) error {
			tx.Enqueue(event{false})
			return tx.Put([]byte("big"), make([]byte, 4<<20))
		})
	})
	eventually(t, "queued", func() bool { return s.queue.queued() == 2 })
	close(hold)
	wg.Wait()
	if read != nil || !errors.Is(refused, errReserved) {
		t.Errorf("the read: %v; the change: %v", read, refused)
	}
}

// On a volume with little room commits go to the database, and others keep that room.
func TestALogLeavesTheLastRoomToOthers(t *testing.T) {
	dir := disktest.Mount(t, disktest.Tmpfs, 32<<20)
	path := filepath.Join(dir, "db")
	s := open(t, path, Options{})
	put(t, s, "a", nil)
	_, free, _, err := volume.Of(s.writer.last.File)
	must(t, err)
	must(t, os.WriteFile(filepath.Join(dir, "others"), make([]byte, free-3<<20), 0o600))
	must(t, s.WriteAhead(t.Context()))
	never(t, s)
	put(t, s, "b", nil)
	info, err := os.Stat(path + walSuffix)
	must(t, err)
	if info.Size() > 0 {
		t.Errorf("the log takes %d bytes", info.Size())
	}
	must(t, os.Remove(filepath.Join(dir, "others")))
	put(t, s, "c", nil)
	must(t, s.between(t.Context(), func() {
		if s.writer.ahead.open == nil {
			t.Error("with room again, commits are not written ahead")
		}
	}))
}

// Without a reserve, everything that fits is still taken on a nearly full disk.
func TestWhatFitsOnAFullDiskIsWrittenAheadOrNot(t *testing.T) {
	dir := disktest.Mount(t, disktest.Ext4, 96<<20)
	s := openAhead(t, filepath.Join(dir, "db"), Options{})
	never(t, s)
	for i := range 200 {
		put(t, s, fmt.Sprint(i), marked("v", 3000))
	}
	disktest.Fill(t, dir)
	for i := range 500 {
		put(t, s, fmt.Sprint(i%200), marked("w", 3000))
	}
}
