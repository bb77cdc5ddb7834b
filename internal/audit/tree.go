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
	TileHeight = 8
	TileWidth  = 1 << TileHeight

	// MaxLevel is the highest tile level of a tree of 2⁶³ leaves.
	MaxLevel = 62 / TileHeight
)

// TileKey returns the key of a tile.
func TileKey(level int, index int64) []byte {
	return binary.BigEndian.AppendUint64(append([]byte("audit/tile/"), byte(level)), uint64(index))
}

// TileRange holds all tiles.
var TileRange = store.Prefix([]byte("audit/tile/"))

// Tile is one row of the tree.
type Tile struct {
	Level int
	Index int64
	Data  []byte // 32 bytes for each hash
}

// TreeBuilder grows a tree entry by entry. It holds only the partial tiles, which are the whole
// right edge of the tree, and the full tiles that no caller has taken yet. The zero value is the
// empty tree.
type TreeBuilder struct {
	Size   int64
	Edge   [][]tlog.Hash // hashes by level, fewer than 256 each
	Filled []Tile
}

// Add appends the hash of the next entry.
func (b *TreeBuilder) Add(entry [32]byte) {
	b.Size++
	b.put(0, tlog.Hash(LeafHash(entry)))
}

func (b *TreeBuilder) put(level int, h tlog.Hash) {
	if level == len(b.Edge) {
		b.Edge = append(b.Edge, nil)
	}
	b.Edge[level] = append(b.Edge[level], h)
	if len(b.Edge[level]) < TileWidth {
		return
	}
	b.Filled = append(b.Filled, Tile{level, (b.Size >> (TileHeight * (level + 1))) - 1, tileData(b.Edge[level])})
	above := PerfectHash(b.Edge[level])
	b.Edge[level] = b.Edge[level][:0]
	b.put(level+1, above)
}

// TakeFilled returns the tiles that were filled since the last call.
func (b *TreeBuilder) TakeFilled() []Tile {
	filled := b.Filled
	b.Filled = nil
	return filled
}

// Partial returns the last tile of each level, if that tile is partial.
func (b *TreeBuilder) Partial() (tiles []Tile) {
	for level, hashes := range b.Edge {
		if len(hashes) > 0 {
			tiles = append(tiles, Tile{level, b.Size >> (TileHeight * (level + 1)), tileData(hashes)})
		}
	}
	return tiles
}

