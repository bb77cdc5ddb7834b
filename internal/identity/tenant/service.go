package tenant

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity/records"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Service administers tenants.
type Service struct{ tenants *Store }

// NewService returns the service of the tenants in s.
func NewService(s *Store) *Service { return &Service{s} }

// TenantName returns the name of a tenant. The caller has authorised the principal. Error:
// fault.Unavailable.
func (s *Service) TenantName(ctx context.Context, id authz.TenantID) (string, error) {
	var t Tenant
	err := s.tenants.store.View(ctx, func(r store.Reader) (err error) {
		t, err = s.tenants.Read(r, id)
		return err
	})
	if err != nil {
		return "", fmt.Errorf("reading a tenant: %w", err)
	}
	return t.Name, nil
}

// Tenants returns at most limit tenants of the deployment, or all if limit is zero, in the order of
// their ids. next is the cursor of the next page, if any. Errors: fault.Forbidden, fault.Invalid
// for a cursor that is not a tenant's id, fault.Unavailable.
func (s *Service) Tenants(ctx context.Context, p authz.Principal, limit int, cursor string) (list []Tenant, next string, err error) {
	ctx, cancel := context.WithTimeout(ctx, records.ReadTimeout)
	defer cancel()
	if err := s.tenants.guard.Admit(ctx, p, authz.ListTenants); err != nil {
		return nil, "", err
	}
	rng := store.Prefix(tenantKey(idPrefix + "_")) // excludes the system's own tenant
	if cursor != "" {
		if !Valid(authz.TenantID(cursor)) {
			return nil, "", errCursor
		}
		rng.From = append(tenantKey(authz.TenantID(cursor)), 0)
	}
	list = []Tenant{}
	err = s.tenants.store.View(ctx, func(r store.Reader) error {
		var bad error
		err := r.Scan(rng, func(key, value []byte) bool {
			if limit > 0 && len(list) == limit {
				next = string(list[limit-1].ID)
				return false
			}
			var found row
			if bad = s.tenants.rows.Decode(key, value, &found); bad != nil {
				return false
			}
			list = append(list, found.tenant(authz.TenantID(key[len(tenantKey("")):])))
			return true
		})
		return errors.Join(err, bad)
	})
	if err != nil {
		return nil, "", fmt.Errorf("listing tenants: %w", err)
	}
	e := event(audit.TenantListed, p, "")
	e.Attributes = map[string]string{"count": strconv.Itoa(len(list))}
	if err := s.tenants.guard.Record(ctx, e); err != nil {
		return nil, "", err
	}
	return list, next, nil
}

// CreateTenant makes a tenant that is active at once. Its one entry is the first in the new
// tenant's own history and names p. Errors: fault.Invalid, fault.Forbidden, fault.Unavailable.
func (s *Service) CreateTenant(ctx context.Context, p authz.Principal, name string) (Tenant, error) {
	if err := s.tenants.guard.Admit(ctx, p, authz.CreateTenant); err != nil {
		return Tenant{}, err
	}
	if err := ValidateName(name); err != nil {
		return Tenant{}, err
	}
	t, err := s.tenants.New(ctx, name, time.Time{})
	if err != nil {
		return Tenant{}, err
	}
	t.By = p
	t.By.Tenant = t.ID
	if err := s.tenants.store.Update(ctx, func(tx store.Tx) error { return s.tenants.Put(tx, t) }); err != nil {
		return Tenant{}, fmt.Errorf("creating a tenant: %w", err)
	}
	return t.Tenant, nil
}

// ActivateTenant ends a tenant's trial for good. It leaves an active tenant unchanged. Errors:
// fault.Forbidden, fault.NotFound, fault.Unavailable.
func (s *Service) ActivateTenant(ctx context.Context, p authz.Principal, id authz.TenantID) (Tenant, error) {
	if err := s.tenants.guard.Admit(ctx, p, authz.ActivateTenant); err != nil {
		return Tenant{}, err
	}
	return s.changeTenant(ctx, event(audit.TenantActivated, p, id), func(r *row) { r.TrialEnds = time.Time{} })
}

// LimitTenant gives a tenant its own rate limits. Errors: fault.Invalid, fault.Forbidden,
// fault.NotFound, fault.Unavailable.
func (s *Service) LimitTenant(ctx context.Context, p authz.Principal, id authz.TenantID, l Limits) (Tenant, error) {
	if err := s.tenants.guard.Admit(ctx, p, authz.LimitTenant); err != nil {
		return Tenant{}, err
	}
	if min(l.V1, l.V2) < 0 || max(l.V1, l.V2) > maxRate {
		return Tenant{}, errLimits
	}
	e := event(audit.TenantLimited, p, id)
	e.Attributes = map[string]string{"v1": strconv.Itoa(l.V1), "v2": strconv.Itoa(l.V2)}
	return s.changeTenant(ctx, e, func(r *row) { r.Limits = l })
}

