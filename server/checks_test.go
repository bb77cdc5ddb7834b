package server

import (
	"bufio"
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/internal/authz"
)

const tooLarge = 1<<20 + 1

func TestARequestIsAnsweredForTheFirstRuleItBreaks(t *testing.T) {
	s := newService(t)
	noScope := []authz.Scope{authz.ComplianceRead}
	all := authz.TenantScopes()
	huge := strings.Repeat("[", tooLarge)
	for _, c := range []struct {
		name string
		request
		scopes []authz.Scope
		want   int
	}{
		{"route", request{method: "POST", path: "/api/v2/vault/none/such?limit=x", body: huge, contentType: "text/plain"}, noScope, 404},
		{"method", request{method: "PATCH", path: "/api/v2/vault/seal?limit=x", body: huge, contentType: "text/plain"}, noScope, 405},
		{"size", request{method: "POST", path: "/api/v2/vault/seal?%zz", body: huge, contentType: "text/plain"}, noScope, 413},
		{"size, chunked", request{method: "POST", path: "/api/v2/vault/seal?%zz", body: huge, contentType: "text/plain", chunked: true}, noScope, 413},
		{"size of a body that is not needed", request{method: "GET", path: "/api/v2/vault/list?%zz", body: huge, contentType: "text/plain"}, noScope, 413},
		{"authentication", request{method: "POST", path: "/api/v2/vault/seal?%zz", body: "[", contentType: "text/plain"}, noScope, 401},
		{"scope", request{method: "POST", path: "/api/v2/vault/seal?%zz", key: s.key, body: "[", contentType: "text/plain"}, noScope, 403},
		{"content type", request{method: "POST", path: "/api/v2/vault/seal?%zz", key: s.key, body: "[", contentType: "text/plain"}, all, 415},
		{"JSON", request{method: "POST", path: "/api/v2/vault/seal", key: s.key, body: `{"name":1,"name":2}`}, all, 400},
		{"no body, no content type", request{method: "POST", path: "/api/v2/vault/seal", key: s.key}, all, 400},
		{"query string", request{method: "POST", path: "/api/v2/vault/seal?%zz", key: s.key, body: `{"name":1}`}, all, 400},
		{"schema", request{method: "POST", path: "/api/v2/vault/seal", key: s.key, body: `{"name":1}`}, all, 422},
		{"query without scope", request{method: "GET", path: "/api/v2/audit/logs?limit=0", key: s.key}, noScope, 403},
		{"query", request{method: "GET", path: "/api/v2/audit/logs?limit=0", key: s.key}, all, 400},
		{"id without a key", request{method: "GET", path: "/api/v2/vault/x"}, all, 401},
		{"id after the content type", request{method: "DELETE", path: "/api/v2/vault/x", key: s.key, body: "[", contentType: "text/plain"}, all, 415},
		{"id after the JSON", request{method: "DELETE", path: "/api/v2/vault/x", key: s.key, body: "["}, all, 400},
		{"id", request{method: "DELETE", path: "/api/v2/vault/x", key: s.key, body: "[]"}, all, 403},
	} {
		if c.key != "" {
			c.key = s.grant(c.scopes...)
		}
		if r := s.call(c.request); r.status != c.want {
			t.Errorf("%s: %d, want %d: %s", c.name, r.status, c.want, r.body)
		}
	}
}

