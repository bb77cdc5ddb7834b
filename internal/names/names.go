// Package names says what the ids of audit entries are called. Entries hold ids alone, so that a name can
// be forgotten while its history stays. A name is read from the row of whatever bears it, when somebody
// who may know asks. What is gone or has another name has the names that package past keeps.
package names

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity"
	"github.com/latticekeep/latticekeep/internal/names/past"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/transit"
	"github.com/latticekeep/latticekeep/internal/vault/record"
)

// MaxIDs bounds how many ids one question may have: the actors and resources of a page of entries.
const MaxIDs = 200

// Name is what an id is called.
type Name struct {
	ID   string
	Type string // type of resource in entries
	Name string // for a user, the e-mail address; of what is gone, its last name

	Former []string // other names that it had, newest first
	Gone   bool
}

// Names finds names.
type Names struct {
	store   store.Store
	guard   *guard.Guard
	sources []source
	past    past.Names
}

// source reads the names of one type. find returns "" for an id of another type, and for one that the
// tenant does not have.
type source struct {
	resource string
	find     func(r store.Reader, tenant authz.TenantID, id string) (string, error)
}

// New returns the names of what these services keep.
func New(s store.Store, g *guard.Guard, i *identity.Service, t *transit.Transit, f past.Names) *Names {
	return &Names{store: s, guard: g, past: f, sources: []source{
		{audit.CredentialResource, record.NameOf},
		{audit.KeyResource, t.Name},
		{audit.APIKeyResource, i.APIKeyName},
		{audit.UserResource, i.UserName},
		{audit.GroupResource, i.Access.GroupName},
	}}
}

// Of returns the names that ids of p's tenant have, in the order of the ids. It leaves out ids without a
// name, ids and past names of credentials outside p's policies, and ids whose row is damaged. It records the read before
// it returns. Errors: fault.Forbidden, fault.Invalid for no ids and for more than [MaxIDs],
// fault.Unavailable.
func (n *Names) Of(ctx context.Context, p authz.Principal, ids []string) ([]Name, error) {
	if err := n.guard.Admit(ctx, p, authz.ReadNames); err != nil {
		return nil, err
	}
	if len(ids) == 0 || len(ids) > MaxIDs {
		return nil, fault.New(fault.Invalid, fmt.Sprintf("ids must have 1 to %d ids", MaxIDs))
	}
	ids = slices.Compact(slices.Sorted(slices.Values(ids)))
	found := []Name{}
	err := n.store.View(ctx, func(r store.Reader) error {
		found = []Name{}
		for _, id := range ids {
			name, err := n.of(r, p, id)
			if err != nil {
				return err
			}
			if name.Name != "" {
				found = append(found, name)
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("reading names: %w", err)
	}
	err = n.guard.Record(ctx, audit.Event{
		Type: audit.AuditRead, Outcome: audit.Success, Principal: p, Resource: audit.Resource{Type: audit.LogResource},
		Attributes: map[string]string{audit.AttributeNames: strconv.Itoa(len(found))},
	})
	if err != nil {
		return nil, err
	}
	return found, nil
}

// Erase erases the past names of something in p's tenant. Errors: those of [past.Names.Erase].
func (n *Names) Erase(ctx context.Context, p authz.Principal, id string) error {
	return n.past.Erase(ctx, n.store, n.guard, p, id)
}

// of returns what an id is called and was, the zero Name for nothing that p may know.
func (n *Names) of(r store.Reader, p authz.Principal, id string) (Name, error) {
	known := Name{ID: id}
	mayKnow := func(resource, name string) bool {
		return resource != audit.CredentialResource || p.Reaches(authz.ListCredentials, name)
	}
	for _, from := range n.sources {
		name, err := from.find(r, p.Tenant, id)
		switch {
		case errors.Is(err, fault.Internal), state.IsRefused(err): // the log is read all the same
			return Name{}, nil
		case err != nil:
			return Name{}, err
		case name != "" && !mayKnow(from.resource, name):
			return Name{}, nil // nor what it was called before
		case name != "":
			known.Type, known.Name = from.resource, name
		}
	}
	before, err := n.past.Of(r, p.Tenant, id)
	if err != nil {
		return Name{}, err
	}
	for _, b := range before {
		switch {
		case !mayKnow(b.Type, b.Name), b.Name == known.Name, slices.Contains(known.Former, b.Name):
		case known.Name == "":
			known.Type, known.Name = b.Type, b.Name
			known.Gone = b.Type != audit.ServiceAccountResource // only its cluster knows whether that is gone
		default:
			known.Former = append(known.Former, b.Name)
		}
	}
	return known, nil
}
