// Package credential reconciles SealedCredentials. [Add] adds the controller. It stores in the
// vault what an object asks for, writes the vault's values into the target Secret, and writes a
// status derived from what it observed. [AddOrphanSweeper] adds the controller that releases the
// vault entries of deleted objects.
//
// The main path is in reconciler.go, from top to bottom. It uses three types with one
// responsibility each: objects (finalizer, status, events), entries (the vault) and targets
// (Secrets).
package credential

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"go.opentelemetry.io/otel/trace"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/latticekeep/latticekeep/api/v1alpha1"
	"github.com/latticekeep/latticekeep/controllers/requeue"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/sealing"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/vault"
)

// Config configures the controllers. All fields except Tracer are required.
type Config struct {
	Vault   *vault.Vault
	Keys    *keyring.Ring
	Tenants *Tenants
	Cluster string // UID of the cluster
	Policy  sealing.Policy
	Workers int // number of objects reconciled at the same time

	// CountChange counts a stored version by the kind of change, such as "rotated".
	CountChange func(change string)
	Tracer      trace.Tracer // makes a span for each reconcile; nil makes none
	Now         func() time.Time
}

// refusedRecheck is how long the operator waits before it checks a transient refusal again. It does
// not watch Secrets, so it must look again itself, for example at a Secret of another owner.
const refusedRecheck = time.Minute

// reconciler brings the vault and the target Secret in line with SealedCredentials.
//
// It reads from the vault what has been done, never from the status. Every change names the version
// that it follows. So a reconcile that was interrupted, runs twice or reads an old object makes no
// change twice.
type reconciler struct {
	reader   client.Reader // reads SealedCredentials from the cache
	objects  *objects
	entries  *entries
	targets  *targets
	tenants  *Tenants
	vault    *vault.Vault
	policy   sealing.Policy
	schedule *requeue.Schedule
	now      func() time.Time
}

// Add adds the controller of SealedCredentials to the manager.
func Add(mgr manager.Manager, c Config) error {
	written := &objects{client: mgr.GetClient(), events: mgr.GetEventRecorder(v1alpha1.OperatorName)}
	r := &reconciler{
		reader: mgr.GetClient(), objects: written,
		entries: &entries{
			client: mgr.GetClient(), live: mgr.GetAPIReader(), objects: written,
			vault: c.Vault, keys: c.Keys, cluster: c.Cluster, countChange: c.CountChange, now: c.Now,
		},
		targets: newTargets(mgr.GetClient(), mgr.GetAPIReader(), c.Now),
		tenants: c.Tenants, vault: c.Vault, policy: c.Policy, schedule: requeue.NewSchedule(c.Now), now: c.Now,
	}
	// The controller itself makes most status changes, so they trigger no reconcile.
	changed := predicate.Or[client.Object](predicate.GenerationChangedPredicate{}, predicate.AnnotationChangedPredicate{})
	return builder.ControllerManagedBy(mgr).
		Named("sealedcredential").
		For(&v1alpha1.SealedCredential{}, builder.WithPredicates(changed)).
		WatchesRawSource(r.schedule).
		WithOptions(controller.Options{MaxConcurrentReconciles: c.Workers, RateLimiter: requeue.NewRateLimiter()}).
		Complete(traced(c.Tracer, r))
}

// Reconcile implements reconcile.Reconciler.
func (r *reconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	sc := new(v1alpha1.SealedCredential)
	if err := r.reader.Get(ctx, req.NamespacedName, sc); apierrors.IsNotFound(err) {
		r.forget(req.NamespacedName)
		return reconcile.Result{}, nil
	} else if err != nil {
		return reconcile.Result{}, fmt.Errorf("reading SealedCredential: %w", err)
	}

	now := r.now()
	o, err := r.reconcile(ctx, sc, now)
	if o != nil {
		defer o.zeroValues()
	}
	if err == nil && o != nil {
		if fault.Of(o.err) == fault.Conflict {
			return reconcile.Result{RequeueAfter: requeue.AfterConflict}, nil
		}
		err = r.updateStatus(ctx, sc, o, now)
	}
	switch {
	case apierrors.IsConflict(err):
		return reconcile.Result{RequeueAfter: requeue.AfterConflict}, nil
	case err != nil:
		return reconcile.Result{}, err
	case o == nil: // nothing to do until the object changes
		r.forget(req.NamespacedName)
		return reconcile.Result{}, nil
	}
	r.schedule.Set(req.NamespacedName, nextReconcile(sc, o, now))
	return reconcile.Result{}, o.err
}

// forget drops everything remembered about an object.
func (r *reconciler) forget(object types.NamespacedName) {
	r.schedule.Forget(object)
	r.targets.forget(object)
}

