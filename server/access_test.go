package server_test

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/getkin/kin-openapi/openapi3"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/test/servertest"
)

// access is who may do what, written out on its own: a change in the contracts
// or in authz must be a change here. A scope is what the caller must hold, "any"
// takes everybody who is known, "user" users alone, "public" everybody, and
// "refresh" who sends the refresh token. A "!" says that the operation stays
// allowed after a trial.
var access = map[string]string{
	"v1 encryptData":    "crypto:encrypt",
	"v1 decryptData":    "crypto:decrypt!",
	"v1 rewrapData":     "crypto:encrypt",
	"v1 generateKey":    "keys:write",
	"v1 listKeys":       "keys:read!",
	"v1 rotateKey":      "keys:write",
	"v1 queryAuditLogs": "audit:read!",

	"v2 sealCredential":         "vault:write",
	"v2 listCredentials":        "vault:read!",
	"v2 unsealCredential":       "vault:read!",
	"v2 unsealCredentialByName": "vault:read!",
	"v2 listCredentialVersions": "vault:read!",
	"v2 getVaultSummary":        "vault:read!",
	"v2 getCredentialMetadata":  "vault:read!",
	"v2 replaceCredential":      "vault:write",
	"v2 rotateCredential":       "vault:write",
	"v2 renameCredential":       "vault:write", // likewise
	"v2 describeCredential":     "vault:write",
	"v2 trashCredential":        "vault:write!",
	"v2 renewCredential":        "vault:write", // and vault:read
	"v2 undoCredential":         "vault:write", // and vault:read
	"v2 listHistoryRules":       "account:admin!",
	"v2 putHistoryRule":         "account:admin",
	"v2 deleteHistoryRule":      "account:admin",
	"v2 getSettings":            "account:admin!",
	"v2 changeSettings":         "account:admin",
	"v2 patchCredential":        "vault:write", // and vault:read, once it knows what is asked
	"v2 putCredentialByName":    "vault:write", // likewise
	"v2 deleteCredential":       "vault:write!",

	"v2 encryptData":    "crypto:encrypt",
	"v2 encryptBatch":   "crypto:encrypt",
	"v2 decryptData":    "crypto:decrypt!",
	"v2 decryptBatch":   "crypto:decrypt!",
	"v2 signData":       "crypto:sign",
	"v2 signBatch":      "crypto:sign",
	"v2 verifyData":     "crypto:verify!",
	"v2 verifyBatch":    "crypto:verify!",
	"v2 listPublicKeys": "crypto:verify!",

	"v2 listKeys":  "keys:read!",
	"v2 createKey": "keys:write",
	"v2 getKey":    "keys:read!",
	"v2 rotateKey": "keys:write",

	"v2 registerUser":         "public",
	"v2 login":                "public",
	"v2 verifyEmail":          "public",
	"v2 requestPasswordReset": "public",
	"v2 resetPassword":        "public",
	"v2 acceptInvitation":     "public",
	"v2 getSealingKey":        "public",
	"v2 refreshSession":       "refresh",
	"v2 logout":               "user!",
	"v2 resendVerification":   "user!",
	"v2 changePassword":       "user!",
	"v2 listSessions":         "user!",
	"v2 endSession":           "user!",
	"v2 getAccount":           "any!",
	"v2 getOverview":          "any!",

	"v2 listMembers":       "account:admin!",
	"v2 inviteMember":      "account:admin",
	"v2 changeMember":      "account:admin",
	"v2 removeMember":      "account:admin!",
	"v2 revokeInvitation":  "account:admin!",
	"v2 listWebhooks":      "account:admin!",
	"v2 createWebhook":     "account:admin",
	"v2 deleteWebhook":     "account:admin!",
	"v2 testWebhook":       "account:admin",
	"v2 listDeliveries":    "account:admin!",
	"v2 resendDelivery":    "account:admin",
	"v2 listPolicies":      "account:admin!",
	"v2 createPolicy":      "account:admin",
	"v2 getPolicy":         "account:admin!",
	"v2 changePolicy":      "account:admin",
	"v2 deletePolicy":      "account:admin!",
	"v2 bindPolicies":      "account:admin",
	"v2 unbindPolicies":    "account:admin",
	"v2 listGroups":        "account:admin!",
	"v2 createGroup":       "account:admin",
	"v2 getGroup":          "account:admin!",
	"v2 renameGroup":       "account:admin",
	"v2 deleteGroup":       "account:admin!",
	"v2 addGroupMember":    "account:admin",
	"v2 removeGroupMember": "account:admin",
	"v2 checkAccess":       "any!",
	"v2 listPermitted":     "account:admin!",
	"v2 tryAccessChange":   "account:admin!",
	"v2 createAPIKey":      "account:admin",
	"v2 listAPIKeys":       "account:admin!",
	"v2 revokeAPIKey":      "account:admin!",
	"v2 approveAPIKey":     "user+account:admin",

	"v2 listTenants":        "system:admin",
	"v2 createTenant":       "system:admin",
	"v2 activateTenant":     "system:admin",
	"v2 setTenantLimits":    "system:admin",
	"v2 createTenantAPIKey": "system:admin",
	"v2 listSealingKeys":    "system:admin",
	"v2 rotateSealingKey":   "system:admin",
	"v2 retireSealingKey":   "system:admin",
	"v2 restoreSealingKey":  "system:admin",
	"v2 takeBackup":         "system:admin",
	"v2 listKMSKeys":        "system:admin",
	"v2 rewrapKeys":         "system:admin",
	"v2 destroyKMSKey":      "system:admin",

	"v2 listSealedCredentials": "vault:read!",

	"v2 resealManifest": "vault:write",
	"v2 checkManifest":  "vault:write",

	"v2 queryAuditLog":     "audit:read!",
	"v2 getAuditEntry":     "audit:read!",
	"v2 findNames":         "audit:names!",
	"v2 getReviews":        "audit:read!",
	"v2 createReview":      "user+audit:read!",
	"v2 getReviewNote":     "audit:read!",
	"v2 eraseReviewNote":   "account:admin!",
	"v2 eraseNames":        "account:admin!",
	"v2 recordNodeLog":     "audit:write",
	"v2 tailAuditLog":      "audit:read!",
	"v2 getCheckpoint":     "audit:read!",
	"v2 proveInclusion":    "audit:read!",
	"v2 proveConsistency":  "audit:read!",
	"v2 getAuditPublicKey": "audit:read!",
	"v2 getTile":           "audit:read!",
	"v2 exportAuditLog":    "system:admin",
	"v2 acceptRollback":    "system:admin",

	"v2 getComplianceScore":   "compliance:read!",
	"v2 getComplianceScores":  "compliance:read!",
	"v2 getComplianceHistory": "compliance:read!",
	"v2 getComplianceReport":  "compliance:read!",
	"v2 getInventory":         "compliance:read!",
	"v2 downloadReport":       "public", // to whoever has a signed URL
}

