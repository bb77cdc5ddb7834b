package access

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity/records"
	"github.com/latticekeep/latticekeep/internal/identity/tenant"
	"github.com/latticekeep/latticekeep/internal/names/past"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/format"
)

// Subject is what package identity knows of a subject.
type Subject struct {
	Principal authz.Principal // with its scopes, and what limits it
	Role      authz.Role      // empty unless it is a user
	Resource  audit.Resource  // resource of entries about it
}

// Named is a user or an API key, with what it is called.
type Named struct{ ID, Name string }

// People are the users and API keys of tenants, which package identity keeps.
type People struct {
	// Grantor returns p with its current rights. Error: a refusal.
	Grantor func(r store.Reader, p authz.Principal, a authz.Action) (authz.Principal, error)
	// Subject reads a user or an API key, and reports whether it exists.
	Subject func(r store.Reader, tenant authz.TenantID, subject string) (s Subject, found bool, err error)
	// All returns the users and the API keys that work.
	All func(r store.Reader, tenant authz.TenantID) ([]Named, error)
	// Withdraw deletes the invitations of a user or an API key that give more than the limited subject may.
	Withdraw func(tx store.Tx, tenant authz.TenantID, subject string) (attributes map[string]string, err error)
}

// Service administers the policies of tenants.
type Service struct {
	policies *Store
	store    store.Store
	guard    *guard.Guard
	rows     *records.Store
	people   People
	past     past.Names
	now      func() time.Time

	Ready format.Readers // asks about [format.Policies]
}

// NewService returns the service of the policies in s.
func NewService(policies *Store, s store.Store, guard *guard.Guard, rows *records.Store, people People, past past.Names, now func() time.Time) *Service {
	return &Service{policies: policies, store: s, guard: guard, rows: rows, people: people, past: past, now: now}
}

var (
	errPolicies  = fault.New(fault.Conflict, "the tenant has 1000 policies: delete those that nobody needs")
	errName      = fault.New(fault.Conflict, "another policy has this name: choose another one, or change that policy")
	errBound     = fault.New(fault.Conflict, "the policy is bound: list the bindings, and give those subjects other policies first")
	errBeyond    = fault.New(fault.Forbidden, "nobody writes or binds a policy that is wider than their own: allow less")
	errSubject   = fault.New(fault.NotFound, "the subject is the id of a user, an API key or a group of the tenant, or system:serviceaccount:<namespace>:<name>")
	errNoBinding = fault.New(fault.NotFound, "the subject has no policy: list the bindings for those there are")
	errOwner     = fault.New(fault.Conflict, "an owner has no policy: give the user another role first")
	errLimited   = fault.New(fault.Conflict, "a limited user always has policies: bind none, or give the user another role first")
	errTooMany   = fault.New(fault.Invalid, "policies must be at most 8 ids of policies, each of them once")
	errBindings  = fault.New(fault.Conflict, "the tenant has 5000 bindings: delete those that nobody needs")
	errReplica   = fault.New(fault.Conflict, "a replica of an earlier release, which knows no policies, uses the database: bind them once it has ended")
	errDenied    = fault.New(fault.Forbidden, "access denied")
)

// Reasons in audit entries.
const (
	reasonTooManyPolicies = "too_many_policies"
	reasonNameTaken       = "name_taken"
	reasonBound           = "policy_bound"
	reasonNoSubject       = "no_such_subject"
	reasonNoBinding       = "no_such_binding"
	reasonOwner           = "owner"
	reasonLimited         = "limited_role"
	reasonReplica         = "replica_knows_no_policies"

	// ReasonBeyond is the reason for refusing to give access to more paths than one has.
	ReasonBeyond = "policy_beyond_own"
)

// attributePolicies has the ids of the policies of a binding.
const attributePolicies = "policies"

func policyEvent(t audit.EventType, p authz.Principal, id string) audit.Event {
	e := audit.Event{Type: t, Outcome: audit.Success, Principal: p, Resource: audit.Resource{Type: audit.PolicyResource}}
	if authz.ValidID(IDPrefix, id) {
		e.Resource.ID = id
	}
	return e
}

// PolicyRequest is what a policy is to be.
type PolicyRequest struct {
	Name  string // 1 to 255 bytes
	Rules []authz.Rule
}

