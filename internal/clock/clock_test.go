package clock

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
)

func TestAClockTellsTheSharedTimeWhateverItsOwnSays(t *testing.T) {
	shared := time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)
	own := shared.Add(-3 * time.Minute)
	var down error
	c := New(func(context.Context) (time.Time, error) {
		own = own.Add(20 * time.Millisecond) // to the database, and the same time back
		told := shared.Add(10 * time.Millisecond)
		shared = shared.Add(20 * time.Millisecond)
		return told, down
	}, func() time.Time { return own })
	if !c.Now().Equal(own) {
		t.Fatal("it knows another time before it asked:", c.Now())
	}
	if err := c.Measure(t.Context()); err != nil || !c.Now().Equal(shared) {
		t.Fatal(c.Now(), shared, err)
	}
	own, shared = own.Add(time.Second), shared.Add(time.Second)
	if !c.Now().Equal(shared) || c.Ahead() != 3*time.Minute {
		t.Fatal(c.Now(), shared, c.Ahead())
	}
	down = errors.New("connection refused")
	if err := c.Fresh(t.Context(), time.Minute); err != nil {
		t.Fatal("a young answer is not enough:", err)
	}
	before := c.Now()
	if err := c.Fresh(t.Context(), time.Millisecond); !errors.Is(err, fault.Unavailable) || c.Now().Sub(before) != 20*time.Millisecond {
		t.Fatal(err, c.Now().Sub(before))
	}
}

func TestAClockIsFollowedAndAWrongMachineIsToldOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		var ahead atomic.Int64 // a time.Duration
		ahead.Store(int64(3 * time.Minute))
		c := New(func(context.Context) (time.Time, error) { return time.Now().Add(time.Duration(ahead.Load())), nil }, nil)
		ctx, end := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			c.Follow(ctx, slog.New(slog.NewTextHandler(&log, nil)))
			close(done)
		}()
		synctest.Wait()
		time.Sleep(5 * every) // the bubble's clock
		synctest.Wait()
		if n := strings.Count(log.String(), "differs from the database's"); n != 1 || c.Ahead() != 3*time.Minute {
			t.Error(n, c.Ahead(), log.String())
		}
		ahead.Store(0)
		time.Sleep(every)
		synctest.Wait()
		if !strings.Contains(log.String(), "right again") || c.Ahead() != 0 {
			t.Error(c.Ahead(), log.String())
		}
		end()
		<-done
	})
}

func TestATimeThatIsHoursAwayIsNotGoneBy(t *testing.T) {
	local := time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)
	told := local.Add(59 * time.Minute)
	c := New(func(context.Context) (time.Time, error) { return told, nil }, func() time.Time { return local })
	if err := c.Measure(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, far := range []time.Duration{2 * time.Hour, -2 * time.Hour, 73 * 365 * 24 * time.Hour} {
		told = local.Add(far)
		if err := c.Measure(t.Context()); !errors.Is(err, fault.Unavailable) {
			t.Errorf("%s: %v", far, err)
		}
		if got := c.Now(); !got.Equal(local.Add(59 * time.Minute)) {
			t.Errorf("%s: it is %s", far, got)
		}
	}
}