var roles = map[string]string{
	"owner":   servertest.EveryScope,
	"admin":   servertest.EveryScope,
	"member":  "vault:read vault:write crypto:encrypt crypto:decrypt crypto:sign crypto:verify keys:read",
	"auditor": "crypto:verify keys:read audit:read audit:names compliance:read",
}

// operation is one of the contracts', that a caller has to do with.
type operation struct {
	name         string // version and operationId
	method, path string
	*openapi3.Operation
	parameters openapi3.Parameters
}

// operations returns all of both contracts but those of the process, by name.
func operations(t testing.TB) map[string]operation {
	t.Helper()
	all := make(map[string]operation)
	both := servertest.NewContract(t)
	for version, doc := range map[string]servertest.Document{"v1": both.V1, "v2": both.V2} {
		for path, item := range doc.Paths.Map() {
			for method, op := range item.Operations() {
				if !slices.Contains(op.Tags, "operations") {
					name := version + " " + op.OperationID
					all[name] = operation{name, method, path, op, append(slices.Clone(item.Parameters), op.Parameters...)}
				}
			}
		}
	}
	return all
}

// at returns the operation's path with a value for its parameter.
func (o operation) at(value string) string {
	before, after, ok := strings.Cut(strings.NewReplacer("{index}", "0", "{delivery_id}", "x").Replace(o.path), "{")
	if !ok {
		return o.path
	}
	_, after, _ = strings.Cut(after, "}")
	if second, _, ok := strings.Cut(after, "{"); ok { // a member of a group, whole or both by one id
		if after = ""; !strings.Contains(value, "/") {
			after = second + value
		}
	}
	return before + value + after
}

func (o operation) v1() bool { return strings.HasPrefix(o.name, "v1 ") }

// principal is somebody who asks, as the table sees it.
type principal struct {
	name   string
	sends  func(*servertest.Request)
	scopes string
	user   bool
	ended  bool // its trial
	v1, v2 bool // who is known to the version by what it sends
}

// apiKey is a principal that sends the key the way each version takes it.
func apiKey(o operation, r *servertest.Request, key string) {
	if o.v1() {
		r.Bearer = key
	} else {
		r.Key = key
	}
}

