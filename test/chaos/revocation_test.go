package chaos

import (
	"fmt"
	"net/http"
	"syscall"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/test/pgtest"
)

// A second after one replica revokes something, no other replica accepts it. A replica that was
// frozen or cut off meanwhile does not accept it when it continues.
func TestARevocationReachesEveryReplica(t *testing.T) {
	beside(t)
	database := pgtest.Shared(t)
	var links []*link
	f := newFleet(t, database.URL(), 3, func(address string) string {
		l, over := newLink(t, address)
		links = append(links, l)
		return over
	})
	admin, system := f.servers[0].Load(), f.replicas[0].system
	made := admin.must(system, "POST", "/api/v2/system/tenants", `{"name":"Former Ltd"}`)
	tenant := "/api/v2/system/tenants/" + made["tenant"].(map[string]any)["tenant_id"].(string)
	owner := admin.must(system, "POST", tenant+"/api-keys", `{"name":"owner","scopes":["account:admin","vault:read"]}`)["api_key"].(string)
	status := func(i int, key string) int {
		t.Helper()
		got, err := f.servers[i].Load().ask(key, "GET", "/api/v2/vault/list", "", "")
		must(t, err)
		return got.status
	}
	for what, away := range map[string]func(bool){
		"in good order": func(bool) {},
		"frozen": func(on bool) {
			f.servers[2].Load().signal(map[bool]syscall.Signal{true: syscall.SIGSTOP, false: syscall.SIGCONT}[on])
		},
		"cut off": func(on bool) {
			if on {
				links[2].cut()
			} else {
				links[2].mend()
			}
		},
	} {
		former := admin.must(owner, "POST", "/api/v2/api-keys", `{"name":"former","scopes":["vault:read"]}`)
		key := former["api_key"].(string)
		for i := range f.replicas {
			waitFor(t, func() bool { return status(i, key) == http.StatusOK })
		}
		away(true)
		admin.must(owner, "DELETE", fmt.Sprintf("/api/v2/api-keys/%s", former["key_id"]), "")
		time.Sleep(time.Second)
		if got := status(1, key); got != http.StatusUnauthorized {
			t.Errorf("a second after a key was revoked another replica answers %d", got)
		}
		away(false)
		// Wait for a real answer: a replica that was away may lack its database for a moment.
		for got := 0; got != http.StatusUnauthorized; {
			if got = status(2, key); got != http.StatusUnauthorized && got != http.StatusServiceUnavailable {
				t.Fatalf("a replica that was %s honours a key that was revoked a second before: %d", what, got)
			}
		}
	}
	for i := range f.servers {
		f.servers[i].Load().kill()
	}
	_, err := f.replicas[0].verify()
	must(t, err)
}
