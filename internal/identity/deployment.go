package identity

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity/apikey"
	"github.com/latticekeep/latticekeep/internal/identity/records"
	"github.com/latticekeep/latticekeep/internal/identity/tenant"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/format"
)

// Open opens the deployment in s: its keys, its audit log, which it gives its keys, and its
// identities, which record through guard. In an empty store it makes what a deployment begins with:
// keys, the first entry of the chain, and a sealing key. Errors: fault.Invalid for a store that is
// wrapped by another KMS key, fault.Internal for a damaged store.
func Open(ctx context.Context, s store.Store, log *writer.Log, guard *guard.Guard, kms keyring.KMS, c keyring.Config) (*Service, *keyring.Ring, error) {
	if c.Now == nil {
		c.Now = time.Now
	}
	keys, err := openKeys(ctx, s, log, guard, kms, c)
	if errors.Is(err, fault.Conflict) || errors.Is(err, fault.Internal) {
		// Another replica may have started the deployment at the same time. Then this replica's Put
		// comes too late, or the log has a head that this replica's keys did not sign.
		keys, err = openKeys(ctx, s, log, guard, kms, c)
	}
	if err != nil {
		return nil, nil, err
	}
	service := newParts(s, guard, keys, c.Now)
	if err := service.tenants.EnsureSystem(ctx); err != nil {
		return nil, nil, err
	}
	if _, err := keys.SealingDocument(ctx); errors.Is(err, fault.NotFound) {
		err = service.newSealingKey(ctx)
		return service, keys, err
	} else if err != nil && !errors.Is(err, keyring.ErrRetired) { // a retired key publishes nothing until there is a new one
		return nil, nil, err
	}
	return service, keys, nil
}

// openKeys opens the keys, gives them to the log, and stores what a new deployment begins with.
// Error: fault.Conflict when another replica has started a deployment meanwhile.
func openKeys(ctx context.Context, s store.Store, log *writer.Log, guard *guard.Guard, kms keyring.KMS, c keyring.Config) (*keyring.Ring, error) {
	var first *keyring.First
	keys, err := keyring.Open(ctx, s, kms, c)
	if errors.Is(err, fault.NotFound) {
		keys, first, err = keyring.Create(ctx, s, kms, c)
	}
	if err != nil {
		return nil, err
	}
	if err := log.Use(ctx, s, keys.Audit(), keys.ChainID()); err != nil {
		return keys, err
	}
	if err := log.BindState(ctx, keys.APIKeyHash()); err != nil || first == nil {
		return keys, err
	}
	tenants := tenant.NewStore(s, guard, keys, records.New(s, guard, keys), c.Now)
	now := c.Now().UTC()
	err = s.Update(ctx, func(tx store.Tx) error {
		if err := errors.Join(first.Put(tx), tenants.PutSystem(tx, now)); err != nil {
			return err
		}
		if log.BindsState() {
			if err := format.Raise(tx, format.State, format.State); err != nil {
				return err
			}
		}
		_, err := log.Append(tx, systemEvent(audit.ChainStarted, audit.ChainResource, keys.ChainID()))
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("starting the deployment: %w", err)
	}
	return keys, nil
}

// FirstSystemKey makes an API key with system:admin if no unexpired key has that scope, so the
// deployment can be operated. deliver hands the key to the operator before it is stored, so a key
// that is lost on the way never worked. Errors: fault.Conflict when another replica stored its key
// meanwhile, fault.Unavailable, or deliver's own.
func (s *Service) FirstSystemKey(ctx context.Context, deliver func(key string) error) error {
	if operated, err := s.isOperated(ctx); err != nil || operated {
		return err
	}
	p := authz.SystemPrincipal(authz.SystemTenant)
	k := s.grants.apiKeys.New(p.Tenant, p.ID, APIKeyRequest{
		Name: "first system key", Scopes: []authz.Scope{authz.SystemAdmin, authz.AccountAdmin, authz.AuditRead},
	})
	if undelivered := deliver(k.Secret); undelivered != nil {
		// Replicas that start together deliver to one place, where all but the first fail.
		if s.awaitOperated(ctx) {
			return nil
		}
		return fmt.Errorf("delivering the first system key: %w", undelivered)
	}
	e := apiKeyEvent(audit.APIKeyCreated, p, k.Row.ID)
	e.Attributes = k.Row.Attributes()
	now := s.now()
	err := s.rows.Commit(ctx, e, func(tx store.Tx, _ *audit.Event) error {
		if operated, err := s.operated(tx, now); err != nil || operated {
			return cmp.Or(err, errOperated)
		}
		return s.grants.apiKeys.Put(tx, k)
	})
	if err != nil {
		return fmt.Errorf("storing the first system key: %w", err)
	}
	return nil
}

// errOperated is returned when a key was delivered that does not work.
var errOperated = fault.New(fault.Conflict, "another replica made the first system key at the same time: remove the one that was delivered here, and start again")

// operated reports whether an unexpired key carries system:admin.
func (s *Service) operated(r store.Reader, now time.Time) (bool, error) {
	keys, err := s.grants.apiKeys.Of(r, authz.SystemTenant)
	if err != nil {
		return false, fmt.Errorf("reading the system's API keys: %w", err)
	}
	return slices.ContainsFunc(keys, func(k APIKey) bool { return slices.Contains(k.Scopes, authz.SystemAdmin) && !k.Expired(now) }), nil
}

func (s *Service) isOperated(ctx context.Context) (operated bool, err error) {
	err = s.store.View(ctx, func(r store.Reader) (err error) {
		operated, err = s.operated(r, s.now())
		return err
	})
	return operated, err
}

// operatedTime is how long a replica waits for another one to make the first system key.
// operatedInterval is how often it looks.
const operatedTime, operatedInterval = time.Second, 50 * time.Millisecond

// awaitOperated waits up to operatedTime and reports whether another replica has made the first
// system key.
func (s *Service) awaitOperated(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, operatedTime)
	defer cancel()
	for {
		if operated, err := s.isOperated(ctx); err != nil || operated {
			return operated
		}
		select {
		case <-ctx.Done():
			return false
		case <-time.After(operatedInterval):
		}
	}
}

