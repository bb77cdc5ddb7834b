// Package postgres keeps a [store.Store] in a PostgreSQL database, for any number of replicas.
//
// # Model
//
// There is one writer at a time among all replicas: the process that holds the lock on the one row
// of latticekeep_head. A group of Updates is one transaction, and Updates can join it while it
// waits for that lock. The transaction takes the lock first. Then it reads, runs the closures and
// the hook over what it has read, and sends all writes with COMMIT in one round trip. Views share
// snapshots; see view.go.
//
// The parts own their state: server what is known about PostgreSQL, pool the sessions that read,
// cache the rows in memory, queue the waiting requests, head the writer's session and the fence.
// The writer brings them together.
//
// # Why READ COMMITTED is serialisable here
//
// Every transaction that writes takes the lock before it reads anything, and keeps it until it has
// ended. In READ COMMITTED each statement sees what was committed when it began. So after the lock
// is granted it sees everything that earlier writers have committed, and nothing else is committed
// until this transaction ends: the writing transactions run one after the other, in the order of
// their fences. SERIALIZABLE would take the snapshot before waiting for the lock, and every writer
// that had to wait would get 40001.
//
// # The fence
//
// Each commit raises the fence in the head by one. The fence tells whether another process has
// committed since this one did. If not, the rows that this process has in memory are still those of
// the database and are not read again. A process that was stopped while it held the lock has lost
// it when it continues: PostgreSQL ends a session that idles in a transaction for a second, and the
// transaction with it. Its COMMIT then finds no session, so it can never arrive late.
//
// # A commit that fails
//
// Before COMMIT is sent nothing can have been committed, and the writer retries the group, closures
// included, for up to five seconds. After that the outcome is open until the database has been
// asked: each commit stores a random id under its fence. The old transaction holds the lock on the
// head until it has ended. So a process that has taken that lock and does not find the id knows
// that the commit will never happen, and the group is retried.
//
// Finding the id does not prove that synchronous standbys have the commit. When a wait for standbys
// is cancelled, or ends with its session, the commit is visible but exists on one machine only. So
// the process that finds the id writes it once more and commits, which brings everything before it
// to the standbys. Only then is the group answered as the success that it was. For the same reason
// the writer looks up a COMMIT that came with a warning, never cancels a writer's statement, and
// never ends a session that waits for standbys. If the database cannot be asked within five
// seconds, the outcome is unknown: the members get fault.Unavailable and may later find their
// writes.
//
// # Rehearsals
//
// All replicas wait while a group reads under the lock. So each closure runs once beforehand, over
// what is known at that moment, to find out what it reads; see rehearse.go. A rehearsal runs at the
// same time as other closures.
//
// Some limits remain. PostgreSQL keeps what it acknowledges only as well as its own settings say:
// with asynchronous replication a failover may lose the newest commits. Deleted rows are gone from
// its files after the next VACUUM, which every replica requests within half a minute, but not from
// backups, standbys and the write-ahead log. The package uses no advisory locks, notifications or
// extensions, so CockroachDB and YugabyteDB may work; neither has been tested. A connection pooler
// must give each connection a session of its own.
package postgres

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/format"
	"github.com/latticekeep/latticekeep/internal/store/postgres/address"
	"github.com/latticekeep/latticekeep/internal/store/postgres/rowcache"
)

const commitLimit = 750 * time.Millisecond // a commit that takes longer is hanging

// Options are the settings of [Open]; the zero value is ready to use.
type Options struct {
	Hook     store.Hook       // nil: no hook
	Observer store.Observer   // nil: none
	ReadOnly bool             // no migration; Update fails
	Logger   *slog.Logger     // nil: discard
	Head     []byte           // key that nearly every View reads: it is read with the snapshot; nil: none
	Now      func() time.Time // measures Views and hanging commits; nil: time.Now

	Password    func() (string, error) // called for each connection; nil: the password of the URL
	Connections int                    // most connections, besides short-lived ones; 0: 16, at least 2
	PQRequired  bool                   // wherever TLS is used, agree on keys with X25519MLKEM768 only

	// For tests only. fault wraps every commit and may fail before it, fail after it, or block.
	fault       func(step string, do func() error) error
	vacuumAfter time.Duration
	commitWait  time.Duration
	patience    time.Duration
	copyLimit   time.Duration
}

