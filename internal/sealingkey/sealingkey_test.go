package sealingkey

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/store"
)

func TestEveryChangeOfASealingKeyIsRecorded(t *testing.T) {
	f := newFixture(t)
	first := f.current()
	var second Key
	_, next := f.entries(1)
	second, err := f.service.Rotate(t.Context(), admin)
	if err != nil || second.State != keyring.SealingKeyCurrent || second.ID == first || second.ID != f.current() || second.Objects != 0 {
		t.Fatalf("rotated: %+v %v", second, err)
	}
	if all, _ := f.entries(next); len(all) != 1 || all[0].EventType != audit.SealingKeyCreated || all[0].Resource.ID != second.ID || all[0].Actor.ID != "admin" {
		t.Fatalf("entries %+v", all)
	}
	f.needs(second.ID, 3)
	f.leaves(audit.SealingKeyListed, audit.Success, "", "", func() {
		keys, err := f.service.List(t.Context(), admin)
		if err != nil || len(keys) != 2 || keys[0].ID != second.ID || keys[0].Objects != 3 || keys[1].ID != first || keys[1].State != keyring.SealingKeyEarlier {
			t.Errorf("listed %+v %v", keys, err)
		}
	})
	for range 2 { // a second time, when it is already retired
		f.leaves(audit.SealingKeyRetired, audit.Success, first, "", func() {
			k, err := f.service.Retire(t.Context(), admin, first)
			if err != nil || k.State != keyring.SealingKeyRetired || !k.RetiredAt.Equal(begin) {
				t.Errorf("retired %+v %v", k, err)
			}
		})
	}
	for range 2 {
		f.leaves(audit.SealingKeyRestored, audit.Success, first, "", func() {
			k, err := f.service.Restore(t.Context(), admin, first)
			if err != nil || k.State != keyring.SealingKeyEarlier || !k.RetiredAt.IsZero() {
				t.Errorf("restored %+v %v", k, err)
			}
		})
	}
}

func TestAKeyIsRetiredOnlyWhenNoObjectIsKnownToNeedIt(t *testing.T) {
	f := newFixture(t)
	first := f.current()
	second, err := f.service.Rotate(t.Context(), admin)
	must(t, err)
	retire := func(id string, kind fault.Kind, says string) func() {
		return func() {
			t.Helper()
			if _, err := f.service.Retire(t.Context(), admin, id); fault.Of(err) != kind || err == nil || !strings.Contains(fault.Message(err), says) {
				t.Errorf("retiring: %v, want %q", err, says)
			}
		}
	}
	f.leaves(audit.SealingKeyRetired, audit.Denied, second.ID, "current_key", retire(second.ID, fault.Conflict, "current"))
	f.leaves(audit.SealingKeyRetired, audit.Denied, strings.Repeat("0", 64), "no_such_sealing_key", retire(strings.Repeat("0", 64), fault.NotFound, "list"))
	f.leaves(audit.SealingKeyRetired, audit.Denied, "", "no_such_sealing_key", retire("../../current", fault.NotFound, "list"))
	f.needs(first, 7)
	f.leaves(audit.SealingKeyRetired, audit.Denied, first, "key_needed", retire(first, fault.Conflict, ": 7"))
	f.leaves(audit.SealingKeyRetired, audit.Denied, first, "key_needed", retire(first, fault.Conflict, "KEY:.spec.sealed.keyID | grep "+first))
	f.needs(first, 0)
	f.loses(errors.New("the cluster does not answer"))
	f.leaves(audit.SealingKeyRetired, audit.Failure, first, "use_unknown", retire(first, fault.Unavailable, ""))
	if _, err := f.service.List(t.Context(), admin); fault.Of(err) != fault.Unavailable {
		t.Errorf("a list without the numbers: %v", err)
	}
	f.loses(nil)
	if got := f.states(); got != "current earlier" {
		t.Fatal(got)
	}
	_, err = f.service.Retire(t.Context(), admin, first)
	must(t, err)

	// An urgent restore does not wait for the cluster.
	f.loses(errors.New("the cluster does not answer"))
	f.leaves(audit.SealingKeyRestored, audit.Success, first, "", func() {
		if _, err := f.service.Restore(t.Context(), admin, first); fault.Of(err) != fault.Unavailable {
			t.Errorf("restored: %v", err)
		}
	})
	f.loses(nil)
	if got := f.states(); got != "current earlier" {
		t.Fatal(got)
	}
}

