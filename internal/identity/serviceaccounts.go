package identity

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/identity/access"
	"github.com/latticekeep/latticekeep/internal/identity/tenant"
	"github.com/latticekeep/latticekeep/internal/identity/token"
	"github.com/latticekeep/latticekeep/internal/store"
)

// ServiceAccount is the identity of a pod of the cluster, as the cluster's review of its token
// gives it.
type ServiceAccount struct {
	Cluster      string // its UID
	Namespace    string
	NamespaceUID string // UID of the account's namespace, never of a later one with that name
	Name         string
	UID          string
	Pod          string              // UID of the pod that the token was made for; may be empty
	Groups       []string            // input of the cluster's decisions, besides the name
	Extra        map[string][]string // same as Groups
	Expires      time.Time           // end of the token
}

// Cluster says who presents a token and what its RBAC allows. It may remember a positive answer for
// a few seconds, but never past the token's end. Error: fault.Unavailable, within half a second,
// when the cluster does not answer; that is never a yes.
type Cluster interface {
	// Review returns the ServiceAccount of a token that was made to be presented here. Without ask
	// it answers only from what it remembers. Error: fault.Unauthenticated for every other token.
	Review(ctx context.Context, token string, ask bool) (ServiceAccount, error)
	// Allowed reports whether the account may do verb in a namespace to the SealedCredential of
	// that name, or to all of them if the name is empty.
	Allowed(ctx context.Context, a ServiceAccount, verb, namespace, name string) (bool, error)
}

// serviceAccounts turns the tokens of pods into callers.
type serviceAccounts struct {
	*deps
	tenants    *tenant.Store
	namespaces *tenant.Service
	sessions   *sessions

	noted *sync.Map // the day on which the name of an account was noted last, by tenant and UID

	cluster        Cluster // nil: ServiceAccounts are not accepted
	clusterTenants map[string]authz.TenantID
}

// UseCluster accepts the ServiceAccounts of a cluster. tenants maps namespaces to the existing
// tenants that they are part of. It must be called before the service is used.
func (s *serviceAccounts) UseCluster(c Cluster, tenants map[string]authz.TenantID) {
	s.cluster, s.clusterTenants = c, tenants
}

// AuthenticateBearer returns the caller of a token in the Authorization header: a user for an
// access token, or else a ServiceAccount, if there is a cluster. Without ask the cluster is not
// asked about a token that it does not remember.
//
// A ServiceAccount has no scope until [Service.Permit] gives it one. In a namespace without a
// tenant it is a stranger until then, so a pod without permissions stores nothing. Errors:
// fault.Unauthenticated, fault.Unavailable.
func (s *serviceAccounts) AuthenticateBearer(ctx context.Context, bearer string, ask bool) (Caller, error) {
	if s.cluster == nil || !token.IsForeign(bearer) {
		return s.sessions.AuthenticateToken(ctx, bearer)
	}
	a, err := s.cluster.Review(ctx, bearer, ask)
	if err != nil {
		return Caller{}, fmt.Errorf("reviewing a ServiceAccount's token: %w", err)
	}
	return s.serviceAccount(ctx, a)
}

// serviceAccount returns the account as a caller, with the tenant that its namespace has now.
func (s *serviceAccounts) serviceAccount(ctx context.Context, a ServiceAccount) (Caller, error) {
	caller := Caller{Principal: authz.Principal{Tenant: authz.SystemTenant, Kind: authz.Stranger}, ServiceAccount: &a}
	err := s.store.View(ctx, func(r store.Reader) error {
		id, err := s.tenants.OfNamespace(r, a.Cluster, a.NamespaceUID)
		if err != nil || id == "" {
			return err
		}
		tenant, err := s.tenants.Read(r, id)
		if err != nil {
			return err
		}
		limits, err := s.policies.Of(r, id, access.ServiceAccount(a.Namespace, a.Name))
		caller.Principal = authz.Principal{
			Tenant: id, Kind: authz.ServiceAccount, ID: a.UID, Pod: a.Pod, Access: limits, ReadOnly: tenant.ReadOnly(s.now()),
			Namespace: authz.Namespace{Cluster: a.Cluster, Name: a.Namespace},
		}
		caller.Limits = tenant.Limits
		return err
	})
	if err != nil {
		return Caller{}, fmt.Errorf("looking up a namespace's tenant: %w", err)
	}
	return caller, nil
}

