package state

import (
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Change is an event of a commit: a deciding row gets another value, or is deleted.
type Change struct {
	record
	build, complete bool // [State.Build] has begun, and has come to the end
}

// Commit is the change of the state that comes with one commit of the store.
type Commit struct {
	state    *State
	before   head
	head     head
	records  []record
	folds    []fold
	row      []byte // in the journal; nil when no deciding row changes
	recorded bool   // the commit has an entry
	loaded   *Loaded
}

// Begin makes the change of one commit, which is not stored yet. Only the commit hook calls it.
// newest is the newest entry of the log before the commit, which the caller has verified; recorded
// tells that the commit has an entry. loaded is the state that the commit goes on with when it accepts
// the loss of the known one; nil otherwise. Begin returns nil while the store keeps no state. Errors:
// fault.Unavailable when the rows of the state are damaged or the state is read anew, fault.Internal
// for a change without an entry.
func (s *State) Begin(tx store.Tx, newest audit.Position, changes []Change, recorded bool, loaded *Loaded) (*Commit, error) {
	if s == nil || !s.inUse() {
		return nil, nil // the keys are not open yet
	}
	building := slices.ContainsFunc(changes, func(c Change) bool { return c.build })
	at, kept, err := s.settle(tx, newest, building, loaded)
	if err != nil || !kept {
		return nil, err
	}
	s.mu.RLock()
	defer s.mu.RUnlock()
	known := Loaded{s.table, s.head}
	if loaded != nil {
		known = *loaded
	}
	if known.head.number != at.number || known.head.commitment != at.commitment {
		return nil, errReread
	}
	c := &Commit{state: s, before: at, head: at, recorded: recorded, loaded: loaded}
	place := make(map[id]int)
	for _, change := range changes {
		if change.build {
			c.head.complete = c.head.complete || change.complete
			continue
		}
		if n, again := place[change.id]; again {
			c.records[n] = change.record
		} else {
			place[change.id] = len(c.records)
			c.records = append(c.records, change.record)
		}
	}
	c.records = slices.DeleteFunc(c.records, func(r record) bool { return known.table.tagOf(r.id) == r.tag })
	if len(c.records) == 0 && c.before.number > 0 && c.head.complete == at.complete {
		return c, nil
	}
	if at.complete && !recorded {
		return nil, fault.Wrap(fault.Internal, fault.Internal.Error(), errUnrecorded)
	}
	c.folds = known.table.nextFolds(c.records)
	row := change{previous: at.commitment, records: c.records}
	for _, f := range c.folds {
		named := make([]foldedRun, len(f))
		for i, p := range f {
			named[i] = p.folded()
		}
		row.folds = append(row.folds, named)
	}
	c.row = row.encode()
	c.head.number++
	c.head.commitment = commit(c.head.number, c.row)
	return c, nil
}

// errUnrecorded is a defect of the product.
var errUnrecorded = errors.New("a deciding row was changed without an entry of the log")

// settle brings the state to the newest commit, whose head it returns. It reports whether the store
// keeps a state: that of an earlier release keeps none until [State.Build] begins.
func (s *State) settle(tx store.Tx, newest audit.Position, building bool, loaded *Loaded) (at head, kept bool, err error) {
	d, err := s.hasher.Load().readHeadBeside(tx, newest)
	if err != nil {
		return at, false, ownError(err)
	}
	known := s.known()
	switch {
	case !d.there && known.complete && newest.Sequence > 0:
		return at, false, ownError(fmt.Errorf("%w: %s is not there", errDamaged, HeadKey))
	case !d.there && (newest.Sequence == 0 || building):
		at = head{complete: newest.Sequence == 0, log: newest}
		s.become(newTable(), at)
		return at, true, nil
	case !d.there:
		return at, false, nil
	case d.foreign() && !d.complete && !known.complete:
		// An earlier release has written meanwhile, and nobody knows what: the build begins again.
		s.become(newTable(), head{})
		return at, false, tx.Delete(HeadKey)
	case d.foreign():
		return at, false, ownError(errForeign)
	case loaded != nil:
		// The state becomes that of the store with the commit.
	case d.log.Sequence < known.log.Sequence:
		return at, false, ownError(fmt.Errorf("%w: %s was put back", errDamaged, HeadKey))
	case d.number == known.number && d.commitment == known.commitment:
		s.update(known, d.head)
	case d.number <= known.number:
		// Another process has accepted the loss of the known changes: the log has later entries.
		err = s.reload(tx, d.head)
	default:
		err = s.follow(tx, d.head)
	}
	return d.head, true, err
}

// update replaces a head by one of the same change.
func (s *State) update(known, by head) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.head == known {
		s.head = by
	}
}

// Commitment returns the value of the attribute that binds the state to the log. It is "" when the
// commit changes no deciding row, and while the state is being built.
func (c *Commit) Commitment() string {
	if c == nil || c.row == nil || !c.head.complete {
		return ""
	}
	return hex.EncodeToString(c.head.commitment[:])
}

// trimRows is the number of rows that the journal drops at once, since the embedded store wipes its
// file after each commit that deletes.
const trimRows = 1024

// Put writes the rows of the state. newest is the last entry of the commit, which has the attribute
// of [Commit.Commitment].
func (c *Commit) Put(tx store.Tx, newest audit.Position) error {
	if c == nil {
		return nil
	}
	s := c.state
	c.head.log = newest
	if c.row != nil {
		if c.head.entry = newest.Sequence; !c.recorded || !c.head.complete {
			c.head.entry = 0
		}
		if c.before.number == 0 {
			c.head.oldest = 1
		}
		if err := tx.Put(changeKey(c.head.number), c.row); err != nil {
			return err
		}
		for _, f := range c.folds {
			for _, p := range f {
				if p.same {
					continue
				}
				if err := tx.Put(runKey(p.from), p.records); err != nil {
					return err
				}
			}
		}
		if err := c.trim(tx); err != nil {
			return err
		}
	}
	row := s.hasher.Load().encodeHead(c.head)
	tx.OnCommit(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if c.loaded != nil {
			s.table, s.head = c.loaded.table, c.before
		}
		switch {
		case s.head.commitment == c.head.commitment: // no row changes, or a View has seen this commit already
			if s.head.log.Sequence < c.head.log.Sequence {
				s.head = c.head
			}
		case s.head.commitment == c.before.commitment:
			s.table.apply(c.records, c.folds, time.Now())
			s.head = c.head
		default:
			return // a View has even seen the next commit of another replica, or the state was read anew
		}
		s.lastHead.Store(&verifiedHead{row, c.head})
	})
	return tx.Put(HeadKey, row)
}

// trim deletes the rows of the journal that all runs have been folded after.
func (c *Commit) trim(tx store.Tx) error {
	if c.loaded != nil {
		return nil // the next commit does it
	}
	c.state.mu.RLock()
	oldest := c.state.table.oldest()
	c.state.mu.RUnlock()
	if oldest < c.head.oldest+trimRows {
		return nil
	}
	for n := c.head.oldest; n < c.head.oldest+trimRows; n++ {
		if err := tx.Delete(changeKey(n)); err != nil {
			return err
		}
	}
	c.head.oldest += trimRows
	return nil
}
