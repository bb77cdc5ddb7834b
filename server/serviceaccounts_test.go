package server

import (
	"context"
	"encoding/base64"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity"
)

// verbs is what a pod's ServiceAccount must be allowed in its cluster for each operation, written out on its own. An operation that is
// not here is none that RBAC can allow.
var verbs = map[string]string{
	"v2 sealCredential": "seal", "v2 listCredentials": "list", "v2 unsealCredential": "unseal", "v2 unsealCredentialByName": "unseal",
	"v2 getVaultSummary": "list", "v2 getCredentialMetadata": "list", "v2 listKeys": "list_keys", "v2 getKey": "list_keys",
	"v2 listCredentialVersions": "list_versions", "v2 replaceCredential": "replace", "v2 rotateCredential": "rotate", "v2 deleteCredential": "delete",
	"v2 encryptData": "encrypt", "v2 encryptBatch": "encrypt", "v2 decryptData": "decrypt", "v2 decryptBatch": "decrypt",
	"v2 signData": "sign", "v2 signBatch": "sign", "v2 verifyData": "verify", "v2 verifyBatch": "verify", "v2 listPublicKeys": "read_public_keys",
	"v2 resealManifest": "reseal", "v2 checkManifest": "check", "v2 queryAuditLog": "read_audit", "v2 getAuditEntry": "read_audit", "v2 tailAuditLog": "read_audit",
	"v2 listSealedCredentials": "list_sealed_credentials",
	"v2 getCheckpoint":         "read_proof", "v2 proveInclusion": "read_proof", "v2 proveConsistency": "read_proof", "v2 getAuditPublicKey": "read_proof",
	"v2 getTile":            "read_proof",
	"v2 getComplianceScore": "read_score", "v2 getComplianceHistory": "read_score_history", "v2 getComplianceReport": "read_report",
	"v2 getInventory": "read_inventory",
}

// byBody reports whether an operation is reviewed once its body has said where.
func byBody(name string) bool { return name == "v2 checkManifest" || name == "v2 resealManifest" }

// pods is a cluster as a test wants it. What the real one says is held in cluster_test.go.
type pods struct {
	mu       sync.Mutex
	accounts map[string]identity.ServiceAccount // by token
	known    map[string]bool                    // tokens that it remembers
	allow    func(namespace, verb, name string) bool
	down     bool
	reviewed int
	asked    []string // verb, namespace and name
}

func (p *pods) Review(_ context.Context, token string, ask bool) (identity.ServiceAccount, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.known[token] {
		return p.accounts[token], nil
	}
	if !ask {
		return identity.ServiceAccount{}, fault.Unauthenticated
	}
	p.reviewed++
	a, ok := p.accounts[token]
	switch {
	case p.down:
		return a, fault.Unavailable
	case !ok:
		return a, fault.Unauthenticated
	}
	return a, nil
}

func (p *pods) Allowed(_ context.Context, a identity.ServiceAccount, verb, namespace, name string) (bool, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.asked = append(p.asked, verb+" "+namespace+"/"+name)
	if p.down {
		return false, fault.Unavailable
	}
	return p.allow(namespace, verb, name), nil
}

func (p *pods) set(allow func(namespace, verb, name string) bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.allow, p.asked = allow, nil
}

func (p *pods) takeAsked() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	asked := p.asked
	p.asked = nil
	return asked
}

func (p *pods) takeReviewed() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := p.reviewed
	p.reviewed = 0
	return n
}

func all(string, string, string) bool     { return true }
func nothing(string, string, string) bool { return false }
func only(verb string) func(string, string, string) bool {
	return func(_, v, _ string) bool { return v == verb }
}

func podToken(n string) string {
	return base64.RawURLEncoding.EncodeToString([]byte(`{"alg":"RS256","kid":"k"}`)) + "." + base64.RawURLEncoding.EncodeToString([]byte(n)) + ".c2ln"
}

// Tokens of a pod in the namespace shop, which is part of a tenant, and of one in a namespace that is nobody's yet.
var shopToken, newToken = podToken("shop"), podToken("new")

