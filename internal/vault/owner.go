package vault

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/vault/history"
	"github.com/latticekeep/latticekeep/internal/vault/listing"
	"github.com/latticekeep/latticekeep/internal/vault/mac"
	"github.com/latticekeep/latticekeep/internal/vault/nameindex"
	"github.com/latticekeep/latticekeep/internal/vault/record"
)

// Object names a SealedCredential.
type Object = nameindex.Object

// Owner is an object that owns a credential.
type Owner struct {
	Object
	UID    string
	Tenant authz.TenantID
}

// ownerRow is the operator's memory of an object, stored under its UID: the credential that it
// owns, and what was applied last.
type ownerRow struct {
	Credential      string               `json:"credential"`
	Version         uint64               `json:"version"`
	SpecDigest      []byte               `json:"spec_digest"`
	Form            []byte               `json:"form,omitempty"`       // [Desired.Form]; rows of earlier releases have none
	AdoptedFrom     string               `json:"former_uid,omitempty"` // UID of the object that the credential was adopted from
	Bound           bool                 `json:"bound,omitempty"`      // nobody asked for the adoption, and Form bounds where the values may go
	Values          []byte               `json:"values,omitempty"`     // keyed hash
	ValuesChangedAt time.Time            `json:"values_changed_at,omitzero"`
	SealedAt        map[string]time.Time `json:"sealed_at"`
	SealingKey      string               `json:"sealing_key,omitempty"`
	Trigger         string               `json:"trigger"`
	Object          Object               `json:"object"`
	Previous        *history.Previous    `json:"former,omitempty"`
}

func (row *ownerRow) version() uint64 {
	if row == nil {
		return 0
	}
	return row.Version
}

// ownerRows keeps the rows of objects, and for each credential the UID of the object that owns it.
type ownerRows struct{ mac.Rows }

func ownedKey(tenant authz.TenantID, uid string) []byte {
	return []byte("owned/" + string(tenant) + "/" + uid)
}

func ownerKey(tenant authz.TenantID, id string) []byte {
	return []byte("owner/" + string(tenant) + "/" + id)
}

// hashValues returns a MAC over values. Equal values have equal MACs, however they were sealed.
func (o ownerRows) hashValues(tenant authz.TenantID, uid string, values map[string]secret.Bytes) []byte {
	fields := [][]byte{[]byte(tenant), []byte(uid)}
	for _, key := range slices.Sorted(maps.Keys(values)) {
		fields = append(fields, []byte(key), values[key])
	}
	return o.KeyedHash("latticekeep/owned-values/v1", fields...)
}

// get returns the row of an object, or nil when it owns nothing.
func (o ownerRows) get(rd store.Reader, tenant authz.TenantID, uid string) (*ownerRow, error) {
	key := ownedKey(tenant, uid)
	b, err := rd.Get(key)
	if err != nil || b == nil {
		return nil, err
	}
	return o.decode(key, b)
}

func (o ownerRows) decode(key, stored []byte) (*ownerRow, error) {
	row, err := mac.Decode[ownerRow](o.Rows, key, stored)
	if err == nil && len(row.SpecDigest) != 32 {
		return nil, record.ErrDamaged
	}
	return row, err
}

func (o ownerRows) put(tx store.Tx, tenant authz.TenantID, uid string, row *ownerRow) error {
	if err := tx.Put(ownerKey(tenant, row.Credential), []byte(uid)); err != nil {
		return err
	}
	return mac.Put(o.Rows, tx, ownedKey(tenant, uid), row)
}

// ownership says which object owns a credential.
type ownership struct {
	owned   bool
	row     *ownerRow // nil when no object owns the credential, or when the object's row names another one
	damaged bool      // the row of the object is damaged
}

// hides reports whether the credential does not exist for p: a ServiceAccount does not see the
// credentials of objects in other namespaces.
func (o ownership) hides(p authz.Principal) bool {
	return o.owned && listing.Hides(p) && (o.row == nil || p.Namespace != o.row.Object.In())
}

// of returns which object owns a credential. It reads and verifies the same number of rows whether
// an object owns the credential or not.
func (o ownerRows) of(rd store.Reader, tenant authz.TenantID, id string) (by ownership, err error) {
	owner, err := rd.Get(ownerKey(tenant, id))
	if err != nil {
		return by, err
	}
	key := ownedKey(tenant, string(owner))
	if owner == nil || len(key) > store.MaxKeySize {
		key = ownedKey(tenant, id) // no object has this UID
	}
	stored, err := rd.Get(key)
	if err != nil {
		return by, err
	}
	exists := stored != nil
	if !exists {
		stored = key
	}
	row, bad := o.decode(key, stored)
	by.owned, by.damaged = owner != nil, exists && bad != nil
	if bad == nil && row.Credential == id {
		by.row = row
	}
	return by, nil
}

// visit calls f with every row of every tenant. A damaged row is nil. One that somebody else changed
// or removed is an error: it may be the last that needs a sealing key.
func (o ownerRows) visit(ctx context.Context, s store.Store, f func(tenant authz.TenantID, uid string, row *ownerRow)) error {
	var calls []func()
	err := s.View(ctx, func(r store.Reader) error {
		calls = nil
		return r.Scan(store.Prefix([]byte("owned/")), func(key, value []byte) bool {
			_, rest, _ := strings.Cut(string(key), "/")
			tenant, uid, _ := strings.Cut(rest, "/")
			key, value = bytes.Clone(key), bytes.Clone(value)
			calls = append(calls, func() { row, _ := o.decode(key, value); f(authz.TenantID(tenant), uid, row) })
			return true
		})
	})
	if err != nil {
		return fmt.Errorf("reading what objects own: %w", err)
	}
	for _, call := range calls {
		call()
	}
	return nil
}
