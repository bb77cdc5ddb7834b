package vault

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/vault/compare"
	"github.com/latticekeep/latticekeep/internal/vault/history"
	"github.com/latticekeep/latticekeep/internal/vault/record"
)

// An attacker who can write the database can move rows. The vault still reads no previous version
// except the one that the object's row names, and the attacker cannot write that row.
func TestNoPreviousVersionIsReadFromRowsThatWereMoved(t *testing.T) {
	for name, c := range map[string]struct {
		change func(f *fixture, o *Owned) error
		reason string // where the rows are not held against the state: there every refusal is for integrity
		hides  bool   // the changed row also decides about the current version
		known  bool   // the verification, which has no secret key, finds nothing wrong
	}{
		"an ended one put back": {reason: reasonMissing, change: func(f *fixture, _ *Owned) error {
			keys, records := f.rows("former/")
			f.advance(time.Hour)
			if _, err := f.vault.Sweep(t.Context()); err != nil {
				return err
			}
			f.advance(-time.Hour)
			f.tamper(func(tx store.Tx) error { return tx.Put(keys[0], records[0]) })
			return nil
		}},
		"one of before put back with the object's row": {reason: reasonMissing, change: func(f *fixture, _ *Owned) error {
			keys, records := f.rows("former/")
			owned, rows := f.rows("owned/")
			f.generate(f.operator(), 2, 0, map[string]string{"p": "newer"})
			f.tamper(func(tx store.Tx) error { return errors.Join(tx.Put(keys[0], records[0]), tx.Put(owned[0], rows[0])) })
			return nil
		}},
		"the current record in its place": {reason: reasonIntegrity, change: func(f *fixture, o *Owned) error {
			_, records := f.rows("credential/")
			f.tamper(func(tx store.Tx) error { return tx.Put(history.PreviousKey(f.a.Tenant, o.ID, 1), records[0]) })
			return nil
		}},
		"the current record under its number": {reason: reasonIntegrity, change: func(f *fixture, o *Owned) error {
			_, records := f.rows("credential/")
			r, err := record.Decode(records[0])
			r.Version = 1
			f.tamper(func(tx store.Tx) error { return tx.Put(history.PreviousKey(f.a.Tenant, o.ID, 1), r.Encode()) })
			return err
		}},
		"that of another credential": {reason: reasonIntegrity, change: func(f *fixture, o *Owned) error {
			other := f.operator()
			other.ID = "other"
			f.generate(other, 0, 0, map[string]string{"p": "x"})
			id := f.generate(other, 1, time.Hour, map[string]string{"p": "y"}).ID
			_, records := f.rows(string(history.PreviousPrefix(f.a.Tenant, id)))
			f.tamper(func(tx store.Tx) error { return tx.Put(history.PreviousKey(f.a.Tenant, o.ID, 1), records[0]) })
			return nil
		}},
		"a first version of another time": {reason: reasonIntegrity, change: func(f *fixture, o *Owned) error {
			_, records := f.rows("former/")
			r, err := record.Decode(records[0])
			if err != nil {
				return err
			}
			keys, err := currentKeys(t.Context(), f.keys, f.a.Tenant)
			if err != nil {
				return err
			}
			err = r.Seal(keys, secrets(map[string]string{"p": "forged"})) // well-formed and signed
			f.tamper(func(tx store.Tx) error { return tx.Put(history.PreviousKey(f.a.Tenant, o.ID, 1), r.Encode()) })
			return err
		}},
		"a flipped byte": {reason: reasonIntegrity, change: func(f *fixture, _ *Owned) error {
			keys, records := f.rows("former/")
			records[0][len(records[0])/3] ^= 1
			f.tamper(func(tx store.Tx) error { return tx.Put(keys[0], records[0]) })
			return nil
		}},
		"a flipped byte of its wrap": {reason: reasonIntegrity, known: true, change: func(f *fixture, _ *Owned) error {
			keys, records := f.rows("former/")
			records[0][len(records[0])-1] ^= 1
			f.tamper(func(tx store.Tx) error { return tx.Put(keys[0], records[0]) })
			return nil
		}},
		"junk": {reason: reasonIntegrity, change: func(f *fixture, o *Owned) error {
			f.tamper(func(tx store.Tx) error { return tx.Put(history.PreviousKey(f.a.Tenant, o.ID, 1), []byte("junk")) })
			return nil
		}},
		"dropped": {reason: reasonMissing, known: true, change: func(f *fixture, o *Owned) error {
			f.tamper(func(tx store.Tx) error { return tx.Delete(history.PreviousKey(f.a.Tenant, o.ID, 1)) })
			return nil
		}},
		"a later end": {reason: reasonIntegrity, known: true, change: func(f *fixture, _ *Owned) error {
			f.tamper(func(tx store.Tx) error {
				key := ownedKey(f.a.Tenant, uid)
				row, err := tx.Get(key)
				if err != nil {
					return err
				}
				later := bytes.Replace(row, []byte("2026-11-21T13:00:00Z"), []byte("2027-11-21T13:00:00Z"), 1)
				if bytes.Equal(row, later) {
					t.Error("nothing changed")
				}
				return tx.Put(key, later)
			})
			return nil
		}},
		"the row of another object": {reason: reasonMissing, hides: true, known: true, change: func(f *fixture, o *Owned) error {
			other := f.operator()
			other.ID = "other"
			f.generate(other, 0, 0, map[string]string{"p": "x"})
			f.generate(other, 1, time.Hour, map[string]string{"p": "y"})
			f.tamper(func(tx store.Tx) error { return tx.Put(ownerKey(f.a.Tenant, o.ID), []byte("other")) })
			return nil
		}},
		"an owner that is too long": {reason: reasonMissing, hides: true, known: true, change: func(f *fixture, o *Owned) error {
			f.tamper(func(tx store.Tx) error { return tx.Put(ownerKey(f.a.Tenant, o.ID), bytes.Repeat([]byte("x"), 2000)) })
			return nil
		}},
	} {
		t.Run(name, func(t *testing.T) {
			inBothStores(t, func(t *testing.T, f *fixture) {
				o := f.rotated()
				must(t, c.change(f, o))
				reason := reasonIntegrity
				if f.unbound {
					reason = c.reason
				}
				if got := f.reads(o.ID, 1); got != "" {
					t.Errorf("read %q", got)
				}
				if e := f.last(f.a); e.Outcome == audit.Success || e.Resource.ID != o.ID || e.Attributes[audit.AttributeReason] != reason {
					t.Errorf("recorded as %+v", e)
				}
				_, err := compare.Store(t.Context(), f.store.Store, verify.Options{})
				if broken, ok := audit.IsBroken(err); ok == c.known || ok && !strings.Contains(broken.Reason, o.ID) && !strings.Contains(broken.Reason, "previous version") {
					t.Errorf("reported as %v", err)
				}
				if name != "a later end" && !strings.HasPrefix(name, "one of before") && (f.unbound || !c.hides) {
					if got := f.reads(o.ID, 2); got != "new" {
						t.Errorf("the current version suffers: %q", got)
					}
				}
			})
		})
	}
}