func (s *Service) newSealingKey(ctx context.Context) error {
	previous, err := s.keys.CurrentSealingKey(ctx) // empty if there is none
	if err != nil {
		return err
	}
	key, err := s.keys.NewSealingKey(ctx, envelope.SuiteMLKEM768X25519)
	if err != nil {
		return err
	}
	err = s.store.Update(ctx, func(tx store.Tx) error {
		if err := key.PutAfter(tx, previous); err != nil {
			return err
		}
		_, err := s.guard.Append(tx, systemEvent(audit.SealingKeyCreated, audit.SealingKeyResource, key.ID))
		return err
	})
	if errors.Is(err, fault.Conflict) {
		return nil // another replica made one at the same time
	}
	if err != nil {
		return fmt.Errorf("storing a sealing key: %w", err)
	}
	return nil
}

func systemEvent(t audit.EventType, resource, id string) audit.Event {
	return audit.Event{
		Type: t, Outcome: audit.Success, Principal: authz.SystemPrincipal(authz.SystemTenant),
		Resource: audit.Resource{Type: resource, ID: id},
	}
}

// devRow records what `server --dev` made. The tenant stays; each start replaces the key.
type devRow struct {
	Tenant authz.TenantID `json:"tenant"`
	KeyID  string         `json:"key_id"`
}

var devKey = []byte("dev")

// Dev returns the tenant of a development server, made at its first start, and a new API key with
// all tenant scopes. It revokes the key of the previous start.
func (s *Service) Dev(ctx context.Context) (authz.TenantID, string, error) {
	var row devRow
	var known bool
	err := s.store.View(ctx, func(r store.Reader) (err error) {
		known, err = s.rows.Get(r, devKey, &row)
		return err
	})
	if err != nil {
		return "", "", fmt.Errorf("reading the development tenant: %w", err)
	}
	var fresh *tenant.NewTenant
	id := row.Tenant
	if !known {
		if fresh, err = s.tenants.New(ctx, "dev", time.Time{}); err != nil {
			return "", "", err
		}
		id = fresh.ID
	}
	p := authz.SystemPrincipal(id)
	key := s.grants.apiKeys.New(id, p.ID, APIKeyRequest{Name: "dev", Scopes: authz.TenantScopes()})
	err = s.store.Update(ctx, func(tx store.Tx) error {
		if fresh != nil {
			if err := s.tenants.Put(tx, fresh); err != nil {
				return err
			}
		} else if revoked, err := s.grants.deleteKey(tx, apikey.Name{Tenant: id, ID: row.KeyID}); err != nil {
			return err
		} else if revoked {
			if _, err := s.guard.Append(tx, apiKeyEvent(audit.APIKeyRevoked, p, row.KeyID)); err != nil {
				return err
			}
		}
		e := apiKeyEvent(audit.APIKeyCreated, p, key.Row.ID)
		e.Attributes = key.Row.Attributes()
		_, err := s.guard.Append(tx, e)
		return errors.Join(err, s.grants.apiKeys.Put(tx, key), s.rows.Put(tx, devKey, devRow{id, key.Row.ID}))
	})
	if err != nil {
		return "", "", fmt.Errorf("making the development key: %w", err)
	}
	return id, key.Secret, nil
}
