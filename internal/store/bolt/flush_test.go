package bolt

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/store"
)

// The disk is waited for once a commit: a record is written and synced, and nothing else.
func TestACommitWaitsForTheDiskOnce(t *testing.T) {
	var steps []string // of the writer, which has ended each before its commit is acknowledged
	s := openAhead(t, filepath.Join(t.TempDir(), "db"), Options{fault: func(step string, do func() error) error {
		steps = append(steps, step)
		return do()
	}})
	never(t, s)
	put(t, s, "first", make([]byte, 1024)) // the file and the log grow
	var first uint64
	must(t, s.queue.turn(t.Context(), func() { first, steps = s.writer.ahead.state.Applied, nil }))
	const commits = 20
	for i := range commits {
		put(t, s, fmt.Sprint(i), make([]byte, 1024))
	}
	flush(t, s)
	if want := append(slices.Repeat([]string{"commit"}, commits), "flush"); !slices.Equal(steps, want) {
		t.Errorf("%d commits took the steps %q", commits, steps)
	}
	must(t, s.queue.turn(t.Context(), func() {
		if n := s.writer.ahead.state.Applied - first; n != commits {
			t.Errorf("%d of %d commits were written ahead", n, commits)
		}
	}))
}

// A flush that fails is settled by the log, and nobody notices.
func TestAFailedFlushLosesNothing(t *testing.T) {
	for _, after := range []bool{false, true} {
		var f faults
		path := filepath.Join(t.TempDir(), "db")
		s := openAhead(t, path, Options{fault: f.step})
		want := make(map[string]string)
		for i := range 20 {
			key := fmt.Sprint("key", i)
			put(t, s, key, []byte(key))
			want[key] = key
			if i == 10 {
				if after {
					f.after.Store("flush", true)
				} else {
					f.before.Store("flush", true)
				}
				flush(t, s)
				f.after.Clear()
				f.before.Clear()
			}
			if got := contents(t, s); !maps.Equal(got, want) {
				t.Fatalf("after %d: %v", i, got)
			}
		}
		killed := open(t, crash(t, path), Options{})
		if got := contents(t, killed); !maps.Equal(got, want) {
			t.Errorf("after a kill: %v", got)
		}
		must(t, s.Close())
		sound(t, path)
	}
}

// After a failed flush the store goes on writing ahead.
func TestALogBeginsAgainAfterAFailedFlush(t *testing.T) {
	var f faults
	s := openAhead(t, filepath.Join(t.TempDir(), "db"), Options{fault: f.step})
	never(t, s)
	put(t, s, "a", nil)
	f.before.Store("flush", true)
	flush(t, s)
	f.before.Clear()
	put(t, s, "b", nil)
	put(t, s, "c", nil)
	must(t, s.between(t.Context(), func() {
		if s.writer.ahead.open == nil {
			t.Error("commits are not written ahead any more")
		}
	}))
}

// A View that holds a scrub back does not make every commit flush.
func TestAScrubThatWaitsDoesNotFlush(t *testing.T) {
	flushes := 0
	s := openAhead(t, filepath.Join(t.TempDir(), "db"), Options{
		pace: pace{pause: 1, patience: time.Hour, hold: time.Second},
		fault: func(step string, do func() error) error {
			if step == "flush" {
				flushes++
			}
			return do()
		},
	})
	never(t, s)
	must(t, s.Scrubbed(t.Context()))
	put(t, s, "a", nil)
	must(t, s.View(t.Context(), func(store.Reader) error {
		remove(t, s, "a")
		for i := range 50 {
			put(t, s, fmt.Sprint(i), nil)
		}
		return s.between(t.Context(), func() {
			if flushes > 1 {
				t.Errorf("%d flushes for 50 commits", flushes)
			}
		})
	}))
	must(t, s.Scrubbed(t.Context()))
}

// What groups undo still makes the flush larger, so it counts.
func TestWhatWasUndoneCountsForTheFlush(t *testing.T) {
	s := openAhead(t, filepath.Join(t.TempDir(), "db"), Options{})
	never(t, s)
	put(t, s, "a", nil)
	err := s.Update(t.Context(), func(tx store.Tx) error {
		for i := range 2000 {
			must(t, tx.Put(fmt.Append(nil, i), nil))
		}
		return errInjected
	})
	if !errors.Is(err, errInjected) {
		t.Fatal(err)
	}
	must(t, s.between(t.Context(), func() {
		if growth := s.writer.ahead.open.growth; growth < 2000*int64(os.Getpagesize()) {
			t.Errorf("%d bytes", growth)
		}
	}))
}

// A flush that few wait for may be long, so that it is rare. One that many wait for comes sooner.
// However many there are, the first group after a flush is written ahead.
func TestManyCallersWaitForShortFlushes(t *testing.T) {
	for _, c := range []struct {
		pending, callers int
		flushed          bool
	}{{1000, 1, false}, {1000, 64, true}, {0, 1000, false}} {
		s := openAhead(t, filepath.Join(t.TempDir(), "db"), Options{})
		never(t, s)
		must(t, s.Update(t.Context(), func(tx store.Tx) error {
			for i := range c.pending {
				must(t, tx.Put(fmt.Append(nil, i), nil))
			}
			return nil
		}))
		var group sync.WaitGroup
		must(t, s.between(t.Context(), func() {
			for i := range c.callers {
				group.Go(func() {
					if err := s.Update(t.Context(), func(tx store.Tx) error { return tx.Put(fmt.Append(nil, "caller ", i), nil) }); err != nil {
						t.Error(err)
					}
				})
			}
			for s.queue.queued() < c.callers {
				runtime.Gosched()
			}
		}))
		group.Wait()
		must(t, s.between(t.Context(), func() {
			if open := s.writer.ahead.open; (open == nil) != c.flushed {
				t.Errorf("%+v: flushed %v", c, open == nil)
			}
		}))
	}
}
