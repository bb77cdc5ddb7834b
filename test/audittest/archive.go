package audittest

import (
	"bytes"
	"errors"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/chain"
	"github.com/latticekeep/latticekeep/internal/audit/entries"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/objects"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Folder returns an archive of files, and its path.
func (f *Fixture) Folder() (audit.Archive, string) {
	f.T.Helper()
	dir := f.T.TempDir()
	b, err := objects.Open(f.T.Context(), "file://"+dir, objects.SigningOptions{})
	if err != nil {
		f.T.Fatal(err)
	}
	f.T.Cleanup(func() { b.Close() })
	return b, dir
}

// Old writes a log with entries of both kinds of signature that are due for the archive, and a few
// new entries. It returns the hashes of all.
func (f *Fixture) Old() map[uint64]string {
	f.T.Helper()
	f.Log.SetSigning(writer.SignBatches)
	f.Fill(30)
	f.Log.SetSigning(writer.SignEntries)
	f.Fill(10)
	f.Log.SetSigning(writer.SignBatches)
	f.Fill(20)
	f.Sealed(TenantB, "cred_sealed", "1", strings.Repeat("0", 64))
	f.Advance(Keep + 24*time.Hour + time.Second) // no later entry is waited for
	f.Log.SetSigning(writer.SignEntries)
	f.Record(audit.Event{Type: audit.AuditRead, Outcome: audit.Success, Principal: Principal(TenantA), Resource: audit.Resource{Type: audit.LogResource}})
	return f.Hashes()
}

// Hashes returns the hashes of the entries in the database.
func (f *Fixture) Hashes() map[uint64]string {
	f.T.Helper()
	hashes := make(map[uint64]string)
	err := entries.ScanAll(f.T.Context(), f.Store, audit.EntryRange, func(row entries.Row) error {
		e, err := DecodeRow(row.Row, row.Batch)
		if err == nil {
			hashes[e.Sequence] = e.Hash
		}
		return err
	})
	if err != nil {
		f.T.Fatal(err)
	}
	return hashes
}

// Restart opens the log as a new process does.
func (f *Fixture) Restart() {
	f.T.Helper()
	if err := f.Store.Close(); err != nil {
		f.T.Fatal(err)
	}
	l := NewParts(f.Now)
	s := f.Opens(l.Commit)
	if err := l.Use(f.T.Context(), Rehearsing(f.T, s), f.Log.Signer, f.Log.Chain.ChainID); err != nil {
		f.T.Fatal(err)
	}
	f.Log, f.Store = l, Rehearsing(f.T, s)
}

// Segments returns the segments that the database names, oldest first.
func (f *Fixture) Segments() []audit.Segment {
	f.T.Helper()
	var segments []audit.Segment
	err := f.Store.View(f.T.Context(), func(r store.Reader) (err error) {
		segments, err = audit.Segments(r)
		return err
	})
	if err != nil {
		f.T.Fatal(err)
	}
	return segments
}

// Clean fails the test unless the only rows of archived entries in the database, packed or not, are
// one index row for each tenant, which was its newest when it was archived.
func (f *Fixture) Clean() {
	f.T.Helper()
	segments := f.Segments()
	to := segments[len(segments)-1].To
	left := make(map[string]int)
	err := audit.ScanAll(f.T.Context(), f.Store, audit.TenantRange, func(key, value []byte) error {
		row, err := audit.DecodeIndexRow(value)
		tenant := string(key[:len(key)-8])
		if row.Sequence <= to {
			left[tenant]++
		}
		if left[tenant] > 1 {
			f.T.Errorf("the index row of entry %d is left, and another", row.Sequence)
		}
		return err
	})
	for _, rng := range []store.Range{audit.EntryRange, audit.BatchRange} {
		err = errors.Join(err, audit.ScanAll(f.T.Context(), f.Store, rng, func(key, _ []byte) error {
			if sequence := audit.SequenceOf(key[len(rng.From):]); sequence <= to {
				f.T.Errorf("%s%d is left", rng.From, sequence)
			}
			return nil
		}))
	}
	err = errors.Join(err, entries.ScanAll(f.T.Context(), f.Store, store.Range{From: audit.EntryRange.From, To: audit.EntryKey(to + 1)}, func(row entries.Row) error {
		f.T.Errorf("entry %d is left in a pack", audit.SequenceOf(row.Key[len(audit.EntryRange.From):]))
		return nil
	}))
	base, failed := chain.ReadBase(f.T.Context(), f.Store)
	err = errors.Join(err, failed, audit.ScanAll(f.T.Context(), f.Store, audit.SummaryRange, func(key, _ []byte) error {
		tenant, block, _ := bytes.Cut(key[len(audit.SummaryRange.From):], []byte("/"))
		if t := base.Tenants[string(tenant)]; t != nil && audit.EndOf(audit.SequenceOf(block)) <= t.Sequence {
			f.T.Errorf("the summary %q is left", key)
		}
		return nil
	}))
	if err != nil {
		f.T.Fatal(err)
	}
}
