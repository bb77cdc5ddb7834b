package state

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/latticekeep/latticekeep/internal/store"
)

// scanRows is the number of rows that a scan reads in one View.
const scanRows = 256

// Scan is the result of comparing all deciding rows of a store with the state.
type Scan struct {
	Rows    uint64      // rows that were read
	Refused []*RowError // at most maxRefused
	More    bool        // there are other refused rows
}

// maxRefused bounds what a scan remembers.
const maxRefused = 10000

func (c *Scan) refuse(e *RowError) {
	if c.More = len(c.Refused) == maxRefused; !c.More {
		c.Refused = append(c.Refused, e)
	}
}

// Scan compares all deciding rows of st, which is the store without its guard, with the state, and
// then verifies the rows of the state itself. Rows may change meanwhile. Without a complete state it
// reads nothing. share, above 0 and at most 1, is the part of the time that the scan may be busy; it
// rests in between, and not at 1. With an error the result has what was found until then. Errors:
// those of the store, and fault.Unavailable when the rows of the state are damaged.
func (s *State) Scan(ctx context.Context, st store.Store, share float64) (Scan, error) {
	var result Scan
	if !s.enforced() {
		return result, nil
	}
	s.mu.Lock()
	began, table := s.head, s.table
	if s.watched++; s.table.changed == nil {
		s.table.changed = make(map[id]struct{}) // the table now remembers what changes
	}
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.watched--; s.watched == 0 {
			s.table.changed = nil
		}
	}()
	// Half an id saves memory. A missing row is overlooked if the half of another of n rows is the
	// same, with a probability of n · 2⁻⁶⁴.
	var seen []uint64
	for from := []byte{0}; from != nil; {
		start := time.Now()
		var page scanned
		err := st.View(ctx, func(r store.Reader) error {
			page = scanned{}
			if !s.knows(table) {
				return errReread
			}
			number, err := s.at(r, began)
			if err != nil {
				return err
			}
			return s.scanPage(r, from, number, &page)
		})
		if err != nil {
			return result, fmt.Errorf("reading the stored rows: %w", err)
		}
		for _, e := range page.refused {
			result.refuse(e)
		}
		seen = append(seen, page.ids...)
		result.Rows += uint64(len(page.ids))
		from = page.next
		if err := rest(ctx, time.Since(start), share); err != nil {
			return result, err
		}
	}
	slices.Sort(seen)
	if err := s.missing(seen, table, &result); err != nil {
		return result, err
	}
	if _, _, err := s.hasher.Load().load(ctx, st); err != nil {
		return result, ownError(err)
	}
	return result, nil
}

// scanned is what a scan keeps of one View. The rows themselves are not copied: with a scan a minute, that would
// be most of what an idle server allocates.
type scanned struct {
	ids     []uint64 // half of each row's id
	refused []*RowError
	next    []byte // key of the first row after them; nil: none
}

// scanPage compares rows from a key on with the state as of a change.
func (s *State) scanPage(r store.Reader, from []byte, number uint64, page *scanned) error {
	page.ids = make([]uint64, 0, scanRows)
	var bad error
	err := scanDeciding(r, from, func(f Family, key, value []byte) bool {
		if len(page.ids) == scanRows {
			page.next = bytes.Clone(key)
			return false
		}
		is := s.hasher.Load().record(f, key, value)
		err := s.checkRecord(row{f, key, value}, is, number)
		var refused *RowError
		if errors.As(err, &refused) {
			page.refused = append(page.refused, refused)
		} else if bad = err; bad != nil {
			return false
		}
		page.ids = append(page.ids, binary.BigEndian.Uint64(is.id[groupSize:]))
		return true
	})
	return errors.Join(err, bad)
}

// knows reports whether a table is still the known one.
func (s *State) knows(t *table) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.table == t
}

// missing adds the rows that the state has, that the scan has not seen, and that did not change
// since the scan began.
func (s *State) missing(seen []uint64, scanned *table, result *Scan) error {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.table != scanned {
		return errReread
	}
	names := make(map[byte]Family)
	for _, f := range Families {
		names[f.Number] = f
	}
	look := func(r record) {
		if r.tag == absent {
			return
		}
		if _, found := slices.BinarySearch(seen, binary.BigEndian.Uint64(r.id[groupSize:])); found {
			return
		}
		if _, changed := s.table.changed[r.id]; changed {
			return
		}
		e := newRowError(names[r.id[0]], nil, Removed)
		e.id = r.id
		result.refuse(e)
	}
	for _, run := range s.table.runs {
		for n := range run.len() {
			c := recordAt(run.records[n*recordSize:])
			if _, over := run.change(c.id); !over {
				look(c)
			}
		}
		for _, c := range run.changes {
			look(c)
		}
	}
	return nil
}

// rest waits so that work takes a share of the time.
func rest(ctx context.Context, worked time.Duration, share float64) error {
	if share >= 1 {
		return ctx.Err()
	}
	pause := time.NewTimer(time.Duration(float64(worked) * (1/share - 1)))
	defer pause.Stop()
	select {
	case <-pause.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