func (s *service) newPods(tenant authz.TenantID) *pods {
	p := &pods{allow: nothing, known: make(map[string]bool), accounts: map[string]identity.ServiceAccount{
		shopToken: {Cluster: "cluster", Namespace: "shop", NamespaceUID: "shop-uid", Name: "app", UID: "account-shop", Pod: "pod-shop"},
		newToken:  {Cluster: "cluster", Namespace: "new", NamespaceUID: "new-uid", Name: "app", UID: "account-new", Pod: "pod-new"},
	}}
	s.identity.UseCluster(p, nil)
	if err := s.identity.MapNamespace(context.Background(), "cluster", "shop", "shop-uid", tenant); err != nil {
		s.t.Fatal(err)
	}
	return p
}

func TestAServiceAccountMayWhatItsClusterAllowsByVerb(t *testing.T) {
	s := newService(t)
	p := s.newPods(s.tenant)
	operations := operations(t)
	for name := range verbs {
		if operations[name].Operation == nil {
			t.Errorf("%s is in no contract", name)
		}
	}
	for name, o := range operations {
		verb, may := verbs[name]
		for who, token := range map[string]string{"of a tenant": shopToken, "of none yet": newToken} {
			want := func(what string, want int) {
				t.Helper()
				switch {
				case o.v1(), name == "v2 refreshSession":
					want = http.StatusUnauthorized
				case access[name] == "public", byBody(name):
					want = http.StatusUnsupportedMediaType
				}
				r := s.probe(o, principal{sends: func(r *request) { r.bearer = token }, v2: true})
				if r.status != want {
					t.Errorf("%s by an account %s that may %s: %d, want %d: %s", name, who, what, r.status, want, r.body)
				}
				if asked := p.takeAsked(); may && !byBody(name) && len(asked) != 1 || !may && len(asked) != 0 {
					t.Errorf("%s: the cluster was asked %q", name, asked)
				}
			}
			s.clock.advance(time.Minute) // in which one entry is left, and some calls may be refused
			p.set(nothing)
			want("nothing", http.StatusForbidden)
			p.set(func(_, v, _ string) bool { return v != verb })
			want("all but that", http.StatusForbidden)
			allowed := http.StatusForbidden
			if may {
				allowed = http.StatusUnsupportedMediaType
			}
			if token == shopToken {
				p.set(only(verb))
				want("only that", allowed)
				p.set(all)
				want("everything", allowed)
			}
		}
	}
	p.set(all)
	s.call(request{method: "GET", path: "/api/v2/vault/list", bearer: newToken}).want(t, http.StatusOK)
}

// What the gate lets in the services let in too: everything works with the one verb of the table, and leaves one entry that names the
// account and its pod.
func TestTheOneVerbOfTheTableIsEnough(t *testing.T) {
	w := newWorld(t, "plain")
	p := w.newPods(w.tenant)
	operations := operations(t)
	for name, verb := range verbs {
		r := examples[name](w, operations[name])
		r.bearer = shopToken
		p.set(only(verb))
		got := w.call(r)
		if got.status >= 300 {
			t.Errorf("%s: %d %s", name, got.status, got.body)
			continue
		}
		if asked := p.takeAsked(); len(asked) == 0 || len(asked) > 1 && name != "v2 tailAuditLog" { // which asks again for as long as it is open
			t.Errorf("%s: the cluster was asked %q", name, asked)
		}
		entries := w.entriesOf(w.keys["audit:read"], got.header.Get("X-Request-ID"))
		entries = slices.DeleteFunc(entries, func(e map[string]any) bool { return e["event_type"] == "KEY_CREATED" }) // a default key's own
		if len(entries) != 1 || entries[0]["outcome"] != "success" || !byPod(entries[0]) {
			t.Errorf("%s leaves %d entries: %v", name, len(entries), entries)
		}
	}
}

// entriesOf returns what a request left in the history of the tenant that an API key is of.
func (s *service) entriesOf(key, requestID string) (of []map[string]any) {
	s.t.Helper()
	answer := s.call(request{method: "GET", path: "/api/v2/audit/logs?limit=10", key: key}).want(s.t, http.StatusOK)
	for _, e := range answer["entries"].([]any) {
		if e := e.(map[string]any); e["request_id"] == requestID {
			of = append(of, e)
		}
	}
	return of
}

func byPod(entry map[string]any) bool {
	actor, attributes := entry["actor"].(map[string]any), entry["attributes"].(map[string]any)
	return actor["type"] == "service_account" && actor["id"] == "account-shop" && attributes["pod_uid"] == "pod-shop"
}

