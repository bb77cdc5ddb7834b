package audit

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/objects"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
)

// folder returns an archive of files, and its path.
func (f *fixture) folder() (Archive, string) {
	f.t.Helper()
	dir := f.t.TempDir()
	b, err := objects.Open(f.t.Context(), "file://"+dir, objects.SigningOptions{})
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { b.Close() })
	return b, dir
}

// old writes a log with entries of both kinds of signature that are due for the archive, and a few
// new entries. It returns the hashes of all.
func (f *fixture) old() map[uint64]string {
	f.t.Helper()
	f.log.SetSigning(SignBatches)
	f.fill(30)
	f.log.SetSigning(SignEntries)
	f.fill(10)
	f.log.SetSigning(SignBatches)
	f.fill(20)
	f.sealed(tenantB, "cred_sealed", "1", strings.Repeat("0", 64))
	f.advance(keep + 24*time.Hour + time.Second) // no later entry is waited for
	f.log.SetSigning(SignEntries)
	f.record(Event{Type: AuditRead, Outcome: Success, Principal: principal(tenantA), Resource: Resource{Type: LogResource}})
	return f.hashes()
}

// hashes returns the hashes of the entries in the database.
func (f *fixture) hashes() map[uint64]string {
	f.t.Helper()
	hashes := make(map[uint64]string)
	err := scanEntries(f.t.Context(), f.store, entryRange, func(row entryRow) error {
		e, err := decodeRow(row.row, row.batch)
		if err == nil {
			hashes[e.Sequence] = e.Hash
		}
		return err
	})
	if err != nil {
		f.t.Fatal(err)
	}
	return hashes
}

// restart opens the log as a new process does.
func (f *fixture) restart() {
	f.t.Helper()
	if err := f.store.Close(); err != nil {
		f.t.Fatal(err)
	}
	l := newParts(f.now)
	s, err := bolt.Open(f.path, bolt.Options{Hook: l.Commit})
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { s.Close() })
	if err := l.Use(f.t.Context(), rehearsing(f.t, s), f.log.signer, f.log.chain.chainID); err != nil {
		f.t.Fatal(err)
	}
	f.log, f.store = l, rehearsing(f.t, s)
}

func (f *fixture) segments() []Segment {
	f.t.Helper()
	var segments []Segment
	err := f.store.View(f.t.Context(), func(r store.Reader) (err error) {
		segments, err = Segments(r)
		return err
	})
	if err != nil {
		f.t.Fatal(err)
	}
	return segments
}

// whole fails the test unless every entry that was ever written is exactly once in the archive or
// in the database. It also verifies the database alone, and both together from the first entry on.
func (f *fixture) whole(a Archive, written map[uint64]string) {
	f.t.Helper()
	have := f.hashes()
	var archived uint64
	for _, s := range f.segments() {
		entries, _ := lines(f.t.(*testing.T), a, s)
		for _, line := range entries {
			e, err := ParseEntry(bytes.TrimSuffix(line, []byte("\n")))
			if err != nil {
				f.t.Fatal(err)
			}
			archived = e.Sequence
			have[e.Sequence] = e.Hash // an entry in both is being removed
		}
	}
	for sequence, hash := range written {
		if have[sequence] != hash {
			f.t.Fatalf("entry %d is neither in the archive nor in the database", sequence)
		}
	}
	report, err := f.verify()
	if err != nil {
		f.t.Fatalf("the database: %v", err)
	}
	if report.From <= archived {
		f.t.Errorf("the verification of the database begins at %d, and %d is archived", report.From, archived)
	}
	pinned := Options{Fingerprint: f.log.Fingerprint()}
	report, err = VerifyWithArchive(f.t.Context(), f.store, a, pinned)
	if err != nil {
		f.t.Fatalf("with the archive: %v", err)
	}
	if report.From != 1 || report.Entries != uint64(len(have)) || !report.Pinned {
		f.t.Errorf("with the archive: from %d, %d entries of %d, pinned %v", report.From, report.Entries, len(have), report.Pinned)
	}
}

// clean fails the test unless the only rows of archived entries in the database are one index row
// for each tenant, which was its newest when it was archived.
func (f *fixture) clean() {
	f.t.Helper()
	segments := f.segments()
	to := segments[len(segments)-1].To
	left := make(map[string]int)
	err := ScanAll(f.t.Context(), f.store, tenantRange, func(key, value []byte) error {
		row, err := decodeIndexRow(value)
		tenant := string(key[:len(key)-8])
		if row.sequence <= to {
			left[tenant]++
		}
		if left[tenant] > 1 {
			f.t.Errorf("the index row of entry %d is left, and another", row.sequence)
		}
		return err
	})
	for _, rng := range []store.Range{entryRange, batchRange} {
		err = errors.Join(err, ScanAll(f.t.Context(), f.store, rng, func(key, _ []byte) error {
			if sequence := sequenceOf(key[len(rng.From):]); sequence <= to {
				f.t.Errorf("%s%d is left", rng.From, sequence)
			}
			return nil
		}))
	}
	if err != nil {
		f.t.Fatal(err)
	}
}

// signedAgain returns the line of an entry with a new signature.
func (f *fixture) signedAgain(e *Entry) []byte {
	sum, err := e.digest()
	if err != nil {
		f.t.Fatal(err)
	}
	signature, err := f.log.signer.Sign(signingContext, sum[:])
	if err != nil {
		f.t.Fatal(err)
	}
	e.Signature = toBase64(signature)
	line, err := e.JSON()
	if err != nil {
		f.t.Fatal(err)
	}
	return append(line, '\n')
}

func (f *fixture) verifyAll(a Archive) {
	f.t.Helper()
	if _, err := VerifyWithArchive(f.t.Context(), f.store, a, Options{}); err != nil {
		f.t.Error(err)
	}
}
