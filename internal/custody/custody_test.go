package custody

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/test/statetest"
	"github.com/latticekeep/latticekeep/test/storetest"
)

// fixture is the service on real parts: a database file, key files and a log. The deployment was
// made with the first key and moves to the second.
type fixture struct {
	t         *testing.T
	dir       string
	store     *switchedStore
	watch     *statetest.Watch
	log       *writer.Log
	keys      *keyring.Ring
	service   *Service
	old, new  *switchedKMS
	destroyed []string
	destroy   func(id string) (kms.Destruction, error)
}

// switchedStore is a database that can crash before or after the next commit.
type switchedStore struct {
	*state.Store
	before, after atomic.Bool
}

var errCrash = errors.New("killed")

func (s *switchedStore) Update(ctx context.Context, fn func(store.Tx) error) error {
	if s.before.Swap(false) {
		return errCrash
	}
	err := s.Store.Update(ctx, fn)
	if s.after.Swap(false) {
		return errCrash
	}
	return err
}

// switchedKMS is a key that can be down.
type switchedKMS struct {
	*kms.Key
	down  atomic.Bool
	after atomic.Int64 // calls until it goes down; 0: never
}

var errDown = fault.New(fault.Unavailable, "connection refused")

func (k *switchedKMS) answers() error {
	if k.after.Load() > 0 && k.after.Add(-1) == 0 {
		k.down.Store(true)
	}
	if k.down.Load() {
		return errDown
	}
	return nil
}

func (k *switchedKMS) Wrap(ctx context.Context, keyContext string, key []byte) ([]byte, error) {
	if err := k.answers(); err != nil {
		return nil, err
	}
	return k.Key.Wrap(ctx, keyContext, key)
}

func (k *switchedKMS) Unwrap(ctx context.Context, keyContext string, wrapped []byte) ([]byte, error) {
	if err := k.answers(); err != nil {
		return nil, err
	}
	return k.Key.Unwrap(ctx, keyContext, wrapped)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

var begin = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)

var (
	admin = authz.Principal{Tenant: authz.SystemTenant, Kind: authz.APIKey, ID: "admin", Scopes: []authz.Scope{authz.SystemAdmin}}
	owner = authz.Principal{Tenant: "ten_aaaaaaaaaaaaaaaaaaaaaaaaaa", Kind: authz.APIKey, ID: "owner", Scopes: authz.TenantScopes()}
)

const tenants = 20

func newFixture(t *testing.T) *fixture {
	t.Helper()
	f := &fixture{t: t, dir: t.TempDir(), watch: statetest.New(t)}
	f.old, f.new = f.key("old"), f.key("new")
	f.destroy = func(string) (kms.Destruction, error) { return kms.Destruction{Undo: "ask for it"}, nil }
	f.open(f.old)
	for i := range tenants {
		f.makeSet(f.keys, i)
	}
	must(t, f.store.Close())
	f.open(f.new, f.old)
	return f
}

func (f *fixture) key(name string) *switchedKMS {
	f.t.Helper()
	path := filepath.Join(f.dir, name+".key")
	must(f.t, kms.CreateLocal(path))
	k, err := kms.OpenLocal(path)
	must(f.t, err)
	return &switchedKMS{Key: k}
}

func tenantID(i int) authz.TenantID { return authz.TenantID(fmt.Sprintf("ten_%026d", i)) }

func (f *fixture) makeSet(r *keyring.Ring, i int) {
	f.t.Helper()
	set, err := r.NewSet(f.t.Context(), tenantID(i), 1)
	must(f.t, err)
	must(f.t, f.store.Update(f.t.Context(), func(tx store.Tx) error {
		_, err := f.log.Append(tx, audit.Event{
			Type: audit.TenantCreated, Outcome: audit.Success, Principal: authz.SystemPrincipal(authz.SystemTenant),
			Resource: audit.Resource{Type: audit.TenantResource, ID: string(tenantID(i))},
		})
		return errors.Join(set.Put(tx), err)
	}))
}

