// Package credentials has the endpoints of credentials and of the history rules of version 2.
package credentials

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/gin-gonic/gin"

	api "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/settings"
	"github.com/latticekeep/latticekeep/internal/vault"
	"github.com/latticekeep/latticekeep/internal/vault/bounds"
	"github.com/latticekeep/latticekeep/internal/vault/details"
	"github.com/latticekeep/latticekeep/internal/vault/kept"
	"github.com/latticekeep/latticekeep/internal/vault/listing"
	"github.com/latticekeep/latticekeep/server/gate"
)

// API implements the endpoints.
type API struct {
	vault *vault.Vault
	reads *reads
}

// New returns the endpoints of v, whose refusals g records.
func New(v *vault.Vault, g *guard.Guard) *API {
	return &API{v, newReads(v, g)}
}

func metadata(c vault.Credential) api.Credential {
	status := api.CredentialStatusActive
	if c.Expired {
		status = api.CredentialStatusExpired
	}
	m := api.Credential{
		CredentialId: c.ID, Name: c.Name, CredentialType: c.Type, Version: int64(c.Version),
		Status: status, Trashed: gate.NonZero(c.Trashed), Owned: c.Owned,
		CreatedAt: c.CreatedAt.UTC(), SealedAt: c.SealedAt.UTC(), ExpiresAt: c.ExpiresAt.UTC(), NeverExpires: gate.NonZero(c.NeverExpires()),
	}
	if d := c.Details; d != nil {
		m.Description, m.Contact = gate.NonZero(d.Description), gate.NonZero(d.Contact)
		if len(d.Tags) > 0 {
			m.Tags = &d.Tags
		}
	}
	if !c.LastRead.IsZero() {
		m.LastReadAt = &c.LastRead
	}
	return m
}

func credentialAnswer(c vault.Credential) api.CredentialAnswer {
	m := metadata(c)
	return api.CredentialAnswer{
		Success: true, CredentialId: m.CredentialId, Name: m.Name, CredentialType: m.CredentialType, Version: m.Version,
		Status: api.CredentialAnswerStatus(m.Status), Trashed: m.Trashed, Owned: m.Owned, CreatedAt: m.CreatedAt, SealedAt: m.SealedAt, ExpiresAt: m.ExpiresAt, NeverExpires: m.NeverExpires,
		Description: m.Description, Contact: m.Contact, Tags: m.Tags, LastReadAt: m.LastReadAt,
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

// Days returns the number of days in a request. For the vault, 0 means that none is given; in a
// request, the absent field means that.
func Days(days *int) (int, error) {
	switch {
	case days == nil:
		return 0, nil
	case *days < 1: // a negative number would be one of the vault's own
		return 0, fault.New(fault.Invalid, "ttl_days is from 1 to 3650")
	}
	return *days, nil
}

// lifetime returns the lifetime of a request: [Days], or [bounds.NeverExpires].
func lifetime(days *int, never *api.NeverExpires) (int, error) {
	switch {
	case never == nil || !*never:
		return Days(days)
	case days != nil:
		return 0, fault.New(fault.Invalid, "ttl_days and never_expires exclude each other: give one of them")
	}
	return bounds.NeverExpires, nil
}

// SealCredential stores a new credential.
func (a *API) SealCredential(c *gin.Context, params api.SealCredentialParams) {
	gate.Answer(c, http.StatusCreated, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.SealRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		days, err := lifetime(body.TtlDays, body.NeverExpires)
		if err != nil {
			return nil, err
		}
		r := vault.SealRequest{Name: body.Name, Type: body.CredentialType, Values: secrets(body.Values), TTLDays: days}
		if params.IdempotencyKey != nil {
			r.IdempotencyKey = *params.IdempotencyKey
		}
		defer secret.ZeroAll(r.Values)
		return stored(a.vault.Seal(ctx, call.Principal(), r))
	})
}

// ListCredentials returns metadata only.
func (a *API) ListCredentials(c *gin.Context, params api.ListCredentialsParams) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		found, rest, err := a.vault.List(ctx, call.Principal(), vault.ListQuery{
			Filter: filter(params), Order: listing.Order(gate.Value(params.Sort)), Limit: gate.Value(params.Limit), Cursor: gate.Value(params.Cursor), Count: gate.Value(params.Total),
		})
		if err != nil {
			return nil, gate.InvalidParameter(err)
		}
		answer := api.CredentialList{Success: true, Credentials: List(found), NextCursor: gate.NonZero(rest.Cursor)}
		if params.Delimiter != nil {
			folders := append([]string{}, rest.Folders...)
			answer.Folders = &folders
		}
		if gate.Value(params.Total) {
			answer.Total, answer.TotalComplete = &rest.Total, &rest.Whole
		}
		return answer, nil
	})
}

