package bolt

import (
	"context"
	"errors"
	"maps"
	"slices"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Copying
//
// A long read transaction would keep freed pages from being wiped, so a copy is
// many short Views, between which its rows are handed on. Commits go on
// meanwhile, and what they change behind the copy's back is noted:
//
//   - The writer notes the keys of a group before it commits, whatever becomes
//     of the commit. So every commit that a View sees has been noted before.
//   - Copying begins, and takes notes off the list, between two commits. So a
//     commit that is not on the list is seen by every later View.
//
// Keys that were noted are read again in later Views, and handed on again. A last
// View reads all that are left at once: for each key the copy has then handed on
// the last change that this View sees, or the row was there from the beginning.
// A key that is noted without need, because its commit failed, costs one more
// reading.

// Bounds of a copy's memory. What the writer notes is bounded too, and a copy that
// falls so far behind is given up: the writer never waits for it.
const (
	pageRows  = 500      // one View reads at most so many rows,
	pageBytes = 4 << 20  // and ends with the row that reaches this size
	lastBytes = 16 << 20 // likewise the last View, which must read all that is left
	noteBytes = 16 << 20 // keys noted, at noteSize more than the length of each
	noteSize  = 64
	maxRounds = 64 // rounds that read what was noted, after the first
)

// copying is the list of keys that commits have changed since a copy began or
// last looked; Store.mu guards it.
type copying struct {
	notes map[string]struct{}
	size  int
	lost  bool // there were too many
}

var errBehind = fault.New(fault.Unavailable,
	"the copy fell behind the writes: take it to a faster place, or while less is written")

// Copy hands all rows to emit, so that applied in order they make the state of
// one commit, which is not older than the call. A key may come several times; a
// nil value says that the row is to be deleted. emit may take its time, within
// ctx, and owns the slices; its error ends the copy and is returned.
//
// Writes go on meanwhile, and a failed commit that the store recovers from does
// not end the copy. Errors: fault.Conflict while another copy is running,
// fault.Unavailable when the copy falls more than 16 MiB of changed keys, some
// 100 000, behind the writes, or does not catch up in 64 rounds.
func (s *Store) Copy(ctx context.Context, emit func(key, value []byte) error) error {
	c := &copying{notes: make(map[string]struct{})}
	if err := s.follow(ctx, c); err != nil {
		return err
	}
	defer s.unfollow(c)
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

// copyRows hands on every row, as some View found it.
func (s *Store) copyRows(ctx context.Context, c *copying, emit func(key, value []byte) error) error {
	for rest, more := (store.Range{}), true; more; {
		var p page
		err := s.read(ctx, func(r store.Reader) error {
			p = page{}
			return r.Scan(rest, p.add)
		})
		if err != nil {
			return err
		}
		if err := p.emit(ctx, emit); err != nil {
			return err
		}
		if more = p.full(); more {
			rest.From = append(slices.Clone(p.rows[len(p.rows)-1].key), 0)
		}
		if s.noted(c) > noteBytes/2 {
			if err := s.catchUp(ctx, c, emit); err != nil {
				return err
			}
		}
	}
	return nil
}

// catchUp takes what is noted off the list and hands it on.
func (s *Store) catchUp(ctx context.Context, c *copying, emit func(key, value []byte) error) error {
	var keys []string
	var lost bool
	err := s.between(ctx, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		keys, lost = slices.Sorted(maps.Keys(c.notes)), c.lost
		c.notes, c.size = make(map[string]struct{}), 0
	})
	if err != nil {
		return err
	}
	if lost {
		return errBehind
	}
	for len(keys) > 0 {
		var p page
		err := s.read(ctx, func(r store.Reader) error {
			p = page{}
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

// lastPage reads all that is noted in one View, and reports whether that was
// possible.
func (s *Store) lastPage(ctx context.Context, c *copying) (p page, whole bool, err error) {
	err = s.read(ctx, func(r store.Reader) error {
		s.mu.Lock() // only now: what this View sees has been noted
		keys, lost := slices.Sorted(maps.Keys(c.notes)), c.lost
		s.mu.Unlock()
		if lost {
			return errBehind
		}
		p = page{}
		err := p.get(r, keys, func() bool { return p.bytes >= lastBytes })
		whole = len(p.rows) == len(keys)
		return err
	})
	return p, whole, err
}

// page is what a copy has read in one View and not handed on.
type page struct {
	rows  []row
	bytes int
}

type row struct{ key, value []byte }

// add reports whether the page takes more.
func (p *page) add(key, value []byte) bool {
	p.rows = append(p.rows, row{key, value})
	p.bytes += len(key) + len(value)
	return !p.full()
}

func (p *page) full() bool { return len(p.rows) >= pageRows || p.bytes >= pageBytes }

// get reads rows until enough says so.
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

// follow has the writer note what it changes from now on.
func (s *Store) follow(ctx context.Context, c *copying) error {
	taken := false
	err := s.between(ctx, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if taken = s.copying != nil; !taken {
			s.copying = c
		}
	})
	if err != nil {
		s.unfollow(c) // between may have been in time, and Update too late to say so
		return err
	}
	if taken {
		return fault.New(fault.Conflict, "another copy of the store is being made: wait until it is done")
	}
	return nil
}

func (s *Store) unfollow(c *copying) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.copying == c {
		s.copying = nil
	}
}

// note is called by the writer before a commit.
func (s *Store) note(log []change) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.copying
	if c == nil || c.lost {
		return
	}
	for _, change := range log {
		if _, known := c.notes[string(change.key)]; !known {
			c.notes[string(change.key)] = struct{}{}
			c.size += len(change.key) + noteSize
		}
	}
	if c.size > noteBytes {
		c.notes, c.size, c.lost = nil, 0, true
	}
}

// noted returns the size of the list.
func (s *Store) noted(c *copying) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return c.size
}

// between calls do while no commit is under way: an Update has its turn when the
// commit before is settled. If the file is out of use, it is opened again first.
func (s *Store) between(ctx context.Context, do func()) error {
	if s.opts.ReadOnly { // nobody writes
		do()
		return nil
	}
	return s.Update(ctx, func(store.Tx) error { do(); return nil })
}

// read is View for who would rather wait than be turned away while the file is
// opened again. fn may run again.
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
