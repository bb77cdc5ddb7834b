// Package access keeps the policies of tenants, and says which of them limit whom.
//
// A policy is a named list of rules of a tenant. A binding gives a subject, which is a user, an API key,
// a ServiceAccount or a group, some of the policies: it may do what any of them allows, and nothing else.
// A subject without a binding may do everything on all paths, as before there were policies. A binding
// without a policy allows nothing; a user with the role limited always has a binding.
//
// A group only ever adds. A member with a binding may also do what the binding of the group allows. A
// member without one is limited by nothing, whatever the binding of the group says. So nobody loses
// anything by joining, or gets anything by leaving.
//
// An API key has the limits of its own binding and of those of everybody behind it: the user who answers
// for it, and the API keys by which it was made. So the binding of an API key stays when the key is revoked,
// as long as a key that it made lives.
//
// Nobody writes or binds a policy that is wider than what limits them. Owners have no binding, so a
// tenant always has somebody who may undo one.
package access

import (
	"cmp"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity/records"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/format"
)

// Policy is a policy of a tenant.
type Policy struct {
	ID, Name  string
	Rules     []authz.Rule
	CreatedAt time.Time
	ChangedAt time.Time
}

// Binding says which policies a subject has.
type Binding struct {
	Subject  string
	Policies []string // ids; none: the subject may do nothing on any path
	BoundBy  string   // id of the principal
	BoundAt  time.Time
}

var errGroup = fault.New(fault.NotFound, "there is no such group: list the groups for those there are")

var errPolicy = fault.New(fault.NotFound, "there is no such policy: list the policies for those there are")

// Reasons in audit entries.
const (
	reasonNoPolicy = "no_such_policy"
	reasonNoGroup  = "no_such_group"
)

// IDPrefix begins the id of a policy.
const IDPrefix = "pol"

// Bounds of a tenant.
const (
	maxPolicies = 1000
	maxBindings = 5000
	maxBound    = 8 // policies of a binding, which also bounds the work of comparing two
)

type policyRow struct {
	Name      string       `json:"name"`
	Rules     []authz.Rule `json:"rules"`
	CreatedAt time.Time    `json:"created_at"`
	ChangedAt time.Time    `json:"changed_at"`
}

type bindingRow struct {
	Policies []string  `json:"policies"`
	BoundBy  string    `json:"bound_by,omitempty"`
	BoundAt  time.Time `json:"bound_at"`
}

func policiesPrefix(tenant authz.TenantID) []byte {
	return []byte("access/policy/" + string(tenant) + "/")
}

func policyKey(tenant authz.TenantID, id string) []byte { return append(policiesPrefix(tenant), id...) }

func bindingsPrefix(tenant authz.TenantID) []byte {
	return []byte("access/binding/" + string(tenant) + "/")
}

func bindingKey(tenant authz.TenantID, subject string) []byte {
	return append(bindingsPrefix(tenant), subject...)
}

// serviceAccount begins the subject of a ServiceAccount, which is the name of its user in Kubernetes.
const serviceAccount = "system:serviceaccount:"

// ServiceAccount returns a ServiceAccount as a subject. A later account of the same name has the same
// binding.
func ServiceAccount(namespace, name string) string { return serviceAccount + namespace + ":" + name }

