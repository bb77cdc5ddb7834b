package audit_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"testing"

	"golang.org/x/mod/sumdb/tlog"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/test/audittest"
)

// A builder that grows in steps of any length, and is encoded and decoded between them, makes the
// same tiles and roots as tlog.
func TestTheTreeIsThatOfRFC6962(t *testing.T) {
	for _, last := range []int64{1, 2, 255, 256, 257, 511, 512, 513, 1000, 65535, 65536, 65537, 66000} {
		t.Run(fmt.Sprint(last), func(t *testing.T) {
			random := rand.New(rand.NewPCG(1, uint64(last)))
			reference, b := &audittest.ReferenceTree{}, &audit.TreeBuilder{}
			rows := make(map[string][]byte)
			for b.Size < last {
				for range min(last-b.Size, 1+random.Int64N(last)) {
					reference.Add(t, audittest.Numbered(b.Size))
					b.Add(audittest.Numbered(b.Size))
				}
				for _, tile := range append(b.TakeFilled(), b.Partial()...) {
					rows[string(audit.TileKey(tile.Level, tile.Index))] = tile.Data
				}
				if got, want := b.Root(), reference.Root(t, b.Size); got != want {
					t.Fatalf("the root of %d is %s, want %s", b.Size, got, want)
				}
				var err error
				if b, err = audit.DecodeTree(b.Encode()); err != nil {
					t.Fatal(err)
				}
			}
			want := reference.Rows(t)
			if len(rows) != len(want) || int64(len(rows)) != tilesIn(last) {
				t.Errorf("%d tiles, want %d, and by their count %d", len(rows), len(want), tilesIn(last))
			}
			for key, data := range want {
				if !bytes.Equal(rows[key], data) {
					t.Errorf("tile %x is another", key)
				}
			}
		})
	}
}

// Computed with another program: Python's hashlib, by the recursion of RFC 6962 §2.1 over the
// SHA3-256 of the numbers from 0 on, eight bytes each.
func TestTheTreeHasItsGoldenRootsAndTiles(t *testing.T) {
	b := &audit.TreeBuilder{}
	roots := map[int64]string{
		0:   "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
		1:   "f8f7c4d4e95023d0a1ed781b65d72d2e9120d891753083a9259717daefacadd8",
		3:   "4ce06aed4eee9cc9b43ce1219d2eff15f83356840a835ac4cf829b42224e22b2",
		300: "48a0c5948395fef396f0f1f9a605140d23824daacd9b2c99d20554c71e2f09d8",
	}
	for b.Size <= 300 {
		if want, ok := roots[b.Size]; ok && hex.EncodeToString(audit.TileData([]tlog.Hash{b.Root()})) != want {
			t.Errorf("the root of %d is %x, want %s", b.Size, b.Root(), want)
		}
		if b.Size == 300 {
			break
		}
		b.Add(audittest.Numbered(b.Size))
	}
	edge := b.Partial()
	if len(edge) != 2 || edge[0].Level != 0 || edge[0].Index != 1 || edge[1].Level != 1 || edge[1].Index != 0 {
		t.Fatalf("%+v", edge)
	}
	if sum := sha256.Sum256(edge[0].Data); hex.EncodeToString(sum[:]) != "b026345dfdc8f9df6069db4601a2677eab5bdc50938f04753d17bfe5697a9493" {
		t.Errorf("the last 44 leaves have the SHA-256 %x", sum)
	}
	if hex.EncodeToString(edge[1].Data) != "cd3ad6468f36e688cd9eb221d3f07299d08de4c5d10c12d5d328fe666362566f" {
		t.Errorf("the first 256 leaves have the root %x", edge[1].Data)
	}
}

func FuzzTree(f *testing.F) {
	f.Fuzz(func(t *testing.T, in []byte) {
		b, err := audit.DecodeTree(in)
		if err != nil {
			return
		}
		if !bytes.Equal(b.Encode(), in) {
			t.Fatal("a tree has another spelling")
		}
		if b.Size < 1<<40 { // the decoded builder continues to grow
			before := b.Size
			b.Add(audittest.Numbered(0))
			if b.Size != before+1 {
				t.Fatal("the tree did not grow")
			}
			b.Root()
		}
	})
}

// tilesIn returns the number of tiles of a tree of a size.
func tilesIn(size int64) (n int64) {
	for hashes := size; hashes > 0; hashes >>= audit.TileHeight {
		n += (hashes + audit.TileWidth - 1) / audit.TileWidth
	}
	return n
}
