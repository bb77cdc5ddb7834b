package nodelog

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/latticekeep/latticekeep/internal/canonical"
)

func TestEntriesAreOnDiskAndFormOneChainOverRestarts(t *testing.T) {
	n := newNode(t, 0)
	must(t, n.log.Append(Wrapped, "1-ab", []byte("a")))
	must(t, n.log.Append(Opened, "1-ab", []byte("b")))
	chain := n.verify().Chain
	n.restart()
	n.append(1)
	s := n.verify()
	if s.Chain != chain || s.From != 1 || s.To != 5 || s.Kinds[Started] != 2 || s.Kinds[Wrapped] != 2 || s.Kinds[Opened] != 1 || !s.LastAt.Equal(start) {
		t.Errorf("the log has %+v", s)
	}
	if info, err := os.Stat(n.newest()); err != nil || info.Mode() != 0o600 || filepath.Base(n.newest()) != "00000000000000000001.jsonl" {
		t.Errorf("the file %s has mode %v, %v", n.newest(), info.Mode(), err)
	}
}

func TestAFileHas256Entries(t *testing.T) {
	n := newNode(t, 0)
	n.append(256)
	n.restart()
	n.append(1)
	paths := n.paths()
	if len(paths) != 2 || filepath.Base(paths[1]) != "00000000000000000257.jsonl" || bytes.Count(readFile(t, paths[0]), []byte("\n")) != 256 {
		t.Errorf("the files are %v", paths)
	}
	n.wants(259, 257, 0)
}

// A crash may end the writing of the last line anywhere.
func TestALineThatACrashHasTornIsCutOff(t *testing.T) {
	n := newNode(t, 0)
	n.append(2)
	whole := readFile(t, n.newest())
	before := bytes.LastIndexByte(whole[:len(whole)-1], '\n') + 1
	for size := before; size < len(whole); size++ {
		if size > before+700 && size < len(whole)-50 && size%61 > 0 { // one signature is like another
			continue
		}
		writeFile(t, n.newest(), whole[:size])
		if s := n.verify(); s.To != 2 {
			t.Fatalf("with %d bytes of the last line the log ends with entry %d, want 2", size-before, s.To)
		}
		if size > before+50 && size < len(whole)-50 { // to open it takes a signature
			continue
		}
		n.restart()
		if s := n.verify(); s.To != 3 || s.Kinds[Started] != 2 || len(damaged(t, n)) > 0 {
			t.Fatalf("after %d bytes of the last line the log goes on with %+v", size-before, s)
		}
		if b := readFile(t, n.newest()); !bytes.HasSuffix(b, []byte("}\n")) {
			t.Fatalf("after %d bytes of the last line a part of it stays: %q", size-before, b[len(b)-100:])
		}
	}
}

func TestAFileWhoseFirstLineWasTornIsMadeAgain(t *testing.T) {
	n := newNode(t, 8)
	n.append(4)
	if len(n.paths()) != 2 {
		t.Fatalf("the files are %v", n.paths())
	}
	for _, size := range []int{0, 100} {
		writeFile(t, n.newest(), readFile(t, n.newest())[:size])
		n.restart()
		if s := n.verify(); s.To != 5 || s.Kinds[Started] != 2 || len(n.paths()) != 2 {
			t.Errorf("the log goes on with %+v in %v", s, n.paths())
		}
	}
}

func TestADamagedLogIsKeptAsideAndAnotherBegins(t *testing.T) {
	other := newKey(t, 8)
	for what, change := range map[string]func(lines [][]byte) [][]byte{
		"a changed byte":         func(l [][]byte) [][]byte { return replaced(l, "1-ab", "1-ac") },
		"an entry less":          func(l [][]byte) [][]byte { return slices.Delete(l, 1, 2) },
		"an entry twice":         func(l [][]byte) [][]byte { return append(l, l[3]) },
		"entries in other order": func(l [][]byte) [][]byte { l[1], l[2] = l[2], l[1]; return l },
		"an unknown field":       func(l [][]byte) [][]byte { return replaced(l, `{"version"`, `{"x":1,"version"`) },
		"no first entry":         func(l [][]byte) [][]byte { return l[1:] },
		"a long line":            func(l [][]byte) [][]byte { return append(l, bytes.Repeat([]byte{0}, maxLine), []byte("\n")) },
		"another node's entry": func([][]byte) [][]byte {
			e := Next(other.Public().ID(), nil, start, Started)
			must(t, e.Sign(other))
			return [][]byte{encoded(t, e)}
		},
	} {
		n := newNode(t, 0)
		n.append(3)
		chain := n.verify().Chain
		lines := bytes.SplitAfter(readFile(t, n.newest()), []byte("\n"))
		content := bytes.Join(change(lines[:4]), nil)
		writeFile(t, n.newest(), content)
		if _, err := VerifyFolder(n.dir, n.key.Public()); err == nil && what != "no first entry" {
			t.Errorf("%s verifies", what)
		}
		n.restart()
		n.append(1)
		if s := n.verify(); s.Chain == chain || s.To != 2 {
			t.Errorf("%s: the log goes on with %+v", what, s)
		}
		n.wantsLogged("does not verify and was moved aside")
		aside := damaged(t, n)
		if len(aside) != 1 || !strings.HasSuffix(aside[0], ".damaged-20260304T050607Z") ||
			!bytes.Equal(readFile(t, filepath.Join(aside[0], fileName(1))), content) {
			t.Errorf("%s: kept aside: %v", what, aside)
		}
	}
}

