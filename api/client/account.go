package client

import (
	"context"
	"errors"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
)

// RegisterUser makes a user and its tenant, whose trial begins. ErrConflict:
// the address is taken.
func (v *V2) RegisterUser(ctx context.Context, r v2.RegisterRequest) (*v2.RegisterAnswer, error) {
	return answer[v2.RegisterAnswer](read(v.api.RegisterUser(anonymous(ctx), r)))
}

// Login begins a session: from here on the methods of V2 act as the user.
func (v *V2) Login(ctx context.Context, r v2.LoginRequest) (*v2.TokenAnswer, error) {
	t, refresh, err := tokens(read(v.api.Login(anonymous(ctx), r)))
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
	err := done(read(v.api.Logout(with(ctx, manner{access: access, refresh: refresh}))))
	if err != nil && !errors.Is(err, ErrUnauthenticated) {
		return err
	}
	v.session.end(access.session)
	return nil
}

// exchange uses up a refresh token.
func (v *V2) exchange(ctx context.Context, refresh string) (*v2.TokenAnswer, string, error) {
	return tokens(read(v.api.RefreshSession(with(ctx, manner{anonymous: true, refresh: refresh}))))
}

// tokens reads an answer that carries both tokens.
func tokens(r *reply, err error) (*v2.TokenAnswer, string, error) {
	t, err := answer[v2.TokenAnswer](r, err)
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
	return done(read(v.api.VerifyEmail(anonymous(ctx), r)))
}

// ResendVerification sends the verification mail again.
func (v *V2) ResendVerification(ctx context.Context) error {
	return done(read(v.api.ResendVerification(ctx)))
}

// ChangePassword sets another password and ends the user's other sessions.
func (v *V2) ChangePassword(ctx context.Context, r v2.ChangePasswordRequest) error {
	return done(read(v.api.ChangePassword(ctx, r)))
}

// RequestPasswordReset sends a mail with a token, if the address is known; the
// answer does not tell.
func (v *V2) RequestPasswordReset(ctx context.Context, r v2.EmailRequest) error {
	return done(read(v.api.RequestPasswordReset(anonymous(ctx), r)))
}

// ResetPassword takes the token of a reset mail, sets the password and ends all
// sessions of the user.
func (v *V2) ResetPassword(ctx context.Context, r v2.ResetPasswordRequest) error {
	return done(read(v.api.ResetPassword(anonymous(ctx), r)))
}

// GetAccount answers who the caller is.
func (v *V2) GetAccount(ctx context.Context) (*v2.AccountAnswer, error) {
	return answer[v2.AccountAnswer](read(v.api.GetAccount(ctx)))
}

// ListSessions answers the user's own sessions.
func (v *V2) ListSessions(ctx context.Context) (*v2.SessionList, error) {
	return answer[v2.SessionList](read(v.api.ListSessions(ctx)))
}

// EndSession ends one of the user's own sessions.
func (v *V2) EndSession(ctx context.Context, sessionID string) error {
	return done(read(v.api.EndSession(ctx, segment(sessionID))))
}

// AcceptInvitation makes the invited user, who then signs in by Login.
func (v *V2) AcceptInvitation(ctx context.Context, r v2.AcceptInvitationRequest) (*v2.RegisterAnswer, error) {
	return answer[v2.RegisterAnswer](read(v.api.AcceptInvitation(anonymous(ctx), r)))
}

// ListMembers answers the tenant's users and who is invited.
func (v *V2) ListMembers(ctx context.Context) (*v2.MemberList, error) {
	return answer[v2.MemberList](read(v.api.ListMembers(ctx)))
}

// InviteMember sends an invitation by mail.
func (v *V2) InviteMember(ctx context.Context, r v2.InviteRequest) (*v2.InvitationAnswer, error) {
	return answer[v2.InvitationAnswer](read(v.api.InviteMember(ctx, r)))
}

// ChangeMember gives a user another role. ErrConflict: it is the last owner.
func (v *V2) ChangeMember(ctx context.Context, userID string, r v2.RoleRequest) (*v2.UserAnswer, error) {
	return answer[v2.UserAnswer](read(v.api.ChangeMember(repeatable(ctx), segment(userID), r)))
}

// RemoveMember removes a user and ends its sessions. ErrConflict: it is the
// last owner.
func (v *V2) RemoveMember(ctx context.Context, userID string) error {
	return done(read(v.api.RemoveMember(ctx, segment(userID))))
}

// RevokeInvitation makes an invitation worthless.
func (v *V2) RevokeInvitation(ctx context.Context, invitationID string) error {
	return done(read(v.api.RevokeInvitation(ctx, segment(invitationID))))
}

