package outbox

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
)

// fixture is a database file with rows, and the test's clock.
type fixture struct {
	t     *testing.T
	store store.Database
	rows  *Outbox

	mu    sync.Mutex
	clock time.Time
}

const timeout = 30 * time.Second

func newFixture(t *testing.T) *fixture {
	t.Helper()
	s, err := bolt.Open(filepath.Join(t.TempDir(), "store.db"), bolt.Options{})
	must(t, err)
	t.Cleanup(func() { _ = s.Close() })
	f := &fixture{t: t, store: s, clock: time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)}
	f.rows = f.at(0)
	return f
}

// at returns the outbox of another replica, whose clock is ahead by the given time.
func (f *fixture) at(ahead time.Duration) *Outbox {
	return New(Config{
		Store: f.store, Noun: "parcel", Retrying: "a parcel could not be sent; retrying", GivingUp: "giving up on a parcel", Rows: "parcel/", Attempts: "parcel-attempt/", Timeout: timeout, Parallel: 4, Longest: time.Hour,
		Wait: func(failed int) time.Duration { return time.Duration(failed) * time.Minute },
		Now: func() time.Time {
			f.mu.Lock()
			defer f.mu.Unlock()
			return f.clock.Add(ahead)
		},
	})
}

func (f *fixture) courier(ahead time.Duration, deliver Deliver) *Courier {
	return f.at(ahead).Courier(slog.New(slog.DiscardHandler), deliver)
}

func (f *fixture) advance(d time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.clock = f.clock.Add(d)
}

func (f *fixture) put(id string) {
	f.t.Helper()
	must(f.t, f.store.Update(f.t.Context(), func(tx store.Tx) error { return f.rows.Put(tx, id, []byte("row of "+id)) }))
}

func (f *fixture) count(prefix string) int {
	f.t.Helper()
	n, err := Queued(f.t.Context(), f.store, prefix)
	must(f.t, err)
	return n
}

