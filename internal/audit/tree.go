package audit

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"slices"

	"golang.org/x/mod/sumdb/tlog"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// The RFC 6962 tree over the hashes of all entries is stored as tiles of C2SP tlog-tiles. A tile of
// level L holds up to 256 consecutive hashes of the level 8·L of the tree, 32 bytes each. Level 0
// holds the leaves, SHA-256(0 ‖ hash of the entry). Only the last tile of a level can be partial,
// and it is overwritten as it grows. A tile never loses hashes, so one row serves all earlier
// trees, too.
const (
	tileHeight = 8
	tileWidth  = 1 << tileHeight

	// maxLevel is the highest tile level of a tree of 2⁶³ leaves.
	maxLevel = 62 / tileHeight
)

func tileKey(level int, index int64) []byte {
	return binary.BigEndian.AppendUint64(append([]byte("audit/tile/"), byte(level)), uint64(index))
}

var tileRange = store.Prefix([]byte("audit/tile/"))

// tile is one row of the tree.
type tile struct {
	level int
	index int64
	data  []byte // 32 bytes for each hash
}

// treeBuilder grows a tree entry by entry. It holds only the partial tiles, which are the whole
// right edge of the tree, and the full tiles that no caller has taken yet. The zero value is the
// empty tree.
type treeBuilder struct {
	size   int64
	edge   [][]tlog.Hash // hashes by level, fewer than 256 each
	filled []tile
}

// add appends the hash of the next entry.
func (b *treeBuilder) add(entry [32]byte) {
	b.size++
	b.put(0, tlog.Hash(leafHash(entry)))
}

func (b *treeBuilder) put(level int, h tlog.Hash) {
	if level == len(b.edge) {
		b.edge = append(b.edge, nil)
	}
	b.edge[level] = append(b.edge[level], h)
	if len(b.edge[level]) < tileWidth {
		return
	}
	b.filled = append(b.filled, tile{level, (b.size >> (tileHeight * (level + 1))) - 1, tileData(b.edge[level])})
	above := perfectHash(b.edge[level])
	b.edge[level] = b.edge[level][:0]
	b.put(level+1, above)
}

// full returns the tiles that were filled since the last call.
func (b *treeBuilder) full() []tile {
	filled := b.filled
	b.filled = nil
	return filled
}

// partial returns the last tile of each level, if that tile is partial.
func (b *treeBuilder) partial() (tiles []tile) {
	for level, hashes := range b.edge {
		if len(hashes) > 0 {
			tiles = append(tiles, tile{level, b.size >> (tileHeight * (level + 1)), tileData(hashes)})
		}
	}
	return tiles
}

// root returns the root hash of the tree.
func (b *treeBuilder) root() tlog.Hash {
	var subtrees []tlog.Hash // perfect subtrees, largest first
	for _, hashes := range slices.Backward(b.edge) {
		for len(hashes) > 0 {
			width := 1
			for 2*width <= len(hashes) {
				width *= 2
			}
			subtrees = append(subtrees, perfectHash(hashes[:width]))
			hashes = hashes[width:]
		}
	}
	if len(subtrees) == 0 {
		return sha256.Sum256(nil)
	}
	root := subtrees[len(subtrees)-1]
	for _, left := range slices.Backward(subtrees[:len(subtrees)-1]) {
		root = tlog.NodeHash(left, root)
	}
	return root
}

// encode returns the builder as bytes: size u64, then the hashes of the partial tiles, from level 0
// up.
func (b *treeBuilder) encode() []byte {
	out := binary.BigEndian.AppendUint64(nil, uint64(b.size))
	for _, hashes := range b.edge {
		out = append(out, tileData(hashes)...)
	}
	return out
}

// decodeTree decodes the bytes of encode. The size determines the number of hashes on each level.
func decodeTree(in []byte) (*treeBuilder, error) {
	if len(in) < 8 {
		return nil, errDamagedLog
	}
	size, rest := binary.BigEndian.Uint64(in), in[8:]
	if size>>63 != 0 {
		return nil, errDamagedLog
	}
	b := &treeBuilder{size: int64(size)}
	for level := 0; b.size>>(tileHeight*level) > 0; level++ {
		n := tlog.HashSize * edgeWidth(b.size, level)
		if len(rest) < n {
			return nil, errDamagedLog
		}
		b.edge = append(b.edge, tileHashes(rest[:n]))
		rest = rest[n:]
	}
	if len(rest) > 0 {
		return nil, errDamagedLog
	}
	return b, nil
}

