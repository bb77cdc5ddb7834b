package keeper

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/entries"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/format"
	"github.com/latticekeep/latticekeep/test/audittest"
)

const everything = 1 << 40

func packer(f *audittest.Fixture) *Packer {
	return &Packer{Log: f.Log.Log, Logger: slog.New(slog.DiscardHandler), Fresh: 1}
}

// packed packs all closed entries of a fixture.
func packed(t testing.TB, f *audittest.Fixture) (n uint64) {
	t.Helper()
	f.Follow()
	n, err := packer(f).Pack(context.Background(), everything)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// answers returns what readers say about the log.
func answers(t *testing.T, f *audittest.Fixture) string {
	t.Helper()
	var out strings.Builder
	out.Write(entriesOf(f))
	for _, tenant := range []authz.TenantID{audittest.TenantA, audittest.TenantB} {
		err := f.Log.Visit(t.Context(), tenant, func(e *audit.Entry) { fmt.Fprintln(&out, e.Sequence, e.Signature) }, audit.CredentialUnsealed, audit.AuditRead)
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, e := range f.Entries() {
		c, err := f.Log.CheckpointAt(t.Context(), e.Sequence)
		fmt.Fprintln(&out, c, err)
	}
	return out.String()
}

// entriesOf returns the lines of an export without the closing one, which is signed anew.
func entriesOf(f *audittest.Fixture) []byte {
	export := bytes.TrimSuffix(f.Export(), []byte("\n"))
	return export[:bytes.LastIndexByte(export, '\n')+1]
}

func mixed(f *audittest.Fixture) {
	f.Fill(70)
	f.Log.SetSigning(writer.SignBatches)
	f.Group(40)
	f.Group(3)
	f.Log.SetSigning(writer.SignEntries)
	f.Fill(50)
}

func TestPackedEntriesAreReadAsBefore(t *testing.T) {
	audittest.OnBothStores(t, func(t *testing.T, newFixture func(testing.TB) *audittest.Fixture) {
		f := newFixture(t)
		mixed(f)
		f.Follow()
		before := answers(t, f)
		if n := packed(t, f); n != 160 {
			t.Errorf("%d entries were packed, want those of 5 blocks", n)
		}
		if singles, packs := len(f.RowsOf(audit.EntryRange)), len(f.RowsOf(entries.PackRange)); singles != 164-160 || packs != 5 {
			t.Errorf("%d rows of entries and %d packs", singles, packs)
		}
		if answers(t, f) != before {
			t.Error("readers say something else of packed entries")
		}
		if report, err := f.Verify(); err != nil || report.Entries != 164 {
			t.Error(report, err)
		}
		if n := packed(t, f); n != 0 {
			t.Errorf("%d entries were packed again", n)
		}
		f.Restart()
		f.Fill(40)
		if _, err := f.Verify(); err != nil {
			t.Error("after a restart:", err)
		}
	})
}

// What has changed since it was found is not packed: by another packer, or by somebody who wrote.
func TestOnlyOnePackerPacksABlock(t *testing.T) {
	audittest.OnBothStores(t, func(t *testing.T, newFixture func(testing.TB) *audittest.Fixture) {
		f := newFixture(t)
		mixed(f)
		f.Follow()
		var all atomic.Uint64
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() {
				n, err := packer(f).Pack(context.Background(), everything)
				if err != nil {
					t.Error(err)
				}
				all.Add(n)
			})
		}
		wg.Wait()
		if all.Load() != 160 {
			t.Errorf("three packers packed %d entries", all.Load())
		}
		if _, err := f.Verify(); err != nil {
			t.Error(err)
		}
	})
}

// A damaged row stays where it is, and what a verification says of it too.
func TestDamagedRowsAreNotPacked(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Fill(100)
	f.Follow()
	f.Put(func(tx store.Tx) error { return tx.Put(audit.EntryKey(40), []byte("damaged")) })
	_, before := f.Verify()
	if n := packed(t, f); n != 64 {
		t.Errorf("%d entries were packed", n)
	}
	if _, err := f.Verify(); err == nil || err.Error() != before.Error() {
		t.Errorf("%v, and before %v", err, before)
	}
}

// Entries that no checkpoint covers yet, the newest ones, and blocks that are not full, keep rows of
// their own. So do all while the log is halted, or while a process does not read packs.
func TestOnlyClosedEntriesArePacked(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Fill(70)
	steps := []struct {
		name   string
		follow bool
		packer Packer
		want   int
	}{
		{"no checkpoint", false, Packer{Fresh: 1}, 0},
		{"too new", true, Packer{Fresh: 40}, 0},
		{"as many as usual stay", true, Packer{}, 0},
		{"an older replica", true, Packer{Fresh: 1, Ready: func(context.Context) (bool, error) { return false, nil }}, 0},
		{"an older block", true, Packer{Fresh: 39}, 1},
		{"another", true, Packer{Fresh: 1}, 2},
	}
	for _, s := range steps {
		if s.follow {
			f.Follow()
		}
		s.packer.Log = f.Log.Log
		if _, err := s.packer.Pack(t.Context(), everything); err != nil {
			t.Fatal(s.name, err)
		}
		if n := len(f.RowsOf(entries.PackRange)); n != s.want {
			t.Errorf("%s: %d packs, want %d", s.name, n, s.want)
		}
	}
}

