package gate_test

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/server"
	"github.com/latticekeep/latticekeep/test/servertest"
)

// Nobody is known to these operations, so nobody's megabyte is held for them.
func TestOperationsForEverybodyTakeSmallBodiesOnly(t *testing.T) {
	s := newService(t)
	body := func(size int) string {
		text := `{"email":"a@example.org","password":"x","ignored":"`
		return text + strings.Repeat("x", size-len(text)-2) + `"}`
	}
	for _, path := range []string{"/api/v2/auth/login", "/api/v2/auth/register", "/api/v2/auth/forgot-password", "/api/v2/auth/logout"} {
		for _, chunked := range []bool{false, true} {
			r := s.Call(servertest.Request{Method: "POST", Path: path, Body: body(16<<10 + 1), Chunked: chunked})
			r.Message(t, http.StatusRequestEntityTooLarge)
			if r := s.Call(servertest.Request{Method: "POST", Path: path, Body: body(16 << 10), Chunked: chunked}); r.Status == http.StatusRequestEntityTooLarge {
				t.Errorf("%s refuses 16 KiB", path)
			}
		}
	}
}

func TestACallerOverItsRateFillsNoLog(t *testing.T) {
	s := newService(t)
	s.Call(servertest.Request{Method: "PUT", Path: "/api/v2/system/tenants/" + string(s.Tenant) + "/limits", Key: s.SystemKey(), Body: `{"v2":2}`}).Want(t, http.StatusOK)
	entries := func() uint64 {
		t.Helper()
		report, err := verify.Store(t.Context(), s.Store, verify.Options{})
		if err != nil {
			t.Fatal(err)
		}
		return report.Entries
	}
	s.Get("/api/v2/vault/list")
	s.Get("/api/v2/vault/list")
	before := entries()
	for range 20 {
		s.Call(servertest.Request{Method: "POST", Path: "/api/v2/vault/seal", Key: s.Key, Body: strings.Repeat("x", servertest.TooLarge)}).Message(t, http.StatusRequestEntityTooLarge)
		s.Get("/api/v2/vault/list").Message(t, http.StatusTooManyRequests)
	}
	if n := entries() - before; n != 1 {
		t.Errorf("%d entries of 40 requests over the rate", n)
	}
}

// What takes a core for long counts like all else for the tenant that asks for
// it, and is not begun for one over its rate. A neighbour does not pay.
func TestSealingAndBackupsCountForWhoAsks(t *testing.T) {
	s := newService(t)
	m := s.Manifest(t, "shop", "db", servertest.Canary)
	reseal := servertest.Request{Method: "POST", Path: "/api/v2/sealing-key/reseal", Body: servertest.Marshal(t, m)}
	check := servertest.Request{Method: "POST", Path: "/api/v2/sealing-key/check", Body: servertest.Marshal(t, map[string]any{
		"namespace": "shop", "name": "db", "credential_type": "database", "sealed": m.Sealed,
	})}
	ofSystem := []servertest.Request{
		{Method: "GET", Path: "/api/v2/system/sealing-keys"}, {Method: "POST", Path: "/api/v2/system/sealing-keys/rotate"},
		{Method: "POST", Path: "/api/v2/system/sealing-keys/" + m.Sealed.KeyId + "/restore"}, {Method: "POST", Path: "/api/v2/system/backup", Body: servertest.BackupBody(t)},
		{Method: "GET", Path: "/api/v2/system/audit/export"},
		{Method: "POST", Path: "/api/v2/system/sealing-keys/" + m.Sealed.KeyId + "/retire"},
	}
	operator, neighbour := s.GrantKeyIn(authz.SystemTenant, authz.SystemAdmin), s.GrantKeyIn(s.Stranger().Tenant, authz.VaultWrite)
	another := s.GrantKey(authz.VaultWrite) // of the same tenant
	for _, tenant := range []authz.TenantID{s.Tenant, s.Stranger().Tenant} {
		limits := "/api/v2/system/tenants/" + string(tenant) + "/limits"
		s.Call(servertest.Request{Method: "PUT", Path: limits, Key: operator, Body: `{"v2":3}`}).Want(t, http.StatusOK)
	}
	as := func(key string, r servertest.Request, want int) {
		t.Helper()
		r.Key = key
		before := len(s.AllEntries(1))
		if got := s.Call(r); got.Status != want {
			t.Errorf("%s %s: %d, want %d: %s", r.Method, r.Path, got.Status, want, got.Body)
		}
		left := s.AllEntries(1)[before:]
		if want == http.StatusTooManyRequests && len(left) > 0 && left[0].EventType != audit.RateLimited {
			t.Errorf("%s %s over the rate left %v", r.Method, r.Path, servertest.Summaries(left))
		}
	}
	for _, r := range []servertest.Request{reseal, check, reseal} {
		as(another, r, http.StatusOK)
	}
	for _, key := range []string{another, s.Key} {
		for _, r := range []servertest.Request{reseal, check, {Method: "GET", Path: "/api/v2/vault/x?version=1"}} {
			as(key, r, http.StatusTooManyRequests)
		}
	}
	for _, r := range []servertest.Request{check, reseal, check} {
		as(neighbour, r, http.StatusOK)
	}
	as(neighbour, check, http.StatusTooManyRequests)
	for i, r := range ofSystem {
		r.Key = operator
		got := s.Call(r)
		if got.Status >= 300 || got.Header.Get("X-RateLimit-Limit") != strconv.Itoa(servertest.Plenty) ||
			got.Header.Get("X-RateLimit-Remaining") != strconv.Itoa(servertest.Plenty-3-i) {
			t.Errorf("%s %s: %d, %v", r.Method, r.Path, got.Status, got.Header)
		}
	}
}

