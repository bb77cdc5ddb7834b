package audit

import (
	"bytes"
	"context"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/latticekeep/latticekeep/internal/store"
)

// baseCache is the base that was read last: one of many credentials is long, and it
// takes seconds to read a row that nobody has changed. The zero value is ready.
type baseCache struct {
	reading sync.Mutex // held by who reads a row, for all that ask meanwhile
	last    atomic.Pointer[readRow]
}

// readRow is a row and what it says.
type readRow struct {
	row  []byte
	base *Base
}

// get returns the base of a row, nil if that was not the last one that was read.
func (c *baseCache) get(row []byte) *Base {
	if last := c.last.Load(); last != nil && bytes.Equal(last.row, row) {
		return last.base
	}
	return nil
}

// ownBase reads the row of the base of this log, which it keeps.
func (ch *Chain) ownBase(row []byte) (*Base, error) {
	if b := ch.bases.get(row); b != nil {
		return b, nil
	}
	ch.bases.reading.Lock()
	defer ch.bases.reading.Unlock()
	if b := ch.bases.get(row); b != nil {
		return b, nil
	}
	b, err := ParseBase(row, ch.key)
	if err != nil || b.chainID != ch.chainID {
		return nil, errDamagedLog
	}
	ch.bases.last.Store(&readRow{row, b})
	return b, nil
}

// readBase is the function of the name for this log. A row that is what it was the
// last time is compared, and not read again.
func (ch *Chain) readBase(ctx context.Context) (b *Base, err error) {
	var row []byte
	err = ch.store.View(ctx, func(r store.Reader) error {
		at, err := r.Get(baseKey)
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
	if b, err = ch.ownBase(row); err != nil {
		return nil, brokenBase()
	}
	return b, nil
}

func brokenBase() *Broken {
	return &Broken{1, ErrBase.Error() + ": what was archived cannot be gone on from"}
}

// movedPast reports whether an entry is archived by now, so that it is no fault if
// it is missing.
func (ch *Chain) movedPast(ctx context.Context, sequence uint64) (bool, error) {
	base, err := ch.readBase(ctx)
	return err == nil && base != nil && base.Sequence() >= sequence, err
}

// readBase returns the base of the store, and nil if nothing was archived. One
// that is damaged breaks the chain at its beginning: what came before the
// entries that are left is not known.
func readBase(ctx context.Context, s store.Store) (b *Base, err error) {
	var row []byte
	err = s.View(ctx, func(r store.Reader) error {
		b, err := r.Get(baseKey)
		row = bytes.Clone(b)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("reading the base of the log: %w", err)
	}
	if row == nil {
		return nil, nil
	}
	if b, err = ParseBase(row, nil); err != nil {
		return nil, brokenBase()
	}
	return b, nil
}

// From the commit that enters a [Segment] its entries are no part of the database
// any more. What is still there of them is garbage, which readers ignore, and
// which is removed in as many small transactions as it takes, from wherever an
// earlier process left off.

// cutTo returns the sequence up to which entries are in the archive, 0 when none
// is: what the database still has of them is to be ignored. The base says so, which
// is signed, and no row beside it: else whoever adds one would hide entries. Error:
// errDamagedLog for a base that is none of this log.
func (ch *Chain) cutTo(r store.Reader) (uint64, error) {
	base, err := ch.baseIn(r)
	if err != nil || base == nil {
		return 0, err
	}
	return base.Sequence(), nil
}

// baseIn returns the base of this log, nil when nothing is archived. Error:
// errDamagedLog.
func (ch *Chain) baseIn(r store.Reader) (*Base, error) {
	row, err := r.Get(baseKey)
	if err != nil || row == nil {
		return nil, err
	}
	if base := ch.bases.get(row); base != nil {
		return base, nil
	}
	return ch.ownBase(bytes.Clone(row))
}

// archivedTo returns the base of what is archived, nil when nothing is.
func (ch *Chain) archivedTo(ctx context.Context) (*Base, error) {
	base, err := ch.readBase(ctx)
	if _, broken := IsBroken(err); broken {
		return nil, errDamagedLog
	}
	return base, err
}