// reconcile brings the vault and the target Secret in line with sc. A nil outcome means that there
// is no status to write. An error means that sc itself could not be written.
func (r *reconciler) reconcile(ctx context.Context, sc *v1alpha1.SealedCredential, now time.Time) (*outcome, error) {
	if !sc.DeletionTimestamp.IsZero() {
		if !controllerutil.ContainsFinalizer(sc, v1alpha1.Finalizer) {
			return nil, nil
		}
		return r.finalize(ctx, sc)
	}
	p, owned, err := r.findEntry(ctx, sc)
	switch {
	case errors.Is(err, errTerminating):
		return nil, nil // the deletion of the object follows
	case errors.As(err, new(apiError)):
		o := new(outcome)
		return o, o.recordAPIError(err)
	case err != nil:
		return &outcome{err: err}, nil
	}
	o := &outcome{owned: owned, entryKnown: true, entryCurrent: matchesSpec(owned, sc)}
	if err := r.reconcileSpec(ctx, p, sc, o, now); err != nil {
		o.zeroValues()
		if errors.Is(err, errTerminating) {
			return nil, nil
		}
		return nil, err
	}
	return o, nil
}

// findEntry returns the principal that acts for sc, and the vault entry of sc. The cached namespace
// may be an earlier one with the same name, and thus another tenant. But an entry that a tenant
// holds for the UID of sc was stored while sc was in that tenant's namespace. So findEntry asks the
// API server for the namespace only when the cached tenant holds nothing.
func (r *reconciler) findEntry(ctx context.Context, sc *v1alpha1.SealedCredential) (authz.Principal, *vault.Owned, error) {
	if tenant, ok := r.tenants.fromCache(ctx, sc.Namespace); ok {
		p := principalFor(ctx, tenant, sc.UID)
		if owned, err := r.vault.Owned(ctx, p, string(sc.UID)); owned != nil || err != nil {
			return p, owned, err
		}
	}
	tenant, err := r.tenants.current(ctx, sc.Namespace)
	if err != nil {
		return authz.Principal{}, nil, err
	}
	p := principalFor(ctx, tenant, sc.UID)
	owned, err := r.vault.Owned(ctx, p, string(sc.UID))
	return p, owned, err
}

// reconcileSpec updates the vault entry first and then the target Secret. It records the result in
// o. An error means that sc itself could not be written.
func (r *reconciler) reconcileSpec(ctx context.Context, p authz.Principal, sc *v1alpha1.SealedCredential, o *outcome, now time.Time) error {
	if o.owned != nil {
		if err := r.objects.ensureFinalizer(ctx, sc); err != nil {
			return err
		}
	}
	if sc.Spec.Suspend {
		return r.checkTarget(ctx, sc, o)
	}
	if o.specRefused = r.checkSpec(sc); o.specRefused == nil {
		if err := r.entries.ensure(ctx, p, sc, o); err != nil {
			return err
		}
	}
	if rotationDue(sc, o, now) {
		if err := r.entries.rotate(ctx, p, sc, o); err != nil {
			return err
		}
	}
	if o.err != nil {
		return nil
	}
	return r.ensureTarget(ctx, p, sc, o, now)
}

// checkSpec returns the reason to refuse sc that does not depend on its values, or nil.
func (r *reconciler) checkSpec(sc *v1alpha1.SealedCredential) *refusal {
	if err := sealing.Check(sc); err != nil {
		reason := v1alpha1.ReasonInvalidSpec
		if sc.Spec.Sealed != nil {
			reason = v1alpha1.ReasonInvalidSealed
		}
		return &refusal{reason: reason, err: err}
	}
	if err := r.policy.Check(sc); err != nil {
		return &refusal{reason: v1alpha1.ReasonPolicy, err: err}
	}
	return nil
}

// ensureTarget writes the vault's version into the target Secret of sc, and deletes a previous
// target.
func (r *reconciler) ensureTarget(ctx context.Context, p authz.Principal, sc *v1alpha1.SealedCredential, o *outcome, now time.Time) error {
	last := r.targets.lastKnown(sc)
	unchanged := last != nil && last.Spec == targetDigest(sc)
	if !o.entryCurrent && !unchanged {
		return nil // a refused spec changes nothing
	}
	if last != nil && last.Name != targetName(sc) {
		if err := r.targets.deleteOwned(ctx, sc, last.Name); err != nil {
			return o.recordAPIError(err)
		}
		r.targets.forget(client.ObjectKeyFromObject(sc))
		o.targetDropped = true
		last, unchanged = nil, false
	}
	if sc.Spec.Target == nil || o.entryMissing() {
		return nil
	}
	from := sourceOf(sc, o.owned)
	isUpToDate := unchanged && last.Audit == from.audit
	if isUpToDate {
		intact, err := r.targets.isUnchanged(ctx, sc, last)
		if err != nil {
			return o.recordAPIError(err)
		}
		if intact {
			o.target = last
			return nil
		}
	}
	if o.targetRefused = r.targets.rememberedRefusal(sc, from); o.targetRefused != nil {
		return nil
	}
	fresh := last == nil && o.values != nil
	seen, what, err := r.targets.ensure(ctx, sc, o.owned, fresh, func() (map[string]secret.Bytes, error) {
		if o.values != nil {
			return o.values, nil
		}
		values, err := r.vault.UnsealOwned(ctx, p, string(sc.UID), o.owned.Version)
		o.setValues(values)
		o.err = err
		return values, err
	})
	switch {
	case fault.Of(o.err) == fault.NotFound:
		if err := r.entries.restore(ctx, p, sc, o); err != nil || o.values == nil {
			return err
		}
		return r.ensureTarget(ctx, p, sc, o, now)
	case o.err != nil:
		return nil
	case errors.As(err, &o.targetRefused):
		r.targets.rememberRefusal(sc, from, o.targetRefused)
		return nil
	case err != nil:
		r.targets.setMemory(sc, &targetMemory{dryRunFirst: true})
		o.targetUnwritten = true
		return o.recordAPIError(err)
	}
	o.target = seen
	r.targets.scheduleCheck(sc, now, seen)
	switch {
	case isUpToDate && what != "":
		what = "Repaired"
	case what == "Created", what == "Updated":
		what = "" // the event of the version already tells it
	}
	if what != "" {
		r.objects.recordEvent(ctx, sc, "Target"+what, "Deliver", fmt.Sprintf("the target Secret holds version %d", o.owned.Version))
	}
	return nil
}

