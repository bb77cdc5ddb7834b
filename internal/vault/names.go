package vault

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha512"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/frame"
	"github.com/latticekeep/latticekeep/internal/store"
)

// keyedHash tells nothing to who has not the deployment's keys, so that names
// can be looked up and do not stand in the keys of the store.
func (v *Vault) keyedHash(label string, fields ...[]byte) []byte {
	h := hmac.New(sha512.New, v.keys.APIKeyHash())
	frame.Write(h, label, fields...)
	return h.Sum(nil)[:32]
}

func (v *Vault) nameHash(tenant authz.TenantID, name string) string {
	return hex.EncodeToString(v.keyedHash("latticekeep/credential-name/v1", []byte(tenant), []byte(name)))
}

// The index of names has three sorts of places: of a name that no object's
// credential has, of one that any object's has, and of one that an object's of
// one namespace has. A credential without an object has a row in the first, an
// object's one in each of the others. So what somebody else seals never comes in
// between when an object's credential is looked up.
func (v *Vault) places(tenant authz.TenantID, hash string, o *Object) []string {
	if o == nil {
		return []string{hash}
	}
	return []string{v.objectsPlace(tenant, hash), v.namespacePlace(tenant, hash, authz.Namespace{Cluster: o.Cluster, Name: o.Namespace})}
}

func (v *Vault) objectsPlace(tenant authz.TenantID, hash string) string {
	return hex.EncodeToString(v.keyedHash("latticekeep/object-name/v1", []byte(tenant), []byte(hash)))
}

func (v *Vault) namespacePlace(tenant authz.TenantID, hash string, n authz.Namespace) string {
	return hex.EncodeToString(v.keyedHash("latticekeep/namespace-name/v1", []byte(tenant), []byte(hash), []byte(n.Cluster), []byte(n.Name)))
}

// The key of a row orders those of one place by when the credentials expire, so
// that however many have expired, looking for one that is active reads at most
// one of them. The value is the row's MAC.
func namePrefix(tenant authz.TenantID, hash string) []byte {
	return []byte("credential-name/" + string(tenant) + "/" + hash + "/")
}

func nameKey(tenant authz.TenantID, hash string, expires, created time.Time, id string) []byte {
	key := binary.BigEndian.AppendUint64(namePrefix(tenant, hash), uint64(expires.UnixMicro()))
	return append(binary.BigEndian.AppendUint64(key, uint64(created.UnixMicro())), id...)
}

// maxNamesakes bounds the active credentials of a name that a lookup compares.
const maxNamesakes = 1000

// UnsealByName is [Vault.Unseal] of the credential of that name which an object
// owns: to a ServiceAccount only one of its own namespace. When there is none,
// not even an expired one, it is that of the credential without an object. Among
// several it is the one which was created last among those that have not expired
// (among the 1000 of them that expire last, should there be more).
func (v *Vault) UnsealByName(ctx context.Context, p authz.Principal, name string) (Unsealed, error) {
	return v.unseal(ctx, p, v.byName(p, name, v.now()))
}

// byName finds the credential of a name. Both places are read, and one row is
// verified, whichever it is: that of the answer, or one that is in no store.
func (v *Vault) byName(p authz.Principal, name string, now time.Time) finder {
	if !validName(name) {
		name = "" // which no credential has
	}
	hash := v.nameHash(p.Tenant, name)
	objects := v.objectsPlace(p.Tenant, hash)
	if p.Kind == authz.ServiceAccount {
		objects = v.namespacePlace(p.Tenant, hash, p.Namespace)
	}
	absent := nameKey(p.Tenant, hash, now, now, authz.NewID(idPrefix))
	return finder{name: name, id: func(rd store.Reader) (string, error) {
		key, row, err := newest(rd, namePrefix(p.Tenant, objects), now)
		other, otherRow, err2 := newest(rd, namePrefix(p.Tenant, hash), now)
		if err := errors.Join(err, err2); err != nil {
			return "", err
		}
		if key == nil {
			key, row = other, otherRow
		}
		found := key != nil
		if !found {
			key, row = absent, absent
		}
		content, bad := v.keys.OpenRow(key, row)
		switch {
		case !found:
			return "", nil
		case bad != nil || len(content) != 0:
			return "", errDamaged
		}
		return string(key[len(namePrefix(p.Tenant, hash))+16:]), nil
	}}
}

