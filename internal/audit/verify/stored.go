package verify

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/mod/sumdb/tlog"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/chain"
	"github.com/latticekeep/latticekeep/internal/audit/entries"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Store checks the whole log in the store and all rows derived from it. It begins at the
// first entry, or at the base of the archived entries, and ends at the head. With From or To, it
// checks only the entries of a range. Derived rows that are not written yet are no fault. A range
// that ends before To is broken there, unless the next entry accepts the loss of To. An
// [audit.Broken] error names the first bad sequence. Nothing may write to the store meanwhile: derived
// rows could then seem wrong, and the error says so.
func Store(ctx context.Context, s store.Store, o Options) (Report, error) {
	o.Tenant, o.Base = false, nil
	base, err := chain.ReadBase(ctx, s)
	if err != nil {
		return Report{}, err
	}
	first := uint64(1)
	if base != nil {
		first = base.Head.Sequence + 1
	}
	if o.From <= first {
		o.From, o.Base = 0, base
	}
	// Only the first entry or the base can be compared with the fingerprint.
	if o.From > first && o.Fingerprint != "" {
		begins, err := Store(ctx, s, Options{To: 1, PublicKey: o.PublicKey, Fingerprint: o.Fingerprint})
		if err != nil {
			return Report{}, err
		}
		o.PublicKey, o.Fingerprint = begins.PublicKey, ""
	}
	w := &storeWalk{ctx: ctx, store: s, base: base, Verifier: NewVerifier(o)}
	w.compareRows, w.checkDerived = w.compareIndexRow, w.compareSummaries
	if w.IsComplete {
		if err := w.prepare(); err != nil {
			return Report{}, err
		}
	}
	if err := w.walk(o.To); err != nil {
		return Report{}, err
	}
	if o.To > 0 || !w.IsComplete {
		w.due = nil
		if err := w.reach(o.To); err != nil {
			return Report{}, err
		}
		return w.Finish()
	}
	report, err := w.Finish()
	if broken, ok := audit.IsBroken(err); err != nil && !ok {
		return Report{}, err
	} else if ok && broken.Sequence <= w.Head.Sequence {
		return Report{}, w.noteWrites(err)
	}
	// The checks below run even if a checkpoint covers more entries than exist, because a derived
	// row may be wrong at an earlier sequence.
	for _, check := range []func() error{w.checkHead, w.findStrayRows, w.checkTilesBelowBase, w.compareCurrentRows, w.findStrayPacks, w.findStrayBatches, w.findStrayTiles, w.findStraySummaries, w.compareEpochRows, w.checkSegments} {
		if err := check(); err != nil {
			return Report{}, err
		}
	}
	if bad := w.outcome(); bad != nil {
		return Report{}, w.noteWrites(bad)
	}
	return report, err
}

// noteWrites adds to a fault of a derived row that the store was written to since prepare. A fault of an
// entry has no such excuse: the walk has ended with it.
func (w *storeWalk) noteWrites(bad error) error {
	now, err := w.readNewest()
	if err != nil || // the fault is what counts
		bytes.Equal(now.head, w.newest.head) && bytes.Equal(now.checkpoint, w.newest.checkpoint) {
		return bad
	}
	return fmt.Errorf("the store was written to meanwhile, which may be why. Stop all servers and try again; if none runs, somebody else writes to it: %w", bad)
}

// storeWalk verifies the rows of a store.
type storeWalk struct {
	ctx   context.Context
	store store.Store
	base  *audit.Base
	*Verifier

	newest    newestRows       // as they were before the first entry was read
	followed  audit.Checkpoint // the content of newest.checkpoint
	followErr error
}

// newestRows are the rows that change with each entry, or soon after it. A row that is missing is nil.
type newestRows struct{ head, checkpoint []byte }

func (w *storeWalk) readNewest() (rows newestRows, err error) {
	err = w.view(func(r store.Reader) error {
		head, err := r.Get(audit.HeadKey)
		if err != nil {
			return err
		}
		checkpoint, err := r.Get(audit.CheckpointKey)
		rows = newestRows{bytes.Clone(head), bytes.Clone(checkpoint)}
		return err
	})
	if err != nil {
		return rows, fmt.Errorf("reading the head and the newest checkpoint: %w", err)
	}
	return rows, nil
}

