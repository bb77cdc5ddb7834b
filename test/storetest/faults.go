package storetest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

func endedContext(t *testing.T, open Open) {
	s := start(t, open, Options{})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err := s.Update(ctx, func(store.Tx) error { t.Error("the closure ran"); return nil })
	wantKind(t, err, fault.Unavailable)
	if !errors.Is(err, context.Canceled) {
		t.Errorf("%v does not wrap the context's error", err)
	}
	err = s.View(ctx, func(store.Reader) error { t.Error("the closure ran"); return nil })
	wantKind(t, err, fault.Unavailable)
}

// gate blocks commits once it is shut.
type gate struct {
	shut    atomic.Bool
	entered chan struct{}
	goOn    chan struct{}
}

func newGate() *gate {
	return &gate{entered: make(chan struct{}, 1), goOn: make(chan struct{})}
}

func (g *gate) commit(do func() error) error {
	if g.shut.CompareAndSwap(true, false) {
		g.entered <- struct{}{}
		<-g.goOn
	}
	return do()
}

// awaited is a context that reports when somebody begins to wait for its end.
type awaited struct {
	context.Context
	cancel  context.CancelFunc
	waiting chan struct{}
	once    sync.Once
}

func newAwaited(parent context.Context) *awaited {
	ctx, cancel := context.WithCancel(parent)
	return &awaited{Context: ctx, cancel: cancel, waiting: make(chan struct{})}
}

func (a *awaited) Done() <-chan struct{} {
	a.once.Do(func() { close(a.waiting) })
	return a.Context.Done()
}

func withdrawn(t *testing.T, open Open) {
	g := newGate()
	s := start(t, open, Options{Commit: g.commit})
	g.shut.Store(true)
	first := make(chan error)
	go func() {
		first <- s.Update(context.Background(), func(tx store.Tx) error { return tx.Put([]byte("first"), nil) })
	}()
	<-g.entered

	ctx := newAwaited(t.Context())
	second := make(chan error)
	go func() {
		second <- s.Update(ctx, func(tx store.Tx) error { return tx.Put([]byte("second"), nil) })
	}()
	<-ctx.waiting
	ctx.cancel()
	err := <-second
	wantKind(t, err, fault.Unavailable)
	if !errors.Is(err, context.Canceled) {
		t.Errorf("%v does not wrap the context's error", err)
	}
	close(g.goOn)
	must(t, <-first)
	put(t, s, "third=")
	wantAll(t, s, "first=", "third=")
}

func hangingCommit(t *testing.T, open Open) {
	var skew atomic.Int64
	g := newGate()
	s := start(t, open, Options{Commit: g.commit, Now: func() time.Time { return time.Now().Add(time.Duration(skew.Load())) }})
	put(t, s, "a=1")
	g.shut.Store(true)
	ctx, cancel := context.WithCancel(t.Context())
	updated := make(chan error)
	go func() { updated <- s.Update(ctx, func(tx store.Tx) error { return tx.Put([]byte("b"), nil) }) }()
	<-g.entered
	must(t, s.Ready(t.Context())) // a commit in progress is no fault
	skew.Store(int64(time.Second))
	wantKind(t, s.Ready(t.Context()), fault.Unavailable)
	wantAll(t, s, "a=1") // Views still answer
	cancel()
	wantKind(t, <-updated, fault.Unavailable)
	close(g.goOn)
	put(t, s, "c=1")
	must(t, s.Ready(t.Context()))
	wantAll(t, s, "a=1", "b=", "c=1")
}