// checkTarget records whether the target Secret of a suspended object has changed.
func (r *reconciler) checkTarget(ctx context.Context, sc *v1alpha1.SealedCredential, o *outcome) error {
	last := r.targets.lastKnown(sc)
	if sc.Spec.Target == nil || last == nil {
		return nil
	}
	intact, err := r.targets.isUnchanged(ctx, sc, last)
	if err != nil {
		return o.recordAPIError(err)
	}
	o.targetDrifted = !intact
	return nil
}

// updateStatus writes the status if it changed, and records an event for every new warning.
func (r *reconciler) updateStatus(ctx context.Context, sc *v1alpha1.SealedCredential, o *outcome, now time.Time) error {
	status := o.status(sc, now)
	if apiequality.Semantic.DeepEqual(status, sc.Status) {
		return nil
	}
	before := sc.DeepCopy()
	sc.Status = status
	if err := r.objects.patchStatus(ctx, before, sc); err != nil {
		return err
	}
	for _, kind := range []string{v1alpha1.ConditionStalled, v1alpha1.ConditionExpiring, v1alpha1.ConditionValuesStale} {
		was := meta.FindStatusCondition(before.Status.Conditions, kind)
		is := meta.FindStatusCondition(status.Conditions, kind)
		if is == nil || is.Status != metav1.ConditionTrue {
			continue
		}
		// A new message of Stalled deserves an event. The growing age of stale values does not.
		if was == nil || was.Status != is.Status || was.Reason != is.Reason || kind == v1alpha1.ConditionStalled && was.Message != is.Message {
			r.objects.recordWarning(sc, kind, is.Message)
		}
	}
	return nil
}

// nextReconcile returns the time of the next reconcile if the object does not change before.
func nextReconcile(sc *v1alpha1.SealedCredential, o *outcome, now time.Time) time.Time {
	wait := recheck
	if refused := cmp.Or(o.specRefused, o.targetRefused); refused != nil && refused.transient {
		wait = refusedRecheck
	}
	next := now.Add(wait - rand.N(wait/5)) //nolint:gosec // spreads reconciles, hides nothing
	s := sc.Status
	times := []*metav1.Time{s.NextRotationTime, s.ExpiresAt, o.overdueAt(sc), o.staleAt(sc)}
	if s.Previous != nil {
		times = append(times, &s.Previous.ReadableUntil)
	}
	for _, t := range times {
		if t != nil && t.After(now) && t.Time.Before(next) {
			next = t.Time
		}
	}
	return next
}

// finalize releases what sc owns, and then removes the finalizer. It removes the finalizer of an
// abandoned object even if its vault entry could not be released.
func (r *reconciler) finalize(ctx context.Context, sc *v1alpha1.SealedCredential) (*outcome, error) {
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
func (r *reconciler) release(ctx context.Context, sc *v1alpha1.SealedCredential) error {
	if err := r.targets.finalize(ctx, sc); err != nil {
		return apiError{err}
	}
	tenant, err := r.tenants.ofDeleted(ctx, sc.Namespace)
	if err != nil {
		return err
	}
	return r.vault.Release(ctx, principalFor(ctx, tenant, sc.UID), string(sc.UID), !retainsEntry(sc))
}

// retainsEntry reports whether the vault entry outlives sc.
func retainsEntry(sc *v1alpha1.SealedCredential) bool {
	return sc.Spec.DeletionPolicy == v1alpha1.DeletionRetain || isAbandoned(sc)
}

func isAbandoned(sc *v1alpha1.SealedCredential) bool {
	return sc.Annotations[v1alpha1.AnnotationAbandon] == "true"
}
