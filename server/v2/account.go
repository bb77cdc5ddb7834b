package v2

import (
	"context"
	"net/http"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/oapi-codegen/runtime/types"

	api "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/identity"
	"github.com/latticekeep/latticekeep/server/gate"
)

func invitation(i identity.Invitation) api.Invitation {
	return api.Invitation{
		InvitationId: i.ID, Email: types.Email(i.Email), Role: api.Role(i.Role), CreatedAt: i.CreatedAt.UTC(), ExpiresAt: i.ExpiresAt.UTC(),
	}
}

// ListMembers returns the tenant's members and open invitations.
func (a *accountAPI) ListMembers(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		members, invited, err := a.identity.Members(ctx, call.Principal())
		if err != nil {
			return nil, err
		}
		answer := api.MemberList{Success: true, Members: make([]api.User, len(members)), Invitations: make([]api.Invitation, len(invited))}
		for i, m := range members {
			answer.Members[i] = user(m)
		}
		for i, v := range invited {
			answer.Invitations[i] = invitation(v)
		}
		return answer, nil
	})
}

// InviteMember sends an invitation by mail.
func (a *accountAPI) InviteMember(c *gin.Context) {
	gate.Answer(c, http.StatusCreated, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.InviteRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		i, err := a.identity.Invite(ctx, call.Principal(), body.Email, authz.Role(body.Role))
		if err != nil {
			return nil, err
		}
		v := invitation(i)
		return api.InvitationAnswer{
			Success: true, InvitationId: v.InvitationId, Email: v.Email, Role: v.Role, CreatedAt: v.CreatedAt, ExpiresAt: v.ExpiresAt,
		}, nil
	})
}

// ChangeMember gives a member another role.
func (a *accountAPI) ChangeMember(c *gin.Context, id string) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.RoleRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		u, err := a.identity.ChangeMember(ctx, call.Principal(), id, authz.Role(body.Role))
		if err != nil {
			return nil, err
		}
		return api.UserAnswer{Success: true, User: user(u)}, nil
	})
}

// RemoveMember removes a member and ends its sessions.
func (a *accountAPI) RemoveMember(c *gin.Context, id string) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		if err := a.identity.RemoveMember(ctx, call.Principal(), id); err != nil {
			return nil, err
		}
		return api.RemovedMember{Success: true, UserId: id}, nil
	})
}

// RevokeInvitation revokes an invitation.
func (a *accountAPI) RevokeInvitation(c *gin.Context, id string) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		if err := a.identity.RevokeInvitation(ctx, call.Principal(), id); err != nil {
			return nil, err
		}
		return api.RevokedInvitation{Success: true, InvitationId: id}, nil
	})
}

func apiKeyRequest(body api.CreateAPIKeyRequest) identity.APIKeyRequest {
	r := identity.APIKeyRequest{Name: body.Name, ExpiresInDays: gate.Value(body.ExpiresInDays)}
	for _, s := range body.Scopes {
		r.Scopes = append(r.Scopes, authz.Scope(s))
	}
	return r
}

func createdAPIKey(k identity.APIKey, key string) api.CreatedAPIKey {
	answer := api.CreatedAPIKey{
		Success: true, ApiKey: key, KeyId: k.ID, Name: k.Name, Scopes: scopes(k.Scopes), CreatedAt: k.CreatedAt.UTC(),
		Status: apiKeyStatus(k, k.CreatedAt),
	}
	if !k.ExpiresAt.IsZero() {
		expires := k.ExpiresAt.UTC()
		answer.ExpiresAt = &expires
	}
	return answer
}

func apiKeyStatus(k identity.APIKey, now time.Time) api.APIKeyStatus {
	switch {
	case k.Expired(now):
		return api.APIKeyStatusExpired
	case k.Pending:
		return api.APIKeyStatusPending
	}
	return api.APIKeyStatusActive
}

// ApproveAPIKey lets a key work that the operator made.
func (a *accountAPI) ApproveAPIKey(c *gin.Context, id string) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		if err := a.identity.ApproveAPIKey(ctx, call.Principal(), id); err != nil {
			return nil, err
		}
		return api.ApprovedAPIKey{Success: true, KeyId: id}, nil
	})
}

