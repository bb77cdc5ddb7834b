package bolt

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// copied applies the rows that a copy emits.
type copied map[string]string

func (c copied) emit(key, value []byte) error {
	if value == nil {
		delete(c, string(key))
	} else {
		c[string(key)] = string(value)
	}
	return nil
}

// history knows the contents of a store at each of its commits. Its hook stores the number of the
// commit in the row "commit" and keeps the changes of each one.
type history struct {
	mu      sync.Mutex
	changes map[int][]write // by commit; the next commit replaces those of one that did not persist
}

type write struct {
	key, value string
	deleted    bool
}

func (h *history) hook(tx store.Tx, events []any) error {
	last, err := tx.Get([]byte("commit"))
	if err != nil {
		return err
	}
	n, _ := strconv.Atoi(string(last)) // 0 before the first
	number := strconv.Itoa(n + 1)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.changes[n+1] = []write{{key: "commit", value: number}}
	for _, e := range events {
		h.changes[n+1] = append(h.changes[n+1], e.(write))
	}
	return tx.Put([]byte("commit"), []byte(number))
}

func (h *history) at(t *testing.T, commit string) map[string]string {
	t.Helper()
	h.mu.Lock()
	defer h.mu.Unlock()
	n, err := strconv.Atoi(commit)
	must(t, err)
	state := map[string]string{}
	for i := 1; i <= n; i++ {
		for _, w := range h.changes[i] {
			if w.deleted {
				delete(state, w.key)
			} else {
				state[w.key] = w.value
			}
		}
	}
	return state
}

// change writes random rows. Its error may be an injected fault.
func (h *history) change(s *Store, random *rand.Rand) error {
	return s.Update(context.Background(), func(tx store.Tx) error {
		for range 1 + random.IntN(8) {
			w := write{key: fmt.Sprintf("%04d", random.IntN(4000)), deleted: random.IntN(3) == 0}
			var err error
			if w.deleted {
				err = tx.Delete([]byte(w.key))
			} else {
				w.value = strconv.FormatUint(random.Uint64(), 36)
				err = tx.Put([]byte(w.key), []byte(w.value))
			}
			if err != nil {
				return err
			}
			tx.Enqueue(w)
		}
		return nil
	})
}

// A copy is the state of one commit, even if others write, commits fail before and after they
// persist, and the file is reopened meanwhile.
func TestACopyIsTheStateOfOneCommit(t *testing.T) {
	for seed := range uint64(3) {
		t.Run(fmt.Sprint("seed", seed), func(t *testing.T) {
			h := &history{changes: map[int][]write{}}
			var f faults
			s := open(t, filepath.Join(t.TempDir(), "db"), Options{Hook: h.hook, fault: f.step, pace: quick()})
			own := rand.New(rand.NewPCG(seed, 0))
			for range 500 {
				must(t, h.change(s, own))
			}
			var stop atomic.Bool
			var writers sync.WaitGroup
			for i := range uint64(3) {
				writers.Go(func() {
					random := rand.New(rand.NewPCG(seed, i+1))
					for !stop.Load() {
						_ = h.change(s, random) // fails when the fault is injected
					}
				})
			}
			before := s.Commits()
			for range 2 {
				got, n := copied{}, 0
				must(t, s.Copy(t.Context(), func(key, value []byte) error {
					// Between two rows of a page, and between two pages, rows on both sides change.
					switch n++; {
					case n%211 == 0:
						step := &f.before
						if own.IntN(2) == 0 {
							step = &f.after
						}
						step.Store("commit", true)
						_ = h.change(s, own)
						step.Clear()
					case n%13 == 0:
						_ = h.change(s, own)
					}
					return got.emit(key, value)
				}))
				if want := h.at(t, got["commit"]); !maps.Equal(got, want) {
					t.Errorf("the copy of commit %s has %d rows, the store had %d, or they differ", got["commit"], len(got), len(want))
				}
			}
			stop.Store(true)
			writers.Wait()
			if s.Commits() < before+20 {
				t.Error("hardly anything was written meanwhile")
			}
			got := copied{}
			must(t, s.Copy(t.Context(), got.emit))
			if !maps.Equal(got, contents(t, s)) {
				t.Error("the copy of a store at rest differs from it")
			}
		})
	}
}

// putPages fills s with two pages of rows, and "z" on the second.
func putPages(t *testing.T, s *Store) {
	t.Helper()
	must(t, s.Update(t.Context(), func(tx store.Tx) error {
		for i := range pageRows {
			if err := tx.Put(fmt.Appendf(nil, "%06d", i), nil); err != nil {
				return err
			}
		}
		return tx.Put([]byte("z"), nil)
	}))
}

