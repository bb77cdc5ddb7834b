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
	"strconv"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/chain"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/vault/bounds"
	"github.com/latticekeep/latticekeep/internal/vault/history"
	"github.com/latticekeep/latticekeep/internal/vault/listing"
	"github.com/latticekeep/latticekeep/internal/vault/record"
)

// Desired is the desired state of an object's credential, with its values opened.
type Desired struct {
	Name    string
	Type    string
	TTLDays int
	Values  map[string]secret.Bytes // empty for [Vault.Generate], which makes them

	SpecDigest [32]byte             // digest of all fields whose change leads to a new version
	Form       [32]byte             // digest of all fields that another object shares if it may go on with the credential
	SealedAt   map[string]time.Time // per key, when its value was sealed
	SealingKey string               // id of the key that the values were sealed for, empty if they were not sealed
	Trigger    string               // trigger of a rotation on demand
	Overlap    time.Duration        // how long the previous version stays readable after new values

	Object Object
}

func (d Desired) request() SealRequest {
	return SealRequest{Name: d.Name, Type: d.Type, TTLDays: d.TTLDays, Values: d.Values}
}

// validate refuses what no credential of an object can be. The operator renews it, so it always expires.
func (d Desired) validate() error {
	if d.TTLDays < 0 {
		return fault.New(fault.Invalid, "ttlDays must be 1 to 3650")
	}
	return d.request().validate()
}

// Owned is what the vault holds for an object. The operator uses it as its memory, and the object's
// status shows it.
type Owned struct {
	Credential
	SpecDigest      [32]byte
	ValuesChangedAt time.Time // unchanged by a rotation of the keys alone
	ValueSealedAt   map[string]time.Time
	SealingKey      string // id of the key that the values were sealed for; empty when they were not sealed
	Trigger         string
	Object          Object
	Previous        *PreviousVersion // nil when none is readable
	Audit           audit.Receipt    // entry of the current version
	AdoptedFrom     string           // UID of the object that the credential was adopted from; empty for none
	Bound           []byte           // [Desired.Form] that the values must not leave: nobody asked for the adoption; nil for any
	Missing         bool             // the credential was deleted outside the object

	row *ownerRow
}

func (o *Owned) version() uint64 {
	if o == nil {
		return 0
	}
	return o.Version
}

func (row *ownerRow) owned(c Credential) *Owned {
	o := &Owned{
		Credential: c, SpecDigest: [32]byte(row.SpecDigest), ValuesChangedAt: row.ValuesChangedAt, ValueSealedAt: row.SealedAt,
		SealingKey: row.SealingKey, Trigger: row.Trigger, Object: row.Object, AdoptedFrom: row.AdoptedFrom, row: row,
	}
	if row.Bound {
		o.Bound = row.Form
	}
	return o
}

// Owned returns what the vault holds for the object with that UID in p's tenant, or nil when it
// holds nothing. It shows no value and leaves no entry, unless somebody changed the rows. Errors:
// fault.Forbidden, fault.Unavailable.
func (v *Vault) Owned(ctx context.Context, p authz.Principal, uid string) (o *Owned, err error) {
	defer func() { err = recordChanged(ctx, v.guard, p, authz.ListCredentials, err) }()
	if err := v.guard.Authorize(ctx, p, authz.ListCredentials); err != nil {
		return nil, err
	}
	o, _, err = v.findOwned(ctx, p.Tenant, uid)
	return o, err
}

// Holds reports whether the current version of o was made from these values.
func (v *Vault) Holds(p authz.Principal, uid string, o *Owned, values map[string]secret.Bytes) bool {
	return o != nil && o.row != nil && hmac.Equal(o.row.Values, v.records.owners.hashValues(p.Tenant, uid, values))
}

