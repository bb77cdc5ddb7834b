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

// purpose is what a key of a set is for.
type purpose string

const (
	wrapping purpose = "wrapping"
	signing  purpose = "signing"  // ML-DSA-65 seed: credential records, encrypted data, data that callers sign
	mac      purpose = "mac"      // HMAC-SHA-512 beside it, for all three
	auditing purpose = "audit"    // ML-DSA-65 seed of the chain
	identity purpose = "identity" // ML-DSA-65 seed of sealing-key documents
	// The HMAC key of whatever is stored as a keyed hash or under a MAC, each with a label of its own: API keys, rows, names of
	// credentials, idempotency keys and their requests, e-mail addresses, refresh tokens and mailed tickets. The key of access
	// tokens is derived from it.
	apiKeyHash purpose = "api-key-hash"
)

// sizes of the keys of a tenant's set and of the deployment's, in bytes.
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

// keyRow is that of a key of a set; a wrapping key that was moved under another
// KMS key has another one, see [wrappedKey].
func keyRow(owner authz.TenantID, version uint32, p purpose) []byte {
	return append(setPrefix(owner, version), p...)
}

func currentRow(owner authz.TenantID) []byte { return fmt.Appendf(nil, "key/%s/current", owner) }

// keyContext is what a stored key is bound to, under the KMS and under the
// wrapping key alike.
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

var errDamaged = fault.New(fault.Internal, "the stored keys are damaged: restore a backup")

func unavailable(what string, err error) error {
	return fault.Wrap(fault.Unavailable, "the key-management service cannot be used now: retry, and check it if this lasts", fmt.Errorf("%s: %w", what, err))
}

// deployment is the first row of a store: whose it is.
type deployment struct {
	Format  int    `json:"format"` // format of the whole store
	ChainID string `json:"chain_id"`
	KMSKey  string `json:"kms_key"` // id of the KMS key that the deployment's own set is under
}

// storeFormat is the only store format there is so far.
const storeFormat = 1

var deploymentRow = []byte("deployment")

// wrappedKey is the wrapping key of a set as it is stored: of every set there is
// one row. A set that was moved has it under a key of its own,
//
//	key/<owner>/<version>/wrapping/<when it was moved: Unix microseconds, 16 hex digits>
//
// since what must be gone is deleted and not overwritten: only that is wiped.
type wrappedKey struct {
	owner   authz.TenantID
	version uint32
	movedAt int64 // Unix microseconds; 0 when it never was
	blob    []byte
}

func (w wrappedKey) row() []byte {
	row := keyRow(w.owner, w.version, wrapping)
	if w.movedAt == 0 {
		return row
	}
	return fmt.Appendf(row, "/%016x", w.movedAt)
}

// parseWrappedKey returns what a row of the keyring is, unless it is not that of
// a wrapping key. The blob shares the row's memory.
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

// readWrappedKey returns the wrapping key of a set. Error: fault.Internal when it
// has none, or two.
func readWrappedKey(rd store.Reader, owner authz.TenantID, version uint32) (w wrappedKey, err error) {
	n, ok := 0, false
	err = rd.Scan(store.Prefix(keyRow(owner, version, wrapping)), func(row, blob []byte) bool {
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

// givenUpRow says that a KMS key is to be destroyed: nothing is wrapped with it
// any more. It has no value.
func givenUpRow(id string) []byte { return []byte("kms/given-up/" + id) }

// movedFromRow says that a set was moved away from a KMS key, which is so a former
// one and not one that is to come. It has no value.
func movedFromRow(id string) []byte { return []byte("kms/moved-from/" + id) }
