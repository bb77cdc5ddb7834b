package vault

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/vault/bounds"
	"github.com/latticekeep/latticekeep/internal/vault/details"
	"github.com/latticekeep/latticekeep/internal/vault/idempotency"
	"github.com/latticekeep/latticekeep/internal/vault/listing"
	"github.com/latticekeep/latticekeep/internal/vault/mac"
	"github.com/latticekeep/latticekeep/internal/vault/record"
)

// Seal stores a new credential. When a request with the same idempotency key made a credential
// within a day, Seal returns the answer to that request. Errors: fault.Forbidden; fault.Invalid,
// also for a key that was used with another request; fault.Unavailable.
func (v *Vault) Seal(ctx context.Context, p authz.Principal, req SealRequest) (Credential, error) {
	if err := v.guard.Authorize(ctx, p, authz.SealCredential); err != nil {
		return Credential{}, err
	}
	if err := cmp.Or(req.validate(), bounds.CheckPath(req.Name)); err != nil {
		return Credential{}, err
	}
	if err := v.guard.AuthorizePath(ctx, p, authz.SealCredential, req.Name); err != nil {
		return Credential{}, err
	}
	fp := v.idempotency.Fingerprint(p, idempotency.Request{Key: req.IdempotencyKey, Name: req.Name, Type: req.Type, TTLDays: max(0, req.ttlDays()), Values: req.Values})
	return retryConflicts(func() (Credential, error) {
		if fp != nil {
			if first, err := (attempt{v}).replay(ctx, p, fp); err != nil {
				return Credential{}, err
			} else if first != nil {
				return *first, nil
			}
		}
		return attempt{v}.seal(ctx, p, req, fp)
	})
}

func (v attempt) seal(ctx context.Context, p authz.Principal, req SealRequest, fp *idempotency.Fingerprint) (Credential, error) {
	keys, err := currentKeys(ctx, v.keys, p.Tenant)
	if err != nil {
		return Credential{}, err
	}
	now := v.now()
	r := newRecord(p.Tenant, authz.NewID(idPrefix), 1, now, now, req)
	if err := r.Seal(keys, req.Values); err != nil {
		return Credential{}, err
	}
	rows, err := v.records.newRows(r)
	if err != nil {
		return Credential{}, fmt.Errorf("encoding a credential: %w", err)
	}
	e := versionEvent(r, audit.CredentialSealed, p)
	err = v.store.Update(ctx, func(tx store.Tx) error {
		if err := v.Settings.CheckLifetime(tx, r, true); err != nil {
			return err
		}
		if err := v.idempotency.Remember(tx, fp, r, now); err != nil {
			return err
		}
		return errors.Join(mac.PutAll(tx, rows), appendEvent(v.guard, tx, e))
	})
	if err != nil {
		return Credential{}, fmt.Errorf("storing a credential: %w", err)
	}
	return listing.CredentialOf(r, now, false), nil
}

// replay returns the first answer to a request, or nil if there was none, and records that it was
// given again.
func (v attempt) replay(ctx context.Context, p authz.Principal, fp *idempotency.Fingerprint) (*Credential, error) {
	if err := v.guard.Ready(ctx); err != nil {
		return nil, err
	}
	first, err := v.idempotency.FirstAnswer(ctx, p.Tenant, fp)
	if err != nil || first == nil {
		return nil, err
	}
	err = v.guard.Record(ctx, audit.Event{
		Type: audit.CredentialListed, Outcome: audit.Success, Principal: p,
		Resource:   audit.Resource{Type: audit.CredentialResource, ID: first.ID},
		Attributes: map[string]string{"replay": "true"},
	})
	if err != nil {
		return nil, err
	}
	return &Credential{
		ID: first.ID, Name: first.Name, Type: first.Type, Version: 1,
		CreatedAt: first.SealedAt, SealedAt: first.SealedAt, ExpiresAt: first.ExpiresAt, Expired: !v.now().Before(first.ExpiresAt),
	}, nil
}

// Rotate encrypts a credential again with a new ML-KEM-768 key pair, as its next version with a
// full TTL, and deletes the old ciphertext. So it does with each kept version, which keeps its number.
// Errors: fault.Forbidden for a credential that does not
// exist for p or belongs to an object; [ErrCondition]; fault.Unavailable.
func (v *Vault) Rotate(ctx context.Context, p authz.Principal, id string, ifMatch ...Condition) (Credential, error) {
	return retryConflicts(func() (Credential, error) {
		return attempt{v}.change(ctx, p, id, edit{action: authz.RotateCredential}, ifMatch...)
	})
}

