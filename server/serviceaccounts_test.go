package server_test

import (
	"encoding/base64"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/server"
	"github.com/latticekeep/latticekeep/test/servertest"
)

// verbs is what a pod's ServiceAccount must be allowed in its cluster for each operation, written out on its own. An operation that is
// not here is none that RBAC can allow.
var verbs = map[string]string{
	"v2 sealCredential": "seal", "v2 listCredentials": "list", "v2 unsealCredential": "unseal", "v2 unsealCredentialByName": "unseal",
	"v2 getVaultSummary": "list", "v2 getCredentialMetadata": "list", "v2 listKeys": "list_keys", "v2 getKey": "list_keys",
	"v2 listCredentialVersions": "list_versions", "v2 replaceCredential": "replace", "v2 patchCredential": "replace", "v2 undoCredential": "replace", "v2 putCredentialByName": "seal", "v2 rotateCredential": "rotate", "v2 renameCredential": "rename", "v2 describeCredential": "describe", "v2 trashCredential": "trash", "v2 renewCredential": "renew", "v2 deleteCredential": "delete",
	"v2 encryptData": "encrypt", "v2 encryptBatch": "encrypt", "v2 decryptData": "decrypt", "v2 decryptBatch": "decrypt",
	"v2 signData": "sign", "v2 signBatch": "sign", "v2 verifyData": "verify", "v2 verifyBatch": "verify", "v2 listPublicKeys": "read_public_keys",
	"v2 resealManifest": "reseal", "v2 checkManifest": "check", "v2 queryAuditLog": "read_audit", "v2 getAuditEntry": "read_audit", "v2 getReviews": "read_audit", "v2 getReviewNote": "read_audit",
	"v2 tailAuditLog":          "read_audit",
	"v2 listSealedCredentials": "list_sealed_credentials",
	"v2 getCheckpoint":         "read_proof", "v2 proveInclusion": "read_proof", "v2 proveConsistency": "read_proof", "v2 getAuditPublicKey": "read_proof",
	"v2 getTile":            "read_proof",
	"v2 getComplianceScore": "read_score", "v2 getComplianceScores": "read_score", "v2 getComplianceHistory": "read_score_history", "v2 getComplianceReport": "read_report",
	"v2 getInventory": "read_inventory",
}

// byBody reports whether an operation is reviewed once its body has said where.
func byBody(name string) bool { return name == "v2 checkManifest" || name == "v2 resealManifest" }

func TestAServiceAccountMayWhatItsClusterAllowsByVerb(t *testing.T) {
	s := newService(t)
	p := s.UsePods(s.Tenant)
	operations := operations(t)
	for name := range verbs {
		if operations[name].Operation == nil {
			t.Errorf("%s is in no contract", name)
		}
	}
	for name, o := range operations {
		verb, may := verbs[name]
		for who, token := range map[string]string{"of a tenant": servertest.ShopToken, "of none yet": servertest.NewToken} {
			want := func(what string, want int) {
				t.Helper()
				switch {
				case o.v1(), name == "v2 refreshSession":
					want = http.StatusUnauthorized
				case access[name] == "public", byBody(name):
					want = http.StatusUnsupportedMediaType
				}
				r := s.probe(o, principal{sends: func(r *servertest.Request) { r.Bearer = token }, v2: true})
				if r.Status != want {
					t.Errorf("%s by an account %s that may %s: %d, want %d: %s", name, who, what, r.Status, want, r.Body)
				}
				if asked := p.TakeAsked(); may && !byBody(name) && len(asked) != 1 || !may && len(asked) != 0 {
					t.Errorf("%s: the cluster was asked %q", name, asked)
				}
			}
			s.Clock.Advance(time.Minute) // in which one entry is left, and some calls may be refused
			p.Allow(servertest.AllowNothing)
			want("nothing", http.StatusForbidden)
			p.Allow(func(_, v, _ string) bool { return v != verb })
			want("all but that", http.StatusForbidden)
			allowed := http.StatusForbidden
			if may {
				allowed = http.StatusUnsupportedMediaType
			}
			if token == servertest.ShopToken {
				p.Allow(servertest.AllowOnly(verb))
				want("only that", allowed)
				p.Allow(servertest.AllowAll)
				want("everything", allowed)
			}
		}
	}
	p.Allow(servertest.AllowAll)
	s.Call(servertest.Request{Method: "GET", Path: "/api/v2/vault/list", Bearer: servertest.NewToken}).Want(t, http.StatusOK)
}