// filled returns a node whose log has entries 1 to 12 in files of 4.
func filled(t *testing.T) *node {
	t.Helper()
	n := newNode(t, 0)
	n.log.perFile = 4
	n.append(11)
	if len(n.paths()) != 3 {
		t.Fatalf("the files are %v", n.paths())
	}
	return n
}

// wantsAside fails unless a start sets the log aside and begins another chain.
func (n *node) wantsAside(what string) {
	n.t.Helper()
	chain := readEntry(n.t, n.newest()).Chain
	n.restart()
	n.append(1)
	if s := n.verify(); s.Chain == chain || s.To != 2 || len(damaged(n.t, n)) != 1 {
		n.t.Errorf("%s: the log goes on with %+v", what, s)
	}
}

func readEntry(t testing.TB, path string) *Entry {
	t.Helper()
	e := new(Entry)
	line, _, _ := bytes.Cut(readFile(t, path), []byte("\n"))
	must(t, canonical.Decode(append(line, '\n'), e))
	return e
}

func TestDamageInAnOlderFileIsFoundAtTheStart(t *testing.T) {
	for what, damage := range map[string]func(path string){
		"a changed byte": func(path string) {
			writeFile(t, path, bytes.Replace(readFile(t, path), []byte("1-ab"), []byte("1-ac"), 1))
		},
		"a shorter file": func(path string) {
			b := readFile(t, path)
			writeFile(t, path, b[:len(b)-1])
		},
		"a missing file": func(path string) { must(t, os.Remove(path)) },
		"another name":   func(path string) { must(t, os.Rename(path, filepath.Join(filepath.Dir(path), fileName(6)))) },
	} {
		n := filled(t)
		damage(n.paths()[1])
		n.wantsAside(what)
	}
}

func TestALogThatEndsBeforeWhatWasShippedOrDiffersIsSetAside(t *testing.T) {
	for what, x := range map[string]struct {
		sequence uint64
		hash     string
		keep     int
	}{
		"the end is missing":         {12, "", 2},
		"another entry was shipped":  {6, Genesis, 3},
		"another one before the log": {4, Genesis, -1},
	} {
		n := filled(t)
		s := n.verify()
		position := &shipped{formatVersion, s.Chain, x.sequence, s.LastHash}
		if x.hash != "" {
			position.Hash = x.hash
		}
		must(t, position.write(n.folder()))
		paths := n.paths()
		if x.keep < 0 {
			must(t, os.Remove(paths[0]))
		} else {
			for _, path := range paths[x.keep:] {
				must(t, os.Remove(path))
			}
		}
		n.wantsAside(what)
	}
}

func TestALogThatWasShippedGoesOn(t *testing.T) {
	n := filled(t)
	n.ships(newDeployment(t), 1, 12)
	n.restart()
	n.wants(13, 11, 0)
	n.restart()
	n.wants(14, 11, 0)
	must(t, os.Remove(n.paths()[0]))
	n.restart()
	if s := n.verify(); s.From != 5 || s.To != 15 || len(damaged(t, n)) > 0 {
		t.Errorf("the log goes on with %+v", s)
	}
}

func TestANewChainInAFolderThatExistsIsAWarning(t *testing.T) {
	n := newNode(t, 0)
	n.append(1)
	if strings.Contains(n.logged.String(), "is gone") {
		t.Errorf("the first start warns: %s", n.logged.String())
	}
	n.ships(newDeployment(t), 1, 2)
	must(t, os.Remove(n.newest()))
	n.restart()
	n.wantsLogged("the log of this node is gone, a new one begins")
	n.wantsLogged("shipped=2")
	must(t, os.Remove(filepath.Join(n.folder(), shippedFile)))
	must(t, os.Remove(n.newest()))
	n.restart()
	n.wantsLogged("shipped=0")
	n.wants(1, 0, 0)
}

