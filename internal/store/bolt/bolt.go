// Package bolt keeps a [store.Store] in one bbolt file: the embedded default,
// for one replica. The lock on the file is the election.
//
// # Model
//
// Callers of Update queue; one writer goroutine takes everything that is queued
// as a group, lets each caller run its closure in turn inside one bbolt
// transaction, calls the hook, and commits: two syncs for the whole group. There
// are no timers: while a group is being synced the next one gathers, and it
// starts as soon as the sync returns.
//
// # Invariants
//
//   - Only the writer goroutine writes to the file: commits, the settling of the
//     newest meta page at open, and the wiping of freed pages all happen there.
//   - Only the writer goroutine opens the file again, and it does so unasked: while
//     no file is in use it is opening one or a timer or poke will make it.
//   - Only bbolt's own panics (assertions, faults of the memory map) become
//     errors; they are caught around the calls to bbolt alone. So every byte that
//     a closure sees is a copy.
//   - No commit starts before the one before it is known to be on disk.
//
// # A commit that fails
//
// Every group stores a random id with its writes. When the commit returns an
// error, the outcome is open: the meta page may or may not have been replaced.
// Then the file is closed, once all readers have left, and opened again, which
// settles its newest meta page (see openFile), and the id is looked up: if it is
// there, the group has persisted and is answered as such; if not, its members
// get fault.Unavailable. Opening again is needed, not merely tidy: after a failed
// sync bbolt takes the meta page in the page cache for durable, and counts pages
// as free that the durable one and the readers of older snapshots still use.
//
// What remains: a disk that fails while the file is opened again leaves the
// outcome unknown; the members get fault.Unavailable and may later find their
// writes. The writer then tries until it succeeds, and Views are turned away
// until it has. A disk that acknowledges a sync it did not do cannot be noticed.
// And when somebody overwrites the meta pages while a commit is under way, a View
// that panics over them can leave that commit waiting for a lock of bbolt that
// nobody will release: Ready reports it, and only a restart helps.
//
// The package does not encrypt and keeps no schema. A backup is a logical copy
// ([Store.Copy]), because a page copy would carry freed pages with it.
package bolt

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

const (
	viewLimit   = 2 * time.Second        // how long a View may read
	commitLimit = 750 * time.Millisecond // a commit that takes longer is hanging
)

// Options are the settings of [Open]; the zero value is ready to use.
type Options struct {
	Hook     store.Hook       // nil: no hook
	ReadOnly bool             // share the file with other readers; Update fails, and a file that breaks stays so
	Logger   *slog.Logger     // nil: discard
	Now      func() time.Time // measures Views and hanging commits; nil: time.Now

	// Tests only. fault stands around every durable step and may fail before
	// it, after it, or block; pace makes the scrubs faster.
	fault func(step string, do func() error) error
	pace  pace
}

// durably runs one step that must reach the disk.
func (o *Options) durably(step string, do func() error) error {
	if o.fault == nil {
		return do()
	}
	return o.fault(step, do)
}

// Store is a [store.Store] in a bbolt file.
type Store struct {
	path string
	opts Options

	mu      sync.Mutex
	open    *file  // what Views and groups use; nil until the file has been opened again
	pending *group // what the writer takes next; nil when nobody waits
	closed  bool
	views   views
	clean   chan struct{} // closed by the scrub that wipes what may have been deleted; nil when nothing has
	copying *copying      // what the running copy has yet to hear of; nil when none is running

	// The writer's.
	last    *file            // the newest file, to be closed before the next is opened
	retry   <-chan time.Time // until then it does not open the file again unless a group needs it
	backoff time.Duration    // how long retry was last
	wipe    wiper

	wake      chan struct{} // pokes the writer: something is pending, the file went out of use, or Close
	left      chan struct{} // pokes the writer: an awaited View has ended
	stopped   chan struct{} // closed when the writer has ended and the file is closed
	closeErr  error         // error of closing the file; read after stopped
	commits   atomic.Uint64
	failed    atomic.Bool  // no commit has succeeded since one failed or the file went out of use
	busySince atomic.Int64 // Unix nanoseconds since which the writer waits for the disk; 0 when it does not
}

var _ store.Store = (*Store)(nil)

// Open opens the database at path and creates it, with mode 0600, when there is
// none. Its errors name the remedy: the folder is missing, another process has
// the file, or the file is truncated, damaged or not ours. With ReadOnly nothing
// is created or written and several processes may open the file together.
func Open(path string, o Options) (*Store, error) {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.pace == (pace{}) {
		o.pace = pace{pause: time.Second, patience: time.Second, hold: viewLimit}
	}
	if !o.ReadOnly {
		if err := create(path, &o); err != nil {
			return nil, fmt.Errorf("creating database: %w", err)
		}
	}
	f, err := openFile(path, &o)
	if err != nil {
		return nil, fmt.Errorf("opening database: %w", err)
	}
	s := &Store{
		path: path, opts: o, open: f, last: f,
		wake: make(chan struct{}, 1), left: make(chan struct{}, 1), stopped: make(chan struct{}),
	}
	if !o.ReadOnly {
		// What an earlier process freed may not have been wiped, and its failed
		// commits may have left bytes in the tail of the file.
		s.clean, s.wipe.tail = make(chan struct{}), true
		go s.write()
		poke(s.wake)
	}
	return s, nil
}

