package server_test

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
	"github.com/latticekeep/latticekeep/test/servertest"
)

// forge makes a JWT of the service's own key, which proves that what is wrong
// with it is what a test made wrong.
func forge(t *testing.T, key []byte, header, claims map[string]any) string {
	t.Helper()
	encode := base64.RawURLEncoding.EncodeToString
	signed := encode([]byte(servertest.Marshal(t, header))) + "." + encode([]byte(servertest.Marshal(t, claims)))
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
	user, other := s.Register("owner@example.org"), s.Register("other@example.org")
	key := []byte(s.Keys.TokenKey())
	header, claims := part(t, user.Access, 0), part(t, user.Access, 1)
	now := s.Clock.Now()
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
		for how, r := range map[string]servertest.Request{
			"bearer": {Method: "GET", Path: "/api/v2/auth/me", Bearer: token},
			"cookie": {Method: "GET", Path: "/api/v2/auth/me", Header: servertest.Cookies("accessToken", token)},
			"scope":  {Method: "GET", Path: "/api/v2/vault/list", Bearer: token},
		} {
			if how == "cookie" && strings.ContainsAny(token, " ,;\"\\\r\n") {
				continue
			}
			got := s.Call(r)
			if got.Status != want || want != http.StatusOK && echoed(got) {
				t.Errorf("%s as %s: %d %s", name, how, got.Status, got.Body)
			}
		}
	}
	try("the user's own", user.Access, http.StatusOK)
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
		"another audience": {"aud", servertest.Canary}, "no audience": {"aud", nil}, "empty audience": {"aud", []string{}}, "audience in another case": {"aud",
			"Latticekeep-API"},
		"another issuer": {"iss", "latticekeep/" + servertest.Canary}, "no issuer": {"iss", nil}, "issuer with more": {"iss", fmt.Sprint(claims["iss"], "/")},
		"no subject": {"sub", nil}, "another user": {"sub", part(t, other.Access, 1)["sub"]}, "nobody": {"sub", authz.NewID("usr")},
		"a path as subject": {"sub", "usr_../" + servertest.Canary},
		"a key as subject":  {"sub", authz.NewID("key")},
		"no session":        {"sid", nil}, "another's session": {"sid", part(t, other.Access, 1)["sid"]}, "no such session": {"sid", authz.NewID("ses")},
		"session a list": {"sid", []any{claims["sid"]}},
	} {
		try(name, forge(t, key, header, changed(claims, pairs...)), http.StatusUnauthorized)
	}
	for name, foreign := range map[string][]byte{"no key": {}, "zeros": make([]byte, 64), "half a key": key[:32],
		"a public value": []byte(fmt.Sprint(claims["iss"])), "flipped": append([]byte{key[0] ^ 1}, key[1:]...)} {
		try(name, forge(t, foreign, header, claims), http.StatusUnauthorized)
	}
	parts := strings.Split(user.Access, ".")
	bare := parts[0] + "." + parts[1]
	mac, err := base64.RawURLEncoding.DecodeString(parts[2])
	if err != nil {
		t.Fatal(err)
	}
	for name, token := range map[string]string{
		"no signature": bare + ".", "two parts": bare, "four parts": user.Access + "." + parts[2], "a dot behind": user.Access + ".",
		"a dot in front": "." + user.Access, "dots": "..",
		"no header": "." + parts[1] + "." + parts[2], "another's signature": bare + "." + strings.Split(other.Access, ".")[2],
		"signature cut": user.Access[:len(user.Access)-2],
		"padding":       user.Access + "==", "MAC cut in half": bare + "." + base64.RawURLEncoding.EncodeToString(mac[:32]),
		"MAC in hexadecimal": bare + "." + fmt.Sprintf("%x", mac),
		"parts swapped":      parts[1] + "." + parts[0] + "." + parts[2], "the header thrice": parts[0] + "." + parts[0] + "." + parts[0],
		"JSON":       string(mustRaw(t, parts[0])) + "..",
		"an API key": s.Key, "a refresh token": user.Refresh, "a word": servertest.Canary, "twice": user.Access + user.Access,
		"with a space": user.Access + " " + user.Access, "tab": parts[0] + "\t." + parts[1] + "." + parts[2],
		"a list": user.Access + ", " + other.Access, "long": strings.Repeat("a", 4000) + "." + strings.Repeat("b", 4000) + "." + strings.Repeat("c",
			4000), "many dots": strings.Repeat(".", 12_000),
		"deep": base64.RawURLEncoding.EncodeToString([]byte(strings.Repeat("[", 5000))) + "." + parts[1] + "." + parts[2],
	} {
		try(name, token, http.StatusUnauthorized)
	}
	// The spare bits of the last character: one token has one spelling.
	const alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
	last := strings.IndexByte(alphabet, user.Access[len(user.Access)-1])
	try("spare bits", user.Access[:len(user.Access)-1]+string(alphabet[last^1]), http.StatusUnauthorized)

	s.Clock.Advance(30*time.Minute - time.Second)
	try("a second before it expires", user.Access, http.StatusOK)
	s.Clock.Advance(time.Second)
	try("when it expires", user.Access, http.StatusUnauthorized)
	again := s.Login(user.Email, user.Password)
	s.Call(servertest.Request{Method: "POST", Path: "/api/v2/auth/logout", Bearer: again.Access}).Want(t, http.StatusOK)
	try("of a session that ended", again.Access, http.StatusUnauthorized)
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
	user, other := s.Register("owner@example.org"), s.Register("other@example.org")
	const v2, v1 = "/api/v2/auth/me", "/v1/keys"
	bearer := func(token string) string { return "Bearer " + token }
	for name, c := range map[string]struct {
		path   string
		header http.Header
		want   int
	}{
		"bearer":                       {v2, http.Header{"Authorization": {bearer(user.Access)}}, 200},
		"bearer in another case":       {v2, http.Header{"Authorization": {"bEARER " + user.Access}}, 200},
		"two bearers":                  {v2, http.Header{"Authorization": {bearer(user.Access), bearer(user.Access)}}, 401},
		"two users":                    {v2, http.Header{"Authorization": {bearer(user.Access), bearer(other.Access)}}, 401},
		"bearer and an empty one":      {v2, http.Header{"Authorization": {bearer(user.Access), ""}}, 401},
		"bearer and key":               {v2, http.Header{"Authorization": {bearer(user.Access)}, "X-Api-Key": {s.Key}}, 401},
		"bearer and an empty key":      {v2, http.Header{"Authorization": {bearer(user.Access)}, "X-Api-Key": {""}}, 401},
		"key and an empty bearer":      {v2, http.Header{"Authorization": {""}, "X-Api-Key": {s.Key}}, 401},
		"key as bearer":                {v2, http.Header{"Authorization": {bearer(s.Key)}}, 401},
		"token as key":                 {v2, http.Header{"X-Api-Key": {user.Access}}, 401},
		"key as cookie":                {v2, servertest.Cookies("accessToken", s.Key), 401},
		"refresh token as access":      {v2, servertest.Cookies("accessToken", user.Refresh), 401},
		"no space":                     {v2, http.Header{"Authorization": {"Bearer" + user.Access}}, 401},
		"two spaces":                   {v2, http.Header{"Authorization": {"Bearer  " + user.Access}}, 401},
		"a tab":                        {v2, http.Header{"Authorization": {"Bearer\t" + user.Access}}, 401},
		"basic":                        {v2, http.Header{"Authorization": {"Basic " + user.Access}}, 401},
		"token alone":                  {v2, http.Header{"Authorization": {user.Access}}, 401},
		"scheme alone":                 {v2, http.Header{"Authorization": {"Bearer"}}, 401},
		"cookie":                       {v2, servertest.Cookies("accessToken", user.Access), 200},
		"cookie twice":                 {v2, servertest.Cookies("accessToken", user.Access, "accessToken", user.Access), 401},
		"cookie of two users":          {v2, http.Header{"Cookie": {"accessToken=" + user.Access, "accessToken=" + other.Access}}, 401},
		"cookie in another case":       {v2, servertest.Cookies("AccessToken", user.Access), 401},
		"cookie with a prefix":         {v2, servertest.Cookies("__Host-accessToken", user.Access), 401},
		"empty cookie":                 {v2, servertest.Cookies("accessToken", ""), 401},
		"cookie behind a wrong bearer": {v2, http.Header{"Authorization": {bearer(servertest.Canary)}, "Cookie": {"accessToken=" + user.Access}}, 401},
		"cookie behind an empty key":   {v2, http.Header{"X-Api-Key": {""}, "Cookie": {"accessToken=" + user.Access}}, 401},
		"a wrong cookie behind bearer": {v2, http.Header{"Authorization": {bearer(user.Access)}, "Cookie": {"accessToken=" + servertest.Canary}}, 200},
		"v1: bearer":                   {v1, http.Header{"Authorization": {bearer(s.Key)}}, 200},
		"v1: two bearers":              {v1, http.Header{"Authorization": {bearer(s.Key), bearer(s.Key)}}, 401},
		"v1: an access token":          {v1, http.Header{"Authorization": {bearer(user.Access)}}, 401},
		"v1: X-API-Key":                {v1, http.Header{"X-Api-Key": {s.Key}}, 401},
		"v1: cookie":                   {v1, servertest.Cookies("accessToken", user.Access), 401},
		"v1: a key as cookie":          {v1, servertest.Cookies("accessToken", s.Key), 401},
	} {
		got := s.Call(servertest.Request{Method: "GET", Path: c.path, Header: c.header})
		if got.Status != c.want || echoed(got) {
			t.Errorf("%s: %d %s", name, got.Status, got.Body)
		}
	}
	for name, header := range map[string]http.Header{
		"none": nil, "empty": servertest.Cookies("refreshToken", ""), "twice": servertest.Cookies("refreshToken", user.Refresh, "refreshToken", user.Refresh),
		"another case": servertest.Cookies("RefreshToken", user.Refresh),
		"access token": servertest.Cookies("refreshToken", user.Access), "a word": servertest.Cookies("refreshToken", servertest.Canary), "long": servertest.Cookies("refreshToken",
			user.Refresh+strings.Repeat("a", 8000)),
		"as bearer": {"Authorization": {bearer(user.Refresh)}}, "upper case": servertest.Cookies("refreshToken", strings.ToUpper(user.Refresh)),
		"as access cookie": servertest.Cookies("accessToken", user.Refresh),
	} {
		for _, path := range []string{"/api/v2/auth/refresh", "/api/v2/auth/logout"} {
			if got := s.Call(servertest.Request{Method: "POST", Path: path, Header: header}); got.Status != http.StatusUnauthorized || echoed(got) {
				t.Errorf("%s, refresh token %s: %d %s", path, name, got.Status, got.Body)
			}
		}
	}
	s.Call(servertest.Request{Method: "POST", Path: "/api/v2/auth/refresh", Header: servertest.Cookies("refreshToken", user.Refresh)}).Want(t, http.StatusOK)
}

