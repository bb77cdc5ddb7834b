package state

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Reason says what is wrong with a row.
type Reason string

// The reasons.
const (
	Replaced Reason = "replaced" // the row is not the one that was written last
	Removed  Reason = "removed"  // the row is not there
	Added    Reason = "added"    // the row was deleted, or never written
)

// RowError is the error of a read that found another row than the one that was written last. Its
// kind is fault.Forbidden, and fault.Unavailable for a row of the deployment itself. Family and key
// are for the operator and never for a caller.
type RowError struct {
	Family string
	Key    []byte // the row's or, when rows of a group are missing, their prefix
	Reason Reason
	kind   fault.Kind
	id     id // set when the key is not known
}

func newRowError(f Family, key []byte, reason Reason) *RowError {
	kind := fault.Forbidden
	if f.Own {
		kind = fault.Unavailable
	}
	return &RowError{Family: f.Prefix, Key: bytes.Clone(key), Reason: reason, kind: kind}
}

// Error implements error.
func (e *RowError) Error() string {
	if e.Key == nil {
		return fmt.Sprintf("a stored row of the family %s is not there, and the log commits to it: its id is %x", e.Family, e.id)
	}
	return fmt.Sprintf("the stored row %q is not the one that the log commits to: it was %s", e.Key, e.Reason)
}

// Unwrap implements the errors package's interface.
func (e *RowError) Unwrap() error {
	if e.kind == fault.Unavailable {
		return fault.Outage(fault.ReasonRows, e.kind.Error(), nil)
	}
	return fault.New(e.kind, e.kind.Error())
}

// IsRefused reports whether err is about a row of a tenant that is not the one that was written
// last. A row of the deployment itself is an outage instead.
func IsRefused(err error) bool {
	var refused *RowError
	return errors.As(err, &refused) && refused.kind == fault.Forbidden
}

// Store is a store whose deciding rows are compared with the state. A read of a row that was put
// back, changed, removed or added by somebody else fails with a [RowError]. An Update that changes
// a deciding row must append an entry to the log.
type Store struct {
	store.Database
	state *State
}

// Guard returns s with its deciding rows compared with the state.
func (s *State) Guard(st store.Database) *Store { return &Store{st, s} }

// Unguarded returns the database below a store of [State.Guard], and any other one as it is.
func Unguarded(st store.Database) store.Database {
	if guarded, ok := st.(*Store); ok {
		return guarded.Database
	}
	return st
}

// View implements [store.Store].
func (s *Store) View(ctx context.Context, fn func(store.Reader) error) error {
	if !s.state.enforced() {
		return s.Database.View(ctx, fn)
	}
	floor := s.state.known()
	var v *reader
	err := s.Database.View(ctx, func(r store.Reader) error {
		v = &reader{raw: r, state: s.state, floor: floor}
		return fn(v)
	})
	if v == nil || v.refused == nil {
		return err
	}
	s.state.report(v.refused) // fn may have passed over it
	return err
}

// Update implements [store.Store].
func (s *Store) Update(ctx context.Context, fn func(store.Tx) error) error {
	if !s.state.inUse() {
		return s.Database.Update(ctx, fn)
	}
	var t *tellingTx
	err := s.Database.Update(ctx, func(raw store.Tx) error {
		t = &tellingTx{reader: reader{raw: raw, state: s.state, floor: s.state.known(), free: !s.state.enforced()}, Tx: raw}
		t.writer = raw
		if err := fn(t); err != nil {
			return err
		}
		if t.changes > 0 && t.events == 0 && s.state.enforced() {
			return fault.Wrap(fault.Internal, fault.Internal.Error(), errUnrecorded)
		}
		return nil
	})
	var refused *RowError
	if t != nil && t.refused != nil && (err == nil || errors.As(err, &refused)) {
		s.state.report(t.refused) // fn may have passed over it; a rehearsal that came to nothing does not count
	}
	return err
}

// reader compares what it reads with the state.
type reader struct {
	raw     store.Reader
	state   *State
	floor   head
	free    bool     // the state is being built: nothing is compared with it
	writer  store.Tx // nil in a View
	placed  bool
	number  uint64
	refused *RowError
}

// at returns the change that the reader stands at.
func (r *reader) at() (uint64, error) {
	if r.placed {
		return r.number, nil
	}
	number, err := r.state.at(r.raw, r.floor)
	if err == nil {
		r.placed, r.number = true, number
	}
	return number, err
}

func (r *reader) check(w row, check func(row, uint64) error) error {
	if r.writer != nil && r.writer.Wrote(w.key) {
		return nil // the group's own value
	}
	number, err := r.at()
	if err == nil {
		err = check(w, number)
	}
	return r.note(err)
}

