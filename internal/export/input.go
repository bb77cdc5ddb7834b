package export

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"

	"github.com/latticekeep/latticekeep/internal/audit"
)

// EntriesOf returns a tenant's entries in the export.
func (f Input) EntriesOf(tenant string) iter.Seq2[*audit.Entry, error] {
	return func(yield func(*audit.Entry, error) bool) {
		var failed error
		err := f.each(func(line []byte) bool {
			if bytes.HasPrefix(line, closingPrefix) {
				return true
			}
			e, err := audit.ParseEntry(bytes.Clone(line))
			if err != nil {
				failed = fmt.Errorf("reading the export: %w", err)
				return false
			}
			return e.TenantID != tenant || yield(e, nil)
		})
		if err := errors.Join(failed, err); err != nil {
			yield(nil, err)
		}
	}
}

// Input is an export that can be read more than once from its beginning.
type Input struct{ *os.File }

// OpenInput opens an export. It copies standard input to a temporary file.
func OpenInput(stdin io.Reader, file string) (f Input, done func(), err error) {
	if file != "-" {
		in, err := os.Open(file)
		if err != nil {
			return Input{}, nil, fmt.Errorf("opening the export: %w", err)
		}
		return Input{in}, func() { _ = in.Close() }, nil
	}
	kept, err := os.CreateTemp("", "latticekeep-export-*")
	if err != nil {
		return Input{}, nil, fmt.Errorf("keeping the export: %w", err)
	}
	done = func() { _, _ = kept.Close(), os.Remove(kept.Name()) }
	if _, err := io.Copy(kept, stdin); err != nil {
		done()
		return Input{}, nil, fmt.Errorf("reading the export: %w", err)
	}
	return Input{kept}, done, nil
}

// each visits the lines until visit returns false.
func (f Input) each(visit func(line []byte) bool) error {
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return fmt.Errorf("reading the export: %w", err)
	}
	lines := bufio.NewScanner(f)
	lines.Buffer(make([]byte, 0, 64<<10), maxLine)
	for lines.Scan() {
		if !visit(lines.Bytes()) {
			break
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("reading the export: %w", err)
	}
	return nil
}

// First returns the first entry, and nil if the first line is not an entry.
func (f Input) First() (e *audit.Entry, err error) {
	err = f.each(func(line []byte) bool {
		e, _ = audit.ParseEntry(bytes.Clone(line))
		return false
	})
	if errors.Is(err, bufio.ErrTooLong) {
		return nil, nil
	}
	return e, err
}