// The first pack keeps releases away that would not find the entries. It changes no row that decides,
// which would need an entry of its own.
func TestTheFirstPackRaisesTheFormat(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Fill(70)
	deployment := []byte(`{"format":2, "chain_id":"chain_test"}`)
	f.Put(func(tx store.Tx) error {
		return errors.Join(format.Raise(tx, format.State, format.State), tx.Put([]byte("deployment"), deployment))
	})
	least := func() format.Format {
		found, err := format.Of(t.Context(), f.Store)
		if err != nil {
			t.Fatal(err)
		}
		return found
	}
	f.Follow()
	if n, err := (&Packer{Log: f.Log.Log}).Pack(t.Context(), everything); n != 0 || err != nil || least().Reader != format.State {
		t.Fatalf("format %+v before the first pack: %d, %v", least(), n, err)
	}
	packed(t, f)
	if least().Reader != format.Packs || least().Writer != format.Packs {
		t.Errorf("format %+v", least())
	}
	if now := f.RowsOf(audit.KeyRange([]byte("deployment")))["deployment"]; !bytes.Equal(now, deployment) {
		t.Errorf("the row of the deployment is %s, and was %s", now, deployment)
	}
}

// The question costs a query of the database for each transaction otherwise.
func TestReplicasAreAskedOnceAMinute(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Fill(400)
	f.Follow()
	asked := 0
	p := packer(f)
	p.Ready = func(context.Context) (bool, error) {
		asked++
		return true, nil
	}
	if n, err := p.Pack(t.Context(), everything); err != nil || n < 8*entries.BlockSize {
		t.Fatal(n, err)
	}
	if asked != 1 {
		t.Errorf("asked %d times", asked)
	}
	p.asked = p.asked.Add(-askEvery)
	f.Fill(64)
	f.Follow()
	if _, err := p.Pack(t.Context(), everything); err != nil || asked != 2 {
		t.Errorf("asked %d times after a minute: %v", asked, err)
	}
}

// A pass packs no more than twice what was written since the pass before.
func TestPassesPackAsMuchAsIsWritten(t *testing.T) {
	f := audittest.NewFixture(t)
	p := packer(f)
	for _, step := range []struct{ written, want int }{{200, 0}, {32, 2}, {8, 2}, {8, 3}, {200, 14}} {
		f.Fill(step.written)
		f.Follow()
		if err := p.pass(t.Context()); err != nil {
			t.Fatal(err)
		}
		if n := len(f.RowsOf(entries.PackRange)); n != step.want {
			t.Errorf("%d packs after %d more entries, want %d", n, step.written, step.want)
		}
	}
}

// A copy of the file at any time, as after a crash, is whole, and packing goes on from it.
func TestPackingGoesOnAfterACrash(t *testing.T) {
	f := audittest.NewFixture(t)
	mixed(f)
	f.Follow()
	want := answers(t, f)
	if n, err := packer(f).Pack(t.Context(), 70); n != 64 || err != nil {
		t.Fatal(n, err)
	}
	g := f.Opened(f.Copied())
	if got := answers(t, g); got != want {
		t.Error("half of the entries are packed, and readers say something else")
	}
	if n := packed(t, g); n != 96 {
		t.Errorf("%d more entries were packed", n)
	}
	if got := answers(t, g); got != want {
		t.Error("readers say something else after the crash")
	}
	if _, err := g.Verify(); err != nil {
		t.Error(err)
	}
}

// Packed entries move to the archive. A pack of which some stay keeps these.
func TestPackedEntriesAreArchived(t *testing.T) {
	audittest.OnBothStores(t, func(t *testing.T, newFixture func(testing.TB) *audittest.Fixture) {
		f := newFixture(t)
		mixed(f)
		packed(t, f)
		f.Advance(2 * audittest.Keep)
		f.Fill(50)
		packed(t, f)
		a, _ := f.Folder()
		n, err := (&Cutter{Log: f.Log.Log, Reader: f.Log.Reader, Archive: a, Keep: audittest.Keep, most: 50}).Run(t.Context())
		if err != nil || n == 0 {
			t.Fatal(n, err)
		}
		all := f.Entries()
		to := f.Segments()[len(f.Segments())-1].To
		if all[0].Sequence != to+1 || to%entries.BlockSize == 0 {
			t.Errorf("entries from %d on are left after a cut at %d", all[0].Sequence, to)
		}
		for key := range f.RowsOf(entries.PackRange) {
			if key < string(entries.PackKey(to/entries.BlockSize)) {
				t.Errorf("the pack %x is left", key)
			}
		}
		if _, err := f.Verify(); err != nil {
			t.Error(err)
		}
		packed(t, f)
		if _, err := f.Verify(); err != nil {
			t.Error("packed again:", err)
		}
	})
}

func TestTheOldestEntryMayBePacked(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Fill(70)
	f.Advance(90 * 24 * time.Hour)
	f.Fill(70)
	f.Follow()
	before, err := f.Log.OldestTime(t.Context())
	if n := packed(t, f); err != nil || n == 0 {
		t.Fatal(n, err)
	}
	if after, err := f.Log.OldestTime(t.Context()); err != nil || !after.Equal(before) {
		t.Errorf("packed, the oldest entry is of %v, was %v: %v", after, before, err)
	}
}
