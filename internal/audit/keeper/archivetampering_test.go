package keeper

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/chain"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/fault"
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

// tampering is an archive that an attacker changes.
type tampering struct {
	audit.Archive
	put func(ctx context.Context, name string, data []byte) error
	get func(ctx context.Context, name string) ([]byte, error)
}

func (a tampering) Put(ctx context.Context, name string, data []byte) error {
	if a.put != nil {
		return a.put(ctx, name, data)
	}
	return a.Archive.Put(ctx, name, data)
}

func (a tampering) Get(ctx context.Context, name string) ([]byte, error) {
	if a.get != nil {
		return a.get(ctx, name)
	}
	return a.Archive.Get(ctx, name)
}

func TestNothingIsCutThatTheArchiveDoesNotHold(t *testing.T) {
	f := audittest.NewFixture(t)
	good, _ := f.Folder()
	written := f.Old()
	text := func(data []byte) (lines [][]byte) {
		err := audit.Unzip(data, func(r io.Reader) error {
			b, err := io.ReadAll(r)
			lines = bytes.SplitAfter(b, []byte("\n"))
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		return lines[:len(lines)-1]
	}
	returning := func(alter func(data []byte) []byte) tampering {
		return tampering{Archive: good, get: func(ctx context.Context, name string) ([]byte, error) {
			data, err := good.Get(ctx, name)
			if err != nil {
				return nil, err
			}
			return alter(data), nil
		}}
	}
	hanging, cancel := context.WithCancel(t.Context())
	cases := map[string]struct {
		archive audit.Archive
		altered bool
	}{
		"a write that fails": {archive: tampering{Archive: good, put: func(context.Context, string, []byte) error {
			return fault.New(fault.Unavailable, "the bucket is gone")
		}}},
		"a write that hangs": {archive: tampering{Archive: good, put: func(ctx context.Context, _ string, _ []byte) error {
			cancel()
			<-ctx.Done()
			return ctx.Err()
		}}},
		"a write that did nothing": {archive: tampering{Archive: good, put: func(context.Context, string, []byte) error { return nil },
			get: func(context.Context, string) ([]byte, error) {
				return nil, fault.New(fault.NotFound, "the object does not exist")
			}}},
		"a read that fails": {archive: tampering{Archive: good, get: func(context.Context, string) ([]byte, error) {
			return nil, fault.New(fault.Unavailable, "the bucket is gone")
		}}},
		"nothing":          {altered: true, archive: returning(func([]byte) []byte { return nil })},
		"half":             {altered: true, archive: returning(func(b []byte) []byte { return b[:len(b)/2] })},
		"all but the end":  {altered: true, archive: returning(func(b []byte) []byte { return b[:len(b)-1] })},
		"something behind": {altered: true, archive: returning(func(b []byte) []byte { return append(bytes.Clone(b), 0) })},
		"another stream behind": {altered: true, archive: returning(func(b []byte) []byte {
			return append(bytes.Clone(b), audittest.Zipped([]byte("x"))...)
		})},
		"a flipped bit in the middle": {altered: true, archive: returning(func(b []byte) []byte {
			b = bytes.Clone(b)
			b[len(b)/2] ^= 1
			return b
		})},
		"another word": {altered: true, archive: returning(func(b []byte) []byte {
			l := text(b)
			l[3] = bytes.Replace(l[3], []byte("success"), []byte("failure"), 1)
			return audittest.Zipped(l...)
		})},
		"one entry less": {altered: true, archive: returning(func(b []byte) []byte { return audittest.Zipped(slices.Delete(text(b), 3, 4)...) })},
		"the last entry less": {altered: true, archive: returning(func(b []byte) []byte {
			l := text(b)
			return audittest.Zipped(slices.Delete(l, len(l)-2, len(l)-1)...)
		})},
		"no closing line": {altered: true, archive: returning(func(b []byte) []byte {
			l := text(b)
			return audittest.Zipped(l[:len(l)-1]...)
		})},
		"two entries exchanged": {altered: true, archive: returning(func(b []byte) []byte {
			l := text(b)
			l[3], l[4] = l[4], l[3]
			return audittest.Zipped(l...)
		})},
		"another signature that verifies": {altered: true, archive: returning(func(b []byte) []byte {
			l := text(b)
			e, err := audit.ParseEntry(bytes.TrimSuffix(l[0], []byte("\n")))
			if err != nil {
				t.Fatal(err)
			}
			return audittest.Zipped(slices.Concat([][]byte{signedAgain(f, e)}, l[1:])...)
		})},
		"another log": {altered: true, archive: returning(func([]byte) []byte {
			other := audittest.NewFixture(t)
			return audittest.Zipped(other.Export())
		})},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			ctx := t.Context()
			if strings.Contains(name, "hangs") {
				ctx = hanging
			}
			told := false
			cutter := Cutter{Log: f.Log.Log, Reader: f.Log.Reader, Archive: c.archive, Keep: audittest.Keep, most: 25, Before: func(context.Context, uint64) error {
				told = true
				return nil
			}}
			n, err := cutter.Run(ctx)
			if n != 0 || err == nil || told {
				t.Errorf("cut %d: %v; before was told: %v", n, err, told)
			}
			if altered := strings.Contains(fault.Message(err), "does not hold what was written"); altered != c.altered {
				t.Errorf("the error says %q", fault.Message(err))
			}
			if got := f.Hashes(); !maps.Equal(got, written) || len(f.Segments()) > 0 {
				t.Error("something was cut")
			}
		})
	}
	c := Cutter{Log: f.Log.Log, Reader: f.Log.Reader, Archive: good, Keep: audittest.Keep, most: 25}
	if _, err := c.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	f.Clean()
	whole(f, good, written)
}

