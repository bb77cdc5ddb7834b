package vault

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/vault/mac"
	"github.com/latticekeep/latticekeep/internal/vault/nameindex"
)

// pod returns a ServiceAccount of a namespace that belongs to the tenant of f.a.
func (f *fixture) pod(cluster, namespace string) authz.Principal {
	return authz.Principal{
		Tenant: f.a.Tenant, Kind: authz.ServiceAccount, ID: "account-" + namespace, Scopes: authz.TenantScopes(),
		Namespace: authz.Namespace{Cluster: cluster, Name: namespace},
	}
}

// object makes the credential of an object, or its next version.
func (f *fixture) object(namespace, name string, expect uint64, ttlDays int, overlap time.Duration) *Owned {
	f.t.Helper()
	op := f.operator()
	op.ID = "uid-" + namespace + "-" + name
	d := f.desired(map[string]string{"of": fmt.Sprint(namespace, expect)}, fmt.Sprint(expect))
	d.Name, d.TTLDays, d.Overlap, d.Object = name, ttlDays, overlap, Object{Cluster: "cluster", Namespace: namespace, Name: name}
	o, err := f.vault.Apply(f.t.Context(), op, op.ID, expect, d)
	must(f.t, err)
	return o
}

func (f *fixture) release(namespace, name string) {
	f.t.Helper()
	op := f.operator()
	must(f.t, f.end(op, "uid-"+namespace+"-"+name, false))
}

// A caller who may write in the tenant, over REST or as an object of another namespace, cannot take
// over the name of an object's credential.
func TestANameOfAnObjectIsNotShadowed(t *testing.T) {
	f := newFixture(t, time.Hour)
	shop, billing := f.pod("cluster", "shop"), f.pod("cluster", "billing")
	is := func(when string, p authz.Principal, want string) {
		t.Helper()
		got, err := f.vault.Read(t.Context(), p, ByName("db"))
		if want == "" && errors.Is(err, fault.Forbidden) && got.Values == nil {
			return
		}
		if err != nil || got.ID != want {
			t.Errorf("%s: %s, want %q (%v)", when, got.ID, want, err)
		}
	}
	owned := f.object("shop", "db", 0, 30, 0)
	is("alone, to its namespace", shop, owned.ID)
	is("alone, to a key", f.a, owned.ID)
	is("alone, to another namespace", billing, "")
	is("alone, to a namespace of that name elsewhere", f.pod("other", "shop"), "")

	f.advance(day)
	seal := func() Credential {
		t.Helper()
		c, err := f.vault.Seal(t.Context(), f.a, SealRequest{Name: "db", Type: "database", TTLDays: 3650, Values: secrets(login)})
		must(t, err)
		return c
	}
	shadow := seal()
	is("beside a later seal, to its namespace", shop, owned.ID)
	is("beside a later seal, to a key", f.a, owned.ID)
	is("beside a later seal, to another namespace", billing, shadow.ID)
	f.commit(func(tx store.Tx) (err error) { // as many as a lookup compares
		for i := range nameindex.MaxNamesakes {
			at := f.now().Add(3650*day + time.Duration(i)*time.Second)
			key := nameindex.Key(f.a.Tenant, f.vault.records.names.Hash(f.a.Tenant, "db"), at, at, authz.NewID(idPrefix))
			err = errors.Join(err, tx.Put(key, f.keys.SealRow(key, nil)))
		}
		return err
	})
	is("beside many, to its namespace", shop, owned.ID)
	is("beside many, to a key", f.a, owned.ID)
	prefix := string(nameindex.Prefix(f.a.Tenant, f.vault.records.names.Hash(f.a.Tenant, "db")))
	f.commit(func(tx store.Tx) error {
		keys, _ := f.rows(prefix)
		return errors.Join(tx.Delete(keys[len(keys)-1]), mac.DeleteAll(tx, []byte(prefix)))
	})
	must(t, f.vault.Delete(t.Context(), f.a, shadow.ID))
	shadow = seal()

	f.advance(day)
	other := f.object("billing", "db", 0, 5, 0)
	is("two objects, to the first namespace", shop, owned.ID)
	is("two objects, to the second", billing, other.ID)
	is("two objects, to a key", f.a, other.ID)
	f.advance(6 * day)
	is("expired, to its namespace: not another one", billing, "")
	is("expired, to a key: the object's that is active", f.a, owned.ID)
	f.advance(31 * day)
	is("all objects' expired, to a key: not the later seal", f.a, "")
	f.release("billing", "db")
	is("released: what no object owns", billing, shadow.ID)
	f.release("shop", "db")
	is("all released, to a key", f.a, shadow.ID)
	again := f.object("shop", "db", 0, 30, 0)
	is("made again", shop, again.ID)
	f.release("shop", "db")
	is("released, and the newest of those without an object", f.a, again.ID)
	is("released, to every namespace", billing, again.ID)
	f.verify()
}

