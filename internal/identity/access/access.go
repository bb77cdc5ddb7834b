// Package access keeps the policies of tenants, and says which of them limit whom.
//
// A policy is a named list of rules of a tenant. A binding gives a subject, which is a user, an API key
// or a ServiceAccount, some of the policies: it may do what any of them allows, and nothing else. A
// subject without a binding may do everything on all paths, as before there were policies. A binding
// without a policy allows nothing; a user with the role limited always has a binding.
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

var errPolicy = fault.New(fault.NotFound, "there is no such policy: list the policies for those there are")

// reasonNoPolicy is a reason in audit entries.
const reasonNoPolicy = "no_such_policy"

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
		policy, err := s.join(r, tenant, row.Policies)
		if err != nil {
			return nil, err
		}
		all = append(all, policy)
	}
	return all, nil
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

// invalid returns the error of a policy that cannot be written as it is.
func invalid(err error) error { return fault.New(fault.Invalid, fmt.Sprint(err)) }