// outlastsHook tests that events belong to the caller again once Update returns, even if its
// context has ended. Until then the hook may write to them.
func outlastsHook(t *testing.T, open Open) {
	type event struct{ sequence int }
	ctx, cancel := context.WithCancel(t.Context())
	returned := make(chan struct{})
	s := start(t, open, Options{Hook: func(_ store.Tx, events []any) error {
		cancel()
		select {
		case <-returned:
			t.Error("Update returned while the hook was running")
		case <-time.After(20 * time.Millisecond): // time for it to happen
		}
		events[0].(*event).sequence = 1
		return nil
	}})
	var e event
	_ = s.Update(ctx, func(tx store.Tx) error { tx.Enqueue(&e); return nil }) // either outcome is right
	close(returned)
	if e.sequence != 1 {
		t.Error("the hook had not written into the event")
	}
}

func viewLimit(t *testing.T, open Open) {
	var skew atomic.Int64
	base := time.Now()
	s := start(t, open, Options{Now: func() time.Time { return base.Add(time.Duration(skew.Load())) }})
	put(t, s, "a=1", "b=1")
	must(t, s.View(t.Context(), func(r store.Reader) error {
		skew.Store(int64(1999 * time.Millisecond))
		_, err := r.Get([]byte("a"))
		return err
	}))
	visits := 0
	err := s.View(t.Context(), func(r store.Reader) error {
		return r.Scan(store.Range{}, func(_, _ []byte) bool {
			visits++
			skew.Add(int64(3 * time.Second))
			return true
		})
	})
	wantKind(t, err, fault.Unavailable)
	if visits != 1 {
		t.Errorf("%d visits, want 1", visits)
	}
	err = s.View(t.Context(), func(r store.Reader) error {
		skew.Add(int64(3 * time.Second))
		_, err := r.Get([]byte("a"))
		return err
	})
	wantKind(t, err, fault.Unavailable)
}

func viewContext(t *testing.T, open Open) {
	s := start(t, open, Options{})
	put(t, s, "a=1", "b=1")
	ctx, cancel := context.WithCancel(t.Context())
	visits := 0
	err := s.View(ctx, func(r store.Reader) error {
		return r.Scan(store.Range{}, func(_, _ []byte) bool { visits++; cancel(); return true })
	})
	wantKind(t, err, fault.Unavailable)
	if visits != 1 || !errors.Is(err, context.Canceled) {
		t.Errorf("%d visits, %v", visits, err)
	}
}

// failing makes selected commits fail, before or after the real one.
type failing struct {
	before, after atomic.Bool
	commits       atomic.Int64
}

var errInjected = errors.New("injected")

func (f *failing) commit(do func() error) error {
	if f.before.Load() {
		return errInjected
	}
	if err := do(); err != nil {
		return err
	}
	f.commits.Add(1)
	if f.after.Load() {
		return errInjected
	}
	return nil
}

// counting runs an Update whose effect shows how often it was applied.
func counting(s store.Store) error {
	return s.Update(context.Background(), func(tx store.Tx) error { _, err := add(tx, "n", 1); return err })
}

func wantCount(t *testing.T, s store.Store, want uint64) {
	t.Helper()
	must(t, s.Update(t.Context(), func(tx store.Tx) error {
		n, err := add(tx, "n", 0)
		if n != want {
			t.Errorf("the update was applied %d times, want %d", n, want)
		}
		return err
	}))
}

func commitNotPersisted(t *testing.T, open Open) {
	var f failing
	s := start(t, open, Options{Commit: f.commit})
	put(t, s, "a=1")
	f.before.Store(true)
	together(t, 4, func(int) error {
		err := counting(s)
		if fault.Of(err) != fault.Unavailable || !errors.Is(err, errInjected) {
			return errors.Join(errors.New("not the failure of the commit"), err)
		}
		return nil
	})
	wantAll(t, s, "a=1")
	f.before.Store(false)
	must(t, counting(s))
	wantCount(t, s, 1)
}

func commitPersisted(t *testing.T, open Open) {
	var f failing
	s := start(t, open, Options{Commit: f.commit})
	f.after.Store(true)
	together(t, 4, func(int) error { return counting(s) })
	f.after.Store(false)
	wantCount(t, s, 4)
}

