package writer_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/keeper"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/test/audittest"
)

func TestWhatIsDerivedFollowsTheChain(t *testing.T) {
	f := audittest.NewFixture(t)
	if _, _, err := f.Log.Chain.NewestCheckpoint(t.Context()); fault.Of(err) != fault.Unavailable {
		t.Errorf("before the first: %v", err)
	}
	if f.Log.Lag() != 1 {
		t.Error("the lag is", f.Log.Lag())
	}
	size := int64(1)
	for _, n := range []int{0, 1, 1, 252, 1, 1, 255, 700} {
		f.Write(n)
		size += int64(n)
		if c := f.Follow(); c.Size != size || c.Epoch != 1 || c.Sequence != uint64(size) {
			t.Fatalf("%+v", c)
		}
		f.FollowsTo(size)
		if f.Log.Lag() != 0 {
			t.Error("the lag is", f.Log.Lag())
		}
	}
}

// faulty is a store whose Updates a test can make fail, counted from 1. It shares the database with
// logs that opened the store before.
type faulty struct {
	store.Store
	views, updates atomic.Int64
	fail           func(update int64, closure func(store.Tx) error) error // nil for none
}

func (s *faulty) View(ctx context.Context, fn func(store.Reader) error) error {
	s.views.Add(1)
	return s.Store.View(ctx, fn)
}

func (s *faulty) Update(ctx context.Context, fn func(store.Tx) error) error {
	n := s.updates.Add(1)
	if s.fail == nil {
		return s.Store.Update(ctx, fn)
	}
	return s.fail(n, fn)
}

// The follower processes an old log without a tree in steps of bounded size. A process that ends
// between or during steps, or gets an error for a commit that succeeded, loses nothing and repeats
// nothing.
func TestFollowingGoesOnAfterAnyFailure(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Write(2*writer.StepEntries + 20)
	broken := fault.New(fault.Unavailable, "broken")
	kinds := map[string]func(fn func(store.Tx) error) error{
		"not begun": func(func(store.Tx) error) error { return broken },
		"undone": func(fn func(store.Tx) error) error {
			return f.Store.Update(context.Background(), func(tx store.Tx) error { return errors.Join(fn(tx), broken) })
		},
		"run again, and kept though it failed": func(fn func(store.Tx) error) error {
			_ = f.Store.Update(context.Background(), func(tx store.Tx) error { return errors.Join(fn(tx), broken) })
			return errors.Join(f.Store.Update(context.Background(), fn), broken)
		},
	}
	for name, kind := range kinds {
		for failing := int64(1); failing <= 3; failing++ {
			t.Run(fmt.Sprint(name, " ", failing), func(t *testing.T) {
				f.T = t
				f.Forget()
				s := &faulty{Store: f.Store}
				s.fail = func(n int64, fn func(store.Tx) error) error {
					if n == failing {
						return kind(fn)
					}
					return f.Store.Update(context.Background(), fn)
				}
				if _, err := f.Another(s).Follow(t.Context()); !errors.Is(err, fault.Unavailable) {
					t.Fatal(err)
				}
				done := failing - 1
				if strings.HasPrefix(name, "run again") {
					done = failing
				}
				if size := min(done*writer.StepEntries, 2*writer.StepEntries+21); size > 0 {
					f.FollowsTo(size)
				} else if rows := f.RowsOf(audit.TileRange, audit.SummaryRange, store.Prefix(audit.CheckpointKey)); len(rows) > 0 {
					t.Errorf("%d rows without a checkpoint", len(rows))
				}
				after := &faulty{Store: f.Store}
				if c, err := f.Another(after).Follow(t.Context()); err != nil || c.Size != 2*writer.StepEntries+21 {
					t.Fatal(c, err)
				}
				if got := after.updates.Load(); got != 3-done {
					t.Errorf("%d more steps, want %d", got, 3-done)
				}
				f.FollowsTo(2*writer.StepEntries + 21)
			})
		}
	}
}

