package server_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/identity"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/vault"
	"github.com/latticekeep/latticekeep/test/servertest"
)

// The ways in which a fuzzed request says who its caller is. The last ones take
// what the fuzzer makes up.
const (
	fuzzNobody = iota
	fuzzKey
	fuzzBearerKey
	fuzzSystemKey
	fuzzAccess
	fuzzAccessCookie
	fuzzRefreshCookie
	fuzzWeakKey
	fuzzTwo
	fuzzRawKey
	fuzzRawBearer
	fuzzRawCookie
	fuzzWays
)

// FuzzServer drives the whole service, both versions, with requests of any form
// from any caller. Whatever is sent, the answer is no 5xx, and it is as the
// contract says. In target and body $cred, $key and the like stand for what the
// service made: an id or a ciphertext that a fuzzer cannot guess.
func FuzzServer(f *testing.F) {
	s := &fuzzed{service: assemble(f)}
	s.system, s.weak = s.SystemKey(), s.GrantKey(authz.ComplianceRead)
	s.FollowLog() // what proofs follow from
	for _, o := range listedOperations(f) {
		id, _ := o.pathExample()
		body := ""
		if o.schema != nil {
			body = servertest.Marshal(f, o.example)
		}
		way := byte(fuzzKey)
		switch {
		case strings.HasPrefix(o.id, "v1 "):
			way = fuzzBearerKey
		case o.scope == "system:admin":
			way = fuzzSystemKey
		case o.id == "v2 refreshSession":
			way = fuzzRefreshCookie
		case o.user:
			way = fuzzAccess
		}
		f.Add(o.method, o.to(id), "application/json", "", way, false, []byte(body))
		f.Add(o.method, o.to(id), "application/json", "", byte(fuzzAccessCookie), true, []byte(body))
	}
	valid := servertest.NewContract(f)
	f.Fuzz(func(t *testing.T, method, target, contentType, credential string, way byte, chunked bool, body []byte) {
		s.T, valid.T = t, t
		known := strings.NewReplacer(s.known(t, target+string(body))...)
		target, body = servertest.WithoutWait(known.Replace(target)), []byte(known.Replace(string(body)))
		u, err := url.ParseRequestURI(target)
		if err != nil || !strings.HasPrefix(target, "/") || strings.Trim(method,
			"ABCDEFGHIJKLMNOPQRSTUVWXYZ") != "" || method == "" || strings.ContainsAny(credential, "\r\n\x00") {
			t.Skip("net/http refuses it")
		}
		r := &http.Request{
			Method: method, URL: u, RequestURI: target, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Host: "127.0.0.1",
			Header: http.Header{}, Body: io.NopCloser(bytes.NewReader(body)), ContentLength: int64(len(body)), RemoteAddr: "192.0.2.1:1234",
		}
		if chunked {
			r.ContentLength = -1
		}
		if contentType != "" {
			r.Header.Set("Content-Type", contentType)
		}
		s.identify(t, r, way%fuzzWays, credential)
		w := httptest.NewRecorder()
		s.Server.Engine().ServeHTTP(w, r.WithContext(t.Context()))
		if w.Code >= 500 {
			t.Errorf("%s %q: %d %s", method, target, w.Code, w.Body)
		}
		if !authz.ValidID("req", w.Header().Get("X-Request-ID")) {
			t.Errorf("%s %q: no request id", method, target)
		}
		if r.Method == http.MethodHead {
			return
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		valid.Check(r, w.Code, w.Header(), w.Body.Bytes())
	})
}

// fuzzed is a service under fuzzing, which ends sessions, changes passwords and
// deletes what it finds: what is used up is made anew.
type fuzzed struct {
	*service
	system, weak string
	tokens       identity.Tokens
	users        int
}

// session returns tokens of a session that lasts.
func (s *fuzzed) session(t *testing.T) identity.Tokens {
	t.Helper()
	ctx := context.Background()
	if _, err := s.Identity.AuthenticateToken(ctx, s.tokens.Access); err == nil {
		return s.tokens
	}
	from := authz.Principal{Kind: authz.Stranger, Tenant: authz.SystemTenant}
	s.users++
	email := "user" + strconv.Itoa(s.users) + "@fuzz.example"
	if _, _, err := s.Identity.Register(ctx, from, email, secret.Bytes(servertest.Password), "Fuzz"); err != nil {
		t.Fatal(err)
	}
	var err error
	if s.tokens, err = s.Identity.SignIn(ctx, from, email, secret.Bytes(servertest.Password)); err != nil {
		t.Fatal(err)
	}
	return s.tokens
}

func (s *fuzzed) identify(t *testing.T, r *http.Request, way byte, credential string) {
	t.Helper()
	switch way {
	case fuzzKey:
		r.Header.Set("X-API-Key", s.Key)
		if credential != "" && !strings.ContainsFunc(credential, func(c rune) bool { return c < ' ' || c > '~' }) {
			r.Header.Set("Idempotency-Key", credential)
		}
	case fuzzBearerKey:
		r.Header.Set("Authorization", "Bearer "+s.Key)
	case fuzzSystemKey:
		r.Header.Set("X-API-Key", s.system)
	case fuzzAccess:
		r.Header.Set("Authorization", "Bearer "+s.session(t).Access)
	case fuzzAccessCookie:
		r.Header.Set("Cookie", "accessToken="+s.session(t).Access)
		if credential != "" {
			r.Header.Set("Origin", credential)
		}
	case fuzzRefreshCookie:
		r.Header.Set("Cookie", "refreshToken="+s.session(t).Refresh)
		s.tokens = identity.Tokens{} // good for one use
	case fuzzWeakKey:
		r.Header.Set("X-API-Key", s.weak)
	case fuzzTwo:
		r.Header.Set("X-API-Key", s.Key)
		r.Header.Set("Authorization", "Bearer "+credential)
	case fuzzRawKey:
		r.Header.Set("X-API-Key", credential)
	case fuzzRawBearer:
		r.Header.Set("Authorization", credential)
	case fuzzRawCookie:
		r.Header.Set("Cookie", credential)
	}
}

// known makes what the placeholders in text stand for and returns both, as
// strings.NewReplacer takes them.
func (s *fuzzed) known(t *testing.T, text string) []string {
	t.Helper()
	ctx, p, encode := context.Background(), s.Operator(), base64.StdEncoding.EncodeToString
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	var pairs []string
	if strings.Contains(text, "$cred") {
		c, err := s.Vault.Seal(ctx, p, vault.SealRequest{Name: "n", Type: "t", Values: map[string]secret.Bytes{"k": secret.Bytes("v")}})
		check(err)
		pairs = append(pairs, "$cred", c.ID)
	}
	if strings.Contains(text, "$key") || strings.Contains(text, "$sealed") || strings.Contains(text, "$kem") || strings.Contains(text, "$data") {
		k, err := s.Transit.CreateKey(ctx, p, "n", 0)
		check(err)
		sealed, err := s.Transit.Encrypt(ctx, p, k.ID, []secret.Bytes{secret.Bytes("data")})
		check(err)
		joined, err := sealed[0].MarshalBinary()
		check(err)
		pairs = append(pairs, "$key", k.ID, "$sealed", encode(joined), "$kem", encode(sealed[0].KEM), "$nonce", encode(sealed[0].Nonce), "$data",
			encode(sealed[0].Data))
	}
	if strings.Contains(text, "$pqc") || strings.Contains(text, "$hmac") {
		signed, err := s.Transit.Sign(ctx, p, []secret.Bytes{secret.Bytes("data")})
		check(err)
		pairs = append(pairs, "$pqc", encode(signed[0].PQC), "$hmac", encode(signed[0].HMAC))
	}
	if strings.Contains(text, "$opens") || strings.Contains(text, "$sealer") {
		m := s.Manifest(t, "shop", "db", "v")
		pairs = append(pairs, "$opens", m.Sealed.Values["password"].Data, "$sealer", m.Sealed.KeyId)
	}
	if strings.Contains(text, "$tenant") {
		pairs = append(pairs, "$tenant", string(s.Stranger().Tenant))
	}
	return pairs
}
