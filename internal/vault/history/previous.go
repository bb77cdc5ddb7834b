package history

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

// PreviousVersion names the version of an object's credential that the last rotation replaced,
// while it is readable. Meanwhile consumers move to the new values without an outage. A credential
// has at most one. The object's row, which is under a MAC, says which record it is and when it
// ends. Any other record in its place is ignored.
type PreviousVersion struct {
	Version uint64
	Until   time.Time
}

// Previous is the part of an object's row about the previous version.
type Previous struct {
	Version uint64    `json:"version"`
	Until   time.Time `json:"until"`
	Digest  string    `json:"digest"` // digest of the record
}

// Overlap returns the part of the object's row about old when new values replace it at now. It
// returns nil when old ends at once.
func Overlap(old *record.Record, overlap time.Duration, now time.Time) *Previous {
	p := &Previous{Version: old.Version, Until: now.Add(overlap).Truncate(time.Microsecond), Digest: old.Digest()}
	if old.ExpiresAt.Before(p.Until) {
		p.Until = old.ExpiresAt
	}
	if !p.Readable(now) {
		return nil
	}
	return p
}

// Readable reports whether there is a previous version that has not ended.
func (p *Previous) Readable(now time.Time) bool { return p != nil && now.Before(p.Until) }

// Find returns the previous version that p names of a credential. It returns nil when that version
// has ended, is missing or is another record.
func (p *Previous) Find(rd store.Reader, tenant authz.TenantID, id string, now time.Time) (*PreviousVersion, error) {
	if !p.Readable(now) {
		return nil, nil
	}
	key := PreviousKey(tenant, id, p.Version)
	stored, err := rd.Get(key)
	if err != nil || stored == nil {
		return nil, err
	}
	if r, bad := PreviousAt(key, stored); bad == nil && r.Digest() == p.Digest {
		return &PreviousVersion{p.Version, p.Until}, nil
	}
	return nil, nil
}

// Put stores the record that p names, of the credential that the object with the UID owns.
func (p *Previous) Put(tx store.Tx, tenant authz.TenantID, uid, id string, stored []byte) error {
	return errors.Join(
		tx.Put(PreviousKey(tenant, id, p.Version), stored),
		tx.Put(EndKey(p.Until, tenant, uid), nil),
	)
}

// Delete deletes all previous versions of a credential; p may be nil.
func (p *Previous) Delete(tx store.Tx, tenant authz.TenantID, uid, id string) error {
	if err := mac.DeleteAll(tx, PreviousPrefix(tenant, id)); err != nil || p == nil {
		return err
	}
	return tx.Delete(EndKey(p.Until, tenant, uid))
}

// PreviousFamily begins the keys of all previous versions.
const PreviousFamily = "former/"

// PreviousPrefix returns the prefix of a credential's previous versions. Each version has its own
// key, so the earlier one is deleted and not overwritten.
func PreviousPrefix(tenant authz.TenantID, id string) []byte {
	return []byte(PreviousFamily + string(tenant) + "/" + id + "/")
}

// PreviousKey returns the key of one previous version.
func PreviousKey(tenant authz.TenantID, id string, version uint64) []byte {
	return binary.BigEndian.AppendUint64(PreviousPrefix(tenant, id), version)
}

// PreviousAt decodes a previous version. Error: record.ErrDamaged, also for a row under the
// key of another version.
func PreviousAt(key, stored []byte) (*record.Record, error) {
	r, err := record.Decode(stored)
	if err != nil || string(PreviousKey(r.Tenant, r.ID, r.Version)) != string(key) {
		return nil, record.ErrDamaged
	}
	return r, nil
}

// endPrefix begins the keys of the index of ends. The index has no MAC; it is compared with the
// object's row.
var endPrefix = []byte("former-end/")

// EndKey returns the key in the index of ends for the object with the UID.
func EndKey(until time.Time, tenant authz.TenantID, uid string) []byte {
	b := binary.BigEndian.AppendUint64(bytes.Clone(endPrefix), uint64(until.UnixMicro()))
	return append(b, string(tenant)+"/"+uid...)
}

// Due returns the rows of the index whose end is reached.
func Due(now time.Time) store.Range {
	return store.Range{From: endPrefix, To: EndKey(now.Add(time.Microsecond), "", "")}
}

// ParseEndKey returns which object a row of the index names.
func ParseEndKey(key []byte) (tenant authz.TenantID, uid string) {
	name, after, _ := bytes.Cut(key[min(len(key), len(endPrefix)+8):], []byte("/"))
	return authz.TenantID(name), string(after)
}