// Replace stores new values as the credential's next version, under new keys and with a full TTL,
// and deletes the old ciphertext unless a rule of the history keeps it. Errors: those of [Vault.Rotate],
// and fault.Invalid.
func (v *Vault) Replace(ctx context.Context, p authz.Principal, id string, req ReplaceRequest) (Credential, error) {
	return retryConflicts(func() (Credential, error) {
		return attempt{v}.change(ctx, p, id, edit{action: authz.ReplaceCredential, validate: req.validate, values: req.values, ttlDays: req.TTLDays}, req.IfMatch)
	})
}

// Patch stores the credential's next version with some values changed and all others kept, under new
// keys and with a full TTL. What is kept decides whether the result is valid, so Patch also needs the
// right to unseal: whoever may only write could find out keys otherwise. Errors: those of
// [Vault.Replace].
func (v *Vault) Patch(ctx context.Context, p authz.Principal, id string, req PatchRequest) (Credential, error) {
	if err := requireRead(ctx, v.guard, p, authz.ReplaceCredential); err != nil {
		return Credential{}, err
	}
	return retryConflicts(func() (Credential, error) {
		return attempt{v}.change(ctx, p, id, edit{action: authz.ReplaceCredential, validate: req.validate, values: req.values, ttlDays: req.TTLDays, reads: true}, req.IfMatch)
	})
}

// Undo stores the values of a kept version as the credential's next version, under new keys and with a
// full TTL. It also needs the right to unseal. Errors: those of [Vault.Replace], fault.Invalid also for a
// version that is not kept.
func (v *Vault) Undo(ctx context.Context, p authz.Principal, id string, version uint64, ifMatch Condition) (Credential, error) {
	if err := requireRead(ctx, v.guard, p, authz.ReplaceCredential); err != nil {
		return Credential{}, err
	}
	return retryConflicts(func() (Credential, error) {
		return attempt{v}.change(ctx, p, id, edit{action: authz.ReplaceCredential, version: version, reads: true}, ifMatch)
	})
}

// Put stores a credential under a name: the next version of the one that the name leads to, or a new
// one when there is none or it has expired. Of several puts at the same time, one makes it. What an
// object owns is never replaced, and nothing is made beside it. created tells whether the credential
// is new. Its answer tells whether there was one, so Put also needs the right to unseal. Errors:
// fault.Forbidden, also when the name leads to an object's credential; [ErrCondition]; fault.Invalid;
// fault.Unavailable.
func (v *Vault) Put(ctx context.Context, p authz.Principal, req PutRequest) (c Credential, created bool, err error) {
	if err := v.guard.Authorize(ctx, p, authz.SealCredential); err != nil {
		return Credential{}, false, err
	}
	if err := requireRead(ctx, v.guard, p, authz.SealCredential); err != nil {
		return Credential{}, false, err
	}
	if err := cmp.Or(req.validate(), bounds.CheckPath(req.Name)); err != nil {
		return Credential{}, false, err
	}
	for _, a := range []authz.Action{authz.SealCredential, authz.UnsealCredential} {
		if err := v.guard.AuthorizePath(ctx, p, a, req.Name); err != nil {
			return Credential{}, false, err
		}
	}
	c, err = retryConflicts(func() (c Credential, err error) {
		c, created, err = attempt{v}.put(ctx, p, req)
		return c, err
	})
	return c, created, err
}

// Rename gives a credential another name, as its next version with the same values under new keys. It
// expires when it would have. The caller must be allowed to change both paths, and to read the values:
// otherwise somebody could carry them to a path that he reads. Errors: fault.Forbidden for a credential that does not exist for p or belongs to an object, and for a name outside p's
// policies; fault.Invalid; [ErrTaken]; [ErrCondition]; fault.Unavailable.
func (v *Vault) Rename(ctx context.Context, p authz.Principal, id, name string, ifMatch Condition) (Credential, error) {
	if err := v.guard.Authorize(ctx, p, authz.RenameCredential); err != nil {
		return Credential{}, err
	}
	if err := cmp.Or(bounds.CheckName(name), bounds.CheckPath(name)); err != nil {
		return Credential{}, err
	}
	if err := requireRead(ctx, v.guard, p, authz.RenameCredential); err != nil {
		return Credential{}, err
	}
	if err := v.guard.AuthorizePath(ctx, p, authz.RenameCredential, name); err != nil {
		return Credential{}, err
	}
	return retryConflicts(func() (Credential, error) {
		return attempt{v}.change(ctx, p, id, edit{action: authz.RenameCredential, name: name, reads: true}, ifMatch)
	})
}

// Trash makes a credential expire now, as its next version with the same values under new keys. Its name
// is free then. Until its grace is over [Vault.Renew] brings it back, and after that it is erased. Errors:
// those of [Vault.Rotate].
func (v *Vault) Trash(ctx context.Context, p authz.Principal, id string, ifMatch Condition) (Credential, error) {
	return retryConflicts(func() (Credential, error) {
		return attempt{v}.change(ctx, p, id, edit{action: authz.TrashCredential}, ifMatch)
	})
}

