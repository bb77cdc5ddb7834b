package bolt

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	bbolt "go.etcd.io/bbolt"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// quick lets tests scrub without a second's pause between two scrubs.
func quick() pace { return pace{pause: 1, patience: time.Millisecond, hold: 5 * time.Millisecond} }

// marked returns a value of size bytes in which every block of 64 bytes contains name.
func marked(name string, size int) []byte {
	return bytes.Repeat(fmt.Appendf(nil, "%-64s", "<"+name+">"), size/64+1)[:size]
}

// found reports whether path, or any file beside it, contains bytes of the marked value.
func found(t *testing.T, path, name string) bool {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(filepath.Dir(path), "*"))
	must(t, err)
	for _, f := range files {
		b, err := os.ReadFile(f)
		must(t, err)
		if bytes.Contains(b, []byte("<"+name+">")) {
			return true
		}
	}
	return false
}

func remove(t *testing.T, s *Store, keys ...string) {
	t.Helper()
	must(t, s.Update(t.Context(), func(tx store.Tx) error {
		var errs []error
		for _, k := range keys {
			errs = append(errs, tx.Delete([]byte(k)))
		}
		return errors.Join(errs...)
	}))
}

// sound checks the closed database with bbolt's own tools.
func sound(t *testing.T, path string) {
	t.Helper()
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{ReadOnly: true, PreLoadFreelist: true})
	must(t, err)
	defer db.Close()
	must(t, db.View(func(tx *bbolt.Tx) error {
		for err := range tx.Check() {
			t.Error(err)
		}
		return nil
	}))
}

func TestDeletedIsGone(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	s := open(t, path, Options{pace: quick()})
	live := map[string]string{}
	for i := range 30 {
		key := fmt.Sprintf("live%02d", i)
		live[key] = string(marked(key, 500*i))
		put(t, s, key, []byte(live[key]))
	}
	sizes := []int{100, 3 << 10, 100 << 10}
	for round := range 3 {
		var names []string
		for _, size := range sizes {
			name := fmt.Sprintf("live%02d/%d-%d", 7*round, round, size) // between live rows
			put(t, s, name, marked(name, size))
			put(t, s, "live00", nil) // more commits, which copy pages
			names = append(names, name)
			if !found(t, path, name) {
				t.Fatal("the test cannot find what it looks for")
			}
		}
		put(t, s, "live00", []byte(live["live00"]))
		remove(t, s, names...)
		must(t, s.Scrubbed(t.Context()))
		for _, name := range names {
			if found(t, path, name) {
				t.Errorf("%s is still in the folder", name)
			}
		}
	}
	check := func(s *Store) {
		t.Helper()
		got := contents(t, s)
		if len(got) != len(live) {
			t.Errorf("%d values, want %d", len(got), len(live))
		}
		for k, v := range live {
			if got[k] != v {
				t.Errorf("%s changed", k)
			}
		}
	}
	check(s)
	must(t, s.Close())
	sound(t, path)
	check(open(t, path, Options{ReadOnly: true}))
}

// With the default pace a delete is wiped too, and at once when the writer is idle.
func TestDeletedIsGoneWithinFiveSeconds(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	s := open(t, path, Options{})
	if p := s.scrubber.pace; p.pause+p.patience+p.hold > 5*time.Second {
		t.Errorf("the default pace %+v is too slow", p)
	}
	for _, name := range []string{"one", "two"} {
		put(t, s, name, marked(name, 3<<10))
		remove(t, s, name)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // a busy machine is slow
		defer cancel()
		must(t, s.Scrubbed(ctx))
		if found(t, path, name) {
			t.Errorf("%s is still in the folder", name)
		}
	}
}

func TestOnlyDeletesAreWiped(t *testing.T) {
	var scrubs atomic.Int64
	s := open(t, filepath.Join(t.TempDir(), "db"), Options{pace: quick(), fault: func(step string, do func() error) error {
		if step == "scrub" {
			scrubs.Add(1)
		}
		return do()
	}})
	must(t, s.Scrubbed(t.Context()))
	before := scrubs.Load()
	for range 10 {
		put(t, s, "key", make([]byte, 5000))
	}
	remove(t, s, "absent")
	err := s.Update(t.Context(), func(tx store.Tx) error { return errors.Join(tx.Delete([]byte("key")), errInjected) })
	if !errors.Is(err, errInjected) {
		t.Fatal(err)
	}
	must(t, s.Scrubbed(t.Context()))
	if n := scrubs.Load() - before; n != 0 {
		t.Errorf("%d scrubs without a delete", n)
	}
	remove(t, s, "key")
	must(t, s.Scrubbed(t.Context()))
	if n := scrubs.Load() - before; n != 1 {
		t.Errorf("%d scrubs for one delete", n)
	}
}

