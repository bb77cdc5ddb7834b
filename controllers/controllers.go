// Package controllers is the operator. It stores in the vault what SealedCredential objects ask
// for, writes the vault's values into target Secrets, and publishes the public key that values are
// sealed with.
//
// The model: an object is identified by its UID, and its tenant by the UIDs of cluster and
// namespace. Each reconcile compares the object with its vault entry, changes the vault by
// compare-and-set on the version, then updates the target Secret, and then writes a status that is
// a function of what it observed (see package credential). A rotation is one commit of the next
// version. Everything after it is derived from the vault, so any later reconcile can finish it. The
// operator remembers only when to look again and what it saw of targets, and it can lose both. So
// it may be stopped anywhere, and two operators that share one store do no harm.
//
// Two operators with different stores would overwrite each other's statuses without end. So a
// cluster belongs to one deployment: the one whose sealing key is published there (see package
// cluster). An operator of another deployment refuses to run.
//
// Invariants: an object has a finalizer before anything is sealed for it. After a refused spec, the
// last good version is still served and rotated. Nothing is created in a terminating namespace.
// Every name in an object refers to its own namespace. The operator neither changes nor uses a
// Secret that the object does not own, unless that Secret names the object. It writes values only
// into target Secrets, and hashes of values nowhere. An author's mistake becomes a condition; only
// failures of the vault or the API server are retried.
//
// The operator lists and watches no Secrets, except the metadata of those in namespaces of
// Rights.WatchSecrets. It serves no endpoint and opens no port. It elects a leader only with
// Options.Elect.
package controllers

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"go.opentelemetry.io/otel/trace"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/controllers/cluster"
	"github.com/latticekeep/latticekeep/controllers/credential"
	"github.com/latticekeep/latticekeep/controllers/requeue"
	"github.com/latticekeep/latticekeep/controllers/restart"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/identity"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/sealing"
	"github.com/latticekeep/latticekeep/internal/vault"
)

// These are the operator's rights. It watches SealedCredentials, the metadata of namespaces and one
// ConfigMap, and reads Secrets one at a time. With WatchSecrets it needs a Role with list and watch
// of Secrets in each of the namespaces, which no marker can name. It patches statuses and finalizers.
// The HTTP service in the same process reviews the tokens and rights of callers from the cluster.
//
// +kubebuilder:rbac:groups=latticekeep.dev,resources=sealedcredentials,verbs=get;list;watch;patch
// +kubebuilder:rbac:groups=latticekeep.dev,resources=sealedcredentials/status,verbs=patch
// +kubebuilder:rbac:groups="",resources=namespaces,verbs=get;list;watch
// +kubebuilder:rbac:groups="",resources=secrets,verbs=get;create;update;patch;delete
// +kubebuilder:rbac:groups=admissionregistration.k8s.io,resources=validatingadmissionpolicies;validatingadmissionpolicybindings,verbs=get,resourceNames=latticekeep-adopt
// +kubebuilder:rbac:groups=events.k8s.io,resources=events,verbs=create;patch
// +kubebuilder:rbac:groups=authentication.k8s.io,resources=tokenreviews,verbs=create
// +kubebuilder:rbac:groups=authorization.k8s.io,resources=subjectaccessreviews,verbs=create
// +kubebuilder:rbac:groups="",resources=configmaps,verbs=get;list;watch;patch,resourceNames=latticekeep-sealing-key,namespace=latticekeep-system
// +kubebuilder:rbac:groups="",resources=configmaps,verbs=create,namespace=latticekeep-system
// Only with RestartWorkloads, and so in a role of its own:
//
// +kubebuilder:rbac:roleName=latticekeep-restart,groups=apps,resources=deployments;statefulsets;daemonsets,verbs=get;list;watch;patch

// Only with Elect, and so in a role of its own:
//
// +kubebuilder:rbac:roleName=latticekeep-election,groups=coordination.k8s.io,resources=leases,verbs=create,namespace=latticekeep-system
// +kubebuilder:rbac:roleName=latticekeep-election,groups=coordination.k8s.io,resources=leases,verbs=get;update,resourceNames=latticekeep,namespace=latticekeep-system

// DefaultNamespace is the operator's own namespace by default.
const DefaultNamespace = "latticekeep-system"

