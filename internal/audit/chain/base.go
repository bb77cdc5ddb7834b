package chain

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/entries"
	"github.com/latticekeep/latticekeep/internal/store"
)

// readRow is a row and the base parsed from it.
type readRow struct {
	row  []byte
	base *audit.Base
}

// get returns the base of a row if the cache has it, and nil otherwise.
func (c *baseCache) get(row []byte) *audit.Base {
	if last := c.last.Load(); last != nil && bytes.Equal(last.row, row) {
		return last.base
	}
	return nil
}

// ParseOwnBase parses and verifies the base row of this log, and caches the result. Error:
// audit.ErrDamagedLog.
func (ch *Chain) ParseOwnBase(row []byte) (*audit.Base, error) {
	if b := ch.bases.get(row); b != nil {
		return b, nil
	}
	ch.bases.reading.Lock()
	defer ch.bases.reading.Unlock()
	if b := ch.bases.get(row); b != nil {
		return b, nil
	}
	b, err := audit.ParseBase(row, ch.Key)
	if err != nil || b.ChainID != ch.ChainID {
		return nil, audit.ErrDamagedLog
	}
	ch.bases.last.Store(&readRow{row, b})
	return b, nil
}

// ReadBase does the same as the function ReadBase, for this log and with its key. It compares the
// row with the cached one and parses it only when it differs.
func (ch *Chain) ReadBase(ctx context.Context) (b *audit.Base, err error) {
	var row []byte
	err = ch.Store.View(ctx, func(r store.Reader) error {
		at, err := r.Get(audit.BaseKey)
		if err != nil || at == nil {
			return err
		}
		if b = ch.bases.get(at); b == nil {
			row = bytes.Clone(at)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("reading the base of the log: %w", err)
	}
	if row == nil {
		return b, nil
	}
	if b, err = ch.ParseOwnBase(row); err != nil {
		return nil, brokenBase()
	}
	return b, nil
}

// LoadBase returns the base of this log with all items of some lists, nil when nothing is archived.
// Errors: an [audit.Broken], fault.Unavailable.
func (ch *Chain) LoadBase(ctx context.Context, lists audit.BaseLists) (*audit.Base, error) {
	base, err := ch.ReadBase(ctx)
	for err == nil && base != nil && lists != "" {
		loaded, failed := base.ReadLists(ctx, ch.Store, lists)
		if !errors.Is(failed, audit.ErrBase) {
			return loaded, failed
		}
		before := base
		if base, err = ch.ReadBase(ctx); err == nil && base.Equal(before) {
			return nil, brokenBase()
		} // otherwise entries were archived meanwhile
	}
	return base, err
}

// ArchivedTenant returns the end of the part of a tenant that is archived, nil when none of its entries
// is. Error: audit.ErrDamagedLog.
func (ch *Chain) ArchivedTenant(r store.Reader, tenant string) (*audit.TenantState, error) {
	base, err := ch.BaseOf(r)
	if err != nil || base == nil {
		return nil, err
	}
	t, err := base.Tenant(tenant, r.Get)
	if errors.Is(err, audit.ErrBase) {
		return nil, audit.ErrDamagedLog
	}
	return t, err
}

func brokenBase() *audit.Broken {
	return &audit.Broken{Sequence: 1, Reason: audit.ErrBase.Error() + ": what was archived cannot be gone on from"}
}

// IsArchived reports whether an entry is archived by now. If so, it may be missing from the
// database.
func (ch *Chain) IsArchived(ctx context.Context, sequence uint64) (bool, error) {
	base, err := ch.ReadBase(ctx)
	return err == nil && base != nil && base.Sequence() >= sequence, err
}

// ReadBase returns the base in the store with all of its items, and nil if nothing was archived. A
// damaged base breaks the chain at its beginning, because the state before the remaining entries is
// unknown. The base is verified with the key that it names itself.
func ReadBase(ctx context.Context, s store.Store) (b *audit.Base, err error) {
	var row []byte
	err = s.View(ctx, func(r store.Reader) error {
		b, err := r.Get(audit.BaseKey)
		row = bytes.Clone(b)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("reading the base of the log: %w", err)
	}
	if row == nil {
		return nil, nil
	}
	if b, err = audit.ParseBase(row, nil); err != nil {
		return nil, brokenBase()
	}
	if b, err = b.ReadLists(ctx, s, audit.AllLists); errors.Is(err, audit.ErrBase) {
		return nil, brokenBase()
	}
	return b, err
}

// When the commit that adds an [audit.Segment] is done, the entries of the segment no longer belong
// to the database. Rows that are left of them are garbage: readers ignore them. They are removed in
// small transactions, and any process continues where an earlier one stopped.

// CutTo returns the sequence up to which entries are in the archive, and 0 when none are. Readers
// ignore rows of these entries. The sequence comes only from the signed base: if an unsigned row
// could state it, a writer to the database could hide entries. Error: audit.ErrDamagedLog for a
// base that does not belong to this log.
func (ch *Chain) CutTo(r store.Reader) (uint64, error) {
	base, err := ch.BaseOf(r)
	if err != nil || base == nil {
		return 0, err
	}
	return base.Sequence(), nil
}

// BaseOf returns the base of this log, and nil when nothing is archived. Error:
// audit.ErrDamagedLog.
func (ch *Chain) BaseOf(r store.Reader) (*audit.Base, error) {
	row, err := r.Get(audit.BaseKey)
	if err != nil || row == nil {
		return nil, err
	}
	if base := ch.bases.get(row); base != nil {
		return base, nil
	}
	return ch.ParseOwnBase(bytes.Clone(row))
}

// ArchivedTo returns the base of the archived entries with all items of some lists, and nil when
// nothing is archived. Error: audit.ErrDamagedLog for a damaged base.
func (ch *Chain) ArchivedTo(ctx context.Context, lists audit.BaseLists) (*audit.Base, error) {
	base, err := ch.LoadBase(ctx, lists)
	if _, broken := audit.IsBroken(err); broken {
		return nil, audit.ErrDamagedLog
	}
	return base, err
}

// OldestTime returns the time of the oldest entry that is in the database, and the zero time when
// there is none. It reads one entry and verifies nothing. Errors: audit.ErrDamagedLog,
// fault.Unavailable.
func (ch *Chain) OldestTime(ctx context.Context) (at time.Time, err error) {
	err = ch.Store.View(ctx, func(r store.Reader) error {
		cut, err := ch.CutTo(r)
		if err != nil {
			return err
		}
		var bad error
		err = entries.Scan(r, store.Range{From: audit.EntryKey(cut + 1), To: audit.EntryKey(math.MaxUint64)}, func(_, row []byte) bool {
			var oldest audit.StoredEntry
			if oldest, bad = audit.DecodeStoredEntry(row, audit.NoSignature); bad == nil {
				at = oldest.Entry.Time()
			}
			return false
		})
		if bad != nil {
			return audit.ErrDamagedLog
		}
		return err
	})
	if err != nil {
		return time.Time{}, fmt.Errorf("reading the oldest entry: %w", err)
	}
	return at, nil
}
