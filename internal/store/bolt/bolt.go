// Package bolt keeps a [store.Store] in one bbolt file. It is the embedded default, for one
// replica. The lock on the file is the leader election.
//
// # Model
//
// Callers of Update queue. One writer goroutine takes all queued requests as a group. It lets each
// caller run its closure in turn inside one bbolt transaction, calls the hook, and commits, with
// two syncs for the whole group, or with one to the write-ahead log (see Writing ahead). There are no
// timers for groups: the next one gathers while a group is being synced, and starts as soon as the
// sync returns.
//
// The parts own their state: queue the waiting requests, views the file in use and the Views that
// read it, scrubber what has to be wiped, followers what copies have to read again and what was not
// shipped, compactor the next file, and writer the file itself.
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
	"fmt"
	"log/slog"
	"time"

	berrors "go.etcd.io/bbolt/errors"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt/pages"
	"github.com/latticekeep/latticekeep/internal/store/format"
)

const (
	viewLimit   = 2 * time.Second        // how long a View may read
	commitLimit = 750 * time.Millisecond // a commit that takes longer is hanging
	probeAfter  = 10 * time.Second       // an older commit says nothing about the disk
)

// Options are the settings of [Open]; the zero value is ready to use.
type Options struct {
	Hook     store.Hook           // nil: no hook
	Reserve  int64                // bytes kept for the closures that are spared on a full disk, at most a sixteenth of the volume; 0: none
	Spared   func(event any) bool // whether closures with this event go on there, and all without one; required with Reserve. It must return at once
	Observer store.Observer       // nil: none
	Journal  int                  // bytes of the newest commits that are kept in memory for [Store.CommitsAfter]; 0: none
	ReadOnly bool                 // share the file with other readers; Update fails, and a file that fails is not reopened
	Logger   *slog.Logger         // nil: discard
	Now      func() time.Time     // measures Views and hanging commits; nil: time.Now

	// For tests only. fault wraps every durable step and may fail before it, fail after it, or
	// block. pace makes the scrubs faster.
	fault func(step string, do func() error) error
	pace  pace
	// upkeep makes compactions more frequent.
	upkeep upkeep
}

// Store is a [store.Store] in a bbolt file. Each of its parts owns its state and its lock, and none
// calls another while it holds the lock.
type Store struct {
	opts      Options
	disk      *disk
	queue     *queue
	views     *views
	scrubber  *scrubber
	followers *followers
	writer    *writer
	compactor *compactor
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
	d := &disk{now: o.Now, fault: o.fault}
	if !o.ReadOnly {
		if err := create(path, d); err != nil {
			return nil, fmt.Errorf("creating database: %w", err)
		}
	}
	wake := make(chan struct{}, 1)
	s := &Store{
		opts: o, disk: d,
		queue:    &queue{now: o.Now, wake: wake, turns: make(chan func()), ended: make(chan struct{})},
		views:    &views{left: make(chan struct{}, 1), wake: wake},
		scrubber: &scrubber{pace: o.pace, disk: d, logger: o.Logger},
	}
	s.followers = &followers{opts: &s.opts, journal: &journal{bound: o.Journal, full: make(chan struct{}, 1)}}
	s.writer = &writer{
		path: path, opts: &s.opts, disk: d, queue: s.queue, views: s.views, scrubber: s.scrubber,
		followers: s.followers, stopped: s.queue.ended,
	}
	open := s.writer.openApplied
	if o.ReadOnly {
		open = func() (*file, error) { return openMerged(path, d) }
	}
	f, err := open()
	if f == nil {
		return nil, fmt.Errorf("opening database: %w", err)
	}
	s.views.use(f)
	s.writer.last, s.writer.reserve = f, newReserve(f, o)
	s.compactor = newCompactor(s, o.upkeep)
	if !o.ReadOnly {
		if s.writer.proved.Store(o.Now().UnixNano()); err != nil { // otherwise the file has just been written
			s.views.failed.Store(true)
			s.writer.failedToOpen(err)
		}
		// An earlier process may not have wiped what it freed, and its failed commits may have left
		// bytes in the tail of the file.
		s.scrubber.suspect()
		go s.writer.write()
		s.compactor.start()
		poke(wake)
	}
	return s, nil
}

