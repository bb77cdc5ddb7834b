package access

import (
	"context"
	"fmt"
	"strconv"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity/records"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Permitted is somebody who may do something on a path.
type Permitted struct {
	Subject string // spelled as in a binding
	Kind    authz.Kind
	Name    string   // address of a user, name of an API key; empty for a ServiceAccount
	Groups  []string // ids of the groups whose policies allow it, if a binding limits the subject
}

// ListPermitted returns all users, API keys that work, and ServiceAccounts with a binding that may do
// something on a path, by scopes and policies. ServiceAccounts without a binding are not among them: the
// cluster decides what they may. It never looks whether a credential is there. Errors: fault.Invalid for a
// verb that does not exist; fault.Forbidden; fault.Unavailable.
func (s *Service) ListPermitted(ctx context.Context, p authz.Principal, q Question) ([]Permitted, error) {
	ctx, cancel := context.WithTimeout(ctx, records.ReadTimeout)
	defer cancel()
	if err := s.guard.Admit(ctx, p, authz.ListPermitted); err != nil {
		return nil, err
	}
	action, ok := actions[q.Verb]
	if !ok {
		return nil, fault.New(fault.Invalid, "verb is one of list, read, write and delete")
	}
	list := []Permitted{}
	err := s.store.View(ctx, func(r store.Reader) error {
		all, err := s.people.All(r, p.Tenant)
		if err != nil {
			return err
		}
		bindings, err := s.policies.bindingsOf(r, p.Tenant)
		if err != nil {
			return err
		}
		for _, b := range bindings {
			if isServiceAccount(b.Subject) {
				all = append(all, Named{ID: b.Subject})
			}
		}
		for _, one := range all {
			is, err := s.subject(r, p.Tenant, one.ID)
			if err != nil {
				return err
			}
			if is.Principal.Denies(action) != "" || !is.Principal.Reaches(action, q.Path) {
				continue
			}
			q.Subject = one.ID
			groups, err := s.groupsThatAllow(r, p.Tenant, q, is)
			if err != nil {
				return err
			}
			list = append(list, Permitted{Subject: one.ID, Kind: is.Principal.Kind, Name: one.Name, Groups: groups})
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("judging all subjects: %w", err)
	}
	err = s.guard.Record(ctx, audit.Event{
		Type: audit.AccessChecked, Outcome: audit.Success, Principal: p, Resource: audit.Resource{Type: audit.PolicyResource},
		Attributes: map[string]string{"permitted": strconv.Itoa(len(list))},
	})
	if err != nil {
		return nil, err
	}
	return list, nil
}
