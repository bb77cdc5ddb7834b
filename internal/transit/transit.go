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
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Bounds of a call. The contract names the same ones.
const (
	MaxData  = 700 << 10 // bytes of one item
	MaxItems = 100
)

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

// Encrypt encrypts every item with the newest version of the key; an empty keyID
// means the tenant's default key. Errors: fault.Forbidden, fault.NotFound for a
// key that is not there, fault.Invalid, fault.Unavailable.
func (t *Transit) Encrypt(ctx context.Context, p authz.Principal, keyID string, data []secret.Bytes) ([]Ciphertext, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	if err := t.guard.Admit(ctx, p, authz.EncryptData); err != nil {
		return nil, err
	}
	if err := checkData(data); err != nil {
		return nil, err
	}
	keys, err := t.current(ctx, p.Tenant)
	if err != nil {
		return nil, err
	}
	e := entry(audit.DataEncrypted, p, validID(keyID), len(data))
	key, err := t.sealing(ctx, keys, keyID, e)
	if err != nil {
		return nil, err
	}
	answer := make([]Ciphertext, len(data))
	for i, d := range data {
		if answer[i], err = key.seal(d); err != nil {
			return nil, err
		}
	}
	e.Resource.ID, e.Attributes[attributeKeyVersion] = key.id, number(key.version)
	if err := t.guard.Record(ctx, e); err != nil {
		return nil, err
	}
	return answer, nil
}

// sealingKey is the version of a key that encrypts, and who signs.
type sealingKey struct {
	tenant  authz.TenantID
	id      string
	version uint32
	kem     *envelope.KEMKey
	signing *dualsig.Key
}

func (k *sealingKey) seal(plaintext secret.Bytes) (Ciphertext, error) {
	c := envelope.MessageContext{Tenant: string(k.tenant), KeyID: k.id, Version: k.version}
	message, err := k.kem.Seal(c, plaintext)
	if err != nil {
		return Ciphertext{}, err
	}
	s := &sealed{keyID: k.id, version: k.version, message: *message}
	signed, err := s.signed(k.tenant)
	if err != nil {
		return Ciphertext{}, err
	}
	if s.signature, err = k.signing.Sign(messageContext, signed); err != nil {
		return Ciphertext{}, fmt.Errorf("signing a ciphertext: %w", err)
	}
	return s.join()
}

// maxAttempts bounds how often an operation starts again because another one
// changed the key meanwhile.
const maxAttempts = 8

// sealing returns the newest version of a key, which it makes if it is a default
// key that is not there yet, and rotates if it is due. When there is no key, that
// is recorded as the outcome of e.
func (t *Transit) sealing(ctx context.Context, keys *keySet, keyID string, e audit.Event) (*sealingKey, error) {
	p := e.Principal
	for range maxAttempts {
		key, seed, err := t.lookup(ctx, p.Tenant, keyID)
		switch {
		case errors.Is(err, fault.Internal):
			return nil, t.guard.Refuse(ctx, e, audit.Failure, reasonIntegrity, err)
		case err != nil:
			return nil, err
		case key == nil && keyID == "":
			if err := t.createDefault(ctx, deployment(p), keys.Keys); err != nil {
				return nil, err
			}
			continue
		case key == nil:
			return nil, t.guard.Refuse(ctx, e, audit.Denied, reasonMissing, errNoKey)
		case key.due(t.now()):
			_, err := t.rotate(ctx, deployment(p), key, keys, false)
			if errors.Is(err, fault.Internal) {
				return nil, t.guard.Refuse(ctx, e, audit.Failure, reasonIntegrity, err)
			}
			if err != nil && !errors.Is(err, fault.Conflict) {
				return nil, err
			}
			continue
		}
		kem, err := keys.messageKey(ctx, key.id, seed)
		if errors.Is(err, fault.Internal) {
			return nil, t.guard.Refuse(ctx, e, audit.Failure, reasonIntegrity, err)
		}
		if err != nil {
			return nil, err
		}
		return &sealingKey{p.Tenant, key.id, key.Version, kem, keys.Signing}, nil
	}
	return nil, fault.Wrap(fault.Unavailable, fault.Unavailable.Error(), errMoved)
}

// lookup returns a key and the seed of its newest version, or nil. An empty id
// is the default key.
func (t *Transit) lookup(ctx context.Context, tenant authz.TenantID, id string) (key *namedKey, seed *seedRow, err error) {
	err = t.store.View(ctx, func(rd store.Reader) (err error) {
		byDefault := id == ""
		if byDefault {
			if id, err = t.getDefault(rd, tenant); err != nil || id == "" {
				return err
			}
		}
		if key, err = t.get(rd, tenant, validID(id)); err != nil {
			return err
		}
		if key != nil {
			seed, err = newestSeed(rd, tenant, id, key.Version)
		}
		if err == nil && seed == nil && (byDefault || key != nil) {
			err = errDamaged // a row names one that is not there
		}
		return err
	})
	if err != nil {
		return nil, nil, fmt.Errorf("reading a key: %w", err)
	}
	return key, seed, nil
}

// deployment is the deployment acting of its own accord, on the occasion of p's
// request.
func deployment(p authz.Principal) authz.Principal {
	return authz.Principal{Tenant: p.Tenant, Kind: authz.System, ID: "latticekeep", Scopes: authz.TenantScopes(), RequestID: p.RequestID}
}
