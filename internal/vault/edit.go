package vault

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/vault/bounds"
	"github.com/latticekeep/latticekeep/internal/vault/details"
	"github.com/latticekeep/latticekeep/internal/vault/listing"
	"github.com/latticekeep/latticekeep/internal/vault/mac"
	"github.com/latticekeep/latticekeep/internal/vault/record"
)

// PatchRequest asks for changes of some values of a credential.
type PatchRequest struct {
	Set     map[string]secret.Bytes
	Remove  []string // keys; those that the credential does not have change nothing
	TTLDays int      // 0 keeps the credential's current TTL; [bounds.NeverExpires]
	IfMatch Condition
}

func (req PatchRequest) validate() error {
	return checkTTL(req.TTLDays)
}

// values returns the current values with the changes. It shares the bytes of both.
func (req PatchRequest) values(current map[string]secret.Bytes) (map[string]secret.Bytes, error) {
	next := maps.Clone(current)
	for _, key := range req.Remove {
		delete(next, key)
	}
	maps.Copy(next, req.Set)
	if len(next) == 0 {
		return nil, fault.New(fault.Invalid, "the patch leaves no value: set one, or delete the credential")
	}
	return next, bounds.CheckValues(next)
}

// isFree returns a check for the transaction that stores r: no other active credential has its name.
func (v attempt) isFree(p authz.Principal, r *record.Record, now time.Time) func(store.Tx) error {
	if !mayReadAt(p, r.Name) {
		return func(store.Tx) error { return nil }
	}
	query := v.records.names.Query(p, r.Name, now)
	return func(rd store.Tx) error {
		id, err := v.records.names.Find(rd, query)
		if err != nil || id == "" || id == r.ID {
			return err
		}
		other, err := record.Find(rd, p.Tenant, id)
		if err == nil && other != nil && now.Before(other.Until()) {
			err = ErrTaken
		}
		return err
	}
}

var errDetailsReplicas = fault.New(fault.Conflict, "a replica of an earlier release still runs, which would leave details behind: end it first")

func (v attempt) describe(ctx context.Context, p authz.Principal, id string, c details.Change) (Credential, error) {
	if _, err := v.ready(ctx, p, authz.DescribeCredential); err != nil {
		return Credential{}, err
	}
	if err := c.Validate(); err != nil {
		return Credential{}, err
	}
	found, err := v.look(ctx, p, byID(authz.DescribeCredential, id), nil)
	if err != nil {
		return Credential{}, err
	}
	now := v.now()
	e := found.event(audit.CredentialDescribed, p, now)
	if e.Outcome == audit.Success && found.owned {
		e.Outcome, e.Attributes[audit.AttributeReason] = audit.Denied, reasonOwned
	}
	if e.Outcome != audit.Success {
		return Credential{}, recordAccess(ctx, v.guard, e)
	}
	described := listing.CredentialOf(found.record, now, false)
	err = v.store.Update(ctx, func(tx store.Tx) error {
		current, err := record.Find(tx, p.Tenant, found.id)
		by, err2 := v.records.owners.of(tx, p.Tenant, found.id)
		if err = errors.Join(err, err2); err != nil || current == nil || current.Version != found.record.Version || by.owned {
			return errors.Join(err, errMoved)
		}
		if described.Details, err = v.records.details.Change(tx, p.Tenant, found.id, c); err != nil {
			return err
		}
		done := e
		done.Attributes = v.records.details.Attributes(p.Tenant, found.id, described.Details)
		return appendEvent(v.guard, tx, done)
	})
	if isDamaged(err) {
		e.Outcome, e.Attributes = audit.Failure, map[string]string{audit.AttributeReason: reasonIntegrity}
		return Credential{}, recordAccess(ctx, v.guard, e)
	}
	if err != nil {
		return Credential{}, fmt.Errorf("describing a credential: %w", err)
	}
	return described, nil
}

// PutRequest asks that a name leads to these values.
type PutRequest struct {
	SealRequest // without an idempotency key: the same request can be repeated
	IfMatch     Condition
	IfNoneMatch bool // only while no active credential has the name: "*" of RFC 9110 §13.1.2

	// Creates says that the caller may only make a credential, and not replace one.
	Creates bool
}

