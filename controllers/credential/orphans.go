package credential

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/latticekeep/latticekeep/api/v1alpha1"
	"github.com/latticekeep/latticekeep/controllers/requeue"
	"github.com/latticekeep/latticekeep/internal/vault"
)

// sweeper releases the vault entries whose object went without them: its finalizer was taken off by hand, or it was
// abandoned while the vault was down. Otherwise nobody could ever change or delete such an entry. It looks when the
// operator starts, and again at each recheck.
//
// It deletes no entry, whatever the object's deletion policy was. That the object is gone is known; that its credential
// should go too is not, since whoever removed the finalizer may have been uninstalling the operator, or have set the
// cluster back to a backup. The entry is its tenant's from now on, who may delete it.
type sweeper struct {
	cached   client.Reader // SealedCredentials only
	live     client.Reader // asks the API server
	events   events.EventRecorder
	vault    *vault.Vault
	cluster  string // UID of the cluster
	schedule *requeue.Schedule
	now      func() time.Time
}

// AddOrphanSweeper adds the controller that releases what objects without a finalizer left behind.
func AddOrphanSweeper(mgr manager.Manager, c Config) error {
	s := &sweeper{
		cached: mgr.GetClient(), live: mgr.GetAPIReader(), events: mgr.GetEventRecorder(v1alpha1.OperatorName),
		vault: c.Vault, cluster: c.Cluster, schedule: requeue.NewSchedule(c.Now), now: c.Now,
	}
	s.schedule.Set(types.NamespacedName{Name: "all"}, s.now())
	return builder.ControllerManagedBy(mgr).
		Named("orphans").
		Watches(&v1alpha1.SealedCredential{}, handler.Funcs{}). // has the cache filled before the first look, and nothing else
		WatchesRawSource(s.schedule).
		WithOptions(controller.Options{RateLimiter: requeue.NewRateLimiter()}).
		Complete(s)
}

// Reconcile implements reconcile.Reconciler.
func (s *sweeper) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	now := s.now()
	// The owners are read before the cache: what is sealed meanwhile is no orphan.
	owners, err := s.vault.Owners(ctx, s.cluster)
	if err != nil {
		return reconcile.Result{}, err
	}
	list := new(v1alpha1.SealedCredentialList)
	if err := s.cached.List(ctx, list, client.UnsafeDisableDeepCopy); err != nil {
		return reconcile.Result{}, fmt.Errorf("listing SealedCredentials: %w", err)
	}
	exists := make(map[types.UID]bool, len(list.Items))
	for i := range list.Items {
		exists[list.Items[i].UID] = true
	}
	var errs []error
	for _, owner := range owners {
		if !exists[types.UID(owner.UID)] {
			errs = append(errs, s.release(ctx, owner))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return reconcile.Result{}, err
	}
	s.schedule.Set(req.NamespacedName, now.Add(recheck))
	return reconcile.Result{}, nil
}

// release releases what owner owns, unless the object turns out to exist: the cache may be behind.
func (s *sweeper) release(ctx context.Context, owner vault.Owner) error {
	object := new(metav1.PartialObjectMetadata)
	object.SetGroupVersionKind(v1alpha1.GroupVersion.WithKind(v1alpha1.KindSealedCredential))
	err := s.live.Get(ctx, client.ObjectKey{Namespace: owner.Namespace, Name: owner.Name}, object)
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("looking for the owner of a vault entry: %w", err)
	}
	if err == nil && string(object.UID) == owner.UID {
		return nil
	}
	if err := s.vault.Release(ctx, principalFor(ctx, owner.Tenant, types.UID(owner.UID)), owner.UID, false); err != nil {
		return err
	}
	const note = "the object is gone and the vault entry is kept, no longer tied to it"
	log.FromContext(ctx).Info(note, "namespace", owner.Namespace, "name", owner.Name, "uid", owner.UID)
	gone := &v1alpha1.SealedCredential{ObjectMeta: metav1.ObjectMeta{
		Namespace: owner.Namespace, Name: owner.Name, UID: types.UID(owner.UID),
	}}
	s.events.Eventf(gone, nil, corev1.EventTypeNormal, "Released", "Release", note)
	return nil
}
