package server

import (
	"net/http"
	"strconv"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/identity"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/vault"
)

// What is refused to a ServiceAccount is its own affair: it takes nothing of its tenant's rate, and fills no log.
func TestAServiceAccountThatMayNothingSpendsNothingOfItsTenant(t *testing.T) {
	const few, rate = 5, 8
	s := newService(t, func(c *Config) { c.Rates.V2, c.Rates.Address = rate, few })
	p := s.newPods(s.tenant)
	otherToken := podToken("other")
	p.accounts[otherToken] = identity.ServiceAccount{Cluster: "cluster", Namespace: "shop", NamespaceUID: "shop-uid", Name: "other", UID: "account-other"}
	for token := range p.accounts {
		p.known[token] = true
	}
	refused := func() []request {
		return []request{
			{method: "GET", path: "/api/v2/vault/list"}, {method: "GET", path: "/api/v2/vault/" + authz.NewID("cred")},
			{method: "POST", path: "/api/v2/vault/seal", body: "{"}, {method: "GET", path: "/api/v2/members"},
			{method: "POST", path: "/api/v2/sealing-key/check", body: "{"}, // before it is known where
		}
	}
	entries := func() int { // which takes one of the tenant's rate
		answer := s.call(request{method: "GET", path: "/api/v2/audit/logs?limit=100&user_id=account-shop", key: s.key}).want(t, http.StatusOK)
		return len(answer["entries"].([]any))
	}
	for _, r := range refused() {
		r.bearer = shopToken
		if got := s.call(r); got.status != http.StatusForbidden && got.status != http.StatusBadRequest {
			t.Errorf("%s %s: %d", r.method, r.path, got.status)
		} else if got.header.Get("X-RateLimit-Limit") != strconv.Itoa(few) {
			t.Errorf("%s %s: of %s", r.method, r.path, got.header.Get("X-RateLimit-Limit"))
		}
	}
	for _, r := range refused() { // its own bucket is empty, and nothing is asked
		r.bearer = shopToken
		p.takeAsked()
		s.call(r).message(t, http.StatusTooManyRequests)
		if asked := p.takeAsked(); len(asked) != 0 {
			t.Errorf("asked %q", asked)
		}
	}
	if n := entries(); n != few+1 { // and that it was over its rate
		t.Errorf("%d entries", n)
	}
	// The tenant has all that it had but that query, and another account too.
	p.set(all)
	for i := range rate - 1 {
		r := s.call(request{method: "GET", path: "/api/v2/vault/list", bearer: otherToken})
		if left := r.header.Get("X-RateLimit-Remaining"); r.status != http.StatusOK || left != strconv.Itoa(rate-2-i) {
			t.Errorf("%d: %d, %s left", i, r.status, left)
		}
	}
	s.call(request{method: "GET", path: "/api/v2/vault/list", bearer: otherToken}).message(t, http.StatusTooManyRequests)
	s.get("/api/v2/vault/list").message(t, http.StatusTooManyRequests)

	s.clock.advance(time.Minute)
	p.set(nothing)
	for range few - 1 {
		s.call(request{method: "GET", path: "/api/v2/vault/list", bearer: shopToken}).message(t, http.StatusForbidden)
	}
	if n := entries(); n != few+2 { // the same refusal is recorded once
		t.Errorf("%d entries", n)
	}
}

// Pods of two namespaces of one tenant do not reach each other's objects.
func TestAPodReachesNoObjectOfAnotherNamespaceOfItsTenant(t *testing.T) {
	s := newService(t)
	p := s.newPods(s.tenant)
	p.set(all)
	if err := s.identity.MapNamespace(t.Context(), "cluster", "new", "new-uid", s.tenant); err != nil {
		t.Fatal(err)
	}
	operator := authz.Principal{Tenant: s.tenant, Kind: authz.Operator, ID: "object-uid", Scopes: authz.TenantScopes()}
	o, err := s.vault.Apply(t.Context(), operator, operator.ID, 0, vault.Desired{
		Name: "db", Type: "database", TTLDays: 30, Values: map[string]secret.Bytes{"k": secret.Bytes("v")},
		Object: vault.Object{Cluster: "cluster", Namespace: "shop", Name: "db"},
	})
	if err != nil {
		t.Fatal(err)
	}
	body := `{"name":"db","credential_type":"t","values":{"k":"shadow"}}`
	shadow := s.call(request{method: "POST", path: "/api/v2/vault/seal", bearer: newToken, body: body}).want(t, http.StatusCreated)["credential_id"]
	for token, want := range map[string]any{shopToken: o.ID, newToken: shadow} {
		if got := s.call(request{method: "GET", path: "/api/v2/vault/by-name/db", bearer: token}).want(t, http.StatusOK)["credential_id"]; got != want {
			t.Errorf("by name %v, want %v", got, want)
		}
	}
	s.call(request{method: "GET", path: "/api/v2/vault/" + o.ID, bearer: shopToken}).want(t, http.StatusOK)
	for _, path := range []string{"", "/versions"} {
		path = "/api/v2/vault/" + o.ID + path
		if got, none := s.call(request{method: "GET", path: path, bearer: newToken}).message(t, http.StatusForbidden),
			s.call(request{method: "GET", path: "/api/v2/vault/" + authz.NewID("cred"), bearer: newToken}).message(t, http.StatusForbidden); got != none {
			t.Errorf("%s: %q, and of none %q", path, got, none)
		}
	}
	for token, want := range map[string]int{shopToken: 2, newToken: 1} {
		if got := s.call(request{method: "GET", path: "/api/v2/vault/list", bearer: token}).want(t, http.StatusOK)["credentials"].([]any); len(got) != want {
			t.Errorf("%d are listed, want %d", len(got), want)
		}
	}
}
