package app

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/latticekeep/latticekeep/internal/audit"
)

// maxLine bounds a line of an export; an entry is a few KiB.
const maxLine = 1 << 20

var closingPrefix = []byte(`{"checkpoint":`)

// closingLine is the last line of an export, as [audit.Log.Export] writes it.
type closingLine struct {
	Checkpoint string `json:"checkpoint"`
}

// entries is an export that grows: each entry has to be the one behind the last,
// in the chain, or in the tenant's part of it.
type entries struct {
	w      *bufio.Writer
	tenant bool         // it is the export of one tenant
	last   *audit.Entry // nil: it has none yet
	closed bool         // it has its closing line
	began  bool         // the last entry was met, or one behind it was added

	// begin is called before the first line is written: what stands behind the
	// last entry goes.
	begin    func() error
	progress *progress
}

var (
	errOtherLog = errors.New("the server's log does not go on from the entries that are in the file: it is of another log or tenant, " +
		"entries were lost by a rollback or archived, or one of the two was altered: export to another file, and verify both")
	errNotExport = errors.New("there is something in the file that is no export: choose another name")
)

// add takes the next line of the log. Lines of entries that are there are held
// against the last of them, and left out.
func (x *entries) add(line []byte) error {
	if bytes.HasPrefix(line, closingPrefix) {
		return x.close(line)
	}
	e, err := audit.ParseEntry(line)
	if err != nil {
		return fmt.Errorf("reading an entry from the server: %w", err)
	}
	if x.last != nil {
		switch place, last := x.place(e), x.place(x.last); {
		case !x.began && place < last:
			return nil
		case !x.began && place == last:
			if e.Hash != x.last.Hash || e.Sequence != x.last.Sequence {
				return errOtherLog
			}
			x.began = true
			return nil
		case x.previous(e) != x.last.Hash:
			return errOtherLog
		}
	}
	if err := x.write(line); err != nil {
		return err
	}
	x.last, x.closed, x.began = e, false, true
	x.progress.add()
	return nil
}

// place orders the entries of the export.
func (x *entries) place(e *audit.Entry) uint64 {
	if x.tenant {
		return e.TenantSequence
	}
	return e.Sequence
}

func (x *entries) previous(e *audit.Entry) string {
	if x.tenant {
		return e.TenantPreviousHash
	}
	return e.PreviousHash
}

func (x *entries) close(line []byte) error {
	if x.closed {
		return nil // nothing came behind what was closed before
	}
	if err := x.write(line); err != nil {
		return err
	}
	x.closed = true
	return nil
}

func (x *entries) write(line []byte) error {
	if x.begin != nil {
		if err := x.begin(); err != nil {
			return err
		}
		x.begin = nil
	}
	if _, err := x.w.Write(append(line, '\n')); err != nil {
		return fmt.Errorf("writing the export: %w", err)
	}
	return nil
}

// addAll takes lines up to their end, which is a closing line.
func (x *entries) addAll(r io.Reader) error {
	lines := bufio.NewScanner(r)
	lines.Buffer(make([]byte, 0, 64<<10), maxLine)
	ended := false
	for lines.Scan() {
		if ended {
			return errors.New("the log goes on after its closing line")
		}
		if err := x.add(bytes.Clone(lines.Bytes())); err != nil {
			return err
		}
		ended = bytes.HasPrefix(lines.Bytes(), closingPrefix)
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("reading the log: %w", err)
	}
	if !ended {
		return errors.New("the log was broken off before its closing line: the server's own log may say why")
	}
	return nil
}

// checkpointLine returns the closing line that has a signed checkpoint.
func checkpointLine(signed string) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false) // as the server writes it
	if err := e.Encode(closingLine{signed}); err != nil {
		return nil, fmt.Errorf("writing the closing line: %w", err)
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), nil
}

