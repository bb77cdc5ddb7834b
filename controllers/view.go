package controllers

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/controllers/credential"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/vault"
)

// View shows users the objects of their namespaces from the operator's cache. Pass a zero View in
// [Options]. It outlives one [Run] and reads the cache of the current one, whether that operator is
// active or waits for the Lease.
type View struct{ source atomic.Pointer[viewSource] }

// viewSource is where a View reads.
type viewSource struct {
	cached     client.Reader
	synced     func() bool
	tenants    *credential.Tenants
	configured map[string]authz.TenantID // tenants of configured namespaces
	vault      *vault.Vault
	cluster    string // UID of the cluster

	mu       sync.Mutex
	read     time.Time     // when owners and previous were read
	took     time.Duration // how long that reading took
	owners   []vault.Owner
	previous []vault.PreviousObject
}

// readingShare bounds the time that is spent on reading all objects for warnings, to one part in so
// many. Thousands of objects may be created one after the other, and each asks about its name.
const readingShare = 20

// named returns the UID of the object with that name that owns a credential, or else when the
// values were sealed that a previous one left.
func (there *viewSource) named(ctx context.Context, tenant authz.TenantID, object vault.Object) (uid string, left map[string]time.Time, err error) {
	there.mu.Lock()
	defer there.mu.Unlock()
	if begun := time.Now(); there.read.IsZero() || begun.Sub(there.read) > readingShare*there.took {
		if there.owners, there.previous, err = there.vault.Objects(ctx, there.cluster); err != nil {
			return "", nil, err
		}
		there.read = time.Now()
		there.took = there.read.Sub(begun)
	}
	if i := slices.IndexFunc(there.owners, func(o vault.Owner) bool { return o.Object == object && o.Tenant == tenant }); i >= 0 {
		return there.owners[i].UID, nil, nil
	}
	if i := slices.IndexFunc(there.previous, func(f vault.PreviousObject) bool { return f.Object == object && f.Tenant == tenant }); i >= 0 {
		left = there.previous[i].SealedAt
	}
	return "", left, nil
}

// use sets the source of the View; nil for none.
func (v *View) use(there *viewSource) {
	if v != nil {
		v.source.Store(there)
	}
}

// SealedCredentials returns the objects of all configured namespaces of the tenant, sorted by
// namespace and name. They belong to the cache and must not be changed. A namespace that was
// deleted and created again under the same name is another tenant's. Error: fault.Unavailable while
// the operator does not know all objects.
func (v *View) SealedCredentials(ctx context.Context, tenant authz.TenantID) ([]v1beta1.SealedCredential, error) {
	there := v.source.Load()
	if there == nil || !there.synced() {
		return nil, fault.Outage(fault.ReasonCluster, fault.Unavailable.Error(), errNotRunning)
	}
	var all []v1beta1.SealedCredential
	for namespace, of := range there.configured {
		if of != tenant {
			continue
		}
		m, err := credential.ReadNamespace(ctx, there.cached, namespace)
		if apierrors.IsNotFound(err) {
			continue
		}
		if err != nil {
			return nil, fault.Outage(fault.ReasonCluster, fault.Unavailable.Error(), fmt.Errorf("reading namespace: %w", err))
		}
		now, err := there.tenants.Find(ctx, m.UID)
		if err != nil {
			return nil, fmt.Errorf("finding tenant of namespace: %w", err)
		}
		if now != tenant {
			continue
		}
		list := new(v1beta1.SealedCredentialList)
		if err := there.cached.List(ctx, list, client.InNamespace(namespace), client.UnsafeDisableDeepCopy); err != nil {
			return nil, fault.Outage(fault.ReasonCluster, fault.Unavailable.Error(), fmt.Errorf("listing objects: %w", err))
		}
		all = append(all, list.Items...)
	}
	slices.SortFunc(all, func(a, b v1beta1.SealedCredential) int {
		if n := strings.Compare(a.Namespace, b.Namespace); n != 0 {
			return n
		}
		return strings.Compare(a.Name, b.Name)
	})
	return all, nil
}

// AcceptedValues returns, for each key, when the value was sealed that the vault accepted last for
// an object: the one with the UID of sc, or without a UID one with its namespace and name, or a
// previous one that left its credential. That may be some moments old, and is enough for a warning.
// It returns nil when there is none, and to a principal of another tenant. A ServiceAccount may ask
// about every namespace that the cluster lets it check. Errors: fault.Unavailable while the
// operator does not know all namespaces, or when the vault fails.
func (v *View) AcceptedValues(ctx context.Context, p authz.Principal, sc *v1beta1.SealedCredential) (map[string]time.Time, error) {
	there := v.source.Load()
	if there == nil || !there.synced() {
		return nil, fault.Outage(fault.ReasonCluster, fault.Unavailable.Error(), errNotRunning)
	}
	m, err := credential.ReadNamespace(ctx, there.cached, sc.Namespace)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fault.Outage(fault.ReasonCluster, fault.Unavailable.Error(), fmt.Errorf("reading namespace: %w", err))
	}
	tenant, err := there.tenants.Find(ctx, m.UID)
	if err != nil {
		return nil, fmt.Errorf("finding tenant of namespace: %w", err)
	}
	if tenant == "" || p.Kind != authz.ServiceAccount && p.Tenant != tenant {
		return nil, nil
	}
	object := vault.Object{Cluster: there.cluster, Namespace: sc.Namespace, Name: sc.Name}
	uid := string(sc.UID)
	if uid == "" {
		var left map[string]time.Time
		if uid, left, err = there.named(ctx, tenant, object); err != nil || uid == "" {
			return left, err
		}
	}
	operator := authz.Principal{Tenant: tenant, Kind: authz.Operator, ID: uid, Scopes: []authz.Scope{authz.VaultRead}}
	owned, err := there.vault.Owned(ctx, operator, uid)
	if err != nil || owned == nil || owned.Object != object {
		return nil, err
	}
	return owned.ValueSealedAt, nil
}
