package server

import (
	"encoding/json"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
)

// account is a signed-in user.
type account struct {
	email, password string
	access, refresh string
}

const testPassword = "correct horse battery staple"

func marshal(t testing.TB, v any) string {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// register makes a user with a tenant of its own and signs it in.
func (s *service) register(email string) account {
	s.t.Helper()
	body := marshal(s.t, map[string]string{"email": email, "password": testPassword, "tenant_name": "Example"})
	s.call(request{method: "POST", path: "/api/v2/auth/register", body: body}).want(s.t, http.StatusCreated)
	return s.login(email, testPassword)
}

func (s *service) login(email, password string) account {
	s.t.Helper()
	sign := request{method: "POST", path: "/api/v2/auth/login", body: marshal(s.t, map[string]string{"email": email, "password": password})}
	r := s.call(sign)
	for range 5 { // a machine that is busy with other tests tells some to come again
		if r.status != http.StatusServiceUnavailable {
			break
		}
		r = s.call(sign)
	}
	a := account{email: email, password: password, access: r.want(s.t, http.StatusOK)["access_token"].(string)}
	a.refresh = r.cookie(s.t, "refreshToken").Value
	return a
}

// cookie returns a cookie that the reply sets.
func (r reply) cookie(t testing.TB, name string) *http.Cookie {
	t.Helper()
	for _, c := range (&http.Response{Header: r.header}).Cookies() {
		if c.Name == name {
			return c
		}
	}
	t.Fatalf("no cookie %s: %v", name, r.header)
	return nil
}

func cookies(pairs ...string) http.Header {
	var parts []string
	for i := 0; i < len(pairs); i += 2 {
		parts = append(parts, pairs[i]+"="+pairs[i+1])
	}
	return http.Header{"Cookie": {strings.Join(parts, "; ")}}
}

// The whole table of the interface specification: method, path, how the caller
// says who it is, and the status, by plain HTTP.
func TestTheSpecificationsTable(t *testing.T) {
	s := newService(t)
	user := s.register("owner@example.org")
	for _, scheme := range []string{"bearer API key", "X-API-Key", "access token", "access cookie"} {
		t.Run(strings.ReplaceAll(scheme, " ", "_"), func(t *testing.T) {
			as := func(method, path, body string) reply {
				t.Helper()
				r := request{method: method, path: path, body: body}
				switch scheme {
				case "bearer API key":
					r.bearer = s.key
				case "X-API-Key":
					r.key = s.key
				case "access token":
					r.bearer = user.access
				case "access cookie":
					r.header = cookies("accessToken", user.access)
				}
				return s.call(r)
			}
			if scheme == "bearer API key" {
				specificationV1(t, as)
			} else {
				specificationV2(t, as)
			}
		})
	}

	t.Run("none", func(t *testing.T) {
		r := s.call(request{method: "POST", path: "/api/v2/auth/login", body: marshal(t, map[string]string{"email": user.email, "password": user.password})})
		if fields := r.want(t, http.StatusOK); fields["token_type"] != "Bearer" || fields["expires_in"] != 1800.0 {
			t.Errorf("login: %v", fields)
		}
		access, refresh := r.cookie(t, "accessToken"), r.cookie(t, "refreshToken")
		for _, c := range []*http.Cookie{access, refresh} {
			if !c.HttpOnly || c.SameSite != http.SameSiteStrictMode {
				t.Errorf("cookie %v", c)
			}
		}
		if access.MaxAge != 30*60 || refresh.MaxAge != 7*24*60*60 || refresh.Path != "/api/v2/auth" {
			t.Errorf("cookies %v, %v", access, refresh)
		}
		r = s.call(request{method: "POST", path: "/api/v2/auth/refresh", header: cookies("refreshToken", refresh.Value)})
		if r.want(t, http.StatusOK)["access_token"] == "" || r.cookie(t, "refreshToken").Value == refresh.Value {
			t.Error("refresh did not rotate")
		}
		s.call(request{method: "POST", path: "/api/v2/auth/refresh"}).message(t, http.StatusUnauthorized)
	})

	t.Run("no credential", func(t *testing.T) {
		for _, e := range specified {
			method, path, _ := strings.Cut(e, " ")
			r := s.call(request{method: method, path: path})
			if r.status != http.StatusUnauthorized {
				t.Errorf("%s: %d", e, r.status)
			}
		}
	})

	t.Run("no permission", func(t *testing.T) {
		weak := s.grant(authz.AccountAdmin) // opens none of them
		for _, e := range specified {
			method, path, _ := strings.Cut(e, " ")
			r := request{method: method, path: path, key: weak}
			if strings.HasPrefix(path, "/v1/") {
				r.key, r.bearer = "", weak
			}
			if got := s.call(r); got.status != http.StatusForbidden {
				t.Errorf("%s: %d", e, got.status)
			}
		}
	})
}

// specified are the endpoints of the specification that take a credential.
var specified = []string{
	"POST /v1/encrypt", "POST /v1/decrypt", "POST /v1/keys/generate", "GET /v1/keys", "POST /v1/keys/x/rotate", "GET /v1/audit/logs",
	"POST /api/v2/vault/seal", "GET /api/v2/vault/list", "GET /api/v2/vault/x", "POST /api/v2/vault/rotate/x", "DELETE /api/v2/vault/x",
	"POST /api/v2/encryption/encrypt", "POST /api/v2/encryption/decrypt", "POST /api/v2/encryption/sign", "POST /api/v2/encryption/verify",
	"GET /api/v2/audit/logs", "GET /api/v2/compliance/score?framework=soc2", "GET /api/v2/compliance/report?framework=soc2",
}

type caller func(method, path, body string) reply

func specificationV1(t *testing.T, as caller) {
	key := as("POST", "/v1/keys/generate", `{"algorithm":"ML-KEM-768","name":"orders","rotation_period":30}`).want(t, http.StatusCreated)
	id := key["key_id"].(string)
	if _, there := key["success"]; there {
		t.Error("a body of v1 has success")
	}
	sealed := as("POST", "/v1/encrypt", marshal(t, map[string]any{"data": "hello", "algorithm": "ML-KEM-768", "key_id": id})).want(t, http.StatusOK)
	open := marshal(t, map[string]any{"encrypted_data": sealed["encrypted_data"], "key_id": sealed["key_id"]})
	if got := as("POST", "/v1/decrypt", open).want(t, http.StatusOK)["data"]; got != "hello" {
		t.Errorf("decrypted %v", got)
	}
	rotated := as("POST", "/v1/keys/"+id+"/rotate", `{"re_encrypt_data":true}`).want(t, http.StatusOK)
	if rotated["version"] != 2.0 || rotated["re_encrypted_versions"] != 1.0 {
		t.Errorf("rotated: %v", rotated)
	}
	if rotated = as("POST", "/v1/keys/"+id+"/rotate", "").want(t, http.StatusOK); rotated["version"] != 3.0 || rotated["re_encrypted_versions"] != 0.0 {
		t.Errorf("rotated without a body: %v", rotated)
	}
	if got := as("POST", "/v1/decrypt", open).want(t, http.StatusOK)["data"]; got != "hello" {
		t.Errorf("decrypted after the rotations: %v", got)
	}
	rewrapped := as("POST", "/v1/rewrap", open).want(t, http.StatusOK)
	if rewrapped["key_version"] != 3.0 || rewrapped["data"] != nil {
		t.Errorf("rewrapped: %v", rewrapped)
	}
	if list := as("GET", "/v1/keys?page=1&limit=1", "").want(t, http.StatusOK); len(list["keys"].([]any)) != 1 || list["total"].(float64) < 1 {
		t.Errorf("keys: %v", list)
	}
	today := time.Date(2026, 11, 21, 0, 0, 0, 0, time.UTC).Format(time.DateOnly)
	if logs := as("GET", "/v1/audit/logs?start_date="+today+"&end_date="+today, "").want(t, http.StatusOK); len(logs["logs"].([]any)) < 5 {
		t.Errorf("%d entries", len(logs["logs"].([]any)))
	}

	refused := func(r reply, status int) {
		t.Helper()
		detail, _ := r.want(t, status)["error"].(map[string]any)
		if detail["code"] != float64(status) || detail["message"] == "" || detail["details"] == "" || detail["request_id"] != r.header.Get("X-Request-ID") {
			t.Errorf("envelope %s", r.body)
		}
	}
	missing := as("POST", "/v1/encrypt", `{"data":"hello"}`)
	refused(missing, http.StatusBadRequest)
	if !strings.Contains(string(missing.body), "algorithm") {
		t.Errorf("the missing field is not named: %s", missing.body)
	}
	refused(as("POST", "/v1/encrypt", `{"data":"hello","algorithm":"RSA"}`), http.StatusBadRequest)
	refused(as("POST", "/v1/decrypt", `{"encrypted_data":"AAAA","key_id":"`+id+`"}`), http.StatusBadRequest)
	refused(as("POST", "/v1/decrypt", strings.Replace(open, id, authz.NewID("tkey"), 1)), http.StatusNotFound)
	refused(as("POST", "/v1/keys/"+authz.NewID("tkey")+"/rotate", ""), http.StatusNotFound)
	refused(as("GET", "/v1/keys?limit=101", ""), http.StatusBadRequest)
	refused(as("GET", "/v1/nothing", ""), http.StatusNotFound)
}

func specificationV2(t *testing.T, as caller) {
	sealed := as("POST", "/api/v2/vault/seal", `{"name":"n","credential_type":"api_key","values":{"k":"v"},"ttl_days":30}`).want(t, http.StatusCreated)
	id := sealed["credential_id"].(string)
	as("GET", "/api/v2/vault/list", "").want(t, http.StatusOK)
	as("GET", "/api/v2/vault/"+id, "").want(t, http.StatusOK)
	as("POST", "/api/v2/vault/rotate/"+id, "").want(t, http.StatusOK)
	as("DELETE", "/api/v2/vault/"+id, "").want(t, http.StatusOK)
	as("GET", "/api/v2/vault/"+id, "").message(t, http.StatusForbidden)

	envelope := as("POST", "/api/v2/encryption/encrypt", `{"data":"hello","algorithm":"ML-KEM-768"}`)
	fields := envelope.want(t, http.StatusOK)
	// The whole answer, posted back as it is; and the three fields alone.
	three := marshal(t, map[string]any{"ciphertext_kem": fields["ciphertext_kem"], "ciphertext_data": fields["ciphertext_data"], "nonce": fields["nonce"]})
	for _, body := range []string{string(envelope.body), three} {
		if got := as("POST", "/api/v2/encryption/decrypt", body).want(t, http.StatusOK)["data"]; got != "hello" {
			t.Errorf("decrypted %v", got)
		}
	}
	as("POST", "/api/v2/encryption/encrypt", `{"data":"hello"}`).want(t, http.StatusOK)
	as("POST", "/api/v2/encryption/encrypt", `{"data":"hello","algorithm":"RSA"}`).message(t, http.StatusUnprocessableEntity)
	as("POST", "/api/v2/encryption/decrypt", strings.Replace(three, `"nonce":"`, `"nonce":"AAAA`, 1)).message(t, http.StatusBadRequest)

	signed := as("POST", "/api/v2/encryption/sign", `{"data":"hello"}`).want(t, http.StatusOK)
	verify := func(change map[string]any) reply {
		body := map[string]any{"data": "hello", "pqc_signature": signed["pqc_signature"], "hmac_signature": signed["hmac_signature"]}
		for name, value := range change {
			if body[name] = value; value == nil {
				delete(body, name)
			}
		}
		return as("POST", "/api/v2/encryption/verify", marshal(t, body))
	}
	if got := verify(nil).want(t, http.StatusOK); got["valid"] != true {
		t.Errorf("verified: %v", got)
	}
	for _, change := range []map[string]any{{"data": "hallo"}, {"pqc_signature": "AAAA"}, {"hmac_signature": "AAAA"}, {"hmac_signature": "§"}} {
		if got := verify(change).want(t, http.StatusOK); got["valid"] != false {
			t.Errorf("%v verified", change)
		}
	}
	verify(map[string]any{"pqc_signature": nil}).message(t, http.StatusUnprocessableEntity)
	verify(map[string]any{"hmac_signature": nil}).message(t, http.StatusUnprocessableEntity)
	as("GET", "/api/v2/audit/logs?event_type=CREDENTIAL_UNSEALED&hours=24", "").want(t, http.StatusOK)

	score := as("GET", "/api/v2/compliance/score?framework=soc2", "").want(t, http.StatusOK)
	if n, ok := score["score"].(float64); !ok || n < 0 || n > 100 {
		t.Errorf("score %v", score["score"])
	}
	report := as("GET", "/api/v2/compliance/report?framework=soc2", "").want(t, http.StatusOK)
	if u, err := url.Parse(report["url"].(string)); err != nil || u.Query().Get("signature") == "" {
		t.Errorf("report: %v", report)
	}
	as("GET", "/api/v2/compliance/score?framework=x", "").message(t, http.StatusBadRequest)
	as("GET", "/api/v2/compliance/report", "").message(t, http.StatusBadRequest)
}

func TestRateLimits(t *testing.T) {
	s := newService(t)
	limit := func(tenant authz.TenantID, v1, v2 int) {
		t.Helper()
		s.call(request{method: "PUT", path: "/api/v2/system/tenants/" + string(tenant) + "/limits", key: s.systemKey(),
			body: marshal(t, map[string]int{"v1": v1, "v2": v2})}).want(t, http.StatusOK)
	}
	limit(s.tenant, 2, 3)
	reset := strconv.FormatInt(s.clock.Now().Truncate(time.Minute).Add(time.Minute).Unix(), 10)
	for i, want := range []int{200, 200, 403, 429, 429} { // errors count too
		path := "/api/v2/vault/list"
		if want == http.StatusForbidden {
			path = "/api/v2/vault/x"
		}
		r := s.get(path)
		if r.status != want {
			t.Fatalf("request %d: %d", i, r.status)
		}
		if got := r.header.Get("X-RateLimit-Limit") + " " + r.header.Get("X-RateLimit-Remaining") + " " + r.header.Get("X-RateLimit-Reset"); got != "3 "+strconv.Itoa(max(0, 2-i))+" "+reset {
			t.Errorf("request %d: %s", i, got)
		}
		after, err := strconv.Atoi(r.header.Get("Retry-After"))
		if want == http.StatusTooManyRequests && (err != nil || after < 60 || after > 65) {
			t.Errorf("Retry-After %q with 60 s to go", r.header.Get("Retry-After"))
		}
	}
	for i, want := range []int{200, 200, 429} { // v1 has a bucket of its own
		r := s.call(request{method: "GET", path: "/v1/keys", bearer: s.key})
		if r.status != want || want == 429 && r.header.Get("Retry-After") != "60" {
			t.Errorf("v1, request %d: %d, Retry-After %q", i, r.status, r.header.Get("Retry-After"))
		}
	}
	other := s.grantIn(s.stranger().Tenant, authz.VaultRead) // and so has a neighbour
	s.call(request{method: "GET", path: "/api/v2/vault/list", key: other}).want(t, http.StatusOK)
	s.clock.advance(time.Minute)
	if n := len(s.entries("event_type=RATE_LIMITED")); n != 1 {
		t.Errorf("%d entries of one caller over its limit in one minute", n)
	}
}

func TestAStrangersAddressHasABucket(t *testing.T) {
	small := newService(t, func(c *Config) { c.Rates.Address = 3 })
	for i, want := range []int{401, 401, 404, 429, 429} {
		path := "/api/v2/vault/list"
		if want == 404 {
			path = "/none"
		}
		r := small.call(request{method: "GET", path: path})
		if r.status != want || r.header.Get("X-RateLimit-Limit") != "3" {
			t.Errorf("request %d: %d, %v", i, r.status, r.header)
		}
	}
	small.call(request{method: "POST", path: "/api/v2/auth/login", body: `{"email":"a@example.org","password":"x"}`}).message(t, http.StatusTooManyRequests)
	// Who is known does not pay for its neighbours.
	small.get("/api/v2/vault/list").want(t, http.StatusOK)
	if r := small.get("/healthz"); r.status != http.StatusOK || r.header.Get("X-RateLimit-Remaining") != "0" {
		t.Errorf("a probe: %d, %v", r.status, r.header)
	}
}