// CreateAPIKey returns the key itself, only this once.
func (a *accountAPI) CreateAPIKey(c *gin.Context) {
	gate.Answer(c, http.StatusCreated, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.CreateAPIKeyRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		k, key, err := a.identity.CreateAPIKey(ctx, call.Principal(), apiKeyRequest(body))
		if err != nil {
			return nil, err
		}
		return createdAPIKey(k, key), nil
	})
}

// ListAPIKeys returns metadata of all API keys of the tenant, never a key itself.
func (a *accountAPI) ListAPIKeys(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		keys, err := a.identity.APIKeys(ctx, call.Principal())
		if err != nil {
			return nil, err
		}
		answer := api.APIKeyList{Success: true, ApiKeys: make([]api.APIKey, len(keys))}
		for i, k := range keys {
			answer.ApiKeys[i] = api.APIKey{
				KeyId: k.ID, Name: k.Name, Scopes: scopes(k.Scopes), Status: apiKeyStatus(k, a.now()), CreatedBy: k.CreatedBy, CreatedAt: k.CreatedAt.UTC(),
			}
			if !k.ExpiresAt.IsZero() {
				expires := k.ExpiresAt.UTC()
				answer.ApiKeys[i].ExpiresAt = &expires
			}
			if !k.LastUsedAt.IsZero() {
				used := k.LastUsedAt.UTC()
				answer.ApiKeys[i].LastUsedAt = &used
			}
		}
		return answer, nil
	})
}

// RevokeAPIKey revokes a key with immediate effect.
func (a *accountAPI) RevokeAPIKey(c *gin.Context, id string) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		if err := a.identity.RevokeAPIKey(ctx, call.Principal(), id); err != nil {
			return nil, err
		}
		return api.RevokedAPIKey{Success: true, KeyId: id}, nil
	})
}

// accessAPI implements the endpoints of policies, bindings and groups.
type accessAPI struct{ identity *identity.Service }

func policy(p identity.Policy) api.Policy {
	shown := api.Policy{PolicyId: p.ID, Name: p.Name, Rules: make([]api.PolicyRule, len(p.Rules)), CreatedAt: p.CreatedAt.UTC(), ChangedAt: p.ChangedAt.UTC()}
	for i, r := range p.Rules {
		shown.Rules[i].Path = r.Path
		for _, v := range r.Verbs {
			shown.Rules[i].Verbs = append(shown.Rules[i].Verbs, api.PathVerb(v))
		}
	}
	return shown
}

func policyRequest(body api.PolicyRequest) identity.PolicyRequest {
	r := identity.PolicyRequest{Name: body.Name, Rules: make([]authz.Rule, len(body.Rules))}
	for i, rule := range body.Rules {
		r.Rules[i].Path = rule.Path
		for _, v := range rule.Verbs {
			r.Rules[i].Verbs = append(r.Rules[i].Verbs, authz.Verb(v))
		}
	}
	return r
}

func policyAnswer(p identity.Policy, err error) (any, error) {
	if err != nil {
		return nil, err
	}
	return api.PolicyAnswer{Success: true, Policy: policy(p)}, nil
}

func binding(b identity.Binding) api.Binding {
	return api.Binding{Subject: b.Subject, Policies: b.Policies, BoundBy: gate.NonZero(b.BoundBy), BoundAt: b.BoundAt.UTC()}
}

// ListPolicies returns the policies of the tenant, and who has which.
func (a *accessAPI) ListPolicies(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		policies, bindings, err := a.identity.Access.Policies(ctx, call.Principal())
		if err != nil {
			return nil, err
		}
		answer := api.PolicyList{Success: true, Policies: make([]api.Policy, len(policies)), Bindings: make([]api.Binding, len(bindings))}
		for i, p := range policies {
			answer.Policies[i] = policy(p)
		}
		for i, b := range bindings {
			answer.Bindings[i] = binding(b)
		}
		return answer, nil
	})
}

// CreatePolicy makes a policy.
func (a *accessAPI) CreatePolicy(c *gin.Context) {
	gate.Answer(c, http.StatusCreated, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.PolicyRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		return policyAnswer(a.identity.Access.CreatePolicy(ctx, call.Principal(), policyRequest(body)))
	})
}

// GetPolicy returns one policy.
func (a *accessAPI) GetPolicy(c *gin.Context, id string) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		return policyAnswer(a.identity.Access.Policy(ctx, call.Principal(), id))
	})
}