func (r PolicyRequest) parse() (authz.Policy, error) {
	if err := tenant.ValidateName(r.Name); err != nil {
		return authz.Policy{}, err
	}
	policy, err := authz.NewPolicy(r.Rules)
	if err != nil {
		return authz.Policy{}, invalid(err)
	}
	return policy, nil
}

// CreatePolicy makes a policy of p's tenant, which nobody has yet. Errors: fault.Invalid;
// fault.Forbidden, also for a policy that is wider than p's own; fault.Conflict for a name that is taken
// and for too many policies; fault.Unavailable.
func (s *Service) CreatePolicy(ctx context.Context, p authz.Principal, r PolicyRequest) (Policy, error) {
	now := s.now().UTC()
	return s.put(ctx, p, authz.CreatePolicy, audit.PolicyCreated, authz.NewID(IDPrefix), r, func(store.Reader) (policyRow, error) {
		return policyRow{CreatedAt: now, ChangedAt: now}, nil
	})
}

// ChangePolicy gives a policy another name and other rules, which count from the next request on.
// Errors: those of [Service.CreatePolicy], and fault.NotFound.
func (s *Service) ChangePolicy(ctx context.Context, p authz.Principal, id string, r PolicyRequest) (Policy, error) {
	if !authz.ValidID(IDPrefix, id) {
		id = ""
	}
	now := s.now().UTC()
	return s.put(ctx, p, authz.ChangePolicy, audit.PolicyChanged, id, r, func(rd store.Reader) (policyRow, error) {
		row, err := s.policies.policy(rd, p.Tenant, id)
		row.ChangedAt = now
		return row, err
	})
}

func (s *Service) put(ctx context.Context, p authz.Principal, a authz.Action, t audit.EventType, id string, r PolicyRequest,
	before func(store.Reader) (policyRow, error)) (made Policy, err error) {
	if err := s.guard.Admit(ctx, p, a); err != nil {
		return Policy{}, err
	}
	policy, err := r.parse()
	if err != nil {
		return Policy{}, err
	}
	e := policyEvent(t, p, "")
	if a == authz.ChangePolicy {
		e.Resource.ID = id
	}
	err = s.rows.Commit(ctx, e, func(tx store.Tx, e *audit.Event) error {
		row, err := before(tx)
		if err != nil {
			return err
		}
		row.Name, row.Rules = r.Name, r.Rules
		if err := s.putPolicy(tx, p, a, id, row, policy); err != nil {
			return err
		}
		e.Resource.ID, e.Attributes = id, map[string]string{"rules": strconv.Itoa(len(r.Rules))}
		made = row.policy(id)
		return nil
	})
	if err != nil {
		return Policy{}, fmt.Errorf("writing a policy: %w", err)
	}
	return made, nil
}

// putPolicy writes the row of a policy, which is new unless a changes one.
func (s *Service) putPolicy(tx store.Tx, p authz.Principal, a authz.Action, id string, row policyRow, policy authz.Policy) error {
	if err := s.requireCovered(tx, p, a, policy); err != nil {
		return err
	}
	all, err := s.policies.policiesOf(tx, p.Tenant)
	switch {
	case err != nil:
		return err
	case slices.ContainsFunc(all, func(other Policy) bool { return other.Name == row.Name && other.ID != id }):
		return records.Refuse(reasonNameTaken, errName)
	case a == authz.CreatePolicy && len(all) >= maxPolicies:
		return records.Refuse(reasonTooManyPolicies, errPolicies)
	}
	return s.rows.Put(tx, policyKey(p.Tenant, id), row)
}

// requireCovered refuses to give a policy that is wider than what limits p now.
func (s *Service) requireCovered(r store.Reader, p authz.Principal, a authz.Action, given authz.Policy) error {
	by, err := s.people.Grantor(r, p, a)
	if err == nil && !by.Access.Covers(given) {
		err = records.Refuse(ReasonBeyond, errBeyond)
	}
	return err
}

