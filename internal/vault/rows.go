package vault

import (
	"bytes"
	"encoding/binary"
	"errors"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

const idPrefix = "cred"

// Rows. A new version is a new row and the old one is deleted, which has the
// store scrub what it leaves behind.
func credentialPrefix(tenant authz.TenantID) []byte {
	return []byte("credential/" + string(tenant) + "/")
}

func versionsPrefix(tenant authz.TenantID, id string) []byte {
	return append(credentialPrefix(tenant), id+"/"...)
}

func recordKey(tenant authz.TenantID, id string, version uint64) []byte {
	return binary.BigEndian.AppendUint64(versionsPrefix(tenant, id), version)
}

func ownerKey(tenant authz.TenantID, id string) []byte {
	return []byte("owner/" + string(tenant) + "/" + id)
}

func putRecord(tx store.Tx, r *record) error {
	return tx.Put(recordKey(r.tenant, r.id, r.version), r.encode())
}

// find returns the newest version of a credential, and nil when there is none.
// A row that stands under another key than its own is damage.
func find(rd store.Reader, tenant authz.TenantID, id string) (*record, error) {
	var r *record
	var bad error
	newest := store.Prefix(versionsPrefix(tenant, id))
	newest.Reverse = true
	err := rd.Scan(newest, func(key, value []byte) bool {
		r, bad = recordAt(key, value)
		return false
	})
	return r, errors.Join(err, bad)
}

func recordAt(key, value []byte) (*record, error) {
	return viewRecordAt(key, bytes.Clone(value))
}

// viewRecordAt is recordAt whose result shares value's memory.
func viewRecordAt(key, value []byte) (*record, error) {
	r, err := viewRecord(value)
	if err != nil || string(recordKey(r.tenant, r.id, r.version)) != string(key) {
		return nil, errDamaged
	}
	return r, nil
}

var errMoved = fault.New(fault.Conflict, "the credential changed meanwhile: retry")

// replace puts next in the place of old, if that is still the newest version.
func (v *Vault) replace(tx store.Tx, old, next *record, what audit.EventType) error {
	current, err := find(tx, old.tenant, old.id)
	if err != nil {
		return err
	}
	if current == nil || current.version != old.version {
		return errMoved
	}
	return v.put(tx, next, what, nil)
}

// deleteAll deletes whatever rows there are under a prefix.
func deleteAll(tx store.Tx, prefix []byte) error {
	var keys [][]byte
	err := tx.Scan(store.Prefix(prefix), func(key, _ []byte) bool {
		keys = append(keys, append([]byte(nil), key...))
		return true
	})
	for _, key := range keys {
		err = errors.Join(err, tx.Delete(key))
	}
	return err
}
