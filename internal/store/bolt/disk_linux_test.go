package bolt

import (
	"bytes"
	"errors"
	"maps"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
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
