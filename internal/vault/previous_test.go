package vault

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/vault/history"
	"github.com/latticekeep/latticekeep/internal/vault/record"
)

// makes returns a produce function for Generate that returns these values, whatever the current
// ones are.
func (f *fixture) makes(values map[string]string) func(map[string]secret.Bytes) (map[string]secret.Bytes, error) {
	return func(map[string]secret.Bytes) (map[string]secret.Bytes, error) { return secrets(values), nil }
}

func (f *fixture) generate(op authz.Principal, expect uint64, overlap time.Duration, values map[string]string) *Owned {
	f.t.Helper()
	d := f.desired(nil, "generated")
	d.Overlap = overlap
	o, err := f.vault.Generate(f.t.Context(), op, op.ID, expect, d, f.makes(values))
	must(f.t, err)
	return o
}

// rotated makes an object's credential with two readable versions: the first, with the value old,
// for an hour, and the current one, with the value new.
func (f *fixture) rotated() *Owned {
	f.t.Helper()
	f.generate(f.operator(), 0, 0, map[string]string{"p": "old"})
	return f.generate(f.operator(), 1, time.Hour, map[string]string{"p": "new"})
}

// reads unseals a version and returns its one value, or "" when the version does not exist.
func (f *fixture) reads(id string, version uint64) string {
	f.t.Helper()
	got, err := f.vault.Read(f.t.Context(), f.a, ByVersion(id, version))
	if errors.Is(err, fault.Forbidden) {
		if got.Values != nil {
			f.t.Fatal("values beside a refusal")
		}
		return ""
	}
	must(f.t, err)
	return string(got.Values["p"])
}

func TestAPreviousVersionIsReadableUntilItsEnd(t *testing.T) {
	f := newFixture(t, time.Minute)
	o := f.rotated()
	until := f.now().Add(time.Hour)
	if o.Previous == nil || *o.Previous != (PreviousVersion{Version: 1, Until: until}) {
		t.Fatalf("%+v", o.Previous)
	}
	if e := f.last(f.a); e.EventType != audit.CredentialRotated || e.Attributes[audit.AttributeOverlapUntil] != "2026-11-21T13:00:00Z" {
		t.Fatalf("%+v", e)
	}
	previous, err := f.vault.Read(t.Context(), f.a, ByVersion(o.ID, 1))
	must(t, err)
	if string(previous.Values["p"]) != "old" || previous.Version != 1 || !previous.ExpiresAt.Equal(until) || previous.Expired || !previous.Owned || previous.ID != o.ID {
		t.Fatalf("%+v", previous)
	}
	if e := f.last(f.a); e.EventType != audit.CredentialUnsealed || e.Outcome != audit.Success || e.Resource.ID != o.ID || e.Attributes[audit.AttributeVersion] != "1" {
		t.Fatalf("%+v", e)
	}
	current, err := f.vault.Read(t.Context(), f.a, ByVersion(o.ID, 2))
	must(t, err)
	if string(current.Values["p"]) != "new" || current.Credential != o.Credential {
		t.Fatalf("%+v", current)
	}
	if list, _, err := f.vault.List(t.Context(), f.a, ListQuery{}); err != nil || len(list) != 1 || list[0].Version != 2 {
		t.Fatal(list, err)
	}
	if got, err := f.vault.Read(t.Context(), f.a, ByID(o.ID)); err != nil || string(got.Values["p"]) != "new" {
		t.Fatal(err)
	}
	if got, err := f.named("db"); err != nil || string(got.Values["p"]) != "new" {
		t.Fatal(err)
	}
	f.verify()

	f.advance(time.Hour - time.Microsecond)
	if n, err := f.vault.Sweep(t.Context()); err != nil || n != 0 || f.reads(o.ID, 1) != "old" {
		t.Fatal("ended before its time", n, err)
	}
	f.advance(time.Microsecond)
	opener := f.vault.opener
	f.vault.opener = func(r *record.Record, wrapping, signing *keyring.Keys) (map[string]secret.Bytes, error) {
		if r.ID == o.ID {
			t.Error("opened after its end")
		}
		return opener(r, wrapping, signing)
	}
	if f.reads(o.ID, 1) != "" {
		t.Fatal("readable after its end")
	}
	f.vault.opener = opener
	if e := f.last(f.a); e.Outcome != audit.Denied || e.Attributes[audit.AttributeReason] != reasonExpired {
		t.Fatalf("%+v", e)
	}
	if seen, err := f.vault.Owned(t.Context(), f.operator(), uid); err != nil || seen.Previous != nil {
		t.Fatal(seen.Previous, err)
	}
	if n, err := f.vault.Sweep(t.Context()); err != nil || n != 1 {
		t.Fatal(n, err)
	}
	e := f.last(f.a)
	if e.EventType != audit.CredentialVersionEnded || e.Outcome != audit.Success || e.Resource.ID != o.ID ||
		e.Attributes[audit.AttributeVersion] != "1" || e.Actor.Type != string(authz.System) {
		t.Fatalf("%+v", e)
	}
	if keys, _ := f.rows("former"); len(keys) != 0 {
		t.Fatalf("left behind: %q", keys)
	}
	if n, err := f.vault.Sweep(t.Context()); err != nil || n != 0 || f.reads(o.ID, 1) != "" || f.reads(o.ID, 2) != "new" {
		t.Fatal(n, err)
	}
	f.verify()
}

