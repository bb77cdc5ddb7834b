package vault

import (
	"cmp"
	"context"
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

// Desired is what a SealedCredential asks for, its values opened.
type Desired struct {
	Name    string
	Type    string
	TTLDays int
	Values  map[string]secret.Bytes

	SpecDigest   [32]byte             // over all that must lead to a new version when it changes
	ValuesDigest [32]byte             // over the sealed values alone: tells new values from new keys
	SealedAt     map[string]time.Time // per key, when its value was sealed
	Trigger      string               // of a rotation on demand

	Object Object // who asks
}

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
	SpecDigest    [32]byte
	ValuesDigest  [32]byte
	ValueSealedAt map[string]time.Time
	Trigger       string
	Object        Object
	Audit         audit.Receipt // entry of the current version
	Missing       bool          // the credential was deleted behind the operator's back
}

// ownedRow is [Owned] as it is stored, under the object's UID.
type ownedRow struct {
	Credential   string               `json:"credential"`
	Version      uint64               `json:"version"`
	SpecDigest   []byte               `json:"spec_digest"`
	ValuesDigest []byte               `json:"values_digest"`
	SealedAt     map[string]time.Time `json:"sealed_at"`
	Trigger      string               `json:"trigger"`
	Object       Object               `json:"object"`
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
	if err := json.Unmarshal(b, &row); err != nil || len(row.SpecDigest) != 32 || len(row.ValuesDigest) != 32 {
		return nil, errDamaged
	}
	return &row, nil
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
	if err := v.log.Authorize(ctx, p, authz.ListCredentials); err != nil {
		return nil, err
	}
	o, _, err := v.owned(ctx, p.Tenant, uid)
	return o, err
}

func (v *Vault) owned(ctx context.Context, tenant authz.TenantID, uid string) (o *Owned, r *record, err error) {
	now := v.now()
	err = v.store.View(ctx, func(rd store.Reader) error {
		row, err := v.getOwned(rd, tenant, uid)
		if err != nil || row == nil {
			return err
		}
		o = &Owned{
			Credential: Credential{ID: row.Credential, Version: row.Version, Owned: true},
			SpecDigest: [32]byte(row.SpecDigest), ValuesDigest: [32]byte(row.ValuesDigest),
			ValueSealedAt: row.SealedAt, Trigger: row.Trigger, Object: row.Object,
		}
		r, err = find(rd, tenant, row.Credential)
		if errors.Is(err, fault.Internal) {
			r, err = nil, nil // a damaged credential is made again, like a deleted one
		}
		if err != nil || r == nil || r.version != row.Version {
			o.Missing = true
			return err
		}
		o.Credential = r.credential(now, true)
		o.Audit, err = audit.Anchor(rd, tenant, row.Credential)
		return err
	})
	if err != nil {
		return nil, nil, fmt.Errorf("reading what an object owns: %w", err)
	}
	return o, r, nil
}