// prepare reads the checkpoint that the derived rows belong to, and compares it with the base, if
// there is one.
func (w *storeWalk) prepare() error {
	var err error
	if w.newest, err = w.readNewest(); err != nil {
		return err
	}
	w.followErr = nil
	if w.newest.checkpoint != nil {
		w.followed, w.followErr = audit.PeekCheckpoint(w.newest.checkpoint)
	}
	w.links = w.compareFilledTiles
	w.begun = func() error {
		if w.newest.checkpoint == nil || w.followErr != nil {
			return nil
		}
		c, err := audit.ParseOwnCheckpoint(w.newest.checkpoint, w.Public)
		if w.followErr = err; err == nil && c.ChainID != w.ChainID {
			w.followErr = audit.ErrCheckpointUnverified
		}
		if w.followErr == nil && c.Size > w.Tree.Size {
			w.expect(c, "the newest checkpoint")
		}
		return nil
	}
	w.older = w.sinceInBase
	if w.base == nil {
		return nil
	}
	if err := w.open(nil); err != nil {
		return err
	}
	switch {
	case !w.hasCheckpoint() || w.followed.Size > w.Tree.Size:
		return nil
	case w.followed.Size < w.Tree.Size:
		return &audit.Broken{Sequence: w.Head.Sequence, Reason: "the newest checkpoint is behind the base of what was archived"}
	case !w.followed.EqualIgnoringTime(w.Checkpoint()):
		return dueCheckpoint{w.followed, "the newest checkpoint"}.forked()
	}
	return w.compareTiles(w.Tree.Partial()) // entries that have the tiles checked may not follow
}

// sinceInBase compares an older checkpoint with the tree of the archived entries. The store still
// has the tiles of that tree.
func (w *storeWalk) sinceInBase(c audit.Checkpoint) error {
	of := dueCheckpoint{c, "the older checkpoint"}
	for i, e := range w.Epochs {
		if e.Number > c.Epoch && e.Size < c.Size {
			return of.lostTo(w.Lost[i-1].LostFrom, e.First)
		}
	}
	if audit.SequenceAt(w.Epochs, c.Size-1) != c.Sequence || audit.EpochOf(w.Epochs, c.Sequence).Number != c.Epoch {
		return of.forked()
	}
	return w.view(func(r store.Reader) error {
		hashes := audit.Tiles{Reader: r}.Hashes(w.Tree.Size, w.Tree.Root())
		root, err := tlog.TreeHash(c.Size, hashes)
		if err != nil {
			return fmt.Errorf("proving the older checkpoint: %w", audit.TreeError(err))
		}
		leaf, err := hashes.ReadHashes([]int64{tlog.StoredHashIndex(0, c.Size-1)})
		if err != nil {
			return fmt.Errorf("proving the older checkpoint: %w", audit.TreeError(err))
		}
		if root != c.Root || leaf[0] != tlog.Hash(audit.LeafHash(c.Hash)) {
			return of.forked()
		}
		return nil
	})
}

func (w *storeWalk) view(do func(r store.Reader) error) error { return w.store.View(w.ctx, do) }

// walk reads the entries after the head up to a sequence; 0 means all.
func (w *storeWalk) walk(to uint64) error {
	rng := audit.EntryRange
	if next := w.Next(); next > 1 {
		rng.From = audit.EntryKey(next)
	}
	if to > 0 && to < audit.MaxInteger {
		rng.To = audit.EntryKey(to + 1)
	}
	return w.read(rng)
}

// reach reads one more entry if the walk ended before the sequence to; 0 disables it. Either that
// entry accepts the loss of to, or the chain is broken here.
func (w *storeWalk) reach(to uint64) error {
	if w.Next() > to {
		return nil
	}
	var next []byte
	err := w.view(func(r store.Reader) error {
		return entries.Scan(r, store.Range{From: audit.EntryKey(min(to, audit.MaxInteger) + 1), To: audit.EntryRange.To}, func(key, _ []byte) bool {
			next = bytes.Clone(key)
			return false
		})
	})
	switch {
	case err != nil:
		return fmt.Errorf("reading the log: %w", err)
	case next == nil && w.Head.Sequence == 0:
		return nil // Finish reports that there is no entry
	case next == nil:
		return w.endsBefore(to)
	}
	return w.read(audit.KeyRange(next))
}

