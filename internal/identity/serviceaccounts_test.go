package identity

import (
	"context"
	"encoding/base64"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity/apikey"
	"github.com/latticekeep/latticekeep/internal/identity/tenant"
	"github.com/latticekeep/latticekeep/internal/store"
)

// pods is a cluster that accepts every token as one account's, and allows what the test says.
type pods struct {
	account  ServiceAccount
	allow    func(verb, namespace, name string) (bool, error)
	reviewed []string // tokens
	asked    []string // verb, namespace and name
}

func (p *pods) Review(_ context.Context, token string, ask bool) (ServiceAccount, error) {
	p.reviewed = append(p.reviewed, token)
	if !ask {
		return ServiceAccount{}, fault.Unauthenticated
	}
	return p.account, nil
}

func (p *pods) Allowed(_ context.Context, _ ServiceAccount, verb, namespace, name string) (bool, error) {
	p.asked = append(p.asked, verb+" "+namespace+"/"+name)
	return p.allow(verb, namespace, name)
}

func newPods() *pods {
	return &pods{
		account: ServiceAccount{Cluster: "cluster-1", Namespace: "shop", NamespaceUID: "ns-1", Name: "app", UID: "uid-1", Pod: "pod-1"},
		allow:   func(string, string, string) (bool, error) { return true, nil },
	}
}

func jws(header string) string {
	return base64.RawURLEncoding.EncodeToString([]byte(header)) + ".e30.AA"
}

var podToken = jws(`{"alg":"RS256","kid":"k"}`)

func tenantsOf(t *testing.T, s *Service) (n int) {
	t.Helper()
	must(t, s.store.View(t.Context(), func(r store.Reader) error {
		return r.Scan(store.Prefix([]byte("tenant/")), func(_, _ []byte) bool { n++; return true })
	}))
	return n
}

func TestOnlyWhatCanBeAServiceAccountsTokenReachesTheCluster(t *testing.T) {
	s := newService(t)
	p := newPods()
	own := jws(`{"alg":"HS512","kid":"1","typ":"at+jwt"}`)
	long := base64.RawURLEncoding.EncodeToString([]byte(`{"alg":"RS256"}`)) + "." + strings.Repeat("a", 8<<10) + ".AA"
	for name, c := range map[string]struct {
		token   string
		reaches bool
	}{
		"a ServiceAccount's":      {podToken, true},
		"of another type":         {jws(`{"alg":"HS512","typ":"JWT"}`), true},
		"of another algorithm":    {jws(`{"alg":"HS256","typ":"at+jwt"}`), true},
		"ours":                    {own, false},
		"ours, in another order":  {jws(`{"typ":"at+jwt","alg":"HS512"}`), false},
		"too long":                {long, false},
		"as long as can be":       {long[:8<<10-3] + ".AA", true},
		"two parts":               {"e30.e30", false},
		"four parts":              {podToken + ".AA", false},
		"many parts":              {strings.Repeat(".", 8<<10), false},
		"a header that is a list": {jws(`[]`), false},
		"a header cut":            {jws(`{"alg":"RS256"`), false},
		"a header with padding":   {"e30=.e30.AA", false},
		"no header":               {".e30.AA", false},
		"a number as algorithm":   {jws(`{"alg":1}`), false},
		"an API key":              {apikey.Prefix + strings.Repeat("a", 52), false},
		"nothing":                 {"", false},
	} {
		s.UseCluster(nil, nil)
		if _, err := s.AuthenticateBearer(t.Context(), c.token, true); !errors.Is(err, fault.Unauthenticated) {
			t.Errorf("%s without a cluster: %v", name, err)
		}
		p.reviewed = nil
		s.UseCluster(p, nil)
		caller, err := s.AuthenticateBearer(t.Context(), c.token, true)
		if c.reaches != (len(p.reviewed) == 1) || c.reaches != (err == nil) || c.reaches != (caller.ServiceAccount != nil) {
			t.Errorf("%s: %v %v", name, p.reviewed, err)
		}
		if !c.reaches && !errors.Is(err, fault.Unauthenticated) {
			t.Errorf("%s: %v", name, err)
		}
		// The token is accepted neither as a cookie nor as a key.
		p.reviewed = nil
		for how, authenticate := range map[string]func(context.Context, string) (Caller, error){"cookie": s.AuthenticateToken, "key": s.Authenticate} {
			if _, err := authenticate(t.Context(), c.token); !errors.Is(err, fault.Unauthenticated) || len(p.reviewed) > 0 {
				t.Errorf("%s as a %s: %v %v", name, how, p.reviewed, err)
			}
		}
	}
	if _, err := s.AuthenticateBearer(t.Context(), podToken, false); !errors.Is(err, fault.Unauthenticated) {
		t.Error("the cluster was not to be asked:", err)
	}
}

