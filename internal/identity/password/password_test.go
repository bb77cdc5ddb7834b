package password

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/secret"
)

const (
	goodPassword  = "correct horse battery"
	otherPassword = "staple, and something else"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestAPasswordIsKeptAsArgon2id(t *testing.T) {
	var p Hasher
	stored, err := p.Hash(t.Context(), secret.Bytes(goodPassword))
	must(t, err)
	if !strings.HasPrefix(stored, "$argon2id$v=19$m=19456,t=2,p=1$") {
		t.Error(stored)
	}
	again, err := p.Hash(t.Context(), secret.Bytes(goodPassword))
	if err != nil || again == stored {
		t.Error("two hashes of one password are the same")
	}
	for password, want := range map[string]bool{goodPassword: true, otherPassword: false, "": false, goodPassword + "\x00": false, goodPassword + " ": false} {
		if right, err := p.Matches(t.Context(), stored, secret.Bytes(password)); err != nil || right != want {
			t.Errorf("%q: %v, %v", password, right, err)
		}
	}
	if right, err := p.Matches(t.Context(), "", secret.Bytes(goodPassword)); err != nil || right {
		t.Error("no user has a password:", right, err)
	}
}

// The hash is from the reference implementation (github.com/P-H-C/phc-winner-argon2, test.c), with
// other parameters and another salt length than ours.
func TestAHashNamesItsOwnParameters(t *testing.T) {
	var p Hasher
	const reference = "$argon2id$v=19$m=65536,t=2,p=1$c29tZXNhbHQ$CTFhFdXPJO1aFaMaO6Mm5c8y7cJHAph8ArZWb2GRPPc"
	if right, err := p.Matches(t.Context(), reference, secret.Bytes("password")); err != nil || !right {
		t.Error(right, err)
	}
	if right, err := p.Matches(t.Context(), reference, secret.Bytes("differentpassword")); err != nil || right {
		t.Error(right, err)
	}
}

func TestADamagedHashIsAnError(t *testing.T) {
	var p Hasher
	good := Unmatchable()
	parts := strings.Split(good, "$")
	with := func(i int, s string) string {
		changed := append([]string(nil), parts...)
		changed[i] = s
		return strings.Join(changed, "$")
	}
	for _, bad := range []string{
		"x", good + "$", good[1:], with(1, "argon2i"), with(2, "v=16"), with(3, "m=19456,t=0,p=1"), with(3, "m=19456,t=2,p=0"), with(3, "m=19456,t=2"),
		with(3, "m=019456,t=2,p=1"), with(3, "m=-1,t=2,p=1"), with(3, "m=19456,t=2,p=300"), with(4, "!"), with(5, ""), with(5, parts[5]+"="), with(5, parts[5][:20]),
	} {
		if right, err := p.Matches(t.Context(), bad, secret.Bytes(goodPassword)); !errors.Is(err, fault.Internal) || right {
			t.Errorf("%q: %v, %v", bad, right, err)
		}
	}
}

func TestAFloodOfPasswordsIsTurnedAway(t *testing.T) {
	var p Hasher
	turns := max(1, runtime.GOMAXPROCS(0)/2)
	var done []func()
	for range turns {
		d, err := p.start(t.Context())
		must(t, err)
		done = append(done, d)
	}
	ctx, cancel := context.WithCancel(t.Context())
	waited := make(chan error, maxWaiting)
	for range maxWaiting {
		go func() {
			d, err := p.start(ctx)
			if err == nil {
				d()
			}
			waited <- err
		}()
	}
	for p.waiting.Load() < maxWaiting {
		runtime.Gosched()
	}
	if _, err := p.Matches(t.Context(), "", secret.Bytes(goodPassword)); !errors.Is(err, fault.Unavailable) {
		t.Error("one more waits:", err)
	}
	cancel() // a caller that gives up leaves the queue
	for range maxWaiting {
		if err := <-waited; !errors.Is(err, fault.Unavailable) {
			t.Error(err)
		}
	}
	done[0]()
	if _, err := p.Hash(t.Context(), secret.Bytes(goodPassword)); err != nil {
		t.Error("a free turn is not taken:", err)
	}
}

func TestAFloodOfPasswordsLeavesTheCoresToOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var p Hasher
		const work = 20 * time.Millisecond
		turn := func() {
			done, err := p.start(t.Context())
			must(t, err)
			time.Sleep(work)
			done()
		}
		began := time.Now()
		for range 3 { // hashes in sequence are no flood
			turn()
		}
		if took := time.Since(began); took != 3*work {
			t.Error("without a flood a slot rested:", took)
		}
		began = time.Now()
		turns := max(1, runtime.GOMAXPROCS(0)/2)
		var wg sync.WaitGroup
		for range 3 * turns {
			wg.Go(turn)
		}
		wg.Wait()
		if took := time.Since(began); took != (3+2*resting)*work { // nobody waits behind the last ones, so their slots do not rest
			t.Error("the slots were used for", 3*work, "of", took)
		}
	})
}

// A process that stands still in the middle of a hash continues as before.
func TestASlowHashKeepsNobodyOutForLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var p Hasher
		var done []func()
		for range max(1, runtime.GOMAXPROCS(0)/2) {
			d, err := p.start(t.Context())
			must(t, err)
			done = append(done, d)
		}
		waited := make(chan time.Time)
		go func() {
			d, err := p.start(t.Context())
			must(t, err)
			d()
			waited <- time.Now()
		}()
		synctest.Wait()
		time.Sleep(time.Hour)
		began := time.Now()
		for _, d := range done {
			d()
		}
		if took := (<-waited).Sub(began); took > longestRest {
			t.Error("the next one waited for", took)
		}
		synctest.Wait()
	})
}
