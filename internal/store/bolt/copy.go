package bolt

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Copying
//
// A long read transaction would keep freed pages from being wiped. So a copy is many short Views,
// and it passes on rows between them. Commits continue meanwhile, and the writer notes the keys
// that they change:
//
//   - The writer notes the keys of a group before it commits, whatever the outcome of the commit.
//     So every commit that a View sees has been noted before.
//   - A copy begins, and takes notes off the list, between two commits. So every later View sees
//     each commit that is not on the list.
//
// Later Views read the noted keys again and pass them on again. The last View reads all remaining
// keys at once. Then the copy has passed on, for each key, the last change that this View sees, or
// the row as it was from the beginning. A key that is noted without need, because its commit
// failed, costs one extra read.

// These constants bound a copy's memory. The writer's notes are bounded too, see changedKeys.
const (
	pageRows  = 500           // most rows of one View
	pageBytes = 4 << 20       // one View ends with the row that reaches this size
	pageTime  = viewLimit / 4 // or with the row that comes later, as on a slow disk
	lastBytes = 16 << 20      // the same for the last View, which must read all remaining keys
	maxRounds = 64            // most rounds that read noted keys, after the first
)

var errBehind = fault.New(fault.Unavailable,
	"the copy fell behind the writes: take it to a faster place, or while less is written")

// Copy passes all rows to emit. Applied in order, they make the state of one commit, which is not
// older than the call. A key may come several times; a nil value means that the row must be
// deleted. emit may be slow, within ctx, and owns the slices. An error of emit ends the copy and is
// returned.
//
// Writes continue meanwhile, and a failed commit from which the store recovers does not end the
// copy. Errors: fault.Conflict while another copy is running; fault.Unavailable when the copy falls
// more than 16 MiB of changed keys, about 100 000 keys, behind the writes, or does not catch up in
// 64 rounds.
func (s *Store) Copy(ctx context.Context, emit func(key, value []byte) error) error {
	c := newChangedKeys()
	if err := s.follow(ctx, &s.followers.copying, c); err != nil {
		return err
	}
	defer s.followers.copying.CompareAndSwap(c, nil)
	if err := s.copyRows(ctx, c, emit); err != nil {
		return err
	}
	for range maxRounds {
		p, whole, err := s.lastPage(ctx, c)
		if err != nil {
			return err
		}
		if whole {
			return p.emit(ctx, emit)
		}
		if err := s.catchUp(ctx, c, emit); err != nil {
			return err
		}
	}
	return errBehind
}

// copyRows passes on every row, each as some View found it.
func (s *Store) copyRows(ctx context.Context, c *changedKeys, emit func(key, value []byte) error) error {
	return s.pages(ctx, func(p page, _ store.Range) error {
		err := p.emit(ctx, emit)
		if err == nil && c.bytes() > noteBytes/2 {
			err = s.catchUp(ctx, c, emit)
		}
		return err
	})
}

// pages passes all rows to visit in pages, each with the range that one View found them in.
func (s *Store) pages(ctx context.Context, visit func(page, store.Range) error) error {
	for rest, more := (store.Range{}), true; more; {
		var p page
		err := s.read(ctx, func(r store.Reader) error {
			p = newPage(s.opts.Now)
			return r.Scan(rest, p.add)
		})
		if err != nil {
			return err
		}
		found := rest
		if more = p.full(); more {
			rest.From = append(slices.Clone(p.rows[len(p.rows)-1].key), 0)
			found.To = rest.From
		}
		if err := visit(p, found); err != nil {
			return err
		}
	}
	return nil
}

// catchUp takes the noted keys off the list, reads them and passes them on.
func (s *Store) catchUp(ctx context.Context, c *changedKeys, emit func(key, value []byte) error) error {
	var keys []string
	var lost bool
	err := s.between(ctx, func() { keys, lost = c.take() })
	if err != nil {
		return err
	}
	if lost {
		return errBehind
	}
	for len(keys) > 0 {
		var p page
		err := s.read(ctx, func(r store.Reader) error {
			p = newPage(s.opts.Now)
			return p.get(r, keys, p.full)
		})
		if err != nil {
			return err
		}
		if err := p.emit(ctx, emit); err != nil {
			return err
		}
		keys = keys[len(p.rows):]
	}
	return nil
}

// lastPage reads all noted keys in one View, and reports whether that was possible.
func (s *Store) lastPage(ctx context.Context, c *changedKeys) (p page, whole bool, err error) {
	err = s.read(ctx, func(r store.Reader) error {
		keys, lost := c.list() // after the View began: everything that it sees has been noted
		if lost {
			return errBehind
		}
		p = newPage(s.opts.Now)
		err := p.get(r, keys, func() bool { return p.bytes >= lastBytes || p.late() })
		whole = len(p.rows) == len(keys)
		return err
	})
	return p, whole, err
}

// page holds rows that a copy has read in one View and not yet passed on.
type page struct {
	rows  []row
	bytes int
	now   func() time.Time
	end   time.Time
}

func newPage(now func() time.Time) page { return page{now: now, end: now().Add(pageTime)} }

type row struct{ key, value []byte }

// add appends a row, and reports whether the page takes more.
func (p *page) add(key, value []byte) bool {
	p.rows = append(p.rows, row{key, value})
	p.bytes += len(key) + len(value)
	return !p.full()
}

func (p *page) full() bool { return len(p.rows) >= pageRows || p.bytes >= pageBytes || p.late() }

// late reports whether the View should end. It reads at least one row.
func (p *page) late() bool { return len(p.rows) > 0 && p.now().After(p.end) }

// get reads rows until enough returns true.
func (p *page) get(r store.Reader, keys []string, enough func() bool) error {
	for _, key := range keys {
		if enough() {
			return nil
		}
		value, err := r.Get([]byte(key))
		if err != nil {
			return err
		}
		p.add([]byte(key), value)
	}
	return nil
}

func (p *page) emit(ctx context.Context, emit func(key, value []byte) error) error {
	for _, row := range p.rows {
		if err := ctx.Err(); err != nil {
			return ended(err)
		}
		if err := emit(row.key, row.value); err != nil {
			return err
		}
	}
	return nil
}

// follow makes the writer note in c the keys that it changes from now on, until the caller takes c
// out of by.
func (s *Store) follow(ctx context.Context, by *atomic.Pointer[changedKeys], c *changedKeys) error {
	taken := false
	err := s.between(ctx, func() { taken = !by.CompareAndSwap(nil, c) })
	if err != nil {
		by.CompareAndSwap(c, nil) // between may have run do before Update returned the error
		return err
	}
	if taken {
		return fault.New(fault.Conflict, "another copy of the store is being made: wait until it is done")
	}
	return nil
}

// between calls do while no commit is in progress, because an Update runs only after the previous
// commit is settled. If the file is out of use, the writer reopens it first.
func (s *Store) between(ctx context.Context, do func()) error {
	if s.opts.ReadOnly { // a read-only file has no writer
		do()
		return nil
	}
	return s.Update(ctx, func(store.Tx) error { do(); return nil })
}

// read is View for callers that would rather wait than be refused while the file is reopened. fn
// may run again.
func (s *Store) read(ctx context.Context, fn func(store.Reader) error) error {
	for {
		err := s.View(ctx, fn)
		if !errors.Is(err, errRecovering) || s.opts.ReadOnly {
			return err
		}
		if err := s.between(ctx, func() {}); err != nil {
			return err
		}
	}
}