func filter(params api.ListCredentialsParams) vault.Filter {
	f := vault.Filter{
		Text: gate.Value(params.Q), Prefix: gate.Value(params.Prefix), Type: gate.Value(params.CredentialType), Status: listing.Status(gate.Value(params.Status)),
		Tag: gate.Value(params.Tag), Folders: params.Delimiter != nil,
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

// List returns the metadata of several credentials.
func List(found []vault.Credential) []api.Credential {
	list := make([]api.Credential, len(found))
	for i, c := range found {
		list[i] = metadata(c)
	}
	return list
}

// defaultSoonDays is the default number of days within which a credential counts as expiring soon.
const defaultSoonDays = 7

// GetVaultSummary returns numbers of credentials, and those that expire next.
func (a *API) GetVaultSummary(c *gin.Context, params api.GetVaultSummaryParams) {
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
			NeverExpire: gate.NonZero(s.NeverExpire), ExpiringSoon: s.ExpiringSoon, ExpiringWithinDays: days,
			CredentialTypes: make([]api.CredentialTypeCount, len(s.Types)), OtherTypes: s.OtherTypes, NextToExpire: List(s.NextToExpire),
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

// change answers a change of a credential. body, if not nil, gets the request's. What the caller may read
// decides what it is told when ifMatch does not hold; with reads, also otherwise.
func change(c *gin.Context, body any, ifMatch *string, reads bool, do func(context.Context, authz.Principal, vault.Condition) (any, error)) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		if body != nil {
			if err := call.Decode(body); err != nil {
				return nil, err
			}
		}
		if reads || ifMatch != nil {
			if _, err := call.Also(ctx, authz.UnsealCredential); err != nil {
				return nil, err
			}
		}
		answer, err := do(ctx, call.Principal(), vault.Condition(gate.Value(ifMatch)))
		return answer, conditional(err)
	})
}

// stored returns the answer to a change that stores a version.
func stored(c vault.Credential, err error) (any, error) {
	if err != nil {
		return nil, err
	}
	return credentialAnswer(c), nil
}