// What the gate lets in the services let in too: everything works with the one verb of the table, and leaves one entry that names the
// account and its pod.
func TestTheOneVerbOfTheTableIsEnough(t *testing.T) {
	w := newWorld(t, "plain")
	p := w.UsePods(w.tenant)
	operations := operations(t)
	for name, verb := range verbs {
		r := examples[name](w, operations[name])
		r.Bearer = servertest.ShopToken
		p.Allow(servertest.AllowOnly(verb))
		tells := name == "v2 patchCredential" || name == "v2 putCredentialByName" || name == "v2 undoCredential" || name == "v2 renewCredential" || name == "v2 renameCredential" // what is there
		if tells {
			if got := w.Call(r); got.Status != http.StatusForbidden {
				t.Errorf("%s without unseal: %d", name, got.Status)
			}
			p.Allow(func(_, asked, _ string) bool { return asked == verb || asked == "unseal" })
		}
		got := w.Call(r)
		if got.Status >= 300 {
			t.Errorf("%s: %d %s", name, got.Status, got.Body)
			continue
		}
		if asked := p.TakeAsked(); len(asked) == 0 || len(asked) > 1 && name != "v2 tailAuditLog" && !tells { // which asks again for as long as it is open
			t.Errorf("%s: the cluster was asked %q", name, asked)
		}
		entries := w.entriesOf(w.keys["audit:read"], got.Header.Get("X-Request-ID"))
		entries = slices.DeleteFunc(entries, func(e map[string]any) bool { return e["event_type"] == "KEY_CREATED" }) // a default key's own
		if len(entries) != 1 || entries[0]["outcome"] != "success" || !byPod(entries[0]) {
			t.Errorf("%s leaves %d entries: %v", name, len(entries), entries)
		}
	}
}

// entriesOf returns what a request left in the history of the tenant that an API key is of.
func (s *service) entriesOf(key, requestID string) (of []map[string]any) {
	s.T.Helper()
	answer := s.Call(servertest.Request{Method: "GET", Path: "/api/v2/audit/logs?limit=10", Key: key}).Want(s.T, http.StatusOK)
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
	p := s.UsePods(s.Tenant)
	id := s.Seal("value")
	for path, reason := range map[string]string{
		"/api/v2/vault/" + id: "missing_scope", "/api/v2/vault/list": "missing_scope", "/api/v2/auth/me": "missing_scope", "/api/v2/members": "missing_scope",
		"/api/v2/system/tenants": "missing_scope", "/api/v2/vault/by-name/n": "missing_scope",
	} {
		s.Clock.Advance(time.Minute)
		r := s.Call(servertest.Request{Method: "GET", Path: path, Bearer: servertest.ShopToken})
		r.Message(t, http.StatusForbidden)
		entries := s.entriesOf(s.Key, r.Header.Get("X-Request-ID"))
		if len(entries) != 1 || entries[0]["outcome"] != "denied" || !byPod(entries[0]) || entries[0]["attributes"].(map[string]any)["reason"] != reason {
			t.Errorf("%s leaves %v", path, entries)
		}
	}
	// So does a request that is invalid, and one of a stranger's credential.
	p.Allow(servertest.AllowAll)
	r := s.Call(servertest.Request{Method: "POST", Path: "/api/v2/vault/seal", Bearer: servertest.ShopToken, Body: `{}`})
	r.Message(t, http.StatusUnprocessableEntity)
	if entries := s.entriesOf(s.Key, r.Header.Get("X-Request-ID")); len(entries) != 1 || entries[0]["outcome"] != "failure" || !byPod(entries[0]) {
		t.Errorf("an invalid request leaves %v", entries)
	}
	r = s.Call(servertest.Request{Method: "GET", Path: "/api/v2/vault/" + authz.NewID("cred"), Bearer: servertest.ShopToken})
	r.Message(t, http.StatusForbidden)
	if entries := s.entriesOf(s.Key, r.Header.Get("X-Request-ID")); len(entries) != 1 || entries[0]["outcome"] != "denied" || !byPod(entries[0]) {
		t.Errorf("an unknown id leaves %v", entries)
	}
	for _, e := range s.Entries("event_type=CREDENTIAL_SEALED") {
		if e["attributes"].(map[string]any)["pod_uid"] != nil && !byPod(e) {
			t.Errorf("who is no pod is recorded as one: %v", e)
		}
	}
}

