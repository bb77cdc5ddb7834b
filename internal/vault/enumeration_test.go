package vault

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
)

// work counts the steps of an operation that take time or leave a trace.
type work struct{ views, updates, gets, scans, writes, entries, kms, opens int64 }

// measured runs do and returns its work.
func (f *fixture) measured(do func() error) (work, error) {
	count := func() work {
		s := f.store
		return work{
			s.views.Load(), s.updates.Load(), s.gets.Load(), s.scans.Load(), s.writes.Load(), s.events.Load(),
			f.kms.calls.Load(), f.opens.Load(),
		}
	}
	before := count()
	err := do()
	after := count()
	return work{
		after.views - before.views, after.updates - before.updates, after.gets - before.gets, after.scans - before.scans,
		after.writes - before.writes, after.entries - before.entries, after.kms - before.kms, after.opens - before.opens,
	}, err
}

// absences returns credentials that do not exist for f.a, one of every kind, and one that does.
// Each has its own name.
func (f *fixture) absences() (ids, names map[string]string, there Credential) {
	t := f.t
	foreign := f.sealNamed(f.b, "foreign", login)
	deleted := f.sealNamed(f.a, "deleted", login)
	must(t, f.vault.Delete(t.Context(), f.a, deleted.ID))
	expired := f.sealNamed(f.a, "expired", login)
	f.advance(31 * day)
	trashed := f.sealNamed(f.a, "trashed", login)
	_, err := f.vault.Trash(t.Context(), f.a, trashed.ID, "")
	must(t, err)
	there = f.sealNamed(f.a, "there", login)
	_, err = f.vault.Read(t.Context(), f.a, ByID(there.ID)) // makes the decoy
	must(t, err)
	ids = map[string]string{
		"foreign": foreign.ID, "deleted": deleted.ID, "expired": expired.ID, "trashed": trashed.ID, "never existing": authz.NewID("cred"),
		"malformed": "../x", "empty": "", "upper case": strings.ToUpper(there.ID),
	}
	names = map[string]string{
		"foreign": "foreign", "deleted": "deleted", "expired": "expired", "trashed": "trashed", "never existing": "never",
		"malformed": "a\x00b", "empty": "", "too long": strings.Repeat("n", 256),
	}
	return ids, names, there
}