// Root returns the root hash of the tree.
func (b *TreeBuilder) Root() tlog.Hash {
	var subtrees []tlog.Hash // perfect subtrees, largest first
	for _, hashes := range slices.Backward(b.Edge) {
		for len(hashes) > 0 {
			width := 1
			for 2*width <= len(hashes) {
				width *= 2
			}
			subtrees = append(subtrees, PerfectHash(hashes[:width]))
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
func (b *TreeBuilder) encode() []byte {
	out := binary.BigEndian.AppendUint64(nil, uint64(b.Size))
	for _, hashes := range b.Edge {
		out = append(out, tileData(hashes)...)
	}
	return out
}

// decodeTree decodes the bytes of encode. The size determines the number of hashes on each level.
func decodeTree(in []byte) (*TreeBuilder, error) {
	if len(in) < 8 {
		return nil, ErrDamagedLog
	}
	size, rest := binary.BigEndian.Uint64(in), in[8:]
	if size>>63 != 0 {
		return nil, ErrDamagedLog
	}
	b := &TreeBuilder{Size: int64(size)}
	for level := 0; b.Size>>(TileHeight*level) > 0; level++ {
		n := tlog.HashSize * edgeWidth(b.Size, level)
		if len(rest) < n {
			return nil, ErrDamagedLog
		}
		b.Edge = append(b.Edge, TileHashes(rest[:n]))
		rest = rest[n:]
	}
	if len(rest) > 0 {
		return nil, ErrDamagedLog
	}
	return b, nil
}

// edgeWidth returns the number of hashes in the partial tile of a level, in a tree of a size. It
// returns 0 if the level has no partial tile.
func edgeWidth(size int64, level int) int {
	return int(size>>(TileHeight*level)) & (TileWidth - 1)
}

func tileData(hashes []tlog.Hash) []byte {
	data := make([]byte, 0, len(hashes)*tlog.HashSize)
	for _, h := range hashes {
		data = append(data, h[:]...)
	}
	return data
}

// TileHashes returns the hashes of a tile, with capacity for a full tile.
func TileHashes(data []byte) []tlog.Hash {
	hashes := make([]tlog.Hash, 0, TileWidth)
	for h := range slices.Chunk(data, tlog.HashSize) {
		hashes = append(hashes, tlog.Hash(h))
	}
	return hashes
}

// PerfectHash returns the hash of a perfect subtree from its hashes on one level. Their number must
// be a power of two.
func PerfectHash(hashes []tlog.Hash) tlog.Hash {
	if len(hashes) == 1 {
		return hashes[0]
	}
	half := len(hashes) / 2
	return tlog.NodeHash(PerfectHash(hashes[:half]), PerfectHash(hashes[half:]))
}

// Tiles reads the tree from a snapshot. It implements [tlog.TileReader], so [tlog.TileHashReader]
// can check what it reads against a root.
type Tiles struct{ Reader store.Reader }

// Height implements [tlog.TileReader].
func (t Tiles) Height() int { return TileHeight }

// ReadTiles implements [tlog.TileReader].
func (t Tiles) ReadTiles(wanted []tlog.Tile) (data [][]byte, err error) {
	for _, w := range wanted {
		b, err := t.Read(w.L, w.N, w.W)
		if err != nil {
			return nil, err
		}
		data = append(data, b)
	}
	return data, nil
}

// SaveTiles implements [tlog.TileReader].
func (t Tiles) SaveTiles([]tlog.Tile, [][]byte) {}

// Read returns the first hashes of a tile, as many as width. Error: ErrDamagedLog if the tile has
// fewer.
func (t Tiles) Read(level int, index int64, width int) ([]byte, error) {
	b, err := t.Reader.Get(TileKey(level, index))
	if err != nil {
		return nil, fmt.Errorf("reading the tree of the log: %w", err)
	}
	if len(b) < width*tlog.HashSize || len(b) > TileWidth*tlog.HashSize || len(b)%tlog.HashSize != 0 {
		return nil, ErrDamagedLog
	}
	return slices.Clone(b[:width*tlog.HashSize]), nil
}

// Builder returns the tree of a size so that it can grow. Error: ErrDamagedLog if the tiles do not
// have the root. For the empty tree, it ignores the root.
func (t Tiles) Builder(size int64, root tlog.Hash) (*TreeBuilder, error) {
	b := &TreeBuilder{Size: size}
	if size == 0 {
		return b, nil
	}
	for level := 0; size>>(TileHeight*level) > 0; level++ {
		var data []byte
		if width := edgeWidth(size, level); width > 0 {
			var err error
			if data, err = t.Read(level, size>>(TileHeight*(level+1)), width); err != nil {
				return nil, err
			}
		}
		b.Edge = append(b.Edge, TileHashes(data))
	}
	if b.Root() != root {
		return nil, ErrDamagedLog
	}
	return b, nil
}

// Hashes returns a reader of the hashes of a tree. It proves that each hash that it reads is in the
// tree.
func (t Tiles) Hashes(size int64, root tlog.Hash) tlog.HashReader {
	return tlog.TileHashReader(tlog.Tree{N: size, Hash: root}, t)
}

// TreeError returns the error of a reader of hashes. If the tiles do not match the root, the reader
// returns an error of its own, which is damage.
func TreeError(err error) error {
	if err != nil && fault.Of(err) == fault.Internal {
		return ErrDamagedLog
	}
	return err
}
