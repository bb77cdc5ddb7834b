package identity

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/store"
)

// failuresOf returns the stored failures of an account.
func (f *people) failuresOf(who string) (found failures) {
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
func (f *people) fails(times int, who ...string) {
	f.t.Helper()
	now := f.time()
	must(f.t, f.store.Rehearsed.Database.Update(f.t.Context(), func(tx store.Tx) error {
		for _, w := range who {
			for range times {
				if _, err := f.countFailure(tx, w, now); err != nil {
					return err
				}
			}
		}
		return nil
	}))
}

func TestParallelGuessesGainNothing(t *testing.T) {
	f := newPeople(t)
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			_, err := f.fail(t.Context(), "a", f.time())
			must(t, err)
		})
	}
	wg.Wait()
	if found := f.failuresOf("a"); found.Count != freeFailures || !found.waits(f.time()) {
		t.Errorf("%+v", found)
	}
}

func TestTheWaitDoublesToAQuarterOfAnHour(t *testing.T) {
	f := newPeople(t)
	for i := range 40 {
		_, err := f.fail(t.Context(), "a", f.time())
		must(t, err)
		want := time.Duration(0)
		if i >= freeFailures-1 {
			want = min(time.Second<<min(i-freeFailures+1, 20), 15*time.Minute)
		}
		if wait := f.failuresOf("a").Until.Sub(f.time()); wait != want {
			t.Fatalf("failure %d: %v, want %v", i+1, wait, want)
		}
		f.advance(want)
	}
	f.advance(forgetAfter + time.Second)
	f.fails(1, "a")
	if n := f.failuresOf("a").Count; n != 1 {
		t.Error("failures of long ago count:", n)
	}
}

// A full slot evicts the account with the fewest failures. So made-up addresses do not push out an
// account that is guessed at, and the store does not fill up.
func TestMadeUpAddressesDoNotPushOutAnAccount(t *testing.T) {
	f := newPeople(t)
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
	rows := f.rows("slowdown/")
	if len(rows) > slots {
		t.Error(len(rows), "slots")
	}
	var all []failures
	must(t, f.decode(slot, []byte(rows[string(slot)]), &all))
	if len(all) != slotSize {
		t.Errorf("%d accounts in a slot", len(all))
	}
	f.advance(forgetAfter + time.Minute)
	f.fails(1, made...)
	f.advance(forgetAfter + time.Minute)
	f.fails(1, made[:slots]...)
	if now := len(f.rows("slowdown/")); now >= len(rows) {
		t.Errorf("%d slots before, and %d after all in most of them was over", len(rows), now)
	}
}

// Guesses count at every replica: with three replicas an attacker has as many as with one, and a
// sign-in at one replica clears the failures at all.
func TestGuessesAtSeveralReplicasCountTogether(t *testing.T) {
	f := newPeople(t)
	f.register("ada@example.com")
	replicas := []*Service{f.Service, f.replica(0), f.replica(0)}
	for i := range freeFailures {
		_, err := replicas[i%3].SignIn(t.Context(), stranger, "ada@example.com", secret.Bytes(otherPassword))
		if !errors.Is(err, fault.Unauthenticated) {
			t.Fatal(err)
		}
	}
	for i, s := range replicas {
		if _, err := s.SignIn(t.Context(), stranger, "ada@example.com", secret.Bytes(goodPassword)); !errors.Is(err, fault.Unauthenticated) {
			t.Errorf("replica %d lets in who waits: %v", i, err)
		}
	}
	f.advance(time.Second)
	if _, err := replicas[1].SignIn(t.Context(), stranger, "ada@example.com", secret.Bytes(goodPassword)); err != nil {
		t.Fatal(err)
	}
	if found := f.failuresOf(f.emailHash("ada@example.com")); found.Count != 0 {
		t.Errorf("a success does not begin anew: %+v", found)
	}
}

// A right password that was checked while others guessed is refused if the account must wait by
// then.
func TestASignInThatIsOvertakenByGuessesIsRefused(t *testing.T) {
	f := newPeople(t)
	f.register("ada@example.com")
	l := f.login("ada@example.com")
	f.fails(freeFailures, f.emailHash("ada@example.com"))
	if _, err := f.beginSession(t.Context(), stranger, l); !errors.Is(err, errWaits) {
		t.Error(err)
	}
	if n := len(f.rows("session/row/")); n != 0 {
		t.Error(n, "sessions")
	}
}

func TestASignInWritesNothingOfItsOwnForTheSlowdown(t *testing.T) {
	f := newPeople(t)
	f.register("ada@example.com")
	before := f.store.updates.Load()
	f.signIn("ada@example.com", goodPassword)
	if n := f.store.updates.Load() - before; n != 1 || len(f.rows("slowdown/")) != 0 {
		t.Errorf("%d updates, %d slots", n, len(f.rows("slowdown/")))
	}
	f.fails(freeFailures, f.emailHash("ada@example.com"))
	_, _ = f.SignIn(t.Context(), stranger, "ada@example.com", secret.Bytes(otherPassword)) // recorded once a minute
	before = f.store.updates.Load()
	_, _ = f.SignIn(t.Context(), stranger, "ada@example.com", secret.Bytes(otherPassword))
	if n := f.store.updates.Load() - before; n != 0 {
		t.Error("a guess at an account that waits takes", n, "updates")
	}
}

// A wait that a clock far ahead wrote ends when the clock is set right. A row that this deployment
// did not write blocks nobody.
func TestAWrongClockLocksNobodyOut(t *testing.T) {
	f := newPeople(t)
	f.register("ada@example.com")
	f.advance(1000 * time.Hour)
	f.fails(freeFailures, f.emailHash("ada@example.com"))
	f.advance(-1000 * time.Hour)
	f.signIn("ada@example.com", goodPassword)
	f.fails(freeFailures, f.emailHash("ada@example.com"))
	slot, _ := f.slot(f.emailHash("ada@example.com"))
	must(t, f.store.Update(context.Background(), func(tx store.Tx) error { return tx.Put(slot, []byte("junk")) }))
	f.signIn("ada@example.com", goodPassword)
}
