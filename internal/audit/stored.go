package audit

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/go-json-experiment/json"

	"github.com/latticekeep/latticekeep/internal/frame"
	"github.com/latticekeep/latticekeep/internal/store"
)

// A page is what one snapshot reads at the most, so that a long log is no long
// transaction, and large rows are not many at a time.
const (
	pageRows  = 500
	pageBytes = 4 << 20
)

// ScanAll visits every row of the range in order, in snapshots of a page each.
// Rows that are only ever added at the end read the same as in one snapshot.
func ScanAll(ctx context.Context, s store.Store, rng store.Range, visit func(key, value []byte) error) error {
	type row struct{ key, value []byte }
	for {
		var rows []row
		size, full := 0, false
		err := s.View(ctx, func(r store.Reader) error {
			return r.Scan(rng, func(key, value []byte) bool {
				rows = append(rows, row{bytes.Clone(key), bytes.Clone(value)})
				size += len(value)
				full = len(rows) == pageRows || size >= pageBytes
				return !full
			})
		})
		if err != nil {
			return err
		}
		for _, row := range rows { // visit may take its time: the snapshot is over
			if err := visit(row.key, row.value); err != nil {
				return err
			}
		}
		if !full {
			return nil
		}
		rng.From = append(rows[len(rows)-1].key, 0)
	}
}

// VerifyStore checks the whole log as it lies in the store, from its first
// entry to its head, and the rows derived from it. Nothing may write to the
// store meanwhile. A [Broken] error names the first bad sequence.
func VerifyStore(ctx context.Context, s store.Store, o Options) (Report, error) {
	o.Tenant = false
	v := NewVerifier(o)
	index := make(map[string]indexRow)
	err := ScanAll(ctx, s, entryRange, func(key, value []byte) error {
		e, err := v.addRow(key, value)
		if err != nil {
			return err
		}
		index[string(tenantKey(e.TenantID, e.TenantSequence))] = indexRow{v.head, e.EventType, e.Actor.ID}
		return nil
	})
	if err != nil {
		return Report{}, err
	}
	report, err := v.Finish()
	if err != nil {
		return Report{}, err
	}
	var head link
	err = s.View(ctx, func(r store.Reader) error {
		b, err := r.Get(headKey)
		if err == nil {
			head, err = decodeLink(b)
		}
		return err
	})
	switch {
	case err != nil:
		return Report{}, fmt.Errorf("reading the head of the chain: %w", err)
	case head.sequence > v.head.sequence:
		return Report{}, &Broken{v.head.sequence + 1, fmt.Sprintf("the log was cut: its head is at %d", head.sequence)}
	case head != v.head:
		return Report{}, &Broken{v.head.sequence, "the head of the chain is not the last entry"}
	}
	err = ScanAll(ctx, s, tenantRange, func(key, value []byte) error {
		want, ok := index[string(key)]
		if !ok {
			return &Broken{sequenceOf(value), "a tenant's index names an entry that is not in the log"}
		}
		if !bytes.Equal(value, want.encode()) {
			return &Broken{want.sequence, "a tenant's index does not agree with the entry"}
		}
		delete(index, string(key))
		return nil
	})
	if err != nil {
		return Report{}, err
	}
	if missing := (&Broken{Reason: "the entry is missing from its tenant's index"}); len(index) > 0 {
		for _, row := range index {
			if missing.Sequence == 0 || row.sequence < missing.Sequence {
				missing.Sequence = row.sequence
			}
		}
		return Report{}, missing
	}
	return report, verifyAnchors(ctx, s, report)
}

// verifyAnchors holds the anchors of live credentials against the replay.
func verifyAnchors(ctx context.Context, s store.Store, report Report) error {
	seen := 0
	anchors := make(map[string]link, len(report.Credentials))
	for key, state := range report.Credentials {
		if !state.Deleted {
			anchors[string(anchorKey(string(key.Tenant), key.Credential))] = state.anchor
		}
	}
	err := ScanAll(ctx, s, anchorRange, func(key, value []byte) error {
		want, live := anchors[string(key)]
		if !live {
			return nil // of a deleted credential
		}
		seen++
		if !bytes.Equal(value, want.encode()) {
			return &Broken{want.sequence, "a credential's anchor does not agree with the entry"}
		}
		return nil
	})
	if err == nil && seen != len(anchors) {
		err = &Broken{report.Sequence, "a credential's anchor is missing"}
	}
	return err
}

func sequenceOf(indexValue []byte) uint64 {
	if len(indexValue) < 8 {
		return 0
	}
	return binary.BigEndian.Uint64(indexValue)
}

// closing is the last line of an export: a signed statement of where it ends,
// so that an export that lost its last lines is seen to have lost them.
type closing struct {
	ChainID   string `json:"chain_id"`
	Hash      string `json:"hash"`
	KeyID     string `json:"key_id"`
	Sequence  uint64 `json:"sequence"`
	Signature string `json:"signature"` // base64 ML-DSA-65
}

type closingLine struct {
	End closing `json:"end"`
}

const closingContext = "latticekeep/export-end/v1"

func (c closing) signed() []byte {
	return frame.Join(closingContext, []byte(c.ChainID), []byte(c.KeyID), frame.Uint64(c.Sequence), []byte(c.Hash))
}

// line returns the closing line in its only form.
func (c closing) line() ([]byte, error) { return json.Marshal(closingLine{c}) }

