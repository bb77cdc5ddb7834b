package vault

import (
	"errors"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
)

// work is what an operation does that takes time or leaves a trace.
type work struct{ views, updates, gets, scans, writes, entries, kms, opens int64 }

// measured runs do and returns what it did.
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

// absences are credentials of every sort that is not there for f.a, and one
// that is. Each has a name of its own.
func (f *fixture) absences() (ids, names map[string]string, there Credential) {
	t := f.t
	foreign := f.sealNamed(f.b, "foreign", login)
	deleted := f.sealNamed(f.a, "deleted", login)
	must(t, f.vault.Delete(t.Context(), f.a, deleted.ID))
	expired := f.sealNamed(f.a, "expired", login)
	f.advance(31 * day)
	there = f.sealNamed(f.a, "there", login)
	_, err := f.vault.Unseal(t.Context(), f.a, there.ID) // makes the decoy
	must(t, err)
	ids = map[string]string{
		"foreign": foreign.ID, "deleted": deleted.ID, "expired": expired.ID, "never existing": authz.NewID("cred"),
		"malformed": "../x", "empty": "", "upper case": strings.ToUpper(there.ID),
	}
	names = map[string]string{
		"foreign": "foreign", "deleted": "deleted", "expired": "expired", "never existing": "never",
		"malformed": "a\x00b", "empty": "", "too long": strings.Repeat("n", 256),
	}
	return ids, names, there
}

// Promise 7: foreign, deleted, expired, never existing and malformed are one
// case, in the answer and in the work, to every method that names a credential.
func TestAllThatIsNotThereIsOneCase(t *testing.T) {
	f := newFixture(t, 0)
	ids, names, there := f.absences()
	operations := map[string]func(id string) error{
		"Unseal":       func(id string) error { _, err := f.vault.Unseal(t.Context(), f.a, id); return err },
		"UnsealByName": func(name string) error { _, err := f.vault.UnsealByName(t.Context(), f.a, name); return err },
		"Versions":     func(id string) error { _, err := f.vault.Versions(t.Context(), f.a, id); return err },
		"Rotate":       func(id string) error { _, err := f.vault.Rotate(t.Context(), f.a, id); return err },
		"Replace": func(id string) error {
			_, err := f.vault.Replace(t.Context(), f.a, id, ReplaceRequest{Values: secrets(login)})
			return err
		},
		"Delete": func(id string) error { return f.vault.Delete(t.Context(), f.a, id) },
	}
	for operation, do := range operations {
		cases, first := ids, ""
		if operation == "UnsealByName" {
			cases = names
		}
		var want work
		for name, which := range cases {
			if operation == "Delete" && name == "expired" {
				continue // what has expired can be deleted
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
	// What only reads does the same work when it succeeds.
	for operation, which := range map[string]struct{ hit, miss string }{
		"Unseal": {there.ID, ids["foreign"]}, "UnsealByName": {"there", "foreign"}, "Versions": {there.ID, ids["foreign"]},
	} {
		hit, err := f.measured(func() error { return operations[operation](which.hit) })
		must(t, err)
		if missed, _ := f.measured(func() error { return operations[operation](which.miss) }); missed != hit {
			t.Errorf("%s: a hit does %+v, a miss %+v", operation, hit, missed)
		}
	}
	must(t, f.vault.Delete(t.Context(), f.a, ids["expired"]))
	f.verify()

	// A new method is entered above, or here with what it does not name.
	others := map[string]string{
		"Seal": "makes one", "List": "names none",
		"Owned": "an object's", "Apply": "an object's", "Reencrypt": "an object's", "Release": "an object's", "Owners": "the deployment's",
		"Reindex": "the deployment's", "Sweep": "the deployment's",
	}
	for method := range reflect.TypeFor[*Vault]().Methods() {
		if operations[method.Name] == nil && others[method.Name] == "" {
			t.Errorf("%s is not counted", method.Name)
		}
	}
}

// The same holds for objects that own nothing here.
func TestAForeignObjectIsNoObject(t *testing.T) {
	f := newFixture(t, 0)
	_, err := f.vault.Apply(t.Context(), f.operator(), uid, 0, f.desired(login, "a"))
	must(t, err)
	foreign := f.operator()
	foreign.Tenant = f.b.Tenant
	for operation, do := range map[string]func(uid string) error{
		"Owned":   func(uid string) error { _, err := f.vault.Owned(t.Context(), foreign, uid); return err },
		"Release": func(uid string) error { return f.vault.Release(t.Context(), foreign, uid, true) },
		"Reencrypt": func(uid string) error {
			_, err := f.vault.Reencrypt(t.Context(), foreign, uid, 1, "now")
			if !errors.Is(err, fault.NotFound) {
				t.Errorf("Reencrypt: %v", err)
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
	_, err := f.vault.Unseal(t.Context(), f.a, there.ID)
	must(t, err)
	for name, id := range ids {
		did, err := f.measured(func() error { _, err := f.vault.Unseal(t.Context(), f.a, id); return err })
		if !errors.Is(err, fault.Forbidden) || did.kms != 0 || did.opens != 1 {
			t.Errorf("%s: did %+v (%v)", name, did, err)
		}
	}
}
