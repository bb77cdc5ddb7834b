// Package transit encrypts and signs data that its callers keep: it has the keys
// and none of the data.
//
// A named key is a row of ML-KEM-768 key pairs, one per version, of which the
// newest encrypts and all decrypt. Every tenant has a default key, made when it
// is first needed. The seeds lie under the tenant's wrapping key, which only the
// KMS opens. A key is rotated on demand and by its period: the background task
// finds the keys that are due in an index ([Transit.RotateDue]), and a key that
// is due when it is about to encrypt is rotated first.
//
// What must stay true:
//   - a ciphertext carries a dual signature of the tenant over all of it, and
//     both parts are verified before anything is decrypted;
//   - what does not decrypt gives [ErrDecrypt] after the same reads and the same
//     work, whatever is wrong with it: a decoy stands in for what is missing;
//   - every call leaves one entry in the audit log before it answers. The
//     entries of a key that was made or rotated by the way are the deployment's.
//
// It keeps no ciphertext, so rotating a key does not change what was encrypted
// before; [Transit.Rewrap] does, one ciphertext at a time.
package transit

import (
	"errors"
	"strconv"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/store"
)

// MaxItems bounds a call. The contract names the same number.
const MaxItems = 100

// ErrDecrypt is the only answer to a ciphertext that does not decrypt. It is of
// no [fault.Kind], because unlike an invalid request it has been recorded.
var ErrDecrypt = errors.New("the ciphertext does not decrypt")

// errNoKey is the answer to every key that is not there for the caller.
var errNoKey = fault.New(fault.NotFound, "there is no key with that id: list the keys to see which there are")

// Reasons in audit entries.
const (
	reasonMissing   = "no_such_key" // foreign and never existing alike
	reasonOpen      = "does_not_open"
	reasonIntegrity = "integrity"
	reasonLimit     = "limit"
)

// Attributes of entries.
const (
	attributeCount      = "count"
	attributeFailed     = "failed"
	attributeKeyVersion = "key_version"
)

// Transit is safe for concurrent use.
type Transit struct {
	store store.Store
	guard *audit.Guard
	keys  *keyring.Ring
	now   func() time.Time
	decoy decoy
}

// New returns the keys in s.
func New(s store.Store, guard *audit.Guard, keys *keyring.Ring, now func() time.Time) *Transit {
	return &Transit{store: s, guard: guard, keys: keys, now: now, decoy: newDecoy()}
}

// timeout bounds a call, a batch too, so that one that cannot be recorded is
// refused within a second whatever hangs.
const timeout = 900 * time.Millisecond

// checkCount refuses what the contract would have refused.
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

// entry is the event of a call on data, which succeeded unless told otherwise.
func entry(what audit.EventType, p authz.Principal, keyID string, count int) audit.Event {
	return audit.Event{
		Type: what, Outcome: audit.Success, Principal: p,
		Resource:   audit.Resource{Type: audit.DataResource, ID: keyID},
		Attributes: map[string]string{attributeCount: strconv.Itoa(count)},
	}
}

func number(v uint32) string { return strconv.FormatUint(uint64(v), 10) }

// validID returns id when it is well formed, and nothing otherwise: only such
// ids are looked up and recorded.
func validID(id string) string {
	if !authz.ValidID(idPrefix, id) {
		return ""
	}
	return id
}

// maxAttempts bounds how often an operation starts again because another one
// changed the key meanwhile.
const maxAttempts = 8

// deployment is the deployment acting of its own accord, on the occasion of p's
// request.
func deployment(p authz.Principal) authz.Principal {
	return authz.Principal{Tenant: p.Tenant, Kind: authz.System, ID: "latticekeep", Scopes: authz.TenantScopes(), RequestID: p.RequestID}
}