// open opens the deployment, also again after it was closed.
func (f *fixture) open(current keyring.KMS, former ...keyring.KMS) {
	f.t.Helper()
	now := func() time.Time { return begin }
	bound := f.watch.State()
	f.log = writer.New(now, bound)
	db, err := bolt.Open(filepath.Join(f.dir, "store.db"), bolt.Options{Hook: f.log.Commit})
	must(f.t, err)
	f.t.Cleanup(func() { _ = db.Close() })
	f.store = &switchedStore{Store: bound.Guard(storetest.Rehearsing(db))}
	_, f.keys, err = identity.Open(f.t.Context(), f.store, f.log, guard.New(f.log), current, keyring.Config{Previous: former, Now: now})
	must(f.t, err)
	f.service = New(f.store, guard.New(f.log), f.keys, Options{Now: now, Destroy: func(_ context.Context, id string) (kms.Destruction, error) {
		f.destroyed = append(f.destroyed, id)
		return f.destroy(id)
	}})
}

// failing unwraps the keys of every tenant and returns how many tenants' keys do not open.
func (f *fixture) failing() (n int) {
	f.t.Helper()
	for i := range tenants {
		if _, err := f.keys.Current(f.t.Context(), tenantID(i)); err != nil {
			n++
		}
	}
	return n
}

func (f *fixture) moveAll() (sets int) {
	f.t.Helper()
	for range 1000 {
		moved, err := f.service.Rewrap(f.t.Context(), admin, time.Time{})
		must(f.t, err)
		if sets += moved.Sets; moved.Remaining == 0 {
			return sets
		}
	}
	f.t.Fatal("it does not end")
	return 0
}

// entries returns the log's entries about KMS keys, oldest first.
func (f *fixture) entries() (all []string) {
	f.t.Helper()
	entries, _, err := reader.New(f.log, guard.New(f.log)).Query(f.t.Context(), authz.Principal{Tenant: authz.SystemTenant, Kind: authz.System, ID: "t", Scopes: []authz.Scope{authz.AuditRead}}, reader.Query{Limit: 100})
	must(f.t, err)
	for _, e := range entries {
		if strings.HasPrefix(string(e.EventType), "KMS_") {
			delete(e.Attributes, audit.AttributeState)
			all = append([]string{fmt.Sprint(e.EventType, " ", e.Outcome, " ", e.Resource.ID, " ", e.Attributes)}, all...)
		}
	}
	return all
}

func (f *fixture) rewrapped(sets int) string {
	return fmt.Sprint("KMS_REWRAPPED success ", f.new.ID(), " ", map[string]string{"from": f.old.ID(), "to": f.new.ID(), "sets": fmt.Sprint(sets)})
}

func TestEveryStepIsRecordedWithWhatItMoved(t *testing.T) {
	f := newFixture(t)
	found, err := f.service.List(t.Context(), admin)
	must(t, err)
	if len(found.Keys) != 2 || found.Keys[0].Sets != 0 || found.Keys[1].Sets != tenants+1 || found.Keys[1].ID != f.old.ID() {
		t.Fatalf("%+v", found)
	}
	moved, err := f.service.Rewrap(t.Context(), admin, time.Time{})
	must(t, err)
	if moved.Sets == 0 || moved.Sets+moved.Remaining != tenants+1 || moved.Keys[0].Sets != moved.Sets {
		t.Fatalf("%+v", moved)
	}
	if got := f.entries(); len(got) != 2 || got[0] != "KMS_KEY_LISTED success  map[count:2]" || got[1] != f.rewrapped(moved.Sets) {
		t.Error(strings.Join(got, "\n"))
	}
	if moved.Sets+f.moveAll() != tenants+1 {
		t.Error("not every set was moved once")
	}
	before := len(f.entries())
	moved, err = f.service.Rewrap(t.Context(), admin, time.Time{})
	must(t, err)
	got := f.entries()
	if moved.Sets != 0 || moved.Remaining != 0 || len(got) != before+1 ||
		got[before] != fmt.Sprint("KMS_REWRAPPED success ", f.new.ID(), " ", map[string]string{"to": f.new.ID(), "sets": "0"}) {
		t.Errorf("%+v\n%s", moved, strings.Join(got, "\n"))
	}
	if n := f.failing(); n != 0 {
		t.Errorf("%d tenants are locked out", n)
	}
	if _, err := f.service.Rewrap(t.Context(), admin, begin.Add(11*time.Minute)); !errors.Is(err, fault.Invalid) {
		t.Error("a time in the future:", err)
	}
	if moved, err = f.service.Rewrap(t.Context(), admin, begin.Add(time.Minute)); err != nil || moved.Sets == 0 || moved.Sets+moved.Remaining != tenants+1 {
		t.Errorf("anew: %+v, %v", moved, err)
	}
}