// Apply stores the desired state of an object as the first or the next version of its credential.
// expect is the version that the caller saw last, 0 for none. When the vault holds another version
// by now, the error is fault.Conflict and nothing changes. Apply seals a deleted credential again
// under its id. Other errors: fault.Forbidden, fault.Invalid, fault.Unavailable.
func (v *Vault) Apply(ctx context.Context, p authz.Principal, uid string, expect uint64, d Desired) (o *Owned, err error) {
	defer func() { err = recordChanged(ctx, v.guard, p, authz.SealCredential, err) }()
	if err := v.guard.Authorize(ctx, p, authz.SealCredential); err != nil {
		return nil, err
	}
	if err := d.validate(); err != nil {
		return nil, err
	}
	before, old, err := v.findOwned(ctx, p.Tenant, uid)
	if err != nil {
		return nil, err
	}
	keys, err := currentKeys(ctx, v.keys, p.Tenant)
	if err != nil {
		return nil, err
	}
	return v.sealOwned(ctx, keys, ownedVersion{p, uid, expect, before, old, d, false})
}

// Generate is [Vault.Apply] with values that the vault makes. produce gets the values of the
// current version, expired or not, and returns the next ones. It gets nil when there is no current
// version or it is damaged. produce runs outside any transaction and must not keep its argument or
// its result, because Generate overwrites both. When produce fails, nothing changes.
func (v *Vault) Generate(
	ctx context.Context, p authz.Principal, uid string, expect uint64, d Desired,
	produce func(current map[string]secret.Bytes) (map[string]secret.Bytes, error),
) (o *Owned, err error) {
	defer func() { err = recordChanged(ctx, v.guard, p, authz.SealCredential, err) }()
	keys, err := v.ready(ctx, p, authz.SealCredential)
	if err != nil {
		return nil, err
	}
	before, old, err := v.findOwned(ctx, p.Tenant, uid)
	if err != nil {
		return nil, err
	}
	if before.version() != expect {
		return nil, errMoved // checked here too, so that no values are made for nothing
	}
	var current map[string]secret.Bytes
	if old != nil {
		current, err = v.openOwned(ctx, p, keys, old, audit.CredentialRotated)
		if errors.Is(err, fault.NotFound) {
			old, err = nil, nil
		}
		if err != nil {
			return nil, err
		}
	}
	defer secret.ZeroAll(current)
	d.Values, err = produce(current)
	defer secret.ZeroAll(d.Values)
	if err != nil {
		return nil, fmt.Errorf("making values: %w", err)
	}
	if err := d.validate(); err != nil {
		return nil, err
	}
	return v.sealOwned(ctx, keys, ownedVersion{p, uid, expect, before, old, d, keepsAny(current, d.Values)})
}

// keepsAny reports whether one of the next values is one of the current ones, under whatever key.
func keepsAny(current, next map[string]secret.Bytes) bool {
	for _, is := range current {
		for _, value := range next {
			if hmac.Equal(is, value) {
				return true
			}
		}
	}
	return false
}

// ownedVersion says what the next version of an object's credential is made from.
type ownedVersion struct {
	principal authz.Principal
	uid       string
	expect    uint64 // version before the next one
	before    *Owned // current state in the vault, nil for none
	old       *record.Record
	desired   Desired
	keeps     bool // desired has a value that the vault took from the version before
}

// sealOwned makes and stores a version of an object's credential.
func (v *Vault) sealOwned(ctx context.Context, keys *keyring.Keys, next ownedVersion) (*Owned, error) {
	p, uid, before, old, d := next.principal, next.uid, next.before, next.old, next.desired
	now := v.now().UTC().Truncate(time.Microsecond)
	row := &ownerRow{
		Version: next.expect + 1, SpecDigest: d.SpecDigest[:], Form: d.Form[:],
		Values: v.records.owners.hashValues(p.Tenant, uid, d.Values), ValuesChangedAt: now,
		SealedAt: sealingTimes(before, d), SealingKey: d.SealingKey, Trigger: d.Trigger, Object: d.Object,
	}
	changed := true
	if before == nil {
		row.Credential = authz.NewID(idPrefix)
	} else {
		row.Credential, row.AdoptedFrom = before.ID, before.AdoptedFrom
		if next.keeps && before.row.Bound {
			row.Bound, row.Form = true, before.row.Form
		}
		if changed = !hmac.Equal(before.row.Values, row.Values); !changed {
			row.ValuesChangedAt = before.row.ValuesChangedAt
		}
	}
	created, change := now, audit.CredentialSealed
	if old != nil {
		created, change = old.CreatedAt, audit.CredentialReencrypted
		if row.Previous = before.row.Previous; changed {
			change, row.Previous = audit.CredentialRotated, history.Overlap(old, d.Overlap, now)
		}
	}
	r := newRecord(p.Tenant, row.Credential, row.Version, created, now, d.request())
	if err := r.Seal(keys, d.Values); err != nil {
		return nil, err
	}
	return v.commitOwned(ctx, ownedChange{p, uid, change, old, r, row})
}

