package chaos

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/internal/vault"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// site is the data and the KMS key that vaults of this process share.
type site struct {
	t         *testing.T
	local     *kms.Key
	open      func(store.Hook, func() time.Time) (store.Database, error)
	principal authz.Principal // principal of its tenant, once there is one
}

func newSite(t *testing.T, open func(store.Hook, func() time.Time) (store.Database, error)) *site {
	t.Helper()
	file := filepath.Join(t.TempDir(), "kms.key")
	must(t, kms.CreateLocal(file))
	local, err := kms.OpenLocal(file)
	must(t, err)
	return &site{t: t, local: local, open: open}
}

// embedded returns a site on the embedded store.
func embedded(t *testing.T) *site {
	t.Helper()
	file := filepath.Join(t.TempDir(), "store.db")
	return newSite(t, func(hook store.Hook, _ func() time.Time) (store.Database, error) {
		return bolt.Open(file, bolt.Options{Hook: hook})
	})
}

// vault opens a vault with its own clock, on the store that change returns for the real one.
func (s *site) vault(now func() time.Time, change func(store.Database) store.Store) (*vault.Vault, store.Database) {
	t := s.t
	t.Helper()
	log := writer.New(now, nil)
	db, err := s.open(log.Commit, now)
	must(t, err)
	t.Cleanup(func() { must(t, db.Close()) })
	_, keys, err := identity.Open(t.Context(), db, log, guard.New(log), s.local, keyring.Config{CacheTTL: time.Hour, Now: now})
	must(t, err)
	if s.principal.Tenant == "" {
		tenant := authz.TenantID(authz.NewID("ten"))
		set, err := keys.NewSet(t.Context(), tenant, 1)
		must(t, err)
		must(t, db.Update(t.Context(), set.Put))
		s.principal = authz.Principal{Tenant: tenant, Kind: authz.APIKey, ID: authz.NewID("key"), Scopes: authz.TenantScopes()}
	}
	return vault.New(change(db), guard.New(log), keys, now), db
}

// asker returns a function that sends calls to a vault of this process.
func asker(v *vault.Vault, p authz.Principal) func(call) answer {
	saw := func(c vault.Credential, value string) sight {
		return sight{id: c.ID, value: value, version: c.Version, created: c.CreatedAt.UnixMicro()}
	}
	return func(c call) answer {
		ctx := context.Background()
		values := map[string]secret.Bytes{"v": secret.Bytes(c.value)}
		one := func(credential vault.Credential, value string, err error) answer {
			switch {
			case err == nil:
				return answer{seen: []sight{saw(credential, value)}}
			case errors.Is(err, fault.Forbidden):
				return answer{denied: true}
			case errors.Is(err, fault.Unavailable):
				return answer{unknown: true}
			}
			panic(fmt.Sprintf("%s: %v", c.action, err))
		}
		switch c.action {
		case seal:
			credential, err := v.Seal(ctx, p, vault.SealRequest{Name: c.name, Type: "t", TTLDays: 30, Values: values})
			return one(credential, c.value, err)
		case replace:
			credential, err := v.Replace(ctx, p, c.id, vault.ReplaceRequest{Values: values})
			return one(credential, c.value, err)
		case rotate:
			credential, err := v.Rotate(ctx, p, c.id)
			return one(credential, "", err)
		case remove:
			a := one(vault.Credential{}, "", v.Delete(ctx, p, c.id))
			a.seen = nil
			return a
		case list:
			all, _, err := v.List(ctx, p, vault.ListQuery{})
			if err != nil {
				return one(vault.Credential{}, "", err)
			}
			var seen []named
			for _, credential := range all {
				seen = append(seen, named{credential.Name, saw(credential, "")})
			}
			return answer{seen: ofName(c.name, seen), all: seen}
		}
		var u vault.Unsealed
		var err error
		if c.action == unseal {
			u, err = v.Read(ctx, p, vault.ByID(c.id))
		} else {
			u, err = v.Read(ctx, p, vault.ByName(c.name))
		}
		return one(u.Credential, string(u.Values["v"]), err)
	}
}

