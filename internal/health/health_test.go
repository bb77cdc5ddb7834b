package health

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

var errDown = errors.New("it is\n\tdown")

// A fault of the replica alone makes it unready at any time. A shared fault only keeps it from
// becoming ready, but stops calls either way.
func TestReadinessDependsOnWhoHasTheFault(t *testing.T) {
	for _, c := range []struct {
		scope         Scope
		stops         []Class
		first, later  bool // ready, for a fault from the start and for a later one
		read, changes bool // served
	}{
		{Replica, Classes(), false, false, false, false},
		{Replica, []Class{Read}, false, false, false, true},
		{Replica, []Class{Change}, true, true, true, false},
		{Replica, nil, true, true, true, true},
		{Shared, Classes(), false, true, false, false},
		{Shared, []Class{Read}, false, true, false, true},
		{Shared, []Class{Change}, true, true, true, false},
		{Shared, nil, true, true, true, true},
	} {
		var err error
		monitor := func() *Monitor {
			return New(Check{Name: "other", Scope: Replica, Stops: Classes(), Ask: func(context.Context) error { return nil }},
				Check{Name: "part", Scope: c.scope, Stops: c.stops, Ask: func(context.Context) error { return err }})
		}
		m := monitor()
		if err := m.Report(t.Context()).Ready(); err != nil {
			t.Fatal(err)
		}
		err = errDown
		first, later := monitor().Report(t.Context()), m.Report(t.Context())
		if first.Ready() == nil != c.first || later.Ready() == nil != c.later {
			t.Errorf("%s %v: from the start %v, later %v", c.scope, c.stops, first.Ready(), later.Ready())
		}
		if later.Stopped(Read) == nil != c.read || later.Stopped(Change) == nil != c.changes {
			t.Errorf("%s %v: read %v, change %v", c.scope, c.stops, later.Stopped(Read), later.Stopped(Change))
		}
		for _, r := range []error{first.Ready(), later.Ready(), later.Stopped(Read), later.Stopped(Change)} {
			if r != nil && !errors.Is(r, errDown) {
				t.Errorf("%v does not name the cause", r)
			}
		}
		err = nil
		if m.Report(t.Context()).Ready() != nil {
			t.Error("no recovery")
		}
	}
}

func TestTheReportListsEveryCheckOnItsOwnLine(t *testing.T) {
	fails := func(context.Context) error { return errDown }
	m := New(Check{Name: "store", Scope: Replica, Stops: Classes(), Ask: func(context.Context) error { return nil }},
		Check{Name: "disk", Scope: Replica, Stops: []Class{Change}, Ask: fails},
		Check{Name: "anchors", Scope: Shared, Ask: fails})
	const want = "[+]store ok\n[-]disk failed (replica; stops change): it is down\n[-]anchors failed (shared; stops nothing): it is down\n" +
		"read calls: served\nchange calls: stopped\nreadyz check passed\n"
	if got := m.Report(t.Context()).Text(error.Error); got != want {
		t.Errorf("%s\ninstead of\n%s", got, want)
	}
	m = New(Check{Name: "disk", Scope: Replica, Stops: Classes(), Ask: fails})
	got := m.Report(t.Context()).Text(func(error) string { return "not said" })
	if strings.Contains(got, "down") || !strings.HasSuffix(got, "\nreadyz check failed\n") {
		t.Error(got)
	}
}

func TestAReportTakesAsLongAsItsSlowestCheck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slow := Check{Ask: func(context.Context) error { time.Sleep(time.Second); return nil }}
		began := time.Now()
		New(slow, slow, slow).Report(t.Context())
		if took := time.Since(began); took != time.Second {
			t.Error(took)
		}
	})
}

// calls stands for the calls of requests and counts the probes.
type calls struct {
	last   Outcome
	err    error // of the next probe
	probes int
}

func (c *calls) watch(bridges time.Duration) *Watch {
	return &Watch{Bridges: bridges, Now: time.Now, Last: func() Outcome { return c.last }, Try: func(context.Context) error {
		c.probes++
		return c.err
	}}
}

func (c *calls) end(err error) {
	c.last.Err = err
	if err == nil {
		c.last.Succeeded = time.Now()
	} else {
		c.last.Failed = time.Now()
	}
}

func TestCallsOfRequestsMakeProbesUnnecessary(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c calls
		w := c.watch(0)
		for range 1000 {
			time.Sleep(probeInterval - time.Nanosecond)
			c.end(nil)
			if err := w.Ask(t.Context()); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Nanosecond)
		}
		c.end(errDown)
		if err := w.Ask(t.Context()); !errors.Is(err, errDown) {
			t.Error(err)
		}
		c.end(nil)
		if err := w.Ask(t.Context()); err != nil {
			t.Error("no recovery:", err)
		}
		if c.probes != 0 {
			t.Errorf("%d probes", c.probes)
		}
	})
}

func TestAnIdlePartIsProbedAtMostEveryTenSeconds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := calls{err: errDown}
		w := c.watch(0)
		for range 100 { // 100 s
			if err := w.Ask(t.Context()); !errors.Is(err, errDown) {
				t.Fatal(err)
			}
			time.Sleep(time.Second)
		}
		if c.probes != 10 {
			t.Errorf("%d probes in 100 s", c.probes)
		}
		c.err = nil
		time.Sleep(probeInterval)
		if err := w.Ask(t.Context()); err != nil {
			t.Error("no recovery:", err)
		}
	})
}

// While the caches bridge an outage, calls are served. A part that works is probed no more often than
// its caches end.
func TestAnOutageCountsOnceTheCachesHaveEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const bridges = 5 * time.Minute
		var c calls
		w := c.watch(bridges)
		c.end(nil)
		time.Sleep(time.Minute)
		c.end(errDown)
		c.err = errDown
		time.Sleep(bridges - time.Minute - time.Second)
		if err := w.Ask(t.Context()); err != nil {
			t.Error("the caches still serve:", err)
		}
		time.Sleep(time.Second)
		if err := w.Ask(t.Context()); !errors.Is(err, errDown) {
			t.Error(err)
		}

		c = calls{}
		w = c.watch(bridges)
		c.end(nil)
		c.err = errDown
		for range 299 {
			time.Sleep(time.Second)
			if err := w.Ask(t.Context()); err != nil || c.probes != 0 {
				t.Fatal(c.probes, err)
			}
		}
		time.Sleep(time.Second)
		if err := w.Ask(t.Context()); !errors.Is(err, errDown) || c.probes != 1 {
			t.Error("an idle part that fails:", c.probes, err)
		}
	})
}

func TestAProbeThatLearnsNothingChangesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := calls{err: ErrUnasked}
		w := c.watch(0)
		for _, before := range []error{nil, errDown} {
			c.end(before)
			time.Sleep(time.Hour)
			if err := w.Ask(t.Context()); !errors.Is(err, before) {
				t.Errorf("%v became %v", before, err)
			}
		}
		if c.probes != 2 {
			t.Error(c.probes)
		}
	})
}

func TestWhoeverHangsUpIsNoOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		w := &Watch{Bridges: 5 * time.Minute, Now: time.Now, Last: func() Outcome { return Outcome{Succeeded: start} },
			Try: func(ctx context.Context) error {
				select {
				case <-time.After(20 * time.Millisecond):
					return nil
				case <-ctx.Done():
					return ctx.Err()
				}
			}}
		time.Sleep(6 * time.Minute)
		ctx, hangUp := context.WithTimeout(t.Context(), time.Millisecond)
		defer hangUp()
		if err := w.Ask(ctx); err != nil {
			t.Error(err)
		}
	})
}