func TestAPodThatMayNothingLeavesNothing(t *testing.T) {
	s := newService(t)
	p := s.UsePods(s.Tenant)
	system := s.SystemKey()
	tenants := func() int {
		return len(s.Call(servertest.Request{Method: "GET", Path: "/api/v2/system/tenants", Key: system}).Want(t, http.StatusOK)["tenants"].([]any))
	}
	refused := func() (n int) {
		answer := s.Call(servertest.Request{Method: "GET", Path: "/api/v2/audit/logs?event_type=ACCESS_REFUSED", Key: system}).Want(t, http.StatusOK)
		return len(answer["entries"].([]any))
	}
	before, seen := tenants(), refused()
	for _, r := range []servertest.Request{
		{Method: "GET", Path: "/api/v2/vault/list"}, {Method: "GET", Path: "/api/v2/auth/me"}, {Method: "DELETE", Path: "/api/v2/vault/x"},
		{Method: "POST", Path: "/api/v2/vault/seal", Body: `{}`},
		{Method: "POST", Path: "/api/v2/sealing-key/check", Body: `{"namespace":"shop","name":"n","credential_type":"t"}`},
	} {
		r.Bearer = servertest.NewToken
		s.Call(r).Message(t, http.StatusForbidden)
	}
	if n := tenants(); n != before {
		t.Errorf("%d tenants more", n-before)
	}
	if n := refused(); n != seen+1 { // one a minute of an address
		t.Errorf("%d entries more", n-seen)
	}
	p.Allow(servertest.AllowAll)
	body := `{"name":"n","credential_type":"t","values":{"k":"v"}}`
	id := s.Call(servertest.Request{Method: "POST", Path: "/api/v2/vault/seal", Bearer: servertest.NewToken, Body: body}).Want(t, http.StatusCreated)["credential_id"].(string)
	if n := tenants(); n != before+1 {
		t.Errorf("%d tenants more", n-before)
	}
	// And it is a tenant of its own, whatever else the pod may.
	s.Call(servertest.Request{Method: "GET", Path: "/api/v2/vault/" + id, Bearer: servertest.NewToken}).Want(t, http.StatusOK)
	s.Call(servertest.Request{Method: "GET", Path: "/api/v2/vault/" + id, Bearer: servertest.ShopToken}).Message(t, http.StatusForbidden)
	s.Call(servertest.Request{Method: "GET", Path: "/api/v2/vault/" + s.Seal("other"), Bearer: servertest.NewToken}).Message(t, http.StatusForbidden)
}

func TestACheckIsReviewedInTheManifestsNamespace(t *testing.T) {
	w := newWorld(t, "plain")
	p := w.UsePods(w.tenant)
	r := examples["v2 checkManifest"](w, operations(t)["v2 checkManifest"])
	in := func(namespace, name string) servertest.Request {
		r := r
		r.Bearer, r.Key = servertest.ShopToken, ""
		r.Body = servertest.Marshal(t, object{"namespace": namespace, "name": name, "credential_type": "database"})
		return r
	}
	p.Allow(func(namespace, verb, name string) bool {
		return verb == "check" && namespace == "payments" && name == "db"
	})
	w.Call(in("payments", "db")).Want(t, http.StatusOK)
	if asked := p.TakeAsked(); !slices.Equal(asked, []string{"check payments/db"}) {
		t.Errorf("asked %q", asked)
	}
	for _, denied := range []servertest.Request{in("shop", "db"), in("payments", "other"), in("payments/x", "db"), in("*", "db")} {
		w.Clock.Advance(time.Minute)
		got := w.Call(denied)
		got.Message(t, http.StatusForbidden)
		entries := w.entriesOf(w.keys["audit:read"], got.Header.Get("X-Request-ID"))
		if len(entries) != 1 || entries[0]["event_type"] != "MANIFEST_CHECKED" || entries[0]["outcome"] != "denied" || !byPod(entries[0]) {
			t.Errorf("%s leaves %v", denied.Body, entries)
		}
	}
	p.Allow(servertest.AllowAll)
	p.TakeAsked()
	w.Call(in("", "db")).Message(t, http.StatusUnprocessableEntity)
	if asked := p.TakeAsked(); len(asked) != 0 {
		t.Errorf("asked %q", asked)
	}
	r.Key = w.keys["vault:write"] // whoever has the scope is not the cluster's to judge
	w.Call(r).Want(t, http.StatusOK)
	if asked := p.TakeAsked(); len(asked) != 0 {
		t.Errorf("asked %q", asked)
	}
}

