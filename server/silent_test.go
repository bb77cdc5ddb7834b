package server_test

import (
	"encoding/json"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/test/servertest"
)

// These tests are about requests that must not silently do something else than they say.

// refusal returns the text that tells the caller what is wrong.
func refusal(t *testing.T, r servertest.Reply, status int) string {
	t.Helper()
	said := r.Want(t, status)["error"].(map[string]any)
	if details, ok := said["details"]; ok { // version 1
		return details.(string)
	}
	return said["message"].(string)
}

// as sends a body to either version with the key that has all scopes.
func (s *service) as(method, path, body string) servertest.Reply {
	s.T.Helper()
	r := servertest.Request{Method: method, Path: path, Body: body}
	if strings.HasPrefix(path, "/v1/") {
		r.Bearer = s.Key
	} else {
		r.Key = s.Key
	}
	return s.Call(r)
}

func TestUnknownFieldsAndParametersAreRefusedByName(t *testing.T) {
	s := newService(t)
	id := s.Seal("v")
	for _, c := range []struct {
		method, path, body string
		status             int
		says               string
	}{
		{"PUT", "/api/v2/vault/" + id, `{"name":"renamed","values":{"k":"other"}}`, 422, `the field "name" is unknown`},
		{"POST", "/api/v2/vault/rotate/" + id, `{"values":{"k":"other"}}`, 400, `takes no request body`},
		{"POST", "/api/v2/vault/seal", `{"name":"n","credential_type":"t","values":{"k":"v"},"ttl":1}`, 422, `the field "ttl" is unknown`},
		{"POST", "/api/v2/encryption/encrypt/batch", `{"items":[{"data":"a"},{"data":"b","key":"x"}]}`, 422, `the field "key" in items[1] is unknown`},
		{"POST", "/v1/encrypt", `{"data":"a","algorithm":"ML-KEM-768","keyid":"x"}`, 400, `the field "keyid" is unknown`},
		{"POST", "/v1/keys/generate", `{"name":"n","algorithm":"ML-KEM-768","Name":"m"}`, 400, `the field "Name" is unknown`},
		{"GET", "/api/v2/audit/logs?event=FOO", "", 400, `the parameter "event" is unknown`},
		{"GET", "/api/v2/vault/list?order=name", "", 400, `the parameter "order" is unknown`},
		{"GET", "/api/v2/vault/" + id + "?Version=1", "", 400, `the parameter "Version" is unknown`},
		{"POST", "/api/v2/vault/rotate/" + id + "?values=x", "", 400, `the parameter "values" is unknown`},
		{"GET", "/v1/keys?sort=name", "", 400, `the parameter "sort" is unknown`},
		{"GET", "/v1/audit/logs?event_type=FOO", "", 400, `the parameter "event_type" is unknown`},
	} {
		if said := refusal(t, s.as(c.method, c.path, c.body), c.status); !strings.Contains(said, c.says) {
			t.Errorf("%s %s %s: %q", c.method, c.path, c.body, said)
		}
	}
	got := s.Get("/api/v2/vault/"+id).Want(t, http.StatusOK)
	if got["version"] != 1.0 || got["values"].(map[string]any)["key"] != "v" {
		t.Errorf("a refused request changed the credential: %v", got)
	}
	s.as("POST", "/api/v2/vault/rotate/"+id, "{}").Want(t, http.StatusOK) // what some clients always send
}

func TestTheNameOfAnUnknownFieldIsShownSafely(t *testing.T) {
	s := newService(t)
	for name, want := range map[string]string{
		"line\nbreak":              `"line\nbreak"`,
		"\x1b[31mred":              `"\x1b[31mred"`,
		"left\u202eright":          `"left\u202eright"`,
		`quote"`:                   `"quote\""`,
		strings.Repeat("ä", 500):   `"` + strings.Repeat("ä", 40) + `"…`,
		strings.Repeat("\x00", 41): `"` + strings.Repeat(`\x00`, 40) + `"…`,
	} {
		body := servertest.Marshal(t, fields{"data": "a", name: servertest.Canary})
		for _, r := range []servertest.Reply{
			s.Post("/api/v2/encryption/sign", body), s.Get("/api/v2/vault/list?" + url.Values{name: {servertest.Canary}}.Encode()),
		} {
			var said struct{ Error struct{ Message string } }
			if err := json.Unmarshal(r.Body, &said); err != nil || !strings.Contains(said.Error.Message, want+" is unknown") || len(said.Error.Message) > 300 {
				t.Errorf("%.20q: %s, %v", name, r.Body, err)
			}
			if strings.Contains(string(r.Body), servertest.Canary) {
				t.Errorf("%.20q: a value is in %s", name, r.Body)
			}
		}
	}
}

