// Package nameindex finds credentials by their names: an index of keyed hashes, which changes in the
// transaction of the record. A row counts only when the record that it leads to has the name.
package nameindex

import (
	"bytes"
	"encoding/binary"
	"errors"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/vault/mac"
	"github.com/latticekeep/latticekeep/internal/vault/record"
)

// Object names a SealedCredential. The name and the UID together identify one object, so a new
// object with an old name is another object.
type Object struct {
	Cluster   string `json:"cluster"` // UID
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
}

// In returns the namespace of the object.
func (o Object) In() authz.Namespace {
	return authz.Namespace{Cluster: o.Cluster, Name: o.Namespace}
}

// Index finds credentials by their names. It has three kinds of sections for a name: one for
// credentials without an object, one for the credentials of all objects, and one per namespace. A
// credential without an object has a row in the first. An object's credential has a row in the
// second and in that of its namespace. So a credential that is sealed under the same name over REST
// never hides an object's credential.
type Index struct{ mac.Rows }

// Hash returns the keyed hash of a name, which is its section of credentials without an object.
func (x Index) Hash(tenant authz.TenantID, name string) string {
	return x.KeyedHex("latticekeep/credential-name/v1", []byte(tenant), []byte(name))
}

// Sections returns the sections of a name that hold the credential of o. A nil o means a credential
// without an object.
func (x Index) Sections(tenant authz.TenantID, hash string, o *Object) []string {
	if o == nil {
		return []string{hash}
	}
	return []string{x.objects(tenant, hash), x.namespace(tenant, hash, o.In())}
}

// objects returns the section of all objects.
func (x Index) objects(tenant authz.TenantID, hash string) string {
	return x.KeyedHex("latticekeep/object-name/v1", []byte(tenant), []byte(hash))
}

// namespace returns the section of the objects of one namespace.
func (x Index) namespace(tenant authz.TenantID, hash string, n authz.Namespace) string {
	return x.KeyedHex("latticekeep/namespace-name/v1", []byte(tenant), []byte(hash), []byte(n.Cluster), []byte(n.Name))
}

// Prefix returns the prefix of a section's rows. Their keys are ordered by when the credentials
// expire. So a search for an active credential reads at most one expired row, however many exist.
// The value of a row is its MAC.
func Prefix(tenant authz.TenantID, section string) []byte {
	return []byte("credential-name/" + string(tenant) + "/" + section + "/")
}

// Key returns the key of a credential's row in a section.
func Key(tenant authz.TenantID, section string, expires, created time.Time, id string) []byte {
	key := binary.BigEndian.AppendUint64(Prefix(tenant, section), uint64(expires.UnixMicro()))
	return append(binary.BigEndian.AppendUint64(key, uint64(created.UnixMicro())), id...)
}

// Encode returns the rows of a record that o owns. A nil o means a credential without an object.
func (x Index) Encode(r *record.Record, hash string, o *Object) []mac.Row {
	var rows []mac.Row
	for _, section := range x.Sections(r.Tenant, hash, o) {
		key := Key(r.Tenant, section, r.ExpiresAt, r.CreatedAt, r.ID)
		rows = append(rows, x.Seal(key, nil))
	}
	return rows
}

// Query is a search for one name.
type Query struct {
	tenant           authz.TenantID
	objects, unowned string // sections to read: the credential of an object wins
	now              time.Time
	absent           []byte // key of a row that does not exist
}

// Query returns p's search for a name. A ServiceAccount finds the objects of its own namespace
// only.
func (x Index) Query(p authz.Principal, name string, now time.Time) Query {
	hash := x.Hash(p.Tenant, name)
	q := Query{tenant: p.Tenant, objects: x.objects(p.Tenant, hash), unowned: hash, now: now}
	if p.Kind == authz.ServiceAccount {
		q.objects = x.namespace(p.Tenant, hash, p.Namespace)
	}
	q.absent = Key(p.Tenant, hash, now, now, authz.NewID(record.IDPrefix))
	return q
}

// Find returns the id of the credential, or "" when there is none. In every case it reads both
// sections and verifies one row: the row of the answer, or one that does not exist. So the work
// does not tell whether the name exists.
func (x Index) Find(rd store.Reader, q Query) (string, error) {
	key, row, err := newest(rd, Prefix(q.tenant, q.objects), q.now)
	other, otherRow, err2 := newest(rd, Prefix(q.tenant, q.unowned), q.now)
	if err := errors.Join(err, err2); err != nil {
		return "", err
	}
	if key == nil {
		key, row = other, otherRow
	}
	found := key != nil
	if !found {
		key, row = q.absent, q.absent
	}
	content, bad := x.Open(key, row)
	switch {
	case !found:
		return "", nil
	case bad != nil || len(content) != 0:
		return "", record.ErrDamaged
	}
	return string(key[len(Prefix(q.tenant, q.unowned))+16:]), nil
}

// MaxNamesakes bounds how many active credentials with one name a search compares.
const MaxNamesakes = 1000

// newest returns the row of the newest credential of a section that is active at now. If none is
// active, it returns the row of the credential that expired last, and nil when the section is
// empty.
func newest(rd store.Reader, section []byte, now time.Time) (key, row []byte, err error) {
	rng := store.Prefix(section)
	rng.Reverse = true
	expires := len(section)
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
		return active && seen < MaxNamesakes // all rows that follow expire earlier
	})
	if err == nil && damaged {
		err = record.ErrDamaged
	}
	return key, row, err
}