// maxSealingTimes bounds the keys in an object's row, dropped ones included.
const maxSealingTimes = 4 * bounds.MaxValues

// sealingTimes returns when the last accepted value of each key was sealed. It keeps the keys that
// the object dropped. Otherwise an old value of a dropped key could come back as the value of a new
// key.
func sealingTimes(before *Owned, d Desired) map[string]time.Time {
	all := make(map[string]time.Time)
	maps.Copy(all, d.SealedAt)
	if before == nil {
		return all
	}
	// Sorted newest first: above the bound, the oldest are dropped.
	dropped := slices.SortedFunc(maps.Keys(before.ValueSealedAt), func(a, b string) int {
		return cmp.Or(before.ValueSealedAt[b].Compare(before.ValueSealedAt[a]), cmp.Compare(a, b))
	})
	for _, key := range dropped {
		if _, used := all[key]; !used && len(all) < maxSealingTimes {
			all[key] = before.ValueSealedAt[key]
		}
	}
	return all
}

var (
	errMissing = fault.New(fault.NotFound, "the credential is not in the vault")
	errBroken  = fault.New(fault.NotFound, "the credential in the vault is damaged")
)

// Reencrypt stores the next version of the object's credential: the same values under new keys,
// with a full TTL. It also stores the trigger and keeps the previous version as it is. The error is
// fault.NotFound when the credential is missing or damaged; [Vault.Apply] repairs that. Other
// errors: those of Apply.
func (v *Vault) Reencrypt(ctx context.Context, p authz.Principal, uid string, expect uint64, trigger string) (o *Owned, err error) {
	defer func() { err = recordChanged(ctx, v.guard, p, authz.RotateCredential, err) }()
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
	defer secret.ZeroAll(values)
	r := newRecord(p.Tenant, old.ID, old.Version+1, old.CreatedAt, v.now(),
		SealRequest{Name: old.Name, Type: old.Type, TTLDays: int(old.TTLDays)})
	if err := r.Seal(keys, values); err != nil {
		return nil, err
	}
	row := *before.row
	row.Version, row.Trigger = r.Version, trigger
	return v.commitOwned(ctx, ownedChange{p, uid, audit.CredentialReencrypted, old, r, &row})
}

// UnsealOwned returns the values of a version of the object's credential for its target, after the
// read is recorded. The caller zeroes them. Errors: fault.Conflict when that version is not the
// current one; fault.NotFound when the credential is missing or damaged; fault.Forbidden, also when
// the credential has expired; fault.Unavailable.
func (v *Vault) UnsealOwned(ctx context.Context, p authz.Principal, uid string, version uint64) (values map[string]secret.Bytes, err error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	defer func() { err = recordChanged(ctx, v.guard, p, authz.UnsealCredential, err) }() // before cancel
	keys, err := v.ready(ctx, p, authz.UnsealCredential)
	if err != nil {
		return nil, err
	}
	_, r, err := v.ownedAt(ctx, p.Tenant, uid, version)
	if err != nil {
		return nil, err
	}
	values, err = v.openOwned(ctx, p, keys, r, audit.CredentialUnsealed)
	if err != nil {
		return nil, err
	}
	found := &lookup{id: r.ID, record: r, until: r.ExpiresAt}
	e := found.event(audit.CredentialUnsealed, p, v.now())
	e.Attributes["purpose"] = "target"
	if err := recordAccess(ctx, v.guard, e); err != nil {
		secret.ZeroAll(values)
		return nil, err
	}
	return values, nil
}

