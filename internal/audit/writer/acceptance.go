package writer

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sort"
	"strconv"
	"time"

	"golang.org/x/mod/sumdb/tlog"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/chain"
	"github.com/latticekeep/latticekeep/internal/audit/entries"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/store"
)

// maxReason is the longest reason for accepting a rollback, in bytes of printable ASCII.
const maxReason = 200

func validReason(s string) bool {
	for i := range len(s) {
		if s[i] < ' ' || s[i] > '~' {
			return false
		}
	}
	return len(s) >= 1 && len(s) <= maxReason
}

// AcceptRollback begins a new epoch above the lost entries that an [audit.RollbackError] names, and
// ends the halt. Services call [guard.Guard.AcceptRollback], which also records a refusal. Errors:
// fault.Forbidden, fault.Invalid for the reason, fault.Conflict when nothing was lost,
// fault.Unavailable.
func (l *Log) AcceptRollback(ctx context.Context, p authz.Principal, reason string) (audit.Rollback, error) {
	if !p.May(authz.AcceptRollback) {
		return audit.Rollback{}, errNoPermission
	}
	if err := l.Chain.Store.Ready(ctx); err != nil {
		return audit.Rollback{}, err
	}
	if !validReason(reason) {
		return audit.Rollback{}, errReason
	}
	// Another replica may have found a loss that this one has not looked for yet. Looking now lets
	// one acceptance cover every known loss.
	l.Detector.askAnchors(ctx)
	if _, err := l.Detector.CheckForRollback(ctx); err != nil {
		return audit.Rollback{}, err
	}
	was := l.Detector.halted.Load()
	var lost *audit.RollbackError
	if was == nil || !errors.As(was.reason, &lost) {
		return audit.Rollback{}, errNothingLost
	}
	loaded, err := l.state.Load(ctx, l.Chain.Store) // the known state is that of the lost entries
	if err != nil {
		return audit.Rollback{}, fmt.Errorf("accepting a rollback (if the store is from before an upgrade, restart the server first): %w", err)
	}
	a := &acceptance{lost: *lost, state: loaded}
	p.Tenant = authz.SystemTenant // verification accepts this entry only from the system tenant
	var receipt *audit.Receipt
	var done bool
	err = l.Chain.Store.Update(ctx, func(tx store.Tx) error {
		receipt, done = nil, false
		epochs, err := l.Chain.Epochs(tx)
		if err != nil {
			return err
		}
		if newest := epochs[len(epochs)-1]; newest.Number > lost.Epoch && newest.First > lost.LostTo {
			done = true // accepted before, but the answer did not arrive
			return nil
		}
		receipt, err = l.append(tx, l.acceptanceEvent(p, reason), a)
		return err
	})
	if err != nil {
		return audit.Rollback{}, fmt.Errorf("accepting a rollback: %w", err)
	}
	l.Detector.halted.CompareAndSwap(was, nil)
	_, _ = l.Detector.CheckForRollback(ctx) // on an error, the follower checks again
	l.noteAcceptance(ctx)
	if done {
		return audit.Rollback{}, errNothingLost
	}
	l.stateEpoch.Store(a.rollback.Epoch)
	a.rollback.Receipt = *receipt
	return a.rollback, nil
}

// SkippedAfterRestore is how many sequences [Log.AcceptRestore] leaves out above the last known entry.
// A server that was lost may have told its anchors of entries that nobody else has: those of about a
// minute, and this is 16,000 a second.
const SkippedAfterRestore = 1_000_000

// AcceptRestore begins a new epoch in a restored store, which nobody serves. lost names the last entry
// that the deployment is known to have had. The skipped sequences are above it, so no anchor halts the
// log for them. attributes are further ones of the entry. Error: fault.Unavailable.
func (l *Log) AcceptRestore(ctx context.Context, lost audit.RollbackError, reason string, attributes map[string]string) (audit.Rollback, error) {
	loaded, err := l.state.Load(ctx, l.Chain.Store)
	if err != nil {
		return audit.Rollback{}, fmt.Errorf("accepting a rollback: %w", err)
	}
	a := &acceptance{lost: lost, state: loaded, skipped: SkippedAfterRestore}
	event := l.acceptanceEvent(authz.SystemPrincipal(authz.SystemTenant), reason)
	maps.Copy(event.Attributes, attributes)
	var receipt *audit.Receipt
	err = l.Chain.Store.Update(ctx, func(tx store.Tx) (err error) {
		receipt, err = l.append(tx, event, a)
		return err
	})
	if err != nil {
		return audit.Rollback{}, fmt.Errorf("accepting a rollback: %w", err)
	}
	l.stateEpoch.Store(a.rollback.Epoch)
	a.rollback.Receipt = *receipt
	return a.rollback, nil
}

