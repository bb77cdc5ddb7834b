package access

import (
	"errors"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Change is a change of access by which somebody may lose some: of the rules of a policy, of a binding, or
// of the members of a group.
type Change struct {
	Kind     authz.Action // ChangePolicy, BindPolicy, UnbindPolicy, ChangeGroup for the removal of a member, or DeleteGroup
	Policy   string       // id of the policy that gets Rules
	Rules    []authz.Rule
	Subject  string   // its binding or membership changes
	Policies []string // ids of those that the subject gets
	Group    string   // id of the group that loses Subject, or that is deleted
}

// Try makes a change as the method of the same name would, but without its entry, in a transaction that is
// not committed. It returns what the entry would be about. Errors: those of that method.
func (s *Service) Try(tx store.Tx, p authz.Principal, c Change) (about audit.Resource, err error) {
	switch c.Kind {
	case authz.ChangePolicy:
		return policyEvent(audit.PolicyChanged, p, c.Policy).Resource, s.tryRules(tx, p, c)
	case authz.DeleteGroup:
		return groupEvent(audit.GroupDeleted, p, c.Group).Resource, s.deleteGroup(tx, p, c.Group)
	}
	about = audit.Resource{Type: audit.PolicyResource}
	is, err := s.subject(tx, p.Tenant, c.Subject)
	if err != nil {
		return about, err
	}
	about = is.Resource
	switch c.Kind {
	case authz.BindPolicy:
		row, err := s.binding(p, c.Policies)
		if err != nil {
			return about, err
		}
		return about, s.bind(tx, p, c.Subject, is, row)
	case authz.UnbindPolicy:
		return about, s.unbind(tx, p, c.Subject, is)
	case authz.ChangeGroup:
		_, err := s.policies.group(tx, p.Tenant, c.Group)
		if err == nil {
			err = s.removeMember(tx, p, c.Group, c.Subject)
		}
		return groupEvent(audit.GroupChanged, p, c.Group).Resource, err
	}
	return about, fault.New(fault.Internal, "no change of access: "+string(c.Kind))
}

func (s *Service) tryRules(tx store.Tx, p authz.Principal, c Change) error {
	row, err := s.policies.policy(tx, p.Tenant, c.Policy)
	if err != nil {
		return err
	}
	policy, err := PolicyRequest{row.Name, c.Rules}.parse()
	if err != nil {
		return err
	}
	row.Rules = c.Rules
	return s.putPolicy(tx, p, authz.ChangePolicy, c.Policy, row, policy)
}

// Principal returns a subject with its scopes and what limits it, and for one that is gone a principal that may
// do nothing.
func (s *Service) Principal(r store.Reader, tenant authz.TenantID, id string) (authz.Principal, error) {
	is, err := s.subject(r, tenant, id)
	if errors.Is(err, errSubject) {
		return authz.Principal{}, nil
	}
	return is.Principal, err
}
