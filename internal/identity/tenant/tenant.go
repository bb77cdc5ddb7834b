// Package tenant keeps the tenants of a deployment, and the Kubernetes namespaces that are part of
// them. [Service] is what callers may do, each time authorised and recorded. [Store] reads and
// writes the rows within a transaction of the caller, who answers for both.
package tenant

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
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
	case t.ReadOnly(now):
		return "read_only"
	}
	return "trial"
}

// ReadOnly reports whether the trial of the tenant has ended.
func (t Tenant) ReadOnly(now time.Time) bool {
	return !t.TrialEnds.IsZero() && !now.Before(t.TrialEnds)
}

const (
	idPrefix = "ten"
	maxName  = 255 // bytes
	maxRate  = 1_000_000
)

// ReasonNotFound is the reason in the audit entry of [ErrNotFound].
const ReasonNotFound = "no_such_tenant"

// ErrNotFound is the answer to the id of a tenant that does not exist.
var ErrNotFound = fault.New(fault.NotFound, "there is no such tenant: list the tenants for those there are")

var (
	errName   = fault.New(fault.Invalid, "a name has 1 to 255 bytes of text without control characters")
	errCursor = fault.New(fault.Invalid, "the cursor is not one of this list: start again without it")
	errLimits = fault.New(fault.Invalid, "a limit is 1 to 1000000 requests a minute, or none for the default")
)

// ValidateName refuses what cannot be the name of a tenant. The names of API keys follow the same
// rule. Error: fault.Invalid.
func ValidateName(name string) error {
	if name == "" || len(name) > maxName || !utf8.ValidString(name) || strings.ContainsFunc(name, unicode.IsControl) {
		return errName
	}
	return nil
}