// CreateAPIKey makes an API key of the caller's tenant. The answer is the only
// one that holds the key itself.
func (v *V2) CreateAPIKey(ctx context.Context, r v2.CreateAPIKeyRequest) (*v2.CreatedAPIKey, error) {
	return answer[v2.CreatedAPIKey](read(v.api.CreateAPIKey(ctx, r)))
}

// ListAPIKeys answers what is known of the tenant's API keys.
func (v *V2) ListAPIKeys(ctx context.Context) (*v2.APIKeyList, error) {
	return answer[v2.APIKeyList](read(v.api.ListAPIKeys(ctx)))
}

// RevokeAPIKey makes an API key worthless at once.
func (v *V2) RevokeAPIKey(ctx context.Context, keyID string) error {
	return done(read(v.api.RevokeAPIKey(ctx, segment(keyID))))
}

// ListTenants answers a page of the deployment's tenants.
func (v *V2) ListTenants(ctx context.Context, p *v2.ListTenantsParams) (*v2.TenantList, error) {
	return answer[v2.TenantList](read(v.api.ListTenants(ctx, p)))
}

// CreateTenant makes a tenant that is active at once.
func (v *V2) CreateTenant(ctx context.Context, r v2.CreateTenantRequest) (*v2.TenantAnswer, error) {
	return answer[v2.TenantAnswer](read(v.api.CreateTenant(ctx, r)))
}

// ActivateTenant ends a tenant's trial for good.
func (v *V2) ActivateTenant(ctx context.Context, tenantID string) (*v2.TenantAnswer, error) {
	return answer[v2.TenantAnswer](read(v.api.ActivateTenant(repeatable(ctx), segment(tenantID))))
}

// SetTenantLimits gives a tenant rate limits of its own; nil is the
// deployment's.
func (v *V2) SetTenantLimits(ctx context.Context, tenantID string, r v2.TenantLimits) (*v2.TenantAnswer, error) {
	return answer[v2.TenantAnswer](read(v.api.SetTenantLimits(repeatable(ctx), segment(tenantID), r)))
}

// CreateTenantAPIKey makes an API key of another tenant.
func (v *V2) CreateTenantAPIKey(ctx context.Context, tenantID string, r v2.CreateAPIKeyRequest) (*v2.CreatedAPIKey, error) {
	return answer[v2.CreatedAPIKey](read(v.api.CreateTenantAPIKey(ctx, segment(tenantID), r)))
}

// ListSealingKeys answers every sealing key, the current one first, with how many
// objects need it.
func (v *V2) ListSealingKeys(ctx context.Context) (*v2.SealingKeyList, error) {
	return answer[v2.SealingKeyList](read(v.api.ListSealingKeys(ctx)))
}

// RotateSealingKey makes a new sealing key and publishes it. It is not sent again
// when its outcome is unknown.
func (v *V2) RotateSealingKey(ctx context.Context) (*v2.SealingKeyAnswer, error) {
	return answer[v2.SealingKeyAnswer](read(v.api.RotateSealingKey(ctx)))
}

// RetireSealingKey archives a sealing key; ErrConflict: it is the current one, or
// an object needs it.
func (v *V2) RetireSealingKey(ctx context.Context, keyID string) (*v2.SealingKeyAnswer, error) {
	return answer[v2.SealingKeyAnswer](read(v.api.RetireSealingKey(repeatable(ctx), segment(keyID))))
}

// ListKMSKeys answers the keys of the key-management service, the current one
// first, with how many sets of keys are under each.
func (v *V2) ListKMSKeys(ctx context.Context) (*v2.KMSKeyList, error) {
	return answer[v2.KMSKeyList](read(v.api.ListKMSKeys(ctx)))
}

// RewrapKeys moves some sets of keys under the current key of the key-management
// service. Repeat it until none remains.
func (v *V2) RewrapKeys(ctx context.Context, r v2.RewrapKeysRequest) (*v2.RewrapKeysAnswer, error) {
	return answer[v2.RewrapKeysAnswer](read(v.api.RewrapKeys(repeatable(ctx), r)))
}

// DestroyKMSKey has the key-management service destroy a former key; ErrConflict:
// it is the current one, or keys are under it. It is not sent again when its
// outcome is unknown.
func (v *V2) DestroyKMSKey(ctx context.Context, r v2.DestroyKMSKeyRequest) (*v2.DestroyKMSKeyAnswer, error) {
	return answer[v2.DestroyKMSKeyAnswer](read(v.api.DestroyKMSKey(ctx, r)))
}

// RestoreSealingKey takes a retired sealing key back into use.
func (v *V2) RestoreSealingKey(ctx context.Context, keyID string) (*v2.SealingKeyAnswer, error) {
	return answer[v2.SealingKeyAnswer](read(v.api.RestoreSealingKey(repeatable(ctx), segment(keyID))))
}
