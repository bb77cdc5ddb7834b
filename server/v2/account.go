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
	"github.com/latticekeep/latticekeep/internal/overview"
	"github.com/latticekeep/latticekeep/internal/vault"
	"github.com/latticekeep/latticekeep/server/gate"
	"github.com/latticekeep/latticekeep/server/v2/credentials"
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

// overviewAPI implements the endpoint of the overview.
type overviewAPI struct{ overview *overview.Service }

// overviewTime limits an overview, each part of which has a limit of its own.
const overviewTime = 5 * time.Second

// GetOverview says what is wrong, what waits for the caller, and what happened.
func (a *overviewAPI) GetOverview(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		o, err := a.overview.Of(ctx, call.Principal())
		if err != nil {
			return nil, err
		}
		if o.Causes != nil {
			_ = c.Error(o.Causes)
		}
		answer := api.Overview{
			Success: true, Todo: make([]api.Todo, len(o.Todo)),
			Setup: api.Setup{Credential: o.Setup.Credential, ApiKey: o.Setup.APIKey, Member: o.Setup.Member, Email: o.Setup.Email},
		}
		for i, t := range o.Todo {
			answer.Todo[i] = api.Todo{Kind: api.TodoKind(t.Kind), Count: t.Count, Framework: gate.NonZero(api.Framework(t.Framework))}
		}
		answer.Health = listed(o.Health, func(h overview.Health) api.PartHealth {
			return api.PartHealth{Part: api.PartHealthPart(h.Part), Status: api.PartHealthStatus(h.Status), Message: h.Message}
		})
		answer.HealthAt = gate.NonZero(o.HealthAt)
		answer.Unavailable = listed(o.Unavailable, func(p overview.Part) api.OverviewPart { return api.OverviewPart(p) })
		answer.Scores = overviewScores(o)
		answer.Credentials = overviewCredentials(o.Credentials)
		if days := listed(o.Days, activityDay); days != nil {
			answer.Activity = &api.Activity{Complete: o.Whole, Days: *days}
		}
		return answer, nil
	})
}

// listed encodes a list; nil for none.
func listed[T, U any](all []T, encode func(T) U) *[]U {
	if len(all) == 0 {
		return nil
	}
	out := make([]U, len(all))
	for i, one := range all {
		out[i] = encode(one)
	}
	return &out
}

func activityDay(d overview.Day) api.ActivityDay {
	return api.ActivityDay{Date: types.Date{Time: d.Start}, Secrets: d.Secrets, Changes: d.Changes, Denials: d.Denials}
}

func overviewScores(o overview.Overview) *[]api.OverviewScore {
	if o.Scores == nil {
		return nil
	}
	scores := make([]api.OverviewScore, len(o.Scores))
	for i, s := range o.Scores {
		scores[i] = api.OverviewScore{Framework: api.Framework(s.Framework), Covered: float32(s.Covered), Failing: s.Failing, Provisional: s.Provisional}
		if s.Score != nil {
			scores[i].Score = new(float32(*s.Score))
		}
	}
	return &scores
}

func overviewCredentials(s *vault.Summary) *api.OverviewCredentials {
	if s == nil {
		return nil
	}
	answer := api.OverviewCredentials{Complete: s.Complete, Total: s.Total, Active: s.Active, Expired: s.Expired, ExpiringSoon: s.ExpiringSoon}
	if u := s.Unread; u != nil {
		answer.Unread = &api.UnreadCredentials{Count: u.Count, Complete: u.Complete, Days: overview.UnreadDays, Credentials: credentials.List(u.Oldest)}
	}
	return &answer
}
