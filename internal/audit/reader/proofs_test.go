package reader_test

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"golang.org/x/mod/sumdb/tlog"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/chain"
	"github.com/latticekeep/latticekeep/internal/audit/entries"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/audittest"
)

// proven returns a log of two tenants with a checkpoint at its end.
func proven(t *testing.T, n int) (f *audittest.Fixture, c audit.Checkpoint) {
	f = audittest.NewFixture(t)
	f.Write(n)
	return f, f.Follow()
}

// Every entry of a tenant is proven in each tree that contains it, from the smallest such tree to
// that of the newest checkpoint.
func TestATenantProvesItsEntriesInEveryTree(t *testing.T) {
	f, newest := proven(t, 520)
	_, c, err := f.Log.ReadCheckpoint(t.Context(), audittest.Principal(audittest.TenantB))
	if err != nil || c != newest {
		t.Fatal(c, err)
	}
	for i, e := range f.Entries() {
		if e.TenantID != string(audittest.TenantB) || e.EventType == audit.ProofRead {
			continue
		}
		for _, size := range []int64{int64(i) + 1, int64(i) + 2, 256, 300, 512, 521, 0} {
			p, err := f.Log.ProveInclusion(t.Context(), audittest.Principal(audittest.TenantB), e.Sequence, size)
			if size != 0 && size <= int64(i) {
				if !errors.Is(err, fault.NotFound) {
					t.Fatalf("entry %d in a tree of %d: %v", e.Sequence, size, err)
				}
				continue
			}
			if err != nil && size > newest.Size && errors.Is(err, fault.Invalid) {
				continue
			}
			if err != nil {
				t.Fatal(err)
			}
			if size == 0 {
				size = newest.Size
			}
			at, err := f.Log.CheckpointAt(t.Context(), uint64(size))
			if err != nil {
				t.Fatal(err)
			}
			hash, _ := hex.DecodeString(e.Hash)
			if p.Sequence != e.Sequence || p.Hash != e.Hash || p.Index != int64(i) || p.Size != size {
				t.Fatalf("%+v", p)
			}
			if err := tlog.CheckRecord(p.Path, size, at.Root, p.Index, tlog.RecordHash(hash)); err != nil {
				t.Fatalf("entry %d in a tree of %d: %v", e.Sequence, size, err)
			}
		}
	}
}

func TestEveryTreeIsConsistentWithLaterOnes(t *testing.T) {
	f, newest := proven(t, 600)
	sizes := []int64{1, 2, 3, 255, 256, 257, 511, 512, 513, 600, 601}
	for i, from := range sizes {
		for _, to := range append([]int64{0}, sizes[i:]...) {
			from2, to2, path, err := f.Log.ProveConsistency(t.Context(), audittest.Principal(audittest.TenantA), from, to)
			if err != nil {
				t.Fatal(err)
			}
			if to == 0 {
				to = newest.Size
			}
			older, err := f.Log.CheckpointAt(t.Context(), uint64(from))
			if err != nil {
				t.Fatal(err)
			}
			newer, err := f.Log.CheckpointAt(t.Context(), uint64(to))
			if err != nil {
				t.Fatal(err)
			}
			if from2 != from || to2 != to {
				t.Fatal(from2, to2)
			}
			if err := tlog.CheckTree(path, to, newer.Root, from, older.Root); err != nil {
				t.Errorf("from %d to %d: %v", from, to, err)
			}
		}
	}
	for _, bad := range [][2]int64{{0, 0}, {-1, 5}, {5, 4}, {5, -1}, {1, 602}, {602, 0}, {math.MinInt64, math.MaxInt64}} {
		if _, _, _, err := f.Log.ProveConsistency(t.Context(), audittest.Principal(audittest.TenantA), bad[0], bad[1]); !errors.Is(err, fault.Invalid) {
			t.Errorf("from %d to %d: %v", bad[0], bad[1], err)
		}
	}
	for _, bad := range []int64{-1, 602, math.MaxInt64, math.MinInt64} {
		if _, err := f.Log.ProveInclusion(t.Context(), audittest.Principal(audittest.TenantA), 3, bad); !errors.Is(err, fault.Invalid) {
			t.Errorf("in a tree of %d: %v", bad, err)
		}
	}
}

