package audittest

import (
	"crypto/sha3"
	"encoding/binary"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"golang.org/x/mod/sumdb/tlog"
)

// ReferenceTree is the tree as tlog itself stores it, hash after hash.
type ReferenceTree struct {
	size   int64
	stored []tlog.Hash
}

func (r *ReferenceTree) ReadHashes(indexes []int64) (hashes []tlog.Hash, err error) {
	for _, i := range indexes {
		hashes = append(hashes, r.stored[i])
	}
	return hashes, nil
}

// Add appends an entry, by its hash.
func (r *ReferenceTree) Add(t testing.TB, entry [32]byte) {
	t.Helper()
	hashes, err := tlog.StoredHashes(r.size, entry[:], r)
	if err != nil {
		t.Fatal(err)
	}
	r.stored = append(r.stored, hashes...)
	r.size++
}

// Root returns the root of the tree of a size.
func (r *ReferenceTree) Root(t testing.TB, size int64) tlog.Hash {
	t.Helper()
	root, err := tlog.TreeHash(size, r)
	if err != nil {
		t.Fatal(err)
	}
	return root
}

// Rows returns the expected rows of the tree, by key.
func (r *ReferenceTree) Rows(t testing.TB) map[string][]byte {
	t.Helper()
	rows := make(map[string][]byte)
	for _, w := range tlog.NewTiles(audit.TileHeight, 0, r.size) {
		data, err := tlog.ReadTileData(w, r)
		if err != nil {
			t.Fatal(err)
		}
		rows[string(audit.TileKey(w.L, w.N))] = data
	}
	return rows
}

// Numbered returns the hash of an entry for tests that need only the hash.
func Numbered(i int64) [32]byte { return sha3.Sum256(binary.BigEndian.AppendUint64(nil, uint64(i))) }