func (l *Log) acceptanceEvent(p authz.Principal, reason string) audit.Event {
	return audit.Event{
		Type: audit.RollbackAccepted, Outcome: audit.Success, Principal: p,
		Resource:   audit.Resource{Type: audit.ChainResource, ID: l.Chain.ChainID},
		Attributes: map[string]string{audit.AttributeReason: reason},
	}
}

// noteAcceptance tells the verification of the running log that a loss was accepted.
func (l *Log) noteAcceptance(ctx context.Context) {
	if l.OnAcceptance != nil {
		l.OnAcceptance(ctx)
	}
}

// beginEpoch chooses the epoch that follows the head, and returns the sequence of its first entry.
// It removes epoch rows that no entry accepts, and data derived from lost entries.
func (a *acceptance) beginEpoch(l *Log, tx store.Tx, head audit.Position) (first uint64, err error) {
	epochs, _, err := l.Chain.AcceptedEpochs(tx, head)
	if err != nil {
		return 0, err
	}
	index, ok := audit.IndexOf(epochs, head.Sequence)
	first = max(a.lost.LostTo, head.Sequence) + a.skipped + 1
	if !ok || first > audit.MaxInteger {
		return 0, audit.ErrDamagedLog
	}
	rows, err := audit.ReadEpochRows(tx)
	if err != nil {
		return 0, err
	}
	for _, row := range rows {
		if slices.Contains(epochs[1:], row.Epoch) {
			continue
		}
		if err := tx.Delete(row.Key); err != nil {
			return 0, err
		}
	}
	if err := l.truncateDerived(tx, epochs, head); err != nil {
		return 0, err
	}
	number := max(a.lost.Epoch, epochs[len(epochs)-1].Number) + 1
	a.epoch = audit.Epoch{Number: number, First: first, Size: index + 1}
	a.rollback = audit.Rollback{Epoch: number, LostFrom: head.Sequence + 1, LostTo: first - 1}
	return first, tx.Put(audit.EpochKey(number), a.epoch.Encode())
}

// describe adds to the first entry of the epoch which loss it accepts.
func (a *acceptance) describe(e *audit.Entry) {
	number := func(n uint64) string { return strconv.FormatUint(n, 10) }
	e.Add(audit.AttributeEpoch, number(a.rollback.Epoch))
	e.Add(audit.AttributeLostFrom, number(a.rollback.LostFrom))
	e.Add(audit.AttributeLostTo, number(a.rollback.LostTo))
	e.Add(audit.AttributeAnchored, number(a.lost.LostTo))
	e.Add(audit.AttributeAnchoredHash, hex.EncodeToString(a.lost.Hash[:]))
}

// truncateDerived reduces derived data to the last entry that the newest checkpoint and the log
// have in common. It does so only if the log lacks the checkpoint's entry.
func (l *Log) truncateDerived(tx store.Tx, epochs []audit.Epoch, head audit.Position) error {
	signed, c, err := l.Chain.ReadCheckpoint(tx)
	if err != nil || signed == nil {
		return err
	}
	has, err := chain.HasCheckpointEntry(tx, head, c)
	if err != nil {
		return err
	}
	if has {
		if index, ok := audit.IndexOf(epochs, c.Sequence); ok && index+1 != c.Size {
			return audit.ErrDamagedLog // the row of an epoch is missing
		}
		return nil
	}
	common, err := l.lastCommon(tx, epochs, head, c)
	if err != nil {
		return err
	}
	if common.Size == 0 {
		err = tx.Delete(audit.CheckpointKey)
	} else if signed, err = audit.SignCheckpoint(common, l.signer); err == nil {
		err = tx.Put(audit.CheckpointKey, signed)
	}
	return errors.Join(err, truncateTree(tx, common), truncateSummaries(tx, common.Sequence))
}

