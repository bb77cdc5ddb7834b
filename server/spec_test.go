package server_test

import (
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/server"
	"github.com/latticekeep/latticekeep/test/servertest"
)

// The whole table of the interface specification: method, path, how the caller
// says who it is, and the status, by plain HTTP.
func TestTheSpecificationsTable(t *testing.T) {
	s := newService(t)
	user := s.Register("owner@example.org")
	for _, scheme := range []string{"bearer API key", "X-API-Key", "access token", "access cookie"} {
		t.Run(strings.ReplaceAll(scheme, " ", "_"), func(t *testing.T) {
			as := func(method, path, body string) servertest.Reply {
				t.Helper()
				r := servertest.Request{Method: method, Path: path, Body: body}
				switch scheme {
				case "bearer API key":
					r.Bearer = s.Key
				case "X-API-Key":
					r.Key = s.Key
				case "access token":
					r.Bearer = user.Access
				case "access cookie":
					r.Header = servertest.Cookies("accessToken", user.Access)
				}
				return s.Call(r)
			}
			if scheme == "bearer API key" {
				specificationV1(t, as)
			} else {
				specificationV2(t, as)
			}
		})
	}

	t.Run("none", func(t *testing.T) {
		r := s.Call(servertest.Request{Method: "POST", Path: "/api/v2/auth/login", Body: servertest.Marshal(t, map[string]string{"email": user.Email, "password": user.Password})})
		if fields := r.Want(t, http.StatusOK); fields["token_type"] != "Bearer" || fields["expires_in"] != 1800.0 {
			t.Errorf("login: %v", fields)
		}
		access, refresh := r.Cookie(t, "accessToken"), r.Cookie(t, "refreshToken")
		for _, c := range []*http.Cookie{access, refresh} {
			if !c.HttpOnly || c.SameSite != http.SameSiteStrictMode {
				t.Errorf("cookie %v", c)
			}
		}
		if access.MaxAge != 30*60 || refresh.MaxAge != 7*24*60*60 || refresh.Path != "/api/v2/auth" {
			t.Errorf("cookies %v, %v", access, refresh)
		}
		r = s.Call(servertest.Request{Method: "POST", Path: "/api/v2/auth/refresh", Header: servertest.Cookies("refreshToken", refresh.Value)})
		if r.Want(t, http.StatusOK)["access_token"] == "" || r.Cookie(t, "refreshToken").Value == refresh.Value {
			t.Error("refresh did not rotate")
		}
		s.Call(servertest.Request{Method: "POST", Path: "/api/v2/auth/refresh"}).Message(t, http.StatusUnauthorized)
	})

	t.Run("no credential", func(t *testing.T) {
		for _, e := range specified {
			method, path, _ := strings.Cut(e, " ")
			r := s.Call(servertest.Request{Method: method, Path: path})
			if r.Status != http.StatusUnauthorized {
				t.Errorf("%s: %d", e, r.Status)
			}
		}
	})

	t.Run("no permission", func(t *testing.T) {
		weak := s.GrantKey(authz.AccountAdmin) // opens none of them
		for _, e := range specified {
			method, path, _ := strings.Cut(e, " ")
			r := servertest.Request{Method: method, Path: path, Key: weak}
			if strings.HasPrefix(path, "/v1/") {
				r.Key, r.Bearer = "", weak
			}
			if got := s.Call(r); got.Status != http.StatusForbidden {
				t.Errorf("%s: %d", e, got.Status)
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

type caller func(method, path, body string) servertest.Reply

func specificationV1(t *testing.T, as caller) {
	key := as("POST", "/v1/keys/generate", `{"algorithm":"ML-KEM-768","name":"orders","rotation_period":30}`).Want(t, http.StatusCreated)
	id := key["key_id"].(string)
	if _, there := key["success"]; there {
		t.Error("a body of v1 has success")
	}
	sealed := as("POST", "/v1/encrypt", servertest.Marshal(t, map[string]any{"data": "hello", "algorithm": "ML-KEM-768", "key_id": id})).Want(t, http.StatusOK)
	open := servertest.Marshal(t, map[string]any{"encrypted_data": sealed["encrypted_data"], "key_id": sealed["key_id"]})
	if got := as("POST", "/v1/decrypt", open).Want(t, http.StatusOK)["data"]; got != "hello" {
		t.Errorf("decrypted %v", got)
	}
	rotated := as("POST", "/v1/keys/"+id+"/rotate", `{"re_encrypt_data":true}`).Want(t, http.StatusOK)
	if rotated["version"] != 2.0 || rotated["re_encrypted_versions"] != 1.0 {
		t.Errorf("rotated: %v", rotated)
	}
	if rotated = as("POST", "/v1/keys/"+id+"/rotate", "").Want(t, http.StatusOK); rotated["version"] != 3.0 || rotated["re_encrypted_versions"] != 0.0 {
		t.Errorf("rotated without a body: %v", rotated)
	}
	if got := as("POST", "/v1/decrypt", open).Want(t, http.StatusOK)["data"]; got != "hello" {
		t.Errorf("decrypted after the rotations: %v", got)
	}
	rewrapped := as("POST", "/v1/rewrap", open).Want(t, http.StatusOK)
	if rewrapped["key_version"] != 3.0 || rewrapped["data"] != nil {
		t.Errorf("rewrapped: %v", rewrapped)
	}
	if list := as("GET", "/v1/keys?page=1&limit=1", "").Want(t, http.StatusOK); len(list["keys"].([]any)) != 1 || list["total"].(float64) < 1 {
		t.Errorf("keys: %v", list)
	}
	today := time.Date(2026, 11, 21, 0, 0, 0, 0, time.UTC).Format(time.DateOnly)
	if logs := as("GET", "/v1/audit/logs?start_date="+today+"&end_date="+today, "").Want(t, http.StatusOK); len(logs["logs"].([]any)) < 5 {
		t.Errorf("%d entries", len(logs["logs"].([]any)))
	}

	refused := func(r servertest.Reply, status int) {
		t.Helper()
		detail, _ := r.Want(t, status)["error"].(map[string]any)
		if detail["code"] != float64(status) || detail["message"] == "" || detail["details"] == "" || detail["request_id"] != r.Header.Get("X-Request-ID") {
			t.Errorf("envelope %s", r.Body)
		}
	}
	missing := as("POST", "/v1/encrypt", `{"data":"hello"}`)
	refused(missing, http.StatusBadRequest)
	if !strings.Contains(string(missing.Body), "algorithm") {
		t.Errorf("the missing field is not named: %s", missing.Body)
	}
	refused(as("POST", "/v1/encrypt", `{"data":"hello","algorithm":"RSA"}`), http.StatusBadRequest)
	refused(as("POST", "/v1/decrypt", `{"encrypted_data":"AAAA","key_id":"`+id+`"}`), http.StatusBadRequest)
	refused(as("POST", "/v1/decrypt", strings.Replace(open, id, authz.NewID("tkey"), 1)), http.StatusNotFound)
	refused(as("POST", "/v1/keys/"+authz.NewID("tkey")+"/rotate", ""), http.StatusNotFound)
	refused(as("GET", "/v1/keys?limit=101", ""), http.StatusBadRequest)
	refused(as("GET", "/v1/nothing", ""), http.StatusNotFound)
}

func specificationV2(t *testing.T, as caller) {
	sealed := as("POST", "/api/v2/vault/seal", `{"name":"n","credential_type":"api_key","values":{"k":"v"},"ttl_days":30}`).Want(t, http.StatusCreated)
	id := sealed["credential_id"].(string)
	as("GET", "/api/v2/vault/list", "").Want(t, http.StatusOK)
	as("GET", "/api/v2/vault/"+id, "").Want(t, http.StatusOK)
	as("POST", "/api/v2/vault/rotate/"+id, "").Want(t, http.StatusOK)
	as("DELETE", "/api/v2/vault/"+id, "").Want(t, http.StatusOK)
	as("GET", "/api/v2/vault/"+id, "").Message(t, http.StatusForbidden)

	envelope := as("POST", "/api/v2/encryption/encrypt", `{"data":"hello","algorithm":"ML-KEM-768"}`)
	fields := envelope.Want(t, http.StatusOK)
	// The whole answer, posted back as it is; and the three fields alone.
	three := servertest.Marshal(t, map[string]any{"ciphertext_kem": fields["ciphertext_kem"], "ciphertext_data": fields["ciphertext_data"], "nonce": fields["nonce"]})
	for _, body := range []string{string(envelope.Body), three} {
		if got := as("POST", "/api/v2/encryption/decrypt", body).Want(t, http.StatusOK)["data"]; got != "hello" {
			t.Errorf("decrypted %v", got)
		}
	}
	as("POST", "/api/v2/encryption/encrypt", `{"data":"hello"}`).Want(t, http.StatusOK)
	as("POST", "/api/v2/encryption/encrypt", `{"data":"hello","algorithm":"RSA"}`).Message(t, http.StatusUnprocessableEntity)
	as("POST", "/api/v2/encryption/decrypt", strings.Replace(three, `"nonce":"`, `"nonce":"AAAA`, 1)).Message(t, http.StatusBadRequest)

	signed := as("POST", "/api/v2/encryption/sign", `{"data":"hello"}`).Want(t, http.StatusOK)
	verify := func(change map[string]any) servertest.Reply {
		body := map[string]any{"data": "hello", "pqc_signature": signed["pqc_signature"], "hmac_signature": signed["hmac_signature"]}
		for name, value := range change {
			if body[name] = value; value == nil {
				delete(body, name)
			}
		}
		return as("POST", "/api/v2/encryption/verify", servertest.Marshal(t, body))
	}
	if got := verify(nil).Want(t, http.StatusOK); got["valid"] != true {
		t.Errorf("verified: %v", got)
	}
	for _, change := range []map[string]any{{"data": "hallo"}, {"pqc_signature": "AAAA"}, {"hmac_signature": "AAAA"}, {"hmac_signature": "§"}} {
		if got := verify(change).Want(t, http.StatusOK); got["valid"] != false {
			t.Errorf("%v verified", change)
		}
	}
	verify(map[string]any{"pqc_signature": nil}).Message(t, http.StatusUnprocessableEntity)
	verify(map[string]any{"hmac_signature": nil}).Message(t, http.StatusUnprocessableEntity)
	as("GET", "/api/v2/audit/logs?event_type=CREDENTIAL_UNSEALED&hours=24", "").Want(t, http.StatusOK)

	score := as("GET", "/api/v2/compliance/score?framework=soc2", "").Want(t, http.StatusOK)
	if n, ok := score["score"].(float64); !ok || n < 0 || n > 100 {
		t.Errorf("score %v", score["score"])
	}
	report := as("GET", "/api/v2/compliance/report?framework=soc2", "").Want(t, http.StatusOK)
	if u, err := url.Parse(report["url"].(string)); err != nil || u.Query().Get("signature") == "" {
		t.Errorf("report: %v", report)
	}
	as("GET", "/api/v2/compliance/score?framework=x", "").Message(t, http.StatusBadRequest)
	as("GET", "/api/v2/compliance/report", "").Message(t, http.StatusBadRequest)
}

func TestRateLimits(t *testing.T) {
	s := newService(t)
	limit := func(tenant authz.TenantID, v1, v2 int) {
		t.Helper()
		s.Call(servertest.Request{Method: "PUT", Path: "/api/v2/system/tenants/" + string(tenant) + "/limits", Key: s.SystemKey(),
			Body: servertest.Marshal(t, map[string]int{"v1": v1, "v2": v2})}).Want(t, http.StatusOK)
	}
	limit(s.Tenant, 2, 3)
	reset := strconv.FormatInt(s.Clock.Now().Truncate(time.Minute).Add(time.Minute).Unix(), 10)
	for i, want := range []int{200, 200, 403, 429, 429} { // errors count too
		path := "/api/v2/vault/list"
		if want == http.StatusForbidden {
			path = "/api/v2/vault/x"
		}
		r := s.Get(path)
		if r.Status != want {
			t.Fatalf("request %d: %d", i, r.Status)
		}
		if got := r.Header.Get("X-RateLimit-Limit") + " " + r.Header.Get("X-RateLimit-Remaining") + " " + r.Header.Get("X-RateLimit-Reset"); got != "3 "+strconv.Itoa(max(0, 2-i))+" "+reset {
			t.Errorf("request %d: %s", i, got)
		}
		after, err := strconv.Atoi(r.Header.Get("Retry-After"))
		if want == http.StatusTooManyRequests && (err != nil || after < 60 || after > 65) {
			t.Errorf("Retry-After %q with 60 s to go", r.Header.Get("Retry-After"))
		}
	}
	for i, want := range []int{200, 200, 429} { // v1 has a bucket of its own
		r := s.Call(servertest.Request{Method: "GET", Path: "/v1/keys", Bearer: s.Key})
		if r.Status != want || want == 429 && r.Header.Get("Retry-After") != "60" {
			t.Errorf("v1, request %d: %d, Retry-After %q", i, r.Status, r.Header.Get("Retry-After"))
		}
	}
	if in := s.Metrics(); !strings.Contains(in, "\nlatticekeep_http_requests_limited_total{rate=\"address\"} 0\n") ||
		strings.Contains(in, "\nlatticekeep_http_requests_limited_total{rate=\"tenant\"} 0\n") {
		t.Error("the refusals are not counted for the tenant")
	}
	other := s.GrantKeyIn(s.Stranger().Tenant, authz.VaultRead) // and so has a neighbour
	s.Call(servertest.Request{Method: "GET", Path: "/api/v2/vault/list", Key: other}).Want(t, http.StatusOK)
	s.Clock.Advance(time.Minute)
	if n := len(s.Entries("event_type=RATE_LIMITED")); n != 1 {
		t.Errorf("%d entries of one caller over its limit in one minute", n)
	}
}

func TestAStrangersAddressHasABucket(t *testing.T) {
	small := newService(t, func(c *server.Config) { c.Limits.Address = 3 })
	for i, want := range []int{401, 401, 404, 429, 429} {
		path := "/api/v2/vault/list"
		if want == 404 {
			path = "/none"
		}
		r := small.Call(servertest.Request{Method: "GET", Path: path})
		if r.Status != want || r.Header.Get("X-RateLimit-Limit") != "3" {
			t.Errorf("request %d: %d, %v", i, r.Status, r.Header)
		}
	}
	small.Call(servertest.Request{Method: "POST", Path: "/api/v2/auth/login", Body: `{"email":"a@example.org","password":"x"}`}).Message(t, http.StatusTooManyRequests)
	if !strings.Contains(small.Metrics(), "\nlatticekeep_http_requests_limited_total{rate=\"address\"} 3\n") {
		t.Error("the refusals are not counted for the address")
	}
	// Who is known does not pay for its neighbours.
	small.Get("/api/v2/vault/list").Want(t, http.StatusOK)
	if r := small.Get("/healthz"); r.Status != http.StatusOK || r.Header.Get("X-RateLimit-Remaining") != "0" {
		t.Errorf("a probe: %d, %v", r.Status, r.Header)
	}
}
