package bolt

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// emptied makes a database of n rows of 4 KiB, of which one in ten is left.
func emptied(t *testing.T, o Options, n int) (s *Store, path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "db")
	o.pace = quick()
	s = open(t, path, o)
	must(t, s.Update(t.Context(), func(tx store.Tx) error {
		var errs []error
		for i := range n {
			errs = append(errs, tx.Put(fmt.Appendf(nil, "%06d", i), marked(fmt.Sprint("row", i), 4<<10)))
		}
		return errors.Join(errs...)
	}))
	must(t, s.Update(t.Context(), func(tx store.Tx) error {
		var errs []error
		for i := range n {
			if i%10 > 0 {
				errs = append(errs, tx.Delete(fmt.Appendf(nil, "%06d", i)))
			}
		}
		return errors.Join(errs...)
	}))
	return s, path
}

// alone fails the test unless the database is the only file in its folder.
func alone(t *testing.T, path string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(filepath.Dir(path), "*"))
	must(t, err)
	if len(files) != 1 || files[0] != path {
		t.Errorf("the folder has %v", files)
	}
}

func TestCompactGivesFreePagesBack(t *testing.T) {
	s, path := emptied(t, Options{}, 5000)
	must(t, os.Chmod(path, 0o640))
	put(t, s, "after", []byte("1"))
	want := contents(t, s)
	before, after, err := s.Compact(t.Context())
	must(t, err)
	if before < 20<<20 || after > 5<<20 {
		t.Errorf("from %d to %d bytes", before, after)
	}
	u, err := s.Usage(t.Context())
	must(t, err)
	if info, err := os.Stat(path); err != nil || info.Size() != after || u.Size != after || u.Returned != before-after || u.Compacted.IsZero() || info.Mode().Perm() != 0o640 {
		t.Errorf("%+v, %v, %v", u, info.Mode(), err)
	}
	if !maps.Equal(contents(t, s), want) {
		t.Error("the rows are not the same")
	}
	alone(t, path)

	put(t, s, "later", []byte("2"))
	want["later"] = "2"
	remove(t, s, "000010")
	delete(want, "000010")
	must(t, s.Scrubbed(t.Context()))
	if found(t, path, "row10") {
		t.Error("a row that was deleted later is still in the folder")
	}
	if _, _, err := s.Compact(t.Context()); err != nil {
		t.Error("a second time:", err)
	}
	must(t, s.Close())
	sound(t, path)
	if !maps.Equal(contents(t, open(t, path, Options{})), want) {
		t.Error("the rows are not the same after a start")
	}
}

// at lets something happen at each durable step of a compaction.
type at struct {
	do atomic.Pointer[func(step string, do func() error) error]
}

func (a *at) fault(step string, do func() error) error {
	if by := a.do.Load(); by != nil {
		return (*by)(step, do)
	}
	return do()
}

func (a *at) set(by func(step string, do func() error) error) { a.do.Store(&by) }

// Rows change all the time, before and behind the copy, and a copy for a backup is made too.
func TestCommitsGoOnDuringACompaction(t *testing.T) {
	s, path := emptied(t, Options{}, 6000)
	model := contents(t, s)
	ctx, stop := context.WithCancel(t.Context())
	var work sync.WaitGroup
	work.Go(func() {
		for i := 0; ctx.Err() == nil; i++ {
			key, value := fmt.Sprintf("%06d", rand.IntN(6000)), fmt.Sprint("changed ", i)
			err := s.Update(context.Background(), func(tx store.Tx) error {
				if i%3 == 0 {
					return tx.Delete([]byte(key))
				}
				return tx.Put([]byte(key), []byte(value))
			})
			if err != nil {
				t.Error(err)
				return
			}
			if delete(model, key); i%3 > 0 {
				model[key] = value
			}
		}
	})
	work.Go(func() {
		for ctx.Err() == nil {
			if err := look(s); err != nil {
				t.Error(err)
				return
			}
		}
	})
	work.Go(func() {
		for ctx.Err() == nil {
			if err := s.Copy(context.Background(), copied{}.emit); err != nil {
				t.Error(err)
				return
			}
		}
	})
	for range 3 {
		if _, _, err := s.Compact(t.Context()); err != nil {
			t.Error(err)
		}
	}
	stop()
	work.Wait()
	if !maps.Equal(contents(t, s), model) {
		t.Error("the rows are not those that were written")
	}
	must(t, s.Close())
	alone(t, path)
	sound(t, path)
	if !maps.Equal(contents(t, open(t, path, Options{})), model) {
		t.Error("the rows are not those that were written after a start")
	}
}

