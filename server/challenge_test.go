package server_test

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/test/servertest"
)

// challenge is what a 401 says of how to authenticate, the same for every credential that is wrong.
func challenge(v1 bool) []string {
	if v1 {
		return []string{`Bearer realm="latticekeep"`}
	}
	return []string{`Bearer realm="latticekeep"`, `ApiKey realm="latticekeep", header="X-API-Key"`}
}

func TestEvery401SaysHowToAuthenticateAndNothingElse(t *testing.T) {
	s := newService(t)
	owner := s.Register("owner@example.org")
	revoked := s.GrantKey(authz.AuditRead)
	for _, k := range s.Get("/api/v2/api-keys").Want(t, http.StatusOK)["api_keys"].([]any) {
		if k := k.(fields); fmt.Sprint(k["scopes"]) == "[audit:read]" {
			s.Delete("/api/v2/api-keys/"+k["key_id"].(string)).Want(t, http.StatusOK)
		}
	}
	last := s.Key[len(s.Key)-1:]
	nearly := s.Key[:len(s.Key)-1] + map[bool]string{true: "b", false: "a"}[last == "a"]
	s.Clock.Advance(31 * time.Minute)
	all := operations(t)
	for place, name := range slices.Sorted(maps.Keys(all)) {
		o := all[name]
		if access[name] == "public" || access[name] == "refresh" || name == "v2 logout" {
			continue
		}
		for i, header := range []http.Header{
			{}, {"Authorization": {"Bearer " + nearly}}, {"Authorization": {"Bearer " + revoked}}, {"Authorization": {"Bearer " + owner.Access}},
			{"Authorization": {"Basic eDp5"}}, {"Authorization": {"Bearer " + s.Key, "Bearer " + s.Key}}, {"X-API-Key": {nearly}}, {"X-API-Key": {revoked}},
			{"X-API-Key": {s.Key}, "Authorization": {"Bearer " + owner.Access}}, {"Cookie": {"accessToken=" + owner.Access}},
			map[bool]http.Header{true: {"X-API-Key": {s.Key}}, false: {"Authorization": {"Bearer " + s.Key}}}[o.v1()], // in the header of the other version
		} {
			if o.v1() && len(header) == 2 {
				continue // version 1 reads one of them
			}
			if !chosen(place, i) {
				continue
			}
			r := s.Call(servertest.Request{Method: o.method, Path: o.at("x"), Header: header})
			if r.Status != http.StatusUnauthorized || !slices.Equal(r.Header.Values("WWW-Authenticate"), challenge(o.v1())) {
				t.Errorf("%s, %d: %d, %q", name, i, r.Status, r.Header.Values("WWW-Authenticate"))
			}
		}
	}
	for _, path := range []string{"login", "refresh", "logout"} {
		r := servertest.Request{Method: "POST", Path: "/api/v2/auth/" + path}
		if path == "login" {
			r.Body = `{"email":"owner@example.org","password":"wrong"}`
		}
		if r := s.Call(r); r.Status != http.StatusUnauthorized || !slices.Equal(r.Header.Values("WWW-Authenticate"), challenge(false)) {
			t.Errorf("%s: %d, %q", path, r.Status, r.Header.Values("WWW-Authenticate"))
		}
	}
	if r := s.Get("/api/v2/vault/list"); r.Header.Values("WWW-Authenticate") != nil {
		t.Errorf("%d has %q", r.Status, r.Header.Values("WWW-Authenticate"))
	}
}

// Every route by a key of every other scope: the one that is missing is named, and in the vault
// nothing.
func TestA403NamesTheMissingScopeOutsideTheVault(t *testing.T) {
	s := newService(t)
	all := operations(t)
	keys := make(map[string]string)
	for _, scope := range strings.Fields(servertest.EveryScope) {
		keys[scope] = s.GrantKey(authz.Scope(scope))
	}
	for place, name := range slices.Sorted(maps.Keys(all)) {
		o := all[name]
		rule := strings.TrimPrefix(strings.TrimSuffix(access[name], "!"), "user+")
		if !strings.Contains(rule, ":") {
			continue
		}
		for i, scope := range slices.Sorted(maps.Keys(keys)) {
			if scope == rule || !chosen(place, i) {
				continue
			}
			r := servertest.Request{Method: o.method, Path: o.at("x")}
			apiKey(o, &r, keys[scope])
			got := s.Call(r)
			want := []string{`Bearer realm="latticekeep", error="insufficient_scope", scope="` + rule + `"`}
			if slices.Contains(o.Tags, "vault") {
				want = nil
			}
			if got.Status != http.StatusForbidden || !slices.Equal(got.Header.Values("WWW-Authenticate"), want) {
				t.Errorf("%s by %s: %d, %q", name, scope, got.Status, got.Header.Values("WWW-Authenticate"))
			}
		}
	}
	// A caller who holds the scope is refused for something else.
	owner := s.Register("owner@example.org")
	s.Clock.Advance(15 * 24 * time.Hour)
	owner = s.Login(owner.Email, owner.Password)
	for _, r := range []servertest.Request{
		{Method: "POST", Path: "/api/v2/auth/change-password", Key: s.Key}, // only users have a password
		{Method: "POST", Path: "/api/v2/keys", Bearer: owner.Access},       // the trial has ended
		{Method: "POST", Path: "/api/v2/keys", Header: http.Header{"Cookie": {"accessToken=" + owner.Access}, "Sec-Fetch-Site": {"cross-site"}}},
	} {
		if got := s.Call(r); got.Status != http.StatusForbidden || got.Header.Values("WWW-Authenticate") != nil {
			t.Errorf("%s: %d, %q", r.Path, got.Status, got.Header.Values("WWW-Authenticate"))
		}
	}
}

// The whole answer of the vault, headers included, does not tell a missing scope from a credential
// that is not there.
func TestTheVaultsRefusalIsTheSameForAMissingScope(t *testing.T) {
	s := newService(t)
	there, deleted := s.Seal("v"), s.Seal("v")
	s.Delete("/api/v2/vault/"+deleted).Want(t, http.StatusOK)
	weak := s.GrantKey(authz.AuditRead)
	for _, o := range []struct{ method, path, body string }{
		{"GET", "/api/v2/vault/%s", ""}, {"DELETE", "/api/v2/vault/%s", ""}, {"PUT", "/api/v2/vault/%s", `{"values":{"k":"v"}}`},
		{"POST", "/api/v2/vault/rotate/%s", ""}, {"GET", "/api/v2/vault/%s/versions", ""}, {"GET", "/api/v2/vault/%s/metadata", ""}, {"GET", "/api/v2/vault/by-name/%s", ""},
	} {
		request := func(key, id string) servertest.Request {
			return servertest.Request{Method: o.method, Path: fmt.Sprintf(o.path, id), Key: key, Body: o.body}
		}
		s.WantIndistinct(t, o.method+" "+o.path, http.StatusForbidden, map[string]servertest.Request{
			"no scope": request(weak, there), "no scope, not there": request(weak, deleted),
			"deleted": request(s.Key, deleted), "never": request(s.Key, authz.NewID("cred")), "malformed": request(s.Key, "x"),
		})
	}
}