// edgeWidth returns the number of hashes in the partial tile of a level, in a tree of a size. It
// returns 0 if the level has no partial tile.
func edgeWidth(size int64, level int) int {
	return int(size>>(tileHeight*level)) & (tileWidth - 1)
}

func tileData(hashes []tlog.Hash) []byte {
	data := make([]byte, 0, len(hashes)*tlog.HashSize)
	for _, h := range hashes {
		data = append(data, h[:]...)
	}
	return data
}

// tileHashes returns the hashes of a tile, with capacity for a full tile.
func tileHashes(data []byte) []tlog.Hash {
	hashes := make([]tlog.Hash, 0, tileWidth)
	for h := range slices.Chunk(data, tlog.HashSize) {
		hashes = append(hashes, tlog.Hash(h))
	}
	return hashes
}

// perfectHash returns the hash of a perfect subtree from its hashes on one level. Their number must
// be a power of two.
func perfectHash(hashes []tlog.Hash) tlog.Hash {
	if len(hashes) == 1 {
		return hashes[0]
	}
	half := len(hashes) / 2
	return tlog.NodeHash(perfectHash(hashes[:half]), perfectHash(hashes[half:]))
}

// tiles reads the tree from a snapshot. It implements [tlog.TileReader], so [tlog.TileHashReader]
// can check what it reads against a root.
type tiles struct{ r store.Reader }

// Height implements [tlog.TileReader].
func (t tiles) Height() int { return tileHeight }

// ReadTiles implements [tlog.TileReader].
func (t tiles) ReadTiles(wanted []tlog.Tile) (data [][]byte, err error) {
	for _, w := range wanted {
		b, err := t.read(w.L, w.N, w.W)
		if err != nil {
			return nil, err
		}
		data = append(data, b)
	}
	return data, nil
}

// SaveTiles implements [tlog.TileReader].
func (t tiles) SaveTiles([]tlog.Tile, [][]byte) {}

// read returns the first hashes of a tile, as many as width. Error: errDamagedLog if the tile has
// fewer.
func (t tiles) read(level int, index int64, width int) ([]byte, error) {
	b, err := t.r.Get(tileKey(level, index))
	if err != nil {
		return nil, fmt.Errorf("reading the tree of the log: %w", err)
	}
	if len(b) < width*tlog.HashSize || len(b) > tileWidth*tlog.HashSize || len(b)%tlog.HashSize != 0 {
		return nil, errDamagedLog
	}
	return slices.Clone(b[:width*tlog.HashSize]), nil
}

// builder returns the tree of a size so that it can grow. Error: errDamagedLog if the tiles do not
// have the root. For the empty tree, it ignores the root.
func (t tiles) builder(size int64, root tlog.Hash) (*treeBuilder, error) {
	b := &treeBuilder{size: size}
	if size == 0 {
		return b, nil
	}
	for level := 0; size>>(tileHeight*level) > 0; level++ {
		var data []byte
		if width := edgeWidth(size, level); width > 0 {
			var err error
			if data, err = t.read(level, size>>(tileHeight*(level+1)), width); err != nil {
				return nil, err
			}
		}
		b.edge = append(b.edge, tileHashes(data))
	}
	if b.root() != root {
		return nil, errDamagedLog
	}
	return b, nil
}

// hashes returns a reader of the hashes of a tree. It proves that each hash that it reads is in the
// tree.
func (t tiles) hashes(size int64, root tlog.Hash) tlog.HashReader {
	return tlog.TileHashReader(tlog.Tree{N: size, Hash: root}, t)
}

// treeError returns the error of a reader of hashes. If the tiles do not match the root, the reader
// returns an error of its own, which is damage.
func treeError(err error) error {
	if err != nil && fault.Of(err) == fault.Internal {
		return errDamagedLog
	}
	return err
}

// tilesIn returns the number of tiles of a tree of a size.
func tilesIn(size int64) (n int64) {
	for hashes := size; hashes > 0; hashes >>= tileHeight {
		n += (hashes + tileWidth - 1) / tileWidth
	}
	return n
}