// newest finds in one place the row of the newest credential that is active at
// now, or else of the one that expired last; nil when there is none.
func newest(rd store.Reader, place []byte, now time.Time) (key, row []byte, err error) {
	rng := store.Prefix(place)
	rng.Reverse = true
	expires := len(place)
	created, id := expires+8, expires+16
	damaged, seen := false, 0
	err = rd.Scan(rng, func(k, stored []byte) bool {
		if len(k) <= id {
			damaged = true
			return false
		}
		active := now.UnixMicro() < int64(binary.BigEndian.Uint64(k[expires:]))
		if key == nil || active && bytes.Compare(k[created:], key[created:]) > 0 {
			key, row = k, stored
		}
		seen++
		return active && seen < maxNamesakes // all that follow expire before this one
	})
	if err == nil && damaged {
		err = errDamaged
	}
	return key, row, err
}

// put stores r as the one version of its credential, in the place of whatever
// stood there, with its line in the history and its places in the index of
// names, which depend on the object that owns it, if one does.
func (v *Vault) put(tx store.Tx, r *record, what audit.EventType, o *Object) error {
	if err := v.unindex(tx, r.tenant, r.id); err != nil {
		return err
	}
	if err := deleteAll(tx, versionsPrefix(r.tenant, r.id)); err != nil {
		return err
	}
	return errors.Join(putRecord(tx, r), v.index(tx, r, what, o))
}

func (v *Vault) index(tx store.Tx, r *record, what audit.EventType, o *Object) error {
	rows, err := v.indexRows(r, what, o)
	if err != nil {
		return err
	}
	if err := putRows(tx, rows); err != nil || r.version <= MaxVersions {
		return err
	}
	return tx.Delete(versionKey(r.tenant, r.id, r.version-MaxVersions))
}

// pair is a row to be put.
type pair struct{ key, value []byte }

func putRows(tx store.Tx, rows []pair) error {
	for _, p := range rows {
		if err := tx.Put(p.key, p.value); err != nil {
			return err
		}
	}
	return nil
}

// indexRows are r's line in the history and its places in the index of names.
func (v *Vault) indexRows(r *record, what audit.EventType, o *Object) ([]pair, error) {
	row := versionRow{
		Change: changes[what], CreatedAt: r.createdAt, SealedAt: r.sealedAt, ExpiresAt: r.expiresAt,
		Name: v.nameHash(r.tenant, r.name), Object: o,
	}
	b, err := json.Marshal(row)
	if err != nil {
		return nil, err
	}
	key := versionKey(r.tenant, r.id, r.version)
	rows := []pair{{key, v.keys.SealRow(key, b)}}
	for _, place := range v.places(r.tenant, row.Name, o) {
		key := nameKey(r.tenant, place, r.expiresAt, r.createdAt, r.id)
		rows = append(rows, pair{key, v.keys.SealRow(key, nil)})
	}
	return rows, nil
}

// newRows are all rows of a new credential, whose id nothing else in the store has.
// They are made before the transaction, in which others wait.
func (v *Vault) newRows(r *record) ([]pair, error) {
	rows, err := v.indexRows(r, audit.CredentialSealed, nil)
	return append(rows, pair{recordKey(r.tenant, r.id, r.version), r.encode()}), err
}

// unindex takes a credential out of the index of names, from every place where
// its record, its newest line in the history and the row of its object say that
// it may stand: when one of them is damaged, the others still tell.
func (v *Vault) unindex(tx store.Tx, tenant authz.TenantID, id string) error {
	r, err := find(tx, tenant, id)
	if err != nil && !errors.Is(err, fault.Internal) {
		return err
	}
	rng := store.Prefix(historyPrefix(tenant, id))
	rng.Reverse = true
	var row *versionRow
	err = tx.Scan(rng, func(key, value []byte) bool {
		_, row, _ = v.decodeVersion(key, value)
		return row == nil
	})
	if err != nil {
		return err
	}
	by, err := v.ownership(tx, tenant, id)
	if err != nil {
		return err
	}
	objects := []*Object{nil}
	if by.row != nil {
		objects = append(objects, &by.row.Object)
	}
	if row != nil && row.Object != nil {
		objects = append(objects, row.Object)
	}
	leave := func(hash string, expires, created time.Time) (err error) {
		for _, o := range objects {
			for _, place := range v.places(tenant, hash, o) {
				err = errors.Join(err, tx.Delete(nameKey(tenant, place, expires, created, id)))
			}
		}
		return err
	}
	if r != nil {
		err = leave(v.nameHash(tenant, r.name), r.expiresAt, r.createdAt)
	}
	if row != nil {
		err = errors.Join(err, leave(row.Name, row.ExpiresAt, row.CreatedAt))
	}
	return err
}

