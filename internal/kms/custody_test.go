package kms_test

import (
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/test/kmstest"
)

// These tests observe the effects of the service on a deployment through its keyring.

const tenant = authz.TenantID("ten_aaaaaaaaaaaaaaaaaaaaaaaaaa")

type deployment struct {
	service *kmstest.Server
	store   store.Store
	key     *kms.Key
	ring    *keyring.Ring
	clock   atomic.Int64 // seconds
}

func deploy(t *testing.T, start func(...kmstest.Option) (*kmstest.Server, error), ttl time.Duration) *deployment {
	t.Helper()
	d := &deployment{}
	d.clock.Store(1_800_000_000)
	var err error
	if d.service, err = start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.service.Close)
	for _, variable := range d.service.Env() {
		name, value, _ := strings.Cut(variable, "=")
		t.Setenv(name, value)
	}
	if d.key, err = kms.Open(t.Context(), d.service.URL(), kms.Options{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.key.Close() })
	if d.store, err = bolt.Open(filepath.Join(t.TempDir(), "k.db"), bolt.Options{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.store.Close() })
	config := keyring.Config{CacheTTL: ttl, Now: func() time.Time { return time.Unix(d.clock.Load(), 0) }}
	ring, first, err := keyring.Create(t.Context(), d.store, d.key, config)
	if err != nil {
		t.Fatal(err)
	}
	set, err := ring.NewSet(t.Context(), tenant, 1)
	if err != nil {
		t.Fatal(err)
	}
	if err := d.store.Update(t.Context(), func(tx store.Tx) error {
		if err := first.Put(tx); err != nil {
			return err
		}
		return set.Put(tx)
	}); err != nil {
		t.Fatal(err)
	}
	if d.ring, err = keyring.Open(t.Context(), d.store, d.key, config); err != nil {
		t.Fatal(err)
	}
	d.service.ResetCalls()
	return d
}

func (d *deployment) use(t *testing.T) error {
	_, err := d.ring.Current(t.Context(), tenant)
	return err
}

var services = map[string]func(...kmstest.Option) (*kmstest.Server, error){
	"awskms": kmstest.NewAWS, "gcpkms": kmstest.NewGCP, "hashivault": kmstest.NewVault,
}

func TestRevocationTakesEffectWithinTheCacheTime(t *testing.T) {
	for name, start := range services {
		t.Run(name, func(t *testing.T) {
			d := deploy(t, start, time.Minute)
			if err := d.use(t); err != nil {
				t.Fatal(err)
			}
			d.service.SetDisabled(kmstest.DefaultKey, true)
			d.service.ResetCalls()
			d.clock.Add(59)
			if err := d.use(t); err != nil || d.service.Calls() != 0 {
				t.Fatal("within the cache time:", err)
			}
			d.clock.Add(1)
			for range 2 {
				if err := d.use(t); fault.Of(err) != fault.Unavailable {
					t.Fatal("after it:", err)
				}
			}
			if n := d.service.Calls(); n != 2 {
				t.Errorf("%d calls of a service that refuses, for two operations", n)
			}
			d.service.SetDisabled(kmstest.DefaultKey, false)
			if err := d.use(t); err != nil {
				t.Error("enabled again:", err)
			}
		})
	}
}

func TestWithoutACacheEveryOperationAsksOnce(t *testing.T) {
	for name, start := range services {
		t.Run(name, func(t *testing.T) {
			d := deploy(t, start, 0)
			const n = 5
			for range n {
				if err := d.use(t); err != nil {
					t.Fatal(err)
				}
			}
			if calls := d.service.CallsOf()["decrypt"]; calls != n || d.service.Calls() != n {
				t.Errorf("%d calls for %d operations: %v", calls, n, d.service.CallsOf())
			}
			d.service.SetRevoked(true)
			if err := d.use(t); fault.Of(err) != fault.Unavailable {
				t.Error("revoked:", err)
			}
		})
	}
}

// A service that takes 20 ms and refuses three of ten calls costs a replica only a handful of calls
// per cache lifetime, whatever its load.
func TestASlowAndThrottledServiceIsAskedSeldom(t *testing.T) {
	for name, start := range services {
		t.Run(name, func(t *testing.T) {
			d := deploy(t, start, 5*time.Minute)
			d.service.SetLatency(20 * time.Millisecond)
			d.service.SetThrottle(0.3)
			const windows, callers, each = 12, 20, 100
			for range windows {
				before := d.service.Calls()
				var wg sync.WaitGroup
				var failures atomic.Int64
				for range callers {
					wg.Go(func() {
						for range each {
							if _, err := d.ring.Current(t.Context(), tenant); err != nil {
								failures.Add(1)
							}
						}
					})
				}
				wg.Wait()
				if failures.Load() > 0 {
					t.Errorf("%d of %d operations failed", failures.Load(), callers*each)
				}
				if n := d.service.Calls() - before; n < 1 || n > 10 {
					t.Errorf("%d calls for %d operations", n, callers*each)
				}
				d.clock.Add(300)
			}
			if n := d.service.Calls(); n == windows {
				t.Error("none was throttled")
			}
			if n := d.service.Peak(); n != 1 {
				t.Errorf("%d calls at one time", n)
			}
			t.Logf("%d operations, %d calls", windows*callers*each, d.service.Calls())
		})
	}
}

// An outage causes one call in flight for all waiting callers, and ends without intervention.
func TestAnOutageIsBoundedAndEndsByItself(t *testing.T) {
	for name, start := range services {
		t.Run(name, func(t *testing.T) {
			d := deploy(t, start, time.Minute)
			d.service.SetLatency(time.Hour)
			var wg sync.WaitGroup
			for range 10 {
				wg.Go(func() {
					if err := d.use(t); fault.Of(err) != fault.Unavailable {
						t.Error(err)
					}
				})
			}
			wg.Wait()
			if n := d.service.Peak(); n != 1 {
				t.Errorf("%d calls in flight for one set of keys", n)
			}
			d.service.SetLatency(0)
			if err := d.use(t); err != nil {
				t.Error("when it answers again:", err)
			}
		})
	}
}
