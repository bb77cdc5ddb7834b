package identity

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
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Tenant is one customer of the deployment, or the deployment itself.
type Tenant struct {
	ID        authz.TenantID
	Name      string // shown to people
	CreatedAt time.Time
	TrialEnds time.Time // zero: active, no trial
	Limits    Limits
}

// Limits are the requests per minute that a tenant may make, for each version of the interface.
// Zero means the deployment's default.
type Limits struct {
	V1 int `json:"v1,omitempty"`
	V2 int `json:"v2,omitempty"`
}

// Status returns what the tenant may do: everything ("active"), everything until the trial ends
// ("trial"), or only read, delete and revoke ("read_only").
func (t Tenant) Status(now time.Time) string {
	switch {
	case t.TrialEnds.IsZero():
		return "active"
	case t.readOnly(now):
		return "read_only"
	}
	return "trial"
}

func (t Tenant) readOnly(now time.Time) bool {
	return !t.TrialEnds.IsZero() && !now.Before(t.TrialEnds)
}

const (
	tenantIDPrefix = "ten"
	maxRate        = 1_000_000
)

var (
	errTenant       = fault.New(fault.NotFound, "there is no such tenant: list the tenants for those there are")
	errTenantCursor = fault.New(fault.Invalid, "the cursor is not one of this list: start again without it")
	errLimits       = fault.New(fault.Invalid, "a limit is 1 to 1000000 requests a minute, or none for the default")
	errDamaged      = fault.New(fault.Internal, "the stored identities are damaged: restore a backup")
)

const reasonNoTenant = "no_such_tenant" // reason in an audit entry

// Each row starts with the keyring's MAC: a tenant, and the tenant of a namespace. Releases before
// names and trials wrote rows without these fields.
type tenantRow struct {
	Name      string    `json:"name,omitempty"`
	CreatedAt time.Time `json:"created_at"`
	TrialEnds time.Time `json:"trial_ends,omitzero"`
	Limits    Limits    `json:"limits,omitzero"`
}

func tenantKey(id authz.TenantID) []byte { return []byte("tenant/" + string(id)) }

func namespaceKey(clusterUID, namespaceUID string) []byte {
	return []byte("namespace/" + clusterUID + "/" + namespaceUID)
}

// namespaceNameKey returns the key of the row that holds the UID of the first namespace that was
// mapped to a tenant under this name.
func namespaceNameKey(clusterUID, name string) []byte {
	return []byte("namespace-name/" + clusterUID + "/" + name)
}

// isTenant reports whether id is well formed. The system's tenant id is not.
func isTenant(id authz.TenantID) bool { return authz.ValidID(tenantIDPrefix, string(id)) }

func (r tenantRow) tenant(id authz.TenantID) Tenant {
	return Tenant{id, r.Name, r.CreatedAt, r.TrialEnds, r.Limits}
}

// tenants owns the rows of tenants and of the namespaces that are part of them.
type tenants struct {
	*deps
	cache records.Cache[tenantRow]
}

// readTenant reads a tenant that another row names. Error: errDamaged if it does not exist.
func (s *tenants) readTenant(r store.Reader, id authz.TenantID) (Tenant, error) {
	row, found, err := s.cache.Get(s.rows, r, tenantKey(id))
	if err == nil && !found {
		err = errDamaged
	}
	return row.tenant(id), err
}

// findTenant reads a tenant that a caller names. Error: a refusal.
func (s *tenants) findTenant(r store.Reader, id authz.TenantID) (row tenantRow, err error) {
	found, err := s.rows.Get(r, tenantKey(id), &row)
	if err == nil && !found {
		err = records.Refuse(reasonNoTenant, errTenant)
	}
	return row, err
}

// newTenant is a tenant that is not stored yet.
type newTenant struct {
	id  authz.TenantID
	row tenantRow
	set *keyring.NewSet
	by  authz.Principal
}

// newTenant makes a tenant with its keys. The tenant is on trial until trialEnds, or active if that
// is zero.
func (s *tenants) newTenant(ctx context.Context, name string, trialEnds time.Time) (*newTenant, error) {
	t := &newTenant{id: authz.TenantID(authz.NewID(tenantIDPrefix)), row: tenantRow{Name: name, CreatedAt: s.now().UTC(), TrialEnds: trialEnds}}
	t.by = System(t.id)
	var err error
	if t.set, err = s.keys.NewSet(ctx, t.id, 1); err != nil {
		return nil, fmt.Errorf("making a tenant's keys: %w", err)
	}
	return t, nil
}

func (t *newTenant) tenant() Tenant { return t.row.tenant(t.id) }