func TestAPreviousVersionEndsNoLaterThanItWouldHave(t *testing.T) {
	f := newFixture(t, time.Minute)
	first := f.generate(f.operator(), 0, 0, map[string]string{"p": "old"})
	f.advance(29 * day)
	if o := f.generate(f.operator(), 1, 7*day, map[string]string{"p": "new"}); !o.Previous.Until.Equal(first.ExpiresAt) {
		t.Fatal(o.Previous)
	}
	f.advance(40 * day) // the second version has expired too
	if o := f.generate(f.operator(), 2, 7*day, map[string]string{"p": "newer"}); o.Previous != nil {
		t.Fatal("an expired version is readable again:", o.Previous)
	}
	if keys, _ := f.rows("former"); len(keys) != 0 {
		t.Fatalf("%q", keys)
	}
	f.verify()
}

func TestNewKeysLeaveAPreviousVersionAlone(t *testing.T) {
	f := newFixture(t, time.Minute)
	op, o := f.operator(), f.rotated()
	again, err := f.vault.Reencrypt(t.Context(), op, uid, 2, "now")
	must(t, err)
	longer := f.desired(nil, "longer")
	longer.TTLDays = 60
	same, err := f.vault.Generate(t.Context(), op, uid, 3, longer, func(previous map[string]secret.Bytes) (map[string]secret.Bytes, error) {
		return previous, nil
	})
	must(t, err)
	for _, o := range []*Owned{again, same} {
		if o.Previous == nil || *o.Previous != (PreviousVersion{Version: 1, Until: f.now().Add(time.Hour)}) {
			t.Fatalf("%+v", o.Previous)
		}
	}
	if e := f.last(f.a); e.EventType != audit.CredentialReencrypted || e.Attributes[audit.AttributeOverlapUntil] != "" {
		t.Fatalf("%+v", e)
	}
	for version, want := range map[uint64]string{1: "old", 2: "", 3: "", 4: "new"} {
		if got := f.reads(o.ID, version); got != want {
			t.Errorf("version %d: %q", version, got)
		}
	}
	f.verify()
	f.advance(time.Hour)
	if n, err := f.vault.Sweep(t.Context()); err != nil || n != 1 {
		t.Fatal(n, err)
	}
	f.verify()
}

