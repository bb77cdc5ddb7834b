package audit

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/mod/sumdb/tlog"

	"github.com/latticekeep/latticekeep/internal/store"
)

// VerifyStore checks the whole log in the store and all rows derived from it. It begins at the
// first entry, or at the base of the archived entries, and ends at the head. With From or To, it
// checks only the entries of a range. Derived rows that are not written yet are no fault. A range
// that ends before To is broken there, unless the next entry accepts the loss of To. Nothing may
// write to the store meanwhile. A [Broken] error names the first bad sequence.
func VerifyStore(ctx context.Context, s store.Store, o Options) (Report, error) {
	o.Tenant, o.Base = false, nil
	base, err := readBase(ctx, s)
	if err != nil {
		return Report{}, err
	}
	first := uint64(1)
	if base != nil {
		first = base.head.sequence + 1
	}
	if o.From <= first {
		o.From, o.Base = 0, base
	}
	// Only the first entry or the base can be compared with the fingerprint.
	if o.From > first && o.Fingerprint != "" {
		begins, err := VerifyStore(ctx, s, Options{To: 1, PublicKey: o.PublicKey, Fingerprint: o.Fingerprint})
		if err != nil {
			return Report{}, err
		}
		o.PublicKey, o.Fingerprint = begins.PublicKey, ""
	}
	w := &storeWalk{ctx: ctx, store: s, base: base, Verifier: NewVerifier(o)}
	w.beside, w.derive = w.indexed, w.summarized
	if w.whole {
		if err := w.prepare(); err != nil {
			return Report{}, err
		}
	}
	if err := w.walk(o.To); err != nil {
		return Report{}, err
	}
	if o.To > 0 || !w.whole {
		w.due = nil
		if err := w.reach(o.To); err != nil {
			return Report{}, err
		}
		return w.Finish()
	}
	report, err := w.Finish()
	if broken, ok := IsBroken(err); err != nil && !ok {
		return Report{}, err
	} else if ok && broken.Sequence <= w.head.sequence {
		return Report{}, err
	}
	// The checks below run even if a checkpoint covers more entries than exist, because a derived
	// row may be wrong at an earlier sequence.
	for _, check := range []func() error{w.atHead, w.noOtherRows, w.tilesBelow, w.current, w.batches, w.tilesOnly, w.summariesOnly, w.epochRows, w.archived} {
		if err := check(); err != nil {
			return Report{}, err
		}
	}
	if bad := w.outcome(); bad != nil {
		return Report{}, bad
	}
	return report, err
}

// storeWalk verifies the rows of a store.
type storeWalk struct {
	ctx   context.Context
	store store.Store
	base  *Base
	*Verifier

	signed    []byte     // the stored checkpoint
	followed  Checkpoint // the content of signed
	followErr error
}

