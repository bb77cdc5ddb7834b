package writer_test

import (
	"errors"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/chain"
	"github.com/latticekeep/latticekeep/internal/audit/keeper"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/audittest"
)

// Verification compares a stored checkpoint at exactly the base with the base, and the tiles too.
func TestTheTreeAtTheBaseIsHeld(t *testing.T) {
	f := audittest.NewFixture(t)
	a, _ := f.Folder()
	f.Old()
	f.Follow()
	if _, err := (&keeper.Cutter{Log: f.Log.Log, Reader: f.Log.Reader, Archive: a, Keep: audittest.Keep}).Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	base, err := chain.ReadBase(t.Context(), f.Store)
	if err != nil || base == nil {
		t.Fatal(base, err)
	}
	at := audit.Checkpoint{
		ChainID: "chain_test", Epoch: audit.EpochOf(base.Epochs, base.Sequence()).Number, Size: base.Size(), Root: base.Tree.Root(),
		Sequence: base.Sequence(), Hash: base.Head.Hash, Time: time.UnixMicro(base.Head.Micros),
	}
	for name, change := range map[string]func(c *audit.Checkpoint, tile []byte){
		"as it was":     nil,
		"another tile":  func(_ *audit.Checkpoint, tile []byte) { tile[5] ^= 1 },
		"another root":  func(c *audit.Checkpoint, _ []byte) { c.Root[0] ^= 1 },
		"another entry": func(c *audit.Checkpoint, _ []byte) { c.Hash[0] ^= 1 },
	} {
		g := f.Opened(f.Copied())
		err := g.Store.Update(t.Context(), func(tx store.Tx) error {
			c := at
			if err := writer.TruncateTree(tx, c); err != nil {
				return err
			}
			index := c.Size >> audit.TileHeight
			tile := audittest.Get(tx, audit.TileKey(0, index))
			if change != nil {
				change(&c, tile)
			}
			return errors.Join(tx.Put(audit.TileKey(0, index), tile), tx.Put(audit.CheckpointKey, audittest.SignedNote(t, f, c)), writer.TruncateSummaries(tx, c.Sequence))
		})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := g.Verify(); (err == nil) != (change == nil) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
