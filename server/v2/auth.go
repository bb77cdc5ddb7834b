package v2

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/oapi-codegen/runtime/types"

	api "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/buildinfo"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity"
	"github.com/latticekeep/latticekeep/internal/identity/device"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/server/gate"
)

// accountAPI implements the endpoints of users, members, API keys and tenants.
type accountAPI struct {
	identity      *identity.Service
	now           func() time.Time
	secureCookies bool
}

// Browsers send the cookie with the refresh token only to these endpoints.
const (
	refreshCookie = "refreshToken"
	refreshPath   = "/api/v2/auth"
)

func user(u identity.User) api.User {
	return api.User{
		UserId: u.ID, Email: types.Email(u.Email), Role: api.Role(u.Role), EmailVerified: u.EmailVerified, CreatedAt: u.CreatedAt.UTC(),
	}
}

func (a *accountAPI) tenant(t identity.Tenant) api.Tenant {
	answer := api.Tenant{TenantId: string(t.ID), Name: t.Name, Status: api.TenantStatus(t.Status(a.now())), CreatedAt: t.CreatedAt.UTC()}
	if !t.TrialEnds.IsZero() {
		ends := t.TrialEnds.UTC()
		answer.TrialEndsAt = &ends
	}
	if t.Limits != (identity.Limits{}) {
		answer.Limits = &api.TenantLimits{V1: gate.NonZero(t.Limits.V1), V2: gate.NonZero(t.Limits.V2)}
	}
	return answer
}

// RegisterUser creates a user and its tenant.
func (a *accountAPI) RegisterUser(c *gin.Context) {
	gate.Answer(c, http.StatusCreated, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.RegisterRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		password := secret.Bytes(body.Password)
		defer password.Zero()
		u, t, err := a.identity.Register(ctx, call.Principal(), body.Email, password, body.TenantName)
		if err != nil {
			return nil, err
		}
		return api.RegisterAnswer{Success: true, User: user(u), Tenant: a.tenant(t)}, nil
	})
}

// Login creates a session.
func (a *accountAPI) Login(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.LoginRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		password := secret.Bytes(body.Password)
		defer password.Zero()
		tokens, err := a.identity.SignIn(ctx, withDevice(c, call), body.Email, password)
		if err != nil {
			return nil, err
		}
		return a.tokens(c, tokens), nil
	})
}

// withDevice returns the caller with the program that it uses, which a session shows to its user.
func withDevice(c *gin.Context, call *gate.Call) authz.Principal {
	p := call.Principal()
	p.Device = device.Of(c.Request.UserAgent())
	return p
}

// RefreshSession exchanges the refresh token for new tokens.
func (a *accountAPI) RefreshSession(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		token, ok := refreshToken(c)
		if !ok {
			return nil, fault.Unauthenticated
		}
		tokens, err := a.identity.Refresh(ctx, withDevice(c, call), token)
		if errors.Is(err, fault.Unauthenticated) {
			a.clearCookies(c)
		}
		if err != nil {
			return nil, err
		}
		return a.tokens(c, tokens), nil
	})
}

// refreshToken returns the cookie's value. It refuses two cookies as it refuses none.
func refreshToken(c *gin.Context) (string, bool) {
	cookies := c.Request.CookiesNamed(refreshCookie)
	if len(cookies) != 1 || cookies[0].Value == "" {
		return "", false
	}
	return cookies[0].Value, true
}

func (a *accountAPI) tokens(c *gin.Context, t identity.Tokens) api.TokenAnswer {
	now := a.now()
	a.setCookie(c, gate.AccessCookie, "/", t.Access, t.AccessExpires.Sub(now))
	a.setCookie(c, refreshCookie, refreshPath, t.Refresh, t.RefreshExpires.Sub(now))
	return api.TokenAnswer{
		Success: true, AccessToken: t.Access, TokenType: "Bearer", ExpiresIn: seconds(t.AccessExpires.Sub(now)),
	}
}

func (a *accountAPI) setCookie(c *gin.Context, name, path, value string, age time.Duration) {
	maxAge := seconds(age)
	if value == "" {
		maxAge = -1 // deletes the cookie
	}
	http.SetCookie(c.Writer, &http.Cookie{ //nolint:gosec // without TLS a browser would drop secure cookies
		Name: name, Value: value, Path: path, MaxAge: maxAge,
		HttpOnly: true, SameSite: http.SameSiteStrictMode, Secure: a.secureCookies,
	})
}

// seconds rounds up to whole seconds, because a JWT states its expiry in whole seconds.
func seconds(d time.Duration) int { return int((d + time.Second - 1) / time.Second) }

func (a *accountAPI) clearCookies(c *gin.Context) {
	a.setCookie(c, gate.AccessCookie, "/", "", 0)
	a.setCookie(c, refreshCookie, refreshPath, "", 0)
}

