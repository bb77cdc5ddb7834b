package vault

import (
	"context"
	"crypto/hmac"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Object is where a SealedCredential stands. Together with its UID it can be
// found again, or found to be gone.
type Object struct {
	Cluster   string `json:"cluster"` // UID
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
}

// Owned is what the vault holds for an object. It is the operator's memory:
// the object's status only shows it.
type Owned struct {
	Credential
	SpecDigest      [32]byte
	ValuesChangedAt time.Time // as opposed to the keys around them
	ValueSealedAt   map[string]time.Time
	SealingKey      string // id of the key that the values were sealed for; empty when they were not
	Trigger         string
	Object          Object
	Former          *Former       // nil when none is readable
	Audit           audit.Receipt // entry of the current version
	Missing         bool          // the credential was deleted behind the operator's back

	row *ownedRow
}

// ownedRow is [Owned] as it is stored, under the object's UID.
type ownedRow struct {
	Credential      string               `json:"credential"`
	Version         uint64               `json:"version"`
	SpecDigest      []byte               `json:"spec_digest"`
	Values          []byte               `json:"values,omitempty"` // keyed hash; a release before wrote none
	ValuesChangedAt time.Time            `json:"values_changed_at,omitzero"`
	SealedAt        map[string]time.Time `json:"sealed_at"`
	SealingKey      string               `json:"sealing_key,omitempty"`
	Trigger         string               `json:"trigger"`
	Object          Object               `json:"object"`
	Former          *formerRow           `json:"former,omitempty"`
}

// changedAt returns when the values changed last. Where a release before did
// not write that down it is when the newest of them was sealed.
func (row *ownedRow) changedAt() (at time.Time) {
	if !row.ValuesChangedAt.IsZero() {
		return row.ValuesChangedAt
	}
	for _, sealed := range row.SealedAt {
		if sealed.After(at) {
			at = sealed
		}
	}
	return at
}

// hashValues tells whether values are the same, whatever they were sealed
// with, and nothing to who has not the deployment's keys.
func (v *Vault) hashValues(tenant authz.TenantID, uid string, values map[string]secret.Bytes) []byte {
	fields := [][]byte{[]byte(tenant), []byte(uid)}
	for _, key := range slices.Sorted(maps.Keys(values)) {
		fields = append(fields, []byte(key), values[key])
	}
	return v.keyedHash("latticekeep/owned-values/v1", fields...)
}

// Holds reports whether the current version that o speaks of was made of these
// values.
func (v *Vault) Holds(p authz.Principal, uid string, o *Owned, values map[string]secret.Bytes) bool {
	return o != nil && o.row != nil && hmac.Equal(o.row.Values, v.hashValues(p.Tenant, uid, values))
}

func ownedKey(tenant authz.TenantID, uid string) []byte {
	return []byte("owned/" + string(tenant) + "/" + uid)
}

func (v *Vault) getOwned(rd store.Reader, tenant authz.TenantID, uid string) (*ownedRow, error) {
	key := ownedKey(tenant, uid)
	b, err := rd.Get(key)
	if err != nil || b == nil {
		return nil, err
	}
	return v.decodeOwned(key, b)
}

func (v *Vault) decodeOwned(key, stored []byte) (*ownedRow, error) {
	b, err := v.keys.OpenRow(key, stored)
	if err != nil {
		return nil, err
	}
	var row ownedRow
	if err := json.Unmarshal(b, &row); err != nil || len(row.SpecDigest) != 32 {
		return nil, errDamaged
	}
	return &row, nil
}

// ownership is what is known of the object that owns a credential.
type ownership struct {
	owned   bool
	row     *ownedRow // of the object; nil when no object owns it, or the row does not say so
	damaged bool      // the row
}

// hides reports whether what is owned is not there for p: an object's credential
// never is for a ServiceAccount of another namespace.
func (o ownership) hides(p authz.Principal) bool {
	if !o.owned || p.Kind != authz.ServiceAccount {
		return false
	}
	return o.row == nil || p.Namespace != authz.Namespace{Cluster: o.row.Object.Cluster, Name: o.row.Object.Namespace}
}

// ownership reads and verifies the same rows whether there is an object or not.
func (v *Vault) ownership(rd store.Reader, tenant authz.TenantID, id string) (o ownership, err error) {
	owner, err := rd.Get(ownerKey(tenant, id))
	if err != nil {
		return o, err
	}
	key := ownedKey(tenant, string(owner))
	if owner == nil || len(key) > store.MaxKeySize {
		key = ownedKey(tenant, id) // of no object
	}
	stored, err := rd.Get(key)
	if err != nil {
		return o, err
	}
	there := stored != nil
	if !there {
		stored = key
	}
	row, bad := v.decodeOwned(key, stored)
	o.owned, o.damaged = owner != nil, there && bad != nil
	if bad == nil && row.Credential == id {
		o.row = row
	}
	return o, nil
}

func (v *Vault) putOwned(tx store.Tx, tenant authz.TenantID, uid string, row *ownedRow) error {
	b, err := json.Marshal(row)
	if err != nil {
		return err
	}
	key := ownedKey(tenant, uid)
	if err := tx.Put(ownerKey(tenant, row.Credential), []byte(uid)); err != nil {
		return err
	}
	return tx.Put(key, v.keys.SealRow(key, b))
}

// Owned returns what the vault holds for the object with that UID in p's
// tenant, and nil when it holds nothing. It shows no value and leaves no
// entry. Errors: fault.Forbidden, fault.Unavailable.
func (v *Vault) Owned(ctx context.Context, p authz.Principal, uid string) (*Owned, error) {
	if err := v.guard.Authorize(ctx, p, authz.ListCredentials); err != nil {
		return nil, err
	}
	o, _, err := v.owned(ctx, p.Tenant, uid)
	return o, err
}

// owned also returns the record, nil when there is none of the version that the
// object's row names.
func (v *Vault) owned(ctx context.Context, tenant authz.TenantID, uid string) (o *Owned, r *record, err error) {
	now := v.now()
	err = v.store.View(ctx, func(rd store.Reader) error {
		row, err := v.getOwned(rd, tenant, uid)
		if err != nil || row == nil {
			return err
		}
		r, err = find(rd, tenant, row.Credential)
		if errors.Is(err, fault.Internal) {
			r, err = nil, nil // a damaged credential is made again, like a deleted one
		}
		if err != nil {
			return err
		}
		if r == nil || r.version != row.Version {
			r = nil
			o = row.owned(Credential{ID: row.Credential, Version: row.Version, Owned: true})
			o.Missing = true
			return nil
		}
		o = row.owned(r.credential(now, true))
		if o.Audit, err = audit.Current(rd, tenant, row.Credential); err != nil {
			return err
		}
		o.Former, err = readableFormer(rd, tenant, row, now)
		return err
	})
	if err != nil {
		return nil, nil, fmt.Errorf("reading what an object owns: %w", err)
	}
	return o, r, nil
}

func (row *ownedRow) owned(c Credential) *Owned {
	return &Owned{
		Credential: c, SpecDigest: [32]byte(row.SpecDigest), ValuesChangedAt: row.changedAt(), ValueSealedAt: row.SealedAt,
		SealingKey: row.SealingKey, Trigger: row.Trigger, Object: row.Object, row: row,
	}
}

// Release ends the ownership of an object that is going away, and deletes its
// credential if asked to; otherwise the credential stays, and can from now on
// be changed over REST. The former version ends either way. Releasing what is
// not owned is no error.
func (v *Vault) Release(ctx context.Context, p authz.Principal, uid string, deleteEntry bool) error {
	if err := v.guard.Authorize(ctx, p, authz.DeleteCredential); err != nil {
		return err
	}
	err := v.store.Update(ctx, func(tx store.Tx) error {
		row, err := v.getOwned(tx, p.Tenant, uid)
		if err != nil || row == nil {
			return err
		}
		e := audit.Event{
			Type: audit.CredentialReleased, Outcome: audit.Success, Principal: p,
			Resource:   audit.Resource{Type: audit.CredentialResource, ID: row.Credential},
			Attributes: map[string]string{audit.AttributeVersion: strconv.FormatUint(row.Version, 10)},
		}
		current, err := find(tx, p.Tenant, row.Credential)
		if err != nil && !errors.Is(err, fault.Internal) {
			return err
		}
		if deleteEntry && (current != nil || err != nil) {
			e.Type = audit.CredentialDeleted
			if err := v.remove(tx, p.Tenant, row.Credential); err != nil {
				return err
			}
		} else if err := v.disown(tx, p.Tenant, row.Credential, current); err != nil {
			return err
		}
		if err := v.append(tx, e); err != nil {
			return err
		}
		return errors.Join(
			dropFormer(tx, p.Tenant, uid, row),
			tx.Delete(ownerKey(p.Tenant, row.Credential)),
			tx.Delete(ownedKey(p.Tenant, uid)),
		)
	})
	if err != nil {
		return fmt.Errorf("releasing an object's credential: %w", err)
	}
	return nil
}

// disown has a credential whose object goes away found by its name as one that
// no object owns. A damaged one is not found any more.
func (v *Vault) disown(tx store.Tx, tenant authz.TenantID, id string, current *record) error {
	err := v.unindex(tx, tenant, id)
	if err != nil || current == nil {
		return err
	}
	return v.index(tx, current, lastChange(tx, current), nil)
}

// Owner is an object that owns a credential.
type Owner struct {
	Object
	UID    string
	Tenant authz.TenantID
}

// Owners returns the objects of a cluster that own a credential, those of all
// tenants: it is the deployment that asks, and it learns no credential. Rows
// that are damaged name no cluster and are left out.
func (v *Vault) Owners(ctx context.Context, cluster string) ([]Owner, error) {
	var owners []Owner
	err := v.allOwned(ctx, func(tenant authz.TenantID, uid string, row *ownedRow) {
		if row != nil && row.Object.Cluster == cluster {
			owners = append(owners, Owner{row.Object, uid, tenant})
		}
	})
	return owners, err
}

// SealingKeyUse returns how many objects of all tenants hold values that were
// sealed for each sealing key, by its id. It is for the deployment. Damaged
// rows are an error: nobody knows which key they need.
func (v *Vault) SealingKeyUse(ctx context.Context) (map[string]int, error) {
	use := make(map[string]int)
	damaged := 0
	err := v.allOwned(ctx, func(_ authz.TenantID, _ string, row *ownedRow) {
		switch {
		case row == nil:
			damaged++
		case row.SealingKey != "":
			use[row.SealingKey]++
		}
	})
	if err == nil && damaged > 0 {
		err = fmt.Errorf("%d rows of what objects own: %w", damaged, errDamaged)
	}
	return use, err
}

// allOwned visits every row, nil for one that is damaged.
func (v *Vault) allOwned(ctx context.Context, visit func(tenant authz.TenantID, uid string, row *ownedRow)) error {
	err := audit.ScanAll(ctx, v.store, store.Prefix([]byte("owned/")), func(key, value []byte) error {
		_, rest, _ := strings.Cut(string(key), "/")
		tenant, uid, _ := strings.Cut(rest, "/")
		row, err := v.decodeOwned(key, value)
		if err != nil {
			row = nil
		}
		visit(authz.TenantID(tenant), uid, row)
		return nil
	})
	if err != nil {
		return fmt.Errorf("reading what objects own: %w", err)
	}
	return nil
}