// A page of another origin makes a browser send cookies, not headers.
func TestRequestsOfOtherOriginsWithCookiesAreRefused(t *testing.T) {
	b := newBesieged(t)
	foreign := map[string]http.Header{
		"cross-site":          {"Sec-Fetch-Site": {"cross-site"}},
		"same-site":           {"Sec-Fetch-Site": {"same-site"}},
		"cross-site, origin":  {"Sec-Fetch-Site": {"cross-site"}, "Origin": {"https://" + servertest.Canary + ".example"}},
		"origin":              {"Origin": {"https://" + servertest.Canary + ".example"}},
		"origin null":         {"Origin": {"null"}},
		"origin of a prefix":  {"Origin": {b.URL + ".example"}},
		"another port":        {"Origin": {"http://127.0.0.1:1"}},
		"unknown value":       {"Sec-Fetch-Site": {servertest.Canary}},
		"none, but an origin": {"Sec-Fetch-Site": {""}, "Origin": {"https://example.org"}},
	}
	own := map[string]http.Header{
		"no browser":  {},
		"same-origin": {"Sec-Fetch-Site": {"same-origin"}, "Origin": {b.URL}},
		"typed":       {"Sec-Fetch-Site": {"none"}},
		"own origin":  {"Origin": {b.URL}},
	}
	with := func(header, more http.Header) http.Header {
		all := maps.Clone(more)
		maps.Copy(all, header)
		return all
	}
	cookie := servertest.Cookies("accessToken", b.user.Access)
	for _, o := range listedOperations(t) {
		if strings.HasPrefix(o.id, "v1 ") || o.scope == "system:admin" {
			continue // which take no cookie, and no user
		}
		r := b.request(o)
		r.Key, r.Bearer = "", ""
		if !o.public && r.Header == nil {
			r.Header = cookie
		}
		for name, header := range foreign {
			attempt := r
			attempt.Header = with(r.Header, header)
			if o.method != http.MethodGet {
				b.refused(t, o.id+", "+name, attempt, http.StatusForbidden)
				continue
			}
			got := b.Call(attempt)
			if got.Status == http.StatusForbidden && !strings.HasPrefix(o.path, "/api/v2/vault/") && o.id != signed || got.Status == http.StatusUnauthorized {
				t.Errorf("%s, %s: reading is refused: %d %s", o.id, name, got.Status, got.Body)
			}
			for answered := range got.Header {
				if strings.HasPrefix(answered, "Access-Control-") {
					t.Errorf("%s, %s: %s lets the page read it", o.id, name, answered)
				}
			}
		}
	}
	encrypt := servertest.Request{Method: "POST", Path: "/api/v2/encryption/encrypt", Body: `{"data":"d"}`}
	for name, header := range own {
		r := encrypt
		r.Header = with(cookie, header)
		if got := b.Call(r); got.Status != http.StatusOK {
			t.Errorf("%s: %d %s", name, got.Status, got.Body)
		}
	}
	for name, header := range foreign {
		for how, r := range map[string]servertest.Request{"key": {Key: b.Key}, "bearer": {Bearer: b.user.Access}} {
			r.Method, r.Path, r.Body, r.Header = encrypt.Method, encrypt.Path, encrypt.Body, header
			if got := b.Call(r); got.Status != http.StatusOK {
				t.Errorf("%s with a %s in a header: %d %s", name, how, got.Status, got.Body)
			}
		}
		r := servertest.Request{Method: "POST", Path: "/v1/encrypt", Body: `{"data":"d","algorithm":"ML-KEM-768"}`, Bearer: b.Key, Header: header}
		b.Call(r).Want(t, http.StatusOK)
	}
	preflight := b.Call(servertest.Request{Method: "OPTIONS", Path: encrypt.Path, Header: http.Header{"Origin": {"https://example.org"},
		"Access-Control-Request-Method": {"POST"}}})
	if preflight.Status != http.StatusMethodNotAllowed || preflight.Header.Get("Access-Control-Allow-Origin") != "" {
		t.Errorf("preflight: %d %v", preflight.Status, preflight.Header)
	}
	b.untouched(t)
}

