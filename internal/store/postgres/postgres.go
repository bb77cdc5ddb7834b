// Package postgres keeps a [store.Store] in a PostgreSQL database, for any number
// of replicas.
//
// # Model
//
// There is one writer at a time among all replicas: who holds the lock on the one
// row of latticekeep_head. A group of Updates is one transaction, which others join
// as long as it waits for that lock. It takes it first; then it reads, runs the
// closures and the hook over what it has read, and sends all writes with COMMIT in
// one round trip. Views share snapshots; see view.go.
//
// # Why READ COMMITTED is serialisable here
//
// Every transaction that writes takes the lock before it reads anything, and keeps
// it until it has ended. In READ COMMITTED each statement sees what was committed
// when it began, hence after the lock was granted all that any earlier writer has
// committed, and nothing else is committed until this one ends: the transactions
// that write are one after the other, in the order of their fences. In SERIALIZABLE
// the snapshot would be taken before the lock is waited for, and everyone who had
// to wait would get 40001.
//
// # The fence
//
// Each commit raises the fence in the head by one. It says whether another process
// has committed since this one did: if not, the rows that this process has in
// memory are still those of the database, and are not read again. A process that
// was stopped while it held the lock has lost it when it goes on: PostgreSQL ends a
// session that idles in a transaction for a second, and with it the transaction,
// so that its COMMIT finds no session and can never be late.
//
// # A commit that fails
//
// Until COMMIT has been sent nothing can have been committed, and the group is
// tried again for up to five seconds, closures and all. After that the outcome is
// open until the database has been asked: each commit stores a random id under its
// fence. The old transaction holds the lock on the head until it is over, so that
// whoever has taken that lock and does not find the id knows that it will never be
// there. Then the group is tried again. If the id is there, that does not say that
// synchronous standbys have it: a wait for them that is cancelled, or that ends with
// its session, leaves a commit that is seen and is on one machine only. So whoever
// finds it writes it once more and commits that, which takes all before it to the
// standbys; only then is the group answered as the success that it was. For the
// same reason a COMMIT that comes with a warning is looked up, no writer's statement
// is ever cancelled, and no session that waits for standbys is ended. A database
// that cannot be asked within five seconds leaves the outcome unknown; the members
// get fault.Unavailable and may later find their writes.
//
// # Rehearsals
//
// What a group reads under the lock keeps all replicas waiting. So each closure is
// run once before, over what is known at that moment, to find out what it reads;
// see rehearse.go. A rehearsal runs at the same time as other closures.
//
// What remains: PostgreSQL keeps what it acknowledges as far as its own settings
// say. With asynchronous replication a failover may lose the newest commits. Rows
// that were deleted are gone from its files after the next VACUUM, which every
// replica asks for within half a minute, except for what backups, replicas and
// the log of PostgreSQL hold. There are no advisory locks, notifications or
// extensions, so that CockroachDB and YugabyteDB may do; neither has been tested.
// A connection pooler must give each connection a session of its own.
package postgres

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

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
	ReadOnly bool             // no migration; Update fails
	Logger   *slog.Logger     // nil: discard
	Now      func() time.Time // measures Views and hanging commits; nil: time.Now

	Password    func() (string, error) // asked for each connection; nil: that of the URL
	Connections int                    // at most, besides short-lived ones; 0: 16, at least 2
	PQRequired  bool                   // agree on keys by X25519MLKEM768 only, wherever TLS is used

	// Tests only. fault stands around every commit and may fail before it, after
	// it, or block.
	fault       func(step string, do func() error) error
	vacuumAfter time.Duration
	commitWait  time.Duration
	patience    time.Duration
	copyLimit   time.Duration
}

// durably runs one step that must be durable.
func (o *Options) durably(step string, do func() error) error {
	if o.fault == nil {
		return do()
	}
	return o.fault(step, do)
}

