package nodelog

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
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

// A limit of the process's files ends a write in the middle, as a full disk does.
func TestAFailedWriteIsTriedAgainAndTheOthersAreCounted(t *testing.T) {
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
