package audit

import (
	"bytes"
	"encoding/binary"
	"fmt"

	"golang.org/x/mod/sumdb/tlog"

	"github.com/latticekeep/latticekeep/internal/store"
)

// Tiles and summaries are written together with their checkpoint. So the expected rows are known
// exactly: all tiles of the checkpoint's tree, the summaries of all blocks that were full at the
// checkpoint, and nothing else.

// following reports whether the store has a checkpoint that verifies.
func (w *storeWalk) following() bool { return w.signed != nil && w.followErr == nil }

// tiled compares the tiles that an entry has completed with the stored tiles.
func (w *storeWalk) tiled(*item) {
	full := w.tree.full()
	if !w.following() || w.tree.size > w.followed.Size {
		return
	}
	if w.tree.size == w.followed.Size {
		full = append(full, w.tree.partial()...)
	}
	if len(full) == 0 {
		return
	}
	if err := w.holdTiles(full); err != nil {
		w.fail(err)
	}
}

func (w *storeWalk) holdTiles(tiles []tile) error {
	err := w.view(func(r store.Reader) error {
		for _, t := range tiles {
			if err := w.holdTile(r, t); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("reading the tree of the log: %w", err)
	}
	return nil
}

func (w *storeWalk) holdTile(r store.Reader, t tile) error {
	b, err := r.Get(tileKey(t.level, t.index))
	if err != nil {
		return err
	}
	if leaf, bad := differs(t, b); bad {
		w.suspect(sequenceAt(w.epochs, leaf), "the stored tree does not agree with the entry")
	}
	return nil
}

// differs compares a row with the tile. If they differ, it returns the index of the first leaf
// below the first hash that differs.
func differs(t tile, row []byte) (leaf int64, differs bool) {
	if bytes.Equal(row, t.data) {
		return 0, false
	}
	at := 0
	for at+2*tlog.HashSize <= len(t.data) && len(row) >= at+tlog.HashSize && bytes.Equal(t.data[at:at+tlog.HashSize], row[at:at+tlog.HashSize]) {
		at += tlog.HashSize
	}
	return (t.index<<tileHeight + int64(at/tlog.HashSize)) << (tileHeight * t.level), true
}

// tilesBelow checks the tiles of archived entries against the edge of the tree in the base: the
// level above has the hash of each full tile.
func (w *storeWalk) tilesBelow() error {
	if w.base == nil || !w.following() {
		return nil
	}
	size, edge := w.base.tree.size, w.base.tree.edge
	for level := len(edge) - 2; level >= 0; level-- {
		for index := range size >> (tileHeight * (level + 1)) {
			err := w.view(func(r store.Reader) error {
				var above tlog.Hash
				if first := size >> (tileHeight * (level + 2)) << tileHeight; index >= first {
					above = edge[level+1][index-first]
				} else {
					b, err := tiles{r}.read(level+1, index>>tileHeight, tileWidth)
					if err != nil {
						return unlessDamaged(err) // the tile above was reported
					}
					above = tlog.Hash(b[tlog.HashSize*(index&(tileWidth-1)):])
				}
				b, err := r.Get(tileKey(level, index))
				if err == nil && (len(b) != tileWidth*tlog.HashSize || perfectHash(tileHashes(b)) != above) {
					w.suspect(sequenceAt(w.epochs, index<<(tileHeight*(level+1))), "the stored tree does not agree with the archived entries")
				}
				return err
			})
			if err != nil {
				return fmt.Errorf("reading the tree of the log: %w", err)
			}
		}
	}
	return nil
}

// tilesOnly looks for tiles that are not part of the checkpoint's tree. The tiles that are part of
// it were compared when they became full.
func (w *storeWalk) tilesOnly() error {
	size := int64(0)
	if w.following() {
		size = w.followed.Size
	}
	err := ScanAll(w.ctx, w.store, tileRange, func(key, _ []byte) error {
		name := key[len(tileRange.From):]
		if len(name) == 9 && int(name[0]) <= maxLevel {
			level, index := int(name[0]), binary.BigEndian.Uint64(name[1:])
			n := (size>>(tileHeight*level) + tileWidth - 1) / tileWidth
			if index < uint64(n) {
				return nil
			}
		}
		w.suspect(w.head.sequence, "the stored tree has a tile that its checkpoint knows nothing of")
		return nil
	})
	if err != nil {
		return fmt.Errorf("reading the tree of the log: %w", err)
	}
	return nil
}

// summarized compares the summaries of blocks that the entries have completed with the index rows
// of the blocks.
func (w *storeWalk) summarized(items []item) error {
	for i := range items {
		if e := items[i].entry; e.TenantSequence%blockSize == 0 && w.following() && e.Sequence <= w.followed.Sequence {
			if err := w.view(func(r store.Reader) error { return w.holdSummary(r, e) }); err != nil {
				return fmt.Errorf("reading the summaries: %w", err)
			}
		}
	}
	return nil
}

func (w *storeWalk) holdSummary(r store.Reader, e *Entry) error {
	block := blockOf(e.TenantSequence)
	from := endOf(block) + 1 - blockSize
	if w.base != nil && w.base.tenants[e.TenantID] != nil {
		from = max(from, w.base.tenants[e.TenantID].sequence+1) // earlier rows may be gone
	}
	var rows []indexRow
	err := r.Scan(store.Range{From: tenantKey(e.TenantID, from), To: tenantKey(e.TenantID, e.TenantSequence+1)}, func(_, value []byte) bool {
		row, err := decodeIndexRow(value)
		if err == nil {
			rows = append(rows, row)
		}
		return err == nil && len(rows) < blockSize
	})
	if err != nil {
		return err
	}
	if len(rows) != int(e.TenantSequence+1-from) {
		return nil // the index is damaged, which is reported elsewhere
	}
	b, err := r.Get(summaryKey(e.TenantID, block))
	if err == nil && !summaryAgrees(b, rows) {
		// The index rows of the block belong to earlier entries, so a wrong row is reported first.
		w.suspect(e.Sequence, "the summary of a tenant's entries up to this one does not agree with them")
	}
	return err
}

// summariesOnly looks for summaries of blocks that were not full at the checkpoint. Other summaries
// were compared when their blocks became full.
func (w *storeWalk) summariesOnly() error {
	err := ScanAll(w.ctx, w.store, summaryRange, func(key, _ []byte) error {
		name := key[len(summaryRange.From):]
		n := len(name) - 9
		if n < 1 || name[n] != '/' || !w.following() {
			w.suspect(w.head.sequence, "there is a summary of no tenant's entries")
			return nil
		}
		tenant, block := string(name[:n]), binary.BigEndian.Uint64(name[n+1:])
		if t := w.tenants[tenant]; t == nil || block >= t.sequence/blockSize {
			w.suspect(w.head.sequence+1, "there is a summary of entries that there are not")
			return nil
		}
		if w.base != nil && w.base.tenants[tenant] != nil && endOf(block) <= w.base.tenants[tenant].sequence {
			return nil // left over from a cut
		}
		return w.view(func(r store.Reader) error {
			b, err := r.Get(tenantKey(tenant, endOf(block)))
			if last := sequenceOf(b); err == nil && last > w.followed.Sequence {
				w.suspect(w.clamp(last), "there is a summary that the newest checkpoint knows nothing of")
			}
			return err
		})
	})
	if err != nil {
		return fmt.Errorf("reading the summaries: %w", err)
	}
	return nil
}

// current compares the rows that name current versions with the replay.
func (w *storeWalk) current() error {
	known := make(map[string]link, len(w.credentials))
	for key, state := range w.credentials {
		if state.current.sequence > 0 {
			known[string(currentKey(string(key.Tenant), key.Credential))] = state.current
		}
	}
	leftOver, err := w.leftOver()
	if err != nil {
		return err
	}
	err = ScanAll(w.ctx, w.store, currentRange, func(key, value []byte) error {
		want, ok := known[string(key)]
		switch {
		case !ok && leftOver && len(value) == 48 && sequenceOf(value) <= w.base.head.sequence:
			// The credential was deleted. The row is removed together with the entry of the
			// deletion.
		case !ok:
			sequence := w.head.sequence
			if at, err := decodeLink(value); err == nil {
				sequence = w.clamp(at.sequence)
			}
			w.suspect(sequence, "the log names a current version of a credential that it never recorded")
		case !bytes.Equal(value, want.encode()):
			w.suspect(want.sequence, "what the log names as a credential's current version is not the newest entry of one")
		}
		delete(known, string(key))
		return nil
	})
	if err != nil {
		return fmt.Errorf("reading the current versions: %w", err)
	}
	for _, missing := range known {
		w.suspect(missing.sequence, "the log no longer names a credential's current version, which this entry made")
	}
	return nil
}

// batches looks for signatures of groups that do not exist. The signatures of existing groups were
// checked with their entries.
func (w *storeWalk) batches() error {
	err := ScanAll(w.ctx, w.store, batchRange, func(key, _ []byte) error {
		at := key[len(batchRange.From):]
		if len(at) != 8 {
			w.suspect(w.head.sequence, "a signature of a group stands where none belongs")
			return nil
		}
		first := binary.BigEndian.Uint64(at)
		if w.base != nil && first <= w.base.head.sequence {
			return nil // left over from a cut
		}
		return w.view(func(r store.Reader) error {
			b, err := r.Get(entryKey(first))
			if of, ok := rowBatch(b); err == nil && (!ok || of != first) {
				w.suspect(w.clamp(first), "a signature of a group has no group")
			}
			return err
		})
	})
	if err != nil {
		return fmt.Errorf("reading the signatures of groups: %w", err)
	}
	return nil
}

// epochRows compares the rows of the epochs with the entries that began them.
func (w *storeWalk) epochRows() error {
	known := make(map[string]epoch)
	for _, e := range w.epochs[1:] {
		known[string(epochKey(e.number))] = e
	}
	err := ScanAll(w.ctx, w.store, epochRange, func(key, value []byte) error {
		e, ok := known[string(key)]
		if !ok {
			w.suspect(w.clamp(sequenceOf(value)), "an epoch was begun that no entry accepts")
		} else if !bytes.Equal(value, e.encode()) {
			w.suspect(e.first, "the epoch is not the one that the entry began")
		}
		delete(known, string(key))
		return nil
	})
	if err != nil {
		return fmt.Errorf("reading the epochs: %w", err)
	}
	for _, e := range known {
		w.suspect(e.first, "the epoch that the entry began is missing")
	}
	return nil
}