// A View sees a commit before the writer learns that it has succeeded.
func TestACopySeesACommitThatIsNotAnsweredYet(t *testing.T) {
	hang, hanging, goOn := atomic.Bool{}, make(chan struct{}), make(chan struct{})
	s := open(t, filepath.Join(t.TempDir(), "db"), Options{fault: func(step string, do func() error) error {
		err := do()
		if step == "commit" && hang.CompareAndSwap(true, false) {
			close(hanging)
			<-goOn
		}
		return err
	}})
	putPages(t, s)
	done := make(chan error, 1)
	got := copied{}
	must(t, s.Copy(t.Context(), func(key, value []byte) error {
		if string(key) == "000000" && len(value) == 0 {
			hang.Store(true)
			go func() {
				done <- s.Update(t.Context(), func(tx store.Tx) error {
					return errors.Join(tx.Put([]byte("000000"), []byte("new")), tx.Put([]byte("z"), []byte("new")))
				})
			}()
			<-hanging
		}
		return got.emit(key, value)
	}))
	close(goOn)
	must(t, <-done)
	if got["000000"] != got["z"] {
		t.Errorf("the copy has half of the commit: %q and %q", got["000000"], got["z"])
	}
}

// waiting closes release once a request waits for the writer, or ctx has ended.
func waiting(ctx context.Context, s *Store, release chan struct{}) {
	for s.queue.queued() == 0 && ctx.Err() == nil {
		runtime.Gosched()
	}
	close(release)
}

func TestACopyWaitsWhileTheFileIsOpenedAgain(t *testing.T) {
	var f faults
	broken, opening, goOn := atomic.Bool{}, make(chan struct{}), make(chan struct{})
	s := open(t, filepath.Join(t.TempDir(), "db"), Options{fault: func(step string, do func() error) error {
		if step == "settle" && broken.CompareAndSwap(true, false) {
			close(opening)
			<-goOn
		}
		return f.step(step, do)
	}})
	putPages(t, s)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	got := copied{}
	err := s.Copy(t.Context(), func(key, value []byte) error {
		if len(got) == 0 {
			f.before.Store("commit", true)
			broken.Store(true)
			go func() {
				done <- s.Update(t.Context(), func(tx store.Tx) error { return tx.Put([]byte("z"), []byte("new")) })
			}()
			<-opening
			f.before.Clear()
			go waiting(ctx, s, goOn)
		}
		return got.emit(key, value)
	})
	cancel()
	must(t, err)
	wantKind(t, <-done, fault.Unavailable)
	if !maps.Equal(got, contents(t, s)) {
		t.Error("the copy differs from the store")
	}
}

// A commit in progress while the copy takes the notes off the list is not lost.
func TestACopyTakesNotesBetweenCommits(t *testing.T) {
	hang, hanging, goOn := atomic.Bool{}, make(chan struct{}), make(chan struct{})
	s := open(t, filepath.Join(t.TempDir(), "db"), Options{fault: func(step string, do func() error) error {
		if step == "commit" && hang.CompareAndSwap(true, false) {
			close(hanging)
			<-goOn
		}
		return do()
	}})
	putPages(t, s)
	done := make(chan error, 1)
	got, first := copied{}, true
	must(t, s.Copy(t.Context(), func(key, value []byte) error {
		switch {
		case string(key) == "z" && first: // the last row of the first round
			first = false
			must(t, s.Update(t.Context(), func(tx store.Tx) error { // more than the last View reads
				return errors.Join(tx.Put([]byte("a"), make([]byte, lastBytes)), tx.Put([]byte("b"), nil))
			}))
			hang.Store(true)
			go func() {
				done <- s.Update(t.Context(), func(tx store.Tx) error { return tx.Put([]byte("000000"), []byte("new")) })
			}()
			<-hanging
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			t.Cleanup(cancel)
			go waiting(ctx, s, goOn)
		case string(key) == "a": // in the second round
			must(t, <-done)
		}
		return got.emit(key, value)
	}))
	if !maps.Equal(got, contents(t, s)) {
		t.Error("the copy differs from the store")
	}
}

func TestACopyOfAReadOnlyStoreIsWhole(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	s := open(t, path, Options{})
	must(t, s.Update(t.Context(), func(tx store.Tx) error {
		for i := range 3*pageRows + 1 {
			if err := tx.Put(fmt.Appendf(nil, "%06d", i), make([]byte, i%3)); err != nil {
				return err
			}
		}
		return tx.Put([]byte("large"), make([]byte, pageBytes+1))
	}))
	want := contents(t, s)
	must(t, s.Close())
	got := copied{}
	must(t, open(t, path, Options{ReadOnly: true}).Copy(t.Context(), got.emit))
	if !maps.Equal(got, want) {
		t.Errorf("%d rows, want %d", len(got), len(want))
	}
}

// Rows that are deleted during a slow copy are wiped as fast as otherwise.
func TestASlowCopyDoesNotHoldUpTheScrub(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	s := open(t, path, Options{})
	put(t, s, "a", []byte("first"))
	put(t, s, "gone", marked("gone", 3<<10))
	got, waited := copied{}, false
	must(t, s.Copy(t.Context(), func(key, value []byte) error {
		if !waited {
			waited = true
			remove(t, s, "gone")
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			must(t, s.Scrubbed(ctx))
			if found(t, path, "gone") {
				t.Error("the value is still in the folder")
			}
		}
		return got.emit(key, value)
	}))
	if want := (copied{"a": "first"}); !maps.Equal(got, want) {
		t.Errorf("the copy has %d rows", len(got))
	}
}