// Only the record that the object's row names is shown as the previous version, however well signed
// another one is.
func TestAnotherRecordIsNotShownAsThePreviousVersion(t *testing.T) {
	inBothStores(t, func(t *testing.T, f *fixture) {
		o := f.rotated()
		keys, records := f.rows("former/")
		r, err := record.Decode(records[0])
		must(t, err)
		current, err := currentKeys(t.Context(), f.keys, f.a.Tenant)
		must(t, err)
		must(t, r.Seal(current, secrets(map[string]string{"p": "forged"})))
		if o, err := f.vault.Owned(t.Context(), f.operator(), uid); err != nil || o.Previous == nil {
			t.Fatal(o, err)
		}
		f.tamper(func(tx store.Tx) error { return tx.Put(keys[0], r.Encode()) })
		if got, err := f.vault.Owned(t.Context(), f.operator(), uid); err == nil && (got.ID != o.ID || got.Previous != nil) {
			t.Fatalf("%+v", got.Previous)
		}
	})
}

// Only the version that the object's row names is read.
func TestNoOtherVersionIsReadBesideThePreviousOne(t *testing.T) {
	inBothStores(t, func(t *testing.T, f *fixture) {
		o := f.rotated()
		_, records := f.rows("former/")
		r, err := record.Decode(records[0])
		must(t, err)
		r.Version = 7
		f.tamper(func(tx store.Tx) error { return tx.Put(history.PreviousKey(f.a.Tenant, o.ID, 7), r.Encode()) })
		if f.reads(o.ID, 7) != "" || f.reads(o.ID, 1) != "old" {
			t.Fatal("another version is readable")
		}
		f.reads(o.ID, 7)
		outcome, reason := audit.Failure, reasonIntegrity
		if f.unbound {
			outcome, reason = audit.Denied, reasonMissing
		}
		if e := f.last(f.a); e.Outcome != outcome || e.Attributes[audit.AttributeReason] != reason {
			t.Errorf("%+v", e)
		}
	})
}

// A previous version that has ended must not come back. The verification reports it.
func TestAPreviousVersionThatTheLogEndedIsReported(t *testing.T) {
	for name, end := range map[string]func(f *fixture, o *Owned) error{
		"released": func(f *fixture, _ *Owned) error {
			return f.end(f.operator(), uid, false)
		},
		"deleted": func(f *fixture, _ *Owned) error {
			return f.end(f.operator(), uid, true)
		},
		"replaced": func(f *fixture, _ *Owned) error {
			_, err := f.vault.Apply(t.Context(), f.operator(), uid, 2, f.desired(login, "b"))
			return err
		},
		"over": func(f *fixture, _ *Owned) error {
			f.advance(time.Hour)
			_, err := f.vault.Sweep(t.Context())
			return err
		},
	} {
		f := newFixture(t, time.Minute)
		o := f.rotated()
		keys, records := f.rows("former/")
		must(t, end(f, o))
		f.verify()
		f.tamper(func(tx store.Tx) error { return tx.Put(keys[0], records[0]) })
		_, err := compare.Store(t.Context(), f.store.Store, verify.Options{})
		if broken, ok := audit.IsBroken(err); !ok || !strings.Contains(broken.Reason, "previous version") || !strings.Contains(broken.Reason, o.ID) || broken.Sequence == 0 {
			t.Errorf("%s: %v", name, err)
		}
	}
}
