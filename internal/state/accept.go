package state

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"slices"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// ID returns the id of the row as hex. It stands for a row whose key is not known, which only a
// missing row is.
func (e *RowError) ID() string { return hex.EncodeToString(e.id[:]) }

// Compare holds a stored row against the state: "" means that the row is the one that the log
// commits to, or that its absence is. A nil value means that the row is absent. known is false for a
// row that does not decide, and while the state is not complete.
func (s *State) Compare(key, value []byte) (reason Reason, known bool) {
	f, ok := FamilyOf(key)
	if !ok || !f.Deciding || !s.enforced() {
		return "", false
	}
	var refused *RowError
	if errors.As(s.check(row{f, key, value}, s.known().number), &refused) {
		reason = refused.Reason
	}
	return reason, true
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

// errOtherRow is the error of a row that is as the state says.
var errOtherRow = fault.New(fault.Conflict, "a row that is to be accepted is not wrong, or has changed meanwhile: look again with latticekeep doctor")

// Accept takes rows that a scan refused into the state as st holds them, in one commit: the log then
// commits to the value of each, or to its absence. st is the store without its guard. appendEntries is part
// of the commit and appends the entries that say so. The digest, hex of a SHA-256, is over the keyed
// hashes of the rows. Errors: fault.Conflict for a row that is as the state says, fault.Unavailable
// when the rows of the state are damaged, and those of the store and of appendEntries.
func (s *State) Accept(ctx context.Context, st store.Store, rows []*RowError, appendEntries func(tx store.Tx, digest string) error) error {
	h := s.hasher.Load()
	return st.Update(ctx, func(tx store.Tx) error {
		if _, err := s.at(tx, s.known()); err != nil { // the newest change that another process has made
			return err
		}
		sum := sha256.New()
		for _, e := range rows {
			r := record{id: e.id} // absent
			if e.Key != nil {
				f, ok := FamilyOf(e.Key)
				if !ok || !f.Deciding {
					return errOtherRow
				}
				value, err := tx.Get(e.Key)
				if err != nil {
					return err
				}
				r = h.record(f, e.Key, value)
			}
			s.mu.RLock()
			known := s.table.tagOf(r.id)
			s.mu.RUnlock()
			if known == r.tag {
				return errOtherRow
			}
			tx.Enqueue(Change{record: r})
			_, _ = sum.Write(r.append(nil)) // a hash never fails
		}
		return appendEntries(tx, hex.EncodeToString(sum.Sum(nil)))
	})
}

// IsDamaged reports whether an error of the state means that its own rows are not those that were
// written.
func IsDamaged(err error) bool { return errors.Is(err, errDamaged) }
