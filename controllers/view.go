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

// View shows people the objects of their namespaces as the operator knows them. The zero View is for [Options]; it lives
// longer than one [Run], and looks at the cache of the one that runs, whether that works or waits for the Lease.
type View struct{ source atomic.Pointer[viewSource] }

// viewSource is what a View looks at.
type viewSource struct {
	cached     client.Reader
	synced     func() bool
	tenants    *credential.Tenants
	configured map[string]authz.TenantID // namespaces that the configuration names
}

// use has a View look there from now on; nil for nowhere.
func (v *View) use(there *viewSource) {
	if v != nil {
		v.source.Store(there)
	}
}

// SealedCredentials returns the objects of all namespaces that the configuration gives to the tenant, by namespace and
// name. They are the cache's and must not be changed. A namespace that was made again since under its name is another
// tenant's. Error: fault.Unavailable while the operator does not know all objects.
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