// exportFile is an export in a file, which may be one that is finished, or one of
// a run that was broken off.
type exportFile struct {
	entries
	f     *os.File
	first *audit.Entry
	size  int64 // where its last entry ends
}

// openExport opens or makes the file and finds where it goes on. It changes
// nothing in it before a line is written.
func openExport(path string, tenant bool, p *progress) (x *exportFile, err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("opening the export: %w", err)
	}
	x = &exportFile{f: f}
	defer func() {
		if err != nil {
			_ = f.Close()
		}
	}()
	x.entries = entries{w: bufio.NewWriterSize(f, 1<<16), tenant: tenant, progress: p}
	if err := x.find(); err != nil {
		return nil, err
	}
	x.begin = func() error {
		if err := x.f.Truncate(x.size); err != nil {
			return fmt.Errorf("cutting the end of the export: %w", err)
		}
		if _, err := x.f.Seek(x.size, io.SeekStart); err != nil {
			return fmt.Errorf("going on behind the last entry: %w", err)
		}
		return nil
	}
	return x, nil
}

// find reads the file once, to know its first and its last entry.
func (x *exportFile) find() error {
	in := bufio.NewReaderSize(x.f, 1<<20)
	count, at := uint64(0), int64(0)
	var last []byte
	for {
		line, err := in.ReadSlice('\n')
		if err == io.EOF {
			break // what is left is a line that was not written to its end
		}
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			return fmt.Errorf("reading the export: %w", err)
		}
		if err != nil || x.closed {
			return errNotExport
		}
		at += int64(len(line))
		line = line[:len(line)-1]
		if x.closed = bytes.HasPrefix(line, closingPrefix); x.closed {
			continue
		}
		if count++; count == 1 {
			if x.first, err = audit.ParseEntry(line); err != nil {
				return errNotExport
			}
		}
		last, x.size = append(last[:0], line...), at
	}
	if count == 0 {
		if info, err := x.f.Stat(); err != nil || at > 0 || info.Size() > maxLine {
			return errors.Join(errNotExport, err)
		}
		return nil
	}
	var err error
	if x.last, err = audit.ParseEntry(last); err != nil {
		return errNotExport
	}
	// The entries of one tenant have no gap in its own sequence, and those of the
	// whole log have one in each tenant's, unless there is one tenant only.
	one := x.first.TenantID == x.last.TenantID && x.last.TenantSequence-x.first.TenantSequence+1 == count
	whole := x.last.Sequence-x.first.Sequence+1 == count && !isTenants(x.first)
	if x.tenant && !one || !x.tenant && one && !whole {
		return errors.New("the file is the export of another part of the log, the whole or one tenant's: choose another name")
	}
	return nil
}

// finish makes what was written durable.
func (x *exportFile) finish(err error) error {
	// What was broken off is kept as far as it goes: the next run goes on there.
	return errors.Join(err, x.w.Flush(), x.f.Sync(), x.f.Close())
}

// backwards calls visit with each line of the first size bytes, which end in a
// newline, the last one first.
func backwards(f io.ReaderAt, size int64, visit func(line []byte) error) error {
	const step = 256 << 10
	var rest []byte // read, and not visited: its first line may begin before it
	for size > 0 || len(rest) > 0 {
		n := min(size, step)
		block := make([]byte, n, n+int64(len(rest)))
		if _, err := f.ReadAt(block, size-n); err != nil {
			return fmt.Errorf("reading what was fetched: %w", err)
		}
		size -= n
		rest = append(block, rest...)
		for {
			begin := bytes.LastIndexByte(rest[:max(len(rest)-1, 0)], '\n') + 1
			if begin == 0 && size > 0 {
				break
			}
			if len(rest) > 0 {
				if err := visit(bytes.TrimSuffix(rest[begin:], []byte("\n"))); err != nil {
					return err
				}
			}
			if rest = rest[:begin]; begin == 0 {
				break
			}
		}
		if len(rest) > 2*maxLine {
			return errNotExport
		}
	}
	return nil
}
