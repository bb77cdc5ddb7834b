package bolt

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"slices"
	"sync/atomic"
	"time"

	bbolt "go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// The pauses between attempts to reopen the file grow from firstRetry to lastRetry.
const (
	firstRetry = 250 * time.Millisecond
	lastRetry  = time.Second
)

// longestGathering is about half the duration of a commit.
const longestGathering = 2 * time.Millisecond

// group is the set of requests that share one physical commit.
type group struct {
	requests []*request
	commit   bool          // commit even when nothing changed, because Ready has sent a probe
	tx       *tx           // set before the first turn
	back     chan struct{} // a request returns the turn
	ran      chan struct{} // closed after the closures and the hook
	done     chan struct{} // closed when err is final
	err      error         // fails all members
}

// request is one Update. Its closure runs in its caller's goroutine while the writer waits, so a
// panic keeps its stack and ends only the caller.
type request struct {
	started atomic.Bool   // set by the writer, which gives the turn, or by the caller, which withdraws
	turn    chan struct{} // the writer gives the turn
	err     error
}

// errExited is the result of a closure that did not return.
var errExited = errors.New("the closure panicked or exited")

// Update implements [store.Store].
func (s *Store) Update(ctx context.Context, fn func(store.Tx) error) error {
	return s.submit(ctx, false, fn)
}

func (s *Store) submit(ctx context.Context, commit bool, fn func(store.Tx) error) error {
	if err := ctx.Err(); err != nil {
		return ended(err)
	}
	g, r, err := s.enqueue(commit)
	if err != nil {
		return err
	}
	select {
	case <-r.turn:
	case <-g.done: // the group could not begin
		return g.err
	case <-ctx.Done():
		if r.started.CompareAndSwap(false, true) {
			s.withdraw(g, r)
			return ended(ctx.Err())
		}
		<-r.turn
	}
	r.run(g, fn)
	select {
	case <-g.done:
	case <-ctx.Done():
		// The hook may still be writing into the events of fn.
		<-g.ran
		select {
		case <-g.done:
		default:
			return fault.Wrap(fault.Unavailable, "the store did not confirm the write in time: look whether it happened before trying again", ctx.Err())
		}
	}
	if g.err != nil {
		return g.err
	}
	return r.err
}

func (r *request) run(g *group, fn func(store.Tx) error) {
	defer func() { g.back <- struct{}{} }()
	r.err = errExited
	r.err = fn(g.tx)
}

func (s *Store) enqueue(commit bool) (*group, *request, error) {
	if s.opts.ReadOnly {
		return nil, nil, fault.Wrap(fault.Internal, fault.Internal.Error(), berrors.ErrDatabaseReadOnly)
	}
	r := &request{turn: make(chan struct{}, 1)}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, nil, errClosed()
	}
	if s.pending == nil {
		s.pending = &group{back: make(chan struct{}), ran: make(chan struct{}), done: make(chan struct{})}
		poke(s.wake)
	}
	s.pending.requests = append(s.pending.requests, r)
	s.pending.commit = s.pending.commit || commit
	return s.pending, r, nil
}

// withdraw removes r from g, so cancelled requests do not pile up while the disk hangs.
func (s *Store) withdraw(g *group, r *request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pending == g {
		g.requests = slices.DeleteFunc(g.requests, func(q *request) bool { return q == r })
	}
}

// write is the writer goroutine. It serves groups and between them first recovers, then scrubs,
// because a reopened file needs a scrub.
func (s *Store) write() {
	for {
		select {
		case <-s.wake:
		case <-s.left:
		case <-s.retry:
			s.retry = nil
		case <-s.wipe.resting:
			s.wipe.resting = nil
		case <-s.wipe.patience:
			s.wipe.patience, s.wipe.overdue = nil, true
		}
		g, closed := s.take()
		if g != nil {
			s.serve(g)
		}
		if closed {
			s.finish()
			return
		}
		s.mend()
		s.wipeFreed()
	}
}

// mend reopens the file when it is out of use. It cannot leave that to the next group: callers that
// read before they update would fail at the read and never send one.
func (s *Store) mend() {
	if s.usable() || s.retry != nil {
		return
	}
	if s.reopen() == nil {
		s.opts.Logger.Info("the database has been opened again")
	}
}

// take returns the pending group, and whether it is the last one.
//
// It first yields to other goroutines for as long as that makes the group grow: callers that have
// just been answered reach their next Update and join this group instead of the next. Yielding
// costs nothing when no goroutine can run, and does not wait for blocked ones. When very many can
// run, one turn lasts until all of them have run, so take also stops after longestGathering.
func (s *Store) take() (*group, bool) {
	const enough = 32 // turns without a new request; a turn takes well under a microsecond when nobody else can run
	began := s.opts.Now()
	for size, idle := 0, 0; idle < enough && s.opts.Now().Sub(began) < longestGathering; {
		runtime.Gosched()
		if n := s.queued(); n > size {
			size, idle = n, 0
		} else {
			idle++
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	g := s.pending
	s.pending = nil
	return g, s.closed
}

// queued returns the size of the group that is forming.
func (s *Store) queued() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pending == nil {
		return 0
	}
	return len(s.pending.requests)
}

func (s *Store) serve(g *group) {
	defer close(g.done)
	g.err = s.runClosures(g)
	close(g.ran)
	switch {
	case g.tx == nil:
	case g.err == nil && (g.commit || g.tx.changed()):
		g.err = s.commit(g.tx)
	default:
		_ = s.rollback(g.tx.bolt) // nothing was committed, whether or not this succeeds
	}
}

// runClosures gives each member its turn and then runs the hook.
func (s *Store) runClosures(g *group) error {
	t, err := s.begin()
	if err != nil {
		return err
	}
	g.tx = t
	defer func() { t.check = over }()
	for _, r := range g.requests {
		if !r.started.CompareAndSwap(false, true) {
			continue
		}
		m := t.mark()
		r.turn <- struct{}{}
		<-g.back
		if r.err != nil {
			t.undo(m)
		}
	}
	if t.broken == nil && t.changed() && s.opts.Hook != nil {
		if err := s.runHook(t); err != nil {
			return err
		}
	}
	return t.broken
}

func (s *Store) runHook(t *tx) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fault.Wrap(fault.Internal, fault.Internal.Error(), fmt.Errorf("the commit hook panicked: %v\n%s", p, debug.Stack()))
		}
	}()
	if err := s.opts.Hook(t, t.events); err != nil {
		return fmt.Errorf("running the commit hook: %w", err)
	}
	return nil
}

