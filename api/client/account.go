package client

import (
	"context"
	"errors"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
)

// RegisterUser makes a user and its tenant, whose trial begins. ErrConflict:
// the address is taken.
func (v *V2) RegisterUser(ctx context.Context, r v2.RegisterRequest) (*v2.RegisterAnswer, error) {
	return do[v2.RegisterAnswer](ctx, v.transport, post("/api/v2/auth/register", r).anonymous())
}

// Login begins a session: from here on the methods of V2 act as the user.
func (v *V2) Login(ctx context.Context, r v2.LoginRequest) (*v2.TokenAnswer, error) {
	t, refresh, err := v.tokens(ctx, post("/api/v2/auth/login", r).anonymous())
	if err != nil {
		return nil, err
	}
	v.session.begin(t.AccessToken, refresh)
	return t, nil
}

// RefreshSession exchanges the refresh token for new tokens now. There is
// seldom a reason to: a call that is refused does it by itself.
// ErrUnauthenticated: there is no session, or it has ended.
func (v *V2) RefreshSession(ctx context.Context) (*v2.TokenAnswer, error) {
	return v.session.force(ctx)
}

// Logout ends the session; nil also when it had ended already. Afterwards the
// methods of V2 carry the API key again, if there is one.
func (v *V2) Logout(ctx context.Context) error {
	access, refresh := v.session.tokens()
	if access == (credential{}) {
		return nil
	}
	// The server takes either token, so an access token that has expired is no
	// reason to renew it first.
	err := v.transport.run(ctx, logout(access, refresh))
	if err != nil && !errors.Is(err, ErrUnauthenticated) {
		return err
	}
	v.session.end(access.session)
	return nil
}

// logout is the call that ends the session of two tokens.
func logout(access credential, refresh string) call {
	return post("/api/v2/auth/logout", nil).as(access).withRefreshToken(refresh)
}

// exchange uses up a refresh token.
func (v *V2) exchange(ctx context.Context, refresh string) (*v2.TokenAnswer, string, error) {
	return v.tokens(ctx, post("/api/v2/auth/refresh", nil).anonymous().withRefreshToken(refresh))
}

// tokens sends a call whose answer carries both tokens.
func (v *V2) tokens(ctx context.Context, c call) (*v2.TokenAnswer, string, error) {
	r, err := v.transport.reply(ctx, c)
	if err != nil {
		return nil, "", err
	}
	t, err := decode[v2.TokenAnswer](r)
	if err != nil {
		return nil, "", err
	}
	for _, c := range r.cookies {
		if c.Name == refreshCookie {
			return t, c.Value, nil
		}
	}
	return t, "", nil
}

// VerifyEmail takes the token of a verification mail. ErrInvalid: the token is
// wrong, used or expired.
func (v *V2) VerifyEmail(ctx context.Context, r v2.TokenRequest) error {
	return v.transport.run(ctx, post("/api/v2/auth/verify-email", r).anonymous())
}

// ResendVerification sends the verification mail again.
func (v *V2) ResendVerification(ctx context.Context) error {
	return v.transport.run(ctx, post("/api/v2/auth/resend-verification", nil))
}

// ChangePassword sets another password and ends the user's other sessions.
func (v *V2) ChangePassword(ctx context.Context, r v2.ChangePasswordRequest) error {
	return v.transport.run(ctx, post("/api/v2/auth/change-password", r))
}

// RequestPasswordReset sends a mail with a token, if the address is known; the
// answer does not tell.
func (v *V2) RequestPasswordReset(ctx context.Context, r v2.EmailRequest) error {
	return v.transport.run(ctx, post("/api/v2/auth/forgot-password", r).anonymous())
}

// ResetPassword takes the token of a reset mail, sets the password and ends all
// sessions of the user.
func (v *V2) ResetPassword(ctx context.Context, r v2.ResetPasswordRequest) error {
	return v.transport.run(ctx, post("/api/v2/auth/reset-password", r).anonymous())
}

// GetAccount answers who the caller is.
func (v *V2) GetAccount(ctx context.Context) (*v2.AccountAnswer, error) {
	return do[v2.AccountAnswer](ctx, v.transport, get("/api/v2/auth/me"))
}

// ListSessions answers the user's own sessions.
func (v *V2) ListSessions(ctx context.Context) (*v2.SessionList, error) {
	return do[v2.SessionList](ctx, v.transport, get("/api/v2/auth/sessions"))
}

// EndSession ends one of the user's own sessions.
func (v *V2) EndSession(ctx context.Context, sessionID string) error {
	return v.transport.run(ctx, remove("/api/v2/auth/sessions/{session_id}", sessionID))
}

// AcceptInvitation makes the invited user, who then signs in by Login.
func (v *V2) AcceptInvitation(ctx context.Context, r v2.AcceptInvitationRequest) (*v2.RegisterAnswer, error) {
	return do[v2.RegisterAnswer](ctx, v.transport, post("/api/v2/auth/accept-invitation", r).anonymous())
}

// ListMembers answers the tenant's users and who is invited.
func (v *V2) ListMembers(ctx context.Context) (*v2.MemberList, error) {
	return do[v2.MemberList](ctx, v.transport, get("/api/v2/members"))
}

// InviteMember sends an invitation by mail.
func (v *V2) InviteMember(ctx context.Context, r v2.InviteRequest) (*v2.InvitationAnswer, error) {
	return do[v2.InvitationAnswer](ctx, v.transport, post("/api/v2/members/invite", r))
}

// ChangeMember gives a user another role. ErrConflict: it is the last owner.
func (v *V2) ChangeMember(ctx context.Context, userID string, r v2.RoleRequest) (*v2.UserAnswer, error) {
	return do[v2.UserAnswer](ctx, v.transport, put("/api/v2/members/{user_id}", r, userID).repeatable())
}

