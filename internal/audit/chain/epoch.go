package chain

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/entries"
	"github.com/latticekeep/latticekeep/internal/store"
)

// CurrentEpoch returns the number of the epoch of the head. It reads and verifies the entries that
// begin epochs only when the rows have changed.
func (ch *Chain) CurrentEpoch(r store.Reader, head audit.Position) (uint64, error) {
	rows, err := audit.ReadEpochRows(r)
	if err != nil || len(rows) == 0 {
		return 1, err
	}
	var text []byte
	for _, row := range rows {
		text = append(append(text, row.Key...), row.Encode()...)
	}
	if c := ch.epochsRead.Load(); c != nil && bytes.Equal(c.rows, text) && c.newest.First <= head.Sequence {
		return c.newest.Number, nil
	}
	epochs, _, err := ch.AcceptedEpochs(r, head)
	if err != nil {
		return 0, err
	}
	newest := epochs[len(epochs)-1]
	if len(epochs) == len(rows)+1 {
		ch.epochsRead.Store(&readEpochs{text, newest})
	}
	return newest.Number, nil
}

// Epochs returns the accepted epochs of the log in ascending order. The first epoch needs no
// acceptance.
func (ch *Chain) Epochs(r store.Reader) ([]audit.Epoch, error) {
	head, err := audit.ReadHead(r)
	if err != nil {
		return nil, err
	}
	epochs, _, err := ch.AcceptedEpochs(r, head)
	return epochs, err
}

// AcceptedEpochs returns the epochs that the entries at their beginning confirm, and the losses
// that these entries accept. Rows are not signed, but entries are. If a row alone counted, anyone
// who replaces the database with an older copy could accept the loss himself, and anyone who adds a
// row could have later entries signed as another epoch's. So AcceptedEpochs ignores a row that no
// entry confirms, without an error. If the row of a real epoch is missing, the entries of that
// epoch do not fit.
func (ch *Chain) AcceptedEpochs(r store.Reader, head audit.Position) (epochs []audit.Epoch, losses []audit.AcceptedLoss, err error) {
	rows, err := audit.ReadEpochRows(r)
	if err != nil {
		return nil, nil, err
	}
	epochs = []audit.Epoch{{Number: 1, First: 1}}
	for _, row := range rows {
		previous := epochs[len(epochs)-1]
		if !row.Follows(previous) || row.First > head.Sequence {
			continue
		}
		loss := row.LossAfter(previous)
		e, err := entries.Read(r, row.First)
		switch {
		case errors.Is(err, audit.ErrNoEntry):
			base, err := ch.BaseOf(r)
			if err != nil && !audit.IsDamage(err) {
				return nil, nil, err
			}
			if err != nil || base == nil || !slices.Contains(base.Epochs, row.Epoch) {
				continue // it is not in the archive either
			}
		case audit.IsDamage(err):
			continue
		case err != nil:
			return nil, nil, err
		case !loss.IsOf(e) || !e.Verify(ch.Key, nil):
			continue
		default:
			loss.Anchored, loss.Hash = e.Number(audit.AttributeAnchored), e.Attributes[audit.AttributeAnchoredHash]
		}
		epochs, losses = append(epochs, row.Epoch), append(losses, loss)
	}
	return epochs, losses, nil
}

// VerifyForeignHead verifies a head that another process has written, and returns it with the rows
// of the newest entries. The head's entry must be the first of these rows. The rows are read in one
// scan, so a remote store can send them together with the head.
func (ch *Chain) VerifyForeignHead(r store.Reader, head audit.Position) (audit.Head, *RecentRows, error) {
	newest := audit.EntryRange
	newest.Reverse = true
	var rows RecentRows
	err := r.Scan(newest, func(key, value []byte) bool {
		rows.entries = append(rows.entries, audit.Row{Key: bytes.Clone(key), Value: bytes.Clone(value)})
		return len(rows.entries) < MaxRecentRows
	})
	if err != nil {
		return audit.Head{}, nil, fmt.Errorf("reading the newest audit entry: %w", err)
	}
	rows.Reader = r
	e, err := entries.ReadStored(&rows, head.Sequence)
	if err != nil || !bytes.Equal(rows.entries[0].Key, audit.EntryKey(head.Sequence)) || e.Entry.Position() != head || !e.Verify(ch.Key, &rows.Memo) {
		if err == nil || errors.Is(err, audit.ErrNoEntry) {
			err = audit.ErrDamagedLog
		}
		return audit.Head{}, nil, err
	}
	number, err := ch.CurrentEpoch(r, head)
	return audit.Head{Position: head, Epoch: number}, &rows, err
}