// View implements [store.Store].
func (s *Store) View(ctx context.Context, fn func(store.Reader) error) error {
	if err := ctx.Err(); err != nil {
		return ended(err)
	}
	f, epoch, err := s.enter()
	if err != nil {
		return err
	}
	defer s.leave(epoch)

	tx, data, err := f.begin(false)
	if err != nil {
		if f.wedged.Load() {
			s.drop(f)
		}
		return unavailable(err)
	}
	defer func() {
		if err := f.rollback(tx); err != nil {
			s.drop(f) // this reader has nothing to lose; the next ones get a fresh file
		}
	}()

	r := &reader{data: data}
	deadline := s.opts.Now().Add(viewLimit)
	r.check = func() error {
		if err := ctx.Err(); err != nil {
			return ended(err)
		}
		if s.opts.Now().After(deadline) {
			return fault.New(fault.Unavailable, "the read took longer than two seconds: ask for less at once")
		}
		return nil
	}
	defer func() { r.check = over }()
	return fn(r)
}

// Ready implements [store.Store].
func (s *Store) Ready(ctx context.Context) error {
	if since := s.busySince.Load(); since != 0 && s.opts.Now().Sub(time.Unix(0, since)) > commitLimit {
		return fault.New(fault.Unavailable, "the store does not answer: check the disk")
	}
	s.mu.Lock()
	closed, usable := s.closed, s.open != nil
	s.mu.Unlock()
	switch {
	case closed:
		return errClosed()
	case usable && !s.failed.Load():
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, commitLimit)
	defer cancel()
	return s.submit(ctx, true, func(store.Tx) error { return nil })
}

// Commits returns the number of physical commits since Open.
func (s *Store) Commits() uint64 { return s.commits.Load() }

// Close implements [store.Store]. It wipes what has been deleted before it
// closes the file. On a disk that hangs it hangs too.
func (s *Store) Close() error {
	s.mu.Lock()
	first := !s.closed
	s.closed = true
	s.mu.Unlock()
	switch {
	case first && s.opts.ReadOnly:
		s.finish()
	case first:
		poke(s.wake)
	}
	<-s.stopped
	if first {
		return s.closeErr
	}
	return nil
}

// finish ends the store after the last group.
func (s *Store) finish() {
	defer close(s.stopped)
	s.awaitViews(s.views.any, nil)
	var scrubbed error
	if !s.opts.ReadOnly && s.usable() {
		scrubbed = s.scrub()
	}
	var closed error
	if s.last != nil {
		closed = s.last.close()
	}
	s.closeErr = errors.Join(scrubbed, closed)
}

// usable tells whether the file is open and nothing is known against it.
func (s *Store) usable() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.open != nil
}

// drop takes f out of use and has the writer open the file again.
func (s *Store) drop(f *file) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open == f {
		s.open = nil
		s.failed.Store(true)
		poke(s.wake)
	}
}

// views counts the open Views, and apart from them those that began before the
// last commit and so may read pages that it freed. A View is counted before its
// snapshot is taken, hence it counts as older than a commit that it just sees:
// an error on the safe side.
type views struct {
	epoch   uint64 // changes with each commit
	current int    // began in this epoch
	older   int    // began before it
	awaited bool   // the writer wants to hear of each end
}

func (v *views) any() bool   { return v.current+v.older > 0 }
func (v *views) stale() bool { return v.older > 0 }

func (s *Store) enter() (*file, uint64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, 0, errClosed()
	}
	if s.open == nil {
		return nil, 0, errRecovering
	}
	s.views.current++
	return s.open, s.views.epoch, nil
}

func (s *Store) leave(epoch uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if epoch == s.views.epoch {
		s.views.current--
	} else {
		s.views.older--
	}
	if s.views.awaited {
		poke(s.left)
	}
}

// awaitViews waits until some is false, or until giveUp, and tells whether it is.
// Only the writer waits, so that one channel is enough.
func (s *Store) awaitViews(some func() bool, giveUp <-chan time.Time) bool {
	for {
		s.mu.Lock()
		s.views.awaited = some()
		wait := s.views.awaited
		s.mu.Unlock()
		if !wait {
			return true
		}
		select {
		case <-s.left:
		case <-giveUp:
			return false
		}
	}
}

const damaged = "the database file is damaged: restore a backup"

// guard runs calls to bbolt, and nothing else, and turns their panics into
// errors: bbolt asserts what it finds in pages, and the memory map faults where
// the file cannot be read.
func guard(do func() error) (err error) {
	before := debug.SetPanicOnFault(true)
	defer func() {
		debug.SetPanicOnFault(before)
		if p := recover(); p != nil {
			err = fault.Wrap(fault.Internal, damaged, fmt.Errorf("bbolt panicked: %v", p))
		}
	}()
	return do()
}

// unavailable classifies an error of bbolt or the file system, and leaves alone
// what guard and openFile have classified.
func unavailable(err error) error {
	var k fault.Kind
	if errors.As(err, &k) {
		return err
	}
	return fault.Wrap(fault.Unavailable, "the store could not be written: free space or repair the disk, then retry", err)
}

func ended(err error) error {
	return fault.Wrap(fault.Unavailable, "the request ended before the store could answer: retry", err)
}

func errClosed() error { return fault.New(fault.Unavailable, "the store is closed") }

var errRecovering = fault.New(fault.Unavailable, "the store is recovering from a failure: retry")

// over is the check of a Reader whose closure has returned.
func over() error {
	return fault.Wrap(fault.Internal, fault.Internal.Error(), errors.New("a store transaction was used outside its closure"))
}

// poke wakes whoever waits on c, now or when it next looks.
func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