var accountPattern = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?:[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?$`)

// isServiceAccount reports whether a subject is that of a ServiceAccount.
func isServiceAccount(subject string) bool {
	account, ok := strings.CutPrefix(subject, serviceAccount)
	return ok && accountPattern.MatchString(account)
}

// Store reads and writes the rows of policies and bindings.
type Store struct {
	rows     *records.Store
	policies records.Cache[policyRow]
	bindings records.Cache[bindingRow]
	members  records.Cache[memberRow]
}

// NewStore returns the policies and bindings among the rows of a store.
func NewStore(rows *records.Store) *Store { return &Store{rows: rows} }

// Of returns what limits somebody to whom the bindings of all the subjects apply. It is part of the
// read that makes a principal.
func (s *Store) Of(r store.Reader, tenant authz.TenantID, subjects ...string) (all authz.Access, err error) {
	for _, subject := range subjects {
		row, found, err := s.bindings.Get(s.rows, r, bindingKey(tenant, subject))
		if err != nil {
			return nil, err
		}
		if !found {
			continue
		}
		ids, err := s.withGroups(r, tenant, subject, row.Policies)
		if err != nil {
			return nil, err
		}
		policy, err := s.join(r, tenant, ids)
		if err != nil {
			return nil, err
		}
		all = append(all, policy)
	}
	return all, nil
}

// withGroups returns the policies of a subject's own binding, and those that its groups add.
func (s *Store) withGroups(r store.Reader, tenant authz.TenantID, subject string, own []string) ([]string, error) {
	if !mayJoin(subject) {
		return own, nil
	}
	groups, err := s.groupsOf(r, tenant, subject)
	if err != nil || len(groups) == 0 {
		return own, err
	}
	ids := slices.Clone(own)
	for _, group := range groups {
		bound, err := s.boundTo(r, tenant, group)
		if err != nil {
			return nil, err
		}
		ids = append(ids, bound...)
	}
	slices.Sort(ids)
	return slices.Compact(ids), nil
}

// boundTo returns the policies of a subject's own binding. Without a binding there are none.
func (s *Store) boundTo(r store.Reader, tenant authz.TenantID, subject string) ([]string, error) {
	row, _, err := s.bindings.Get(s.rows, r, bindingKey(tenant, subject))
	return row.Policies, err
}

// join returns the policy that allows what any of the policies allows. Error: records.ErrDamaged if one
// is missing.
func (s *Store) join(r store.Reader, tenant authz.TenantID, ids []string) (authz.Policy, error) {
	var all []authz.Policy
	for _, id := range ids {
		row, found, err := s.policies.Get(s.rows, r, policyKey(tenant, id))
		if err == nil && !found {
			err = records.ErrDamaged
		}
		if err != nil {
			return authz.Policy{}, err
		}
		policy, err := authz.NewPolicy(row.Rules)
		if err != nil {
			return authz.Policy{}, fault.Wrap(fault.Internal, fault.Internal.Error(), err)
		}
		all = append(all, policy)
	}
	return authz.Join(all...), nil
}

// IsBound reports whether a subject has a binding.
func (s *Store) IsBound(r store.Reader, tenant authz.TenantID, subject string) (bool, error) {
	b, err := r.Get(bindingKey(tenant, subject))
	return b != nil, err
}

// Limit gives a subject without a binding one that allows nothing.
func (s *Store) Limit(tx store.Tx, tenant authz.TenantID, subject string, now time.Time) error {
	bound, err := s.IsBound(tx, tenant, subject)
	if err != nil || bound {
		return err
	}
	return s.bind(tx, tenant, subject, bindingRow{Policies: []string{}, BoundAt: now.UTC()})
}

// bind writes a binding. The first one keeps releases away that know none.
func (s *Store) bind(tx store.Tx, tenant authz.TenantID, subject string, row bindingRow) error {
	return errors.Join(s.rows.Put(tx, bindingKey(tenant, subject), row), format.Raise(tx, format.Policies, format.Policies))
}

// Forget deletes the binding of a subject that is gone.
func (s *Store) Forget(tx store.Tx, tenant authz.TenantID, subject string) error {
	return tx.Delete(bindingKey(tenant, subject))
}

func (s *Store) policy(r store.Reader, tenant authz.TenantID, id string) (row policyRow, err error) {
	found := authz.ValidID(IDPrefix, id)
	if found {
		found, err = s.rows.Get(r, policyKey(tenant, id), &row)
	}
	if err == nil && !found {
		err = records.Refuse(reasonNoPolicy, errPolicy)
	}
	return row, err
}

func (r policyRow) policy(id string) Policy {
	return Policy{ID: id, Name: r.Name, Rules: r.Rules, CreatedAt: r.CreatedAt, ChangedAt: r.ChangedAt}
}

// policiesOf reads a tenant's policies, by name.
func (s *Store) policiesOf(r store.Reader, tenant authz.TenantID) (all []Policy, err error) {
	prefix := policiesPrefix(tenant)
	all = []Policy{}
	var bad error
	err = r.Scan(store.Prefix(prefix), func(key, value []byte) bool {
		var row policyRow
		if bad = s.rows.Decode(key, value, &row); bad != nil {
			return false
		}
		all = append(all, row.policy(string(key[len(prefix):])))
		return true
	})
	slices.SortFunc(all, func(a, b Policy) int { return cmp.Compare(a.Name, b.Name) })
	return all, errors.Join(err, bad)
}

// bindingsOf reads a tenant's bindings, by subject.
func (s *Store) bindingsOf(r store.Reader, tenant authz.TenantID) (all []Binding, err error) {
	prefix := bindingsPrefix(tenant)
	all = []Binding{}
	var bad error
	err = r.Scan(store.Prefix(prefix), func(key, value []byte) bool {
		var row bindingRow
		if bad = s.rows.Decode(key, value, &row); bad != nil {
			return false
		}
		all = append(all, Binding{string(key[len(prefix):]), row.Policies, row.BoundBy, row.BoundAt})
		return true
	})
	return all, errors.Join(err, bad)
}

// Group is a group of a tenant. It adds the policies of its binding to those of its members.
type Group struct {
	ID, Name  string
	Members   []string // subjects, which are users and ServiceAccounts, sorted
	Policies  []string // ids of its binding
	CreatedAt time.Time
	ChangedAt time.Time // when it got its name
}

// GroupPrefix begins the id of a group.
const GroupPrefix = "grp"

// Bounds of groups.
const (
	maxGroups  = 200  // groups of a tenant
	maxMembers = 1000 // members of a group: rows that change when it is deleted
	maxJoining = 5000 // members of all groups of a tenant: rows that a change reads
	maxJoined  = 4    // groups of a subject, which bounds the rows that each of its requests reads
)

type groupRow struct {
	Name      string    `json:"name"`
	CreatedAt time.Time `json:"created_at"`
	ChangedAt time.Time `json:"changed_at"`
}

// memberRow alone says which groups a subject is a member of. Groups list their members from these rows.
type memberRow struct {
	Groups []string `json:"groups"` // ids, sorted; at least one
}

func groupsPrefix(tenant authz.TenantID) []byte {
	return []byte("access/group/" + string(tenant) + "/")
}

func groupKey(tenant authz.TenantID, id string) []byte { return append(groupsPrefix(tenant), id...) }

func membersPrefix(tenant authz.TenantID) []byte {
	return []byte("access/member/" + string(tenant) + "/")
}

func memberKey(tenant authz.TenantID, subject string) []byte {
	return append(membersPrefix(tenant), subject...)
}

func isGroup(subject string) bool { return authz.ValidID(GroupPrefix, subject) }

// mayJoin reports whether a subject is of a kind that groups have as members.
func mayJoin(subject string) bool {
	return strings.HasPrefix(subject, "usr_") || isServiceAccount(subject)
}

// groupsOf returns the groups of a subject.
func (s *Store) groupsOf(r store.Reader, tenant authz.TenantID, subject string) ([]string, error) {
	row, _, err := s.members.Get(s.rows, r, memberKey(tenant, subject))
	return row.Groups, err
}

func (s *Store) putGroupsOf(tx store.Tx, tenant authz.TenantID, subject string, groups []string) error {
	if len(groups) == 0 {
		return tx.Delete(memberKey(tenant, subject))
	}
	return s.rows.Put(tx, memberKey(tenant, subject), memberRow{groups})
}

// LeaveAll ends the memberships of a subject that is gone.
func (s *Store) LeaveAll(tx store.Tx, tenant authz.TenantID, subject string) error {
	return tx.Delete(memberKey(tenant, subject))
}

func (s *Store) group(r store.Reader, tenant authz.TenantID, id string) (row groupRow, err error) {
	found := isGroup(id)
	if found {
		found, err = s.rows.Get(r, groupKey(tenant, id), &row)
	}
	if err == nil && !found {
		err = records.Refuse(reasonNoGroup, errGroup)
	}
	return row, err
}

// groups reads a tenant's groups, by name.
func (s *Store) groups(r store.Reader, tenant authz.TenantID) (all []Group, err error) {
	var bad error
	all = []Group{}
	prefix := groupsPrefix(tenant)
	err = r.Scan(store.Prefix(prefix), func(key, value []byte) bool {
		var row groupRow
		if bad = s.rows.Decode(key, value, &row); bad == nil {
			all = append(all, row.group(string(key[len(prefix):])))
		}
		return bad == nil
	})
	slices.SortFunc(all, func(a, b Group) int { return cmp.Compare(a.Name, b.Name) })
	return all, errors.Join(err, bad)
}

func (r groupRow) group(id string) Group {
	return Group{ID: id, Name: r.Name, CreatedAt: r.CreatedAt, ChangedAt: r.ChangedAt}
}

// membersOf returns the members of each of a tenant's groups, and how many subjects are members of any.
func (s *Store) membersOf(r store.Reader, tenant authz.TenantID) (members map[string][]string, subjects int, err error) {
	var bad error
	members = make(map[string][]string)
	prefix := membersPrefix(tenant)
	err = r.Scan(store.Prefix(prefix), func(key, value []byte) bool {
		var row memberRow
		if bad = s.rows.Decode(key, value, &row); bad != nil {
			return false
		}
		subjects++
		for _, group := range row.Groups {
			members[group] = append(members[group], string(key[len(prefix):]))
		}
		return true
	})
	return members, subjects, errors.Join(err, bad)
}

// show adds the members and the policies of a group. It also returns how many subjects are members of any.
func (s *Store) show(r store.Reader, tenant authz.TenantID, g Group) (shown Group, subjects int, err error) {
	members, subjects, err1 := s.membersOf(r, tenant)
	policies, err2 := s.boundTo(r, tenant, g.ID)
	g.Members, g.Policies = members[g.ID], policies
	return g, subjects, errors.Join(err1, err2)
}

// leave ends one membership.
func (s *Store) leave(tx store.Tx, tenant authz.TenantID, group, subject string) error {
	groups, err := s.groupsOf(tx, tenant, subject)
	if err != nil {
		return err
	}
	return s.putGroupsOf(tx, tenant, subject, slices.DeleteFunc(slices.Clone(groups), func(id string) bool { return id == group }))
}

// invalid returns the error of a policy that cannot be written as it is.
func invalid(err error) error { return fault.New(fault.Invalid, fmt.Sprint(err)) }