// prepare reads the checkpoint that the derived rows belong to, and compares it with the base, if
// there is one.
func (w *storeWalk) prepare() error {
	w.signed, w.followErr = nil, nil
	err := w.view(func(r store.Reader) error {
		b, err := r.Get(checkpointKey)
		w.signed = bytes.Clone(b)
		return err
	})
	if err != nil {
		return fmt.Errorf("reading the newest checkpoint: %w", err)
	}
	if w.signed != nil {
		w.followed, w.followErr = peekCheckpoint(w.signed)
	}
	w.links = w.tiled
	w.begun = func() error {
		if w.signed == nil || w.followErr != nil {
			return nil
		}
		c, err := parseOnly(w.signed, w.public)
		if w.followErr = err; err == nil && c.ChainID != w.chainID {
			w.followErr = ErrCheckpointUnverified
		}
		if w.followErr == nil && c.Size > w.tree.size {
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
	case !w.following() || w.followed.Size > w.tree.size:
		return nil
	case w.followed.Size < w.tree.size:
		return &Broken{w.head.sequence, "the newest checkpoint is behind the base of what was archived"}
	case !w.followed.same(w.checkpoint()):
		return dueCheckpoint{w.followed, "the newest checkpoint"}.forked()
	}
	return w.holdTiles(w.tree.partial()) // entries that have the tiles checked may not follow
}

// sinceInBase compares an older checkpoint with the tree of the archived entries. The store still
// has the tiles of that tree.
func (w *storeWalk) sinceInBase(c Checkpoint) error {
	of := dueCheckpoint{c, "the older checkpoint"}
	for i, e := range w.epochs {
		if e.number > c.Epoch && e.size < c.Size {
			return of.lostTo(w.lost[i-1].LostFrom, e.first)
		}
	}
	if sequenceAt(w.epochs, c.Size-1) != c.Sequence || epochOf(w.epochs, c.Sequence).number != c.Epoch {
		return of.forked()
	}
	return w.view(func(r store.Reader) error {
		hashes := tiles{r}.hashes(w.tree.size, w.tree.root())
		root, err := tlog.TreeHash(c.Size, hashes)
		if err != nil {
			return fmt.Errorf("proving the older checkpoint: %w", treeError(err))
		}
		leaf, err := hashes.ReadHashes([]int64{tlog.StoredHashIndex(0, c.Size-1)})
		if err != nil {
			return fmt.Errorf("proving the older checkpoint: %w", treeError(err))
		}
		if root != c.Root || leaf[0] != tlog.Hash(leafHash(c.Hash)) {
			return of.forked()
		}
		return nil
	})
}

func (w *storeWalk) view(do func(r store.Reader) error) error { return w.store.View(w.ctx, do) }

// walk reads the entries after the head up to a sequence; 0 means all.
func (w *storeWalk) walk(to uint64) error {
	rng := entryRange
	if next := w.next(); next > 1 {
		rng.From = entryKey(next)
	}
	if to > 0 && to < maxInteger {
		rng.To = entryKey(to + 1)
	}
	return w.read(rng)
}

// reach reads one more entry if the walk ended before the sequence to; 0 disables it. Either that
// entry accepts the loss of to, or the chain is broken here.
func (w *storeWalk) reach(to uint64) error {
	if w.next() > to {
		return nil
	}
	var next []byte
	err := w.view(func(r store.Reader) error {
		return r.Scan(store.Range{From: entryKey(min(to, maxInteger) + 1), To: entryRange.To}, func(key, _ []byte) bool {
			next = bytes.Clone(key)
			return false
		})
	})
	switch {
	case err != nil:
		return fmt.Errorf("reading the log: %w", err)
	case next == nil && w.head.sequence == 0:
		return nil // Finish reports that there is no entry
	case next == nil:
		return w.endsBefore(to)
	}
	return w.read(only(next))
}

func (w *storeWalk) read(rng store.Range) error {
	err := w.addRange(w.ctx, w.store, rng)
	if _, broken := IsBroken(err); err != nil && !broken && w.failed() == nil {
		return fmt.Errorf("reading the log: %w", err)
	}
	if err := w.Wait(); err != nil {
		if _, broken := IsBroken(err); !broken || w.failed() != nil {
			return err
		}
	}
	return nil
}

// indexed compares an entry with its row in the tenant's index.
func (w *storeWalk) indexed(r store.Reader, it *item) error {
	e := it.entry
	b, err := r.Get(tenantKey(e.TenantID, e.TenantSequence))
	if err != nil {
		return fmt.Errorf("reading the index of a tenant: %w", err)
	}
	want := indexRow{link{e.Sequence, it.micros, it.hash}, e.EventType, e.Actor.ID}
	switch {
	case b == nil:
		it.beside = "the entry is missing from its tenant's index"
	case !bytes.Equal(b, want.encode()):
		it.beside = "a tenant's index does not agree with the entry"
	}
	return nil
}

// atHead compares the stored head with the last entry.
func (w *storeWalk) atHead() error {
	var head link
	bad := false
	err := w.view(func(r store.Reader) error {
		b, err := r.Get(headKey)
		if err == nil {
			head, err = decodeLink(b)
			bad, err = err != nil, nil
		}
		return err
	})
	switch {
	case err != nil:
		return fmt.Errorf("reading the head of the chain: %w", err)
	case !bad && head.sequence > w.head.sequence:
		w.suspect(w.head.sequence+1, fmt.Sprintf("the log was cut: its head is at %d", head.sequence))
	case bad || head != w.head:
		w.suspect(w.head.sequence, "the head of the chain is not the last entry")
	}
	if w.followErr != nil {
		w.suspect(w.head.sequence, "the newest checkpoint does not verify")
	}
	return nil
}

// clamp returns a sequence that a row claims, limited to the first sequence after the log. For 0 it
// returns the sequence of the head.
func (w *storeWalk) clamp(sequence uint64) uint64 {
	if sequence == 0 {
		return w.head.sequence
	}
	return min(sequence, w.head.sequence+1)
}

// noOtherRows reports rows that do not belong: in the tenants' indexes, and anywhere else under
// audit/. The index rows of entries in the log were already compared with those entries.
func (w *storeWalk) noOtherRows() error {
	err := ScanAll(w.ctx, w.store, tenantRange, func(key, value []byte) error {
		name := key[len(tenantRange.From):]
		if n := len(name) - 9; n > 0 && name[n] == '/' {
			sequence := binary.BigEndian.Uint64(name[n+1:])
			if t := w.tenants[string(name[:n])]; t != nil && sequence >= 1 && sequence <= t.sequence {
				return w.kept(string(name[:n]), sequence, value)
			}
		}
		w.suspect(w.clamp(sequenceOf(value)), "a tenant's index names an entry that is not in the log")
		return nil
	})
	if err != nil {
		return fmt.Errorf("reading the indexes of tenants: %w", err)
	}
	at := []byte("audit/")
	for _, known := range rowRanges {
		err := ScanAll(w.ctx, w.store, store.Range{From: at, To: known.From}, func([]byte, []byte) error { return errStray })
		if errors.Is(err, errStray) {
			w.suspect(w.head.sequence, "there is a row that is not of the log")
		} else if err != nil {
			return err
		}
		at = known.To
	}
	err = ScanAll(w.ctx, w.store, store.Range{From: at, To: store.Prefix([]byte("audit/")).To}, func([]byte, []byte) error { return errStray })
	if errors.Is(err, errStray) {
		w.suspect(w.head.sequence, "there is a row that is not of the log")
		return nil
	}
	return err
}

var errStray = errors.New("a row that is not of the log")

// kept compares the one remaining index row of a tenant whose entries are all archived with the
// base. An older row is left over from a cut and is no fault.
func (w *storeWalk) kept(tenant string, sequence uint64, value []byte) error {
	if w.base == nil || w.base.tenants[tenant] == nil || w.base.tenants[tenant].sequence != sequence {
		return nil
	}
	if row, err := decodeIndexRow(value); err != nil || row.link != w.base.tenants[tenant].last {
		w.suspect(w.base.tenants[tenant].last.sequence, "a tenant's index does not agree with the archived entry")
	}
	return nil
}

// rowRanges are the ranges of all rows of the log, in the order of their keys.
var rowRanges = []store.Range{
	currentRange,
	archiveRange,
	only(baseKey),
	batchRange,
	only(checkpointKey),
	entryRange,
	epochRange,
	only(headKey),
	summaryRange,
	tenantRange,
	tileRange,
	only(verifiedKey), // this row says nothing that VerifyStore does not check itself
}

// leftOver reports whether archived entries still have to be removed, together with the rows that
// only they need.
func (w *storeWalk) leftOver() (found bool, err error) {
	if w.base == nil {
		return false, nil
	}
	err = w.view(func(r store.Reader) error {
		return r.Scan(store.Range{From: entryRange.From, To: entryKey(w.base.head.sequence + 1)}, func(_, _ []byte) bool {
			found = true
			return false
		})
	})
	if err != nil {
		return false, fmt.Errorf("reading the log: %w", err)
	}
	return found, nil
}

// archived compares the list of archived segments with the base, and with the entries that recorded
// their archiving. The base keeps those of these entries that are archived themselves.
func (w *storeWalk) archived() error {
	var segments []Segment
	err := w.view(func(r store.Reader) (err error) {
		segments, err = Segments(r)
		return err
	})
	if err != nil && !errors.Is(err, errDamagedLog) {
		return err
	}
	var newest Segment
	if len(segments) > 0 {
		newest = segments[len(segments)-1]
	}
	switch {
	case err != nil:
		w.suspect(1, "what the log says to be in the archive is damaged")
		return nil
	case w.base == nil && len(segments) > 0:
		w.suspect(1, "the log says that entries are in the archive, and has no base to go on from")
	case w.base != nil && (newest.To != w.base.head.sequence || newest.Hash != w.base.head.hash):
		w.suspect(w.base.head.sequence, "what the log says to be in the archive does not end with the base")
	}
	said := slices.DeleteFunc(slices.Clone(w.history.kept), func(e *Entry) bool { return !e.archives() })
	size := int64(0) // size of the tree before the next segment
	for i, s := range segments {
		if i >= len(said) || !s.isOf(said[i]) {
			w.suspect(w.clamp(s.From), "what the log says to be in the archive is not what the entry says that archived it")
		}
		first, ok1 := indexOf(w.epochs, s.From)
		last, ok2 := indexOf(w.epochs, s.To)
		if !ok1 || !ok2 || first != size {
			w.suspect(w.clamp(s.From), "what the log says to be in the archive does not go on where the previous segment ends")
			return nil
		}
		if err := w.endsWith(last, s); err != nil {
			return err
		}
		size = last + 1
	}
	if len(said) > len(segments) {
		w.suspect(w.clamp(said[len(segments)].number(attributeFrom)), "an entry says that others are in the archive, and the log does not say where")
	}
	return nil
}

// endsWith compares the hash of a segment's last entry with the tree. No entry names that hash.
func (w *storeWalk) endsWith(index int64, s Segment) error {
	if !w.following() || index >= w.followed.Size {
		return nil
	}
	err := w.view(func(r store.Reader) error {
		at := int(index & (tileWidth - 1))
		b, err := tiles{r}.read(0, index>>tileHeight, at+1)
		if err == nil && tlog.Hash(b[at*tlog.HashSize:]) != tlog.Hash(leafHash(s.Hash)) {
			w.suspect(w.clamp(s.To), "what the log says to be in the archive ends with another entry than the tree has there")
		}
		return unlessDamaged(err) // another check reports a damaged tile
	})
	if err != nil {
		return fmt.Errorf("reading the tree of the log: %w", err)
	}
	return nil
}
