package custody

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/test/kmstest"
)

// A roll-out first names the new key in kms.former.
func TestAKeyThatIsToComeIsNotDestroyed(t *testing.T) {
	f := newFixture(t)
	must(t, f.store.Close())
	f.open(f.old, f.new)
	if _, err := f.service.Destroy(t.Context(), admin, f.new.ID()); !errors.Is(err, fault.Conflict) || !strings.Contains(fault.Message(err), "nothing was ever moved") {
		t.Error(err)
	}
	if f.givenUp(f.new.ID()) || len(f.destroyed) != 0 {
		t.Fatal("it was given up:", f.destroyed)
	}
	must(t, f.store.Close())
	f.open(f.new, f.old)
	f.moveAll()
	if _, err := f.service.Destroy(t.Context(), admin, f.old.ID()); err != nil || len(f.destroyed) != 1 {
		t.Error("the one that was moved from:", err)
	}
}

func (f *fixture) givenUp(id string) bool {
	f.t.Helper()
	found, err := f.keys.KMSKeys(f.t.Context(), time.Time{})
	must(f.t, err)
	for _, k := range found.Keys {
		if k.ID == id {
			return k.GivenUp
		}
	}
	f.t.Fatal("there is no key", id)
	return false
}

// The address is part of the name of a key of Vault.
func TestAKeyIsNotDestroyedByAnotherName(t *testing.T) {
	f := newFixture(t)
	service, err := kmstest.NewVault()
	must(t, err)
	t.Cleanup(service.Close)
	for _, variable := range service.Env() {
		name, value, _ := strings.Cut(variable, "=")
		t.Setenv(name, value)
	}
	service.SetDeletable(kmstest.DefaultKey, true)
	service.AddKey("other", "")
	service.SetDeletable("other", true)
	_, port, _ := strings.Cut(service.Address(), ":")
	open := func(key, host string) *kms.Key {
		k, err := kms.Open(t.Context(), "hashivault://"+key+"?address=http://"+host+":"+port, kms.Options{})
		must(t, err)
		t.Cleanup(func() { _ = k.Close() })
		return k
	}
	first, second, other := open(kmstest.DefaultKey, "localhost"), open(kmstest.DefaultKey, "127.0.0.1"), open("other", "localhost")
	f.destroy = func(string) (kms.Destruction, error) { return first.Destroy(context.Background()) }
	openKeys := func(current *kms.Key, former ...keyring.KMS) { f.open(current, append(former, f.old)...) }
	move := func(to *kms.Key, from ...keyring.KMS) {
		must(t, f.store.Close())
		openKeys(to, from...)
		f.moveAll()
	}
	move(first)
	move(second, first)
	refused := func(when string) {
		t.Helper()
		_, err := f.service.Destroy(t.Context(), admin, first.ID())
		entries := f.entries()
		if !errors.Is(err, fault.Conflict) || !strings.Contains(fault.Message(err), "another name") || f.givenUp(first.ID()) || len(f.destroyed) != 0 ||
			!strings.Contains(entries[len(entries)-1], "denied "+first.ID()+" map[reason:needed_by_another_name]") {
			t.Fatal(when, err, f.destroyed, entries[len(entries)-1])
		}
	}
	refused("the current key by another name:")

	// Sets are still under this key's other name, although that is not the current key.
	move(other, first, second)
	must(t, f.store.Close())
	openKeys(second, first, other)
	f.makeSet(f.keys, tenants)
	must(t, f.store.Close())
	openKeys(other, first, second)
	refused("a former key by another name:")

	// If the service does not answer, the test must not conclude that there are two keys.
	f.moveAll()
	for what, set := range map[string]func(bool){"that is down": service.SetFailing, "that refuses": service.SetRevoked} {
		set(true)
		if _, err := f.service.Destroy(t.Context(), admin, first.ID()); err == nil || fault.Of(err) == fault.Forbidden || len(f.destroyed) != 0 {
			t.Errorf("a service %s: %v, %v", what, err, f.destroyed)
		}
		set(false)
	}
	if _, err := f.service.Destroy(t.Context(), admin, first.ID()); err != nil || service.Exists(kmstest.DefaultKey) {
		t.Error("when nothing is under either name:", err)
	}
}

// Each call takes 20 ms, three in ten are refused, and the key is rotated meanwhile.
func TestASlowAndThrottledServiceIsMovedTo(t *testing.T) {
	f := newFixture(t)
	service, err := kmstest.NewVault()
	must(t, err)
	t.Cleanup(service.Close)
	for _, variable := range service.Env() {
		name, value, _ := strings.Cut(variable, "=")
		t.Setenv(name, value)
	}
	k, err := kms.Open(t.Context(), service.URL(), kms.Options{})
	must(t, err)
	t.Cleanup(func() { _ = k.Close() })
	must(t, f.store.Close())
	f.open(k, f.old)
	service.SetLatency(20 * time.Millisecond)
	service.SetThrottle(0.3)
	total := 0
	for remaining := 1; remaining > 0; {
		moved, err := f.service.Rewrap(t.Context(), admin, time.Time{})
		if errors.Is(err, fault.Unavailable) { // every call of this step was refused
			continue
		}
		must(t, err)
		if total == 0 {
			service.Rotate(kmstest.DefaultKey)
		}
		total, remaining = total+moved.Sets, moved.Remaining
	}
	service.SetThrottle(0)
	f.old.down.Store(true)
	if n := f.failing(); n != 0 || total != tenants+1 {
		t.Errorf("%d tenants are locked out, %d sets were moved", n, total)
	}
}

// If the KMS refuses to destroy a key, the key is in use again. If the KMS may have destroyed it,
// another call finds out.
func TestAKeyThatIsNotDestroyedIsTakenBack(t *testing.T) {
	f := newFixture(t)
	f.moveAll()
	ask := func(answer error, is fault.Kind, givenUp bool) {
		t.Helper()
		f.destroy = func(string) (kms.Destruction, error) {
			if !f.givenUp(f.old.ID()) {
				t.Error("the KMS was asked before the key was given up")
			}
			return kms.Destruction{}, answer
		}
		before := len(f.entries())
		_, err := f.service.Destroy(t.Context(), admin, f.old.ID())
		if (err == nil) != (answer == nil) || fault.Of(err) != is {
			t.Error(answer, err)
		}
		if f.givenUp(f.old.ID()) != givenUp {
			t.Errorf("%v: given up: %t", answer, !givenUp)
		}
		got := f.entries()[before:]
		if answer == nil && len(got) != 1 || answer != nil && (len(got) != 2 || !strings.Contains(got[1], "failure "+f.old.ID()+" map[reason:not_destroyed]")) {
			t.Error(strings.Join(got, "\n"))
		}
	}
	ask(fault.New(fault.Forbidden, "allow kms:ScheduleKeyDeletion"), fault.Conflict, false)
	// The key that was taken back may be the current one again.
	must(t, f.store.Close())
	f.open(f.old, f.new)
	f.moveAll()
	must(t, f.store.Close())
	f.open(f.new, f.old)
	f.moveAll()

	ask(errDown, fault.Unavailable, true)
	ask(context.DeadlineExceeded, fault.Internal, true)
	ask(fault.New(fault.Conflict, "deletion_allowed=true"), fault.Conflict, false)
	ask(errDown, fault.Unavailable, true)
	f.old.down.Store(true) // like a destroyed key: a key that was given up is not tested
	ask(nil, fault.Internal, true)
}