// The last process may have written an entry, and ended before it was synced.
func TestTheNewestFileIsSyncedBeforeTheLogGoesOn(t *testing.T) {
	n := newNode(t, 0)
	n.append(2)
	whole := readFile(t, n.newest())
	failed := errors.New("the disk fails")
	n.sync = func(*os.File) error { return failed }
	n.restart()
	if err := n.log.Append(Wrapped, "1-ab", nil); !errors.Is(err, failed) {
		t.Errorf("the sync fails: %v", err)
	}
	if b := readFile(t, n.newest()); !bytes.Equal(b, whole) {
		t.Errorf("the log went on before it was synced: %d bytes, want %d", len(b), len(whole))
	}
	n.sync = nil
	n.restart()
	n.append(1)
	n.wants(5, 3, 0)
}

func TestWhatTheCallerDropsIsInTheNextEntry(t *testing.T) {
	n := newNode(t, 0)
	n.log.Drop(3)
	n.wants(1, 0, 0)
	n.append(1)
	n.wants(3, 1, 3)
	n.log.Drop(2)
	if lost := n.log.Close(); lost != 0 {
		t.Errorf("%d are lost, want none", lost)
	}
	n.wants(4, 1, 5)
}

func replaced(lines [][]byte, from, to string) [][]byte {
	lines[2] = bytes.Replace(lines[2], []byte(from), []byte(to), 1)
	return lines
}

func TestAFullLogCountsWhatItDrops(t *testing.T) {
	n := newNode(t, 8)
	n.append(7) // with the start: full
	for range 3 {
		if err := n.log.Append(Opened, "1-ab", nil); !errors.Is(err, ErrFull) {
			t.Fatalf("a full log: %v, want ErrFull", err)
		}
	}
	n.wants(8, 7, 0)
	n.wantsLogged("takes no entries")
	if c := strings.Count(n.logged.String(), "takes no entries"); c != 1 {
		t.Errorf("it was logged %d times", c)
	}
	kept := n.paths()[0]
	must(t, os.Rename(kept, filepath.Join(n.dir, "kept"))) // an operator makes room
	n.append(1)
	n.wants(6, 5, 3)
	n.wantsLogged("dropped=3")
	s, err := Verify(n.key.Public(), append([]string{filepath.Join(n.dir, "kept")}, n.paths()...))
	if err != nil || s.From != 1 || s.To != 10 || s.Dropped != 3 {
		t.Errorf("with the file that was moved away: %+v, %v", s, err)
	}
}

func TestWhatIsNotRecordedAtTheEndIsLogged(t *testing.T) {
	n := newNode(t, 8)
	n.append(7)
	_ = n.log.Append(Opened, "1-ab", nil)
	if lost := n.log.Close(); lost != 1 {
		t.Errorf("%d are lost, want 1", lost)
	}
	n.wantsLogged("the number is not in it")
	if err := n.log.Append(Opened, "1-ab", nil); !errors.Is(err, fs.ErrClosed) {
		t.Errorf("after the end: %v", err)
	}
}

func TestWhatWasDroppedIsRecordedAtTheEnd(t *testing.T) {
	n := newNode(t, 8)
	n.append(7)
	_ = n.log.Append(Opened, "1-ab", nil)
	must(t, os.Remove(n.paths()[0]))
	if lost := n.log.Close(); lost != 0 {
		t.Errorf("%d are lost, want none", lost)
	}
	n.wants(5, 4, 1)
}

func TestWhatTheCallerRefusesIsNotCounted(t *testing.T) {
	n := newNode(t, 8)
	n.log.Close()
	n.required = true
	n.open()
	n.append(6)
	if err := n.log.Append(Opened, "1-ab", nil); !errors.Is(err, ErrFull) {
		t.Errorf("a full log: %v, want ErrFull", err)
	}
	must(t, os.Remove(n.paths()[0]))
	n.append(1)
	n.wants(5, 5, 0)
}

func TestFilesThatWereShippedMakeRoom(t *testing.T) {
	for what, x := range map[string]struct {
		chain string
		until uint64
		first uint64 // sequence of the first entry that stays
	}{
		"nothing":        {"", 0, 1},
		"a part of one":  {"", 3, 1},
		"one":            {"", 4, 5},
		"two":            {"", 11, 9},
		"all":            {"", 99, 9},
		"another's part": {"ab", 99, 1},
	} {
		n := newNode(t, 12) // files of 6
		n.log.perFile = 4
		n.append(11)
		s := shipped{Version: 1, Chain: n.verify().Chain + x.chain, Sequence: x.until}
		must(t, s.write(n.folder()))
		var got []uint64
		for range 5 {
			_ = n.log.Append(Wrapped, "1-ab", nil)
		}
		for _, path := range n.paths() {
			first, _ := firstOf(filepath.Base(path))
			got = append(got, first)
		}
		if got[0] != x.first {
			t.Errorf("%s was shipped: the log begins with entry %d, want %d", what, got[0], x.first)
		}
	}
}

