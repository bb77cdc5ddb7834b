package storetest

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

func snapshot(t *testing.T, open Open) {
	s := start(t, open, Options{})
	put(t, s, "a=1", "b=1")
	must(t, s.View(t.Context(), func(r store.Reader) error {
		if _, err := r.Get([]byte("absent")); err != nil { // takes the snapshot now at the latest
			return err
		}
		done := make(chan error)
		go func() {
			done <- s.Update(context.Background(), func(tx store.Tx) error {
				return errors.Join(tx.Put([]byte("a"), []byte("2")), tx.Delete([]byte("b")), tx.Put([]byte("c"), []byte("2")))
			})
		}()
		if err := <-done; err != nil {
			return err
		}
		got, err := scan(r, store.Range{})
		if !slices.Equal(got, []string{"a=1", "b=1"}) {
			t.Errorf("the snapshot changed to %q", got)
		}
		return err
	}))
	wantAll(t, s, "a=2", "c=2")
}

func noDirtyReads(t *testing.T, open Open) {
	var s store.Store
	s = start(t, open, Options{Commit: func(do func() error) error {
		// All closures of the group have run, and nothing is committed yet.
		err := s.View(context.Background(), func(r store.Reader) error {
			if got, err := scan(r, store.Range{}); err != nil || len(got) != 0 {
				t.Errorf("a View reads %q before the commit: %v", got, err)
			}
			return nil
		})
		return errors.Join(err, do())
	}})
	put(t, s, "a=1")
	// A View before the next commit must see the first commit.
	must(t, s.View(t.Context(), func(r store.Reader) error {
		if v, err := r.Get([]byte("a")); err != nil || string(v) != "1" {
			t.Errorf("after the commit: %q, %v", v, err)
		}
		return nil
	}))
}

func ownWrites(t *testing.T, open Open) {
	s := start(t, open, Options{})
	put(t, s, "a=1", "b=1")
	must(t, s.Update(t.Context(), func(tx store.Tx) error {
		err := errors.Join(tx.Put([]byte("a"), []byte("2")), tx.Delete([]byte("b")), tx.Put([]byte("c"), []byte("2")))
		got, serr := scan(tx, store.Range{})
		if !slices.Equal(got, []string{"a=2", "c=2"}) {
			t.Errorf("the closure reads %q", got)
		}
		return errors.Join(err, serr)
	}))
}

func lostUpdates(t *testing.T, open Open) {
	s := start(t, open, Options{})
	const writers, each = 16, 20
	together(t, writers, func(int) error {
		for range each {
			if err := s.Update(context.Background(), func(tx store.Tx) error { _, err := add(tx, "n", 1); return err }); err != nil {
				return err
			}
		}
		return nil
	})
	must(t, s.Update(t.Context(), func(tx store.Tx) error {
		if n, err := add(tx, "n", 0); err != nil || n != writers*each {
			t.Errorf("the counter is %d after %d updates: %v", n, writers*each, err)
		}
		return nil
	}))
}

// writeSkew tests the rule that at most one of a and b leaves duty. Each closure reads both keys
// and writes one, so only a serial order keeps the rule.
func writeSkew(t *testing.T, open Open) {
	s := start(t, open, Options{})
	const rounds = 20
	for round := range rounds {
		a, b := fmt.Sprintf("a%d", round), fmt.Sprintf("b%d", round)
		put(t, s, a+"=on", b+"=on")
		together(t, 2, func(i int) error {
			return s.Update(context.Background(), func(tx store.Tx) error {
				av, aerr := tx.Get([]byte(a))
				bv, berr := tx.Get([]byte(b))
				if string(av) == "on" && string(bv) == "on" {
					return errors.Join(aerr, berr, tx.Put([]byte([]string{a, b}[i]), []byte("off")))
				}
				return errors.Join(aerr, berr)
			})
		})
		on := 0
		for _, pair := range all(t, s) {
			if pair == a+"=on" || pair == b+"=on" {
				on++
			}
		}
		if on != 1 {
			t.Fatalf("round %d: %d remain on duty, want 1", round, on)
		}
	}
}

