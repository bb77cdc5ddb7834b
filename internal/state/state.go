package state

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

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
	recent *recent

	mu      sync.RWMutex
	table   *table
	head    head // the change that the table is as of
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
// that is refused; it may be nil. A refused row of the deployment itself also halts the state: see
// [State.Halted].
func New(report func(*RowError)) *State {
	s := &State{table: newTable(), recent: newRecent()}
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

// Rows returns the number of rows of the family with a prefix, or of all families without one.
func (s *State) Rows(prefix string) int {
	var ids []byte
	for _, f := range Families {
		if f.Prefix == prefix {
			ids = []byte{f.Number}
		}
	}
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.table.count(ids)
}

// CheckOwn compares the rows of the deployment itself with the state. The first that is not the one
// that was written last halts the state, and CheckOwn returns nil then. st is the store without its
// guard. Errors: that of the store, and fault.Unavailable when the rows of the state are damaged.
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

// Use gives the state its key, the deployment's hash key, and reads what st holds. Error:
// fault.Internal when the rows of the state do not fit to the newest entry of the log.
func (s *State) Use(ctx context.Context, st store.Store, key []byte) error {
	hasher, err := newHasher(key)
	if err != nil {
		return err
	}
	if err := s.use(ctx, st, hasher); err != nil {
		return fmt.Errorf("reading the state: %w", err)
	}
	s.lastHead.Store(nil)
	s.hasher.Store(hasher)
	s.stale.Store(false)
	return nil
}

func (s *State) use(ctx context.Context, st store.Store, hasher *hasher) error {
	var d storedHead
	err := st.View(ctx, func(r store.Reader) (err error) {
		d, err = hasher.readHead(r)
		return err
	})
	if err != nil {
		return err
	}
	empty := d.newest.Sequence == 0
	t, h, kept := newTable(), head{complete: empty}, empty
	switch {
	case d.foreign() && d.complete:
		return errForeign
	case d.there && !d.foreign(): // else an earlier release has written while the state was being built
		t, h, err = hasher.load(ctx, st)
		if kept = true; errors.Is(err, errForeign) && !d.complete { // it writes still
			t, h, kept, err = newTable(), head{}, false, nil
		}
		if err != nil {
			return err
		}
	}
	s.become(t, h)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.kept = kept
	return nil
}

// become replaces what the state knows.
func (s *State) become(t *table, h head) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.table, s.head = t, h
}

func (s *State) inUse() bool { return s.hasher.Load() != nil && !s.stale.Load() }

// enforced reports whether rows are compared with the state.
func (s *State) enforced() bool {
	if !s.inUse() {
		return false
	}
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.head.complete
}

// known returns the head of the newest known change.
func (s *State) known() head {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.head
}

// at returns the change that a reader stands at, after the state has caught up with it. No reader
// may stand before floor, the head that was known when it began. Errors: fault.Unavailable, and
// fault.Conflict when two replicas start one deployment with keys of their own: the later one needs
// the keys of the earlier, so its state waits for [State.Use] again.
func (s *State) at(r store.Reader, floor head) (uint64, error) {
	row, err := r.Get(HeadKey)
	if err != nil {
		return 0, err
	}
	var h head
	if last := s.lastHead.Load(); last != nil && bytes.Equal(last.row, row) {
		h = last.head
	} else if row != nil {
		if h, err = s.hasher.Load().decodeHead(row); err != nil {
			if s.known() == (head{complete: true}) { // the store was empty
				s.stale.Store(true)
				return 0, fault.Wrap(fault.Conflict, "another replica has started the deployment meanwhile", err)
			}
			return 0, ownError(err)
		}
		s.lastHead.Store(&verifiedHead{row, h})
	}
	// A lost branch of the log may have as many changes. Its entries are before those of the epoch
	// that was begun after the loss.
	if h.number < floor.number || h.log.Sequence < floor.log.Sequence {
		return 0, ownError(fmt.Errorf("%w: %s was put back", errDamaged, HeadKey))
	}
	switch known := s.known(); {
	case h.number == known.number && h.commitment != known.commitment:
		return 0, errReread // the loss of the known changes was accepted
	case h.number <= known.number:
		return h.number, nil
	}
	d, err := s.hasher.Load().readHead(r)
	if err == nil && d.foreign() {
		err = errForeign
	}
	if err != nil {
		return 0, ownError(err)
	}
	return h.number, s.follow(r, h)
}