func TestAnOpenViewKeepsWhatItReads(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	s := open(t, path, Options{pace: quick()})
	want := marked("held", 100<<10)
	put(t, s, "held", want)
	must(t, s.View(t.Context(), func(r store.Reader) error {
		remove(t, s, "held")
		// Long enough for the scrub to lose patience, hold back groups and give up several times.
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		if err := s.Scrubbed(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("scrubbed under an open View: %v", err)
		}
		put(t, s, "other", make([]byte, 100<<10)) // writes continue
		got, err := r.Get([]byte("held"))
		if !bytes.Equal(got, want) {
			t.Error("the View reads something else")
		}
		return err
	}))
	must(t, s.Scrubbed(t.Context()))
	if found(t, path, "held") {
		t.Error("the value is still in the folder")
	}
}

// Views that overlap, each open for a moment, must not starve the scrub.
func TestOverlappingViewsDoNotStarveTheScrub(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	s := open(t, path, Options{pace: pace{pause: 1, patience: time.Millisecond, hold: viewLimit}})
	put(t, s, "gone", marked("gone", 3<<10))
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan struct{})
	for range 4 {
		go func() {
			defer func() { ended <- struct{}{} }()
			for ctx.Err() == nil {
				_ = s.View(ctx, func(r store.Reader) error { _, err := r.Get([]byte("a")); return err })
				_ = s.Update(ctx, func(tx store.Tx) error { return tx.Put([]byte("a"), nil) })
			}
		}()
	}
	remove(t, s, "gone")
	must(t, s.Scrubbed(t.Context()))
	if found(t, path, "gone") {
		t.Error("the value is still in the folder")
	}
	stop()
	for range 4 {
		<-ended
	}
}

func TestTheNextStartWipesWhatTheLastDidNot(t *testing.T) {
	for _, broken := range []string{"wipe", "scrub"} {
		path := filepath.Join(t.TempDir(), "db")
		var fail atomic.Bool
		s := open(t, path, Options{pace: quick(), fault: func(step string, do func() error) error {
			if fail.Load() && step == broken {
				return errInjected
			}
			return do()
		}})
		must(t, s.Scrubbed(t.Context()))
		put(t, s, "gone", marked("gone", 100<<10))
		fail.Store(true)
		remove(t, s, "gone")
		if err := s.Close(); !errors.Is(err, errInjected) {
			t.Fatalf("Close hides that deleted data remains: %v", err)
		}
		if broken == "wipe" && !found(t, path, "gone") {
			t.Fatal("the test shows nothing")
		}
		s = open(t, path, Options{pace: quick()})
		must(t, s.Scrubbed(t.Context()))
		if found(t, path, "gone") {
			t.Errorf("%s: the value is still in the folder", broken)
		}
	}
}

func TestAFailedScrubIsRepeatedInFull(t *testing.T) {
	var failing atomic.Bool
	var wiped atomic.Int64
	firstDone := make(chan int64, 100)
	s := open(t, filepath.Join(t.TempDir(), "db"), Options{pace: quick(), fault: func(step string, do func() error) error {
		switch step {
		case "wipe":
			wiped.Add(1)
		case "scrub":
			firstDone <- wiped.Swap(0)
			if failing.Swap(false) {
				return errInjected // the zeroes are in the page cache, but perhaps not on disk
			}
		}
		return do()
	}})
	must(t, s.Scrubbed(t.Context()))
	put(t, s, "gone", marked("gone", 100<<10))
	for len(firstDone) > 0 {
		<-firstDone
	}
	failing.Store(true)
	remove(t, s, "gone")
	must(t, s.Scrubbed(t.Context()))
	first, second := <-firstDone, <-firstDone
	if first < 25 || second != first {
		t.Errorf("wiped %d pages, then %d after the sync failed", first, second)
	}
}

