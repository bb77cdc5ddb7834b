package v2

import (
	"context"
	"errors"
	"net/http"
	"time"
	"unicode/utf8"

	"github.com/gin-gonic/gin"

	api "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/vault"
	"github.com/latticekeep/latticekeep/internal/vault/listing"
	"github.com/latticekeep/latticekeep/server/gate"
)

// vaultAPI implements the endpoints of credentials.
type vaultAPI struct{ vault *vault.Vault }

func metadata(c vault.Credential) api.Credential {
	status := api.CredentialStatusActive
	if c.Expired {
		status = api.CredentialStatusExpired
	}
	return api.Credential{
		CredentialId: c.ID, Name: c.Name, CredentialType: c.Type, Version: int64(c.Version),
		Status: status, Owned: c.Owned,
		CreatedAt: c.CreatedAt.UTC(), SealedAt: c.SealedAt.UTC(), ExpiresAt: c.ExpiresAt.UTC(),
	}
}

func credentialAnswer(c vault.Credential) api.CredentialAnswer {
	m := metadata(c)
	return api.CredentialAnswer{
		Success: true, CredentialId: m.CredentialId, Name: m.Name, CredentialType: m.CredentialType, Version: m.Version,
		Status: api.CredentialAnswerStatus(m.Status), Owned: m.Owned, CreatedAt: m.CreatedAt, SealedAt: m.SealedAt, ExpiresAt: m.ExpiresAt,
	}
}

// secrets copies values into bytes that can be overwritten.
func secrets(values map[string]string) map[string]secret.Bytes {
	copied := make(map[string]secret.Bytes, len(values))
	for key, value := range values {
		copied[key] = secret.Bytes(value)
	}
	return copied
}

func zero(values map[string]secret.Bytes) {
	for _, value := range values {
		value.Zero()
	}
}

// ttl returns the number of days in a request. For the vault, 0 means that none is given; in a
// request, the absent field means that.
func ttl(days *int) (int, error) {
	switch {
	case days == nil:
		return 0, nil
	case *days == 0:
		return 0, fault.New(fault.Invalid, "ttl_days is from 1 to 3650")
	}
	return *days, nil
}

// SealCredential stores a new credential.
func (a *vaultAPI) SealCredential(c *gin.Context, params api.SealCredentialParams) {
	gate.Answer(c, http.StatusCreated, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.SealRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		days, err := ttl(body.TtlDays)
		if err != nil {
			return nil, err
		}
		r := vault.SealRequest{Name: body.Name, Type: body.CredentialType, Values: secrets(body.Values), TTLDays: days}
		if params.IdempotencyKey != nil {
			r.IdempotencyKey = *params.IdempotencyKey
		}
		defer zero(r.Values)
		sealed, err := a.vault.Seal(ctx, call.Principal(), r)
		if err != nil {
			return nil, err
		}
		return credentialAnswer(sealed), nil
	})
}

// ListCredentials returns metadata only.
func (a *vaultAPI) ListCredentials(c *gin.Context, params api.ListCredentialsParams) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		found, next, err := a.vault.List(ctx, call.Principal(), vault.ListQuery{
			Filter: filter(params), Order: listing.Order(gate.Value(params.Sort)), Limit: gate.Value(params.Limit), Cursor: gate.Value(params.Cursor),
		})
		if err != nil {
			return nil, gate.InvalidParameter(err)
		}
		return api.CredentialList{Success: true, Credentials: credentials(found), NextCursor: optional(next)}, nil
	})
}

func filter(params api.ListCredentialsParams) vault.Filter {
	f := vault.Filter{
		Text: gate.Value(params.Q), Prefix: gate.Value(params.Prefix), Type: gate.Value(params.CredentialType), Status: listing.Status(gate.Value(params.Status)),
	}
	if params.ExpiresBefore != nil {
		// For the vault, the zero time means that no limit is given. A microsecond later gives the
		// same result: nothing expires before either.
		if f.ExpiresBefore = *params.ExpiresBefore; f.ExpiresBefore.IsZero() {
			f.ExpiresBefore = f.ExpiresBefore.Add(time.Microsecond)
		}
	}
	return f
}

func credentials(found []vault.Credential) []api.Credential {
	list := make([]api.Credential, len(found))
	for i, c := range found {
		list[i] = metadata(c)
	}
	return list
}

// defaultSoonDays is the default number of days within which a credential counts as expiring soon.
const defaultSoonDays = 7

