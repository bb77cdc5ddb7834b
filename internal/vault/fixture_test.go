package vault

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/internal/vault/compare"
	"github.com/latticekeep/latticekeep/internal/vault/record"
	"github.com/latticekeep/latticekeep/test/statetest"
	"github.com/latticekeep/latticekeep/test/storetest"
)

// fixture is a vault on real parts: a database file, a key file and a log. The test controls the
// clock and can make the KMS fail.
type fixture struct {
	t     testing.TB
	dir   string
	store *watchedStore
	watch *statetest.Watch
	state *state.State // nil when the store is not under one
	log   *writer.Log
	keys  *keyring.Ring
	kms   *switchedKMS
	vault *Vault
	a, b  authz.Principal // principals of two tenants, with all scopes

	unbound bool         // the store is not under a state
	opens   atomic.Int64 // records opened, each with two signatures and a decryption

	mu    sync.Mutex
	clock time.Time
}

// switchedKMS is the local key behind a switch and a counter.
type switchedKMS struct {
	*kms.Key
	down  atomic.Bool
	calls atomic.Int64
}

var errDown = errors.New("connection refused")

func (k *switchedKMS) Unwrap(ctx context.Context, keyContext string, wrapped []byte) ([]byte, error) {
	k.calls.Add(1)
	if k.down.Load() {
		return nil, errDown
	}
	return k.Key.Unwrap(ctx, keyContext, wrapped)
}

// watchedStore is the database with counters and a switch that makes it fail like a full disk. In
// tests it runs every closure of Update twice, like a backend that has to retry.
type watchedStore struct {
	*bolt.Store                                       // without the guard
	guarded                                           store.Database
	twice                                             bool
	views, updates, gets, scans, rows, writes, events atomic.Int64
	full                                              atomic.Bool
	before                                            func() // called before each Update, if not nil
}

type watchedReader struct {
	store.Reader
	s *watchedStore
}

func (r watchedReader) Get(key []byte) ([]byte, error) {
	r.s.gets.Add(1)
	return r.Reader.Get(key)
}

func (r watchedReader) Scan(rng store.Range, visit func(key, value []byte) bool) error {
	r.s.scans.Add(1)
	return r.Reader.Scan(rng, func(key, value []byte) bool {
		r.s.rows.Add(1)
		return visit(key, value)
	})
}

type watchedTx struct {
	watchedReader
	tx store.Tx
}

func (tx watchedTx) Put(key, value []byte) error {
	tx.s.writes.Add(1)
	return tx.tx.Put(key, value)
}

func (tx watchedTx) Delete(key []byte) error {
	tx.s.writes.Add(1)
	return tx.tx.Delete(key)
}

func (tx watchedTx) Enqueue(event any) {
	tx.s.events.Add(1)
	tx.tx.Enqueue(event)
}

func (tx watchedTx) Wrote(key []byte) bool { return tx.tx.Wrote(key) }

func (tx watchedTx) Written(prefix []byte, visit func([]byte, bool)) error {
	return tx.tx.Written(prefix, visit)
}

func (tx watchedTx) OnCommit(do func()) { tx.tx.OnCommit(do) }

func (s *watchedStore) View(ctx context.Context, fn func(store.Reader) error) error {
	s.views.Add(1)
	return s.guarded.View(ctx, func(r store.Reader) error { return fn(watchedReader{r, s}) })
}

func (s *watchedStore) Update(ctx context.Context, fn func(store.Tx) error) error {
	if s.before != nil {
		s.before()
	}
	s.updates.Add(1)
	if s.full.Load() {
		return fault.New(fault.Unavailable, "no space left")
	}
	if s.twice {
		storetest.Rehearse(ctx, s.guarded, fn)
	}
	return s.guarded.Update(ctx, func(tx store.Tx) error { return fn(watchedTx{watchedReader{tx, s}, tx}) })
}

func (s *watchedStore) Ready(ctx context.Context) error {
	if s.full.Load() {
		return fault.New(fault.Unavailable, "no space left")
	}
	return s.Store.Ready(ctx)
}

// end releases an object whose form is that of its current version.
func (f *fixture) end(p authz.Principal, uid string, deleteEntry bool) error {
	f.t.Helper()
	_, err := f.vault.Release(f.t.Context(), p, uid, [32]byte{}, deleteEntry)
	return err
}

// leave releases an object of a form, whose entry stays.
func (f *fixture) leave(p authz.Principal, uid string, form [32]byte) error {
	f.t.Helper()
	_, err := f.vault.Release(f.t.Context(), p, uid, form, false)
	return err
}

func (f *fixture) now() time.Time {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.clock
}

func (f *fixture) advance(d time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.clock = f.clock.Add(d)
}

func newFixture(t testing.TB, cacheTTL time.Duration) *fixture {
	t.Helper()
	f := newFixtureWithoutStore(t)
	f.open(cacheTTL)
	f.a, f.b = f.tenant(), f.tenant()
	return f
}

func newFixtureWithoutStore(t testing.TB) *fixture {
	t.Helper()
	f := &fixture{t: t, dir: t.TempDir(), watch: statetest.New(t), clock: time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)}
	keyFile := filepath.Join(t.TempDir(), "kms.key") // outside the directory of the store
	must(t, kms.CreateLocal(keyFile))
	local, err := kms.OpenLocal(keyFile)
	must(t, err)
	f.kms = &switchedKMS{Key: local}
	return f
}