func TestRegistrationsHaveARateOfTheirOwn(t *testing.T) {
	s := newService(t, func(c *server.Config) { c.Limits.Registrations = 2 })
	for i, want := range []int{http.StatusCreated, http.StatusCreated, http.StatusTooManyRequests} {
		r := s.Call(servertest.Request{Method: "POST", Path: "/api/v2/auth/register", Body: servertest.Marshal(t, map[string]string{
			"email": fmt.Sprintf("u%d@example.org", i), "password": servertest.Password, "tenant_name": "T",
		})})
		if r.Status != want || r.Header.Get("X-RateLimit-Limit") != "2" {
			t.Errorf("registration %d: %d, limit %s", i, r.Status, r.Header.Get("X-RateLimit-Limit"))
		}
	}
	s.Login("u0@example.org", servertest.Password)
}

func TestOnlyXForwardedForOfATrustedProxyIsBelieved(t *testing.T) {
	for _, c := range []struct {
		name    string
		trusted []string
		header  http.Header
		want    string
	}{
		{"no proxy", nil, http.Header{"X-Forwarded-For": {"203.0.113.1"}, "X-Real-Ip": {"203.0.113.2"}}, "127.0.0.1"},
		{"proxy", []string{"127.0.0.1"}, http.Header{"X-Forwarded-For": {"203.0.113.1"}}, "203.0.113.1"},
		{"a chain", []string{"127.0.0.1"}, http.Header{"X-Forwarded-For": {"198.51.100.1, 203.0.113.1"}}, "203.0.113.1"},
		{"another header", []string{"127.0.0.1"}, http.Header{"X-Real-Ip": {"203.0.113.2"}, "Forwarded": {"for=203.0.113.3"}}, "127.0.0.1"},
	} {
		s := newService(t, func(config *server.Config) { config.TrustedProxies = c.trusted })
		s.Call(servertest.Request{Method: "GET", Path: "/api/v2/vault/list", Key: s.Key, Header: c.header}).Want(t, http.StatusOK)
		if got := s.Entries("event_type=CREDENTIAL_LISTED")[0]["source_ip"]; got != c.want {
			t.Errorf("%s: %v", c.name, got)
		}
	}
}

// A header that names nobody is no reason to trust the cookies beside it.
func TestAJunkHeaderDoesNotExcuseACrossOriginCookie(t *testing.T) {
	s := newService(t)
	user := s.Register("a@example.org")
	header := servertest.Cookies("refreshToken", user.Refresh)
	header.Set("Authorization", "Bearer x")
	header.Set("Origin", "https://evil.example")
	header.Set("Sec-Fetch-Site", "cross-site")
	s.Call(servertest.Request{Method: "POST", Path: "/api/v2/auth/refresh", Header: header}).Message(t, http.StatusForbidden)
}
