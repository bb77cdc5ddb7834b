package server_test

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/server"
	"github.com/latticekeep/latticekeep/test/servertest"
)

func (s *service) scrape(key string) servertest.Reply {
	s.T.Helper()
	return s.Call(servertest.Request{Method: "GET", Path: "/metrics", Key: key})
}

func TestMetricsOfTheInterfaceTakeAScopeOfTheirOwn(t *testing.T) {
	s := newService(t)
	for _, key := range []string{"", "lk_live_x"} {
		r := s.scrape(key)
		r.Message(t, http.StatusUnauthorized)
		if !slices.Equal(r.Header.Values("WWW-Authenticate"), challenge(false)) {
			t.Errorf("%q: %q", key, r.Header.Values("WWW-Authenticate"))
		}
	}
	keys := map[string]string{"all of a tenant": s.Key, "the system's": s.SystemKey()}
	for _, scope := range authz.Scopes() {
		if scope != authz.MetricsRead {
			keys[string(scope)] = s.GrantKeyIn(authz.SystemTenant, scope)
		}
	}
	for name, key := range keys {
		r := s.scrape(key)
		r.Message(t, http.StatusForbidden)
		if got := r.Header.Get("WWW-Authenticate"); !strings.HasSuffix(got, `error="insufficient_scope", scope="metrics:read"`) {
			t.Errorf("%s: %q", name, got)
		}
	}
	before := s.NextSequence()
	s.scrape(s.SystemKey()).Message(t, http.StatusForbidden)
	reader := s.GrantKeyIn(authz.SystemTenant, authz.MetricsRead)
	for range 3 {
		r := s.scrape(reader)
		if r.Status != http.StatusOK || !strings.HasPrefix(r.Header.Get("Content-Type"), "text/plain;") || !strings.Contains(string(r.Body), "\nlatticekeep_build_info") {
			t.Errorf("%d %.200s", r.Status, r.Body)
		}
	}
	var left []string
	for _, e := range s.AllEntries(before) {
		left = append(left, fmt.Sprintf("%s %s", e.EventType, e.Outcome))
	}
	if want := []string{"API_KEY_CREATED success", "METRICS_READ denied", "API_KEY_CREATED success"}; !slices.Equal(left, want) {
		t.Errorf("entries %q, want %q: a scrape leaves none", left, want)
	}
	s.scrape(reader+"x").Message(t, http.StatusUnauthorized)
	s.Call(servertest.Request{Method: "GET", Path: "/metrics?sort=name", Key: reader}).Message(t, http.StatusBadRequest)
	s.LoseEntries() // the metrics are served still, since they show it
	if r := s.scrape(reader); r.Status != http.StatusOK {
		t.Errorf("while the log is halted: %d %s", r.Status, r.Body)
	}
	s.Audit.Halt(nil)
	if e := s.AllEntries(before); slices.ContainsFunc(e, func(e audit.Entry) bool { return e.EventType == audit.MetricsRead && e.Outcome == audit.Success }) {
		t.Error("a scrape left an entry")
	}
}

// Every route of both contracts by a key that may read metrics: what takes no scope is open to it,
// and nothing else.
func TestAKeyForMetricsOpensNothingElse(t *testing.T) {
	s := newService(t)
	reader := keyPrincipal("a key for metrics", s.GrantKeyIn(authz.SystemTenant, authz.MetricsRead), "metrics:read")
	for name, o := range operations(t) {
		want := reader.wants(o)
		if want == 0 {
			want = http.StatusUnsupportedMediaType
			if rule := strings.TrimSuffix(access[name], "!"); rule != "public" && rule != "any" {
				t.Errorf("the table lets it into %s", name)
			}
		}
		if r := s.probe(o, reader); r.Status != want {
			t.Errorf("%s: %d, want %d: %s", name, r.Status, want, r.Body)
		}
	}
}

// The metrics tell of all tenants, so no tenant can read them.
func TestNoTenantIsGivenTheMetrics(t *testing.T) {
	s := newService(t)
	owner := s.Register("owner@example.org")
	body := `{"name":"prometheus","scopes":["metrics:read"]}`
	s.Call(servertest.Request{Method: "POST", Path: "/api/v2/auth/verify-email", Body: servertest.Marshal(t, fields{"token": s.TokenMailedTo(owner.Email, 1)})}).Want(t, http.StatusOK)
	for name, r := range map[string]servertest.Request{
		"a key of all scopes": {Key: s.Key, Path: "/api/v2/api-keys"}, "an owner": {Bearer: owner.Access, Path: "/api/v2/api-keys"},
		"the system's key, for a tenant": {Key: s.SystemKey(), Path: "/api/v2/system/tenants/" + string(s.Tenant) + "/api-keys"},
		"a key of the system without it": {Key: s.GrantKeyIn(authz.SystemTenant, authz.AccountAdmin), Path: "/api/v2/api-keys"},
	} {
		r.Method, r.Body = "POST", body
		if got := s.Call(r); got.Status != http.StatusForbidden {
			t.Errorf("%s: %d %s", name, got.Status, got.Body)
		}
	}
	// The system key of an earlier release lacks the scope, and may grant it.
	made := s.Call(servertest.Request{Method: "POST", Path: "/api/v2/api-keys", Key: s.SystemKey(), Body: body}).Want(t, http.StatusCreated)
	if r := s.scrape(made["api_key"].(string)); r.Status != http.StatusOK {
		t.Errorf("%d %s", r.Status, r.Body)
	}
}

func TestMetricsOfTheOperationsListenerAreFree(t *testing.T) {
	s := newService(t, func(c *server.Config) { c.OperationsApart = true })
	operations, _ := operate(t, s)
	if code, metrics := servertest.GetStatus(t, operations+"/metrics?any=parameter"); code != http.StatusOK || !strings.Contains(metrics, "\nlatticekeep_build_info") {
		t.Error(code, metrics)
	}
	if code, body := servertest.GetStatus(t, s.URL+"/metrics"); code != http.StatusNotFound {
		t.Errorf("on the listener of the interface: %d %s", code, body)
	}
}
