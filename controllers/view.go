package controllers

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/latticekeep/latticekeep/api/v1alpha1"
	"github.com/latticekeep/latticekeep/controllers/credential"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
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
func (v *View) SealedCredentials(ctx context.Context, tenant authz.TenantID) ([]v1alpha1.SealedCredential, error) {
	there := v.source.Load()
	if there == nil || !there.synced() {
		return nil, fault.Wrap(fault.Unavailable, fault.Unavailable.Error(), errNotRunning)
	}
	var all []v1alpha1.SealedCredential
	for namespace, of := range there.configured {
		if of != tenant {
			continue
		}
		m, err := credential.ReadNamespace(ctx, there.cached, namespace)
		if apierrors.IsNotFound(err) {
			continue
		}
		if err != nil {
			return nil, fault.Wrap(fault.Unavailable, fault.Unavailable.Error(), fmt.Errorf("reading namespace: %w", err))
		}
		now, err := there.tenants.Find(ctx, m.UID)
		if err != nil {
			return nil, fmt.Errorf("finding tenant of namespace: %w", err)
		}
		if now != tenant {
			continue
		}
		list := new(v1alpha1.SealedCredentialList)
		if err := there.cached.List(ctx, list, client.InNamespace(namespace), client.UnsafeDisableDeepCopy); err != nil {
			return nil, fault.Wrap(fault.Unavailable, fault.Unavailable.Error(), fmt.Errorf("listing objects: %w", err))
		}
		all = append(all, list.Items...)
	}
	slices.SortFunc(all, func(a, b v1alpha1.SealedCredential) int {
		if n := strings.Compare(a.Namespace, b.Namespace); n != 0 {
			return n
		}
		return strings.Compare(a.Name, b.Name)
	})
	return all, nil
}
