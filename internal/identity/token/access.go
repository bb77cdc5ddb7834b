package token

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/golang-jwt/jwt/v5"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/secret"
)

// An access token is a JWT (RFC 9068) with a fixed algorithm, type, key id, issuer and audience. It
// names only the user and the session. Every request reads anew what the user may do, so signing
// out, a change of role and the end of a trial take effect at once.
const (
	accessLifetime = 30 * time.Minute
	clockSkew      = 5 * time.Minute // between replicas, so a token is valid at once on a replica whose clock is behind
	accessType     = "at+jwt"
	keyID          = "1" // the only key so far
	audience       = "latticekeep-api"
	maxAccess      = 8 << 10
)

var method = jwt.SigningMethodHS512

// ErrAccess is the one answer to an access token that is not valid.
var ErrAccess = fault.New(fault.Unauthenticated, "a valid access token is required: refresh the session or sign in again")

type claims struct {
	jwt.RegisteredClaims
	Session string `json:"sid"`
}

// Signer signs and verifies access tokens with the key of a deployment.
type Signer struct {
	key    secret.Bytes
	issuer string
	now    func() time.Time
}

// NewSigner returns the signer of the deployment with that chain.
func NewSigner(key secret.Bytes, chainID string, now func() time.Time) *Signer {
	return &Signer{key, "latticekeep/" + chainID, now}
}

// Sign returns an access token for a session and when it expires: after half an hour, but not after
// the session ends.
func (s *Signer) Sign(user, session string, now, sessionEnd time.Time) (access string, expires time.Time, err error) {
	issued := now.Truncate(time.Second) // a JWT has whole seconds only
	expires = issued.Add(accessLifetime)
	if end := sessionEnd.Truncate(time.Second); end.Before(expires) {
		expires = end
	}
	token := jwt.NewWithClaims(method, claims{
		RegisteredClaims: jwt.RegisteredClaims{
			Issuer: s.issuer, Audience: jwt.ClaimStrings{audience}, Subject: user,
			IssuedAt: jwt.NewNumericDate(issued), NotBefore: jwt.NewNumericDate(issued.Add(-clockSkew)), ExpiresAt: jwt.NewNumericDate(expires),
		},
		Session: session,
	})
	token.Header["typ"], token.Header["kid"] = accessType, keyID
	if access, err = token.SignedString([]byte(s.key)); err != nil {
		return "", time.Time{}, fmt.Errorf("signing an access token: %w", err)
	}
	return access, expires, nil
}

// Verify returns the user and the session that a token names, if its signature and its claims are
// valid. It checks the length and counts the dots before it parses anything. Error: ErrAccess.
func (s *Signer) Verify(access string) (user, session string, err error) {
	if len(access) > maxAccess || strings.Count(access, ".") != 2 || strings.ContainsAny(access, "\r\n") { // the base64 decoder skips line ends
		return "", "", ErrAccess
	}
	var c claims
	parsed, err := jwt.ParseWithClaims(access, &c, func(t *jwt.Token) (any, error) {
		if t.Header["typ"] != accessType || t.Header["kid"] != keyID {
			return nil, ErrAccess
		}
		return []byte(s.key), nil
	}, jwt.WithValidMethods([]string{method.Alg()}), jwt.WithIssuer(s.issuer), jwt.WithAudience(audience),
		jwt.WithExpirationRequired(), jwt.WithNotBeforeRequired(), jwt.WithStrictDecoding(), jwt.WithTimeFunc(s.now))
	if err != nil || !parsed.Valid {
		return "", "", ErrAccess
	}
	return c.Subject, c.Session, nil
}

// IsForeign reports whether a token is a JWT whose header is not that of our access tokens. It
// checks the length of the token before it parses anything.
func IsForeign(token string) bool {
	if len(token) > maxAccess || strings.Count(token, ".") != 2 {
		return false
	}
	first, _, _ := strings.Cut(token, ".")
	b, err := base64.RawURLEncoding.DecodeString(first)
	if err != nil {
		return false
	}
	var header struct {
		Algorithm string `json:"alg"`
		Type      string `json:"typ"`
	}
	return json.Unmarshal(b, &header) == nil && (header.Algorithm != method.Alg() || header.Type != accessType)
}
