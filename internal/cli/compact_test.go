package cli

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/offline"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/machine"
)

// compactable is an estate whose database has many free pages.
func compactable(t *testing.T) (e *estate, at string) {
	t.Helper()
	e, at = newEstate(t, "")
	e.fill(at, 60_000)
	large := make([]byte, 64<<20)
	e.with(at, func(s store.Database) {
		must(t, s.Update(t.Context(), func(tx store.Tx) error { return tx.Put([]byte("test/large"), large) }))
		must(t, s.Update(t.Context(), func(tx store.Tx) error { return tx.Delete([]byte("test/large")) }))
	})
	return e, at
}

// alone fails the test unless the database is the only file of its name.
func (e *estate) alone() {
	e.t.Helper()
	files, err := filepath.Glob(e.path("data/" + offline.DatabaseFile + "*"))
	must(e.t, err)
	if len(files) != 1 {
		e.t.Error("there are", files)
	}
}

func TestCompactGivesPagesBack(t *testing.T) {
	t.Parallel()
	e, at := compactable(t)
	url, end := e.serve(at)
	if _, err := run(t, "compact", "--data-dir", e.path("data")); err == nil || !strings.Contains(err.Error(), "in use by another latticekeep process: stop it") {
		t.Error("beside a server:", err)
	}
	e.seal(url, 1)
	end()
	before := e.rows(at)
	out := mustRun(t, "compact", "--data-dir", e.path("data"))
	var file string
	var has, had float64
	if _, err := fmt.Sscanf(out, "ok: %s has %f MB, and had %f MB\n", &file, &has, &had); err != nil || had < 64 || has > had-60 {
		t.Errorf("%q: %v", out, err)
	}
	info, err := os.Stat(file)
	must(t, err)
	if size := fmt.Sprintf("%.1f", float64(info.Size())/1e6); size != regexp.MustCompile(`has (\S+) MB`).FindStringSubmatch(out)[1] {
		t.Errorf("it has %s MB: %s", size, out)
	}
	e.alone()
	if !maps.Equal(e.rows(at), before) {
		t.Error("the rows differ")
	}
	mustRun(t, "audit", "verify", "--data-dir", e.path("data"))
	e.whole(at)

	for _, args := range [][]string{{"compact"}, {"compact", "--data-dir", e.path("none")}} {
		if out, err := run(t, args...); err == nil {
			t.Errorf("%q: %s", args, out)
		}
	}
	if _, err := os.Stat(e.path("none")); err == nil {
		t.Error("a database was made")
	}
}

// Killed whenever the new file has grown, compact leaves the database, and the next run takes away
// what the one before left.
func TestACompactThatIsKilledLosesNothing(t *testing.T) {
	t.Parallel()
	e, at := compactable(t)
	before := e.rows(at)
	program := filepath.Join(t.TempDir(), "latticekeep") // under this name the test binary is the program
	self, err := os.Executable()
	must(t, err)
	must(t, os.Symlink(self, program))
	beside := e.path("data/" + offline.DatabaseFile + ".compact")
	killed, look := 0, time.NewTicker(time.Millisecond)
	defer look.Stop()
	for size := int64(0); ; size += 4 << 20 {
		cmd := exec.Command(program, "compact", "--data-dir", e.path("data"))
		var said machine.Log
		cmd.Stdout, cmd.Stderr = &said, &said
		must(t, cmd.Start())
		ended := make(chan error, 1)
		go func() { ended <- cmd.Wait() }()
		done := false
		for !done {
			info, err := os.Stat(beside)
			if err == nil && info.Size() > size {
				_ = cmd.Process.Kill() // it may have ended
			}
			select {
			case err := <-ended:
				if err == nil && !strings.Contains(said.String(), "ok: ") {
					t.Fatal(said.String())
				}
				if err != nil {
					killed++
				}
				done = true
			case <-look.C:
			}
		}
		if strings.Contains(said.String(), "ok: ") {
			break
		}
		if !maps.Equal(e.rows(at), before) {
			t.Fatal("the rows differ after a kill at", size)
		}
	}
	if killed == 0 {
		t.Error("it was never killed")
	}
	t.Log(killed, "kills")
	e.alone()
	if !maps.Equal(e.rows(at), before) {
		t.Error("the rows differ")
	}
	e.whole(at)
}
