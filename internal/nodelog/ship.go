package nodelog

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/latticekeep/latticekeep/internal/canonical"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/durable"
)

// shipped is the content of shipped.json: which entries a deployment has recorded, so that the plugin may
// remove them. Losing it loses nothing, because the deployment tells its position.
type shipped struct {
	Version  int    `json:"version"`
	Chain    string `json:"chain"`
	Sequence uint64 `json:"sequence"`
	Hash     string `json:"hash"` // hash of the entry with that sequence
}

const (
	shippedFile = "shipped.json"
	maxShipped  = 4 << 10
)

// readShipped returns the zero value when there is nothing to read.
func readShipped(folder string) *shipped {
	s := new(shipped)
	b, err := os.ReadFile(filepath.Join(folder, shippedFile))
	if err != nil || len(b) > maxShipped || canonical.Decode(b, s) != nil || s.Version != formatVersion {
		return new(shipped)
	}
	return s
}

func (s *shipped) write(folder string) error {
	b, err := canonical.Encode(s)
	if err == nil {
		err = durable.Write(filepath.Join(folder, shippedFile), b)
	}
	return err
}

// Receipt is the newest entry of a chain that a deployment has recorded.
type Receipt struct {
	Sequence uint64
	Hash     string
	Recorded bool // this call has recorded it
}

// Ship has a deployment record the entries from first to last of a node's log as one entry. It records
// nothing when first is at or before its position in that chain, and answers with the position.
type Ship func(ctx context.Context, publicKey []byte, first, last *Entry) (Receipt, error)

// Range is what was shipped. Its zero value is nothing.
type Range struct {
	Chain     string `json:"chain"`
	From      uint64 `json:"from"`
	To        uint64 `json:"to"`
	FirstHash string `json:"first_hash"`
	LastHash  string `json:"last_hash"`
	Count     uint64 `json:"count"`
}

// maxRounds bounds what one call asks a deployment: it tells its position first, and a second call of this
// program may move it meanwhile.
const maxRounds = 4

// ShipAll ships the entries of the log in the directory of a plugin that a deployment does not have yet,
// after verifying them. The deployment says where to begin: shipped.json has no signature, and whoever
// changed entries could name one behind them. A lost answer or two calls at once have nothing recorded
// twice.
func ShipAll(ctx context.Context, dir string, publicKey []byte, ship Ship) (Range, error) {
	key, err := dualsig.ParsePublicKey(publicKey)
	if err != nil {
		return Range{}, err
	}
	folder := Folder(dir, key.ID())
	position := new(shipped)
	for range maxRounds {
		first, last, err := unshipped(folder, key, position)
		switch {
		case err != nil:
			return Range{}, err
		case first == nil && position.Sequence > 0:
			return Range{}, position.write(folder)
		case first == nil:
			return Range{}, nil
		}
		r, err := ship(ctx, publicKey, first, last)
		if err != nil {
			return Range{}, fmt.Errorf("shipping entries %d to %d of this node's log: %w", first.Sequence, last.Sequence, err)
		}
		position = &shipped{formatVersion, first.Chain, r.Sequence, r.Hash}
		switch {
		case r.Recorded && (r.Sequence != last.Sequence || r.Hash != last.Hash()):
			return Range{}, fmt.Errorf("the deployment has recorded entry %d with hash %.64q, and was sent entries until %d with hash %s", r.Sequence, r.Hash, last.Sequence, last.Hash())
		case r.Recorded:
			shipped := Range{first.Chain, first.Sequence, last.Sequence, first.Hash(), last.Hash(), last.Sequence - first.Sequence + 1}
			return shipped, position.write(folder)
		case r.Sequence < first.Sequence:
			return Range{}, fmt.Errorf("the deployment has recorded nothing, and its position is entry %d, before entry %d that it was sent", r.Sequence, first.Sequence)
		}
	}
	return Range{}, fmt.Errorf("the deployment has recorded nothing in %d requests, and names another position each time: see that no other program ships this log", maxRounds)
}

// unshipped verifies the log, and returns the first entry after a position and the last one of all. They
// are nil when there is none after it.
func unshipped(folder string, key *dualsig.PublicKey, position *shipped) (first, last *Entry, err error) {
	after := uint64(0) // sequence of the position in this chain
	w := &walk{key: key}
	w.visit = func(e *Entry) error {
		if w.last == nil && e.Chain == position.Chain {
			after = position.Sequence
		}
		switch {
		case after > 0 && e.Sequence == after && e.Hash() != position.Hash:
			return changed(after, e.Hash(), position.Hash)
		case after > 0 && e.Sequence == after+1 && e.Previous != position.Hash:
			return changed(after, e.Previous, position.Hash)
		case e.Sequence > after && first == nil:
			first = e
		}
		return nil
	}
	// The files are synced before their entries are shipped. Otherwise a crash could lose an entry that was
	// shipped, and the log would look changed.
	if err := w.readFolder(folder, (*os.File).Sync); err != nil {
		return nil, nil, fmt.Errorf("reading the log of this node: %w", err)
	}
	if w.last != nil {
		if err := durable.SyncFolder(folder); err != nil {
			return nil, nil, fmt.Errorf("syncing the log of this node: %w", err)
		}
	}
	if w.last != nil && w.last.Sequence < after {
		return nil, nil, fmt.Errorf("the log of this node was changed after it was shipped: it ends with entry %d, and the deployment has entry %d with hash %s", w.last.Sequence, after, position.Hash)
	}
	if first == nil {
		return nil, nil, nil
	}
	return first, w.last, nil
}

func changed(sequence uint64, here, there string) error {
	return fmt.Errorf("the log of this node was changed after it was shipped: entry %d has hash %s here, and %.64q in the deployment", sequence, here, there)
}