func TestAPreviousVersionGoesWithWhatEndsIt(t *testing.T) {
	for name, c := range map[string]struct {
		end     func(f *fixture, o *Owned) error
		kept    int  // number of previous versions afterwards
		unbound bool // a row is missing, and the state would refuse that
	}{
		"a deletion": {end: func(f *fixture, o *Owned) error {
			system := f.a
			system.Kind = authz.System
			return f.vault.Delete(f.t.Context(), system, o.ID)
		}},
		"a release that deletes": {end: func(f *fixture, _ *Owned) error {
			return f.end(f.operator(), uid, true)
		}},
		"a release that keeps": {end: func(f *fixture, _ *Owned) error {
			return f.end(f.operator(), uid, false)
		}},
		"another previous version": {kept: 1, end: func(f *fixture, _ *Owned) error {
			f.generate(f.operator(), 2, 2*time.Hour, map[string]string{"p": "newer"})
			return nil
		}},
		"new values without an overlap": {end: func(f *fixture, _ *Owned) error {
			_, err := f.vault.Apply(f.t.Context(), f.operator(), uid, 2, f.desired(map[string]string{"p": "newer"}, "b"))
			return err
		}},
		"a credential that is made again": {unbound: true, end: func(f *fixture, o *Owned) error {
			f.tamper(func(tx store.Tx) error { return tx.Delete(record.Key(f.a.Tenant, o.ID, 2)) })
			f.generate(f.operator(), 2, time.Hour, map[string]string{"p": "new"})
			return nil
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // the scrubber takes some time
			open := newFixture
			if c.unbound {
				open = newUnboundFixture
			}
			f := open(t, time.Minute)
			o := f.rotated()
			keys, records := f.rows("former/")
			old, err := record.Decode(records[0])
			must(t, err)
			if f.reads(o.ID, 1) != "old" {
				t.Fatal("no previous version")
			}
			must(t, c.end(f, o))
			if f.reads(o.ID, 1) != "" {
				t.Error("it is still readable")
			}
			if left, _ := f.rows("former/"); len(left) != c.kept || c.kept > 0 && bytes.Equal(left[0], keys[0]) {
				t.Errorf("left behind: %q", left)
			}
			f.verify()
			must(t, f.store.Scrubbed(t.Context()))
			if files := f.files(); bytes.Contains(files, old.Body[:64]) || bytes.Contains(files, old.Wrap) {
				t.Error("its ciphertext is still in a file")
			}
			entries := f.verify().Entries
			f.advance(time.Hour) // a deleted version does not end a second time
			if _, err := f.vault.Sweep(t.Context()); err != nil || f.verify().Entries != entries {
				t.Errorf("the sweep recorded something (%v)", err)
			}
			if left, _ := f.rows("former-end/"); len(left) != c.kept {
				t.Errorf("left in the index: %q", left)
			}
		})
	}
}

func TestAnEndedPreviousVersionIsInNoFile(t *testing.T) {
	t.Parallel() // it mostly waits
	f := newFixture(t, time.Minute)
	f.rotated()
	_, records := f.rows("former/")
	old, err := record.Decode(records[0])
	must(t, err)
	if !bytes.Contains(f.files(), old.Body[:64]) {
		t.Fatal("this cannot fail")
	}
	f.advance(time.Hour)
	_, err = f.vault.Sweep(t.Context())
	must(t, err)
	must(t, f.store.Scrubbed(t.Context()))
	if files := f.files(); bytes.Contains(files, old.Body[:64]) || bytes.Contains(files, old.Wrap) {
		t.Fatal("its ciphertext is still in a file")
	}
}

func TestAPreviousVersionOutlivesARestart(t *testing.T) {
	f := newFixture(t, time.Minute)
	o := f.rotated()
	restart := func() {
		t.Helper()
		must(t, f.store.Close())
		f.open(time.Minute)
	}
	restart()
	if f.reads(o.ID, 1) != "old" || f.reads(o.ID, 2) != "new" {
		t.Fatal("not readable after a restart")
	}
	f.advance(time.Hour)
	restart() // it ended while no process ran
	if f.reads(o.ID, 1) != "" {
		t.Fatal("readable after its end")
	}
	if n, err := f.vault.Sweep(t.Context()); err != nil || n != 1 {
		t.Fatal(n, err)
	}
	f.verify()
}

func TestAClockThatIsSetBackBringsNothingBack(t *testing.T) {
	f := newFixture(t, time.Minute)
	o := f.rotated()
	f.advance(-day)
	if f.reads(o.ID, 1) != "old" {
		t.Fatal("not readable before its end")
	}
	f.advance(day + time.Hour)
	if n, err := f.vault.Sweep(t.Context()); err != nil || n != 1 {
		t.Fatal(n, err)
	}
	f.advance(-day)
	if f.reads(o.ID, 1) != "" {
		t.Fatal("readable once more")
	}
	if seen, err := f.vault.Owned(t.Context(), f.operator(), uid); err != nil || seen.Previous != nil {
		t.Fatal(seen.Previous, err)
	}
}

