package bolt

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt/pages"
)

func TestConcurrentUpdatesShareCommits(t *testing.T) {
	s := open(t, filepath.Join(t.TempDir(), "db"), Options{})
	const writers, each = 64, 10
	var wg sync.WaitGroup
	for i := range writers {
		wg.Go(func() {
			for j := range each {
				if err := s.Update(context.Background(), func(tx store.Tx) error {
					return tx.Put(fmt.Appendf(nil, "%d/%d", i, j), nil)
				}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if n := len(contents(t, s)); n != writers*each {
		t.Errorf("%d values, want %d", n, writers*each)
	}
	if c := s.Commits(); c >= writers*each/2 {
		t.Errorf("%d commits for %d updates", c, writers*each)
	}
}

// faults fails the named steps, before or after they are done.
type faults struct{ before, after sync.Map }

func (f *faults) step(step string, do func() error) error {
	if _, fail := f.before.Load(step); fail {
		return errInjected
	}
	if err := do(); err != nil {
		return err
	}
	if _, fail := f.after.Load(step); fail {
		return errInjected
	}
	return nil
}

func TestAStoreThatCannotBeOpenedAgainComesBack(t *testing.T) {
	for _, persisted := range []bool{false, true} {
		var f faults
		s := open(t, filepath.Join(t.TempDir(), "db"), Options{fault: f.step})
		put(t, s, "a", nil)
		f.before.Store("settle", true)
		if persisted {
			f.after.Store("commit", true)
		} else {
			f.before.Store("commit", true)
		}
		write := func(tx store.Tx) error { return tx.Put([]byte("b"), nil) }
		for range 2 {
			wantKind(t, s.Update(t.Context(), write), fault.Unavailable)
			wantKind(t, s.View(t.Context(), func(store.Reader) error { return nil }), fault.Unavailable)
			wantKind(t, s.Ready(t.Context()), fault.Unavailable)
		}
		f.before.Clear()
		f.after.Clear()
		must(t, s.Ready(t.Context()))
		_, there := contents(t, s)["b"]
		if there != persisted {
			t.Errorf("persisted %v, and afterwards it is there: %v", persisted, there)
		}
		put(t, s, "c", nil)
		must(t, s.Close())
	}
}

// eventually waits for something that the store does by itself.
func eventually(t *testing.T, what string, happens func() bool) {
	t.Helper()
	poll := time.NewTicker(time.Millisecond)
	defer poll.Stop()
	deadline := time.After(time.Minute)
	for !happens() {
		select {
		case <-poll.C:
		case <-deadline:
			t.Fatalf("%s: not within a minute", what)
		}
	}
}

func look(s *Store) error {
	return s.View(context.Background(), func(r store.Reader) error { _, err := r.Get([]byte("key7")); return err })
}

// Every request looks up its key first, so in an outage no request reaches its Update.
func TestAStoreThatIsOnlyReadComesBackAfterAFailedCommit(t *testing.T) {
	var f faults
	var attempts atomic.Int64
	s := open(t, filepath.Join(t.TempDir(), "db"), Options{fault: func(step string, do func() error) error {
		if step == "settle" {
			attempts.Add(1)
		}
		return f.step(step, do)
	}})
	put(t, s, "a", nil)
	f.before.Store("settle", true)
	f.before.Store("commit", true)
	wantKind(t, s.Update(t.Context(), func(tx store.Tx) error { return tx.Put([]byte("b"), nil) }), fault.Unavailable)
	failed := attempts.Load()
	eventually(t, "the second attempt that nobody asked for", func() bool { return attempts.Load() >= failed+2 })
	wantKind(t, look(s), fault.Unavailable)
	f.before.Clear()
	eventually(t, "a View", func() bool { return look(s) == nil })
	if got := contents(t, s); len(got) != 1 {
		t.Errorf("the store has %v", got)
	}
	must(t, s.Ready(t.Context()))
}

func TestCloseOfABrokenStoreEnds(t *testing.T) {
	var f faults
	path := filepath.Join(t.TempDir(), "db")
	s := open(t, path, Options{fault: f.step})
	f.before.Store("settle", true)
	f.before.Store("commit", true)
	wantKind(t, s.Update(t.Context(), func(tx store.Tx) error { return tx.Put([]byte("a"), nil) }), fault.Unavailable)
	_ = s.Close()
	open(t, path, Options{})
}

// A reader of the snapshot before a commit of unknown outcome keeps its pages: the file is reopened
// only after the reader has ended.
func TestAViewOutlivesAFailedCommit(t *testing.T) {
	var f faults
	s := open(t, filepath.Join(t.TempDir(), "db"), Options{fault: f.step})
	want := marked("old", 100<<10)
	put(t, s, "a", want)
	f.after.Store("commit", true)
	updated := make(chan error, 1)
	must(t, s.View(t.Context(), func(r store.Reader) error {
		go func() {
			updated <- s.Update(context.Background(), func(tx store.Tx) error { return tx.Put([]byte("a"), []byte("new")) })
		}()
		// Wait until the writer has found the failure and refuses Views.
		for s.View(context.Background(), func(store.Reader) error { return nil }) == nil {
			runtime.Gosched()
		}
		got, err := r.Get([]byte("a"))
		if !bytes.Equal(got, want) {
			t.Error("the View reads something else")
		}
		return err
	}))
	must(t, <-updated)
	f.after.Clear()
	if got := contents(t, s)["a"]; got != "new" {
		t.Errorf("the commit that persisted left %d bytes", len(got))
	}
}

func TestAHookThatPanicsFailsItsGroup(t *testing.T) {
	var panics atomic.Bool
	s := open(t, filepath.Join(t.TempDir(), "db"), Options{Hook: func(store.Tx, []any) error {
		if panics.Load() {
			panic("boom")
		}
		return nil
	}})
	panics.Store(true)
	err := s.Update(t.Context(), func(tx store.Tx) error { return tx.Put([]byte("a"), nil) })
	wantKind(t, err, fault.Internal)
	panics.Store(false)
	put(t, s, "b", nil)
	if got := contents(t, s); len(got) != 1 {
		t.Errorf("the store has %v", got)
	}
}

// t.FailNow in a closure ends the goroutine; the store must go on.
func TestAClosureThatExitsIsUndone(t *testing.T) {
	s := open(t, filepath.Join(t.TempDir(), "db"), Options{})
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		_ = s.Update(context.Background(), func(tx store.Tx) error {
			_ = tx.Put([]byte("a"), nil)
			runtime.Goexit()
			return nil
		})
	}()
	<-gone
	put(t, s, "b", nil)
	if got := contents(t, s); len(got) != 1 {
		t.Errorf("the store has %v", got)
	}
}

// Overwriting or truncating the file under a running store causes errors, not a crash. When the
// file is restored, the store works again.
func TestAFileSpoiledUnderTheStoreIsAnError(t *testing.T) {
	spoil := map[string]func(path string, m pages.Meta) error{
		"meta pages": func(path string, m pages.Meta) error { return overwrite(path, make([]byte, 2*m.PageSize)) },
		"cut":        func(path string, m pages.Meta) error { return os.Truncate(path, 2*m.PageSize) },
	}
	for name, spoil := range spoil {
		for _, viewFirst := range []bool{true, false} {
			path := filepath.Join(t.TempDir(), "db")
			s := open(t, path, Options{pace: quick()})
			for i := range 20 {
				put(t, s, fmt.Sprint("key", i), make([]byte, 3<<10))
			}
			must(t, s.Scrubbed(t.Context()))
			whole, err := os.ReadFile(path)
			must(t, err)
			must(t, spoil(path, newest(t, whole)))
			get := func(r store.Reader) error { _, err := r.Get([]byte("key7")); return err }
			if viewFirst {
				wantKind(t, s.View(t.Context(), get), fault.Internal)
			}
			err = s.Update(t.Context(), func(tx store.Tx) error { return errors.Join(get(tx), tx.Put([]byte("x"), nil)) })
			if k := fault.Of(err); err == nil || k != fault.Internal && k != fault.Invalid {
				t.Errorf("%s: %v", name, err)
			}
			must(t, overwrite(path, whole))
			put(t, s, "x", nil)
			if n := len(contents(t, s)); n != 21 {
				t.Errorf("%s: %d values, want 21", name, n)
			}
			must(t, s.Close())
		}
	}
}

// overwrite replaces the beginning of the file in place.
func overwrite(path string, b []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	return errors.Join(err, f.Close())
}

// A View that finds damaged meta pages leaves bbolt's locks locked. Neither concurrent Views nor
// the store may hang on them.
func TestAStoreThatIsOnlyReadComesBackWhenItsFileIsPutRight(t *testing.T) {
	for _, askReady := range []bool{false, true} {
		path := filepath.Join(t.TempDir(), "db")
		s := open(t, path, Options{pace: quick()})
		for i := range 20 {
			put(t, s, fmt.Sprint("key", i), make([]byte, 3<<10))
		}
		must(t, s.Scrubbed(t.Context()))
		whole, err := os.ReadFile(path)
		must(t, err)
		must(t, s.View(t.Context(), func(store.Reader) error { // this View stays open all the while
			must(t, overwrite(path, make([]byte, 2*newest(t, whole).PageSize)))
			var views sync.WaitGroup
			for range 16 {
				views.Go(func() {
					if look(s) == nil {
						t.Error("a View read a spoiled file")
					}
				})
			}
			views.Wait()
			if !s.views.failed.Load() {
				t.Error("Ready would call the store healthy")
			}
			return nil
		}))
		if askReady {
			if err := s.Ready(t.Context()); err == nil {
				t.Error("Ready calls a store healthy that answers no View")
			}
		}
		must(t, overwrite(path, whole))
		eventually(t, "a View", func() bool { return look(s) == nil })
		must(t, s.Ready(t.Context()))
		if n := len(contents(t, s)); n != 20 {
			t.Errorf("%d values, want 20", n)
		}
		must(t, s.Close())
		sound(t, path)
	}
}

// A scrub may also be the first to find the damage, and it holds bbolt's writer lock.
func TestAScrubOfASpoiledFileDoesNotStopTheWriter(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	s := open(t, path, Options{pace: quick()})
	put(t, s, "gone", marked("gone", 100<<10))
	must(t, s.Scrubbed(t.Context()))
	var whole []byte
	must(t, s.View(t.Context(), func(store.Reader) error { // holds back the scrub
		remove(t, s, "gone")
		var err error
		whole, err = os.ReadFile(path)
		must(t, err)
		return overwrite(path, make([]byte, 2*newest(t, whole).PageSize))
	}))
	eventually(t, "the scrub finds out", func() bool { return !s.views.usable() })
	must(t, overwrite(path, whole))
	eventually(t, "a View", func() bool { return look(s) == nil })
	must(t, s.Scrubbed(t.Context()))
	if found(t, path, "gone") {
		t.Error("the value is still in the folder")
	}
	put(t, s, "a", nil)
}

// TestRandomOperationsAgreeWithAMap drives the store and a map with the same random operations:
// closures that succeed and fail, commits that fail with and without persisting, scrubs and
// reopenings.
func TestRandomOperationsAgreeWithAMap(t *testing.T) {
	for seed := range uint64(3) {
		t.Run(fmt.Sprint("seed", seed), func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, 0))
			path := filepath.Join(t.TempDir(), "db")
			var f faults
			o := Options{fault: f.step, pace: quick()}
			s := open(t, path, o)
			model := map[string]string{}
			for range 150 {
				f.before.Clear()
				f.after.Clear()
				next := maps.Clone(model)
				wantFail := false
				switch random.IntN(12) {
				case 0:
					f.before.Store("commit", true)
					wantFail = true
				case 1:
					f.after.Store("commit", true)
				case 2:
					must(t, s.Close())
					s = open(t, path, o)
				}
				fails := random.IntN(5) == 0
				err := s.Update(t.Context(), func(tx store.Tx) error {
					for range 1 + random.IntN(10) {
						key := fmt.Sprintf("%03d", random.IntN(200))
						if random.IntN(3) == 0 {
							delete(next, key)
							if err := tx.Delete([]byte(key)); err != nil {
								return err
							}
							continue
						}
						value := string(marked(key, random.IntN(1<<random.IntN(15))))
						next[key] = value
						if err := tx.Put([]byte(key), []byte(value)); err != nil {
							return err
						}
					}
					if fails {
						return errInjected
					}
					return tx.Put([]byte("always"), nil)
				})
				next["always"] = ""
				switch {
				case fails || wantFail:
					if err == nil {
						t.Fatal("no error")
					}
				case err != nil:
					t.Fatal(err)
				default:
					model = next
				}
				if got := contents(t, s); !maps.Equal(got, model) {
					t.Fatalf("the store has %d values, the map %d, or they differ", len(got), len(model))
				}
			}
			must(t, s.Close())
			sound(t, path)
		})
	}
}
