package server

import (
	"bufio"
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"hash"
	"io"
	"maps"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
)

// forge makes a JWT of the service's own key, which proves that what is wrong
// with it is what a test made wrong.
func forge(t *testing.T, key []byte, header, claims map[string]any) string {
	t.Helper()
	encode := base64.RawURLEncoding.EncodeToString
	signed := encode([]byte(marshal(t, header))) + "." + encode([]byte(marshal(t, claims)))
	algorithm := map[string]func() hash.Hash{"HS256": sha256.New, "HS384": sha512.New384}[fmt.Sprint(header["alg"])]
	if algorithm == nil {
		algorithm = sha512.New
	}
	mac := hmac.New(algorithm, key)
	mac.Write([]byte(signed))
	return signed + "." + encode(mac.Sum(nil))
}

// part decodes a part of a JWT.
func part(t *testing.T, token string, i int) map[string]any {
	t.Helper()
	b, err := base64.RawURLEncoding.DecodeString(strings.Split(token, ".")[i])
	if err != nil {
		t.Fatal(err)
	}
	var fields map[string]any
	d := json.NewDecoder(bytes.NewReader(b))
	d.UseNumber()
	if err := d.Decode(&fields); err != nil {
		t.Fatal(err)
	}
	return fields
}

func TestForgedAccessTokensAreNobody(t *testing.T) {
	s := newService(t)
	user, other := s.register("owner@example.org"), s.register("other@example.org")
	key := []byte(s.keys.TokenKey())
	header, claims := part(t, user.access, 0), part(t, user.access, 1)
	now := s.clock.Now()
	changed := func(fields map[string]any, pairs ...any) map[string]any {
		c := maps.Clone(fields)
		for i := 0; i < len(pairs); i += 2 {
			if c[pairs[i].(string)] = pairs[i+1]; pairs[i+1] == nil {
				delete(c, pairs[i].(string))
			}
		}
		return c
	}
	try := func(name, token string, want int) {
		t.Helper()
		for how, r := range map[string]request{
			"bearer": {method: "GET", path: "/api/v2/auth/me", bearer: token},
			"cookie": {method: "GET", path: "/api/v2/auth/me", header: cookies("accessToken", token)},
			"scope":  {method: "GET", path: "/api/v2/vault/list", bearer: token},
		} {
			if how == "cookie" && strings.ContainsAny(token, " ,;\"\\\r\n") {
				continue
			}
			got := s.call(r)
			if got.status != want || want != http.StatusOK && echoed(got) {
				t.Errorf("%s as %s: %d %s", name, how, got.status, got.body)
			}
		}
	}
	try("the user's own", user.access, http.StatusOK)
	try("one made alike", forge(t, key, header, claims), http.StatusOK)

	for name, pairs := range map[string][]any{
		"alg none": {"alg", "none"}, "alg None": {"alg", "None"}, "alg empty": {"alg", ""}, "no alg": {"alg", nil}, "alg null": {"alg",
			json.RawMessage("null")}, "HS256": {"alg", "HS256"},
		"HS384": {"alg", "HS384"}, "RS256": {"alg", "RS256"}, "EdDSA": {"alg", "EdDSA"}, "hs512": {"alg", "hs512"}, "alg a list": {"alg",
			[]string{"HS512"}},
		"typ JWT": {"typ", "JWT"}, "no typ": {"typ", nil}, "typ of another case": {"typ", "AT+JWT"}, "typ a list": {"typ", []string{"at+jwt"}},
		"another kid": {"kid", "2"}, "no kid": {"kid", nil}, "a path as kid": {"kid", "../../dev/null"}, "a number as kid": {"kid", 1},
	} {
		try(name, forge(t, key, changed(header, pairs...), claims), http.StatusUnauthorized)
	}
	for name, pairs := range map[string][]any{
		"expired": {"exp", now.Unix() - 1}, "expired now": {"exp", now.Unix()}, "no exp": {"exp", nil}, "exp null": {"exp", json.RawMessage("null")},
		"exp 0": {"exp", 0}, "exp a list": {"exp", []int64{now.Unix() + 600}},
		"not yet valid": {"nbf", now.Unix() + 60}, "no nbf": {"nbf", nil},
		"another audience": {"aud", canary}, "no audience": {"aud", nil}, "empty audience": {"aud", []string{}}, "audience in another case": {"aud",
			"Latticekeep-API"},
		"another issuer": {"iss", "latticekeep/" + canary}, "no issuer": {"iss", nil}, "issuer with more": {"iss", fmt.Sprint(claims["iss"], "/")},
		"no subject": {"sub", nil}, "another user": {"sub", part(t, other.access, 1)["sub"]}, "nobody": {"sub", authz.NewID("usr")},
		"a path as subject": {"sub", "usr_../" + canary},
		"a key as subject":  {"sub", authz.NewID("key")},
		"no session":        {"sid", nil}, "another's session": {"sid", part(t, other.access, 1)["sid"]}, "no such session": {"sid", authz.NewID("ses")},
		"session a list": {"sid", []any{claims["sid"]}},
	} {
		try(name, forge(t, key, header, changed(claims, pairs...)), http.StatusUnauthorized)
	}
	for name, foreign := range map[string][]byte{"no key": {}, "zeros": make([]byte, 64), "half a key": key[:32],
		"a public value": []byte(fmt.Sprint(claims["iss"])), "flipped": append([]byte{key[0] ^ 1}, key[1:]...)} {
		try(name, forge(t, foreign, header, claims), http.StatusUnauthorized)
	}
	parts := strings.Split(user.access, ".")
	bare := parts[0] + "." + parts[1]
	mac, err := base64.RawURLEncoding.DecodeString(parts[2])
	if err != nil {
		t.Fatal(err)
	}
	for name, token := range map[string]string{
		"no signature": bare + ".", "two parts": bare, "four parts": user.access + "." + parts[2], "a dot behind": user.access + ".",
		"a dot in front": "." + user.access, "dots": "..",
		"no header": "." + parts[1] + "." + parts[2], "another's signature": bare + "." + strings.Split(other.access, ".")[2],
		"signature cut": user.access[:len(user.access)-2],
		"padding":       user.access + "==", "MAC cut in half": bare + "." + base64.RawURLEncoding.EncodeToString(mac[:32]),
		"MAC in hexadecimal": bare + "." + fmt.Sprintf("%x", mac),
		"parts swapped":      parts[1] + "." + parts[0] + "." + parts[2], "the header thrice": parts[0] + "." + parts[0] + "." + parts[0],
		"JSON":       string(mustRaw(t, parts[0])) + "..",
		"an API key": s.key, "a refresh token": user.refresh, "a word": canary, "twice": user.access + user.access,
		"with a space": user.access + " " + user.access, "tab": parts[0] + "\t." + parts[1] + "." + parts[2],
		"a list": user.access + ", " + other.access, "long": strings.Repeat("a", 4000) + "." + strings.Repeat("b", 4000) + "." + strings.Repeat("c",
			4000), "many dots": strings.Repeat(".", 12_000),
		"deep": base64.RawURLEncoding.EncodeToString([]byte(strings.Repeat("[", 5000))) + "." + parts[1] + "." + parts[2],
	} {
		try(name, token, http.StatusUnauthorized)
	}
	// The spare bits of the last character: one token has one spelling.
	const alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
	last := strings.IndexByte(alphabet, user.access[len(user.access)-1])
	try("spare bits", user.access[:len(user.access)-1]+string(alphabet[last^1]), http.StatusUnauthorized)

	s.clock.advance(30*time.Minute - time.Second)
	try("a second before it expires", user.access, http.StatusOK)
	s.clock.advance(time.Second)
	try("when it expires", user.access, http.StatusUnauthorized)
	again := s.login(user.email, user.password)
	s.call(request{method: "POST", path: "/api/v2/auth/logout", bearer: again.access}).want(t, http.StatusOK)
	try("of a session that ended", again.access, http.StatusUnauthorized)
}