func TestWhoMayNotLearnsNothingAndIsRecorded(t *testing.T) {
	f := newFixture(t)
	first := f.current()
	_, err := f.service.Rotate(t.Context(), admin)
	must(t, err)
	for what, call := range map[audit.EventType]func(authz.Principal) error{
		audit.SealingKeyListed:   func(p authz.Principal) error { _, err := f.service.List(t.Context(), p); return err },
		audit.SealingKeyCreated:  func(p authz.Principal) error { _, err := f.service.Rotate(t.Context(), p); return err },
		audit.SealingKeyRetired:  func(p authz.Principal) error { _, err := f.service.Retire(t.Context(), p, first); return err },
		audit.SealingKeyRestored: func(p authz.Principal) error { _, err := f.service.Restore(t.Context(), p, first); return err },
		audit.ManifestResealed: func(p authz.Principal) error {
			_, err := f.service.Reseal(t.Context(), p, f.manifest())
			return err
		},
		audit.ManifestChecked: func(p authz.Principal) error { _, err := f.service.Check(t.Context(), p, f.manifest()); return err },
	} {
		f.leaves(what, audit.Denied, "", "missing_scope", func() {
			if err := call(readerKey); fault.Of(err) != fault.Forbidden || fault.Message(err) != "access denied" {
				t.Errorf("%s: %v", what, err)
			}
		})
		f.store.full.Store(true) // then nothing can be recorded
		if err := call(admin); fault.Of(err) != fault.Unavailable {
			t.Errorf("%s without a log: %v", what, err)
		}
		f.store.full.Store(false)
	}
	if got := f.states(); got != "current earlier" {
		t.Fatal(got)
	}
}

func TestOfRotationsAtTheSameTimeOneHappens(t *testing.T) {
	f := newFixture(t)
	f.advance(31 * 24 * time.Hour)
	var wg sync.WaitGroup
	var mu sync.Mutex
	rotated := 0
	for range 8 {
		wg.Go(func() {
			ok, err := f.service.RotateDue(t.Context(), 30*24*time.Hour)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				t.Error(err)
			}
			if ok {
				rotated++
			}
		})
	}
	wg.Wait()
	if got := f.states(); rotated != 1 || got != "current earlier" {
		t.Errorf("%d rotated: %s", rotated, got)
	}
}

func TestAKeyIsRotatedWhenItIsDue(t *testing.T) {
	f := newFixture(t)
	due := func(lifetime time.Duration) bool {
		t.Helper()
		rotated, err := f.service.RotateDue(t.Context(), lifetime)
		must(t, err)
		return rotated
	}
	const lifetime = 720 * time.Hour
	if due(lifetime) {
		t.Error("a new key is due")
	}
	f.advance(lifetime - time.Second)
	if due(lifetime) {
		t.Error("due a second early")
	}
	f.advance(time.Second)
	if due(0) {
		t.Error("due although keys never are")
	}
	_, next := f.entries(1)
	if !due(lifetime) || due(lifetime) {
		t.Error("it is not rotated once")
	}
	all, _ := f.entries(next)
	if len(all) != 1 || all[0].EventType != audit.SealingKeyCreated || all[0].Actor.Type != string(authz.System) || all[0].Resource.ID != f.current() {
		t.Errorf("entries %+v", all)
	}
	if got := f.states(); got != "current earlier" {
		t.Error(got)
	}
}

// A process that is killed during a rotation has rotated or has not. The next process finds out
// which, and no key is created twice.
func TestAKillDoublesNoKeyAndLosesNone(t *testing.T) {
	for _, when := range []string{"before the commit", "after the commit"} {
		t.Run(when, func(t *testing.T) {
			f := newFixture(t)
			first := f.current()
			f.advance(31 * 24 * time.Hour)
			want := "current"
			if when == "before the commit" {
				f.store.before.Store(1)
			} else {
				f.store.after.Store(1)
				want = "current earlier"
			}
			if _, err := f.service.RotateDue(t.Context(), 720*time.Hour); !errors.Is(err, errCrash) {
				t.Fatal(err)
			}
			must(t, f.store.Close())
			f.open()
			if got := f.states(); got != want {
				t.Fatalf("after the kill: %s", got)
			}
			_, err := f.service.RotateDue(t.Context(), 720*time.Hour)
			must(t, err)
			if got := f.states(); got != "current earlier" || f.current() == first {
				t.Fatalf("in the end: %s", got)
			}
			created := 0
			all, _ := f.entries(1)
			for _, e := range all {
				if e.EventType == audit.SealingKeyCreated {
					created++
				}
			}
			if created != 2 {
				t.Errorf("%d entries of new keys", created)
			}
		})
	}
}

func TestAChangeThatIsKilledIsWholeOrNotThere(t *testing.T) {
	for _, after := range []bool{false, true} {
		t.Run(fmt.Sprint("after the commit: ", after), func(t *testing.T) {
			f := newFixture(t)
			first := f.current()
			_, err := f.service.Rotate(t.Context(), admin)
			must(t, err)
			_, next := f.entries(1)
			want, left := "current earlier", 0
			if after {
				f.store.after.Store(1)
				want, left = "current retired", 1
			} else {
				f.store.before.Store(1)
			}
			if _, err := f.service.Retire(t.Context(), admin, first); !errors.Is(err, errCrash) {
				t.Fatal(err)
			}
			must(t, f.store.Close())
			f.open()
			all, _ := f.entries(next)
			if got := f.states(); got != want || len(all) != left {
				t.Errorf("%s with %d entries", got, len(all))
			}
		})
	}
}