func TestADeniedServiceAccountLeavesOneEntryWithItsPod(t *testing.T) {
	s := newService(t)
	p := s.newPods(s.tenant)
	id := s.seal("value")
	for path, reason := range map[string]string{
		"/api/v2/vault/" + id: "missing_scope", "/api/v2/vault/list": "missing_scope", "/api/v2/auth/me": "missing_scope", "/api/v2/members": "missing_scope",
		"/api/v2/system/tenants": "missing_scope", "/api/v2/vault/by-name/n": "missing_scope",
	} {
		s.clock.advance(time.Minute)
		r := s.call(request{method: "GET", path: path, bearer: shopToken})
		r.message(t, http.StatusForbidden)
		entries := s.entriesOf(s.key, r.header.Get("X-Request-ID"))
		if len(entries) != 1 || entries[0]["outcome"] != "denied" || !byPod(entries[0]) || entries[0]["attributes"].(map[string]any)["reason"] != reason {
			t.Errorf("%s leaves %v", path, entries)
		}
	}
	// So does a request that is invalid, and one of a stranger's credential.
	p.set(all)
	r := s.call(request{method: "POST", path: "/api/v2/vault/seal", bearer: shopToken, body: `{}`})
	r.message(t, http.StatusUnprocessableEntity)
	if entries := s.entriesOf(s.key, r.header.Get("X-Request-ID")); len(entries) != 1 || entries[0]["outcome"] != "failure" || !byPod(entries[0]) {
		t.Errorf("an invalid request leaves %v", entries)
	}
	r = s.call(request{method: "GET", path: "/api/v2/vault/" + authz.NewID("cred"), bearer: shopToken})
	r.message(t, http.StatusForbidden)
	if entries := s.entriesOf(s.key, r.header.Get("X-Request-ID")); len(entries) != 1 || entries[0]["outcome"] != "denied" || !byPod(entries[0]) {
		t.Errorf("an unknown id leaves %v", entries)
	}
	for _, e := range s.entries("event_type=CREDENTIAL_SEALED") {
		if e["attributes"].(map[string]any)["pod_uid"] != nil && !byPod(e) {
			t.Errorf("who is no pod is recorded as one: %v", e)
		}
	}
}

func TestAPodThatMayNothingLeavesNothing(t *testing.T) {
	s := newService(t)
	p := s.newPods(s.tenant)
	system := s.systemKey()
	tenants := func() int {
		return len(s.call(request{method: "GET", path: "/api/v2/system/tenants", key: system}).want(t, http.StatusOK)["tenants"].([]any))
	}
	refused := func() (n int) {
		answer := s.call(request{method: "GET", path: "/api/v2/audit/logs?event_type=ACCESS_REFUSED", key: system}).want(t, http.StatusOK)
		return len(answer["entries"].([]any))
	}
	before, seen := tenants(), refused()
	for _, r := range []request{
		{method: "GET", path: "/api/v2/vault/list"}, {method: "GET", path: "/api/v2/auth/me"}, {method: "DELETE", path: "/api/v2/vault/x"},
		{method: "POST", path: "/api/v2/vault/seal", body: `{}`},
		{method: "POST", path: "/api/v2/sealing-key/check", body: `{"namespace":"shop","name":"n","credential_type":"t"}`},
	} {
		r.bearer = newToken
		s.call(r).message(t, http.StatusForbidden)
	}
	if n := tenants(); n != before {
		t.Errorf("%d tenants more", n-before)
	}
	if n := refused(); n != seen+1 { // one a minute of an address
		t.Errorf("%d entries more", n-seen)
	}
	p.set(all)
	body := `{"name":"n","credential_type":"t","values":{"k":"v"}}`
	id := s.call(request{method: "POST", path: "/api/v2/vault/seal", bearer: newToken, body: body}).want(t, http.StatusCreated)["credential_id"].(string)
	if n := tenants(); n != before+1 {
		t.Errorf("%d tenants more", n-before)
	}
	// And it is a tenant of its own, whatever else the pod may.
	s.call(request{method: "GET", path: "/api/v2/vault/" + id, bearer: newToken}).want(t, http.StatusOK)
	s.call(request{method: "GET", path: "/api/v2/vault/" + id, bearer: shopToken}).message(t, http.StatusForbidden)
	s.call(request{method: "GET", path: "/api/v2/vault/" + s.seal("other"), bearer: newToken}).message(t, http.StatusForbidden)
}