// GetCredentialMetadata returns the metadata of one credential, as in the list.
func (a *API) GetCredentialMetadata(c *gin.Context, id string) {
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
func (a *API) UnsealCredential(c *gin.Context, id string, params api.UnsealCredentialParams) {
	r := vault.ByID(id)
	if params.Version != nil {
		r = vault.ByVersion(id, uint64(*params.Version))
	}
	a.reads.answer(c, r, params.IfNoneMatch, params.Wait)
}

// UnsealCredentialByName returns the newest active credential with a name.
func (a *API) UnsealCredentialByName(c *gin.Context, name string, params api.UnsealCredentialByNameParams) {
	a.reads.answer(c, vault.ByName(name), params.IfNoneMatch, params.Wait)
}

// ReplaceCredential stores new values as the next version.
func (a *API) ReplaceCredential(c *gin.Context, id string, params api.ReplaceCredentialParams) {
	var body api.ReplaceRequest
	change(c, &body, params.IfMatch, false, func(ctx context.Context, p authz.Principal, ifMatch vault.Condition) (any, error) {
		days, err := lifetime(body.TtlDays, body.NeverExpires)
		if err != nil {
			return nil, err
		}
		r := vault.ReplaceRequest{Values: secrets(body.Values), TTLDays: days, IfMatch: ifMatch}
		defer secret.ZeroAll(r.Values)
		return stored(a.vault.Replace(ctx, p, id, r))
	})
}

// PatchCredential stores some values changed and all others kept as the next version.
func (a *API) PatchCredential(c *gin.Context, id string, params api.PatchCredentialParams) {
	var body api.PatchRequest
	change(c, &body, params.IfMatch, true, func(ctx context.Context, p authz.Principal, ifMatch vault.Condition) (any, error) {
		days, err := lifetime(body.TtlDays, body.NeverExpires)
		if err != nil {
			return nil, err
		}
		r := vault.PatchRequest{Set: make(map[string]secret.Bytes), TTLDays: days, IfMatch: ifMatch}
		defer secret.ZeroAll(r.Set)
		for key, value := range body.Values {
			if value == nil {
				r.Remove = append(r.Remove, key)
			} else {
				r.Set[key] = secret.Bytes(*value)
			}
		}
		return stored(a.vault.Patch(ctx, p, id, r))
	})
}

// PutCredentialByName replaces the credential with a name, or makes one.
func (a *API) PutCredentialByName(c *gin.Context, name string, params api.PutCredentialByNameParams) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.PutRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		days, err := lifetime(body.TtlDays, body.NeverExpires)
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
		r := vault.PutRequest{IfMatch: vault.Condition(gate.Value(params.IfMatch)), IfNoneMatch: params.IfNoneMatch != nil, Creates: !replaces}
		r.Name, r.Type, r.Values, r.TTLDays = name, body.CredentialType, secrets(body.Values), days
		defer secret.ZeroAll(r.Values)
		put, created, err := a.vault.Put(ctx, call.Principal(), r)
		if err != nil {
			return nil, conditional(err)
		}
		if created {
			return gate.Created{Answer: credentialAnswer(put)}, nil
		}
		return credentialAnswer(put), nil
	})
}

// RotateCredential re-encrypts a credential.
func (a *API) RotateCredential(c *gin.Context, id string, params api.RotateCredentialParams) {
	change(c, nil, params.IfMatch, false, func(ctx context.Context, p authz.Principal, ifMatch vault.Condition) (any, error) {
		return stored(a.vault.Rotate(ctx, p, id, ifMatch))
	})
}

// RenameCredential gives a credential another name. What the caller may read also decides whether it is
// told that the name is taken.
func (a *API) RenameCredential(c *gin.Context, id string, params api.RenameCredentialParams) {
	var body api.RenameRequest
	change(c, &body, params.IfMatch, true, func(ctx context.Context, p authz.Principal, ifMatch vault.Condition) (any, error) {
		return stored(a.vault.Rename(ctx, p, id, body.Name, ifMatch))
	})
}

// DescribeCredential changes what is said of a credential.
func (a *API) DescribeCredential(c *gin.Context, id string) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.DetailsRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		return stored(a.vault.Describe(ctx, call.Principal(), id, details.Change{Description: body.Description, Contact: body.Contact, Tags: body.Tags}))
	})
}

// UndoCredential stores the values of a kept version as the next one.
func (a *API) UndoCredential(c *gin.Context, id string, params api.UndoCredentialParams) {
	var body api.UndoRequest
	change(c, &body, params.IfMatch, true, func(ctx context.Context, p authz.Principal, ifMatch vault.Condition) (any, error) {
		return stored(a.vault.Undo(ctx, p, id, uint64(body.Version), ifMatch))
	})
}

