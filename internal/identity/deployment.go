package identity

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Open opens the deployment in s: its keys, its audit log, which it equips, and
// its identities. An empty store gets what a deployment begins with: keys, the
// first entry of the chain, and a sealing key. Errors: fault.Invalid for a
// store that another KMS key wraps, fault.Internal for a damaged one.
func Open(ctx context.Context, s store.Store, log *audit.Log, kms keyring.KMS, c keyring.Config) (*Service, *keyring.Ring, error) {
	if c.Now == nil {
		c.Now = time.Now
	}
	var first *keyring.First
	keys, err := keyring.Open(ctx, s, kms, c)
	if errors.Is(err, fault.NotFound) {
		keys, first, err = keyring.Create(ctx, s, kms, c)
	}
	if err != nil {
		return nil, nil, err
	}
	if err := log.Use(ctx, s, keys.Audit(), keys.ChainID()); err != nil {
		return nil, nil, err
	}
	if first != nil {
		err := s.Update(ctx, func(tx store.Tx) error {
			_, err := log.Append(tx, systemEvent(audit.ChainStarted, audit.ChainResource, keys.ChainID()))
			return errors.Join(err, first.Put(tx))
		})
		if err != nil {
			return nil, nil, fmt.Errorf("starting the deployment: %w", err)
		}
	}
	service := &Service{store: s, log: log, keys: keys, now: c.Now}
	if _, err := keys.SealingDocument(ctx); errors.Is(err, fault.NotFound) {
		err = service.newSealingKey(ctx)
		return service, keys, err
	} else if err != nil {
		return nil, nil, err
	}
	return service, keys, nil
}

func (s *Service) newSealingKey(ctx context.Context) error {
	key, err := s.keys.NewSealingKey(ctx, envelope.SuiteMLKEM768X25519)
	if err != nil {
		return err
	}
	err = s.store.Update(ctx, func(tx store.Tx) error {
		_, err := s.log.Append(tx, systemEvent(audit.SealingKeyCreated, audit.SealingKeyResource, key.ID))
		return errors.Join(err, key.Put(tx))
	})
	if err != nil {
		return fmt.Errorf("storing a sealing key: %w", err)
	}
	return nil
}

func systemEvent(t audit.EventType, resource, id string) audit.Event {
	return audit.Event{
		Type: t, Outcome: audit.Success, Principal: System(authz.SystemTenant),
		Resource: audit.Resource{Type: resource, ID: id},
	}
}
