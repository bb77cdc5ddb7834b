package state

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// ID returns the id of the row as hex. It stands for a row whose key is not known, which only a
// missing row is.
func (e *RowError) ID() string { return hex.EncodeToString(e.id[:]) }

// Compare compares a stored row with the state: "" means that the row is the one that the log
// commits to, or that its absence is. A nil value means that the row is absent. known is false for a
// row that does not decide, and while the state is not complete.
func (s *State) Compare(key, value []byte) (reason Reason, known bool) {
	f, ok := FamilyOf(key)
	if !ok || !f.Deciding || !s.enforced() {
		return "", false
	}
	err := s.check(row{f, key, value}, s.known().number)
	var refused *RowError
	if errors.As(err, &refused) {
		return refused.Reason, true
	}
	return "", err == nil
}

// Unnamed holds the missing rows whose keys are not known. Only a keyed hash of the key is stored,
// so a key is found by trying those that the row may have had.
type Unnamed struct {
	hasher *hasher
	rows   map[id]*RowError
	groups map[[groupSize]byte][]*RowError
}

// Unnamed returns those rows of a scan whose keys are not known.
func (s *State) Unnamed(rows []*RowError) *Unnamed {
	u := &Unnamed{hasher: s.hasher.Load(), rows: make(map[id]*RowError), groups: make(map[[groupSize]byte][]*RowError)}
	for _, e := range rows {
		if e.Key == nil {
			u.rows[e.id] = e
			g := [groupSize]byte(e.id.group())
			u.groups[g] = append(u.groups[g], e)
		}
	}
	return u
}

// Len returns the number of rows whose keys are still unknown.
func (u *Unnamed) Len() int { return len(u.rows) }

// Families returns the families of the rows whose keys are still unknown.
func (u *Unnamed) Families() map[string]bool {
	all := make(map[string]bool)
	for _, e := range u.rows {
		all[e.Family] = true
	}
	return all
}

// Try tries a key. If a row had it, the row gets it, and Try returns the row.
func (u *Unnamed) Try(key []byte) *RowError {
	f, ok := FamilyOf(key)
	if !ok || !f.Deciding {
		return nil
	}
	i := u.hasher.id(f, key)
	e := u.rows[i]
	if e != nil {
		e.Key = slices.Clone(key)
		delete(u.rows, i)
	}
	return e
}

// InGroup returns the rows of a group: those that [Family.GroupOf] returns the prefix for.
func (u *Unnamed) InGroup(prefix []byte) []*RowError {
	f, ok := FamilyOf(prefix)
	if !ok || !f.Deciding {
		return nil
	}
	return u.groups[u.hasher.group(f.Number, prefix)]
}

// Absent is the digest of a row that is missing.
const Absent = "absent"

// Digest returns a digest of a row as it is stored, 16 hex digits, or [Absent] for a nil value. It is
// keyed, so nobody without the deployment's hash key can make another value with the same digest. It
// is "" before [State.Use].
func (s *State) Digest(key, value []byte) string {
	h := s.hasher.Load()
	switch {
	case h == nil:
		return ""
	case value == nil:
		return Absent
	}
	t := h.tag(key, value)
	return hex.EncodeToString(t[:8])
}

// Seen is a row as somebody has seen it.
type Seen struct {
	Key     []byte    // nil: see Missing
	Digest  string    // see [State.Digest]
	Missing *RowError // a missing row whose key is unknown
}

// errOtherRow is the error of a row that is as the state says.
var errOtherRow = fault.New(fault.Conflict, "a row that is to be accepted is not wrong any more: look again with latticekeep doctor")

// Changed is the error of a row that is not as it was seen.
func (row Seen) Changed() error {
	name := fmt.Sprintf("%+q", row.Key)
	if row.Key == nil {
		name = row.Missing.Family + "#" + row.Missing.ID()
	}
	return fault.New(fault.Conflict, fmt.Sprintf("the row %s has changed since latticekeep doctor printed the digest %s: look at it again before you accept or remove it", name, row.Digest))
}

// Accept takes rows that a scan refused into the state as st holds them, in one commit: the log then
// commits to the value of each, or to its absence. st is the store without its guard. appendEntries is part
// of the commit and appends the entries that say so. The digest, hex of a SHA-256, is over the keyed
// hashes of the rows as they are seen. Errors: fault.Conflict for a row that has changed since it was
// seen, or that is as the state says, fault.Unavailable when the rows of the state are damaged, and
// those of the store and of appendEntries.
func (s *State) Accept(ctx context.Context, st store.Store, rows []Seen, appendEntries func(tx store.Tx, digest string) error) error {
	return s.resolve(ctx, st, rows, appendEntries, func(tx store.Tx, _ Seen, r record) error {
		if r.id[0] == 0 || s.newestTag(r.id) == r.tag { // the family does not decide, or nothing is wrong
			return errOtherRow
		}
		tx.Enqueue(Change{record: r})
		return nil
	})
}

// Remove deletes rows in one commit, also such as do not decide: the log then commits to their absence.
// Parameters and errors are those of [State.Accept]; a row that is missing has changed.
func (s *State) Remove(ctx context.Context, st store.Store, rows []Seen, appendEntries func(tx store.Tx, digest string) error) error {
	return s.resolve(ctx, st, rows, appendEntries, func(tx store.Tx, row Seen, r record) error {
		if r.tag == absent {
			return row.Changed()
		}
		if s.newestTag(r.id) != absent {
			tx.Enqueue(Change{record: record{id: r.id}})
		}
		return tx.Delete(row.Key)
	})
}

// resolve calls do for each row, with its record as st holds it, in one commit.
func (s *State) resolve(ctx context.Context, st store.Store, rows []Seen, appendEntries func(tx store.Tx, digest string) error, do func(tx store.Tx, row Seen, r record) error) error {
	h := s.hasher.Load()
	return st.Update(ctx, func(tx store.Tx) error {
		if _, err := s.at(tx, s.known()); err != nil { // the newest change that another process has made
			return err
		}
		sum := sha256.New()
		for _, row := range rows {
			var r record
			digest := Absent
			if row.Key == nil {
				r.id = row.Missing.id
			} else {
				f, _ := FamilyOf(row.Key)
				value, err := tx.Get(row.Key)
				if err != nil {
					return err
				}
				digest, r = s.Digest(row.Key, value), h.record(f, row.Key, value)
			}
			if digest != row.Digest {
				return row.Changed()
			}
			if err := do(tx, row, r); err != nil {
				return err
			}
			_, _ = sum.Write(r.append(nil)) // a hash never fails
		}
		return appendEntries(tx, hex.EncodeToString(sum.Sum(nil)))
	})
}

func (s *State) newestTag(i id) tag {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.table.tagOf(i)
}

// IsDamaged reports whether an error of the state means that its own rows are not those that were
// written.
func IsDamaged(err error) bool { return errors.Is(err, errDamaged) }
