package identity

import (
	"errors"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity/apikey"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/test/statetest"
	"github.com/latticekeep/latticekeep/test/storetest"
)

func newService(t *testing.T) *Service {
	t.Helper()
	return makeService(t, false)
}

func makeService(t *testing.T, unbound bool) *Service {
	t.Helper()
	dir := t.TempDir()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(kms.CreateLocal(filepath.Join(dir, "kms.key")))
	k, err := kms.OpenLocal(filepath.Join(dir, "kms.key"))
	must(err)
	s, log := openStore(t, dir, time.Now, unbound)
	service, _, err := Open(t.Context(), s, log, guard.New(log), k, keyring.Config{CacheTTL: time.Minute, Now: time.Now})
	must(err)
	return service
}

// boundStore is a database file whose rows are held against the state. A row that is refused and was
// not tampered with fails the test.
type boundStore struct {
	*state.Store
	raw     *bolt.Store // without the guard
	watch   *statetest.Watch
	unbound bool // rows are not held against the state yet
}

// openStore opens a store. In an unbound one rows are not held against the state yet, as while the
// store of an earlier release is brought up to date.
func openStore(t testing.TB, dir string, now func() time.Time, unbound bool) (*boundStore, *writer.Log) {
	t.Helper()
	s := &boundStore{watch: statetest.New(t), unbound: unbound}
	guarding := s.watch.State() // holds nothing before the log gives it a key
	log := writer.New(now, guarding)
	if unbound {
		log = writer.New(now, nil)
	}
	var err error
	s.raw, err = bolt.Open(filepath.Join(dir, "i.db"), bolt.Options{Hook: log.Commit})
	must(t, err)
	t.Cleanup(func() { _ = s.raw.Close() })
	s.Store = guarding.Guard(storetest.Rehearsing(s.raw))
	return s, log
}

// tamper changes rows as somebody does who has no key.
func (s *boundStore) tamper(t *testing.T, change func(tx store.Tx) error) {
	t.Helper()
	must(t, s.watch.Tamper(t.Context(), s.raw, change))
}

// isChanged reports whether err is the answer to a row that somebody has changed. In an unbound store
// the row's MAC tells that the row is damaged, but not that somebody has put it there.
func (s *boundStore) isChanged(err error) bool {
	if s.unbound {
		return errors.Is(err, fault.Internal)
	}
	return state.IsRefused(err) && !errors.Is(err, fault.Internal)
}

// bound returns the store of [newService] or [openIn].
func (s *Service) bound() *boundStore { return s.store.(*boundStore) }

func TestADevelopmentServerKeepsItsTenantAndReplacesItsKey(t *testing.T) {
	s := newService(t)
	tenant, key, err := s.Dev(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	p, err := s.Authenticate(t.Context(), key)
	if err != nil || p.Tenant != tenant || p.Kind != authz.APIKey || len(p.Scopes) != len(authz.TenantScopes()) || !strings.HasPrefix(key, "lk_live_") {
		t.Fatal(p, err)
	}
	tenant2, key2, err := s.Dev(t.Context())
	if err != nil || tenant2 != tenant || key2 == key {
		t.Fatal(tenant2, err)
	}
	if _, err := s.Authenticate(t.Context(), key); !errors.Is(err, fault.Unauthenticated) {
		t.Fatal("the previous key still works:", err)
	}
	if _, err := s.Authenticate(t.Context(), key2); err != nil {
		t.Fatal(err)
	}
	if _, err := verify.Store(t.Context(), s.bound().raw, verify.Options{}); err != nil {
		t.Fatal(err)
	}
}

func TestKeysAreStoredAsHashesOnly(t *testing.T) {
	s := newService(t)
	_, key, err := s.Dev(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	err = s.store.View(t.Context(), func(r store.Reader) error {
		return r.Scan(store.Range{}, func(k, v []byte) bool {
			if strings.Contains(string(k)+string(v), key[len(apikey.Prefix):]) {
				t.Errorf("the key lies under %q", k)
			}
			return true
		})
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestWhatIsNotAKeyIsRefusedAlike(t *testing.T) {
	s := newService(t)
	_, key, err := s.Dev(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{
		"", "lk_live_", key + "a", key[:len(key)-1], strings.ToUpper(key), " " + key, key + "\n", key[len(apikey.Prefix):],
		"lk_test_" + key[len(apikey.Prefix):], apikey.Prefix + strings.Repeat("a", 52), key[:len(key)-1] + "7", strings.Repeat("x", 1<<20),
	} {
		if bad == key {
			continue
		}
		if _, err := s.Authenticate(t.Context(), bad); !errors.Is(err, fault.Unauthenticated) || fault.Message(err) != fault.Message(errUnauthenticated) {
			t.Errorf("%.20q: %v", bad, err)
		}
	}
}

func TestANamespaceIsATenantOfItsOwn(t *testing.T) {
	s := newService(t)
	dev, _, err := s.Dev(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	seen := make(map[authz.TenantID]bool)
	var wg sync.WaitGroup
	for range 8 { // in parallel, still one tenant
		wg.Go(func() {
			tenant, err := s.NamespaceTenant(t.Context(), "cluster-1", "ns-1")
			if err != nil {
				t.Error(err)
			}
			mu.Lock()
			defer mu.Unlock()
			seen[tenant] = true
		})
	}
	wg.Wait()
	if len(seen) != 1 {
		t.Fatalf("%d tenants for one namespace", len(seen))
	}
	for _, other := range [][2]string{{"cluster-1", "ns-2"}, {"cluster-2", "ns-1"}} {
		tenant, err := s.NamespaceTenant(t.Context(), other[0], other[1])
		if err != nil || seen[tenant] {
			t.Fatal(tenant, err)
		}
		if _, err := s.keys.Current(t.Context(), tenant); err != nil {
			t.Fatal("a tenant without keys:", err)
		}
	}
	if err := s.MapNamespace(t.Context(), "cluster-1", "three", "ns-3", dev); err != nil {
		t.Fatal(err)
	}
	if tenant, err := s.NamespaceTenant(t.Context(), "cluster-1", "ns-3"); err != nil || tenant != dev {
		t.Fatal(tenant, err)
	}
	if _, err := verify.Store(t.Context(), s.bound().raw, verify.Options{}); err != nil {
		t.Fatal(err)
	}
}
