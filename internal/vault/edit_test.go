package vault

import (
	"errors"
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/vault/bounds"
)

// RFC 7396 on the values: what is named is set or removed, and all else stays.
func TestAPatchChangesWhatItNames(t *testing.T) {
	f := newFixture(t, 0)
	c := f.seal(f.a, map[string]string{"user": "ada", "password": "one", "old": "x"})
	patched, err := f.vault.Patch(t.Context(), f.a, c.ID, PatchRequest{
		Set: secrets(map[string]string{"password": "two", "port": "5432"}), Remove: []string{"old", "never"}, TTLDays: 7,
	})
	must(t, err)
	got, err := f.vault.Read(t.Context(), f.a, ByID(c.ID))
	must(t, err)
	want := map[string]string{"user": "ada", "password": "two", "port": "5432"}
	if !reflect.DeepEqual(plain(got.Values), want) || got.Version != 2 || patched.Version != 2 || !patched.ExpiresAt.Equal(f.now().Add(7*day)) {
		t.Errorf("%v, version %d until %v", plain(got.Values), got.Version, patched.ExpiresAt)
	}
	if e := f.history(f.a)[1]; e.EventType != audit.CredentialRotated || e.Outcome != audit.Success {
		t.Errorf("%+v", e)
	}
	many := make(map[string]string)
	for i := range bounds.MaxValues - 2 {
		many[fmt.Sprint("k", i)] = ""
	}
	for what, req := range map[string]PatchRequest{
		"no key is left": {Remove: []string{"user", "password", "port"}}, "too many keys": {Set: secrets(many)},
		"a key with a slash": {Set: secrets(map[string]string{"a/b": "x"})}, "too long": {Set: secrets(map[string]string{"k": strings.Repeat("x", bounds.MaxValuesBytes)})},
		"days": {Set: secrets(login), TTLDays: bounds.MaxTTLDays + 1},
	} {
		if _, err := f.vault.Patch(t.Context(), f.a, c.ID, req); !errors.Is(err, fault.Invalid) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := f.vault.Patch(t.Context(), f.a, c.ID, PatchRequest{Set: secrets(login), IfMatch: Condition(c.EntityTag())}); !errors.Is(err, ErrCondition) {
		t.Error(err)
	}
	f.verify()
}

// Whether a patch fits depends on what is kept. So a caller that may only write is told nothing, and
// changes nothing, whatever is there.
func TestAPatchNeedsTheRightToUnseal(t *testing.T) {
	f := newFixture(t, 0)
	c := f.seal(f.a, map[string]string{"only": "x"})
	writer := f.a
	writer.Scopes = []authz.Scope{authz.VaultWrite}
	var first work
	for i, req := range []PatchRequest{
		{Remove: []string{"only"}}, {Remove: []string{"other"}}, {Set: secrets(login)}, {Set: secrets(map[string]string{"/": ""})},
	} {
		for _, id := range []string{c.ID, authz.NewID("cred"), "x"} {
			did, err := f.measured(func() error { _, err := f.vault.Patch(t.Context(), writer, id, req); return err })
			if first == (work{}) {
				first = did
			}
			if !errors.Is(err, fault.Forbidden) || err.Error() != errDenied.Error() || did != first {
				t.Errorf("%d of %s: %v after %+v, first %+v", i, id, err, did, first)
			}
		}
	}
	if got, err := f.vault.Metadata(t.Context(), f.a, c.ID); err != nil || got.Version != 1 {
		t.Error(got.Version, err)
	}
}

func put(name string, values map[string]string) PutRequest {
	return PutRequest{SealRequest: SealRequest{Name: name, Type: "database", Values: secrets(values)}}
}

func TestAPutMakesWhatTheNameLeadsToOrReplacesIt(t *testing.T) {
	f := newFixture(t, 0)
	req := put("shop/db", login)
	req.TTLDays = 30
	made, created, err := f.vault.Put(t.Context(), f.a, req)
	must(t, err)
	if !created || made.Version != 1 || made.Name != "shop/db" {
		t.Errorf("%v %+v", created, made)
	}
	req = put("shop/db", map[string]string{"k": "two"})
	req.Type = "api_key"
	next, created, err := f.vault.Put(t.Context(), f.a, req)
	must(t, err)
	if created || next.ID != made.ID || next.Version != 2 || next.Type != "api_key" || !next.ExpiresAt.Equal(f.now().AddDate(0, 0, 30)) {
		t.Errorf("%v %+v", created, next)
	}
	if got, err := f.named("shop/db"); err != nil || got.ID != made.ID || string(got.Values["k"]) != "two" {
		t.Error(got.ID, err)
	}
	f.advance(31 * day) // it has expired, and keeps what it has
	third, created, err := f.vault.Put(t.Context(), f.a, put("shop/db", login))
	must(t, err)
	if !created || third.ID == made.ID || !third.ExpiresAt.Equal(f.now().AddDate(0, 0, bounds.DefaultTTLDays)) {
		t.Errorf("%v %+v", created, third)
	}
	for _, bad := range []string{"", "/", "a//b", "/a", "a/", ".", "a/../b", "a\x00"} {
		if _, _, err := f.vault.Put(t.Context(), f.a, put(bad, login)); !errors.Is(err, fault.Invalid) {
			t.Errorf("%q: %v", bad, err)
		}
		if _, err := f.vault.Seal(t.Context(), f.a, SealRequest{Name: bad, Type: "database", Values: secrets(login)}); !errors.Is(err, fault.Invalid) {
			t.Errorf("%q is sealed: %v", bad, err)
		}
	}
	for _, good := range []string{"a", "a/b", "...", "a/..b", " ", "a/b/c/ü"} {
		f.sealNamed(f.a, good, login)
	}
	f.verify()
}

// Promise: puts at the same time make one credential, and lose none of the versions.
func TestPutsAtTheSameTimeMakeOneCredential(t *testing.T) {
	f := newFixture(t, day)
	const writers = 6
	var all sync.WaitGroup
	var mu sync.Mutex
	ids, made := make(map[string]bool), 0
	for range writers {
		all.Go(func() {
			c, created, err := f.vault.Put(t.Context(), f.a, put("shop/db", login))
			mu.Lock()
			defer mu.Unlock()
			if ids[c.ID] = true; err != nil {
				t.Error(err)
			}
			if created {
				made++
			}
		})
	}
	all.Wait()
	got, err := f.named("shop/db")
	must(t, err)
	if len(ids) != 1 || made != 1 || got.Version != writers {
		t.Errorf("%d credentials, %d made, the last version %d", len(ids), made, got.Version)
	}
	f.verify()
}

// Promise: a put that may only make a credential replaces none, also not one that is made meanwhile. An
// expired one is in nobody's way.
func TestIfNoneMatchMakesOneCredentialAndReplacesNone(t *testing.T) {
	f := newFixture(t, day)
	const writers = 6
	var all sync.WaitGroup
	made := make(chan string, writers)
	for n := range writers {
		all.Go(func() {
			req := put("shop/db", map[string]string{"k": strconv.Itoa(n)})
			req.IfNoneMatch = true
			switch _, created, err := f.vault.Put(t.Context(), f.a, req); {
			case err == nil && created:
				made <- strconv.Itoa(n)
			case created || !errors.Is(err, ErrCondition):
				t.Error(created, err)
			}
		})
	}
	all.Wait()
	got, err := f.named("shop/db")
	must(t, err)
	if len(made) != 1 || got.Version != 1 || string(got.Values["k"]) != <-made {
		t.Errorf("%d made, version %d", len(made), got.Version)
	}
	refused := 0
	for _, e := range f.history(f.a) {
		if e.EventType == audit.CredentialSealed && e.Outcome == audit.Denied && e.Attributes[audit.AttributeReason] == reasonCondition && e.Resource.ID == got.ID {
			refused++
		}
	}
	if refused != writers-1 {
		t.Errorf("%d entries of refusals", refused)
	}
	f.advance(400 * day)
	req := put("shop/db", login)
	req.IfNoneMatch = true
	if _, created, err := f.vault.Put(t.Context(), f.a, req); err != nil || !created {
		t.Error(created, err)
	}
	f.verify()
}

// Nothing that is put stands in for an object's secret, and a refused put is the one 403.
func TestAPutReplacesNoObjectsCredential(t *testing.T) {
	f := newFixture(t, 0)
	op := f.operator()
	op.Tenant = f.a.Tenant
	owned := f.generate(op, 0, 0, map[string]string{"p": "1"})
	rows, _ := f.rows("credential/" + string(f.a.Tenant))
	_, _, err := f.vault.Put(t.Context(), f.a, put(owned.Name, login))
	if !errors.Is(err, fault.Forbidden) || err.Error() != errDenied.Error() {
		t.Error(err)
	}
	if e := f.last(f.a); e.EventType != audit.CredentialSealed || e.Outcome != audit.Denied || e.Attributes[audit.AttributeReason] != "owned_by_object" {
		t.Errorf("%+v", e)
	}
	f.advance(400 * day) // an object's name stays its own when its credential has expired
	if _, _, err := f.vault.Put(t.Context(), f.a, put(owned.Name, login)); !errors.Is(err, fault.Forbidden) {
		t.Error(err)
	}
	if now, _ := f.rows("credential/" + string(f.a.Tenant)); len(now) != len(rows) {
		t.Errorf("%d credentials, before %d", len(now), len(rows))
	}
	// A name of another tenant is free.
	if _, created, err := f.vault.Put(t.Context(), f.b, put(owned.Name, login)); err != nil || !created {
		t.Error(created, err)
	}
	// A condition holds for a version that is there only.
	req := put("new", login)
	for _, req.IfMatch = range []Condition{"*", `"x"`} {
		if _, _, err := f.vault.Put(t.Context(), f.a, req); !errors.Is(err, fault.Forbidden) {
			t.Error(req.IfMatch, err)
		}
	}
	req.IfMatch = ""
	_, _, err = f.vault.Put(t.Context(), f.a, req)
	must(t, err)
	req.Creates = true
	if _, _, err := f.vault.Put(t.Context(), f.a, req); !errors.Is(err, fault.Forbidden) {
		t.Error("a caller that may only make one replaced it:", err)
	}
	req.Creates, req.IfMatch = false, `"x"`
	if _, _, err := f.vault.Put(t.Context(), f.a, req); !errors.Is(err, ErrCondition) {
		t.Error(err)
	}
	f.verify()
}