// What is no proper HTTP request never reaches an operation.
func TestMalformedHTTPIsRefused(t *testing.T) {
	s := newService(t)
	head := func(line string, fields ...string) string {
		return line + "\r\nHost: x\r\nX-API-Key: " + s.Key + "\r\n" + strings.Join(fields, "\r\n") + "\r\n\r\n"
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
		"space in a name":        {head("GET /api/v2/vault/list HTTP/1.1", "X-API-Key : "+servertest.Canary), 400},
		"NUL in a header":        {head("GET /api/v2/vault/list HTTP/1.1", "X: a\x00"+servertest.Canary), 400},
		"a bad escape":           {head("GET /api/v2/vault/%zz HTTP/1.1"), 400},
		"another version":        {head("GET /api/v2/vault/list HTTP/9.9"), 505},
		"no version":             {"GET /api/v2/vault/list\r\n\r\n", 400},
		"a header of a MiB":      {head("GET /api/v2/vault/list HTTP/1.1", "X: "+strings.Repeat("a", 1<<20)), 431},
		"a MiB of dots":          {head("GET /api/v2/vault/list HTTP/1.1", "Authorization: Bearer "+strings.Repeat(".", 1<<20)), 431},
		"many headers":           {head("GET /api/v2/vault/list HTTP/1.1", strings.Repeat("X: a\r\n", 10_000)+"X: a"), 431},
		"a path of a MiB":        {head("GET /api/v2/vault/" + strings.Repeat("a", 1<<20) + " HTTP/1.1"), 431},
		"another host's URL":     {head("GET http://" + servertest.Canary + "/api/v2/none HTTP/1.1"), 404},
		"a proxy's method":       {head("CONNECT " + servertest.Canary + ":443 HTTP/1.1"), 404},
		"all of it":              {head("OPTIONS * HTTP/1.1"), 404},
		"TRACE":                  {head("TRACE /api/v2/vault/list HTTP/1.1", "X-"+servertest.Canary+": "+servertest.Canary), 405},
		"a body that ends early": {head(post, kind, "Content-Length: 100") + body, 400},
	} {
		got, err := s.exchange(c.sent, name == "a body that ends early")
		if err != nil {
			t.Errorf("%s: %v", name, err)
		} else if got.Status != c.want || echoed(got) {
			t.Errorf("%s: %d, want %d: %s", name, got.Status, c.want, got.Body)
		}
	}
	s.Get("/api/v2/vault/list").Want(t, http.StatusOK)
}

// exchange sends bytes as they are and reads one answer.
func (s *service) exchange(sent string, hangUp bool) (servertest.Reply, error) {
	conn, err := net.Dial("tcp", strings.TrimPrefix(s.URL, "http://"))
	if err != nil {
		return servertest.Reply{}, err
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
		return servertest.Reply{}, err
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(resp.Body) // a refusal may end with a reset
	return servertest.Reply{Status: resp.StatusCode, Header: resp.Header, Body: body}, nil
}
