package v2

import (
	"context"
	"time"
	"unicode/utf8"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/vault"
)

// credential is the metadata of a vault entry.
type credential struct {
	CredentialID   string    `json:"credential_id"`
	Name           string    `json:"name"`
	CredentialType string    `json:"credential_type"`
	Version        uint64    `json:"version"`
	Status         string    `json:"status"`
	Owned          bool      `json:"owned"`
	CreatedAt      time.Time `json:"created_at"`
	SealedAt       time.Time `json:"sealed_at"`
	ExpiresAt      time.Time `json:"expires_at"`
}

func metadata(c vault.Credential) credential {
	status := "active"
	if c.Expired {
		status = "expired"
	}
	return credential{
		CredentialID: c.ID, Name: c.Name, CredentialType: c.Type, Version: c.Version,
		Status: status, Owned: c.Owned,
		CreatedAt: c.CreatedAt.UTC(), SealedAt: c.SealedAt.UTC(), ExpiresAt: c.ExpiresAt.UTC(),
	}
}

type credentialAnswer struct {
	success
	credential
}

type sealRequest struct {
	Name           string          `json:"name"`
	CredentialType string          `json:"credential_type"`
	Values         map[string]text `json:"values"`
	TTLDays        *int            `json:"ttl_days"`
}

func (a *API) seal(ctx context.Context, p authz.Principal, in input) (any, error) {
	var body sealRequest
	err := decode(in.body, &body)
	values := make(map[string]secret.Bytes, len(body.Values))
	for key, value := range body.Values {
		values[key] = secret.Bytes(value)
	}
	defer zero(values)
	if err != nil {
		return nil, err
	}
	r := vault.SealRequest{Name: body.Name, Type: body.CredentialType, Values: values}
	if body.TTLDays != nil {
		// To the vault zero means the default; here the absent field does.
		if r.TTLDays = *body.TTLDays; r.TTLDays == 0 {
			return nil, fault.New(fault.Invalid, "ttl_days is from 1 to 3650")
		}
	}
	c, err := a.Vault.Seal(ctx, p, r)
	if err != nil {
		return nil, err
	}
	return credentialAnswer{success{true}, metadata(c)}, nil
}

type credentials struct {
	success
	Credentials []credential `json:"credentials"`
	NextCursor  string       `json:"next_cursor,omitzero"`
}

func (a *API) list(ctx context.Context, p authz.Principal, in input) (any, error) {
	params := parameters{query: in.query}
	q := vault.ListQuery{
		Limit:  params.integer("limit", maxLimit),
		Cursor: params.text("cursor", maxCursorLength),
	}
	if params.err != nil {
		return nil, params.err
	}
	found, next, err := a.Vault.List(ctx, p, q)
	if err != nil {
		return nil, badCursor(err)
	}
	answer := credentials{success{true}, make([]credential, len(found)), next}
	for i, c := range found {
		answer.Credentials[i] = metadata(c)
	}
	return answer, nil
}

type unsealed struct {
	success
	CredentialID   string            `json:"credential_id"`
	Name           string            `json:"name"`
	CredentialType string            `json:"credential_type"`
	Values         map[string]text   `json:"values"`
	BinaryValues   map[string]binary `json:"binary_values,omitempty"`
	Version        uint64            `json:"version"`
	CreatedAt      time.Time         `json:"created_at"`
	ExpiresAt      time.Time         `json:"expires_at"`

	plaintext map[string]secret.Bytes
}

// zero overwrites the values; the server calls it once the answer is written.
func (u unsealed) zero() { zero(u.plaintext) }

func (a *API) unseal(ctx context.Context, p authz.Principal, in input) (any, error) {
	c, err := a.Vault.Unseal(ctx, p, in.id)
	if err != nil {
		return nil, err
	}
	answer := unsealed{
		success: success{true}, CredentialID: c.ID, Name: c.Name, CredentialType: c.Type,
		Values: make(map[string]text), BinaryValues: make(map[string]binary),
		Version: c.Version, CreatedAt: c.CreatedAt.UTC(), ExpiresAt: c.ExpiresAt.UTC(),
		plaintext: c.Values,
	}
	for key, value := range c.Values {
		if utf8.Valid(value) {
			answer.Values[key] = text(value)
		} else {
			answer.BinaryValues[key] = binary(value)
		}
	}
	return answer, nil
}

func (a *API) rotate(ctx context.Context, p authz.Principal, in input) (any, error) {
	c, err := a.Vault.Rotate(ctx, p, in.id)
	if err != nil {
		return nil, err
	}
	return credentialAnswer{success{true}, metadata(c)}, nil
}

type removed struct {
	success
	CredentialID string `json:"credential_id"`
}

func (a *API) remove(ctx context.Context, p authz.Principal, in input) (any, error) {
	if err := a.Vault.Delete(ctx, p, in.id); err != nil {
		return nil, err
	}
	return removed{success{true}, in.id}, nil
}

func zero(values map[string]secret.Bytes) {
	for _, value := range values {
		value.Zero()
	}
}