// putTenant stores a tenant with the first entry of its history.
func (s *tenants) putTenant(tx store.Tx, t *newTenant) error {
	_, err := s.guard.Append(tx, tenantEvent(audit.TenantCreated, t.by, t.id))
	return errors.Join(err, t.set.Put(tx), s.rows.Put(tx, tenantKey(t.id), t.row))
}

func tenantEvent(t audit.EventType, p authz.Principal, id authz.TenantID) audit.Event {
	return audit.Event{Type: t, Outcome: audit.Success, Principal: p, Resource: audit.Resource{Type: audit.TenantResource, ID: string(id)}}
}

// Tenants returns at most limit tenants of the deployment, or all if limit is zero, in the order of
// their ids. next is the cursor of the next page, if any. Errors: fault.Forbidden, fault.Invalid
// for a cursor that is not a tenant's id, fault.Unavailable.
func (s *tenants) Tenants(ctx context.Context, p authz.Principal, limit int, cursor string) (list []Tenant, next string, err error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	if err := s.guard.Admit(ctx, p, authz.ListTenants); err != nil {
		return nil, "", err
	}
	rng := store.Prefix(tenantKey(tenantIDPrefix + "_")) // excludes the system's own tenant
	if cursor != "" {
		if !isTenant(authz.TenantID(cursor)) {
			return nil, "", errTenantCursor
		}
		rng.From = append(tenantKey(authz.TenantID(cursor)), 0)
	}
	list = []Tenant{}
	err = s.store.View(ctx, func(r store.Reader) error {
		var bad error
		err := r.Scan(rng, func(key, value []byte) bool {
			if limit > 0 && len(list) == limit {
				next = string(list[limit-1].ID)
				return false
			}
			var row tenantRow
			if bad = s.rows.Decode(key, value, &row); bad != nil {
				return false
			}
			list = append(list, row.tenant(authz.TenantID(key[len(tenantKey("")):])))
			return true
		})
		return errors.Join(err, bad)
	})
	if err != nil {
		return nil, "", fmt.Errorf("listing tenants: %w", err)
	}
	e := tenantEvent(audit.TenantListed, p, "")
	e.Attributes = map[string]string{"count": strconv.Itoa(len(list))}
	if err := s.guard.Record(ctx, e); err != nil {
		return nil, "", err
	}
	return list, next, nil
}

// CreateTenant makes a tenant that is active at once. Its one entry is the first in the new
// tenant's own history and names p. Errors: fault.Invalid, fault.Forbidden, fault.Unavailable.
func (s *tenants) CreateTenant(ctx context.Context, p authz.Principal, name string) (Tenant, error) {
	if err := s.guard.Admit(ctx, p, authz.CreateTenant); err != nil {
		return Tenant{}, err
	}
	if err := checkName(name); err != nil {
		return Tenant{}, err
	}
	t, err := s.newTenant(ctx, name, time.Time{})
	if err != nil {
		return Tenant{}, err
	}
	t.by = p
	t.by.Tenant = t.id
	if err := s.store.Update(ctx, func(tx store.Tx) error { return s.putTenant(tx, t) }); err != nil {
		return Tenant{}, fmt.Errorf("creating a tenant: %w", err)
	}
	return t.tenant(), nil
}

// ActivateTenant ends a tenant's trial for good. It leaves an active tenant unchanged. Errors:
// fault.Forbidden, fault.NotFound, fault.Unavailable.
func (s *tenants) ActivateTenant(ctx context.Context, p authz.Principal, id authz.TenantID) (Tenant, error) {
	if err := s.guard.Admit(ctx, p, authz.ActivateTenant); err != nil {
		return Tenant{}, err
	}
	return s.changeTenant(ctx, tenantEvent(audit.TenantActivated, p, id), func(row *tenantRow) { row.TrialEnds = time.Time{} })
}

// LimitTenant gives a tenant its own rate limits. Errors: fault.Invalid, fault.Forbidden,
// fault.NotFound, fault.Unavailable.
func (s *tenants) LimitTenant(ctx context.Context, p authz.Principal, id authz.TenantID, l Limits) (Tenant, error) {
	if err := s.guard.Admit(ctx, p, authz.LimitTenant); err != nil {
		return Tenant{}, err
	}
	if min(l.V1, l.V2) < 0 || max(l.V1, l.V2) > maxRate {
		return Tenant{}, errLimits
	}
	e := tenantEvent(audit.TenantLimited, p, id)
	e.Attributes = map[string]string{"v1": strconv.Itoa(l.V1), "v2": strconv.Itoa(l.V2)}
	return s.changeTenant(ctx, e, func(row *tenantRow) { row.Limits = l })
}