// Wherever a step is interrupted, either all of it is stored or nothing.
func TestKeepingAndEndingAreOneCommitEach(t *testing.T) {
	f := newFixture(t, time.Minute)
	f.sweep() // the first one writes when it was
	f.generate(f.operator(), 0, 0, map[string]string{"p": "old"})
	commits := func(do func()) int64 {
		before := f.store.updates.Load()
		do()
		return f.store.updates.Load() - before
	}
	if n := commits(func() { f.generate(f.operator(), 1, time.Hour, map[string]string{"p": "new"}) }); n != 1 {
		t.Errorf("a rotation is %d commits", n)
	}
	f.advance(time.Hour)
	sweep := func() {
		t.Helper()
		_, err := f.vault.Sweep(t.Context())
		must(t, err)
	}
	if n := commits(sweep); n != 1 {
		t.Errorf("the end is %d commits", n)
	}
	f.generate(f.operator(), 2, time.Hour, map[string]string{"p": "newer"})
	f.advance(time.Hour)
	f.store.full.Store(true)
	if _, err := f.vault.Sweep(t.Context()); !errors.Is(err, fault.Unavailable) {
		t.Fatal(err)
	}
	f.verify()
	f.store.full.Store(false)
	sweep()
	if e := f.last(f.a); e.EventType != audit.CredentialVersionEnded || e.Attributes[audit.AttributeVersion] != "2" {
		t.Fatalf("%+v", e)
	}
	f.verify()
}

func TestTheSweepEndsPreviousVersionsInBatches(t *testing.T) {
	f := newFixture(t, time.Minute)
	f.sweep() // the first one writes when it was
	for i := range endBatch + 2 {
		op := f.operator()
		op.ID = fmt.Sprint("object-", i)
		f.generate(op, 0, 0, map[string]string{"p": "old"})
		f.generate(op, 1, time.Hour, map[string]string{"p": "new"})
	}
	f.advance(time.Hour)
	before, entries := f.store.updates.Load(), f.verify().Entries
	if n, err := f.vault.Sweep(t.Context()); err != nil || n != endBatch+2 {
		t.Fatal(n, err)
	}
	if commits := f.store.updates.Load() - before; commits != 2 {
		t.Errorf("%d commits", commits)
	}
	if keys, _ := f.rows("former"); len(keys) != 0 || f.verify().Entries != entries+endBatch+2 {
		t.Errorf("left behind: %q", keys)
	}
}

// The index of ends decides nothing alone.
func TestTheIndexOfEndsIsOnlyAnIndex(t *testing.T) {
	f := newFixture(t, time.Minute)
	o := f.rotated()
	early := f.now().Add(-time.Hour)
	f.tamper(func(tx store.Tx) error {
		return errors.Join(
			tx.Put(history.EndKey(early, f.a.Tenant, uid), nil),
			tx.Put(history.EndKey(early, f.a.Tenant, "nobody"), nil),
			tx.Put(history.EndKey(early, "", ""), nil),
			tx.Put([]byte("former-end/\x00"), nil),
			tx.Put([]byte("former-end/"), nil),
		)
	})
	entries := f.verify().Entries
	if n, err := f.vault.Sweep(t.Context()); err != nil || n != 5 || f.verify().Entries != entries {
		t.Fatal(n, err)
	}
	if keys, _ := f.rows("former-end/"); len(keys) != 1 || f.reads(o.ID, 1) != "old" {
		t.Fatalf("%q", keys)
	}
}

func TestADamagedRowOfAnObjectDoesNotHoldUpTheSweep(t *testing.T) {
	f := newUnboundFixture(t, time.Minute)
	f.rotated()
	f.tamper(func(tx store.Tx) error { return tx.Put(ownedKey(f.a.Tenant, uid), []byte("junk")) })
	f.advance(time.Hour)
	if n, err := f.vault.Sweep(t.Context()); err != nil || n != 1 {
		t.Fatal(n, err)
	}
}