// An attacker who can write the database can put back old rows. The log shows it.
func TestKeysThatAreNotAsTheLogSaysAreFound(t *testing.T) {
	current, prefix := []byte("sealing/current"), "sealing/key/"
	for name, tc := range map[string]struct {
		row    func(first string) []byte // row that is put back
		retire bool                      // retire the first key between the copy and putting it back
		says   string
		remedy func(f *fixture, first string) error
	}{
		"a retired key opens again": {func(id string) []byte { return []byte(prefix + id) }, true, "opens, and the audit log says that it is retired",
			func(f *fixture, first string) error {
				_, err := f.service.Retire(f.t.Context(), admin, first)
				return err
			}},
		"a restored key is retired again": {func(id string) []byte { return []byte(prefix + id) }, false, "is retired, and the audit log says that it is not",
			func(f *fixture, first string) error {
				_, err := f.service.Restore(f.t.Context(), admin, first)
				return err
			}},
		"an earlier key is published": {func(string) []byte { return current }, false, "is the one that is published",
			func(f *fixture, _ string) error {
				_, err := f.service.Rotate(f.t.Context(), admin)
				return err
			}},
		"a retired key is to be published": {func(string) []byte { return current }, true, "is the one that is published",
			func(f *fixture, _ string) error {
				_, err := f.service.Rotate(f.t.Context(), admin)
				return err
			}},
	} {
		putBack := func(t *testing.T, f *fixture) (first string) {
			first = f.current()
			if name == "a restored key is retired again" {
				_, err := f.service.Rotate(t.Context(), admin)
				must(t, err)
				_, err = f.service.Retire(t.Context(), admin, first)
				must(t, err)
			}
			key := tc.row(first)
			var row []byte
			must(t, f.store.View(t.Context(), func(r store.Reader) error {
				b, err := r.Get(key)
				row = bytes.Clone(b)
				return err
			}))
			if name == "a restored key is retired again" {
				_, err := f.service.Restore(t.Context(), admin, first)
				must(t, err)
			} else {
				_, err := f.service.Rotate(t.Context(), admin)
				must(t, err)
			}
			if tc.retire {
				_, err := f.service.Retire(t.Context(), admin, first)
				must(t, err)
			}
			must(t, f.service.Verify(t.Context()))
			f.tamper(func(tx store.Tx) error { return tx.Put(key, row) })
			return first
		}
		t.Run(name, func(t *testing.T) { // nobody can be served, neither now nor after a start
			f := newFixture(t)
			putBack(t, f)
			for _, when := range []string{"running", "started"} {
				var err error
				if when == "started" {
					must(t, f.store.Close())
					err = f.tryOpen() // it reads the key that is published
				}
				if err == nil {
					_, err1 := f.keys.SealingKeys(t.Context())
					_, err2 := f.keys.SealingDocument(t.Context())
					err = errors.Join(err1, err2)
				}
				if fault.Of(err) != fault.Unavailable {
					t.Errorf("%s: %v", when, err)
				}
				if err := f.log.Ready(t.Context()); fault.Of(err) != fault.Unavailable {
					t.Errorf("%s, the log: %v", when, err)
				}
				if refused := f.watch.Refused(); len(refused) == 0 || !strings.HasPrefix(refused[0].Family, "sealing/") {
					t.Errorf("%s: the state reports %v", when, refused)
				}
			}
		})
		t.Run(name+", without the state", func(t *testing.T) {
			f := makeFixture(t, true)
			first := putBack(t, f)
			must(t, f.store.Close())
			f.open() // the deployment still opens, whatever was put back
			err := f.service.Verify(t.Context())
			if fault.Of(err) != fault.Internal || !strings.Contains(fault.Message(err), first) || !strings.Contains(fault.Message(err), tc.says) {
				t.Errorf("found: %v", err)
			}
			must(t, tc.remedy(f, first))
			must(t, f.service.Verify(t.Context()))
			_, err = f.keys.SealingDocument(t.Context())
			must(t, err)
		})
	}
}

// Replicas that find the key due at the same time create one new key. The replicas that lose report
// no error.
func TestReplicasRotateADueKeyOnce(t *testing.T) {
	f := newFixture(t)
	f.advance(31 * 24 * time.Hour)
	_, next := f.entries(1)
	var made atomic.Int64
	var wg sync.WaitGroup
	for range 4 {
		replica := New(f.store, guard.New(f.log), reader.New(f.log, guard.New(f.log)), f.keys, Options{InUse: f.inUse, Now: f.now})
		wg.Go(func() {
			rotated, err := replica.RotateDue(t.Context(), 30*24*time.Hour)
			must(t, err)
			if rotated {
				made.Add(1)
			}
		})
	}
	wg.Wait()
	if all, _ := f.entries(next); made.Load() != 1 || len(all) != 1 || f.states() != "current earlier" {
		t.Errorf("%d keys, %d entries, %s", made.Load(), len(all), f.states())
	}
}
