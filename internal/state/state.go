package state

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// State is a verified copy of the tags of all deciding rows. A [Store] asks it about each row that
// is read, and the commit hook of the log has it make the next change. It is safe for concurrent
// use.
type State struct {
	hasher atomic.Pointer[hasher] // nil until Use
	stale  atomic.Bool            // the key is not that of the store: as before Use
	report func(*RowError)

	mu      sync.RWMutex
	table   *table
	head    head // of the table
	kept    bool // the store has the rows of a state, or is empty
	watched int  // scans that are running
	halted  error

	lastHead atomic.Pointer[verifiedHead]
}

// verifiedHead saves checking the same bytes again.
type verifiedHead struct {
	row []byte
	head
}

// New returns a state that has no key yet and lets everything pass. report is called for each read
// that is refused; it may be nil.
func New(report func(*RowError)) *State {
	s := &State{table: newTable()}
	s.report = func(e *RowError) {
		if e.kind == fault.Unavailable {
			s.Halt(e)
		}
		if report != nil {
			report(e)
		}
	}
	return s
}

// Kept reports whether the store had a state when [State.Use] read it, or was empty. A store of an
// earlier release has none. Whoever uses such a store must make sure that the log never had one:
// somebody may have removed its rows.
func (s *State) Kept() bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.kept
}

// CheckOwn holds the rows of the deployment itself against the state, and reports the first that is
// not the one that was written last. st is the store without its guard. Error: that of the store.
func (s *State) CheckOwn(ctx context.Context, st store.Store) error {
	if !s.enforced() {
		return nil
	}
	floor := s.known()
	var refused error
	err := st.View(ctx, func(r store.Reader) error {
		refused = nil
		number, err := s.at(r, floor)
		if err != nil {
			return err
		}
		for _, f := range Families {
			if !f.Own {
				continue
			}
			found := 0
			err := r.Scan(f.rows(), func(key, value []byte) bool {
				found++
				refused = s.check(row{f, key, value}, number)
				return refused == nil
			})
			if err != nil || refused != nil {
				return err
			}
			if refused = s.checkCount(f, nil, found, number); refused != nil {
				return nil
			}
		}
		return nil
	})
	var e *RowError
	if errors.As(refused, &e) {
		s.report(e)
		return err
	}
	return errors.Join(err, refused)
}

// Halted returns why nobody can be served: a row of the deployment itself is not the one that was
// written last. It returns nil while there is no reason.
func (s *State) Halted() error {
	if s == nil {
		return nil
	}
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.halted
}

// Halt has nobody served until the process ends.
func (s *State) Halt(reason error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.halted = reason
}