// Renew starts the lifetime of a credential again, also of one that has expired or is in the trash, as
// its next version with the same values under new keys. ttlDays is 0 for as many days as it had, and may be
// [bounds.NeverExpires]. It also needs the right to unseal. Errors: those of [Vault.Rotate]; fault.Invalid; [ErrTaken] when another one
// has got the name.
func (v *Vault) Renew(ctx context.Context, p authz.Principal, id string, ttlDays int, ifMatch Condition) (Credential, error) {
	if err := requireRead(ctx, v.guard, p, authz.RenewCredential); err != nil {
		return Credential{}, err
	}
	return retryConflicts(func() (Credential, error) {
		return attempt{v}.change(ctx, p, id, edit{action: authz.RenewCredential, validate: func() error { return checkTTL(ttlDays) }, ttlDays: ttlDays, reads: true}, ifMatch)
	})
}

// Describe changes what is said of a credential, and neither its version nor its values. Errors:
// fault.Forbidden for a credential that does not exist for p, has expired or belongs to an object;
// fault.Invalid; fault.Conflict beside an earlier release; fault.Unavailable.
func (v *Vault) Describe(ctx context.Context, p authz.Principal, id string, c details.Change) (Credential, error) {
	if err := v.guard.Authorize(ctx, p, authz.DescribeCredential); err != nil {
		return Credential{}, err
	}
	ready, err := v.DetailsReady.All(ctx)
	switch {
	case err != nil:
		return Credential{}, err
	case !ready:
		err := v.guard.RecordAttempt(ctx, p, authz.DescribeCredential, audit.Denied, reasonReplicas)
		return Credential{}, cmp.Or(err, errDetailsReplicas)
	}
	return retryConflicts(func() (Credential, error) { return attempt{v}.describe(ctx, p, id, c) })
}

// requireRead refuses an action, before anything is looked up, to a caller that may not unseal.
func requireRead(ctx context.Context, g *guard.Guard, p authz.Principal, a authz.Action) error {
	if mayRead(p) {
		return nil
	}
	err := g.RecordAttempt(ctx, p, a, audit.Denied, string(cmp.Or(p.Denies(a), authz.MissingScope)))
	return cmp.Or(err, errDenied)
}

// edit says what the next version of a credential has. The zero value of a field keeps what there is.
type edit struct {
	action   authz.Action
	validate func() error // before anything is looked up; nil for nothing to validate
	values   func(current map[string]secret.Bytes) (map[string]secret.Bytes, error)
	ttlDays  int
	name     string // a new name renews nothing: it keeps the time at which the credential expires
	reads    bool   // takes the right to read the credential, too
	version  uint64 // version whose values it gets; 0 for none
}

