package identity

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity/apikey"
	"github.com/latticekeep/latticekeep/internal/identity/records"
	"github.com/latticekeep/latticekeep/internal/identity/tenant"
	"github.com/latticekeep/latticekeep/internal/mail"
	"github.com/latticekeep/latticekeep/internal/store"
)

// APIKey describes an API key, and APIKeyRequest asks for one.
type (
	APIKey        = apikey.Key
	APIKeyRequest = apikey.Request
)

const (
	maxAPIKeys = 1000 // per tenant
	maxPending = 20   // API keys that wait for an owner's approval, per tenant; each mails all owners
)

var (
	errMakers       = fault.New(fault.Conflict, "eight API keys that each made the next one limit this one already: make the new key as a user, or with a key that a user made")
	errScopesBeyond = fault.New(fault.Forbidden, "nobody gives an API key more than they hold: ask for fewer scopes")
	errAPIKey       = fault.New(fault.NotFound, "there is no such API key: list the API keys for those there are")
	errAPIKeys      = fault.New(fault.Conflict, "the tenant has 1000 API keys: revoke those that nobody uses")

	errPending       = fault.New(fault.Conflict, "20 API keys of the tenant wait for an owner: have some approved or revoked, or wait until they lapse, 14 days after they were made")
	errLapsed        = fault.New(fault.Conflict, "this API key was not approved within 14 days: have the operator make another one, and revoke this one")
	errOwnersChanged = fault.New(fault.Conflict, "the owners of the tenant have just changed: try again")
	errNotOwner      = fault.New(fault.Forbidden, "only an owner of the tenant approves an API key that the operator made")
	errNotPending    = fault.New(fault.Conflict, "this API key waits for no approval")
)

// Reasons in audit entries.
const (
	reasonScopes         = "scopes_beyond_own"
	reasonMakers         = "too_many_makers"
	reasonNoAPIKey       = "no_such_api_key"
	reasonTooManyAPIKeys = "too_many_api_keys"
	reasonOwnersChanged  = "owners_changed"
	reasonNotPending     = "not_pending"
	reasonTooManyPending = "too_many_pending"
	reasonLapsed         = "not_approved_in_time"
)

// apiKeys makes, approves, lists and revokes API keys, and authenticates their callers.
type apiKeys struct {
	*deps
	tenants *tenant.Store
	grants  *grants
	members *members
	outbox  *mail.Outbox
	used    apikey.LastUses
}

// CreateAPIKey makes an API key of p's tenant and returns it. The key cannot be read again. When p
// is an API key that expires, the new key expires no later. Errors: fault.Invalid; fault.Forbidden
// for scopes that p does not hold and for a user whose address is not verified;
// fault.Unauthenticated for a principal that was removed meanwhile; fault.Conflict for too many
// keys; fault.Unavailable.
func (s *apiKeys) CreateAPIKey(ctx context.Context, p authz.Principal, r APIKeyRequest) (APIKey, string, error) {
	if err := s.guard.Admit(ctx, p, authz.CreateAPIKey); err != nil {
		return APIKey{}, "", err
	}
	if err := r.Check(); err != nil {
		return APIKey{}, "", err
	}
	if !p.Holds(r.Scopes) || !grantable(p.Tenant, r.Scopes) {
		return APIKey{}, "", s.deny(ctx, p, authz.CreateAPIKey, reasonScopes, errScopesBeyond)
	}
	return s.createAPIKey(ctx, p, p.Tenant, r)
}

// CreateTenantAPIKey makes an API key of any tenant for the deployment's operator, who may hold
// fewer scopes than the key. Its entry is in that tenant's history and names p. If the tenant has an
// owner, the key is pending until an owner approves it, and each owner gets a mail. Errors:
// fault.Invalid, fault.Forbidden, fault.NotFound, fault.Conflict for too many keys or too many that are
// pending, fault.Unavailable.
func (s *apiKeys) CreateTenantAPIKey(ctx context.Context, p authz.Principal, id authz.TenantID, r APIKeyRequest) (APIKey, string, error) {
	if err := s.guard.Admit(ctx, p, authz.CreateTenantAPIKey); err != nil {
		return APIKey{}, "", err
	}
	if err := r.Check(); err != nil {
		return APIKey{}, "", err
	}
	switch {
	case !tenant.Valid(id):
		return APIKey{}, "", s.deny(ctx, p, authz.CreateTenantAPIKey, tenant.ReasonNotFound, tenant.ErrNotFound)
	case !grantable(id, r.Scopes):
		return APIKey{}, "", s.deny(ctx, p, authz.CreateTenantAPIKey, reasonScopes, errScopesBeyond)
	}
	return s.createAPIKey(ctx, p, id, r)
}