// DeletePolicy deletes a policy that nobody has. Errors: fault.Forbidden, fault.NotFound,
// fault.Conflict for one that is bound, fault.Unavailable.
func (s *Service) DeletePolicy(ctx context.Context, p authz.Principal, id string) error {
	if err := s.guard.Admit(ctx, p, authz.DeletePolicy); err != nil {
		return err
	}
	err := s.rows.Commit(ctx, policyEvent(audit.PolicyDeleted, p, id), func(tx store.Tx, e *audit.Event) error {
		if _, err := s.policies.policy(tx, p.Tenant, e.Resource.ID); err != nil {
			return err
		}
		bindings, err := s.policies.bindingsOf(tx, p.Tenant)
		if err != nil {
			return err
		}
		if slices.ContainsFunc(bindings, func(b Binding) bool { return slices.Contains(b.Policies, id) }) {
			return records.Refuse(reasonBound, errBound)
		}
		return tx.Delete(policyKey(p.Tenant, id))
	})
	if err != nil {
		return fmt.Errorf("deleting a policy: %w", err)
	}
	return nil
}

// Policies returns the policies of p's tenant, by name, and the bindings, by subject. Errors:
// fault.Forbidden, fault.Unavailable.
func (s *Service) Policies(ctx context.Context, p authz.Principal) (policies []Policy, bindings []Binding, err error) {
	err = s.read(ctx, p, "", func(r store.Reader) (err error) {
		var err2 error
		policies, err = s.policies.policiesOf(r, p.Tenant)
		bindings, err2 = s.policies.bindingsOf(r, p.Tenant)
		return errors.Join(err, err2)
	})
	return policies, bindings, err
}

// Policy returns one policy of p's tenant. Errors: fault.Forbidden, fault.NotFound, fault.Unavailable.
func (s *Service) Policy(ctx context.Context, p authz.Principal, id string) (found Policy, err error) {
	err = s.read(ctx, p, id, func(r store.Reader) error {
		row, err := s.policies.policy(r, p.Tenant, id)
		found = row.policy(id)
		return err
	})
	return found, err
}

// read reads policies and records it. A policy that is not there is recorded, too.
func (s *Service) read(ctx context.Context, p authz.Principal, id string, do func(store.Reader) error) error {
	ctx, cancel := context.WithTimeout(ctx, records.ReadTimeout)
	defer cancel()
	if err := s.guard.Admit(ctx, p, authz.ListPolicies); err != nil {
		return err
	}
	e := policyEvent(audit.PolicyListed, p, id)
	err := s.store.View(ctx, do)
	if errors.Is(err, errPolicy) {
		return s.guard.Refuse(ctx, e, audit.Denied, reasonNoPolicy, errPolicy)
	}
	if err != nil {
		return fmt.Errorf("reading policies: %w", err)
	}
	return s.guard.Record(ctx, e)
}

// subject reads a subject. Error: a refusal.
func (s *Service) subject(r store.Reader, t authz.TenantID, subject string) (Subject, error) {
	if isServiceAccount(subject) {
		limits, err := s.policies.Of(r, t, subject)
		return Subject{
			// The cluster says which scopes it has, for each request.
			Principal: authz.Principal{Tenant: t, Kind: authz.ServiceAccount, Scopes: authz.TenantScopes(), Access: limits},
			Resource:  audit.Resource{Type: audit.ServiceAccountResource, ID: s.rows.Hash("latticekeep/policy-subject/v1", []byte(subject))[:32]},
		}, err
	}
	if isGroup(subject) {
		return s.groupSubject(r, t, subject)
	}
	is, found, err := s.people.Subject(r, t, subject)
	if err == nil && !found {
		err = records.Refuse(reasonNoSubject, errSubject)
	}
	return is, err
}

// groupSubject reads a group as a subject: what it adds for its members, whatever their scopes are.
func (s *Service) groupSubject(r store.Reader, t authz.TenantID, id string) (Subject, error) {
	_, err := s.policies.group(r, t, id)
	if errors.Is(err, errGroup) {
		err = records.Refuse(reasonNoSubject, errSubject)
	}
	if err != nil {
		return Subject{}, err
	}
	limits, err := s.policies.Of(r, t, id)
	if !limits.IsLimited() {
		limits = authz.Nothing()
	}
	return Subject{
		Principal: authz.Principal{Tenant: t, ID: id, Scopes: authz.TenantScopes(), Access: limits},
		Resource:  audit.Resource{Type: audit.GroupResource, ID: id},
	}, err
}