// A limit of the process's files ends a write in the middle, as a full disk does. The limit would also hold
// for what the testing package writes, so the test runs in a process of its own.
func TestAFailedWriteIsTriedAgainAndTheOthersAreCounted(t *testing.T) {
	if os.Getenv("LATTICEKEEP_TEST_LIMIT") == "" {
		c := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v")
		c.Env = append(os.Environ(), "LATTICEKEEP_TEST_LIMIT=1")
		if out, err := c.CombinedOutput(); err != nil || !bytes.Contains(out, []byte("--- PASS: "+t.Name())) {
			t.Errorf("in a process of its own: %v\n%s", err, out)
		}
		return
	}
	n := newNode(t, 0)
	n.append(2)
	info, err := os.Stat(n.newest())
	must(t, err)
	signal.Ignore(syscall.SIGXFSZ)
	defer signal.Reset(syscall.SIGXFSZ)
	var before syscall.Rlimit
	must(t, syscall.Getrlimit(syscall.RLIMIT_FSIZE, &before))
	restore := func() { must(t, syscall.Setrlimit(syscall.RLIMIT_FSIZE, &before)) }
	defer restore()
	must(t, syscall.Setrlimit(syscall.RLIMIT_FSIZE, &syscall.Rlimit{Cur: uint64(info.Size()) + 1000, Max: before.Max}))
	for range 4 {
		if err := n.log.Append(Opened, "1-ab", nil); !errors.Is(err, syscall.EFBIG) {
			t.Fatalf("a failed write: %v", err)
		}
	}
	if size := len(readFile(t, n.newest())); int64(size) != info.Size()+1000 {
		t.Fatalf("the file has %d bytes: no line was torn", size)
	}
	n.wants(3, 2, 0) // a reader takes no notice
	restore()
	n.append(1)
	n.wants(6, 4, 3)
	if s := n.verify(); s.Kinds[Opened] != 1 {
		t.Errorf("the entry that could not be written is not there: %+v", s)
	}
}

func TestALogThatCannotBeOpenedIsTriedAgain(t *testing.T) {
	n := newNode(t, 0)
	n.append(1)
	n.log.Close()
	must(t, os.Rename(n.folder(), n.folder()+".away"))
	writeFile(t, n.folder(), nil)
	n.open()
	for range 2 {
		refused(t, "a file in the place of the folder", n.log.Append(Wrapped, "1-ab", nil), "not a directory")
	}
	must(t, os.Remove(n.folder()))
	must(t, os.Rename(n.folder()+".away", n.folder()))
	n.append(1)
	n.wants(5, 2, 2)
	if s := n.verify(); s.Kinds[Started] != 2 {
		t.Errorf("the second start is not recorded: %+v", s)
	}
}

func TestTheFolderGoesAwayAndComesBack(t *testing.T) {
	n := newNode(t, 0)
	n.append(1)
	must(t, os.Rename(n.folder(), n.folder()+".away"))
	writeFile(t, n.folder(), nil)
	for range 3 { // the first is tried again
		refused(t, "a file in the place of the folder", n.log.Append(Wrapped, "1-ab", nil), "not a directory")
	}
	must(t, os.Remove(n.folder()))
	must(t, os.Rename(n.folder()+".away", n.folder()))
	n.append(1)
	n.wants(5, 3, 2)
}

func TestTheChainGoesOnWhenAllFilesAreRemoved(t *testing.T) {
	n := newNode(t, 0)
	n.append(3)
	must(t, os.RemoveAll(filepath.Join(n.dir, "log")))
	n.append(1)
	if s := n.verify(); s.From != 5 || s.To != 5 {
		t.Errorf("the log goes on with %+v", s)
	}
}

func TestEntriesOfManyCallsAreOneChain(t *testing.T) {
	n := newNode(t, 0)
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 20 {
				if err := n.log.Append(Opened, "1-ab", nil); err != nil {
					t.Error(err)
				}
			}
			if _, err := VerifyFolder(n.dir, n.key.Public()); err != nil {
				t.Errorf("verifying meanwhile: %v", err)
			}
		})
	}
	all.Wait()
	n.wants(161, 160, 0)
}