// TrashCredential lets a credential expire now.
func (a *API) TrashCredential(c *gin.Context, id string, params api.TrashCredentialParams) {
	change(c, nil, params.IfMatch, false, func(ctx context.Context, p authz.Principal, ifMatch vault.Condition) (any, error) {
		return stored(a.vault.Trash(ctx, p, id, ifMatch))
	})
}

// RenewCredential starts the lifetime of a credential again.
func (a *API) RenewCredential(c *gin.Context, id string, params api.RenewCredentialParams) {
	var body api.RenewRequest
	change(c, &body, params.IfMatch, true, func(ctx context.Context, p authz.Principal, ifMatch vault.Condition) (any, error) {
		days, err := lifetime(body.TtlDays, body.NeverExpires)
		if err != nil {
			return nil, err
		}
		return stored(a.vault.Renew(ctx, p, id, days, ifMatch))
	})
}

// ListHistoryRules returns the rules of the history.
func (a *API) ListHistoryRules(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		return historyRules(a.vault.Rules.Rules(ctx, call.Principal()))
	})
}

// PutHistoryRule puts a rule in place of the one with its path.
func (a *API) PutHistoryRule(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.HistoryRuleRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		return historyRules(a.vault.Rules.Set(ctx, call.Principal(), kept.Rule{Path: body.Path, Versions: body.VersionsKept}))
	})
}

// DeleteHistoryRule removes the rule with a path.
func (a *API) DeleteHistoryRule(c *gin.Context, params api.DeleteHistoryRuleParams) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		answer, err := historyRules(a.vault.Rules.Remove(ctx, call.Principal(), params.Path))
		return answer, gate.InvalidParameter(err)
	})
}

func historyRules(rules []kept.Rule, err error) (any, error) {
	if err != nil {
		return nil, err
	}
	answer := api.HistoryRules{Success: true, Rules: make([]api.HistoryRule, len(rules))}
	for i, r := range rules {
		answer.Rules[i] = api.HistoryRule{Path: r.Path, VersionsKept: r.Versions}
	}
	return answer, nil
}

// GetSettings returns the settings of the tenant.
func (a *API) GetSettings(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		return tenantSettings(a.vault.Settings.Read(ctx, call.Principal()))
	})
}

// ChangeSettings changes settings of the tenant.
func (a *API) ChangeSettings(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.SettingsRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		return tenantSettings(a.vault.Settings.Change(ctx, call.Principal(), settings.Change{NeverExpires: body.NeverExpiresPaths, NamesKept: body.NamesKeptDays}))
	})
}

func tenantSettings(s settings.Settings, err error) (any, error) {
	if err != nil {
		return nil, err
	}
	return api.Settings{Success: true, NeverExpiresPaths: append([]string{}, s.NeverExpires...), NamesKeptDays: s.NamesKeptDays()}, nil
}

// DeleteCredential deletes a credential permanently.
func (a *API) DeleteCredential(c *gin.Context, id string, params api.DeleteCredentialParams) {
	change(c, nil, params.IfMatch, false, func(ctx context.Context, p authz.Principal, ifMatch vault.Condition) (any, error) {
		return api.DeletedCredential{Success: true, CredentialId: id}, a.vault.Delete(ctx, p, id, ifMatch)
	})
}

// ListCredentialVersions returns metadata of a credential's versions.
func (a *API) ListCredentialVersions(c *gin.Context, id string) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		versions, err := a.vault.Versions(ctx, call.Principal(), id)
		if err != nil {
			return nil, err
		}
		answer := api.CredentialVersionList{Success: true, CredentialId: id, Versions: make([]api.CredentialVersion, len(versions))}
		for i, v := range versions {
			answer.Versions[i] = api.CredentialVersion{
				Version: int64(v.Number), Change: api.CredentialVersionChange(v.Change), Current: v.Current, Readable: v.Readable,
				SealedAt: v.SealedAt.UTC(), ExpiresAt: v.ExpiresAt.UTC(),
			}
		}
		return answer, nil
	})
}