// changeTenant changes the row of the tenant that an event names. The change is recorded in that
// tenant's own history, a refusal in p's. A malformed id is not recorded.
func (s *Service) changeTenant(ctx context.Context, e audit.Event, change func(*row)) (changed Tenant, err error) {
	id := authz.TenantID(e.Resource.ID)
	if !Valid(id) {
		id, e.Resource.ID = "", ""
	}
	err = s.tenants.rows.Commit(ctx, e, func(tx store.Tx, e *audit.Event) error {
		found, err := s.tenants.find(tx, id)
		if err != nil {
			return err
		}
		e.Principal.Tenant = id
		change(&found)
		changed = found.tenant(id)
		return s.tenants.rows.Put(tx, tenantKey(id), found)
	})
	if err != nil {
		return Tenant{}, fmt.Errorf("changing a tenant: %w", err)
	}
	return changed, nil
}

// FindNamespaceTenant returns the tenant of a Kubernetes namespace, or "" if it has none yet.
// Error: fault.Unavailable.
func (s *Service) FindNamespaceTenant(ctx context.Context, clusterUID, namespaceUID string) (tenant authz.TenantID, err error) {
	err = s.tenants.store.View(ctx, func(r store.Reader) (err error) {
		tenant, err = s.tenants.OfNamespace(r, clusterUID, namespaceUID)
		return err
	})
	if err != nil {
		return "", fmt.Errorf("reading a namespace's tenant: %w", err)
	}
	return tenant, nil
}

// NamespaceTenant returns the tenant of a Kubernetes namespace and makes one if there is none yet.
// The UID identifies the namespace: one that was made again under an old name gets a new tenant.
// Error: fault.Unavailable.
func (s *Service) NamespaceTenant(ctx context.Context, clusterUID, namespaceUID string) (authz.TenantID, error) {
	tenant, err := s.FindNamespaceTenant(ctx, clusterUID, namespaceUID)
	if err != nil || tenant != "" {
		return tenant, err
	}
	fresh, err := s.tenants.New(ctx, "namespace "+namespaceUID, time.Time{})
	if err != nil {
		return "", err
	}
	err = s.tenants.store.Update(ctx, func(tx store.Tx) (err error) {
		if tenant, err = s.tenants.OfNamespace(tx, clusterUID, namespaceUID); err != nil || tenant != "" { // made meanwhile
			return err
		}
		tenant = fresh.ID
		if err := s.tenants.Put(tx, fresh); err != nil {
			return err
		}
		return s.tenants.mapNamespace(tx, clusterUID, namespaceUID, tenant)
	})
	if err != nil {
		return "", fmt.Errorf("making a namespace's tenant: %w", err)
	}
	return tenant, nil
}

// ErrRecreated means that an earlier namespace of this name was mapped to a tenant. This one was
// made again after it, is not the namespace that was meant, and gets its own tenant.
var ErrRecreated = fault.New(fault.Conflict, "the namespace was deleted and made again, and has a tenant of its own: "+
	"a name becomes part of a tenant once; if this namespace is meant too, map its UID in kubernetes.namespacesByUID")

// MapNamespaceUID makes the one namespace with that UID part of an existing tenant, so a namespace
// that was made again goes on with the tenant of the previous one. If it has another tenant by now,
// that one gets an entry too; what the namespace stored there stays there. Errors: fault.NotFound
// for an unknown tenant, fault.Unavailable.
func (s *Service) MapNamespaceUID(ctx context.Context, clusterUID, namespaceUID string, tenant authz.TenantID) error {
	err := s.tenants.store.Update(ctx, func(tx store.Tx) error {
		if err := s.tenants.Check(tx, tenant); err != nil {
			return err
		}
		left, err := s.tenants.OfNamespace(tx, clusterUID, namespaceUID)
		if err != nil || left == tenant {
			return err
		}
		if left != "" {
			if err := s.tenants.recordMapped(tx, left, clusterUID, namespaceUID, map[string]string{"now_part_of": string(tenant)}); err != nil {
				return err
			}
		}
		return s.tenants.mapNamespace(tx, clusterUID, namespaceUID, tenant)
	})
	if err != nil {
		return fmt.Errorf("mapping a namespace to a tenant: %w", err)
	}
	return nil
}

// MapNamespace makes a namespace part of an existing tenant. It accepts a name for the first UID
// only, so somebody who may delete and make a namespace cannot enter the tenant of another one by
// its name. Errors: ErrRecreated, fault.Unavailable.
func (s *Service) MapNamespace(ctx context.Context, clusterUID, name, namespaceUID string, tenant authz.TenantID) error {
	err := s.tenants.store.Update(ctx, func(tx store.Tx) error {
		nameKey := namespaceNameKey(clusterUID, name)
		first, err := tx.Get(nameKey)
		if err != nil {
			return err
		}
		named := first != nil
		if named {
			first, err = s.tenants.keys.OpenRow(nameKey, first)
			if err == nil && string(first) != namespaceUID {
				err = ErrRecreated
			}
		} else {
			err = tx.Put(nameKey, s.tenants.keys.SealRow(nameKey, []byte(namespaceUID)))
		}
		if err != nil {
			return err
		}
		key := namespaceKey(clusterUID, namespaceUID)
		b, err := tx.Get(key)
		if err != nil || named && bytes.Equal(b, s.tenants.keys.SealRow(key, []byte(tenant))) {
			return err
		}
		return s.tenants.mapNamespace(tx, clusterUID, namespaceUID, tenant) // also records the first UID of the name
	})
	if err != nil {
		return fmt.Errorf("mapping a namespace to a tenant: %w", err)
	}
	return nil
}
