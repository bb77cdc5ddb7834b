package chaos

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// limited is a tenant with a low rate limit that constantly asks every replica for more.
type limited struct {
	limit           int // requests per minute
	began           time.Time
	served, refused atomic.Int64
	stop            atomic.Bool
	asking          sync.WaitGroup
}

// newLimited creates the tenant and starts its requests.
func (f *fleet) newLimited(limit int) *limited {
	f.t.Helper()
	p, system := f.servers[0].Load(), f.replicas[0].system
	made := p.must(system, "POST", "/api/v2/system/tenants", `{"name":"Impatient Ltd"}`)
	tenant := "/api/v2/system/tenants/" + made["tenant"].(map[string]any)["tenant_id"].(string)
	p.must(system, "PUT", tenant+"/limits", fmt.Sprintf(`{"v2":%d}`, limit))
	key := p.must(system, "POST", tenant+"/api-keys", `{"name":"impatient","scopes":["vault:read"]}`)["api_key"].(string)
	l := &limited{limit: limit, began: time.Now()}
	for i := range 2 * len(f.replicas) {
		l.asking.Go(func() {
			for ; !l.stop.Load(); time.Sleep(10 * time.Millisecond) {
				got, err := f.servers[i%len(f.replicas)].Load().ask(key, "GET", "/api/v2/vault/list", "", "")
				switch {
				case err != nil:
				case got.status == 200:
					l.served.Add(1)
				case got.status == 429:
					l.refused.Add(1)
				}
			}
		})
	}
	return l
}

// check stops the tenant. It fails the test if the tenant was served more than its limit during the
// elapsed minutes.
func (l *limited) check(t *testing.T) string {
	t.Helper()
	l.stop.Store(true)
	l.asking.Wait()
	minutes := 1 + int64(time.Now().Truncate(time.Minute).Sub(l.began.Truncate(time.Minute))/time.Minute)
	if most := minutes * int64(l.limit); l.served.Load() > most {
		t.Errorf("a tenant of %d requests a minute was served %d in %d minutes", l.limit, l.served.Load(), minutes)
	}
	if l.refused.Load() == 0 {
		t.Errorf("a tenant of %d requests a minute was never refused, after %d: the limit has not been tried", l.limit, l.served.Load())
	}
	return fmt.Sprintf("a tenant of %d requests a minute: %d served in the course of %d minutes, %d refused", l.limit, l.served.Load(), minutes, l.refused.Load())
}
