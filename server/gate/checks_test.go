package gate_test

import (
	"bufio"
	"fmt"
	"net"
	"net/http"
	"regexp"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/api/openapi"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/server"
	"github.com/latticekeep/latticekeep/test/servertest"
)

func TestARequestIsAnsweredForTheFirstRuleItBreaks(t *testing.T) {
	s := newService(t)
	noScope := []authz.Scope{authz.ComplianceRead}
	all := authz.TenantScopes()
	huge := strings.Repeat("[", servertest.TooLarge)
	for _, c := range []struct {
		name string
		servertest.Request
		scopes []authz.Scope
		want   int
	}{
		{"route", servertest.Request{Method: "POST", Path: "/api/v2/vault/none/such?limit=x", Body: huge, ContentType: "text/plain"}, noScope, 404},
		{"method", servertest.Request{Method: "PATCH", Path: "/api/v2/keys?limit=x", Body: huge, ContentType: "text/plain"}, noScope, 405},
		{"size", servertest.Request{Method: "POST", Path: "/api/v2/vault/seal?%zz", Body: huge, ContentType: "text/plain"}, noScope, 413},
		{"size, chunked", servertest.Request{Method: "POST", Path: "/api/v2/vault/seal?%zz", Body: huge, ContentType: "text/plain", Chunked: true}, noScope, 413},
		{"size of a body that is not needed", servertest.Request{Method: "GET", Path: "/api/v2/vault/list?%zz", Body: huge, ContentType: "text/plain"}, noScope, 413},
		{"authentication", servertest.Request{Method: "POST", Path: "/api/v2/vault/seal?%zz", Body: "[", ContentType: "text/plain"}, noScope, 401},
		{"scope", servertest.Request{Method: "POST", Path: "/api/v2/vault/seal?%zz", Key: s.Key, Body: "[", ContentType: "text/plain"}, noScope, 403},
		{"content type", servertest.Request{Method: "POST", Path: "/api/v2/vault/seal?%zz", Key: s.Key, Body: "[", ContentType: "text/plain"}, all, 415},
		{"JSON", servertest.Request{Method: "POST", Path: "/api/v2/vault/seal", Key: s.Key, Body: `{"name":1,"name":2}`}, all, 400},
		{"no body, no content type", servertest.Request{Method: "POST", Path: "/api/v2/vault/seal", Key: s.Key}, all, 400},
		{"query string", servertest.Request{Method: "POST", Path: "/api/v2/vault/seal?%zz", Key: s.Key, Body: `{"name":1}`}, all, 400},
		{"schema", servertest.Request{Method: "POST", Path: "/api/v2/vault/seal", Key: s.Key, Body: `{"name":1}`}, all, 422},
		{"query without scope", servertest.Request{Method: "GET", Path: "/api/v2/audit/logs?limit=0", Key: s.Key}, noScope, 403},
		{"query", servertest.Request{Method: "GET", Path: "/api/v2/audit/logs?limit=0", Key: s.Key}, all, 400},
		{"id without a key", servertest.Request{Method: "GET", Path: "/api/v2/vault/x"}, all, 401},
		{"id after the content type", servertest.Request{Method: "DELETE", Path: "/api/v2/vault/x", Key: s.Key, Body: "[", ContentType: "text/plain"}, all, 415},
		{"id after the JSON", servertest.Request{Method: "DELETE", Path: "/api/v2/vault/x", Key: s.Key, Body: "["}, all, 400},
		{"id after a body that is not needed", servertest.Request{Method: "DELETE", Path: "/api/v2/vault/x", Key: s.Key, Body: `{"name":"x"}`}, all, 400},
		{"id after an unknown parameter", servertest.Request{Method: "DELETE", Path: "/api/v2/vault/x?name=y", Key: s.Key}, all, 400},
		{"id", servertest.Request{Method: "DELETE", Path: "/api/v2/vault/x", Key: s.Key, Body: "{}"}, all, 403},
	} {
		if c.Key != "" {
			c.Key = s.GrantKey(c.scopes...)
		}
		if r := s.Call(c.Request); r.Status != c.want {
			t.Errorf("%s: %d, want %d: %s", c.name, r.Status, c.want, r.Body)
		}
	}
}