// findOwned returns what the vault holds for an object, and its record. The record is nil when it
// is missing, damaged or not the version that the object's row names.
func (v *Vault) findOwned(ctx context.Context, tenant authz.TenantID, uid string) (o *Owned, r *record.Record, err error) {
	now := v.now()
	err = v.store.View(ctx, func(rd store.Reader) error {
		row, err := v.records.owners.get(rd, tenant, uid)
		if err != nil || row == nil {
			return err
		}
		r, err = record.Find(rd, tenant, row.Credential)
		if errors.Is(err, fault.Internal) {
			r, err = nil, nil // a damaged credential is sealed again, like a deleted one
		}
		if err != nil {
			return err
		}
		if r == nil || r.Version != row.Version {
			r = nil
			o = row.owned(Credential{ID: row.Credential, Version: row.Version, Owned: true})
			o.Missing = true
			return nil
		}
		o = row.owned(listing.CredentialOf(r, now, true))
		if o.Audit, err = chain.Current(rd, tenant, row.Credential); err != nil {
			return err
		}
		o.Previous, err = row.Previous.Find(rd, tenant, row.Credential, now)
		return err
	})
	if err != nil {
		return nil, nil, fmt.Errorf("reading what an object owns: %w", err)
	}
	return o, r, nil
}

// ownedAt is findOwned for an operation on a version that must exist.
func (v *Vault) ownedAt(ctx context.Context, tenant authz.TenantID, uid string, version uint64) (*Owned, *record.Record, error) {
	o, r, err := v.findOwned(ctx, tenant, uid)
	switch {
	case err != nil:
		return nil, nil, err
	case r == nil:
		return nil, nil, errMissing
	case o.Version != version:
		return nil, nil, errMoved
	}
	return o, r, nil
}

// openOwned opens an object's record. For a damaged record it records a failure of change, the
// event of the operation that needs the values, and returns fault.NotFound. The credential must
// then be sealed again.
func (v *Vault) openOwned(ctx context.Context, p authz.Principal, keys *keyring.Keys, r *record.Record, change audit.EventType) (map[string]secret.Bytes, error) {
	values, err := v.openRecord(ctx, keys, r)
	if !errors.Is(err, fault.Internal) {
		return values, err
	}
	err = v.guard.Record(ctx, audit.Event{
		Type: change, Outcome: audit.Failure, Principal: p,
		Resource:   audit.Resource{Type: audit.CredentialResource, ID: r.ID},
		Attributes: map[string]string{audit.AttributeReason: reasonIntegrity},
	})
	if err != nil {
		return nil, err
	}
	return nil, errBroken
}

// ownedChange is a change of an object's credential that is ready to be stored.
type ownedChange struct {
	principal authz.Principal
	uid       string
	change    audit.EventType
	old       *record.Record // record that next was made from, nil when it is missing or lost
	next      *record.Record
	row       *ownerRow
}

// commitOwned stores c in one transaction. It checks that the version before c.next is still the
// current one, replaces the credential's record and the object's row, keeps or ends the previous
// version, and records the change.
func (v *Vault) commitOwned(ctx context.Context, c ownedChange) (*Owned, error) {
	p, uid, r, row := c.principal, c.uid, c.next, c.row
	var replaced []byte
	if c.old != nil {
		replaced = c.old.Encode()
	}
	e := versionEvent(r, c.change, p)
	keeps := c.change == audit.CredentialRotated && row.Previous != nil
	if keeps {
		e.Attributes[audit.AttributeOverlapUntil] = row.Previous.Until.Format(time.RFC3339Nano)
	}
	var receipt *audit.Receipt
	err := v.store.Update(ctx, func(tx store.Tx) error {
		current, err := v.records.owners.get(tx, p.Tenant, uid)
		if err != nil {
			return err
		}
		if current.version() != r.Version-1 || (current != nil && current.Credential != r.ID) {
			return errMoved
		}
		if c.old != nil { // a credential deleted meanwhile must not return as r or as its previous version
			stored, err := tx.Get(record.Key(p.Tenant, c.old.ID, c.old.Version))
			if err != nil {
				return err
			}
			if !bytes.Equal(stored, replaced) {
				return errMoved
			}
		}
		if c.change != audit.CredentialReencrypted && current != nil {
			if err := deletePrevious(tx, p.Tenant, uid, current); err != nil {
				return err
			}
		}
		if keeps {
			if err := row.Previous.Put(tx, p.Tenant, uid, row.Credential, replaced); err != nil {
				return err
			}
		}
		if err := v.records.put(tx, r, c.change, &row.Object); err != nil {
			return err
		}
		if receipt, err = v.guard.Append(tx, e); err != nil {
			return err
		}
		return v.records.owners.put(tx, p.Tenant, uid, row)
	})
	if err != nil {
		return nil, fmt.Errorf("storing an object's credential: %w", err)
	}
	now := v.now()
	o := row.owned(listing.CredentialOf(r, now, true))
	if o.Audit = *receipt; row.Previous.Readable(now) {
		o.Previous = &PreviousVersion{Version: row.Previous.Version, Until: row.Previous.Until}
	}
	return o, nil
}

