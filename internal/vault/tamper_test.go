package vault

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/vault/compare"
	"github.com/latticekeep/latticekeep/internal/vault/record"
)

// An attacker who can write the database can move rows. The vault unseals nothing from a row in a
// wrong place, records the attempt, and the verification names the credential.
func TestTamperingWithRowsIsReported(t *testing.T) {
	type rows struct{ a1, a2, b, old []byte } // two credentials of a, one of b, and a1 before its rotation
	cases := map[string]struct {
		change func(tx store.Tx, key func(p authz.Principal, id string, version uint64) []byte, ids [3]string, r rows) error
		says   string
		opens  bool // an old state in its own place is valid in itself: only the log and the state show it
	}{
		"swapped between credentials": {change: func(tx store.Tx, key func(authz.Principal, string, uint64) []byte, ids [3]string, r rows) error {
			return errors.Join(tx.Put(key(a, ids[0], 2), r.a2), tx.Put(key(a, ids[1], 1), r.a1))
		}, says: "damaged or under a wrong key"},
		"swapped between tenants": {change: func(tx store.Tx, key func(authz.Principal, string, uint64) []byte, ids [3]string, r rows) error {
			return errors.Join(tx.Delete(key(a, ids[0], 2)), tx.Put(key(a, ids[0], 1), r.b))
		}, says: "damaged or under a wrong key"},
		"another tenant's bytes under its own id": {change: func(tx store.Tx, key func(authz.Principal, string, uint64) []byte, ids [3]string, r rows) error {
			other, err := record.Decode(r.b)
			if err != nil {
				return err
			}
			mine, err := record.Decode(r.a1)
			if err != nil {
				return err
			}
			other.Tenant, other.ID, other.Version = mine.Tenant, mine.ID, mine.Version
			return tx.Put(key(a, ids[0], 2), other.Encode())
		}, says: "not the version that the log recorded"},
		"an old version under the newest number": {change: func(tx store.Tx, key func(authz.Principal, string, uint64) []byte, ids [3]string, r rows) error {
			old, err := record.Decode(r.old)
			if err != nil {
				return err
			}
			old.Version = 2
			return tx.Put(key(a, ids[0], 2), old.Encode())
		}, says: "not the version that the log recorded"},
		"an old row put back": {change: func(tx store.Tx, key func(authz.Principal, string, uint64) []byte, ids [3]string, r rows) error {
			return errors.Join(tx.Delete(key(a, ids[0], 2)), tx.Put(key(a, ids[0], 1), r.old))
		}, says: "not the version that the log recorded", opens: true},
		"a flipped byte": {change: func(tx store.Tx, key func(authz.Principal, string, uint64) []byte, ids [3]string, r rows) error {
			b := bytes.Clone(r.a1)
			b[len(b)/3] ^= 1
			return tx.Put(key(a, ids[0], 2), b)
		}, says: "not the version that the log recorded"},
		"cut short": {change: func(tx store.Tx, key func(authz.Principal, string, uint64) []byte, ids [3]string, r rows) error {
			return tx.Put(key(a, ids[0], 2), r.a1[:len(r.a1)-1])
		}, says: "damaged"},
		"dropped": {change: func(tx store.Tx, key func(authz.Principal, string, uint64) []byte, ids [3]string, _ rows) error {
			return tx.Delete(key(a, ids[0], 2))
		}, says: "has no row"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			inBothStores(t, func(t *testing.T, f *fixture) {
				ids := [3]string{f.seal(f.a, login).ID, f.seal(f.a, login).ID, f.seal(f.b, login).ID}
				row := func(p authz.Principal, id string) []byte {
					_, values := f.rows("credential/" + string(p.Tenant) + "/" + id)
					return values[0]
				}
				old := row(f.a, ids[0])
				_, err := f.vault.Rotate(t.Context(), f.a, ids[0])
				must(t, err)
				f.verify()
				r := rows{row(f.a, ids[0]), row(f.a, ids[1]), row(f.b, ids[2]), old}
				f.tamper(func(tx store.Tx) error {
					key := func(who authz.Principal, id string, version uint64) []byte {
						if who.ID == a.ID {
							return record.Key(f.a.Tenant, id, version)
						}
						return record.Key(f.b.Tenant, id, version)
					}
					return c.change(tx, key, ids, r)
				})
				_, err = compare.Store(t.Context(), f.store.Store, verify.Options{})
				broken, ok := audit.IsBroken(err)
				if !ok || !strings.Contains(broken.Reason, c.says) || broken.Sequence == 0 {
					t.Errorf("reported as %v, want %q", err, c.says)
				}
				got, err := f.vault.Read(t.Context(), f.a, ByID(ids[0]))
				if c.opens && f.unbound {
					must(t, err)
				} else if !errors.Is(err, fault.Forbidden) || got.Values != nil {
					t.Errorf("unsealed from it: %v", err)
				} else if e := f.last(f.a); e.Outcome == audit.Success || e.Resource.ID != ids[0] {
					t.Errorf("recorded as %+v", e)
				}
				if _, err := f.vault.Read(t.Context(), f.b, ByID(ids[2])); err != nil {
					t.Errorf("another tenant's credential suffers: %v", err)
				}
			})
		})
	}
}

// a stands for the fixture's first tenant in the table above.
var a = authz.Principal{ID: "a"}

