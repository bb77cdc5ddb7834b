package app

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/objects"
)

// exportInput is an export that is read from its beginning more than once.
type exportInput struct{ *os.File }

// openInput opens an export. Standard input is kept in a temporary file.
func openInput(stdin io.Reader, file string) (f exportInput, done func(), err error) {
	if file != "-" {
		in, err := os.Open(file)
		if err != nil {
			return exportInput{}, nil, fmt.Errorf("opening the export: %w", err)
		}
		return exportInput{in}, func() { _ = in.Close() }, nil
	}
	kept, err := os.CreateTemp("", "latticekeep-export-*")
	if err != nil {
		return exportInput{}, nil, fmt.Errorf("keeping the export: %w", err)
	}
	done = func() { _, _ = kept.Close(), os.Remove(kept.Name()) }
	if _, err := io.Copy(kept, stdin); err != nil {
		done()
		return exportInput{}, nil, fmt.Errorf("reading the export: %w", err)
	}
	return exportInput{kept}, done, nil
}

// each visits the lines until visit returns false.
func (f exportInput) each(visit func(line []byte) bool) error {
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return fmt.Errorf("reading the export: %w", err)
	}
	lines := bufio.NewScanner(f)
	lines.Buffer(make([]byte, 0, 64<<10), maxLine)
	for lines.Scan() && visit(lines.Bytes()) {
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("reading the export: %w", err)
	}
	return nil
}

// first returns the first entry, and nil when the first line is none.
func (f exportInput) first() (e *audit.Entry, err error) {
	err = f.each(func(line []byte) bool {
		e, _ = audit.ParseEntry(bytes.Clone(line))
		return false
	})
	if errors.Is(err, bufio.ErrTooLong) {
		return nil, nil
	}
	return e, err
}

// keyIn returns the key that an entry names, as the first one of the log and of
// each tenant does.
func keyIn(e *audit.Entry) (serverKey, bool) {
	if e == nil || e.Attributes["chain_id"] == "" {
		return serverKey{}, false
	}
	text := e.Attributes["public_key"]
	raw, err := base64.StdEncoding.DecodeString(text)
	if err != nil || base64.StdEncoding.EncodeToString(raw) != text { // it has one spelling
		return serverKey{}, false
	}
	public, err := dualsig.ParsePublicKey(raw)
	return serverKey{e.Attributes["chain_id"], public}, err == nil
}

// isTenants reports whether an export that begins with the entry is that of one
// tenant: no tenant's first entry is that of the log, but the system's.
func isTenants(first *audit.Entry) bool {
	_, named := keyIn(first)
	return named && first.Sequence > 1 && first.TenantSequence == 1
}

// logVerifier verifies the log of an export or of a running server.
type logVerifier struct {
	archive string // URL of the bucket with the entries before those of the export; empty for none
	tenant  string // the export must be of this tenant; empty for any
}

// verifyFile verifies an export: that of a tenant when it begins with one's first
// entry, and no tenant's is the log's first.
func (v *logVerifier) verifyFile(ctx context.Context, stdin io.Reader, file string, a audit.Options) (audit.Report, error) {
	f, done, err := openInput(stdin, file)
	if err != nil {
		return audit.Report{}, err
	}
	defer done()
	return v.verifyOpen(ctx, f, a)
}

func (v *logVerifier) verifyOpen(ctx context.Context, f exportInput, a audit.Options) (audit.Report, error) {
	first, err := f.first()
	if err != nil {
		return audit.Report{}, err
	}
	key, named := keyIn(first)
	if a.From > 1 && a.PublicKey == nil && named {
		if a.Fingerprint != "" && a.Fingerprint != key.fingerprint() {
			return audit.Report{}, errAnotherLog(first.Sequence)
		}
		a.PublicKey, a.Fingerprint = key.public, ""
	}
	a.Tenant = v.tenant != "" || v.archive == "" && a.From <= 1 && isTenants(first)
	if v.archive != "" && first != nil && first.Sequence > 1 {
		return v.behindArchive(ctx, f, first, a)
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return audit.Report{}, fmt.Errorf("reading the export: %w", err)
	}
	report, err := audit.VerifyExport(f, a)
	switch broken, ok := audit.IsBroken(err); {
	case ok && broken.Sequence == 1 && first != nil && first.Sequence > 1 && a.From <= 1 && !a.Tenant:
		return audit.Report{}, fmt.Errorf("%w; if it goes on behind archived entries, give --archive, or --from %d to verify this part alone", err, first.Sequence)
	case err != nil:
		return audit.Report{}, err
	case v.tenant != "" && report.Tenant != v.tenant:
		return audit.Report{}, fmt.Errorf("the export is of tenant %q", report.Tenant)
	}
	return report, nil
}

