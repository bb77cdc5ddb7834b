package sealingkey

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"maps"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/internal/sealing"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/test/statetest"
	"github.com/latticekeep/latticekeep/test/storetest"
)

const canary = "tr0ub4dor-and-3"

// fixture is the service on real parts: a database file, a key file and a log. The test controls
// the clock, and says which keys objects need.
type fixture struct {
	t       *testing.T
	dir     string
	store   *switchedStore
	watch   *statetest.Watch
	unbound bool // rows are not held against the state, as while the store of an earlier release is brought up to date
	keys    *keyring.Ring
	log     *writer.Log
	service *Service
	policy  sealing.Policy

	clock atomic.Int64 // seconds since the test began
	mu    sync.Mutex
	use   map[string]int
	lost  error // error of looking up the use
}

// switchedStore is the database with a crash before or after the n-th commit from now, and a disk
// that can be full. It runs every closure of Update twice, like a backend that has to retry.
type switchedStore struct {
	*state.Store
	raw           *bolt.Store // without the guard
	full          atomic.Bool
	before, after atomic.Int64 // commits left until the crash; 0 for none
}

var errCrash = errors.New("killed")

func (s *switchedStore) Update(ctx context.Context, fn func(store.Tx) error) error {
	if s.full.Load() {
		return fault.New(fault.Unavailable, "no space left")
	}
	if s.before.Load() > 0 && s.before.Add(-1) == 0 {
		return errCrash
	}
	storetest.Rehearse(ctx, s.Store, fn)
	err := s.Store.Update(ctx, fn)
	if s.after.Load() > 0 && s.after.Add(-1) == 0 {
		return errCrash
	}
	return err
}

func (s *switchedStore) Ready(ctx context.Context) error {
	if s.full.Load() {
		return fault.New(fault.Unavailable, "no space left")
	}
	return s.Store.Ready(ctx)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

var begin = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)

func (f *fixture) now() time.Time { return begin.Add(time.Duration(f.clock.Load()) * time.Second) }

func (f *fixture) advance(d time.Duration) { f.clock.Add(int64(d / time.Second)) }

func newFixture(t *testing.T) *fixture {
	t.Helper()
	return makeFixture(t, false)
}

func makeFixture(t *testing.T, unbound bool) *fixture {
	t.Helper()
	f := &fixture{t: t, dir: t.TempDir(), watch: statetest.New(t), unbound: unbound, use: make(map[string]int)}
	must(t, kms.CreateLocal(filepath.Join(f.dir, "kms.key")))
	f.open()
	return f
}

// tamper changes rows as somebody does who has no key.
func (f *fixture) tamper(change func(tx store.Tx) error) {
	f.t.Helper()
	must(f.t, f.watch.Tamper(f.t.Context(), f.store.raw, change))
}

// open opens the deployment, also again after it was closed.
func (f *fixture) open() {
	f.t.Helper()
	must(f.t, f.tryOpen())
}

func (f *fixture) tryOpen() error {
	t := f.t
	t.Helper()
	local, err := kms.OpenLocal(filepath.Join(f.dir, "kms.key"))
	must(t, err)
	guarding := f.watch.State() // holds nothing before the log gives it a key
	if f.log = writer.New(f.now, guarding); f.unbound {
		f.log = writer.New(f.now, nil)
	}
	db, err := bolt.Open(filepath.Join(f.dir, "store.db"), bolt.Options{Hook: f.log.Commit})
	must(t, err)
	t.Cleanup(func() { _ = db.Close() })
	f.store = &switchedStore{Store: guarding.Guard(db), raw: db}
	_, f.keys, err = identity.Open(t.Context(), f.store, f.log, guard.New(f.log), local, keyring.Config{CacheTTL: time.Minute, Now: f.now})
	if err != nil {
		return err
	}
	f.service = New(f.store, guard.New(f.log), reader.New(f.log, guard.New(f.log)), f.keys, Options{InUse: f.inUse, Policy: f.policy, Now: f.now})
	return nil
}

