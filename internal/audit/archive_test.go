package audit

import (
	"bytes"
	"context"
	"encoding/hex"
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

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/objects"
	"github.com/latticekeep/latticekeep/internal/store"
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
	f := newFixture(t)
	written := f.old()
	before := []uint64{}
	c := Cutter{Log: f.log.Log, Reader: f.log.Reader, Archive: a, Keep: keep, most: 7, Before: func(_ context.Context, to uint64) error {
		before = append(before, to)
		return nil
	}}
	cut, err := c.Run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	segments := f.segments()
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
		entries, closing := lines(t, a, s)
		var note closingLine
		if err := jsonUnmarshal(bytes.TrimSpace(closing), &note); err != nil {
			t.Fatal(err)
		}
		if at, err := ParseCheckpoint([]byte(note.Checkpoint), f.log.signer.Public()); err != nil || at.Sequence != s.To || at.Size != int64(s.To) {
			t.Errorf("segment %d ends with the checkpoint %+v: %v", i, at, err)
		}
		if i > 0 && i < len(segments)-1 && len(entries) < 7 {
			t.Errorf("segment %d has %d entries", i, len(entries))
		}
	}
	f.clean()
	f.whole(a, written)
	// Each segment has an entry of its own.
	entries, _, err := f.log.Query(t.Context(), systemReader, Query{EventType: string(LogArchived), Limit: 100})
	if err != nil || len(entries) != len(segments) {
		t.Fatalf("%d entries say so of %d segments: %v", len(entries), len(segments), err)
	}
	last := segments[len(segments)-1]
	want := map[string]string{
		"from": fmt.Sprint(last.From), "to": "62", "entries": fmt.Sprint(62 - last.From + 1), "object": last.Name, "sha256": hex.EncodeToString(last.Digest[:]),
	}
	if e := entries[0]; e.Outcome != Success || !maps.Equal(e.Attributes, want) {
		t.Errorf("the entry says %v", e.Attributes)
	}
	// The log continues in a process that knows it only from the database. This includes a tenant
	// that has only its newest index row left.
	f.restart()
	for _, tenant := range []authz.TenantID{tenantA, tenantB, "ten_iiiiiiiiiiiiiiiiiiiiiiiiii"} {
		f.record(Event{Type: AuditRead, Outcome: Success, Principal: principal(tenant), Resource: Resource{Type: LogResource}})
	}
	f.whole(a, f.hashes())
	if entries, next, err := f.log.Query(t.Context(), principal(tenantB), Query{Limit: 100}); err != nil || len(entries) != 1 || next != "" {
		t.Errorf("the tenant sees %d of its entries, and %q: %v", len(entries), next, err)
	}
	c.Log, c.Reader = f.log.Log, f.log.Reader
	if n, err := c.Run(t.Context()); n != 0 || err != nil {
		t.Errorf("another run cut %d: %v", n, err)
	}
	// Later, the entries about the archive are archived as well.
	f.advance(keep + lateness + time.Second)
	f.fill(3)
	written = f.hashes()
	if n, err := c.Run(t.Context()); n == 0 || err != nil {
		t.Fatalf("a later run cut %d: %v", n, err)
	}
	f.clean()
	f.whole(a, written)
	// The index row that stayed as the tenant's newest is gone after the next segment.
	last = f.segments()[len(f.segments())-1]
	err = ScanAll(t.Context(), f.store, store.Prefix(tenantPrefix(string(tenantB))), func(_, value []byte) error {
		row, err := decodeIndexRow(value)
		if row.sequence <= last.To {
			t.Errorf("the index row of entry %d is left", row.sequence)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

var systemReader = authz.Principal{Tenant: authz.SystemTenant, Kind: authz.APIKey, ID: "reader", Scopes: []authz.Scope{authz.AuditRead}}

func TestEntriesStayAsLongAsTheyAreToBeKept(t *testing.T) {
	f := newFixture(t)
	a, _ := f.folder()
	run := func(c Cutter, want uint64) {
		t.Helper()
		c.Log, c.Reader, c.Archive = f.log.Log, f.log.Reader, a
		if n, err := c.Run(t.Context()); err != nil || n != want {
			t.Fatalf("cut %d, want %d: %v", n, want, err)
		}
	}
	f.fill(9) // entries 1 to 10
	run(Cutter{Keep: keep, most: 5}, 0)
	f.advance(keep - time.Microsecond)
	f.record(Event{Type: AuditRead, Outcome: Success, Principal: principal(tenantA), Resource: Resource{Type: LogResource}}) // entry 11
	run(Cutter{Keep: keep, most: 5}, 0)
	f.advance(2 * time.Microsecond)
	run(Cutter{Keep: 0, most: 5}, 0) // zero keeps everything for ever
	run(Cutter{Keep: keep, most: 11}, 0)
	run(Cutter{Keep: keep, most: 6}, 6) // the remaining entries do not fill a segment
	f.advance(lateness)
	run(Cutter{Keep: keep, most: 6}, 4) // the first entry is late
	f.advance(10 * keep)
	run(Cutter{Keep: keep, most: 6}, 1+2) // entry 11 and the entries about two segments
	if hashes := f.hashes(); len(hashes) != 2 {
		t.Errorf("the database has %v", slices.Sorted(maps.Keys(hashes)))
	}
}

func TestACutEndsAtCheckpointsAndGroups(t *testing.T) {
	f := newFixture(t)
	a, _ := f.folder()
	written := f.old()
	ends := make(map[uint64]bool) // last sequences of groups
	err := scanEntries(t.Context(), f.store, entryRange, func(row entryRow) error {
		at, err := decodeStored(row.row, row.batch)
		if err == nil && (at.proof.n == 0 || at.proof.index+1 == at.proof.n) {
			ends[at.entry.Sequence] = true
		}
		return err
	})
	if err != nil || len(ends) == len(written) {
		t.Fatalf("%d groups of %d entries: %v", len(ends), len(written), err)
	}
	c := Cutter{Log: f.log.Log, Reader: f.log.Reader, Archive: a, Keep: keep, most: 1}
	if _, err := c.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, s := range f.segments() {
		if !ends[s.To] {
			t.Errorf("a segment ends at %d, in the middle of a group", s.To)
		}
	}
	f.clean()
	f.whole(a, written)
}

// The newest entry stays, and so does its whole group.
func TestTheNewestGroupStays(t *testing.T) {
	f := newFixture(t)
	a, _ := f.folder()
	f.log.SetSigning(SignBatches)
	err := f.store.Update(t.Context(), func(tx store.Tx) error {
		for range 5 { // all in one commit
			if _, err := f.log.Append(tx, Event{Type: AuditRead, Outcome: Success, Principal: principal(tenantA)}); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	f.advance(keep + lateness + time.Second)
	c := Cutter{Log: f.log.Log, Reader: f.log.Reader, Archive: a, Keep: keep}
	if _, err := c.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	if s := f.segments(); s[0].To != 1 {
		t.Errorf("archived %+v", s)
	}
	f.verifyAll(a)
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
				f := newFixture(t)
				a, _ := f.folder()
				written := f.old()
				broken := &failing{Store: f.store, at: at, persisted: persisted}
				c := Cutter{Log: f.log.Log, Reader: f.log.Reader, Archive: a, Keep: keep, most: 25}
				f.log.chain.store = broken
				_, err := c.Run(t.Context())
				f.log.chain.store = f.store
				if reached = broken.n >= at; !reached {
					if err != nil {
						t.Fatal(err)
					}
					return
				}
				if !errors.Is(err, errInjected) {
					t.Fatalf("the failure was not reported: %v", err)
				}
				f.whole(a, written)
				// Readers see exactly the existing entries, and no damage.
				if _, _, err := f.log.Query(t.Context(), principal(tenantA), Query{Limit: 100}); err != nil {
					t.Errorf("a query: %v", err)
				}
				f.record(Event{Type: AuditRead, Outcome: Success, Principal: principal(tenantB), Resource: Resource{Type: LogResource}})
				if _, err := c.Run(t.Context()); err != nil {
					t.Fatalf("the next run: %v", err)
				}
				f.clean()
				f.whole(a, written)
			})
			if at > 50 {
				t.Fatal("it does not end")
			}
		}
	}
}

// tampering is an archive that an attacker changes.
type tampering struct {
	Archive
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
	f := newFixture(t)
	good, _ := f.folder()
	written := f.old()
	text := func(data []byte) (lines [][]byte) {
		err := unzip(data, func(r io.Reader) error {
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
		archive Archive
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
			return append(bytes.Clone(b), zipped([]byte("x"))...)
		})},
		"a flipped bit in the middle": {altered: true, archive: returning(func(b []byte) []byte {
			b = bytes.Clone(b)
			b[len(b)/2] ^= 1
			return b
		})},
		"another word": {altered: true, archive: returning(func(b []byte) []byte {
			l := text(b)
			l[3] = bytes.Replace(l[3], []byte("success"), []byte("failure"), 1)
			return zipped(l...)
		})},
		"one entry less": {altered: true, archive: returning(func(b []byte) []byte { return zipped(slices.Delete(text(b), 3, 4)...) })},
		"the last entry less": {altered: true, archive: returning(func(b []byte) []byte {
			l := text(b)
			return zipped(slices.Delete(l, len(l)-2, len(l)-1)...)
		})},
		"no closing line": {altered: true, archive: returning(func(b []byte) []byte {
			l := text(b)
			return zipped(l[:len(l)-1]...)
		})},
		"two entries exchanged": {altered: true, archive: returning(func(b []byte) []byte {
			l := text(b)
			l[3], l[4] = l[4], l[3]
			return zipped(l...)
		})},
		"another signature that verifies": {altered: true, archive: returning(func(b []byte) []byte {
			l := text(b)
			e, err := ParseEntry(bytes.TrimSuffix(l[0], []byte("\n")))
			if err != nil {
				t.Fatal(err)
			}
			return zipped(slices.Concat([][]byte{f.signedAgain(e)}, l[1:])...)
		})},
		"another log": {altered: true, archive: returning(func([]byte) []byte {
			other := newFixture(t)
			return zipped(other.export())
		})},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			ctx := t.Context()
			if strings.Contains(name, "hangs") {
				ctx = hanging
			}
			told := false
			cutter := Cutter{Log: f.log.Log, Reader: f.log.Reader, Archive: c.archive, Keep: keep, most: 25, Before: func(context.Context, uint64) error {
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
			if got := f.hashes(); !maps.Equal(got, written) || len(f.segments()) > 0 {
				t.Error("something was cut")
			}
		})
	}
	c := Cutter{Log: f.log.Log, Reader: f.log.Reader, Archive: good, Keep: keep, most: 25}
	if _, err := c.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	f.clean()
	f.whole(good, written)
}

func TestNothingIsCutThatDoesNotHold(t *testing.T) {
	f := newFixture(t)
	a, _ := f.folder()
	f.fill(20)
	f.advance(keep + lateness + time.Second)
	f.fill(1)
	flip := func(sequence uint64) {
		err := f.store.Update(t.Context(), func(tx store.Tx) error {
			row := get(tx, entryKey(sequence))
			row[100] ^= 1
			return tx.Put(entryKey(sequence), row)
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if _, err := f.log.Follow(t.Context()); err != nil {
		t.Fatal(err)
	}
	flip(15)
	c := Cutter{Log: f.log.Log, Reader: f.log.Reader, Archive: a, Keep: keep, most: 10}
	n, err := c.Run(t.Context())
	if broken, ok := IsBroken(err); !ok || broken.Sequence != 15 || n != 10 {
		t.Fatalf("cut %d: %v", n, err)
	}
	if segments := f.segments(); len(segments) != 1 || segments[0].To != 10 {
		t.Errorf("archived %+v", segments)
	}
	flip(15)
	if n, err := c.Run(t.Context()); err != nil || n == 0 {
		t.Errorf("mended, it cut %d: %v", n, err)
	}
}

func TestACutWaitsForWhoNeedsTheEntries(t *testing.T) {
	f := newFixture(t)
	a, _ := f.folder()
	written := f.old()
	refusing := errors.New("not yet")
	c := Cutter{Log: f.log.Log, Reader: f.log.Reader, Archive: a, Keep: keep, Before: func(context.Context, uint64) error { return refusing }}
	if n, err := c.Run(t.Context()); n != 0 || !errors.Is(err, refusing) || len(f.segments()) > 0 {
		t.Errorf("cut %d: %v", n, err)
	}
	c.Before = nil
	f.log.Halt(errors.New("entries are lost"))
	c.Archive = tampering{put: func(context.Context, string, []byte) error {
		t.Error("a refused log is archived")
		return errInjected
	}}
	if n, err := c.Run(t.Context()); n != 0 || fault.Of(err) != fault.Unavailable || len(f.segments()) > 0 {
		t.Errorf("a refused log: cut %d: %v", n, err)
	}
	c.Archive = a
	f.log.Halt(nil)
	if _, err := c.Run(t.Context()); err != nil {
		t.Error(err)
	}
	f.whole(a, written)
}

// Archived entries that are still in the database are removed only while the archive has them.
// Until then readers ignore them.
func TestARemovalGoesOnOnlyWhileTheArchiveIsThere(t *testing.T) {
	f := newFixture(t)
	a, dir := f.folder()
	written := f.old()
	c := Cutter{Log: f.log.Log, Reader: f.log.Reader, Archive: a, Keep: keep}
	broken := &failing{Store: f.store}
	if _, err := f.log.Follow(t.Context()); err != nil {
		t.Fatal(err)
	}
	f.log.chain.store, broken.at = broken, 2 // the commit after the cut
	if _, err := c.Run(t.Context()); !errors.Is(err, errInjected) {
		t.Fatal(err)
	}
	f.log.chain.store = f.store
	segments := f.segments()
	if len(segments) != 1 || len(f.hashes()) != len(written)+1 {
		t.Fatalf("archived %+v, left %d", segments, len(f.hashes()))
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
		if left := len(f.hashes()); left != len(written)+1 {
			t.Errorf("%s: %d entries are left", name, left)
		}
	}
	entries, _, err := f.log.Query(t.Context(), principal(tenantA), Query{Limit: 100})
	if err != nil || len(entries) != 1 {
		t.Errorf("the tenant sees %d entries: %v", len(entries), err)
	}
	if err := os.WriteFile(object, data, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	f.clean()
	f.whole(a, written)
}

// A forged row does not cause a removal, and verification finds it.
func TestARemovalNeedsASignedBase(t *testing.T) {
	for name, signed := range map[string]bool{"no base": false, "an older base": true} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			a, _ := f.folder()
			f.old()
			if signed {
				c := Cutter{Log: f.log.Log, Reader: f.log.Reader, Archive: a, Keep: keep}
				if _, err := c.Run(t.Context()); err != nil {
					t.Fatal(err)
				}
				f.fill(10)
			}
			written := f.hashes()
			newest := slices.Max(slices.Collect(maps.Keys(written)))
			forged := Segment{From: newest - 1, To: newest - 1, Name: "audit/chain_test/forged"}
			err := f.store.Update(t.Context(), func(tx store.Tx) error { return tx.Put(archiveKey(forged.From), forged.encode()) })
			if err != nil {
				t.Fatal(err)
			}
			c := Cutter{Log: f.log.Log, Reader: f.log.Reader, Archive: a, Keep: keep}
			if n, err := c.Run(t.Context()); n != 0 || fault.Of(err) != fault.Internal {
				t.Errorf("cut %d: %v", n, err)
			}
			if !maps.Equal(f.hashes(), written) {
				t.Error("entries were removed")
			}
			if _, err := f.verify(); err == nil {
				t.Error("the verification of the database finds nothing")
			}
		})
	}
}

func TestTamperingWithTheArchiveIsReported(t *testing.T) {
	f := newFixture(t)
	a, dir := f.folder()
	f.old()
	c := Cutter{Log: f.log.Log, Reader: f.log.Reader, Archive: a, Keep: keep, most: 20}
	if _, err := c.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	segments := f.segments()
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
		"an object of other log": {second, func() error { return write(1, zipped(newFixture(t).export())) }},
		"an entry in it changed": {second + 3, func() error {
			entries, closing := lines(t, a, segments[1])
			entries[3] = bytes.Replace(entries[3], []byte("success"), []byte("failure"), 1)
			return write(1, zipped(append(entries, closing)...))
		}},
	} {
		if err := c.spoil(); err != nil {
			t.Fatal(err)
		}
		_, err := VerifyWithArchive(t.Context(), f.store, a, Options{})
		if broken, ok := IsBroken(err); !ok || broken.Sequence != c.first {
			t.Errorf("%s: %v, want a fault at %d", name, err, c.first)
		}
		for i, data := range saved {
			if err := write(i, data); err != nil {
				t.Fatal(err)
			}
		}
	}
	if _, err := VerifyWithArchive(t.Context(), f.store, a, Options{}); err != nil {
		t.Errorf("mended: %v", err)
	}
	other := Options{Fingerprint: strings.Repeat("0", 64)}
	if _, err := VerifyWithArchive(t.Context(), f.store, a, other); err == nil {
		t.Error("a fingerprint of another log verifies")
	}
	// Verification compares the rows about the archive with the base.
	for name, change := range map[string]func(tx store.Tx) error{
		"a row lost":  func(tx store.Tx) error { return tx.Delete(archiveKey(segments[len(segments)-1].From)) },
		"the base":    func(tx store.Tx) error { return tx.Delete(baseKey) },
		"a row short": func(tx store.Tx) error { return tx.Put(archiveKey(segments[1].From), []byte("x")) },
	} {
		t.Run(name, func(t *testing.T) {
			rows := make(map[string][]byte)
			err := f.store.Update(t.Context(), func(tx store.Tx) error {
				for _, s := range segments {
					rows[string(archiveKey(s.From))] = get(tx, archiveKey(s.From))
				}
				rows[string(baseKey)] = get(tx, baseKey)
				return change(tx)
			})
			if err != nil {
				t.Fatal(err)
			}
			_, alone := f.verify()
			_, both := VerifyWithArchive(t.Context(), f.store, a, Options{})
			if alone == nil || both == nil {
				t.Errorf("the database alone: %v; with the archive: %v", alone, both)
			}
			err = f.store.Update(t.Context(), func(tx store.Tx) error {
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
	f := newFixture(t)
	a, _ := f.folder()
	f.old()
	c := Cutter{Log: f.log.Log, Reader: f.log.Reader, Archive: a, Keep: keep}
	if _, err := c.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	base, err := readBase(t.Context(), f.store)
	if err != nil {
		t.Fatal(err)
	}
	base.apiKeys[APIKeyName{tenantA, "key_that_never_was"}] = APIKeyState{Sequence: 3}
	signed, err := base.sign(f.log.signer, f.log.ChainID())
	if err != nil {
		t.Fatal(err)
	}
	if err := f.store.Update(t.Context(), func(tx store.Tx) error { return tx.Put(baseKey, signed) }); err != nil {
		t.Fatal(err)
	}
	if _, err := f.verify(); err != nil {
		t.Errorf("the database alone: %v", err)
	}
	_, err = VerifyWithArchive(t.Context(), f.store, a, Options{})
	if broken, ok := IsBroken(err); !ok || broken.Sequence != 62 {
		t.Errorf("with the archive: %v", err)
	}
}

// A segment contains an accepted rollback like any other entry, and an older checkpoint is also
// found in the archive.
func TestEpochsAndOlderCheckpointsAreArchived(t *testing.T) {
	f := newFixture(t)
	a, _ := f.folder()
	f.fill(20)
	at, err := f.log.Follow(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	since, err := SignCheckpoint(at, f.log.signer)
	if err != nil {
		t.Fatal(err)
	}
	f.log.Halt(&RollbackError{LostFrom: 22, LostTo: 40, Epoch: 1, Place: "test"})
	admin := authz.Principal{Tenant: authz.SystemTenant, Kind: authz.APIKey, ID: "admin", Scopes: []authz.Scope{authz.SystemAdmin}}
	if _, err := f.log.AcceptRollback(t.Context(), admin, "restored a backup"); err != nil {
		t.Fatal(err)
	}
	f.fill(20)
	f.advance(keep + lateness + time.Second)
	f.fill(1)
	written := f.hashes()
	for _, most := range []int{20, 1, 30} { // the epoch begins between segments too
		c := Cutter{Log: f.log.Log, Reader: f.log.Reader, Archive: a, Keep: keep, most: most}
		if _, err := c.Run(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	f.clean()
	f.whole(a, written)
	report, err := VerifyWithArchive(t.Context(), f.store, a, Options{Since: since})
	if err != nil || report.Since == nil || report.Epoch != 2 || len(report.Rollbacks) != 1 {
		t.Errorf("since %+v, epoch %d, rollbacks %v: %v", report.Since, report.Epoch, report.Rollbacks, err)
	}
	if report, err := VerifyStore(t.Context(), f.store, Options{Since: since}); err != nil || report.Since == nil {
		t.Errorf("the database alone, since %+v: %v", report.Since, err)
	}
}

// Events of sealing keys decide which key is published, however old they are.
func TestEventsOfSealingKeysOutliveTheirEntries(t *testing.T) {
	f := newFixture(t)
	a, _ := f.folder()
	change := func(what EventType, id string, o Outcome) {
		f.record(Event{Type: what, Outcome: o, Principal: principal(authz.SystemTenant), Resource: Resource{Type: SealingKeyResource, ID: id}})
	}
	types := []EventType{SealingKeyCreated, SealingKeyRetired}
	visited := func() (seen []string) {
		t.Helper()
		err := f.log.Visit(t.Context(), authz.SystemTenant, func(e *Entry) { seen = append(seen, string(e.EventType)+" "+e.Resource.ID) }, types...)
		if err != nil {
			t.Fatal(err)
		}
		return seen
	}
	change(SealingKeyCreated, "first", Success)
	change(SealingKeyCreated, "second", Success)
	change(SealingKeyRetired, "second", Denied)
	change(SealingKeyRestored, "first", Success)
	f.fill(5)
	f.advance(keep + lateness + time.Second)
	change(SealingKeyRetired, "first", Success)
	change(SealingKeyCreated, "third", Success)
	want := []string{"SEALING_KEY_CREATED first", "SEALING_KEY_CREATED second", "SEALING_KEY_RETIRED first", "SEALING_KEY_CREATED third"}
	if got := visited(); !slices.Equal(got, want) {
		t.Fatalf("before: %q", got)
	}
	for range 2 {
		c := Cutter{Log: f.log.Log, Reader: f.log.Reader, Archive: a, Keep: keep, most: 3}
		if n, err := c.Run(t.Context()); err != nil || n == 0 {
			t.Fatalf("cut %d: %v", n, err)
		}
		if got := visited(); !slices.Equal(got, want) {
			t.Fatalf("after: %q", got)
		}
		f.advance(keep + lateness + time.Second)
		f.fill(1)
	}
	f.verifyAll(a)
}

// A block of a tenant's entries is summarised even if some of them are archived, and a summary is
// removed with the last entry of its block.
func TestSummariesAreOfWhatIsLeft(t *testing.T) {
	f := newFixture(t)
	a, _ := f.folder()
	f.log.SetSigning(SignBatches)
	few := func(n int) {
		var wg sync.WaitGroup
		for i := range n {
			what := CredentialListed
			if i%40 == 0 {
				what = AuditRead
			}
			wg.Go(func() {
				err := f.log.Record(t.Context(), Event{Type: what, Outcome: Success, Principal: principal(tenantA), Resource: Resource{Type: LogResource}})
				if err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
	}
	summaries := func() (blocks []uint64) {
		t.Helper()
		err := ScanAll(t.Context(), f.store, summaryRange, func(key, _ []byte) error {
			blocks = append(blocks, sequenceOf(key[len(key)-8:]))
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		return blocks
	}
	reads := func() int {
		t.Helper()
		entries, next, err := f.log.Query(t.Context(), principal(tenantA), Query{EventType: string(AuditRead), Limit: 100})
		if err != nil || next != "" {
			t.Fatalf("a query: %q %v", next, err)
		}
		return len(entries)
	}
	few(400) // the second block is not full
	f.advance(keep + lateness + time.Second)
	few(1)
	c := Cutter{Log: f.log.Log, Reader: f.log.Reader, Archive: a, Keep: keep, most: 100}
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
	if _, err := f.log.Follow(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := summaries(); !slices.Equal(got, []uint64{1, 2}) {
		t.Errorf("there are summaries of the blocks %v", got)
	}
	if got := reads(); got != 1+1+10 {
		t.Errorf("the tenant finds %d entries", got)
	}
	f.verifyAll(a)
	f.advance(keep + lateness + time.Second)
	few(1)
	if _, err := c.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := summaries(); len(got) != 0 {
		t.Errorf("there are summaries of the blocks %v", got)
	}
	f.verifyAll(a)
}

// If two cutters run at the same time, one of them cuts each segment.
func TestTwoCuttersDoNoHarm(t *testing.T) {
	f := newFixture(t)
	a, _ := f.folder()
	written := f.old()
	second := Cutter{Log: f.log.Log, Reader: f.log.Reader, Archive: a, Keep: keep, most: 20}
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
	f.clean()
	f.whole(a, written)
}