// GetVaultSummary returns numbers of credentials, and those that expire next.
func (a *vaultAPI) GetVaultSummary(c *gin.Context, params api.GetVaultSummaryParams) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		days := defaultSoonDays
		if params.ExpiringWithinDays != nil {
			days = *params.ExpiringWithinDays
		}
		s, err := a.vault.Summary(ctx, call.Principal(), time.Duration(days)*24*time.Hour)
		if err != nil {
			return nil, err
		}
		answer := api.VaultSummary{
			Success: true, Complete: s.Complete, Total: s.Total, Active: s.Active, Expired: s.Expired,
			ExpiringSoon: s.ExpiringSoon, ExpiringWithinDays: days,
			CredentialTypes: make([]api.CredentialTypeCount, len(s.Types)), OtherTypes: s.OtherTypes, NextToExpire: credentials(s.NextToExpire),
		}
		for i, t := range s.Types {
			answer.CredentialTypes[i] = api.CredentialTypeCount{CredentialType: t.Type, Count: t.Count}
		}
		return answer, nil
	})
}

// conditional turns the refusal of a change whose If-Match does not hold into a 412.
func conditional(err error) error {
	if errors.Is(err, vault.ErrCondition) {
		return gate.Refusal(http.StatusPreconditionFailed, fault.Message(err))
	}
	return err
}

// condition returns the condition of a change, and finds out whether the caller may also unseal:
// that decides what it is told when the condition does not hold.
func condition(ctx context.Context, call *gate.Call, ifMatch *string) (vault.Condition, error) {
	if ifMatch == nil {
		return "", nil
	}
	_, err := call.Also(ctx, authz.UnsealCredential)
	return vault.Condition(*ifMatch), err
}

// GetCredentialMetadata returns the metadata of one credential, as in the list.
func (a *vaultAPI) GetCredentialMetadata(c *gin.Context, id string) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		found, err := a.vault.Metadata(ctx, call.Principal(), id)
		if err != nil {
			return nil, err
		}
		c.Header("ETag", found.EntityTag())
		return credentialAnswer(found), nil
	})
}

// UnsealCredential returns a credential with the values of the requested version, or else of the
// current one.
func (a *vaultAPI) UnsealCredential(c *gin.Context, id string, params api.UnsealCredentialParams) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		if params.Version == nil {
			return unsealed(c)(a.vault.Unseal(ctx, call.Principal(), id))
		}
		return unsealed(c)(a.vault.UnsealVersion(ctx, call.Principal(), id, uint64(*params.Version)))
	})
}

// UnsealCredentialByName returns the newest active credential with a name.
func (a *vaultAPI) UnsealCredentialByName(c *gin.Context, name string) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		return unsealed(c)(a.vault.UnsealByName(ctx, call.Principal(), name))
	})
}

// unsealed returns the function that answers an unsealed credential, with its entity tag.
func unsealed(c *gin.Context) func(vault.Unsealed, error) (any, error) {
	return func(u vault.Unsealed, err error) (any, error) {
		if err != nil {
			return nil, err
		}
		defer zero(u.Values)
		c.Header("ETag", u.EntityTag())
		answer := api.UnsealedCredential{
			Success: true, CredentialId: u.ID, Name: u.Name, CredentialType: u.Type, Values: make(map[string]string),
			Version: int64(u.Version), CreatedAt: u.CreatedAt.UTC(), ExpiresAt: u.ExpiresAt.UTC(),
		}
		binary := make(map[string][]byte)
		for key, value := range u.Values {
			if utf8.Valid(value) {
				answer.Values[key] = string(value)
			} else {
				binary[key] = append([]byte(nil), value...)
			}
		}
		if len(binary) > 0 {
			answer.BinaryValues = &binary
		}
		return answer, nil
	}
}

// ReplaceCredential stores new values as the next version.
func (a *vaultAPI) ReplaceCredential(c *gin.Context, id string, params api.ReplaceCredentialParams) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.ReplaceRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		days, err := ttl(body.TtlDays)
		if err != nil {
			return nil, err
		}
		ifMatch, err := condition(ctx, call, params.IfMatch)
		if err != nil {
			return nil, err
		}
		r := vault.ReplaceRequest{Values: secrets(body.Values), TTLDays: days, IfMatch: ifMatch}
		defer zero(r.Values)
		replaced, err := a.vault.Replace(ctx, call.Principal(), id, r)
		if err != nil {
			return nil, conditional(err)
		}
		return credentialAnswer(replaced), nil
	})
}

