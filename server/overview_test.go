package server_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/diagnosis"
	"github.com/latticekeep/latticekeep/server"
	"github.com/latticekeep/latticekeep/test/servertest"
)

const overviewPath = "/api/v2/overview"

// overview returns the overview of a user or an API key. Each leaves one entry, which names the parts.
func (s *service) overview(bearer, key string) fields {
	s.T.Helper()
	before := s.NextSequence()
	found := s.Call(servertest.Request{Method: "GET", Path: overviewPath, Bearer: bearer, Key: key}).Want(s.T, http.StatusOK)
	left := s.AllEntries(before)
	if len(left) != 1 || left[0].EventType != "ACCOUNT_READ" || left[0].Attributes["overview"] == "" {
		s.T.Errorf("an overview leaves %+v", left)
	}
	return found
}

// todo returns what waits, by kind, without failing controls, of which there are some for each framework.
func todo(overview fields) map[string]float64 {
	counts := make(map[string]float64)
	for _, one := range overview["todo"].([]any) {
		if t := one.(fields); t["kind"] != "controls_failing" {
			counts[t["kind"].(string)] = t["count"].(float64)
		}
	}
	return counts
}

// An overview says what is so, and only what the caller's scopes cover.
func TestAnOverviewSaysWhatIsSo(t *testing.T) {
	for name, open := range map[string]servertest.Open{"a file": servertest.Bolt, "PostgreSQL": servertest.Postgres} {
		t.Run(name, func(t *testing.T) { saysWhatIsSo(t, &service{servertest.StartOn(t, open)}) })
	}
}