func TestNothingIsCutThatDoesNotHold(t *testing.T) {
	f := audittest.NewFixture(t)
	a, _ := f.Folder()
	f.Fill(20)
	f.Advance(audittest.Keep + lateness + time.Second)
	f.Fill(1)
	flip := func(sequence uint64) {
		err := f.Store.Update(t.Context(), func(tx store.Tx) error {
			row := audittest.Get(tx, audit.EntryKey(sequence))
			row[100] ^= 1
			return tx.Put(audit.EntryKey(sequence), row)
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if _, err := f.Log.Follow(t.Context()); err != nil {
		t.Fatal(err)
	}
	flip(15)
	c := Cutter{Log: f.Log.Log, Reader: f.Log.Reader, Archive: a, Keep: audittest.Keep, most: 10}
	n, err := c.Run(t.Context())
	if broken, ok := audit.IsBroken(err); !ok || broken.Sequence != 15 || n != 10 {
		t.Fatalf("cut %d: %v", n, err)
	}
	if segments := f.Segments(); len(segments) != 1 || segments[0].To != 10 {
		t.Errorf("archived %+v", segments)
	}
	flip(15)
	if n, err := c.Run(t.Context()); err != nil || n == 0 {
		t.Errorf("mended, it cut %d: %v", n, err)
	}
}

// A forged row does not cause a removal, and verification finds it.
func TestARemovalNeedsASignedBase(t *testing.T) {
	for name, signed := range map[string]bool{"no base": false, "an older base": true} {
		t.Run(name, func(t *testing.T) {
			f := audittest.NewFixture(t)
			a, _ := f.Folder()
			f.Old()
			if signed {
				c := Cutter{Log: f.Log.Log, Reader: f.Log.Reader, Archive: a, Keep: audittest.Keep}
				if _, err := c.Run(t.Context()); err != nil {
					t.Fatal(err)
				}
				f.Fill(10)
			}
			written := f.Hashes()
			newest := slices.Max(slices.Collect(maps.Keys(written)))
			forged := audit.Segment{From: newest - 1, To: newest - 1, Name: "audit/chain_test/forged"}
			err := f.Store.Update(t.Context(), func(tx store.Tx) error { return tx.Put(audit.ArchiveKey(forged.From), forged.Encode()) })
			if err != nil {
				t.Fatal(err)
			}
			c := Cutter{Log: f.Log.Log, Reader: f.Log.Reader, Archive: a, Keep: audittest.Keep}
			if n, err := c.Run(t.Context()); n != 0 || fault.Of(err) != fault.Internal {
				t.Errorf("cut %d: %v", n, err)
			}
			if !maps.Equal(f.Hashes(), written) {
				t.Error("entries were removed")
			}
			if _, err := f.Verify(); err == nil {
				t.Error("the verification of the database finds nothing")
			}
		})
	}
}

func TestTamperingWithTheArchiveIsReported(t *testing.T) {
	f := audittest.NewFixture(t)
	a, dir := f.Folder()
	f.Old()
	c := Cutter{Log: f.Log.Log, Reader: f.Log.Reader, Archive: a, Keep: audittest.Keep, most: 20}
	if _, err := c.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	segments := f.Segments()
	path := func(i int) string { return filepath.Join(dir, segments[i].Name) }
	saved := make(map[int][]byte)
	for i := range segments {
		data, err := os.ReadFile(path(i))
		if err != nil {
			t.Fatal(err)
		}
		saved[i] = data
	}
	write := func(i int, data []byte) error { return os.WriteFile(path(i), data, 0o600) }
	second := segments[1].From
	for name, c := range map[string]struct {
		first uint64
		spoil func() error
	}{
		"an object is missing":   {second, func() error { return os.Remove(path(1)) }},
		"an object is empty":     {second, func() error { return write(1, nil) }},
		"an object is cut":       {second, func() error { return write(1, saved[1][:len(saved[1])-9]) }},
		"two objects exchanged":  {1, func() error { return errors.Join(write(0, saved[1]), write(1, saved[0])) }},
		"an object repeated":     {second, func() error { return write(1, saved[0]) }},
		"an object of other log": {second, func() error { return write(1, audittest.Zipped(audittest.NewFixture(t).Export())) }},
		"an entry in it changed": {second + 3, func() error {
			entries, closing := audittest.Lines(t, a, segments[1])
			entries[3] = bytes.Replace(entries[3], []byte("success"), []byte("failure"), 1)
			return write(1, audittest.Zipped(append(entries, closing)...))
		}},
	} {
		if err := c.spoil(); err != nil {
			t.Fatal(err)
		}
		_, err := verify.StoreWithArchive(t.Context(), f.Store, a, verify.Options{})
		if broken, ok := audit.IsBroken(err); !ok || broken.Sequence != c.first {
			t.Errorf("%s: %v, want a fault at %d", name, err, c.first)
		}
		for i, data := range saved {
			if err := write(i, data); err != nil {
				t.Fatal(err)
			}
		}
	}
	if _, err := verify.StoreWithArchive(t.Context(), f.Store, a, verify.Options{}); err != nil {
		t.Errorf("mended: %v", err)
	}
	other := verify.Options{Fingerprint: strings.Repeat("0", 64)}
	if _, err := verify.StoreWithArchive(t.Context(), f.Store, a, other); err == nil {
		t.Error("a fingerprint of another log verifies")
	}
	// Verification compares the rows about the archive with the base.
	for name, change := range map[string]func(tx store.Tx) error{
		"a row lost":  func(tx store.Tx) error { return tx.Delete(audit.ArchiveKey(segments[len(segments)-1].From)) },
		"the base":    func(tx store.Tx) error { return tx.Delete(audit.BaseKey) },
		"a row short": func(tx store.Tx) error { return tx.Put(audit.ArchiveKey(segments[1].From), []byte("x")) },
	} {
		t.Run(name, func(t *testing.T) {
			rows := make(map[string][]byte)
			err := f.Store.Update(t.Context(), func(tx store.Tx) error {
				for _, s := range segments {
					rows[string(audit.ArchiveKey(s.From))] = audittest.Get(tx, audit.ArchiveKey(s.From))
				}
				rows[string(audit.BaseKey)] = audittest.Get(tx, audit.BaseKey)
				return change(tx)
			})
			if err != nil {
				t.Fatal(err)
			}
			_, alone := f.Verify()
			_, both := verify.StoreWithArchive(t.Context(), f.Store, a, verify.Options{})
			if alone == nil || both == nil {
				t.Errorf("the database alone: %v; with the archive: %v", alone, both)
			}
			err = f.Store.Update(t.Context(), func(tx store.Tx) error {
				for key, row := range rows {
					if err := tx.Put([]byte(key), row); err != nil {
						return err
					}
				}
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
		})
	}
}

// The holder of the key can sign a base that contradicts the entries. The archive shows it.
func TestABaseIsHeldAgainstTheArchive(t *testing.T) {
	f := audittest.NewFixture(t)
	a, _ := f.Folder()
	f.Old()
	c := Cutter{Log: f.Log.Log, Reader: f.Log.Reader, Archive: a, Keep: audittest.Keep}
	if _, err := c.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	base, err := chain.ReadBase(t.Context(), f.Store)
	if err != nil {
		t.Fatal(err)
	}
	base.APIKeys[audit.APIKeyName{Tenant: audittest.TenantA, ID: "key_that_never_was"}] = audit.APIKeyState{Sequence: 3}
	signed := f.SignFormerBase(base)
	lists := f.RowsOf(audit.BaseListRange)
	f.Put(func(tx store.Tx) error {
		for key := range lists {
			if err := tx.Delete([]byte(key)); err != nil {
				return err
			}
		}
		return tx.Put(audit.BaseKey, signed)
	})
	if _, err := f.Verify(); err != nil {
		t.Errorf("the database alone: %v", err)
	}
	_, err = verify.StoreWithArchive(t.Context(), f.Store, a, verify.Options{})
	if broken, ok := audit.IsBroken(err); !ok || broken.Sequence != 62 {
		t.Errorf("with the archive: %v", err)
	}
}

// An object that decompresses to more than the bound is no segment.
func TestARemovalReadsNoBomb(t *testing.T) {
	f := audittest.NewFixture(t)
	a, _ := f.Folder()
	f.Old()
	f.Follow()
	c := Cutter{Log: f.Log.Log, Reader: f.Log.Reader, Archive: a, Keep: audittest.Keep}
	f.Log.Chain.Store = &failing{Store: f.Store, at: 2}
	if _, err := c.Run(t.Context()); err == nil {
		t.Fatal("it did not fail")
	}
	f.Log.Chain.Store = f.Store
	if err := a.Put(t.Context(), f.Segments()[0].Name, audittest.Zipped(make([]byte, 8*audit.MaxLine))); err != nil {
		t.Fatal(err)
	}
	if n, err := c.Run(t.Context()); n != 0 || fault.Of(err) != fault.Internal {
		t.Errorf("cut %d: %v", n, err)
	}
}