// PatchCredential stores some values changed and all others kept as the next version.
func (a *vaultAPI) PatchCredential(c *gin.Context, id string, params api.PatchCredentialParams) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.PatchRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		days, err := ttl(body.TtlDays)
		if err != nil {
			return nil, err
		}
		if _, err := call.Also(ctx, authz.UnsealCredential); err != nil {
			return nil, err
		}
		r := vault.PatchRequest{Set: make(map[string]secret.Bytes), TTLDays: days, IfMatch: vault.Condition(gate.Value(params.IfMatch))}
		defer zero(r.Set)
		for key, value := range body.Values {
			if value == nil {
				r.Remove = append(r.Remove, key)
			} else {
				r.Set[key] = secret.Bytes(*value)
			}
		}
		patched, err := a.vault.Patch(ctx, call.Principal(), id, r)
		if err != nil {
			return nil, conditional(err)
		}
		return credentialAnswer(patched), nil
	})
}

// PutCredentialByName replaces the credential with a name, or makes one.
func (a *vaultAPI) PutCredentialByName(c *gin.Context, name string, params api.PutCredentialByNameParams) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.PutRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		days, err := ttl(body.TtlDays)
		if err != nil {
			return nil, err
		}
		if _, err := call.Also(ctx, authz.UnsealCredential); err != nil {
			return nil, err
		}
		replaces, err := call.Also(ctx, authz.ReplaceCredential)
		if err != nil {
			return nil, err
		}
		r := vault.PutRequest{IfMatch: vault.Condition(gate.Value(params.IfMatch)), Creates: !replaces}
		r.Name, r.Type, r.Values, r.TTLDays = name, body.CredentialType, secrets(body.Values), days
		defer zero(r.Values)
		stored, created, err := a.vault.Put(ctx, call.Principal(), r)
		if err != nil {
			return nil, conditional(err)
		}
		if created {
			return gate.Created{Answer: credentialAnswer(stored)}, nil
		}
		return credentialAnswer(stored), nil
	})
}

// RotateCredential re-encrypts a credential.
func (a *vaultAPI) RotateCredential(c *gin.Context, id string, params api.RotateCredentialParams) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		ifMatch, err := condition(ctx, call, params.IfMatch)
		if err != nil {
			return nil, err
		}
		rotated, err := a.vault.Rotate(ctx, call.Principal(), id, ifMatch)
		if err != nil {
			return nil, conditional(err)
		}
		return credentialAnswer(rotated), nil
	})
}

// RenameCredential gives a credential another name.
func (a *vaultAPI) RenameCredential(c *gin.Context, id string, params api.RenameCredentialParams) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.RenameRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		// What the caller may read decides whether it is told that a name is taken, or the version another.
		if _, err := call.Also(ctx, authz.UnsealCredential); err != nil {
			return nil, err
		}
		renamed, err := a.vault.Rename(ctx, call.Principal(), id, body.Name, vault.Condition(gate.Value(params.IfMatch)))
		if err != nil {
			return nil, conditional(err)
		}
		return credentialAnswer(renamed), nil
	})
}

// DeleteCredential deletes a credential permanently.
func (a *vaultAPI) DeleteCredential(c *gin.Context, id string, params api.DeleteCredentialParams) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		ifMatch, err := condition(ctx, call, params.IfMatch)
		if err != nil {
			return nil, err
		}
		if err := a.vault.Delete(ctx, call.Principal(), id, ifMatch); err != nil {
			return nil, conditional(err)
		}
		return api.DeletedCredential{Success: true, CredentialId: id}, nil
	})
}

// ListCredentialVersions returns metadata of a credential's versions.
func (a *vaultAPI) ListCredentialVersions(c *gin.Context, id string) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		versions, err := a.vault.Versions(ctx, call.Principal(), id)
		if err != nil {
			return nil, err
		}
		answer := api.CredentialVersionList{Success: true, CredentialId: id, Versions: make([]api.CredentialVersion, len(versions))}
		for i, v := range versions {
			answer.Versions[i] = api.CredentialVersion{
				Version: int64(v.Number), Change: api.CredentialVersionChange(v.Change), Current: v.Current,
				SealedAt: v.SealedAt.UTC(), ExpiresAt: v.ExpiresAt.UTC(),
			}
		}
		return answer, nil
	})
}

// optional returns nil for a zero value, so that the answer leaves it out.
func optional[T comparable](v T) *T {
	var none T
	if v == none {
		return nil
	}
	return &v
}
