package keeper

import (
	"bytes"
	"errors"
	"fmt"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/chain"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/audittest"
)

// inSegments returns a log in several segments. The first segment contains a lost range, so most of
// the entries about segments are archived themselves.
func inSegments(t *testing.T) (f *audittest.Fixture, a audit.Archive) {
	f = audittest.NewFixture(t)
	a, _ = f.Folder()
	for i := range 4 {
		f.Fill(30)
		if i == 0 {
			f.RollBack(31, 40)
		}
		f.Advance(audittest.Keep + 2*lateness)
		f.Fill(1)
		if _, err := (&Cutter{Log: f.Log.Log, Reader: f.Log.Reader, Archive: a, Keep: audittest.Keep, most: 16}).Run(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	f.Fill(20)
	f.Follow()
	if _, err := f.Verify(); err != nil || len(f.Segments()) < 5 {
		t.Fatal(len(f.Segments()), err)
	}
	return f, a
}

// Verification compares every bit of the rows about the archive with the entries about it, whether
// these entries are archived or not.
func TestRowsOfTheArchiveAreHeldAgainstTheEntries(t *testing.T) {
	f, a := inSegments(t)
	segments := f.Segments()
	base, err := chain.ReadBase(t.Context(), f.Store)
	if err != nil {
		t.Fatal(err)
	}
	said := 0
	for _, e := range base.Kept {
		if e.Archives() {
			said++
		}
	}
	if said == 0 || said == len(segments) {
		t.Fatalf("the base keeps %d entries of %d segments", said, len(segments))
	}
	copied, o := audittest.CopyStore(t, f.Store), verify.Options{PublicKey: f.Log.Signer.Public()}
	if _, err := verify.Store(t.Context(), copied, o); err != nil {
		t.Fatal(err)
	}
	reported := func(what string, change func(tx store.Tx) error) {
		t.Helper()
		if _, ok := audit.IsBroken(func() error { _, err := verify.Store(t.Context(), copied.With(change), o); return err }()); !ok {
			t.Error(what, "is not reported")
		}
	}
	for i, s := range segments {
		key, row := audit.ArchiveKey(s.From), s.Encode()
		for _, at := range []int{0, 7, 8, 39, 40, 71, 72, len(row) - 1} {
			reported(fmt.Sprintf("byte %d of row %d", at, i), func(tx store.Tx) error {
				b := bytes.Clone(row)
				b[at] ^= 1
				return tx.Put(key, b)
			})
		}
		reported(fmt.Sprintf("the lack of row %d", i), func(tx store.Tx) error { return tx.Delete(key) })
		reported(fmt.Sprintf("row %d from elsewhere", i), func(tx store.Tx) error {
			return errors.Join(tx.Delete(key), tx.Put(audit.ArchiveKey(s.From+1), row))
		})
	}
	first, second := segments[0], segments[1]
	reported("one row for two", func(tx store.Tx) error {
		second.From = first.From
		return errors.Join(tx.Delete(audit.ArchiveKey(segments[1].From)), tx.Put(audit.ArchiveKey(first.From), second.Encode()))
	})
	if _, err := verify.StoreWithArchive(t.Context(), f.Store, a, verify.Options{}); err != nil {
		t.Error(err)
	}
}

// Only a signed base hides entries. No other row does.
func TestARowAloneHidesNothing(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Fill(20)
	f.Follow()
	before, _, err := f.Log.Query(t.Context(), audittest.Principal(audittest.TenantA), reader.Query{Limit: 100})
	if err != nil {
		t.Fatal(err)
	}
	put := func(key, row []byte) {
		t.Helper()
		if err := f.Store.Update(t.Context(), func(tx store.Tx) error { return tx.Put(key, row) }); err != nil {
			t.Fatal(err)
		}
	}
	put(audit.ArchiveKey(1), audit.Segment{From: 1, To: 15, Name: "x"}.Encode())
	f.Restart()
	after, _, err := f.Log.Query(t.Context(), audittest.Principal(audittest.TenantA), reader.Query{Limit: 100})
	if err != nil || len(after) != len(before)+1 { // plus one entry for the query
		t.Errorf("%d entries, then %d: %v", len(before), len(after), err)
	}
	if to, err := f.Log.Archived(t.Context()); err != nil || to != 0 {
		t.Error(to, err)
	}
	if p, err := f.Log.Verify(t.Context()); err != nil || p.Status != verify.ProofVerified {
		t.Error(p, err)
	}
	if _, ok := audit.IsBroken(func() error { _, err := f.Verify(); return err }()); !ok {
		t.Error("the row is not reported")
	}
	// A base that is signed with another key is an error, and hides nothing either.
	other := audittest.NewFixture(t)
	other.Fill(20)
	_, row := other.BaseAt(15)
	put(audit.BaseKey, row)
	if entries, _, err := f.Log.Query(t.Context(), audittest.Principal(audittest.TenantA), reader.Query{Limit: 100}); !errors.Is(err, audit.ErrDamagedLog) {
		t.Errorf("%d entries, %v", len(entries), err)
	}
}