func (f *fixture) pass(c *Courier) time.Duration {
	f.t.Helper()
	wait, err := c.Pass(f.t.Context())
	must(f.t, err)
	return wait
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

var errRefused = errors.New("connection refused")

// Several replicas empty one outbox and deliver each row once, even if their clocks are minutes apart.
func TestReplicasDeliverEachRowOnce(t *testing.T) {
	f := newFixture(t)
	want := make(map[string]int)
	for n := range 3 * passSize {
		id := strconv.Itoa(n)
		f.put(id)
		want[id] = 1
	}
	var mu sync.Mutex
	sent := make(map[string]int)
	deliver := func(_ context.Context, i Item) Outcome {
		mu.Lock()
		defer mu.Unlock()
		if string(i.Row) == "row of "+i.ID && string(i.Key) == "parcel/"+i.ID {
			sent[i.ID]++
		}
		return Outcome{}
	}
	var wg sync.WaitGroup
	for _, ahead := range []time.Duration{0, 3 * time.Minute, -3 * time.Minute} {
		c := f.courier(ahead, deliver)
		wg.Go(func() {
			for f.count("parcel/") > 0 {
				_, err := c.Pass(t.Context())
				must(t, err)
			}
		})
	}
	wg.Wait()
	if !maps.Equal(sent, want) {
		t.Errorf("%v", sent)
	}
	if n := f.count("parcel-attempt/"); n != 0 {
		t.Error(n, "rows are left of what is delivered")
	}
}

// While one replica is about to deliver a row no other replica does, however far ahead its clock is.
// When the first one has been gone for longer than an attempt takes, another delivers it.
func TestARowOfADeadReplicaIsDeliveredByAnother(t *testing.T) {
	f := newFixture(t)
	f.put("a")
	var sent []string
	other := f.courier(time.Hour, func(_ context.Context, i Item) Outcome {
		sent = append(sent, i.ID)
		return Outcome{}
	})
	func() {
		defer func() { _ = recover() }()
		c := f.courier(0, func(context.Context, Item) Outcome { panic("the process is killed") })
		due, _, err := c.due(t.Context())
		must(t, err)
		c.deliver(t.Context(), due[0])
	}()
	if wait := f.pass(other); wait != 2*timeout || len(sent) != 0 {
		t.Fatalf("looks again in %v, sent %v", wait, sent)
	}
	f.advance(2*timeout - time.Millisecond)
	if f.pass(other); len(sent) != 0 {
		t.Fatal("sent beside whoever claimed it:", sent)
	}
	f.advance(time.Millisecond)
	if f.pass(other); len(sent) != 1 || sent[0] != "a" || f.count("parcel/") != 0 {
		t.Fatal(sent, f.count("parcel/"))
	}
}

// After a failed attempt, all replicas wait together.
func TestReplicasTogetherWaitAfterAFailure(t *testing.T) {
	f := newFixture(t)
	f.put("a")
	tries := 0
	var couriers []*Courier
	for range 3 {
		c := f.courier(0, func(_ context.Context, i Item) Outcome {
			if i.Failed != tries {
				t.Errorf("%d attempts failed, but it says %d", tries, i.Failed)
			}
			tries++
			return Outcome{Err: errRefused}
		})
		c.restarted = false
		couriers = append(couriers, c)
	}
	for n := range 5 {
		for _, c := range couriers {
			f.pass(c)
		}
		if tries != n+1 {
			t.Fatalf("%d tries, want %d", tries, n+1)
		}
		must(t, f.store.View(t.Context(), func(r store.Reader) error {
			next, err := f.rows.Next(r, "a")
			if want := f.clock.Add(time.Duration(n+1) * time.Minute); !next.Equal(want) {
				t.Errorf("the next attempt is at %v, not %v", next, want)
			}
			return err
		}))
		f.advance(time.Duration(n+1) * time.Minute)
	}
}

// A Run that ends in the middle of an attempt releases the row to the others at once.
func TestARunThatEndsReleasesItsRows(t *testing.T) {
	f := newFixture(t)
	f.put("a")
	ctx, stop := context.WithCancel(t.Context())
	f.rows.Run(ctx, slog.New(slog.DiscardHandler), func(ctx context.Context, _ Item) Outcome {
		stop()
		<-ctx.Done()
		return Outcome{Err: ctx.Err()}
	})
	sent := 0
	f.pass(f.courier(0, func(context.Context, Item) Outcome { sent++; return Outcome{} }))
	if sent != 1 || f.count("parcel/") != 0 {
		t.Fatal(sent, f.count("parcel/"))
	}
}

// What an attempt notes is stored together with its outcome, or not at all.
func TestANoteIsPartOfTheOutcome(t *testing.T) {
	f := newFixture(t)
	write := func(row string) func(store.Tx) error {
		return func(tx store.Tx) error { return tx.Put([]byte("note/"+row), []byte("x")) }
	}
	outcomes := map[string]Outcome{
		"done": {Note: write("done")}, "final": {Err: errRefused, Final: true, Note: write("final")}, "again": {Err: errRefused, Note: write("again")},
		"unstored": {Note: func(tx store.Tx) error { return errors.Join(write("unstored")(tx), errRefused) }},
	}
	for id := range outcomes {
		f.put(id)
	}
	c := f.courier(0, func(_ context.Context, i Item) Outcome { return outcomes[i.ID] })
	f.pass(c)
	if f.count("note/") != 3 || f.count("note/unstored") != 0 || f.count("parcel/") != 2 || f.count("parcel/unstored") != 1 || f.count("parcel/again") != 1 {
		t.Error(f.count("note/"), f.count("parcel/"))
	}
	if s := c.Stats(); s.Sent != 2 || s.GivenUp != 1 || s.Postponed != 2 {
		t.Errorf("%+v", s)
	}
	// A row that is put again begins anew, and one that is deleted leaves nothing.
	f.put("again")
	must(t, f.store.Update(t.Context(), func(tx store.Tx) error { return f.rows.Delete(tx, "unstored") }))
	if f.count("parcel-attempt/") != 0 || f.count("parcel/") != 1 {
		t.Error(f.count("parcel-attempt/"), f.count("parcel/"))
	}
}

// Promise: a replica that gives up takes nothing away that another one has taken over, or somebody has put
// again.
func TestARowThatWasPutAgainIsNotGivenUp(t *testing.T) {
	f := newFixture(t)
	f.put("a")
	f.pass(f.courier(0, func(context.Context, Item) Outcome {
		f.put("a")
		return Outcome{Err: errRefused, Final: true, Note: func(store.Tx) error { t.Error("it noted the end"); return nil }}
	}))
	if n := f.count("parcel/"); n != 1 {
		t.Errorf("%d rows", n)
	}
}