// newUnboundFixture returns a fixture whose rows are not held against the state yet, as while the
// store of an earlier release is being brought up to date.
func newUnboundFixture(t testing.TB, cacheTTL time.Duration) *fixture {
	t.Helper()
	f := newFixtureWithoutStore(t)
	f.unbound = true
	f.open(cacheTTL)
	f.a, f.b = f.tenant(), f.tenant()
	return f
}

// inBothStores runs a test about changed rows twice: on a store whose rows are held against the state,
// and on one whose rows are not yet. There the records' own signatures and MACs protect.
func inBothStores(t *testing.T, test func(t *testing.T, f *fixture)) {
	t.Run("held against the state", func(t *testing.T) { test(t, newFixture(t, time.Minute)) })
	t.Run("not held against the state", func(t *testing.T) { test(t, newUnboundFixture(t, time.Minute)) })
}

func (f *fixture) open(cacheTTL time.Duration) {
	t := f.t
	t.Helper()
	if !f.unbound {
		f.state = f.watch.State()
	}
	f.log = writer.New(f.now, f.state)
	s, err := bolt.Open(filepath.Join(f.dir, "vault.db"), bolt.Options{Hook: f.log.Commit})
	must(t, err)
	t.Cleanup(func() { s.Close() })
	_, benchmark := t.(*testing.B)
	f.store = &watchedStore{Store: s, guarded: s, twice: !benchmark}
	if !f.unbound {
		f.store.guarded = f.state.Guard(s)
	}
	_, f.keys, err = identity.Open(t.Context(), f.store, f.log, guard.New(f.log), f.kms, keyring.Config{CacheTTL: cacheTTL, Now: f.now})
	must(t, err)
	f.vault = New(f.store, guard.New(f.log), f.keys, f.now)
	f.vault.opener = func(r *record.Record, wrapping, signing *keyring.Keys) (map[string]secret.Bytes, error) {
		f.opens.Add(1)
		return r.Open(wrapping, signing)
	}
}

func (f *fixture) tenant() authz.Principal {
	f.t.Helper()
	id := authz.TenantID(authz.NewID("ten"))
	set, err := f.keys.NewSet(f.t.Context(), id, 1)
	must(f.t, err)
	f.commit(set.Put)
	return authz.Principal{Tenant: id, Kind: authz.APIKey, ID: authz.NewID("key"), Scopes: authz.TenantScopes()}
}

func (f *fixture) seal(p authz.Principal, values map[string]string) Credential {
	f.t.Helper()
	return f.sealNamed(p, "db", values)
}

func (f *fixture) sealNamed(p authz.Principal, name string, values map[string]string) Credential {
	f.t.Helper()
	c, err := f.vault.Seal(f.t.Context(), p, SealRequest{Name: name, Type: "database", TTLDays: 30, Values: secrets(values)})
	must(f.t, err)
	return c
}

func (f *fixture) verify() verify.Report {
	f.t.Helper()
	report, err := compare.Store(f.t.Context(), f.store.Store, verify.Options{})
	must(f.t, err)
	return report
}

// last returns the newest entry of p's tenant, read from the store itself.
func (f *fixture) last(p authz.Principal) audit.Entry {
	f.t.Helper()
	entries, _, err := reader.New(f.log, guard.New(f.log)).Query(f.t.Context(), p, reader.Query{Limit: 1})
	must(f.t, err)
	return entries[0]
}

// history returns the newest entries of p's tenant, read from the store itself.
func (f *fixture) history(p authz.Principal) []audit.Entry {
	f.t.Helper()
	entries, _, err := reader.New(f.log, guard.New(f.log)).Query(f.t.Context(), p, reader.Query{Limit: 100})
	must(f.t, err)
	return entries
}

// rows returns the raw rows under the prefix.
func (f *fixture) rows(prefix string) (keys, values [][]byte) {
	f.t.Helper()
	must(f.t, f.store.Store.View(f.t.Context(), func(r store.Reader) error {
		return r.Scan(store.Prefix([]byte(prefix)), func(k, v []byte) bool {
			keys, values = append(keys, append([]byte(nil), k...)), append(values, append([]byte(nil), v...))
			return true
		})
	}))
	return keys, values
}

// commit changes rows without the vault, with an entry.
func (f *fixture) commit(change func(tx store.Tx) error) {
	f.t.Helper()
	must(f.t, f.store.guarded.Update(f.t.Context(), func(tx store.Tx) error {
		_, err := f.log.Append(tx, audit.Event{
			Type: audit.TenantCreated, Outcome: audit.Success, Principal: authz.SystemPrincipal(authz.SystemTenant),
			Resource: audit.Resource{Type: audit.TenantResource},
		})
		return errors.Join(change(tx), err)
	}))
}

// tamper changes rows as somebody does who has no key.
func (f *fixture) tamper(change func(tx store.Tx) error) {
	f.t.Helper()
	must(f.t, f.watch.Tamper(f.t.Context(), f.store.Store, change))
}

// files returns the bytes of every file in the data directory.
func (f *fixture) files() []byte {
	f.t.Helper()
	var all []byte
	entries, err := os.ReadDir(f.dir)
	must(f.t, err)
	for _, e := range entries {
		b, err := os.ReadFile(filepath.Join(f.dir, e.Name()))
		must(f.t, err)
		all = append(all, b...)
	}
	return all
}

func secrets(values map[string]string) map[string]secret.Bytes {
	s := make(map[string]secret.Bytes, len(values))
	for k, v := range values {
		s[k] = secret.Bytes(v)
	}
	return s
}

func plain(values map[string]secret.Bytes) map[string]string {
	s := make(map[string]string, len(values))
	for k, v := range values {
		s[k] = string(v)
	}
	return s
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
