package identity

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity/token"
)

// forge signs claims with any method, key and header.
func forge(t *testing.T, method jwt.SigningMethod, key any, header map[string]any, claims jwt.MapClaims) string {
	t.Helper()
	token := jwt.NewWithClaims(method, claims)
	maps.Copy(token.Header, header)
	signed, err := token.SignedString(key)
	must(t, err)
	return signed
}

func TestOnlyItsOwnAccessTokensCount(t *testing.T) {
	f := newPeople(t)
	u := f.register("ada@example.com")
	tokens := f.signIn("ada@example.com", goodPassword)
	session := f.caller(tokens).Session
	key := []byte(f.keys.TokenKey())
	header := map[string]any{"typ": "at+jwt", "kid": "1"}
	now := f.time().Unix()
	claims := jwt.MapClaims{
		"iss": "latticekeep/" + f.keys.ChainID(), "aud": "latticekeep-api", "sub": u.ID, "sid": session, "iat": now, "nbf": now, "exp": now + 600,
	}
	with := func(change jwt.MapClaims) jwt.MapClaims {
		c := maps.Clone(claims)
		maps.Copy(c, change)
		maps.DeleteFunc(c, func(_ string, v any) bool { return v == nil })
		return c
	}
	if _, err := f.AuthenticateToken(t.Context(), forge(t, jwt.SigningMethodHS512, key, header, claims)); err != nil {
		t.Fatal("the test does not know what a token is made of:", err)
	}
	ec, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	good := tokens.Access
	parts := strings.Split(good, ".")
	hs512 := jwt.SigningMethodHS512
	bad := map[string]string{
		"nothing":             "",
		"an API key":          "lk_live_" + strings.Repeat("a", 52),
		"the refresh token":   tokens.Refresh,
		"alg none":            forge(t, jwt.SigningMethodNone, jwt.UnsafeAllowNoneSignatureType, header, claims),
		"alg none, unsigned":  base64.RawURLEncoding.EncodeToString([]byte(`{"alg":"none","typ":"at+jwt","kid":"1"}`)) + "." + parts[1] + ".",
		"HS256":               forge(t, jwt.SigningMethodHS256, key, header, claims),
		"HS384":               forge(t, jwt.SigningMethodHS384, key, header, claims),
		"ES256":               forge(t, jwt.SigningMethodES256, ec, header, claims),
		"another key":         forge(t, hs512, append([]byte("x"), key...), header, claims),
		"a public key":        forge(t, hs512, f.keys.Identity().Bytes(), header, claims),
		"type JWT":            forge(t, hs512, key, map[string]any{"typ": "JWT", "kid": "1"}, claims),
		"no type":             forge(t, hs512, key, map[string]any{"typ": nil, "kid": "1"}, claims),
		"another key id":      forge(t, hs512, key, map[string]any{"typ": "at+jwt", "kid": "2"}, claims),
		"a key id of a path":  forge(t, hs512, key, map[string]any{"typ": "at+jwt", "kid": "../1"}, claims),
		"no key id":           forge(t, hs512, key, map[string]any{"typ": "at+jwt"}, claims),
		"another issuer":      forge(t, hs512, key, header, with(jwt.MapClaims{"iss": "latticekeep/other"})),
		"no issuer":           forge(t, hs512, key, header, with(jwt.MapClaims{"iss": nil})),
		"another audience":    forge(t, hs512, key, header, with(jwt.MapClaims{"aud": "other"})),
		"no audience":         forge(t, hs512, key, header, with(jwt.MapClaims{"aud": nil})),
		"expired":             forge(t, hs512, key, header, with(jwt.MapClaims{"exp": now})),
		"no end":              forge(t, hs512, key, header, with(jwt.MapClaims{"exp": nil})),
		"an end that is text": forge(t, hs512, key, header, with(jwt.MapClaims{"exp": "never"})),
		"not yet":             forge(t, hs512, key, header, with(jwt.MapClaims{"nbf": now + 1})),
		"no beginning":        forge(t, hs512, key, header, with(jwt.MapClaims{"nbf": nil})),
		"no user":             forge(t, hs512, key, header, with(jwt.MapClaims{"sub": nil})),
		"another user":        forge(t, hs512, key, header, with(jwt.MapClaims{"sub": authz.NewID("usr")})),
		"a path for a user":   forge(t, hs512, key, header, with(jwt.MapClaims{"sub": "../" + u.ID})),
		"no session":          forge(t, hs512, key, header, with(jwt.MapClaims{"sid": nil})),
		"another session":     forge(t, hs512, key, header, with(jwt.MapClaims{"sid": authz.NewID("ses")})),
		"a session in a list": forge(t, hs512, key, header, with(jwt.MapClaims{"sid": []string{session}})),
		"cut short":           good[:len(good)-1],
		"no signature":        parts[0] + "." + parts[1] + ".",
		"longer":              good + "A",
		"padded":              good + "==",
		"a space before":      " " + good,
		"a line after":        good + "\n",
		"four parts":          good + "." + parts[2],
		"two parts":           parts[0] + "." + parts[1],
		"junk":                "a.b.c",
		"two dots":            "..",
		"a megabyte of dots":  strings.Repeat(".", 1<<20),
		"too long":            parts[0] + "." + parts[1] + strings.Repeat("A", 8<<10) + "." + parts[2],
		"NUL":                 good + "\x00",
		"invalid UTF-8":       "\xff." + parts[1] + "." + parts[2],
	}
	for name, text := range bad {
		c, err := f.AuthenticateToken(t.Context(), text)
		if !errors.Is(err, fault.Unauthenticated) || c.Tenant != "" || fault.Message(err) != fault.Message(token.ErrAccess) {
			t.Errorf("%s: %+v, %v", name, c, err)
		}
	}
}