// DefaultWorkers is how many objects are reconciled at the same time by default. Their changes
// share commits of the store.
const DefaultWorkers = 16

// DefaultLooksPerMinute is how many target Secrets a minute the operator looks at unasked by
// default.
const DefaultLooksPerMinute = 2000

// Tenants maps existing namespaces to existing tenants. Every other namespace is a tenant of its own,
// created with its first object.
type Tenants struct {
	Names map[string]authz.TenantID // keyed by name: the first namespace of that name, which must exist
	UIDs  map[string]authz.TenantID // keyed by UID, for example a namespace that was made again
}

// Options configures [Run]. Vault, Identity and Keys are required and belong to one store.
type Options struct {
	Vault    *vault.Vault
	Identity *identity.Service
	Keys     *keyring.Ring

	// Tenants says which namespaces are part of existing tenants.
	Tenants Tenants
	// Namespace is where the sealing key is published, which claims the cluster; default
	// DefaultNamespace. The operator creates it if it is missing and its rights allow that.
	Namespace string
	// Policy is what the deployment allows of objects, in addition to the CRD's rules.
	Policy sealing.Policy
	// Pace is how much work the operator does at a time.
	Pace Pace
	// Rights is what the operator does with more rights than its usual role has.
	Rights Rights
	// Elect makes the operators that share a store elect the active one with a Lease; the others
	// wait. Two that are active at once do no harm: the store and the API server both compare
	// versions before they accept a change.
	Elect bool
	// Certificates are the serving certificates that the operator makes and renews. Leave it empty
	// if something else makes them.
	Certificates []cluster.Certificate
	Metrics      *Metrics         // may be nil
	View         *View            // may be nil
	Tracer       trace.Tracer     // makes a span for each reconcile; nil: none
	Logger       *slog.Logger     // default slog.Default()
	Now          func() time.Time // the clock of the vault; default time.Now
}

// Rights is what the operator does with more rights than its usual role has.
type Rights struct {
	// RestartWorkloads restarts annotated workloads when values change.
	RestartWorkloads bool
	// WatchSecrets are namespaces whose Secrets the operator may list and watch. It fixes their
	// targets as soon as they change.
	WatchSecrets []string
}

// Pace is how much work the operator does at a time. Zero means the default.
type Pace struct {
	// Workers is how many objects are reconciled at the same time; default DefaultWorkers.
	Workers int
	// LooksPerMinute is how many target Secrets a minute the operator looks at unasked, above all
	// after a start; default DefaultLooksPerMinute.
	LooksPerMinute int
}

// Run runs the operator against the cluster of cfg until ctx ends, and returns nil once the
// reconciles in flight have finished. It fails at once if the API server does not answer or lacks
// the CRD, or if the cluster belongs to another deployment. It fails later if another deployment
// takes over the cluster. It may be called again in the same process.
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
	o.Pace.Workers = cmp.Or(o.Pace.Workers, DefaultWorkers)
	o.Pace.LooksPerMinute = cmp.Or(o.Pace.LooksPerMinute, DefaultLooksPerMinute)
	if o.Metrics == nil {
		o.Metrics = NewMetrics()
	}
	mgr, err := setUp(ctx, cfg, o)
	if ctx.Err() != nil {
		return nil
	}
	if err != nil {
		return fmt.Errorf("setting up operator: %w", err)
	}
	defer o.Metrics.use(nil)
	defer o.View.use(nil)
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
	// A cluster has no UID of its own. The UID of this namespace is as unique and lives as long.
	system, err := credential.ReadNamespace(ctx, mgr.GetAPIReader(), metav1.NamespaceSystem)
	if err != nil {
		return nil, fmt.Errorf("reading the cluster's UID: %w", err)
	}
	clusterID := string(system.UID)
	if err := mapTenants(ctx, mgr, o, clusterID); err != nil {
		return nil, err
	}
	// This comes first: it fails unless the cluster belongs to this deployment.
	if err := cluster.AddPublisher(ctx, mgr, o.Keys, o.Namespace, o.Now); err != nil {
		return nil, err
	}
	if err := checkWatch(ctx, mgr, o.Rights.WatchSecrets); err != nil {
		return nil, err
	}
	if err := addSealedCredentials(ctx, mgr, o, clusterID); err != nil {
		return nil, err
	}
	if o.Rights.RestartWorkloads {
		if err := restart.Add(mgr, o.Now); err != nil {
			return nil, err
		}
	}
	return mgr, cluster.AddCertificates(mgr, o.Namespace, o.Certificates, o.Now)
}