func TestAResealIsReviewedInTheManifestsNamespace(t *testing.T) {
	s := newService(t)
	p := s.UsePods(s.Tenant)
	reseal := func(bearer, key string) servertest.Reply {
		body := servertest.Marshal(t, s.Manifest(t, "payments", "db", "value"))
		return s.Call(servertest.Request{Method: "POST", Path: "/api/v2/sealing-key/reseal", Bearer: bearer, Key: key, Body: body})
	}
	p.Allow(func(namespace, verb, name string) bool {
		return verb == "reseal" && namespace == "payments" && name == "db"
	})
	reseal(servertest.ShopToken, "").Want(t, http.StatusOK)
	if asked := p.TakeAsked(); !slices.Equal(asked, []string{"reseal payments/db"}) {
		t.Errorf("asked %q", asked)
	}
	p.Allow(func(namespace, _, _ string) bool { return namespace == "shop" })
	r := reseal(servertest.ShopToken, "")
	r.Message(t, http.StatusForbidden)
	entries := s.entriesOf(s.Key, r.Header.Get("X-Request-ID"))
	if len(entries) != 1 || entries[0]["event_type"] != "MANIFEST_RESEALED" || entries[0]["outcome"] != "denied" || !byPod(entries[0]) {
		t.Errorf("leaves %v", entries)
	}
	p.TakeAsked()
	reseal("", s.GrantKey(authz.VaultWrite)).Want(t, http.StatusOK) // whoever has the scope is not the cluster's to judge
	if asked := p.TakeAsked(); len(asked) != 0 {
		t.Errorf("asked %q", asked)
	}
}

func TestTheNameThatIsReviewedIsTheOneThatIsRead(t *testing.T) {
	s := newService(t)
	p := s.UsePods(s.Tenant)
	for path, name := range map[string]string{
		"db": "db", "d%62": "db", "a%2Fb": "a/b", "%2541": "%41", "a+b": "a+b", "a%20b": "a b", "%2A": "*", "db%00": "db\x00", "db%0A": "db\n", "..%2Fdb": "../db",
	} {
		p.Allow(func(_, _, asked string) bool { return asked == name })
		body := servertest.Marshal(t, object{"name": name, "credential_type": "t", "values": object{"k": "value of " + name}})
		sealed := s.Post("/api/v2/vault/seal", body).Status == http.StatusCreated
		r := s.Call(servertest.Request{Method: "GET", Path: "/api/v2/vault/by-name/" + path, Bearer: servertest.ShopToken})
		if asked := p.TakeAsked(); !slices.Equal(asked, []string{"unseal shop/" + name}) {
			t.Errorf("%s: asked %q", path, asked)
		}
		if !sealed {
			r.Message(t, http.StatusForbidden)
		} else if got := r.Want(t, http.StatusOK)["name"]; got != name {
			t.Errorf("%s: %q was read", path, got)
		}
	}
	for _, path := range []string{"db%FF", "%C0%80", strings.Repeat("n", 254)} {
		p.Allow(servertest.AllowAll)
		s.Call(servertest.Request{Method: "GET", Path: "/api/v2/vault/by-name/" + path, Bearer: servertest.ShopToken}).Message(t, http.StatusForbidden)
		if asked := p.TakeAsked(); len(asked) != 0 {
			t.Errorf("%s: asked %q", path, asked)
		}
	}
}

