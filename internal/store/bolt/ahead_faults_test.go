package bolt

import (
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

// When the commit that ends the log fails, Close scrubs nothing: after a power loss the meta page before it may
// count, with pages that bbolt takes for free.
func TestCloseScrubsNothingAfterACommitThatFailed(t *testing.T) {
	var ending, failed atomic.Bool
	s := openAhead(t, filepath.Join(t.TempDir(), "db"), Options{pace: quick(), fault: func(step string, do func() error) error {
		if failed.Load() && (step == "wipe" || step == "scrub") {
			t.Errorf("%s after the failure", step)
		}
		err := do()
		if ending.Load() && step == "note log" {
			failed.Store(true)
			err = errors.Join(err, errInjected)
		}
		return err
	}})
	never(t, s)
	put(t, s, "a", nil)
	must(t, s.Scrubbed(t.Context()))
	ending.Store(true)
	if err := s.Close(); !errors.Is(err, errInjected) {
		t.Error(err)
	}
	if !failed.Load() {
		t.Error("the test shows nothing")
	}
}

// The log of another database, and one of a newer release, stay as they are.
func TestALogThatIsNotUnderstoodIsKept(t *testing.T) {
	made := func(key string) string {
		path := filepath.Join(t.TempDir(), "db")
		s := openAhead(t, path, Options{})
		never(t, s)
		put(t, s, key, nil)
		return crash(t, path)
	}
	for name, spoil := range map[string]func(path string){
		"another database's": func(path string) { must(t, os.Rename(made("b")+walSuffix, path+walSuffix)) },
		"a newer row": func(path string) {
			db, err := bbolt.Open(path, 0o600, nil)
			must(t, err)
			must(t, db.Update(func(tx *bbolt.Tx) error {
				b := tx.Bucket([]byte(bucketCommit))
				return b.Put([]byte(keyAhead), append(b.Get([]byte(keyAhead)), 1))
			}))
			must(t, db.Close())
		},
		"a newer version": func(path string) {
			b, err := os.ReadFile(path + walSuffix)
			must(t, err)
			b[7]++
			must(t, os.WriteFile(path+walSuffix, b, 0o600))
		},
	} {
		path := made("a")
		spoil(path)
		before, err := os.ReadFile(path + walSuffix)
		must(t, err)
		for _, readOnly := range []bool{true, false} {
			if s, err := Open(path, Options{ReadOnly: readOnly}); err == nil {
				t.Errorf("%s: opened", name)
				_ = s.Close()
			}
		}
		if after, err := os.ReadFile(path + walSuffix); err != nil || string(after) != string(before) {
			t.Errorf("%s: the log has changed: %v", name, err)
		}
	}
}

// A log that is not used any more, because it could not be written, is wiped like one that is.
func TestADeletedRowLeavesALogThatIsLeft(t *testing.T) {
	var f faults
	dir := t.TempDir()
	path := filepath.Join(dir, "db")
	s := openAhead(t, path, Options{pace: quick(), fault: f.step})
	never(t, s)
	must(t, s.Scrubbed(t.Context()))
	put(t, s, "secret", marked("secret", 3000))
	f.before.Store("commit", true)
	f.before.Store("wipe log", true)
	_ = s.Update(t.Context(), func(tx store.Tx) error { return tx.Put([]byte("b"), nil) })
	f.before.Delete("commit")
	remove(t, s, "secret")
	if !found(t, path+walSuffix, "secret") {
		t.Fatal("the test shows nothing")
	}
	f.before.Clear()
	must(t, s.Scrubbed(t.Context()))
	if _, err := os.Stat(path + walSuffix); !errors.Is(err, os.ErrNotExist) {
		t.Error("the log is still there:", err)
	}
}

// What Close could not bring into the database, or wipe, is an error.
func TestCloseTellsOfALogThatStays(t *testing.T) {
	var f faults
	s := openAhead(t, filepath.Join(t.TempDir(), "db"), Options{fault: f.step})
	never(t, s)
	put(t, s, "a", nil)
	f.before.Store("flush", true)
	f.before.Store("apply", true)
	flush(t, s)
	if err := s.Close(); !errors.Is(err, errInjected) {
		t.Error(err)
	}
}

func TestReadySeesThatTheLogHangs(t *testing.T) {
	for _, step := range []string{"wipe log", "note log"} {
		var armed atomic.Bool
		var late atomic.Int64
		hangs, goOn := make(chan struct{}), make(chan struct{})
		s := open(t, filepath.Join(t.TempDir(), "db"), Options{
			pace: quick(),
			Now:  func() time.Time { return time.Now().Add(time.Duration(late.Load())) },
			fault: func(at string, do func() error) error {
				if at == step && armed.CompareAndSwap(true, false) {
					close(hangs)
					<-goOn
				}
				return do()
			},
		})
		must(t, s.Scrubbed(t.Context()))
		if step == "wipe log" {
			must(t, s.WriteAhead(t.Context()))
			put(t, s, "a", nil)
			armed.Store(true)
			remove(t, s, "a")
		} else {
			armed.Store(true)
			go func() { _ = s.WriteAhead(context.Background()) }()
		}
		<-hangs
		late.Store(int64(2 * commitLimit))
		if s.Ready(t.Context()) == nil {
			t.Errorf("ready while the writer hangs in %s", step)
		}
		close(goOn)
	}
}

// A commit that the log has, as the file shows when it is opened again, is answered as a success even when the
// log cannot be applied.
func TestACommitThatTheLogHasIsASuccess(t *testing.T) {
	var f faults
	s := openAhead(t, filepath.Join(t.TempDir(), "db"), Options{fault: f.step})
	never(t, s)
	put(t, s, "a", nil)
	f.after.Store("commit", true)
	f.before.Store("apply", true)
	did := false
	must(t, s.Update(t.Context(), func(tx store.Tx) error {
		tx.OnCommit(func() { did = true })
		return tx.Put([]byte("b"), nil)
	}))
	if got := contents(t, s); len(got) != 2 || !did {
		t.Errorf("Views see %v; OnCommit ran: %v", got, did)
	}
	f.after.Clear()
	f.before.Clear()
}

// As long as no file is open, the pauses between attempts are short: Views are refused meanwhile.
func TestAFileThatDoesNotOpenIsTriedSoon(t *testing.T) {
	var f faults
	s := openAhead(t, filepath.Join(t.TempDir(), "db"), Options{fault: f.step})
	never(t, s)
	put(t, s, "a", nil)
	for _, step := range []string{"flush", "apply", "settle log"} {
		f.before.Store(step, true)
	}
	flush(t, s)
	must(t, s.queue.turn(t.Context(), func() {
		if s.writer.retry.pause == 0 || s.writer.retry.pause > lastRetry {
			t.Errorf("the pause is %v", s.writer.retry.pause)
		}
	}))
	f.before.Clear()
	retryNow(t, s)
	must(t, s.between(t.Context(), func() {}))
}

// While the disk is low, commits go to the database at once: to the log first they would take more syncs.
func TestCommitsOnALowDiskAreNotWrittenAhead(t *testing.T) {
	flushes := 0
	s := openAhead(t, filepath.Join(t.TempDir(), "db"), Options{
		Reserve: 8 << 20, Spared: func(any) bool { return true },
		fault: func(step string, do func() error) error {
			if step == "flush" {
				flushes++
			}
			return do()
		},
	})
	never(t, s)
	put(t, s, "a", nil)
	must(t, s.queue.turn(t.Context(), func() {
		s.writer.reserve.size, s.writer.reserve.again = 1<<40, make(chan time.Time)
		flushes = 0
	}))
	for i := range 20 {
		put(t, s, fmt.Sprint(i), nil)
	}
	must(t, s.queue.turn(t.Context(), func() {
		if s.writer.reserve.size = 0; flushes > 1 {
			t.Errorf("%d flushes for 20 commits", flushes)
		}
	}))
}

// Reading the log of commits applies what was written ahead, without a commit of its own, and without it while the
// database is behind.
func TestTheLogOfCommitsIsReadWithoutACommit(t *testing.T) {
	var f faults
	hooks := 0
	s := openAhead(t, filepath.Join(t.TempDir(), "db"), Options{fault: f.step, Hook: func(store.Tx, []any) error { hooks++; return nil }})
	never(t, s)
	must(t, s.BeginLog(t.Context(), LogID{1}, noPosition))
	put(t, s, "a", nil)
	before := hooks
	l, err := s.Log(t.Context())
	if err != nil || l.Newest != 1 || hooks != before {
		t.Errorf("%+v, %v, %d hooks", l, err, hooks-before)
	}
	put(t, s, "b", nil)
	f.before.Store("flush", true)
	f.before.Store("apply", true)
	flush(t, s)
	if l, err = s.Log(t.Context()); err != nil || l.Newest != 1 {
		t.Errorf("behind: %+v, %v", l, err)
	}
	f.before.Clear()
	retryNow(t, s)
	must(t, s.between(t.Context(), func() {}))
	must(t, s.Close())
	_, err = s.Log(t.Context())
	wantKind(t, err, fault.Unavailable)
}
