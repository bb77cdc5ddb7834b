package access

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity/records"
	"github.com/latticekeep/latticekeep/internal/identity/tenant"
	"github.com/latticekeep/latticekeep/internal/store"
)

// GroupName returns the name of a group, or "" if the tenant has no group of the id.
func (s *Service) GroupName(r store.Reader, tenant authz.TenantID, id string) (string, error) {
	row, err := s.policies.group(r, tenant, id)
	if errors.Is(err, errGroup) {
		return "", nil
	}
	return row.Name, err
}

var (
	errGroups    = fault.New(fault.Conflict, "the tenant has 200 groups: delete those that nobody needs")
	errGroupName = fault.New(fault.Conflict, "another group has this name: choose another one, or rename that group")
	errMember    = fault.New(fault.NotFound, "the member is the id of a user of the tenant, or system:serviceaccount:<namespace>:<name>")
	errNoMember  = fault.New(fault.NotFound, "the subject is no member of the group: read the group for those who are")
	errMembers   = fault.New(fault.Conflict, "the group has 1000 members: make another group, and bind the same policies to it")
	errJoining   = fault.New(fault.Conflict, "the groups of the tenant have 5000 members: remove those who need no group")
	errJoined    = fault.New(fault.Conflict, "the subject is a member of 4 groups: remove it from one first")
)

// Reasons in audit entries.
const (
	reasonTooManyGroups  = "too_many_groups"
	reasonTooManyMembers = "too_many_members"
	reasonNoMember       = "no_such_member"
)

// Attributes of the entries of a group.
const (
	attributeAdded   = "member_added"   // id of the member, or a hash of a ServiceAccount's name
	attributeRemoved = "member_removed" // likewise
)

func groupEvent(t audit.EventType, p authz.Principal, id string) audit.Event {
	e := audit.Event{Type: t, Outcome: audit.Success, Principal: p, Resource: audit.Resource{Type: audit.GroupResource}}
	if isGroup(id) {
		e.Resource.ID = id
	}
	return e
}

// CreateGroup makes a group of p's tenant, which has no member and no policy. The name has 1 to 255 bytes.
// Errors: fault.Invalid, fault.Forbidden, fault.Conflict for a name that is taken and for too many groups,
// fault.Unavailable.
func (s *Service) CreateGroup(ctx context.Context, p authz.Principal, name string) (Group, error) {
	now := s.now().UTC()
	return s.putGroup(ctx, p, authz.CreateGroup, authz.NewID(GroupPrefix), name, func(store.Reader) (groupRow, error) {
		return groupRow{CreatedAt: now, ChangedAt: now}, nil
	})
}

// RenameGroup gives a group another name. Errors: those of [Service.CreateGroup], and fault.NotFound.
func (s *Service) RenameGroup(ctx context.Context, p authz.Principal, id, name string) (Group, error) {
	now := s.now().UTC()
	return s.putGroup(ctx, p, authz.ChangeGroup, id, name, func(r store.Reader) (groupRow, error) {
		row, err := s.policies.group(r, p.Tenant, id)
		row.ChangedAt = now
		return row, err
	})
}

func (s *Service) putGroup(ctx context.Context, p authz.Principal, a authz.Action, id, name string,
	before func(store.Reader) (groupRow, error)) (made Group, err error) {
	if err := s.guard.Admit(ctx, p, a); err != nil {
		return Group{}, err
	}
	if err := tenant.ValidateName(name); err != nil {
		return Group{}, err
	}
	e := groupEvent(audit.GroupCreated, p, "")
	if a == authz.ChangeGroup {
		e = groupEvent(audit.GroupChanged, p, id)
	}
	err = s.rows.Commit(ctx, e, func(tx store.Tx, e *audit.Event) error {
		if _, err := s.people.Grantor(tx, p, a); err != nil {
			return err
		}
		row, err := before(tx)
		if err != nil {
			return err
		}
		all, err := s.policies.groups(tx, p.Tenant)
		switch {
		case err != nil:
			return err
		case slices.ContainsFunc(all, func(other Group) bool { return other.Name == name && other.ID != id }):
			return records.Refuse(reasonNameTaken, errGroupName)
		case a == authz.CreateGroup && len(all) >= maxGroups:
			return records.Refuse(reasonTooManyGroups, errGroups)
		}
		if row.Name != name {
			if err := s.past.Keep(tx, p.Tenant, audit.GroupResource, id, row.Name); err != nil {
				return err
			}
		}
		row.Name = name
		e.Resource.ID = id
		made = row.group(id)
		if a == authz.ChangeGroup { // a new one has no members
			if made, _, err = s.policies.show(tx, p.Tenant, made); err != nil {
				return err
			}
		}
		return s.rows.Put(tx, groupKey(p.Tenant, id), row)
	})
	if err != nil {
		return Group{}, fmt.Errorf("writing a group: %w", err)
	}
	return made, nil
}