func TestAClusterThatCannotBeAskedIsNoAnswer(t *testing.T) {
	s := newService(t)
	p := s.UsePods(s.Tenant)
	p.Allow(servertest.AllowAll)
	id := s.Seal("value")
	path := "/api/v2/vault/" + id
	s.Call(servertest.Request{Method: "GET", Path: path, Bearer: servertest.ShopToken}).Want(t, http.StatusOK)
	p.Mu.Lock()
	p.Down = true
	p.Mu.Unlock()
	before := len(s.Entries("limit=100"))
	for _, known := range []bool{false, true} { // the token
		p.Mu.Lock()
		p.Known[servertest.ShopToken] = known
		p.Mu.Unlock()
		for _, path := range []string{path, "/api/v2/vault/x", "/api/v2/vault/list", "/api/v2/vault/by-name/n"} {
			r := s.Call(servertest.Request{Method: "GET", Path: path, Bearer: servertest.ShopToken})
			if message := r.Message(t, http.StatusServiceUnavailable); message != fault.Unavailable.Error() || r.Header.Get("Retry-After") != "" {
				t.Errorf("%s: %s", path, r.Body)
			}
		}
	}
	s.Get(path).Want(t, http.StatusOK) // nobody else is concerned
	if after := len(s.Entries("limit=100")); after != before+2 {
		t.Errorf("%d entries", after-before)
	}
	p.Mu.Lock()
	p.Down = false
	p.Mu.Unlock()
	s.Call(servertest.Request{Method: "GET", Path: path, Bearer: servertest.ShopToken}).Want(t, http.StatusOK)
}

func TestAServiceAccountsTokenCountsInOnePlaceOnly(t *testing.T) {
	s := newService(t)
	p := s.UsePods(s.Tenant)
	p.Allow(servertest.AllowAll)
	const v2, v1 = "/api/v2/vault/list", "/v1/keys"
	bearer := "Bearer " + servertest.ShopToken
	for name, c := range map[string]struct {
		path     string
		header   http.Header
		want     int
		reviewed int
	}{
		"bearer":                       {v2, http.Header{"Authorization": {bearer}}, 200, 1},
		"bearer in another case":       {v2, http.Header{"Authorization": {"bEARER " + servertest.ShopToken}}, 200, 1},
		"beside a cookie":              {v2, http.Header{"Authorization": {bearer}, "Cookie": {"accessToken=" + servertest.ShopToken}}, 200, 1},
		"two bearers":                  {v2, http.Header{"Authorization": {bearer, bearer}}, 401, 0},
		"two in one":                   {v2, http.Header{"Authorization": {bearer + ", " + bearer}}, 401, 0},
		"beside a key":                 {v2, http.Header{"Authorization": {bearer}, "X-Api-Key": {s.Key}}, 401, 0},
		"beside an empty key":          {v2, http.Header{"Authorization": {bearer}, "X-Api-Key": {""}}, 401, 0},
		"as a key":                     {v2, http.Header{"X-Api-Key": {servertest.ShopToken}}, 401, 0},
		"as a cookie":                  {v2, servertest.Cookies("accessToken", servertest.ShopToken), 401, 0},
		"as a refresh token":           {v2, servertest.Cookies("refreshToken", servertest.ShopToken), 401, 0},
		"basic":                        {v2, http.Header{"Authorization": {"Basic " + servertest.ShopToken}}, 401, 0},
		"without a scheme":             {v2, http.Header{"Authorization": {servertest.ShopToken}}, 401, 0},
		"two spaces":                   {v2, http.Header{"Authorization": {"Bearer  " + servertest.ShopToken}}, 401, 0},
		"version 1":                    {v1, http.Header{"Authorization": {bearer}}, 401, 0},
		"version 1, as a key":          {v1, http.Header{"X-Api-Key": {servertest.ShopToken}}, 401, 0},
		"a dot more":                   {v2, http.Header{"Authorization": {bearer + "."}}, 401, 0},
		"many dots":                    {v2, http.Header{"Authorization": {"Bearer " + strings.Repeat(".", 12_000)}}, 401, 0},
		"more than 8 KiB":              {v2, http.Header{"Authorization": {bearer + strings.Repeat("A", 8<<10)}}, 401, 0},
		"a header that is not JSON":    {v2, http.Header{"Authorization": {"Bearer AAAA.e30.AA"}}, 401, 0},
		"a deep header":                {v2, http.Header{"Authorization": {"Bearer " + base64.RawURLEncoding.EncodeToString([]byte(strings.Repeat("[", 5000))) + ".e30.AA"}}, 401, 0},
		"one that nobody has":          {v2, http.Header{"Authorization": {"Bearer " + servertest.PodToken("nobody")}}, 401, 1},
		"with a proxy's authorization": {v2, http.Header{"Proxy-Authorization": {bearer}}, 401, 0},
	} {
		p.TakeReviewed()
		r := s.Call(servertest.Request{Method: "GET", Path: c.path, Header: c.header})
		if r.Status != c.want || c.want == 401 && (echoed(r) || strings.Contains(string(r.Body), servertest.ShopToken)) {
			t.Errorf("%s: %d %s", name, r.Status, r.Body)
		}
		if n := p.TakeReviewed(); n != c.reviewed {
			t.Errorf("%s: %d reviews", name, n)
		}
	}
	// All strangers get one answer.
	junk, none := s.Call(servertest.Request{Method: "GET", Path: v2, Bearer: servertest.PodToken("x")}), s.Call(servertest.Request{Method: "GET", Path: v2, Bearer: "x"})
	if a, b := junk.Message(t, 401), none.Message(t, 401); a != b {
		t.Errorf("%q and %q", a, b)
	}
	if log := s.Logged.String(); strings.Contains(log, servertest.ShopToken) || strings.Contains(log, strings.Split(servertest.ShopToken, ".")[1]) {
		t.Error("a token is in the log")
	}
}

