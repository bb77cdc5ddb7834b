package vault

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/vault/lifetime"
)

func (f *fixture) trash(id string) Credential {
	f.t.Helper()
	c, err := f.vault.Trash(f.t.Context(), f.a, id, "")
	must(f.t, err)
	return c
}

// sweep returns how many rows a sweep changed.
func (f *fixture) sweep() int {
	f.t.Helper()
	n, err := f.vault.Sweep(f.t.Context())
	must(f.t, err)
	return n
}

// pass lets a time pass in which the vault is swept every day, and returns how many rows that changed.
func (f *fixture) pass(d time.Duration) (n int) {
	f.t.Helper()
	for ; d > 0; d -= day {
		f.advance(min(d, day))
		n += f.sweep()
	}
	return n
}

// Promise: what is in the trash cannot be read in any way, its name is free, and a renewal brings it back
// with its values and kept versions.
func TestTheTrashGivesBackWhatItTook(t *testing.T) {
	f := newFixture(t, 0)
	f.keep("**", 2)
	c := f.sealNamed(f.a, "shop/db", map[string]string{"k": "0"})
	f.change(c.ID, "1")
	trashed := f.trash(c.ID)
	if !trashed.Expired || !trashed.Trashed || trashed.Version != 3 || trashed.Name != c.Name {
		t.Errorf("%+v", trashed)
	}
	if e := f.last(f.a); e.EventType != audit.CredentialReencrypted || e.Attributes[audit.AttributeTrashed] != "true" || e.Attributes[audit.AttributeVersion] != "3" {
		t.Errorf("%+v", e)
	}
	f.advance(-time.Minute) // the clock of another replica
	_, byID := f.vault.Read(t.Context(), f.a, ByID(c.ID))
	_, byName := f.named(c.Name)
	_, byVersion := f.vault.Read(t.Context(), f.a, ByVersion(c.ID, 1))
	_, again := f.vault.Trash(t.Context(), f.a, c.ID, "")
	for what, err := range map[string]error{"by id": byID, "by name": byName, "a kept version": byVersion, "a second time": again} {
		if !errors.Is(err, fault.Forbidden) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if m, err := f.vault.Metadata(t.Context(), f.a, c.ID); err != nil || !m.Trashed || !m.Expired {
		t.Errorf("%+v %v", m, err)
	}
	f.advance(time.Minute)
	f.verify()

	back, err := f.vault.Renew(t.Context(), f.a, c.ID, 0, Condition(trashed.EntityTag()))
	must(t, err)
	if back.Expired || back.Trashed || back.Version != 4 || !back.ExpiresAt.Equal(f.now().AddDate(0, 0, 30)) {
		t.Errorf("%+v", back)
	}
	if e := f.last(f.a); e.EventType != audit.CredentialReencrypted || e.Attributes[attributeRenewed] != "true" {
		t.Errorf("%+v", e)
	}
	got, err := f.named(c.Name)
	must(t, err)
	first, err := f.vault.Read(t.Context(), f.a, ByVersion(c.ID, 1))
	must(t, err)
	if string(got.Values["k"]) != "1" || string(first.Values["k"]) != "0" {
		t.Errorf("now %s, first %s", got.Values["k"], first.Values["k"])
	}
	// A renewal of what has not expired starts its lifetime again.
	f.advance(7 * day)
	if back, err = f.vault.Renew(t.Context(), f.a, c.ID, 5, ""); err != nil || !back.ExpiresAt.Equal(f.now().AddDate(0, 0, 5)) {
		t.Errorf("%+v %v", back, err)
	}
	if _, err = f.vault.Renew(t.Context(), f.a, c.ID, 3651, ""); !errors.Is(err, fault.Invalid) {
		t.Error(err)
	}
	f.verify()
}

// A name in the trash is free. Who takes it keeps it.
func TestARenewalLeavesATakenName(t *testing.T) {
	f := newFixture(t, 0)
	c := f.sealNamed(f.a, "shop/db", login)
	f.trash(c.ID)
	next, created, err := f.vault.Put(t.Context(), f.a, put(c.Name, map[string]string{"k": "next"}))
	must(t, err)
	if !created {
		t.Error("a put replaced what is in the trash")
	}
	if _, err := f.vault.Renew(t.Context(), f.a, c.ID, 0, ""); !errors.Is(err, ErrTaken) {
		t.Error(err)
	}
	if e := f.last(f.a); e.Outcome != audit.Denied || e.Attributes[audit.AttributeReason] != reasonTaken {
		t.Errorf("%+v", e)
	}
	f.trash(next.ID)
	if _, err := f.vault.Renew(t.Context(), f.a, c.ID, 0, ""); err != nil {
		t.Error(err)
	}
	f.verify()
}

// Promise: what has expired can be renewed for 28 days, and is gone after that, with its kept versions and
// an entry. What expired before the database was first swept has these days from then on.
func TestAnExpiredCredentialIsErasedAfterItsGrace(t *testing.T) {
	f := newFixture(t, 0)
	f.keep("**", 2)
	old := f.sealNamed(f.a, "old", login)
	f.advance(100 * day) // of a release that erases nothing
	f.sweep()
	c := f.sealNamed(f.a, "shop/db", map[string]string{"k": "0"})
	f.change(c.ID, "1")
	lasting := f.sealNamed(f.a, "lasting", login)
	renewed := f.sealNamed(f.a, "renewed", login)
	owned := f.generate(f.operator(), 0, 0, map[string]string{"p": "1"})
	f.trash(c.ID)
	if n := f.pass(lifetime.Grace - time.Second); n != 0 {
		t.Errorf("%d erased too early", n)
	}
	for _, id := range []string{old.ID, c.ID, lasting.ID, renewed.ID} {
		if _, err := f.vault.Metadata(t.Context(), f.a, id); err != nil {
			t.Errorf("%s is gone too early: %v", id, err)
		}
	}
	f.advance(time.Second)
	if _, err := f.vault.Renew(t.Context(), f.a, c.ID, 0, ""); !errors.Is(err, fault.Forbidden) {
		t.Error("renewed after its grace:", err)
	}
	if n := f.sweep(); n != 2 {
		t.Errorf("%d erased", n)
	}
	for _, id := range []string{old.ID, c.ID} {
		if _, err := f.vault.Metadata(t.Context(), f.a, id); !errors.Is(err, fault.Forbidden) {
			t.Errorf("%s: %v", id, err)
		}
		for _, family := range []string{"credential/", "kept/", "credential-version/", "credential-path/"} {
			keys, _ := f.rows(fmt.Sprint(family, f.a.Tenant, "/", id))
			if len(keys) > 0 {
				t.Errorf("%s has rows in %s", id, family)
			}
		}
	}
	erased := 0
	for _, e := range f.history(f.a) {
		if e.EventType == audit.CredentialDeleted && e.Actor.Type == string(authz.System) && e.Attributes[audit.AttributeExpiresAt] != "" {
			erased++
		}
	}
	if erased != 2 {
		t.Errorf("%d entries", erased)
	}
	f.verify()

	f.pass(29 * day)
	_, err := f.vault.Renew(t.Context(), f.a, renewed.ID, 0, "")
	must(t, err)
	if n := f.pass(lifetime.Grace); n != 1 {
		t.Errorf("%d erased: the one that was not renewed", n)
	}
	f.pass(100 * day)
	if _, err := f.vault.Metadata(t.Context(), f.operator(), owned.ID); err != nil {
		t.Error("what an object owns is erased:", err)
	}
	f.verify()
}

// What an object left behind waits for it.
func TestWhatAnObjectLeftIsNotErased(t *testing.T) {
	f := newFixture(t, 0)
	f.sweep()
	op := f.operator()
	owned := f.generate(op, 0, 0, map[string]string{"p": "1"})
	must(t, f.leave(op, uid, [32]byte{}))
	if n := f.pass(200 * day); n != 0 {
		t.Errorf("%d erased", n)
	}
	if _, err := f.vault.Metadata(t.Context(), op, owned.ID); err != nil {
		t.Error(err)
	}
}

// The grace runs only while the deployment does, whatever becomes of the row that says so.
func TestAPauseOfTheDeploymentIsNoGrace(t *testing.T) {
	f := newFixture(t, 0)
	f.sweep()
	for name, pause := range map[string]func(){
		"an outage": func() { f.advance(60 * day) },
		"a damaged row": func() {
			f.pass(lifetime.Grace - day)
			f.tamper(func(tx store.Tx) error { return tx.Put([]byte(lifetime.RunKey), []byte("x")) })
			f.advance(day)
		},
		"short ones": func() {
			for range 14 {
				f.advance(2 * day)
				f.sweep()
			}
		},
	} {
		c := f.seal(f.a, login)
		f.trash(c.ID)
		pause()
		if n := f.sweep(); n != 0 && name != "short ones" {
			t.Errorf("%s: %d erased", name, n)
		}
		_, err := f.vault.Renew(t.Context(), f.a, c.ID, 0, "")
		if gone := name == "short ones"; (err != nil) != gone {
			t.Errorf("%s: %v", name, err)
		}
		if err == nil {
			f.trash(c.ID)
			if n := f.pass(lifetime.Grace); n != 1 {
				t.Errorf("%s: %d erased after its grace", name, n)
			}
		}
	}
}

// A trashed version that is replaced in the database by the one before is refused.
func TestATrashedCredentialThatIsPutBack(t *testing.T) {
	f := newFixture(t, 0)
	c := f.seal(f.a, login)
	keys, values := f.rows("credential/")
	f.trash(c.ID)
	f.tamper(func(tx store.Tx) error {
		now, _ := f.rows("credential/")
		for _, key := range now {
			must(t, tx.Delete(key))
		}
		for i := range keys {
			must(t, tx.Put(keys[i], values[i]))
		}
		return nil
	})
	if _, err := f.vault.Read(t.Context(), f.a, ByID(c.ID)); err == nil {
		t.Error("the version before the trash is served")
	}
}

// Promise: a tenant is reminded 30, 7 and 1 days before a credential expires, at most twice a day, and of
// nothing that renews itself or has a shorter life.
func TestATenantIsRemindedBeforeCredentialsExpire(t *testing.T) {
	f := newFixture(t, 0)
	mails := make(map[authz.TenantID]int)
	var fails error
	var soon []lifetime.Soon // of the last reminder
	f.vault.Lifetimes.Remind = func(ctx context.Context, tenant authz.TenantID, find lifetime.Find) (func(store.Tx) error, error) {
		found, err := find(ctx)
		must(t, err)
		soon = found
		return func(tx store.Tx) error {
			tx.OnCommit(func() { mails[tenant]++ })
			return nil
		}, fails
	}
	seal := func(p authz.Principal, name string, days int) Credential {
		c, err := f.vault.Seal(t.Context(), p, SealRequest{Name: name, Type: "t", TTLDays: days, Values: secrets(login)})
		must(t, err)
		return c
	}
	want := func(when string, a, b int) {
		t.Helper()
		f.sweep()
		if mails[f.a.Tenant] != a || mails[f.b.Tenant] != b {
			t.Errorf("%s: %d and %d mails, want %d and %d", when, mails[f.a.Tenant], mails[f.b.Tenant], a, b)
		}
	}
	f.sweep()
	names := func(days int, want ...Credential) {
		t.Helper()
		ok := len(soon) == len(want)
		for i := 0; ok && i < len(want); i++ {
			ok = soon[i] == lifetime.Soon{ID: want[i].ID, ExpiresAt: want[i].ExpiresAt, Days: days}
		}
		if !ok {
			t.Errorf("it names %v, not %v", soon, want)
		}
	}
	long := seal(f.a, "long", 90)
	trashed := seal(f.a, "trashed", 60)
	seal(f.a, "short", 1) // expired before any of the others expires soon
	month := seal(f.b, "month", 30)
	f.generate(f.operator(), 0, 0, map[string]string{"p": "1"})
	f.trash(trashed.ID)
	want("at first", 0, 0)
	f.advance(23*day - time.Second)
	want("a second before 7 days", 0, 0)
	f.advance(time.Second)
	want("7 days before", 0, 1)
	names(7, month)
	f.advance(6 * day)
	want("a day before", 0, 2)
	names(1, month)
	f.advance(day)
	want("expired", 0, 2)
	f.advance(30 * day)
	want("30 days before", 1, 2)
	names(30, long)
	also := seal(f.a, "also", 31)
	f.advance(time.Minute)
	more := seal(f.a, "more", 31)
	f.advance(day - time.Minute)
	want("the next day", 2, 2)
	names(30, also)
	f.advance(day/2 - time.Second)
	want("a third time a day", 2, 2)
	f.advance(time.Second)
	want("in time for the day before", 3, 2)
	names(30, more)
	f.advance(2 * day)
	want("no such moment came", 3, 2)
	f.advance(19*day + day/2)
	fails = fault.New(fault.Unavailable, "the KMS does not answer")
	if _, err := f.vault.Sweep(t.Context()); !errors.Is(err, fault.Unavailable) {
		t.Error(err)
	}
	fails = nil
	want("7 days before, after an outage of the KMS", 4, 2)
	f.advance(day - time.Second)
	want("once", 4, 2)
	f.advance(1000 * day)
	seal(f.a, "far", 8)
	f.advance(day)
	want("by a clock that runs ahead", 5, 2)
	f.advance(-900 * day)
	seal(f.a, "near", 8)
	f.advance(day)
	want("by one that is right", 6, 2)
	f.verify()
}

// Promise: each tenant is told of its own credentials, however many there are.
func TestEachTenantIsRemindedOfItsOwn(t *testing.T) {
	f := newFixture(t, 0)
	named := make(map[authz.TenantID][]string)
	f.vault.Lifetimes.Remind = func(ctx context.Context, tenant authz.TenantID, find lifetime.Find) (func(store.Tx) error, error) {
		soon, err := find(ctx)
		for _, one := range soon {
			named[tenant] = append(named[tenant], one.ID)
		}
		return func(store.Tx) error { return nil }, err
	}
	want := make(map[authz.TenantID][]string)
	for _, p := range []authz.Principal{f.a, f.b} {
		for i, days := range []int{60, 61, 59} {
			c, err := f.vault.Seal(t.Context(), p, SealRequest{Name: strconv.Itoa(i), Type: "t", TTLDays: days, Values: secrets(login)})
			must(t, err)
			want[p.Tenant] = append(want[p.Tenant], c.ID)
		}
		all := want[p.Tenant]
		want[p.Tenant] = []string{all[2], all[0]} // those that expire first at the beginning
	}
	f.sweep()
	f.advance(30 * day)
	f.sweep()
	if !maps.EqualFunc(named, want, slices.Equal[[]string]) {
		t.Errorf("%v, want %v", named, want)
	}
}

// Promise: a put finds a renewal that came first, and does not make a second active credential of the name.
func TestAPutThatARenewalComesBefore(t *testing.T) {
	f := newFixture(t, 0)
	c := f.sealNamed(f.a, "shop/db", login)
	f.trash(c.ID)
	f.store.before = func() {
		f.store.before = nil
		_, err := f.vault.Renew(t.Context(), f.a, c.ID, 0, "")
		must(t, err)
	}
	req := put(c.Name, map[string]string{"k": "new"})
	req.IfNoneMatch = true
	if _, created, err := f.vault.Put(t.Context(), f.a, req); created || !errors.Is(err, ErrCondition) {
		t.Error(created, err)
	}
	f.verify()
}

// A moment that comes while a reminder is made is in the next one.
func TestNoMomentFallsBetweenReminders(t *testing.T) {
	f := newFixture(t, 0)
	var named []string
	f.vault.Lifetimes.Remind = func(ctx context.Context, _ authz.TenantID, find lifetime.Find) (func(store.Tx) error, error) {
		soon, err := find(ctx)
		for _, one := range soon {
			named = append(named, one.ID)
		}
		f.advance(time.Minute)
		return func(store.Tx) error { return nil }, err
	}
	first, err := f.vault.Seal(t.Context(), f.a, SealRequest{Name: "first", Type: "t", TTLDays: 2, Values: secrets(login)})
	must(t, err)
	f.advance(time.Second)
	second, err := f.vault.Seal(t.Context(), f.a, SealRequest{Name: "second", Type: "t", TTLDays: 2, Values: secrets(login)})
	must(t, err)
	f.advance(day - time.Second)
	f.sweep()
	f.advance(day / 2)
	f.sweep()
	if want := []string{first.ID, second.ID}; !slices.Equal(named, want) {
		t.Errorf("%v are named, want %v", named, want)
	}
}