func (f *fixture) inUse(context.Context) (map[string]int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return maps.Clone(f.use), f.lost
}

func (f *fixture) needs(id string, objects int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.use[id] = objects
}

func (f *fixture) loses(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lost = err
}

var (
	admin     = authz.Principal{Tenant: authz.SystemTenant, Kind: authz.APIKey, ID: "admin", Scopes: []authz.Scope{authz.SystemAdmin}}
	writerKey = authz.Principal{Tenant: "ten_aaaaaaaaaaaaaaaaaaaaaaaaaa", Kind: authz.APIKey, ID: "writer", Scopes: []authz.Scope{authz.VaultWrite}}
	pod       = authz.Principal{Tenant: writerKey.Tenant, Kind: authz.ServiceAccount, ID: "latticekeep-system/webhook", Pod: "one", Scopes: []authz.Scope{authz.VaultWrite}}
	readerKey = authz.Principal{Tenant: writerKey.Tenant, Kind: authz.APIKey, ID: "reader", Scopes: []authz.Scope{authz.VaultRead, authz.AccountAdmin}}
)

// current returns the id of the published key.
func (f *fixture) current() string {
	f.t.Helper()
	document, err := f.keys.SealingDocument(f.t.Context())
	must(f.t, err)
	return document.Key().ID()
}

// states returns the states of all keys, and checks that they agree with the log.
func (f *fixture) states() string {
	f.t.Helper()
	must(f.t, f.service.Verify(f.t.Context()))
	keys, err := f.service.Survey(f.t.Context())
	must(f.t, err)
	var states []string
	for _, k := range keys {
		states = append(states, string(k.State))
	}
	return strings.Join(states, " ")
}

// manifest returns an object whose values are sealed for the current key.
func (f *fixture) manifest(change ...func(*sealing.Request)) *v1beta1.SealedCredential {
	f.t.Helper()
	document, err := f.keys.SealingDocument(f.t.Context())
	must(f.t, err)
	r := sealing.Request{
		Namespace: "shop", Name: "db", CredentialType: "database",
		Values: map[string]secret.Bytes{"password": secret.Bytes(canary), "username": secret.Bytes("app")},
	}
	for _, c := range change {
		c(&r)
	}
	obj, err := sealing.Seal(document.Key(), r, f.now())
	must(f.t, err)
	return obj
}

// entries returns the entries since the mark from, and the next mark.
func (f *fixture) entries(from int) (all []audit.Entry, next int) {
	f.t.Helper()
	rng := store.Prefix([]byte("audit/entry/"))
	rng.From = binary.BigEndian.AppendUint64([]byte("audit/entry/"), uint64(from))
	err := audit.ScanAll(f.t.Context(), f.store, rng, func(_, value []byte) error {
		var e audit.Entry
		err := json.Unmarshal(value[1+dualsig.SignatureSize:], &e)
		all = append(all, e)
		return err
	})
	must(f.t, err)
	if strings.Contains(string(mustJSON(f.t, all)), canary) {
		f.t.Error("an entry has a value")
	}
	return all, from + len(all)
}

func mustJSON(t *testing.T, v any) []byte {
	t.Helper()
	b, err := json.Marshal(v)
	must(t, err)
	return b
}

// leaves runs a call and checks that it leaves exactly one entry.
func (f *fixture) leaves(what audit.EventType, o audit.Outcome, id, reason string, call func()) {
	f.t.Helper()
	_, next := f.entries(1)
	call()
	all, _ := f.entries(next)
	if len(all) != 1 {
		f.t.Errorf("%s: %d entries", what, len(all))
		return
	}
	e := all[0]
	if e.EventType != what || e.Outcome != o || e.Resource.ID != id || e.Attributes[audit.AttributeReason] != reason {
		f.t.Errorf("entry %s %s %v %v, want %s %s %q %q", e.EventType, e.Outcome, e.Resource, e.Attributes, what, o, id, reason)
	}
}