// Export writes the whole log as JSON lines: each entry in its canonical form,
// oldest first, and a signed line that says where the export ends. It verifies
// what it writes, up to the head, and signs nothing about a log that does not
// hold: the error is then a [Broken].
func (l *Log) Export(ctx context.Context, w io.Writer) error {
	out := bufio.NewWriter(w)
	v := NewVerifier(Options{PublicKey: l.signer.Public()})
	head, err := l.head(ctx)
	if err != nil {
		return fmt.Errorf("exporting the log: %w", err)
	}
	err = ScanAll(ctx, l.store, entryRange, func(key, value []byte) error {
		if v.Next() > head.sequence {
			return errEnd // written since
		}
		e, err := v.addRow(key, value)
		if err != nil {
			return err
		}
		line, err := e.JSON()
		if err == nil {
			_, err = out.Write(append(line, '\n'))
		}
		return err
	})
	if err != nil && !errors.Is(err, errEnd) {
		return fmt.Errorf("exporting the log: %w", err)
	}
	report, err := v.Finish()
	if err == nil && v.head != head {
		err = &Broken{v.Next(), fmt.Sprintf("the log was cut: its head is at %d", head.sequence)}
	}
	if err != nil {
		return fmt.Errorf("exporting the log: %w", err)
	}
	end := closing{ChainID: l.chainID, Hash: report.Hash, KeyID: l.keyID, Sequence: report.Sequence}
	signature, err := l.signer.Sign(closingContext, end.signed())
	if err != nil {
		return fmt.Errorf("signing the end of the export: %w", err)
	}
	end.Signature = base64.StdEncoding.EncodeToString(signature)
	line, err := end.line()
	if err != nil {
		return err
	}
	if _, err := out.Write(append(line, '\n')); err != nil {
		return fmt.Errorf("exporting the log: %w", err)
	}
	return out.Flush()
}

var errEnd = errors.New("the end of the export")

// addRow checks the next row of the store.
func (v *Verifier) addRow(key, value []byte) (*Entry, error) {
	if !bytes.Equal(key, entryKey(v.Next())) {
		return nil, &Broken{v.Next(), "the entry is missing, or a row stands where none belongs"}
	}
	e, err := decodeRow(value)
	if err != nil {
		return nil, &Broken{v.Next(), err.Error()}
	}
	return e, v.Add(e)
}

// maxLine bounds one line of an export: an entry is a few KiB.
const maxLine = 1 << 20

// VerifyExport checks a log that [Log.Export] wrote.
func VerifyExport(r io.Reader, o Options) (Report, error) {
	o.Tenant = false
	v := NewVerifier(o)
	lines := bufio.NewScanner(r)
	lines.Buffer(make([]byte, 0, 16<<10), maxLine)
	lines.Split(splitLines)
	var end *closing
	for lines.Scan() {
		line := lines.Bytes()
		if end != nil {
			return Report{}, &Broken{v.Next(), "the export goes on after its closing line"}
		}
		if bytes.HasPrefix(line, []byte(`{"end":`)) {
			var c closingLine
			err := json.Unmarshal(line, &c)
			if again, err2 := c.End.line(); err != nil || err2 != nil || !bytes.Equal(again, line) {
				return Report{}, &Broken{v.Next(), "the closing line is malformed"}
			}
			end = &c.End
			continue
		}
		e, err := ParseEntry(line)
		if err != nil {
			return Report{}, &Broken{v.Next(), err.Error()}
		}
		if err := v.Add(e); err != nil {
			return Report{}, err
		}
	}
	if err := lines.Err(); err != nil {
		if errors.Is(err, bufio.ErrTooLong) {
			return Report{}, &Broken{v.Next(), "the line is too long for an entry"}
		}
		return Report{}, fmt.Errorf("reading the export: %w", err)
	}
	report, err := v.Finish()
	if err != nil {
		return Report{}, err
	}
	if end == nil {
		return Report{}, &Broken{v.Next(), "the export was cut: its closing line is missing"}
	}
	signature, ok := decodeBase64(end.Signature)
	if !ok || end.KeyID != v.keyID || end.ChainID != report.ChainID ||
		!report.PublicKey.Verify(closingContext, end.signed(), signature) {
		return Report{}, &Broken{v.Next(), "the closing line does not verify"}
	}
	if end.Sequence != report.Sequence || end.Hash != report.Hash {
		return Report{}, &Broken{v.Next(), fmt.Sprintf("the export was cut: it says that it ends at %d", end.Sequence)}
	}
	return report, nil
}

// splitLines is [bufio.ScanLines] without its leniency: a line ends in one
// newline, the last one too, and a carriage return is part of it.
func splitLines(data []byte, atEOF bool) (advance int, token []byte, err error) {
	if i := bytes.IndexByte(data, '\n'); i >= 0 {
		return i + 1, data[:i], nil
	}
	if atEOF && len(data) > 0 {
		return len(data), data, nil // an entry cut short parses as little as one with junk
	}
	return 0, nil, nil
}

// VerifyTenant checks one tenant's part of the chain, given oldest first, as a
// tenant reads it over the interface.
func VerifyTenant(entries []Entry, o Options) (Report, error) {
	o.Tenant = true
	v := NewVerifier(o)
	for i := range entries {
		if err := v.Add(&entries[i]); err != nil {
			return Report{}, err
		}
	}
	return v.Finish()
}
