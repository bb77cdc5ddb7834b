package vault

import (
	"crypto/sha3"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/vault/bounds"
	"github.com/latticekeep/latticekeep/internal/vault/record"
)

const uid = "8c2b1c1e-0000-4000-8000-000000000001"

func (f *fixture) operator() authz.Principal {
	return authz.Principal{Tenant: f.a.Tenant, Kind: authz.Operator, ID: uid, Scopes: []authz.Scope{authz.VaultRead, authz.VaultWrite}}
}

func (f *fixture) desired(values map[string]string, spec string) Desired {
	sealedAt := make(map[string]time.Time)
	for k := range values {
		sealedAt[k] = f.now()
	}
	return Desired{
		Name: "db", Type: "database", TTLDays: 30, Values: secrets(values), SealedAt: sealedAt,
		SpecDigest: sha3.Sum256([]byte(spec)),
	}
}

func TestAnOwnedCredentialFollowsItsObject(t *testing.T) {
	f := newFixture(t, time.Minute)
	op := f.operator()
	if o, err := f.vault.Owned(t.Context(), op, uid); err != nil || o != nil {
		t.Fatal(o, err)
	}
	first, err := f.vault.Apply(t.Context(), op, uid, 0, f.desired(map[string]string{"p": "1", "q": "x"}, "a"))
	must(t, err)
	seen, err := f.vault.Owned(t.Context(), op, uid)
	must(t, err)
	if seen.Credential != first.Credential || seen.Audit != first.Audit || seen.SpecDigest != first.SpecDigest || !seen.Owned || seen.Missing {
		t.Fatalf("applied %+v, holds %+v", first, seen)
	}
	if e := f.last(f.a); e.EventType != audit.CredentialSealed || e.Sequence != seen.Audit.Sequence || e.Hash != seen.Audit.Hash {
		t.Fatalf("%+v", e)
	}

	f.advance(day)
	next, err := f.vault.Apply(t.Context(), op, uid, 1, f.desired(map[string]string{"p": "2"}, "b"))
	must(t, err)
	if next.ID != first.ID || next.Version != 2 || !next.CreatedAt.Equal(first.CreatedAt) {
		t.Fatalf("%+v", next)
	}
	if e := f.last(f.a); e.EventType != audit.CredentialRotated {
		t.Fatalf("new values are recorded as %s", e.EventType)
	}
	if at := next.ValueSealedAt["q"]; !at.Equal(f.now().Add(-day)) {
		t.Fatal("a dropped key was forgotten: its old value could come back")
	}
	longer := f.desired(map[string]string{"p": "2"}, "c")
	longer.TTLDays = 60
	_, err = f.vault.Apply(t.Context(), op, uid, 2, longer)
	must(t, err)
	if e := f.last(f.a); e.EventType != audit.CredentialReencrypted {
		t.Fatalf("a new TTL is recorded as %s", e.EventType)
	}
	again, err := f.vault.Reencrypt(t.Context(), op, uid, 3, "now")
	must(t, err)
	if again.Version != 4 || again.Trigger != "now" || !again.ExpiresAt.Equal(f.now().Add(60*day)) || again.SpecDigest != longer.SpecDigest {
		t.Fatalf("%+v", again)
	}
	got, err := f.vault.Read(t.Context(), f.a, ByID(first.ID))
	must(t, err)
	if !maps.Equal(plain(got.Values), map[string]string{"p": "2"}) {
		t.Fatal(plain(got.Values))
	}
	// The credential can be encrypted again after it expired, because the object still exists.
	f.advance(61 * day)
	_, err = f.vault.Reencrypt(t.Context(), op, uid, 4, "now")
	must(t, err)
	f.verify()
}