func TestAuthentication(t *testing.T) {
	s := newService(t)
	for name, header := range map[string]http.Header{
		"no key":             {},
		"empty":              {"X-API-Key": {""}},
		"twice":              {"X-API-Key": {s.key, s.key}},
		"twice, one empty":   {"X-API-Key": {s.key, ""}},
		"listed":             {"X-API-Key": {s.key + "," + s.key}},
		"unknown":            {"X-API-Key": {"lk_live_" + strings.Repeat("a", 52)}},
		"upper case":         {"X-API-Key": {strings.ToUpper(s.key)}},
		"one more character": {"X-API-Key": {s.key + "a"}},
		"one less":           {"X-API-Key": {s.key[:len(s.key)-1]}},
		"without its prefix": {"X-API-Key": {strings.TrimPrefix(s.key, "lk_live_")}},
		"long":               {"X-API-Key": {strings.Repeat("a", 8000)}},
		"bytes":              {"X-API-Key": {"\xff\xfe"}},
		"bearer":             {"Authorization": {"Bearer " + s.key}},
		"basic":              {"Authorization": {"Basic " + s.key}},
		"cookie":             {"Cookie": {"X-API-Key=" + s.key}},
	} {
		for _, path := range []string{"/api/v2/vault/list", "/api/v2/vault/x", "/api/v2/audit/logs"} {
			if r := s.call(request{method: "GET", path: path, header: header}); r.status != http.StatusUnauthorized {
				t.Errorf("%s on %s: %d", name, path, r.status)
			}
		}
	}
	s.call(request{method: "GET", path: "/api/v2/vault/list?api_key=" + s.key + "&X-API-Key=" + s.key}).message(t, http.StatusUnauthorized)
	if _, _, err := s.identity.Dev(t.Context()); err != nil { // makes a new key
		t.Fatal(err)
	}
	s.get("/api/v2/vault/list").message(t, http.StatusUnauthorized)
}

func TestHostileSealRequests(t *testing.T) {
	s := newService(t)
	body := func(fields string) string {
		return `{"name":"n","credential_type":"t","values":{"k":"v"}` + fields + `}`
	}
	for _, c := range []struct {
		name string
		request
		want int
	}{
		{"exactly 1 MiB", request{body: body("") + strings.Repeat(" ", 1<<20-len(body("")))}, 201},
		{"1 MiB and a byte", request{body: body("") + strings.Repeat(" ", tooLarge-len(body("")))}, 413},
		{"1 MiB and a byte, chunked", request{body: body("") + strings.Repeat(" ", tooLarge-len(body(""))), chunked: true}, 413},
		{"chunked", request{body: body(""), chunked: true}, 201},
		{"empty", request{}, 400},
		{"blank", request{body: " "}, 400},
		{"deep", request{body: body(`,"x":` + strings.Repeat("[", 1000) + strings.Repeat("]", 1000))}, 400},
		{"very deep", request{body: strings.Repeat(`{"a":`, 100_000)}, 400},
		{"duplicate names", request{body: body(`,"name":"n"`)}, 400},
		{"duplicate values", request{body: `{"name":"n","credential_type":"t","values":{"k":"v","k":"w"}}`}, 400},
		{"invalid UTF-8", request{body: body(",\"x\":\"\xff\"")}, 400},
		{"raw NUL", request{body: body(",\"x\":\"\x00\"")}, 400},
		{"lone surrogate", request{body: body(`,"x":"\ud800"`)}, 400},
		{"trailing data", request{body: body("") + "{}"}, 400},
		{"byte order mark", request{body: "\xef\xbb\xbf" + body("")}, 400},
		{"form", request{body: "name=n", contentType: "application/x-www-form-urlencoded"}, 415},
		{"no content type", request{body: body(""), contentType: " "}, 415},
		{"array", request{body: `[]`}, 422},
		{"null", request{body: `null`}, 422},
		{"nothing in it", request{body: `{}`}, 422},
		{"other case", request{body: `{"Name":"n","CREDENTIAL_TYPE":"t","Values":{"k":"v"}}`}, 422},
		{"NUL in the name", request{body: `{"name":"\u0000","credential_type":"t","values":{"k":"v"}}`}, 422},
		{"empty name", request{body: `{"name":"","credential_type":"t","values":{"k":"v"}}`}, 422},
		{"long name", request{body: `{"name":"` + strings.Repeat("n", 256) + `","credential_type":"t","values":{"k":"v"}}`}, 422},
		{"no type", request{body: `{"name":"n","values":{"k":"v"}}`}, 422},
		{"a type of another alphabet", request{body: `{"name":"n","credential_type":"ключ","values":{"k":"v"}}`}, 422},
		{"no values", request{body: `{"name":"n","credential_type":"t"}`}, 422},
		{"empty values", request{body: `{"name":"n","credential_type":"t","values":{}}`}, 422},
		{"number as a value", request{body: `{"name":"n","credential_type":"t","values":{"k":1}}`}, 422},
		{"null as a value", request{body: `{"name":"n","credential_type":"t","values":{"k":null}}`}, 422},
		{"object as a value", request{body: `{"name":"n","credential_type":"t","values":{"k":{}}}`}, 422},
		{"empty key", request{body: `{"name":"n","credential_type":"t","values":{"":"v"}}`}, 422},
		{"slash in a key", request{body: `{"name":"n","credential_type":"t","values":{"a/b":"v"}}`}, 422},
		{"65 values", request{body: `{"name":"n","credential_type":"t","values":{"k":"v"` + many(64) + `}}`}, 422},
		{"too much", request{body: `{"name":"n","credential_type":"t","values":{"k":"` + strings.Repeat("v", 256<<10) + `"}}`}, 422},
		{"ttl 0", request{body: body(`,"ttl_days":0`)}, 422},
		{"ttl -1", request{body: body(`,"ttl_days":-1`)}, 422},
		{"ttl 3651", request{body: body(`,"ttl_days":3651`)}, 422},
		{"ttl 1.5", request{body: body(`,"ttl_days":1.5`)}, 422},
		{"ttl as text", request{body: body(`,"ttl_days":"1"`)}, 422},
		{"ttl null", request{body: body(`,"ttl_days":null`)}, 422},
		{"huge ttl", request{body: body(`,"ttl_days":1e999`)}, 422},
		{"many digits", request{body: body(`,"ttl_days":` + strings.Repeat("9", 1000))}, 422},
		{"huge number in an unknown field", request{body: body(`,"x":1e999`)}, 201},
	} {
		c.method, c.path, c.key = "POST", "/api/v2/vault/seal", s.key
		if r := s.call(c.request); r.status != c.want {
			t.Errorf("%s: %d, want %d: %s", c.name, r.status, c.want, r.body)
		}
	}
}

