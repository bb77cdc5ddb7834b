package transit

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// namedKey is what is stored of a key besides its seeds, under a MAC.
type namedKey struct {
	tenant authz.TenantID
	id     string
	keyRow
}

type keyRow struct {
	Name         string    `json:"name"`
	Version      uint32    `json:"version"`
	RotationDays int       `json:"rotation_days"`
	Default      bool      `json:"default,omitempty"`
	CreatedAt    time.Time `json:"created_at"`
	RotatedAt    time.Time `json:"rotated_at"`
	NextRotation time.Time `json:"next_rotation_at"`
}

// seedRow is the seed of one version of a key, under one version of the tenant's
// wrapping key; its own key names both. A new wrapping key gives a new row, so
// that the old one is deleted and not overwritten.
type seedRow struct {
	version, wrapping uint32
	blob              []byte
}

func keysPrefix(tenant authz.TenantID) []byte { return []byte("transit/key/" + string(tenant) + "/") }

func keyKey(tenant authz.TenantID, id string) []byte { return append(keysPrefix(tenant), id...) }

func defaultKey(tenant authz.TenantID) []byte { return []byte("transit/default/" + string(tenant)) }

func seedsPrefix(tenant authz.TenantID, id string) []byte {
	return []byte("transit/seed/" + string(tenant) + "/" + id + "/")
}

func versionPrefix(tenant authz.TenantID, id string, version uint32) []byte {
	return fmt.Appendf(seedsPrefix(tenant, id), "%08x/", version)
}

func seedKey(tenant authz.TenantID, id string, version, wrapping uint32) []byte {
	return fmt.Appendf(versionPrefix(tenant, id, version), "%08x", wrapping)
}

// seedContext is what a seed is bound to under the wrapping key.
func seedContext(tenant authz.TenantID, id string, version uint32) string {
	return fmt.Sprintf("transit/%s/%s/%d", tenant, id, version)
}

// Due rows are in the order of time, so that finding the keys that are due reads
// no others. They are hints: what decides is the key's own row.
var dueRange = store.Prefix([]byte("transit/due/"))

func dueKey(k *namedKey) []byte {
	b := binary.BigEndian.AppendUint64([]byte("transit/due/"), uint64(k.NextRotation.UnixMicro()))
	return append(b, string(k.tenant)+"/"+k.id...)
}

// parseDue tells from a due row which key it is of; what is no due row has an id
// that is no key's.
func parseDue(key []byte) (tenant authz.TenantID, id string) {
	rest := bytes.TrimPrefix(key, dueRange.From)
	owner, id, _ := strings.Cut(string(rest[min(8, len(rest)):]), "/")
	return authz.TenantID(owner), id
}

var errDamaged = fault.New(fault.Internal, "a stored encryption key is damaged: restore a backup")

// get returns a key of the tenant, and nil when it has none with that id.
func (t *Transit) get(rd store.Reader, tenant authz.TenantID, id string) (*namedKey, error) {
	key := keyKey(tenant, id)
	b, err := rd.Get(key)
	if err != nil || b == nil {
		return nil, err
	}
	return t.decode(tenant, id, b)
}

func (t *Transit) decode(tenant authz.TenantID, id string, stored []byte) (*namedKey, error) {
	b, err := t.keys.OpenRow(keyKey(tenant, id), stored)
	if err != nil {
		return nil, err
	}
	k := &namedKey{tenant: tenant, id: id}
	if err := json.Unmarshal(b, &k.keyRow); err != nil || k.Version == 0 {
		return nil, errDamaged
	}
	return k, nil
}

// getDefault returns the id of the tenant's default key, empty when it has none
// yet.
func (t *Transit) getDefault(rd store.Reader, tenant authz.TenantID) (string, error) {
	key := defaultKey(tenant)
	b, err := rd.Get(key)
	if err == nil {
		b, err = t.keys.OpenRow(key, b)
	}
	return string(b), err
}

// put stores next, and old's due row gives way to its own. old is nil for a new
// key.
func (t *Transit) put(tx store.Tx, old, next *namedKey) error {
	b, err := json.Marshal(next.keyRow)
	if err != nil {
		return err
	}
	key := keyKey(next.tenant, next.id)
	if err := tx.Put(key, t.keys.SealRow(key, b)); err != nil {
		return err
	}
	if old != nil {
		if err := tx.Delete(dueKey(old)); err != nil {
			return err
		}
	}
	if next.Version == maxVersions {
		return nil // is never rotated again
	}
	return tx.Put(dueKey(next), []byte{})
}

// newestSeed returns the seed of a version of a key, and nil when there is none.
func newestSeed(rd store.Reader, tenant authz.TenantID, id string, version uint32) (*seedRow, error) {
	var row *seedRow
	var bad error
	newest := store.Prefix(versionPrefix(tenant, id, version))
	newest.Reverse = true
	err := rd.Scan(newest, func(key, value []byte) bool {
		row, bad = seedAt(tenant, id, key, value)
		return false
	})
	return row, errors.Join(err, bad)
}

// seeds returns the seeds of all versions of a key, oldest first.
func seeds(rd store.Reader, tenant authz.TenantID, id string) ([]*seedRow, error) {
	var rows []*seedRow
	var bad error
	err := rd.Scan(store.Prefix(seedsPrefix(tenant, id)), func(key, value []byte) bool {
		row, err := seedAt(tenant, id, key, value)
		if err != nil {
			bad = err
			return false
		}
		rows = append(rows, row)
		return true
	})
	return rows, errors.Join(err, bad)
}

func seedAt(tenant authz.TenantID, id string, key, value []byte) (*seedRow, error) {
	version, wrapping, ok := strings.Cut(string(bytes.TrimPrefix(key, seedsPrefix(tenant, id))), "/")
	v, err1 := strconv.ParseUint(version, 16, 32)
	w, err2 := strconv.ParseUint(wrapping, 16, 32)
	if !ok || err1 != nil || err2 != nil {
		return nil, errDamaged
	}
	return &seedRow{uint32(v), uint32(w), bytes.Clone(value)}, nil
}
