package postgres

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"runtime/debug"
	"sync/atomic"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/postgres/rowcache"
)

// How long a group is retried. patience applies when the group was in progress as the database was
// lost, so that it survives a restart of the database. impatience applies when it began later, so
// that requests are refused soon.
const (
	patience   = 5 * time.Second
	impatience = 500 * time.Millisecond
	hopeless   = 2 * time.Second // after the writer has waited for so long, others do not wait for it; longer than idleLimit
)

var errUnconfirmed = "the store did not confirm the write in time: look whether it happened before trying again"

// writer commits groups, one after the other.
type writer struct {
	server   *server
	queue    *queue
	head     *head
	hook     store.Hook
	observer store.Observer
	fault    func(step string, do func() error) error // Options.fault
	patience time.Duration

	commits atomic.Uint64
	stopped chan struct{} // closed when the writer has ended
}

// submit adds r to the waiting group and waits until the group is settled. With commit the group
// commits even when nothing changed.
func (w *writer) submit(ctx context.Context, r *request, commit bool, fn func(store.Tx) error) error {
	if err := ctx.Err(); err != nil {
		return ended(err)
	}
	g := w.queue.enqueue(r, commit)
	late := time.NewTimer(impatience)
	defer late.Stop()
	for {
		select {
		case <-r.turn:
			r.run(g, fn)
		case <-g.done:
			if g.err != nil {
				return g.err
			}
			return r.err
		case <-late.C:
			if (w.server.down.Load() || w.head.hangs(hopeless)) && r.state.CompareAndSwap(queued, gone) {
				w.queue.withdraw(g, r)
				return errRecovering
			}
			late.Reset(impatience)
		case <-ctx.Done():
			if r.state.CompareAndSwap(queued, gone) {
				w.queue.withdraw(g, r)
				return ended(ctx.Err())
			}
			if !r.state.CompareAndSwap(ran, gone) {
				<-r.turn // the writer has just given the turn
				r.run(g, fn)
				continue
			}
			// The hook may still be writing into the events of fn.
			g.phase.Lock()
			g.phase.Unlock() //nolint:staticcheck // an empty section waits
			select {
			case <-g.done:
				if g.err != nil {
					return g.err
				}
				return r.err
			default:
				return fault.Outage(fault.ReasonStore, errUnconfirmed, ctx.Err())
			}
		}
	}
}

// write is the writer goroutine. It runs until the last request has left after Close.
func (w *writer) write() {
	defer close(w.stopped)
	for {
		select {
		case <-w.queue.wake:
		case <-w.server.life.Done():
			if w.head.session != nil {
				w.head.session.kill()
			}
			return
		}
		if g := w.queue.take(); g != nil {
			w.serve(g)
		}
	}
}

// serve attempts g until it is settled.
func (w *writer) serve(g *group) {
	defer close(g.done)
	bound := w.patience
	if w.server.down.Load() {
		bound = impatience
	}
	var until time.Time
	for {
		retry, err := w.observed(g, until)
		if err == nil {
			return
		}
		if _, ours := kindOf(err); !ours { // an error of the hook, or a final one
			g.err = err
			return
		}
		w.server.failed.Store(true)
		if !retry {
			g.err = answer(err)
			return
		}
		if k, _ := kindOf(err); k == down {
			w.server.lostContact(err)
		}
		if until.IsZero() {
			w.server.logger.Warn("a commit failed; retrying", "error", err)
			until = time.Now().Add(bound)
		}
		if time.Now().Add(pause).After(until) || !g.awaited() {
			g.err = answer(err)
			return
		}
		select {
		case <-time.After(pause):
		case <-w.server.life.Done():
		}
	}
}

// observed is attempt for the observer.
func (w *writer) observed(g *group, until time.Time) (retry bool, err error) {
	began, before := time.Now(), w.commits.Load()
	retry, err = w.attempt(g, until)
	if w.observer != nil && (err != nil || w.commits.Load() > before) {
		w.observer(store.Commit{Updates: len(g.requests), Took: time.Since(began), Err: err})
	}
	return retry, err
}

