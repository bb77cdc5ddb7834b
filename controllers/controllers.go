// Package controllers is the operator: it makes the vault hold what SealedCredential objects say, and publishes the
// public key that they are sealed with.
//
// The model: an object is identified by its UID, its tenant by the UIDs of cluster and namespace. Each reconcile
// compares the object with what the vault holds for it, changes the vault by compare-and-set on the version, and then
// writes a status that is a function of what it saw (see outcome). Nothing is remembered between two reconciles but
// when to look again (see schedule), so the operator may be stopped anywhere, and two that share one store do no harm.
//
// Two with stores of their own would overwrite each other's statuses without end, so a cluster belongs to one
// deployment: the one whose sealing key is published there (see publisher). An operator of another one refuses to run.
//
// What holds: a finalizer is on the object before anything is sealed for it; a spec that is refused leaves the last
// good version serving, and rotating; in a terminating namespace nothing is made; no value, and no hash of one, is
// written to the cluster or a log. The author's mistakes are conditions, and only trouble with the vault or the API
// server is retried.
//
// What it does not do: it reads and writes no Secrets, elects no leader (the lock of the embedded store is the
// election), serves no endpoint, and opens no port.
package controllers

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/latticekeep/latticekeep/api/v1alpha1"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/identity"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/vault"
)

// What the operator may do. Reading SealedCredentials, and the one ConfigMap, is watching them; a namespace is read one
// at a time, for its UID. The status and the finalizers are patched.
//
// +kubebuilder:rbac:groups=latticekeep.dev,resources=sealedcredentials,verbs=get;list;watch;patch
// +kubebuilder:rbac:groups=latticekeep.dev,resources=sealedcredentials/status,verbs=patch
// +kubebuilder:rbac:groups="",resources=namespaces,verbs=get
// +kubebuilder:rbac:groups=events.k8s.io,resources=events,verbs=create;patch
// +kubebuilder:rbac:groups="",resources=configmaps,verbs=get;list;watch;patch,resourceNames=latticekeep-sealing-key,namespace=latticekeep-system
// +kubebuilder:rbac:groups="",resources=configmaps,verbs=create,namespace=latticekeep-system

// DefaultNamespace is the operator's own namespace unless it is configured otherwise.
const DefaultNamespace = "latticekeep-system"

// operatorName is who the operator is in events and as the owner of fields.
const operatorName = "latticekeep"

const (
	// workers reconcile at the same time; their changes share commits of the store.
	workers = 8
	// A failing reconcile is retried after firstRetry, then twice as long each time, up to lastRetry: also how long
	// the operator takes to notice that the vault is back.
	firstRetry, lastRetry = 100 * time.Millisecond, 30 * time.Second
	// reconcileTimeout bounds one reconcile, so that a hanging API server does not hold all workers.
	reconcileTimeout = time.Minute
)

// Options of [Run]. Vault, Identity and Keys are required and belong to one store.
type Options struct {
	Vault    *vault.Vault
	Identity *identity.Service
	Keys     *keyring.Ring

	// Tenants names by namespace the existing tenants that these are part of. Every other namespace is a tenant of
	// its own, made when it has its first object. The namespaces must exist.
	Tenants map[string]authz.TenantID
	// Namespace is where the sealing key is published, and so the cluster claimed; default DefaultNamespace. It is
	// created if it is missing and the operator may.
	Namespace string
	Logger    *slog.Logger     // default slog.Default()
	Now       func() time.Time // the clock of the vault; default time.Now
}

