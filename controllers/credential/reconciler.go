// Package credential reconciles SealedCredentials. [Add] adds the controller. It stores in the
// vault what an object asks for, writes the vault's values into the target Secret, and writes a
// status derived from what it observed. [AddOrphanSweeper] adds the controller that releases the
// vault entries of deleted objects.
//
// The main path is in reconciler.go, from top to bottom. It uses three types with one
// responsibility each: objects (finalizer, status, events), entries (the vault) and targets
// (Secrets). adoption.go decides what a new object goes on with, and release.go what a deleted one
// leaves.
package credential

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"go.opentelemetry.io/otel/trace"
	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/latticekeep/latticekeep/api/v1beta1"
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

	LooksPerMinute int  // number of target Secrets looked at in a minute without being asked
	WatchSecrets   bool // the manager's cache has the metadata of Secrets of some namespaces

	// CountChange counts a stored version by the kind of change, such as "rotated".
	CountChange func(change string)
	CountRepair func()       // counts a target Secret that was changed or deleted, and is right again
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
	previous *previousObjects
	targets  *targets
	tenants  *Tenants
	vault    *vault.Vault
	policy   sealing.Policy
	schedule *requeue.Schedule
	now      func() time.Time

	countRepair func()
}

// Add adds the controller of SealedCredentials to the manager, and the one that releases the vault
// entries of objects deleted without their finalizer. It returns a function that returns the time of
// the oldest of the last looks at all target Secrets, or the zero time if there are none.
func Add(ctx context.Context, mgr manager.Manager, c Config) (oldestLook func() time.Time, err error) {
	left := &previousObjects{vault: c.Vault, cluster: c.Cluster, now: c.Now}
	if err := addOrphanSweeper(mgr, c, left); err != nil {
		return nil, err
	}
	written := &objects{client: mgr.GetClient(), events: mgr.GetEventRecorder(v1beta1.OperatorName)}
	r := &reconciler{
		reader: mgr.GetClient(), objects: written,
		entries: &entries{
			client: mgr.GetClient(), live: mgr.GetAPIReader(), objects: written,
			vault: c.Vault, keys: c.Keys, previous: left, cluster: c.Cluster, countChange: c.CountChange, now: c.Now,
		},
		previous: left,
		targets:  newTargets(mgr.GetClient(), mgr.GetAPIReader(), c.LooksPerMinute, c.Now),
		tenants:  c.Tenants, vault: c.Vault, policy: c.Policy, schedule: requeue.NewSchedule(c.Now), now: c.Now, countRepair: c.CountRepair,
	}
	// The controller itself makes most status changes, so they trigger no reconcile. Neither does the
	// finalizer that it adds, but one that somebody removed is put back.
	changed := predicate.Or[client.Object](predicate.GenerationChangedPredicate{}, predicate.AnnotationChangedPredicate{},
		predicate.LabelChangedPredicate{}, predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
			return controllerutil.ContainsFinalizer(e.ObjectOld, v1beta1.Finalizer) && !controllerutil.ContainsFinalizer(e.ObjectNew, v1beta1.Finalizer)
		}})
	b := builder.ControllerManagedBy(mgr).
		Named("sealedcredential").
		For(&v1beta1.SealedCredential{}, builder.WithPredicates(changed)).
		WatchesRawSource(r.schedule).
		WithOptions(controller.Options{MaxConcurrentReconciles: c.Workers, RateLimiter: requeue.NewRateLimiter()})
	if c.WatchSecrets {
		if err := mgr.GetFieldIndexer().IndexField(ctx, &v1beta1.SealedCredential{}, targetIndex, indexTarget); err != nil {
			return nil, fmt.Errorf("indexing targets: %w", err)
		}
		b = b.WatchesMetadata(&corev1.Secret{}, r.targetHandler())
	}
	return r.targets.oldestLook, b.Complete(traced(c.Tracer, r))
}

