package bolt

import (
	"crypto/rand"
	"errors"
	"fmt"
	"runtime/debug"
	"sync/atomic"
	"time"

	bbolt "go.etcd.io/bbolt"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt/wal"
)

// The pauses between attempts to reopen the file grow from firstRetry to lastRetry.
const (
	firstRetry = 250 * time.Millisecond
	lastRetry  = time.Second
)

// writer is the only one that writes to the file. It commits groups, reopens the file after a
// failure, and scrubs.
type writer struct {
	path      string
	opts      *Options
	disk      *disk
	queue     *queue
	views     *views
	scrubber  *scrubber
	reserve   *reserve
	followers *followers
	commits   atomic.Uint64
	proved    atomic.Int64 // Unix nanoseconds at which a commit last succeeded, or a healthy store was last sent a probe

	// The writer goroutine owns these.
	last  *file // the newest file, to be closed before the next is opened
	ahead ahead
	retry retry

	stopped  chan struct{} // closed when the writer has ended and the file is closed
	closeErr error         // error of closing the file; read after stopped
}

// retry is when the writer tries to reopen the file again.
type retry struct {
	after <-chan time.Time // until it fires, the writer reopens the file only for a group
	pause time.Duration    // the last pause; 0: no attempt has failed
}

// write is the writer goroutine. It serves groups and between them first recovers, then scrubs,
// because a reopened file needs a scrub.
func (w *writer) write() {
	for {
		select {
		case <-w.queue.wake:
		case <-w.views.left:
		case do := <-w.queue.turns:
			_ = w.flush() // the file then has all commits, or is behind, or out of use
			do()
		case <-w.ahead.due:
			_ = w.flush()
		case <-w.retry.after:
			w.retry.after = nil
		case <-w.reserve.again:
			w.reserve.again = nil
		case <-w.scrubber.resting:
			w.scrubber.resting = nil
		case <-w.scrubber.patience:
			w.scrubber.patience, w.scrubber.overdue = nil, true
		}
		g, closed := w.queue.take()
		if g != nil {
			w.serve(g)
		}
		if closed {
			w.finish()
			return
		}
		w.mend()
		w.resume()
		w.refill()
		w.wipeFreed()
	}
}

// mend reopens the file when it is out of use, or lacks what the write-ahead log has. It cannot leave that
// to the next group: callers that read before they update would fail at the read and never send one.
func (w *writer) mend() {
	if w.views.usable() && w.ahead.behind == nil || w.retry.after != nil {
		return
	}
	if w.reopen() == nil {
		w.opts.Logger.Info("the database has been opened again")
	}
}

func (w *writer) serve(g *group) {
	defer close(g.done)
	began := w.opts.Now()
	g.err = w.runClosures(g)
	close(g.ran)
	attempted := g.err != nil
	switch {
	case g.tx == nil:
	case g.err == nil && (g.probe || g.tx.changed()):
		attempted = true
		g.err = w.commit(g)
	default:
		w.abandon(g.tx)
	}
	if attempted && w.opts.Observer != nil {
		w.opts.Observer(store.Commit{Updates: len(g.requests), Took: w.opts.Now().Sub(began), Err: g.err})
	}
}

// runClosures gives each member its turn and then runs the hook.
func (w *writer) runClosures(g *group) error {
	t, err := w.begin()
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
		if r.err == nil {
			r.err = w.admit(t, m)
		}
		if r.err != nil {
			t.undo(m)
		}
	}
	if t.broken == nil && t.changed() && w.opts.Hook != nil {
		if err := w.runHook(t); err != nil {
			return err
		}
	}
	return t.broken
}

func (w *writer) runHook(t *tx) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fault.Wrap(fault.Internal, fault.Internal.Error(), fmt.Errorf("the commit hook panicked: %v\n%s", p, debug.Stack()))
		}
	}()
	if err := w.opts.Hook(t, t.events); err != nil {
		return fmt.Errorf("running the commit hook: %w", err)
	}
	return nil
}