func TestATooLargeBodyIsRefusedBeforeItIsSent(t *testing.T) {
	s := newService(t)
	c, err := net.Dial("tcp", strings.TrimPrefix(s.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := fmt.Fprintf(c, "POST /api/v2/vault/seal HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n", tooLarge); err != nil {
		t.Fatal(err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusRequestEntityTooLarge {
		t.Errorf("status %d", resp.StatusCode)
	}
}

// many returns n more members of an object.
func many(n int) string {
	var b strings.Builder
	for i := range n {
		b.WriteString(`,"x` + strings.Repeat("x", i) + `":"v"`)
	}
	return b.String()
}

func TestUnknownRoutesAndMethodsHaveTheEnvelope(t *testing.T) {
	s := newService(t)
	for _, path := range []string{"/index.html", "/vault/", "/settings/", "/assets/app.js", "/assets/0000000000000000/app.js", "/api", "/api/v2", "/api/v2/", "/api/v2/vault", "/api/v2/vault/", "/API/v2/vault/list",
		"/api/v2/vault/list/", "//api/v2/vault/list", "/api/v2/vault/../vault/list", "/v1", "/v1/", "/debug/pprof/", "/healthz/", "/%00", "/api/v2/vault/a/b"} {
		if r := s.get(path); r.status != http.StatusNotFound {
			t.Errorf("%s: %d", path, r.status)
		}
	}
	for method, allow := range map[string]string{"PUT": "POST", "PATCH": "POST", "OPTIONS": "POST", "canary": "POST"} {
		r := s.call(request{method: method, path: "/api/v2/vault/rotate/x", key: s.key})
		r.message(t, http.StatusMethodNotAllowed)
		if r.header.Get("Allow") != allow {
			t.Errorf("%s: Allow %q", method, r.header.Get("Allow"))
		}
	}
}