// attempt runs a group once. retry means that nothing of the group was or will be committed, and
// that another attempt may succeed.
func (w *writer) attempt(g *group, until time.Time) (retry bool, err error) {
	l, err := w.head.lock(w.queue, g)
	w.queue.shut(g)
	if err != nil {
		return w.abandon(err), err
	}
	t := &tx{base: l, over: make(map[string][]byte), check: func() error { return nil }}
	err = w.runClosures(g, t, l)
	switch {
	case t.broken != nil:
		return w.abandon(t.broken), t.broken
	case err != nil || !g.commit && !t.changed():
		w.head.release()
		return false, err
	case !g.raises && l.schema < raisedVersion && raises(t):
		g.raises = true
		w.head.release()
		return w.attempt(g, until)
	}
	return w.commit(l, t, until)
}

// abandon ends the transaction after a failure before the commit, and reports whether the group may
// be retried.
func (w *writer) abandon(err error) (retry bool) {
	k, ours := kindOf(err)
	if k == again || k == full {
		w.head.release()
	} else {
		w.head.forget()
	}
	return ours && k != broken && k != full
}

// runClosures gives each member its turn and then runs the hook.
func (w *writer) runClosures(g *group, t *tx, l *locked) error {
	g.phase.Lock()
	defer g.phase.Unlock()
	g.tx = t
	defer func() { t.check = over }()
	for _, r := range g.requests {
		if !r.state.CompareAndSwap(queued, running) && !r.state.CompareAndSwap(ran, running) {
			continue
		}
		m := t.mark()
		r.turn <- struct{}{}
		<-g.back
		if r.err != nil {
			t.undo(m)
		}
	}
	if t.broken == nil && t.changed() && w.hook != nil {
		l.hook = &wants{}
		if err := w.runHook(t); err != nil {
			return err
		}
		w.head.habits.note(l.hook)
	}
	return nil
}

func (w *writer) runHook(t *tx) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fault.Wrap(fault.Internal, fault.Internal.Error(), fmt.Errorf("the commit hook panicked: %v\n%s", p, debug.Stack()))
		}
	}()
	m := t.events[:len(t.events):len(t.events)] // ignore events that the hook enqueues
	if err := w.hook(t, m); err != nil {
		return fmt.Errorf("running the commit hook: %w", err)
	}
	return nil
}

// commit makes the writes of t durable, or finds out that they are not. retry has the meaning that
// it has for attempt.
func (w *writer) commit(l *locked, t *tx, until time.Time) (retry bool, err error) {
	defer w.head.busy()()
	id := make([]byte, 16)
	rand.Read(id) // never fails
	fence := l.fence + 1
	err = w.durably("commit", func() error { return l.send(t, fence, id) })
	if err == nil {
		w.head.cache.Apply(rowcache.Commit{Fence: fence, ID: string(id)}, t.over)
		w.committed(t)
		return false, nil
	}
	w.server.logger.Warn("committing failed", "error", err)
	w.server.failed.Store(true)
	k, ours := kindOf(err)
	if ours && k != lost && l.c.pg.TxStatus() == 'E' {
		return w.abandon(err), err // the server refused a statement and did not reach COMMIT
	}
	w.head.forget()
	if until.IsZero() {
		until = time.Now().Add(w.patience)
	}
	persisted, serr := w.head.settle(fence, id, until)
	switch {
	case serr != nil:
		return false, fault.Outage(fault.ReasonStore, errUnconfirmed, errors.Join(err, serr))
	case persisted:
		w.server.logger.Info("the commit that failed has persisted")
		w.committed(t)
		return false, nil
	}
	if !ours {
		return false, answer(err)
	}
	return k != broken && k != full, err // the commit has not persisted and never will
}

// durably runs one step that must be durable.
func (w *writer) durably(step string, do func() error) error {
	if w.fault == nil {
		return do()
	}
	return w.fault(step, do)
}

// committed updates the counters after a commit, before any caller gets its answer.
func (w *writer) committed(t *tx) {
	w.commits.Add(1)
	w.server.failed.Store(false)
	w.server.down.Store(false)
	for _, do := range t.after {
		do()
	}
	for _, value := range t.over {
		if value == nil {
			poke(w.server.deleted)
			return
		}
	}
}
