package transit

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/test/statetest"
	"github.com/latticekeep/latticekeep/test/storetest"
)

// fixture is the service on real parts: a database file, a key file and a log. The test controls
// the clock. KMS and store have a switch and a counter.
type fixture struct {
	*Transit
	t     testing.TB
	dir   string
	db    *switchedStore
	log   *writer.Log
	watch *statetest.Watch
	kms   *switchedKMS
	a, b  authz.Principal // principals of two tenants, with all scopes

	unbound bool // rows are not held against the state yet

	mu    sync.Mutex
	clock time.Time
}

type switchedKMS struct {
	*kms.Key
	down  atomic.Bool
	calls atomic.Int64
	asked func() // if set, every Unwrap calls it
}

var errDown = errors.New("connection refused")

func (k *switchedKMS) Unwrap(ctx context.Context, keyContext string, wrapped []byte) ([]byte, error) {
	k.calls.Add(1)
	if k.asked != nil {
		k.asked()
	}
	if k.down.Load() {
		return nil, errDown
	}
	return k.Key.Unwrap(ctx, keyContext, wrapped)
}

func (k *switchedKMS) Wrap(ctx context.Context, keyContext string, key []byte) ([]byte, error) {
	if k.down.Load() {
		return nil, errDown
	}
	return k.Key.Wrap(ctx, keyContext, key)
}

// switchedStore counts reads. It can fail like a full disk, at once or only at the next commit.
type switchedStore struct {
	*state.Store
	raw         *bolt.Store // without the guard
	views, gets atomic.Int64
	patience    atomic.Int64 // time left for the first read with a deadline since this was set to 0
	full        atomic.Bool
	refuse      atomic.Bool
}

type countedReader struct {
	store.Reader
	n *atomic.Int64
}

func (r countedReader) Get(key []byte) ([]byte, error) {
	r.n.Add(1)
	return r.Reader.Get(key)
}

func (r countedReader) Scan(rng store.Range, visit func(key, value []byte) bool) error {
	r.n.Add(1)
	return r.Reader.Scan(rng, visit)
}

func (s *switchedStore) View(ctx context.Context, fn func(store.Reader) error) error {
	s.views.Add(1)
	if end, ok := ctx.Deadline(); ok {
		s.patience.CompareAndSwap(0, int64(time.Until(end)))
	}
	return s.Store.View(ctx, func(r store.Reader) error { return fn(countedReader{r, &s.gets}) })
}

func (s *switchedStore) Update(ctx context.Context, fn func(store.Tx) error) error {
	if s.full.Load() || s.refuse.Load() {
		return fault.New(fault.Unavailable, "no space left")
	}
	return s.Store.Update(ctx, fn)
}

func (s *switchedStore) Ready(ctx context.Context) error {
	if s.full.Load() {
		return fault.New(fault.Unavailable, "no space left")
	}
	return s.Store.Ready(ctx)
}

func (f *fixture) now() time.Time {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.clock
}

func (f *fixture) advance(days int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.clock = f.clock.AddDate(0, 0, days)
}

func (f *fixture) advanceBy(d time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.clock = f.clock.Add(d)
}

func newFixture(t testing.TB, cacheTTL time.Duration) *fixture {
	t.Helper()
	return makeFixture(t, cacheTTL, false)
}

// newUnboundFixture returns a fixture whose rows are not held against the state yet, as while the
// store of an earlier release is being brought up to date.
func newUnboundFixture(t testing.TB, cacheTTL time.Duration) *fixture {
	t.Helper()
	return makeFixture(t, cacheTTL, true)
}

// inBothStores runs a test about changed rows on a store whose rows are held against the state, and on
// one whose rows are not yet.
func inBothStores(t *testing.T, test func(t *testing.T, f *fixture)) {
	t.Run("held against the state", func(t *testing.T) { test(t, newFixture(t, time.Minute)) })
	t.Run("not held against the state", func(t *testing.T) { test(t, newUnboundFixture(t, time.Minute)) })
}

// isChanged reports whether err is the answer to a row that somebody has changed. In an unbound store
// the row's MAC tells that the row is damaged, but not that somebody has put it there.
func (f *fixture) isChanged(err error) bool {
	if f.unbound {
		return errors.Is(err, fault.Internal)
	}
	return state.IsRefused(err) && !errors.Is(err, fault.Internal)
}

func makeFixture(t testing.TB, cacheTTL time.Duration, unbound bool) *fixture {
	t.Helper()
	f := &fixture{t: t, dir: t.TempDir(), watch: statetest.New(t), unbound: unbound, clock: time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)}
	keyFile := filepath.Join(t.TempDir(), "kms.key")
	must(t, kms.CreateLocal(keyFile))
	local, err := kms.OpenLocal(keyFile)
	must(t, err)
	f.kms = &switchedKMS{Key: local}
	guarding := f.watch.State() // holds nothing before the log gives it a key
	log := writer.New(f.now, guarding)
	if unbound {
		log = writer.New(f.now, nil)
	}
	f.log = log
	s, err := bolt.Open(filepath.Join(f.dir, "t.db"), bolt.Options{Hook: log.Commit})
	must(t, err)
	t.Cleanup(func() { s.Close() })
	f.db = &switchedStore{Store: guarding.Guard(storetest.Rehearsing(s)), raw: s}
	_, keys, err := identity.Open(t.Context(), f.db, log, guard.New(log), f.kms, keyring.Config{CacheTTL: cacheTTL, Now: f.now})
	must(t, err)
	f.Transit = New(f.db, guard.New(log), keys, f.now)
	f.a, f.b = f.tenant(), f.tenant()
	return f
}