// Use gives the state its key, the deployment's hash key, and reads what s holds. Error:
// fault.Internal when the rows of the state do not fit to the newest entry of the log.
func (s *State) Use(ctx context.Context, st store.Store, key []byte) error {
	hasher, err := newHasher(key)
	if err != nil {
		return err
	}
	err = st.View(ctx, func(r store.Reader) error {
		s.lastHead.Store(nil)
		newest, err := audit.ReadHead(r)
		if err != nil {
			return err
		}
		row, err := r.Get(HeadKey)
		if err != nil {
			return err
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		s.table, s.head, s.kept = newTable(), head{complete: newest.Sequence == 0}, newest.Sequence == 0 || row != nil
		if row == nil {
			return nil
		}
		h, err := hasher.decodeHead(row)
		if err != nil {
			return err
		}
		if h.log != newest {
			if s.kept = h.complete; s.kept {
				return errForeign
			}
			return nil // an earlier release has written while the state was being built
		}
		t, err := load(r, h)
		if err != nil {
			return err
		}
		s.table, s.head = t, h
		return checkEntry(r, h)
	})
	if err != nil {
		return fmt.Errorf("reading the state: %w", err)
	}
	s.hasher.Store(hasher)
	s.stale.Store(false)
	return nil
}

var errForeign = fmt.Errorf("%w: %s is not of the newest entry of the log", errDamaged, HeadKey)

// checkEntry reports whether the entry that a head names has the head's commitment. An entry that
// was archived is covered by the base.
func checkEntry(r store.Reader, h head) error {
	if h.entry == 0 {
		return nil
	}
	e, err := audit.ReadEntry(r, h.entry)
	if errors.Is(err, audit.ErrNoEntry) {
		if base, read := r.Get(audit.BaseKey); read == nil && base != nil {
			return nil // it was archived; the MAC of the head covers the commitment
		}
	}
	if err != nil {
		return err
	}
	if e.Attributes[audit.AttributeState] != hex.EncodeToString(h.commitment[:]) {
		return fmt.Errorf("%w: entry %d names another state", errDamaged, h.entry)
	}
	return nil
}

func (s *State) inUse() bool { return s.hasher.Load() != nil && !s.stale.Load() }

// enforced reports whether rows are held against the state.
func (s *State) enforced() bool {
	if !s.inUse() {
		return false
	}
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.head.complete
}

// known returns the number of the newest known change.
func (s *State) known() uint64 {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.head.number
}

// at returns the change that a reader stands at, after the state has caught up with it. No reader
// may stand before floor, the change that was known when it began. Errors: fault.Unavailable, and
// fault.Conflict when two replicas start one deployment with keys of their own: the later one needs
// the keys of the earlier, so its state waits for [State.Use] again.
func (s *State) at(r store.Reader, floor uint64) (uint64, error) {
	row, err := r.Get(HeadKey)
	if err != nil {
		return 0, err
	}
	var h head
	if last := s.lastHead.Load(); last != nil && bytes.Equal(last.row, row) {
		h = last.head
	} else if row != nil {
		if h, err = s.hasher.Load().decodeHead(row); err != nil {
			if s.known() == 0 {
				s.stale.Store(true)
				return 0, fault.Wrap(fault.Conflict, "another replica has started the deployment meanwhile", err)
			}
			return 0, ownError(err)
		}
		s.lastHead.Store(&verifiedHead{row, h})
	}
	if h.number < floor {
		return 0, ownError(fmt.Errorf("%w: %s was put back", errDamaged, HeadKey))
	}
	if h.number <= s.known() {
		return h.number, nil
	}
	if newest, err := audit.ReadHead(r); err != nil {
		return 0, err
	} else if h.log != newest {
		return 0, ownError(errForeign)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return h.number, s.follow(r, h)
}

// follow makes the changes up to a head that other replicas have made. The caller holds the lock.
func (s *State) follow(r store.Reader, h head) error {
	if h.number <= s.head.number {
		return nil
	}
	if s.head.number+1 < h.oldest {
		return s.reload(r, h)
	}
	type next struct {
		records []record
		folds   [][]foldedRun
	}
	var all []next
	err := readChanges(r, s.head.number+1, h, func(number uint64, c change) error {
		if len(all) == 0 && c.previous != s.head.commitment {
			return fmt.Errorf("%w: change %d does not follow the one before", errDamaged, number)
		}
		all = append(all, next{c.records, c.folds})
		return nil
	})
	if err != nil {
		return ownError(err)
	}
	now := time.Now()
	for _, c := range all {
		s.table.apply(c.records, nil, now)
		for _, f := range c.folds {
			pieces, err := s.table.refold(f)
			if err != nil {
				s.table, s.head = newTable(), head{complete: true} // whatever comes next reads everything anew
				return s.reload(r, h)
			}
			s.table.fold(pieces)
		}
		s.table.debt = max(0, s.table.debt-foldEvery*len(c.folds))
	}
	s.head = h
	return nil
}

// refresh reads the state that another replica has completed.
func (s *State) refresh(ctx context.Context, st store.Store) error {
	return st.View(ctx, func(r store.Reader) error {
		newest, err := audit.ReadHead(r)
		if err != nil {
			return err
		}
		row, err := r.Get(HeadKey)
		if err != nil {
			return err
		}
		h, err := s.hasher.Load().decodeHead(row)
		if err != nil {
			return ownError(err)
		}
		if h.log != newest {
			return ownError(errForeign)
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		if h.number < s.head.number {
			return nil
		}
		return s.reload(r, h)
	})
}

func (s *State) reload(r store.Reader, h head) error {
	t, err := load(r, h)
	if err != nil {
		return ownError(err)
	}
	s.table, s.head = t, h
	return nil
}

// ownError is the error of the state's own rows. Whoever reads can retry until they are mended.
func ownError(err error) error {
	if fault.Of(err) == fault.Unavailable {
		return err
	}
	return fault.Wrap(fault.Unavailable, fault.Unavailable.Error(), err)
}

// row is a row that is to be held against the state.
type row struct {
	family Family
	key    []byte
	value  []byte // nil: absent
}

// check holds a row against the state as of a change.
func (s *State) check(r row, number uint64) error {
	h := s.hasher.Load()
	s.mu.RLock()
	want, known := s.table.tagAt(h.id(r.family, r.key), number)
	s.mu.RUnlock()
	got := h.tag(r.key, r.value)
	switch {
	case !known:
		return errTooOld
	case got == want:
		return nil
	case want == absent:
		return newRowError(r.family, r.key, Added)
	case got == absent:
		return newRowError(r.family, r.key, Removed)
	}
	return newRowError(r.family, r.key, Replaced)
}

// checkCount holds the number of rows of a group, or of a family, against the state as of a change.
func (s *State) checkCount(f Family, prefix []byte, found int, number uint64) error {
	ids := []byte{f.Number}
	if prefix != nil {
		g := s.hasher.Load().group(f.Number, prefix)
		ids = g[:]
	} else {
		prefix = []byte(f.Prefix)
	}
	s.mu.RLock()
	want, known := s.table.countAt(ids, number)
	s.mu.RUnlock()
	switch {
	case !known:
		return errTooOld
	case found != want:
		return newRowError(f, prefix, Removed)
	}
	return nil
}

var errTooOld = fault.New(fault.Unavailable, "the read took too long: try again")

// Change is an event of a commit: a deciding row gets another value. A nil value means that the row
// is deleted.
type Change struct {
	record
	build, complete bool // of [State.Build]: it has begun, and has come to the end
}

// Commit is the change of the state that comes with one commit of the store.
type Commit struct {
	state    *State
	number   uint64
	head     head
	records  []record
	folds    []fold
	row      []byte // in the journal; nil when no deciding row changes
	recorded bool   // the commit has an entry
}

// Begin makes the change of one commit, which is not stored yet. Only the commit hook calls it.
// newest is the newest entry of the log before the commit, which the caller has verified; recorded
// tells that the commit has an entry. Errors: fault.Unavailable when the rows of the state are
// damaged, fault.Internal for a change without an entry.
func (s *State) Begin(tx store.Tx, newest audit.Position, changes []Change, recorded bool) (*Commit, error) {
	if s == nil || !s.inUse() {
		return nil, nil // the deployment's own rows are not read yet
	}
	building := slices.ContainsFunc(changes, func(c Change) bool { return c.build })
	if kept, err := s.settle(tx, newest, building); err != nil || !kept {
		return nil, err
	}
	s.mu.RLock()
	defer s.mu.RUnlock()
	c := &Commit{state: s, number: s.head.number, head: s.head, recorded: recorded}
	at := make(map[id]int)
	for _, change := range changes {
		if change.build {
			c.head.complete = c.head.complete || change.complete
			continue
		}
		if n, again := at[change.id]; again {
			c.records[n] = change.record
		} else {
			at[change.id] = len(c.records)
			c.records = append(c.records, change.record)
		}
	}
	c.records = slices.DeleteFunc(c.records, func(r record) bool { return s.table.tagOf(r.id) == r.tag })
	if len(c.records) == 0 && c.number > 0 && c.head.complete == s.head.complete {
		return c, nil
	}
	if s.head.complete && !recorded {
		return nil, fault.Wrap(fault.Internal, fault.Internal.Error(), errUnrecorded)
	}
	c.folds = s.table.nextFolds(c.records)
	row := change{previous: s.head.commitment, records: c.records}
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

// settle brings the state to the newest commit. It reports whether the store keeps a state: that of
// an earlier release keeps none until [State.Build] begins.
func (s *State) settle(tx store.Tx, newest audit.Position, building bool) (kept bool, err error) {
	row, err := tx.Get(HeadKey)
	if err != nil {
		return false, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if row == nil {
		switch {
		case s.head.complete && newest.Sequence > 0:
			return false, ownError(fmt.Errorf("%w: %s is not there", errDamaged, HeadKey))
		case newest.Sequence == 0 || building:
			s.table, s.head = newTable(), head{complete: newest.Sequence == 0, log: newest}
			return true, nil
		}
		return false, nil
	}
	h, err := s.hasher.Load().decodeHead(row)
	switch {
	case err != nil:
		return false, ownError(err)
	case h.log != newest && !h.complete && !s.head.complete:
		// An earlier release has written meanwhile, and nobody knows what: the build begins again.
		s.table, s.head = newTable(), head{}
		return false, tx.Delete(HeadKey)
	case h.log != newest:
		return false, ownError(errForeign)
	case h == s.head:
		return true, nil
	case h.number == s.head.number && h.commitment == s.head.commitment:
		s.head = h
		return true, nil
	case h.number <= s.head.number:
		// The caller knows that the log has lost nothing that was not accepted, and the head is of its
		// newest entry. So an earlier change is that of an earlier copy of the database.
		return true, s.reload(tx, h)
	}
	return true, s.follow(tx, h)
}

// Commitment returns the value of the attribute that binds the state to the log. It is "" when the
// commit changes no deciding row, and while the state is being built.
func (c *Commit) Commitment() string {
	if c == nil || c.row == nil || !c.head.complete {
		return ""
	}
	return hex.EncodeToString(c.head.commitment[:])
}

// trimRows is the number of rows that the journal drops at once. Each deletion has an embedded
// store wipe its file.
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
		if c.number == 0 {
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
		// A View may have seen this commit before this call, and even the next one of another replica.
		if c.head.number < s.head.number || c.head.number == s.head.number && c.head.log.Sequence < s.head.log.Sequence {
			return
		}
		if s.table.number < c.head.number {
			s.table.apply(c.records, c.folds, time.Now())
		}
		s.head = c.head
		s.lastHead.Store(&verifiedHead{row, c.head})
	})
	return tx.Put(HeadKey, row)
}

// trim deletes the rows of the journal that all runs have been folded after.
func (c *Commit) trim(tx store.Tx) error {
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

// refold makes a fold of another process again.
func (t *table) refold(named []foldedRun) (fold, error) {
	at := t.runOf(named[0].from)
	if t.runs[at].from != named[0].from {
		return nil, errDamaged
	}
	rest := t.runs[at].merged(nil)
	var f fold
	for _, p := range named {
		n := int(p.len) * recordSize
		if n > len(rest) || sha256.Sum256(rest[:n]) != p.digest {
			return nil, errDamaged
		}
		f = append(f, piece{from: p.from, records: rest[:n:n]})
		rest = rest[n:]
	}
	if len(rest) > 0 {
		return nil, errDamaged
	}
	return f, nil
}