// Bytes that a failed commit left after the last page in use are wiped too.
func TestTheTailIsWiped(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	whole := fill(t, path, 3, 100)
	m := newest(t, whole)
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	must(t, err)
	_, err = f.WriteAt(marked("tail", 3<<10), int64(m.High+5)*m.PageSize)
	must(t, errors.Join(err, f.Close()))
	s := open(t, path, Options{})
	must(t, s.Scrubbed(t.Context()))
	if found(t, path, "tail") {
		t.Error("it is still in the folder")
	}
	if n := len(contents(t, s)); n != 3 {
		t.Errorf("%d values remain", n)
	}
}

// Bytes that a failed commit left are wiped without another Delete.
func TestWhatAFailedCommitLeavesIsWiped(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	var fail, failed atomic.Bool
	looked := make(chan struct{})
	s := open(t, path, Options{pace: quick(), fault: func(step string, do func() error) error {
		if step == "wipe" && failed.Load() {
			<-looked
		}
		if step != "commit" || !fail.Swap(false) {
			return do()
		}
		failed.Store(true)
		// Simulate a crash after the pages of this commit were written, but not its meta page.
		f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
		if err != nil {
			return err
		}
		_, err = f.Write(marked("left", 3<<10))
		return errors.Join(err, f.Close(), errInjected)
	}})
	put(t, s, "a", nil)
	must(t, s.Scrubbed(t.Context()))
	fail.Store(true)
	if err := s.Update(t.Context(), func(tx store.Tx) error { return tx.Put([]byte("b"), nil) }); !errors.Is(err, errInjected) {
		t.Fatal(err)
	}
	there := found(t, path, "left")
	close(looked)
	if !there {
		t.Fatal("the test shows nothing")
	}
	must(t, s.Scrubbed(t.Context()))
	if found(t, path, "left") {
		t.Error("it is still in the folder")
	}
}

// A Delete that persisted is wiped, even if its caller was told that the outcome is unknown.
func TestADeleteOfUnknownOutcomeIsWiped(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	var f faults
	s := open(t, path, Options{pace: quick(), fault: f.step})
	put(t, s, "gone", marked("gone", 512<<10))
	must(t, s.Scrubbed(t.Context()))
	f.after.Store("commit", true)
	f.before.Store("settle", true)
	wantKind(t, s.Update(t.Context(), func(tx store.Tx) error { return tx.Delete([]byte("gone")) }), fault.Unavailable)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if s.Scrubbed(ctx) == nil || !found(t, path, "gone") {
		t.Error("nothing is left to be wiped, or Scrubbed says so")
	}
	f.before.Clear()
	f.after.Clear()
	ctx, cancel = context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	must(t, s.Scrubbed(ctx))
	if found(t, path, "gone") {
		t.Error("the value is still in the folder")
	}
	if got := contents(t, s); len(got) != 0 {
		t.Errorf("%d values remain", len(got))
	}
}

// Copies of the file from the middle of a scrub show what a crash there leaves.
func TestACrashInTheMiddleOfAScrubIsHarmless(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	crashes := t.TempDir()
	var n atomic.Int64
	var on atomic.Bool
	s := open(t, path, Options{pace: quick(), fault: func(step string, do func() error) error {
		if on.Load() && (step == "wipe" || step == "scrub") {
			b, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			if err := os.WriteFile(filepath.Join(crashes, fmt.Sprint(n.Add(1))), b[:min(len(b), 1<<20)], 0o600); err != nil {
				return err
			}
		}
		return do()
	}})
	for i := range 10 {
		put(t, s, fmt.Sprintf("live%d", i), marked("live", 3<<10))
		put(t, s, fmt.Sprintf("gone%d", i), marked("gone", 3<<10))
	}
	must(t, s.Scrubbed(t.Context()))
	on.Store(true)
	for i := range 5 {
		remove(t, s, fmt.Sprintf("gone%d", i), fmt.Sprintf("gone%d", i+5))
		must(t, s.Scrubbed(t.Context()))
	}
	on.Store(false)
	if n.Load() < 10 {
		t.Fatalf("%d crashes show nothing", n.Load())
	}
	for i := range n.Load() {
		dir := t.TempDir()
		image := filepath.Join(dir, "db")
		must(t, os.Rename(filepath.Join(crashes, fmt.Sprint(i+1)), image))
		s := open(t, image, Options{pace: quick()})
		live := 0
		for k, v := range contents(t, s) {
			if k[:4] == "live" {
				live++
				if v != string(marked("live", 3<<10)) {
					t.Errorf("crash %d: %s changed", i, k)
				}
			}
		}
		if live != 10 {
			t.Errorf("crash %d: %d live values", i, live)
		}
		must(t, s.Close())
		sound(t, image)
	}
}