func TestPodsShareTheRateOfTheirTenantAndJunkThatOfItsAddress(t *testing.T) {
	const few = 3
	s := newService(t, func(c *server.Config) { c.Limits.V2, c.Limits.Address = few, few })
	p := s.UsePods(s.Tenant)
	p.Allow(servertest.AllowAll)
	get := func(token string) int {
		return s.Call(servertest.Request{Method: "GET", Path: "/api/v2/vault/list", Bearer: token}).Status
	}
	for i := range few {
		if status := get(servertest.PodToken("junk")); status != 401 {
			t.Errorf("junk %d: %d", i, status)
		}
	}
	if n := p.TakeReviewed(); n != few {
		t.Errorf("%d reviews", n)
	}
	for range few { // the address has used up what it has: nothing is asked for it any more
		if status := get(servertest.PodToken("junk")); status != 429 {
			t.Errorf("junk: %d", status)
		}
	}
	if status := get(servertest.NewToken); status != 429 || p.TakeReviewed() != 0 {
		t.Errorf("a pod that the cluster was not asked about: %d", status)
	}
	p.Mu.Lock()
	p.Known[servertest.ShopToken] = true
	p.Mu.Unlock()
	for range few { // but who is known does not pay for it
		if status := get(servertest.ShopToken); status != 200 {
			t.Errorf("a known pod: %d", status)
		}
	}
	if status := get(servertest.ShopToken); status != 429 {
		t.Errorf("a tenant over its rate: %d", status)
	}
	if status := s.Get("/api/v2/vault/list").Status; status != 429 {
		t.Errorf("the same tenant by an API key: %d", status)
	}
}

func TestAServiceAccountOfATrialThatEndedMayWhatStaysAllowed(t *testing.T) {
	w := newWorld(t, "plain")
	p := w.UsePods(w.tenant)
	p.Allow(servertest.AllowAll)
	w.Clock.Advance(15 * 24 * 3600e9)
	w.Call(servertest.Request{Method: "GET", Path: "/api/v2/vault/list", Bearer: servertest.ShopToken}).Want(t, http.StatusOK)
	body := `{"name":"n","credential_type":"t","values":{"k":"v"}}`
	if m := w.Call(servertest.Request{Method: "POST", Path: "/api/v2/vault/seal", Bearer: servertest.ShopToken, Body: body}).Message(t, http.StatusForbidden); !strings.Contains(m, "trial") {
		t.Error(m)
	}
	r := w.Call(servertest.Request{Method: "POST", Path: "/api/v2/vault/seal", Bearer: servertest.ShopToken, Body: "x", ContentType: "text/plain"})
	r.Message(t, http.StatusForbidden) // before anything of the request is looked at
	r = w.Call(servertest.Request{Method: "POST", Path: "/api/v2/sealing-key/check", Bearer: servertest.ShopToken, Body: `{"namespace":"shop","name":"n","credential_type":"t"}`})
	if m := r.Message(t, http.StatusForbidden); !strings.Contains(m, "trial") {
		t.Error(m)
	}
}
