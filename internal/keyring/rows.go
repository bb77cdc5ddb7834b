package keyring

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"strconv"
	"strings"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/store"
)

// purpose is the use of a key in a set.
type purpose string

const (
	wrapping purpose = "wrapping"
	signing  purpose = "signing"  // ML-DSA-65 seed: credential records, encrypted data, data that callers sign
	mac      purpose = "mac"      // HMAC-SHA-512 beside the signature, for the same three
	auditing purpose = "audit"    // ML-DSA-65 seed: audit chain
	identity purpose = "identity" // ML-DSA-65 seed: public documents, such as those of sealing keys
	// HMAC key of everything that is stored as a keyed hash or under a MAC, each with its own
	// label: API keys, rows, names of credentials, idempotency keys and their requests, e-mail
	// addresses, refresh tokens and mailed tickets. The keys of access tokens and of report URLs
	// are derived from it.
	apiKeyHash purpose = "api-key-hash"
)

// Sizes in bytes of the keys in a tenant's set and in the deployment's set.
var (
	tenantSet     = map[purpose]int{signing: dualsig.SeedSize, mac: dualsig.MACKeySize}
	deploymentSet = map[purpose]int{auditing: dualsig.SeedSize, identity: dualsig.SeedSize, apiKeyHash: 64}
)

const wrappingKeySize = 32

func setOf(owner authz.TenantID) map[purpose]int {
	if owner == authz.SystemTenant {
		return deploymentSet
	}
	return tenantSet
}

func setPrefix(owner authz.TenantID, version uint32) []byte {
	return fmt.Appendf(nil, "key/%s/%08x/", owner, version)
}

// keyRow returns the key in the store of a set's key. A wrapping key that was moved to another KMS
// key has a different one, see [wrappedKey].
func keyRow(owner authz.TenantID, version uint32, p purpose) []byte {
	return append(setPrefix(owner, version), p...)
}

func currentRow(owner authz.TenantID) []byte { return fmt.Appendf(nil, "key/%s/current", owner) }

// keyContext returns the context that a stored key is bound to, both under the KMS and under the
// wrapping key.
func keyContext(owner authz.TenantID, version uint32, p purpose) string {
	return fmt.Sprintf("%s/%d/%s", owner, version, p)
}

func currentVersion(r store.Reader, owner authz.TenantID) (uint32, error) {
	b, err := r.Get(currentRow(owner))
	if err != nil || b == nil {
		return 0, err
	}
	if len(b) != 4 {
		return 0, errDamaged
	}
	return binary.BigEndian.Uint32(b), nil
}

func random(n int) secret.Bytes {
	b := make(secret.Bytes, n)
	_, _ = rand.Read(b) // never fails
	return b
}

var errDamaged = fault.New(fault.Internal, "the stored keys are damaged: find the row with latticekeep doctor, and restore a backup")

func unavailable(what string, err error) error {
	return fault.Outage(fault.ReasonKMS, "the key-management service cannot be used now: retry, and check it if this lasts", fmt.Errorf("%s: %w", what, err))
}

// deployment is the first row of a store. It identifies the deployment that owns the store.
type deployment struct {
	Format  int    `json:"format"` // for releases before the row of [format.Format]: 1, and 2 once that row was raised
	ChainID string `json:"chain_id"`
	KMSKey  string `json:"kms_key"` // id of the KMS key that the deployment's own set is under
}

var deploymentRow = []byte("deployment")

// wrappedKey is the stored wrapping key of a set. Every set has exactly one such row. A set that
// was moved has it under a new key in the store,
//
//	key/<owner>/<version>/wrapping/<when it was moved: Unix microseconds, 16 hex digits>
//
// because the store wipes a deleted value, but not an overwritten one.
type wrappedKey struct {
	owner   authz.TenantID
	version uint32
	movedAt int64 // Unix microseconds; 0 if never moved
	blob    []byte
}

func (w wrappedKey) row() []byte {
	row := keyRow(w.owner, w.version, wrapping)
	if w.movedAt == 0 {
		return row
	}
	return fmt.Appendf(row, "/%016x", w.movedAt)
}

// parseWrappedKey parses a row of the keyring. ok is false if it is not that of a wrapping key. The
// blob shares the row's memory.
func parseWrappedKey(row, blob []byte) (w wrappedKey, ok bool) {
	parts := strings.Split(string(row), "/")
	if len(parts) != 4 && len(parts) != 5 || parts[3] != string(wrapping) {
		return w, false
	}
	version, err := strconv.ParseUint(parts[2], 16, 32)
	if err != nil {
		return w, false
	}
	w = wrappedKey{owner: authz.TenantID(parts[1]), version: uint32(version), blob: blob}
	if len(parts) == 5 {
		if w.movedAt, err = strconv.ParseInt(parts[4], 16, 64); err != nil {
			return w, false
		}
	}
	return w, bytes.Equal(w.row(), row)
}

// readWrappedKey returns the wrapping key of a set. Error: fault.Internal if it has none, or two. It
// reads all rows of the set, because a store that holds its rows against the log then tells a row
// that somebody has changed from one that is damaged.
func readWrappedKey(rd store.Reader, owner authz.TenantID, version uint32) (w wrappedKey, err error) {
	n, ok := 0, false
	first := keyRow(owner, version, wrapping)
	err = rd.Scan(store.Prefix(setPrefix(owner, version)), func(row, blob []byte) bool {
		if !bytes.HasPrefix(row, first) {
			return true
		}
		n++
		w, ok = parseWrappedKey(row, bytes.Clone(blob))
		return ok && n < 2
	})
	if err == nil && (n != 1 || !ok) {
		err = errDamaged
	}
	return w, err
}

var keyRows = store.Prefix([]byte("key/"))

// givenUpRow returns the key of the row that marks a KMS key as given up: it may be destroyed, and
// nothing may be wrapped with it any more. The row has no value.
func givenUpRow(id string) []byte { return []byte("kms/given-up/" + id) }

// movedFromRow returns the key of the row that records that a set was moved away from a KMS key.
// The row proves that the KMS key is a previous one and not a future one. It has no value.
func movedFromRow(id string) []byte { return []byte("kms/moved-from/" + id) }