// What a copy takes across the replacement is the state of one commit.
func TestACopyOutlivesACompaction(t *testing.T) {
	s, _ := emptied(t, Options{}, 10000)
	got := copied{}
	must(t, s.Copy(t.Context(), func(key, value []byte) error {
		if len(got) == 700 {
			put(t, s, "000000", []byte("changed"))
			_, _, err := s.Compact(t.Context())
			must(t, err)
			put(t, s, "000010", []byte("changed"))
		}
		return got.emit(key, value)
	}))
	if !maps.Equal(got, contents(t, s)) {
		t.Error("the copy differs from the store")
	}
}

// A View that is open when the file is replaced reads its snapshot to its end.
func TestAViewOutlivesACompaction(t *testing.T) {
	var a at
	s, path := emptied(t, Options{fault: a.fault}, 2000)
	done, replaced := make(chan error, 1), make(chan struct{})
	must(t, s.View(t.Context(), func(r store.Reader) error {
		if _, err := r.Get([]byte("000010")); err != nil {
			return err
		}
		a.set(func(step string, do func() error) error {
			if step == "erase" {
				t.Error("the file is erased while a View reads it")
			}
			return do()
		})
		go func() {
			_, _, err := s.Compact(context.Background())
			done <- err
		}()
		go func() {
			defer close(replaced)
			eventually(t, "another file", func() bool { u, err := s.Usage(context.Background()); return err == nil && u.Size < 5<<20 })
		}()
		<-replaced
		put(t, s, "000010", []byte("changed"))
		value, err := r.Get([]byte("000010"))
		if !bytes.Equal(value, marked("row10", 4<<10)) {
			t.Error("the View reads something else")
		}
		a.set(func(_ string, do func() error) error { return do() })
		return err
	}))
	must(t, <-done)
	if got := contents(t, s)["000010"]; got != "changed" {
		t.Errorf("it reads %.20q", got)
	}
	alone(t, path)
}

// Whatever fails, before it is done or after, the store has all rows, goes on by itself and leaves
// no other file.
func TestACompactionThatFailsLosesNothing(t *testing.T) {
	type step struct {
		name  string
		count int64 // of those with this name
		after bool
	}
	for _, fails := range []step{
		{"create", 1, false}, {"create", 1, true}, {"settle", 1, false}, {"settle", 1, true}, {"copy", 1, false}, {"copy", 1, true},
		{"copy", 2, false}, {"copy", 2, true}, {"grow", 1, false}, {"grow", 1, true}, {"sync copy", 1, false}, {"sync copy", 1, true},
		{"sync copy", 2, false}, {"sync copy", 2, true}, {"replace", 1, false}, {"replace", 1, true},
		{"sync folder", 1, false}, {"sync folder", 1, true}, {"erase", 1, false}, {"erase", 1, true},
	} {
		t.Run(fmt.Sprint(fails), func(t *testing.T) {
			var a at
			s, path := emptied(t, Options{fault: a.fault, Reserve: 1 << 20, Spared: func(any) bool { return true }}, 2000)
			want := contents(t, s)
			must(t, s.Scrubbed(t.Context()))
			var count atomic.Int64
			a.set(func(name string, do func() error) error {
				if name != fails.name || count.Add(1) != fails.count {
					return do()
				}
				if fails.after {
					if err := do(); err != nil {
						t.Error(err)
					}
				}
				return errInjected
			})
			if _, _, err := s.Compact(t.Context()); (err == nil) != (fails == step{"replace", 1, true}) {
				t.Error(err) // a replacement that happened has not failed
			}
			if count.Load() < fails.count {
				t.Error("there is no such step")
			}
			eventually(t, "a commit", func() bool {
				return s.Update(t.Context(), func(tx store.Tx) error { return tx.Put([]byte("later"), []byte("2")) }) == nil
			})
			want["later"] = "2"
			if !maps.Equal(contents(t, s), want) {
				t.Error("the rows are not the same")
			}
			alone(t, path)
			a.set(func(_ string, do func() error) error { return do() })
			if _, _, err := s.Compact(t.Context()); err != nil {
				t.Error("afterwards:", err)
			}
			must(t, s.Close())
			sound(t, path)
			if !maps.Equal(contents(t, open(t, path, Options{})), want) {
				t.Error("the rows are not the same after a start")
			}
		})
	}
}