// Bind gives a subject these policies in place of those that it has; without any it may do nothing on
// any path. It counts from the subject's next request on, also for the API keys that it made. Bind
// withdraws invitations of the subject that give more. Errors: fault.Invalid; fault.Forbidden, also for policies that
// are wider than p's own; fault.NotFound for a subject or a policy; fault.Conflict for an owner;
// fault.Unavailable.
func (s *Service) Bind(ctx context.Context, p authz.Principal, subject string, policies []string) (Binding, error) {
	if err := s.guard.Admit(ctx, p, authz.BindPolicy); err != nil {
		return Binding{}, err
	}
	row, err := s.binding(p, policies)
	if err != nil {
		return Binding{}, err
	}
	ready, err := s.Ready.All(ctx)
	if err != nil {
		return Binding{}, err
	}
	e := audit.Event{Type: audit.PolicyBound, Outcome: audit.Success, Principal: p, Resource: audit.Resource{Type: audit.PolicyResource}}
	err = s.rows.Commit(ctx, e, func(tx store.Tx, e *audit.Event) error {
		is, err := s.subject(tx, p.Tenant, subject)
		if err != nil {
			return err
		}
		e.Resource = is.Resource
		if !ready {
			return records.Refuse(reasonReplica, errReplica)
		}
		if err := s.bind(tx, p, subject, is, row); err != nil {
			return err
		}
		if e.Attributes, err = s.people.Withdraw(tx, p.Tenant, subject); err != nil {
			return err
		}
		if len(row.Policies) > 0 {
			e.Attributes[attributePolicies] = strings.Join(row.Policies, " ")
		}
		return nil
	})
	if err != nil {
		return Binding{}, fmt.Errorf("binding policies: %w", err)
	}
	return Binding{subject, row.Policies, row.BoundBy, row.BoundAt}, nil
}

// binding returns the row of a binding of these policies.
func (s *Service) binding(p authz.Principal, policies []string) (bindingRow, error) {
	ids := slices.AppendSeq([]string{}, slices.Values(policies))
	slices.Sort(ids)
	if len(ids) > maxBound || len(slices.Compact(slices.Clone(ids))) != len(ids) {
		return bindingRow{}, errTooMany
	}
	return bindingRow{Policies: ids, BoundBy: p.ID, BoundAt: s.now().UTC()}, nil
}

// bind writes the binding of a subject, if p may give it.
func (s *Service) bind(tx store.Tx, p authz.Principal, subject string, is Subject, row bindingRow) error {
	if is.Role == authz.Owner {
		return records.Refuse(reasonOwner, errOwner)
	}
	for _, id := range row.Policies {
		if _, err := s.policies.policy(tx, p.Tenant, id); err != nil {
			return err
		}
	}
	given, err := s.policies.join(tx, p.Tenant, row.Policies)
	if err != nil {
		return err
	}
	if err := s.requireCovered(tx, p, authz.BindPolicy, given); err != nil {
		return err
	}
	all, err := s.policies.bindingsOf(tx, p.Tenant)
	if err != nil {
		return err
	}
	bound := slices.ContainsFunc(all, func(b Binding) bool { return b.Subject == subject })
	if !bound && len(all) >= maxBindings {
		return records.Refuse(reasonTooManyPolicies, errBindings)
	}
	return s.policies.bind(tx, p.Tenant, subject, row)
}

// Unbind takes a subject's policies away, so it may do on all paths what its scopes permit. Only
// somebody without a policy does that. A group without a binding adds nothing, so everybody who
// administers the tenant may unbind one. Errors: fault.Forbidden, fault.NotFound, fault.Conflict for a
// limited user, fault.Unavailable.
func (s *Service) Unbind(ctx context.Context, p authz.Principal, subject string) error {
	if err := s.guard.Admit(ctx, p, authz.UnbindPolicy); err != nil {
		return err
	}
	e := audit.Event{Type: audit.PolicyUnbound, Outcome: audit.Success, Principal: p, Resource: audit.Resource{Type: audit.PolicyResource}}
	err := s.rows.Commit(ctx, e, func(tx store.Tx, e *audit.Event) error {
		is, err := s.subject(tx, p.Tenant, subject)
		if err != nil {
			return err
		}
		e.Resource = is.Resource
		return s.unbind(tx, p, subject, is)
	})
	if err != nil {
		return fmt.Errorf("unbinding policies: %w", err)
	}
	return nil
}

