// Package history keeps what remains of the versions of a credential: a line for each of the newest
// ones, without its values, and the record of the previous version while it stays readable. The
// vault decides when a version begins and ends; the package only reads and writes the rows.
package history

import (
	"encoding/binary"
	"errors"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/vault/mac"
	"github.com/latticekeep/latticekeep/internal/vault/nameindex"
	"github.com/latticekeep/latticekeep/internal/vault/record"
)

// MaxVersions bounds how many lines a credential has.
const MaxVersions = 100

// Version is the metadata of one version of a credential.
type Version struct {
	Number    uint64
	Change    string // event that created it: sealed, rotated or reencrypted
	Current   bool
	Readable  bool // it has values: the current one, a kept one, or the previous one of an object's credential
	SealedAt  time.Time
	ExpiresAt time.Time // as sealed, even if a later version ended it earlier
}

// changes maps each event to the change that [Version] names.
var changes = map[audit.EventType]string{
	audit.CredentialSealed:      "sealed",
	audit.CredentialRotated:     "rotated",
	audit.CredentialReencrypted: "reencrypted",
}

// Line is the stored row of one version. It outlives the version. It also says where the version is
// in the name index, so a credential with a damaged record can be removed from the index.
type Line struct {
	Change    string            `json:"change"`
	CreatedAt time.Time         `json:"created_at"` // time of the first version
	SealedAt  time.Time         `json:"sealed_at"`
	ExpiresAt time.Time         `json:"expires_at"`
	Name      string            `json:"name"`             // keyed hash, as in the index
	Object    *nameindex.Object `json:"object,omitempty"` // the owner at that time
}

// Family begins the keys of all lines.
const Family = "credential-version/"

// Prefix begins the keys of a credential's lines.
func Prefix(tenant authz.TenantID, id string) []byte {
	return []byte(Family + string(tenant) + "/" + id + "/")
}

// Key returns the key of one line.
func Key(tenant authz.TenantID, id string, version uint64) []byte {
	return binary.BigEndian.AppendUint64(Prefix(tenant, id), version)
}

// Rows reads and writes lines. It is safe for concurrent use.
type Rows struct{ mac.Rows }

func (h Rows) decode(key, stored []byte) (uint64, *Line, error) {
	line, err := mac.Decode[Line](h.Rows, key, stored)
	if err != nil {
		return 0, nil, err
	}
	if len(key) < 8 {
		return 0, nil, record.ErrDamaged
	}
	return binary.BigEndian.Uint64(key[len(key)-8:]), line, nil
}

// Encode returns the line of r, which change made. hash is that of its name.
func (h Rows) Encode(r *record.Record, change audit.EventType, hash string, o *nameindex.Object) (mac.Row, error) {
	return mac.Encode(h.Rows, Key(r.Tenant, r.ID, r.Version), Line{
		Change: changes[change], CreatedAt: r.CreatedAt, SealedAt: r.SealedAt, ExpiresAt: r.ExpiresAt,
		Name: hash, Object: o,
	})
}

// Trim deletes the line that newest pushes out of the history.
func (h Rows) Trim(tx store.Tx, newest *record.Record) error {
	if newest.Version <= MaxVersions {
		return nil
	}
	return tx.Delete(Key(newest.Tenant, newest.ID, newest.Version-MaxVersions))
}

// List returns the versions of a credential, newest first. current is the credential's record, or
// nil. It returns record.ErrDamaged when current has no line.
func (h Rows) List(rd store.Reader, tenant authz.TenantID, id string, current *record.Record) ([]Version, error) {
	list := []Version{}
	rng := store.Prefix(Prefix(tenant, id))
	rng.Reverse = true
	var bad error
	err := rd.Scan(rng, func(key, value []byte) bool {
		number, line, err := h.decode(key, value)
		if err != nil {
			bad = err
			return false
		}
		list = append(list, Version{
			Number: number, Change: line.Change, Current: current != nil && number == current.Version,
			SealedAt: line.SealedAt, ExpiresAt: line.ExpiresAt,
		})
		return true
	})
	if err := errors.Join(err, bad); err != nil {
		return nil, err
	}
	if current != nil && (len(list) == 0 || !list[0].Current) {
		return nil, record.ErrDamaged
	}
	return list, nil
}

// Newest returns the newest line that can be read, or nil.
func (h Rows) Newest(rd store.Reader, tenant authz.TenantID, id string) (line *Line, err error) {
	rng := store.Prefix(Prefix(tenant, id))
	rng.Reverse = true
	err = rd.Scan(rng, func(key, value []byte) bool {
		_, line, _ = h.decode(key, value)
		return line == nil
	})
	return line, err
}