func TestAUsersTokenIsNotTheClustersToJudge(t *testing.T) {
	s, p := newPeople(t), newPods()
	s.UseCluster(p, nil)
	ctx := t.Context()
	s.register("ada@example.com")
	tokens := s.signIn("ada@example.com", goodPassword)
	caller, err := s.AuthenticateBearer(ctx, tokens.Access, true)
	if err != nil || caller.Kind != authz.User || caller.ServiceAccount != nil || len(p.reviewed) > 0 {
		t.Fatal(caller, err, p.reviewed)
	}
	// The cluster is not asked what a user may do.
	if got, err := s.Permit(ctx, caller, authz.UnsealCredential, "shop", "db"); err != nil || !slices.Equal(got.Scopes, caller.Scopes) || len(p.asked) > 0 {
		t.Fatal(got, err, p.asked)
	}
}

func TestANamespaceHasATenantOnceItsPodMayDoSomething(t *testing.T) {
	s, p := newService(t), newPods()
	s.UseCluster(p, nil)
	ctx := t.Context()
	before := tenantsOf(t, s)
	p.allow = func(string, string, string) (bool, error) { return false, nil }
	for range 2 {
		caller, err := s.AuthenticateBearer(ctx, podToken, true)
		if err != nil || caller.Kind != authz.Stranger || caller.Tenant != authz.SystemTenant || caller.ID != "" || len(caller.Scopes) > 0 {
			t.Fatal(caller, err)
		}
		caller, err = s.Permit(ctx, caller, authz.UnsealCredential, "", "")
		if err != nil || caller.Kind != authz.Stranger || len(caller.Scopes) > 0 {
			t.Fatal(caller, err)
		}
	}
	down := errors.New("down")
	p.allow = func(string, string, string) (bool, error) { return true, down }
	caller, err := s.AuthenticateBearer(ctx, podToken, true)
	must(t, err)
	if got, err := s.Permit(ctx, caller, authz.UnsealCredential, "", ""); !errors.Is(err, down) || len(got.Scopes) > 0 {
		t.Fatal(got, err)
	}
	if n := tenantsOf(t, s); n != before {
		t.Fatalf("%d tenants more", n-before)
	}
	p.allow = func(string, string, string) (bool, error) { return true, nil }
	caller.RequestID, caller.SourceIP = "request", "192.0.2.1"
	got, err := s.Permit(ctx, caller, authz.UnsealCredential, "", "")
	if err != nil || got.Kind != authz.ServiceAccount || got.ID != "uid-1" || got.Pod != "pod-1" || got.RequestID != "request" || got.SourceIP != "192.0.2.1" ||
		!slices.Equal(got.Scopes, []authz.Scope{authz.VaultRead}) {
		t.Fatal(got, err)
	}
	if tenant, err := s.NamespaceTenant(ctx, "cluster-1", "ns-1"); err != nil || tenant != got.Tenant || tenantsOf(t, s) != before+1 {
		t.Fatal(tenant, got.Tenant, err)
	}
	// From then on the account is known, whether its requests are allowed or not.
	known, err := s.AuthenticateBearer(ctx, podToken, true)
	if err != nil || known.Kind != authz.ServiceAccount || known.Tenant != got.Tenant || known.ID != "uid-1" || len(known.Scopes) > 0 {
		t.Fatal(known, err)
	}
	// The same name with another UID, or the same UID in another cluster, is another namespace.
	for _, other := range []ServiceAccount{{Cluster: "cluster-1", NamespaceUID: "ns-2"}, {Cluster: "cluster-2", NamespaceUID: "ns-1"}} {
		other.Namespace, other.Name, other.UID = "shop", "app", "uid-1"
		p.account = other
		caller, err := s.AuthenticateBearer(ctx, podToken, true)
		must(t, err)
		if caller.Kind != authz.Stranger {
			t.Fatal(caller)
		}
		caller, err = s.Permit(ctx, caller, authz.ListCredentials, "", "")
		if err != nil || caller.Tenant == got.Tenant || !tenant.Valid(caller.Tenant) {
			t.Fatal(caller, err)
		}
	}
}