// Store is a [store.Store] in a PostgreSQL database. Each of its parts owns its state and its lock.
type Store struct {
	opts    Options
	server  *server
	pool    *pool
	rounds  *rounds
	loader  *loader
	writer  *writer
	copying atomic.Bool

	mu       sync.Mutex
	closed   bool
	inside   int           // requests that are being served
	left     chan struct{} // closed when the last request has left after Close
	finished chan struct{} // closed when everything has ended
}

var _ store.Database = (*Store)(nil)

// Open opens the database at url, postgres://user@host/database?sslmode=verify-full with the
// parameters of libpq, and creates or migrates its tables. It leaves other tables alone. Its errors
// name the remedy and never repeat the password. Every error that is not about the URL or the
// schema has kind fault.Unavailable.
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
	cfg, err := address.Parse(url, connectWait, o.PQRequired)
	if err != nil {
		return nil, err
	}
	life, end := context.WithCancel(context.Background())
	srv := &server{
		cfg: cfg, password: o.Password, pqRequired: o.PQRequired, logger: o.Logger, vacuumAfter: o.vacuumAfter,
		reads: format.Reads, life: life, end: end, deleted: make(chan struct{}, 1),
	}
	if err := srv.migrate(ctx, o.ReadOnly); err != nil {
		end()
		if k, ours := kindOf(err); ours && k != broken {
			return nil, fault.Outage(fault.ReasonStore, "the database cannot be opened: look at PostgreSQL and the URL, then retry", err)
		}
		return nil, fmt.Errorf("opening database: %w", err)
	}
	readers := &pool{server: srv, slots: make(chan struct{}, max(1, o.Connections-1))} // one connection is the writer's
	known := &rowcache.Cache{}
	s := &Store{
		opts: o, server: srv, pool: readers,
		rounds: &rounds{server: srv, pool: readers, head: o.Head},
		loader: &loader{server: srv, pool: readers, cache: known},
		writer: &writer{
			server: srv, queue: &queue{wake: make(chan struct{}, 1)},
			head: &head{server: srv, cache: known, now: o.Now, commitWait: o.commitWait},
			hook: o.Hook, observer: o.Observer, fault: o.fault, patience: o.patience, stopped: make(chan struct{}),
		},
		left: make(chan struct{}), finished: make(chan struct{}),
	}
	if o.ReadOnly {
		close(s.writer.stopped)
	} else {
		go s.writer.write()
		srv.tasks.Go(srv.tend)
		poke(srv.deleted) // an earlier process may have deleted rows
	}
	return s, nil
}

// enter counts a request in. It returns false when the store is closed.
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

// View implements [store.Store].
func (s *Store) View(ctx context.Context, fn func(store.Reader) error) error {
	if err := ctx.Err(); err != nil {
		return ended(err)
	}
	if !s.enter() {
		return errClosed()
	}
	defer s.leave()
	m := &member{in: s.rounds, ctx: ctx, limit: time.NewTimer(viewLimit)}
	defer m.end()
	deadline := s.opts.Now().Add(viewLimit)
	t := &tx{base: m, check: func() error {
		if err := ctx.Err(); err != nil {
			return ended(err)
		}
		if s.opts.Now().After(deadline) {
			return errSlow
		}
		return nil
	}}
	defer func() { t.check = over }()
	return fn(viewer{t})
}