func failedClosure(t *testing.T, open Open) {
	var events []any
	s := start(t, open, Options{Hook: func(_ store.Tx, e []any) error { events = append(events, e...); return nil }})
	put(t, s, "a=1", "b=1", "e=")
	boom := errors.New("boom")
	// As far as the store groups commits, the failing closure runs between others of its group.
	together(t, 9, func(i int) error {
		err := s.Update(context.Background(), func(tx store.Tx) error {
			if i != 4 {
				tx.Enqueue(i)
				return tx.Put(fmt.Appendf(nil, "ok%d", i), nil)
			}
			err := errors.Join(
				tx.Put([]byte("a"), []byte("2")), tx.Put([]byte("a"), []byte("3")), tx.Delete([]byte("a")),
				tx.Delete([]byte("b")), tx.Put([]byte("b"), []byte("4")),
				tx.Put([]byte("c"), []byte("5")), tx.Delete([]byte("c")), tx.Put([]byte("c"), []byte("6")),
				tx.Delete([]byte("e")))
			tx.Enqueue("never")
			return errors.Join(err, boom)
		})
		if i == 4 {
			if !errors.Is(err, boom) {
				return fmt.Errorf("the closure's error became %w", err)
			}
			return nil
		}
		return err
	})
	wantAll(t, s, "a=1", "b=1", "e=", "ok0=", "ok1=", "ok2=", "ok3=", "ok5=", "ok6=", "ok7=", "ok8=")
	if len(events) != 8 || slices.Contains(events, any("never")) {
		t.Fatalf("the hook got %v", events)
	}
}

func panickingClosure(t *testing.T, open Open) {
	s := start(t, open, Options{})
	put(t, s, "a=1")
	caught := make(chan any)
	go func() {
		defer func() { caught <- recover() }()
		_ = s.Update(context.Background(), func(tx store.Tx) error {
			if err := tx.Put([]byte("a"), []byte("2")); err != nil {
				return err
			}
			panic("boom")
		})
	}()
	if p := <-caught; p != "boom" {
		t.Fatalf("the caller recovered %v", p)
	}
	put(t, s, "b=1")
	wantAll(t, s, "a=1", "b=1")

	func() {
		defer func() {
			if p := recover(); p != "boom" {
				t.Errorf("the View's caller recovered %v", p)
			}
		}()
		_ = s.View(t.Context(), func(store.Reader) error { panic("boom") })
	}()
	put(t, s, "c=1")
}

// rerun tests a store that runs a closure more than once. It must commit only the last run, so that
// the variables which the closure captured agree with the stored data.
func rerun(t *testing.T, open Open) {
	s := start(t, open, Options{})
	together(t, 8, func(i int) error {
		key := fmt.Sprintf("runs%d", i)
		for range 10 {
			var runs, before uint64
			err := s.Update(context.Background(), func(tx store.Tx) error {
				runs++
				if _, err := add(tx, "contended", 1); err != nil {
					return err
				}
				n, err := add(tx, key, runs)
				before = n - runs
				return err
			})
			if err != nil {
				return err
			}
			err = s.View(context.Background(), func(r store.Reader) error {
				v, err := r.Get([]byte(key))
				if err == nil && binary.BigEndian.Uint64(v) != before+runs {
					return fmt.Errorf("%s is %d, the last run left %d", key, binary.BigEndian.Uint64(v), before+runs)
				}
				return err
			})
			if err != nil {
				return err
			}
		}
		return nil
	})
	must(t, s.Update(t.Context(), func(tx store.Tx) error {
		if n, err := add(tx, "contended", 0); err != nil || n != 80 {
			t.Errorf("80 updates left %d: %v", n, err)
		}
		return nil
	}))
}

func hookJoins(t *testing.T, open Open) {
	s := start(t, open, Options{Hook: func(tx store.Tx, events []any) error {
		for _, e := range events {
			n, err := add(tx, "sequence", 1)
			if err != nil {
				return err
			}
			if err := tx.Put(fmt.Appendf(nil, "log/%06d", n), []byte(e.(string))); err != nil {
				return err
			}
		}
		tx.Enqueue("ignored")
		return nil
	}})
	const writers, each = 8, 10
	together(t, writers, func(i int) error {
		for j := range each {
			id := fmt.Sprintf("%d-%d", i, j)
			err := s.Update(context.Background(), func(tx store.Tx) error {
				n, err := add(tx, "order", 1)
				tx.Enqueue(fmt.Sprintf("%d:%s", n, id))
				return err
			})
			if err != nil {
				return err
			}
			// The hook's write is visible once Update returns.
			err = s.View(context.Background(), func(r store.Reader) error {
				found := false
				err := r.Scan(store.Prefix([]byte("log/")), func(_, v []byte) bool {
					_, got, _ := strings.Cut(string(v), ":")
					found = got == id
					return !found
				})
				if !found {
					return errors.Join(err, fmt.Errorf("no entry for %s", id))
				}
				return err
			})
			if err != nil {
				return err
			}
		}
		return nil
	})
	must(t, s.View(t.Context(), func(r store.Reader) error {
		want := 0
		err := r.Scan(store.Prefix([]byte("log/")), func(_, v []byte) bool {
			want++
			if n, _, _ := strings.Cut(string(v), ":"); n != strconv.Itoa(want) {
				t.Errorf("event %s of the commit order came as number %d", n, want)
			}
			return true
		})
		if want != writers*each {
			t.Errorf("%d events of %d", want, writers*each)
		}
		return err
	}))
}

