package transit

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
)

// namedKey is the stored row of a key, without its seeds, under a MAC.
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

// seedRow is the seed of one version of a key under one version of the tenant's wrapping key. The
// row's key names both versions. A new wrapping key gives a new row, so the old one is deleted and
// not overwritten.
type seedRow struct {
	version, wrapping uint32
	blob              []byte
}

// maxVersions is more than a key with daily rotation reaches in ten years. It is small enough to
// encrypt all versions again in one transaction.
const maxVersions = 4096

// versionRow is the stored row of one version of a key, without its seed, under a MAC.
type versionRow struct {
	CreatedAt time.Time `json:"created_at"`
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

func versionRowsPrefix(tenant authz.TenantID, id string) []byte {
	return []byte("transit/version/" + string(tenant) + "/" + id + "/")
}

func versionRowKey(tenant authz.TenantID, id string, version uint32) []byte {
	return fmt.Appendf(versionRowsPrefix(tenant, id), "%08x", version)
}

// seedContext returns the context that binds a seed under the wrapping key.
func seedContext(tenant authz.TenantID, id string, version uint32) string {
	return fmt.Sprintf("transit/%s/%s/%d", tenant, id, version)
}

// dueRange holds the due rows in the order of time, so a search for due keys reads no other rows.
// Due rows are only hints: the key's own row decides.
var dueRange = store.Prefix([]byte("transit/due/"))

func dueKey(k *namedKey) []byte {
	b := binary.BigEndian.AppendUint64([]byte("transit/due/"), uint64(k.NextRotation.UnixMicro()))
	return append(b, string(k.tenant)+"/"+k.id...)
}

// parseDue returns the key that a due row names. For any other row it returns an id that no key
// has.
func parseDue(key []byte) (tenant authz.TenantID, id string) {
	rest := bytes.TrimPrefix(key, dueRange.From)
	owner, id, _ := strings.Cut(string(rest[min(8, len(rest)):]), "/")
	return authz.TenantID(owner), id
}

var errDamaged = fault.New(fault.Internal, "a stored encryption key is damaged: find the row with latticekeep doctor, and restore a backup")

// isDamaged reports whether an error is about what is stored: a row that cannot be read, or that is
// not the one that was written last.
func isDamaged(err error) bool { return errors.Is(err, fault.Internal) || state.IsRefused(err) }

// get returns a key of the tenant, or nil when the tenant has none with that id.
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

// getDefault returns the id of the tenant's default key, or "" when it has none yet.
func (t *Transit) getDefault(rd store.Reader, tenant authz.TenantID) (string, error) {
	key := defaultKey(tenant)
	b, err := rd.Get(key)
	if err == nil {
		b, err = t.keys.OpenRow(key, b)
	}
	return string(b), err
}

// put stores next, which has a new newest version, and replaces old's due row by next's. old is nil
// for a new key.
func (t *Transit) put(tx store.Tx, old, next *namedKey) error {
	b, err := json.Marshal(next.keyRow)
	if err != nil {
		return err
	}
	key := keyKey(next.tenant, next.id)
	if err := tx.Put(key, t.keys.SealRow(key, b)); err != nil {
		return err
	}
	if err := t.putVersion(tx, next); err != nil {
		return err
	}
	if old != nil {
		if err := tx.Delete(dueKey(old)); err != nil {
			return err
		}
	}
	if next.Version == maxVersions {
		return nil // it is never rotated again
	}
	return tx.Put(dueKey(next), []byte{})
}

// putVersion stores the time of the key's newest version.
func (t *Transit) putVersion(tx store.Tx, k *namedKey) error {
	b, err := json.Marshal(versionRow{k.RotatedAt})
	if err != nil {
		return err
	}
	key := versionRowKey(k.tenant, k.id, k.Version)
	return tx.Put(key, t.keys.SealRow(key, b))
}

// versions returns the newest versions of a key, newest first. It reads the rows of all versions: a
// store that holds its rows against the log then refuses one that somebody has changed.
func (t *Transit) versions(rd store.Reader, k *namedKey) ([]KeyVersion, error) {
	list := make([]KeyVersion, min(int(k.Version), MaxKeyVersions))
	for i := range list {
		list[i] = KeyVersion{Number: k.Version - uint32(i), Current: i == 0}
	}
	prefix := versionRowsPrefix(k.tenant, k.id)
	oldest := versionRowKey(k.tenant, k.id, list[len(list)-1].Number)
	var bad error
	err := rd.Scan(store.Prefix(prefix), func(key, value []byte) bool {
		if bytes.Compare(key, oldest) < 0 {
			return true
		}
		version, err := strconv.ParseUint(string(key[len(prefix):]), 16, 32)
		var b []byte
		if err == nil {
			b, err = t.keys.OpenRow(key, value)
		}
		var row versionRow
		if err != nil || version > uint64(k.Version) || json.Unmarshal(b, &row) != nil {
			bad = errDamaged
			return false
		}
		list[uint64(k.Version)-version].CreatedAt = row.CreatedAt
		return true
	})
	if err != nil || bad != nil {
		return nil, errors.Join(err, bad)
	}
	// The times of the newest and the first version are in the key's own row.
	list[0].CreatedAt = k.RotatedAt
	if last := &list[len(list)-1]; last.Number == 1 {
		last.CreatedAt = k.CreatedAt
	}
	if slices.ContainsFunc(list, func(v KeyVersion) bool { return v.CreatedAt.IsZero() }) {
		return nil, errDamaged
	}
	return list, nil
}

// newestSeed returns the seed of a version of a key, under its newest wrapping key, or nil when
// there is none.
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

// keySet holds a tenant's keys for one operation: the newest version, and the earlier versions that
// something names. It asks for each version once, even when the ring caches nothing and a batch
// names the version a hundred times. It is not safe for concurrent use.
type keySet struct {
	*keyring.Keys // newest version

	ring    *keyring.Ring
	tenant  authz.TenantID
	earlier map[uint32]keysOrError
}

type keysOrError struct {
	keys *keyring.Keys
	err  error
}

// current returns the tenant's newest keys.
func (t *Transit) current(ctx context.Context, tenant authz.TenantID) (*keySet, error) {
	keys, err := t.keys.Current(ctx, tenant)
	if err != nil {
		return nil, fmt.Errorf("unwrapping the tenant's keys: %w", err)
	}
	return &keySet{keys, t.keys, tenant, make(map[uint32]keysOrError)}, nil
}

// at returns one version of the tenant's keys. An error is remembered for the rest of the
// operation.
func (s *keySet) at(ctx context.Context, version uint32) (*keyring.Keys, error) {
	if version == s.Version {
		return s.Keys, nil
	}
	known, ok := s.earlier[version]
	if !ok {
		known.keys, known.err = s.ring.Version(ctx, s.tenant, version)
		s.earlier[version] = known
	}
	if known.err != nil {
		return nil, fmt.Errorf("unwrapping earlier keys: %w", known.err)
	}
	return known.keys, nil
}

// messageKey opens a seed with the wrapping key that it names.
func (s *keySet) messageKey(ctx context.Context, id string, seed *seedRow) (*envelope.KEMKey, error) {
	wrapper, err := s.at(ctx, seed.wrapping)
	if err != nil {
		return nil, err
	}
	return wrapper.MessageKey(seedContext(s.tenant, id, seed.version), seed.blob)
}

// KeyVersion is the public information about one version of a key.
type KeyVersion struct {
	Number    uint32
	CreatedAt time.Time
	Current   bool // encrypts new data
}

// MaxKeyVersions bounds the versions of a key that [Transit.Key] returns.
const MaxKeyVersions = 100
