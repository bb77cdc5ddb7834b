package transit

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/secret"
)

// Signatures holds both signatures of one item. KeyID is the id of the public key that verifies
// PQC, as [Transit.PublicKeys] lists it.
type Signatures struct {
	PQC, HMAC []byte
	KeyID     string
}

// Signed is data with the signatures to verify.
type Signed struct {
	Data      secret.Bytes
	PQC, HMAC []byte
}

// PublicKey is the public half of one version of the tenant's signing keys.
type PublicKey = keyring.PublicKey

// Sign signs every item with both algorithms and the tenant's newest signing keys. Errors:
// fault.Forbidden, fault.Invalid, fault.Unavailable.
func (t *Transit) Sign(ctx context.Context, p authz.Principal, data []secret.Bytes) ([]Signatures, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	if err := t.guard.Admit(ctx, p, authz.SignData); err != nil {
		return nil, err
	}
	if err := checkData(data); err != nil {
		return nil, err
	}
	keys, err := t.current(ctx, p.Tenant)
	if err != nil {
		return nil, err
	}
	id := keys.Signing.Public().ID()
	signed := make([]Signatures, len(data))
	for i, d := range data {
		pqc, tag, err := keys.Signing.SignData(d)
		if err != nil {
			return nil, err
		}
		signed[i] = Signatures{PQC: pqc, HMAC: tag, KeyID: id}
	}
	e := entry(audit.DataSigned, p, id, len(data))
	e.Attributes[attributeKeyVersion] = number(keys.Version)
	if err := t.guard.Record(ctx, e); err != nil {
		return nil, err
	}
	return signed, nil
}

// Verify reports for every item whether both its signatures were made with the tenant's keys, of
// any version. Errors: fault.Forbidden, fault.Invalid, fault.Unavailable.
func (t *Transit) Verify(ctx context.Context, p authz.Principal, s []Signed) ([]bool, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	if err := t.guard.Admit(ctx, p, authz.VerifyData); err != nil {
		return nil, err
	}
	data := make([]secret.Bytes, len(s))
	for i := range s {
		data[i] = s[i].Data
	}
	if err := checkData(data); err != nil {
		return nil, err
	}
	keys, err := t.current(ctx, p.Tenant)
	if err != nil {
		return nil, err
	}
	valid := make([]bool, len(s))
	failed := 0
	for i := range s {
		if valid[i], err = keys.verifyData(ctx, &s[i]); err != nil {
			return nil, err
		}
		if !valid[i] {
			failed++
		}
	}
	e := entry(audit.DataVerified, p, "", len(s))
	if failed > 0 {
		e.Attributes[attributeFailed] = strconv.Itoa(failed)
	}
	if err := t.guard.Record(ctx, e); err != nil {
		return nil, err
	}
	return valid, nil
}

// verifyData reports whether both signatures of s are valid. A tag that names no version of the
// tenant's keys is checked with the newest version, where it fails too. So it fails after the same
// work as any other.
func (k *keySet) verifyData(ctx context.Context, s *Signed) (bool, error) {
	version, err := dualsig.DataKeyVersion(s.HMAC)
	if err != nil || version == 0 || version > k.Version {
		version = k.Version
	}
	keys, err := k.at(ctx, version)
	if err != nil {
		return false, err
	}
	return keys.Signing.VerifyData(s.Data, s.PQC, s.HMAC), nil
}

// PublicKeys returns the public keys of all versions of the tenant's signing keys, newest first.
// Errors: fault.Forbidden, fault.Unavailable.
func (t *Transit) PublicKeys(ctx context.Context, p authz.Principal) ([]PublicKey, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	if err := t.guard.Admit(ctx, p, authz.ReadPublicKeys); err != nil {
		return nil, err
	}
	keys, err := t.keys.PublicKeys(ctx, p.Tenant)
	e := audit.Event{
		Type: audit.PublicKeyRead, Outcome: audit.Success, Principal: p,
		Resource:   audit.Resource{Type: audit.TenantResource, ID: string(p.Tenant)},
		Attributes: map[string]string{attributeCount: strconv.Itoa(len(keys))},
	}
	if errors.Is(err, fault.Internal) {
		return nil, t.guard.Refuse(ctx, e, audit.Failure, reasonIntegrity, err)
	}
	if err != nil {
		return nil, fmt.Errorf("reading public keys: %w", err)
	}
	if err := t.guard.Record(ctx, e); err != nil {
		return nil, err
	}
	return keys, nil
}