// Several replicas follow the same log at the same time while it grows.
func TestManyMayFollowAtOnce(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Write(writer.StepEntries + 100)
	var wg sync.WaitGroup
	for range 4 {
		l := f.Another(f.Store)
		wg.Go(func() {
			for range 10 {
				if _, err := l.Follow(t.Context()); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for range 20 {
		f.Write(30)
	}
	wg.Wait()
	f.Follow()
	f.FollowsTo(1 + writer.StepEntries + 100 + 600)
}

// If another process follows between a step's reads and its write, the step leaves the other's rows
// unchanged.
func TestAStepThatWasOutrunWritesNothing(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Write(10)
	f.Follow()
	f.Write(10)
	slow, err := f.Log.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := slow.Read(t.Context(), f.Store); err != nil {
		t.Fatal(err)
	}
	f.Write(10)
	f.Follow()
	c, err := slow.Checkpoint(f.Log.Chain)
	if err != nil || c.Size != 21 {
		t.Fatal(c, err)
	}
	signed, err := audit.SignCheckpoint(c, f.Log.Signer)
	if err != nil {
		t.Fatal(err)
	}
	err = f.Store.Update(t.Context(), func(tx store.Tx) error { return slow.Write(tx, signed) })
	if !errors.Is(err, writer.ErrOutrun) {
		t.Error(err)
	}
	f.FollowsTo(31)
}

// Nothing is signed about a broken chain, or on a tree that differs from the previous checkpoint's.
func TestADamagedLogIsNotFollowed(t *testing.T) {
	put := func(key []byte, change func(row []byte) []byte) func(tx store.Tx) error {
		return func(tx store.Tx) error {
			row, err := tx.Get(key)
			if err != nil {
				return err
			}
			if row = change(bytes.Clone(row)); row == nil {
				return tx.Delete(key)
			}
			return tx.Put(key, row)
		}
	}
	flip := func(row []byte) []byte { row[len(row)-1] ^= 1; return row }
	gone := func([]byte) []byte { return nil }
	f := audittest.NewFixture(t)
	f.Write(300)
	f.Follow()
	f.Record(audit.Event{Type: audit.AuditRead, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantA)})
	f.Write(3)
	f.Record(audit.Event{Type: audit.AuditRead, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantA)})
	other, err := dualsig.NewPrivateKey(make([]byte, dualsig.SeedSize))
	if err != nil {
		t.Fatal(err)
	}
	_, newest, err := f.Log.Chain.NewestCheckpoint(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	foreign, err := audit.SignCheckpoint(newest, other)
	if err != nil {
		t.Fatal(err)
	}
	newest.ChainID = "chain_other"
	otherChain, err := audit.SignCheckpoint(newest, f.Log.Signer)
	if err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(tx store.Tx) error{
		"an entry changed": put(audit.EntryKey(303), func(row []byte) []byte {
			return bytes.Replace(row, []byte("success"), []byte("failure"), 1)
		}),
		"the last entry changed, and the head with it": func(tx store.Tx) error {
			var e *audit.Entry
			change := func(row []byte) []byte {
				row = bytes.Replace(row, []byte("success"), []byte("failure"), 1)
				e, _ = audittest.DecodeRow(row, nil)
				return row
			}
			return errors.Join(put(audit.EntryKey(306), change)(tx), tx.Put(audit.HeadKey, e.Position().Encode()))
		},
		"an entry missing":              put(audit.EntryKey(304), gone),
		"the last entry missing":        put(audit.EntryKey(306), gone),
		"a group's signature missing":   put(audit.BatchKey(303), gone),
		"the head below the checkpoint": put(audit.HeadKey, func(row []byte) []byte { row[7] = 9; row[6] = 0; return row }),
		"the head is another entry's":   put(audit.HeadKey, flip),
		"the last tile changed":         put(audit.TileKey(0, 1), flip),
		"the last tile missing":         put(audit.TileKey(0, 1), gone),
		"an upper tile changed":         put(audit.TileKey(1, 0), flip),
		"an index row missing":          nil,
		"the checkpoint unsigned":       put(audit.CheckpointKey, flip),
		"the checkpoint of another key": put(audit.CheckpointKey, func([]byte) []byte { return foreign }),
		"the checkpoint of another log": put(audit.CheckpointKey, func([]byte) []byte { return otherChain }),
	} {
		t.Run(name, func(t *testing.T) {
			if change == nil {
				f.Write(1000) // fills a block of tenantA
				change = put(audit.TenantKey(string(audittest.TenantA), 500), gone)
			}
			kept := f.RowsOf(store.Prefix([]byte("audit/")))
			if err := f.Store.Update(t.Context(), change); err != nil {
				t.Fatal(err)
			}
			changed := f.RowsOf(store.Prefix([]byte("audit/")))
			f.Log.Chain.Followed.Store(nil) // as after a start
			f.Log.ForgetLosses()
			f.Log.Halt(nil)
			if c, err := f.Log.Follow(t.Context()); !errors.Is(err, fault.Internal) {
				t.Errorf("%+v, %v", c, err)
			}
			if !maps.EqualFunc(changed, f.RowsOf(store.Prefix([]byte("audit/"))), bytes.Equal) {
				t.Error("something was written")
			}
			err := f.Store.Update(t.Context(), func(tx store.Tx) error {
				for key, row := range kept {
					if err := tx.Put([]byte(key), row); err != nil {
						return err
					}
				}
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
		})
	}
	f.Follow()
	f.FollowsTo(int64(len(f.Entries())))
}

// The tree continues across a rollback, and a follower accepts this as one log.
func TestTheTreeGoesOnInANewEpoch(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Write(9)
	before := f.Follow()
	f.Write(10) // no checkpoint yet
	f.Lose(300)
	f.Write(300)
	c := f.Follow()
	f.FollowsTo(321)
	if before.Epoch != 1 || c.Epoch != 2 || c.Sequence != 601 || c.Size != 321 {
		t.Errorf("%+v, then %+v", before, c)
	}
	for sequence, want := range map[uint64]audit.Checkpoint{20: {Epoch: 1, Size: 20}, 301: {Epoch: 2, Size: 21}, 601: {Epoch: 2, Size: 321}} {
		got, err := f.Log.CheckpointAt(t.Context(), sequence)
		if err != nil || got.Epoch != want.Epoch || got.Size != want.Size || got.Sequence != sequence {
			t.Errorf("at %d: %+v, %v", sequence, got, err)
		}
	}
	for _, sequence := range []uint64{0, 21, 300, 602} {
		if _, err := f.Log.CheckpointAt(t.Context(), sequence); !errors.Is(err, fault.NotFound) {
			t.Errorf("at %d: %v", sequence, err)
		}
	}
}

// A checkpoint at an entry equals the one that was signed there, at any later time.
func TestACheckpointAtAnEntryIsTheOneOfItsTime(t *testing.T) {
	f := audittest.NewFixture(t)
	var signed []audit.Checkpoint
	for _, n := range []int{0, 3, 250, 3, 600} {
		f.Write(n)
		signed = append(signed, f.Follow())
	}
	f.Write(5)
	for _, want := range signed {
		if got, err := f.Log.CheckpointAt(t.Context(), want.Sequence); err != nil || got != want || got.Text() != want.Text() {
			t.Errorf("%+v, want %+v: %v", got, want, err)
		}
	}
	// The checkpoint of an entry that is not followed yet.
	if got, err := f.Log.CheckpointAt(t.Context(), 862); err != nil || got.Size != 862 {
		t.Error(got, err)
	}
}

// keptFollowing runs KeepFollowing in a synctest bubble, on a store that counts Updates.
func keptFollowing(t *testing.T, test func(f *audittest.Fixture, s *faulty, logged *bytes.Buffer, end func())) {
	synctest.Test(t, func(t *testing.T) {
		f := audittest.NewFixture(t)
		s := &faulty{Store: f.Store}
		f.Log.Chain.Store = s
		ctx, cancel := context.WithCancel(t.Context())
		var logged bytes.Buffer
		var wg sync.WaitGroup
		wg.Go(func() { f.Log.KeepFollowing(ctx, slog.New(slog.NewTextHandler(&logged, nil))) })
		end := sync.OnceFunc(func() { cancel(); wg.Wait() })
		defer end()
		test(f, s, &logged, end)
		end()
		if err := f.Store.Close(); err != nil { // its goroutines belong to the bubble
			t.Error(err)
		}
	})
}

func TestTheCheckpointIsAtMostASecondBehind(t *testing.T) {
	keptFollowing(t, func(f *audittest.Fixture, s *faulty, logged *bytes.Buffer, end func()) {
		for n := int64(1); n < 10; n++ {
			time.Sleep(time.Second) // synctest clock
			synctest.Wait()
			f.FollowsTo(n)
			f.Record(audit.Event{Type: audit.AuditRead, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantA)})
		}
		time.Sleep(time.Second) // synctest clock
		synctest.Wait()
		views, updates := s.views.Load(), s.updates.Load()
		time.Sleep(time.Hour) // synctest clock
		synctest.Wait()
		if s.views.Load()-views > int64(time.Hour/writer.FollowEvery) || s.updates.Load() != updates {
			t.Errorf("while nothing happened it looked %d and wrote %d times", s.views.Load()-views, s.updates.Load()-updates)
		}
		f.Record(audit.Event{Type: audit.AuditRead, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantA)})
		end() // the last step happens at once, without waiting
		f.FollowsTo(11)
		if logged.Len() > 0 {
			t.Error(logged)
		}
	})
}

// An empty log is no failure.
func TestTheEmptyLogIsFollowedOnceItBegins(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &audittest.Fixture{T: t, Clock: time.Now()}
		f.Log = audittest.NewParts(f.Now)
		s, err := bolt.Open(filepath.Join(t.TempDir(), "db"), bolt.Options{Hook: f.Log.Commit})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		f.Store = audittest.Rehearsing(t, s)
		key, err := dualsig.NewPrivateKey(make([]byte, dualsig.SeedSize))
		if err != nil {
			t.Fatal(err)
		}
		if err := f.Log.Use(t.Context(), f.Store, key, "chain_test"); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		var logged bytes.Buffer
		var wg sync.WaitGroup
		wg.Go(func() { f.Log.KeepFollowing(ctx, slog.New(slog.NewTextHandler(&logged, nil))) })
		time.Sleep(time.Minute) // synctest clock
		f.Record(audit.Event{Type: audit.ChainStarted, Outcome: audit.Success, Principal: audittest.Principal(authz.SystemTenant), Resource: audit.Resource{Type: audit.ChainResource}})
		time.Sleep(time.Second) // synctest clock
		synctest.Wait()
		f.FollowsTo(1)
		cancel()
		wg.Wait()
		if logged.Len() > 0 {
			t.Error(&logged)
		}
	})
}

func TestAFailureToFollowIsLoggedOnceAndGetsOver(t *testing.T) {
	keptFollowing(t, func(f *audittest.Fixture, s *faulty, logged *bytes.Buffer, _ func()) {
		time.Sleep(time.Second) // synctest clock
		synctest.Wait()
		var failing atomic.Bool
		s.fail = func(_ int64, fn func(store.Tx) error) error {
			if failing.Load() {
				return fault.New(fault.Unavailable, "the disk is full")
			}
			return f.Store.Update(context.Background(), fn)
		}
		failing.Store(true)
		err := f.Store.Update(f.T.Context(), func(tx store.Tx) error { // the context of the outer test is outside the bubble
			_, err := f.Log.Append(tx, audit.Event{Type: audit.AuditRead, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantA)})
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute) // synctest clock
		synctest.Wait()
		if n := strings.Count(logged.String(), "level=ERROR"); n != 1 {
			t.Errorf("%d errors were logged: %s", n, logged)
		}
		failing.Store(false)
		time.Sleep(time.Second) // synctest clock
		synctest.Wait()
		f.FollowsTo(2)
		if !strings.Contains(logged.String(), "has checkpoints again") {
			t.Error(logged)
		}
	})
}

// A step writes nothing if an older copy of the database and newer entries replaced the entries
// that it read, even if the checkpoint is unchanged.
func TestAStepOfAnotherHistoryIsNotWritten(t *testing.T) {
	r := audittest.NewReplicas(t, 1)[0]
	if _, err := r.Log.Follow(t.Context()); err != nil {
		t.Fatal(err)
	}
	older := r.Read()
	for range 5 {
		r.Append(audit.AuditRead, audittest.TenantA)
	}
	slow, err := r.Log.Begin(t.Context())
	if err == nil {
		err = slow.Read(t.Context(), r)
	}
	if err != nil {
		t.Fatal(err)
	}
	r.Put(older)
	other := r.Replica(t, r.Log.Signer)
	for range 9 {
		other.Append(audit.AuditRead, audittest.TenantA)
	}
	if c, err := r.Log.Step(t.Context()); err == nil {
		t.Errorf("a checkpoint is signed of what this process has seen otherwise: %+v", c)
	}
	c, err := slow.Checkpoint(r.Log.Chain)
	if err != nil {
		t.Fatal(err)
	}
	signed := audittest.SignedNote(t, &audittest.Fixture{Log: r.Log}, c)
	if err := r.Update(t.Context(), func(tx store.Tx) error { return slow.Write(tx, signed) }); !errors.Is(err, writer.ErrOutrun) {
		t.Error(err)
	}
	r.Verified(t)
}

// If another process follows and archives the entries that a step is reading, the step does not
// report damage.
func TestAStepThatIsArchivedUnderneathFindsNoDamage(t *testing.T) {
	outrun := 0
	for at := int64(1); ; at++ {
		f := audittest.NewFixture(t)
		a, _ := f.Folder()
		f.Old()
		other := f.Another(f.Store)
		s := &audittest.Between{Store: f.Store, At: at, Do: func() error {
			_, err := (&keeper.Cutter{Log: other.Log, Reader: other.Reader, Archive: a, Keep: audittest.Keep}).Run(t.Context())
			return err
		}}
		f.Log.Chain.Store = s
		if _, err := f.Log.Step(t.Context()); errors.Is(err, writer.ErrOutrun) {
			outrun++
		} else if err != nil {
			t.Errorf("archived before look %d: %v", at, err)
		}
		f.Log.Chain.Store = f.Store
		if _, err := f.Log.Follow(t.Context()); err != nil {
			t.Errorf("archived before look %d: %v", at, err)
		}
		if s.Views.Load() < at {
			break
		}
	}
	if outrun == 0 {
		t.Error("no step was outrun")
	}
}
