package vault

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/identity"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/internal/store/postgres"
	"github.com/latticekeep/latticekeep/internal/vault/listing"
	"github.com/latticekeep/latticekeep/test/pgtest"
)

// BenchmarkSeal reports how many physical commits (one sync each) a sealed credential of 1 KiB costs. It measures one caller, and 64 callers that each seal again as soon as they have
// an answer.
func BenchmarkSeal(b *testing.B) {
	for _, sealers := range []int{1, 64} {
		b.Run(fmt.Sprintf("sealers=%d", sealers), func(b *testing.B) {
			f := newFixture(b, time.Hour)
			must(b, f.store.WriteAhead(b.Context()))
			req := SealRequest{Name: "n", Type: "t", Values: map[string]secret.Bytes{"v": secret.Bytes(strings.Repeat("x", 1024))}}
			commits := f.store.Commits()
			var next atomic.Int64
			var wg sync.WaitGroup
			b.ResetTimer()
			for range sealers {
				wg.Go(func() {
					for next.Add(1) <= int64(b.N) {
						if _, err := f.vault.Seal(context.Background(), f.a, req); err != nil {
							b.Error(err)
							return
						}
					}
				})
			}
			wg.Wait()
			b.StopTimer()
			b.ReportMetric(float64(f.store.Commits()-commits)/float64(b.N), "commits/seal")
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "seals/s")
		})
	}
}

// BenchmarkTenThousandCredentials reports how long reads of many credentials take in a tenant with
// 10,000 credentials, on both stores.
func BenchmarkTenThousandCredentials(b *testing.B) {
	stores := map[string]func(b *testing.B, hook store.Hook) (store.Store, error){
		"bolt": func(b *testing.B, hook store.Hook) (store.Store, error) {
			return bolt.Open(filepath.Join(b.TempDir(), "vault.db"), bolt.Options{Hook: hook})
		},
		"postgres": func(b *testing.B, hook store.Hook) (store.Store, error) {
			return postgres.Open(b.Context(), pgtest.Shared(b).URL(), postgres.Options{Hook: hook})
		},
	}
	for name, open := range stores {
		b.Run(name, func(b *testing.B) {
			log := writer.New(time.Now, nil)
			s, err := open(b, log.Commit)
			must(b, err)
			b.Cleanup(func() { _ = s.Close() })
			key := filepath.Join(b.TempDir(), "kms.key")
			must(b, kms.CreateLocal(key))
			local, err := kms.OpenLocal(key)
			must(b, err)
			_, keys, err := identity.Open(b.Context(), s, log, guard.New(log), local, keyring.Config{CacheTTL: time.Hour})
			must(b, err)
			p := authz.Principal{Tenant: authz.TenantID(authz.NewID("ten")), Kind: authz.APIKey, ID: authz.NewID("key"), Scopes: authz.TenantScopes()}
			set, err := keys.NewSet(b.Context(), p.Tenant, 1)
			must(b, err)
			must(b, s.Update(b.Context(), set.Put))
			fill(b, s, log, p.Tenant, time.Now(), 10_000, func(i int) string { return fmt.Sprint("filled ", i) })
			v := New(s, guard.New(log), keys, time.Now)
			list := func(q ListQuery) func() error {
				return func() error { _, _, err := v.List(b.Context(), p, q); return err }
			}
			of := p
			of.Kind, of.Namespace = authz.ServiceAccount, authz.Namespace{Cluster: "c", Name: "n"}
			for what, do := range map[string]func() error{
				"page":               list(ListQuery{Limit: 100}),
				"page of what is":    list(ListQuery{Limit: 100, Filter: Filter{Text: "FILLED"}}),
				"page of what isn't": list(ListQuery{Limit: 100, Filter: Filter{Text: "none"}}),
				"all of what isn't": func() error {
					for q := (ListQuery{Limit: 100, Filter: Filter{Text: "none"}}); ; {
						_, rest, err := v.List(b.Context(), p, q)
						next := rest.Cursor
						if q.Cursor = next; next == "" || err != nil {
							return err
						}
					}
				},
				"summary":        func() error { _, err := v.Summary(b.Context(), p, 7*day); return err },
				"summary of pod": func() error { _, err := v.Summary(b.Context(), of, 7*day); return err },
			} {
				b.Run(what, func(b *testing.B) {
					for b.Loop() {
						must(b, do())
					}
				})
			}
		})
	}
}

// BenchmarkPaths reports how much longer a list takes in a tenant with 100,000 credentials in 10,000
// folders than in one with 100 in 10, both in the same store and read in turns. The caller has eight
// policies of fifty rules each, the most there are.
func BenchmarkPaths(b *testing.B) {
	f := newFixture(b, time.Hour)
	few, many := f.a, f.b
	name := func(i int) string { return fmt.Sprintf("team-%05d/credential-%d", i/10, i%10) }
	fill(b, f.store.guarded, f.log, few.Tenant, f.now(), 100, name)
	fill(b, f.store.guarded, f.log, many.Tenant, f.now(), 100_000, name)
	f.index()
	var all authz.Access
	for i := range 8 {
		rules := []authz.Rule{anyVerb("team-00003/**"), anyVerb("team-00005/**")}
		for j := range authz.MaxRules - len(rules) {
			rules = append(rules, anyVerb(fmt.Sprintf("other-%d-%d/**", i, j)))
		}
		policy, err := authz.NewPolicy(rules)
		must(b, err)
		all = append(all, policy)
	}
	for what, q := range map[string]ListQuery{
		"page":   {Limit: 10},
		"sorted": {Limit: 10, Order: listing.ByName},
		"prefix": {Limit: 10, Filter: Filter{Prefix: "team-00003/"}},
		"search": {Limit: 10, Filter: Filter{Prefix: "team-00003/", Text: "CREDENTIAL-7"}},
	} {
		for who, access := range map[string]authz.Access{"all paths": nil, "policies": all} {
			b.Run(what+" of "+who, func(b *testing.B) {
				var took [2]time.Duration
				for b.Loop() {
					for i, p := range []authz.Principal{few, many} {
						p.Access = access
						began := time.Now()
						_, _, err := f.vault.List(b.Context(), p, q)
						took[i] += time.Since(began)
						must(b, err)
					}
				}
				b.ReportMetric(float64(took[1])/float64(took[0]), "100000/100")
			})
		}
	}
}