// wants is the table read out: 401, 403, or 0 for being let in.
func (p principal) wants(o operation) int {
	rule, trialed := strings.CutSuffix(access[o.name], "!")
	rule, users := strings.CutPrefix(rule, "user+")
	known := o.v1() && p.v1 || !o.v1() && p.v2
	switch {
	case rule == "public":
		return 0
	case rule == "refresh", !known:
		return http.StatusUnauthorized
	case (users || rule == "user") && !p.user:
		return http.StatusForbidden
	case rule != "user" && rule != "any" && !slices.Contains(strings.Fields(p.scopes), rule):
		return http.StatusForbidden
	case p.ended && !trialed:
		return http.StatusForbidden
	}
	return 0
}

// probe asks for the operation in a way that harms nothing: whoever is let in
// is told that the body is of the wrong type, which is looked at right after
// who asks.
func (s *service) probe(o operation, p principal) servertest.Reply {
	s.T.Helper()
	r := servertest.Request{Method: o.method, Path: o.at("x"), Body: "x", ContentType: "text/plain"}
	if o.name == "v2 refreshSession" || o.name == "v2 logout" && !p.v2 {
		r.Body, r.ContentType = "", "" // it looks for the cookie last
	}
	if p.sends != nil {
		p.sends(&r)
	}
	if p.v1 && p.v2 { // an API key
		apiKey(o, &r, r.Key)
		if o.v1() {
			r.Key = ""
		}
	}
	return s.Call(r)
}

// holdAccess compares what every operation answers each of the principals with the
// table.
func (s *service) holdAccess(principals []principal) {
	s.T.Helper()
	all := operations(s.T)
	for place, name := range slices.Sorted(maps.Keys(all)) {
		o := all[name]
		for i, p := range principals {
			if !chosen(place, i) {
				continue
			}
			want := p.wants(o)
			if want == 0 {
				want = http.StatusUnsupportedMediaType
			}
			if r := s.probe(o, p); r.Status != want {
				s.T.Errorf("%s by %s: %d, want %d: %s", name, p.name, r.Status, want, r.Body)
			}
		}
	}
}

func keyPrincipal(name, key, scopes string) principal {
	return principal{name: name, sends: func(r *servertest.Request) { r.Key = key }, scopes: scopes, v1: true, v2: true}
}

// userPrincipals returns the user as it asks with a header and with a cookie.
func userPrincipals(role string, a servertest.Account) []principal {
	bearer := func(r *servertest.Request) { r.Bearer = a.Access }
	cookie := func(r *servertest.Request) { r.Header = servertest.Cookies("accessToken", a.Access) }
	return []principal{
		{name: role + " by bearer", sends: bearer, scopes: roles[role], user: true, v2: true},
		{name: role + " by cookie", sends: cookie, scopes: roles[role], user: true, v2: true},
	}
}

// join makes a user of the tenant with a role and signs it in.
func (s *service) join(tenant authz.TenantID, email, role string) servertest.Account {
	s.T.Helper()
	ctx := context.Background()
	if _, err := s.Identity.Invite(ctx, administrator(tenant), email, authz.Role(role)); err != nil {
		s.T.Fatal(err)
	}
	token := s.TokenMailedTo(email, 1)
	body := servertest.Marshal(s.T, map[string]string{"token": token, "password": servertest.Password})
	s.Call(servertest.Request{Method: "POST", Path: "/api/v2/auth/accept-invitation", Body: body}).Want(s.T, http.StatusCreated)
	return s.Login(email, servertest.Password)
}

// administrator is who prepares things in a tenant for a test, whatever the
// tenant itself may do.
func administrator(tenant authz.TenantID) authz.Principal {
	return authz.Principal{Tenant: tenant, Kind: authz.Operator, ID: "operator", Scopes: authz.TenantScopes()}
}

func TestTheTableNamesEveryOperation(t *testing.T) {
	all := operations(t)
	for name := range all {
		if access[name] == "" {
			t.Errorf("%s is not in the table", name)
		}
	}
	for name := range access {
		if all[name].Operation == nil {
			t.Errorf("%s is in no contract", name)
		}
	}
}

