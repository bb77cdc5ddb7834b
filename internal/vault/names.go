package vault

import (
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
	"github.com/latticekeep/latticekeep/internal/frame"
	"github.com/latticekeep/latticekeep/internal/store"
)

// keyedHash tells nothing to who has not the deployment's keys, so that names
// can be looked up and do not stand in the keys of the store.
func (v *Vault) keyedHash(label string, fields ...[]byte) []byte {
	framed := frame.Join(label, fields...)
	defer clear(framed) // there may be values in it
	h := hmac.New(sha512.New, v.keys.APIKeyHash())
	h.Write(framed)
	return h.Sum(nil)[:32]
}

func (v *Vault) nameHash(tenant authz.TenantID, name string) string {
	return hex.EncodeToString(v.keyedHash("latticekeep/credential-name/v1", []byte(tenant), []byte(name)))
}

// The index of names: a row per credential whose key orders those of one name
// by their creation, and whose value says until when it is active.
func namePrefix(tenant authz.TenantID, hash string) []byte {
	return []byte("credential-name/" + string(tenant) + "/" + hash + "/")
}

func nameKey(tenant authz.TenantID, hash string, created time.Time, id string) []byte {
	return append(binary.BigEndian.AppendUint64(namePrefix(tenant, hash), uint64(created.UnixMicro())), id...)
}

// UnsealByName is [Vault.Unseal] of the credential of that name which was
// created last among those that have not expired.
func (v *Vault) UnsealByName(ctx context.Context, p authz.Principal, name string) (Unsealed, error) {
	return v.unseal(ctx, p, v.byName(p.Tenant, name, v.now()))
}

// byName finds the newest credential of a name that is active at now, or else
// the newest, which is then known to have expired.
func (v *Vault) byName(tenant authz.TenantID, name string, now time.Time) finder {
	if !validName(name) {
		name = "" // which no credential has
	}
	prefix := namePrefix(tenant, v.nameHash(tenant, name))
	rng := store.Prefix(prefix)
	rng.Reverse = true
	return finder{name: name, id: func(rd store.Reader) (string, error) {
		active, newest := "", ""
		var bad error
		err := rd.Scan(rng, func(key, stored []byte) bool {
			b, err := v.keys.OpenRow(key, stored)
			if err != nil || len(b) != 8 || len(key) < len(prefix)+8 {
				bad = errDamaged
				return false
			}
			id := string(key[len(prefix)+8:])
			if newest == "" {
				newest = id
			}
			if now.UnixMicro() < int64(binary.BigEndian.Uint64(b)) {
				active = id
				return false
			}
			return true
		})
		if active == "" {
			active = newest
		}
		return active, errors.Join(err, bad)
	}}
}

// put stores r as the newest version of its credential, with its line in the
// history and its place in the index of names.
func (v *Vault) put(tx store.Tx, r *record, what audit.EventType) error {
	if err := putRecord(tx, r); err != nil {
		return err
	}
	return v.index(tx, r, what)
}

func (v *Vault) index(tx store.Tx, r *record, what audit.EventType) error {
	if err := v.unindex(tx, r.tenant, r.id); err != nil {
		return err
	}
	row := versionRow{
		Change: changes[what], CreatedAt: r.createdAt, SealedAt: r.sealedAt, ExpiresAt: r.expiresAt,
		Name: v.nameHash(r.tenant, r.name),
	}
	b, err := json.Marshal(row)
	if err != nil {
		return err
	}
	key := versionKey(r.tenant, r.id, r.version)
	if err := tx.Put(key, v.keys.SealRow(key, b)); err != nil {
		return err
	}
	if r.version > MaxVersions {
		if err := tx.Delete(versionKey(r.tenant, r.id, r.version-MaxVersions)); err != nil {
			return err
		}
	}
	key = nameKey(r.tenant, row.Name, r.createdAt, r.id)
	until := binary.BigEndian.AppendUint64(nil, uint64(r.expiresAt.UnixMicro()))
	return tx.Put(key, v.keys.SealRow(key, until))
}

// unindex takes a credential out of the index of names, where its newest line
// in the history says that it stands. A damaged line is passed over.
func (v *Vault) unindex(tx store.Tx, tenant authz.TenantID, id string) error {
	rng := store.Prefix(historyPrefix(tenant, id))
	rng.Reverse = true
	var row *versionRow
	err := tx.Scan(rng, func(key, value []byte) bool {
		_, row, _ = v.decodeVersion(key, value)
		return row == nil
	})
	if err != nil || row == nil {
		return err
	}
	return tx.Delete(nameKey(tenant, row.Name, row.CreatedAt, id))
}

// remove deletes all rows of a credential, damaged ones too.
func (v *Vault) remove(tx store.Tx, tenant authz.TenantID, id string) error {
	return errors.Join(
		v.unindex(tx, tenant, id),
		deleteAll(tx, historyPrefix(tenant, id)),
		deleteAll(tx, versionsPrefix(tenant, id)),
		tx.Delete(requestKey(tenant, id)),
	)
}

// indexedRow stands in a store whose credentials are all indexed.
var indexedRow = []byte("credential-indexed/1")

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
		err = v.store.Update(ctx, func(tx store.Tx) error {
			next, err := v.reindex(tx, rng)
			if err != nil {
				return err
			}
			if done = next == nil; done {
				return tx.Put(indexedRow, nil)
			}
			rng.From = next
			return nil
		})
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
		what, bad := audit.LastChange(tx, r.tenant, r.id)
		if bad != nil { // of which audit verify tells
			if what = audit.CredentialSealed; r.version > 1 {
				what = audit.CredentialRotated
			}
		}
		if err == nil {
			err = v.index(tx, r, what)
		}
	}
	return next, err
}