func mustRaw(t *testing.T, s string) []byte {
	t.Helper()
	b, err := base64.RawURLEncoding.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestTwoCredentialsAreAsGoodAsNone(t *testing.T) {
	s := newService(t)
	user, other := s.register("owner@example.org"), s.register("other@example.org")
	const v2, v1 = "/api/v2/auth/me", "/v1/keys"
	bearer := func(token string) string { return "Bearer " + token }
	for name, c := range map[string]struct {
		path   string
		header http.Header
		want   int
	}{
		"bearer":                       {v2, http.Header{"Authorization": {bearer(user.access)}}, 200},
		"bearer in another case":       {v2, http.Header{"Authorization": {"bEARER " + user.access}}, 200},
		"two bearers":                  {v2, http.Header{"Authorization": {bearer(user.access), bearer(user.access)}}, 401},
		"two users":                    {v2, http.Header{"Authorization": {bearer(user.access), bearer(other.access)}}, 401},
		"bearer and an empty one":      {v2, http.Header{"Authorization": {bearer(user.access), ""}}, 401},
		"bearer and key":               {v2, http.Header{"Authorization": {bearer(user.access)}, "X-Api-Key": {s.key}}, 401},
		"bearer and an empty key":      {v2, http.Header{"Authorization": {bearer(user.access)}, "X-Api-Key": {""}}, 401},
		"key and an empty bearer":      {v2, http.Header{"Authorization": {""}, "X-Api-Key": {s.key}}, 401},
		"key as bearer":                {v2, http.Header{"Authorization": {bearer(s.key)}}, 401},
		"token as key":                 {v2, http.Header{"X-Api-Key": {user.access}}, 401},
		"key as cookie":                {v2, cookies("accessToken", s.key), 401},
		"refresh token as access":      {v2, cookies("accessToken", user.refresh), 401},
		"no space":                     {v2, http.Header{"Authorization": {"Bearer" + user.access}}, 401},
		"two spaces":                   {v2, http.Header{"Authorization": {"Bearer  " + user.access}}, 401},
		"a tab":                        {v2, http.Header{"Authorization": {"Bearer\t" + user.access}}, 401},
		"basic":                        {v2, http.Header{"Authorization": {"Basic " + user.access}}, 401},
		"token alone":                  {v2, http.Header{"Authorization": {user.access}}, 401},
		"scheme alone":                 {v2, http.Header{"Authorization": {"Bearer"}}, 401},
		"cookie":                       {v2, cookies("accessToken", user.access), 200},
		"cookie twice":                 {v2, cookies("accessToken", user.access, "accessToken", user.access), 401},
		"cookie of two users":          {v2, http.Header{"Cookie": {"accessToken=" + user.access, "accessToken=" + other.access}}, 401},
		"cookie in another case":       {v2, cookies("AccessToken", user.access), 401},
		"cookie with a prefix":         {v2, cookies("__Host-accessToken", user.access), 401},
		"empty cookie":                 {v2, cookies("accessToken", ""), 401},
		"cookie behind a wrong bearer": {v2, http.Header{"Authorization": {bearer(canary)}, "Cookie": {"accessToken=" + user.access}}, 401},
		"cookie behind an empty key":   {v2, http.Header{"X-Api-Key": {""}, "Cookie": {"accessToken=" + user.access}}, 401},
		"a wrong cookie behind bearer": {v2, http.Header{"Authorization": {bearer(user.access)}, "Cookie": {"accessToken=" + canary}}, 200},
		"v1: bearer":                   {v1, http.Header{"Authorization": {bearer(s.key)}}, 200},
		"v1: two bearers":              {v1, http.Header{"Authorization": {bearer(s.key), bearer(s.key)}}, 401},
		"v1: an access token":          {v1, http.Header{"Authorization": {bearer(user.access)}}, 401},
		"v1: X-API-Key":                {v1, http.Header{"X-Api-Key": {s.key}}, 401},
		"v1: cookie":                   {v1, cookies("accessToken", user.access), 401},
		"v1: a key as cookie":          {v1, cookies("accessToken", s.key), 401},
	} {
		got := s.call(request{method: "GET", path: c.path, header: c.header})
		if got.status != c.want || echoed(got) {
			t.Errorf("%s: %d %s", name, got.status, got.body)
		}
	}
	for name, header := range map[string]http.Header{
		"none": nil, "empty": cookies("refreshToken", ""), "twice": cookies("refreshToken", user.refresh, "refreshToken", user.refresh),
		"another case": cookies("RefreshToken", user.refresh),
		"access token": cookies("refreshToken", user.access), "a word": cookies("refreshToken", canary), "long": cookies("refreshToken",
			user.refresh+strings.Repeat("a", 8000)),
		"as bearer": {"Authorization": {bearer(user.refresh)}}, "upper case": cookies("refreshToken", strings.ToUpper(user.refresh)),
		"as access cookie": cookies("accessToken", user.refresh),
	} {
		for _, path := range []string{"/api/v2/auth/refresh", "/api/v2/auth/logout"} {
			if got := s.call(request{method: "POST", path: path, header: header}); got.status != http.StatusUnauthorized || echoed(got) {
				t.Errorf("%s, refresh token %s: %d %s", path, name, got.status, got.body)
			}
		}
	}
	s.call(request{method: "POST", path: "/api/v2/auth/refresh", header: cookies("refreshToken", user.refresh)}).want(t, http.StatusOK)
}

// A page of another origin makes a browser send cookies, not headers.
func TestRequestsOfOtherOriginsWithCookiesAreRefused(t *testing.T) {
	b := newBesieged(t)
	foreign := map[string]http.Header{
		"cross-site":          {"Sec-Fetch-Site": {"cross-site"}},
		"same-site":           {"Sec-Fetch-Site": {"same-site"}},
		"cross-site, origin":  {"Sec-Fetch-Site": {"cross-site"}, "Origin": {"https://" + canary + ".example"}},
		"origin":              {"Origin": {"https://" + canary + ".example"}},
		"origin null":         {"Origin": {"null"}},
		"origin of a prefix":  {"Origin": {b.url + ".example"}},
		"another port":        {"Origin": {"http://127.0.0.1:1"}},
		"unknown value":       {"Sec-Fetch-Site": {canary}},
		"none, but an origin": {"Sec-Fetch-Site": {""}, "Origin": {"https://example.org"}},
	}
	own := map[string]http.Header{
		"no browser":  {},
		"same-origin": {"Sec-Fetch-Site": {"same-origin"}, "Origin": {b.url}},
		"typed":       {"Sec-Fetch-Site": {"none"}},
		"own origin":  {"Origin": {b.url}},
	}
	with := func(header, more http.Header) http.Header {
		all := maps.Clone(more)
		maps.Copy(all, header)
		return all
	}
	cookie := cookies("accessToken", b.user.access)
	for _, o := range listedOperations(t) {
		if strings.HasPrefix(o.id, "v1 ") || o.scope == "system:admin" {
			continue // which take no cookie, and no user
		}
		r := b.request(o)
		r.key, r.bearer = "", ""
		if !o.public && r.header == nil {
			r.header = cookie
		}
		for name, header := range foreign {
			attempt := r
			attempt.header = with(r.header, header)
			if o.method != http.MethodGet {
				b.refused(t, o.id+", "+name, attempt, http.StatusForbidden)
				continue
			}
			got := b.call(attempt)
			if got.status == http.StatusForbidden && !strings.HasPrefix(o.path, "/api/v2/vault/") && o.id != signed || got.status == http.StatusUnauthorized {
				t.Errorf("%s, %s: reading is refused: %d %s", o.id, name, got.status, got.body)
			}
			for answered := range got.header {
				if strings.HasPrefix(answered, "Access-Control-") {
					t.Errorf("%s, %s: %s lets the page read it", o.id, name, answered)
				}
			}
		}
	}
	encrypt := request{method: "POST", path: "/api/v2/encryption/encrypt", body: `{"data":"d"}`}
	for name, header := range own {
		r := encrypt
		r.header = with(cookie, header)
		if got := b.call(r); got.status != http.StatusOK {
			t.Errorf("%s: %d %s", name, got.status, got.body)
		}
	}
	for name, header := range foreign {
		for how, r := range map[string]request{"key": {key: b.key}, "bearer": {bearer: b.user.access}} {
			r.method, r.path, r.body, r.header = encrypt.method, encrypt.path, encrypt.body, header
			if got := b.call(r); got.status != http.StatusOK {
				t.Errorf("%s with a %s in a header: %d %s", name, how, got.status, got.body)
			}
		}
		r := request{method: "POST", path: "/v1/encrypt", body: `{"data":"d","algorithm":"ML-KEM-768"}`, bearer: b.key, header: header}
		b.call(r).want(t, http.StatusOK)
	}
	preflight := b.call(request{method: "OPTIONS", path: encrypt.path, header: http.Header{"Origin": {"https://example.org"},
		"Access-Control-Request-Method": {"POST"}}})
	if preflight.status != http.StatusMethodNotAllowed || preflight.header.Get("Access-Control-Allow-Origin") != "" {
		t.Errorf("preflight: %d %v", preflight.status, preflight.header)
	}
	b.untouched(t)
}

// What is no proper HTTP request never reaches an operation.
func TestMalformedHTTPIsRefused(t *testing.T) {
	s := newService(t)
	head := func(line string, fields ...string) string {
		return line + "\r\nHost: x\r\nX-API-Key: " + s.key + "\r\n" + strings.Join(fields, "\r\n") + "\r\n\r\n"
	}
	const post, length = "POST /api/v2/encryption/encrypt HTTP/1.1", "Content-Length: 12"
	const kind, body = "Content-Type: application/json", `{"data":"d"}`
	for name, c := range map[string]struct {
		sent string
		want int
	}{
		"proper":                 {head(post, kind, length) + body, 200},
		"expecting 100":          {head(post, kind, length, "Expect: 100-continue") + body, 200},
		"two content types":      {head(post, kind, kind, length) + body, 415},
		"compressed":             {head(post, kind, length, "Content-Encoding: gzip") + "\x1f\x8b\x08" + body[3:], 400},
		"two lengths":            {head(post, kind, length, "Content-Length: 11") + body, 400},
		"negative length":        {head(post, kind, "Content-Length: -1") + body, 400},
		"length with a sign":     {head(post, kind, "Content-Length: +12") + body, 400},
		"another coding":         {head(post, kind, "Transfer-Encoding: gzip, chunked") + body, 501},
		"a bad chunk":            {head(post, kind, "Transfer-Encoding: chunked") + "zz\r\n" + body, 400},
		"no host":                {"GET /api/v2/vault/list HTTP/1.1\r\n\r\n", 400},
		"two hosts":              {head("GET /api/v2/vault/list HTTP/1.1", "Host: y"), 400},
		"space in a name":        {head("GET /api/v2/vault/list HTTP/1.1", "X-API-Key : "+canary), 400},
		"NUL in a header":        {head("GET /api/v2/vault/list HTTP/1.1", "X: a\x00"+canary), 400},
		"a bad escape":           {head("GET /api/v2/vault/%zz HTTP/1.1"), 400},
		"another version":        {head("GET /api/v2/vault/list HTTP/9.9"), 505},
		"no version":             {"GET /api/v2/vault/list\r\n\r\n", 400},
		"a header of a MiB":      {head("GET /api/v2/vault/list HTTP/1.1", "X: "+strings.Repeat("a", 1<<20)), 431},
		"a MiB of dots":          {head("GET /api/v2/vault/list HTTP/1.1", "Authorization: Bearer "+strings.Repeat(".", 1<<20)), 431},
		"many headers":           {head("GET /api/v2/vault/list HTTP/1.1", strings.Repeat("X: a\r\n", 10_000)+"X: a"), 431},
		"a path of a MiB":        {head("GET /api/v2/vault/" + strings.Repeat("a", 1<<20) + " HTTP/1.1"), 431},
		"another host's URL":     {head("GET http://" + canary + "/api/v2/none HTTP/1.1"), 404},
		"a proxy's method":       {head("CONNECT " + canary + ":443 HTTP/1.1"), 404},
		"all of it":              {head("OPTIONS * HTTP/1.1"), 200},
		"TRACE":                  {head("TRACE /api/v2/vault/list HTTP/1.1", "X-"+canary+": "+canary), 405},
		"a body that ends early": {head(post, kind, "Content-Length: 100") + body, 400},
	} {
		got, err := s.exchange(c.sent, name == "a body that ends early")
		if err != nil {
			t.Errorf("%s: %v", name, err)
		} else if got.status != c.want || echoed(got) {
			t.Errorf("%s: %d, want %d: %s", name, got.status, c.want, got.body)
		}
	}
	s.get("/api/v2/vault/list").want(t, http.StatusOK)
}

// exchange sends bytes as they are and reads one answer.
func (s *service) exchange(sent string, hangUp bool) (reply, error) {
	conn, err := net.Dial("tcp", strings.TrimPrefix(s.url, "http://"))
	if err != nil {
		return reply{}, err
	}
	defer conn.Close()
	go func() { // the server may stop reading before all is written
		_, _ = io.WriteString(conn, sent)
		if hangUp {
			_ = conn.(*net.TCPConn).CloseWrite()
		}
	}()
	answers := bufio.NewReader(conn)
	resp, err := http.ReadResponse(answers, nil)
	if err == nil && resp.StatusCode == http.StatusContinue {
		resp, err = http.ReadResponse(answers, nil)
	}
	if err != nil {
		return reply{}, err
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(resp.Body) // a refusal may end with a reset
	return reply{resp.StatusCode, resp.Header, body}, nil
}