func (v attempt) put(ctx context.Context, p authz.Principal, req PutRequest) (c Credential, created bool, err error) {
	keys, err := v.ready(ctx, p, authz.SealCredential)
	if err != nil {
		return Credential{}, false, err
	}
	now := v.now()
	query := v.records.names.Query(p, req.Name, now)
	find := func(rd store.Reader) (string, error) { return v.records.names.Find(rd, query) }
	found, err := v.open(ctx, keys, p, finder{name: req.Name, action: authz.SealCredential, id: find})
	if err != nil {
		return Credential{}, false, err
	}
	secret.ZeroAll(found.values)
	e := found.event(audit.CredentialSealed, p, now)
	reason := e.Attributes[audit.AttributeReason]
	created = !found.owned && (reason == reasonMissing || reason == reasonExpired)
	readable := e.Outcome == audit.Success
	switch {
	case found.owned:
		e.Outcome, e.Attributes[audit.AttributeReason] = audit.Denied, reasonOwned
	case readable && req.Creates:
		e.Outcome, e.Attributes[audit.AttributeReason] = audit.Denied, string(authz.MissingScope)
	}
	switch {
	case e.Outcome != audit.Success && !created:
		return Credential{}, false, recordAccess(ctx, v.guard, e)
	case !created && req.IfNoneMatch, created && req.IfMatch != "", !created && !req.IfMatch.Holds(found.id, found.record.Version):
		refused := failCondition(readable && mayReadAt(p, req.Name), &e)
		return Credential{}, false, cmp.Or(v.guard.Record(ctx, e), refused)
	}
	begins := req.TTLDays == bounds.NeverExpires
	id, version, first, change := authz.NewID(idPrefix), uint64(1), now, audit.CredentialSealed
	if !created {
		old := found.record
		id, version, first, change = old.ID, old.Version+1, old.CreatedAt, audit.CredentialRotated
		req.TTLDays = cmp.Or(req.TTLDays, old.Days())
	}
	r := newRecord(p.Tenant, id, version, first, now, req.SealRequest)
	if err := r.Seal(keys, req.Values); err != nil {
		return Credential{}, false, err
	}
	rows, err := v.records.newRows(r)
	if err != nil {
		return Credential{}, false, fmt.Errorf("encoding a credential: %w", err)
	}
	stored := versionEvent(r, change, p)
	err = v.store.Update(ctx, func(tx store.Tx) error {
		if err := v.Settings.CheckLifetime(tx, r, begins); err != nil {
			return err
		}
		if id, err := find(tx); err != nil || id != found.id {
			return errors.Join(err, errMoved)
		}
		if created && found.record != nil { // an expired one, which may have been renewed
			now, err := record.Find(tx, p.Tenant, found.id)
			if err != nil || now == nil || now.Version != found.record.Version {
				return errors.Join(err, errMoved)
			}
		}
		if created {
			return errors.Join(mac.PutAll(tx, rows), appendEvent(v.guard, tx, stored))
		}
		return errors.Join(v.records.replace(tx, found.record, r, change), appendEvent(v.guard, tx, stored))
	})
	if err != nil {
		return Credential{}, false, fmt.Errorf("storing a credential by its name: %w", refuseChanged(ctx, v.guard, stored, err))
	}
	return listing.CredentialOf(r, now, false), created, nil
}

// Attributes of the entries of changes.
const (
	attributeRenewed   = "renewed"              // "true": the lifetime began again
	attributeUndo      = "undo_to"              // version whose values the new one has
	attributeEncrypted = "versions_reencrypted" // how many kept versions were encrypted again, too
)

// earlierValues returns the values of a version of a credential. e is the entry of the change that wants
// them. Error: fault.Invalid for a version that is not kept.
func (v attempt) earlierValues(ctx context.Context, keys *keyring.Keys, p authz.Principal, id string, version uint64, e audit.Event) (map[string]secret.Bytes, error) {
	found, err := v.open(ctx, keys, p, v.records.byVersion(p.Tenant, id, version))
	if err != nil {
		return nil, err
	}
	switch {
	case found.failed:
		e.Outcome, e.Attributes = audit.Failure, map[string]string{audit.AttributeReason: reasonIntegrity}
		return nil, recordAccess(ctx, v.guard, e)
	case found.record != nil && !v.now().Before(found.until):
		e.Outcome, e.Attributes = audit.Denied, map[string]string{audit.AttributeReason: reasonExpired}
		return nil, recordAccess(ctx, v.guard, e)
	case found.record == nil:
		return nil, fault.New(fault.Invalid, fmt.Sprintf("version %d is not kept: the list of versions says which are readable", version))
	}
	return found.values, nil
}

// reencrypted returns the kept versions of a credential under new keys. e is the entry of the change.
func (v attempt) reencrypted(ctx context.Context, keys *keyring.Keys, current *record.Record, e audit.Event) ([]*record.Record, error) {
	var all []*record.Record
	err := v.store.View(ctx, func(rd store.Reader) (err error) {
		all, err = v.records.kept.All(rd, current)
		return err
	})
	for _, r := range all {
		var values map[string]secret.Bytes
		if values, err = v.openRecord(ctx, keys, r); err == nil {
			err = r.Seal(keys, values)
			secret.ZeroAll(values)
		}
		if err != nil {
			break
		}
	}
	if isDamaged(err) {
		e.Outcome, e.Attributes = audit.Failure, map[string]string{audit.AttributeReason: reasonIntegrity}
		return nil, recordAccess(ctx, v.guard, e)
	}
	if err != nil {
		return nil, fmt.Errorf("encrypting kept versions again: %w", err)
	}
	return all, nil
}