// Logout ends the session of the access token, or that of the refresh token if the access token has
// expired.
func (a *accountAPI) Logout(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		err := error(fault.Unauthenticated)
		if token, ok := refreshToken(c); call.Caller.Kind != authz.Stranger {
			err = a.identity.SignOut(ctx, call.Caller)
		} else if ok {
			err = a.identity.SignOutRefresh(ctx, call.Principal(), token)
		}
		if err == nil || errors.Is(err, fault.Unauthenticated) { // no session, or it has already ended
			a.clearCookies(c)
		}
		return done(err)
	})
}

// done returns the answer of an operation without a result.
func done(err error) (any, error) {
	if err != nil {
		return nil, err
	}
	return api.EmptyAnswer{Success: true}, nil
}

// VerifyEmail accepts the token of a verification mail.
func (a *accountAPI) VerifyEmail(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.TokenRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		return done(badToken(a.identity.VerifyEmail(ctx, call.Principal(), body.Token)))
	})
}

// badToken returns the same error for every invalid or expired token from a mail.
func badToken(err error) error {
	if errors.Is(err, identity.ErrTicket) {
		return gate.BadRequest(fault.Message(err))
	}
	return err
}

// ResendVerification sends the verification mail again.
func (a *accountAPI) ResendVerification(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		return done(a.identity.ResendVerification(ctx, call.Caller))
	})
}

// ChangePassword changes the password and ends all other sessions.
func (a *accountAPI) ChangePassword(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.ChangePasswordRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		current, next := secret.Bytes(body.CurrentPassword), secret.Bytes(body.NewPassword)
		defer current.Zero()
		defer next.Zero()
		return done(a.identity.ChangePassword(ctx, call.Caller, current, next))
	})
}

// RequestPasswordReset gives the same answer whether the address is known or not.
func (a *accountAPI) RequestPasswordReset(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.EmailRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		return done(a.identity.RequestPasswordReset(ctx, call.Principal(), body.Email))
	})
}

// ResetPassword accepts the token of a reset mail, sets the password and ends all sessions.
func (a *accountAPI) ResetPassword(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.ResetPasswordRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		next := secret.Bytes(body.NewPassword)
		defer next.Zero()
		return done(badToken(a.identity.ResetPassword(ctx, call.Principal(), body.Token, next)))
	})
}

// GetAccount returns the caller's account.
func (a *accountAPI) GetAccount(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		t, u, err := a.identity.Account(ctx, call.Caller)
		if err != nil {
			return nil, err
		}
		answer := api.AccountAnswer{
			Success:   true,
			Principal: api.Principal{Kind: api.PrincipalKind(call.Caller.Kind), Id: call.Caller.ID, Scopes: scopes(call.Caller.Scopes)},
			Tenant:    a.tenant(t),
			Server:    &api.ServerInfo{Version: buildinfo.Version(), Documentation: buildinfo.Documentation},
		}
		limits := call.EffectiveLimits()
		answer.EffectiveLimits = &api.EffectiveLimits{V1: limits.V1, V2: limits.V2}
		if u != nil {
			own := user(*u)
			answer.User = &own
		}
		return answer, nil
	})
}

// ListSessions returns the caller's own sessions.
func (a *accountAPI) ListSessions(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		sessions, err := a.identity.Sessions(ctx, call.Caller)
		if err != nil {
			return nil, err
		}
		answer := api.SessionList{Success: true, Sessions: make([]api.Session, len(sessions))}
		for i, s := range sessions {
			answer.Sessions[i] = api.Session{
				SessionId: s.ID, Current: s.Current,
				CreatedAt: s.CreatedAt.UTC(), LastUsedAt: s.LastUsedAt.UTC(), ExpiresAt: s.ExpiresAt.UTC(),
				Device: gate.NonZero(s.Device), Address: gate.NonZero(s.Address),
			}
		}
		return answer, nil
	})
}

// EndSession ends one of the caller's own sessions.
func (a *accountAPI) EndSession(c *gin.Context, id string) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		if err := a.identity.EndSession(ctx, call.Caller, id); err != nil {
			return nil, err
		}
		return api.SessionAnswer{Success: true, SessionId: id}, nil
	})
}

// AcceptInvitation creates the invited user.
func (a *accountAPI) AcceptInvitation(c *gin.Context) {
	gate.Answer(c, http.StatusCreated, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.AcceptInvitationRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		password := secret.Bytes(body.Password)
		defer password.Zero()
		u, t, err := a.identity.AcceptInvitation(ctx, call.Principal(), body.Token, password)
		if err != nil {
			return nil, badToken(err)
		}
		return api.RegisterAnswer{Success: true, User: user(u), Tenant: a.tenant(t)}, nil
	})
}

func scopes(held []authz.Scope) []api.Scope {
	answer := make([]api.Scope, len(held))
	for i, s := range held {
		answer[i] = api.Scope(s)
	}
	return answer
}