// change stores the next version of a credential. It opens the old version in every case, because it
// signs the old metadata again and must verify it first.
func (v attempt) change(ctx context.Context, p authz.Principal, id string, to edit, ifMatch ...Condition) (Credential, error) {
	change := audit.CredentialReencrypted
	if to.values != nil || to.version != 0 {
		change = audit.CredentialRotated
	}
	keys, err := v.ready(ctx, p, to.action)
	if err != nil {
		return Credential{}, err
	}
	if to.validate != nil {
		if err := to.validate(); err != nil {
			return Credential{}, err
		}
	}
	which := byID(to.action, id)
	if to.action == authz.RenewCredential {
		which.until = v.Lifetimes.Until
	}
	found, err := v.open(ctx, keys, p, which)
	if err != nil {
		return Credential{}, err
	}
	defer secret.ZeroAll(found.values)
	if to.reads && found.record != nil && !p.Reaches(authz.UnsealCredential, found.record.Name) {
		found.record, found.outside = nil, true
	}
	now := v.now()
	e := found.event(change, p, now)
	if e.Outcome == audit.Success && found.owned {
		e.Outcome, e.Attributes[audit.AttributeReason] = audit.Denied, reasonOwned
	}
	if e.Outcome != audit.Success {
		return Credential{}, recordAccess(ctx, v.guard, e)
	}
	if !record.AllHold(ifMatch, found.id, found.record.Version) { // the commit stores nothing on top of another version
		refused := failCondition(mayReadAt(p, found.record.Name), &e)
		return Credential{}, cmp.Or(v.guard.Record(ctx, e), refused)
	}
	old, next := found.record, SealRequest{Values: found.values}
	switch {
	case to.version != 0:
		next.Values, err = v.earlierValues(ctx, keys, p, old.ID, to.version, e)
		defer secret.ZeroAll(next.Values)
	case to.values != nil:
		next.Values, err = to.values(found.values)
	}
	if err != nil {
		return Credential{}, err
	}
	next.Name, next.Type, next.TTLDays = cmp.Or(to.name, old.Name), old.Type, cmp.Or(to.ttlDays, old.Days())
	r := newRecord(p.Tenant, old.ID, old.Version+1, old.CreatedAt, now, next)
	switch {
	case to.name != "":
		r.ExpiresAt = old.ExpiresAt
	case to.action == authz.TrashCredential:
		r.ExpiresAt = r.SealedAt
	}
	if err := r.Seal(keys, next.Values); err != nil {
		return Credential{}, err
	}
	// A lifetime that goes on stays as it is. One that begins, and one at another path, must be allowed.
	begins := to.ttlDays != 0 || to.name != "" || to.action == authz.RenewCredential
	var again []*record.Record // kept versions under new keys
	if to.action == authz.RotateCredential {
		if again, err = v.reencrypted(ctx, keys, old, e); err != nil {
			return Credential{}, err
		}
	}
	changed := versionEvent(r, change, p)
	if to.version != 0 {
		changed.Attributes[attributeUndo] = strconv.FormatUint(to.version, 10)
	}
	if len(again) > 0 {
		changed.Attributes[attributeEncrypted] = strconv.Itoa(len(again))
	}
	prepare := func(store.Tx) error { return nil }
	switch {
	case to.name != "":
		changed.Attributes[audit.AttributeRenamed] = "true"
		prepare = v.isFree(p, r, now)
	case to.action == authz.TrashCredential:
		changed.Attributes[audit.AttributeTrashed] = "true"
		prepare = func(tx store.Tx) error { return tx.Delete(idempotency.RequestKey(p.Tenant, id)) }
	case to.action == authz.RenewCredential:
		changed.Attributes[attributeRenewed] = "true"
		if !now.Before(old.Until()) {
			prepare = v.isFree(p, r, now)
		}
	}
	err = v.store.Update(ctx, func(tx store.Tx) error {
		if err := v.Settings.CheckLifetime(tx, r, begins); err != nil {
			return err
		}
		if err := prepare(tx); err != nil {
			return err
		}
		return errors.Join(v.records.replace(tx, old, r, change), v.records.kept.PutAgain(tx, again), appendEvent(v.guard, tx, changed))
	})
	if errors.Is(err, ErrTaken) {
		e.Outcome, e.Attributes = audit.Denied, map[string]string{audit.AttributeReason: reasonTaken}
		return Credential{}, cmp.Or(v.guard.Record(ctx, e), ErrTaken)
	}
	if err != nil {
		return Credential{}, fmt.Errorf("changing a credential: %w", refuseChanged(ctx, v.guard, changed, err))
	}
	return listing.CredentialOf(r, now, false), nil
}

// Delete removes a credential, expired or not, with its ciphertext. Errors: fault.Forbidden for a
// credential that does not exist for p or belongs to an object; [ErrCondition]; fault.Unavailable.
func (v *Vault) Delete(ctx context.Context, p authz.Principal, id string, ifMatch ...Condition) error {
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
	var refused error
	err := v.store.Update(ctx, func(tx store.Tx) error {
		refused = nil
		e, reason := e, ""
		current, err := record.Find(tx, p.Tenant, e.Resource.ID)
		damaged := errors.Is(err, fault.Internal) // a damaged credential can be deleted like any other
		if err != nil && !damaged {
			return err
		}
		by, err := v.records.owners.of(tx, p.Tenant, e.Resource.ID)
		if err != nil {
			return err
		}
		switch {
		case current != nil && !p.Reaches(authz.DeleteCredential, current.Name):
			reason = string(authz.OutsidePolicy)
		case current == nil && (!damaged || p.Access.IsLimited()), by.hides(p):
			reason = reasonMissing
		case by.owned && p.Kind != authz.System:
			reason = reasonOwned
		case !record.AllHold(ifMatch, e.Resource.ID, versionOf(current)):
			refused = failCondition(!damaged && v.now().Before(current.Until()) && mayReadAt(p, current.Name), &e)
		default:
			err = v.records.Remove(tx, p.Tenant, e.Resource.ID)
		}
		if reason != "" {
			refused = errDenied
			e.Outcome, e.Attributes = audit.Denied, map[string]string{audit.AttributeReason: reason}
		}
		return errors.Join(err, appendEvent(v.guard, tx, e))
	})
	if err != nil {
		return fmt.Errorf("deleting a credential: %w", refuseChanged(ctx, v.guard, e, err))
	}
	return refused
}

// versionOf returns the version of a record, and 0, which no credential has, for none.
func versionOf(r *record.Record) uint64 {
	if r == nil {
		return 0
	}
	return r.Version
}
