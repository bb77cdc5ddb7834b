package keeper

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/chain"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/objects"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/audittest"
	"github.com/latticekeep/latticekeep/test/s3test"
)

func TestOldEntriesMoveToTheArchive(t *testing.T) {
	server := s3test.ForTest(t)
	rawURL, err := server.Bucket("archive")
	if err != nil {
		t.Fatal(err)
	}
	a, err := objects.Open(t.Context(), rawURL, objects.SigningOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	f := audittest.NewFixture(t)
	written := f.Old()
	before := []uint64{}
	c := Cutter{Log: f.Log.Log, Reader: f.Log.Reader, Archive: a, Keep: audittest.Keep, most: 7, Before: func(_ context.Context, to uint64) error {
		before = append(before, to)
		return nil
	}}
	cut, err := c.Run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	segments := f.Segments()
	if len(segments) < 2 || segments[0].From != 1 || segments[len(segments)-1].To != 62 || cut != 62 {
		t.Fatalf("cut %d in %+v", cut, segments)
	}
	for i, s := range segments {
		if want := fmt.Sprintf("audit/chain_test/%020d-%020d-%.16s.jsonl.gz", s.From, s.To, written[s.To]); s.Name != want || before[i] != s.To {
			t.Errorf("segment %d is %s, want %s; before was told %d", i, s.Name, want, before[i])
		}
		if hex.EncodeToString(s.Hash[:]) != written[s.To] {
			t.Errorf("segment %d has the hash %x", i, s.Hash)
		}
		entries, closing := audittest.Lines(t, a, s)
		var note verify.ClosingLine
		if err := json.Unmarshal(bytes.TrimSpace(closing), &note); err != nil {
			t.Fatal(err)
		}
		if at, err := audit.ParseCheckpoint([]byte(note.Checkpoint), f.Log.Signer.Public()); err != nil || at.Sequence != s.To || at.Size != int64(s.To) {
			t.Errorf("segment %d ends with the checkpoint %+v: %v", i, at, err)
		}
		if i > 0 && i < len(segments)-1 && len(entries) < 7 {
			t.Errorf("segment %d has %d entries", i, len(entries))
		}
	}
	f.Clean()
	whole(f, a, written)
	// Each segment has an entry of its own.
	entries, _, err := f.Log.Query(t.Context(), systemReader, reader.Query{EventType: string(audit.LogArchived), Limit: 100})
	if err != nil || len(entries) != len(segments) {
		t.Fatalf("%d entries say so of %d segments: %v", len(entries), len(segments), err)
	}
	last := segments[len(segments)-1]
	want := map[string]string{
		"from": fmt.Sprint(last.From), "to": "62", "entries": fmt.Sprint(62 - last.From + 1), "object": last.Name, "sha256": hex.EncodeToString(last.Digest[:]),
	}
	if e := entries[0]; e.Outcome != audit.Success || !maps.Equal(e.Attributes, want) {
		t.Errorf("the entry says %v", e.Attributes)
	}
	// The log continues in a process that knows it only from the database. This includes a tenant
	// that has only its newest index row left.
	f.Restart()
	for _, tenant := range []authz.TenantID{audittest.TenantA, audittest.TenantB, "ten_iiiiiiiiiiiiiiiiiiiiiiiiii"} {
		f.Record(audit.Event{Type: audit.AuditRead, Outcome: audit.Success, Principal: audittest.Principal(tenant), Resource: audit.Resource{Type: audit.LogResource}})
	}
	whole(f, a, f.Hashes())
	if entries, next, err := f.Log.Query(t.Context(), audittest.Principal(audittest.TenantB), reader.Query{Limit: 100}); err != nil || len(entries) != 1 || next != "" {
		t.Errorf("the tenant sees %d of its entries, and %q: %v", len(entries), next, err)
	}
	c.Log, c.Reader = f.Log.Log, f.Log.Reader
	if n, err := c.Run(t.Context()); n != 0 || err != nil {
		t.Errorf("another run cut %d: %v", n, err)
	}
	// Later, the entries about the archive are archived as well.
	f.Advance(audittest.Keep + lateness + time.Second)
	f.Fill(3)
	written = f.Hashes()
	if n, err := c.Run(t.Context()); n == 0 || err != nil {
		t.Fatalf("a later run cut %d: %v", n, err)
	}
	f.Clean()
	whole(f, a, written)
	// The index row that stayed as the tenant's newest is gone after the next segment.
	last = f.Segments()[len(f.Segments())-1]
	err = audit.ScanAll(t.Context(), f.Store, store.Prefix(audit.TenantPrefix(string(audittest.TenantB))), func(_, value []byte) error {
		row, err := audit.DecodeIndexRow(value)
		if row.Sequence <= last.To {
			t.Errorf("the index row of entry %d is left", row.Sequence)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

var systemReader = authz.Principal{Tenant: authz.SystemTenant, Kind: authz.APIKey, ID: "reader", Scopes: []authz.Scope{authz.AuditRead}}

func TestEntriesStayAsLongAsTheyAreToBeKept(t *testing.T) {
	f := audittest.NewFixture(t)
	a, _ := f.Folder()
	run := func(c Cutter, want uint64) {
		t.Helper()
		c.Log, c.Reader, c.Archive = f.Log.Log, f.Log.Reader, a
		if n, err := c.Run(t.Context()); err != nil || n != want {
			t.Fatalf("cut %d, want %d: %v", n, want, err)
		}
	}
	f.Fill(9) // entries 1 to 10
	run(Cutter{Keep: audittest.Keep, most: 5}, 0)
	f.Advance(audittest.Keep - time.Microsecond)
	f.Record(audit.Event{Type: audit.AuditRead, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantA), Resource: audit.Resource{Type: audit.LogResource}}) // entry 11
	run(Cutter{Keep: audittest.Keep, most: 5}, 0)
	f.Advance(2 * time.Microsecond)
	run(Cutter{Keep: 0, most: 5}, 0) // zero keeps everything for ever
	run(Cutter{Keep: audittest.Keep, most: 11}, 0)
	run(Cutter{Keep: audittest.Keep, most: 6}, 6) // the remaining entries do not fill a segment
	f.Advance(lateness)
	run(Cutter{Keep: audittest.Keep, most: 6}, 4) // the first entry is late
	f.Advance(10 * audittest.Keep)
	run(Cutter{Keep: audittest.Keep, most: 6}, 1+2) // entry 11 and the entries about two segments
	if hashes := f.Hashes(); len(hashes) != 2 {
		t.Errorf("the database has %v", slices.Sorted(maps.Keys(hashes)))
	}
}

func TestACutEndsAtCheckpointsAndGroups(t *testing.T) {
	f := audittest.NewFixture(t)
	a, _ := f.Folder()
	written := f.Old()
	ends := make(map[uint64]bool) // last sequences of groups
	err := audit.ScanEntries(t.Context(), f.Store, audit.EntryRange, func(row audit.EntryRow) error {
		at, err := audit.DecodeStoredEntry(row.Row, row.Batch)
		if err == nil && (at.Proof.N == 0 || at.Proof.Index+1 == at.Proof.N) {
			ends[at.Entry.Sequence] = true
		}
		return err
	})
	if err != nil || len(ends) == len(written) {
		t.Fatalf("%d groups of %d entries: %v", len(ends), len(written), err)
	}
	c := Cutter{Log: f.Log.Log, Reader: f.Log.Reader, Archive: a, Keep: audittest.Keep, most: 1}
	if _, err := c.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, s := range f.Segments() {
		if !ends[s.To] {
			t.Errorf("a segment ends at %d, in the middle of a group", s.To)
		}
	}
	f.Clean()
	whole(f, a, written)
}

// The newest entry stays, and so does its whole group.
func TestTheNewestGroupStays(t *testing.T) {
	f := audittest.NewFixture(t)
	a, _ := f.Folder()
	f.Log.SetSigning(writer.SignBatches)
	err := f.Store.Update(t.Context(), func(tx store.Tx) error {
		for range 5 { // all in one commit
			if _, err := f.Log.Append(tx, audit.Event{Type: audit.AuditRead, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantA)}); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	f.Advance(audittest.Keep + lateness + time.Second)
	c := Cutter{Log: f.Log.Log, Reader: f.Log.Reader, Archive: a, Keep: audittest.Keep}
	if _, err := c.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	if s := f.Segments(); s[0].To != 1 {
		t.Errorf("archived %+v", s)
	}
	verifyAll(f, a)
}

// failing fails Update number at, before or after its commit.
type failing struct {
	store.Store
	at, n     int
	persisted bool
}

var errInjected = fault.New(fault.Unavailable, "injected")

func (s *failing) Update(ctx context.Context, fn func(store.Tx) error) error {
	if s.n++; s.n != s.at {
		return s.Store.Update(ctx, fn)
	}
	err := s.Store.Update(ctx, func(tx store.Tx) error {
		if err := fn(tx); err != nil || s.persisted {
			return err
		}
		return errInjected
	})
	return errors.Join(err, errInjected)
}

// Every commit may fail, as if the process had ended there. Nothing is lost, and the next run
// continues.
func TestACrashAtAnyCommitLosesNothing(t *testing.T) {
	for _, persisted := range []bool{false, true} {
		reached := true
		for at := 1; reached; at++ {
			t.Run(fmt.Sprintf("commit %d, persisted %v", at, persisted), func(t *testing.T) {
				f := audittest.NewFixture(t)
				a, _ := f.Folder()
				written := f.Old()
				broken := &failing{Store: f.Store, at: at, persisted: persisted}
				c := Cutter{Log: f.Log.Log, Reader: f.Log.Reader, Archive: a, Keep: audittest.Keep, most: 25}
				f.Log.Chain.Store = broken
				_, err := c.Run(t.Context())
				f.Log.Chain.Store = f.Store
				if reached = broken.n >= at; !reached {
					if err != nil {
						t.Fatal(err)
					}
					return
				}
				if !errors.Is(err, errInjected) {
					t.Fatalf("the failure was not reported: %v", err)
				}
				whole(f, a, written)
				// Readers see exactly the existing entries, and no damage.
				if _, _, err := f.Log.Query(t.Context(), audittest.Principal(audittest.TenantA), reader.Query{Limit: 100}); err != nil {
					t.Errorf("a query: %v", err)
				}
				f.Record(audit.Event{Type: audit.AuditRead, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantB), Resource: audit.Resource{Type: audit.LogResource}})
				if _, err := c.Run(t.Context()); err != nil {
					t.Fatalf("the next run: %v", err)
				}
				f.Clean()
				whole(f, a, written)
			})
			if at > 50 {
				t.Fatal("it does not end")
			}
		}
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

func TestACutWaitsForWhoNeedsTheEntries(t *testing.T) {
	f := audittest.NewFixture(t)
	a, _ := f.Folder()
	written := f.Old()
	refusing := errors.New("not yet")
	c := Cutter{Log: f.Log.Log, Reader: f.Log.Reader, Archive: a, Keep: audittest.Keep, Before: func(context.Context, uint64) error { return refusing }}
	if n, err := c.Run(t.Context()); n != 0 || !errors.Is(err, refusing) || len(f.Segments()) > 0 {
		t.Errorf("cut %d: %v", n, err)
	}
	c.Before = nil
	f.Log.Halt(errors.New("entries are lost"))
	c.Archive = tampering{put: func(context.Context, string, []byte) error {
		t.Error("a refused log is archived")
		return errInjected
	}}
	if n, err := c.Run(t.Context()); n != 0 || fault.Of(err) != fault.Unavailable || len(f.Segments()) > 0 {
		t.Errorf("a refused log: cut %d: %v", n, err)
	}
	c.Archive = a
	f.Log.Halt(nil)
	if _, err := c.Run(t.Context()); err != nil {
		t.Error(err)
	}
	whole(f, a, written)
}

// Archived entries that are still in the database are removed only while the archive has them.
// Until then readers ignore them.
func TestARemovalGoesOnOnlyWhileTheArchiveIsThere(t *testing.T) {
	f := audittest.NewFixture(t)
	a, dir := f.Folder()
	written := f.Old()
	c := Cutter{Log: f.Log.Log, Reader: f.Log.Reader, Archive: a, Keep: audittest.Keep}
	broken := &failing{Store: f.Store}
	if _, err := f.Log.Follow(t.Context()); err != nil {
		t.Fatal(err)
	}
	f.Log.Chain.Store, broken.at = broken, 2 // the commit after the cut
	if _, err := c.Run(t.Context()); !errors.Is(err, errInjected) {
		t.Fatal(err)
	}
	f.Log.Chain.Store = f.Store
	segments := f.Segments()
	if len(segments) != 1 || len(f.Hashes()) != len(written)+1 {
		t.Fatalf("archived %+v, left %d", segments, len(f.Hashes()))
	}
	object := filepath.Join(dir, segments[0].Name)
	data, err := os.ReadFile(object)
	if err != nil {
		t.Fatal(err)
	}
	for name, spoil := range map[string]func() error{
		"gone":    func() error { return os.Remove(object) },
		"altered": func() error { return os.WriteFile(object, data[:len(data)-1], 0o600) },
	} {
		if err := spoil(); err != nil {
			t.Fatal(err)
		}
		if n, err := c.Run(t.Context()); n != 0 || err == nil {
			t.Errorf("%s: cut %d: %v", name, n, err)
		}
		if left := len(f.Hashes()); left != len(written)+1 {
			t.Errorf("%s: %d entries are left", name, left)
		}
	}
	entries, _, err := f.Log.Query(t.Context(), audittest.Principal(audittest.TenantA), reader.Query{Limit: 100})
	if err != nil || len(entries) != 1 {
		t.Errorf("the tenant sees %d entries: %v", len(entries), err)
	}
	if err := os.WriteFile(object, data, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	f.Clean()
	whole(f, a, written)
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
	signed, err := base.Sign(f.Log.Signer, f.Log.ChainID())
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Store.Update(t.Context(), func(tx store.Tx) error { return tx.Put(audit.BaseKey, signed) }); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Verify(); err != nil {
		t.Errorf("the database alone: %v", err)
	}
	_, err = verify.StoreWithArchive(t.Context(), f.Store, a, verify.Options{})
	if broken, ok := audit.IsBroken(err); !ok || broken.Sequence != 62 {
		t.Errorf("with the archive: %v", err)
	}
}

// A segment contains an accepted rollback like any other entry, and an older checkpoint is also
// found in the archive.
func TestEpochsAndOlderCheckpointsAreArchived(t *testing.T) {
	f := audittest.NewFixture(t)
	a, _ := f.Folder()
	f.Fill(20)
	at, err := f.Log.Follow(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	since, err := audit.SignCheckpoint(at, f.Log.Signer)
	if err != nil {
		t.Fatal(err)
	}
	f.Log.Halt(&audit.RollbackError{LostFrom: 22, LostTo: 40, Epoch: 1, Source: "test"})
	admin := authz.Principal{Tenant: authz.SystemTenant, Kind: authz.APIKey, ID: "admin", Scopes: []authz.Scope{authz.SystemAdmin}}
	if _, err := f.Log.AcceptRollback(t.Context(), admin, "restored a backup"); err != nil {
		t.Fatal(err)
	}
	f.Fill(20)
	f.Advance(audittest.Keep + lateness + time.Second)
	f.Fill(1)
	written := f.Hashes()
	for _, most := range []int{20, 1, 30} { // the epoch begins between segments too
		c := Cutter{Log: f.Log.Log, Reader: f.Log.Reader, Archive: a, Keep: audittest.Keep, most: most}
		if _, err := c.Run(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	f.Clean()
	whole(f, a, written)
	report, err := verify.StoreWithArchive(t.Context(), f.Store, a, verify.Options{Since: since})
	if err != nil || report.Since == nil || report.Epoch != 2 || len(report.Rollbacks) != 1 {
		t.Errorf("since %+v, epoch %d, rollbacks %v: %v", report.Since, report.Epoch, report.Rollbacks, err)
	}
	if report, err := verify.Store(t.Context(), f.Store, verify.Options{Since: since}); err != nil || report.Since == nil {
		t.Errorf("the database alone, since %+v: %v", report.Since, err)
	}
}

// Events of sealing keys decide which key is published, however old they are.
func TestEventsOfSealingKeysOutliveTheirEntries(t *testing.T) {
	f := audittest.NewFixture(t)
	a, _ := f.Folder()
	change := func(what audit.EventType, id string, o audit.Outcome) {
		f.Record(audit.Event{Type: what, Outcome: o, Principal: audittest.Principal(authz.SystemTenant), Resource: audit.Resource{Type: audit.SealingKeyResource, ID: id}})
	}
	types := []audit.EventType{audit.SealingKeyCreated, audit.SealingKeyRetired}
	visited := func() (seen []string) {
		t.Helper()
		err := f.Log.Visit(t.Context(), authz.SystemTenant, func(e *audit.Entry) { seen = append(seen, string(e.EventType)+" "+e.Resource.ID) }, types...)
		if err != nil {
			t.Fatal(err)
		}
		return seen
	}
	change(audit.SealingKeyCreated, "first", audit.Success)
	change(audit.SealingKeyCreated, "second", audit.Success)
	change(audit.SealingKeyRetired, "second", audit.Denied)
	change(audit.SealingKeyRestored, "first", audit.Success)
	f.Fill(5)
	f.Advance(audittest.Keep + lateness + time.Second)
	change(audit.SealingKeyRetired, "first", audit.Success)
	change(audit.SealingKeyCreated, "third", audit.Success)
	want := []string{"SEALING_KEY_CREATED first", "SEALING_KEY_CREATED second", "SEALING_KEY_RETIRED first", "SEALING_KEY_CREATED third"}
	if got := visited(); !slices.Equal(got, want) {
		t.Fatalf("before: %q", got)
	}
	for range 2 {
		c := Cutter{Log: f.Log.Log, Reader: f.Log.Reader, Archive: a, Keep: audittest.Keep, most: 3}
		if n, err := c.Run(t.Context()); err != nil || n == 0 {
			t.Fatalf("cut %d: %v", n, err)
		}
		if got := visited(); !slices.Equal(got, want) {
			t.Fatalf("after: %q", got)
		}
		f.Advance(audittest.Keep + lateness + time.Second)
		f.Fill(1)
	}
	verifyAll(f, a)
}

// A block of a tenant's entries is summarised even if some of them are archived, and a summary is
// removed with the last entry of its block.
func TestSummariesAreOfWhatIsLeft(t *testing.T) {
	f := audittest.NewFixture(t)
	a, _ := f.Folder()
	f.Log.SetSigning(writer.SignBatches)
	few := func(n int) {
		var wg sync.WaitGroup
		for i := range n {
			what := audit.CredentialListed
			if i%40 == 0 {
				what = audit.AuditRead
			}
			wg.Go(func() {
				err := f.Log.Record(t.Context(), audit.Event{Type: what, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantA), Resource: audit.Resource{Type: audit.LogResource}})
				if err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
	}
	summaries := func() (blocks []uint64) {
		t.Helper()
		err := audit.ScanAll(t.Context(), f.Store, audit.SummaryRange, func(key, _ []byte) error {
			blocks = append(blocks, audit.SequenceOf(key[len(key)-8:]))
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		return blocks
	}
	reads := func() int {
		t.Helper()
		entries, next, err := f.Log.Query(t.Context(), audittest.Principal(audittest.TenantA), reader.Query{EventType: string(audit.AuditRead), Limit: 100})
		if err != nil || next != "" {
			t.Fatalf("a query: %q %v", next, err)
		}
		return len(entries)
	}
	few(400) // the second block is not full
	f.Advance(audittest.Keep + lateness + time.Second)
	few(1)
	c := Cutter{Log: f.Log.Log, Reader: f.Log.Reader, Archive: a, Keep: audittest.Keep, most: 100}
	if _, err := c.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := summaries(); len(got) != 0 {
		t.Errorf("after the first block was archived there are summaries of %v", got)
	}
	if got := reads(); got != 1 {
		t.Errorf("the tenant finds %d entries", got)
	}
	few(400) // the second block is full now, and with the query the third is too
	if _, err := f.Log.Follow(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := summaries(); !slices.Equal(got, []uint64{1, 2}) {
		t.Errorf("there are summaries of the blocks %v", got)
	}
	if got := reads(); got != 1+1+10 {
		t.Errorf("the tenant finds %d entries", got)
	}
	verifyAll(f, a)
	f.Advance(audittest.Keep + lateness + time.Second)
	few(1)
	if _, err := c.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := summaries(); len(got) != 0 {
		t.Errorf("there are summaries of the blocks %v", got)
	}
	verifyAll(f, a)
}

// If two cutters run at the same time, one of them cuts each segment.
func TestTwoCuttersDoNoHarm(t *testing.T) {
	f := audittest.NewFixture(t)
	a, _ := f.Folder()
	written := f.Old()
	second := Cutter{Log: f.Log.Log, Reader: f.Log.Reader, Archive: a, Keep: audittest.Keep, most: 20}
	once := false
	first := second
	first.Before = func(ctx context.Context, _ uint64) error {
		if once {
			return nil
		}
		once = true
		_, err := second.Run(ctx)
		return err
	}
	if n, err := first.Run(t.Context()); n != 0 || fault.Of(err) != fault.Conflict {
		t.Fatalf("the one that comes late cut %d: %v", n, err)
	}
	f.Clean()
	whole(f, a, written)
}

// signedAgain returns the line of an entry with a new signature.
func signedAgain(f *audittest.Fixture, e *audit.Entry) []byte {
	sum, err := e.Digest()
	if err != nil {
		f.T.Fatal(err)
	}
	signature, err := f.Log.Signer.Sign(audit.SigningContext, sum[:])
	if err != nil {
		f.T.Fatal(err)
	}
	e.Signature = base64.StdEncoding.EncodeToString(signature)
	line, err := e.JSON()
	if err != nil {
		f.T.Fatal(err)
	}
	return append(line, '\n')
}

func verifyAll(f *audittest.Fixture, a audit.Archive) {
	f.T.Helper()
	if _, err := verify.StoreWithArchive(f.T.Context(), f.Store, a, verify.Options{}); err != nil {
		f.T.Error(err)
	}
}

// whole fails the test unless every entry that was ever written is exactly once in the archive or
// in the database. It also verifies the database alone, and both together from the first entry on.
func whole(f *audittest.Fixture, a audit.Archive, written map[uint64]string) {
	f.T.Helper()
	have := f.Hashes()
	var archived uint64
	for _, s := range f.Segments() {
		entries, _ := audittest.Lines(f.T.(*testing.T), a, s)
		for _, line := range entries {
			e, err := audit.ParseEntry(bytes.TrimSuffix(line, []byte("\n")))
			if err != nil {
				f.T.Fatal(err)
			}
			archived = e.Sequence
			have[e.Sequence] = e.Hash // an entry in both is being removed
		}
	}
	for sequence, hash := range written {
		if have[sequence] != hash {
			f.T.Fatalf("entry %d is neither in the archive nor in the database", sequence)
		}
	}
	report, err := f.Verify()
	if err != nil {
		f.T.Fatalf("the database: %v", err)
	}
	if report.From <= archived {
		f.T.Errorf("the verification of the database begins at %d, and %d is archived", report.From, archived)
	}
	pinned := verify.Options{Fingerprint: f.Log.Fingerprint()}
	report, err = verify.StoreWithArchive(f.T.Context(), f.Store, a, pinned)
	if err != nil {
		f.T.Fatalf("with the archive: %v", err)
	}
	if report.From != 1 || report.Entries != uint64(len(have)) || !report.Pinned {
		f.T.Errorf("with the archive: from %d, %d entries of %d, pinned %v", report.From, report.Entries, len(have), report.Pinned)
	}
}
