package postgres

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/url"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/pgtest"
)

// openAt opens a store that is closed after the test.
func openAt(t testing.TB, url string, o Options) *Store {
	t.Helper()
	s, err := Open(t.Context(), url, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("closing: %v", err)
		}
	})
	return s
}

// breakable returns the shared server for a test that breaks it and repairs it afterwards. The test
// runs alone in its process.
func breakable(t *testing.T) *pgtest.Server {
	t.Helper()
	s := pgtest.Shared(t)
	t.Cleanup(func() {
		_ = s.Thaw()
		if s.Exec(context.Background(), "SELECT 1") == nil {
			return
		}
		if err := s.Restart(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// chain is a hook that gives every event the next number, as the log does. A lost or doubled commit
// leaves a gap or a fork.
func chain(tx store.Tx, events []any) error {
	for _, e := range events {
		n, err := bump(tx, "head")
		if err != nil {
			return err
		}
		if err := tx.Put(fmt.Appendf(nil, "entry/%08d", n), []byte(e.(string))); err != nil {
			return err
		}
	}
	return nil
}

func bump(tx store.Tx, key string) (uint64, error) {
	v, err := tx.Get([]byte(key))
	if err != nil {
		return 0, err
	}
	n := uint64(1)
	if v != nil {
		n += binary.BigEndian.Uint64(v)
	}
	return n, tx.Put([]byte(key), binary.BigEndian.AppendUint64(nil, n))
}

// load runs writers that each update their own counter and a common one until it is stopped. It
// records what was acknowledged.
type load struct {
	stores []*Store
	stop   chan struct{}
	done   sync.WaitGroup
	acked  []atomic.Uint64 // acknowledged updates of each writer
	tried  []atomic.Uint64
	failed atomic.Uint64
}

func startLoad(stores ...*Store) *load {
	const writers = 8
	l := &load{stores: stores, stop: make(chan struct{}), acked: make([]atomic.Uint64, writers), tried: make([]atomic.Uint64, writers)}
	for w := range writers {
		s := stores[w%len(stores)]
		l.done.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-l.stop:
					return
				default:
				}
				l.tried[w].Add(1)
				err := s.Update(context.Background(), func(tx store.Tx) error {
					n, err := bump(tx, fmt.Sprintf("writer/%d", w))
					if err != nil {
						return err
					}
					if _, err := bump(tx, "common"); err != nil {
						return err
					}
					tx.Enqueue(fmt.Sprintf("%d:%d", w, n))
					return nil
				})
				if err == nil {
					l.acked[w].Add(1)
				} else if l.failed.Add(1); fault.Of(err) != fault.Unavailable {
					panic(err)
				}
			}
		})
	}
	return l
}

func (l *load) total() (n uint64) {
	for w := range l.acked {
		n += l.acked[w].Load()
	}
	return n
}