func saysWhatIsSo(t *testing.T, s *service) {
	t.Helper()
	owner := s.Register("ada@example.org")
	access := s.Login("ada@example.org", servertest.Password).Access
	o := s.overview(access, "")
	if !maps.Equal(o["setup"].(fields), fields{"credential": false, "api_key": false, "member": false, "email": false}) ||
		!maps.Equal(todo(o), map[string]float64{"email_unverified": 1}) || o["unavailable"] != nil {
		t.Errorf("of a new tenant: %v", o)
	}
	s.Send("POST", "/api/v2/auth/verify-email", "", fields{"token": s.TokenMailedTo("ada@example.org", 1)})
	tenant := s.TenantOf(owner)
	s.Call(servertest.Request{Method: "POST", Path: "/api/v2/system/tenants/" + string(tenant) + "/activate", Key: s.SystemKey()}).Want(t, http.StatusOK)
	sealed := func(name string, days int) string {
		return s.Send("POST", "/api/v2/vault/seal", access, fields{"name": name, "credential_type": "t", "values": fields{"k": "v"}, "ttl_days": days}).Want(t, http.StatusCreated)["credential_id"].(string)
	}
	gone, read := sealed("gone", 2), sealed("read", 400)
	sealed("soon", 106)
	sealed("quiet", 400)
	s.Send("POST", "/api/v2/members/invite", access, fields{"email": "bob@example.org", "role": "auditor"}).Want(t, http.StatusCreated)
	s.Send("POST", "/api/v2/auth/accept-invitation", "", fields{"token": s.TokenMailedTo("bob@example.org", 1), "password": servertest.Password}).Want(t, http.StatusCreated)
	key := s.Send("POST", "/api/v2/api-keys", access, fields{"name": "app", "scopes": []string{"vault:read"}, "expires_in_days": 103}).Want(t, http.StatusCreated)["api_key"].(string)
	s.Send("POST", "/api/v2/keys", access, fields{"name": "orders", "rotation_period": 30}).Want(t, http.StatusCreated)
	s.Clock.Advance(60 * 24 * time.Hour)
	get := func(id, key string, want int) {
		s.Call(servertest.Request{Method: "GET", Path: "/api/v2/vault/" + id, Key: key}).Want(t, want)
	}
	get(read, key, http.StatusOK)
	s.Clock.Advance(41 * 24 * time.Hour)
	access = s.Login("ada@example.org", servertest.Password).Access
	get(read, key, http.StatusOK)
	get(gone, key, http.StatusForbidden)
	s.Clock.Advance(24 * time.Hour)
	access = s.Login("ada@example.org", servertest.Password).Access
	auditor := s.Login("bob@example.org", servertest.Password).Access
	o = s.overview(access, "")
	if !maps.Equal(todo(o), map[string]float64{"credentials_expired": 1, "credentials_expiring": 1, "api_keys_expiring": 1, "keys_overdue": 1}) {
		t.Errorf("what waits for the owner: %v", todo(o)) // whose key it was that was denied
	}
	if !maps.Equal(o["setup"].(fields), fields{"credential": true, "api_key": true, "member": true, "email": true}) {
		t.Errorf("%v", o["setup"])
	}
	c := o["credentials"].(fields)
	unread := c["unread"].(fields)
	if c["total"] != 4.0 || c["expired"] != 1.0 || c["expiring_soon"] != 1.0 || unread["count"] != 2.0 || unread["complete"] != true {
		t.Errorf("%v", c)
	}
	for _, one := range unread["credentials"].([]any) {
		if name := one.(fields)["name"]; name != "quiet" && name != "soon" {
			t.Errorf("nobody reads %v", name)
		}
	}
	days := o["activity"].(fields)["days"].([]any)
	if yesterday := days[28].(fields); len(days) != 30 || o["activity"].(fields)["complete"] != true || yesterday["secrets"] != 2.0 || yesterday["denials"] != 1.0 {
		t.Errorf("%v", days)
	}
	if scores := o["scores"].([]any); len(scores) != 9 || scores[0].(fields)["score"] == nil || scores[0].(fields)["failing"] == 0.0 {
		t.Errorf("%v", scores)
	}
	if got := todo(s.overview(auditor, "")); !maps.Equal(got, map[string]float64{"reviews_waiting": 1, "keys_overdue": 1}) {
		t.Errorf("what waits for the auditor: %v", got)
	}

	always := []string{"setup", "success", "todo"}
	for scope, parts := range map[string][]string{
		"vault:read": {"credentials"}, "audit:read": {"activity", "health", "health_at"}, "compliance:read": {"health", "health_at", "scores"},
		"keys:read": nil, "account:admin": nil, "vault:write": nil, "crypto:decrypt": nil, "audit:names": nil,
	} {
		key := s.Send("POST", "/api/v2/api-keys", access, fields{"name": scope, "scopes": []string{scope}}).Want(t, http.StatusCreated)["api_key"].(string)
		o := s.overview("", key)
		if want := slices.Sorted(slices.Values(slices.Concat(always, parts))); !slices.Equal(slices.Sorted(maps.Keys(o)), want) {
			t.Errorf("%s: %v, want %v", scope, slices.Sorted(maps.Keys(o)), want)
		}
		want := map[string]string{"vault:read": "credentials_expired credentials_expiring", "audit:read": "reviews_waiting", "keys:read": "keys_overdue", "account:admin": "api_keys_expiring"}[scope]
		got := slices.Sorted(maps.Keys(todo(o)))
		if scope == "audit:read" {
			got, want = nil, "" // the user behind the key caused the denial
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%s: %v waits", scope, got)
		}
	}
	s.VerifyLog()
}

