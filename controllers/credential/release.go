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

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/controllers/requeue"
	"github.com/latticekeep/latticekeep/internal/sealing"
	"github.com/latticekeep/latticekeep/internal/vault"
)

// finalize releases what sc owns, and then removes the finalizer. It removes the finalizer of an
// abandoned object even if its vault entry could not be released.
func (r *reconciler) finalize(ctx context.Context, sc *v1beta1.SealedCredential) (*outcome, error) {
	err := r.release(ctx, sc)
	note := "the vault entry is deleted"
	switch {
	case errors.As(err, new(apiError)) && !isAbandoned(sc):
		o := new(outcome)
		return o, o.recordAPIError(err)
	case err != nil && !isAbandoned(sc):
		return &outcome{err: err}, nil
	case err != nil:
		log.FromContext(ctx).Error(err, "the vault entry could not be released")
		note = "the vault entry is abandoned: it could not be released yet"
	case retainsEntry(sc):
		note = "the vault entry is kept, and no longer tied to this object"
	}
	if err := r.objects.removeFinalizer(ctx, sc); err != nil {
		return nil, err
	}
	r.objects.recordEvent(ctx, sc, "Released", "Release", note)
	return nil, nil
}

// release deletes the target Secret of sc and deletes or releases its vault entry, as the deletion
// policies say.
func (r *reconciler) release(ctx context.Context, sc *v1beta1.SealedCredential) error {
	if err := r.targets.finalize(ctx, sc); err != nil {
		return apiError{err}
	}
	tenant, err := r.tenants.ofDeleted(ctx, sc.Namespace)
	if err != nil {
		return err
	}
	p := principalFor(ctx, tenant, sc.UID)
	var form [32]byte
	if retainsEntry(sc) {
		defer r.previous.changed()
		owned, err := r.vault.Owned(ctx, p, string(sc.UID))
		if err != nil {
			return err
		}
		form = acceptedForm(sc, owned)
	}
	_, err = r.vault.Release(ctx, p, string(sc.UID), form, !retainsEntry(sc))
	return err
}

// retainsEntry reports whether the vault entry outlives sc.
func retainsEntry(sc *v1beta1.SealedCredential) bool {
	return sc.Spec.DeletionPolicy == v1beta1.DeletionRetain || isAbandoned(sc)
}

func isAbandoned(sc *v1beta1.SealedCredential) bool {
	return sc.Annotations[v1beta1.AnnotationAbandon] == "true"
}

// releaseVanished releases what sc owns if sc vanished while it got its finalizer: the API server
// deletes an object that had none when the deletion began, even if it has one by now.
func (r *reconciler) releaseVanished(ctx context.Context, sc *v1beta1.SealedCredential) error {
	now := new(metav1.PartialObjectMetadata)
	now.SetGroupVersionKind(v1beta1.GroupVersion.WithKind(v1beta1.KindSealedCredential))
	err := r.targets.live.Get(ctx, client.ObjectKeyFromObject(sc), now)
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("looking for a SealedCredential: %w", err)
	}
	if err == nil && now.UID == sc.UID {
		return nil
	}
	return r.release(ctx, sc)
}

// acceptedForm returns the form of sc if its spec was accepted whole, and zero otherwise.
func acceptedForm(sc *v1beta1.SealedCredential, owned *vault.Owned) [32]byte {
	made := ""
	if sc.Status.Target != nil {
		made = sc.Status.Target.Spec
	}
	if owned == nil || !matchesSpec(owned, sc) || made != targetDigest(sc) {
		return [32]byte{}
	}
	return sealing.FormDigest(sc)
}

// sweeper releases the vault entries of objects that went without the operator: someone removed the
// finalizer by hand, or abandoned the object while the vault was down. Otherwise nobody could ever
// change or delete such an entry. It runs when the operator starts, and at every recheck interval.
//
// It deletes no entry, whatever the object's deletion policy was. It knows that the object is gone,
// but not that the credential should go too: the finalizer may have been removed to uninstall the
// operator, or the cluster may have been restored from a backup. A released entry belongs to its
// tenant, who may delete it.
type sweeper struct {
	cached   client.Reader // SealedCredentials only
	live     client.Reader // reads from the API server, not from the cache
	events   events.EventRecorder
	vault    *vault.Vault
	previous *previousObjects
	cluster  string // UID of the cluster
	schedule *requeue.Schedule
	now      func() time.Time
}

// addOrphanSweeper adds the controller that releases the vault entries of objects deleted without
// their finalizer.
func addOrphanSweeper(mgr manager.Manager, c Config, previous *previousObjects) error {
	s := &sweeper{
		cached: mgr.GetClient(), live: mgr.GetAPIReader(), events: mgr.GetEventRecorder(v1beta1.OperatorName),
		vault: c.Vault, previous: previous, cluster: c.Cluster, schedule: requeue.NewSchedule(c.Now), now: c.Now,
	}
	previous.release = s.release
	s.schedule.Set(types.NamespacedName{Name: "all"}, s.now())
	return builder.ControllerManagedBy(mgr).
		Named("orphans").
		Watches(&v1beta1.SealedCredential{}, handler.Funcs{}). // only fills the cache before the first run
		WatchesRawSource(s.schedule).
		WithOptions(controller.Options{RateLimiter: requeue.NewRateLimiter()}).
		Complete(s)
}

// Reconcile implements reconcile.Reconciler.
func (s *sweeper) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	now := s.now()
	// Read the owners before the cache: an entry stored in between is not an orphan.
	owners, _, err := s.vault.Objects(ctx, s.cluster)
	if err != nil {
		return reconcile.Result{}, err
	}
	list := new(v1beta1.SealedCredentialList)
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

// release releases the entries of owner, unless the API server has the object: the cache may lag.
func (s *sweeper) release(ctx context.Context, owner vault.Owner) error {
	object := new(metav1.PartialObjectMetadata)
	object.SetGroupVersionKind(v1beta1.GroupVersion.WithKind(v1beta1.KindSealedCredential))
	err := s.live.Get(ctx, client.ObjectKey{Namespace: owner.Namespace, Name: owner.Name}, object)
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("looking for the owner of a vault entry: %w", err)
	}
	if err == nil && string(object.UID) == owner.UID {
		return nil
	}
	released, err := s.vault.Release(ctx, principalFor(ctx, owner.Tenant, types.UID(owner.UID)), owner.UID, [32]byte{}, false)
	if err != nil || !released { // the next object of its name may have had it released first
		return err
	}
	s.previous.changed()
	const note = "the object is gone and the vault entry is kept, no longer tied to it"
	log.FromContext(ctx).Info(note, "namespace", owner.Namespace, "name", owner.Name, "uid", owner.UID)
	gone := &v1beta1.SealedCredential{ObjectMeta: metav1.ObjectMeta{
		Namespace: owner.Namespace, Name: owner.Name, UID: types.UID(owner.UID),
	}}
	s.events.Eventf(gone, nil, corev1.EventTypeNormal, "Released", "Release", note)
	return nil
}