func TestAConfiguredNamespaceIsPartOfItsTenantAtOnce(t *testing.T) {
	s, p := newService(t), newPods()
	tenant, _, err := s.Dev(t.Context())
	must(t, err)
	s.UseCluster(p, map[string]authz.TenantID{"shop": tenant})
	before := tenantsOf(t, s)
	caller, err := s.AuthenticateBearer(t.Context(), podToken, true)
	must(t, err)
	caller, err = s.Permit(t.Context(), caller, authz.SealCredential, "", "")
	if err != nil || caller.Tenant != tenant || tenantsOf(t, s) != before {
		t.Fatal(caller, err)
	}
}

// Somebody who may delete and make namespaces cannot enter a configured tenant by a name, neither
// with a pod's call nor when the operator starts.
func TestANamespaceThatWasMadeAgainIsNotThatOfTheConfiguration(t *testing.T) {
	s, p := newService(t), newPods()
	tenant, _, err := s.Dev(t.Context())
	must(t, err)
	s.UseCluster(p, map[string]authz.TenantID{"shop": tenant})
	call := func() Caller {
		t.Helper()
		caller, err := s.AuthenticateBearer(t.Context(), podToken, true)
		must(t, err)
		caller, err = s.Permit(t.Context(), caller, authz.SealCredential, "", "")
		must(t, err)
		return caller
	}
	if got := call(); got.Tenant != tenant || got.Namespace != (authz.Namespace{Cluster: "cluster-1", Name: "shop"}) {
		t.Fatal(got)
	}
	must(t, s.MapNamespace(t.Context(), "cluster-1", "shop", "ns-1", tenant)) // the operator does this at each start
	p.account.NamespaceUID = "ns-2"
	again := call()
	if again.Tenant == tenant || again.Kind != authz.ServiceAccount {
		t.Fatal(again)
	}
	if err := s.MapNamespace(t.Context(), "cluster-1", "shop", "ns-2", tenant); !errors.Is(err, ErrRecreated) {
		t.Fatal(err)
	}
	if got := call(); got.Tenant != again.Tenant {
		t.Fatal(got)
	}
	must(t, s.MapNamespace(t.Context(), "cluster-2", "shop", "ns-3", tenant)) // another cluster has its own names
	other, err := s.NamespaceTenant(t.Context(), "cluster-1", "ns-9")
	must(t, err)
	must(t, s.MapNamespace(t.Context(), "cluster-1", "shop", "ns-1", other)) // the configuration may map the first namespace to another tenant
	key := []byte("namespace-name/cluster-1/shop")
	commit(t, s, func(tx store.Tx) error { return tx.Delete(key) }) // a release before these rows mapped the namespace
	must(t, s.MapNamespace(t.Context(), "cluster-1", "shop", "ns-1", other))
	// Nobody can change the UID in the row of the first namespace.
	s.bound().tamper(t, func(tx store.Tx) error {
		row, err := tx.Get(key)
		return errors.Join(err, tx.Put(key, append(slices.Clone(row[:len(row)-1]), '2')))
	})
	if err := s.MapNamespace(t.Context(), "cluster-1", "shop", "ns-2", tenant); !s.bound().isChanged(err) {
		t.Fatal(err)
	}
}

