package identity

import (
	"errors"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/store"
)

const freeFailures = 5 // wrong passwords before an account must wait

// fails counts wrong passwords for one account.
func (f *people) fails(times int, who string) {
	f.t.Helper()
	for range times {
		_, err := f.signIns.throttle.Fail(f.t.Context(), who, f.time())
		must(f.t, err)
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
	if n := len(f.rows("slowdown/")); n != 0 {
		t.Error("a success does not begin anew")
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
	for slot := range f.rows("slowdown/") {
		must(t, f.store.Update(t.Context(), func(tx store.Tx) error { return tx.Put([]byte(slot), []byte("junk")) }))
	}
	f.signIn("ada@example.com", goodPassword)
}
