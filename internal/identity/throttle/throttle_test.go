package throttle

import (
	"bytes"
	"fmt"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/identity/records"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/test/storetest"
)

// fixture is a throttle on a real store, with the test's clock.
type fixture struct {
	*Throttle
	t   *testing.T
	db  store.Store // without rehearsals
	now time.Time
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	dir := t.TempDir()
	must(t, kms.CreateLocal(filepath.Join(dir, "kms.key")))
	k, err := kms.OpenLocal(filepath.Join(dir, "kms.key"))
	must(t, err)
	db, err := bolt.Open(filepath.Join(dir, "i.db"), bolt.Options{})
	must(t, err)
	t.Cleanup(func() { _ = db.Close() })
	keys, _, err := keyring.Create(t.Context(), db, k, keyring.Config{CacheTTL: time.Hour, Now: time.Now})
	must(t, err)
	s := storetest.Rehearsing(db)
	return &fixture{New(s, records.New(s, nil, keys)), t, db, time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// failuresOf returns the stored failures of an account.
func (f *fixture) failuresOf(who string) (found failures) {
	f.t.Helper()
	key, of := f.slot(who)
	must(f.t, f.store.View(f.t.Context(), func(r store.Reader) error {
		all, err := f.readSlot(r, key)
		if at := indexOf(all, of); at >= 0 {
			found = all[at]
		}
		return err
	}))
	return found
}

// fails counts failures of many accounts in one transaction.
func (f *fixture) fails(times int, who ...string) {
	f.t.Helper()
	must(f.t, f.db.Update(f.t.Context(), func(tx store.Tx) error {
		for _, w := range who {
			for range times {
				if _, err := f.countFailure(tx, w, f.now); err != nil {
					return err
				}
			}
		}
		return nil
	}))
}

// slots returns the stored slots.
func (f *fixture) slots() map[string][]byte {
	f.t.Helper()
	rows := make(map[string][]byte)
	must(f.t, f.db.View(f.t.Context(), func(r store.Reader) error {
		return r.Scan(store.Prefix(slotsPrefix), func(key, value []byte) bool {
			rows[string(key)] = bytes.Clone(value)
			return true
		})
	}))
	return rows
}

func TestParallelGuessesGainNothing(t *testing.T) {
	f := newFixture(t)
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			_, err := f.Fail(t.Context(), "a", f.now)
			must(t, err)
		})
	}
	wg.Wait()
	if found := f.failuresOf("a"); found.Count != freeFailures || !found.waits(f.now) {
		t.Errorf("%+v", found)
	}
}

func TestTheWaitDoublesToAQuarterOfAnHour(t *testing.T) {
	f := newFixture(t)
	for i := range 40 {
		_, err := f.Fail(t.Context(), "a", f.now)
		must(t, err)
		want := time.Duration(0)
		if i >= freeFailures-1 {
			want = min(time.Second<<min(i-freeFailures+1, 20), 15*time.Minute)
		}
		if wait := f.failuresOf("a").Until.Sub(f.now); wait != want {
			t.Fatalf("failure %d: %v, want %v", i+1, wait, want)
		}
		f.now = f.now.Add(want)
	}
	f.now = f.now.Add(forgetAfter + time.Second)
	f.fails(1, "a")
	if n := f.failuresOf("a").Count; n != 1 {
		t.Error("failures of long ago count:", n)
	}
}

// A full slot evicts the account with the fewest failures. So made-up addresses do not push out an
// account that is guessed at, and the store does not fill up.
func TestMadeUpAddressesDoNotPushOutAnAccount(t *testing.T) {
	f := newFixture(t)
	f.fails(freeFailures, "victim")
	made := make([]string, 3*slots)
	for i := range made {
		made[i] = fmt.Sprint("made up ", i)
	}
	slot, _ := f.slot("victim")
	beside := 0
	for _, who := range made {
		if key, _ := f.slot(who); string(key) == string(slot) {
			beside++
		}
	}
	for i := 0; beside <= slotSize; i++ {
		who := fmt.Sprint("neighbour ", i)
		if key, _ := f.slot(who); string(key) == string(slot) {
			made, beside = append(made, who), beside+1
		}
	}
	f.fails(1, made...)
	if n := f.failuresOf("victim").Count; n != freeFailures {
		t.Error("the account that waits was forgotten:", n)
	}
	rows := f.slots()
	if len(rows) > slots {
		t.Error(len(rows), "slots")
	}
	var all []failures
	must(t, f.rows.Decode(slot, rows[string(slot)], &all))
	if len(all) != slotSize {
		t.Errorf("%d accounts in a slot", len(all))
	}
	f.now = f.now.Add(forgetAfter + time.Minute)
	f.fails(1, made...)
	f.now = f.now.Add(forgetAfter + time.Minute)
	f.fails(1, made[:slots]...)
	if now := len(f.slots()); now >= len(rows) {
		t.Errorf("%d slots before, and %d after all in most of them was over", len(rows), now)
	}
}