// givable is what a cluster's RBAC can give, written a second time. Everything else is refused,
// whatever RBAC says.
var givable = map[authz.Action]authz.Scope{
	"seal": "vault:write", "list": "vault:read", "list_versions": "vault:read", "unseal": "vault:read", "replace": "vault:write",
	"rotate": "vault:write", "rename": "vault:write", "describe": "vault:write", "trash": "vault:write", "renew": "vault:write", "delete": "vault:write", "reseal": "vault:write", "check": "vault:write", "list_sealed_credentials": "vault:read",
	"encrypt": "crypto:encrypt", "decrypt": "crypto:decrypt", "rewrap": "crypto:encrypt", "sign": "crypto:sign", "verify": "crypto:verify",
	"read_public_keys": "crypto:verify", "list_keys": "keys:read", "read_audit": "audit:read", "read_proof": "audit:read",
	"read_score": "compliance:read", "read_score_history": "compliance:read", "read_report": "compliance:read", "read_inventory": "compliance:read",
}

func TestAClusterGivesTheOneScopeOfTheVerbAndNoneThatIsNotItsOwn(t *testing.T) {
	s, p := newService(t), newPods()
	s.UseCluster(p, nil)
	first, err := s.AuthenticateBearer(t.Context(), podToken, true)
	must(t, err)
	_, err = s.Permit(t.Context(), first, authz.SealCredential, "", "")
	must(t, err)
	for _, action := range append(authz.Actions(), "", "*", "no_such_action") {
		for _, allowed := range []bool{true, false} {
			p.allow, p.asked = func(string, string, string) (bool, error) { return allowed, nil }, nil
			caller, err := s.AuthenticateBearer(t.Context(), podToken, true)
			must(t, err)
			caller, err = s.Permit(t.Context(), caller, action, "", "")
			must(t, err)
			scope, can := givable[action]
			var want []authz.Scope
			if can && allowed {
				want = []authz.Scope{scope}
			}
			if !slices.Equal(caller.Scopes, want) {
				t.Errorf("%s, allowed %v: %v", action, allowed, caller.Scopes)
			}
			if asked := slices.Equal(p.asked, []string{string(action) + " shop/"}); asked != can {
				t.Errorf("%s: the cluster was asked %q", action, p.asked)
			}
			if can && caller.May(action) != allowed {
				t.Errorf("%s, allowed %v: it may %v", action, allowed, caller.May(action))
			}
		}
	}
}

func TestTheClusterIsAskedAboutTheNameThatIsLookedUp(t *testing.T) {
	s, p := newService(t), newPods()
	s.UseCluster(p, nil)
	caller, err := s.AuthenticateBearer(t.Context(), podToken, true)
	must(t, err)
	for _, c := range []struct{ namespace, name, asked string }{
		{"", "", "unseal shop/"}, {"", "db", "unseal shop/db"}, {"other", "db", "unseal other/db"}, {"", "a/../b", "unseal shop/a/../b"},
		{"", strings.Repeat("n", 253), "unseal shop/" + strings.Repeat("n", 253)},
		{"", strings.Repeat("n", 254), ""}, {strings.Repeat("n", 254), "", ""}, {"", "db\xff", ""}, {"\xc0\x80", "db", ""},
	} {
		p.asked = nil
		got, err := s.Permit(t.Context(), caller, authz.UnsealCredential, c.namespace, c.name)
		must(t, err)
		if (len(got.Scopes) > 0) != (c.asked != "") || strings.Join(p.asked, ",") != c.asked {
			t.Errorf("%q %q: %q %v", c.namespace, c.name, p.asked, got.Scopes)
		}
	}
}