// checkCRD returns an error that names the remedy if the cluster lacks the SealedCredential CRD.
func checkCRD(ctx context.Context, cfg *rest.Config) error {
	d, err := discovery.NewDiscoveryClientForConfig(cfg)
	if err != nil {
		return err
	}
	_, err = d.ServerResourcesForGroupVersionWithContext(ctx, v1beta1.GroupVersion.String())
	if apierrors.IsNotFound(err) {
		return errors.New("the cluster does not know SealedCredential of " + v1beta1.GroupVersion.String() + ": run `latticekeep crd apply`, or `kubectl apply -k config/crd`")
	}
	if err != nil {
		return fmt.Errorf("asking the API server for its resources (is it up, and does the kubeconfig name it?): %w", err)
	}
	return nil
}

// checkWatch returns an error that names the remedy if the operator may not list the Secrets of one of
// the namespaces.
func checkWatch(ctx context.Context, mgr manager.Manager, namespaces []string) error {
	for _, namespace := range namespaces {
		list := new(metav1.PartialObjectMetadataList)
		list.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("SecretList"))
		err := mgr.GetAPIReader().List(ctx, list, client.InNamespace(namespace), client.Limit(1))
		if apierrors.IsForbidden(err) {
			return fmt.Errorf("the operator may not list Secrets in the namespace %s, which kubernetes.watchSecrets names: "+
				"give its ServiceAccount a Role there with list and watch of secrets, as the chart does, or take the namespace from the list", namespace)
		}
		if err != nil {
			return fmt.Errorf("listing Secrets: %w", err)
		}
	}
	return nil
}

// newManager returns a manager that caches SealedCredentials, the metadata of namespaces and one
// ConfigMap, and with more rights the metadata of workloads and of Secrets in some namespaces. It
// never caches the data of a Secret.
func newManager(cfg *rest.Config, o Options) (manager.Manager, error) {
	cfg = rest.CopyConfig(cfg)
	cfg.QPS = -1 // the API server's own priority and fairness is the limit

	scheme := runtime.NewScheme()
	if err := v1beta1.AddToScheme(scheme); err != nil {
		return nil, err
	}
	if err := corev1.AddToScheme(scheme); err != nil {
		return nil, err
	}
	if err := appsv1.AddToScheme(scheme); err != nil {
		return nil, err
	}
	logger := logr.FromSlogHandler(o.Logger.Handler())
	logLibrariesTo(logger)
	var lock resourcelock.Interface
	if o.Elect {
		var err error
		if lock, err = cluster.NewLease(cfg, o.Namespace); err != nil {
			return nil, err
		}
	}
	byObject := map[client.Object]cache.ByObject{
		&v1beta1.SealedCredential{}: {},
		&corev1.ConfigMap{}: {Namespaces: map[string]cache.Config{
			o.Namespace: {FieldSelector: fields.OneTermEqualSelector(metav1.ObjectNameField, cluster.SealingKeyConfigMap)},
		}},
	}
	if len(o.Rights.WatchSecrets) > 0 {
		secrets := cache.ByObject{Namespaces: make(map[string]cache.Config)}
		for _, namespace := range o.Rights.WatchSecrets {
			secrets.Namespaces[namespace] = cache.Config{}
		}
		byObject[&corev1.Secret{}] = secrets
	}
	skipNames := true // Run may be called again in the same process
	return manager.New(cfg, manager.Options{
		LeaderElection:                      o.Elect,
		LeaderElectionResourceLockInterface: lock,
		LeaderElectionReleaseOnCancel:       true, // reconciles in flight have ended by then

		Scheme:  scheme,
		Logger:  logger,
		Metrics: metricsserver.Options{BindAddress: "0"},
		Cache: cache.Options{
			DefaultTransform:            dropUnread,
			ReaderFailOnMissingInformer: true,
			ByObject:                    byObject,
		},
		Controller: config.Controller{
			SkipNameValidation:    &skipNames,
			ReconciliationTimeout: requeue.Timeout,
		},
	})
}

