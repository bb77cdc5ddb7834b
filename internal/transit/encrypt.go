package transit

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Encrypt encrypts every item with the newest version of the key. An empty keyID means the tenant's
// default key. Errors: fault.Forbidden, fault.NotFound for a key that does not exist,
// fault.Invalid, fault.Unavailable.
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

// sealingKey is the version of a key that encrypts, with the key that signs.
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

// sealing returns the newest version of a key. It creates a missing default key and rotates a due
// key first. When another key is missing, sealing records e as denied.
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

// lookup returns a key and the seed of its newest version, or nil. An empty id means the default
// key.
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
			err = errDamaged // a row names a key or seed that is missing
		}
		return err
	})
	if err != nil {
		return nil, nil, fmt.Errorf("reading a key: %w", err)
	}
	return key, seed, nil
}

// Opened is the result for one ciphertext: data, which the caller zeroes, or Err, which is always
// [ErrDecrypt].
type Opened struct {
	Data       secret.Bytes
	KeyID      string
	KeyVersion uint32
	Err        error
}

// Decrypt decrypts every item with the version of the key that it names. An empty keyID allows all
// keys of the tenant. An item that does not decrypt does not stop the others. Errors of the whole
// call: fault.Forbidden, fault.NotFound for a keyID that does not exist, fault.Invalid for too many
// items, fault.Unavailable.
func (t *Transit) Decrypt(ctx context.Context, p authz.Principal, keyID string, c []Ciphertext) ([]Opened, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	if err := t.guard.Admit(ctx, p, authz.DecryptData); err != nil {
		return nil, err
	}
	if err := checkCount(len(c)); err != nil {
		return nil, err
	}
	keys, err := t.current(ctx, p.Tenant)
	if err != nil {
		return nil, err
	}
	e := entry(audit.DataDecrypted, p, validID(keyID), len(c))
	a, err := t.open(ctx, keys, keyID, c, e)
	if err != nil {
		return nil, err
	}
	a.describe(&e)
	if err := t.guard.Record(ctx, e); err != nil {
		a.zero()
		return nil, err
	}
	return a.opened, nil
}

// Rewrap encrypts a ciphertext again with the newest version of the key. The data does not leave
// the process. An empty keyID means the key that the ciphertext names. Errors: [ErrDecrypt],
// fault.Forbidden, fault.NotFound for a keyID that does not exist, fault.Unavailable.
func (t *Transit) Rewrap(ctx context.Context, p authz.Principal, keyID string, c Ciphertext) (Ciphertext, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	if err := t.guard.Admit(ctx, p, authz.RewrapData); err != nil {
		return Ciphertext{}, err
	}
	keys, err := t.current(ctx, p.Tenant)
	if err != nil {
		return Ciphertext{}, err
	}
	e := entry(audit.DataRewrapped, p, validID(keyID), 1)
	a, err := t.open(ctx, keys, keyID, []Ciphertext{c}, e)
	if err != nil {
		return Ciphertext{}, err
	}
	defer a.zero()
	a.describe(&e)
	if a.failed > 0 {
		if err := t.guard.Record(ctx, e); err != nil {
			return Ciphertext{}, err
		}
		return Ciphertext{}, ErrDecrypt
	}
	key, err := t.sealing(ctx, keys, a.opened[0].KeyID, e)
	if err != nil {
		return Ciphertext{}, err
	}
	again, err := key.seal(a.opened[0].Data)
	if err != nil {
		return Ciphertext{}, err
	}
	e.Attributes[attributeKeyVersion] = number(key.version)
	if err := t.guard.Record(ctx, e); err != nil {
		return Ciphertext{}, err
	}
	return again, nil
}

// attempt is the result of a call that opens items.
type attempt struct {
	opened  []Opened
	keyID   string // key that the call or all its items name; empty when the items name several
	failed  int
	damaged bool // a stored key is damaged
}

