package reader

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"

	"golang.org/x/mod/sumdb/tlog"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/chain"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/fault"
)

// Inclusion is the proof that an entry is in the tree.
type Inclusion struct {
	Sequence    uint64
	Hash        string // hash of the entry, lower-case hex; the leaf is made from its 32 bytes
	Index, Size int64  // index of the leaf, size of the tree
	Path        tlog.RecordProof
}

// Key is the public key that verifies the log's signatures.
type Key struct {
	ChainID     string
	Fingerprint string // [audit.Fingerprint]
	Verifier    string // [audit.VerifierKey] of the newest checkpoint's epoch
	Public      *dualsig.PublicKey
}

// Reasons in audit entries.
const (
	reasonNoEntry = "no_such_entry"
	reasonNoTile  = "no_such_tile"
)

var (
	// errNotProven is the one answer for all entries that a tenant gets no proof of.
	errNotProven = fault.New(fault.NotFound, "the tenant has no entry with this sequence, or none yet that a checkpoint covers: new ones are covered within a second; one that is in the archive only is proved with its hash and the tiles")

	errNoTile = fault.New(fault.NotFound, "the tree of the newest checkpoint has no such tile, or its entries are in the archive only")

	errTreeSize = fault.New(fault.Invalid, "a size is at least 1 and at most that of the newest checkpoint's tree, and consistency is from the smaller to the larger")
	errTileArea = fault.New(fault.Invalid, "a tile has a level from -1 to 7, an index of at least 0 and a width from 1 to 256")
)

// ReadCheckpoint returns the newest checkpoint: the signed note and its content. Errors of this
// method and of the methods below: fault.Forbidden; fault.Unavailable, also before the first
// checkpoint.
func (rd *Reader) ReadCheckpoint(ctx context.Context, p authz.Principal) (signed []byte, c audit.Checkpoint, err error) {
	err = rd.readProof(ctx, p, "", func(s chain.TreeView) error {
		signed, c = s.Signed, s.Newest
		return nil
	})
	if err != nil {
		return nil, audit.Checkpoint{}, fmt.Errorf("reading the newest checkpoint: %w", err)
	}
	return signed, c, nil
}

// ReadKey returns the public key of the log.
func (rd *Reader) ReadKey(ctx context.Context, p authz.Principal) (k Key, err error) {
	err = rd.readProof(ctx, p, "", func(s chain.TreeView) error {
		public := rd.chain.Key
		k = Key{rd.chain.ChainID, rd.log.Fingerprint(), audit.VerifierKey(rd.chain.ChainID, s.Newest.Epoch, public), public}
		return nil
	})
	if err != nil {
		return Key{}, fmt.Errorf("reading the log's key: %w", err)
	}
	return k, nil
}

// ProveInclusion returns the proof that an entry of p's tenant is in the tree of a size; 0 means
// the tree of the newest checkpoint. Errors: fault.NotFound, the same for entries of other tenants,
// for entries that never existed, and for those that the tree does not have yet or the database no
// longer has; fault.Invalid for a size that the tree does not have.
func (rd *Reader) ProveInclusion(ctx context.Context, p authz.Principal, sequence uint64, size int64) (proof Inclusion, err error) {
	err = rd.readProof(ctx, p, reasonNoEntry, func(s chain.TreeView) error {
		if size == 0 {
			size = s.Newest.Size
		}
		if size < 1 || size > s.Newest.Size {
			return errTreeSize
		}
		row, found, err := chain.FindSequence(rd.chain, s.Reader, string(p.Tenant), sequence)
		if err != nil {
			return err
		}
		index, known := s.IndexOf(sequence)
		if !found || !known || index >= size {
			return errNotProven
		}
		root, err := s.RootAt(size)
		if err != nil {
			return err
		}
		path, err := tlog.ProveRecord(size, index, s.Hashes)
		if err != nil {
			return audit.TreeError(err)
		}
		if tlog.CheckRecord(path, size, root, index, tlog.Hash(audit.LeafHash(row.Hash))) != nil {
			return audit.ErrDamagedLog // the tenant's index and the tree disagree about the entry
		}
		proof = Inclusion{sequence, hex.EncodeToString(row.Hash[:]), index, size, path}
		return nil
	})
	if err != nil {
		return Inclusion{}, fmt.Errorf("proving an inclusion: %w", err)
	}
	return proof, nil
}

// ProveConsistency returns the proof that the tree of size to begins with the tree of size from. If
// to is 0, it is the size of the newest checkpoint. Error: fault.Invalid for sizes that the tree
// does not have.
func (rd *Reader) ProveConsistency(ctx context.Context, p authz.Principal, from, to int64) (from2, to2 int64, path tlog.TreeProof, err error) {
	err = rd.readProof(ctx, p, "", func(s chain.TreeView) error {
		if to == 0 {
			to = s.Newest.Size
		}
		if from < 1 || to < from || to > s.Newest.Size {
			return errTreeSize
		}
		path, err = tlog.ProveTree(to, from, s.Hashes)
		return audit.TreeError(err)
	})
	if err != nil {
		return 0, 0, nil, fmt.Errorf("proving consistency: %w", err)
	}
	return from, to, path, nil
}