func (w *storeWalk) read(rng store.Range) error {
	err := w.AddRange(w.ctx, w.store, rng)
	if _, broken := audit.IsBroken(err); err != nil && !broken && w.failed() == nil {
		return fmt.Errorf("reading the log: %w", err)
	}
	if err := w.Wait(); err != nil {
		if _, broken := audit.IsBroken(err); !broken || w.failed() != nil {
			return err
		}
	}
	return nil
}

// compareIndexRow compares an entry with its row in the tenant's index.
func (w *storeWalk) compareIndexRow(r store.Reader, it *Item) error {
	e := it.Entry
	b, err := r.Get(audit.TenantKey(e.TenantID, e.TenantSequence))
	if err != nil {
		return fmt.Errorf("reading the index of a tenant: %w", err)
	}
	want := audit.IndexRow{Position: audit.Position{Sequence: e.Sequence, Micros: it.micros, Hash: it.Hash}, EventType: e.EventType, Actor: e.Actor.ID}
	switch {
	case b == nil:
		it.rowFault = "the entry is missing from its tenant's index"
	case !bytes.Equal(b, want.Encode()):
		it.rowFault = "a tenant's index does not agree with the entry"
	}
	return nil
}

// checkHead compares the stored head with the last entry.
func (w *storeWalk) checkHead() error {
	var head audit.Position
	bad := false
	err := w.view(func(r store.Reader) error {
		b, err := r.Get(audit.HeadKey)
		if err == nil {
			head, err = audit.DecodePosition(b)
			bad, err = err != nil, nil
		}
		return err
	})
	switch {
	case err != nil:
		return fmt.Errorf("reading the head of the chain: %w", err)
	case !bad && head.Sequence > w.Head.Sequence:
		w.suspect(w.Head.Sequence+1, fmt.Sprintf("the log was cut: its head is at %d", head.Sequence))
	case bad || head != w.Head:
		w.suspect(w.Head.Sequence, "the head of the chain is not the last entry")
	}
	if w.followErr != nil {
		w.suspect(w.Head.Sequence, "the newest checkpoint does not verify")
	}
	return nil
}

// clamp returns a sequence that a row claims, limited to the first sequence after the log. For 0 it
// returns the sequence of the head.
func (w *storeWalk) clamp(sequence uint64) uint64 {
	if sequence == 0 {
		return w.Head.Sequence
	}
	return min(sequence, w.Head.Sequence+1)
}

// findStrayRows reports rows that do not belong: in the tenants' indexes, and anywhere else under
// audit/. The index rows of entries in the log were already compared with those entries.
func (w *storeWalk) findStrayRows() error {
	err := audit.ScanAll(w.ctx, w.store, audit.TenantRange, func(key, value []byte) error {
		name := key[len(audit.TenantRange.From):]
		if n := len(name) - 9; n > 0 && name[n] == '/' {
			sequence := binary.BigEndian.Uint64(name[n+1:])
			if t := w.Tenants[string(name[:n])]; t != nil && sequence >= 1 && sequence <= t.Sequence {
				return w.compareKeptIndexRow(string(name[:n]), sequence, value)
			}
		}
		w.suspect(w.clamp(audit.SequenceOf(value)), "a tenant's index names an entry that is not in the log")
		return nil
	})
	if err != nil {
		return fmt.Errorf("reading the indexes of tenants: %w", err)
	}
	at := []byte("audit/")
	for _, known := range rowRanges {
		err := audit.ScanAll(w.ctx, w.store, store.Range{From: at, To: known.From}, func([]byte, []byte) error { return errStray })
		if errors.Is(err, errStray) {
			w.suspect(w.Head.Sequence, "there is a row that is not of the log")
		} else if err != nil {
			return err
		}
		at = known.To
	}
	err = audit.ScanAll(w.ctx, w.store, store.Range{From: at, To: store.Prefix([]byte("audit/")).To}, func([]byte, []byte) error { return errStray })
	if errors.Is(err, errStray) {
		w.suspect(w.Head.Sequence, "there is a row that is not of the log")
		return nil
	}
	return err
}

