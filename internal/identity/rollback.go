package identity

import (
	"context"
	"errors"
	"fmt"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/identity/apikey"
	"github.com/latticekeep/latticekeep/internal/identity/password"
	"github.com/latticekeep/latticekeep/internal/identity/records"
	"github.com/latticekeep/latticekeep/internal/store"
)

// What follows are the changes that only the deployment itself makes, after a rollback: p is a
// principal of the kind authz.System, in the tenant that the change is in.

// EndSessionOf ends a session of any user of p's tenant. Errors: fault.NotFound, also for a session
// that has expired; fault.Unavailable.
func (s *sessions) EndSessionOf(ctx context.Context, p authz.Principal, user, id string) error {
	if p.Kind != authz.System {
		return errDenied
	}
	return s.end(ctx, audit.SessionEnded, p, sessionName{user, id})
}

// RequireNewPassword makes a user's password and mailed tokens worthless, so the user has to reset the
// password by mail. Errors: fault.NotFound, fault.Unavailable.
func (s *members) RequireNewPassword(ctx context.Context, p authz.Principal, user string) error {
	if p.Kind != authz.System {
		return errDenied
	}
	err := s.rows.Commit(ctx, memberEvent(audit.PasswordChanged, p, user), func(tx store.Tx, e *audit.Event) error {
		m, err := s.findMember(tx, e)
		if err != nil {
			return err
		}
		previous := m.row.Password
		m.row.Password = authz.NewID(passwordIDPrefix)
		return errors.Join(s.tickets.DropUser(tx, m.User), tx.Delete(passwordKey(m.User, previous)),
			s.rows.Put(tx, passwordKey(m.User, m.row.Password), password.Unmatchable()), s.rows.Put(tx, userKey(m.account), m.row))
	})
	if err != nil {
		return fmt.Errorf("requiring a new password: %w", err)
	}
	return nil
}

// SuspendAPIKey makes an API key of p's tenant one that waits for an owner's approval. One that waits
// already goes on waiting. Errors: fault.NotFound, fault.Unavailable.
func (s *apiKeys) SuspendAPIKey(ctx context.Context, p authz.Principal, id string) error {
	if p.Kind != authz.System {
		return errDenied
	}
	err := s.rows.Commit(ctx, apiKeyEvent(audit.APIKeySuspended, p, id), func(tx store.Tx, e *audit.Event) error {
		row, found, err := s.grants.apiKeys.Find(tx, apikey.Name{Tenant: p.Tenant, ID: id})
		switch {
		case err != nil:
			return err
		case !found:
			return records.Refuse(reasonNoAPIKey, errAPIKey)
		case !row.Pending():
			row.Requested, row.Scopes, row.Suspended = row.Scopes, nil, s.now().UTC()
		}
		e.Attributes = row.Attributes()
		return s.grants.apiKeys.Replace(tx, row)
	})
	if err != nil {
		return fmt.Errorf("suspending an API key: %w", err)
	}
	return nil
}