// Update implements [store.Store].
func (s *Store) Update(ctx context.Context, fn func(store.Tx) error) error {
	if s.opts.ReadOnly {
		return fault.Wrap(fault.Internal, fault.Internal.Error(), errors.New("the database was opened for reading only"))
	}
	if err := ctx.Err(); err != nil {
		return ended(err)
	}
	if !s.enter() {
		return errClosed()
	}
	defer s.leave()
	return s.writer.submit(ctx, &request{turn: make(chan struct{}, 1), wants: s.loader.rehearse(ctx, fn)}, false, fn)
}

// Ready implements [store.Store].
func (s *Store) Ready(ctx context.Context) error {
	if s.writer.head.hangs(commitLimit) {
		return fault.Outage(fault.ReasonStore, "the database does not answer: look at PostgreSQL", nil)
	}
	if !s.enter() {
		return errClosed()
	}
	defer s.leave()
	if !s.server.failed.Load() {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, commitLimit)
	defer cancel()
	if s.opts.ReadOnly {
		return s.View(ctx, func(r store.Reader) error { _, err := r.Get([]byte{0}); return err })
	}
	return s.writer.submit(ctx, &request{turn: make(chan struct{}, 1)}, true, func(store.Tx) error { return nil })
}

// Time returns the time of the server's clock, which all users of the database share. Error:
// fault.Unavailable.
func (s *Store) Time(ctx context.Context) (time.Time, error) {
	micros, err := s.ask(ctx, "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint")
	if err != nil {
		return time.Time{}, fault.Outage(fault.ReasonStore, "the database does not tell its time: retry", fmt.Errorf("reading the server's clock: %w", err))
	}
	return time.UnixMicro(micros).UTC(), nil
}

// Usage implements [store.Database]. PostgreSQL knows how much of its tables is free only after it
// has read them.
func (s *Store) Usage(ctx context.Context) (store.Usage, error) {
	size, err := s.ask(ctx, "SELECT pg_total_relation_size('latticekeep_kv')")
	if err != nil {
		return store.Usage{}, fault.Wrap(fault.Unavailable, "the database does not tell its size: retry", fmt.Errorf("reading the size of the tables: %w", err))
	}
	return store.Usage{Size: size, Free: -1}, nil
}

// ask returns the number that a query answers. It is refused at once while the server is down.
func (s *Store) ask(ctx context.Context, query string) (int64, error) {
	if !s.enter() {
		return 0, errClosed()
	}
	defer s.leave()
	if s.server.down.Load() {
		return 0, errRecovering
	}
	ctx, cancel := context.WithTimeout(ctx, commitLimit)
	defer cancel()
	n, err := s.pool.ask(ctx, query, false)
	if err != nil && ctx.Err() == nil { // an idle session may have died
		n, err = s.pool.ask(ctx, query, true)
	}
	return n, err
}

// Stats returns the use of the connections, and how often the server was lost.
func (s *Store) Stats() Stats {
	stats := s.pool.stats()
	stats.Reachable, stats.Outages = !s.server.down.Load(), s.server.outages.Load()
	return stats
}

// ReplicasRead implements [store.Database].
func (s *Store) ReplicasRead(ctx context.Context, least int) (bool, error) {
	d, err := s.Describe(ctx)
	for reads := range d.Readers {
		if reads < least {
			return false, err
		}
	}
	return err == nil, err
}

// Describe asks the server how it is set up and used. Error: fault.Unavailable.
func (s *Store) Describe(ctx context.Context) (d Description, err error) {
	if !s.enter() {
		return d, errClosed()
	}
	defer s.leave()
	if d, err = s.server.describe(ctx); err != nil {
		err = fault.Outage(fault.ReasonStore, "the database does not tell who uses it: retry", fmt.Errorf("reading pg_stat_activity: %w", err))
	}
	return d, err
}

// Commits returns the number of physical commits since Open.
func (s *Store) Commits() uint64 { return s.writer.commits.Load() }

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
		s.server.end()
		<-s.writer.stopped
		s.pool.close()
		s.server.tasks.Wait()
		close(s.finished)
	}
	<-s.finished
	return nil
}