// Apply makes the vault hold what the object asks for: a first version, or the
// next one. expect is the version last seen, 0 for none; when the vault has
// moved on meanwhile the error is fault.Conflict and nothing changed. A
// credential that was deleted is sealed again under its id. Other errors:
// fault.Forbidden, fault.Invalid, fault.Unavailable.
func (v *Vault) Apply(ctx context.Context, p authz.Principal, uid string, expect uint64, d Desired) (*Owned, error) {
	if err := v.log.Authorize(ctx, p, authz.SealCredential); err != nil {
		return nil, err
	}
	req := SealRequest{Name: d.Name, Type: d.Type, TTLDays: d.TTLDays, Values: d.Values}
	if err := req.validate(); err != nil {
		return nil, err
	}
	before, old, err := v.owned(ctx, p.Tenant, uid)
	if err != nil {
		return nil, err
	}
	now := v.now()
	id, created, what := authz.NewID(idPrefix), now, audit.CredentialSealed
	if before != nil {
		id = before.ID
		if !before.Missing {
			created, what = old.createdAt, audit.CredentialReencrypted
			if d.ValuesDigest != before.ValuesDigest {
				what = audit.CredentialRotated
			}
		}
	}
	keys, err := v.current(ctx, p.Tenant)
	if err != nil {
		return nil, err
	}
	r := newRecord(p.Tenant, id, expect+1, created, now, req)
	if err := r.seal(keys, d.Values); err != nil {
		return nil, err
	}
	return v.commitOwned(ctx, p, uid, expect, r, what, &ownedRow{
		Credential: id, Version: r.version, SpecDigest: d.SpecDigest[:], ValuesDigest: d.ValuesDigest[:],
		SealedAt: accepted(before, d), Trigger: d.Trigger, Object: d.Object,
	})
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

// Reencrypt gives the object's credential new keys and a full TTL around the
// same values, as its next version, and remembers the trigger. Errors:
// fault.NotFound when there is nothing to encrypt anew, which [Vault.Apply]
// mends; otherwise those of Apply.
func (v *Vault) Reencrypt(ctx context.Context, p authz.Principal, uid string, expect uint64, trigger string) (*Owned, error) {
	keys, err := v.ready(ctx, p, authz.RotateCredential)
	if err != nil {
		return nil, err
	}
	before, old, err := v.owned(ctx, p.Tenant, uid)
	if err != nil {
		return nil, err
	}
	if before == nil || before.Missing {
		return nil, fault.New(fault.NotFound, "the credential is not in the vault")
	}
	if before.Version != expect {
		return nil, errMoved
	}
	values, err := v.openRecord(ctx, keys, old)
	if errors.Is(err, fault.Internal) {
		if err := v.log.Record(ctx, audit.Event{
			Type: audit.CredentialReencrypted, Outcome: audit.Failure, Principal: p,
			Resource:   audit.Resource{Type: audit.CredentialResource, ID: old.id},
			Attributes: map[string]string{audit.AttributeReason: reasonIntegrity},
		}); err != nil {
			return nil, fmt.Errorf("recording a damaged credential: %w", err)
		}
		return nil, fault.New(fault.NotFound, "the credential in the vault is damaged")
	}
	if err != nil {
		return nil, err
	}
	defer zero(values)
	r := newRecord(p.Tenant, old.id, old.version+1, old.createdAt, v.now(),
		SealRequest{Name: old.name, Type: old.kind, TTLDays: int(old.ttlDays)})
	if err := r.seal(keys, values); err != nil {
		return nil, err
	}
	return v.commitOwned(ctx, p, uid, expect, r, audit.CredentialReencrypted, &ownedRow{
		Credential: r.id, Version: r.version, SpecDigest: before.SpecDigest[:], ValuesDigest: before.ValuesDigest[:],
		SealedAt: before.ValueSealedAt, Trigger: trigger, Object: before.Object,
	})
}

// commitOwned compares with the expected version, replaces the credential's
// record by r and the object's row by row, and records it: one transaction.
func (v *Vault) commitOwned(ctx context.Context, p authz.Principal, uid string, expect uint64, r *record, what audit.EventType, row *ownedRow) (*Owned, error) {
	var receipt *audit.Receipt
	e := r.event(what, p)
	err := v.store.Update(ctx, func(tx store.Tx) error {
		current, err := v.getOwned(tx, p.Tenant, uid)
		if err != nil {
			return err
		}
		if version := versionOf(current); version != expect || (current != nil && current.Credential != r.id) {
			return errMoved
		}
		if err := v.put(tx, r, what); err != nil {
			return err
		}
		if receipt, err = v.log.Append(tx, e); err != nil {
			return err
		}
		return v.putOwned(tx, p.Tenant, uid, row)
	})
	if err != nil {
		return nil, fmt.Errorf("storing an object's credential: %w", err)
	}
	return &Owned{
		Credential: r.credential(v.now(), true),
		SpecDigest: [32]byte(row.SpecDigest), ValuesDigest: [32]byte(row.ValuesDigest),
		ValueSealedAt: row.SealedAt, Trigger: row.Trigger, Object: row.Object, Audit: *receipt,
	}, nil
}

func versionOf(row *ownedRow) uint64 {
	if row == nil {
		return 0
	}
	return row.Version
}

// Release ends the ownership of an object that is going away, and deletes its
// credential if asked to; otherwise the credential stays, and can from now on
// be changed over REST. Releasing what is not owned is no error.
func (v *Vault) Release(ctx context.Context, p authz.Principal, uid string, deleteEntry bool) error {
	if err := v.log.Authorize(ctx, p, authz.DeleteCredential); err != nil {
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
		}
		if err := v.append(tx, e); err != nil {
			return err
		}
		if err := tx.Delete(ownerKey(p.Tenant, row.Credential)); err != nil {
			return err
		}
		return tx.Delete(ownedKey(p.Tenant, uid))
	})
	if err != nil {
		return fmt.Errorf("releasing an object's credential: %w", err)
	}
	return nil
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
	err := audit.ScanAll(ctx, v.store, store.Prefix([]byte("owned/")), func(key, value []byte) error {
		_, rest, _ := strings.Cut(string(key), "/")
		tenant, uid, _ := strings.Cut(rest, "/")
		row, err := v.decodeOwned(key, value)
		if err == nil && row.Object.Cluster == cluster {
			owners = append(owners, Owner{row.Object, uid, authz.TenantID(tenant)})
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("reading which objects own credentials: %w", err)
	}
	return owners, nil
}