// Of other tenants, of what policies hide and of the deployment an overview tells nothing, and a
// ServiceAccount gets none.
func TestAnOverviewTellsNothingOfOthers(t *testing.T) {
	const canary = "canary-host.example"
	s := newService(t, func(c *server.Config) {
		c.Diagnosis = func(ctx context.Context, _ ...diagnosis.Part) diagnosis.Report {
			line := diagnosis.Fail(canary, errors.New("bucket s3://"+canary+" with key local:0f1e"))
			return diagnosis.Run(ctx, canary, time.Second,
				diagnosis.Check{Part: diagnosis.Backups, Look: func(context.Context) []diagnosis.Line { return []diagnosis.Line{line} }},
				diagnosis.Check{Part: diagnosis.KMS, Look: func(context.Context) []diagnosis.Line { return []diagnosis.Line{diagnosis.Well(canary)} }},
				diagnosis.Check{Part: diagnosis.Mail, Look: func(context.Context) []diagnosis.Line { return []diagnosis.Line{line} }})
		}
	})
	owner, stranger := s.RegisterVerified("ada@example.org"), s.RegisterVerified("bob@example.org")
	s.UsePods(s.TenantOf(owner)).Allow(servertest.AllowAll)
	limited := s.Send("POST", "/api/v2/api-keys", owner.Access, fields{"name": "red", "scopes": []string{"vault:read"}}).Want(t, http.StatusCreated)
	s.policy(owner, "red/**", limited["key_id"].(string))
	seal := func(access, name string) {
		s.Send("POST", "/api/v2/vault/seal", access, fields{"name": name, "credential_type": "t", "values": fields{"k": "v"}, "ttl_days": 3650}).Want(t, http.StatusCreated)
	}
	seal(owner.Access, "red/own")
	for i := range 7 {
		seal(owner.Access, fmt.Sprint("blue/", i))
	}
	s.Clock.Advance(100 * 24 * time.Hour)
	owner, stranger = s.Login("ada@example.org", servertest.Password), s.Login("bob@example.org", servertest.Password)
	for who, want := range map[string]struct {
		overview fields
		n        float64
	}{
		"the owner": {s.overview(owner.Access, ""), 8}, "somebody whom policies limit": {s.overview("", limited["api_key"].(string)), 1}, "another tenant": {s.overview(stranger.Access, ""), 0},
	} {
		c := want.overview["credentials"].(fields)
		unread := c["unread"].(fields)
		names := fmt.Sprint(unread["credentials"])
		if c["total"] != want.n || c["active"] != want.n || unread["count"] != want.n || want.n < 8 && strings.Contains(names, "blue") {
			t.Errorf("%s is told %v", who, c)
		}
	}
	reply := s.Call(servertest.Request{Method: "GET", Path: overviewPath, Bearer: owner.Access})
	reply.Want(t, http.StatusOK)
	if strings.Contains(string(reply.Body), "canary") || strings.Contains(string(reply.Body), "s3:") || strings.Contains(string(reply.Body), `"mail"`) {
		t.Errorf("of the deployment: %s", reply.Body)
	}
	health := map[string]string{}
	for _, one := range s.overview(owner.Access, "")["health"].([]any) {
		health[one.(fields)["part"].(string)] = one.(fields)["status"].(string)
	}
	if !maps.Equal(health, map[string]string{"chain": "unknown", "rows": "unknown", "anchors": "unknown", "kms": "ok", "backups": "failed", "certificates": "unknown"}) {
		t.Errorf("%v", health)
	}
	s.Call(servertest.Request{Method: "GET", Path: overviewPath, Bearer: servertest.ShopToken}).Want(t, http.StatusForbidden)
}

// A look at the deployment that hangs holds up no overview, and many overviews cause one look.
func TestAnOverviewDoesNotWaitForTheDeployment(t *testing.T) {
	var looks atomic.Int64
	hangs := make(chan struct{})
	s := newService(t, func(c *server.Config) {
		c.Diagnosis = func(ctx context.Context, parts ...diagnosis.Part) diagnosis.Report {
			if !slices.Equal(parts, []diagnosis.Part{diagnosis.Chain, diagnosis.Rows, diagnosis.Anchors, diagnosis.KMS, diagnosis.Backups, diagnosis.Certificates}) {
				t.Errorf("it looks at %q", parts)
			}
			looks.Add(1)
			<-hangs
			return diagnosis.Run(ctx, "v1", time.Second, diagnosis.Check{Part: diagnosis.KMS, Look: func(context.Context) []diagnosis.Line { return []diagnosis.Line{diagnosis.Well("x")} }})
		}
	})
	key := s.GrantKey(authz.AuditRead)
	status := func() string {
		o := s.overview("", key)
		one := o["health"].([]any)[3].(fields)["status"].(string)
		if _, known := o["health_at"]; known != (one != "unknown") {
			t.Errorf("%s, looked at %v", one, o["health_at"])
		}
		return one
	}
	for range 3 {
		if got := status(); got != "unknown" {
			t.Errorf("while it hangs: %s", got)
		}
	}
	close(hangs)
	if got := status(); got != "ok" {
		t.Errorf("afterwards: %s", got)
	}
	for range 5 {
		status()
	}
	if n := looks.Load(); n != 1 {
		t.Errorf("%d looks", n)
	}
}
