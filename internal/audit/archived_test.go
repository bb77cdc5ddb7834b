package audit

import (
	"bytes"
	"errors"
	"fmt"
	"testing"

	"github.com/latticekeep/latticekeep/internal/store"
)

// inSegments returns a log in several segments. The first segment contains a lost range, so most of
// the entries about segments are archived themselves.
func inSegments(t *testing.T) (f *fixture, a Archive) {
	f = newFixture(t)
	a, _ = f.folder()
	for i := range 4 {
		f.fill(30)
		if i == 0 {
			f.rollBack(31, 40)
		}
		f.advance(keep + 2*lateness)
		f.fill(1)
		if _, err := (&Cutter{Log: f.log.Log, Reader: f.log.Reader, Archive: a, Keep: keep, most: 16}).Run(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	f.fill(20)
	f.follow()
	if _, err := f.verify(); err != nil || len(f.segments()) < 5 {
		t.Fatal(len(f.segments()), err)
	}
	return f, a
}

// Verification compares every bit of the rows about the archive with the entries about it, whether
// these entries are archived or not.
func TestRowsOfTheArchiveAreHeldAgainstTheEntries(t *testing.T) {
	f, a := inSegments(t)
	segments := f.segments()
	base, err := readBase(t.Context(), f.store)
	if err != nil {
		t.Fatal(err)
	}
	said := 0
	for _, e := range base.kept {
		if e.archives() {
			said++
		}
	}
	if said == 0 || said == len(segments) {
		t.Fatalf("the base keeps %d entries of %d segments", said, len(segments))
	}
	copied, o := copyStore(t, f.store), Options{PublicKey: f.log.signer.Public()}
	if _, err := VerifyStore(t.Context(), copied, o); err != nil {
		t.Fatal(err)
	}
	reported := func(what string, change func(tx store.Tx) error) {
		t.Helper()
		if _, ok := IsBroken(func() error { _, err := VerifyStore(t.Context(), copied.with(change), o); return err }()); !ok {
			t.Error(what, "is not reported")
		}
	}
	for i, s := range segments {
		key, row := archiveKey(s.From), s.encode()
		for _, at := range []int{0, 7, 8, 39, 40, 71, 72, len(row) - 1} {
			reported(fmt.Sprintf("byte %d of row %d", at, i), func(tx store.Tx) error {
				b := bytes.Clone(row)
				b[at] ^= 1
				return tx.Put(key, b)
			})
		}
		reported(fmt.Sprintf("the lack of row %d", i), func(tx store.Tx) error { return tx.Delete(key) })
		reported(fmt.Sprintf("row %d from elsewhere", i), func(tx store.Tx) error {
			return errors.Join(tx.Delete(key), tx.Put(archiveKey(s.From+1), row))
		})
	}
	first, second := segments[0], segments[1]
	reported("one row for two", func(tx store.Tx) error {
		second.From = first.From
		return errors.Join(tx.Delete(archiveKey(segments[1].From)), tx.Put(archiveKey(first.From), second.encode()))
	})
	if _, err := VerifyWithArchive(t.Context(), f.store, a, Options{}); err != nil {
		t.Error(err)
	}
}

// Only a signed base hides entries. No other row does.
func TestARowAloneHidesNothing(t *testing.T) {
	f := newFixture(t)
	f.fill(20)
	f.follow()
	before, _, err := f.log.Query(t.Context(), principal(tenantA), Query{Limit: 100})
	if err != nil {
		t.Fatal(err)
	}
	put := func(key, row []byte) {
		t.Helper()
		if err := f.store.Update(t.Context(), func(tx store.Tx) error { return tx.Put(key, row) }); err != nil {
			t.Fatal(err)
		}
	}
	put(archiveKey(1), Segment{From: 1, To: 15, Name: "x"}.encode())
	f.restart()
	after, _, err := f.log.Query(t.Context(), principal(tenantA), Query{Limit: 100})
	if err != nil || len(after) != len(before)+1 { // plus one entry for the query
		t.Errorf("%d entries, then %d: %v", len(before), len(after), err)
	}
	if to, err := f.log.Archived(t.Context()); err != nil || to != 0 {
		t.Error(to, err)
	}
	if p, err := f.log.Verify(t.Context()); err != nil || p.Status != ProofVerified {
		t.Error(p, err)
	}
	if _, ok := IsBroken(func() error { _, err := f.verify(); return err }()); !ok {
		t.Error("the row is not reported")
	}
	// A base that is signed with another key is an error, and hides nothing either.
	other := newFixture(t)
	other.fill(20)
	_, row := other.baseAt(15)
	put(baseKey, row)
	if entries, _, err := f.log.Query(t.Context(), principal(tenantA), Query{Limit: 100}); !errors.Is(err, errDamagedLog) {
		t.Errorf("%d entries, %v", len(entries), err)
	}
}