// Release ends the ownership of an object that is being deleted. With deleteEntry it also deletes
// the credential. Otherwise the credential stays, and can be changed over REST or go on with another
// object ([Vault.Adopt]) from then on. form is that of the last accepted spec; a zero form stands for
// the one of the current version. A bound object leaves the form that it is bound to. The previous
// version ends in both cases. Releasing an object that owns nothing is not an error; released tells
// the caller that changed something.
func (v *Vault) Release(ctx context.Context, p authz.Principal, uid string, form [32]byte, deleteEntry bool) (released bool, err error) {
	defer func() { err = recordChanged(ctx, v.guard, p, authz.DeleteCredential, err) }()
	if err := v.guard.Authorize(ctx, p, authz.DeleteCredential); err != nil {
		return false, err
	}
	err = v.store.Update(ctx, func(tx store.Tx) error {
		row, err := v.records.owners.get(tx, p.Tenant, uid)
		if released = row != nil; err != nil || row == nil {
			return err
		}
		e := audit.Event{
			Type: audit.CredentialReleased, Outcome: audit.Success, Principal: p,
			Resource:   audit.Resource{Type: audit.CredentialResource, ID: row.Credential},
			Attributes: map[string]string{audit.AttributeVersion: strconv.FormatUint(row.Version, 10)},
		}
		current, err := record.Find(tx, p.Tenant, row.Credential)
		if err != nil && !errors.Is(err, fault.Internal) {
			return err
		}
		if deleteEntry && (current != nil || err != nil) {
			e.Type = audit.CredentialDeleted
			if err := v.records.Remove(tx, p.Tenant, row.Credential); err != nil {
				return err
			}
		} else if err := v.records.disown(tx, p.Tenant, row.Credential, current); err != nil {
			return err
		}
		if err := appendEvent(v.guard, tx, e); err != nil {
			return err
		}
		if e.Type == audit.CredentialReleased && current != nil {
			if form != ([32]byte{}) && !row.Bound {
				row.Form = form[:]
			}
			if err := v.records.owners.putReleased(tx, p.Tenant, uid, row); err != nil {
				return err
			}
		}
		return v.records.owners.end(tx, p.Tenant, uid, row)
	})
	if err != nil {
		return false, fmt.Errorf("releasing an object's credential: %w", err)
	}
	return released, nil
}

// SealingKeyUse returns, for each id of a sealing key, how many objects of all tenants hold values
// that were sealed for it. The deployment calls it. Damaged, changed and removed rows are an error,
// because the keys that they need are unknown.
func (v *Vault) SealingKeyUse(ctx context.Context) (map[string]int, error) {
	use := make(map[string]int)
	damaged := 0
	err := v.records.owners.visit(ctx, v.store, func(_ authz.TenantID, _ string, row *ownerRow) {
		switch {
		case row == nil:
			damaged++
		case row.SealingKey != "":
			use[row.SealingKey]++
		}
	})
	if err == nil && damaged > 0 {
		err = fmt.Errorf("%d rows of what objects own: %w", damaged, record.ErrDamaged)
	}
	return use, err
}
