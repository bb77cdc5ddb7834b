// Package identity knows the tenants, their users and their API keys, and turns
// what a caller presents into a [Caller].
//
// # Model
//
// A tenant is made by an operator, by a registration (then it is on trial until
// an operator activates it), or for a Kubernetes namespace. It has users, who
// sign in with a password and hold sessions, and API keys, which programs hold.
// The deployment itself is the tenant [authz.SystemTenant]: it has API keys
// only, and no other tenant's key can carry system:admin.
//
// Pods of a cluster present the token of their ServiceAccount. Who that is and
// what it may do is the cluster's to say ([Cluster]); it is never stored.
//
// # Invariants
//
//   - Nothing that lets someone in is stored: of API keys and tokens only a keyed
//     hash is, by which they are looked up, so that no comparison depends on where
//     two of them differ; of passwords only their argon2id hash.
//   - Every row that decides who may see what carries the keyring's MAC.
//   - Every request reads the key or session and the tenant anew, so that
//     revoking, another role and the end of a trial count at once.
//   - Nobody gives another what it has not itself, except the deployment.
//   - An API key and an invitation name the user who answers for them, and are
//     revoked when that user is removed or may no longer give them.
//   - Whoever resets the password of an account that was never verified proves to
//     own its address, and shares the account with nobody: its sessions end, and
//     until then it could make no API key and no invitation.
//
// The package limits no rates and speaks no HTTP. Mail leaves by the outbox.
package identity

import (
	"context"
	"crypto/hmac"
	"crypto/sha512"
	"encoding/base32"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/frame"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/mail"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Service is safe for concurrent use. [Open] makes it.
type Service struct {
	store  store.Store
	guard  *audit.Guard
	keys   *keyring.Ring
	now    func() time.Time
	outbox *mail.Outbox

	registrationClosed bool

	cluster        Cluster // nil: nobody is a ServiceAccount
	clusterTenants map[string]authz.TenantID

	passwords passwords
	decoy     decoy
	used      lastUses

	apiKeys known[apiKeyRow]
	tenants known[tenantRow]
}

// Outbox holds the mails that the service writes; whoever runs the service
// sends them.
func (s *Service) Outbox() *mail.Outbox { return s.outbox }

// CloseRegistration lets nobody register a tenant. It is called before the
// service is used.
func (s *Service) CloseRegistration() { s.registrationClosed = true }

// Caller is a principal, and what a request of it is handled by.
type Caller struct {
	authz.Principal
	Session string // of a user
	Limits  Limits // of the tenant

	// ServiceAccount is who the caller is in its cluster; nil unless it is a
	// ServiceAccount.
	ServiceAccount *ServiceAccount
}

var encoding = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)

var errUnauthenticated = fault.New(fault.Unauthenticated, "a valid API key is required")

// Authenticate returns the caller that an API key stands for. Errors:
// fault.Unauthenticated for every key that is not one, or not any more,
// fault.Unavailable.
func (s *Service) Authenticate(ctx context.Context, apiKey string) (Caller, error) {
	body, ok := strings.CutPrefix(apiKey, apiKeyPrefix)
	if !ok || len(body) != encoding.EncodedLen(apiKeyBytes) {
		return Caller{}, errUnauthenticated
	}
	raw, err := encoding.DecodeString(body)
	if err != nil || encoding.EncodeToString(raw) != body { // a key has one spelling
		return Caller{}, errUnauthenticated
	}
	now := s.now()
	hash := apiKeyKey(s.apiKeyHash(raw))
	var row apiKeyRow
	var tenant Tenant
	err = s.store.View(ctx, func(r store.Reader) (err error) {
		var found bool
		if row, found, err = s.apiKeys.get(s, r, hash); err != nil {
			return err
		} else if !found || row.expired(now) {
			return errUnauthenticated
		}
		tenant, err = s.readTenant(r, row.Tenant)
		return err
	})
	if err != nil {
		return Caller{}, fmt.Errorf("looking up an API key: %w", err)
	}
	s.used.note(apiKeyName{row.Tenant, row.ID}, now)
	return Caller{
		Principal: authz.Principal{Tenant: row.Tenant, Kind: authz.APIKey, ID: row.ID, Scopes: row.Scopes, ReadOnly: tenant.readOnly(now)},
		Limits:    tenant.Limits,
	}, nil
}

// encode returns a row that only this deployment can have written, since a row
// decides whose secrets a caller may see.
func (s *Service) encode(key []byte, row any) ([]byte, error) {
	b, err := json.Marshal(row)
	if err != nil {
		return nil, err
	}
	return s.keys.SealRow(key, b), nil
}

func (s *Service) decode(key, stored []byte, row any) error {
	b, err := s.keys.OpenRow(key, stored)
	if err != nil {
		return err
	}
	return json.Unmarshal(b, row)
}

// keyedHash returns what stands in the store for b, as lower-case hex: it can
// be looked up by whoever knows b, and b cannot be found from it without the
// deployment's hash key. Each label is used for one kind of b.
func (s *Service) keyedHash(label string, b []byte) string {
	h := hmac.New(sha512.New, s.keys.APIKeyHash())
	h.Write(frame.Join(label, b))
	return hex.EncodeToString(h.Sum(nil)[:sha512.Size256])
}

// System is the deployment acting in a tenant of its own accord.
func System(tenant authz.TenantID) authz.Principal {
	return authz.Principal{Tenant: tenant, Kind: authz.System, ID: "latticekeep", Scopes: authz.TenantScopes()}
}

const maxName = 255 // bytes, of a tenant and of an API key

var errName = fault.New(fault.Invalid, "a name has 1 to 255 bytes of text without control characters")

func checkName(name string) error {
	if name == "" || len(name) > maxName || !utf8.ValidString(name) || strings.ContainsFunc(name, unicode.IsControl) {
		return errName
	}
	return nil
}
