package identity

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/golang-jwt/jwt/v5"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// An access token is a JWT (RFC 9068) of which everything is pinned: algorithm,
// type, key id, issuer and audience. It says only which session of which user
// it belongs to; what the user may do is read anew at every request, so that
// signing out, another role and the end of a trial count at once.
const (
	accessLifetime = 30 * time.Minute
	clockSkew      = 5 * time.Minute // between replicas: a token counts at once where it is earlier
	tokenType      = "at+jwt"
	tokenKeyID     = "1" // of the one key there is so far
	tokenAudience  = "latticekeep-api"
	maxAccessToken = 8 << 10
)

var (
	tokenMethod    = jwt.SigningMethodHS512
	errAccessToken = fault.New(fault.Unauthenticated, "a valid access token is required: refresh the session or sign in again")
)

type accessClaims struct {
	jwt.RegisteredClaims
	Session string `json:"sid"`
}

func (s *Service) issuer() string { return "latticekeep/" + s.keys.ChainID() }

// tokens signs an access token for a session and adds its refresh token.
func (s *Service) tokens(n sessionName, row sessionRow, refresh string, now time.Time) (Tokens, error) {
	issued := now.Truncate(time.Second) // which is all that a JWT tells
	expires := issued.Add(accessLifetime)
	if end := row.ExpiresAt.Truncate(time.Second); end.Before(expires) {
		expires = end
	}
	token := jwt.NewWithClaims(tokenMethod, accessClaims{
		RegisteredClaims: jwt.RegisteredClaims{
			Issuer: s.issuer(), Audience: jwt.ClaimStrings{tokenAudience}, Subject: n.User,
			IssuedAt: jwt.NewNumericDate(issued), NotBefore: jwt.NewNumericDate(issued.Add(-clockSkew)), ExpiresAt: jwt.NewNumericDate(expires),
		},
		Session: n.ID,
	})
	token.Header["typ"], token.Header["kid"] = tokenType, tokenKeyID
	access, err := token.SignedString([]byte(s.keys.TokenKey()))
	if err != nil {
		return Tokens{}, fmt.Errorf("signing an access token: %w", err)
	}
	return Tokens{access, expires, refresh, row.ExpiresAt}, nil
}

// AuthenticateToken returns the user that an access token stands for. Errors:
// fault.Unauthenticated for every token that is not one or whose session is
// over, fault.Unavailable.
func (s *Service) AuthenticateToken(ctx context.Context, accessToken string) (Caller, error) {
	claims, err := s.parseAccess(accessToken)
	if err != nil {
		return Caller{}, err
	}
	n := sessionName{claims.Subject, claims.Session}
	now := s.now()
	var caller Caller
	err = s.store.View(ctx, func(r store.Reader) error {
		var session sessionRow
		var user userRow
		if found, err := s.get(r, sessionKey(n), &session); err != nil {
			return err
		} else if !found || !now.Before(session.ExpiresAt) {
			return errAccessToken
		}
		a := account{session.Tenant, n.User}
		if found, err := s.get(r, userKey(a), &user); err != nil {
			return err
		} else if !found {
			return errAccessToken
		}
		tenant, err := s.readTenant(r, a.Tenant)
		if err != nil {
			return err
		}
		caller = Caller{
			Principal: authz.Principal{
				Tenant: a.Tenant, Kind: authz.User, ID: a.User, Scopes: user.Role.Scopes(), ReadOnly: tenant.readOnly(now),
			},
			Session: n.ID, Limits: tenant.Limits,
		}
		return nil
	})
	if err != nil {
		return Caller{}, fmt.Errorf("looking up a session: %w", err)
	}
	return caller, nil
}

// parseAccess verifies what a token says of itself. Its length is bounded and
// its dots are counted before anything is taken apart.
func (s *Service) parseAccess(token string) (accessClaims, error) {
	var claims accessClaims
	if len(token) > maxAccessToken || strings.Count(token, ".") != 2 || strings.ContainsAny(token, "\r\n") { // which base64 skips
		return claims, errAccessToken
	}
	parsed, err := jwt.ParseWithClaims(token, &claims, func(t *jwt.Token) (any, error) {
		if t.Header["typ"] != tokenType || t.Header["kid"] != tokenKeyID {
			return nil, errAccessToken
		}
		return []byte(s.keys.TokenKey()), nil
	}, jwt.WithValidMethods([]string{tokenMethod.Alg()}), jwt.WithIssuer(s.issuer()), jwt.WithAudience(tokenAudience),
		jwt.WithExpirationRequired(), jwt.WithNotBeforeRequired(), jwt.WithStrictDecoding(), jwt.WithTimeFunc(s.now))
	if err != nil || !parsed.Valid || !authz.ValidID(userIDPrefix, claims.Subject) || !authz.ValidID(sessionIDPrefix, claims.Session) {
		return claims, errAccessToken
	}
	return claims, nil
}