// RemoveMember removes a user and ends its sessions. ErrConflict: it is the
// last owner.
func (v *V2) RemoveMember(ctx context.Context, userID string) error {
	return v.transport.run(ctx, remove("/api/v2/members/{user_id}", userID))
}

// RevokeInvitation makes an invitation worthless.
func (v *V2) RevokeInvitation(ctx context.Context, invitationID string) error {
	return v.transport.run(ctx, remove("/api/v2/members/invitations/{invitation_id}", invitationID))
}

// CreateAPIKey makes an API key of the caller's tenant. The answer is the only
// one that holds the key itself.
func (v *V2) CreateAPIKey(ctx context.Context, r v2.CreateAPIKeyRequest) (*v2.CreatedAPIKey, error) {
	return do[v2.CreatedAPIKey](ctx, v.transport, post("/api/v2/api-keys", r))
}

// ListAPIKeys answers what is known of the tenant's API keys.
func (v *V2) ListAPIKeys(ctx context.Context) (*v2.APIKeyList, error) {
	return do[v2.APIKeyList](ctx, v.transport, get("/api/v2/api-keys"))
}

// RevokeAPIKey makes an API key worthless at once.
func (v *V2) RevokeAPIKey(ctx context.Context, keyID string) error {
	return v.transport.run(ctx, remove("/api/v2/api-keys/{key_id}", keyID))
}

// ListTenants answers a page of the deployment's tenants.
func (v *V2) ListTenants(ctx context.Context, p *v2.ListTenantsParams) (*v2.TenantList, error) {
	return do[v2.TenantList](ctx, v.transport, get("/api/v2/system/tenants").with(p))
}

// CreateTenant makes a tenant that is active at once.
func (v *V2) CreateTenant(ctx context.Context, r v2.CreateTenantRequest) (*v2.TenantAnswer, error) {
	return do[v2.TenantAnswer](ctx, v.transport, post("/api/v2/system/tenants", r))
}

// ActivateTenant ends a tenant's trial for good.
func (v *V2) ActivateTenant(ctx context.Context, tenantID string) (*v2.TenantAnswer, error) {
	return do[v2.TenantAnswer](ctx, v.transport, post("/api/v2/system/tenants/{tenant_id}/activate", nil, tenantID).repeatable())
}

// SetTenantLimits gives a tenant rate limits of its own; nil is the
// deployment's.
func (v *V2) SetTenantLimits(ctx context.Context, tenantID string, r v2.TenantLimits) (*v2.TenantAnswer, error) {
	return do[v2.TenantAnswer](ctx, v.transport, put("/api/v2/system/tenants/{tenant_id}/limits", r, tenantID).repeatable())
}

// CreateTenantAPIKey makes an API key of another tenant.
func (v *V2) CreateTenantAPIKey(ctx context.Context, tenantID string, r v2.CreateAPIKeyRequest) (*v2.CreatedAPIKey, error) {
	return do[v2.CreatedAPIKey](ctx, v.transport, post("/api/v2/system/tenants/{tenant_id}/api-keys", r, tenantID))
}

// ListSealingKeys answers every sealing key, the current one first, with how many
// objects need it.
func (v *V2) ListSealingKeys(ctx context.Context) (*v2.SealingKeyList, error) {
	return do[v2.SealingKeyList](ctx, v.transport, get("/api/v2/system/sealing-keys"))
}

// RotateSealingKey makes a new sealing key and publishes it. It is not sent again
// when its outcome is unknown.
func (v *V2) RotateSealingKey(ctx context.Context) (*v2.SealingKeyAnswer, error) {
	return do[v2.SealingKeyAnswer](ctx, v.transport, post("/api/v2/system/sealing-keys/rotate", nil))
}

// RetireSealingKey archives a sealing key; ErrConflict: it is the current one, or
// an object needs it.
func (v *V2) RetireSealingKey(ctx context.Context, keyID string) (*v2.SealingKeyAnswer, error) {
	return do[v2.SealingKeyAnswer](ctx, v.transport, post("/api/v2/system/sealing-keys/{key_id}/retire", nil, keyID).repeatable())
}

// ListKMSKeys answers the keys of the key-management service, the current one
// first, with how many sets of keys are under each.
func (v *V2) ListKMSKeys(ctx context.Context) (*v2.KMSKeyList, error) {
	return do[v2.KMSKeyList](ctx, v.transport, get("/api/v2/system/kms"))
}

// RewrapKeys moves some sets of keys under the current key of the key-management
// service. Repeat it until none remains.
func (v *V2) RewrapKeys(ctx context.Context, r v2.RewrapKeysRequest) (*v2.RewrapKeysAnswer, error) {
	return do[v2.RewrapKeysAnswer](ctx, v.transport, post("/api/v2/system/kms/rewrap", r).repeatable())
}

// DestroyKMSKey has the key-management service destroy a former key; ErrConflict:
// it is the current one, or keys are under it. It is not sent again when its
// outcome is unknown.
func (v *V2) DestroyKMSKey(ctx context.Context, r v2.DestroyKMSKeyRequest) (*v2.DestroyKMSKeyAnswer, error) {
	return do[v2.DestroyKMSKeyAnswer](ctx, v.transport, post("/api/v2/system/kms/destroy", r))
}

// RestoreSealingKey takes a retired sealing key back into use.
func (v *V2) RestoreSealingKey(ctx context.Context, keyID string) (*v2.SealingKeyAnswer, error) {
	return do[v2.SealingKeyAnswer](ctx, v.transport, post("/api/v2/system/sealing-keys/{key_id}/restore", nil, keyID).repeatable())
}