func TestADeletedCredentialThatIsBackIsReported(t *testing.T) {
	f := newFixture(t, time.Minute)
	c := f.seal(f.a, login)
	keys, values := f.rows("credential/")
	must(t, f.vault.Delete(t.Context(), f.a, c.ID))
	f.tamper(func(tx store.Tx) error { return tx.Put(keys[0], values[0]) })
	_, err := compare.Store(t.Context(), f.store.Store, verify.Options{})
	if broken, ok := audit.IsBroken(err); !ok || !strings.Contains(broken.Reason, "recorded its deletion") {
		t.Fatal(err)
	}
}

func TestACredentialTheLogNeverSawIsReported(t *testing.T) {
	f := newFixture(t, time.Minute)
	f.seal(f.a, login)
	_, values := f.rows("credential/")
	r, err := record.Decode(values[0])
	must(t, err)
	r.ID = authz.NewID("cred")
	f.tamper(func(tx store.Tx) error { return tx.Put(record.Key(r.Tenant, r.ID, r.Version), r.Encode()) })
	_, err = compare.Store(t.Context(), f.store.Store, verify.Options{})
	if broken, ok := audit.IsBroken(err); !ok || !strings.Contains(broken.Reason, "never recorded") {
		t.Fatal(err)
	}
}

// The digest and the signature do not cover the wrap. Its own associated data binds it to its
// place.
func TestAWrapOfAnotherVersionOpensNothing(t *testing.T) {
	f := newFixture(t, time.Minute)
	c := f.seal(f.a, login)
	_, values := f.rows("credential/")
	old, err := record.Decode(values[0])
	must(t, err)
	_, err = f.vault.Rotate(t.Context(), f.a, c.ID)
	must(t, err)
	keys, values := f.rows("credential/")
	current, err := record.Decode(values[0])
	must(t, err)
	current.Wrap = old.Wrap
	f.tamper(func(tx store.Tx) error { return tx.Put(keys[0], current.Encode()) })
	if _, err := f.vault.Read(t.Context(), f.a, ByID(c.ID)); !errors.Is(err, fault.Forbidden) {
		t.Fatal(err)
	}
	if e := f.last(f.a); e.Outcome != audit.Failure || e.Attributes[audit.AttributeReason] != reasonIntegrity {
		t.Fatalf("%+v", e)
	}
}

func TestADamagedRecordIsListedAroundAndCanBeDeleted(t *testing.T) {
	f := newUnboundFixture(t, time.Minute)
	good, bad := f.seal(f.a, login).ID, f.seal(f.a, login).ID
	f.tamper(func(tx store.Tx) error { return tx.Put(record.Key(f.a.Tenant, bad, 1), []byte("junk")) })
	list, _, err := f.vault.List(t.Context(), f.a, ListQuery{})
	if err != nil || len(list) != 1 || list[0].ID != good {
		t.Fatal(list, err)
	}
	if e := f.last(f.a); e.Outcome != audit.Failure || e.Attributes["damaged"] != "1" {
		t.Fatalf("%+v", e)
	}
	must(t, f.vault.Delete(t.Context(), f.a, bad))
	f.verify()
}

// Neither of the rows that say who owns a credential can be removed without a trace in a list.
func TestACredentialWithoutItsOwnersRowsIsListedAround(t *testing.T) {
	for _, row := range []string{"owner/", "owned/"} {
		f := newFixture(t, time.Minute)
		whole := f.seal(f.a, login).ID
		f.object("shop", "database", 0, 0, 0)
		keys, _ := f.rows(row)
		f.tamper(func(tx store.Tx) error { return tx.Delete(keys[0]) })
		list, _, err := f.vault.List(t.Context(), f.a, ListQuery{})
		if err != nil || len(list) != 1 || list[0].ID != whole {
			t.Errorf("without the row %s: %v %v", row, list, err)
		}
		if e := f.last(f.a); e.Outcome != audit.Failure || e.Attributes["damaged"] != "1" {
			t.Errorf("without the row %s: %+v", row, e)
		}
	}
}

// The row of an object decides which credential its changes replace.
func TestWhatAnObjectOwnsCannotBeRewritten(t *testing.T) {
	inBothStores(t, func(t *testing.T, f *fixture) {
		victim := f.seal(f.a, map[string]string{"other": "value"})
		o, err := f.vault.Apply(t.Context(), f.operator(), uid, 0, f.desired(login, "a"))
		must(t, err)
		f.tamper(func(tx store.Tx) error {
			key := ownedKey(f.a.Tenant, uid)
			row, err := tx.Get(key)
			if err != nil {
				return err
			}
			return tx.Put(key, bytes.ReplaceAll(row, []byte(o.ID), []byte(victim.ID)))
		})
		if _, err := f.vault.Owned(t.Context(), f.operator(), uid); !isDamaged(err) {
			t.Error(err)
		}
		if _, err := f.vault.Apply(t.Context(), f.operator(), uid, 1, f.desired(login, "b")); !isDamaged(err) {
			t.Error(err)
		}
		if got, err := f.vault.Read(t.Context(), f.a, ByID(victim.ID)); err != nil || string(got.Values["other"]) != "value" {
			t.Error("another credential was replaced:", err)
		}
	})
}