// Promise 7: another tenant's, a deleted, an expired, an unknown and a malformed credential are one
// case, in the answer and in the work, for every method that names a credential.
func TestAllThatIsNotThereIsOneCase(t *testing.T) {
	f := newFixture(t, 0)
	ids, names, there := f.absences()
	operations := map[string]func(id string) error{
		"Read":         func(id string) error { _, err := f.vault.Read(t.Context(), f.a, ByID(id)); return err },
		"Read by name": func(name string) error { _, err := f.vault.Read(t.Context(), f.a, ByName(name)); return err },
		"Read a version": func(id string) error {
			_, err := f.vault.Read(t.Context(), f.a, ByVersion(id, 1))
			return err
		},
		"FindHeld": func(id string) error { // the endpoint then reads what is not held
			held, err := f.vault.FindHeld(t.Context(), f.a, ByID(id), "*", false)
			if held == nil && err == nil {
				_, err = f.vault.Read(t.Context(), f.a, ByID(id))
			}
			return err
		},
		"Versions": func(id string) error { _, err := f.vault.Versions(t.Context(), f.a, id); return err },
		"Metadata": func(id string) error { _, err := f.vault.Metadata(t.Context(), f.a, id); return err },
		"Rotate":   func(id string) error { _, err := f.vault.Rotate(t.Context(), f.a, id); return err },
		"Rename": func(id string) error {
			_, err := f.vault.Rename(t.Context(), f.a, id, "moved", "")
			return err
		},
		"Describe": func(id string) error { _, err := f.vault.Describe(t.Context(), f.a, id, tagged("t")); return err },
		"Replace": func(id string) error {
			_, err := f.vault.Replace(t.Context(), f.a, id, ReplaceRequest{Values: secrets(login)})
			return err
		},
		"Patch": func(id string) error {
			_, err := f.vault.Patch(t.Context(), f.a, id, PatchRequest{Set: secrets(login)})
			return err
		},
		"Undo":   func(id string) error { _, err := f.vault.Undo(t.Context(), f.a, id, 1, ""); return err },
		"Trash":  func(id string) error { _, err := f.vault.Trash(t.Context(), f.a, id, ""); return err },
		"Renew":  func(id string) error { _, err := f.vault.Renew(t.Context(), f.a, id, 0, ""); return err },
		"Delete": func(id string) error { return f.vault.Delete(t.Context(), f.a, id) },
	}
	for operation, do := range operations {
		cases, first := ids, ""
		if operation == "Read by name" {
			cases = names
		}
		var want work
		for name, which := range cases {
			if (name == "expired" || name == "trashed") && (operation == "Delete" || operation == "Metadata" || operation == "Renew") {
				continue // an expired credential can be deleted and renewed, and is listed
			}
			did, err := f.measured(func() error { return do(which) })
			if !errors.Is(err, fault.Forbidden) {
				t.Errorf("%s %s: %v", operation, name, err)
				continue
			}
			if first == "" {
				want, first = did, err.Error()
			}
			if did != want || err.Error() != first {
				t.Errorf("%s %s: did %+v and said %q, another case did %+v and said %q", operation, name, did, err, want, first)
			}
			if e := f.last(f.a); e.Outcome != audit.Denied || did.entries != 1 {
				t.Errorf("%s %s: %d entries, the last %+v", operation, name, did.entries, e)
			}
		}
	}
	// A read does the same work when it succeeds.
	for operation, which := range map[string]struct{ hit, miss string }{
		"Read": {there.ID, ids["foreign"]}, "Read by name": {"there", "foreign"}, "Versions": {there.ID, ids["foreign"]},
		"Read a version": {there.ID, ids["foreign"]}, "Metadata": {there.ID, ids["foreign"]},
	} {
		hit, err := f.measured(func() error { return operations[operation](which.hit) })
		must(t, err)
		if missed, _ := f.measured(func() error { return operations[operation](which.miss) }); missed != hit {
			t.Errorf("%s: a hit does %+v, a miss %+v", operation, hit, missed)
		}
	}
	must(t, f.vault.Delete(t.Context(), f.a, ids["expired"]))
	f.verify()

	// A new method is added to the table above, or here with what it names instead of a credential.
	others := map[string]string{
		"Seal": "makes one", "Put": "makes one where none is", "List": "names none", "Summary": "names none",
		"Owned": "an object's", "Apply": "an object's", "Generate": "an object's", "Reencrypt": "an object's", "Release": "an object's",
		"UnsealOwned": "an object's", "Holds": "an object's", "StillHeld": "what FindHeld found", "Adopt": "an object's", "Objects": "the deployment's", "SealingKeyUse": "the deployment's",
		"Sweep": "the deployment's",
	}
	for method := range reflect.TypeFor[*Vault]().Methods() {
		if operations[method.Name] == nil && others[method.Name] == "" {
			t.Errorf("%s is not counted", method.Name)
		}
	}
}

