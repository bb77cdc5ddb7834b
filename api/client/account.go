package client

import (
	"context"
	"errors"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
)

// RegisterUser creates a user and its tenant and starts the tenant's trial. ErrConflict: the
// address is taken.
func (v *V2) RegisterUser(ctx context.Context, r v2.RegisterRequest) (*v2.RegisterAnswer, error) {
	return do[v2.RegisterAnswer](ctx, v.transport, post("/api/v2/auth/register", r).anonymous())
}

// Login begins a session. From then on the methods of V2 act as the user.
func (v *V2) Login(ctx context.Context, r v2.LoginRequest) (*v2.TokenAnswer, error) {
	t, refresh, err := v.tokens(ctx, post("/api/v2/auth/login", r).anonymous())
	if err != nil {
		return nil, err
	}
	v.session.begin(t.AccessToken, refresh)
	return t, nil
}

// RefreshSession exchanges the refresh token for new tokens now. This is seldom necessary, because
// a rejected call does it by itself. ErrUnauthenticated: there is no session, or it has ended.
func (v *V2) RefreshSession(ctx context.Context) (*v2.TokenAnswer, error) {
	return v.session.force(ctx)
}

// Logout ends the session. It returns nil also when the session has already ended. Afterwards the
// methods of V2 carry the API key again, if there is one.
func (v *V2) Logout(ctx context.Context) error {
	access, refresh := v.session.tokens()
	if access == (credential{}) {
		return nil
	}
	// The server accepts either token, so an expired access token needs no renewal first.
	err := v.transport.run(ctx, logout(access, refresh))
	if err != nil && !errors.Is(err, ErrUnauthenticated) {
		return err
	}
	v.session.end(access.session)
	return nil
}

// logout returns the call that ends the session with these tokens.
func logout(access credential, refresh string) call {
	return post("/api/v2/auth/logout", nil).as(access).withRefreshToken(refresh)
}

// exchange exchanges the refresh token for new tokens.
func (v *V2) exchange(ctx context.Context, refresh string) (*v2.TokenAnswer, string, error) {
	return v.tokens(ctx, post("/api/v2/auth/refresh", nil).anonymous().withRefreshToken(refresh))
}

// tokens sends a call whose answer contains both tokens.
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

// VerifyEmail confirms an address with the token of a verification e-mail. ErrInvalid: the token is
// wrong, used or expired.
func (v *V2) VerifyEmail(ctx context.Context, r v2.TokenRequest) error {
	return v.transport.run(ctx, post("/api/v2/auth/verify-email", r).anonymous())
}

// ResendVerification sends the verification e-mail again.
func (v *V2) ResendVerification(ctx context.Context) error {
	return v.transport.run(ctx, post("/api/v2/auth/resend-verification", nil))
}

// ChangePassword sets a new password and ends the user's other sessions.
func (v *V2) ChangePassword(ctx context.Context, r v2.ChangePasswordRequest) error {
	return v.transport.run(ctx, post("/api/v2/auth/change-password", r))
}

// RequestPasswordReset sends an e-mail with a token, if the address is known. The answer does not
// reveal whether it is.
func (v *V2) RequestPasswordReset(ctx context.Context, r v2.EmailRequest) error {
	return v.transport.run(ctx, post("/api/v2/auth/forgot-password", r).anonymous())
}

// ResetPassword sets the password with the token of a reset e-mail, and ends all sessions of the
// user.
func (v *V2) ResetPassword(ctx context.Context, r v2.ResetPasswordRequest) error {
	return v.transport.run(ctx, post("/api/v2/auth/reset-password", r).anonymous())
}

// GetAccount returns the account of the caller.
func (v *V2) GetAccount(ctx context.Context) (*v2.AccountAnswer, error) {
	return do[v2.AccountAnswer](ctx, v.transport, get("/api/v2/auth/me"))
}

