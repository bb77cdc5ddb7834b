package quota

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/clock"
	"github.com/latticekeep/latticekeep/internal/store/postgres"
	"github.com/latticekeep/latticekeep/test/pgtest"
)

// Three processes share one PostgreSQL, and their clocks are minutes apart. In each minute of the
// database they grant as much as one process.
func TestReplicasOnPostgreSQLGrantTheLimitAndNoMore(t *testing.T) {
	const limit = 300
	url := pgtest.Shared(t).URL()
	var granted [2]atomic.Int64 // for two minutes, because the first may end during the test
	var first atomic.Pointer[time.Time]
	var wg sync.WaitGroup
	for _, ahead := range []time.Duration{0, 3 * time.Minute, -3 * time.Minute} {
		s, err := postgres.Open(t.Context(), url, postgres.Options{})
		must(t, err)
		t.Cleanup(func() { _ = s.Close() })
		c := clock.New(s.Time, func() time.Time { return time.Now().Add(ahead) })
		lender := NewLender(s, c)
		l := NewShared(lender, "tenant", 0)
		for range 4 {
			wg.Go(func() {
				for {
					u, err := l.Borrow(t.Context(), "a", limit)
					if err != nil {
						t.Error(err)
						return
					}
					minute := u.Reset
					first.CompareAndSwap(nil, &minute)
					if u.Exceeded {
						return
					}
					at := 0
					if !minute.Equal(*first.Load()) {
						at = 1
					}
					granted[at].Add(1)
				}
			})
		}
	}
	wg.Wait()
	if a, b := granted[0].Load(), granted[1].Load(); a > limit || b > limit || a < limit && b == 0 {
		t.Fatalf("%d granted, and %d in the next minute; the limit is %d", a, b, limit)
	}
}