// begin starts the transaction of a group. If a failure has not been cleared up, it first tries to
// reopen the file.
func (s *Store) begin() (*tx, error) {
	if !s.usable() {
		if err := s.reopen(); err != nil {
			return nil, err
		}
	}
	b, data, err := s.beginWrite()
	if err != nil {
		return nil, unavailable(err)
	}
	return &tx{bolt: b, reader: reader{data: data, check: func() error { return nil }}}, nil
}

// beginWrite starts a write transaction. If that fails, it takes the file out of use.
func (s *Store) beginWrite() (*bbolt.Tx, *bbolt.Bucket, error) {
	tx, data, err := s.last.begin(true)
	if err != nil {
		s.drop(s.last)
	}
	return tx, data, err
}

// rollback ends a write transaction. If that fails, it takes the file out of use.
func (s *Store) rollback(tx *bbolt.Tx) error {
	err := s.last.rollback(tx)
	if err != nil {
		s.drop(s.last)
	}
	return err
}

// commit makes t durable. Its error means that t did not persist, or that the outcome is unknown.
func (s *Store) commit(t *tx) error {
	defer s.busy()()
	s.note(t.log)
	id := make([]byte, 16)
	rand.Read(id) // never fails
	err := s.opts.durably("commit", func() error {
		return guard(func() error {
			if err := t.bolt.Bucket([]byte(bucketCommit)).Put([]byte(keyCommit), id); err != nil {
				return err
			}
			return t.bolt.Commit()
		})
	})
	if err == nil {
		s.failed.Store(false)
		s.committed(t)
		return nil
	}
	_ = s.rollback(t.bolt) // the file is reopened anyway
	s.opts.Logger.Error("committing failed", "error", err)
	if rerr := s.reopen(); rerr != nil {
		return unavailable(errors.Join(err, rerr))
	}
	last, rerr := s.lastCommit()
	if rerr != nil || !bytes.Equal(last, id) {
		return unavailable(err)
	}
	s.opts.Logger.Info("the commit that failed has persisted")
	s.committed(t)
	return nil
}

// committed updates the counters and views after a durable commit, before any caller gets its
// answer.
func (s *Store) committed(t *tx) {
	s.commits.Add(1)
	for _, do := range t.after {
		do()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.views.epoch++
	s.views.older += s.views.current
	s.views.current = 0
	if t.deletes() && s.clean == nil {
		s.clean = make(chan struct{})
	}
}

// busy marks the time during which the writer waits for the disk.
func (s *Store) busy() (end func()) {
	s.busySince.Store(s.opts.Now().UnixNano())
	return func() { s.busySince.Store(0) }
}

// reopen closes the file and opens it again to see what is on disk. Open Views keep the old file
// until they end, within two seconds; new ones are refused meanwhile. When reopen fails, the writer
// tries again, see mend.
func (s *Store) reopen() error {
	defer s.busy()()
	if s.last != nil {
		s.drop(s.last)
		s.awaitViews(s.views.any, nil)
		if err := s.last.close(); err != nil {
			s.opts.Logger.Warn("closing the database failed", "error", err)
		}
		s.last = nil
	}
	s.suspect()
	f, err := openFile(s.path, &s.opts)
	if err != nil {
		if s.backoff == 0 { // once per outage
			s.opts.Logger.Error("opening the database again failed, will be tried again", "error", err)
		}
		s.backoff = min(max(2*s.backoff, firstRetry), lastRetry)
		s.retry = time.After(s.backoff)
		return unavailable(fmt.Errorf("opening database again: %w", err))
	}
	s.last, s.retry, s.backoff = f, nil, 0
	s.mu.Lock()
	s.open = f
	s.mu.Unlock()
	return nil
}

// suspect makes a scrub due, because a commit with an unknown outcome may have deleted rows or left
// pages in the tail. reopen calls it before the outcome is known, so that Scrubbed waits for the
// scrub from the moment the members are answered.
func (s *Store) suspect() {
	s.wipe.tail = true
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.clean == nil {
		s.clean = make(chan struct{})
	}
}

// lastCommit returns the id of the newest commit in the file.
func (s *Store) lastCommit() (id []byte, err error) {
	err = s.last.view(func(tx *bbolt.Tx) error {
		id = bytes.Clone(tx.Bucket([]byte(bucketCommit)).Get([]byte(keyCommit)))
		return nil
	})
	if err != nil {
		s.drop(s.last)
	}
	return id, err
}
