package audit

import (
	"errors"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/store"
)

// Verification compares a stored checkpoint at exactly the base with the base, and the tiles too.
func TestTheTreeAtTheBaseIsHeld(t *testing.T) {
	f := newFixture(t)
	a, _ := f.folder()
	f.old()
	f.follow()
	if _, err := (&Cutter{Log: f.log.Log, Reader: f.log.Reader, Archive: a, Keep: keep}).Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	base, err := readBase(t.Context(), f.store)
	if err != nil || base == nil {
		t.Fatal(base, err)
	}
	at := Checkpoint{
		ChainID: "chain_test", Epoch: epochOf(base.epochs, base.Sequence()).number, Size: base.Size(), Root: base.tree.root(),
		Sequence: base.Sequence(), Hash: base.head.hash, Time: time.UnixMicro(base.head.micros),
	}
	for name, change := range map[string]func(c *Checkpoint, tile []byte){
		"as it was":     nil,
		"another tile":  func(_ *Checkpoint, tile []byte) { tile[5] ^= 1 },
		"another root":  func(c *Checkpoint, _ []byte) { c.Root[0] ^= 1 },
		"another entry": func(c *Checkpoint, _ []byte) { c.Hash[0] ^= 1 },
	} {
		g := f.opened(f.copied())
		err := g.store.Update(t.Context(), func(tx store.Tx) error {
			c := at
			if err := takeBackTree(tx, c); err != nil {
				return err
			}
			index := c.Size >> tileHeight
			tile := get(tx, tileKey(0, index))
			if change != nil {
				change(&c, tile)
			}
			return errors.Join(tx.Put(tileKey(0, index), tile), tx.Put(checkpointKey, signedNote(t, f, c)), takeBackSummaries(tx, c.Sequence))
		})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := g.verify(); (err == nil) != (change == nil) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