var errStray = errors.New("a row that is not of the log")

// compareKeptIndexRow compares the one remaining index row of a tenant whose entries are all
// archived with the base. An older row is left over from a cut and is no fault.
func (w *storeWalk) compareKeptIndexRow(tenant string, sequence uint64, value []byte) error {
	if w.base == nil || w.base.Tenants[tenant] == nil || w.base.Tenants[tenant].Sequence != sequence {
		return nil
	}
	if row, err := audit.DecodeIndexRow(value); err != nil || row.Position != w.base.Tenants[tenant].Last {
		w.suspect(w.base.Tenants[tenant].Last.Sequence, "a tenant's index does not agree with the archived entry")
	}
	return nil
}

// rowRanges are the ranges of all rows of the log, in the order of their keys.
var rowRanges = []store.Range{
	audit.CurrentRange,
	audit.ArchiveRange,
	audit.KeyRange(audit.BaseKey),
	audit.BaseListRange,
	audit.BatchRange,
	audit.KeyRange(audit.CheckpointKey),
	audit.EntryRange,
	audit.EpochRange,
	audit.KeyRange(audit.HeadKey),
	entries.PackRange,
	audit.SummaryRange,
	audit.TenantRange,
	audit.TileRange,
	audit.KeyRange(audit.VerifiedKey), // this row says nothing that VerifyStore does not check itself
}

// hasUnremovedEntries reports whether archived entries still have to be removed, together with the
// rows that only they need.
func (w *storeWalk) hasUnremovedEntries() (found bool, err error) {
	if w.base == nil {
		return false, nil
	}
	err = w.view(func(r store.Reader) error {
		found, err = entries.Exist(r, store.Range{From: audit.EntryRange.From, To: audit.EntryKey(w.base.Head.Sequence + 1)})
		return err
	})
	if err != nil {
		return false, fmt.Errorf("reading the log: %w", err)
	}
	return found, nil
}

// checkSegments compares the list of archived segments with the base, and with the entries that
// recorded their archiving. The base keeps those of these entries that are archived themselves.
func (w *storeWalk) checkSegments() error {
	var segments []audit.Segment
	err := w.view(func(r store.Reader) (err error) {
		segments, err = audit.Segments(r)
		return err
	})
	if err != nil && !errors.Is(err, audit.ErrDamagedLog) {
		return err
	}
	var newest audit.Segment
	if len(segments) > 0 {
		newest = segments[len(segments)-1]
	}
	switch {
	case err != nil:
		w.suspect(1, "what the log says to be in the archive is damaged")
		return nil
	case w.base == nil && len(segments) > 0:
		w.suspect(1, "the log says that entries are in the archive, and has no base to go on from")
	case w.base != nil && (newest.To != w.base.Head.Sequence || newest.Hash != w.base.Head.Hash):
		w.suspect(w.base.Head.Sequence, "what the log says to be in the archive does not end with the base")
	}
	said := slices.DeleteFunc(slices.Clone(w.History.Kept), func(e *audit.Entry) bool { return !e.Archives() })
	size := int64(0) // size of the tree before the next segment
	for i, s := range segments {
		if i >= len(said) || !s.IsOf(said[i]) {
			w.suspect(w.clamp(s.From), "what the log says to be in the archive is not what the entry says that archived it")
		}
		first, ok1 := audit.IndexOf(w.Epochs, s.From)
		last, ok2 := audit.IndexOf(w.Epochs, s.To)
		if !ok1 || !ok2 || first != size {
			w.suspect(w.clamp(s.From), "what the log says to be in the archive does not go on where the previous segment ends")
			return nil
		}
		if err := w.compareSegmentEnd(last, s); err != nil {
			return err
		}
		size = last + 1
	}
	if len(said) > len(segments) {
		w.suspect(w.clamp(said[len(segments)].Number(audit.AttributeFrom)), "an entry says that others are in the archive, and the log does not say where")
	}
	return nil
}

