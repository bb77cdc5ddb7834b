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
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
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
	"sigs.k8s.io/controller-runtime/pkg/log"
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
	formers  *formers
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
	left := &formers{vault: c.Vault, live: mgr.GetAPIReader(), cluster: c.Cluster, now: c.Now}
	if err := addOrphanSweeper(mgr, c, left); err != nil {
		return nil, err
	}
	written := &objects{client: mgr.GetClient(), events: mgr.GetEventRecorder(v1beta1.OperatorName)}
	r := &reconciler{
		reader: mgr.GetClient(), objects: written,
		entries: &entries{
			client: mgr.GetClient(), live: mgr.GetAPIReader(), objects: written,
			vault: c.Vault, keys: c.Keys, formers: left, cluster: c.Cluster, countChange: c.CountChange, now: c.Now,
		},
		formers: left,
		targets: newTargets(mgr.GetClient(), mgr.GetAPIReader(), c.LooksPerMinute, c.Now),
		tenants: c.Tenants, vault: c.Vault, policy: c.Policy, schedule: requeue.NewSchedule(c.Now), now: c.Now, countRepair: c.CountRepair,
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
		if err := r.takeOver(ctx, p, sc, o); err != nil {
			return err
		}
	}
	if o.specRefused == nil && o.err == nil {
		holds := func(values map[string]secret.Bytes) bool { return r.vault.Holds(p, string(sc.UID), o.owned, values) }
		if err := r.takeBack(ctx, sc, o, holds); err != nil {
			return o.recordAPIError(err)
		}
	}
	if o.specRefused == nil && o.err == nil && len(sc.Spec.Generate) > 0 && o.formerValues != "" && o.given == nil {
		o.refuseTransiently(v1beta1.ReasonFormerValues, "%s", o.formerValues)
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

// takeOver lets an object that owns nothing go on with the credential of a previous one: the one that
// spec.adoptFrom names, or one that was left by an object of the same name, tenant and form. If
// there is another one of that name, whose values only the vault has, it records in o what to do
// about that. The same holds for an object that went on with a credential unasked and now has another
// form. An error means that sc itself could not be written.
func (r *reconciler) takeOver(ctx context.Context, p authz.Principal, sc *v1beta1.SealedCredential, o *outcome) error {
	from, form := sc.Spec.AdoptFrom, sealing.FormDigest(sc)
	named := from != nil && from.CredentialID != ""
	bound := !o.entryMissing() && o.owned.Bound != nil
	switch {
	case o.owned != nil && named && o.owned.ID != from.CredentialID:
		o.specRefused = &refusal{reason: v1beta1.ReasonFormerValues, err: fault.New(fault.Invalid,
			"spec.adoptFrom: the object has a vault entry of its own: remove adoptFrom, or delete the object and create it with adoptFrom")}
		return nil
	case named && (o.owned == nil || bound):
		guarded, err := r.formers.guarded(ctx)
		if err != nil {
			return o.recordAPIError(err)
		}
		if !guarded {
			o.refuseTransiently(v1beta1.ReasonFormerValues, "spec.adoptFrom: the API server does not check who sets it: install the admission policy %s "+
				"(chart value admissionPolicies.enabled)", policyName)
			return nil
		}
		return r.adopt(ctx, p, sc, o, from.CredentialID, nil)
	case bound && !bytes.Equal(o.owned.Bound, form[:]):
		o.entryCurrent = false // so that values that the object brings are stored in place of those of the previous one
		o.formerValues = fmt.Sprintf("the vault has the values of a previous object for this one, which had the same credential type, source and target, "+
			"and nobody said that they may go elsewhere: take this change of the spec back, or set spec.adoptFrom.credentialID to %s, which needs the verb adopt. "+
			"After a rotation to new values the spec can be changed freely", o.owned.ID)
		return nil
	case o.owned != nil, from != nil:
		return nil
	}
	left, err := r.formers.of(ctx, sc)
	if err != nil {
		o.err = err
		return nil
	}
	for _, former := range left {
		if former.Tenant == p.Tenant && bytes.Equal(former.Form, form[:]) {
			if err := r.adopt(ctx, p, sc, o, former.Credential, &form); err != nil || o.owned != nil || o.err != nil {
				return err
			}
		}
	}
	if len(left) == 0 || sc.Spec.Sealed != nil {
		return nil // the manifest itself has the values
	}
	const fresh = "or set spec.adoptFrom.newValues to true to begin with new ones"
	if i := slices.IndexFunc(left, func(f vault.Former) bool { return f.Tenant == p.Tenant }); i >= 0 {
		o.formerValues = fmt.Sprintf("the vault keeps the values of a previous object of this name (%s): set spec.adoptFrom.credentialID to that id to go on with them, "+
			"which needs the verb adopt, %s", left[i].Credential, fresh)
	} else {
		o.formerValues = "the vault keeps the values of an object of this name in an earlier namespace of this name: have an administrator make this namespace part of " +
			"the tenant of that one (kubernetes.namespacesByUID; the operator's log names the tenant), " + fresh
		log.FromContext(ctx).Info("a previous namespace left values of an object of this name", "tenant", left[0].Tenant, "uid", left[0].UID)
	}
	return nil
}

// adopt lets sc go on with a credential of its tenant. form is nil when somebody asked for it, and
// otherwise the form of sc, which the values must not leave.
func (r *reconciler) adopt(ctx context.Context, p authz.Principal, sc *v1beta1.SealedCredential, o *outcome, credential string, form *[32]byte) error {
	if err := r.objects.ensureFinalizer(ctx, sc); err != nil {
		return err
	}
	owned, err := r.vault.Adopt(ctx, p, string(sc.UID), r.entries.object(sc), credential, form)
	r.formers.changed()
	switch {
	case errors.Is(err, fault.NotFound) && sc.Spec.AdoptFrom != nil:
		o.refuseTransiently(v1beta1.ReasonFormerValues, "spec.adoptFrom.credentialID: the tenant of this namespace has no entry of this id that the object can go on with")
	case errors.Is(err, fault.NotFound):
	case err != nil:
		o.err = err
	default:
		o.owned, o.entryCurrent = owned, matchesSpec(owned, sc)
		r.entries.countChange("adopted")
		r.objects.recordEvent(ctx, sc, "Adopted", "Adopt", fmt.Sprintf("goes on with version %d of %s, which a previous object left", owned.Version, owned.ID))
	}
	return nil
}

// takeBack looks at the Secret where a new object that generates its values is to have its target.
// That Secret may hold the only copy of values that something uses. If its owner handed it over, its
// values become those of the object. If it still carries the mark of a previous object, the object is
// refused.
func (r *reconciler) takeBack(ctx context.Context, sc *v1beta1.SealedCredential, o *outcome, holds func(map[string]secret.Bytes) bool) error {
	last := r.targets.lastKnown(sc)
	switch {
	case len(sc.Spec.Generate) == 0, sc.Spec.Target == nil, last != nil && last.Name == targetName(sc):
		return nil
	case o.owned != nil && o.formerValues != "":
		return nil // the values that the Secret lacks would be those that must not go there
	}
	is := new(corev1.Secret)
	err := r.targets.live.Get(ctx, client.ObjectKey{Namespace: sc.Namespace, Name: targetName(sc)}, is)
	if apierrors.IsNotFound(err) {
		return nil
	} else if err != nil {
		return fmt.Errorf("reading the Secret in the target's place: %w", err)
	}
	defer clearData(is)
	owner, adopt := is.Annotations[v1beta1.AnnotationOwner], is.Annotations[v1beta1.AnnotationAdopt] == sc.Name
	former := owner != "" && owner != string(sc.UID)
	inherited := o.owned != nil && former && owner == o.owned.Former // it comes with the entry
	switch {
	case owner == string(sc.UID), !former && !adopt, inherited && !adopt && !isAhead(sc, is, o.owned, holds):
		return nil // a Secret of somebody else is a conflict of the target, once there are values for it
	case !adopt && inherited:
		o.refuseTransiently(v1beta1.ReasonFormerValues, "spec.target: the Secret %s holds other values than version %d in the vault, and they may be newer: "+
			"annotate it with %s=%s to go on with them, or delete it to go on with those in the vault", is.Name, o.owned.Version, v1beta1.AnnotationAdopt, sc.Name)
		return nil
	case !adopt && o.formerValues != "":
		o.refuseTransiently(v1beta1.ReasonFormerValues, "%s; or annotate the Secret %s with %s=%s to go on with its values", o.formerValues, is.Name, v1beta1.AnnotationAdopt, sc.Name)
		return nil
	case !adopt:
		o.refuseTransiently(v1beta1.ReasonFormerValues, "spec.target: the Secret %s holds the values of a previous object: annotate it with %s=%s to go on with them, "+
			"or delete it", is.Name, v1beta1.AnnotationAdopt, sc.Name)
		return nil
	}
	given, missing, half := valuesOf(sc, is)
	if former && len(missing) > 0 || half {
		o.refuseTransiently(v1beta1.ReasonFormerValues, "spec.target: the Secret %s holds values to go on with, but not %s by itself: "+
			"give spec.target.keys an entry with from for each, and the Secret such a key, or delete the Secret", is.Name, strings.Join(missing, ", "))
		return nil
	}
	if len(given) > 0 {
		o.given = given
	}
	return nil
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
		defer r.formers.changed()
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