func TestAnOwnedCredentialIsReadOnlyForOthers(t *testing.T) {
	f := newFixture(t, time.Minute)
	o, err := f.vault.Apply(t.Context(), f.operator(), uid, 0, f.desired(login, "a"))
	must(t, err)
	if _, err := f.vault.Rotate(t.Context(), f.a, o.ID); !errors.Is(err, fault.Forbidden) {
		t.Error(err)
	}
	if _, err := f.vault.Replace(t.Context(), f.a, o.ID, ReplaceRequest{Values: secrets(login)}); !errors.Is(err, fault.Forbidden) {
		t.Error(err)
	}
	if e := f.last(f.a); e.EventType != audit.CredentialRotated || e.Outcome != audit.Denied || e.Attributes[audit.AttributeReason] != reasonOwned {
		t.Errorf("%+v", e)
	}
	if err := f.vault.Delete(t.Context(), f.a, o.ID); !errors.Is(err, fault.Forbidden) {
		t.Error(err)
	}
	if e := f.last(f.a); e.Outcome != audit.Denied || e.Attributes[audit.AttributeReason] != reasonOwned {
		t.Errorf("%+v", e)
	}
	if got, err := f.vault.Read(t.Context(), f.a, ByID(o.ID)); err != nil || !got.Owned {
		t.Error(err)
	}
}

