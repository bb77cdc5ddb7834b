package entries_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/entries"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/audittest"
)

// rowsIn returns what a scan of a range visits.
func rowsIn(t *testing.T, r store.Reader, rng store.Range) (seen []string) {
	t.Helper()
	err := entries.Scan(r, rng, func(key, row []byte) bool {
		seen = append(seen, string(key)+string(row))
		return true
	})
	if err != nil {
		t.Fatal(err)
	}
	return seen
}

// A scan in either direction, over any range, sees the same of every mixture of packs and rows.
func TestScansSeeTheSameOfPackedEntries(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Fill(60)
	f.Log.SetSigning(writer.SignBatches)
	f.Group(50)
	rows := audittest.CopyStore(t, f.Store)
	gap := rows.With(func(tx store.Tx) error { // as after an accepted loss
		for n := uint64(40); n < 70; n++ {
			if err := tx.Delete(audit.EntryKey(n)); err != nil {
				return err
			}
		}
		return nil
	})
	bounds := []uint64{0, 1, 32, 33, 34, 39, 70, 97, 111, audit.MaxInteger + 1}
	for _, m := range []*audittest.Memory{rows, gap} {
		for _, to := range []uint64{1, 32, 80, 111} {
			packed := m.With(func(tx store.Tx) error { return audittest.PackUpTo(tx, to) })
			mixed := m.With(func(tx store.Tx) error { return audittest.PackUpTo(tx, to) }).With(func(tx store.Tx) error { // a block in the middle stays
				var undo [][2][]byte
				err := entries.Scan(tx, store.Range{From: audit.EntryKey(33), To: audit.EntryKey(65)}, func(key, row []byte) bool {
					undo = append(undo, [2][]byte{bytes.Clone(key), bytes.Clone(row)})
					return true
				})
				for _, u := range undo {
					if err == nil {
						err = tx.Put(u[0], u[1])
					}
				}
				return errors.Join(err, tx.Delete(entries.PackKey(1)))
			})
			for _, other := range []*audittest.Memory{packed, mixed} {
				for n := uint64(0); n < 130; n++ {
					want, _ := m.Tx().Get(audit.EntryKey(n))
					got, err := entries.ReadRow(other.Tx(), n)
					if err != nil || !bytes.Equal(got, want) || (got == nil) != (want == nil) {
						t.Fatalf("the row of %d, with packs up to %d: %x, %v; want %x", n, to, got, err, want)
					}
				}
				for _, low := range bounds {
					for _, high := range bounds {
						for _, reverse := range []bool{false, true} {
							rng := store.Range{From: audit.EntryKey(low), To: audit.EntryKey(high), Reverse: reverse}
							if !slices.Equal(rowsIn(t, m.Tx(), rng), rowsIn(t, other.Tx(), rng)) {
								t.Fatalf("a scan from %d to %d (reverse %v) with packs up to %d differs", low, high, reverse, to)
							}
						}
					}
				}
				for _, rng := range []store.Range{audit.EntryRange, {From: append(audit.EntryKey(30), 0), To: append(audit.EntryKey(40), 0)}} {
					if !slices.Equal(rowsIn(t, m.Tx(), rng), rowsIn(t, other.Tx(), rng)) {
						t.Fatalf("a scan of %q to %q differs", rng.From, rng.To)
					}
				}
			}
		}
	}
}

// The packs of this program are those of the format.
func TestPacksHaveTheFormat(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Fill(40)
	var blocks []*entries.Block
	rows := make(map[uint64][]byte)
	err := f.Store.View(t.Context(), func(r store.Reader) (err error) {
		if blocks, _, err = entries.FindBlocks(r, 0, 40, 9); err != nil {
			return err
		}
		return entries.Scan(r, store.Range{From: audit.EntryKey(1), To: audit.EntryKey(33)}, func(key, row []byte) bool {
			rows[audit.SequenceOf(key[len(audit.EntryRange.From):])] = bytes.Clone(row)
			return true
		})
	})
	if err != nil || len(blocks) != 1 || !blocks[0].Encode() {
		t.Fatalf("%d blocks: %v", len(blocks), err)
	}
	f.Put(func(tx store.Tx) error {
		done, err := blocks[0].Put(tx)
		if !done {
			t.Error("not packed")
		}
		return err
	})
	var ours []byte
	_ = f.Store.View(t.Context(), func(r store.Reader) (err error) { ours, err = r.Get(entries.PackKey(0)); return err })
	theirs := audittest.EncodePack(rows)
	if len(ours) > 32*(3310+300)+1000 || len(theirs) > len(ours)+100 || len(ours) > len(theirs)+100 {
		t.Errorf("a pack of %d bytes, and %d by the format", len(ours), len(theirs))
	}
	for _, pack := range [][]byte{ours, theirs} {
		m := new(audittest.Memory)
		_ = m.Tx().Put(entries.PackKey(0), pack)
		for n := range uint64(33) {
			if row, err := entries.ReadRow(m.Tx(), n); err != nil || !bytes.Equal(row, rows[n]) {
				t.Errorf("the row of %d: %x, %v", n, row, err)
			}
		}
	}
}

// A block that has changed since it was found keeps its rows.
func TestAChangedBlockIsNotPacked(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Fill(40)
	whole := audittest.CopyStore(t, f.Store)
	var blocks []*entries.Block
	if err := whole.View(context.Background(), func(r store.Reader) (err error) { blocks, _, err = entries.FindBlocks(r, 0, 40, 9); return err }); err != nil {
		t.Fatal(err)
	}
	blocks[0].Encode()
	for name, change := range map[string]func(store.Tx) error{
		"another row":    func(tx store.Tx) error { return tx.Put(audit.EntryKey(7), []byte("other")) },
		"a missing row":  func(tx store.Tx) error { return tx.Delete(audit.EntryKey(7)) },
		"a pack already": func(tx store.Tx) error { return audittest.PackUpTo(tx, 32) },
	} {
		now := whole.With(change)
		before := fmt.Sprint(now.Rows)
		if done, err := blocks[0].Put(now.Tx()); done || err != nil || fmt.Sprint(now.Rows) != before {
			t.Errorf("%s: packed %v, %v", name, done, err)
		}
	}
}

// No bytes make a reader panic, or use memory without bounds.
func FuzzPack(f *testing.F) {
	fix := audittest.NewFixture(f)
	fix.Fill(8)
	rows := make(map[uint64][]byte)
	for key, row := range fix.RowsOf(audit.EntryRange) {
		rows[audit.SequenceOf([]byte(key)[len(audit.EntryRange.From):])] = row
	}
	f.Add(audittest.EncodePack(rows))
	f.Add([]byte{1, 0, 0, 0, 0})
	f.Add([]byte{1, 0, 0, 0, 1, 0, 0, 0, 4, 0, 0, 0, 0})
	f.Fuzz(func(t *testing.T, pack []byte) {
		m := new(audittest.Memory)
		_ = m.Tx().Put(entries.PackKey(0), pack)
		n := 0
		err := entries.Scan(m.Tx(), audit.EntryRange, func(_, row []byte) bool { n++; return len(row) <= 2<<20 })
		if err != nil || n > entries.BlockSize {
			t.Errorf("%d rows: %v", n, err)
		}
		if _, err := entries.Remove(m.Tx(), 3, 100, func(_, _ []byte) error { return nil }); err != nil {
			t.Error(err)
		}
	})
}