func TestACheckIsReviewedInTheManifestsNamespace(t *testing.T) {
	w := newWorld(t, "plain")
	p := w.newPods(w.tenant)
	r := examples["v2 checkManifest"](w, operations(t)["v2 checkManifest"])
	in := func(namespace, name string) request {
		r := r
		r.bearer, r.key = shopToken, ""
		r.body = marshal(t, object{"namespace": namespace, "name": name, "credential_type": "database"})
		return r
	}
	p.set(func(namespace, verb, name string) bool {
		return verb == "check" && namespace == "payments" && name == "db"
	})
	w.call(in("payments", "db")).want(t, http.StatusOK)
	if asked := p.takeAsked(); !slices.Equal(asked, []string{"check payments/db"}) {
		t.Errorf("asked %q", asked)
	}
	for _, denied := range []request{in("shop", "db"), in("payments", "other"), in("payments/x", "db"), in("*", "db")} {
		w.clock.advance(time.Minute)
		got := w.call(denied)
		got.message(t, http.StatusForbidden)
		entries := w.entriesOf(w.keys["audit:read"], got.header.Get("X-Request-ID"))
		if len(entries) != 1 || entries[0]["event_type"] != "MANIFEST_CHECKED" || entries[0]["outcome"] != "denied" || !byPod(entries[0]) {
			t.Errorf("%s leaves %v", denied.body, entries)
		}
	}
	p.set(all)
	p.takeAsked()
	w.call(in("", "db")).message(t, http.StatusUnprocessableEntity)
	if asked := p.takeAsked(); len(asked) != 0 {
		t.Errorf("asked %q", asked)
	}
	r.key = w.keys["vault:write"] // whoever has the scope is not the cluster's to judge
	w.call(r).want(t, http.StatusOK)
	if asked := p.takeAsked(); len(asked) != 0 {
		t.Errorf("asked %q", asked)
	}
}

func TestAResealIsReviewedInTheManifestsNamespace(t *testing.T) {
	s := newService(t)
	p := s.newPods(s.tenant)
	reseal := func(bearer, key string) reply {
		body := marshal(t, s.manifest(t, "payments", "db", "value"))
		return s.call(request{method: "POST", path: "/api/v2/sealing-key/reseal", bearer: bearer, key: key, body: body})
	}
	p.set(func(namespace, verb, name string) bool {
		return verb == "reseal" && namespace == "payments" && name == "db"
	})
	reseal(shopToken, "").want(t, http.StatusOK)
	if asked := p.takeAsked(); !slices.Equal(asked, []string{"reseal payments/db"}) {
		t.Errorf("asked %q", asked)
	}
	p.set(func(namespace, _, _ string) bool { return namespace == "shop" })
	r := reseal(shopToken, "")
	r.message(t, http.StatusForbidden)
	entries := s.entriesOf(s.key, r.header.Get("X-Request-ID"))
	if len(entries) != 1 || entries[0]["event_type"] != "MANIFEST_RESEALED" || entries[0]["outcome"] != "denied" || !byPod(entries[0]) {
		t.Errorf("leaves %v", entries)
	}
	p.takeAsked()
	reseal("", s.grant(authz.VaultWrite)).want(t, http.StatusOK) // whoever has the scope is not the cluster's to judge
	if asked := p.takeAsked(); len(asked) != 0 {
		t.Errorf("asked %q", asked)
	}
}

func TestTheNameThatIsReviewedIsTheOneThatIsRead(t *testing.T) {
	s := newService(t)
	p := s.newPods(s.tenant)
	for path, name := range map[string]string{
		"db": "db", "d%62": "db", "a%2Fb": "a/b", "%2541": "%41", "a+b": "a+b", "a%20b": "a b", "%2A": "*", "db%00": "db\x00", "db%0A": "db\n", "..%2Fdb": "../db",
	} {
		p.set(func(_, _, asked string) bool { return asked == name })
		body := marshal(t, object{"name": name, "credential_type": "t", "values": object{"k": "value of " + name}})
		sealed := s.post("/api/v2/vault/seal", body).status == http.StatusCreated
		r := s.call(request{method: "GET", path: "/api/v2/vault/by-name/" + path, bearer: shopToken})
		if asked := p.takeAsked(); !slices.Equal(asked, []string{"unseal shop/" + name}) {
			t.Errorf("%s: asked %q", path, asked)
		}
		if !sealed {
			r.message(t, http.StatusForbidden)
		} else if got := r.want(t, http.StatusOK)["name"]; got != name {
			t.Errorf("%s: %q was read", path, got)
		}
	}
	for _, path := range []string{"db%FF", "%C0%80", strings.Repeat("n", 254)} {
		p.set(all)
		s.call(request{method: "GET", path: "/api/v2/vault/by-name/" + path, bearer: shopToken}).message(t, http.StatusForbidden)
		if asked := p.takeAsked(); len(asked) != 0 {
			t.Errorf("%s: asked %q", path, asked)
		}
	}
}