// dropUnread removes parts of cached objects that nothing reads and that are as large as the rest
// together.
func dropUnread(object any) (any, error) {
	if m, err := meta.Accessor(object); err == nil {
		m.SetManagedFields(nil)
		if annotations := m.GetAnnotations(); annotations != nil {
			delete(annotations, corev1.LastAppliedConfigAnnotation)
		}
	}
	return object, nil
}

// logLibrariesTo sends the logs that client-go and controller-runtime write outside of a manager to
// logger. Both have one logger for the process, and the first one stays: klog's logger must not be
// replaced while anything logs.
func logLibrariesTo(logger logr.Logger) {
	log.SetLogger(logger)
	setKlog.Do(func() { klog.SetLoggerWithOptions(logger, klog.ContextualLogger(true)) })
}

var setKlog sync.Once

// mapTenants assigns the configured namespaces to their tenants. A namespace that was deleted and
// created again is not assigned: it keeps a tenant of its own.
func mapTenants(ctx context.Context, mgr manager.Manager, o Options, cluster string) error {
	for name, tenant := range o.Tenants.Names {
		namespace, err := credential.ReadNamespace(ctx, mgr.GetAPIReader(), name)
		if err != nil {
			return fmt.Errorf("reading a namespace that has a tenant configured: %w", err)
		}
		err = o.Identity.MapNamespace(ctx, cluster, name, string(namespace.UID), tenant)
		if errors.Is(err, identity.ErrRecreated) {
			o.Logger.ErrorContext(ctx, "a configured namespace is not part of its tenant", "namespace", name, "tenant", tenant, "error", err)
		} else if err != nil {
			return err
		}
	}
	for uid, tenant := range o.Tenants.UIDs {
		if err := o.Identity.MapNamespaceUID(ctx, cluster, uid, tenant); err != nil {
			return fmt.Errorf("kubernetes.namespacesByUID: %s: %w", uid, err)
		}
	}
	return nil
}

// addSealedCredentials adds the controller of SealedCredentials and the sweeper, and lets Metrics
// and View read the cache.
func addSealedCredentials(ctx context.Context, mgr manager.Manager, o Options, cluster string) error {
	namespaces := new(metav1.PartialObjectMetadata)
	namespaces.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Namespace"))
	spaces, err := mgr.GetCache().GetInformer(ctx, namespaces, cache.BlockUntilSynced(false))
	if err != nil {
		return err
	}
	// An operator that waits for the Lease fills its cache too: users may ask any replica for the
	// objects.
	objects, err := mgr.GetCache().GetInformer(ctx, new(v1beta1.SealedCredential), cache.BlockUntilSynced(false))
	if err != nil {
		return err
	}
	tenants := credential.NewTenants(mgr.GetClient(), mgr.GetAPIReader(), o.Identity, cluster)
	o.View.use(&viewSource{
		cached: mgr.GetClient(), synced: func() bool { return spaces.HasSynced() && objects.HasSynced() }, tenants: tenants, configured: o.Tenants.Names,
		vault: o.Vault, cluster: cluster,
	})
	config := credential.Config{
		Vault: o.Vault, Keys: o.Keys, Tenants: tenants, Cluster: cluster, Policy: o.Policy, Workers: o.Pace.Workers, LooksPerMinute: o.Pace.LooksPerMinute, WatchSecrets: len(o.Rights.WatchSecrets) > 0,
		CountChange: o.Metrics.countChange, CountRepair: o.Metrics.countRepair, Tracer: o.Tracer, Now: o.Now,
	}
	oldestLook, err := credential.Add(ctx, mgr, config)
	if err != nil {
		return err
	}
	o.Metrics.use(&objectCache{cached: mgr.GetClient(), synced: objects.HasSynced, oldestLook: oldestLook, now: o.Now})
	return nil
}

// LogLibrariesTo sends the logs that client-go and controller-runtime write by themselves to
// handler. Call it before anything uses them: their logger cannot be replaced safely later.
func LogLibrariesTo(handler slog.Handler) { logLibrariesTo(logr.FromSlogHandler(handler)) }