// grantable reports whether a key of the tenant may carry the scopes at all.
func grantable(tenant authz.TenantID, scopes []authz.Scope) bool {
	ofSystem := func(s authz.Scope) bool { return slices.Contains(authz.SystemScopes(), s) }
	return tenant == authz.SystemTenant || !slices.ContainsFunc(scopes, ofSystem)
}

func (s *apiKeys) createAPIKey(ctx context.Context, p authz.Principal, tenant authz.TenantID, r APIKeyRequest) (APIKey, string, error) {
	k := s.grants.apiKeys.New(tenant, p.ID, r)
	made := k.Row
	foreign := tenant != p.Tenant // the operator makes it
	var mails []approvalMail
	if foreign {
		var err error
		if mails, err = s.prepareApprovalMails(ctx, tenant); err != nil {
			return APIKey{}, "", fmt.Errorf("creating an API key: %w", err)
		}
	}
	err := s.rows.Commit(ctx, apiKeyEvent(audit.APIKeyCreated, p, ""), func(tx store.Tx, e *audit.Event) error {
		k.Row = made // nothing stays of a previous attempt at the transaction
		if err := s.tenants.Check(tx, tenant); err != nil {
			return err
		}
		var err error
		if foreign {
			err = s.requireApproval(tx, &k.Row, mails)
		} else {
			err = s.bindToGrantor(tx, p, &k.Row)
		}
		if err != nil {
			return err
		}
		lapsed, err := s.roomFor(tx, &k.Row)
		if err != nil {
			return err
		}
		e.Resource.ID, e.Attributes = k.Row.ID, k.Row.Attributes()
		e.Principal.Tenant = tenant
		for _, m := range mails { // last, because what precedes a refusal is stored
			err = errors.Join(err, m.post.Put(tx))
		}
		for _, id := range lapsed {
			err = errors.Join(err, s.lapse(tx, apikey.Name{Tenant: tenant, ID: id}))
		}
		return errors.Join(err, s.grants.apiKeys.Put(tx, k))
	})
	if err != nil {
		return APIKey{}, "", fmt.Errorf("creating an API key: %w", err)
	}
	if len(mails) > 0 {
		s.outbox.Notify()
	}
	return k.Row.Key(time.Time{}), k.Secret, nil
}

// roomFor returns an error if the tenant has no room for a new key, and the keys that make room for it
// because no owner approved them in time.
func (s *apiKeys) roomFor(r store.Reader, row *apikey.Row) (lapsed []string, err error) {
	n, err := s.grants.apiKeys.Count(r, row.Tenant)
	waiting := 0
	if err == nil && row.Pending() {
		var keys []APIKey
		keys, err = s.grants.apiKeys.Of(r, row.Tenant)
		now := s.now()
		for _, k := range keys {
			switch {
			case !k.Pending:
			case k.Expired(now):
				lapsed = append(lapsed, k.ID)
			default:
				waiting++
			}
		}
	}
	switch {
	case err != nil:
		return nil, err
	case waiting >= maxPending:
		return nil, records.Refuse(reasonTooManyPending, errPending)
	case n-len(lapsed) >= maxAPIKeys:
		return nil, records.Refuse(reasonTooManyAPIKeys, errAPIKeys)
	}
	return lapsed, nil
}

// lapse deletes a key that was not approved in time, with an entry.
func (s *apiKeys) lapse(tx store.Tx, n apikey.Name) error {
	e := apiKeyEvent(audit.APIKeyRevoked, authz.SystemPrincipal(n.Tenant), n.ID)
	e.Attributes = map[string]string{audit.AttributeReason: reasonLapsed}
	_, err := s.grants.deleteKey(tx, n)
	if err == nil {
		_, err = s.guard.Append(tx, e)
	}
	return err
}

// maxMakers bounds the API keys besides its own maker whose policies limit a key, because each request
// reads them all.
const maxMakers = 8

