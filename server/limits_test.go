package server

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
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
			r := s.call(request{method: "POST", path: path, body: body(16<<10 + 1), chunked: chunked})
			r.message(t, http.StatusRequestEntityTooLarge)
			if r := s.call(request{method: "POST", path: path, body: body(16 << 10), chunked: chunked}); r.status == http.StatusRequestEntityTooLarge {
				t.Errorf("%s refuses 16 KiB", path)
			}
		}
	}
}

func TestACallerOverItsRateFillsNoLog(t *testing.T) {
	s := newService(t)
	s.call(request{method: "PUT", path: "/api/v2/system/tenants/" + string(s.tenant) + "/limits", key: s.systemKey(), body: `{"v2":2}`}).want(t, http.StatusOK)
	entries := func() uint64 {
		t.Helper()
		report, err := audit.VerifyStore(t.Context(), s.store, audit.Options{})
		if err != nil {
			t.Fatal(err)
		}
		return report.Entries
	}
	s.get("/api/v2/vault/list")
	s.get("/api/v2/vault/list")
	before := entries()
	for range 20 {
		s.call(request{method: "POST", path: "/api/v2/vault/seal", key: s.key, body: strings.Repeat("x", tooLarge)}).message(t, http.StatusRequestEntityTooLarge)
		s.get("/api/v2/vault/list").message(t, http.StatusTooManyRequests)
	}
	if n := entries() - before; n != 1 {
		t.Errorf("%d entries of 40 requests over the rate", n)
	}
}

// What takes a core for long counts like all else for the tenant that asks for
// it, and is not begun for one over its rate. A neighbour does not pay.
func TestSealingAndBackupsCountForWhoAsks(t *testing.T) {
	s := newService(t)
	m := s.manifest(t, "shop", "db", canary)
	reseal := request{method: "POST", path: "/api/v2/sealing-key/reseal", body: marshal(t, m)}
	check := request{method: "POST", path: "/api/v2/sealing-key/check", body: marshal(t, map[string]any{
		"namespace": "shop", "name": "db", "credential_type": "database", "sealed": m.Sealed,
	})}
	ofSystem := []request{
		{method: "GET", path: "/api/v2/system/sealing-keys"}, {method: "POST", path: "/api/v2/system/sealing-keys/rotate"},
		{method: "POST", path: "/api/v2/system/sealing-keys/" + m.Sealed.KeyId + "/restore"}, {method: "POST", path: "/api/v2/system/backup", body: backupBody(t)},
		{method: "GET", path: "/api/v2/system/audit/export"},
		{method: "POST", path: "/api/v2/system/sealing-keys/" + m.Sealed.KeyId + "/retire"},
	}
	operator, neighbour := s.grantIn(authz.SystemTenant, authz.SystemAdmin), s.grantIn(s.stranger().Tenant, authz.VaultWrite)
	another := s.grant(authz.VaultWrite) // of the same tenant
	for _, tenant := range []authz.TenantID{s.tenant, s.stranger().Tenant} {
		limits := "/api/v2/system/tenants/" + string(tenant) + "/limits"
		s.call(request{method: "PUT", path: limits, key: operator, body: `{"v2":3}`}).want(t, http.StatusOK)
	}
	as := func(key string, r request, want int) {
		t.Helper()
		r.key = key
		before := len(s.records(1))
		if got := s.call(r); got.status != want {
			t.Errorf("%s %s: %d, want %d: %s", r.method, r.path, got.status, want, got.body)
		}
		left := s.records(1)[before:]
		if want == http.StatusTooManyRequests && len(left) > 0 && left[0].EventType != audit.RateLimited {
			t.Errorf("%s %s over the rate left %v", r.method, r.path, summary(left))
		}
	}
	for _, r := range []request{reseal, check, reseal} {
		as(another, r, http.StatusOK)
	}
	for _, key := range []string{another, s.key} {
		for _, r := range []request{reseal, check, {method: "GET", path: "/api/v2/vault/x?version=1"}} {
			as(key, r, http.StatusTooManyRequests)
		}
	}
	for _, r := range []request{check, reseal, check} {
		as(neighbour, r, http.StatusOK)
	}
	as(neighbour, check, http.StatusTooManyRequests)
	for i, r := range ofSystem {
		r.key = operator
		got := s.call(r)
		if got.status >= 300 || got.header.Get("X-RateLimit-Limit") != strconv.Itoa(plenty) ||
			got.header.Get("X-RateLimit-Remaining") != strconv.Itoa(plenty-3-i) {
			t.Errorf("%s %s: %d, %v", r.method, r.path, got.status, got.header)
		}
	}
}

func TestRegistrationsHaveARateOfTheirOwn(t *testing.T) {
	s := newService(t, func(c *Config) { c.Rates.Registrations = 2 })
	for i, want := range []int{http.StatusCreated, http.StatusCreated, http.StatusTooManyRequests} {
		r := s.call(request{method: "POST", path: "/api/v2/auth/register", body: marshal(t, map[string]string{
			"email": fmt.Sprintf("u%d@example.org", i), "password": testPassword, "tenant_name": "T",
		})})
		if r.status != want || r.header.Get("X-RateLimit-Limit") != "2" {
			t.Errorf("registration %d: %d, limit %s", i, r.status, r.header.Get("X-RateLimit-Limit"))
		}
	}
	s.login("u0@example.org", testPassword)
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
		s := newService(t, func(config *Config) { config.TrustedProxies = c.trusted })
		s.call(request{method: "GET", path: "/api/v2/vault/list", key: s.key, header: c.header}).want(t, http.StatusOK)
		if got := s.entries("event_type=CREDENTIAL_LISTED")[0]["source_ip"]; got != c.want {
			t.Errorf("%s: %v", c.name, got)
		}
	}
}

// A header that names nobody is no reason to trust the cookies beside it.
func TestAJunkHeaderDoesNotExcuseACrossOriginCookie(t *testing.T) {
	s := newService(t)
	user := s.register("a@example.org")
	header := cookies("refreshToken", user.refresh)
	header.Set("Authorization", "Bearer x")
	header.Set("Origin", "https://evil.example")
	header.Set("Sec-Fetch-Site", "cross-site")
	s.call(request{method: "POST", path: "/api/v2/auth/refresh", header: header}).message(t, http.StatusForbidden)
}