// A program keeps what encrypt and sign answer as it is, and posts it back as it is.
func TestWholeAnswersMayBePostedBack(t *testing.T) {
	s := newService(t)
	v1 := string(s.as("POST", "/v1/encrypt", `{"data":"hello","algorithm":"ML-KEM-768"}`).Body)
	if got := s.as("POST", "/v1/decrypt", v1).Want(t, http.StatusOK)["data"]; got != "hello" {
		t.Errorf("v1 decrypted %v", got)
	}
	v1 = string(s.as("POST", "/v1/rewrap", v1).Body)
	if got := s.as("POST", "/v1/decrypt", v1).Want(t, http.StatusOK)["data"]; got != "hello" {
		t.Errorf("v1 decrypted %v after rewrap", got)
	}
	v2 := string(s.as("POST", "/api/v2/encryption/encrypt", `{"data":"hello"}`).Body)
	if got := s.as("POST", "/api/v2/encryption/decrypt", v2).Want(t, http.StatusOK)["data"]; got != "hello" {
		t.Errorf("v2 decrypted %v", got)
	}
	signed := s.as("POST", "/api/v2/encryption/sign", `{"data":"hello"}`).Want(t, http.StatusOK)
	signed["data"] = "hello"
	if got := s.as("POST", "/api/v2/encryption/verify", servertest.Marshal(t, signed)).Want(t, http.StatusOK)["valid"]; got != true {
		t.Errorf("verified %v", got)
	}
	for _, c := range []struct{ make, take, result string }{{"encrypt", "decrypt", "data"}, {"sign", "verify", "valid"}} {
		made := s.as("POST", "/api/v2/encryption/"+c.make+"/batch", `{"items":[{"data":"hello"},{"data":"hello"}]}`).Want(t, http.StatusOK)
		items := made["results"].([]any)
		for _, item := range items {
			if c.take == "verify" {
				item.(map[string]any)["data"] = "hello"
			}
		}
		taken := s.as("POST", "/api/v2/encryption/"+c.take+"/batch", servertest.Marshal(t, fields{"items": items})).Want(t, http.StatusOK)
		for _, result := range taken["results"].([]any) {
			if got := result.(map[string]any)[c.result]; got != "hello" && got != true {
				t.Errorf("%s: %v", c.take, result)
			}
		}
	}
	limits := "/api/v2/system/tenants/" + string(s.Tenant) + "/limits"
	tenant := s.Call(servertest.Request{Method: "PUT", Path: limits, Key: s.SystemKey(), Body: `{"v2":9999}`}).Want(t, http.StatusOK)["tenant"].(map[string]any)
	s.Call(servertest.Request{Method: "PUT", Path: limits, Key: s.SystemKey(), Body: servertest.Marshal(t, tenant["limits"])}).Want(t, http.StatusOK)
}

