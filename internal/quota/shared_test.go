package quota

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/clock"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/test/storetest"
)

// shared is a store and its time, which several replicas share.
type shared struct {
	t       *testing.T
	store   store.Store
	updates atomic.Int64
	down    atomic.Bool

	mu   sync.Mutex
	time time.Time
}

func newShared(t *testing.T) *shared {
	t.Helper()
	db, err := bolt.Open(filepath.Join(t.TempDir(), "q.db"), bolt.Options{})
	must(t, err)
	t.Cleanup(func() { _ = db.Close() })
	return &shared{t: t, store: storetest.Rehearsing(db), time: time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (s *shared) now() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.time
}

func (s *shared) advance(d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.time = s.time.Add(d)
}

var errDown = fault.New(fault.Unavailable, "the store is down")

// View counts and calls the store's View, and fails when the store is down. Update does the same.
func (s *shared) View(ctx context.Context, fn func(store.Reader) error) error {
	if s.down.Load() {
		return errDown
	}
	return s.store.View(ctx, fn)
}

func (s *shared) Update(ctx context.Context, fn func(store.Tx) error) error {
	if s.down.Load() {
		return errDown
	}
	s.updates.Add(1)
	return s.store.Update(ctx, fn)
}

func (s *shared) Ready(ctx context.Context) error { return s.store.Ready(ctx) }
func (s *shared) Close() error                    { return s.store.Close() }

// replica returns the limiter of a process whose own clock is ahead by the given time.
func (s *shared) replica(ahead time.Duration, most int) *Limiter {
	c := clock.New(func(context.Context) (time.Time, error) { return s.now(), nil }, func() time.Time { return s.now().Add(ahead) })
	return NewShared(NewLender(s, c), "tenant", most)
}

// use takes until the bucket is full and returns how many requests were granted.
func use(t *testing.T, l *Limiter, limit int) (n int) {
	t.Helper()
	for {
		u, err := l.Borrow(t.Context(), "a", limit)
		must(t, err)
		if u.Remaining < 0 || u.Limit != limit || u.Reset.Sub(l.now()) > time.Minute {
			t.Fatal(u)
		}
		if u.Exceeded {
			if u.Remaining != 0 {
				t.Fatal("something remains of a bucket that is full:", u)
			}
			return n
		}
		n++
	}
}

func TestOneReplicaUsesAllOfALimitAndWritesSeldom(t *testing.T) {
	for _, limit := range []int{1, 2, 7, 30, 1000, 5000, 100_000} {
		s := newShared(t)
		l := s.replica(-3*time.Minute, 0)
		for minute := range 2 {
			before := s.updates.Load()
			if n := use(t, l, limit); n != limit {
				t.Errorf("limit %d, minute %d: %d granted", limit, minute, n)
			}
			if asked := s.updates.Load() - before; asked > int64(min(limit+1, 120)) {
				t.Errorf("limit %d: asked %d times", limit, asked)
			}
			before = s.updates.Load()
			if use(t, l, limit) != 0 || s.updates.Load() != before {
				t.Error("a bucket that is full is asked for again")
			}
			s.advance(time.Minute)
		}
	}
}

// However far the clocks of three replicas are apart and however the load is spread, together they
// grant as much as one.
func TestReplicasTogetherGrantTheLimitAndNoMore(t *testing.T) {
	const limit = 900
	s := newShared(t)
	replicas := []*Limiter{s.replica(0, 0), s.replica(3*time.Minute, 0), s.replica(-3*time.Minute-7*time.Second, 0)}
	for range 4 {
		var granted atomic.Int64
		var wg sync.WaitGroup
		for i, l := range replicas {
			for range 4 * (i + 1) {
				wg.Go(func() {
					for {
						switch u, err := l.Borrow(t.Context(), "a", limit); {
						case err != nil:
							t.Error(err)
							return
						case u.Exceeded:
							return
						}
						granted.Add(1)
					}
				})
			}
		}
		wg.Wait()
		if granted.Load() != limit {
			t.Fatalf("%d granted, the limit is %d", granted.Load(), limit)
		}
		s.advance(time.Minute)
	}
}

// Requests come to any replica at any time, and some replicas restart with another clock.
func TestNoMinuteOfTheStoreGrantsMoreThanTheLimit(t *testing.T) {
	for seed := range uint64(20) {
		random := rand.New(rand.NewPCG(seed, 1))
		s := newShared(t)
		limit := 20 + random.IntN(80)
		var ahead [3]atomic.Int64
		begin := func(i int) *Limiter {
			ahead[i].Store(int64(random.IntN(600)-300) * int64(time.Second))
			c := clock.New(func(context.Context) (time.Time, error) { return s.now(), nil },
				func() time.Time { return s.now().Add(time.Duration(ahead[i].Load())) })
			return NewShared(NewLender(s, c), "tenant", 0)
		}
		replicas := [3]*Limiter{begin(0), begin(1), begin(2)}
		granted := make(map[time.Time]int)
		for range 2000 {
			i := random.IntN(3)
			switch random.IntN(200) {
			case 0:
				replicas[i] = begin(i)
			case 1:
				s.advance(time.Duration(random.IntN(100)) * time.Second)
			}
			s.advance(time.Duration(random.IntN(200)) * time.Millisecond)
			u, err := replicas[i].Borrow(t.Context(), "a", limit)
			must(t, err)
			if !u.Exceeded {
				granted[s.now().Truncate(time.Minute)]++
			}
		}
		for minute, n := range granted {
			if n > limit {
				t.Errorf("seed %d: %d granted in %v, the limit is %d", seed, n, minute, limit)
			}
		}
	}
}

func TestNothingIsGrantedThatIsNotLent(t *testing.T) {
	s := newShared(t)
	l := s.replica(0, 0)
	if _, err := l.Borrow(t.Context(), "a", 100); err != nil {
		t.Fatal(err)
	}
	s.down.Store(true)
	if _, err := l.Borrow(t.Context(), "b", 100); !errors.Is(err, fault.Unavailable) {
		t.Fatal("granted while the store is down:", err)
	}
	if u := l.Peek("b", 100); u.Remaining != 100 || u.Exceeded {
		t.Fatal("a failure counts:", u)
	}
	s.down.Store(false)
	if u, err := l.Borrow(t.Context(), "b", 100); err != nil || u.Exceeded {
		t.Fatal("not granted afterwards:", u, err)
	}
	ended, end := context.WithCancel(t.Context())
	end()
	if _, err := l.Borrow(ended, "c", 100); !errors.Is(err, fault.Unavailable) {
		t.Fatal("a caller that gave up:", err)
	}
	if n := use(t, s.replica(0, 0), 100); n > 100 {
		t.Fatal(n)
	}
}

func TestALimitThatChangesCountsAtOnce(t *testing.T) {
	s := newShared(t)
	l, other := s.replica(0, 0), s.replica(0, 0)
	if n := use(t, l, 64) + use(t, l, 100); n != 100 {
		t.Fatal("raised to 100:", n)
	}
	if n := use(t, other, 50); n != 0 {
		t.Fatal("lowered to 50, of which 100 are used:", n)
	}
	u, err := l.Borrow(t.Context(), "b", 6400) // the first lease is a hundred
	if err != nil || u.Exceeded {
		t.Fatal(u, err)
	}
	if u, err = l.Borrow(t.Context(), "b", 10); err != nil || !u.Exceeded {
		t.Fatal("what was lent under another limit is used:", u, err)
	}
}

func TestACheckCountsNothingAndKnowsWhatOthersTook(t *testing.T) {
	s := newShared(t)
	l, other := s.replica(0, 0), s.replica(0, 0)
	for range 3 {
		if u, err := l.Check(t.Context(), "a", 10); err != nil || u.Exceeded || u.Remaining != 10 {
			t.Fatal(u, err)
		}
	}
	if n := use(t, other, 10) + use(t, l, 10); n != 10 {
		t.Fatal(n)
	}
	if u, err := s.replica(0, 0).Check(t.Context(), "a", 10); err != nil || !u.Exceeded {
		t.Fatal(u, err)
	}
}

func TestAFloodOfBucketsTakesFewRows(t *testing.T) {
	s := newShared(t)
	l := s.replica(0, 10)
	for i := range 200 {
		_, err := l.Borrow(t.Context(), fmt.Sprint("stranger ", i), 100, fmt.Sprint("network ", i%40))
		must(t, err)
	}
	if n := s.rows(); n != 21 { // ten names, ten networks, and one for all others
		t.Fatal(n, "rows")
	}
	if u, err := l.Borrow(t.Context(), "stranger 5", 2); err != nil || u.Exceeded || u.Remaining != 0 {
		t.Fatal("one from before the flood is counted with others:", u, err)
	}
	all := 0
	for {
		u, err := l.Borrow(t.Context(), fmt.Sprint("late ", all), 100, fmt.Sprint("of network ", all))
		must(t, err)
		if u.Exceeded {
			break
		}
		all++
	}
	if all >= 100 {
		t.Fatal(all, "strangers beyond the bound were granted")
	}
}

func (s *shared) rows() (n int) {
	s.t.Helper()
	must(s.t, s.store.View(s.t.Context(), func(r store.Reader) error {
		return r.Scan(store.Range{}, func(_, _ []byte) bool { n++; return true })
	}))
	return n
}

func TestMinutesThatAreOverAreSwept(t *testing.T) {
	s := newShared(t)
	l := s.replica(time.Hour, 0)
	for minute := range 10 {
		for i := range 3 {
			_, err := l.Borrow(t.Context(), fmt.Sprint(i), 100)
			must(t, err)
		}
		must(t, NewLender(s, clock.New(func(context.Context) (time.Time, error) { return s.now(), nil }, s.now)).Sweep(t.Context()))
		if want := 3 * min(minute+1, 4); s.rows() != want {
			t.Fatalf("minute %d: %d rows, want %d", minute, s.rows(), want)
		}
		s.advance(time.Minute)
	}
	if n := use(t, l, 50); n != 50 {
		t.Fatal(n)
	}
}

// A replica that was asked for much has borrowed more than its next request needs, but leaves most
// of the limit to the others.
func TestWhatAnIdleReplicaHoldsIsLittle(t *testing.T) {
	const limit = 1000
	s := newShared(t)
	idle, busy := s.replica(0, 0), s.replica(0, 0)
	for range 2 {
		_, err := idle.Borrow(t.Context(), "a", limit)
		must(t, err)
	}
	if n := use(t, busy, limit); n < limit*9/10 || n > limit-2 {
		t.Fatalf("%d of %d are left for a replica beside one that took two", n, limit)
	}
}