// open opens every item. When keyID names no key, open records e as denied.
func (t *Transit) open(ctx context.Context, keys *keySet, keyID string, c []Ciphertext, e audit.Event) (*attempt, error) {
	tenant := e.Principal.Tenant
	items := make([]item, len(c))
	for i := range c {
		items[i] = t.newItem(c[i], keys.Keys, keyID)
	}
	missing := false
	a := &attempt{opened: make([]Opened, len(items)), keyID: validID(keyID)}
	err := t.store.View(ctx, func(rd store.Reader) error {
		if keyID != "" {
			key, err := t.get(rd, tenant, validID(keyID))
			if errors.Is(err, fault.Internal) {
				a.damaged, err = true, nil
			} else {
				missing = key == nil
			}
			if err != nil {
				return err
			}
		}
		for i := range items {
			if err := items[i].read(rd, tenant); err != nil {
				return err
			}
		}
		return nil
	})
	switch {
	case err != nil:
		return nil, fmt.Errorf("reading keys: %w", err)
	case missing:
		return nil, t.guard.Refuse(ctx, e, audit.Denied, reasonMissing, errNoKey)
	}
	for i := range items {
		if a.opened[i], err = t.openItem(ctx, keys, &items[i]); err != nil {
			a.zero()
			return nil, err
		}
		if a.opened[i].Err != nil {
			a.failed++
		}
		a.damaged = a.damaged || items[i].damaged
	}
	if keyID == "" {
		a.keyID = common(items)
	}
	return a, nil
}

// item is a ciphertext that is being opened.
type item struct {
	*sealed
	good    bool // nothing known so far prevents opening
	decoy   bool // replaces a malformed ciphertext
	seed    *seedRow
	damaged bool
}

func (t *Transit) newItem(c Ciphertext, current *keyring.Keys, keyID string) item {
	s, err := c.parse()
	if err == nil {
		var signing uint32
		signing, err = dualsig.KeyVersion(s.signature)
		if signing == 0 || signing > current.Version {
			err = errMalformed
		}
	}
	if err != nil {
		return item{sealed: t.decoy.instead(current), decoy: true}
	}
	return item{sealed: s, good: keyID == "" || keyID == s.keyID}
}

func (m *item) read(rd store.Reader, tenant authz.TenantID) (err error) {
	m.seed, err = newestSeed(rd, tenant, m.keyID, m.version)
	if isDamaged(err) {
		m.seed, m.damaged, err = nil, true, nil
	}
	return err
}

// openItem verifies both signatures and then decrypts. When something is already wrong, or a
// signature does not verify, it decrypts with the decoy's key instead, for equal work. An error
// means that the outcome is unknown.
func (t *Transit) openItem(ctx context.Context, keys *keySet, m *item) (Opened, error) {
	kem := t.decoy.kem
	if m.seed != nil {
		key, err := keys.messageKey(ctx, m.keyID, m.seed)
		switch {
		case isDamaged(err):
			m.damaged = true
		case err != nil:
			return Opened{}, err
		default:
			kem = key
		}
	}
	verified, err := keys.verify(ctx, m.sealed)
	if isDamaged(err) {
		m.damaged, err = true, nil
	}
	if err != nil {
		return Opened{}, err
	}
	if !m.good || !verified {
		kem = t.decoy.kem
	}
	data, err := kem.Open(envelope.MessageContext{Tenant: string(keys.tenant), KeyID: m.keyID, Version: m.version}, &m.message)
	if err != nil {
		return Opened{Err: ErrDecrypt}, nil
	}
	return Opened{Data: data, KeyID: m.keyID, KeyVersion: m.version}, nil
}

// verify reports whether both signatures of s are valid. The caller has checked that the version of
// the signing keys that s names exists.
func (k *keySet) verify(ctx context.Context, s *sealed) (bool, error) {
	version, err := dualsig.KeyVersion(s.signature)
	if err != nil {
		return false, nil
	}
	signer, err := k.at(ctx, version)
	if err != nil {
		return false, err
	}
	signed, err := s.signed(k.tenant)
	if err != nil {
		return false, err
	}
	return signer.Signing.Verify(messageContext, signed, s.signature), nil
}

// common returns the id of the key that all items name, or "" when they name several.
func common(items []item) string {
	for _, m := range items {
		if m.decoy || m.keyID != items[0].keyID {
			return ""
		}
	}
	return items[0].keyID
}

// describe writes the result of the attempt into e.
func (a *attempt) describe(e *audit.Event) {
	e.Resource.ID = a.keyID
	if a.failed == 0 {
		if version := a.opened[0].KeyVersion; a.sameVersion(version) {
			e.Attributes[attributeKeyVersion] = number(version)
		}
		return
	}
	e.Outcome = audit.Failure
	e.Attributes[attributeFailed] = strconv.Itoa(a.failed)
	e.Attributes[audit.AttributeReason] = reasonOpen
	if a.damaged {
		e.Attributes[audit.AttributeReason] = reasonIntegrity
	}
}

func (a *attempt) sameVersion(version uint32) bool {
	for _, o := range a.opened {
		if o.KeyVersion != version || o.KeyID != a.opened[0].KeyID {
			return false
		}
	}
	return true
}

func (a *attempt) zero() {
	for _, o := range a.opened {
		o.Data.Zero()
	}
}
