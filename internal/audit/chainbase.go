package audit

import (
	"bytes"
	"context"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/latticekeep/latticekeep/internal/store"
)

// baseCache caches the base that was read last. Parsing takes seconds when a base has many
// credentials, so an unchanged row is not parsed again. The zero value is ready for use.
type baseCache struct {
	reading sync.Mutex // lets one caller parse a row while the others wait for the result
	last    atomic.Pointer[readRow]
}

// readRow is a row and the base parsed from it.
type readRow struct {
	row  []byte
	base *Base
}

// get returns the base of a row if the cache has it, and nil otherwise.
func (c *baseCache) get(row []byte) *Base {
	if last := c.last.Load(); last != nil && bytes.Equal(last.row, row) {
		return last.base
	}
	return nil
}

// ownBase parses and verifies the base row of this log, and caches the result. Error:
// errDamagedLog.
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

// readBase does the same as the function readBase, for this log and with its key. It compares the
// row with the cached one and parses it only when it differs.
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

// movedPast reports whether an entry is archived by now. If so, it may be missing from the
// database.
func (ch *Chain) movedPast(ctx context.Context, sequence uint64) (bool, error) {
	base, err := ch.readBase(ctx)
	return err == nil && base != nil && base.Sequence() >= sequence, err
}

// readBase returns the base in the store, and nil if nothing was archived. A damaged base breaks
// the chain at its beginning, because the state before the remaining entries is unknown. The base
// is verified with the key that it names itself.
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

// When the commit that adds a [Segment] is done, the entries of the segment no longer belong to the
// database. Rows that are left of them are garbage: readers ignore them. They are removed in small
// transactions, and any process continues where an earlier one stopped.

// cutTo returns the sequence up to which entries are in the archive, and 0 when none are. Readers
// ignore rows of these entries. The sequence comes only from the signed base: if an unsigned row
// could state it, a writer to the database could hide entries. Error: errDamagedLog for a base that
// does not belong to this log.
func (ch *Chain) cutTo(r store.Reader) (uint64, error) {
	base, err := ch.baseIn(r)
	if err != nil || base == nil {
		return 0, err
	}
	return base.Sequence(), nil
}

// baseIn returns the base of this log, and nil when nothing is archived. Error: errDamagedLog.
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

// archivedTo returns the base of the archived entries, and nil when nothing is archived. Error:
// errDamagedLog for a damaged base.
func (ch *Chain) archivedTo(ctx context.Context) (*Base, error) {
	base, err := ch.readBase(ctx)
	if _, broken := IsBroken(err); broken {
		return nil, errDamagedLog
	}
	return base, err
}