func (r *reader) note(err error) error {
	var refused *RowError
	if errors.As(err, &refused) && r.refused == nil {
		r.refused = refused
	}
	return err
}

// Get implements [store.Reader].
func (r *reader) Get(key []byte) ([]byte, error) {
	f, ok := FamilyOf(key)
	if !ok {
		return nil, unknownFamily(key)
	}
	value, err := r.raw.Get(key)
	if err != nil || !f.Deciding || r.free {
		return value, err
	}
	if err := r.check(row{f, key, value}, r.state.checkRead); err != nil {
		return nil, err
	}
	return value, nil
}

// Scan implements [store.Reader]. A scan of a whole group decides something: it fails when a row is
// refused or missing, also when visit ends it early. Other scans are lists: they pass over refused
// rows, so that one row does not keep the others from being seen.
func (r *reader) Scan(rg store.Range, visit func(key, value []byte) bool) error {
	if r.free {
		return r.raw.Scan(rg, visit)
	}
	f, _ := FamilyOf(rg.From)
	prefix := f.GroupOf(rg.From)
	all := f.Whole && isPrefix(rg, []byte(f.Prefix))
	whole := all || prefix != nil && isPrefix(rg, prefix)
	var bad error
	wanted, found := true, make(map[byte]int) // rows of each family, by its number
	err := r.raw.Scan(rg, func(key, value []byte) bool {
		if of, ok := FamilyOf(key); ok && of.Deciding {
			found[of.Number]++ // rows behind the end count too: one of them may stand for a row that is missing
			err := r.check(row{of, key, value}, r.state.check)
			var refused *RowError
			if !whole && errors.As(err, &refused) {
				return true
			}
			if bad = err; bad != nil {
				return false
			}
		}
		if wanted {
			wanted = visit(key, value)
		}
		return wanted || whole
	})
	if err := errors.Join(err, bad); err != nil || !whole {
		return err
	}
	if !all {
		return r.checkCount(f, prefix, found[f.Number])
	}
	for _, of := range Families {
		if of.Deciding && strings.HasPrefix(of.Prefix, f.Prefix) {
			if err := r.checkCount(of, nil, found[of.Number]); err != nil {
				return err
			}
		}
	}
	return nil
}

// checkCount compares the number of rows of a group with the state, with those that the transaction
// itself has written or deleted. A nil prefix means all rows of the family.
func (r *reader) checkCount(f Family, prefix []byte, found int) error {
	number, err := r.at()
	if err != nil {
		return err
	}
	if r.writer != nil {
		within := prefix
		if within == nil {
			within = []byte(f.Prefix)
		}
		err := r.writer.Written(within, func(key []byte, absent bool) {
			if of, _ := FamilyOf(key); of.Number != f.Number {
				return
			}
			was := r.state.check(row{f, key, nil}, number) != nil
			switch {
			case was && absent:
				found++
			case !was && !absent:
				found--
			}
		})
		if err != nil {
			return err
		}
	}
	return r.note(r.state.checkCount(f, prefix, found, number))
}

func isPrefix(rg store.Range, prefix []byte) bool {
	whole := store.Prefix(prefix)
	return bytes.Equal(rg.From, whole.From) && bytes.Equal(rg.To, whole.To)
}

func unknownFamily(key []byte) error {
	return fault.Wrap(fault.Internal, fault.Internal.Error(), fmt.Errorf("the row %q is of no family", key))
}

// tellingTx is a transaction that tells the commit hook which deciding rows change.
type tellingTx struct {
	reader
	store.Tx
	changes, events int
}

// Get implements [store.Reader].
func (t *tellingTx) Get(key []byte) ([]byte, error) { return t.reader.Get(key) }

// Scan implements [store.Reader].
func (t *tellingTx) Scan(rg store.Range, visit func(key, value []byte) bool) error {
	return t.reader.Scan(rg, visit)
}

// Put implements [store.Tx].
func (t *tellingTx) Put(key, value []byte) error {
	if value == nil {
		value = []byte{}
	}
	if err := t.change(key, value); err != nil {
		return err
	}
	return t.Tx.Put(key, value)
}

// Delete implements [store.Tx].
func (t *tellingTx) Delete(key []byte) error {
	if err := t.change(key, nil); err != nil {
		return err
	}
	return t.Tx.Delete(key)
}

func (t *tellingTx) change(key, value []byte) error {
	f, ok := FamilyOf(key)
	if !ok {
		return unknownFamily(key)
	}
	if !f.Deciding {
		return nil
	}
	t.changes++
	t.Tx.Enqueue(Change{record: t.state.hasher.Load().record(f, key, value)})
	return nil
}

// Enqueue implements [store.Tx].
func (t *tellingTx) Enqueue(event any) {
	t.events++
	t.Tx.Enqueue(event)
}
