package keeper

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
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
	"github.com/latticekeep/latticekeep/internal/audit/entries"
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

func TestTheOldestEntriesMoveBeyondANumber(t *testing.T) {
	f := audittest.NewFixture(t)
	a, _ := f.Folder()
	run := func(c Cutter, want uint64) {
		t.Helper()
		c.Log, c.Reader, c.Archive = f.Log.Log, f.Log.Reader, a
		if n, err := c.Run(t.Context()); err != nil || n != want {
			t.Fatalf("cut %d, want %d: %v", n, want, err)
		}
		stored, err := f.Log.Chain.StoredEntries(t.Context())
		if hashes := f.Hashes(); err != nil || int(stored) != len(hashes) {
			t.Errorf("the database says that it has %d entries, and has %d: %v", stored, len(hashes), err)
		}
	}
	f.Fill(29)                              // entries 1 to 30
	run(Cutter{MaxEntries: 10, most: 5}, 0) // all are younger than an hour
	f.Advance(leastKeep)
	run(Cutter{MaxEntries: 26, most: 5}, 0) // the four beyond do not fill a segment
	run(Cutter{MaxEntries: 10, Keep: audittest.Keep, most: 5}, 20)
	f.Fill(10) // which are too young, with the four entries about segments
	run(Cutter{MaxEntries: 10, most: 5}, 10)
	f.Advance(leastKeep)
	run(Cutter{MaxEntries: 0, most: 1}, 0) // zero moves none
	run(Cutter{MaxEntries: 10, most: 5}, 5)
	verifyAll(f, a)
	// An epoch skips sequences. They count for nothing, and a segment does not wait for them.
	f.Log.Halt(&audit.RollbackError{LostFrom: f.Log.Newest() + 1, LostTo: f.Log.Newest() + 1000, Epoch: 1, Source: "test"})
	admin := authz.Principal{Tenant: authz.SystemTenant, Kind: authz.APIKey, ID: "admin", Scopes: []authz.Scope{authz.SystemAdmin}}
	if _, err := f.Log.AcceptRollback(t.Context(), admin, "restored a backup"); err != nil {
		t.Fatal(err)
	}
	f.Fill(20)
	f.Advance(leastKeep)
	c := Cutter{Log: f.Log.Log, Reader: f.Log.Reader, Archive: a, MaxEntries: 5, most: 4}
	if _, err := c.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := len(f.Hashes()); n < 5 || n > 5+4+8 { // each segment leaves an entry that is too young
		t.Errorf("%d entries stay", n)
	}
	verifyAll(f, a)
}