// The rate is that of the tenant for a known caller, and of the address for everybody else.
func TestTheRateComesBeforeWhatIsWrongWithTheCaller(t *testing.T) {
	s := newService(t, func(c *server.Config) { c.Limits.Address = 1 })
	weak := s.GrantKey(authz.ComplianceRead)
	another := s.GrantKeyIn(s.Stranger().Tenant, authz.VaultRead)
	huge := strings.Repeat("[", servertest.TooLarge)
	s.Call(servertest.Request{Method: "PUT", Path: "/api/v2/system/tenants/" + string(s.Tenant) + "/limits", Key: s.SystemKey(), Body: `{"v1":1,"v2":1}`}).Want(t, http.StatusOK)
	list := servertest.Request{Method: "GET", Path: "/api/v2/vault/list"}
	as := func(r servertest.Request, key string) servertest.Request { r.Key = key; return r }
	s.Call(as(list, s.Key)).Want(t, http.StatusOK) // the one request of the tenant in v2
	s.Call(servertest.Request{Method: "GET", Path: "/v1/keys", Bearer: s.Key}).Want(t, http.StatusOK)
	s.Call(list).Message(t, http.StatusUnauthorized) // the one request of the address
	s.Call(as(list, another)).Want(t, http.StatusOK) // a known caller of the address is not limited by it
	for _, c := range []struct {
		name string
		servertest.Request
		want int
	}{
		{"size before rate", servertest.Request{Method: "POST", Path: "/api/v2/vault/seal", Key: s.Key, Body: huge}, 413},
		{"size before rate, nobody", servertest.Request{Method: "POST", Path: "/api/v2/vault/seal", Body: huge}, 413},
		{"rate before authentication", list, 429},
		{"rate before authentication, a wrong key", as(list, "lk_live_x"), 429},
		{"rate before authentication, v1", servertest.Request{Method: "GET", Path: "/v1/keys"}, 429},
		{"rate before scope", as(list, weak), 429},
		{"rate before scope, v1", servertest.Request{Method: "GET", Path: "/v1/keys", Bearer: weak}, 429},
		{"rate before content type", servertest.Request{Method: "POST", Path: "/api/v2/vault/seal", Key: s.Key, Body: "[", ContentType: "text/plain"}, 429},
		{"rate before route", servertest.Request{Method: "GET", Path: "/api/v2/none/such", Key: s.Key}, 429},
		{"rate before method", servertest.Request{Method: "PATCH", Path: "/api/v2/keys", Key: s.Key}, 429},
	} {
		if r := s.Call(c.Request); r.Status != c.want {
			t.Errorf("%s: %d, want %d: %s", c.name, r.Status, c.want, r.Body)
		}
	}
}

func TestTheScopeOfAServiceAccountComesBeforeTheRateOfItsTenant(t *testing.T) {
	s := newService(t)
	p := s.UsePods(s.Tenant)
	s.Call(servertest.Request{Method: "PUT", Path: "/api/v2/system/tenants/" + string(s.Tenant) + "/limits", Key: s.SystemKey(), Body: `{"v2":1}`}).Want(t, http.StatusOK)
	s.Get("/api/v2/vault/list").Want(t, http.StatusOK)
	s.Get("/api/v2/vault/list").Message(t, http.StatusTooManyRequests)
	list := servertest.Request{Method: "GET", Path: "/api/v2/vault/list", Bearer: servertest.ShopToken}
	s.Call(list).Message(t, http.StatusForbidden)
	p.Allow(servertest.AllowAll)
	s.Call(list).Message(t, http.StatusTooManyRequests)
}

// The tests of the order above are about the order that the contracts state.
func TestTheContractsStateTheOrderOfChecks(t *testing.T) {
	for text, want := range map[string]string{
		openapi.V1(): "404 405 413 429 401 403 415 400 400 400 404",
		openapi.V2(): "404 405 413 429 401 403 415 400 400 422 404 403",
	} {
		_, order, _ := strings.Cut(text, "**Order of checks.**")
		order, _, _ = strings.Cut(order, "A known")
		if got := strings.Join(regexp.MustCompile(`\b[45]\d\d\b`).FindAllString(order, -1), " "); got != want {
			t.Errorf("stated %s, want %s", got, want)
		}
	}
}