// ListSessions returns the user's own sessions.
func (v *V2) ListSessions(ctx context.Context) (*v2.SessionList, error) {
	return do[v2.SessionList](ctx, v.transport, get("/api/v2/auth/sessions"))
}

// EndSession ends one of the user's own sessions.
func (v *V2) EndSession(ctx context.Context, sessionID string) error {
	return v.transport.run(ctx, remove("/api/v2/auth/sessions/{session_id}", sessionID))
}

// AcceptInvitation creates the invited user, who then signs in with Login.
func (v *V2) AcceptInvitation(ctx context.Context, r v2.AcceptInvitationRequest) (*v2.RegisterAnswer, error) {
	return do[v2.RegisterAnswer](ctx, v.transport, post("/api/v2/auth/accept-invitation", r).anonymous())
}

// ListMembers returns the tenant's members and open invitations.
func (v *V2) ListMembers(ctx context.Context) (*v2.MemberList, error) {
	return do[v2.MemberList](ctx, v.transport, get("/api/v2/members"))
}

// InviteMember sends an invitation by e-mail.
func (v *V2) InviteMember(ctx context.Context, r v2.InviteRequest) (*v2.InvitationAnswer, error) {
	return do[v2.InvitationAnswer](ctx, v.transport, post("/api/v2/members/invite", r))
}

// ChangeMember gives a member another role. ErrConflict: the member is the last owner.
func (v *V2) ChangeMember(ctx context.Context, userID string, r v2.RoleRequest) (*v2.UserAnswer, error) {
	return do[v2.UserAnswer](ctx, v.transport, put("/api/v2/members/{user_id}", r, userID).repeatable())
}

// RemoveMember removes a member and ends its sessions. ErrConflict: the member is the last owner.
func (v *V2) RemoveMember(ctx context.Context, userID string) error {
	return v.transport.run(ctx, remove("/api/v2/members/{user_id}", userID))
}

// RevokeInvitation makes an invitation invalid.
func (v *V2) RevokeInvitation(ctx context.Context, invitationID string) error {
	return v.transport.run(ctx, remove("/api/v2/members/invitations/{invitation_id}", invitationID))
}

// CreateAPIKey creates an API key of the caller's tenant. Only this answer contains the key itself.
func (v *V2) CreateAPIKey(ctx context.Context, r v2.CreateAPIKeyRequest) (*v2.CreatedAPIKey, error) {
	return do[v2.CreatedAPIKey](ctx, v.transport, post("/api/v2/api-keys", r))
}

// ListAPIKeys returns the metadata of the tenant's API keys.
func (v *V2) ListAPIKeys(ctx context.Context) (*v2.APIKeyList, error) {
	return do[v2.APIKeyList](ctx, v.transport, get("/api/v2/api-keys"))
}

// RevokeAPIKey makes an API key invalid at once.
func (v *V2) RevokeAPIKey(ctx context.Context, keyID string) error {
	return v.transport.run(ctx, remove("/api/v2/api-keys/{key_id}", keyID))
}

// ListTenants returns a page of the deployment's tenants.
func (v *V2) ListTenants(ctx context.Context, p *v2.ListTenantsParams) (*v2.TenantList, error) {
	return do[v2.TenantList](ctx, v.transport, get("/api/v2/system/tenants").with(p))
}

// CreateTenant creates a tenant that is active at once.
func (v *V2) CreateTenant(ctx context.Context, r v2.CreateTenantRequest) (*v2.TenantAnswer, error) {
	return do[v2.TenantAnswer](ctx, v.transport, post("/api/v2/system/tenants", r))
}

// ActivateTenant ends a tenant's trial for good.
func (v *V2) ActivateTenant(ctx context.Context, tenantID string) (*v2.TenantAnswer, error) {
	return do[v2.TenantAnswer](ctx, v.transport, post("/api/v2/system/tenants/{tenant_id}/activate", nil, tenantID).repeatable())
}