// lastChange is what made the version that r is, as the log says.
func lastChange(tx store.Tx, r *record) audit.EventType {
	what, bad := audit.LastChange(tx, r.tenant, r.id)
	if bad != nil { // of which audit verify tells
		if what = audit.CredentialSealed; r.version > 1 {
			what = audit.CredentialRotated
		}
	}
	return what
}

// remove deletes all rows of a credential, damaged ones too.
func (v *Vault) remove(tx store.Tx, tenant authz.TenantID, id string) error {
	return errors.Join(
		v.unindex(tx, tenant, id),
		deleteAll(tx, historyPrefix(tenant, id)),
		deleteAll(tx, versionsPrefix(tenant, id)),
		deleteAll(tx, formerPrefix(tenant, id)), // the object's row may still speak of it, and means nothing without it
		tx.Delete(requestKey(tenant, id)),
	)
}

// indexedRow stands in a store whose credentials are all indexed. The index
// that 1 stood for was in the order of creation, and that of 2 did not tell the
// credentials of objects from others.
var indexedRow = []byte("credential-indexed/3")

// reindexBatch bounds how many records one transaction of [Vault.Reindex]
// reads.
const reindexBatch = 64

// Reindex gives the credentials of a data directory that an earlier release
// wrote their place in the index of names and the first line of their history.
// It is called before the vault is used, and does its work once.
func (v *Vault) Reindex(ctx context.Context) error {
	done := false
	rng := store.Prefix([]byte("credential/"))
	err := v.store.View(ctx, func(rd store.Reader) error {
		b, err := rd.Get(indexedRow)
		done = b != nil
		return err
	})
	for err == nil && !done {
		var next []byte // the closure may run again: the batch is done when it is committed
		err = v.store.Update(ctx, func(tx store.Tx) (err error) {
			if next, err = v.reindex(tx, rng); err != nil || next != nil {
				return err
			}
			return tx.Put(indexedRow, nil)
		})
		rng.From, done = next, next == nil
	}
	if err != nil {
		return fmt.Errorf("indexing the credentials of an earlier release: %w", err)
	}
	return nil
}

// reindex does one batch, and returns where the next one begins, nil after the
// last. Damaged records have no name to be found by.
func (v *Vault) reindex(tx store.Tx, rng store.Range) (next []byte, err error) {
	var records []*record
	rows := 0
	err = tx.Scan(rng, func(key, value []byte) bool {
		if rows == reindexBatch {
			next = append([]byte(nil), key...)
			return false
		}
		rows++
		if r, err := recordAt(key, value); err == nil {
			records = append(records, r)
		}
		return true
	})
	for _, r := range records {
		if err == nil {
			err = v.reindexOne(tx, r)
		}
	}
	return next, err
}

func (v *Vault) reindexOne(tx store.Tx, r *record) error {
	by, err := v.ownership(tx, r.tenant, r.id)
	if err != nil {
		return err
	}
	var o *Object
	if by.owned {
		o = new(Object) // in no namespace, should its row be damaged
	}
	if by.row != nil {
		o = &by.row.Object
	}
	return errors.Join(tx.Delete(v.createdKey(r)), v.unindex(tx, r.tenant, r.id), v.index(tx, r, lastChange(tx, r), o))
}

// createdKey is where r stood in the index that was in the order of creation.
func (v *Vault) createdKey(r *record) []byte {
	prefix := namePrefix(r.tenant, v.nameHash(r.tenant, r.name))
	return append(binary.BigEndian.AppendUint64(prefix, uint64(r.createdAt.UnixMicro())), r.id...)
}