// serviceAccountScopes are all scopes that a ServiceAccount can get. RBAC of a cluster decides
// about secrets and what the log says about them. It does not decide about accounts, members, API
// keys or the deployment.
var serviceAccountScopes = []authz.Scope{
	authz.VaultRead, authz.VaultWrite, authz.CryptoEncrypt, authz.CryptoDecrypt, authz.CryptoSign, authz.CryptoVerify,
	authz.KeysRead, authz.AuditRead, authz.ComplianceRead,
}

// maxObjectName is the length of the longest name in a cluster, and bounds what the cluster is
// asked about.
const maxObjectName = 253

// Permit returns a ServiceAccount with the one scope that the action takes if the cluster allows it
// the verb with the action's name, and unchanged otherwise. An empty namespace stands for the
// account's own. name is that of the one object concerned, if any. The first account that is
// permitted in a namespace gives the namespace its tenant. Permit returns every other caller
// unchanged. Error: fault.Unavailable.
func (s *serviceAccounts) Permit(ctx context.Context, c Caller, a authz.Action, namespace, name string) (Caller, error) {
	scope, users := authz.Required(a)
	if c.ServiceAccount == nil || users || !slices.Contains(serviceAccountScopes, scope) {
		return c, nil
	}
	account := *c.ServiceAccount
	if namespace == "" {
		namespace = account.Namespace
	}
	// Text that is not UTF-8 would be a different name in the cluster than in the vault.
	if max(len(namespace), len(name)) > maxObjectName || !utf8.ValidString(namespace) || !utf8.ValidString(name) {
		return c, nil
	}
	allowed, err := s.cluster.Allowed(ctx, account, string(a), namespace, name)
	if err != nil || !allowed {
		return c, err
	}
	if c.Kind == authz.Stranger {
		if err := s.giveTenant(ctx, account); err != nil {
			return c, err
		}
		known, err := s.serviceAccount(ctx, account)
		if err != nil {
			return c, err
		}
		known.RequestID, known.SourceIP = c.RequestID, c.SourceIP
		c = known
	}
	c.Scopes = []authz.Scope{scope}
	s.noteName(ctx, c.Tenant, account)
	return c, nil
}

// noteTimeout bounds what a name costs a request.
const noteTimeout = 250 * time.Millisecond

// noteName notes once a day what an account is called, because the log has its UID only. An account whose
// name cannot be noted is served all the same.
func (s *serviceAccounts) noteName(ctx context.Context, tenant authz.TenantID, a ServiceAccount) {
	key, day := string(tenant)+"/"+a.UID, s.now().Unix()/86400
	if last, ok := s.noted.Load(key); ok && last == day {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, noteTimeout)
	defer cancel()
	err := s.store.Update(ctx, func(tx store.Tx) error {
		return s.past.Note(tx, tenant, audit.ServiceAccountResource, a.UID, access.ServiceAccount(a.Namespace, a.Name))
	})
	if err == nil {
		s.noted.Store(key, day)
	}
}

// giveTenant maps an account's namespace to the tenant that is configured for the first namespace
// of that name, or else to a tenant of its own.
func (s *serviceAccounts) giveTenant(ctx context.Context, a ServiceAccount) error {
	if tenant, ok := s.clusterTenants[a.Namespace]; ok {
		if err := s.namespaces.MapNamespace(ctx, a.Cluster, a.Namespace, a.NamespaceUID, tenant); !errors.Is(err, ErrRecreated) {
			return err
		}
	}
	_, err := s.namespaces.NamespaceTenant(ctx, a.Cluster, a.NamespaceUID)
	return err
}
