package vault

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/chain"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/vault/mac"
	"github.com/latticekeep/latticekeep/internal/vault/record"
)

// releasedRow is the memory of an object that is gone, kept with its credential. It ends with the
// credential, or when another object goes on with it.
type releasedRow struct {
	UID string `json:"uid"`
	ownerRow
}

func releasedKey(tenant authz.TenantID, id string) []byte {
	return []byte("released/" + string(tenant) + "/" + id)
}

// putReleased keeps the memory of an object whose credential stays. The hash of the values is left
// out: it is bound to the object's UID.
func (o ownerRows) putReleased(tx store.Tx, tenant authz.TenantID, uid string, row *ownerRow) error {
	kept := releasedRow{uid, *row}
	kept.Values, kept.Previous = nil, nil
	return mac.Put(o.Rows, tx, releasedKey(tenant, row.Credential), kept)
}

// end deletes the rows of an object, and its previous version.
func (o ownerRows) end(tx store.Tx, tenant authz.TenantID, uid string, row *ownerRow) error {
	return errors.Join(
		deletePrevious(tx, tenant, uid, row),
		tx.Delete(ownerKey(tenant, row.Credential)),
		tx.Delete(ownedKey(tenant, uid)),
	)
}

// PreviousObject is an object that is gone, or left behind in another cluster, and whose credential
// is kept.
type PreviousObject struct {
	Owner
	Credential string
	Form       []byte               // [Desired.Form] of its last accepted spec; empty when it is not known
	SealedAt   map[string]time.Time // as [Owned.ValueSealedAt]
}

// Objects returns the objects of all tenants, as the operator of a cluster sees them: those of that
// cluster that own a credential, and the previous ones, whose credentials were released or belong
// to another cluster. The deployment calls it. It shows no credential. It leaves out damaged rows
// of owners, because they name no object. A previous object whose row is damaged has only a tenant
// and a credential. A row that somebody else changed or removed is an error.
func (v *Vault) Objects(ctx context.Context, cluster string) (owners []Owner, previous []PreviousObject, err error) {
	err = v.records.owners.visit(ctx, v.store, func(tenant authz.TenantID, uid string, row *ownerRow) {
		switch {
		case row == nil:
		case row.Object.Cluster == cluster:
			owners = append(owners, Owner{row.Object, uid, tenant})
		default:
			previous = append(previous, PreviousObject{Owner{row.Object, uid, tenant}, row.Credential, row.Form, row.SealedAt})
		}
	})
	if err != nil {
		return nil, nil, err
	}
	var kept []mac.Row
	err = v.store.View(ctx, func(rd store.Reader) error {
		kept = nil
		return rd.Scan(store.Prefix([]byte("released/")), func(key, value []byte) bool {
			kept = append(kept, mac.Row{Key: bytes.Clone(key), Value: bytes.Clone(value)})
			return true
		})
	})
	if err != nil {
		return nil, nil, fmt.Errorf("reading what objects left: %w", err)
	}
	for _, k := range kept {
		_, rest, _ := strings.Cut(string(k.Key), "/")
		tenant, id, _ := strings.Cut(rest, "/")
		row, err := mac.Decode[releasedRow](v.records.Rows, k.Key, k.Value)
		if err != nil {
			row = &releasedRow{ownerRow: ownerRow{Credential: id}}
		}
		previous = append(previous, PreviousObject{Owner{row.Object, row.UID, authz.TenantID(tenant)}, row.Credential, row.Form, row.SealedAt})
	}
	return owners, previous, nil
}

// errNotAdoptable is the only answer for a credential that an object cannot go on with: another
// tenant's, an unknown one, one that belongs to another object, and one that never expires.
var errNotAdoptable = fault.New(fault.NotFound, "there is no credential of this id that the object can go on with")