func TestACutEndsAtCheckpointsAndGroups(t *testing.T) {
	f := audittest.NewFixture(t)
	a, _ := f.Folder()
	written := f.Old()
	ends := make(map[uint64]bool) // last sequences of groups
	err := entries.ScanAll(t.Context(), f.Store, audit.EntryRange, func(row entries.Row) error {
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
		for at := 1; reached; at += audittest.Stride(3) {
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

// What is archived takes no room in the database, also if it was packed or signed in groups.
func TestArchivedEntriesLeaveNoRows(t *testing.T) {
	f := audittest.NewFixture(t)
	a, _ := f.Folder()
	f.Fill(300)
	f.Log.SetSigning(writer.SignBatches)
	f.Group(40)
	f.Fill(100)
	for i := range 5 {
		id := fmt.Sprintf("cred_%d", i)
		f.Sealed(audittest.TenantA, id, "1", strings.Repeat("a", 64))
		f.Record(audit.Event{Type: audit.CredentialDeleted, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantA), Resource: audit.Resource{ID: id, Type: audit.CredentialResource}})
	}
	f.Follow()
	if n, err := (&Packer{Log: f.Log.Log, Fresh: 20}).Pack(t.Context(), 1<<20); n < 300 || err != nil {
		t.Fatal(n, err)
	}
	rows := []store.Range{audit.EntryRange, entries.PackRange, audit.BatchRange, audit.SummaryRange, audit.TenantRange, audit.CurrentRange}
	size := func() (size int) {
		for key, row := range f.RowsOf(rows...) {
			size += len(key) + len(row)
		}
		return size
	}
	before := size()
	f.Advance(audittest.Keep + 2*lateness)
	f.Fill(2)
	written := f.Hashes()
	if n, err := (&Cutter{Log: f.Log.Log, Reader: f.Log.Reader, Archive: a, Keep: audittest.Keep, most: 100}).Run(t.Context()); n < 300 || err != nil {
		t.Fatal(n, err)
	}
	f.Clean()
	whole(f, a, written)
	if left := f.RowsOf(entries.PackRange, audit.SummaryRange, audit.CurrentRange); len(left) > 0 {
		t.Errorf("%d rows are left", len(left))
	}
	if after := size(); after > before/20 {
		t.Errorf("%d bytes of rows are left of %d", after, before)
	}
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

// A restored backup writes another history of the same sequences. The archive keeps both.
func TestAnArchivedHistoryIsNotOverwritten(t *testing.T) {
	f := audittest.NewFixture(t)
	a, _ := f.Folder()
	f.Fill(20)
	backup := f.Copied()
	run := func(f *audittest.Fixture) audit.Segment {
		t.Helper()
		f.Fill(20)
		f.Advance(audittest.Keep + 2*lateness)
		f.Fill(1)
		if n, err := (&Cutter{Log: f.Log.Log, Reader: f.Log.Reader, Archive: a, Keep: audittest.Keep, most: 41}).Run(t.Context()); err != nil || n == 0 {
			t.Fatalf("cut %d: %v", n, err)
		}
		return f.Segments()[0]
	}
	lost := run(f)
	restored := run(f.Opened(backup))
	if lost.From != restored.From || lost.To != restored.To || lost.Hash == restored.Hash {
		t.Fatalf("%+v, %+v", lost, restored)
	}
	for _, s := range []audit.Segment{lost, restored} {
		data, err := a.Get(t.Context(), s.Name)
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := verify.Segment(data, s, verify.Options{PublicKey: f.Log.Signer.Public()}); err != nil {
			t.Errorf("%s: %v", s.Name, err)
		}
	}
}

// A base omits deleted items together with the archived entries of their deletion. Rows of deleted
// items that reappear are found.
func TestABaseForgetsWhatIsGone(t *testing.T) {
	f := audittest.NewFixture(t)
	a, _ := f.Folder()
	gone := func(id string) {
		f.Record(audit.Event{Type: audit.CredentialDeleted, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantA), Resource: audit.Resource{ID: id, Type: audit.CredentialResource}})
	}
	apiKey := func(of audit.EventType, id string) {
		f.Record(audit.Event{Type: of, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantA), Resource: audit.Resource{ID: id, Type: audit.APIKeyResource}})
	}
	for i := range 5 {
		f.Sealed(audittest.TenantA, fmt.Sprintf("cred_%d", i), "1", strings.Repeat("a", 64))
	}
	gone("cred_0")
	gone("cred_1")
	f.Sealed(audittest.TenantA, "cred_1", "1", strings.Repeat("b", 64)) // sealed again, and stays
	gone("cred_2")
	apiKey(audit.APIKeyCreated, "key_0")
	apiKey(audit.APIKeyCreated, "key_1")
	apiKey(audit.APIKeyRevoked, "key_0")
	f.Advance(audittest.Keep + 2*lateness)
	gone("cred_3") // after the archived part
	apiKey(audit.APIKeyRevoked, "key_1")
	f.Fill(2)
	written := f.Hashes()
	var row []byte
	f.Put(func(tx store.Tx) error {
		row = audittest.Get(tx, audit.CurrentKey(string(audittest.TenantA), "cred_0"))
		return nil
	})
	c := Cutter{Log: f.Log.Log, Reader: f.Log.Reader, Archive: a, Keep: audittest.Keep}
	f.Follow()
	broken := &failing{Store: f.Store, at: 2} // the Update after the cut's
	f.Log.Chain.Store = broken
	if _, err := c.Run(t.Context()); err == nil {
		t.Fatal("it did not fail")
	}
	f.Log.Chain.Store = f.Store
	whole(f, a, written) // including everything that is still to be removed
	if _, err := c.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	f.Clean()
	whole(f, a, written)
	base, err := f.Log.Chain.LoadBase(t.Context(), audit.AllLists)
	if err != nil || len(base.Credentials) != 3 || len(base.APIKeys) != 1 {
		t.Fatalf("%v: the base knows %v and %v", err, base.Credentials, base.APIKeys)
	}
	report, err := f.Verify()
	if err != nil {
		t.Fatal(err)
	}
	for id, known := range map[string]bool{"cred_0": false, "cred_1": true, "cred_2": false, "cred_3": true, "cred_4": true} {
		state, ok := report.Credentials[audit.CredentialKey{Tenant: audittest.TenantA, Credential: id}]
		if ok != known || state.Deleted != (id == "cred_3") {
			t.Errorf("%s: %+v, %v", id, state, ok)
		}
		if err := f.Store.View(t.Context(), func(r store.Reader) error { return audittest.ErrorOf(chain.Current(r, audittest.TenantA, id)) }); (err == nil) != known {
			t.Errorf("%s: its current version is %v", id, err)
		}
	}
	f.Put(func(tx store.Tx) error { return tx.Put(audit.CurrentKey(string(audittest.TenantA), "cred_0"), row) })
	if _, err := f.Verify(); err == nil {
		t.Error("a row that is back is not found")
	}
}

// A cut changes, adds and removes what its entries say, and leaves everything else as it is.
func TestACutChangesWhatItsEntriesTouch(t *testing.T) {
	audittest.OnBothStores(t, cutTwice)
}

func cutTwice(t *testing.T, newFixture func(testing.TB) *audittest.Fixture) {
	f := newFixture(t)
	a, _ := f.Folder()
	record := func(what audit.EventType, kind, id string) {
		f.Record(audit.Event{Type: what, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantA), Resource: audit.Resource{ID: id, Type: kind}})
	}
	cut := func() *audit.Base {
		t.Helper()
		f.Advance(audittest.Keep + 2*lateness)
		f.Fill(2)
		written := f.Hashes()
		if n, err := (&Cutter{Log: f.Log.Log, Reader: f.Log.Reader, Archive: a, Keep: audittest.Keep}).Run(t.Context()); n == 0 || err != nil {
			t.Fatal(n, err)
		}
		whole(f, a, written) // which compares the base with that of the archive
		base, err := chain.ReadBase(t.Context(), f.Store)
		if err != nil {
			t.Fatal(err)
		}
		return base
	}
	for i := range 60 {
		f.Sealed(audittest.TenantA, fmt.Sprintf("cred_%d", i), "1", strings.Repeat("a", 64))
		record(audit.APIKeyCreated, audit.APIKeyResource, fmt.Sprintf("key_%d", i))
	}
	first := cut()
	before := f.RowsOf(audit.BaseListRange)
	record(audit.CredentialDeleted, audit.CredentialResource, "cred_1")
	record(audit.APIKeyRevoked, audit.APIKeyResource, "key_1")
	record(audit.APIKeyRevoked, audit.APIKeyResource, "key_that_never_was")
	f.Sealed(audittest.TenantA, "cred_2", "2", strings.Repeat("b", 64))
	f.Sealed(audittest.TenantB, "cred_1", "1", strings.Repeat("c", 64))
	second := cut()
	after := f.RowsOf(audit.BaseListRange)
	changed := 0
	for key, row := range after {
		if !bytes.Equal(before[key], row) {
			changed++
		}
	}
	if changed == 0 || changed > len(after)/2 {
		t.Errorf("%d of %d rows changed", changed, len(after))
	}
	if _, there := second.Credentials[audit.CredentialKey{Tenant: audittest.TenantA, Credential: "cred_1"}]; there || len(second.Credentials) != 60 || len(first.Credentials) != 60 || len(second.APIKeys) != 59 {
		t.Errorf("%d credentials and then %d, %d API keys", len(first.Credentials), len(second.Credentials), len(second.APIKeys))
	}
	if state := second.Credentials[audit.CredentialKey{Tenant: audittest.TenantA, Credential: "cred_2"}]; state.Version != "2" {
		t.Error(state)
	}
}

// A base of an earlier release has its lists in one row. The next cut makes rows of them, once every
// replica reads these.
func TestABaseOfAnEarlierReleaseGetsRows(t *testing.T) {
	f := audittest.NewFixture(t)
	a, _ := f.Folder()
	for i := range 40 {
		f.Sealed(audittest.TenantA, fmt.Sprintf("cred_%d", i), "1", strings.Repeat("a", 64))
	}
	f.Advance(audittest.Keep + 2*lateness)
	f.Fill(2)
	ready := true
	c := Cutter{Log: f.Log.Log, Reader: f.Log.Reader, Archive: a, Keep: audittest.Keep, Ready: func(context.Context) (bool, error) { return ready, nil }}
	if n, err := c.Run(t.Context()); n == 0 || err != nil {
		t.Fatal(n, err)
	}
	base, err := chain.ReadBase(t.Context(), f.Store)
	if err != nil || len(base.Credentials) != 40 {
		t.Fatal(len(base.Credentials), err)
	}
	verifyAll(f, a)
	lists := f.RowsOf(audit.BaseListRange)
	f.Put(func(tx store.Tx) error {
		for key := range lists {
			if err := tx.Delete([]byte(key)); err != nil {
				return err
			}
		}
		return tx.Put(audit.BaseKey, f.SignFormerBase(base))
	})
	f.Restart()
	verifyAll(f, a)
	f.Sealed(audittest.TenantA, "cred_0", "2", strings.Repeat("b", 64))
	f.Record(audit.Event{Type: audit.CredentialDeleted, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantA), Resource: audit.Resource{ID: "cred_1", Type: audit.CredentialResource}})
	f.Advance(audittest.Keep + 2*lateness)
	f.Fill(2)
	written := f.Hashes()
	c.Log, c.Reader, ready = f.Log.Log, f.Log.Reader, false
	if n, err := c.Run(t.Context()); n != 0 || err != nil {
		t.Fatalf("cut %d while a replica does not read it: %v", n, err)
	}
	ready = true
	if n, err := c.Run(t.Context()); n == 0 || err != nil {
		t.Fatal(n, err)
	}
	ready = false // which does not matter any more
	whole(f, a, written)
	if base, err = chain.ReadBase(t.Context(), f.Store); err != nil || len(base.Credentials) != 39 || !base.HasRows() {
		t.Fatal(len(base.Credentials), err)
	}
	if state := base.Credentials[audit.CredentialKey{Tenant: audittest.TenantA, Credential: "cred_0"}]; state.Version != "2" {
		t.Error(state)
	}
	// Each row is one that the base commits to. A row that is changed, lost or added is found.
	rows := f.RowsOf(audit.BaseListRange)
	for key, row := range rows {
		if strings.Count(key, "/") < 3 || rows[key+"0"] != nil {
			continue // a child stands where one is to be added
		}
		for name, change := range map[string]func(tx store.Tx) error{
			"changed": func(tx store.Tx) error { return tx.Put([]byte(key), append(bytes.Clone(row), 0)) },
			"lost":    func(tx store.Tx) error { return tx.Delete([]byte(key)) },
			"added":   func(tx store.Tx) error { return tx.Put([]byte(key+"0"), row) },
		} {
			f.Put(change)
			if _, err := f.Verify(); err == nil {
				t.Errorf("%q is %s, and the log verifies", key, name)
			}
			f.Put(func(tx store.Tx) error { return errors.Join(tx.Put([]byte(key), row), tx.Delete([]byte(key+"0"))) })
		}
	}
	if _, err := f.Verify(); err != nil {
		t.Error(err)
	}
}

