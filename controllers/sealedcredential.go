package controllers

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/latticekeep/latticekeep/api/v1alpha1"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/sealing"
	"github.com/latticekeep/latticekeep/internal/vault"
)

const (
	// recheck is how often an object is looked at when nothing happens to it: a vault entry may have been deleted, and
	// a sealing key that was unknown may have been restored. A fifth of it is jitter.
	recheck = 10 * time.Minute
	// afterConflict is how soon an object is looked at that changed while it was reconciled.
	afterConflict = 100 * time.Millisecond
	// refusedRecheck is how often an object is looked at that is refused for something around it, such as a Secret of
	// somebody else: the operator does not watch Secrets.
	refusedRecheck = time.Minute
)

// reconciler makes the vault hold what SealedCredentials say.
//
// What has been done is read from the vault, never from the status, and every change names the version that it follows:
// a reconcile that was cut off at any point, runs twice, or reads an old object, changes nothing twice.
type reconciler struct {
	client   client.Client // reads SealedCredentials from the cache
	live     client.Reader // asks the API server
	tenants  *tenants
	events   events.EventRecorder
	vault    *vault.Vault
	keys     *keyring.Ring
	policy   sealing.Policy
	cluster  string // UID of the cluster
	schedule *schedule
	targets  *targets
	counters *Metrics
	now      func() time.Time

	rsaKeys sync.Mutex // held while RSA keys are made
}

// Reconcile implements reconcile.Reconciler.
func (r *reconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	sc := new(v1alpha1.SealedCredential)
	if err := r.client.Get(ctx, req.NamespacedName, sc); apierrors.IsNotFound(err) {
		r.schedule.Forget(req.NamespacedName)
		r.targets.forget(req.NamespacedName)
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
			return reconcile.Result{RequeueAfter: afterConflict}, nil
		}
		err = r.updateStatus(ctx, sc, o, now)
	}
	switch {
	case apierrors.IsConflict(err):
		return reconcile.Result{RequeueAfter: afterConflict}, nil
	case err != nil:
		return reconcile.Result{}, err
	case o == nil: // nothing left to do until the object changes
		r.schedule.Forget(req.NamespacedName)
		r.targets.forget(req.NamespacedName)
		return reconcile.Result{}, nil
	}
	r.schedule.Set(req.NamespacedName, nextReconcile(sc, o, now))
	return reconcile.Result{}, o.err
}

// reconcile brings the vault in line with sc. A nil outcome means that there is no status to write; an error is trouble
// with the API server.
func (r *reconciler) reconcile(ctx context.Context, sc *v1alpha1.SealedCredential, now time.Time) (*outcome, error) {
	if !sc.DeletionTimestamp.IsZero() {
		if !controllerutil.ContainsFinalizer(sc, v1alpha1.Finalizer) {
			return nil, nil
		}
		return r.finalize(ctx, sc, r.releaseOwned(ctx, sc))
	}
	p, owned, err := r.findEntry(ctx, sc)
	switch {
	case errors.Is(err, errTerminating):
		return nil, nil // the object's own deletion follows
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

// reconcileSpec does what is to be done for sc: the vault entry first, then the target Secret. What came of it is in o; an error is
// trouble with writing sc itself.
func (r *reconciler) reconcileSpec(ctx context.Context, p authz.Principal, sc *v1alpha1.SealedCredential, o *outcome, now time.Time) error {
	if o.owned != nil {
		if err := r.ensureFinalizer(ctx, sc); err != nil {
			return err
		}
	}
	if sc.Spec.Suspend {
		return r.checkTarget(ctx, sc, o)
	}
	if o.specRefused = r.checkSpec(sc); o.specRefused == nil {
		if err := r.ensureEntry(ctx, p, sc, o); err != nil {
			return err
		}
	}
	if rotationDue(sc, o, now) {
		if err := r.rotate(ctx, p, sc, o); err != nil {
			return err
		}
	}
	if o.err != nil {
		return nil
	}
	return r.ensureTarget(ctx, p, sc, o, now)
}

// findEntry returns the operator as it acts for sc, and what the vault holds for sc. The namespace that is cached may be a
// former one of the same name, and so another tenant; but what a tenant holds for the UID of sc was stored when sc was in
// its namespace. Only when it holds nothing, the namespace is asked for.
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

// checkSpec returns why sc is refused whatever its values are.
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

func principalFor(ctx context.Context, tenant authz.TenantID, object types.UID) authz.Principal {
	return authz.Principal{
		Tenant: tenant, Kind: authz.Operator, ID: string(object),
		Scopes:    []authz.Scope{authz.VaultRead, authz.VaultWrite},
		RequestID: string(controller.ReconcileIDFromContext(ctx)), // every log line has the same id
	}
}

// ensureFinalizer puts the finalizer on sc, so that it does not go without its vault entry.
func (r *reconciler) ensureFinalizer(ctx context.Context, sc *v1alpha1.SealedCredential) error {
	if controllerutil.ContainsFinalizer(sc, v1alpha1.Finalizer) {
		return nil
	}
	before := sc.DeepCopy()
	controllerutil.AddFinalizer(sc, v1alpha1.Finalizer)
	if err := r.patch(ctx, r.client, before, sc); err != nil {
		return fmt.Errorf("adding finalizer: %w", err)
	}
	return nil
}

// patcher is a client, or that of the status.
type patcher interface {
	Patch(ctx context.Context, obj client.Object, patch client.Patch, opts ...client.PatchOption) error
}

type statusPatcher struct{ client.SubResourceWriter }

// Patch implements patcher.
func (p statusPatcher) Patch(ctx context.Context, obj client.Object, patch client.Patch, _ ...client.PatchOption) error {
	return p.SubResourceWriter.Patch(ctx, obj, patch)
}

// patch patches what differs between before and sc of the finalizers and the status, unless the object is no longer
// before. The sealed values, which are most of an object, are neither compared nor sent, in either direction.
func (r *reconciler) patch(ctx context.Context, to patcher, before, sc *v1alpha1.SealedCredential) error {
	slim := func(sc *v1alpha1.SealedCredential) *v1alpha1.SealedCredential {
		return &v1alpha1.SealedCredential{
			ObjectMeta: metav1.ObjectMeta{Namespace: sc.Namespace, Name: sc.Name, ResourceVersion: sc.ResourceVersion, Finalizers: sc.Finalizers},
			Status:     sc.Status,
		}
	}
	data, err := changes(slim(before)).Data(slim(sc))
	if err != nil {
		return err
	}
	m := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Namespace: sc.Namespace, Name: sc.Name}}
	m.SetGroupVersionKind(v1alpha1.GroupVersion.WithKind(v1alpha1.KindSealedCredential))
	if err := to.Patch(ctx, m, client.RawPatch(types.MergePatchType, data)); err != nil {
		return err
	}
	sc.ResourceVersion, sc.Finalizers = m.ResourceVersion, m.Finalizers
	return nil
}