func TestAClusterThatCannotBeAskedIsNoAnswer(t *testing.T) {
	s := newService(t)
	p := s.newPods(s.tenant)
	p.set(all)
	id := s.seal("value")
	path := "/api/v2/vault/" + id
	s.call(request{method: "GET", path: path, bearer: shopToken}).want(t, http.StatusOK)
	p.mu.Lock()
	p.down = true
	p.mu.Unlock()
	before := len(s.entries("limit=100"))
	for _, known := range []bool{false, true} { // the token
		p.mu.Lock()
		p.known[shopToken] = known
		p.mu.Unlock()
		for _, path := range []string{path, "/api/v2/vault/x", "/api/v2/vault/list", "/api/v2/vault/by-name/n"} {
			r := s.call(request{method: "GET", path: path, bearer: shopToken})
			if message := r.message(t, http.StatusServiceUnavailable); message != fault.Unavailable.Error() || r.header.Get("Retry-After") != "" {
				t.Errorf("%s: %s", path, r.body)
			}
		}
	}
	s.get(path).want(t, http.StatusOK) // nobody else is concerned
	if after := len(s.entries("limit=100")); after != before+2 {
		t.Errorf("%d entries", after-before)
	}
	p.mu.Lock()
	p.down = false
	p.mu.Unlock()
	s.call(request{method: "GET", path: path, bearer: shopToken}).want(t, http.StatusOK)
}

func TestAServiceAccountsTokenCountsInOnePlaceOnly(t *testing.T) {
	s := newService(t)
	p := s.newPods(s.tenant)
	p.set(all)
	const v2, v1 = "/api/v2/vault/list", "/v1/keys"
	bearer := "Bearer " + shopToken
	for name, c := range map[string]struct {
		path     string
		header   http.Header
		want     int
		reviewed int
	}{
		"bearer":                       {v2, http.Header{"Authorization": {bearer}}, 200, 1},
		"bearer in another case":       {v2, http.Header{"Authorization": {"bEARER " + shopToken}}, 200, 1},
		"beside a cookie":              {v2, http.Header{"Authorization": {bearer}, "Cookie": {"accessToken=" + shopToken}}, 200, 1},
		"two bearers":                  {v2, http.Header{"Authorization": {bearer, bearer}}, 401, 0},
		"two in one":                   {v2, http.Header{"Authorization": {bearer + ", " + bearer}}, 401, 0},
		"beside a key":                 {v2, http.Header{"Authorization": {bearer}, "X-Api-Key": {s.key}}, 401, 0},
		"beside an empty key":          {v2, http.Header{"Authorization": {bearer}, "X-Api-Key": {""}}, 401, 0},
		"as a key":                     {v2, http.Header{"X-Api-Key": {shopToken}}, 401, 0},
		"as a cookie":                  {v2, cookies("accessToken", shopToken), 401, 0},
		"as a refresh token":           {v2, cookies("refreshToken", shopToken), 401, 0},
		"basic":                        {v2, http.Header{"Authorization": {"Basic " + shopToken}}, 401, 0},
		"without a scheme":             {v2, http.Header{"Authorization": {shopToken}}, 401, 0},
		"two spaces":                   {v2, http.Header{"Authorization": {"Bearer  " + shopToken}}, 401, 0},
		"version 1":                    {v1, http.Header{"Authorization": {bearer}}, 401, 0},
		"version 1, as a key":          {v1, http.Header{"X-Api-Key": {shopToken}}, 401, 0},
		"a dot more":                   {v2, http.Header{"Authorization": {bearer + "."}}, 401, 0},
		"many dots":                    {v2, http.Header{"Authorization": {"Bearer " + strings.Repeat(".", 12_000)}}, 401, 0},
		"more than 8 KiB":              {v2, http.Header{"Authorization": {bearer + strings.Repeat("A", 8<<10)}}, 401, 0},
		"a header that is not JSON":    {v2, http.Header{"Authorization": {"Bearer AAAA.e30.AA"}}, 401, 0},
		"a deep header":                {v2, http.Header{"Authorization": {"Bearer " + base64.RawURLEncoding.EncodeToString([]byte(strings.Repeat("[", 5000))) + ".e30.AA"}}, 401, 0},
		"one that nobody has":          {v2, http.Header{"Authorization": {"Bearer " + podToken("nobody")}}, 401, 1},
		"with a proxy's authorization": {v2, http.Header{"Proxy-Authorization": {bearer}}, 401, 0},
	} {
		p.takeReviewed()
		r := s.call(request{method: "GET", path: c.path, header: c.header})
		if r.status != c.want || c.want == 401 && (echoed(r) || strings.Contains(string(r.body), shopToken)) {
			t.Errorf("%s: %d %s", name, r.status, r.body)
		}
		if n := p.takeReviewed(); n != c.reviewed {
			t.Errorf("%s: %d reviews", name, n)
		}
	}
	// All strangers get one answer.
	junk, none := s.call(request{method: "GET", path: v2, bearer: podToken("x")}), s.call(request{method: "GET", path: v2, bearer: "x"})
	if a, b := junk.message(t, 401), none.message(t, 401); a != b {
		t.Errorf("%q and %q", a, b)
	}
	if log := s.log.String(); strings.Contains(log, shopToken) || strings.Contains(log, strings.Split(shopToken, ".")[1]) {
		t.Error("a token is in the log")
	}
}

