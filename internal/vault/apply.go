package vault

import (
	"bytes"
	"cmp"
	"context"
	"crypto/hmac"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Desired is what a SealedCredential asks for, its values opened.
type Desired struct {
	Name    string
	Type    string
	TTLDays int
	Values  map[string]secret.Bytes // [Vault.Generate] has them made

	SpecDigest [32]byte             // over all that must lead to a new version when it changes
	SealedAt   map[string]time.Time // per key, when its value was sealed
	SealingKey string               // id of the key that the values were sealed for, if they were
	Trigger    string               // of a rotation on demand
	Overlap    time.Duration        // how long the former version stays readable once the values change

	Object Object // who asks
}

func (d Desired) request() SealRequest {
	return SealRequest{Name: d.Name, Type: d.Type, TTLDays: d.TTLDays, Values: d.Values}
}

// Apply makes the vault hold what the object asks for: a first version, or the
// next one. expect is the version last seen, 0 for none; when the vault has
// moved on meanwhile the error is fault.Conflict and nothing changed. A
// credential that was deleted is sealed again under its id. Other errors:
// fault.Forbidden, fault.Invalid, fault.Unavailable.
func (v *Vault) Apply(ctx context.Context, p authz.Principal, uid string, expect uint64, d Desired) (*Owned, error) {
	if err := v.guard.Authorize(ctx, p, authz.SealCredential); err != nil {
		return nil, err
	}
	if err := d.request().validate(); err != nil {
		return nil, err
	}
	before, old, err := v.owned(ctx, p.Tenant, uid)
	if err != nil {
		return nil, err
	}
	keys, err := v.current(ctx, p.Tenant)
	if err != nil {
		return nil, err
	}
	return v.sealOwned(ctx, p, keys, uid, expect, before, old, d)
}

// Generate is [Vault.Apply] of values that are made here: produce gets those of
// the current version, expired or not, or nil when there is none or it is
// damaged, and returns the next ones. It runs outside any transaction and keeps
// nothing: what it was given and what it returned is overwritten. When it
// fails, nothing has happened.
func (v *Vault) Generate(
	ctx context.Context, p authz.Principal, uid string, expect uint64, d Desired,
	produce func(former map[string]secret.Bytes) (map[string]secret.Bytes, error),
) (*Owned, error) {
	keys, err := v.ready(ctx, p, authz.SealCredential)
	if err != nil {
		return nil, err
	}
	before, old, err := v.owned(ctx, p.Tenant, uid)
	if err != nil {
		return nil, err
	}
	if before.version() != expect {
		return nil, errMoved // before values are made that nobody will have
	}
	var former map[string]secret.Bytes
	if old != nil {
		former, err = v.openOwned(ctx, p, keys, old, audit.CredentialRotated)
		if errors.Is(err, fault.NotFound) {
			old, err = nil, nil
		}
		if err != nil {
			return nil, err
		}
	}
	defer zero(former)
	d.Values, err = produce(former)
	defer zero(d.Values)
	if err != nil {
		return nil, fmt.Errorf("making values: %w", err)
	}
	if err := d.request().validate(); err != nil {
		return nil, err
	}
	return v.sealOwned(ctx, p, keys, uid, expect, before, old, d)
}

// sealOwned makes the version that follows expect. old is the record of the one
// before, nil when there is none or it is lost.
func (v *Vault) sealOwned(ctx context.Context, p authz.Principal, keys *keyring.Keys, uid string, expect uint64, before *Owned, old *record, d Desired) (*Owned, error) {
	now := v.now().UTC().Truncate(time.Microsecond)
	row := &ownedRow{
		Version: expect + 1, SpecDigest: d.SpecDigest[:], Values: v.hashValues(p.Tenant, uid, d.Values), ValuesChangedAt: now,
		SealedAt: accepted(before, d), SealingKey: d.SealingKey, Trigger: d.Trigger, Object: d.Object,
	}
	changed := true
	if before == nil {
		row.Credential = authz.NewID(idPrefix)
	} else {
		row.Credential = before.ID
		if changed = !hmac.Equal(before.row.Values, row.Values); !changed {
			row.ValuesChangedAt = before.row.changedAt()
		}
	}
	created, what := now, audit.CredentialSealed
	if old != nil {
		created, what = old.createdAt, audit.CredentialReencrypted
		if row.Former = before.row.Former; changed {
			what, row.Former = audit.CredentialRotated, formerOf(old, d.Overlap, now)
		}
	}
	r := newRecord(p.Tenant, row.Credential, row.Version, created, now, d.request())
	if err := r.seal(keys, d.Values); err != nil {
		return nil, err
	}
	return v.commitOwned(ctx, p, uid, old, r, what, row)
}

// maxAccepted bounds how many keys that are no longer used are remembered.
const maxAccepted = 4 * MaxValues

// accepted returns when the last accepted value of each key was sealed. A key
// that the object dropped is remembered, so that an old value of it cannot
// come back as if the key were new.
func accepted(before *Owned, d Desired) map[string]time.Time {
	all := make(map[string]time.Time)
	maps.Copy(all, d.SealedAt)
	if before == nil {
		return all
	}
	// Newest first: what is forgotten when there are too many is the oldest.
	dropped := slices.SortedFunc(maps.Keys(before.ValueSealedAt), func(a, b string) int {
		return cmp.Or(before.ValueSealedAt[b].Compare(before.ValueSealedAt[a]), cmp.Compare(a, b))
	})
	for _, key := range dropped {
		if _, used := all[key]; !used && len(all) < maxAccepted {
			all[key] = before.ValueSealedAt[key]
		}
	}
	return all
}

var (
	errNotThere = fault.New(fault.NotFound, "the credential is not in the vault")
	errNotWhole = fault.New(fault.NotFound, "the credential in the vault is damaged")
)

// Reencrypt gives the object's credential new keys and a full TTL around the
// same values, as its next version, and remembers the trigger. A former version
// stays as it is. Errors: fault.NotFound when there is nothing to encrypt anew,
// which [Vault.Apply] mends; otherwise those of Apply.
func (v *Vault) Reencrypt(ctx context.Context, p authz.Principal, uid string, expect uint64, trigger string) (*Owned, error) {
	keys, err := v.ready(ctx, p, authz.RotateCredential)
	if err != nil {
		return nil, err
	}
	before, old, err := v.ownedAt(ctx, p.Tenant, uid, expect)
	if err != nil {
		return nil, err
	}
	values, err := v.openOwned(ctx, p, keys, old, audit.CredentialReencrypted)
	if err != nil {
		return nil, err
	}
	defer zero(values)
	r := newRecord(p.Tenant, old.id, old.version+1, old.createdAt, v.now(),
		SealRequest{Name: old.name, Type: old.kind, TTLDays: int(old.ttlDays)})
	if err := r.seal(keys, values); err != nil {
		return nil, err
	}
	row := *before.row
	row.Version, row.Trigger = r.version, trigger
	return v.commitOwned(ctx, p, uid, old, r, audit.CredentialReencrypted, &row)
}

// UnsealOwned returns the values of a version of the object's credential, for
// its target, once the read is recorded. The caller zeroes them. Errors:
// fault.Conflict when that version is not the current one, fault.NotFound when
// the credential is missing or damaged, fault.Forbidden also when it has
// expired, fault.Unavailable.
func (v *Vault) UnsealOwned(ctx context.Context, p authz.Principal, uid string, version uint64) (map[string]secret.Bytes, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	keys, err := v.ready(ctx, p, authz.UnsealCredential)
	if err != nil {
		return nil, err
	}
	_, r, err := v.ownedAt(ctx, p.Tenant, uid, version)
	if err != nil {
		return nil, err
	}
	values, err := v.openOwned(ctx, p, keys, r, audit.CredentialUnsealed)
	if err != nil {
		return nil, err
	}
	found := &lookup{id: r.id, record: r, until: r.expiresAt}
	e := found.event(audit.CredentialUnsealed, p, v.now())
	e.Attributes["purpose"] = "target"
	if err := v.guard.Record(ctx, e); err != nil {
		zero(values)
		return nil, err
	}
	if e.Outcome != audit.Success {
		zero(values)
		return nil, errDenied
	}
	return values, nil
}

// ownedAt is owned for an operation on a version that must be there.
func (v *Vault) ownedAt(ctx context.Context, tenant authz.TenantID, uid string, version uint64) (*Owned, *record, error) {
	o, r, err := v.owned(ctx, tenant, uid)
	switch {
	case err != nil:
		return nil, nil, err
	case r == nil:
		return nil, nil, errNotThere
	case o.Version != version:
		return nil, nil, errMoved
	}
	return o, r, nil
}

// openOwned opens an object's record. A damaged one is recorded as a failure of
// what was to be done with it, and is fault.NotFound: it has to be made again.
func (v *Vault) openOwned(ctx context.Context, p authz.Principal, keys *keyring.Keys, r *record, what audit.EventType) (map[string]secret.Bytes, error) {
	values, err := v.openRecord(ctx, keys, r)
	if !errors.Is(err, fault.Internal) {
		return values, err
	}
	err = v.guard.Record(ctx, audit.Event{
		Type: what, Outcome: audit.Failure, Principal: p,
		Resource:   audit.Resource{Type: audit.CredentialResource, ID: r.id},
		Attributes: map[string]string{audit.AttributeReason: reasonIntegrity},
	})
	if err != nil {
		return nil, err
	}
	return nil, errNotWhole
}

// commitOwned compares with the version before r, replaces the credential's
// record by r and the object's row by row, keeps or ends the former version,
// and records it: one transaction. old is the record that r was made from, nil
// when there is none.
func (v *Vault) commitOwned(ctx context.Context, p authz.Principal, uid string, old, r *record, what audit.EventType, row *ownedRow) (*Owned, error) {
	var replaced []byte
	if old != nil {
		replaced = old.encode()
	}
	e := r.event(what, p)
	keeps := what == audit.CredentialRotated && row.Former != nil
	if keeps {
		e.Attributes[audit.AttributeOverlapUntil] = row.Former.Until.Format(time.RFC3339Nano)
	}
	var receipt *audit.Receipt
	err := v.store.Update(ctx, func(tx store.Tx) error {
		current, err := v.getOwned(tx, p.Tenant, uid)
		if err != nil {
			return err
		}
		if current.version() != r.version-1 || (current != nil && current.Credential != r.id) {
			return errMoved
		}
		if old != nil { // what was deleted meanwhile does not come back, neither as r nor as its former version
			stored, err := tx.Get(recordKey(p.Tenant, old.id, old.version))
			if err != nil {
				return err
			}
			if !bytes.Equal(stored, replaced) {
				return errMoved
			}
		}
		if what != audit.CredentialReencrypted && current != nil {
			if err := dropFormer(tx, p.Tenant, uid, current); err != nil {
				return err
			}
		}
		if keeps {
			if err := keepFormer(tx, p.Tenant, uid, row, replaced); err != nil {
				return err
			}
		}
		if err := v.put(tx, r, what, &row.Object); err != nil {
			return err
		}
		if receipt, err = v.guard.Append(tx, e); err != nil {
			return err
		}
		return v.putOwned(tx, p.Tenant, uid, row)
	})
	if err != nil {
		return nil, fmt.Errorf("storing an object's credential: %w", err)
	}
	now := v.now()
	o := row.owned(r.credential(now, true))
	if o.Audit = *receipt; row.Former.readable(now) {
		o.Former = &Former{row.Former.Version, row.Former.Until}
	}
	return o, nil
}

func (o *Owned) version() uint64 {
	if o == nil {
		return 0
	}
	return o.Version
}

func (row *ownedRow) version() uint64 {
	if row == nil {
		return 0
	}
	return row.Version
}