// Entries of others, entries that do not exist and entries without a checkpoint get the same answer
// after the same reads.
func TestATenantLearnsNothingOfWhatIsNotItsOwn(t *testing.T) {
	f, _ := proven(t, 500)
	f.Write(4) // not covered by the checkpoint
	entries := f.Entries()
	prove := func(sequence uint64) (reads string, err error) {
		counting := &audittest.CountingStore{Store: f.Store}
		f.Log.Chain.Store = counting
		defer func() { f.Log.Chain.Store = f.Store }()
		_, err = f.Log.ProveInclusion(t.Context(), audittest.Principal(audittest.TenantA), sequence, 0)
		return counting.String(), err
	}
	if _, err := prove(0); !errors.Is(err, fault.NotFound) { // the attempt is recorded once a minute
		t.Fatal(err)
	}
	wantReads, wantErr := prove(0)
	for name, sequence := range map[string]uint64{
		"of the deployment": 1, "of another tenant, the first": 2, "of another tenant": 300 - 1, "of another tenant, not covered": 502,
		"its own, not covered": 503, "its own, the last": 504, "the attempt itself": 506, "never": 507, "never, far": 1 << 40, "no number of an entry": math.MaxUint64,
	} {
		if sequence > 1 && sequence < 507 {
			if own := entries[min(sequence, 505)-1].TenantID == string(audittest.TenantA); own == (name[:2] == "of") && sequence != 506 {
				t.Fatal("the log is not what this test takes it for", name)
			}
		}
		if reads, err := prove(sequence); !errors.Is(err, fault.NotFound) || err.Error() != wantErr.Error() || reads != wantReads {
			t.Errorf("%s: %v after %s, want %v after %s", name, err, reads, wantErr, wantReads)
		}
	}
	if reads, err := prove(303); err != nil || reads == wantReads { // the tree is read for existing entries only
		t.Error("its own:", err, reads)
	}
	if _, err := f.Log.ProveInclusion(t.Context(), audittest.Principal("ten_none"), 3, 0); !errors.Is(err, fault.NotFound) {
		t.Error("a tenant without entries:", err)
	}
}

// A mirror that reads tiles and bundles gets the whole tree and every entry in it.
func TestTilesAreThoseOfTheNewestCheckpoint(t *testing.T) {
	f, c := proven(t, 700)
	f.Write(300) // not covered by the checkpoint
	entries := f.Entries()
	reference := &audittest.ReferenceTree{}
	for _, e := range entries[:c.Size] {
		reference.Add(t, e.Position().Hash)
	}
	for _, tile := range tlog.NewTiles(audit.TileHeight, 0, c.Size) {
		want, err := tlog.ReadTileData(tile, reference)
		if err != nil {
			t.Fatal(err)
		}
		for _, width := range []int{tile.W, 1, tile.W / 2} {
			if width == 0 {
				continue
			}
			got, err := f.Log.Tile(t.Context(), audittest.Principal(audittest.TenantA), tile.L, tile.N, width)
			if err != nil || !bytes.Equal(got, want[:width*tlog.HashSize]) {
				t.Errorf("%s, %d of it: %v", tile.Path(), width, err)
			}
		}
	}
	if whole, err := f.Log.Tile(t.Context(), audittest.Principal(audittest.TenantA), 0, 1, 0); err != nil || len(whole) != 256*32 {
		t.Error(len(whole), err)
	}
	var bundles []byte
	for index, width := range []int{256, 256, 189} {
		bundle, err := f.Log.Tile(t.Context(), audittest.Principal(audittest.TenantA), -1, int64(index), width)
		if err != nil {
			t.Fatal(err)
		}
		bundles = append(bundles, bundle...)
	}
	for i, e := range entries[:c.Size] {
		if got := hex.EncodeToString(bundles[i*34:][:34]); got != "0020"+e.Hash {
			t.Fatalf("entry %d is %s", e.Sequence, got)
		}
	}
	if len(bundles) != 701*34 {
		t.Error(len(bundles))
	}
	for _, absent := range []struct {
		level int
		index int64
		width int
	}{{0, 2, 190}, {0, 2, 0}, {0, 3, 1}, {1, 0, 3}, {1, 1, 1}, {2, 0, 1}, {7, 0, 1}, {-1, 2, 190}, {-1, 3, 1}, {0, math.MaxInt64, 256}, {7, math.MaxInt64, 1}} {
		if _, err := f.Log.Tile(t.Context(), audittest.Principal(audittest.TenantA), absent.level, absent.index, absent.width); !errors.Is(err, fault.NotFound) {
			t.Errorf("%+v: %v", absent, err)
		}
	}
	for _, bad := range []struct {
		level int
		index int64
		width int
	}{{-2, 0, 1}, {8, 0, 1}, {0, -1, 1}, {0, 0, -1}, {0, 0, 257}} {
		if _, err := f.Log.Tile(t.Context(), audittest.Principal(audittest.TenantA), bad.level, bad.index, bad.width); !errors.Is(err, fault.Invalid) {
			t.Errorf("%+v: %v", bad, err)
		}
	}
}