// Tile returns the first hashes of a tile of C2SP tlog-tiles, 32 bytes each. The width is their
// number; 0 means 256. Level -1 is the bundle of the entries themselves: for each entry, two bytes
// of length, always 32, and the entry's hash. Bundles are made from the entries in the database, so
// archived entries have hashes in level 0 only. Errors: fault.NotFound if the newest checkpoint's
// tree does not have that many hashes, fault.Invalid.
func (rd *Reader) Tile(ctx context.Context, p authz.Principal, level int, index int64, width int) (data []byte, err error) {
	if width == 0 {
		width = audit.TileWidth
	}
	err = rd.readProof(ctx, p, reasonNoTile, func(s chain.TreeView) error {
		if level < -1 || level > audit.MaxLevel || index < 0 || width < 1 || width > audit.TileWidth {
			return errTileArea
		}
		hashes := s.Newest.Size >> (audit.TileHeight * max(level, 0))
		if index > hashes/audit.TileWidth || index*audit.TileWidth+int64(width) > hashes {
			return errNoTile
		}
		if level == -1 {
			data, err = bundle(s, index*audit.TileWidth, width)
			return err
		}
		t := tlog.Tile{H: audit.TileHeight, L: level, N: index, W: width}
		data, err = tlog.ReadTileData(t, s.Hashes)
		return audit.TreeError(err)
	})
	if err != nil {
		return nil, fmt.Errorf("reading a tile: %w", err)
	}
	return data, nil
}

// bundle returns the hashes of n entries, beginning at an index of the tree.
func bundle(s chain.TreeView, first int64, n int) ([]byte, error) {
	leaves, err := tlog.ReadTileData(tlog.Tile{H: audit.TileHeight, N: first / audit.TileWidth, W: n}, s.Hashes)
	if err != nil {
		return nil, audit.TreeError(err)
	}
	data := make([]byte, 0, n*34)
	for i := range n {
		hash, err := s.HashOf(audit.SequenceAt(s.Epochs, first+int64(i)))
		if errors.Is(err, audit.ErrNoEntry) {
			return nil, errNoTile
		}
		if err != nil {
			return nil, err
		}
		if leaf := audit.LeafHash(hash); !bytes.Equal(leaf[:], leaves[i*tlog.HashSize:][:tlog.HashSize]) {
			return nil, audit.ErrDamagedLog
		}
		data = binary.BigEndian.AppendUint16(data, uint16(len(hash)))
		data = append(data, hash[:]...)
	}
	return data, nil
}

// readProof lets p read from the tree and records the read before it returns, at most once a minute
// for each caller. If p may see nothing there, it records a denied attempt with the reason, equally
// often.
func (rd *Reader) readProof(ctx context.Context, p authz.Principal, reason string, read func(chain.TreeView) error) error {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	if err := rd.guard.Admit(ctx, p, authz.ReadProof); err != nil {
		return err
	}
	err := rd.chain.ViewTree(ctx, read)
	switch {
	case errors.Is(err, fault.NotFound):
		return cmp.Or(rd.guard.RecordAttemptOncePerMinute(ctx, p, authz.ReadProof, audit.Denied, reason), err)
	case err != nil:
		return err
	}
	return rd.guard.RecordOncePerMinute(ctx, audit.Event{Type: audit.ProofRead, Outcome: audit.Success, Principal: p, Resource: audit.Resource{Type: audit.LogResource}})
}

// CheckpointAt returns the checkpoint at an entry, as any reader of the log would compute it. It is
// not signed and always the same. Errors: fault.NotFound if the entry does not exist or is only in
// the archive.
func (rd *Reader) CheckpointAt(ctx context.Context, sequence uint64) (c audit.Checkpoint, err error) {
	_, newest, err := rd.chain.NewestCheckpoint(ctx)
	if err != nil && !errors.Is(err, chain.ErrNoCheckpoint) {
		return audit.Checkpoint{}, err
	}
	if err != nil || newest.Sequence < sequence {
		if _, err := rd.Follower.Follow(ctx); err != nil {
			return audit.Checkpoint{}, err
		}
	}
	err = rd.chain.ViewTree(ctx, func(s chain.TreeView) error {
		c, err = s.CheckpointAt(sequence)
		return err
	})
	if err != nil {
		return audit.Checkpoint{}, fmt.Errorf("computing a checkpoint: %w", err)
	}
	return c, nil
}