// run has nine clients make 60 calls each to the vaults in turn.
func run(p authz.Principal, vaults ...*vault.Vault) *history {
	c := &clients{history: newHistory()}
	for i := range 9 {
		c.asks = append(c.asks, asker(vaults[i%len(vaults)], p))
	}
	c.start(60)
	c.done.Wait()
	c.end(asker(vaults[0], p))
	return c.history
}

func unchanged(db store.Database) store.Store { return db }

// unreliable is a store whose commits sometimes fail, before or after they have happened, so that
// the caller does not know which.
type unreliable struct{ store.Database }

var errLost = fault.New(fault.Unavailable, "the answer of the store was lost")

func (s unreliable) Update(ctx context.Context, fn func(store.Tx) error) error {
	switch rand.IntN(8) {
	case 0:
		return errLost
	case 1:
		return errors.Join(s.Database.Update(ctx, fn), errLost)
	}
	return s.Database.Update(ctx, fn)
}

func TestTheVaultIsLinearisable(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: checks long histories")
	}
	beside(t)
	for _, failing := range []bool{false, true} {
		t.Run(fmt.Sprintf("failing=%v", failing), func(t *testing.T) {
			s := embedded(t)
			v, _ := s.vault(time.Now, func(db store.Database) store.Store {
				if failing {
					return unreliable{db}
				}
				return db
			})
			h := run(s.principal, v)
			t.Log(h.check(t))
			if _, unknown := h.count(); (unknown > 0) != failing {
				t.Errorf("%d calls had no outcome", unknown)
			}
		})
	}
}

// stale is a store that serves Views from a snapshot up to a tenth of a second old, like a replica
// that lags behind.
type stale struct {
	store.Database
	views chan func(store.Reader)
}

func newStale(t *testing.T, db store.Database) *stale {
	s := &stale{db, make(chan func(store.Reader))}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for t.Context().Err() == nil {
			_ = db.View(context.Background(), func(r store.Reader) error {
				for old := time.After(100 * time.Millisecond); ; {
					select {
					case do := <-s.views:
						do(r)
					case <-old:
						return nil
					}
				}
			})
		}
	}()
	t.Cleanup(func() { <-ended })
	return s
}

func (s *stale) View(_ context.Context, fn func(store.Reader) error) error {
	done := make(chan error)
	s.views <- func(r store.Reader) { done <- fn(r) }
	return <-done
}

// forgetful is a store that acknowledges some Updates without making them.
type forgetful struct{ store.Database }

var errForgotten = errors.New("forgotten")

func (s forgetful) Update(ctx context.Context, fn func(store.Tx) error) error {
	if rand.IntN(20) > 0 {
		return s.Database.Update(ctx, fn)
	}
	err := s.Database.Update(ctx, func(tx store.Tx) error {
		if err := fn(tx); err != nil {
			return err
		}
		return errForgotten
	})
	if errors.Is(err, errForgotten) {
		return nil
	}
	return err
}

// Proves that the checker of histories detects broken stores.
func TestABrokenStoreIsFoundOut(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: checks long histories")
	}
	beside(t)
	for name, change := range map[string]func(store.Database) store.Store{
		"stale reads":       func(db store.Database) store.Store { return newStale(t, db) },
		"forgotten updates": func(db store.Database) store.Store { return forgetful{db} },
	} {
		t.Run(name, func(t *testing.T) {
			for range 5 { // one history may escape a random fault
				s := embedded(t)
				v, _ := s.vault(time.Now, change)
				ok, _, err := run(s.principal, v).linearisable()
				must(t, err)
				if !ok {
					return
				}
			}
			t.Error("five histories of a broken store passed for linearisable")
		})
	}
}