// follow makes the changes up to a head that other replicas have made. The lock is not held while it
// reads.
func (s *State) follow(r store.Reader, h head) error {
	from := s.known()
	switch {
	case from.number >= h.number:
		return nil // another has followed meanwhile
	case from.number+1 < h.oldest:
		return s.reload(r, h)
	}
	var changes []change
	journal := journalReader{next: from.number + 1, previous: from.commitment, begun: true}
	if _, err := journal.read(r, h, 0, func(_ uint64, c change) { changes = append(changes, c) }); err != nil {
		return ownError(err)
	}
	if err := s.catchUp(from, changes, h); err != nil {
		return s.reload(r, h)
	}
	return nil
}

// catchUp makes the changes that follow a head. Others may have made some of them meanwhile. Error:
// when the table is of another branch by now, or cannot be folded like that of the other replica.
func (s *State) catchUp(from head, changes []change, h head) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.head.number >= h.number {
		return nil
	}
	if s.head.number < from.number {
		return errDamaged
	}
	changes = changes[s.head.number-from.number:]
	if changes[0].previous != s.head.commitment {
		return errDamaged
	}
	now := time.Now()
	for _, c := range changes {
		s.table.apply(c.records, nil, now)
		for _, f := range c.folds {
			pieces, err := s.table.refold(f)
			if err != nil {
				// Until everything is read anew, each row is refused. The entry is still the floor.
				s.table, s.head = newTable(), head{complete: true, log: s.head.log}
				return err
			}
			s.table.fold(pieces)
		}
		s.table.owe(0, len(c.folds))
	}
	s.head = h
	return nil
}

// reload reads the state of a snapshot anew.
func (s *State) reload(r store.Reader, h head) error {
	t, err := load(r, h)
	if err != nil {
		return ownError(err)
	}
	s.goOnWith(t, h)
	return nil
}

// goOnWith replaces what the state knows, unless it knows of later entries by now.
func (s *State) goOnWith(t *table, h head) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.head.log.Sequence <= h.log.Sequence {
		s.table, s.head = t, h
	}
}

// Loaded is the state of a store as it was read anew. It replaces the known one with the commit of
// an entry that accepts the loss of entries.
type Loaded struct {
	table *table
	head  head
}

// Load reads the state anew, also when it is of an earlier change than the known one, and changes
// nothing. It returns nil while no state is complete: then nothing is compared with it. Error:
// fault.Unavailable.
func (s *State) Load(ctx context.Context, st store.Store) (*Loaded, error) {
	if s == nil || !s.enforced() {
		return nil, nil
	}
	t, h, err := s.hasher.Load().load(ctx, st)
	if err != nil {
		return nil, fmt.Errorf("reading the state again: %w", ownError(err))
	}
	return &Loaded{t, h}, nil
}

// Reload goes on with the state of a store whose log goes on after lost entries, or whose state
// another process has built. The caller has verified that the log has the entry with the sequence
// least, and that the loss was accepted. Error: fault.Unavailable.
func (s *State) Reload(ctx context.Context, st store.Store, least uint64) error {
	if s == nil || !s.inUse() {
		return nil
	}
	if !s.enforced() { // as at a start: the store may have no state yet
		return s.use(ctx, st, s.hasher.Load())
	}
	l, err := s.Load(ctx, st)
	if err != nil {
		return err
	}
	if l.head.log.Sequence < least {
		return ownError(fmt.Errorf("%w: %s was put back", errDamaged, HeadKey))
	}
	s.goOnWith(l.table, l.head)
	return nil
}

// ownError is the error of the state's own rows. Whoever reads can retry until they are mended.
func ownError(err error) error {
	if fault.Of(err) == fault.Unavailable {
		return err
	}
	return fault.Outage(fault.ReasonRows, fault.Unavailable.Error(), err)
}

// row is a row that is to be compared with the state.
type row struct {
	family Family
	key    []byte
	value  []byte // nil: absent
}

// check compares a row with the state as of a change.
func (s *State) check(r row, number uint64) error {
	return s.checkRecord(r, s.hasher.Load().record(r.family, r.key, r.value), number)
}

// checkRead is check for a row that somebody reads, and is likely to read again.
func (s *State) checkRead(r row, number uint64) error {
	return s.checkRecord(r, s.recent.recordOf(s.hasher.Load(), r), number)
}

func (s *State) checkRecord(r row, is record, number uint64) error {
	s.mu.RLock()
	want, known := s.table.tagAt(is.id, number)
	s.mu.RUnlock()
	switch {
	case !known:
		return errTooOld
	case is.tag == want:
		return nil
	case want == absent:
		return newRowError(r.family, r.key, Added)
	case is.tag == absent:
		return newRowError(r.family, r.key, Removed)
	}
	return newRowError(r.family, r.key, Replaced)
}

// checkCount compares the number of rows of a group, or of a family, with the state as of a change.
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

var errReread = fault.New(fault.Unavailable, "the state is being read again: retry the request")

var errTooOld = fault.New(fault.Unavailable, "the read took too long: try again")