// An object in a namespace never reaches another namespace, and no answer reveals that a credential
// exists there.
func TestAnObjectsCredentialIsNotThereForOtherNamespaces(t *testing.T) {
	f := newFixture(t, 0)
	f.object("shop", "db", 0, 30, 0)
	owned := f.object("shop", "db", 1, 30, 10*day)
	free := f.seal(f.a, login)
	_, err := f.vault.Read(t.Context(), f.a, ByID(owned.ID)) // makes the decoy
	must(t, err)
	shop := f.pod("cluster", "shop")
	operations := func(p authz.Principal) map[string]func(id string) error {
		return map[string]func(id string) error{
			"Unseal":       func(id string) error { _, err := f.vault.Read(t.Context(), p, ByID(id)); return err },
			"UnsealByName": func(string) error { _, err := f.vault.Read(t.Context(), p, ByName("none")); return err },
			"the current": func(id string) error {
				_, err := f.vault.Read(t.Context(), p, ByVersion(id, 2))
				return err
			},
			"the previous": func(id string) error {
				_, err := f.vault.Read(t.Context(), p, ByVersion(id, 1))
				return err
			},
			"Versions": func(id string) error { _, err := f.vault.Versions(t.Context(), p, id); return err },
			"Metadata": func(id string) error { _, err := f.vault.Metadata(t.Context(), p, id); return err },
			"Rotate":   func(id string) error { _, err := f.vault.Rotate(t.Context(), p, id); return err },
			"Replace": func(id string) error {
				_, err := f.vault.Replace(t.Context(), p, id, ReplaceRequest{Values: secrets(login)})
				return err
			},
			"Delete": func(id string) error { return f.vault.Delete(t.Context(), p, id) },
		}
	}
	for name, p := range map[string]authz.Principal{
		"another namespace": f.pod("cluster", "billing"), "another cluster": f.pod("other", "shop"), "none": f.pod("", ""),
	} {
		for operation, do := range operations(p) {
			never, err := f.measured(func() error { return do(authz.NewID("cred")) })
			if !errors.Is(err, fault.Forbidden) {
				t.Errorf("%s, %s of none: %v", name, operation, err)
			}
			did, err2 := f.measured(func() error { return do(owned.ID) })
			if !errors.Is(err2, fault.Forbidden) || err2.Error() != err.Error() || did != never {
				t.Errorf("%s, %s: did %+v and said %v, of one that never existed %+v and %v", name, operation, did, err2, never, err)
			}
			if e := f.last(f.a); e.Outcome != audit.Denied || e.Attributes[audit.AttributeReason] != reasonMissing {
				t.Errorf("%s, %s: recorded as %+v", name, operation, e)
			}
		}
		list, _, err := f.vault.List(t.Context(), p, ListQuery{Limit: 1})
		if err != nil || len(list) != 1 || list[0].ID != free.ID {
			t.Errorf("%s: %+v %v", name, list, err)
		}
	}
	list, _, err := f.vault.List(t.Context(), shop, ListQuery{})
	if err != nil || len(list) != 2 {
		t.Errorf("%+v %v", list, err)
	}
	for operation, do := range operations(shop) {
		err := do(owned.ID)
		if reads := !slices.Contains([]string{"UnsealByName", "Rotate", "Replace", "Delete"}, operation); reads != (err == nil) {
			t.Errorf("its own namespace, %s: %v", operation, err)
		}
		if e := f.last(f.a); err != nil && operation != "UnsealByName" && e.Attributes[audit.AttributeReason] != reasonOwned {
			t.Errorf("its own namespace, %s: recorded as %+v", operation, e)
		}
	}
}

func TestADamagedRowOfAnObjectRevealsNothing(t *testing.T) {
	inBothStores(t, func(t *testing.T, f *fixture) {
		owned := f.object("shop", "db", 0, 30, 0)
		keys, values := f.rows("owned/")
		f.tamper(func(tx store.Tx) error {
			return tx.Put(keys[0], []byte(strings.Replace(string(values[0]), `"shop"`, `"much"`, 1)))
		})
		for _, p := range []authz.Principal{f.pod("cluster", "shop"), f.pod("cluster", "much")} {
			if got, err := f.vault.Read(t.Context(), p, ByID(owned.ID)); !errors.Is(err, fault.Forbidden) || got.Values != nil {
				t.Errorf("%s, a changed row: %v", p.ID, err)
			}
		}
		// The state refuses the row for everybody. Without it, nobody but a ServiceAccount depends on it.
		if got, err := f.vault.Read(t.Context(), f.a, ByID(owned.ID)); (err == nil) != f.unbound || err != nil && (!errors.Is(err, fault.Forbidden) || got.Values != nil) {
			t.Error(err)
		}
	})
}

func TestDamageLeavesNoPlaceOfAnObjectsCredentialInTheIndex(t *testing.T) {
	for _, damaged := range []string{"credential/", "credential-version/", "owned/"} {
		f := newUnboundFixture(t, time.Hour)
		c := f.object("shop", "db", 0, 30, 0)
		keys, _ := f.rows(damaged)
		f.tamper(func(tx store.Tx) error { return tx.Put(keys[0], []byte("junk")) })
		system := f.a
		system.Kind = authz.System
		must(t, f.vault.Delete(t.Context(), system, c.ID))
		if keys, _ := f.rows("credential-name/"); len(keys) != 0 {
			t.Errorf("damage to %s: %q", damaged, keys)
		}
	}
}