// lastCommon returns the checkpoint of the last entry that is the same in the log and in the tree
// of c. It returns the zero checkpoint when there is none. Error: audit.ErrDamagedLog when the
// stored tree is not the checkpoint's.
func (l *Log) lastCommon(r store.Reader, epochs []audit.Epoch, head audit.Position, c audit.Checkpoint) (audit.Checkpoint, error) {
	index, ok := audit.IndexOf(epochs, head.Sequence)
	if !ok {
		return audit.Checkpoint{}, audit.ErrDamagedLog
	}
	at, least := audit.Position{}, int64(0) // archived entries cannot be compared, and are not lost
	base, err := l.Chain.BaseOf(r)
	if err != nil {
		return audit.Checkpoint{}, err
	}
	if base != nil {
		at, least = base.Head, base.Tree.Size
	}
	if most := min(c.Size, index+1); most < least {
		return audit.Checkpoint{}, audit.ErrDamagedLog
	}
	hashes := audit.Tiles{Reader: r}.Hashes(c.Size, c.Root)
	var failed error
	// Each entry names the one before it, so the common entries come first and a binary search
	// finds the last one.
	n := sort.Search(int(min(c.Size, index+1)-least), func(i int) bool {
		leaf, err := hashes.ReadHashes([]int64{tlog.StoredHashIndex(0, least+int64(i))})
		if err != nil {
			failed = audit.TreeError(err)
			return true
		}
		e, err := entries.Read(r, audit.SequenceAt(epochs, least+int64(i)))
		if err != nil && !errors.Is(err, audit.ErrNoEntry) && !audit.IsDamage(err) {
			failed = err
		}
		return err != nil || leaf[0] != tlog.Hash(audit.LeafHash(e.Position().Hash))
	})
	size := least + int64(n)
	if failed != nil || size == 0 {
		return audit.Checkpoint{}, failed
	}
	if n > 0 {
		e, err := entries.Read(r, audit.SequenceAt(epochs, size-1))
		if err != nil {
			return audit.Checkpoint{}, err
		}
		at = e.Position()
	}
	root, err := tlog.TreeHash(size, hashes)
	if err != nil {
		return audit.Checkpoint{}, audit.TreeError(err)
	}
	return audit.Checkpoint{
		ChainID: l.Chain.ChainID, Epoch: audit.EpochOf(epochs, at.Sequence).Number, Size: size, Root: root,
		Sequence: at.Sequence, Hash: at.Hash, Time: time.UnixMicro(at.Micros).UTC(),
	}, nil
}

// truncateTree removes all tiles and hashes that do not belong to a checkpoint's tree.
func truncateTree(tx store.Tx, c audit.Checkpoint) error {
	for level := range audit.MaxLevel + 1 {
		n := (c.Size>>(audit.TileHeight*level) + audit.TileWidth - 1) / audit.TileWidth
		if err := deleteAll(tx, store.Range{From: audit.TileKey(level, n), To: audit.TileKey(level+1, 0)}, nil); err != nil {
			return fmt.Errorf("taking the tree back: %w", err)
		}
	}
	b, err := audit.Tiles{Reader: tx}.Builder(c.Size, c.Root)
	if err != nil {
		return err
	}
	for _, t := range b.Partial() {
		if err := tx.Put(audit.TileKey(t.Level, t.Index), t.Data); err != nil {
			return err
		}
	}
	return nil
}

// truncateSummaries removes the summaries of blocks that were not full at an entry.
func truncateSummaries(tx store.Tx, to uint64) error {
	err := deleteAll(tx, audit.SummaryRange, func(key []byte) (bool, error) {
		name := key[len(audit.SummaryRange.From):]
		n := len(name) - 9
		if n < 1 || name[n] != '/' {
			return false, nil // not a summary key; verification reports it
		}
		row, err := tx.Get(audit.TenantKey(string(name[:n]), audit.EndOf(binary.BigEndian.Uint64(name[n+1:]))))
		return row == nil || audit.SequenceOf(row) > to, err
	})
	if err != nil {
		return fmt.Errorf("taking the summaries back: %w", err)
	}
	return nil
}

// deleteAll deletes the rows of a range for which meant returns true. A nil function selects all
// rows.
func deleteAll(tx store.Tx, rng store.Range, meant func(key []byte) (bool, error)) error {
	var keys [][]byte
	err := tx.Scan(rng, func(key, _ []byte) bool {
		keys = append(keys, bytes.Clone(key))
		return true
	})
	for _, key := range keys {
		if err != nil {
			return err
		}
		remove := true
		if meant != nil {
			remove, err = meant(key)
		}
		if remove && err == nil {
			err = tx.Delete(key)
		}
	}
	return err
}