// behindArchive verifies an export that goes on behind archived entries, those
// included.
func (v *logVerifier) behindArchive(ctx context.Context, f exportInput, first *audit.Entry, a audit.Options) (audit.Report, error) {
	bucket, err := objects.OpenExisting(ctx, v.archive)
	if err != nil {
		return audit.Report{}, fmt.Errorf("--archive: %w", err)
	}
	defer bucket.Close()
	segments, err := findSegments(ctx, bucket, f, first)
	if err != nil {
		return audit.Report{}, err
	}
	archived, base, err := audit.VerifyArchive(ctx, bucket, segments, a)
	if err != nil {
		return audit.Report{}, err
	}
	if a.Base = base; archived.Since != nil {
		a.Since = nil
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return audit.Report{}, fmt.Errorf("reading the export: %w", err)
	}
	report, err := audit.VerifyExport(f, a)
	if err != nil {
		return audit.Report{}, err
	}
	if report.From, report.Entries = archived.From, report.Entries+archived.Entries; archived.Since != nil {
		report.Since = archived.Since
	}
	return report, nil
}

// findSegments returns what lies in the archive before an export, oldest first. The
// log says of each segment in a later entry where it is, so that the newest ones
// are named in the export, and those before in them. Nothing that is returned was
// verified.
func findSegments(ctx context.Context, bucket *objects.Bucket, f exportInput, first *audit.Entry) ([]audit.Segment, error) {
	known := make(map[uint64]audit.Segment) // by their ends
	note := func(line []byte) bool {
		if e, err := audit.ParseEntry(bytes.Clone(line)); err == nil {
			if s, ok := segmentIn(e); ok {
				known[s.To] = s
			}
		}
		return true
	}
	if err := f.each(note); err != nil {
		return nil, err
	}
	var segments []audit.Segment
	for next := first; next.Sequence > 1; {
		var s audit.Segment
		for to := range known {
			if to < next.Sequence && to > s.To {
				s = known[to]
			}
		}
		hash, err := hex.DecodeString(next.PreviousHash)
		if s.To == 0 || err != nil || len(hash) != len(s.Hash) {
			return nil, &audit.Broken{Sequence: 1, Reason: fmt.Sprintf("no entry from %d on says where those before it are archived", next.Sequence)}
		}
		s.Hash = [32]byte(hash)
		segments = append([]audit.Segment{s}, segments...)
		data, err := bucket.Get(ctx, s.Name)
		if err != nil {
			return nil, fmt.Errorf("reading %s: %w", s.Name, err)
		}
		begins := (*audit.Entry)(nil)
		err = eachLine(data, func(line []byte) bool {
			if begins == nil {
				begins, _ = audit.ParseEntry(bytes.Clone(line))
			}
			return begins != nil && note(line)
		})
		if err != nil || begins == nil || begins.Sequence != s.From || begins.Sequence >= next.Sequence {
			return nil, &audit.Broken{Sequence: s.From, Reason: "the object " + s.Name + " is not the segment that the log names"}
		}
		next = begins
	}
	return segments, nil
}

// eachLine visits the lines of a segment's object.
func eachLine(object []byte, visit func(line []byte) bool) error {
	zip, err := gzip.NewReader(bytes.NewReader(object))
	if err != nil {
		return err
	}
	lines := bufio.NewScanner(io.LimitReader(zip, audit.MaxSegment)) // what it is compressed from is its writer's word
	lines.Buffer(make([]byte, 0, 64<<10), maxLine)
	for lines.Scan() && visit(lines.Bytes()) {
	}
	return lines.Err()
}

// segmentIn returns the segment that an entry says was archived.
func segmentIn(e *audit.Entry) (s audit.Segment, ok bool) {
	if e.EventType != audit.LogArchived || e.Outcome != audit.Success || e.TenantID != string(authz.SystemTenant) {
		return s, false
	}
	from, err1 := strconv.ParseUint(e.Attributes["from"], 10, 64)
	to, err2 := strconv.ParseUint(e.Attributes["to"], 10, 64)
	digest, err3 := hex.DecodeString(e.Attributes["sha256"])
	if errors.Join(err1, err2, err3) != nil || from == 0 || to < from || len(digest) != len(s.Digest) {
		return s, false
	}
	return audit.Segment{From: from, To: to, Digest: [32]byte(digest), Name: e.Attributes["object"]}, true
}
