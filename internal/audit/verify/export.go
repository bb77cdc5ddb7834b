package verify

import (
	"bufio"
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"

	"github.com/go-json-experiment/json"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/fault"
)

// ClosingLine is the last line of an export: the signed checkpoint of its last entry. It reveals an
// export that lost its last lines.
type ClosingLine struct {
	Checkpoint string `json:"checkpoint"`
}

var closingPrefix = []byte(`{"checkpoint":`)

// endPrefix begins the closing line of exports from releases before checkpoints existed.
var endPrefix = []byte(`{"end":`)

var errEarlierExport = fault.New(fault.Invalid, "the export was made by an earlier release, which closed it in another way: export the log again with this one")

// Export checks an export of [reader.Reader.Export]: a whole log, with From or Base the part after
// an entry, or with Tenant the entries of one tenant. An export without its closing line was cut,
// unless To or Unclosed is given. With To, it stops after To, or after the entry that accepts the loss of To. A log that ends before To is
// broken there; for a tenant, To is only an upper bound. Another error is fault.Invalid: a
// fingerprint is given, but nothing in the part that was read identifies the log.
func Export(r io.Reader, o Options) (Report, error) {
	_, report, err := verifyExport(r, o)
	return report, err
}

// verifyExport also returns the verifier, which has seen everything in the report.
func verifyExport(r io.Reader, o Options) (v *Verifier, report Report, err error) {
	if o.Base != nil || o.Tenant && o.From <= 1 {
		o.From = 0
	}
	v = NewVerifier(o)
	lines := bufio.NewScanner(r)
	lines.Buffer(make([]byte, 0, 64<<10), audit.MaxLine)
	lines.Split(splitLines)
	var end []byte
	for lines.Scan() {
		if end != nil {
			return nil, Report{}, v.orBroken("the export goes on after its closing line")
		}
		line := bytes.Clone(lines.Bytes())
		if bytes.HasPrefix(line, closingPrefix) {
			end = line
			continue
		}
		if bytes.HasPrefix(line, endPrefix) {
			return nil, Report{}, cmp.Or(v.Wait(), error(errEarlierExport))
		}
		if o.From > 1 || o.To > 0 {
			e, err := audit.ParseEntry(line)
			if err == nil && e.Sequence < o.From {
				continue
			}
			if err == nil && o.To > 0 && e.Sequence > o.To {
				if err := v.Wait(); err != nil {
					return nil, Report{}, err
				}
				if v.Next() <= o.To && !o.Tenant {
					_ = v.addLine(line) // it accepts the loss of To, or breaks the chain
				}
				break
			}
		}
		if err := v.addLine(line); err != nil {
			return nil, Report{}, cmp.Or(v.Wait(), err)
		}
	}
	if err := lines.Err(); err != nil {
		if errors.Is(err, bufio.ErrTooLong) {
			return nil, Report{}, v.orBroken("the line is too long for an entry")
		}
		return nil, Report{}, fmt.Errorf("reading the export: %w", err)
	}
	report, err = v.Finish()
	switch {
	case err != nil:
		return nil, Report{}, err
	case !o.Tenant && report.Sequence < o.To:
		return nil, Report{}, v.endsBefore(o.To)
	case end == nil && (o.To > 0 || o.Tenant && o.Unclosed):
		if err := v.named(); err != nil {
			return nil, Report{}, err
		}
		return v, report, nil
	case end == nil:
		return nil, Report{}, &audit.Broken{Sequence: v.Next(), Reason: fmt.Sprintf("the export was cut: its closing line is missing; export again, or verify up to %d to leave open what came after", report.Sequence)}
	}
	report, err = v.close(report, end)
	return v, report, err
}

// endsBefore returns the fault of a log that ends before the sequence to.
func (v *Verifier) endsBefore(to uint64) *audit.Broken {
	return &audit.Broken{Sequence: v.Next(), Reason: fmt.Sprintf("the log ends here: it was to be verified up to %d", to)}
}

var errNotNamed = fault.New(fault.Invalid, "a part of the log that neither begins with its first entry nor ends with its last line does not say whose it is, and was not held against the fingerprint: verify it to its end, or give the public key alone")

// named returns an error if a fingerprint was given but could not be compared with anything that
// was read.
func (v *Verifier) named() error {
	if v.options.Fingerprint != "" && v.ChainID == "" {
		return errNotNamed
	}
	return nil
}

// orBroken returns the earliest fault of what was read, or else a fault with this reason at the
// next sequence.
func (v *Verifier) orBroken(reason string) error {
	if err := v.Wait(); err != nil {
		return err
	}
	return &audit.Broken{Sequence: v.Next(), Reason: reason}
}

// close compares the closing line with the entries.
func (v *Verifier) close(report Report, line []byte) (Report, error) {
	var end ClosingLine
	err := json.Unmarshal(line, &end)
	if again, err2 := json.Marshal(end); err != nil || err2 != nil || !bytes.Equal(again, line) {
		return Report{}, &audit.Broken{Sequence: v.Next(), Reason: "the closing line is malformed"}
	}
	c, err := audit.ParseOwnCheckpoint([]byte(end.Checkpoint), v.Public)
	if errors.Is(err, audit.ErrCheckpointMalformed) {
		return Report{}, &audit.Broken{Sequence: v.Next(), Reason: "the closing line is malformed"}
	}
	if err != nil || v.ChainID != "" && c.ChainID != v.ChainID {
		return Report{}, &audit.Broken{Sequence: v.Next(), Reason: "the closing line does not verify"}
	}
	if v.options.Tenant {
		if c.Sequence < v.Head.Sequence {
			return Report{}, &audit.Broken{Sequence: v.Next(), Reason: fmt.Sprintf("the export goes on after its end: it says that it ends at %d", c.Sequence)}
		}
		if err := v.nameBy(c, &report); err != nil {
			return Report{}, err
		}
		return report, nil
	}
	if c.Sequence != v.Head.Sequence || c.Hash != v.Head.Hash {
		return Report{}, &audit.Broken{Sequence: v.Next(), Reason: fmt.Sprintf("the export was cut: it says that it ends at %d", c.Sequence)}
	}
	if v.IsComplete && !c.EqualIgnoringTime(v.Checkpoint()) {
		return Report{}, &audit.Broken{Sequence: v.Head.Sequence, Reason: "the closing checkpoint has another tree than the entries"}
	}
	if !v.IsComplete { // only the signature of the checkpoint vouches for the entries before the part
		report.Size, report.Root, report.Epoch = c.Size, c.Root, c.Epoch
		if err := v.nameBy(c, &report); err != nil {
			return Report{}, err
		}
	}
	return report, nil
}

// nameBy takes the chain ID of a part from a checkpoint that is signed with the log's key.
func (v *Verifier) nameBy(c audit.Checkpoint, r *Report) error {
	if v.ChainID != "" {
		return nil
	}
	v.ChainID = c.ChainID
	r.ChainID, r.Fingerprint = c.ChainID, audit.Fingerprint(c.ChainID, v.Public.Bytes())
	return v.checkPins(r.From)
}

// splitLines is [bufio.ScanLines] without its leniency about carriage returns: a line ends with one
// newline, and a carriage return before that is part of the line.
func splitLines(data []byte, atEOF bool) (advance int, token []byte, err error) {
	if i := bytes.IndexByte(data, '\n'); i >= 0 {
		return i + 1, data[:i], nil
	}
	if atEOF && len(data) > 0 {
		return len(data), data, nil // a line that was cut short does not parse
	}
	return 0, nil, nil
}