// unbind deletes the binding of a subject, if p may.
func (s *Service) unbind(tx store.Tx, p authz.Principal, subject string, is Subject) error {
	by, err := s.people.Grantor(tx, p, authz.UnbindPolicy)
	if err != nil {
		return err
	}
	bound, err := s.policies.IsBound(tx, p.Tenant, subject)
	switch {
	case err != nil:
		return err
	case by.Access.IsLimited() && !isGroup(subject):
		return records.Refuse(ReasonBeyond, errBeyond)
	case is.Role == authz.Limited:
		return records.Refuse(reasonLimited, errLimited)
	case !bound:
		return records.Refuse(reasonNoBinding, errNoBinding)
	}
	return s.policies.Forget(tx, p.Tenant, subject)
}

// Question asks whether somebody may do something on a path.
type Question struct {
	Path    string
	Verb    authz.Verb
	Subject string // empty: the principal who asks
}

// Judgement is the answer to a [Question].
type Judgement struct {
	Allowed bool
	Reason  authz.Denial // why not; empty if it is allowed, and for those who may not know
	Groups  []string     // ids of the subject's groups whose policies allow it; none for those who may not know
}

// actions has an action for each verb. Those of one verb take the same scope.
var actions = map[authz.Verb]authz.Action{
	authz.ListPath: authz.ListCredentials, authz.ReadPath: authz.UnsealCredential,
	authz.WritePath: authz.SealCredential, authz.DeletePath: authz.DeleteCredential,
}

// Check judges a path by the scopes and policies of a subject. It never looks whether a credential is
// there. Only somebody who administers the tenant may ask about others, and learns a reason. Errors:
// fault.Invalid for a verb that does not exist; fault.Forbidden; fault.NotFound for a subject;
// fault.Unavailable.
func (s *Service) Check(ctx context.Context, p authz.Principal, q Question) (Judgement, error) {
	ctx, cancel := context.WithTimeout(ctx, records.ReadTimeout)
	defer cancel()
	if err := s.guard.Admit(ctx, p, authz.CheckAccess); err != nil {
		return Judgement{}, err
	}
	action, ok := actions[q.Verb]
	if !ok {
		return Judgement{}, fault.New(fault.Invalid, "verb is one of list, read, write and delete")
	}
	e := audit.Event{Type: audit.AccessChecked, Outcome: audit.Success, Principal: p, Resource: audit.Resource{Type: audit.PolicyResource}}
	administers := p.Holds([]authz.Scope{authz.AccountAdmin})
	judged := p
	var groups []string
	if q.Subject != "" && q.Subject != p.ID {
		if !administers {
			return Judgement{}, s.guard.Refuse(ctx, e, audit.Denied, string(authz.MissingScope), errDenied)
		}
		var is Subject
		err := s.store.View(ctx, func(r store.Reader) (err error) {
			if is, err = s.subject(r, p.Tenant, q.Subject); err == nil {
				groups, err = s.groupsThatAllow(r, p.Tenant, q, is)
			}
			return err
		})
		if errors.Is(err, errSubject) {
			return Judgement{}, s.guard.Refuse(ctx, e, audit.Denied, reasonNoSubject, errSubject)
		}
		if err != nil {
			return Judgement{}, fmt.Errorf("reading a subject: %w", err)
		}
		judged, e.Resource = is.Principal, is.Resource
	}
	why := judged.Denies(action)
	if why == "" && !judged.Reaches(action, q.Path) {
		why = authz.OutsidePolicy
	}
	e.Attributes = map[string]string{"allowed": strconv.FormatBool(why == "")}
	if err := s.guard.Record(ctx, e); err != nil {
		return Judgement{}, err
	}
	j := Judgement{Allowed: why == ""}
	if administers {
		j.Reason = why
	}
	if j.Allowed {
		j.Groups = groups
	}
	return j, nil
}

// groupsThatAllow returns the groups by which a subject with a binding reaches the path of a question.
func (s *Service) groupsThatAllow(r store.Reader, tenant authz.TenantID, q Question, is Subject) (ids []string, err error) {
	if !mayJoin(q.Subject) || !is.Principal.Access.IsLimited() {
		return nil, nil
	}
	groups, err := s.policies.groupsOf(r, tenant, q.Subject)
	for _, id := range groups {
		adds, failed := s.policies.Of(r, tenant, id)
		if err = errors.Join(err, failed); adds.IsLimited() && adds.Allows(q.Verb, q.Path) {
			ids = append(ids, id)
		}
	}
	return ids, err
}