// Adopt lets an object that owns nothing go on with a credential of its tenant that has no owner, or
// whose owner is an object of another cluster than o's. form is nil when somebody asked for it.
// Otherwise form must be that of the previous object, and binds the values to it ([Owned.Bound]). A
// bound object may ask for its own credential, and is bound no longer then. Nothing else of the
// credential changes. Errors: fault.NotFound when there is no such credential or it is damaged,
// fault.Conflict, fault.Forbidden, fault.Unavailable.
func (v *Vault) Adopt(ctx context.Context, p authz.Principal, uid string, o Object, credential string, form *[32]byte) (owned *Owned, err error) {
	defer func() { err = recordChanged(ctx, v.guard, p, authz.SealCredential, err) }()
	keys, err := v.ready(ctx, p, authz.SealCredential)
	if err != nil {
		return nil, err
	}
	var found *adoptable
	err = v.store.View(ctx, func(rd store.Reader) (err error) {
		found, err = v.records.adoptable(rd, p.Tenant, uid, o, credential)
		if err == nil && form != nil && !bytes.Equal(found.last.Form, form[:]) {
			err = errNotAdoptable
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("looking for a credential to adopt: %w", err)
	}
	r := found.record
	if r.NeverExpires() {
		return nil, errNotAdoptable // an object renews its credential
	}
	values, err := v.openOwned(ctx, p, keys, r, audit.CredentialAdopted)
	if err != nil {
		return nil, err
	}
	defer secret.ZeroAll(values)
	row := found.last.ownerRow
	row.Credential, row.Version, row.Object, row.Bound, row.Previous = r.ID, r.Version, o, form != nil, nil
	if found.last.UID != uid {
		row.AdoptedFrom = found.last.UID
	}
	row.Values = v.records.owners.hashValues(p.Tenant, uid, values)
	err = v.store.Update(ctx, func(tx store.Tx) error {
		now, err := v.records.adoptable(tx, p.Tenant, uid, o, credential)
		if err != nil {
			return err
		}
		taken, err := v.records.owners.get(tx, p.Tenant, uid)
		if err != nil {
			return err
		}
		if taken != nil && now.last.UID != uid || now.owned != found.owned || now.last.UID != found.last.UID || !bytes.Equal(now.record.Encode(), r.Encode()) {
			return errMoved
		}
		change, err := chain.LastChange(tx, p.Tenant, r.ID)
		if err != nil {
			return err
		}
		if err := v.records.unindex(tx, p.Tenant, r.ID); err != nil {
			return err
		}
		if now.owned {
			if err := v.records.owners.end(tx, p.Tenant, now.last.UID, &now.last.ownerRow); err != nil {
				return err
			}
		}
		attributes := map[string]string{audit.AttributeVersion: strconv.FormatUint(r.Version, 10)}
		if row.AdoptedFrom != "" {
			attributes["former_uid"] = row.AdoptedFrom
		}
		err = appendEvent(v.guard, tx, audit.Event{
			Type: audit.CredentialAdopted, Outcome: audit.Success, Principal: p,
			Resource: audit.Resource{Type: audit.CredentialResource, ID: r.ID}, Attributes: attributes,
		})
		return errors.Join(err,
			tx.Delete(releasedKey(p.Tenant, r.ID)),
			v.records.index(tx, r, change, &row.Object),
			v.records.owners.put(tx, p.Tenant, uid, &row),
		)
	})
	if err != nil {
		return nil, fmt.Errorf("adopting a credential: %w", err)
	}
	owned, _, err = v.findOwned(ctx, p.Tenant, uid)
	return owned, err
}

// adoptable is a credential that an object can go on with.
type adoptable struct {
	record *record.Record
	last   releasedRow // memory of the previous object; names no UID for a credential that was never an object's
	owned  bool        // the previous object still owns it, in another cluster, or the object itself is bound
}

// adoptable returns the credential of that id if the object can go on with it, and errNotAdoptable
// otherwise.
func (s recordStore) adoptable(rd store.Reader, tenant authz.TenantID, uid string, o Object, id string) (*adoptable, error) {
	if !authz.ValidID(idPrefix, id) {
		return nil, errNotAdoptable
	}
	r, err := record.Find(rd, tenant, id)
	if errors.Is(err, fault.Internal) || err == nil && r == nil {
		return nil, errNotAdoptable
	}
	if err != nil {
		return nil, err
	}
	owner, err := rd.Get(ownerKey(tenant, id))
	if err != nil {
		return nil, err
	}
	if owner != nil {
		row, err := s.owners.get(rd, tenant, string(owner))
		if err != nil {
			return nil, err
		}
		own := row != nil && string(owner) == uid && row.Bound
		if row == nil || row.Credential != id || row.Object.Cluster == o.Cluster && !own || row.Object.Namespace != o.Namespace {
			return nil, errNotAdoptable
		}
		return &adoptable{r, releasedRow{string(owner), *row}, true}, nil
	}
	last, err := mac.Get[releasedRow](s.Rows, rd, releasedKey(tenant, id))
	if err != nil {
		return nil, err
	}
	if last != nil && last.Object.Namespace != o.Namespace {
		return nil, errNotAdoptable // another namespace of the tenant, where the right to adopt is asked for separately
	}
	if last == nil {
		last = &releasedRow{ownerRow: ownerRow{SpecDigest: make([]byte, 32), SealedAt: map[string]time.Time{}, ValuesChangedAt: r.SealedAt}}
	}
	return &adoptable{record: r, last: *last}, nil
}
