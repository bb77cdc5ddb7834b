// Package transit encrypts and signs data for its callers. It keeps the keys and none of the data.
//
// A named key is a series of ML-KEM-768 key pairs, one per version. The newest version encrypts,
// and all versions decrypt. Every tenant has a default key, which is created when it is first
// needed. The seeds are wrapped under the tenant's wrapping key, which only the KMS unwraps. A key
// is rotated on demand and by its period: the background task finds due keys in an index
// ([Transit.RotateDue]), and a due key is also rotated before it encrypts.
//
// What must stay true:
//   - a ciphertext carries the tenant's dual signature over all of it, and both parts are verified
//     before anything is decrypted;
//   - every ciphertext that does not decrypt gives [ErrDecrypt] after the same reads and the same
//     work, whatever is wrong with it: a decoy replaces each missing part;
//   - every call leaves one entry in the audit log before it answers. When encrypting first creates
//     or rotates a key, another entry for that names the deployment as the principal.
//
// Transit stores no ciphertext, so rotating a key does not change earlier ciphertexts.
// [Transit.Rewrap] encrypts them again, one at a time.
package transit

import (
	"errors"
	"strconv"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/store"
)

// MaxItems bounds the items of a call. The API contract names the same number.
const MaxItems = 100

// ErrDecrypt is the only answer to a ciphertext that does not decrypt. It has no [fault.Kind],
// because unlike an invalid request it is recorded.
var ErrDecrypt = errors.New("the ciphertext does not decrypt")

// errNoKey is the answer for every key that does not exist for the caller.
var errNoKey = fault.New(fault.NotFound, "there is no key with that id: list the keys to see which there are")

// Reasons in audit entries.
const (
	reasonMissing   = "no_such_key" // the same for another tenant's key and an unknown one
	reasonOpen      = "does_not_open"
	reasonIntegrity = "integrity"
	reasonLimit     = "limit"
)

// Names of attributes in entries.
const (
	attributeCount      = "count"
	attributeFailed     = "failed"
	attributeKeyVersion = "key_version"
)

// Transit is safe for concurrent use.
type Transit struct {
	store store.Store
	guard *guard.Guard
	keys  *keyring.Ring
	now   func() time.Time
	decoy decoy
}

// New returns a Transit that keeps its keys in s.
func New(s store.Store, guard *guard.Guard, keys *keyring.Ring, now func() time.Time) *Transit {
	return &Transit{store: s, guard: guard, keys: keys, now: now, decoy: newDecoy()}
}

// timeout bounds a call, also a batch. If the call cannot be recorded, it is refused within a
// second, even when the store or the KMS hangs.
const timeout = 900 * time.Millisecond

// checkCount refuses a number of items that the API contract does not allow.
func checkCount(n int) error {
	if n < 1 || n > MaxItems {
		return fault.New(fault.Invalid, "there must be 1 to 100 items")
	}
	return nil
}

func checkData(data []secret.Bytes) error {
	for _, d := range data {
		if len(d) > MaxData {
			return fault.New(fault.Invalid, "data must have at most 700 KiB")
		}
	}
	return checkCount(len(data))
}

// entry returns the event of a call on data, with outcome success.
func entry(what audit.EventType, p authz.Principal, keyID string, count int) audit.Event {
	return audit.Event{
		Type: what, Outcome: audit.Success, Principal: p,
		Resource:   audit.Resource{Type: audit.DataResource, ID: keyID},
		Attributes: map[string]string{attributeCount: strconv.Itoa(count)},
	}
}

func number(v uint32) string { return strconv.FormatUint(uint64(v), 10) }

// validID returns id when it is well-formed, and "" otherwise. Only well-formed ids are looked up
// and recorded.
func validID(id string) string {
	if !authz.ValidID(idPrefix, id) {
		return ""
	}
	return id
}

// maxAttempts bounds how often an operation starts again because another operation changed the key
// meanwhile.
const maxAttempts = 8

// deployment returns the principal for what the deployment does on its own during p's request.
func deployment(p authz.Principal) authz.Principal {
	return authz.Principal{Tenant: p.Tenant, Kind: authz.System, ID: "latticekeep", Scopes: authz.TenantScopes(), RequestID: p.RequestID}
}