// View implements [store.Store].
func (s *Store) View(ctx context.Context, fn func(store.Reader) error) error {
	if err := ctx.Err(); err != nil {
		return ended(err)
	}
	f, epoch, err := s.views.enter()
	if err != nil {
		return err
	}
	defer s.views.leave(f, epoch)

	tx, r, err := f.beginView()
	if err != nil {
		if f.wedged.Load() {
			s.views.drop(f)
		}
		return unavailable(err)
	}
	defer func() {
		if err := f.rollback(tx); err != nil {
			s.views.drop(f) // this reader has nothing to lose; the next ones get a reopened file
		}
	}()

	deadline := s.opts.Now().Add(viewLimit)
	r.check = func() error {
		if err := ctx.Err(); err != nil {
			return ended(err)
		}
		if s.opts.Now().After(deadline) {
			return fault.Outage(fault.ReasonTimeout, "the read took longer than two seconds: ask for less at once", nil)
		}
		return nil
	}
	defer func() { r.check = over }()
	return fn(r)
}

// Update implements [store.Store].
func (s *Store) Update(ctx context.Context, fn func(store.Tx) error) error {
	return s.submit(ctx, false, fn)
}

func (s *Store) submit(ctx context.Context, probe bool, fn func(store.Tx) error) error {
	if err := ctx.Err(); err != nil {
		return ended(err)
	}
	if s.opts.ReadOnly {
		return fault.Wrap(fault.Internal, fault.Internal.Error(), berrors.ErrDatabaseReadOnly)
	}
	return s.queue.submit(ctx, probe, fn)
}

// Ready implements [store.Store]. While commits fail it waits for a probe. Otherwise its answer is
// that of the last commit, and when that is older than ten seconds, Ready sends a probe for the next
// answer.
func (s *Store) Ready(ctx context.Context) error {
	if s.disk.hangs(commitLimit) {
		return fault.Outage(fault.ReasonStore, "the store does not answer: check the disk", nil)
	}
	switch closed, healthy := s.views.state(); {
	case closed:
		return errClosed()
	case s.writer.reserve.gone.Load():
		return errNoRoom
	case healthy:
		now, proved := s.opts.Now(), s.writer.proved.Load()
		if !s.opts.ReadOnly && now.Sub(time.Unix(0, proved)) > probeAfter && s.writer.proved.CompareAndSwap(proved, now.UnixNano()) {
			s.queue.probe()
		}
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, commitLimit)
	defer cancel()
	return s.submit(ctx, true, func(store.Tx) error { return nil })
}

// Scrubbed waits until the bytes of everything that completed Updates deleted, whatever their
// answer, are wiped from the file. It returns an error when ctx ends first.
func (s *Store) Scrubbed(ctx context.Context) error { return s.scrubber.wait(ctx) }

// ReplicasRead implements [store.Database]. Only this process uses the file.
func (s *Store) ReplicasRead(_ context.Context, least int) (bool, error) {
	return least <= format.Reads, nil
}

// Usage implements [store.Database]. It reads the newest meta page and the count of free pages.
func (s *Store) Usage(context.Context) (store.Usage, error) {
	f, epoch, err := s.views.enter() // so that the writer does not close the file meanwhile
	if err != nil {
		return store.Usage{}, err
	}
	defer s.views.leave(f, epoch)
	l, err := pages.LayoutOf(f.File)
	if err != nil {
		return store.Usage{}, unavailable(fmt.Errorf("reading the size of the database: %w", err))
	}
	return store.Usage{
		Size: l.Size(), Free: l.Free + l.Tail,
		Reserve: s.writer.reserve.left.Load(), Reserved: s.writer.reserve.low.Load(),
		Returned: s.compactor.returned.Load(), Compacted: s.compactor.last(),
	}, nil
}

// Commits returns the number of physical commits since Open.
func (s *Store) Commits() uint64 { return s.writer.commits.Load() }

// Close implements [store.Store]. It wipes deleted rows before it closes the file. If the disk
// hangs, Close hangs too.
func (s *Store) Close() error {
	s.compactor.stop()
	first := s.views.close()
	switch {
	case first && s.opts.ReadOnly:
		s.writer.finish()
	case first:
		s.queue.close()
	}
	<-s.writer.stopped
	if first {
		return s.writer.closeErr
	}
	return nil
}