// onCommitOfOthers tests that a failed closure is not told about the commit of the others in its
// group.
func onCommitOfOthers(t *testing.T, open Open) {
	g := newGate()
	s := start(t, open, Options{Commit: g.commit})
	g.shut.Store(true)
	first := make(chan error)
	go func() {
		first <- s.Update(context.Background(), func(tx store.Tx) error { return tx.Put([]byte("first"), nil) })
	}()
	<-g.entered
	var heard [2]atomic.Bool
	var done [2]chan error
	for i := range heard { // both wait for the hanging commit
		ctx := newAwaited(t.Context())
		defer ctx.cancel()
		done[i] = make(chan error, 1)
		go func() {
			done[i] <- s.Update(ctx, func(tx store.Tx) error {
				tx.OnCommit(func() { heard[i].Store(true) })
				err := tx.Put(fmt.Appendf(nil, "%d", i), nil)
				if i == 0 {
					return errors.Join(err, errInjected)
				}
				return err
			})
		}()
		<-ctx.waiting
	}
	close(g.goOn)
	must(t, <-first)
	if err := <-done[0]; !errors.Is(err, errInjected) {
		t.Error(err)
	}
	must(t, <-done[1])
	if heard[0].Load() || !heard[1].Load() {
		t.Error("the one that failed heard:", heard[0].Load(), "the other:", heard[1].Load())
	}
}

// onCommit tests that closures and hooks are told about their own commit, once, before any caller
// gets an answer, and about no other commit.
func onCommit(t *testing.T, open Open) {
	var f failing
	var fail bool // makes the hook fail
	var heard []string
	hear := func(tx store.Tx, what string) {
		heard = append(heard, what+" too early") // until it is
		tx.OnCommit(func() { heard = append(heard, what) })
	}
	s := start(t, open, Options{Commit: f.commit, Hook: func(tx store.Tx, _ []any) error {
		hear(tx, "hook")
		if fail {
			return errInjected
		}
		return nil
	}})
	update := func(what string, err error) error {
		heard = nil
		return s.Update(t.Context(), func(tx store.Tx) error {
			heard = nil
			hear(tx, what)
			return errors.Join(tx.Put([]byte("key"), []byte(what)), err)
		})
	}
	want := func(when string, want ...string) {
		t.Helper()
		if !slices.Equal(heard, want) {
			t.Errorf("%s: it hears %q, want %q", when, heard, want)
		}
	}
	must(t, update("a", nil))
	want("done", "a too early", "hook too early", "a", "hook")
	if err := update("b", errInjected); !errors.Is(err, errInjected) {
		t.Error(err)
	}
	want("the closure fails", "b too early")
	fail = true
	if err := update("c", nil); !errors.Is(err, errInjected) {
		t.Error(err)
	}
	want("the hook fails", "c too early", "hook too early")
	fail = false
	f.before.Store(true)
	wantKind(t, update("d", nil), fault.Unavailable)
	want("the commit fails", "d too early", "hook too early")
	f.before.Store(false)
	heard = nil
	must(t, s.Ready(t.Context())) // another commit
	want("after the commit has failed")
	f.after.Store(true)
	must(t, update("e", nil))
	want("the commit that failed has persisted", "e too early", "hook too early", "e", "hook")
}

func recovers(t *testing.T, open Open) {
	var f failing
	s := start(t, open, Options{Commit: f.commit})
	must(t, s.Ready(t.Context()))
	f.before.Store(true)
	wantKind(t, counting(s), fault.Unavailable)
	wantKind(t, s.Ready(t.Context()), fault.Unavailable)
	f.before.Store(false)
	before := f.commits.Load()
	must(t, s.Ready(t.Context()))
	if f.commits.Load() != before+1 {
		t.Error("Ready did not try a commit after a failed one")
	}
	must(t, s.Ready(t.Context()))
	if f.commits.Load() != before+1 {
		t.Error("Ready tried another commit after a good one")
	}
	must(t, counting(s))
	wantCount(t, s, 1)
}
