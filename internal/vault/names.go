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
	framed := frame.Join(label, fields...)
	defer clear(framed) // there may be values in it
	h := hmac.New(sha512.New, v.keys.APIKeyHash())
	h.Write(framed)
	return h.Sum(nil)[:32]
}

func (v *Vault) nameHash(tenant authz.TenantID, name string) string {
	return hex.EncodeToString(v.keyedHash("latticekeep/credential-name/v1", []byte(tenant), []byte(name)))
}

// The index of names: a row per credential, whose key orders those of one name
// by when they expire, so that however many have expired, looking for one that
// is active reads at most one of them. The value is the row's MAC.
func namePrefix(tenant authz.TenantID, hash string) []byte {
	return []byte("credential-name/" + string(tenant) + "/" + hash + "/")
}

func nameKey(tenant authz.TenantID, hash string, expires, created time.Time, id string) []byte {
	key := binary.BigEndian.AppendUint64(namePrefix(tenant, hash), uint64(expires.UnixMicro()))
	return append(binary.BigEndian.AppendUint64(key, uint64(created.UnixMicro())), id...)
}

// maxNamesakes bounds the active credentials of a name that a lookup compares.
const maxNamesakes = 1000

// UnsealByName is [Vault.Unseal] of the credential of that name which was
// created last among those that have not expired (among the 1000 of them that
// expire last, should there be more).
func (v *Vault) UnsealByName(ctx context.Context, p authz.Principal, name string) (Unsealed, error) {
	return v.unseal(ctx, p, v.byName(p.Tenant, name, v.now()))
}

// byName finds the newest credential of a name that is active at now, or else
// the one that expired last. One row is verified, whichever it is: that of the
// answer, or one that is in no store.
func (v *Vault) byName(tenant authz.TenantID, name string, now time.Time) finder {
	if !validName(name) {
		name = "" // which no credential has
	}
	hash := v.nameHash(tenant, name)
	rng := store.Prefix(namePrefix(tenant, hash))
	rng.Reverse = true
	expires := len(namePrefix(tenant, hash))
	created, id := expires+8, expires+16
	absent := nameKey(tenant, hash, now, now, authz.NewID(idPrefix))
	return finder{name: name, id: func(rd store.Reader) (string, error) {
		key, row := absent, absent
		found, damaged, seen := false, false, 0
		err := rd.Scan(rng, func(k, stored []byte) bool {
			if len(k) <= id {
				damaged = true
				return false
			}
			active := now.UnixMicro() < int64(binary.BigEndian.Uint64(k[expires:]))
			if !found || active && bytes.Compare(k[created:], key[created:]) > 0 {
				key, row, found = k, stored, true
			}
			seen++
			return active && seen < maxNamesakes // all that follow expire before this one
		})
		content, bad := v.keys.OpenRow(key, row)
		switch {
		case err != nil:
			return "", err
		case damaged, found && (bad != nil || len(content) != 0):
			return "", errDamaged
		case !found:
			return "", nil
		}
		return string(key[id:]), nil
	}}
}

// put stores r as the one version of its credential, in the place of whatever
// stood there, with its line in the history and its place in the index of names.
func (v *Vault) put(tx store.Tx, r *record, what audit.EventType) error {
	if err := v.unindex(tx, r.tenant, r.id); err != nil {
		return err
	}
	if err := deleteAll(tx, versionsPrefix(r.tenant, r.id)); err != nil {
		return err
	}
	return errors.Join(putRecord(tx, r), v.index(tx, r, what))
}

func (v *Vault) index(tx store.Tx, r *record, what audit.EventType) error {
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
	key = v.nameKeyOf(r)
	return tx.Put(key, v.keys.SealRow(key, nil))
}

func (v *Vault) nameKeyOf(r *record) []byte {
	return nameKey(r.tenant, v.nameHash(r.tenant, r.name), r.expiresAt, r.createdAt, r.id)
}

// unindex takes a credential out of the index of names, where its record and
// its newest line in the history say that it stands: when one of them is
// damaged, the other still tells.
func (v *Vault) unindex(tx store.Tx, tenant authz.TenantID, id string) error {
	r, err := find(tx, tenant, id)
	if err != nil && !errors.Is(err, fault.Internal) {
		return err
	}
	if r != nil {
		if err := tx.Delete(v.nameKeyOf(r)); err != nil {
			return err
		}
	}
	rng := store.Prefix(historyPrefix(tenant, id))
	rng.Reverse = true
	var row *versionRow
	err = tx.Scan(rng, func(key, value []byte) bool {
		_, row, _ = v.decodeVersion(key, value)
		return row == nil
	})
	if err != nil || row == nil {
		return err
	}
	return tx.Delete(nameKey(tenant, row.Name, row.ExpiresAt, row.CreatedAt, id))
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

// indexedRow stands in a store whose credentials are all indexed. The index
// that 1 stood for was in the order of creation.
var indexedRow = []byte("credential-indexed/2")

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
		what, bad := audit.LastChange(tx, r.tenant, r.id)
		if bad != nil { // of which audit verify tells
			if what = audit.CredentialSealed; r.version > 1 {
				what = audit.CredentialRotated
			}
		}
		if err == nil {
			err = errors.Join(tx.Delete(v.createdKey(r)), v.index(tx, r, what))
		}
	}
	return next, err
}

// createdKey is where r stood in the index that was in the order of creation.
func (v *Vault) createdKey(r *record) []byte {
	prefix := namePrefix(r.tenant, v.nameHash(r.tenant, r.name))
	return append(binary.BigEndian.AppendUint64(prefix, uint64(r.createdAt.UnixMicro())), r.id...)
}
