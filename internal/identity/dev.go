package identity

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/store"
)

// devRow remembers what `server --dev` made: its tenant stays, its key is
// replaced at each start.
type devRow struct {
	Tenant authz.TenantID `json:"tenant"`
	KeyID  string         `json:"key_id"`
}

var devKey = []byte("dev")

// Dev returns the tenant of a development server, made at its first start, and
// a new API key with all tenant scopes; the key of the start before is
// revoked.
func (s *Service) Dev(ctx context.Context) (authz.TenantID, string, error) {
	var row devRow
	var known bool
	err := s.store.View(ctx, func(r store.Reader) (err error) {
		known, err = s.get(r, devKey, &row)
		return err
	})
	if err != nil {
		return "", "", fmt.Errorf("reading the development tenant: %w", err)
	}
	var fresh *newTenant
	tenant := row.Tenant
	if !known {
		if fresh, err = s.newTenant(ctx, "dev", time.Time{}); err != nil {
			return "", "", err
		}
		tenant = fresh.id
	}
	p := System(tenant)
	key := s.newAPIKey(tenant, p.ID, APIKeyRequest{Name: "dev", Scopes: authz.TenantScopes()})
	err = s.store.Update(ctx, func(tx store.Tx) error {
		if fresh != nil {
			if err := s.putTenant(tx, fresh); err != nil {
				return err
			}
		} else if revoked, err := s.deleteAPIKey(tx, apiKeyName{tenant, row.KeyID}); err != nil {
			return err
		} else if revoked {
			if _, err := s.guard.Append(tx, apiKeyEvent(audit.APIKeyRevoked, p, row.KeyID)); err != nil {
				return err
			}
		}
		e := apiKeyEvent(audit.APIKeyCreated, p, key.row.ID)
		e.Attributes = key.row.attributes()
		_, err := s.guard.Append(tx, e)
		return errors.Join(err, s.putAPIKey(tx, key), s.put(tx, devKey, devRow{tenant, key.row.ID}))
	})
	if err != nil {
		return "", "", fmt.Errorf("making the development key: %w", err)
	}
	return tenant, key.key, nil
}