func TestAuthentication(t *testing.T) {
	s := newService(t)
	for name, header := range map[string]http.Header{
		"no key":             {},
		"empty":              {"X-API-Key": {""}},
		"twice":              {"X-API-Key": {s.Key, s.Key}},
		"twice, one empty":   {"X-API-Key": {s.Key, ""}},
		"listed":             {"X-API-Key": {s.Key + "," + s.Key}},
		"unknown":            {"X-API-Key": {"lk_live_" + strings.Repeat("a", 52)}},
		"upper case":         {"X-API-Key": {strings.ToUpper(s.Key)}},
		"one more character": {"X-API-Key": {s.Key + "a"}},
		"one less":           {"X-API-Key": {s.Key[:len(s.Key)-1]}},
		"without its prefix": {"X-API-Key": {strings.TrimPrefix(s.Key, "lk_live_")}},
		"long":               {"X-API-Key": {strings.Repeat("a", 8000)}},
		"bytes":              {"X-API-Key": {"\xff\xfe"}},
		"bearer":             {"Authorization": {"Bearer " + s.Key}},
		"basic":              {"Authorization": {"Basic " + s.Key}},
		"cookie":             {"Cookie": {"X-API-Key=" + s.Key}},
	} {
		for _, path := range []string{"/api/v2/vault/list", "/api/v2/vault/x", "/api/v2/audit/logs"} {
			if r := s.Call(servertest.Request{Method: "GET", Path: path, Header: header}); r.Status != http.StatusUnauthorized {
				t.Errorf("%s on %s: %d", name, path, r.Status)
			}
		}
	}
	s.Call(servertest.Request{Method: "GET", Path: "/api/v2/vault/list?api_key=" + s.Key + "&X-API-Key=" + s.Key}).Message(t, http.StatusUnauthorized)
	if _, _, err := s.Identity.Dev(t.Context()); err != nil { // makes a new key
		t.Fatal(err)
	}
	s.Get("/api/v2/vault/list").Message(t, http.StatusUnauthorized)
}