// A process that is killed before or after any step leaves a folder in which the next one finds all
// rows, and removes the rest.
func TestACompactionThatIsKilledLosesNothing(t *testing.T) {
	var a at
	s, path := emptied(t, Options{fault: a.fault}, 2000)
	put(t, s, "counter", []byte("0"))
	must(t, s.Scrubbed(t.Context()))
	want := contents(t, s)
	killed := 0
	var one sync.Mutex // the copying and the writer take steps at the same time
	look := func(step string) {
		one.Lock()
		defer one.Unlock()
		dir := filepath.Join(t.TempDir(), fmt.Sprint(killed))
		killed++
		must(t, os.CopyFS(dir, os.DirFS(filepath.Dir(path))))
		left := filepath.Join(dir, "db")
		got, err := Open(left, Options{})
		must(t, err)
		if !maps.Equal(contents(t, got), want) {
			t.Error(step, "leaves other rows")
		}
		put(t, got, "counter", []byte("1"))
		must(t, got.Close())
		alone(t, left)
		sound(t, left)
		must(t, os.RemoveAll(dir))
	}
	a.set(func(step string, do func() error) error {
		if step == "wipe" {
			return do() // thousands
		}
		look("before " + step)
		err := do()
		look("after " + step)
		return err
	})
	_, _, err := s.Compact(t.Context())
	must(t, err)
	a.set(func(_ string, do func() error) error { return do() })
	must(t, s.Close()) // a step may still be looked at
	if killed < 14 {
		t.Errorf("%d steps", killed)
	}
}

// Until the name of the new file is durable, no commit goes to it: a crash might bring the old one
// back.
func TestNoCommitGoesToAFileWhoseNameIsNotDurable(t *testing.T) {
	var a at
	s, path := emptied(t, Options{fault: a.fault}, 2000)
	must(t, s.Scrubbed(t.Context()))
	a.set(func(step string, do func() error) error {
		if step == "sync folder" {
			return errInjected
		}
		return do()
	})
	old, err := os.Open(path) // stands for what a crash brings back
	must(t, err)
	defer old.Close()
	if _, _, err := s.Compact(t.Context()); !errors.Is(err, errInjected) {
		t.Fatal(err)
	}
	for range 3 {
		wantKind(t, s.Update(t.Context(), func(tx store.Tx) error { return tx.Put([]byte("lost"), nil) }), fault.Unavailable)
	}
	if whole, err := io.ReadAll(old); err != nil || !bytes.Contains(whole, []byte("<row10>")) {
		t.Error("the old file was erased:", err)
	}
	a.set(func(_ string, do func() error) error { return do() })
	eventually(t, "a commit", func() bool {
		return s.Update(t.Context(), func(tx store.Tx) error { return tx.Put([]byte("kept"), nil) }) == nil
	})
	if got := contents(t, s); len(got) != 201 {
		t.Errorf("%d rows", len(got))
	}
}

