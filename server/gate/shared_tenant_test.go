package gate_test

import (
	"net/http"
	"strconv"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/identity"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/vault"
	"github.com/latticekeep/latticekeep/server"
	"github.com/latticekeep/latticekeep/test/servertest"
)

// What is refused to a ServiceAccount is its own affair: it takes nothing of its tenant's rate, and fills no log.
func TestAServiceAccountThatMayNothingSpendsNothingOfItsTenant(t *testing.T) {
	const few, rate = 5, 8
	s := newService(t, func(c *server.Config) { c.Limits.V2, c.Limits.Address = rate, few })
	p := s.UsePods(s.Tenant)
	otherToken := servertest.PodToken("other")
	p.Accounts[otherToken] = identity.ServiceAccount{Cluster: "cluster", Namespace: "shop", NamespaceUID: "shop-uid", Name: "other", UID: "account-other"}
	for token := range p.Accounts {
		p.Known[token] = true
	}
	refused := func() []servertest.Request {
		return []servertest.Request{
			{Method: "GET", Path: "/api/v2/vault/list"}, {Method: "GET", Path: "/api/v2/vault/" + authz.NewID("cred")},
			{Method: "POST", Path: "/api/v2/vault/seal", Body: "{"}, {Method: "GET", Path: "/api/v2/members"},
			{Method: "POST", Path: "/api/v2/sealing-key/check", Body: "{"}, // before it is known where
		}
	}
	entries := func() int { // which takes one of the tenant's rate
		answer := s.Call(servertest.Request{Method: "GET", Path: "/api/v2/audit/logs?limit=100&user_id=account-shop", Key: s.Key}).Want(t, http.StatusOK)
		return len(answer["entries"].([]any))
	}
	for _, r := range refused() {
		r.Bearer = servertest.ShopToken
		if got := s.Call(r); got.Status != http.StatusForbidden && got.Status != http.StatusBadRequest {
			t.Errorf("%s %s: %d", r.Method, r.Path, got.Status)
		} else if got.Header.Get("X-RateLimit-Limit") != strconv.Itoa(few) {
			t.Errorf("%s %s: of %s", r.Method, r.Path, got.Header.Get("X-RateLimit-Limit"))
		}
	}
	for _, r := range refused() { // its own bucket is empty, and nothing is asked
		r.Bearer = servertest.ShopToken
		p.TakeAsked()
		s.Call(r).Message(t, http.StatusTooManyRequests)
		if asked := p.TakeAsked(); len(asked) != 0 {
			t.Errorf("asked %q", asked)
		}
	}
	if n := entries(); n != few+1 { // and that it was over its rate
		t.Errorf("%d entries", n)
	}
	// The tenant has all that it had but that query, and another account too.
	p.Allow(servertest.AllowAll)
	for i := range rate - 1 {
		r := s.Call(servertest.Request{Method: "GET", Path: "/api/v2/vault/list", Bearer: otherToken})
		if left := r.Header.Get("X-RateLimit-Remaining"); r.Status != http.StatusOK || left != strconv.Itoa(rate-2-i) {
			t.Errorf("%d: %d, %s left", i, r.Status, left)
		}
	}
	s.Call(servertest.Request{Method: "GET", Path: "/api/v2/vault/list", Bearer: otherToken}).Message(t, http.StatusTooManyRequests)
	s.Get("/api/v2/vault/list").Message(t, http.StatusTooManyRequests)

	s.Clock.Advance(time.Minute)
	p.Allow(servertest.AllowNothing)
	for range few - 1 {
		s.Call(servertest.Request{Method: "GET", Path: "/api/v2/vault/list", Bearer: servertest.ShopToken}).Message(t, http.StatusForbidden)
	}
	if n := entries(); n != few+2 { // the same refusal is recorded once
		t.Errorf("%d entries", n)
	}
}

// Pods of two namespaces of one tenant do not reach each other's objects.
func TestAPodReachesNoObjectOfAnotherNamespaceOfItsTenant(t *testing.T) {
	s := newService(t)
	p := s.UsePods(s.Tenant)
	p.Allow(servertest.AllowAll)
	if err := s.Identity.MapNamespace(t.Context(), "cluster", "new", "new-uid", s.Tenant); err != nil {
		t.Fatal(err)
	}
	operator := authz.Principal{Tenant: s.Tenant, Kind: authz.Operator, ID: "object-uid", Scopes: authz.TenantScopes()}
	o, err := s.Vault.Apply(t.Context(), operator, operator.ID, 0, vault.Desired{
		Name: "db", Type: "database", TTLDays: 30, Values: map[string]secret.Bytes{"k": secret.Bytes("v")},
		Object: vault.Object{Cluster: "cluster", Namespace: "shop", Name: "db"},
	})
	if err != nil {
		t.Fatal(err)
	}
	body := `{"name":"db","credential_type":"t","values":{"k":"shadow"}}`
	shadow := s.Call(servertest.Request{Method: "POST", Path: "/api/v2/vault/seal", Bearer: servertest.NewToken, Body: body}).Want(t, http.StatusCreated)["credential_id"]
	for token, want := range map[string]any{servertest.ShopToken: o.ID, servertest.NewToken: shadow} {
		if got := s.Call(servertest.Request{Method: "GET", Path: "/api/v2/vault/by-name/db", Bearer: token}).Want(t, http.StatusOK)["credential_id"]; got != want {
			t.Errorf("by name %v, want %v", got, want)
		}
	}
	s.Call(servertest.Request{Method: "GET", Path: "/api/v2/vault/" + o.ID, Bearer: servertest.ShopToken}).Want(t, http.StatusOK)
	for _, path := range []string{"", "/versions"} {
		path = "/api/v2/vault/" + o.ID + path
		if got, none := s.Call(servertest.Request{Method: "GET", Path: path, Bearer: servertest.NewToken}).Message(t, http.StatusForbidden),
			s.Call(servertest.Request{Method: "GET", Path: "/api/v2/vault/" + authz.NewID("cred"), Bearer: servertest.NewToken}).Message(t, http.StatusForbidden); got != none {
			t.Errorf("%s: %q, and of none %q", path, got, none)
		}
	}
	for token, want := range map[string]int{servertest.ShopToken: 2, servertest.NewToken: 1} {
		if got := s.Call(servertest.Request{Method: "GET", Path: "/api/v2/vault/list", Bearer: token}).Want(t, http.StatusOK)["credentials"].([]any); len(got) != want {
			t.Errorf("%d are listed, want %d", len(got), want)
		}
	}
}