// Two processes archive at once. Each removes only what it has read back itself, even if the other
// has archived more by then.
func TestWhatAnotherArchivesIsNotRemovedForIt(t *testing.T) {
	f := audittest.NewFixture(t)
	a, _ := f.Folder()
	f.Old()
	f.Follow()
	other := f.Another(f.Store)
	theirs := &Cutter{Log: other.Log, Reader: other.Reader, Archive: a}
	// The first segment of c is archived, and its entries are still there.
	f.Log.Chain.Store = &failing{Store: f.Store, at: 2}
	c := &Cutter{Log: f.Log.Log, Reader: f.Log.Reader, Archive: a, Keep: audittest.Keep, most: 20}
	if _, err := c.Run(t.Context()); err == nil {
		t.Fatal("it did not fail")
	}
	f.Log.Chain.Store = f.Store
	first := f.Segments()[0]
	newest, found, err := theirs.leftOver(t.Context())
	if err != nil || !found || newest != first {
		t.Fatal(newest, found, err)
	}
	// The other process has read the segment back. Before it removes the entries, c archives
	// another segment.
	f.Log.Chain.Store = &failing{Store: f.Store, at: 4} // Updates: removal of the first segment, checkpoint, cut, removal of the second
	if _, err := c.Run(t.Context()); err == nil {
		t.Fatal("it did not fail")
	}
	f.Log.Chain.Store = f.Store
	if n := len(f.Segments()); n != 2 {
		t.Fatalf("%d segments", n)
	}
	if err := removeArchived(t.Context(), theirs.Log.Chain, newest.To); err != nil {
		t.Fatal(err)
	}
	if n := len(f.RowsOf(store.Range{From: audit.EntryKey(first.To + 1), To: audit.EntryKey(f.Segments()[1].To + 1)})); n == 0 {
		t.Error("entries were removed on the word of another process")
	}
	if _, err := c.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	f.Clean()
}
