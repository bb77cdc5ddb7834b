// Package export writes and verifies the exports of the audit log that clients keep. An export is a
// file of JSON lines that grows with the log and resumes after an interruption. It is verified
// alone, with the archive, or against a running server.
package export

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/progress"
)

// Stream adds the lines that write writes.
func Stream(x *Writer, write func(io.Writer) error) error {
	r, w := io.Pipe()
	failed := make(chan error, 1)
	go func() {
		err := write(w)
		_ = w.CloseWithError(err) // never fails
		failed <- err
	}()
	err := x.addAll(r)
	_ = r.CloseWithError(errors.Join(errors.New("the export ended"), err))
	if cause := <-failed; cause != nil && (err == nil || errors.Is(err, cause)) {
		return cause
	}
	return err
}

// maxLine bounds a line of an export. An entry has a few KiB.
const maxLine = 1 << 20

var closingPrefix = []byte(`{"checkpoint":`)

// closingLine is the last line of an export, as [reader.Reader.Export] writes it.
type closingLine struct {
	Checkpoint string `json:"checkpoint"`
}

// Writer is an export that grows. Each entry must directly follow the last one, in the chain of the
// log or of the tenant.
type Writer struct {
	w      *bufio.Writer
	tenant bool         // the export is that of one tenant
	Last   *audit.Entry // nil without entries
	closed bool         // the last line is a closing line
	began  bool         // the last entry was seen again, or a newer one was added

	// begin is called before the first line is written. It removes everything after the last entry.
	begin    func() error
	progress *progress.Progress
}

var (
	errOtherLog = errors.New("the server's log does not go on from the entries that are in the file: it is of another log or tenant, " +
		"entries were lost by a rollback or archived, or one of the two was altered: export to another file, and verify both")
	errNotExport = errors.New("there is something in the file that is no export: choose another name")
)

// add takes the next line of the log. It skips entries that the export already has, and checks that
// the last of them matches.
func (x *Writer) add(line []byte) error {
	if bytes.HasPrefix(line, closingPrefix) {
		return x.close(line)
	}
	e, err := audit.ParseEntry(line)
	if err != nil {
		return fmt.Errorf("reading an entry from the server: %w", err)
	}
	if x.Last != nil {
		switch place, last := x.place(e), x.place(x.Last); {
		case !x.began && place < last:
			return nil
		case !x.began && place == last:
			if e.Hash != x.Last.Hash || e.Sequence != x.Last.Sequence {
				return errOtherLog
			}
			x.began = true
			return nil
		case x.previous(e) != x.Last.Hash:
			return errOtherLog
		}
	}
	if err := x.write(line); err != nil {
		return err
	}
	x.Last, x.closed, x.began = e, false, true
	x.progress.Add()
	return nil
}

// place returns the sequence that orders the entries of the export.
func (x *Writer) place(e *audit.Entry) uint64 {
	if x.tenant {
		return e.TenantSequence
	}
	return e.Sequence
}

func (x *Writer) previous(e *audit.Entry) string {
	if x.tenant {
		return e.TenantPreviousHash
	}
	return e.PreviousHash
}

func (x *Writer) close(line []byte) error {
	if x.closed {
		return nil // nothing new since the last closing line
	}
	if err := x.write(line); err != nil {
		return err
	}
	x.closed = true
	return nil
}

func (x *Writer) write(line []byte) error {
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

// addAll takes all lines of r. The last one must be a closing line.
func (x *Writer) addAll(r io.Reader) error {
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

// checkpointLine returns the closing line for a signed checkpoint.
func checkpointLine(signed string) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false) // as the server does
	if err := e.Encode(closingLine{signed}); err != nil {
		return nil, fmt.Errorf("writing the closing line: %w", err)
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), nil
}
