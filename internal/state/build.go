package state

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/latticekeep/latticekeep/internal/store"
)

// buildRows is the number of rows that one commit adds to a state that is being built.
const buildRows = 256

// decidingRanges are the ranges of the deciding rows, in the order of their keys.
var decidingRanges = func() (all []store.Range) {
	deciding := slices.DeleteFunc(slices.Clone(Families), func(f Family) bool { return !f.Deciding })
	slices.SortFunc(deciding, func(a, b Family) int { return strings.Compare(a.Prefix, b.Prefix) })
	last := "\xff"
	for _, f := range deciding {
		if !strings.HasPrefix(f.Prefix, last) { // else it is in the range before
			last = f.Prefix
			all = append(all, f.rows())
		}
	}
	return all
}()

// rows returns the range of the family's rows.
func (f Family) rows() store.Range {
	if strings.HasSuffix(f.Prefix, "/") {
		return store.Prefix([]byte(f.Prefix))
	}
	return store.Range{From: []byte(f.Prefix), To: append([]byte(f.Prefix), 0)}
}

// scanDeciding calls visit for the deciding rows from a key on, until visit returns false.
func scanDeciding(r store.Reader, from []byte, visit func(f Family, key, value []byte) bool) error {
	more := true
	for _, rng := range decidingRanges {
		if bytes.Compare(rng.To, from) <= 0 || !more {
			continue
		}
		if bytes.Compare(rng.From, from) < 0 {
			rng.From = from
		}
		err := r.Scan(rng, func(key, value []byte) bool {
			if f, ok := FamilyOf(key); ok && f.Deciding {
				more = visit(f, key, value)
			}
			return more
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// Complete reports whether all deciding rows are compared with the state. They are in each store
// that this release or a later one made; [State.Build] brings an earlier store there.
func (s *State) Complete() bool { return s.enforced() }

// Damaged is the reason of a row whose MAC is wrong before the state has it.
const Damaged Reason = "damaged"

// wrongKey is the key of the row that counts the rows with a wrong MAC while a state is being built.
var wrongKey = []byte("state/building-wrong")

// Binding is what [State.Build] needs of its caller.
type Binding struct {
	// Verify returns an error for a row whose MAC is wrong. It is called for rows that have one.
	Verify func(key, value []byte) error
	// Report is called for each of these rows, at least once.
	Report func(*RowError)
	// Record is part of the last commit, with the number of these rows.
	Record func(tx store.Tx, wrong uint64) error
}

// Build adds the rows of an earlier release's store to the state, while the store is used: from the
// last commit on, rows are compared with the state. A row whose MAC is wrong is added as it is, so
// that it stops nothing: whoever reads it refuses it, as before. st is the store without its guard.
// The work is kept, so a build that was interrupted goes on. Errors: those of the store and of
// b.Record.
func (s *State) Build(ctx context.Context, st store.Store, b Binding) error {
	h := s.hasher.Load()
	for !s.Complete() {
		done := false // another replica has built the state
		var wrong []*RowError
		err := st.Update(ctx, func(tx store.Tx) error {
			wrong = nil
			t := &tellingTx{reader: reader{raw: tx, state: s, free: true}, Tx: tx}
			cursor, err := tx.Get(cursorKey)
			if err != nil {
				return err
			}
			row, err := tx.Get(HeadKey)
			if err != nil {
				return err
			}
			if row == nil {
				cleared, err := clearBuild(tx)
				if err != nil || !cleared {
					return err
				}
				cursor = nil
			} else if d, err := h.decodeHead(row); err != nil || d.complete {
				done = err == nil
				return err
			}
			done = false
			tx.Enqueue(Change{build: true})
			n, next := 0, []byte(nil)
			err = scanDeciding(tx, cursor, func(f Family, key, value []byte) bool {
				if n == buildRows {
					next = key
					return false
				}
				n++
				tx.Enqueue(Change{record: h.record(f, key, value)})
				if f.HasMAC(key) && b.Verify(key, value) != nil {
					wrong = append(wrong, newRowError(f, key, Damaged))
				}
				return true
			})
			if err != nil {
				return err
			}
			total, err := countWrong(tx, len(wrong))
			if err != nil {
				return err
			}
			if next != nil {
				return tx.Put(cursorKey, next)
			}
			tx.Enqueue(Change{build: true, complete: true})
			if err := errors.Join(tx.Delete(cursorKey), tx.Delete(wrongKey)); err != nil {
				return err
			}
			return b.Record(t, total)
		})
		for _, e := range wrong { // also when it is not known whether the commit succeeded
			b.Report(e)
		}
		if err == nil && done {
			err = s.Reload(ctx, st, 0)
		}
		if err != nil {
			return fmt.Errorf("building the state: %w", err)
		}
	}
	return nil
}

// countWrong adds to the number of rows with a wrong MAC, and returns it.
func countWrong(tx store.Tx, more int) (uint64, error) {
	row, err := tx.Get(wrongKey)
	if err != nil {
		return 0, err
	}
	n := uint64(more)
	if len(row) == 8 { // nothing but the count in an entry depends on it
		n += binary.BigEndian.Uint64(row)
	}
	if more == 0 {
		return n, nil
	}
	return n, tx.Put(wrongKey, binary.BigEndian.AppendUint64(nil, n))
}

// clearBuild deletes rows of a build that was given up, and reports whether none is left.
func clearBuild(tx store.Tx) (bool, error) {
	var keys [][]byte
	err := tx.Scan(ownRows, func(key, _ []byte) bool {
		keys = append(keys, bytes.Clone(key))
		return len(keys) < trimRows
	})
	for _, key := range keys {
		if err == nil {
			err = tx.Delete(key)
		}
	}
	return len(keys) < trimRows, err
}