// A previous version whose rows somebody has changed ends as soon as they are mended, and holds up no
// other until then.
func TestAPreviousVersionWithChangedRowsEndsOnceTheyAreMended(t *testing.T) {
	owned := func(f *fixture, _ *Owned) []byte { return ownedKey(f.a.Tenant, uid) }
	previous := func(version uint64) func(*fixture, *Owned) []byte {
		return func(f *fixture, o *Owned) []byte { return history.PreviousKey(f.a.Tenant, o.ID, version) }
	}
	for name, c := range map[string]struct {
		key   func(f *fixture, o *Owned) []byte
		value []byte // nil: the row is removed
	}{
		"the object's row is changed": {owned, []byte("junk")},
		"the object's row is removed": {owned, nil},
		"its own row is changed":      {previous(1), []byte("junk")},
		"its own row is removed":      {previous(1), nil},
		"a row is added beside it":    {previous(7), []byte("junk")},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, time.Minute)
			key := c.key(f, f.rotated())
			other := f.operator()
			other.ID = "other"
			f.generate(other, 0, 0, map[string]string{"p": "old"})
			f.generate(other, 1, time.Hour, map[string]string{"p": "new"})
			put := func(value []byte) {
				f.tamper(func(tx store.Tx) error {
					if value == nil {
						return tx.Delete(key)
					}
					return tx.Put(key, value)
				})
			}
			_, values := f.rows(string(key))
			put(c.value)
			f.advance(time.Hour)
			for _, want := range []int{1, 0} {
				if n, err := f.vault.Sweep(t.Context()); err != nil || n != want {
					t.Fatal(n, err)
				}
			}
			if left, _ := f.rows("former-end/"); len(left) != 1 {
				t.Fatalf("left in the index: %q", left)
			}
			put(slices.Concat(values...))
			if n, err := f.vault.Sweep(t.Context()); err != nil || n != 1 {
				t.Fatal(n, err)
			}
			if e := f.last(f.a); e.EventType != audit.CredentialVersionEnded || e.Attributes[audit.AttributeVersion] != "1" {
				t.Errorf("%+v", e)
			}
			if left, _ := f.rows("former"); len(left) != 0 {
				t.Errorf("left behind: %q", left)
			}
			f.verify()
		})
	}
}

// Rows that an administrator accepted as they are end like others.
func TestAPreviousVersionWithAcceptedRowsEnds(t *testing.T) {
	f := newFixture(t, time.Minute)
	f.rotated()
	keys, _ := f.rows("former/")
	f.tamper(func(tx store.Tx) error { return tx.Put(keys[0], []byte("junk")) })
	f.advance(time.Hour)
	f.watch.Refused()
	if n, err := f.vault.Sweep(t.Context()); err != nil || n != 0 {
		t.Fatal(n, err)
	}
	seen := []state.Seen{{Key: keys[0], Digest: f.state.Digest(keys[0], []byte("junk"))}}
	must(t, f.state.Accept(t.Context(), f.store.Store, seen, func(tx store.Tx, _ string) error {
		_, err := f.log.Append(tx, audit.Event{
			Type: audit.StateRowsAccepted, Outcome: audit.Success, Principal: authz.SystemPrincipal(authz.SystemTenant),
			Resource: audit.Resource{Type: audit.ChainResource},
		})
		return err
	}))
	if n, err := f.vault.Sweep(t.Context()); err != nil || n != 1 {
		t.Fatal(n, err)
	}
	if left, _ := f.rows("former"); len(left) != 0 {
		t.Errorf("left behind: %q", left)
	}
}

// More changed rows than fit into a batch hold up no other.
func TestChangedRowsDoNotHoldUpTheSweep(t *testing.T) {
	f := newFixture(t, time.Minute)
	for i := range endBatch + 2 {
		op := f.operator()
		op.ID = fmt.Sprint("object-", i)
		f.generate(op, 0, 0, map[string]string{"p": "old"})
		f.generate(op, 1, time.Hour, map[string]string{"p": "new"})
	}
	owned, _ := f.rows("owned/") // in the order of the index, since all end at one time
	f.tamper(func(tx store.Tx) (err error) {
		for _, key := range owned[:endBatch+1] {
			err = errors.Join(err, tx.Put(key, []byte("junk")))
		}
		return err
	})
	f.advance(time.Hour)
	if n, err := f.vault.Sweep(t.Context()); err != nil || n != 1 {
		t.Fatal(n, err)
	}
	if left, _ := f.rows("former-end/"); len(left) != endBatch+1 {
		t.Errorf("%d are left in the index", len(left))
	}
}
