// Package bolt keeps a [store.Store] in one bbolt file. It is the embedded default, for one
// replica. The lock on the file is the leader election.
//
// # Model
//
// Callers of Update queue. One writer goroutine takes all queued requests as a group. It lets each
// caller run its closure in turn inside one bbolt transaction, calls the hook, and commits, with
// two syncs for the whole group. There are no timers: the next group gathers while a group is being
// synced, and starts as soon as the sync returns.
//
// # Invariants
//
//   - Only the writer goroutine writes to the file. It commits, settles the newest meta page at
//     open, and wipes freed pages.
//   - Only the writer goroutine reopens the file, and it does so without a request: while no
//     file is in use, the writer is opening one, or a timer or poke is about to start it.
//   - Only bbolt's own panics (assertions, faults of the memory map) become errors. They are
//     caught around the calls to bbolt alone, so every byte that a closure sees is a copy.
//   - No commit starts before the previous one is known to be on disk.
//
// # A commit that fails
//
// Every group stores a random id with its writes. When the commit returns an error, the outcome is
// open: the meta page may or may not have been replaced. The writer then waits until all readers
// have left, closes the file and opens it again, which settles its newest meta page (see openFile).
// It looks up the id: if the id is there, the group has persisted and is answered as a success; if
// not, its members get fault.Unavailable. Reopening is necessary: after a failed sync bbolt treats
// the meta page in the page cache as durable, and counts pages as free that the durable one and the
// readers of older snapshots still use.
//
// Three limits remain. If the disk fails while the file is being reopened, the outcome is unknown:
// the members get fault.Unavailable and may later find their writes. The writer retries until it
// succeeds, and Views are refused until then. A disk that acknowledges a sync it did not do cannot
// be detected. If something overwrites the meta pages during a commit, a View that panics on them
// can leave the commit waiting for a bbolt lock that is never released: Ready reports this, and
// only a restart helps.
//
// The package does not encrypt and keeps no schema. A backup is a logical copy ([Store.Copy]),
// because a page copy would include freed pages.
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
	ReadOnly bool             // share the file with other readers; Update fails, and a file that fails is not reopened
	Logger   *slog.Logger     // nil: discard
	Now      func() time.Time // measures Views and hanging commits; nil: time.Now

	// For tests only. fault wraps every durable step and may fail before it, fail after it, or
	// block. pace makes the scrubs faster.
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
	open    *file  // file for Views and groups; nil until it has been reopened
	pending *group // group that the writer takes next; nil when nobody waits
	closed  bool
	views   views
	clean   chan struct{} // closed by the scrub that wipes deleted rows; nil when there is nothing to wipe
	copying *copying      // keys that the running copy has yet to read; nil when no copy is running

	// The writer goroutine owns these.
	last    *file            // the newest file, to be closed before the next is opened
	retry   <-chan time.Time // until it fires, the writer reopens the file only for a group
	backoff time.Duration    // last duration of retry
	wipe    wiper

	wake      chan struct{} // wakes the writer: a request is pending, the file went out of use, or Close was called
	left      chan struct{} // wakes the writer: an awaited View has ended
	stopped   chan struct{} // closed when the writer has ended and the file is closed
	closeErr  error         // error of closing the file; read after stopped
	commits   atomic.Uint64
	failed    atomic.Bool  // no commit has succeeded since one failed or the file went out of use
	busySince atomic.Int64 // Unix nanoseconds since which the writer waits for the disk; 0 when it does not
}

var _ store.Store = (*Store)(nil)

// Open opens the database at path. If there is none, it creates one with mode 0600. Its errors name
// the remedy: the folder is missing, another process has the file open, or the file is truncated,
// damaged or not a database of this product. With ReadOnly it creates and writes nothing, and
// several processes may open the file together.
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
		// An earlier process may not have wiped what it freed, and its failed commits may have left
		// bytes in the tail of the file.
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
			s.drop(f) // this reader has nothing to lose; the next ones get a reopened file
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

// Close implements [store.Store]. It wipes deleted rows before it closes the file. If the disk
// hangs, Close hangs too.
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

// finish closes the store after the last group.
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

// usable reports whether the file is open and not under suspicion.
func (s *Store) usable() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.open != nil
}

// drop takes f out of use and makes the writer reopen the file.
func (s *Store) drop(f *file) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open == f {
		s.open = nil
		s.failed.Store(true)
		poke(s.wake)
	}
}

// views counts the open Views. It counts separately those that began before the last commit and so
// may read pages that this commit freed. A View is counted before its snapshot is taken, so it
// counts as older than a commit that it just sees. This error is on the safe side.
type views struct {
	epoch   uint64 // changes with each commit
	current int    // Views that began in this epoch
	older   int    // Views that began earlier
	awaited bool   // the writer wants a poke when a View ends
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

// awaitViews waits until some returns false or giveUp fires, and reports whether some returned
// false. Only the writer waits, so one channel is enough.
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

// guard runs calls to bbolt, and nothing else, and turns their panics into errors. bbolt asserts
// what it finds in pages, and the memory map faults where the file cannot be read.
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

// unavailable classifies an error of bbolt or the file system. It leaves errors alone that guard
// and openFile have classified.
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

// over is the check function of a Reader whose closure has returned.
func over() error {
	return fault.Wrap(fault.Internal, fault.Internal.Error(), errors.New("a store transaction was used outside its closure"))
}

// poke wakes the goroutine that waits on c, now or when it next waits.
func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