// Reconcile implements reconcile.Reconciler.
func (r *reconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	sc := new(v1beta1.SealedCredential)
	if err := r.reader.Get(ctx, req.NamespacedName, sc); apierrors.IsNotFound(err) {
		r.forget(req.NamespacedName)
		return reconcile.Result{}, nil
	} else if err != nil {
		return reconcile.Result{}, fmt.Errorf("reading SealedCredential: %w", err)
	}

	now, hadFinalizer := r.now(), controllerutil.ContainsFinalizer(sc, v1beta1.Finalizer)
	o, err := r.reconcile(ctx, sc, now)
	if o != nil {
		defer o.zeroValues()
		defer o.zeroGiven()
	}
	if err == nil && o != nil {
		if fault.Of(o.err) == fault.Conflict {
			return reconcile.Result{RequeueAfter: requeue.AfterConflict}, nil
		}
		err = r.updateStatus(ctx, sc, o, now)
		if !hadFinalizer && (apierrors.IsNotFound(err) || apierrors.IsConflict(err)) {
			return reconcile.Result{RequeueAfter: requeue.AfterConflict}, r.releaseVanished(ctx, sc)
		}
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
	r.schedule.Set(req.NamespacedName, nextReconcile(sc, o, r.targets.nextTurn(sc), now))
	return reconcile.Result{}, o.err
}

// forget drops everything remembered about an object.
func (r *reconciler) forget(object types.NamespacedName) {
	r.schedule.Forget(object)
	r.targets.forget(object)
}

// reconcile brings the vault and the target Secret in line with sc. A nil outcome means that there
// is no status to write. An error means that sc itself could not be written.
func (r *reconciler) reconcile(ctx context.Context, sc *v1beta1.SealedCredential, now time.Time) (*outcome, error) {
	if !sc.DeletionTimestamp.IsZero() {
		if !controllerutil.ContainsFinalizer(sc, v1beta1.Finalizer) {
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
func (r *reconciler) findEntry(ctx context.Context, sc *v1beta1.SealedCredential) (authz.Principal, *vault.Owned, error) {
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
func (r *reconciler) reconcileSpec(ctx context.Context, p authz.Principal, sc *v1beta1.SealedCredential, o *outcome, now time.Time) error {
	if o.owned != nil {
		if err := r.objects.ensureFinalizer(ctx, sc); err != nil {
			return err
		}
	}
	if sc.Spec.Suspend {
		return r.checkTarget(ctx, sc, o)
	}
	if o.specRefused = r.checkSpec(sc); o.specRefused == nil {
		if err := r.adoptEntry(ctx, p, sc, o); err != nil {
			return err
		}
	}
	if o.specRefused == nil && o.err == nil {
		holds := func(values map[string]secret.Bytes) bool { return r.vault.Holds(p, string(sc.UID), o.owned, values) }
		if err := r.adoptSecret(ctx, sc, o, holds); err != nil {
			return o.recordAPIError(err)
		}
	}
	if o.specRefused == nil && o.err == nil && len(sc.Spec.Generate) > 0 && o.previousValues != "" && o.given == nil {
		o.refuseTransiently(v1beta1.ReasonFormerValues, "%s", o.previousValues)
	}
	if o.specRefused == nil && o.err == nil {
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
	return r.ensureTarget(ctx, p, sc, o)
}

// checkSpec returns the reason to refuse sc that does not depend on its values, or nil.
func (r *reconciler) checkSpec(sc *v1beta1.SealedCredential) *refusal {
	if err := sealing.Check(sc); err != nil {
		reason := v1beta1.ReasonInvalidSpec
		if sc.Spec.Sealed != nil {
			reason = v1beta1.ReasonInvalidSealed
		}
		return &refusal{reason: reason, err: err}
	}
	if err := r.policy.Check(sc); err != nil {
		return &refusal{reason: v1beta1.ReasonPolicy, err: err}
	}
	return nil
}

// ensureTarget writes the vault's version into the target Secret of sc, and deletes a previous
// target.
func (r *reconciler) ensureTarget(ctx context.Context, p authz.Principal, sc *v1beta1.SealedCredential, o *outcome) error {
	last := r.targets.lastKnown(sc)
	unchanged := last != nil && last.Spec == targetDigest(sc)
	if !o.entryCurrent && !unchanged || o.specRefused != nil && o.specRefused.reason == v1beta1.ReasonFormerValues {
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
		seen, err := r.targets.isUnchanged(ctx, sc, last)
		if err != nil {
			return o.recordAPIError(err)
		}
		if seen != nil {
			o.target = seen
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
		return r.ensureTarget(ctx, p, sc, o)
	case o.err != nil:
		return nil
	case errors.As(err, &o.targetRefused):
		r.targets.rememberRefusal(sc, from, o.targetRefused)
		return nil
	case err != nil:
		r.targets.rememberFailure(sc)
		o.targetUnwritten = true
		return o.recordAPIError(err)
	}
	o.target = seen
	r.targets.recordLook(sc, seen)
	switch {
	case isUpToDate && what != "":
		what = "Repaired"
		r.countRepair()
	case what == "Created", what == "Updated":
		what = "" // the event of the version already tells it
	}
	if what != "" {
		r.objects.recordEvent(ctx, sc, "Target"+what, "Deliver", fmt.Sprintf("the target Secret holds version %d", o.owned.Version))
	}
	return nil
}

// checkTarget records whether the target Secret of a suspended object has changed.
func (r *reconciler) checkTarget(ctx context.Context, sc *v1beta1.SealedCredential, o *outcome) error {
	last := r.targets.lastKnown(sc)
	if sc.Spec.Target == nil || last == nil {
		return nil
	}
	seen, err := r.targets.isUnchanged(ctx, sc, last)
	if err != nil {
		return o.recordAPIError(err)
	}
	o.target, o.targetDrifted = seen, seen == nil
	return nil
}

// updateStatus writes the status if it changed, and records an event for every new warning.
func (r *reconciler) updateStatus(ctx context.Context, sc *v1beta1.SealedCredential, o *outcome, now time.Time) error {
	status := o.status(sc, now)
	if apiequality.Semantic.DeepEqual(status, sc.Status) {
		return nil
	}
	before := sc.DeepCopy()
	sc.Status = status
	if err := r.objects.patchStatus(ctx, before, sc); err != nil {
		return err
	}
	for _, kind := range []string{v1beta1.ConditionStalled, v1beta1.ConditionExpiring, v1beta1.ConditionValuesStale} {
		was := meta.FindStatusCondition(before.Status.Conditions, kind)
		is := meta.FindStatusCondition(status.Conditions, kind)
		if is == nil || is.Status != metav1.ConditionTrue {
			continue
		}
		// A new message of Stalled deserves an event. The growing age of stale values does not.
		if was == nil || was.Status != is.Status || was.Reason != is.Reason || kind == v1beta1.ConditionStalled && was.Message != is.Message {
			r.objects.recordWarning(sc, kind, is.Message)
		}
	}
	return nil
}

// nextReconcile returns the time of the next reconcile if the object does not change before. turn is
// that of a look at the target Secret that waits.
func nextReconcile(sc *v1beta1.SealedCredential, o *outcome, turn, now time.Time) time.Time {
	wait := recheck
	if refused := cmp.Or(o.specRefused, o.targetRefused); refused != nil && refused.transient {
		wait = refusedRecheck
	}
	next := now.Add(wait - rand.N(wait/5)) //nolint:gosec // spreads reconciles, hides nothing
	s := sc.Status
	times := []*metav1.Time{s.NextRotationTime, s.ExpiresAt, o.overdueAt(sc), o.staleAt(sc), {Time: turn}}
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