// Run runs the operator against the cluster of cfg until ctx ends, and then returns nil once the reconciles in flight
// have finished. It fails at once when the API server does not answer or lacks the CRD, or when the cluster belongs to
// another deployment; and later when the cluster comes to belong to another. It may be called again in the same process.
func Run(ctx context.Context, cfg *rest.Config, o Options) error {
	if o.Namespace == "" {
		o.Namespace = DefaultNamespace
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	mgr, err := setUp(ctx, cfg, o)
	if ctx.Err() != nil {
		return nil
	}
	if err != nil {
		return fmt.Errorf("setting up operator: %w", err)
	}
	if err := mgr.Start(ctx); err != nil {
		return fmt.Errorf("running operator: %w", err)
	}
	return nil
}

// setUp returns the manager, ready to start.
func setUp(ctx context.Context, cfg *rest.Config, o Options) (manager.Manager, error) {
	if err := checkCRD(ctx, cfg); err != nil {
		return nil, err
	}
	mgr, err := newManager(cfg, o)
	if err != nil {
		return nil, err
	}
	// A cluster has no UID of its own; that of this namespace is as unique and lives as long.
	system, err := readNamespace(ctx, mgr.GetAPIReader(), metav1.NamespaceSystem)
	if err != nil {
		return nil, fmt.Errorf("reading the cluster's UID: %w", err)
	}
	cluster := string(system.UID)
	if err := mapTenants(ctx, mgr, o, cluster); err != nil {
		return nil, err
	}
	if err := addSealingKey(ctx, mgr, o); err != nil { // first, since it fails unless the cluster is ours
		return nil, err
	}
	if err := addSealedCredentials(mgr, o, cluster); err != nil {
		return nil, err
	}
	return mgr, addSweeper(mgr, o, cluster)
}

// checkCRD returns an error that names the remedy when the cluster does not know SealedCredential.
func checkCRD(ctx context.Context, cfg *rest.Config) error {
	d, err := discovery.NewDiscoveryClientForConfig(cfg)
	if err != nil {
		return err
	}
	_, err = d.ServerResourcesForGroupVersionWithContext(ctx, v1alpha1.GroupVersion.String())
	if apierrors.IsNotFound(err) {
		return errors.New("the cluster does not know SealedCredential: install it with `kubectl apply -k config/crd`")
	}
	if err != nil {
		return fmt.Errorf("asking the API server for its resources (is it up, and does the kubeconfig name it?): %w", err)
	}
	return nil
}

// newManager returns a manager that caches SealedCredentials and the one ConfigMap, and nothing else.
func newManager(cfg *rest.Config, o Options) (manager.Manager, error) {
	cfg = rest.CopyConfig(cfg)
	cfg.QPS = -1 // the API server's own priority and fairness is the limit

	scheme := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		return nil, err
	}
	if err := corev1.AddToScheme(scheme); err != nil {
		return nil, err
	}
	logger := logr.FromSlogHandler(o.Logger.Handler())
	logLibrariesTo(logger)
	skipNames := true // Run may be called again in the same process
	return manager.New(cfg, manager.Options{
		Scheme:  scheme,
		Logger:  logger,
		Metrics: metricsserver.Options{BindAddress: "0"},
		Cache: cache.Options{
			DefaultTransform:            cache.TransformStripManagedFields(),
			ReaderFailOnMissingInformer: true,
			ByObject: map[client.Object]cache.ByObject{
				&v1alpha1.SealedCredential{}: {},
				&corev1.ConfigMap{}: {Namespaces: map[string]cache.Config{
					o.Namespace: {FieldSelector: fields.OneTermEqualSelector(metav1.ObjectNameField, sealingKeyConfigMap)},
				}},
			},
		},
		Controller: config.Controller{
			SkipNameValidation:    &skipNames,
			ReconciliationTimeout: reconcileTimeout,
		},
	})
}

// logLibrariesTo sends to logger what client-go and controller-runtime log outside of a manager. Both have one logger
// for the process, and the first stays: klog's must not be replaced while anything logs.
func logLibrariesTo(logger logr.Logger) {
	log.SetLogger(logger)
	if reflect.TypeOf(klog.Background().GetSink()) == reflect.TypeOf(klog.NewKlogr().GetSink()) {
		klog.SetLoggerWithOptions(logger, klog.ContextualLogger(true))
	}
}

// mapTenants makes the configured namespaces part of their tenants.
func mapTenants(ctx context.Context, mgr manager.Manager, o Options, cluster string) error {
	for name, tenant := range o.Tenants {
		namespace, err := readNamespace(ctx, mgr.GetAPIReader(), name)
		if err != nil {
			return fmt.Errorf("reading a namespace that has a tenant configured: %w", err)
		}
		if err := o.Identity.MapNamespace(ctx, cluster, string(namespace.UID), tenant); err != nil {
			return err
		}
	}
	return nil
}

// readNamespace returns the metadata of a namespace.
func readNamespace(ctx context.Context, r client.Reader, name string) (*metav1.PartialObjectMetadata, error) {
	m := new(metav1.PartialObjectMetadata)
	m.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Namespace"))
	return m, r.Get(ctx, client.ObjectKey{Name: name}, m)
}

func addSealedCredentials(mgr manager.Manager, o Options, cluster string) error {
	r := &reconciler{
		client: mgr.GetClient(), namespaces: mgr.GetAPIReader(), events: mgr.GetEventRecorder(operatorName),
		vault: o.Vault, identity: o.Identity, keys: o.Keys,
		cluster: cluster, due: newSchedule(o.Now), now: o.Now,
	}
	// Not for every change of the status, most of which are our own.
	changed := predicate.Or[client.Object](predicate.GenerationChangedPredicate{}, predicate.AnnotationChangedPredicate{})
	return builder.ControllerManagedBy(mgr).
		Named("sealedcredential").
		For(&v1alpha1.SealedCredential{}, builder.WithPredicates(changed)).
		WatchesRawSource(r.due).
		WithOptions(controller.Options{MaxConcurrentReconciles: workers, RateLimiter: retries()}).
		Complete(r)
}

func retries() workqueue.TypedRateLimiter[reconcile.Request] {
	return workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](firstRetry, lastRetry)
}