func TestHostileSealRequests(t *testing.T) {
	s := newService(t)
	body := func(fields string) string {
		return `{"name":"n","credential_type":"t","values":{"k":"v"}` + fields + `}`
	}
	for _, c := range []struct {
		name string
		servertest.Request
		want int
	}{
		{"exactly 1 MiB", servertest.Request{Body: body("") + strings.Repeat(" ", 1<<20-len(body("")))}, 201},
		{"1 MiB and a byte", servertest.Request{Body: body("") + strings.Repeat(" ", servertest.TooLarge-len(body("")))}, 413},
		{"1 MiB and a byte, chunked", servertest.Request{Body: body("") + strings.Repeat(" ", servertest.TooLarge-len(body(""))), Chunked: true}, 413},
		{"chunked", servertest.Request{Body: body(""), Chunked: true}, 201},
		{"empty", servertest.Request{}, 400},
		{"blank", servertest.Request{Body: " "}, 400},
		{"deep", servertest.Request{Body: body(`,"x":` + strings.Repeat("[", 1000) + strings.Repeat("]", 1000))}, 400},
		{"very deep", servertest.Request{Body: strings.Repeat(`{"a":`, 100_000)}, 400},
		{"duplicate names", servertest.Request{Body: body(`,"name":"n"`)}, 400},
		{"duplicate values", servertest.Request{Body: `{"name":"n","credential_type":"t","values":{"k":"v","k":"w"}}`}, 400},
		{"invalid UTF-8", servertest.Request{Body: body(",\"x\":\"\xff\"")}, 400},
		{"raw NUL", servertest.Request{Body: body(",\"x\":\"\x00\"")}, 400},
		{"lone surrogate", servertest.Request{Body: body(`,"x":"\ud800"`)}, 400},
		{"trailing data", servertest.Request{Body: body("") + "{}"}, 400},
		{"byte order mark", servertest.Request{Body: "\xef\xbb\xbf" + body("")}, 400},
		{"form", servertest.Request{Body: "name=n", ContentType: "application/x-www-form-urlencoded"}, 415},
		{"no content type", servertest.Request{Body: body(""), ContentType: " "}, 415},
		{"array", servertest.Request{Body: `[]`}, 422},
		{"null", servertest.Request{Body: `null`}, 422},
		{"nothing in it", servertest.Request{Body: `{}`}, 422},
		{"other case", servertest.Request{Body: `{"Name":"n","CREDENTIAL_TYPE":"t","Values":{"k":"v"}}`}, 422},
		{"NUL in the name", servertest.Request{Body: `{"name":"\u0000","credential_type":"t","values":{"k":"v"}}`}, 422},
		{"empty name", servertest.Request{Body: `{"name":"","credential_type":"t","values":{"k":"v"}}`}, 422},
		{"long name", servertest.Request{Body: `{"name":"` + strings.Repeat("n", 256) + `","credential_type":"t","values":{"k":"v"}}`}, 422},
		{"no type", servertest.Request{Body: `{"name":"n","values":{"k":"v"}}`}, 422},
		{"a type of another alphabet", servertest.Request{Body: `{"name":"n","credential_type":"ключ","values":{"k":"v"}}`}, 422},
		{"no values", servertest.Request{Body: `{"name":"n","credential_type":"t"}`}, 422},
		{"empty values", servertest.Request{Body: `{"name":"n","credential_type":"t","values":{}}`}, 422},
		{"number as a value", servertest.Request{Body: `{"name":"n","credential_type":"t","values":{"k":1}}`}, 422},
		{"null as a value", servertest.Request{Body: `{"name":"n","credential_type":"t","values":{"k":null}}`}, 422},
		{"object as a value", servertest.Request{Body: `{"name":"n","credential_type":"t","values":{"k":{}}}`}, 422},
		{"empty key", servertest.Request{Body: `{"name":"n","credential_type":"t","values":{"":"v"}}`}, 422},
		{"slash in a key", servertest.Request{Body: `{"name":"n","credential_type":"t","values":{"a/b":"v"}}`}, 422},
		{"65 values", servertest.Request{Body: `{"name":"n","credential_type":"t","values":{"k":"v"` + many(64) + `}}`}, 422},
		{"too much", servertest.Request{Body: `{"name":"n","credential_type":"t","values":{"k":"` + strings.Repeat("v", 256<<10) + `"}}`}, 422},
		{"ttl 0", servertest.Request{Body: body(`,"ttl_days":0`)}, 422},
		{"ttl -1", servertest.Request{Body: body(`,"ttl_days":-1`)}, 422},
		{"ttl 3651", servertest.Request{Body: body(`,"ttl_days":3651`)}, 422},
		{"ttl 1.5", servertest.Request{Body: body(`,"ttl_days":1.5`)}, 422},
		{"ttl as text", servertest.Request{Body: body(`,"ttl_days":"1"`)}, 422},
		{"ttl null", servertest.Request{Body: body(`,"ttl_days":null`)}, 422},
		{"huge ttl", servertest.Request{Body: body(`,"ttl_days":1e999`)}, 422},
		{"many digits", servertest.Request{Body: body(`,"ttl_days":` + strings.Repeat("9", 1000))}, 422},
		{"huge number in an unknown field", servertest.Request{Body: body(`,"x":1e999`)}, 422},
	} {
		c.Method, c.Path, c.Key = "POST", "/api/v2/vault/seal", s.Key
		if r := s.Call(c.Request); r.Status != c.want {
			t.Errorf("%s: %d, want %d: %s", c.name, r.Status, c.want, r.Body)
		}
	}
}

func TestATooLargeBodyIsRefusedBeforeItIsSent(t *testing.T) {
	s := newService(t)
	c, err := net.Dial("tcp", strings.TrimPrefix(s.URL, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := fmt.Fprintf(c, "POST /api/v2/vault/seal HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n", servertest.TooLarge); err != nil {
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
		if r := s.Get(path); r.Status != http.StatusNotFound {
			t.Errorf("%s: %d", path, r.Status)
		}
	}
	for method, allow := range map[string]string{"PUT": "POST", "PATCH": "POST", "OPTIONS": "POST", "canary": "POST"} {
		r := s.Call(servertest.Request{Method: method, Path: "/api/v2/vault/rotate/x", Key: s.Key})
		r.Message(t, http.StatusMethodNotAllowed)
		if r.Header.Get("Allow") != allow {
			t.Errorf("%s: Allow %q", method, r.Header.Get("Allow"))
		}
	}
}
