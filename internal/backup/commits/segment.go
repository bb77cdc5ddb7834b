// Package commits ships a log of what the commits of an embedded store change into a bucket, and reads
// it, so that a backup can be brought up to a moment before the store was lost.
//
// # Logs
//
// A log begins together with a backup and has no gaps. Whatever would make one ends it, and another
// log begins, with another backup: when the list of what was not shipped is too long, when a release
// has written to the store that knows no logs, when the store was restored, or when another server,
// on a copy of the store, has written to the same log. A row of the store names its log, so a backup
// names the log that goes on after it ([Place]).
//
// # Segments
//
// A segment is the object commits/<chain id>/<log>/<ordinal>. It has a statement in clear text, which
// the identity key of the deployment signs, and records (package store/commit) that are encrypted to
// the recipients of backups. A segment names the one before, and is created, never replaced. So of two
// servers that write to one log, the second finds the segment of the first. And a segment that is
// missing, or another one in its place, is found by whoever reads the next one.
//
// What is missing at the end of a log is not found: that is what anchors of the audit log are for.
package commits

import (
	"bytes"
	"crypto/sha3"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/backup"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/frame"
	"github.com/latticekeep/latticekeep/internal/store/commit"
)

const (
	magic    = "latticekeep-commits-1\n"
	saidSize = 32 + 16 + 8 + 32 + 3*8 + 16 + 8 + 2*commit.HeadSize + 8 + 32

	// statementSize is the length of a statement in bytes.
	statementSize = len(magic) + saidSize + dualsig.SignatureSize
)

// statement says what a segment is, to whoever cannot open it: to the server that goes on with the
// log, and to a reader who looks for where to begin.
type statement struct {
	Chain           [32]byte // fingerprint of the audit chain
	Log             [16]byte
	Ordinal         uint64   // number of the segment in the log, from 1
	Previous        [32]byte // digest of the statement before; zeroes in the first one
	First, Last, At uint64   // commits of its records, and At of the last record
	Mark            [16]byte // random id that the store gave the commit At
	Time            time.Time
	Before, After   commit.Head // before its first record and after its last one
	Size            uint64      // length of the encrypted records in bytes
	Digest          [32]byte    // SHA3-256 of the encrypted records
}

// whole reports whether the rows are those of one commit after the segment.
func (s statement) whole() bool { return s.At == s.Last }

// said returns what the signature covers.
func (s statement) said() []byte {
	b := append(bytes.Clone(s.Chain[:]), s.Log[:]...)
	b = append(binary.BigEndian.AppendUint64(b, s.Ordinal), s.Previous[:]...)
	for _, n := range []uint64{s.First, s.Last, s.At} {
		b = binary.BigEndian.AppendUint64(b, n)
	}
	b = append(b, s.Mark[:]...)
	b = binary.BigEndian.AppendUint64(b, uint64(s.Time.UnixMicro()))
	b = s.After.Append(s.Before.Append(b))
	return append(binary.BigEndian.AppendUint64(b, s.Size), s.Digest[:]...)
}

// digest is what the next segment has as Previous.
func (s statement) digest() [32]byte { return sha3.Sum256(s.said()) }

// Signer signs with the identity key of a deployment. A keyring implements it.
type Signer interface {
	SignCommits(message []byte) ([]byte, error) // signs for backup.CommitsContext
	Identity() *dualsig.PublicKey
}

// seal returns a segment of the records. It fills in what the statement says of them.
func seal(s *statement, records []commit.Record, to []backup.Recipient, signer Signer) ([]byte, error) {
	var sealed bytes.Buffer
	out, err := backup.Encrypt(&sealed, to)
	if err != nil {
		return nil, err
	}
	for _, r := range records {
		if _, err := out.Write(r.Append(nil)); err != nil {
			return nil, fmt.Errorf("encrypting commits: %w", err)
		}
	}
	if err := out.Close(); err != nil {
		return nil, fmt.Errorf("encrypting commits: %w", err)
	}
	last := records[len(records)-1]
	s.First, s.Last, s.At, s.Time, s.After = records[0].First, last.Last, last.At, last.Time, last.Head
	s.Size, s.Digest = uint64(sealed.Len()), sha3.Sum256(sealed.Bytes())
	said := s.said()
	signature, err := signer.SignCommits(frame.Join(backup.CommitsContext, said))
	if err != nil {
		return nil, fmt.Errorf("signing commits: %w", err)
	}
	return bytes.Join([][]byte{[]byte(magic), said, signature, sealed.Bytes()}, nil), nil
}