// bindToGrantor lets the user behind p answer for a new key, which expires no later than p.
func (s *apiKeys) bindToGrantor(r store.Reader, p authz.Principal, row *apikey.Row) error {
	by, err := s.grants.grantor(r, p, authz.CreateAPIKey)
	switch {
	case err != nil:
		return err
	case !by.Holds(row.Scopes):
		return records.Refuse(reasonScopes, errScopesBeyond)
	}
	row.User, row.ExpiresAt = by.user, by.bound(row.ExpiresAt)
	if row.Makers, err = s.grants.makers(r, by); err == nil && len(row.Makers) > maxMakers {
		err = records.Refuse(reasonMakers, errMakers)
	}
	return err
}

// approvalMail asks an owner to approve a key.
type approvalMail struct {
	owner string // address
	post  *mail.Pending
}

// prepareApprovalMails prepares a mail to each owner of a tenant. It runs before the transaction that
// stores them, because it may have to ask the KMS.
func (s *apiKeys) prepareApprovalMails(ctx context.Context, tenant authz.TenantID) (mails []approvalMail, err error) {
	var owners []string
	err = s.store.View(ctx, func(r store.Reader) (err error) {
		owners, err = s.members.ownerAddresses(r, tenant)
		return err
	})
	for _, address := range owners {
		var post *mail.Pending
		if post, err = s.outbox.Prepare(ctx, mail.Message{Kind: mail.ApproveAPIKey, To: address}); err != nil {
			break
		}
		mails = append(mails, approvalMail{address, post})
	}
	return mails, err
}

// requireApproval makes a new key pending if its tenant has owners. mails are those to the owners.
func (s *apiKeys) requireApproval(r store.Reader, row *apikey.Row, mails []approvalMail) error {
	owners, err := s.members.ownerAddresses(r, row.Tenant)
	if err != nil {
		return err
	}
	if !slices.EqualFunc(owners, mails, func(address string, m approvalMail) bool { return address == m.owner }) {
		return records.Refuse(reasonOwnersChanged, errOwnersChanged)
	}
	if len(owners) > 0 {
		row.Requested, row.Scopes = row.Scopes, nil
	}
	return nil
}

// ApproveAPIKey lets a pending API key of p's tenant work. The user p, an owner, answers for it from
// now on. Errors: fault.Forbidden for anybody else and for an owner whose address is not verified,
// fault.NotFound, fault.Conflict for a key that is not pending or was not approved in time,
// fault.Unavailable.
func (s *apiKeys) ApproveAPIKey(ctx context.Context, p authz.Principal, id string) error {
	if err := s.guard.Admit(ctx, p, authz.ApproveAPIKey); err != nil {
		return err
	}
	e := apiKeyEvent(audit.APIKeyApproved, p, "")
	if authz.ValidID(apikey.IDPrefix, id) {
		e.Resource.ID = id
	}
	err := s.rows.Commit(ctx, e, func(tx store.Tx, e *audit.Event) error {
		n := apikey.Name{Tenant: p.Tenant, ID: e.Resource.ID}
		row, found, err := s.grants.apiKeys.Find(tx, n)
		switch {
		case err != nil:
			return err
		case !found:
			return records.Refuse(reasonNoAPIKey, errAPIKey)
		case !row.Pending():
			return records.Refuse(reasonNotPending, errNotPending)
		case row.Key(time.Time{}).Expired(s.now()):
			return records.Refuse(reasonLapsed, errLapsed)
		}
		by, err := s.grants.grantor(tx, p, authz.ApproveAPIKey)
		if err != nil {
			return err
		}
		isOwner, err := s.members.isOwner(tx, p)
		switch {
		case err != nil:
			return err
		case !isOwner:
			return records.Refuse(reasonRole, errNotOwner)
		case !by.Holds(row.Requested):
			return records.Refuse(reasonScopes, errScopesBeyond)
		}
		row.Scopes, row.Requested, row.User = row.Requested, nil, by.user
		e.Attributes = row.Attributes()
		return s.grants.apiKeys.Replace(tx, row)
	})
	if err != nil {
		return fmt.Errorf("approving an API key: %w", err)
	}
	return nil
}