// row is a tenant. Releases before names and trials wrote rows without these fields.
type row struct {
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

// Valid reports whether id is well formed. The system's tenant id is not.
func Valid(id authz.TenantID) bool { return authz.ValidID(idPrefix, string(id)) }

func (r row) tenant(id authz.TenantID) Tenant {
	return Tenant{id, r.Name, r.CreatedAt, r.TrialEnds, r.Limits}
}

// NewID returns a new tenant's id.
func NewID() authz.TenantID { return authz.TenantID(authz.NewID(idPrefix)) }

// Store owns the rows of tenants and of the namespaces that are part of them.
type Store struct {
	store store.Store
	guard *guard.Guard
	keys  *keyring.Ring
	rows  *records.Store
	now   func() time.Time
	cache records.Cache[row]
}

// NewStore returns the tenants in s.
func NewStore(s store.Store, guard *guard.Guard, keys *keyring.Ring, rows *records.Store, now func() time.Time) *Store {
	return &Store{store: s, guard: guard, keys: keys, rows: rows, now: now}
}

// PutSystem stores the system's own tenant, in the first transaction of a deployment.
func (s *Store) PutSystem(tx store.Tx, now time.Time) error {
	return s.rows.Put(tx, tenantKey(authz.SystemTenant), row{Name: "system", CreatedAt: now})
}

// EnsureSystem stores the system's own tenant if it is missing, as after a release that stored it
// later than the deployment and was stopped in between.
func (s *Store) EnsureSystem(ctx context.Context) error {
	missing := false
	err := s.store.View(ctx, func(r store.Reader) error {
		b, err := r.Get(tenantKey(authz.SystemTenant))
		missing = b == nil
		return err
	})
	if err != nil {
		return fmt.Errorf("reading the system's tenant: %w", err)
	}
	if !missing {
		return nil
	}
	now := s.now().UTC()
	err = s.store.Update(ctx, func(tx store.Tx) error {
		if b, err := tx.Get(tenantKey(authz.SystemTenant)); err != nil || b != nil {
			return err
		}
		_, err := s.guard.Append(tx, event(audit.TenantCreated, authz.SystemPrincipal(authz.SystemTenant), authz.SystemTenant))
		return errors.Join(err, s.PutSystem(tx, now))
	})
	if err != nil {
		return fmt.Errorf("storing the system's tenant: %w", err)
	}
	return nil
}

// Read reads a tenant that another row names. Error: records.ErrDamaged if it does not exist.
func (s *Store) Read(r store.Reader, id authz.TenantID) (Tenant, error) {
	stored, found, err := s.cache.Get(s.rows, r, tenantKey(id))
	if err == nil && !found {
		err = records.ErrDamaged
	}
	return stored.tenant(id), err
}

// Check refuses the id of a tenant that does not exist. Error: a refusal.
func (s *Store) Check(r store.Reader, id authz.TenantID) error {
	_, err := s.find(r, id)
	return err
}

// find reads a tenant that a caller names. Error: a refusal.
func (s *Store) find(r store.Reader, id authz.TenantID) (found row, err error) {
	ok, err := s.rows.Get(r, tenantKey(id), &found)
	if err == nil && !ok {
		err = records.Refuse(ReasonNotFound, ErrNotFound)
	}
	return found, err
}

// NewTenant is a tenant that is not stored yet.
type NewTenant struct {
	Tenant
	By  authz.Principal // its creator, in the first entry of its history
	set *keyring.NewSet
}

// New makes a tenant with its keys. The tenant is on trial until trialEnds, or active if that is
// zero.
func (s *Store) New(ctx context.Context, name string, trialEnds time.Time) (*NewTenant, error) {
	id := NewID()
	t := &NewTenant{Tenant: Tenant{ID: id, Name: name, CreatedAt: s.now().UTC(), TrialEnds: trialEnds}, By: authz.SystemPrincipal(id)}
	var err error
	if t.set, err = s.keys.NewSet(ctx, id, 1); err != nil {
		return nil, fmt.Errorf("making a tenant's keys: %w", err)
	}
	return t, nil
}

// Put stores a tenant with the first entry of its history.
func (s *Store) Put(tx store.Tx, t *NewTenant) error {
	_, err := s.guard.Append(tx, event(audit.TenantCreated, t.By, t.ID))
	return errors.Join(err, t.set.Put(tx), s.rows.Put(tx, tenantKey(t.ID), row{t.Name, t.CreatedAt, t.TrialEnds, t.Limits}))
}

func event(t audit.EventType, p authz.Principal, id authz.TenantID) audit.Event {
	return audit.Event{Type: t, Outcome: audit.Success, Principal: p, Resource: audit.Resource{Type: audit.TenantResource, ID: string(id)}}
}

// OfNamespace reads the tenant of a namespace. It returns "" if there is none yet.
func (s *Store) OfNamespace(r store.Reader, clusterUID, namespaceUID string) (authz.TenantID, error) {
	key := namespaceKey(clusterUID, namespaceUID)
	b, err := r.Get(key)
	if err == nil {
		b, err = s.keys.OpenRow(key, b)
	}
	return authz.TenantID(b), err
}

// recordMapped appends the entry of a mapped namespace to the history of a tenant.
func (s *Store) recordMapped(tx store.Tx, tenant authz.TenantID, clusterUID, namespaceUID string, more map[string]string) error {
	e := event(audit.NamespaceMapped, authz.SystemPrincipal(tenant), tenant)
	e.Attributes = map[string]string{"cluster_uid": clusterUID, "namespace_uid": namespaceUID}
	maps.Copy(e.Attributes, more)
	_, err := s.guard.Append(tx, e)
	return err
}

// mapNamespace makes a namespace part of a tenant, with its entry.
func (s *Store) mapNamespace(tx store.Tx, clusterUID, namespaceUID string, tenant authz.TenantID) error {
	err := s.recordMapped(tx, tenant, clusterUID, namespaceUID, nil)
	key := namespaceKey(clusterUID, namespaceUID)
	return errors.Join(err, tx.Put(key, s.keys.SealRow(key, []byte(tenant))))
}
