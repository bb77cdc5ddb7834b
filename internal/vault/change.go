package vault

import (
	"context"
	"errors"
	"fmt"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/store"
)

// maxAttempts bounds how often an operation starts again because another one
// changed the credential between its lookup and its commit.
const maxAttempts = 8

// retried runs an operation until nobody got in between.
func retried(attempt func() (Credential, error)) (Credential, error) {
	for range maxAttempts {
		c, err := attempt()
		if !errors.Is(err, fault.Conflict) {
			return c, err
		}
	}
	return Credential{}, fault.Wrap(fault.Unavailable, fault.Unavailable.Error(), errMoved)
}

// Rotate encrypts a credential anew with a new ML-KEM-768 key pair, as its
// next version with a full TTL; the old ciphertext is gone. Errors:
// fault.Forbidden for all that is not there for p or belongs to an object,
// fault.Unavailable.
func (v *Vault) Rotate(ctx context.Context, p authz.Principal, id string) (Credential, error) {
	return retried(func() (Credential, error) {
		return v.change(ctx, p, id, authz.RotateCredential, audit.CredentialReencrypted, nil)
	})
}

// ReplaceRequest asks for new values of a credential.
type ReplaceRequest struct {
	Values  map[string]secret.Bytes
	TTLDays int // 0 keeps the one that the credential has
}

// Replace stores new values as the credential's next version, under new keys
// and with a full TTL; the old ciphertext is gone. Errors: as for
// [Vault.Rotate], and fault.Invalid.
func (v *Vault) Replace(ctx context.Context, p authz.Principal, id string, req ReplaceRequest) (Credential, error) {
	return retried(func() (Credential, error) {
		return v.change(ctx, p, id, authz.ReplaceCredential, audit.CredentialRotated, &req)
	})
}

// change makes the next version of a credential, with the values that it has
// when req is nil. The old version is opened either way: what is kept of it
// must be known to hold before it is signed again.
func (v *Vault) change(ctx context.Context, p authz.Principal, id string, a authz.Action, what audit.EventType, req *ReplaceRequest) (Credential, error) {
	keys, err := v.ready(ctx, p, a)
	if err != nil {
		return Credential{}, err
	}
	if req != nil {
		if err := req.validate(); err != nil {
			return Credential{}, err
		}
	}
	found, err := v.open(ctx, keys, p, byID(id))
	if err != nil {
		return Credential{}, err
	}
	defer found.zero()
	now := v.now()
	e := found.event(what, p, now)
	if e.Outcome == audit.Success && found.owned {
		e.Outcome, e.Attributes[audit.AttributeReason] = audit.Denied, reasonOwned
	}
	if e.Outcome != audit.Success {
		return Credential{}, v.deny(ctx, e)
	}
	old, next := found.record, SealRequest{Values: found.values}
	next.Name, next.Type, next.TTLDays = old.name, old.kind, int(old.ttlDays)
	if req != nil {
		next.Values = req.Values
		if req.TTLDays != 0 {
			next.TTLDays = req.TTLDays
		}
	}
	r := newRecord(p.Tenant, old.id, old.version+1, old.createdAt, now, next)
	if err := r.seal(keys, next.Values); err != nil {
		return Credential{}, err
	}
	made := r.event(what, p)
	err = v.store.Update(ctx, func(tx store.Tx) error {
		if err := v.replace(tx, old, r, what); err != nil {
			return err
		}
		if req != nil { // the values that a request was remembered by are gone
			if err := tx.Delete(requestKey(p.Tenant, r.id)); err != nil {
				return err
			}
		}
		return v.append(tx, made)
	})
	if err != nil {
		return Credential{}, fmt.Errorf("changing a credential: %w", err)
	}
	return r.credential(now, false), nil
}

func (v *Vault) deny(ctx context.Context, e audit.Event) error {
	if err := v.guard.Record(ctx, e); err != nil {
		return err
	}
	return errDenied
}

// Delete removes a credential, expired or not, with its ciphertext. Errors:
// fault.Forbidden for all that is not there for p or belongs to an object,
// fault.Unavailable.
func (v *Vault) Delete(ctx context.Context, p authz.Principal, id string) error {
	if _, err := v.ready(ctx, p, authz.DeleteCredential); err != nil {
		return err
	}
	e := audit.Event{
		Type: audit.CredentialDeleted, Outcome: audit.Success, Principal: p,
		Resource: audit.Resource{Type: audit.CredentialResource},
	}
	if authz.ValidID(idPrefix, id) {
		e.Resource.ID = id
	}
	denied := false
	err := v.store.Update(ctx, func(tx store.Tx) error {
		e, reason := e, ""
		current, err := find(tx, p.Tenant, e.Resource.ID)
		damaged := errors.Is(err, fault.Internal) // which can be deleted like any other
		if err != nil && !damaged {
			return err
		}
		by, err := v.ownership(tx, p.Tenant, e.Resource.ID)
		if err != nil {
			return err
		}
		switch {
		case current == nil && !damaged, by.hides(p):
			reason = reasonMissing
		case by.owned && p.Kind != authz.System:
			reason = reasonOwned
		default:
			err = v.remove(tx, p.Tenant, e.Resource.ID)
		}
		if denied = reason != ""; denied {
			e.Outcome, e.Attributes = audit.Denied, map[string]string{audit.AttributeReason: reason}
		}
		return errors.Join(err, v.append(tx, e))
	})
	if err != nil {
		return fmt.Errorf("deleting a credential: %w", err)
	}
	if denied {
		return errDenied
	}
	return nil
}