func TestOperationsAnswerExactlyWhomTheTableLetsIn(t *testing.T) {
	s := newService(t)
	principals := []principal{
		{name: "a stranger"},
		keyPrincipal("the system's key", s.SystemKey(), "system:admin account:admin audit:read"),
		keyPrincipal("a key of system:admin alone", s.GrantKeyIn(authz.SystemTenant, authz.SystemAdmin), "system:admin"),
		keyPrincipal("a key of all scopes", s.Key, servertest.EveryScope),
		{name: "a key as bearer of v2", sends: func(r *servertest.Request) { r.Bearer = s.Key }, scopes: servertest.EveryScope, v1: true},
		{name: "a key in the cookie", sends: func(r *servertest.Request) { r.Header = servertest.Cookies("accessToken", s.Key) }},
	}
	for _, scope := range strings.Fields(servertest.EveryScope) {
		principals = append(principals, keyPrincipal("a key of "+scope, s.GrantKey(authz.Scope(scope)), scope))
	}
	for role := range roles {
		a := s.join(s.Tenant, role+"@example.org", role)
		principals = append(principals, userPrincipals(role, a)...)
		principals = append(principals, principal{name: role + "'s token as a key", sends: func(r *servertest.Request) { r.Key = a.Access }})
	}
	s.holdAccess(principals)
	for _, p := range principals { // some scopes open nothing that a user can reach
		r := servertest.Request{Method: "GET", Path: "/api/v2/auth/me"}
		if p.sends == nil || !p.v2 {
			continue
		}
		p.sends(&r)
		held := s.Call(r).Want(t, http.StatusOK)["principal"].(map[string]any)["scopes"].([]any)
		got := strings.Fields(strings.Trim(fmt.Sprint(held), "[]"))
		want := strings.Fields(p.scopes)
		slices.Sort(got)
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Errorf("%s holds %v, want %v", p.name, got, want)
		}
	}
}

func TestATrialThatEndedLeavesWhatTheTableSays(t *testing.T) {
	s := newService(t)
	owner := s.Register("owner@example.org")
	tenant := s.TenantOf(owner)
	s.join(tenant, "auditor@example.org", "auditor")
	all := s.GrantKeyIn(tenant, authz.TenantScopes()...)
	reader := s.GrantKeyIn(tenant, authz.VaultRead)
	principals := func(ended bool) []principal {
		list := []principal{keyPrincipal("a key of all scopes", all, servertest.EveryScope), keyPrincipal("a key of vault:read", reader, "vault:read")}
		list = append(list, userPrincipals("owner", s.Login("owner@example.org", servertest.Password))...)
		list = append(list, userPrincipals("auditor", s.Login("auditor@example.org", servertest.Password))...)
		for i := range list {
			list[i].ended = ended
		}
		return list
	}
	status := func(want string) {
		t.Helper()
		me := s.Call(servertest.Request{Method: "GET", Path: "/api/v2/auth/me", Key: all}).Want(t, http.StatusOK)
		if got := me["tenant"].(map[string]any)["status"]; got != want {
			t.Errorf("the tenant is %v, want %s", got, want)
		}
	}
	s.Clock.Advance(14*24*time.Hour - time.Second)
	status("trial")
	s.holdAccess(principals(false))
	s.Clock.Advance(time.Second)
	status("read_only")
	s.holdAccess(principals(true))
	path := "/api/v2/system/tenants/" + string(tenant) + "/activate"
	s.Call(servertest.Request{Method: "POST", Path: path, Key: all}).Message(t, http.StatusForbidden)
	s.Call(servertest.Request{Method: "POST", Path: path, Key: s.SystemKey()}).Want(t, http.StatusOK)
	status("active")
	s.holdAccess(principals(false))
}

// What the gate lets in the services let in too: everything works for a key of
// the one scope that the table names, and after a trial what the table says.
func TestTheOneScopeOfTheTableIsEnough(t *testing.T) {
	for _, ended := range []bool{false, true} {
		name := map[bool]string{false: "active", true: "trial ended"}[ended]
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, "plain")
			all := operations(t)
			requests := make(map[string]servertest.Request)
			prepare := func(users bool) {
				for name, rule := range access {
					if rule != "public" && rule != "refresh" && users == strings.HasPrefix(rule, "user") {
						requests[name] = examples[name](w, all[name])
					}
				}
			}
			prepare(false)
			if ended {
				for range 3 {
					w.spare = append(w.spare, w.newUser())
				}
				w.Clock.Advance(14 * 24 * time.Hour)
				w.owner = w.Login(w.owner.Email, servertest.Password)
			}
			prepare(true)
			for name, r := range requests {
				o := all[name]
				if r.Bearer != "" && !strings.HasPrefix(access[name], "user") {
					r.Bearer = w.owner.Access // signed in anew
				}
				got := w.Call(w.authorized(o, r))
				if ended && !strings.HasSuffix(access[name], "!") && access[name] != "system:admin" {
					if !strings.Contains(string(got.Body), "the trial has ended") || got.Status != http.StatusForbidden {
						t.Errorf("%s: %d %s", name, got.Status, got.Body)
					}
				} else if got.Status >= 300 {
					t.Errorf("%s: %d %s", name, got.Status, got.Body)
				}
			}
		})
	}
}
