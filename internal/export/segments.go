package export

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/objects"
)

// findSegments returns the archived segments before an export, oldest first. A later entry of the
// log names each segment, so the export names the newest segments, and these name the earlier ones.
// The result is not verified.
func findSegments(ctx context.Context, bucket *objects.Bucket, f Input, first *audit.Entry) ([]audit.Segment, error) {
	known := make(map[uint64]audit.Segment) // segments by their last sequence
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

// archivedBefore says where the entries before an export are. Error: an [audit.Broken] if no entry of
// the export says that they were archived.
func archivedBefore(f Input, first *audit.Entry) (line string, err error) {
	var newest audit.Segment
	by := uint64(0) // the entry that says so
	err = f.each(func(line []byte) bool {
		if e, err := audit.ParseEntry(bytes.Clone(line)); err == nil {
			if s, ok := segmentIn(e); ok && s.To > newest.To && s.To < first.Sequence {
				newest, by = s, e.Sequence
			}
		}
		return true
	})
	// The name has the beginning of the hash of the segment's last entry.
	if err == nil && !strings.HasSuffix(newest.Name, fmt.Sprintf("-%.16s.jsonl.gz", first.PreviousHash)) {
		err = &audit.Broken{Sequence: 1, Reason: fmt.Sprintf("no entry from %d on says that those before it are archived", first.Sequence)}
	}
	return fmt.Sprintf("not verified: entries 1 to %d, which are in the archive, as entry %d says; --archive URL verifies them too", newest.To, by), err
}

// eachLine visits the lines of an archived segment.
func eachLine(object []byte, visit func(line []byte) bool) error {
	zip, err := gzip.NewReader(bytes.NewReader(object))
	if err != nil {
		return err
	}
	lines := bufio.NewScanner(io.LimitReader(zip, audit.MaxSegment)) // bounds the output, because the object comes from an untrusted writer
	lines.Buffer(make([]byte, 0, 64<<10), maxLine)
	for lines.Scan() {
		if !visit(lines.Bytes()) {
			break
		}
	}
	return lines.Err()
}

// segmentIn returns the segment that an entry of type LogArchived names.
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