// DeleteGroup deletes a group with its binding and its memberships, so its members lose what it added.
// Errors: fault.Forbidden, fault.NotFound, fault.Unavailable.
func (s *Service) DeleteGroup(ctx context.Context, p authz.Principal, id string) error {
	if err := s.guard.Admit(ctx, p, authz.DeleteGroup); err != nil {
		return err
	}
	err := s.rows.Commit(ctx, groupEvent(audit.GroupDeleted, p, id), func(tx store.Tx, _ *audit.Event) error {
		return s.deleteGroup(tx, p, id)
	})
	if err != nil {
		return fmt.Errorf("deleting a group: %w", err)
	}
	return nil
}

func (s *Service) deleteGroup(tx store.Tx, p authz.Principal, id string) error {
	if _, err := s.people.Grantor(tx, p, authz.DeleteGroup); err != nil {
		return err
	}
	row, err := s.policies.group(tx, p.Tenant, id)
	if err != nil {
		return err
	}
	members, _, err := s.policies.membersOf(tx, p.Tenant)
	for _, subject := range members[id] {
		err = errors.Join(err, s.policies.leave(tx, p.Tenant, id, subject))
	}
	return errors.Join(err, s.past.Keep(tx, p.Tenant, audit.GroupResource, id, row.Name),
		s.policies.Forget(tx, p.Tenant, id), tx.Delete(groupKey(p.Tenant, id)))
}

// AddMember makes a user or a ServiceAccount a member of a group, from its next request on. It is no error
// if it is one already. Errors: fault.Forbidden, also for a group whose policies are wider than p's own;
// fault.NotFound for a group or a subject; fault.Conflict at the bounds of groups; fault.Unavailable.
func (s *Service) AddMember(ctx context.Context, p authz.Principal, id, subject string) (Group, error) {
	return s.changeMember(ctx, p, id, subject, func(tx store.Tx, e *audit.Event, is Subject) error {
		if kind := is.Principal.Kind; kind != authz.User && kind != authz.ServiceAccount {
			return records.Refuse(reasonNoSubject, errMember)
		}
		policies, err := s.policies.boundTo(tx, p.Tenant, id)
		if err != nil {
			return err
		}
		given, err := s.policies.join(tx, p.Tenant, policies)
		if err != nil {
			return err
		}
		if err := s.requireCovered(tx, p, authz.ChangeGroup, given); err != nil {
			return err
		}
		groups, err := s.policies.groupsOf(tx, p.Tenant, subject)
		switch {
		case err != nil:
			return err
		case slices.Contains(groups, id):
			return nil
		case len(groups) >= maxJoined:
			return records.Refuse(reasonTooManyGroups, errJoined)
		}
		e.Attributes = map[string]string{attributeAdded: is.Resource.ID}
		return s.policies.putGroupsOf(tx, p.Tenant, subject, slices.Sorted(slices.Values(append(slices.Clone(groups), id))))
	})
}

// RemoveMember ends a membership, from the next request of the subject on. It only takes away, so p's own
// policies do not matter. Errors: fault.Forbidden, fault.NotFound, fault.Unavailable.
func (s *Service) RemoveMember(ctx context.Context, p authz.Principal, id, subject string) (Group, error) {
	return s.changeMember(ctx, p, id, subject, func(tx store.Tx, e *audit.Event, is Subject) error {
		e.Attributes = map[string]string{attributeRemoved: is.Resource.ID}
		return s.removeMember(tx, p, id, subject)
	})
}

