package nodelog

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/canonical"
	"github.com/latticekeep/latticekeep/internal/dualsig"
)

const (
	extension = ".jsonl"
	maxLine   = 16 << 10 // bytes of a line, which has about 5 KB
)

// Folder returns the folder of a node key's log in the directory of a plugin.
func Folder(dir, node string) string { return filepath.Join(dir, "log", node) }

// fileName returns the name of the file whose first entry has this sequence.
func fileName(first uint64) string { return fmt.Sprintf("%020d%s", first, extension) }

// firstOf is the inverse of fileName.
func firstOf(name string) (first uint64, ok bool) {
	first, err := strconv.ParseUint(strings.TrimSuffix(name, extension), 10, 64)
	return first, err == nil && name == fileName(first)
}

// list returns the first sequences of the files in a folder, rising. A folder that does not exist has
// none.
func list(folder string) (files []uint64, err error) {
	found, err := os.ReadDir(folder)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for _, f := range found {
		if first, ok := firstOf(f.Name()); ok {
			files = append(files, first)
		}
	}
	slices.Sort(files)
	return files, nil
}

// Files returns the paths of the files of a folder, in the order of their entries.
func Files(folder string) (paths []string, err error) {
	files, err := list(folder)
	for _, first := range files {
		paths = append(paths, filepath.Join(folder, fileName(first)))
	}
	return paths, err
}

// Summary is what a log, or a part of one, has. Its zero value has no entry.
type Summary struct {
	Node      string          `json:"node"` // id of the node's key
	Chain     string          `json:"chain"`
	From      uint64          `json:"from"` // sequence of the first entry
	To        uint64          `json:"to"`   // sequence of the last entry
	FirstHash string          `json:"first_hash"`
	LastHash  string          `json:"last_hash"`
	Kinds     map[Kind]uint64 `json:"kinds"`    // entries of each kind
	Dropped   uint64          `json:"dropped"`  // what entries of the kind dropped count
	FirstAt   time.Time       `json:"first_at"` // time of the first entry
	LastAt    time.Time       `json:"last_at"`  // time of the last entry
}

// Count returns the number of entries.
func (s *Summary) Count() uint64 {
	if s.To == 0 {
		return 0
	}
	return s.To - s.From + 1
}

// damagedError says that what a file has is no log of the key, or not the next part of it.
type damagedError struct{ error }

// walk follows a chain from entry to entry, and verifies each.
type walk struct {
	key  *dualsig.PublicKey
	last *Entry // nil before the first
	sum  Summary

	visit func(*Entry) error // optional; called before last changes
}

// read adds the entries of r, and returns how many bytes they have. What follows the last line feed is
// not an entry yet.
func (w *walk) read(r io.Reader) (size int64, err error) {
	in := bufio.NewReaderSize(r, maxLine)
	for {
		line, err := in.ReadSlice('\n')
		switch {
		case errors.Is(err, io.EOF):
			return size, nil
		case errors.Is(err, bufio.ErrBufferFull):
			return size, &damagedError{fmt.Errorf("the line at byte %d is longer than %d KiB", size, maxLine>>10)}
		case err != nil:
			return size, err
		}
		e := new(Entry)
		if err := canonical.Decode(line, e); err != nil {
			return size, &damagedError{fmt.Errorf("decoding the line at byte %d: %w", size, err)}
		}
		if err := w.add(e); err != nil {
			return size, err
		}
		size += int64(len(line))
	}
}

// readFrom is read for a file whose name says with which sequence it begins.
func (w *walk) readFrom(f *os.File, first uint64) (size int64, err error) {
	before := w.last
	size, err = w.read(f)
	if err != nil {
		return size, fmt.Errorf("%s: %w", f.Name(), err)
	}
	from := w.sum.From
	if before != nil {
		from = before.Sequence + 1
	}
	if w.last != before && from != first {
		return size, &damagedError{fmt.Errorf("%s begins with entry %d", f.Name(), from)}
	}
	return size, nil
}

// open is read for a path.
func (w *walk) open(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := w.read(f); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

// openFrom is readFrom for a path.
func (w *walk) openFrom(path string, first uint64) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = w.readFrom(f, first)
	return err
}

func (w *walk) add(e *Entry) error {
	if w.last != nil && !e.Follows(w.last) {
		return &damagedError{fmt.Errorf("entry %d of chain %.32q does not follow entry %d of chain %s: entries between them are missing, or were changed", e.Sequence, e.Chain, w.last.Sequence, w.last.Chain)}
	}
	if err := e.Verify(w.key); err != nil {
		return &damagedError{err}
	}
	if w.visit != nil {
		if err := w.visit(e); err != nil {
			return err
		}
	}
	s := &w.sum
	if w.last == nil {
		*s = Summary{Node: e.Node, Chain: e.Chain, From: e.Sequence, FirstHash: e.Hash(), FirstAt: e.At, Kinds: map[Kind]uint64{}}
	}
	s.To, s.LastAt, s.Dropped = e.Sequence, e.At, s.Dropped+e.Count
	s.Kinds[e.Kind]++
	w.last = e
	return nil
}

// summary returns what was read.
func (w *walk) summary() Summary {
	if w.last != nil {
		w.sum.LastHash = w.last.Hash()
	}
	return w.sum
}

// Verify verifies files of a log, in the order of their entries, by the node's key.
func Verify(key *dualsig.PublicKey, paths []string) (Summary, error) {
	w := &walk{key: key}
	for _, path := range paths {
		if err := w.open(path); err != nil {
			return Summary{}, err
		}
	}
	return w.summary(), nil
}

// NodeOf returns the id of the node key that the first entry of a file names. Nothing is verified.
func NodeOf(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	line, err := bufio.NewReaderSize(f, maxLine).ReadSlice('\n')
	e := new(Entry)
	if err == nil {
		err = canonical.Decode(line, e)
	}
	if err == nil {
		err = e.check()
	}
	if err != nil {
		return "", fmt.Errorf("%s: decoding the first entry: %w", path, err)
	}
	return e.Node, nil
}

// VerifyFolder verifies the log of a node's key in the directory of its plugin, which may serve
// meanwhile.
func VerifyFolder(dir string, key *dualsig.PublicKey) (Summary, error) {
	w := &walk{key: key}
	err := w.readFolder(Folder(dir, key.ID()), func(*os.File) error { return nil })
	return w.summary(), err
}

// readFolder adds all files of a folder, and calls after with each. The plugin may remove the oldest ones
// meanwhile, so all are opened before the first is read.
func (w *walk) readFolder(folder string, after func(*os.File) error) error {
	files, err := openAll(folder)
	defer closeAll(files)
	if err != nil {
		return err
	}
	for _, f := range files {
		if _, err = w.read(f); err == nil {
			err = after(f)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", f.Name(), err)
		}
	}
	return nil
}

// openAll opens the files of a folder, in the order of their entries.
func openAll(folder string) (files []*os.File, err error) {
	const tries = 10 // the plugin removes a file for 256 entries at most
	for range tries {
		if files, err = openListed(folder); !errors.Is(err, fs.ErrNotExist) {
			break
		}
		closeAll(files)
		files = nil
	}
	return files, err
}

func openListed(folder string) (files []*os.File, err error) {
	paths, err := Files(folder)
	for _, path := range paths {
		f, err := os.Open(path)
		if err != nil {
			return files, err
		}
		files = append(files, f)
	}
	return files, err
}

func closeAll(files []*os.File) {
	for _, f := range files {
		_ = f.Close() // it was only read
	}
}