func (f *fixture) tenant() authz.Principal {
	f.t.Helper()
	id := authz.TenantID(authz.NewID("ten"))
	set, err := f.keys.NewSet(f.t.Context(), id, 1)
	must(f.t, err)
	f.commit(set.Put)
	return authz.Principal{Tenant: id, Kind: authz.APIKey, ID: authz.NewID("key"), Scopes: authz.TenantScopes(), RequestID: "req"}
}

func (f *fixture) create(p authz.Principal, name string, days int) Key {
	f.t.Helper()
	k, err := f.CreateKey(f.t.Context(), p, name, days)
	must(f.t, err)
	return k
}

func (f *fixture) encrypt(p authz.Principal, keyID, data string) Ciphertext {
	f.t.Helper()
	c, err := f.Encrypt(f.t.Context(), p, keyID, []secret.Bytes{secret.Bytes(data)})
	must(f.t, err)
	return c[0]
}

func (f *fixture) decrypt(p authz.Principal, keyID string, c Ciphertext) Opened {
	f.t.Helper()
	o, err := f.Decrypt(f.t.Context(), p, keyID, []Ciphertext{c})
	must(f.t, err)
	return o[0]
}

func (f *fixture) mustOpen(p authz.Principal, keyID string, c Ciphertext, want string) {
	f.t.Helper()
	if o := f.decrypt(p, keyID, c); o.Err != nil || string(o.Data) != want {
		f.t.Fatalf("opened to %d bytes, %v", len(o.Data), o.Err)
	}
}

func (f *fixture) mustNotOpen(p authz.Principal, keyID string, c Ciphertext, what string) {
	f.t.Helper()
	if o := f.decrypt(p, keyID, c); o.Err != ErrDecrypt || o.Data != nil || o.KeyID != "" || o.KeyVersion != 0 {
		f.t.Errorf("%s: opened to %d bytes, %v", what, len(o.Data), o.Err)
	}
}

func (f *fixture) rotate(p authz.Principal, id string, rewrap bool) (Key, int) {
	f.t.Helper()
	k, n, err := f.RotateKey(f.t.Context(), p, id, rewrap)
	must(f.t, err)
	return k, n
}

// entries returns the tenant's entries, oldest first.
func (f *fixture) entries(p authz.Principal) []audit.Entry {
	f.t.Helper()
	var all []audit.Entry
	must(f.t, audit.ScanAll(f.t.Context(), f.db.raw, store.Prefix([]byte("audit/entry/")), func(_, row []byte) error {
		var e audit.Entry
		err := json.Unmarshal(row[1+dualsig.SignatureSize:], &e) // see docs/formats.md
		if err == nil && e.TenantID == string(p.Tenant) {
			all = append(all, e)
		}
		return err
	}))
	return all
}

// leaves runs do and returns the entries that it left in p's tenant.
func (f *fixture) leaves(p authz.Principal, do func()) []audit.Entry {
	f.t.Helper()
	before := len(f.entries(p))
	do()
	return f.entries(p)[before:]
}

func (f *fixture) verify() {
	f.t.Helper()
	_, err := verify.Store(f.t.Context(), f.db, verify.Options{})
	must(f.t, err)
}

// rows returns the keys and values of the rows under the prefix.
func (f *fixture) rows(prefix string) (keys, values []string) {
	f.t.Helper()
	must(f.t, f.db.raw.View(f.t.Context(), func(r store.Reader) error {
		return r.Scan(store.Prefix([]byte(prefix)), func(k, v []byte) bool {
			keys, values = append(keys, string(k)), append(values, string(v))
			return true
		})
	}))
	return keys, values
}

// commit changes rows without the service, with an entry of the system.
func (f *fixture) commit(change func(tx store.Tx) error) {
	f.t.Helper()
	must(f.t, f.db.Store.Update(f.t.Context(), func(tx store.Tx) error {
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
	must(f.t, f.watch.Tamper(f.t.Context(), f.db.raw, change))
}

// inFiles reports whether a file in the data directory contains the bytes.
func (f *fixture) inFiles(b string) bool {
	f.t.Helper()
	entries, err := os.ReadDir(f.dir)
	must(f.t, err)
	for _, e := range entries {
		content, err := os.ReadFile(filepath.Join(f.dir, e.Name()))
		must(f.t, err)
		if strings.Contains(string(content), b) {
			return true
		}
	}
	return false
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