// compareSegmentEnd compares the hash of a segment's last entry with the tree. No entry names that
// hash.
func (w *storeWalk) compareSegmentEnd(index int64, s audit.Segment) error {
	if !w.hasCheckpoint() || index >= w.followed.Size {
		return nil
	}
	err := w.view(func(r store.Reader) error {
		at := int(index & (audit.TileWidth - 1))
		b, err := audit.Tiles{Reader: r}.Read(0, index>>audit.TileHeight, at+1)
		if err == nil && tlog.Hash(b[at*tlog.HashSize:]) != tlog.Hash(audit.LeafHash(s.Hash)) {
			w.suspect(w.clamp(s.To), "what the log says to be in the archive ends with another entry than the tree has there")
		}
		return audit.IgnoreDamagedRows(err) // another check reports a damaged tile
	})
	if err != nil {
		return fmt.Errorf("reading the tree of the log: %w", err)
	}
	return nil
}

// hasCheckpoint reports whether the store has a checkpoint that verifies.
func (w *storeWalk) hasCheckpoint() bool { return w.newest.checkpoint != nil && w.followErr == nil }

// compareFilledTiles compares the tiles that an entry has completed with the stored tiles.
func (w *storeWalk) compareFilledTiles(*Item) {
	full := w.Tree.TakeFilled()
	if !w.hasCheckpoint() || w.Tree.Size > w.followed.Size {
		return
	}
	if w.Tree.Size == w.followed.Size {
		full = append(full, w.Tree.Partial()...)
	}
	if len(full) == 0 {
		return
	}
	if err := w.compareTiles(full); err != nil {
		w.fail(err)
	}
}

