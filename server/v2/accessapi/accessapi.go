// Package accessapi has the endpoints of policies, bindings and groups of version 2.
package accessapi

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/gin-gonic/gin"

	api "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dryrun"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity"
	"github.com/latticekeep/latticekeep/server/gate"
)

// Access implements the endpoints.
type Access struct {
	identity *identity.Service
	dryRun   *dryrun.DryRun
}

// New returns the endpoints of the policies and groups of i, and the dry runs of d.
func New(i *identity.Service, d *dryrun.DryRun) *Access { return &Access{i, d} }

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
	return identity.PolicyRequest{Name: body.Name, Rules: policyRules(body.Rules)}
}

func policyRules(body []api.PolicyRuleRequest) []authz.Rule {
	rules := make([]authz.Rule, len(body))
	for i, rule := range body {
		rules[i].Path = rule.Path
		for _, v := range rule.Verbs {
			rules[i].Verbs = append(rules[i].Verbs, authz.Verb(v))
		}
	}
	return rules
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
func (a *Access) ListPolicies(c *gin.Context) {
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
func (a *Access) CreatePolicy(c *gin.Context) {
	gate.Answer(c, http.StatusCreated, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.PolicyRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		return policyAnswer(a.identity.Access.CreatePolicy(ctx, call.Principal(), policyRequest(body)))
	})
}

// GetPolicy returns one policy.
func (a *Access) GetPolicy(c *gin.Context, id string) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		return policyAnswer(a.identity.Access.Policy(ctx, call.Principal(), id))
	})
}

// ChangePolicy gives a policy another name and other rules.
func (a *Access) ChangePolicy(c *gin.Context, id string) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.PolicyRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		return policyAnswer(a.identity.Access.ChangePolicy(ctx, call.Principal(), id, policyRequest(body)))
	})
}

// DeletePolicy deletes a policy that nobody has.
func (a *Access) DeletePolicy(c *gin.Context, id string) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		if err := a.identity.Access.DeletePolicy(ctx, call.Principal(), id); err != nil {
			return nil, err
		}
		return api.DeletedPolicy{Success: true, PolicyId: id}, nil
	})
}

// BindPolicies gives a subject policies in place of those that it has.
func (a *Access) BindPolicies(c *gin.Context, subject string) {
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
func (a *Access) UnbindPolicies(c *gin.Context, subject string) {
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
func (a *Access) ListGroups(c *gin.Context) {
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
func (a *Access) CreateGroup(c *gin.Context) {
	gate.Answer(c, http.StatusCreated, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.GroupRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		return groupAnswer(a.identity.Access.CreateGroup(ctx, call.Principal(), body.Name))
	})
}

// GetGroup returns one group.
func (a *Access) GetGroup(c *gin.Context, id string) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		return groupAnswer(a.identity.Access.Group(ctx, call.Principal(), id))
	})
}

// RenameGroup gives a group another name.
func (a *Access) RenameGroup(c *gin.Context, id string) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.GroupRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		return groupAnswer(a.identity.Access.RenameGroup(ctx, call.Principal(), id, body.Name))
	})
}

// DeleteGroup deletes a group with its binding.
func (a *Access) DeleteGroup(c *gin.Context, id string) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		if err := a.identity.Access.DeleteGroup(ctx, call.Principal(), id); err != nil {
			return nil, err
		}
		return api.DeletedGroup{Success: true, GroupId: id}, nil
	})
}

// AddGroupMember makes a user or a ServiceAccount a member of a group.
func (a *Access) AddGroupMember(c *gin.Context, id, subject string) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		return groupAnswer(a.identity.Access.AddMember(ctx, call.Principal(), id, subject))
	})
}

// RemoveGroupMember ends a membership.
func (a *Access) RemoveGroupMember(c *gin.Context, id, subject string) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		return groupAnswer(a.identity.Access.RemoveMember(ctx, call.Principal(), id, subject))
	})
}

// CheckAccess judges whether a path may be reached.
func (a *Access) CheckAccess(c *gin.Context) {
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

// ListPermitted says who may do something on a path.
func (a *Access) ListPermitted(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.PermittedRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		list, err := a.identity.Access.ListPermitted(ctx, call.Principal(), identity.Question{Path: body.Path, Verb: authz.Verb(body.Verb)})
		if err != nil {
			return nil, err
		}
		answer := api.PermittedList{Success: true, Subjects: make([]api.PermittedSubject, len(list))}
		for i, one := range list {
			answer.Subjects[i] = api.PermittedSubject{Subject: one.Subject, Kind: api.PermittedSubjectKind(one.Kind), Name: gate.NonZero(one.Name)}
			if len(one.Groups) > 0 {
				answer.Subjects[i].Groups = &one.Groups
			}
		}
		return answer, nil
	})
}

// DryRunTime limits the answer to a dry run, which reads the log and then the policies.
const DryRunTime = 3 * time.Second

// changeFields has what each change of access takes.
var changeFields = map[api.AccessChangeChange]struct {
	action authz.Action
	fields string
}{
	api.AccessChangeChangeChangePolicy:   {authz.ChangePolicy, "policy_id and rules"},
	api.AccessChangeChangeBindPolicies:   {authz.BindPolicy, "policies and subject"},
	api.AccessChangeChangeUnbindPolicies: {authz.UnbindPolicy, "subject"},
	api.AccessChangeChangeRemoveMember:   {authz.ChangeGroup, "group_id and subject"},
	api.AccessChangeChangeDeleteGroup:    {authz.DeleteGroup, "group_id"},
}

// accessChange returns the change of a request. Error: fault.Invalid for one with other fields than it takes.
func accessChange(body api.AccessChange) (identity.AccessChange, error) {
	var given []string
	for _, f := range []struct {
		name  string
		given bool
	}{
		{"group_id", body.GroupId != nil}, {"policies", body.Policies != nil}, {"policy_id", body.PolicyId != nil},
		{"rules", body.Rules != nil}, {"subject", body.Subject != nil},
	} {
		if f.given {
			given = append(given, f.name)
		}
	}
	takes := changeFields[body.Change]
	if strings.Join(given, " and ") != takes.fields {
		return identity.AccessChange{}, fault.New(fault.Invalid, fmt.Sprintf("change: %s takes %s, and nothing else", body.Change, takes.fields))
	}
	return identity.AccessChange{
		Kind: takes.action, Policy: gate.Value(body.PolicyId), Rules: policyRules(gate.Value(body.Rules)),
		Subject: gate.Value(body.Subject), Policies: gate.Value(body.Policies), Group: gate.Value(body.GroupId),
	}, nil
}

// TryAccessChange says who would lose what by a change of access.
func (a *Access) TryAccessChange(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.AccessChange
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		change, err := accessChange(body)
		if err != nil {
			return nil, err
		}
		page, err := a.dryRun.Of(ctx, call.Principal(), change, gate.Value(body.Cursor))
		if err != nil {
			return nil, err
		}
		answer := api.AccessDryRun{Success: true, Losses: make([]api.AccessLoss, len(page.Losses)), From: page.From.UTC(), Unjudged: page.Unjudged, NextCursor: gate.NonZero(page.Cursor)}
		for i, l := range page.Losses {
			loss := api.AccessLoss{CredentialId: l.Credential, Name: gate.NonZero(l.Name), Verb: api.PathVerb(l.Verb), Uses: l.Uses, LastUsedAt: l.LastUse.UTC()}
			loss.Actor.Id, loss.Actor.Type = l.Actor.ID, l.Actor.Type
			answer.Losses[i] = loss
		}
		return answer, nil
	})
}