// APIKeys returns the API keys of p's tenant, oldest first, including expired ones. Errors:
// fault.Forbidden, fault.Unavailable.
func (s *apiKeys) APIKeys(ctx context.Context, p authz.Principal) ([]APIKey, error) {
	ctx, cancel := context.WithTimeout(ctx, records.ReadTimeout)
	defer cancel()
	if err := s.guard.Admit(ctx, p, authz.ListAPIKeys); err != nil {
		return nil, err
	}
	unwritten := s.used.All() // read before the rows, so every use is in one of the two
	var list []APIKey
	err := s.store.View(ctx, func(r store.Reader) (err error) {
		list, err = s.grants.apiKeys.Of(r, p.Tenant)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("listing API keys: %w", err)
	}
	for i, k := range list {
		if used := unwritten[apikey.Name{Tenant: k.Tenant, ID: k.ID}]; used.After(k.LastUsedAt) {
			list[i].LastUsedAt = used
		}
	}
	e := apiKeyEvent(audit.APIKeyListed, p, "")
	e.Attributes = map[string]string{"count": strconv.Itoa(len(list))}
	if err := s.guard.Record(ctx, e); err != nil {
		return nil, err
	}
	return list, nil
}

// APIKeysUnrecorded returns the API keys of p's tenant, without their last use, for a caller that records
// the read itself. Errors: fault.Forbidden, fault.Unavailable.
func (s *apiKeys) APIKeysUnrecorded(ctx context.Context, p authz.Principal) (list []APIKey, err error) {
	ctx, cancel := context.WithTimeout(ctx, records.ReadTimeout)
	defer cancel()
	if err := s.guard.Admit(ctx, p, authz.ListAPIKeys); err != nil {
		return nil, err
	}
	err = s.store.View(ctx, func(r store.Reader) (err error) {
		list, err = s.grants.apiKeys.Of(r, p.Tenant)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("listing API keys: %w", err)
	}
	return list, nil
}

// RevokeAPIKey deletes an API key of p's tenant, which takes effect from the next request on.
// Errors: fault.Forbidden, fault.NotFound, fault.Unavailable.
func (s *apiKeys) RevokeAPIKey(ctx context.Context, p authz.Principal, id string) error {
	if err := s.guard.Admit(ctx, p, authz.RevokeAPIKey); err != nil {
		return err
	}
	e := apiKeyEvent(audit.APIKeyRevoked, p, "")
	if authz.ValidID(apikey.IDPrefix, id) {
		e.Resource.ID = id
	}
	err := s.rows.Commit(ctx, e, func(tx store.Tx, e *audit.Event) error {
		found, err := s.grants.deleteKey(tx, apikey.Name{Tenant: p.Tenant, ID: e.Resource.ID})
		if err == nil && !found {
			err = records.Refuse(reasonNoAPIKey, errAPIKey)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("revoking an API key: %w", err)
	}
	return nil
}

// FlushLastUsed writes when API keys were last used. It is called regularly and when the service
// stops. A crash loses only the uses since the last call. Error: fault.Unavailable.
func (s *apiKeys) FlushLastUsed(ctx context.Context) error {
	if err := s.used.Flush(ctx, s.store, s.grants.apiKeys); err != nil {
		return fmt.Errorf("writing last uses: %w", err)
	}
	return nil
}

// Authenticate returns the caller that an API key stands for. Errors: fault.Unauthenticated for a
// malformed, unknown, pending, revoked or expired key; fault.Unavailable.
func (s *apiKeys) Authenticate(ctx context.Context, secret string) (Caller, error) {
	now := s.now()
	var row apikey.Row
	var tenant Tenant
	var limits authz.Access
	err := s.store.View(ctx, func(r store.Reader) (err error) {
		var found bool
		if row, found, err = s.grants.apiKeys.Lookup(r, secret); err != nil {
			return err
		} else if !found || row.Pending() || row.Key(time.Time{}).Expired(now) {
			return errUnauthenticated
		}
		if tenant, err = s.tenants.Read(r, row.Tenant); err == nil {
			limits, err = s.policies.Of(r, row.Tenant, row.Limiters()...)
		}
		return err
	})
	if err != nil {
		return Caller{}, fmt.Errorf("looking up an API key: %w", err)
	}
	s.used.Note(apikey.Name{Tenant: row.Tenant, ID: row.ID}, now)
	return Caller{
		Principal: authz.Principal{
			Tenant: row.Tenant, Kind: authz.APIKey, ID: row.ID, Scopes: row.Scopes, Access: limits, ReadOnly: tenant.ReadOnly(now),
		},
		Limits: tenant.Limits,
	}, nil
}

// APIKeyName returns the name of an API key of the tenant, and "" if there is none with the id.
func (s *apiKeys) APIKeyName(r store.Reader, tenant authz.TenantID, id string) (string, error) {
	if !authz.ValidID(apikey.IDPrefix, id) {
		return "", nil
	}
	row, _, err := s.grants.apiKeys.Find(r, apikey.Name{Tenant: tenant, ID: id})
	return row.Name, err
}