// changes is a patch from before, which the API server refuses when the object is no longer that one.
func changes(before client.Object) client.Patch {
	return client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})
}

// recordEvent leaves an event and a line in the log of what was done with the vault entry of sc.
func (r *reconciler) recordEvent(ctx context.Context, sc *v1alpha1.SealedCredential, reason, action, note string) {
	log.FromContext(ctx).Info(note, "reason", reason)
	r.events.Eventf(sc, nil, corev1.EventTypeNormal, reason, action, "%s", note)
}

// rotationDue reports whether the version that the vault holds is to be rotated: because its time has come or the trigger
// was changed. Neither that the spec is refused meanwhile nor trouble with the API server lets the last good version end. New
// values are made only once the spec is accepted, so half of the time that is left is waited for that.
func rotationDue(sc *v1alpha1.SealedCredential, o *outcome, now time.Time) bool {
	switch {
	case o.entryMissing(), o.err != nil && !errors.As(o.err, new(apiError)):
		return false
	case o.specRefused != nil && regenerates(sc):
		return !now.Before(o.owned.ExpiresAt.Add(-rotationLead(sc, o.owned) / 2))
	}
	return o.owned.Trigger != rotationTrigger(sc) || !now.Before(nextRotation(sc, o.owned))
}

// releaseOwned deletes the target Secret of an object that is going away and ends its vault entry, as its deletion policies
// say.
func (r *reconciler) releaseOwned(ctx context.Context, sc *v1alpha1.SealedCredential) error {
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

// finalize removes the finalizer once the vault entry has been released, or err, the reason why it has not, no longer
// matters.
func (r *reconciler) finalize(ctx context.Context, sc *v1alpha1.SealedCredential, err error) (*outcome, error) {
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
	before := sc.DeepCopy()
	controllerutil.RemoveFinalizer(sc, v1alpha1.Finalizer)
	if err := r.patch(ctx, r.client, before, sc); client.IgnoreNotFound(err) != nil {
		return nil, fmt.Errorf("removing finalizer: %w", err)
	}
	r.recordEvent(ctx, sc, "Released", "Release", note)
	return nil, nil
}

// maxNote is the length of the longest note of an event that the API server takes, in bytes.
const maxNote = 1024

// updateStatus writes the status when it is another one, and tells in an event of every warning that is new in it.
func (r *reconciler) updateStatus(ctx context.Context, sc *v1alpha1.SealedCredential, o *outcome, now time.Time) error {
	status := o.status(sc, now)
	if apiequality.Semantic.DeepEqual(status, sc.Status) {
		return nil
	}
	before := sc.DeepCopy()
	sc.Status = status
	if err := r.patch(ctx, statusPatcher{r.client.Status()}, before, sc); err != nil {
		return fmt.Errorf("writing status: %w", err)
	}
	for _, kind := range []string{v1alpha1.ConditionStalled, v1alpha1.ConditionExpiring, v1alpha1.ConditionValuesStale} {
		was := meta.FindStatusCondition(before.Status.Conditions, kind)
		is := meta.FindStatusCondition(status.Conditions, kind)
		if is == nil || is.Status != metav1.ConditionTrue {
			continue
		}
		// Why it is stalled is news; how old values are is not, once they are too old.
		if was == nil || was.Status != is.Status || was.Reason != is.Reason || kind == v1alpha1.ConditionStalled && was.Message != is.Message {
			note := is.Message[:min(len(is.Message), maxNote)]
			r.events.Eventf(sc, nil, corev1.EventTypeWarning, kind, "Reconcile", "%s", strings.ToValidUTF8(note, ""))
		}
	}
	return nil
}

// nextReconcile returns when an object is due again if nothing happens to it.
func nextReconcile(sc *v1alpha1.SealedCredential, o *outcome, now time.Time) time.Time {
	wait := recheck
	if refused := cmp.Or(o.specRefused, o.targetRefused); refused != nil && refused.transient {
		wait = refusedRecheck
	}
	next := now.Add(wait - rand.N(wait/5))
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

// entryMissing reports that the vault has no entry for the object.
func (o *outcome) entryMissing() bool { return o.owned == nil || o.owned.Missing }

// matchesSpec reports whether the vault entry was made from the spec of sc.
func matchesSpec(owned *vault.Owned, sc *v1alpha1.SealedCredential) bool {
	return owned != nil && !owned.Missing && owned.SpecDigest == sealing.SpecDigest(sc)
}