// changeTenant changes the row of the tenant that an event names. The change is recorded in that
// tenant's own history, a refusal in p's. A malformed id is not recorded.
func (s *tenants) changeTenant(ctx context.Context, e audit.Event, change func(*tenantRow)) (changed Tenant, err error) {
	id := authz.TenantID(e.Resource.ID)
	if !isTenant(id) {
		id, e.Resource.ID = "", ""
	}
	err = s.rows.Commit(ctx, e, func(tx store.Tx, e *audit.Event) error {
		row, err := s.findTenant(tx, id)
		if err != nil {
			return err
		}
		e.Principal.Tenant = id
		change(&row)
		changed = row.tenant(id)
		return s.rows.Put(tx, tenantKey(id), row)
	})
	if err != nil {
		return Tenant{}, fmt.Errorf("changing a tenant: %w", err)
	}
	return changed, nil
}

// FindNamespaceTenant returns the tenant of a Kubernetes namespace, or "" if it has none yet.
// Error: fault.Unavailable.
func (s *tenants) FindNamespaceTenant(ctx context.Context, clusterUID, namespaceUID string) (tenant authz.TenantID, err error) {
	err = s.store.View(ctx, func(r store.Reader) (err error) {
		tenant, err = s.namespaceTenant(r, clusterUID, namespaceUID)
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
func (s *tenants) NamespaceTenant(ctx context.Context, clusterUID, namespaceUID string) (authz.TenantID, error) {
	tenant, err := s.FindNamespaceTenant(ctx, clusterUID, namespaceUID)
	if err != nil || tenant != "" {
		return tenant, err
	}
	fresh, err := s.newTenant(ctx, "namespace "+namespaceUID, time.Time{})
	if err != nil {
		return "", err
	}
	err = s.store.Update(ctx, func(tx store.Tx) (err error) {
		if tenant, err = s.namespaceTenant(tx, clusterUID, namespaceUID); err != nil || tenant != "" { // made meanwhile
			return err
		}
		tenant = fresh.id
		if err := s.putTenant(tx, fresh); err != nil {
			return err
		}
		return s.mapNamespace(tx, clusterUID, namespaceUID, tenant)
	})
	if err != nil {
		return "", fmt.Errorf("making a namespace's tenant: %w", err)
	}
	return tenant, nil
}

// namespaceTenant reads the tenant of a namespace. It returns "" if there is none yet.
func (s *tenants) namespaceTenant(r store.Reader, clusterUID, namespaceUID string) (authz.TenantID, error) {
	key := namespaceKey(clusterUID, namespaceUID)
	b, err := r.Get(key)
	if err == nil {
		b, err = s.keys.OpenRow(key, b)
	}
	return authz.TenantID(b), err
}

// ErrRemade means that an earlier namespace of this name was mapped to a tenant. This one was made
// again after it, is not the namespace that was meant, and gets its own tenant.
var ErrRemade = fault.New(fault.Conflict, "the namespace was deleted and made again, and has a tenant of its own: "+
	"a name becomes part of a tenant once; take a namespace of another name, and take this one out of kubernetes.namespaces")

// MapNamespace makes a namespace part of an existing tenant. It accepts a name for the first UID
// only, so somebody who may delete and make a namespace cannot enter the tenant of another one by
// its name. Errors: ErrRemade, fault.Unavailable.
func (s *tenants) MapNamespace(ctx context.Context, clusterUID, name, namespaceUID string, tenant authz.TenantID) error {
	err := s.store.Update(ctx, func(tx store.Tx) error {
		meant := namespaceNameKey(clusterUID, name)
		first, err := tx.Get(meant)
		switch {
		case err != nil:
			return err
		case first == nil:
			err = tx.Put(meant, s.keys.SealRow(meant, []byte(namespaceUID)))
		default:
			first, err = s.keys.OpenRow(meant, first)
			if err == nil && string(first) != namespaceUID {
				err = ErrRemade
			}
		}
		if err != nil {
			return err
		}
		key := namespaceKey(clusterUID, namespaceUID)
		b, err := tx.Get(key)
		if err != nil || bytes.Equal(b, s.keys.SealRow(key, []byte(tenant))) {
			return err
		}
		return s.mapNamespace(tx, clusterUID, namespaceUID, tenant)
	})
	if err != nil {
		return fmt.Errorf("mapping a namespace to a tenant: %w", err)
	}
	return nil
}

func (s *tenants) mapNamespace(tx store.Tx, clusterUID, namespaceUID string, tenant authz.TenantID) error {
	_, err := s.guard.Append(tx, audit.Event{
		Type: audit.NamespaceMapped, Outcome: audit.Success, Principal: System(tenant),
		Resource:   audit.Resource{Type: audit.TenantResource, ID: string(tenant)},
		Attributes: map[string]string{"cluster_uid": clusterUID, "namespace_uid": namespaceUID},
	})
	key := namespaceKey(clusterUID, namespaceUID)
	return errors.Join(err, tx.Put(key, s.keys.SealRow(key, []byte(tenant))))
}
