package credential

import (
	"context"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/identity"
)

// Tenants finds the tenant of a namespace. A namespace that is deleted and created again under the
// same name is another tenant, so the cache may know an earlier namespace of that name. Only
// Tenants.current decides where something new is stored.
type Tenants struct {
	cache    client.Reader // metadata of all namespaces
	live     client.Reader // reads from the API server, not from the cache
	identity *identity.Service
	cluster  string // UID of the cluster
}

// NewTenants returns the tenants of a cluster's namespaces. cache has the metadata of all
// namespaces, and live reads from the API server.
func NewTenants(cache, live client.Reader, identity *identity.Service, cluster string) *Tenants {
	return &Tenants{cache: cache, live: live, identity: identity, cluster: cluster}
}

// errTerminating means that a namespace is being deleted, so nothing can be created in it.
var errTerminating = errors.New("the namespace is terminating")

// apiError is an error of the API server, as opposed to one of the vault.
type apiError struct{ error }

func (e apiError) Unwrap() error { return e.error }

// Find returns the tenant of the namespace with that UID, or "" if it has none yet.
func (t *Tenants) Find(ctx context.Context, namespace types.UID) (authz.TenantID, error) {
	return t.identity.FindNamespaceTenant(ctx, t.cluster, string(namespace))
}

// fromCache returns the tenant of the cached namespace, without asking the API server. It returns
// false if the namespace is missing or terminating, or has no tenant yet.
func (t *Tenants) fromCache(ctx context.Context, namespace string) (authz.TenantID, bool) {
	m, err := ReadNamespace(ctx, t.cache, namespace)
	if err != nil || !m.DeletionTimestamp.IsZero() {
		return "", false
	}
	tenant, err := t.Find(ctx, m.UID)
	return tenant, err == nil && tenant != ""
}

// current returns the tenant of the namespace that exists now, in order to store something. It
// returns errTerminating if the namespace is being deleted, and an apiError if the API server
// fails.
func (t *Tenants) current(ctx context.Context, namespace string) (authz.TenantID, error) {
	m, err := ReadNamespace(ctx, t.live, namespace)
	switch {
	case err != nil:
		return "", apiError{fmt.Errorf("reading namespace: %w", err)}
	case !m.DeletionTimestamp.IsZero():
		return "", errTerminating
	}
	return t.byUID(ctx, m.UID)
}

// ofDeleted returns the tenant of an object that is being deleted. Unlike current, it accepts a
// terminating namespace.
func (t *Tenants) ofDeleted(ctx context.Context, namespace string) (authz.TenantID, error) {
	m, err := ReadNamespace(ctx, t.live, namespace)
	if err != nil {
		return "", apiError{fmt.Errorf("reading namespace: %w", err)}
	}
	return t.byUID(ctx, m.UID)
}

func (t *Tenants) byUID(ctx context.Context, namespace types.UID) (authz.TenantID, error) {
	tenant, err := t.identity.NamespaceTenant(ctx, t.cluster, string(namespace))
	if err != nil {
		return "", fmt.Errorf("finding tenant of namespace: %w", err)
	}
	return tenant, nil
}

// ReadNamespace returns the metadata of a namespace.
func ReadNamespace(ctx context.Context, r client.Reader, name string) (*metav1.PartialObjectMetadata, error) {
	m := new(metav1.PartialObjectMetadata)
	m.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Namespace"))
	return m, r.Get(ctx, client.ObjectKey{Name: name}, m)
}

// isTerminating reports whether the API server refused to create something because its namespace is
// terminating.
func isTerminating(err error) bool {
	return apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause)
}