func TestPodsShareTheRateOfTheirTenantAndJunkThatOfItsAddress(t *testing.T) {
	const few = 3
	s := newService(t, func(c *Config) { c.Rates.V2, c.Rates.Address = few, few })
	p := s.newPods(s.tenant)
	p.set(all)
	get := func(token string) int {
		return s.call(request{method: "GET", path: "/api/v2/vault/list", bearer: token}).status
	}
	for i := range few {
		if status := get(podToken("junk")); status != 401 {
			t.Errorf("junk %d: %d", i, status)
		}
	}
	if n := p.takeReviewed(); n != few {
		t.Errorf("%d reviews", n)
	}
	for range few { // the address has used up what it has: nothing is asked for it any more
		if status := get(podToken("junk")); status != 429 {
			t.Errorf("junk: %d", status)
		}
	}
	if status := get(newToken); status != 429 || p.takeReviewed() != 0 {
		t.Errorf("a pod that the cluster was not asked about: %d", status)
	}
	p.mu.Lock()
	p.known[shopToken] = true
	p.mu.Unlock()
	for range few { // but who is known does not pay for it
		if status := get(shopToken); status != 200 {
			t.Errorf("a known pod: %d", status)
		}
	}
	if status := get(shopToken); status != 429 {
		t.Errorf("a tenant over its rate: %d", status)
	}
	if status := s.get("/api/v2/vault/list").status; status != 429 {
		t.Errorf("the same tenant by an API key: %d", status)
	}
}

func TestAServiceAccountOfATrialThatEndedMayWhatStaysAllowed(t *testing.T) {
	w := newWorld(t, "plain")
	p := w.newPods(w.tenant)
	p.set(all)
	w.clock.advance(15 * 24 * 3600e9)
	w.call(request{method: "GET", path: "/api/v2/vault/list", bearer: shopToken}).want(t, http.StatusOK)
	body := `{"name":"n","credential_type":"t","values":{"k":"v"}}`
	if m := w.call(request{method: "POST", path: "/api/v2/vault/seal", bearer: shopToken, body: body}).message(t, http.StatusForbidden); !strings.Contains(m, "trial") {
		t.Error(m)
	}
	r := w.call(request{method: "POST", path: "/api/v2/vault/seal", bearer: shopToken, body: "x", contentType: "text/plain"})
	r.message(t, http.StatusForbidden) // before anything of the request is looked at
	r = w.call(request{method: "POST", path: "/api/v2/sealing-key/check", bearer: shopToken, body: `{"namespace":"shop","name":"n","credential_type":"t"}`})
	if m := r.message(t, http.StatusForbidden); !strings.Contains(m, "trial") {
		t.Error(m)
	}
}