func (w *storeWalk) compareTiles(tiles []audit.Tile) error {
	err := w.view(func(r store.Reader) error {
		for _, t := range tiles {
			if err := w.compareTile(r, t); err != nil {
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

func (w *storeWalk) compareTile(r store.Reader, t audit.Tile) error {
	b, err := r.Get(audit.TileKey(t.Level, t.Index))
	if err != nil {
		return err
	}
	if leaf, bad := differs(t, b); bad {
		w.suspect(audit.SequenceAt(w.Epochs, leaf), "the stored tree does not agree with the entry")
	}
	return nil
}

// differs compares a row with the tile. If they differ, it returns the index of the first leaf
// below the first hash that differs.
func differs(t audit.Tile, row []byte) (leaf int64, differs bool) {
	if bytes.Equal(row, t.Data) {
		return 0, false
	}
	at := 0
	for at+2*tlog.HashSize <= len(t.Data) && len(row) >= at+tlog.HashSize && bytes.Equal(t.Data[at:at+tlog.HashSize], row[at:at+tlog.HashSize]) {
		at += tlog.HashSize
	}
	return (t.Index<<audit.TileHeight + int64(at/tlog.HashSize)) << (audit.TileHeight * t.Level), true
}

// checkTilesBelowBase checks the tiles of archived entries against the edge of the tree in the
// base: the level above has the hash of each full tile.
func (w *storeWalk) checkTilesBelowBase() error {
	if w.base == nil || !w.hasCheckpoint() {
		return nil
	}
	size, edge := w.base.Tree.Size, w.base.Tree.Edge
	for level := len(edge) - 2; level >= 0; level-- {
		for index := range size >> (audit.TileHeight * (level + 1)) {
			err := w.view(func(r store.Reader) error {
				var above tlog.Hash
				if first := size >> (audit.TileHeight * (level + 2)) << audit.TileHeight; index >= first {
					above = edge[level+1][index-first]
				} else {
					b, err := audit.Tiles{Reader: r}.Read(level+1, index>>audit.TileHeight, audit.TileWidth)
					if err != nil {
						return audit.IgnoreDamagedRows(err) // the tile above was reported
					}
					above = tlog.Hash(b[tlog.HashSize*(index&(audit.TileWidth-1)):])
				}
				b, err := r.Get(audit.TileKey(level, index))
				if err == nil && (len(b) != audit.TileWidth*tlog.HashSize || audit.PerfectHash(audit.TileHashes(b)) != above) {
					w.suspect(audit.SequenceAt(w.Epochs, index<<(audit.TileHeight*(level+1))), "the stored tree does not agree with the archived entries")
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

// findStrayTiles looks for tiles that are not part of the checkpoint's tree. The tiles that are
// part of it were compared when they became full.
func (w *storeWalk) findStrayTiles() error {
	size := int64(0)
	if w.hasCheckpoint() {
		size = w.followed.Size
	}
	err := audit.ScanAll(w.ctx, w.store, audit.TileRange, func(key, _ []byte) error {
		name := key[len(audit.TileRange.From):]
		if len(name) == 9 && int(name[0]) <= audit.MaxLevel {
			level, index := int(name[0]), binary.BigEndian.Uint64(name[1:])
			n := (size>>(audit.TileHeight*level) + audit.TileWidth - 1) / audit.TileWidth
			if index < uint64(n) {
				return nil
			}
		}
		w.suspect(w.Head.Sequence, "the stored tree has a tile that its checkpoint knows nothing of")
		return nil
	})
	if err != nil {
		return fmt.Errorf("reading the tree of the log: %w", err)
	}
	return nil
}

// compareSummaries compares the summaries of blocks that the entries have completed with the index
// rows of the blocks.
func (w *storeWalk) compareSummaries(items []Item) error {
	for i := range items {
		if e := items[i].Entry; e.TenantSequence%audit.BlockSize == 0 && w.hasCheckpoint() && e.Sequence <= w.followed.Sequence {
			if err := w.view(func(r store.Reader) error { return w.compareSummary(r, e) }); err != nil {
				return fmt.Errorf("reading the summaries: %w", err)
			}
		}
	}
	return nil
}

func (w *storeWalk) compareSummary(r store.Reader, e *audit.Entry) error {
	block := audit.BlockOf(e.TenantSequence)
	from := audit.EndOf(block) + 1 - audit.BlockSize
	if w.base != nil && w.base.Tenants[e.TenantID] != nil {
		from = max(from, w.base.Tenants[e.TenantID].Sequence+1) // earlier rows may be gone
	}
	var rows []audit.IndexRow
	err := r.Scan(store.Range{From: audit.TenantKey(e.TenantID, from), To: audit.TenantKey(e.TenantID, e.TenantSequence+1)}, func(_, value []byte) bool {
		row, err := audit.DecodeIndexRow(value)
		if err == nil {
			rows = append(rows, row)
		}
		return err == nil && len(rows) < audit.BlockSize
	})
	if err != nil {
		return err
	}
	if len(rows) != int(e.TenantSequence+1-from) {
		return nil // the index is damaged, which is reported elsewhere
	}
	b, err := r.Get(audit.SummaryKey(e.TenantID, block))
	if err == nil && !audit.SummaryAgrees(b, rows) {
		// The index rows of the block belong to earlier entries, so a wrong row is reported first.
		w.suspect(e.Sequence, "the summary of a tenant's entries up to this one does not agree with them")
	}
	return err
}

// findStraySummaries looks for summaries of blocks that were not full at the checkpoint. Other
// summaries were compared when their blocks became full.
func (w *storeWalk) findStraySummaries() error {
	err := audit.ScanAll(w.ctx, w.store, audit.SummaryRange, func(key, _ []byte) error {
		name := key[len(audit.SummaryRange.From):]
		n := len(name) - 9
		if n < 1 || name[n] != '/' || !w.hasCheckpoint() {
			w.suspect(w.Head.Sequence, "there is a summary of no tenant's entries")
			return nil
		}
		tenant, block := string(name[:n]), binary.BigEndian.Uint64(name[n+1:])
		if t := w.Tenants[tenant]; t == nil || block >= t.Sequence/audit.BlockSize {
			w.suspect(w.Head.Sequence+1, "there is a summary of entries that there are not")
			return nil
		}
		if w.base != nil && w.base.Tenants[tenant] != nil && audit.EndOf(block) <= w.base.Tenants[tenant].Sequence {
			return nil // left over from a cut
		}
		return w.view(func(r store.Reader) error {
			b, err := r.Get(audit.TenantKey(tenant, audit.EndOf(block)))
			if last := audit.SequenceOf(b); err == nil && last > w.followed.Sequence {
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

// compareCurrentRows compares the rows that name current versions with the replay.
func (w *storeWalk) compareCurrentRows() error {
	known := make(map[string]audit.Position, len(w.Credentials))
	for key, state := range w.Credentials {
		if state.Current.Sequence > 0 {
			known[string(audit.CurrentKey(string(key.Tenant), key.Credential))] = state.Current
		}
	}
	leftOver, err := w.hasUnremovedEntries()
	if err != nil {
		return err
	}
	err = audit.ScanAll(w.ctx, w.store, audit.CurrentRange, func(key, value []byte) error {
		want, ok := known[string(key)]
		switch {
		case !ok && leftOver && len(value) == 48 && audit.SequenceOf(value) <= w.base.Head.Sequence:
			// The credential was deleted. The row is removed together with the entry of the
			// deletion.
		case !ok:
			sequence := w.Head.Sequence
			if at, err := audit.DecodePosition(value); err == nil {
				sequence = w.clamp(at.Sequence)
			}
			w.suspect(sequence, "the log names a current version of a credential that it never recorded")
		case !bytes.Equal(value, want.Encode()):
			w.suspect(want.Sequence, "what the log names as a credential's current version is not the newest entry of one")
		}
		delete(known, string(key))
		return nil
	})
	if err != nil {
		return fmt.Errorf("reading the current versions: %w", err)
	}
	for _, missing := range known {
		w.suspect(missing.Sequence, "the log no longer names a credential's current version, which this entry made")
	}
	return nil
}

// findStrayPacks looks for packs where no reader of entries looks. The entries in all other packs were
// checked like those with rows of their own.
func (w *storeWalk) findStrayPacks() error {
	err := audit.ScanAll(w.ctx, w.store, entries.PackRange, func(key, _ []byte) error {
		if !entries.IsPackKey(key) {
			w.suspect(w.Head.Sequence, "a pack of entries stands where none belongs")
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("reading the packs of entries: %w", err)
	}
	return nil
}

// findStrayBatches looks for signatures of groups that do not exist. The signatures of existing
// groups were checked with their entries.
func (w *storeWalk) findStrayBatches() error {
	err := audit.ScanAll(w.ctx, w.store, audit.BatchRange, func(key, _ []byte) error {
		at := key[len(audit.BatchRange.From):]
		if len(at) != 8 {
			w.suspect(w.Head.Sequence, "a signature of a group stands where none belongs")
			return nil
		}
		first := binary.BigEndian.Uint64(at)
		if w.base != nil && first <= w.base.Head.Sequence {
			return nil // left over from a cut
		}
		return w.view(func(r store.Reader) error {
			b, err := entries.ReadRow(r, first)
			if of, ok := audit.RowBatch(b); err == nil && (!ok || of != first) {
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

// compareEpochRows compares the rows of the epochs with the entries that began them.
func (w *storeWalk) compareEpochRows() error {
	known := make(map[string]audit.Epoch)
	for _, e := range w.Epochs[1:] {
		known[string(audit.EpochKey(e.Number))] = e
	}
	err := audit.ScanAll(w.ctx, w.store, audit.EpochRange, func(key, value []byte) error {
		e, ok := known[string(key)]
		if !ok {
			w.suspect(w.clamp(audit.SequenceOf(value)), "an epoch was begun that no entry accepts")
		} else if !bytes.Equal(value, e.Encode()) {
			w.suspect(e.First, "the epoch is not the one that the entry began")
		}
		delete(known, string(key))
		return nil
	})
	if err != nil {
		return fmt.Errorf("reading the epochs: %w", err)
	}
	for _, e := range known {
		w.suspect(e.First, "the epoch that the entry began is missing")
	}
	return nil
}