// SetTenantLimits sets the rate limits of a tenant; nil means the limits of the deployment.
func (v *V2) SetTenantLimits(ctx context.Context, tenantID string, r v2.LimitTenantRequest) (*v2.TenantAnswer, error) {
	return do[v2.TenantAnswer](ctx, v.transport, put("/api/v2/system/tenants/{tenant_id}/limits", r, tenantID).repeatable())
}

// ApproveAPIKey approves an API key that the operator made. Only an owner with a session may.
func (v *V2) ApproveAPIKey(ctx context.Context, keyID string) error {
	return v.transport.run(ctx, post("/api/v2/api-keys/{key_id}/approve", nil, keyID))
}

// CreateTenantAPIKey creates an API key of another tenant, which may wait for the approval of an
// owner: see Status.
func (v *V2) CreateTenantAPIKey(ctx context.Context, tenantID string, r v2.CreateAPIKeyRequest) (*v2.CreatedAPIKey, error) {
	return do[v2.CreatedAPIKey](ctx, v.transport, post("/api/v2/system/tenants/{tenant_id}/api-keys", r, tenantID))
}

// ListSealingKeys returns every sealing key, the current one first, with the number of objects that
// need it.
func (v *V2) ListSealingKeys(ctx context.Context) (*v2.SealingKeyList, error) {
	return do[v2.SealingKeyList](ctx, v.transport, get("/api/v2/system/sealing-keys"))
}

// RotateSealingKey creates a new sealing key and publishes it. The client does not repeat the call
// when its outcome is unknown.
func (v *V2) RotateSealingKey(ctx context.Context) (*v2.SealingKeyAnswer, error) {
	return do[v2.SealingKeyAnswer](ctx, v.transport, post("/api/v2/system/sealing-keys/rotate", nil))
}

// RetireSealingKey takes a sealing key out of use. ErrConflict: the key is the current one, or an
// object needs it.
func (v *V2) RetireSealingKey(ctx context.Context, keyID string) (*v2.SealingKeyAnswer, error) {
	return do[v2.SealingKeyAnswer](ctx, v.transport, post("/api/v2/system/sealing-keys/{key_id}/retire", nil, keyID).repeatable())
}

// ListKMSKeys returns the keys of the key-management service, the current one first, with the
// number of key sets that each one wraps.
func (v *V2) ListKMSKeys(ctx context.Context) (*v2.KMSKeyList, error) {
	return do[v2.KMSKeyList](ctx, v.transport, get("/api/v2/system/kms"))
}

// RewrapKeys wraps some key sets with the current key of the key-management service. Repeat it
// until none remains.
func (v *V2) RewrapKeys(ctx context.Context, r v2.RewrapKeysRequest) (*v2.RewrapKeysAnswer, error) {
	return do[v2.RewrapKeysAnswer](ctx, v.transport, post("/api/v2/system/kms/rewrap", r).repeatable())
}

// DestroyKMSKey makes the key-management service destroy a previous key. ErrConflict: the key is
// the current one, or it still wraps keys. The client does not repeat the call when its outcome is
// unknown.
func (v *V2) DestroyKMSKey(ctx context.Context, r v2.DestroyKMSKeyRequest) (*v2.DestroyKMSKeyAnswer, error) {
	return do[v2.DestroyKMSKeyAnswer](ctx, v.transport, post("/api/v2/system/kms/destroy", r))
}

// RestoreSealingKey puts a retired sealing key back into use.
func (v *V2) RestoreSealingKey(ctx context.Context, keyID string) (*v2.SealingKeyAnswer, error) {
	return do[v2.SealingKeyAnswer](ctx, v.transport, post("/api/v2/system/sealing-keys/{key_id}/restore", nil, keyID).repeatable())
}

// ListWebhooks returns the webhooks of the tenant.
func (v *V2) ListWebhooks(ctx context.Context) (*v2.WebhookList, error) {
	return do[v2.WebhookList](ctx, v.transport, get("/api/v2/webhooks"))
}