func hookOnce(t *testing.T, open Open) {
	var hooks, commits int
	s := start(t, open, Options{
		Hook:   func(_ store.Tx, _ []any) error { hooks++; return nil },
		Commit: func(do func() error) error { commits++; return do() },
	})
	together(t, 16, func(i int) error {
		return s.Update(context.Background(), func(tx store.Tx) error { return tx.Put(fmt.Appendf(nil, "%d", i), nil) })
	})
	must(t, s.Update(t.Context(), func(tx store.Tx) error { tx.Enqueue("only an event"); return nil }))
	if hooks != commits || commits == 0 || commits > 17 {
		t.Fatalf("%d hooks for %d commits of 17 updates", hooks, commits)
	}
	before := commits
	must(t, s.Update(t.Context(), func(tx store.Tx) error { _, err := tx.Get([]byte("0")); return err }))
	must(t, s.Update(t.Context(), func(tx store.Tx) error { return tx.Delete([]byte("absent")) }))
	must(t, s.Ready(t.Context()))
	if commits != before || hooks != before {
		t.Fatalf("nothing was written, and there are %d commits and %d hooks more", commits-before, hooks-before)
	}
}

func observed(t *testing.T, open Open) {
	var seen []store.Commit
	fails := false
	boom := errors.New("boom")
	s := start(t, open, Options{
		Observer: func(c store.Commit) { seen = append(seen, c) },
		Commit: func(do func() error) error {
			if fails {
				return boom
			}
			return do()
		},
	})
	together(t, 16, func(i int) error {
		return s.Update(context.Background(), func(tx store.Tx) error { return tx.Put(fmt.Appendf(nil, "%d", i), make([]byte, 4096)) })
	})
	updates := 0
	for _, c := range seen {
		if updates += c.Updates; c.Err != nil || c.Took <= 0 || c.Took > time.Minute {
			t.Errorf("a commit that succeeded is observed as %+v", c)
		}
	}
	if updates != 16 {
		t.Fatalf("16 updates are observed as %+v", seen)
	}
	before := len(seen)
	must(t, s.Update(t.Context(), func(tx store.Tx) error { _, err := tx.Get([]byte("0")); return err }))
	if len(seen) != before {
		t.Errorf("an update that wrote nothing is observed as %+v", seen[before:])
	}
	fails = true
	err := s.Update(t.Context(), func(tx store.Tx) error { return tx.Put([]byte("0"), nil) })
	if err == nil || len(seen) != before+1 || !errors.Is(seen[before].Err, boom) {
		t.Errorf("a commit that failed with %v is observed as %+v", err, seen[before:])
	}
	fails = false
	put(t, s, "again=1") // the store has recovered
	u, err := s.(store.Database).Usage(t.Context())
	if err != nil || u.Size < 16*4096 || u.Free > u.Size {
		t.Errorf("16 rows of 4 KiB take %+v, %v", u, err)
	}
}

func hookFails(t *testing.T, open Open) {
	boom := errors.New("boom")
	fail := false
	s := start(t, open, Options{Hook: func(tx store.Tx, _ []any) error {
		if !fail {
			return nil
		}
		return errors.Join(tx.Put([]byte("hook"), nil), boom)
	}})
	put(t, s, "a=1")
	fail = true
	together(t, 4, func(i int) error {
		err := s.Update(context.Background(), func(tx store.Tx) error { return tx.Put(fmt.Appendf(nil, "%d", i), nil) })
		if !errors.Is(err, boom) || fault.Of(err) != fault.Internal {
			return fmt.Errorf("the hook's error became %w", err)
		}
		return nil
	})
	fail = false
	put(t, s, "b=1")
	wantAll(t, s, "a=1", "b=1")
}