var (
	errCut     = errors.New("it is cut off")
	errForeign = errors.New("it is none of a log of commits, or of a newer release")
	errForged  = errors.New("it is not signed by the deployment: it was changed, or somebody else made it")
	errChanged = errors.New("it was changed since it was written")
)

// parseStatement reads the statement at the beginning of a segment and verifies its signature.
func parseStatement(b []byte, identity *dualsig.PublicKey) (s statement, err error) {
	start := b[:min(len(b), len(magic))]
	if !strings.HasPrefix(magic, string(start)) {
		return s, errForeign
	}
	if len(b) < statementSize {
		return s, errCut
	}
	said := b[len(magic) : len(magic)+saidSize]
	if !identity.Verify(backup.CommitsContext, frame.Join(backup.CommitsContext, said), b[len(magic)+saidSize:statementSize]) {
		return s, errForged
	}
	take := func(n int) []byte {
		part := said[:n]
		said = said[n:]
		return part
	}
	number := func() uint64 { return binary.BigEndian.Uint64(take(8)) }
	copy(s.Chain[:], take(32))
	copy(s.Log[:], take(16))
	s.Ordinal = number()
	copy(s.Previous[:], take(32))
	s.First, s.Last, s.At = number(), number(), number()
	copy(s.Mark[:], take(16))
	s.Time = time.UnixMicro(int64(number())).UTC() //nolint:gosec // signed by the deployment
	s.Before, s.After = commit.ParseHead(take(commit.HeadSize)), commit.ParseHead(take(commit.HeadSize))
	s.Size = number()
	copy(s.Digest[:], take(32))
	return s, nil
}

// unseal returns the records of a segment, whose statement was read from it.
func (s statement) unseal(segment []byte, identities []backup.Identity) ([]commit.Record, error) {
	sealed := segment[statementSize:]
	switch {
	case uint64(len(sealed)) < s.Size:
		return nil, errCut
	case uint64(len(sealed)) != s.Size || sha3.Sum256(sealed) != s.Digest:
		return nil, errChanged
	}
	in, err := backup.Decrypt(bytes.NewReader(sealed), identities)
	if err != nil {
		return nil, err
	}
	plain, err := io.ReadAll(in)
	if err != nil {
		return nil, err
	}
	var records []commit.Record
	next, at := s.First, uint64(0)
	for len(plain) > 0 {
		var r commit.Record
		if r, plain, err = commit.Parse(plain); err != nil {
			return nil, err
		}
		if r.First != next || r.At < at {
			return nil, errors.New("its records do not follow each other")
		}
		records = append(records, r)
		next, at = r.Last+1, r.At
	}
	if n := len(records); n == 0 || records[n-1].Last != s.Last || records[n-1].At != s.At || records[n-1].Head != s.After {
		return nil, errors.New("its records are not those that it names")
	}
	return records, nil
}

// segmentName returns the name of a segment below the prefix of its log.
func segmentName(ordinal uint64) string { return fmt.Sprintf("%020d", ordinal) }

// ordinalOf returns the ordinal of a name. ok is false for objects that are no segments.
func ordinalOf(name string) (ordinal uint64, ok bool) {
	ordinal, err := strconv.ParseUint(name, 10, 64)
	return ordinal, err == nil && segmentName(ordinal) == name && ordinal > 0
}

// logPrefix returns how the names of the segments of a log begin, below the folder of the chain's logs.
func logPrefix(folder string, log [16]byte) string {
	return folder + hex.EncodeToString(log[:]) + "/"
}

// Folder returns where the logs of a chain are in the bucket of backups.
func Folder(chainID string) string { return "commits/" + chainID + "/" }