// begin starts the transaction of a group. If a failure has not been cleared up, it first tries to
// reopen the file.
func (w *writer) begin() (*tx, error) {
	switch {
	case w.ahead.behind != nil && w.retry.after != nil:
		return nil, unavailable(w.ahead.behind)
	case w.ahead.behind != nil || !w.views.usable():
		if err := w.reopen(); err != nil {
			return nil, err
		}
	}
	t := &tx{reader: reader{check: func() error { return nil }}}
	if w.isTight() {
		if err := w.flush(); err != nil { // so that it is known how much room is left
			return nil, err
		}
		t.direct = true
	}
	if open := w.ahead.open; open != nil {
		t.bolt, t.data, t.txid, t.earlier = open.bolt, open.data, open.txid, open.growth
	} else {
		b, data, err := w.beginWrite()
		if err != nil {
			return nil, unavailable(err)
		}
		t.bolt, t.data, t.txid = b, data, b.ID()
	}
	t.room = w.lookForRoom(t.bolt.Size(), t.growth())
	return t, nil
}

// isTight reports whether there is so little room that a flush must show how much there is.
func (w *writer) isTight() bool {
	open := w.ahead.open
	if open == nil {
		return false
	}
	needed, kept := open.growth, w.reserve.size+lastRoom
	if w.reserve.size == 0 {
		needed += kept // otherwise looking keeps it
	}
	return w.lookForRoom(open.bolt.Size(), needed)-open.growth < kept
}

// abandon ends a group that commits nothing. Its transaction stays open for what was written ahead in it.
func (w *writer) abandon(t *tx) {
	if open := w.ahead.open; open != nil {
		if t.undo(mark{}); t.broken == nil {
			open.growth = t.growth()
			return
		}
		w.views.drop(w.last) // a reopened file gets what was written ahead from the log
	}
	_ = w.rollback(t.bolt) // nothing was committed, whether or not this succeeds
}

// beginWrite starts a write transaction. If that fails, it takes the file out of use.
func (w *writer) beginWrite() (*bbolt.Tx, *bbolt.Bucket, error) {
	tx, data, err := w.last.begin(true)
	if err != nil {
		w.views.drop(w.last)
	}
	return tx, data, err
}

// rollback ends a write transaction. If that fails, it takes the file out of use.
func (w *writer) rollback(tx *bbolt.Tx) error {
	err := w.last.rollback(tx)
	if err != nil {
		w.views.drop(w.last)
	}
	return err
}

// commit makes a group durable. Its error means that the group did not persist, or that the outcome is
// unknown. As long as commits fail, each one is a probe: a small commit may fit where an entry does not.
func (w *writer) commit(g *group) error {
	t := g.tx
	defer w.disk.busy()()
	if err := w.fits(t); err != nil {
		w.views.failed.Store(true)
		w.opts.Logger.Error("committing failed", "error", err)
		w.abandon(t) // nothing was written: the file stays open
		return unavailable(err)
	}
	w.followers.noteKeys(t.log)
	var id wal.ID
	rand.Read(id[:]) // never fails
	at := w.opts.Now()
	var made *Commit
	note := func() (err error) {
		if made, err = w.followers.note(t, id[:], at); err != nil {
			return err
		}
		return t.bolt.Bucket([]byte(bucketCommit)).Put([]byte(keyCommit), id[:])
	}
	var err error
	if record, items := w.encodeAhead(g, id, at); record != nil {
		if err = guard(note); err == nil {
			err = w.writeAhead(t, id, record, items)
		}
	} else {
		err = w.disk.durably("commit", func() error {
			return guard(func() (err error) {
				if err := note(); err != nil {
					return err
				}
				if g.probe || w.views.failed.Load() {
					if err := putProbe(t.bolt); err != nil {
						return err
					}
				}
				return w.commitBolt(t.bolt)
			})
		})
		if err == nil {
			w.ahead.state.Newest = id
			w.flushed(t.txid)
		}
	}
	if err == nil {
		w.views.failed.Store(false)
		w.proved.Store(w.opts.Now().UnixNano())
		w.committed(t, made)
		return nil
	}
	w.opts.Logger.Error("committing failed", "error", err)
	_ = w.rollback(t.bolt) // the file is reopened anyway, and gets what was written ahead from the log
	rerr := w.reopen()
	if w.last == nil || w.ahead.state.Newest != id {
		return unavailable(errors.Join(err, rerr))
	}
	w.opts.Logger.Info("the commit that failed has persisted")
	w.committed(t, made)
	return nil
}