// JSON Schema calls a number whole by its value, and not by its spelling.
func TestWholeNumbersMayHaveAnySpelling(t *testing.T) {
	s := newService(t)
	for spelling, days := range map[string]float64{"30": 30, "30.0": 30, "3e1": 30, "1e2": 100, "3.65E+3": 3650, "10e-1": 1, "0.3e2": 30, "30.000": 30} {
		made := s.as("POST", "/v1/keys/generate", `{"name":"n","algorithm":"ML-KEM-768","rotation_period":`+spelling+`}`).Want(t, http.StatusCreated)
		if made["rotation_period"] != days {
			t.Errorf("v1 %s: %v", spelling, made["rotation_period"])
		}
		made = s.Post("/api/v2/keys", `{"name":"n","rotation_period":`+spelling+`}`).Want(t, http.StatusCreated)
		if got := made["key"].(map[string]any)["rotation_period"]; got != days {
			t.Errorf("v2 %s: %v", spelling, got)
		}
	}
	for _, spelling := range []string{"0.0", "0e9", "-1.0", "3651.0", "3.651e3", "30.5", "1e-1", "1e999", "1e-999", "30.00000000000000000001", "1e99999999999999999999", "-30e0"} {
		for path, body := range map[string]string{
			"/v1/keys/generate": `{"name":"n","algorithm":"ML-KEM-768","rotation_period":` + spelling + `}`, "/api/v2/keys": `{"name":"n","rotation_period":` + spelling + `}`,
		} {
			want := map[bool]int{true: 400, false: 422}[strings.HasPrefix(path, "/v1")]
			if said := refusal(t, s.as("POST", path, body), want); !strings.Contains(said, "rotation_period") {
				t.Errorf("%s %s: %s", path, spelling, said)
			}
		}
	}
	m := s.Manifest(t, "shop", "db", "v")
	body := strings.Replace(servertest.Marshal(t, m), `"version":1`, `"version":1.0`, 1) // a whole number of a type of its own
	if !strings.Contains(body, "1.0") {
		t.Fatal(body)
	}
	s.Post("/api/v2/sealing-key/reseal", body).Want(t, http.StatusOK)
}

func TestValidationMessagesNameTheFieldAndTheRule(t *testing.T) {
	s := newService(t)
	seal, scopes := "/api/v2/vault/seal", make([]string, 0)
	for _, scope := range authz.Scopes() {
		scopes = append(scopes, string(scope))
	}
	for _, c := range []struct{ path, body, says string }{
		{seal, `{"name":"n","credential_type":"api key","values":{"k":"v"}}`, `send credential_type as a string that matches ^[`},
		{seal, `{"name":"n","credential_type":"","values":{"k":"v"}}`, "send credential_type as a string of 1 to 63 characters"},
		{seal, `{"name":"n","credential_type":7,"values":{"k":"v"}}`, "send credential_type as a string of 1 to 63 characters"},
		{seal, `{"name":"n","credential_type":"t","values":[]}`, "send values as an object of 1 to 64 fields"},
		{seal, `{"name":"n","credential_type":"t","values":{}}`, "send values as an object of 1 to 64 fields"},
		{seal, `{"name":"n","credential_type":"t","values":{"k":1}}`, "send values[*] as a string"},
		{seal, `{"name":"n","credential_type":"t"}`, "the field values is missing"},
		{seal, `{"name":"n","credential_type":"t","values":{"k":"v"},"ttl_days":0}`, "send ttl_days as a whole number from 1 to 3650"},
		{seal, `[]`, "send the body as an object"},
		{"/api/v2/api-keys", `{"name":"n","scopes":["foo"]}`, "send scopes[0] as one of " + strings.Join(scopes, ", ")},
		{"/api/v2/api-keys", `{"name":"n","scopes":[]}`, "send scopes as a list of at least 1 items"},
		{"/api/v2/api-keys", `{"name":"n","scopes":["vault:read","vault:read"]}`, "send scopes as a list that repeats no item"},
		{"/api/v2/encryption/decrypt/batch", `{"items":[{"ciphertext_kem":"a","nonce":"b"}]}`, "the field items[0].ciphertext_data is missing"},
		{"/api/v2/keys", `{"name":"n","rotation_period":30.00000000000000000001}`, "check the type of rotation_period"},
	} {
		if said := refusal(t, s.Post(c.path, c.body), http.StatusUnprocessableEntity); !strings.HasSuffix(said, ": "+c.says) && !(strings.HasSuffix(c.says, "[") && strings.Contains(said, c.says)) {
			t.Errorf("%s: %q", c.body, said)
		}
	}
	r := s.Call(servertest.Request{Method: "POST", Path: seal, Key: s.Key, Header: http.Header{"Idempotency-Key": {"with a blank"}}, Body: `{"name":"n","credential_type":"t","values":{"k":"v"}}`})
	if said := refusal(t, r, http.StatusBadRequest); !strings.Contains(said, "Idempotency-Key") || !strings.Contains(said, "matches ^[!-~]+$") {
		t.Errorf("a blank in the key: %q", said)
	}
}