func (s *Service) removeMember(tx store.Tx, p authz.Principal, id, subject string) error {
	if _, err := s.people.Grantor(tx, p, authz.ChangeGroup); err != nil {
		return err
	}
	groups, err := s.policies.groupsOf(tx, p.Tenant, subject)
	if err == nil && !slices.Contains(groups, id) {
		err = records.Refuse(reasonNoMember, errNoMember)
	}
	if err != nil {
		return err
	}
	return s.policies.leave(tx, p.Tenant, id, subject)
}

func (s *Service) changeMember(ctx context.Context, p authz.Principal, id, subject string,
	change func(tx store.Tx, e *audit.Event, is Subject) error) (changed Group, err error) {
	if err := s.guard.Admit(ctx, p, authz.ChangeGroup); err != nil {
		return Group{}, err
	}
	err = s.rows.Commit(ctx, groupEvent(audit.GroupChanged, p, id), func(tx store.Tx, e *audit.Event) error {
		row, err := s.policies.group(tx, p.Tenant, id)
		if err != nil {
			return err
		}
		is, err := s.subject(tx, p.Tenant, subject)
		if err != nil {
			return err
		}
		if err := change(tx, e, is); err != nil {
			return err
		}
		var subjects int
		changed, subjects, err = s.policies.show(tx, p.Tenant, row.group(id))
		switch {
		case err != nil:
			return err
		case e.Attributes[attributeAdded] == "":
			return nil
		case len(changed.Members) > maxMembers:
			return records.Refuse(reasonTooManyMembers, errMembers)
		case subjects > maxJoining:
			return records.Refuse(reasonTooManyMembers, errJoining)
		}
		return nil
	})
	if err != nil {
		return Group{}, fmt.Errorf("changing the members of a group: %w", err)
	}
	return changed, nil
}

// Groups returns the groups of p's tenant, by name. Errors: fault.Forbidden, fault.Unavailable.
func (s *Service) Groups(ctx context.Context, p authz.Principal) (all []Group, err error) {
	err = s.readGroups(ctx, p, "", func(r store.Reader) error {
		found, err1 := s.policies.groups(r, p.Tenant)
		members, _, err2 := s.policies.membersOf(r, p.Tenant)
		err := errors.Join(err1, err2)
		for i, g := range found {
			policies, failed := s.policies.boundTo(r, p.Tenant, g.ID)
			found[i].Members, found[i].Policies = members[g.ID], policies
			err = errors.Join(err, failed)
		}
		all = found
		return err
	})
	return all, err
}

// Group returns one group of p's tenant. Errors: fault.Forbidden, fault.NotFound, fault.Unavailable.
func (s *Service) Group(ctx context.Context, p authz.Principal, id string) (found Group, err error) {
	err = s.readGroups(ctx, p, id, func(r store.Reader) error {
		row, err := s.policies.group(r, p.Tenant, id)
		if err != nil {
			return err
		}
		found, _, err = s.policies.show(r, p.Tenant, row.group(id))
		return err
	})
	return found, err
}

// readGroups reads groups and records it. A group that is not there is recorded, too.
func (s *Service) readGroups(ctx context.Context, p authz.Principal, id string, do func(store.Reader) error) error {
	ctx, cancel := context.WithTimeout(ctx, records.ReadTimeout)
	defer cancel()
	if err := s.guard.Admit(ctx, p, authz.ListGroups); err != nil {
		return err
	}
	e := groupEvent(audit.GroupListed, p, id)
	err := s.store.View(ctx, do)
	if errors.Is(err, errGroup) {
		return s.guard.Refuse(ctx, e, audit.Denied, reasonNoGroup, errGroup)
	}
	if err != nil {
		return fmt.Errorf("reading groups: %w", err)
	}
	return s.guard.Record(ctx, e)
}