// After entries are only in the archive, the tree still proves the remaining ones and shows the
// hashes of all.
func TestTheTreeNeedsNoEntriesThatWereCut(t *testing.T) {
	f, _ := proven(t, 700)
	want, err := f.Log.CheckpointAt(t.Context(), 600)
	if err != nil {
		t.Fatal(err)
	}
	tile, err := f.Log.Tile(t.Context(), audittest.Principal(audittest.TenantA), 0, 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	err = f.Store.Update(t.Context(), func(tx store.Tx) error {
		for n := uint64(1); n <= 400; n++ {
			e, err := entries.Read(tx, n)
			if err == nil {
				err = errors.Join(tx.Delete(audit.EntryKey(n)), tx.Delete(audit.TenantKey(e.TenantID, e.TenantSequence)))
			}
			if err != nil {
				return err
			}
		}
		return tx.Delete(audit.SummaryKey(string(audittest.TenantA), 0))
	})
	if err != nil {
		t.Fatal(err)
	}
	f.Log.Chain.Followed.Store(nil)
	f.Write(200) // fills tenantA's block whose first rows were removed
	c := f.Follow()
	if got, err := f.Log.CheckpointAt(t.Context(), 600); err != nil || got != want {
		t.Error(got, err)
	}
	if _, err := f.Log.CheckpointAt(t.Context(), 400); !errors.Is(err, fault.NotFound) {
		t.Error(err)
	}
	p, err := f.Log.ProveInclusion(t.Context(), audittest.Principal(audittest.TenantA), 403, 0)
	if err != nil {
		t.Fatal(err)
	}
	hash, _ := hex.DecodeString(p.Hash)
	if err := tlog.CheckRecord(p.Path, c.Size, c.Root, p.Index, tlog.RecordHash(hash)); err != nil {
		t.Error(err)
	}
	if _, err := f.Log.ProveInclusion(t.Context(), audittest.Principal(audittest.TenantA), 399, 0); !errors.Is(err, fault.NotFound) {
		t.Error("an entry that was cut:", err)
	}
	if again, err := f.Log.Tile(t.Context(), audittest.Principal(audittest.TenantA), 0, 0, 0); err != nil || !bytes.Equal(again, tile) {
		t.Error("a tile of entries that were cut:", err)
	}
	for index, gone := range []bool{true, true, false} {
		width := 100
		_, err := f.Log.Tile(t.Context(), audittest.Principal(audittest.TenantA), -1, int64(index), width)
		if errors.Is(err, fault.NotFound) != gone || !gone && err != nil {
			t.Errorf("bundle %d: %v", index, err)
		}
	}
	for _, n := range []uint64{300, 500} { // some rows of tenantA's block 1 are still there
		if audittest.RowOf(f, audit.SummaryKey(string(audittest.TenantA), audit.BlockOf(n))) == nil {
			t.Error("the summary of a block that is still there was removed")
		}
	}
}

// A changed tree or index yields an error and never a proof.
func TestADamagedTreeProvesNothing(t *testing.T) {
	f, _ := proven(t, 700)
	for name, change := range map[string]func(tx store.Tx) error{
		"a leaf": func(tx store.Tx) error {
			b, err := tx.Get(audit.TileKey(0, 1))
			b = bytes.Clone(b)
			b[44*32] ^= 1 // hash of entry 301
			return errors.Join(err, tx.Put(audit.TileKey(0, 1), b))
		},
		"a tile":           func(tx store.Tx) error { return tx.Delete(audit.TileKey(0, 1)) },
		"the tile above":   func(tx store.Tx) error { return tx.Put(audit.TileKey(1, 0), make([]byte, 64)) },
		"a tile too long":  func(tx store.Tx) error { return tx.Put(audit.TileKey(0, 1), make([]byte, 257*32)) },
		"a tile and a bit": func(tx store.Tx) error { return tx.Put(audit.TileKey(0, 2), make([]byte, 255*32+1)) },
		"the index": func(tx store.Tx) error {
			e, err := entries.Read(tx, 301)
			if err != nil {
				return err
			}
			row := audit.IndexRow{Position: e.Position(), EventType: e.EventType, Actor: e.Actor.ID}
			row.Hash[0] ^= 1
			return tx.Put(audit.TenantKey(e.TenantID, e.TenantSequence), row.Encode())
		},
	} {
		t.Run(name, func(t *testing.T) {
			kept := f.RowsOf(audit.TileRange, audit.TenantRange)
			if err := f.Store.Update(t.Context(), change); err != nil {
				t.Fatal(err)
			}
			if p, err := f.Log.ProveInclusion(t.Context(), audittest.Principal(audittest.TenantA), 301, 0); !errors.Is(err, fault.Internal) {
				t.Errorf("%+v, %v", p, err)
			}
			if name != "the index" {
				if _, err := f.Log.Tile(t.Context(), audittest.Principal(audittest.TenantA), 0, 1, 0); !errors.Is(err, fault.Internal) && name != "a tile and a bit" {
					t.Error("a tile:", err)
				}
				if _, err := f.Log.CheckpointAt(t.Context(), 301); !errors.Is(err, fault.Internal) {
					t.Error("a checkpoint:", err)
				}
			}
			err := f.Store.Update(t.Context(), func(tx store.Tx) error {
				for key, row := range kept {
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

// Each read of proofs is authorized and recorded like any other read, but at most once a minute for
// each caller, because a mirror reads much.
func TestReadingProofsIsAllowedAndRecorded(t *testing.T) {
	f, _ := proven(t, 3)
	reads := map[string]func(p authz.Principal) error{
		"checkpoint": func(p authz.Principal) error { _, _, err := f.Log.ReadCheckpoint(t.Context(), p); return err },
		"inclusion":  func(p authz.Principal) error { _, err := f.Log.ProveInclusion(t.Context(), p, 3, 0); return err },
		"consistency": func(p authz.Principal) error {
			_, _, _, err := f.Log.ProveConsistency(t.Context(), p, 1, 0)
			return err
		},
		"tile":   func(p authz.Principal) error { _, err := f.Log.Tile(t.Context(), p, 0, 0, 1); return err },
		"bundle": func(p authz.Principal) error { _, err := f.Log.Tile(t.Context(), p, -1, 0, 1); return err },
		"key":    func(p authz.Principal) error { _, err := f.Log.ReadKey(t.Context(), p); return err },
	}
	newest := func() *audit.Entry { entries := f.Entries(); return entries[len(entries)-1] }
	for name, read := range reads {
		f.Advance(time.Minute)
		before := len(f.Entries())
		for range 3 {
			if err := read(audittest.Principal(audittest.TenantA)); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		if e := newest(); len(f.Entries()) != before+1 || e.EventType != audit.ProofRead || e.Outcome != audit.Success || e.TenantID != string(audittest.TenantA) {
			t.Errorf("%s: %d entries, the last %+v", name, len(f.Entries())-before, e)
		}
		without := audittest.Principal(audittest.TenantA)
		without.Scopes = slices.DeleteFunc(without.Scopes, func(s authz.Scope) bool { return s == authz.AuditRead })
		if err := read(without); !errors.Is(err, fault.Forbidden) {
			t.Errorf("%s without the scope: %v", name, err)
		}
		if e := newest(); e.EventType != audit.ProofRead || e.Outcome != audit.Denied {
			t.Errorf("%s without the scope: %+v", name, e)
		}
	}
	before := len(f.Entries())
	for range 3 {
		if _, err := f.Log.ProveInclusion(t.Context(), audittest.Principal(audittest.TenantA), 1, 0); !errors.Is(err, fault.NotFound) {
			t.Error(err)
		}
	}
	if e := newest(); len(f.Entries()) != before+1 || e.Outcome != audit.Denied || e.Attributes[audit.AttributeReason] != reader.ReasonNoEntry {
		t.Errorf("%+v", e)
	}
	f.Log.Halt(errors.New("a test"))
	for name, read := range reads {
		if err := read(audittest.Principal(audittest.TenantA)); !errors.Is(err, fault.Unavailable) {
			t.Errorf("%s while nothing can be recorded: %v", name, err)
		}
	}
}

func TestTheKeyIsThatOfTheNewestEpoch(t *testing.T) {
	f, _ := proven(t, 3)
	public := f.Log.Signer.Public()
	for epoch := uint64(1); epoch <= 2; epoch++ {
		k, err := f.Log.ReadKey(t.Context(), audittest.Principal(audittest.TenantA))
		want := reader.Key{ChainID: "chain_test", Fingerprint: f.Log.Fingerprint(), Verifier: audit.VerifierKey("chain_test", epoch, public), Public: public}
		if err != nil || k != want {
			t.Errorf("%+v, %v", k, err)
		}
		if epoch == 1 {
			f.Lose(100)
			f.Follow()
		}
	}
}

// The number of rows that a look-up reads depends only on how many entries the tenant has.
func TestALookUpReadsAsManyRowsWhateverItFinds(t *testing.T) {
	f, _ := proven(t, 130)
	for _, rows := range []int{0, 1, 2, 3, 7, 64, 86} {
		err := f.Store.Update(t.Context(), func(tx store.Tx) error {
			tenant := fmt.Sprint("ten_of_", rows)
			own := make(map[uint64]bool)
			for n := range uint64(rows) {
				row, err := chain.ReadIndexRow(tx, string(audittest.TenantA), n+1)
				if err != nil {
					return err
				}
				own[row.Sequence] = true
				if err := tx.Put(audit.TenantKey(tenant, n+5), row.Encode()); err != nil { // the first four were cut
					return err
				}
			}
			want := -1
			for sequence := range uint64(140) {
				counting := &countingReader{Reader: tx}
				row, found, err := chain.FindSequence(f.Log.Chain, counting, tenant, sequence)
				if err != nil || found != own[sequence] || found && row.Sequence != sequence {
					t.Errorf("%d among %d: %v %v %v", sequence, rows, row, found, err)
				}
				if want >= 0 && counting.gets != want {
					t.Errorf("%d among %d: %d rows, want %d", sequence, rows, counting.gets, want)
				}
				want = counting.gets
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

// The lengths in a bundle are those of C2SP tlog-tiles.
func TestABundleIsPrefixedWithLengths(t *testing.T) {
	f, _ := proven(t, 1)
	bundle, err := f.Log.Tile(t.Context(), audittest.Principal(audittest.TenantA), -1, 0, 2)
	if err != nil || len(bundle) != 2*34 || binary.BigEndian.Uint16(bundle) != 32 || binary.BigEndian.Uint16(bundle[34:]) != 32 {
		t.Errorf("%x, %v", bundle, err)
	}
}

// A bundle has the hashes of entries, even if their signatures are damaged.
func TestABundleNeedsNoSignatures(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Log.SetSigning(writer.SignBatches)
	first := f.Group(20)
	c := f.Follow()
	want, err := f.Log.Tile(t.Context(), audittest.Principal(audittest.TenantA), -1, 0, int(c.Size))
	if err != nil {
		t.Fatal(err)
	}
	f.Put(func(tx store.Tx) error { return tx.Delete(audit.BatchKey(first)) })
	got, err := f.Log.Tile(t.Context(), audittest.Principal(audittest.TenantA), -1, 0, int(c.Size))
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("%d bytes: %v", len(got), err)
	}
	f.Put(func(tx store.Tx) error {
		row := audittest.Get(tx, audit.EntryKey(first+3))
		row[len(row)-5] ^= 1
		return tx.Put(audit.EntryKey(first+3), row)
	})
	if _, err := f.Log.Tile(t.Context(), audittest.Principal(audittest.TenantA), -1, 0, int(c.Size)); fault.Of(err) != fault.Internal || err == nil {
		t.Errorf("an altered entry: %v", err)
	}
}