// CreateWebhook creates a webhook. The answer has its secret, which is not shown again. ErrConflict: there
// are too many webhooks.
func (v *V2) CreateWebhook(ctx context.Context, r v2.WebhookRequest) (*v2.CreatedWebhook, error) {
	return do[v2.CreatedWebhook](ctx, v.transport, post("/api/v2/webhooks", r))
}

// DeleteWebhook deletes a webhook and its deliveries.
func (v *V2) DeleteWebhook(ctx context.Context, webhookID string) error {
	return v.transport.run(ctx, remove("/api/v2/webhooks/{webhook_id}", webhookID))
}

// TestWebhook sends a test event to a webhook. ErrConflict: too many deliveries wait.
func (v *V2) TestWebhook(ctx context.Context, webhookID string) (*v2.DeliveryAnswer, error) {
	return do[v2.DeliveryAnswer](ctx, v.transport, post("/api/v2/webhooks/{webhook_id}/test", nil, webhookID))
}

// ListDeliveries returns what became of the events for a webhook.
func (v *V2) ListDeliveries(ctx context.Context, webhookID string) (*v2.DeliveryList, error) {
	return do[v2.DeliveryList](ctx, v.transport, get("/api/v2/webhooks/{webhook_id}/deliveries", webhookID))
}

// ResendDelivery sends a dead delivery again. ErrConflict: it is not dead, or too many deliveries wait.
func (v *V2) ResendDelivery(ctx context.Context, webhookID, deliveryID string) (*v2.DeliveryAnswer, error) {
	return do[v2.DeliveryAnswer](ctx, v.transport, post("/api/v2/webhooks/{webhook_id}/deliveries/{delivery_id}/resend", nil, webhookID, deliveryID))
}

// ListPolicies returns the policies of the tenant, and who has which.
func (v *V2) ListPolicies(ctx context.Context) (*v2.PolicyList, error) {
	return do[v2.PolicyList](ctx, v.transport, get("/api/v2/access/policies"))
}

// CreatePolicy creates a policy. ErrForbidden: it is wider than those of the caller. ErrConflict: the
// name is taken, or there are too many policies.
func (v *V2) CreatePolicy(ctx context.Context, r v2.PolicyRequest) (*v2.PolicyAnswer, error) {
	return do[v2.PolicyAnswer](ctx, v.transport, post("/api/v2/access/policies", r))
}

// GetPolicy returns one policy.
func (v *V2) GetPolicy(ctx context.Context, policyID string) (*v2.PolicyAnswer, error) {
	return do[v2.PolicyAnswer](ctx, v.transport, get("/api/v2/access/policies/{policy_id}", policyID))
}

// ChangePolicy gives a policy another name and other rules. Errors as for CreatePolicy.
func (v *V2) ChangePolicy(ctx context.Context, policyID string, r v2.PolicyRequest) (*v2.PolicyAnswer, error) {
	return do[v2.PolicyAnswer](ctx, v.transport, put("/api/v2/access/policies/{policy_id}", r, policyID).repeatable())
}

// DeletePolicy deletes a policy. ErrConflict: it is bound.
func (v *V2) DeletePolicy(ctx context.Context, policyID string) error {
	return v.transport.run(ctx, remove("/api/v2/access/policies/{policy_id}", policyID))
}

// BindPolicies gives a user, an API key or a ServiceAccount these policies in place of those that it
// has. ErrForbidden: they are wider than those of the caller. ErrConflict: the user is an owner.
func (v *V2) BindPolicies(ctx context.Context, subject string, r v2.BindingRequest) (*v2.BindingAnswer, error) {
	return do[v2.BindingAnswer](ctx, v.transport, put("/api/v2/access/bindings/{subject}", r, subject).repeatable())
}