// A row that is deleted while the file is copied is wiped from both files, and erased with the old
// one afterwards.
func TestARowDeletedDuringACompactionIsGone(t *testing.T) {
	var a at
	var clock atomic.Int64
	now := time.Now()
	s, path := emptied(t, Options{fault: a.fault, Now: func() time.Time { return now.Add(time.Duration(clock.Load())) }}, 20000)
	must(t, s.Scrubbed(t.Context()))
	copies, checked := 0, false
	a.set(func(step string, do func() error) error {
		if step == "copy" {
			switch copies++; copies {
			case 1:
				defer func() { // the row is in the new file
					if !found(t, path+compactSuffix, "row10") {
						t.Error("the row is not in the new file yet")
					}
					remove(t, s, "000010")
					must(t, s.Scrubbed(t.Context()))
					clock.Add(int64(2 * deleteDelay))
				}()
			case 3: // rows that are left, after the deletion was followed
				checked = true
				if found(t, path, "row10") {
					t.Error("the row is still in the folder")
				}
			}
		}
		return do()
	})
	old, err := os.Open(path)
	must(t, err)
	defer old.Close()
	_, _, err = s.Compact(t.Context())
	must(t, err)
	if !checked {
		t.Errorf("%d transactions", copies)
	}
	if b, err := io.ReadAll(old); err != nil || len(b) < 8<<20 || bytes.Contains(b, []byte("<row")) {
		t.Error("the old file has rows:", err)
	}
}

// A new file that a disk has changed is not used.
func TestANewFileThatDiffersIsNotUsed(t *testing.T) {
	var a at
	s, path := emptied(t, Options{fault: a.fault}, 10000)
	want := contents(t, s)
	must(t, s.Scrubbed(t.Context()))
	var copies atomic.Int64
	a.set(func(step string, do func() error) error {
		err := do()
		if step == "copy" && copies.Add(1) == 1 {
			f, ferr := os.OpenFile(path+compactSuffix, os.O_RDWR, 0)
			must(t, ferr)
			defer f.Close()
			b := make([]byte, 4<<20)
			_, ferr = f.Read(b)
			must(t, ferr)
			_, ferr = f.WriteAt([]byte("<r0w"), int64(bytes.Index(b, []byte("<row"))))
			must(t, ferr)
		}
		return err
	})
	_, _, err := s.Compact(t.Context())
	wantKind(t, err, fault.Internal)
	alone(t, path)
	if !maps.Equal(contents(t, s), want) {
		t.Error("the rows are not the same")
	}
}

func TestACompactionEndsWithItsContextAndItsStore(t *testing.T) {
	var a at
	s, path := emptied(t, Options{fault: a.fault}, 2000)
	ctx, cancel := context.WithCancel(t.Context())
	a.set(func(step string, do func() error) error {
		if step == "copy" {
			_, _, err := s.Compact(t.Context())
			wantKind(t, err, fault.Conflict)
			cancel()
		}
		return do()
	})
	_, _, err := s.Compact(ctx)
	wantKind(t, err, fault.Unavailable)
	alone(t, path)

	closed := make(chan error, 1)
	var once sync.Once
	a.set(func(step string, do func() error) error {
		if step == "copy" {
			once.Do(func() { go func() { closed <- s.Close() }(); <-s.compactor.closing.Done() })
		}
		return do()
	})
	_, _, err = s.Compact(t.Context())
	wantKind(t, err, fault.Unavailable)
	must(t, <-closed)
	alone(t, path)
	_, _, err = s.Compact(t.Context())
	wantKind(t, err, fault.Unavailable)
	_, _, err = open(t, path, Options{ReadOnly: true}).Compact(t.Context())
	wantKind(t, err, fault.Invalid)
}

// A server gives pages back without being asked, once half of the file is free.
func TestAStoreCompactsItself(t *testing.T) {
	s, path := emptied(t, Options{upkeep: upkeep{every: time.Millisecond, least: 1 << 20}}, 5000)
	want := contents(t, s)
	eventually(t, "a compaction", func() bool {
		u, err := s.Usage(t.Context())
		return err == nil && u.Returned > 15<<20
	})
	if !maps.Equal(contents(t, s), want) {
		t.Error("the rows are not the same")
	}
	eventually(t, "the end of the compaction", func() bool { return s.compactor.running.TryLock() })
	alone(t, path)
}

// The log of commits goes on in the new file, and so do records that were not shipped.
func TestTheLogOfCommitsOutlivesACompaction(t *testing.T) {
	s, path := emptied(t, Options{}, 2000)
	beginLog(t, s, testLog)
	r := replica{t: t, rows: contents(t, s)}
	changeSome(t, s)
	_, _, err := s.Compact(t.Context())
	must(t, err)
	must(t, s.Close())
	s = open(t, path, Options{})
	changeSome(t, s)
	r.follow(s, 1<<20)
	r.compare(s)
}