// progress waits until n more updates have been acknowledged.
func (l *load) progress(t *testing.T, n uint64) {
	t.Helper()
	from := l.total()
	eventually(t, "no progress", func() bool { return l.total() >= from+n })
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !ok(); {
		if time.Now().After(end) {
			t.Fatal(what)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// check ends the load and compares: an acknowledged update is there once, any other at most once,
// and the chain has no gap.
func (l *load) check(t *testing.T) {
	t.Helper()
	close(l.stop)
	l.done.Wait()
	rows := make(map[string][]byte)
	eventually(t, "no copy", func() bool {
		clear(rows)
		return l.stores[0].Copy(t.Context(), func(k, v []byte) error { rows[string(k)] = v; return nil }) == nil
	})
	count := func(key string) uint64 {
		if rows[key] == nil {
			return 0
		}
		return binary.BigEndian.Uint64(rows[key])
	}
	var sum uint64
	for w := range l.acked {
		n, acked, tried := count(fmt.Sprintf("writer/%d", w)), l.acked[w].Load(), l.tried[w].Load()
		if n < acked || n > tried {
			t.Errorf("writer %d: %d stored, %d acknowledged, %d tried", w, n, acked, tried)
		}
		sum += n
	}
	if n := count("common"); n != sum {
		t.Errorf("the common counter is %d, the others are %d together", n, sum)
	}
	if n := count("head"); n != sum {
		t.Errorf("the chain has %d entries of %d updates", n, sum)
	}
	seen := make(map[string]bool)
	for i := range sum {
		v, ok := rows[fmt.Sprintf("entry/%08d", i+1)]
		if !ok || seen[string(v)] {
			t.Fatalf("entry %d of the chain is %q, %v", i+1, v, ok)
		}
		seen[string(v)] = true
	}
	if sum == 0 {
		t.Error("nothing was written")
	}
	t.Logf("%d updates, %d failed", sum, l.failed.Load())
}

func TestTwoStoresShareOneSerialOrder(t *testing.T) {
	url := pgtest.Shared(t).URL()
	l := startLoad(openAt(t, url, Options{Hook: chain}), openAt(t, url, Options{Hook: chain}))
	l.progress(t, 600)
	l.check(t)
}

// TestAViewSeesWhatAnyStoreAcknowledged reads from one store what another has just written.
func TestAViewSeesWhatAnyStoreAcknowledged(t *testing.T) {
	url := pgtest.Shared(t).URL()
	a, b := openAt(t, url, Options{}), openAt(t, url, Options{})
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			key := fmt.Appendf(nil, "k%d", w)
			for i := range 40 {
				from, to := a, b
				if i%2 == 1 {
					from, to = b, a
				}
				want := fmt.Sprint(i)
				err := from.Update(context.Background(), func(tx store.Tx) error { return tx.Put(key, []byte(want)) })
				if err != nil {
					t.Error(err)
					return
				}
				err = to.View(context.Background(), func(r store.Reader) error {
					got, err := r.Get(key)
					if string(got) != want {
						t.Errorf("the other store reads %q of %s, want %s", got, key, want)
					}
					return err
				})
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
}

func TestNothingAcknowledgedIsLostWhenPostgreSQLIsKilled(t *testing.T) {
	s := breakable(t)
	l := startLoad(openAt(t, s.URL(), Options{Hook: chain}), openAt(t, s.URL(), Options{Hook: chain}))
	for range 3 {
		l.progress(t, 100)
		if err := s.Kill(); err != nil {
			t.Fatal(err)
		}
		if err := s.Restart(); err != nil {
			t.Fatal(err)
		}
	}
	l.progress(t, 100)
	l.check(t)
}

func TestARestartOfPostgreSQLIsSurvived(t *testing.T) {
	s := breakable(t)
	db := openAt(t, s.URL(), Options{Hook: chain})
	l := startLoad(db)
	l.progress(t, 50)
	if err := s.Restart(); err != nil {
		t.Fatal(err)
	}
	l.progress(t, 50)
	eventually(t, "not ready again", func() bool { return db.Ready(t.Context()) == nil })
	l.check(t)
}

func TestAFrozenDatabaseIsABoundedWait(t *testing.T) {
	s := breakable(t)
	db := openAt(t, s.URL(), Options{Hook: chain})
	l := startLoad(db)
	l.progress(t, 50)
	if err := s.Freeze(); err != nil {
		t.Fatal(err)
	}
	view := func() error {
		return db.View(context.Background(), func(r store.Reader) error { _, err := r.Get([]byte("head")); return err })
	}
	// A caller with a short deadline gets an answer at once. The View's own limit, two seconds, has
	// another error.
	soon, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	for what, err := range map[string]error{
		"View":   db.View(soon, func(r store.Reader) error { _, err := r.Get([]byte("head")); return err }),
		"Update": db.Update(soon, func(tx store.Tx) error { _, err := bump(tx, "soon"); return err }),
	} {
		if !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, errRecovering) || fault.Of(err) != fault.Unavailable {
			t.Errorf("%s with little time: %v", what, err)
		}
	}
	began := time.Now()
	if err := view(); fault.Of(err) != fault.Unavailable {
		t.Errorf("a View of a frozen database: %v", err)
	}
	if d := time.Since(began); d > time.Minute || viewLimit > 2*time.Second { // a busy machine is slow, but the limit is fixed
		t.Errorf("it took %v, with a limit of %v", d, viewLimit)
	}
	eventually(t, "still called ready", func() bool { return fault.Of(db.Ready(context.Background())) == fault.Unavailable })
	eventually(t, "Views are not turned away at once", func() bool {
		began := time.Now()
		return view() != nil && time.Since(began) < 100*time.Millisecond
	})
	if err := s.Thaw(); err != nil {
		t.Fatal(err)
	}
	l.progress(t, 50)
	eventually(t, "not ready again", func() bool { return db.Ready(context.Background()) == nil })
	l.check(t)
}

func TestWhileItIsDownRequestsAreTurnedAwaySoon(t *testing.T) {
	s := breakable(t)
	db := openAt(t, s.URL(), Options{})
	if err := s.Kill(); err != nil {
		t.Fatal(err)
	}
	put := func() error {
		return db.Update(context.Background(), func(tx store.Tx) error { return tx.Put([]byte("k"), nil) })
	}
	// This View discovers the outage.
	_ = db.View(t.Context(), func(r store.Reader) error { _, err := r.Get([]byte("k")); return err })
	began := time.Now()
	if err := put(); fault.Of(err) != fault.Unavailable {
		t.Errorf("an Update without a database: %v", err)
	}
	if d := time.Since(began); d > time.Minute || impatience > time.Second/2 { // a busy machine is slow, but the limit is fixed
		t.Errorf("it took %v, with a limit of %v", d, impatience)
	}
	if err := s.Restart(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "no recovery", func() bool { return put() == nil })
}

func TestLosingSessionsLosesNothing(t *testing.T) {
	s := breakable(t)
	l := startLoad(openAt(t, s.URL(), Options{Hook: chain}), openAt(t, s.URL(), Options{Hook: chain}))
	for range 15 {
		l.progress(t, 20)
		if err := s.Exec(t.Context(), "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'latticekeep' AND random() < 0.7"); err != nil {
			t.Fatal(err)
		}
	}
	l.progress(t, 50)
	l.check(t)
	if l.failed.Load() > 0 {
		t.Errorf("%d updates failed, though the server was there all the time", l.failed.Load())
	}
}

// TestAStoppedWriterIsPassed stops a store while it holds the lock on the head.
func TestAStoppedWriterIsPassed(t *testing.T) {
	url := pgtest.Shared(t).URL()
	var stop atomic.Bool
	stopped, goOn := make(chan struct{}), make(chan struct{})
	a := openAt(t, url, Options{Hook: func(tx store.Tx, events []any) error {
		if stop.CompareAndSwap(true, false) {
			close(stopped)
			<-goOn
		}
		return chain(tx, events)
	}})
	b := openAt(t, url, Options{Hook: chain})
	write := func(s *Store, what string) error {
		return s.Update(context.Background(), func(tx store.Tx) error { tx.Enqueue(what); return nil })
	}
	stop.Store(true)
	first := make(chan error)
	go func() { first <- write(a, "a") }()
	<-stopped
	if err := write(b, "b"); err != nil {
		t.Errorf("the other store: %v", err)
	}
	close(goOn)
	if err := <-first; err != nil {
		t.Errorf("the stopped one, tried again: %v", err)
	}
	err := b.View(t.Context(), func(r store.Reader) error {
		one, err := r.Get([]byte("entry/00000001"))
		two, err2 := r.Get([]byte("entry/00000002"))
		three, err3 := r.Get([]byte("entry/00000003"))
		if string(one) != "b" || string(two) != "a" || three != nil {
			t.Errorf("the chain is %q, %q, %q", one, two, three)
		}
		return errors.Join(err, err2, err3)
	})
	if err != nil {
		t.Error(err)
	}
}

// withHost returns the URL with another host.
func withHost(t *testing.T, text, host string) string {
	t.Helper()
	u, err := url.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	u.Host = host
	return u.String()
}

func TestAnAmbiguousCommitIsSettled(t *testing.T) {
	for _, delivered := range []bool{true, false} {
		t.Run(fmt.Sprintf("delivered=%v", delivered), func(t *testing.T) {
			url := pgtest.Shared(t).URL()
			p := newProxy(t, url)
			s := openAt(t, withHost(t, url, p.address), Options{Hook: chain})
			for i := range 10 {
				p.cut(delivered)
				if err := s.Update(t.Context(), func(tx store.Tx) error { _, err := bump(tx, "n"); tx.Enqueue(fmt.Sprint(i)); return err }); err != nil {
					t.Fatal(err)
				}
			}
			if n := p.cuts.Load(); n < 10 {
				t.Fatalf("%d commits of 10 were cut", n)
			}
			err := s.View(t.Context(), func(r store.Reader) error {
				n, err := r.Get([]byte("n"))
				head, err2 := r.Get([]byte("head"))
				if binary.BigEndian.Uint64(n) != 10 || binary.BigEndian.Uint64(head) != 10 {
					t.Errorf("10 updates made %d, and %d entries", n, head)
				}
				return errors.Join(err, err2)
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
}