// UnbindPolicies takes all policies of a subject away, so no policy limits it. ErrConflict: the user
// has the role limited.
func (v *V2) UnbindPolicies(ctx context.Context, subject string) error {
	return v.transport.run(ctx, remove("/api/v2/access/bindings/{subject}", subject))
}

// ListGroups returns the groups of the tenant, with their members and policies.
func (v *V2) ListGroups(ctx context.Context) (*v2.GroupList, error) {
	return do[v2.GroupList](ctx, v.transport, get("/api/v2/groups"))
}

// CreateGroup creates a group without members. ErrConflict: the name is taken, or there are too many
// groups.
func (v *V2) CreateGroup(ctx context.Context, r v2.GroupRequest) (*v2.GroupAnswer, error) {
	return do[v2.GroupAnswer](ctx, v.transport, post("/api/v2/groups", r))
}

// GetGroup returns one group.
func (v *V2) GetGroup(ctx context.Context, groupID string) (*v2.GroupAnswer, error) {
	return do[v2.GroupAnswer](ctx, v.transport, get("/api/v2/groups/{group_id}", groupID))
}

// RenameGroup gives a group another name. ErrConflict: the name is taken.
func (v *V2) RenameGroup(ctx context.Context, groupID string, r v2.GroupRequest) (*v2.GroupAnswer, error) {
	return do[v2.GroupAnswer](ctx, v.transport, patch("/api/v2/groups/{group_id}", r, groupID))
}

// DeleteGroup deletes a group with its binding and its memberships.
func (v *V2) DeleteGroup(ctx context.Context, groupID string) error {
	return v.transport.run(ctx, remove("/api/v2/groups/{group_id}", groupID))
}

// GetOverview returns what is wrong, what waits for the caller, and what happened. Parts that the caller's
// scopes do not cover are nil.
func (v *V2) GetOverview(ctx context.Context) (*v2.Overview, error) {
	return do[v2.Overview](ctx, v.transport, get("/api/v2/overview"))
}

// AddGroupMember makes a user or a ServiceAccount a member of a group. ErrForbidden: the policies of the
// group are wider than those of the caller. ErrConflict: the group or the subject is at its bound.
func (v *V2) AddGroupMember(ctx context.Context, groupID, subject string) (*v2.GroupAnswer, error) {
	return do[v2.GroupAnswer](ctx, v.transport, put("/api/v2/groups/{group_id}/members/{subject}", nil, groupID, subject).repeatable())
}

// RemoveGroupMember ends a membership. ErrNotFound: there is none.
func (v *V2) RemoveGroupMember(ctx context.Context, groupID, subject string) (*v2.GroupAnswer, error) {
	return do[v2.GroupAnswer](ctx, v.transport, remove("/api/v2/groups/{group_id}/members/{subject}", groupID, subject))
}

// TryAccessChange says who would lose what by a change of access, and changes nothing. It returns a page;
// NextCursor is the Cursor of the next one. ErrForbidden, ErrNotFound and ErrConflict: those of the change.
func (v *V2) TryAccessChange(ctx context.Context, r v2.AccessChange) (*v2.AccessDryRun, error) {
	return do[v2.AccessDryRun](ctx, v.transport, post("/api/v2/access/dry-run", r).repeatable())
}

// ListPermitted says who may do something on a path. It tells nothing of what is there.
func (v *V2) ListPermitted(ctx context.Context, r v2.PermittedRequest) (*v2.PermittedList, error) {
	return do[v2.PermittedList](ctx, v.transport, post("/api/v2/access/permitted", r).repeatable())
}

// CheckAccess judges whether a path may be reached. It tells nothing of what is there.
func (v *V2) CheckAccess(ctx context.Context, r v2.AccessCheckRequest) (*v2.AccessJudgement, error) {
	return do[v2.AccessJudgement](ctx, v.transport, post("/api/v2/access/check", r).repeatable())
}