// ChangePolicy gives a policy another name and other rules.
func (a *accessAPI) ChangePolicy(c *gin.Context, id string) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.PolicyRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		return policyAnswer(a.identity.Access.ChangePolicy(ctx, call.Principal(), id, policyRequest(body)))
	})
}

// DeletePolicy deletes a policy that nobody has.
func (a *accessAPI) DeletePolicy(c *gin.Context, id string) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		if err := a.identity.Access.DeletePolicy(ctx, call.Principal(), id); err != nil {
			return nil, err
		}
		return api.DeletedPolicy{Success: true, PolicyId: id}, nil
	})
}

// BindPolicies gives a subject policies in place of those that it has.
func (a *accessAPI) BindPolicies(c *gin.Context, subject string) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.BindingRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		b, err := a.identity.Access.Bind(ctx, call.Principal(), subject, body.Policies)
		if err != nil {
			return nil, err
		}
		return api.BindingAnswer{Success: true, Binding: binding(b)}, nil
	})
}

// UnbindPolicies takes a subject's policies away.
func (a *accessAPI) UnbindPolicies(c *gin.Context, subject string) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		if err := a.identity.Access.Unbind(ctx, call.Principal(), subject); err != nil {
			return nil, err
		}
		return api.DeletedBinding{Success: true, Subject: subject}, nil
	})
}

func group(g identity.Group) api.Group {
	return api.Group{
		GroupId: g.ID, Name: g.Name, Members: append([]string{}, g.Members...), Policies: append([]string{}, g.Policies...),
		CreatedAt: g.CreatedAt.UTC(), ChangedAt: g.ChangedAt.UTC(),
	}
}

func groupAnswer(g identity.Group, err error) (any, error) {
	if err != nil {
		return nil, err
	}
	return api.GroupAnswer{Success: true, Group: group(g)}, nil
}

// ListGroups returns the groups of the tenant, with their members and policies.
func (a *accessAPI) ListGroups(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		all, err := a.identity.Access.Groups(ctx, call.Principal())
		if err != nil {
			return nil, err
		}
		answer := api.GroupList{Success: true, Groups: make([]api.Group, len(all))}
		for i, g := range all {
			answer.Groups[i] = group(g)
		}
		return answer, nil
	})
}

// CreateGroup makes a group without members.
func (a *accessAPI) CreateGroup(c *gin.Context) {
	gate.Answer(c, http.StatusCreated, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.GroupRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		return groupAnswer(a.identity.Access.CreateGroup(ctx, call.Principal(), body.Name))
	})
}

// GetGroup returns one group.
func (a *accessAPI) GetGroup(c *gin.Context, id string) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		return groupAnswer(a.identity.Access.Group(ctx, call.Principal(), id))
	})
}

// RenameGroup gives a group another name.
func (a *accessAPI) RenameGroup(c *gin.Context, id string) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.GroupRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		return groupAnswer(a.identity.Access.RenameGroup(ctx, call.Principal(), id, body.Name))
	})
}

// DeleteGroup deletes a group with its binding.
func (a *accessAPI) DeleteGroup(c *gin.Context, id string) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		if err := a.identity.Access.DeleteGroup(ctx, call.Principal(), id); err != nil {
			return nil, err
		}
		return api.DeletedGroup{Success: true, GroupId: id}, nil
	})
}

// AddGroupMember makes a user or a ServiceAccount a member of a group.
func (a *accessAPI) AddGroupMember(c *gin.Context, id, subject string) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		return groupAnswer(a.identity.Access.AddMember(ctx, call.Principal(), id, subject))
	})
}

// RemoveGroupMember ends a membership.
func (a *accessAPI) RemoveGroupMember(c *gin.Context, id, subject string) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		return groupAnswer(a.identity.Access.RemoveMember(ctx, call.Principal(), id, subject))
	})
}

// CheckAccess judges whether a path may be reached.
func (a *accessAPI) CheckAccess(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.AccessCheckRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		j, err := a.identity.Access.Check(ctx, call.Principal(), identity.Question{
			Path: body.Path, Verb: authz.Verb(body.Verb), Subject: gate.Value(body.Subject),
		})
		if err != nil {
			return nil, err
		}
		answer := api.AccessJudgement{Success: true, Allowed: j.Allowed, Reason: gate.NonZero(api.AccessJudgementReason(j.Reason))}
		if len(j.Groups) > 0 {
			answer.Groups = &j.Groups
		}
		return answer, nil
	})
}
