package export

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/progress"
)

// Write calls write with an export that continues after the entries in output. It keeps the written
// lines when write fails.
func Write(output string, tenant bool, p *progress.Progress, stdout io.Writer, write func(*Writer) error) error {
	if output == "-" {
		x := &Writer{w: bufio.NewWriterSize(stdout, 1<<16), tenant: tenant, progress: p}
		return errors.Join(write(x), x.w.Flush())
	}
	x, err := OpenFile(output, tenant, p)
	if err != nil {
		return err
	}
	if err := x.finish(write(&x.Writer)); err != nil {
		return fmt.Errorf("exporting to %s: %w", filepath.Base(output), err)
	}
	return nil
}

// File is an export in a file. The file may hold a finished export or one from an interrupted run.
type File struct {
	Writer
	f     *os.File
	first *audit.Entry
	size  int64 // end of the last entry
}

// OpenFile opens or creates the file and finds where the export continues. It does not change the
// file before the first line is written.
func OpenFile(path string, tenant bool, p *progress.Progress) (x *File, err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("opening the export: %w", err)
	}
	x = &File{f: f}
	defer func() {
		if err != nil {
			_ = f.Close()
		}
	}()
	x.Writer = Writer{w: bufio.NewWriterSize(f, 1<<16), tenant: tenant, progress: p}
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

// find reads the file once to find its first and last entry.
func (x *File) find() error {
	in := bufio.NewReaderSize(x.f, 1<<20)
	count, at := uint64(0), int64(0)
	var last []byte
	for {
		line, err := in.ReadSlice('\n')
		if errors.Is(err, io.EOF) {
			break // the rest is an incomplete line
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
	if x.Last, err = audit.ParseEntry(last); err != nil {
		return errNotExport
	}
	// The entries of one tenant have no gap in that tenant's sequence. The whole log has gaps in
	// each tenant's sequence, unless there is only one tenant.
	one := x.first.TenantID == x.Last.TenantID && x.Last.TenantSequence-x.first.TenantSequence+1 == count
	whole := x.Last.Sequence-x.first.Sequence+1 == count && !IsTenants(x.first)
	if x.tenant && !one || !x.tenant && one && !whole {
		return errors.New("the file is the export of another part of the log, the whole or one tenant's: choose another name")
	}
	return nil
}

// finish makes the written lines durable.
func (x *File) finish(err error) error {
	// An interrupted export keeps its lines. The next run continues there.
	return errors.Join(err, x.w.Flush(), x.f.Sync(), x.f.Close())
}

// backwards calls visit with each line of the first size bytes, last line first. These bytes must
// end in a newline.
func backwards(f io.ReaderAt, size int64, visit func(line []byte) error) error {
	const step = 256 << 10
	var rest []byte // read but not visited; its first line may begin earlier in the file
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