func TestAStepThatWasCutOffIsRepeated(t *testing.T) {
	f := newFixture(t)
	total := 0
	for _, when := range []*atomic.Bool{&f.store.before, &f.store.after} {
		when.Store(true)
		if _, err := f.service.Rewrap(t.Context(), admin, time.Time{}); !errors.Is(err, errCrash) {
			t.Fatal(err)
		}
		if n := f.failing(); n != 0 {
			t.Errorf("%d tenants are locked out", n)
		}
	}
	for _, e := range f.entries() { // the crash came after these commits
		var n int
		if _, err := fmt.Sscanf(e[strings.Index(e, "sets:"):], "sets:%d", &n); err != nil {
			t.Fatal(err)
		}
		total += n
	}
	must(t, f.store.Close())
	f.open(f.new, f.old)
	if n := f.failing(); n != 0 {
		t.Errorf("%d tenants are locked out after a restart", n)
	}
	if total += f.moveAll(); total != tenants+1 {
		t.Errorf("%d sets were moved", total)
	}
	must(t, f.store.Close())
	f.open(f.new)
	if n := f.failing(); n != 0 {
		t.Errorf("%d tenants are locked out without the former key", n)
	}
}

func TestAKMSThatGoesDownOnTheWayCostsNothing(t *testing.T) {
	for name, which := range map[string]func(*fixture) *switchedKMS{
		"the former": func(f *fixture) *switchedKMS { return f.old }, "the current": func(f *fixture) *switchedKMS { return f.new },
	} {
		f := newFixture(t)
		k := which(f)
		k.after.Store(7) // in the middle of a step
		var err error
		var moved Moved
		for err == nil {
			moved, err = f.service.Rewrap(t.Context(), admin, time.Time{})
			if err == nil && moved.Remaining == 0 {
				t.Fatal(name, "was never missed")
			}
		}
		if !errors.Is(err, fault.Unavailable) {
			t.Errorf("%s: %v", name, err)
		}
		k.down.Store(false)
		if n := f.failing(); n != 0 {
			t.Errorf("%s: %d tenants are locked out", name, n)
		}
		f.moveAll()
		f.old.down.Store(true)
		if n := f.failing(); n != 0 {
			t.Errorf("%s: %d tenants are locked out by the former key", name, n)
		}
	}
}