// A version exists when it is the current one, or the previous one before its end. All other
// versions, of any credential, are one case with those that never existed.
func TestAllVersionsThatAreNotThereAreOneCase(t *testing.T) {
	f := newFixture(t, 0)
	generate := func(op authz.Principal, expect uint64, overlap time.Duration) *Owned {
		t.Helper()
		return f.generate(op, expect, overlap, map[string]string{"p": fmt.Sprint(op.ID, expect)})
	}
	object := func(p authz.Principal, id string) authz.Principal {
		op := f.operator()
		op.Tenant, op.ID = p.Tenant, id
		return op
	}
	ended, swept, released, deleted, foreign := object(f.a, "ended"), object(f.a, "swept"), object(f.a, "released"), object(f.a, "deleted"), object(f.b, "foreign")
	ids := make(map[string]string)
	for _, op := range []authz.Principal{ended, swept, released, deleted, foreign} {
		generate(op, 0, 0)
		ids[op.ID] = generate(op, 1, 20*day).ID
	}
	must(t, f.end(released, "released", false))
	must(t, f.end(deleted, "deleted", true))
	f.advance(10 * day)
	again := object(f.a, "again")
	generate(again, 0, 0)
	generate(again, 1, day)
	ids["again"] = generate(again, 2, 15*day).ID // ended version 1
	f.advance(10 * day)
	if n, err := f.vault.Sweep(t.Context()); err != nil || n != 3 {
		t.Fatal(n, err) // the versions of swept, ended and foreign
	}
	late := object(f.a, "late")
	generate(late, 0, 0)
	ids["late"] = generate(late, 1, time.Hour).ID
	f.advance(time.Hour)
	generate(foreign, 2, 15*day)
	unowned := f.seal(f.a, login)
	_, err := f.vault.Rotate(t.Context(), f.a, unowned.ID)
	must(t, err)

	read := func(id string, version uint64) (work, error) {
		return f.measured(func() error {
			_, err := f.vault.Read(t.Context(), f.a, ByVersion(id, version))
			return err
		})
	}
	if _, err := read(ids["again"], 2); err != nil { // the first read of an hour also notes it
		t.Fatal(err)
	}
	want, err := read(ids["again"], 2)
	if err != nil {
		t.Fatal("the previous version cannot be read:", err)
	}
	if did, err := read(ids["again"], 3); err != nil || did != want {
		t.Fatalf("the current version: did %+v, the previous one %+v (%v)", did, want, err)
	}
	first := ""
	for name, c := range map[string]struct {
		id      string
		version uint64
	}{
		"ended long ago":      {ids["ended"], 1},
		"swept":               {ids["swept"], 1},
		"ended, not swept":    {ids["late"], 1},
		"of what is released": {ids["released"], 1},
		"of what is deleted":  {ids["deleted"], 1},
		"the current deleted": {ids["deleted"], 2},
		"replaced":            {ids["again"], 1},
		"none yet":            {ids["again"], 4},
		"number 0":            {ids["again"], 0},
		"the largest number":  {ids["again"], 1<<64 - 1},
		"a foreign previous":  {ids["foreign"], 2},
		"a foreign current":   {ids["foreign"], 3},
		"of no object's":      {unowned.ID, 1},
		"never existing":      {authz.NewID("cred"), 1},
		"malformed":           {"../x", 1},
	} {
		did, err := read(c.id, c.version)
		if !errors.Is(err, fault.Forbidden) {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if first == "" {
			first = err.Error()
		}
		if did != want || err.Error() != first {
			t.Errorf("%s: did %+v and said %q, a hit did %+v, another case said %q", name, did, err, want, first)
		}
		if e := f.last(f.a); e.EventType != audit.CredentialUnsealed || e.Outcome != audit.Denied {
			t.Errorf("%s: recorded as %+v", name, e)
		}
	}
	f.verify()
}

// The same holds for an object that owns nothing in this tenant.
func TestAForeignObjectIsNoObject(t *testing.T) {
	f := newFixture(t, 0)
	_, err := f.vault.Apply(t.Context(), f.operator(), uid, 0, f.desired(login, "a"))
	must(t, err)
	foreign := f.operator()
	foreign.Tenant = f.b.Tenant
	for operation, do := range map[string]func(uid string) error{
		"Owned":   func(uid string) error { _, err := f.vault.Owned(t.Context(), foreign, uid); return err },
		"Release": func(uid string) error { return f.end(foreign, uid, true) },
		"Reencrypt": func(uid string) error {
			_, err := f.vault.Reencrypt(t.Context(), foreign, uid, 1, "now")
			if !errors.Is(err, fault.NotFound) {
				t.Errorf("Reencrypt: %v", err)
			}
			return nil
		},
		"UnsealOwned": func(uid string) error {
			_, err := f.vault.UnsealOwned(t.Context(), foreign, uid, 1)
			if !errors.Is(err, fault.NotFound) {
				t.Errorf("UnsealOwned: %v", err)
			}
			return nil
		},
		"Generate": func(uid string) error {
			_, err := f.vault.Generate(t.Context(), foreign, uid, 1, f.desired(nil, "a"), f.makes(login))
			if !errors.Is(err, fault.Conflict) {
				t.Errorf("Generate: %v", err)
			}
			return nil
		},
	} {
		owned, err := f.measured(func() error { return do(uid) })
		must(t, err)
		if never, err := f.measured(func() error { return do("8c2b1c1e-0000-4000-8000-00000000ffff") }); err != nil || owned != never {
			t.Errorf("%s: a foreign object does %+v, none does %+v (%v)", operation, owned, never, err)
		}
	}
	f.verify()
}

func TestMissesWithCachedKeysAskNoKMS(t *testing.T) {
	f := newFixture(t, time.Hour)
	ids, _, there := f.absences()
	_, err := f.vault.Read(t.Context(), f.a, ByID(there.ID))
	must(t, err)
	for name, id := range ids {
		did, err := f.measured(func() error { _, err := f.vault.Read(t.Context(), f.a, ByID(id)); return err })
		if !errors.Is(err, fault.Forbidden) || did.kms != 0 || did.opens != 1 {
			t.Errorf("%s: did %+v (%v)", name, did, err)
		}
	}
}