// committed updates the counters and views after a durable commit, before any caller gets its
// answer.
func (w *writer) committed(t *tx, made *Commit) {
	w.commits.Add(1)
	w.followers.journal.add(made)
	for _, do := range t.after {
		do()
	}
	if t.deletes() {
		w.scrubber.request()
	}
}

// reopen closes the file and opens it again to see what is on disk. Open Views keep the old file
// until they end, within two seconds; new ones are refused meanwhile. When reopen fails, the writer
// tries again, see mend.
func (w *writer) reopen() error {
	defer w.disk.busy()()
	if w.ahead.open != nil {
		_ = w.rollback(w.ahead.open.bolt)
		w.ahead.open, w.ahead.due = nil, nil
	}
	if w.ahead.log != nil {
		_ = w.ahead.log.Close() // its records are read again
		w.ahead.log = nil
	}
	if w.last != nil {
		w.views.drop(w.last)
		w.views.await(w.views.any, nil)
		if err := w.last.close(); err != nil {
			w.opts.Logger.Warn("closing the database failed", "error", err)
		}
		w.last, w.ahead.behind = nil, nil
	}
	// The outcome of the last commit is unknown here, so Scrubbed waits for the scrub from the moment
	// the members are answered.
	w.scrubber.suspect()
	var f *file
	err := syncFolder(w.path, w.disk) // the name of a compacted file must be durable before the next commit
	if err == nil {
		f, err = w.openApplied()
	}
	if f != nil {
		w.last = f
		w.views.use(f)
	}
	if err != nil {
		w.failedToOpen(err)
		return unavailable(fmt.Errorf("opening database again: %w", err))
	}
	w.retry = retry{}
	return nil
}

// failedToOpen says when to try again.
func (w *writer) failedToOpen(err error) {
	if w.retry.pause == 0 { // once per outage
		w.opts.Logger.Error("opening the database failed, will be tried again", "error", err)
	}
	if w.retry.pause = min(max(2*w.retry.pause, firstRetry), lastRetry); w.ahead.behind != nil {
		w.retry.pause = applyAgain
	}
	w.retry.after = time.After(w.retry.pause)
}

// wipeFreed scrubs if a scrub is due and nothing blocks it.
func (w *writer) wipeFreed() {
	if !w.scrubber.isDue() || !w.views.usable() || w.ahead.behind != nil {
		return
	}
	if w.ahead.open != nil {
		// All Views that are open now will be older than the flush.
		if !w.scrubber.overdue && !w.scrubber.awaitViews(w.views, w.views.any) || w.flush() != nil {
			return
		}
	}
	if !w.scrubber.awaitViews(w.views, w.views.stale) {
		return
	}
	w.scrubber.resting = time.After(w.scrubber.pace.pause)
	if err := w.scrub(); err != nil {
		w.opts.Logger.Error("wiping freed pages failed, will be tried again", "error", err)
	}
}

// scrub wipes all free pages. The caller must make sure that no View is older than the last commit.
func (w *writer) scrub() error {
	tx, _, err := w.beginWrite()
	if err != nil {
		return fmt.Errorf("beginning to scrub: %w", err)
	}
	err = w.scrubber.wipe(w.last, tx.ID())
	if err = errors.Join(err, w.rollback(tx)); err == nil {
		err = w.wipeLog()
	}
	if err != nil {
		return err
	}
	w.scrubber.finish()
	return nil
}

// finish closes the store after the last group.
func (w *writer) finish() {
	defer close(w.stopped)
	w.views.await(w.views.any, nil)
	var scrubbed error
	if !w.opts.ReadOnly && w.views.usable() && w.ahead.behind == nil {
		scrubbed = w.flush()
		if scrubbed == nil {
			scrubbed = w.endLog() // before the scrub, as it frees pages
		}
		if scrubbed == nil {
			scrubbed = w.scrub()
		}
	}
	closed := w.ahead.behind
	if w.last != nil {
		closed = errors.Join(closed, w.last.close())
	}
	w.closeErr = errors.Join(scrubbed, closed)
}