func TestAStaleExpectationChangesNothing(t *testing.T) {
	f := newFixture(t, time.Minute)
	op := f.operator()
	var won atomic.Int64
	var wg sync.WaitGroup
	for range 5 { // like five replicas that all believe that they lead
		wg.Go(func() {
			_, err := f.vault.Apply(t.Context(), op, uid, 0, f.desired(login, "a"))
			switch {
			case err == nil:
				won.Add(1)
			case !errors.Is(err, fault.Conflict):
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if keys, _ := f.rows("credential/"); won.Load() != 1 || len(keys) != 1 {
		t.Fatal(won.Load(), len(keys))
	}
	for range 5 {
		wg.Go(func() {
			if _, err := f.vault.Reencrypt(t.Context(), op, uid, 1, "x"); err == nil {
				won.Add(1)
			} else if !errors.Is(err, fault.Conflict) {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if o, err := f.vault.Owned(t.Context(), op, uid); err != nil || o.Version != 2 || won.Load() != 2 {
		t.Fatal(o, err, won.Load())
	}
	f.verify()
}

func TestALostCredentialIsMadeAgainUnderItsID(t *testing.T) {
	losses := map[string]func(f *fixture, o *Owned){
		"deleted": func(f *fixture, o *Owned) {
			system := f.a
			system.Kind = authz.System
			must(t, f.vault.Delete(t.Context(), system, o.ID))
		},
		"damaged": func(f *fixture, o *Owned) {
			f.tamper(func(tx store.Tx) error { return tx.Put(record.Key(f.a.Tenant, o.ID, o.Version), []byte("junk")) })
		},
		"an old row": func(f *fixture, o *Owned) {
			_, values := f.rows("credential/")
			f.tamper(func(tx store.Tx) error {
				r, err := record.Decode(values[0])
				if err != nil {
					return err
				}
				r.Version += 7
				return errors.Join(tx.Delete(record.Key(f.a.Tenant, o.ID, o.Version)), tx.Put(record.Key(r.Tenant, r.ID, r.Version), r.Encode()))
			})
		},
	}
	for name, lose := range losses {
		f := newUnboundFixture(t, time.Minute)
		op := f.operator()
		o, err := f.vault.Apply(t.Context(), op, uid, 0, f.desired(login, "a"))
		must(t, err)
		lose(f, o)
		seen, err := f.vault.Owned(t.Context(), op, uid)
		must(t, err)
		if !seen.Missing || seen.ID != o.ID || seen.Version != 1 {
			t.Fatalf("%s: %+v", name, seen)
		}
		if _, err := f.vault.Reencrypt(t.Context(), op, uid, 1, ""); !errors.Is(err, fault.NotFound) {
			t.Errorf("%s: %v", name, err)
		}
		again, err := f.vault.Apply(t.Context(), op, uid, 1, f.desired(login, "a"))
		must(t, err)
		if again.ID != o.ID || again.Version != 2 {
			t.Fatalf("%s: %+v", name, again)
		}
		got, err := f.vault.Read(t.Context(), f.a, ByID(o.ID))
		must(t, err)
		if !maps.Equal(plain(got.Values), login) {
			t.Errorf("%s: other values", name)
		}
		f.verify()
	}
}

func TestReleaseDeletesOrLetsGo(t *testing.T) {
	for _, deleteEntry := range []bool{true, false} {
		f := newFixture(t, time.Minute)
		op := f.operator()
		o, err := f.vault.Apply(t.Context(), op, uid, 0, f.desired(login, "a"))
		must(t, err)
		for i := range 2 { // a second release is not an error
			released, err := f.vault.Release(t.Context(), op, uid, [32]byte{}, deleteEntry)
			if must(t, err); released != (i == 0) {
				t.Errorf("release %d says %v", i, released)
			}
		}
		_, err = f.vault.Rotate(t.Context(), f.a, o.ID)
		if deleteEntry != errors.Is(err, fault.Forbidden) || (!deleteEntry && err != nil) {
			t.Errorf("delete %v: %v", deleteEntry, err)
		}
		if keys, _ := f.rows("own"); len(keys) != 0 {
			t.Errorf("rows left: %q", keys)
		}
		f.verify()
	}
}

func TestOwnersAreThoseOfOneCluster(t *testing.T) {
	f := newFixture(t, time.Minute)
	here := Object{Cluster: "c1", Namespace: "ns", Name: "db"}
	apply := func(tenant authz.TenantID, id string, o Object) *Owned {
		t.Helper()
		op, d := f.operator(), f.desired(login, "a")
		op.Tenant, op.ID, d.Object = tenant, id, o
		owned, err := f.vault.Apply(t.Context(), op, id, 0, d)
		must(t, err)
		return owned
	}
	first := apply(f.a.Tenant, uid, here)
	apply(f.b.Tenant, "other-tenant", Object{Cluster: "c1", Namespace: "ns2", Name: "db2"})
	apply(f.a.Tenant, "other-cluster", Object{Cluster: "c2", Namespace: "ns", Name: "db"})
	apply(f.a.Tenant, "damaged", here)
	f.commit(func(tx store.Tx) error { return tx.Put(ownedKey(f.a.Tenant, "damaged"), []byte("junk")) })

	_, err := f.vault.Reencrypt(t.Context(), f.operator(), uid, 1, "now")
	must(t, err)
	owners, _, err := f.vault.Objects(t.Context(), "c1")
	must(t, err)
	got := make(map[Owner]bool)
	for _, o := range owners {
		got[o] = true
	}
	if want := (map[Owner]bool{
		{here, uid, f.a.Tenant}: true, {Object{Cluster: "c1", Namespace: "ns2", Name: "db2"}, "other-tenant", f.b.Tenant}: true,
	}); !maps.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	must(t, f.end(f.operator(), uid, false))
	owners, left, err := f.vault.Objects(t.Context(), "c1")
	if err != nil || len(owners) != 1 {
		t.Error("a released object still owns:", owners, err)
	}
	if len(left) != 2 || !slices.ContainsFunc(left, func(o PreviousObject) bool { return o.Object == here && o.Credential == first.ID }) {
		t.Errorf("one object was released and one is in another cluster, but these are left: %+v", left)
	}
	f.commit(func(tx store.Tx) error { return tx.Put(releasedKey(f.a.Tenant, first.ID), []byte("junk")) })
	_, left, err = f.vault.Objects(t.Context(), "c1")
	damaged := func(o PreviousObject) bool {
		return o.Owner == Owner{Tenant: f.a.Tenant} && o.Credential == first.ID && o.Form == nil
	}
	if err != nil || len(left) != 2 || !slices.ContainsFunc(left, damaged) {
		t.Errorf("a damaged row does not show: %+v, %v", left, err)
	}
}

func TestAnObjectReachesOnlyItsTenant(t *testing.T) {
	f := newFixture(t, time.Minute)
	_, err := f.vault.Apply(t.Context(), f.operator(), uid, 0, f.desired(login, "a"))
	must(t, err)
	foreign := f.operator()
	foreign.Tenant = f.b.Tenant
	if o, err := f.vault.Owned(t.Context(), foreign, uid); err != nil || o != nil {
		t.Fatal(o, err)
	}
	must(t, f.end(foreign, uid, true))
	if keys, _ := f.rows("credential/"); len(keys) != 1 {
		t.Fatal("released by another tenant")
	}
}

// An operator retries an object whose rows somebody has changed, until they are mended. Each of its
// operations says so in the log, once an hour.
func TestChangedRowsOfAnObjectAreRecordedOnceAnHour(t *testing.T) {
	both, all := "owned/ credential/", "owned/ credential/ credential-version/ key/"
	for name, op := range map[string]struct {
		event audit.EventType
		reads string // families whose rows it needs
		do    func(f *fixture) error
	}{
		"Owned": {audit.CredentialListed, both, func(f *fixture) error {
			o, err := f.vault.Owned(f.t.Context(), f.operator(), uid)
			if o != nil && err != nil {
				f.t.Error("a state beside an error")
			}
			return err
		}},
		"Apply": {audit.CredentialSealed, all + " former/", func(f *fixture) error {
			_, err := f.vault.Apply(f.t.Context(), f.operator(), uid, 2, f.desired(map[string]string{"p": "3"}, "b"))
			return err
		}},
		"Generate": {audit.CredentialSealed, all + " former/", func(f *fixture) error {
			_, err := f.vault.Generate(f.t.Context(), f.operator(), uid, 2, f.desired(nil, "b"), f.makes(map[string]string{"p": "3"}))
			return err
		}},
		"Reencrypt": {audit.CredentialReencrypted, all, func(f *fixture) error {
			_, err := f.vault.Reencrypt(f.t.Context(), f.operator(), uid, 2, "now")
			return err
		}},
		"UnsealOwned": {audit.CredentialUnsealed, both + " key/", func(f *fixture) error {
			values, err := f.vault.UnsealOwned(f.t.Context(), f.operator(), uid, 2)
			if values != nil && err != nil {
				f.t.Error("values beside an error")
			}
			return err
		}},
		"Release": {audit.CredentialDeleted, "owned/ credential/ credential-version/ former/", func(f *fixture) error {
			return f.end(f.operator(), uid, true)
		}},
	} {
		for _, family := range strings.Fields(op.reads) {
			t.Run(name+" "+family, func(t *testing.T) {
				f := newFixture(t, 0)
				f.rotated()
				keys, values := f.rows(family + string(f.a.Tenant) + "/")
				f.tamper(func(tx store.Tx) error {
					return tx.Put(keys[0], append(values[0], 0))
				})
				integrity := func() (n int) {
					for _, e := range f.history(f.a) {
						if e.Attributes[audit.AttributeReason] == reasonIntegrity {
							n++
							if e.EventType != op.event || e.Outcome != audit.Failure || e.Actor.ID != uid {
								t.Errorf("%+v", e)
							}
						}
					}
					return n
				}
				for hour := range 2 {
					for range 3 {
						if err := op.do(f); !state.IsRefused(err) {
							t.Fatal(err)
						}
						if n := integrity(); n != hour+1 {
							t.Fatalf("%d entries in hour %d", n, hour+1)
						}
						f.advance(time.Minute)
					}
					f.advance(time.Hour)
				}
			})
		}
	}
}

func TestAnInvalidSpecIsRefused(t *testing.T) {
	f := newFixture(t, time.Minute)
	d := f.desired(map[string]string{"k": strings.Repeat("x", bounds.MaxValuesBytes)}, "a")
	if _, err := f.vault.Apply(t.Context(), f.operator(), uid, 0, d); !errors.Is(err, fault.Invalid) {
		t.Fatal(err)
	}
}

func TestDecodeRecordRefusesEverythingButItsOwn(t *testing.T) {
	f := newFixture(t, time.Minute)
	f.seal(f.a, login)
	_, values := f.rows("credential/")
	row := values[0]
	if r, err := record.Decode(row); err != nil || string(r.Encode()) != string(row) {
		t.Fatal("not its own", err)
	}
	for n := range row {
		if _, err := record.Decode(row[:n]); err == nil {
			t.Fatalf("%d bytes of %d accepted", n, len(row))
		}
	}
	if _, err := record.Decode(append(row, 0)); err == nil {
		t.Fatal("a byte too many accepted")
	}
}