func TestNobodyIsLockedOutWhileTwoCallersMove(t *testing.T) {
	f := newFixture(t)
	total := 0
	var mu sync.Mutex
	var movers, users sync.WaitGroup
	moving, stop := context.WithCancel(t.Context())
	for range 3 {
		users.Go(func() {
			for i := 0; moving.Err() == nil; i++ {
				if _, err := f.keys.Current(t.Context(), tenantID(i%tenants)); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	for range 2 {
		movers.Go(func() {
			for {
				moved, err := f.service.Rewrap(t.Context(), admin, time.Time{})
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				total += moved.Sets
				mu.Unlock()
				if moved.Remaining == 0 {
					return
				}
			}
		})
	}
	movers.Wait()
	stop()
	users.Wait()
	if total != tenants+1 {
		t.Errorf("%d sets were moved", total)
	}
}

func TestAKeyIsDestroyedOnlyWhenNothingIsUnderIt(t *testing.T) {
	f := newFixture(t)
	destroy := func(p authz.Principal, id string) error {
		_, err := f.service.Destroy(t.Context(), p, id)
		return err
	}
	if err := destroy(admin, f.old.ID()); !errors.Is(err, fault.Conflict) {
		t.Error("while everything is under it:", err)
	}
	f.moveAll()
	if err := destroy(admin, f.new.ID()); !errors.Is(err, fault.Conflict) {
		t.Error("the current one:", err)
	}
	if err := destroy(admin, "local:other"); !errors.Is(err, fault.NotFound) {
		t.Error("an unknown one:", err)
	}
	if err := destroy(owner, f.old.ID()); !errors.Is(err, fault.Forbidden) {
		t.Error("by a tenant:", err)
	}
	if len(f.destroyed) != 0 {
		t.Fatalf("destroyed: %v", f.destroyed)
	}
	before := len(f.entries())
	f.destroy = func(string) (kms.Destruction, error) {
		if got := f.entries(); len(got) != before+1 || got[before] != "KMS_KEY_DESTROYED success "+f.old.ID()+" map[]" {
			t.Error("it is not recorded before it is asked for:", strings.Join(got, "\n"))
		}
		return kms.Destruction{}, fault.New(fault.Forbidden, "allow kms:ScheduleKeyDeletion")
	}
	if err := destroy(admin, f.old.ID()); !errors.Is(err, fault.Conflict) || !strings.Contains(fault.Message(err), "allow kms:ScheduleKeyDeletion") {
		t.Error("a KMS that refuses:", err)
	}
	f.destroy = func(string) (kms.Destruction, error) { return kms.Destruction{}, errDown }
	if err := destroy(admin, f.old.ID()); !errors.Is(err, fault.Unavailable) {
		t.Error("a KMS that is down:", err)
	}
	f.destroy = func(string) (kms.Destruction, error) { return kms.Destruction{When: begin, Undo: "ask"}, nil }
	if d, err := f.service.Destroy(t.Context(), admin, f.old.ID()); err != nil || d != (kms.Destruction{When: begin, Undo: "ask"}) {
		t.Error("again:", d, err)
	}
	if got := strings.Join(f.entries()[before:], "\n"); strings.Count(got, " success ") != 3 || strings.Count(got, " failure ") != 2 || strings.Count(got, "reason:not_destroyed") != 2 {
		t.Error(got)
	}
	got := strings.Join(f.entries()[:before], "\n")
	for _, reason := range []string{"key_needed", "current_key", "no_such_kms_key"} {
		if !strings.Contains(got, "denied") || !strings.Contains(got, "reason:"+reason) {
			t.Errorf("no entry of %s: %s", reason, got)
		}
	}
	if strings.Contains(got, "local:other") {
		t.Error("what a caller made up is in the log")
	}
}

func TestOnlyTheSystemAdministersKMSKeys(t *testing.T) {
	f := newFixture(t)
	_, errs := f.service.List(t.Context(), owner)
	_, err := f.service.Rewrap(t.Context(), owner, time.Time{})
	for _, err := range []error{errs, err} {
		if !errors.Is(err, fault.Forbidden) {
			t.Error(err)
		}
	}
	f.log.Halt(errDown)
	f.old.after.Store(1)
	for name, call := range map[string]func() error{
		"list":    func() error { _, err := f.service.List(t.Context(), admin); return err },
		"rewrap":  func() error { _, err := f.service.Rewrap(t.Context(), admin, time.Time{}); return err },
		"destroy": func() error { _, err := f.service.Destroy(t.Context(), admin, f.old.ID()); return err },
	} {
		if err := call(); !errors.Is(err, fault.Unavailable) {
			t.Errorf("%s while the log takes no entries: %v", name, err)
		}
	}
	if f.old.down.Load() {
		t.Error("a KMS was asked although nothing could be recorded")
	}
	f.log.Halt(nil)
	found, err := f.keys.KMSKeys(t.Context(), time.Time{})
	if err != nil || found.Remaining != tenants+1 || len(f.destroyed) != 0 {
		t.Errorf("%+v, %v", found, err)
	}
}