func TestAnAccessTokenSaysNoMoreThanItMust(t *testing.T) {
	f := newPeople(t)
	f.register("ada@example.com")
	parts := strings.Split(f.signIn("ada@example.com", goodPassword).Access, ".")
	b, err := base64.RawURLEncoding.DecodeString(parts[1])
	must(t, err)
	var claims map[string]any
	must(t, json.Unmarshal(b, &claims))
	names := slices.Sorted(maps.Keys(claims))
	if want := []string{"aud", "exp", "iat", "iss", "nbf", "sid", "sub"}; !slices.Equal(names, want) {
		t.Errorf("%q, want %q", names, want)
	}
	for _, text := range []string{"@", "example.com", "owner", "Example Ltd", "ten_"} {
		if strings.Contains(string(b), text) {
			t.Errorf("%s is in %s", text, b)
		}
	}
}

func TestARoleCountsFromTheNextRequestOn(t *testing.T) {
	f := newPeople(t)
	owner := f.verified("ada@example.com")
	bob := f.join(owner, "bob@example.com", authz.Member)
	tokens := f.signIn("bob@example.com", goodPassword)
	_, err := f.ChangeMember(t.Context(), owner.Principal, bob.ID, authz.Auditor)
	must(t, err)
	if c := f.caller(tokens); c.May(authz.SealCredential) || !c.May(authz.ReadAudit) {
		t.Errorf("%+v", c)
	}
	must(t, f.RemoveMember(t.Context(), owner.Principal, bob.ID))
	if f.alive(tokens) {
		t.Error("removed, and the access token still counts")
	}
	if _, err := f.Refresh(t.Context(), stranger, tokens.Refresh); !errors.Is(err, fault.Unauthenticated) {
		t.Error("removed, and the refresh token still counts:", err)
	}
	if _, err := f.SignIn(t.Context(), stranger, "bob@example.com", []byte(goodPassword)); !errors.Is(err, fault.Unauthenticated) {
		t.Error("removed, and signs in:", err)
	}
	f.advance(time.Minute)
	f.join(owner, "bob@example.com", authz.Member) // the address is free again
}