// RecentRows answers reads from the newest entries before it asks the store. Continuing from
// another process's head needs the newest entries of tenants, and most of them are among these.
type RecentRows struct {
	store.Reader
	entries []audit.Row // newest first
	Memo    audit.Memo  // remembers groups, which often have several of these entries
}

// MaxRecentRows is small enough for one page of a scan in every store.
const MaxRecentRows = 16

// Get implements [store.Reader].
func (r *RecentRows) Get(key []byte) ([]byte, error) {
	for _, e := range r.entries {
		if bytes.Equal(e.Key, key) {
			return e.Value, nil
		}
	}
	return r.Reader.Get(key)
}

// VerifyTenantHead checks that a signature covers what a tenant's row says. The entry that the row
// names covers it. If that entry is archived, or the row names none, the base must agree with the
// row. The memo may be nil. Error: audit.ErrDamagedLog.
func (ch *Chain) VerifyTenantHead(r store.Reader, tenant string, p audit.TenantHead, m *audit.Memo) error {
	if p.Sequence > 0 {
		e, err := entries.ReadStored(r, p.Last.Sequence)
		switch {
		case err == nil && p.IsOf(e.Entry, tenant) && e.Verify(ch.Key, m):
			return nil
		case err == nil:
			return audit.ErrDamagedLog
		case !errors.Is(err, audit.ErrNoEntry):
			return err
		}
	}
	t, err := ch.ArchivedTenant(r, tenant)
	if err != nil {
		return err
	}
	var archived audit.TenantHead
	if t != nil {
		archived = audit.TenantHead{Sequence: t.Sequence, Last: t.Last}
	}
	if archived != p {
		return audit.ErrDamagedLog
	}
	return nil
}

// ReadState returns the state of the log in a snapshot. The caller sets Seen.
func (ch *Chain) ReadState(r store.Reader) (s LogState, err error) {
	if s.Head, err = audit.ReadHead(r); err == nil {
		s.epochs, s.losses, err = ch.AcceptedEpochs(r, s.Head)
	}
	return s, err
}

// LogState is the state of the log in a snapshot.
type LogState struct {
	Head   audit.Position
	epochs []audit.Epoch
	losses []audit.AcceptedLoss
	Seen   audit.Head // newest entry that this process had seen before
}

// Epoch returns the newest epoch.
func (s LogState) Epoch() audit.Epoch { return s.epochs[len(s.epochs)-1] }

// StoredHead returns the head that the store names. Error: [ErrNoCheckpoint] for a log without
// entries.
func (ch *Chain) StoredHead(ctx context.Context) (head audit.Position, err error) {
	err = ch.Store.View(ctx, func(r store.Reader) error {
		head, err = audit.ReadHead(r)
		return err
	})
	if err == nil && head.Sequence == 0 {
		err = ErrNoCheckpoint
	}
	return head, err
}

// VerifiedHead returns the stored head after comparing it with the last entry and verifying that
// entry's signature.
func (ch *Chain) VerifiedHead(ctx context.Context) (head audit.Head, err error) {
	var last *audit.Entry
	err = ch.Store.View(ctx, func(r store.Reader) error {
		if head.Position, err = audit.ReadHead(r); err != nil {
			return err
		}
		newest, err := entries.ReadNewest(r)
		if err == nil && newest > 0 {
			last, err = entries.Read(r, newest)
		}
		if err == nil {
			head.Epoch, err = ch.CurrentEpoch(r, head.Position)
		}
		return err
	})
	switch {
	case err != nil:
		return audit.Head{}, err
	case last == nil && head.Position == audit.Position{}:
		return head, nil
	case last == nil || last.Position() != head.Position || !last.Verify(ch.Key, nil):
		return audit.Head{}, audit.ErrDamagedLog
	}
	return head, nil
}

// StoredEntries returns the number of entries that are in the database and not in the archive. It
// counts nothing: the tree says how many there are. Errors: audit.ErrDamagedLog, fault.Unavailable.
func (ch *Chain) StoredEntries(ctx context.Context) (n int64, err error) {
	err = ch.Store.View(ctx, func(r store.Reader) error {
		head, err := audit.ReadHead(r)
		if err != nil || head.Sequence == 0 {
			return err
		}
		epochs, _, err := ch.AcceptedEpochs(r, head)
		if err != nil {
			return err
		}
		index, ok := audit.IndexOf(epochs, head.Sequence)
		if !ok {
			return audit.ErrDamagedLog
		}
		n = index + 1
		base, err := ch.BaseOf(r)
		if base != nil {
			n -= base.Tree.Size
		}
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("counting the entries in the database: %w", err)
	}
	return n, nil
}