// Reading a row takes a fifth of a second, so a View has time for nine.
func TestACopyReadsLessAtATimeFromASlowDisk(t *testing.T) {
	var passed atomic.Int64
	now := func() time.Time { return time.Unix(0, passed.Add(int64(100*time.Millisecond))) }
	s, err := Open(filepath.Join(t.TempDir(), "s.db"), Options{Now: now})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	const rows = 40
	err = s.Update(t.Context(), func(tx store.Tx) error {
		for i := range rows {
			if err := tx.Put([]byte{byte(i)}, []byte("row")); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	c := make(copied)
	if err := s.Copy(t.Context(), c.emit); err != nil || len(c) != rows {
		t.Error(len(c), err)
	}
}

func TestACopyEndsWithItsContextAndItsTaker(t *testing.T) {
	s := open(t, filepath.Join(t.TempDir(), "db"), Options{})
	put(t, s, "a", nil)
	put(t, s, "b", nil)
	ctx, cancel := context.WithCancel(t.Context())
	err := s.Copy(ctx, func(_, _ []byte) error {
		wantKind(t, s.Copy(t.Context(), copied{}.emit), fault.Conflict)
		cancel()
		return nil
	})
	wantKind(t, err, fault.Unavailable)
	if err := s.Copy(t.Context(), func(_, _ []byte) error { return errInjected }); !errors.Is(err, errInjected) {
		t.Error(err)
	}
	wantKind(t, s.Copy(ctx, copied{}.emit), fault.Unavailable)
	must(t, s.Copy(t.Context(), copied{}.emit)) // the earlier copies do not block the next one
	if s.followers.copying.Load() != nil {
		t.Error("the writer still notes what it changes")
	}
	must(t, s.Close())
	wantKind(t, s.Copy(t.Context(), copied{}.emit), fault.Unavailable)
}

// churn changes n rows with keys of the maximum length.
func churn(t *testing.T, s *Store, from, n, size int) {
	t.Helper()
	must(t, s.Update(t.Context(), func(tx store.Tx) error {
		for i := range n {
			key := append(bytes.Repeat([]byte("k"), store.MaxKeySize-8), fmt.Sprintf("%08d", from+i)...)
			if err := tx.Put(key, make([]byte, size)); err != nil {
				return err
			}
		}
		return nil
	}))
}

// A copy fails when more keys change than it may note, and its notes are released at once.
func TestACopyThatFallsTooFarBehindIsGivenUp(t *testing.T) {
	s := open(t, filepath.Join(t.TempDir(), "db"), Options{})
	put(t, s, "a", nil)
	fallen := false
	err := s.Copy(t.Context(), func(_, _ []byte) error {
		if !fallen {
			fallen = true
			churn(t, s, 0, noteBytes/(store.MaxKeySize+noteSize)+1, 0)
			if keys, _ := s.followers.copying.Load().list(); len(keys) != 0 {
				t.Errorf("%d keys are still noted", len(keys))
			}
		}
		return nil
	})
	wantKind(t, err, fault.Unavailable)
}

// A copy reads in rounds when the notes exceed half of their bound and the size of the last View. A
// copy that never catches up still ends.
func TestACopyCatchesUpInRounds(t *testing.T) {
	s := open(t, filepath.Join(t.TempDir(), "db"), Options{})
	put(t, s, "a", nil)
	got, rounds := copied{}, 0
	emit := func(key, value []byte) error {
		switch string(key) {
		case "a":
			churn(t, s, 0, noteBytes/2/(store.MaxKeySize+noteSize)+1, 0)
			must(t, s.Update(t.Context(), func(tx store.Tx) error {
				return errors.Join(tx.Put([]byte("b"), nil), tx.Put([]byte("c"), make([]byte, lastBytes)))
			}))
		case "b":
			if rounds++; rounds < 4 {
				must(t, s.Update(t.Context(), func(tx store.Tx) error {
					return errors.Join(tx.Put([]byte("b"), []byte{byte(rounds)}), tx.Put([]byte("c"), make([]byte, lastBytes+rounds)), tx.Put([]byte("d"), nil))
				}))
			}
		}
		return got.emit(key, value)
	}
	must(t, s.Copy(t.Context(), emit))
	if rounds != 4 || !maps.Equal(got, contents(t, s)) {
		t.Errorf("%d rounds; the copy has %d rows, or they differ", rounds, len(got))
	}
	endless := 0
	err := s.Copy(t.Context(), func(key, _ []byte) error {
		if string(key) != "c" {
			return nil
		}
		endless++
		return s.Update(t.Context(), func(tx store.Tx) error {
			return errors.Join(tx.Put([]byte("c"), make([]byte, lastBytes)), tx.Put([]byte("d"), nil))
		})
	})
	wantKind(t, err, fault.Unavailable)
	if endless != maxRounds+1 {
		t.Errorf("%d rounds", endless)
	}
}