// Store is a [store.Store] in a PostgreSQL database.
type Store struct {
	cfg  *pgconn.Config
	opts Options

	life    context.Context // ends when the last request has left after Close
	end     context.CancelFunc
	tasks   sync.WaitGroup
	rounds  rounds
	loader  loader
	pool    pool
	cache   cache
	copying atomic.Bool
	deleted chan struct{} // pokes the vacuum

	mu       sync.Mutex
	pending  *group // what the writer takes next; nil when nobody waits
	closed   bool
	inside   int           // requests that are being served
	left     chan struct{} // closed when the last has left after Close
	wake     chan struct{} // pokes the writer: something is pending
	stopped  chan struct{} // closed when the writer has ended
	finished chan struct{} // closed when all is

	// The writer's.
	session *conn // nil until it is needed
	alone   int   // commits since one of another process
	habits  habits

	commits   atomic.Uint64
	failed    atomic.Bool  // no commit has succeeded since one failed or the server was lost
	down      atomic.Bool  // the server could not be had, and is being looked for
	busySince atomic.Int64 // Unix nanoseconds since which the writer waits for the server; 0 when it does not
}

var _ store.Database = (*Store)(nil)

// Open opens the database at url, postgres://user@host/database?sslmode=verify-full
// with the parameters of libpq, and makes or migrates its tables. Other tables in
// it are left alone. Its errors name the remedy and never repeat the password.
// What is no error of the URL or the schema is of kind fault.Unavailable.
func Open(ctx context.Context, url string, o Options) (*Store, error) {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Connections == 0 {
		o.Connections = 16
	}
	o.vacuumAfter = cmp.Or(o.vacuumAfter, vacuumAfter)
	o.commitWait = cmp.Or(o.commitWait, commitWait)
	o.patience = cmp.Or(o.patience, patience)
	o.copyLimit = cmp.Or(o.copyLimit, copyLimit)
	cfg, err := configure(url, &o)
	if err != nil {
		return nil, err
	}
	s := &Store{
		cfg: cfg, opts: o,
		deleted: make(chan struct{}, 1), left: make(chan struct{}), wake: make(chan struct{}, 1),
		stopped: make(chan struct{}), finished: make(chan struct{}),
	}
	s.life, s.end = context.WithCancel(context.Background())
	s.pool.s, s.loader.s = s, s
	s.pool.slots = make(chan struct{}, max(1, o.Connections-1)) // one is the writer's
	if err := s.migrate(ctx); err != nil {
		s.end()
		if k, ours := kindOf(err); ours && k != broken {
			return nil, fault.Wrap(fault.Unavailable, "the database cannot be opened: look at PostgreSQL and the URL, then retry", err)
		}
		return nil, fmt.Errorf("opening database: %w", err)
	}
	if o.ReadOnly {
		close(s.stopped)
	} else {
		go s.write()
		s.tasks.Go(s.tend)
		poke(s.deleted) // an earlier process may have deleted
	}
	return s, nil
}

// enter counts a request in, unless the store is closed.
func (s *Store) enter() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	s.inside++
	return true
}

func (s *Store) leave() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.inside--; s.inside == 0 && s.closed {
		close(s.left)
	}
}

// Ready implements [store.Store].
func (s *Store) Ready(ctx context.Context) error {
	if s.hangs(commitLimit) {
		return fault.New(fault.Unavailable, "the database does not answer: look at PostgreSQL")
	}
	if !s.enter() {
		return errClosed()
	}
	defer s.leave()
	if !s.failed.Load() {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, commitLimit)
	defer cancel()
	if s.opts.ReadOnly {
		return s.View(ctx, func(r store.Reader) error { _, err := r.Get([]byte{0}); return err })
	}
	return s.submit(ctx, &request{turn: make(chan struct{}, 1)}, true, func(store.Tx) error { return nil })
}

// Commits returns the number of physical commits since Open.
func (s *Store) Commits() uint64 { return s.commits.Load() }

// Close implements [store.Store].
func (s *Store) Close() error {
	s.mu.Lock()
	first := !s.closed
	s.closed = true
	if first && s.inside == 0 {
		close(s.left)
	}
	s.mu.Unlock()
	if first {
		<-s.left
		s.end()
		<-s.stopped
		s.pool.close()
		s.tasks.Wait()
		close(s.finished)
	}
	<-s.finished
	return nil
}

// poke wakes whoever waits on c, now or when it next looks.
func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
