package controllers

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
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
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/sealing"
	"github.com/latticekeep/latticekeep/internal/vault"
)

// abandonAnnotation, set to "true", lets a deleted object go even when its vault entry cannot be released. The entry is
// kept: it is released by now, or the sweeper does that once it can.
const abandonAnnotation = "latticekeep.dev/abandon"

const (
	// recheck is how often an object is looked at when nothing happens to it: a vault entry may have been deleted, and
	// a sealing key that was unknown may have been restored. A fifth of it is jitter.
	recheck = 10 * time.Minute
	// again is how soon an object is looked at that changed while it was reconciled.
	again = 100 * time.Millisecond
)

// reconciler makes the vault hold what SealedCredentials say.
//
// What has been done is read from the vault, never from the status, and every change names the version that it follows:
// a reconcile that was cut off at any point, runs twice, or reads an old object, changes nothing twice.
type reconciler struct {
	client     client.Client // reads SealedCredentials from the cache
	namespaces client.Reader // asks the API server
	events     events.EventRecorder
	vault      *vault.Vault
	identity   *identity.Service
	keys       *keyring.Ring
	cluster    string // UID of the cluster
	due        *schedule
	now        func() time.Time
}

// Reconcile implements reconcile.Reconciler.
func (r *reconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	sc := new(v1alpha1.SealedCredential)
	if err := r.client.Get(ctx, req.NamespacedName, sc); apierrors.IsNotFound(err) {
		r.due.Forget(req.NamespacedName)
		return reconcile.Result{}, nil
	} else if err != nil {
		return reconcile.Result{}, fmt.Errorf("reading SealedCredential: %w", err)
	}

	now := r.now()
	o, err := r.reconcile(ctx, sc, now)
	if err == nil && o != nil {
		if fault.Of(o.trouble) == fault.Conflict {
			return reconcile.Result{RequeueAfter: again}, nil
		}
		err = r.report(ctx, sc, o, now)
	}
	switch {
	case apierrors.IsConflict(err):
		return reconcile.Result{RequeueAfter: again}, nil
	case err != nil:
		return reconcile.Result{}, err
	case o == nil: // nothing left to do until the object changes
		r.due.Forget(req.NamespacedName)
		return reconcile.Result{}, nil
	}
	r.due.Set(req.NamespacedName, nextLook(sc.Status, now))
	return reconcile.Result{}, o.trouble
}

// reconcile brings the vault in line with sc. A nil outcome means that there is no status to write; an error is trouble
// with the API server.
func (r *reconciler) reconcile(ctx context.Context, sc *v1alpha1.SealedCredential, now time.Time) (*outcome, error) {
	if !sc.DeletionTimestamp.IsZero() {
		if !controllerutil.ContainsFinalizer(sc, v1alpha1.Finalizer) {
			return nil, nil
		}
		return r.letGo(ctx, sc, r.release(ctx, sc))
	}
	namespace, err := readNamespace(ctx, r.namespaces, sc.Namespace)
	if err != nil {
		return nil, fmt.Errorf("reading namespace: %w", err)
	}
	if !namespace.DeletionTimestamp.IsZero() {
		return nil, nil // the object's own deletion follows
	}
	p, err := r.principal(ctx, namespace.UID, sc.UID)
	if err != nil {
		return &outcome{trouble: err}, nil
	}
	owned, err := r.vault.Owned(ctx, p, string(sc.UID))
	if err != nil {
		return &outcome{trouble: err}, nil
	}
	o := &outcome{owned: owned, known: true, current: holds(owned, sc)}
	if owned != nil {
		if err := r.hold(ctx, sc); err != nil {
			return nil, err
		}
	}
	if sc.Spec.Suspend {
		return o, nil
	}
	if !o.current {
		if err := r.seal(ctx, p, sc, o); err != nil {
			return nil, err
		}
	}
	if rotationDue(sc, o, now) {
		if err := r.rotate(ctx, p, sc, o); err != nil {
			return nil, err
		}
	}
	return o, nil
}

// principal is the operator acting for one object in the tenant of its namespace.
func (r *reconciler) principal(ctx context.Context, namespace, object types.UID) (authz.Principal, error) {
	tenant, err := r.identity.NamespaceTenant(ctx, r.cluster, string(namespace))
	if err != nil {
		return authz.Principal{}, fmt.Errorf("finding tenant of namespace: %w", err)
	}
	return actingFor(ctx, tenant, object), nil
}

func actingFor(ctx context.Context, tenant authz.TenantID, object types.UID) authz.Principal {
	return authz.Principal{
		Tenant: tenant, Kind: authz.Operator, ID: string(object),
		Scopes:    []authz.Scope{authz.VaultRead, authz.VaultWrite},
		RequestID: string(controller.ReconcileIDFromContext(ctx)), // which is in every line of the log
	}
}

// hold puts the finalizer on sc, so that it does not go without its vault entry.
func (r *reconciler) hold(ctx context.Context, sc *v1alpha1.SealedCredential) error {
	if controllerutil.ContainsFinalizer(sc, v1alpha1.Finalizer) {
		return nil
	}
	before := sc.DeepCopy()
	controllerutil.AddFinalizer(sc, v1alpha1.Finalizer)
	if err := r.client.Patch(ctx, sc, changes(before)); err != nil {
		return fmt.Errorf("adding finalizer: %w", err)
	}
	return nil
}

// changes is a patch from before, which the API server refuses when the object is no longer that one.
func changes(before client.Object) client.Patch {
	return client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})
}

// seal opens the values of sc and makes them the next version of the vault entry, or its first. The finalizer comes
// before.
func (r *reconciler) seal(ctx context.Context, p authz.Principal, sc *v1alpha1.SealedCredential, o *outcome) error {
	if o.owned != nil {
		if err := sealing.Older(sc, o.owned.ValueSealedAt); err != nil {
			o.refused = &refusal{v1alpha1.ReasonOlderValue, err}
			return nil
		}
	}
	values, err := sealing.Open(sc, func(keyID string) (*envelope.SealingKey, error) { return r.keys.SealingKey(ctx, keyID) })
	if err != nil {
		o.fail(err)
		return nil
	}
	defer func() {
		for _, v := range values {
			v.Zero()
		}
	}()
	if err := r.hold(ctx, sc); err != nil {
		return err
	}
	desired := vault.Desired{
		Name: sc.Name, Type: sc.Spec.CredentialType, TTLDays: int(sc.Spec.TTLDays), Values: values,
		SpecDigest: sealing.SpecDigest(sc), ValuesDigest: sealing.ValuesDigest(sc),
		SealedAt: sealing.SealedAt(sc), Trigger: trigger(sc),
		Object: vault.Object{Cluster: r.cluster, Namespace: sc.Namespace, Name: sc.Name},
	}
	var version uint64
	reason, note := "Sealed", "sealed into the vault as version %d"
	if former := o.owned; former != nil {
		version = former.Version
		switch {
		case former.Missing:
			reason, note = "Recreated", "the vault entry was gone and is sealed again as version %d"
		case former.ValuesDigest == desired.ValuesDigest:
			reason, note = "Reencrypted", "the same values are sealed anew as version %d"
		default:
			reason, note = "Rotated", "changed values are sealed as version %d"
		}
	}
	owned, err := r.vault.Apply(ctx, p, string(sc.UID), version, desired)
	if err != nil {
		o.fail(err)
		return nil
	}
	o.owned, o.current = owned, true
	r.tell(ctx, sc, reason, "Seal", fmt.Sprintf(note, owned.Version))
	return nil
}

// tell leaves an event and a line in the log of what was done with the vault entry of sc.
func (r *reconciler) tell(ctx context.Context, sc *v1alpha1.SealedCredential, reason, action, note string) {
	log.FromContext(ctx).Info(note, "reason", reason)
	r.events.Eventf(sc, nil, corev1.EventTypeNormal, reason, action, "%s", note)
}

// rotationDue reports whether the version that the vault holds is to be replaced by one of the same values: because its
// time has come or the trigger was changed. That the spec is refused meanwhile does not let the last good version end.
func rotationDue(sc *v1alpha1.SealedCredential, o *outcome, now time.Time) bool {
	return o.trouble == nil && !o.missing() &&
		(o.owned.Trigger != trigger(sc) || !now.Before(nextRotation(sc, o.owned)))
}

// rotate makes the next version of the same values. The vault takes them from the entry; when that turns out to be
// damaged they come from the object once more.
func (r *reconciler) rotate(ctx context.Context, p authz.Principal, sc *v1alpha1.SealedCredential, o *outcome) error {
	owned, err := r.vault.Reencrypt(ctx, p, string(sc.UID), o.owned.Version, trigger(sc))
	switch {
	case fault.Of(err) == fault.NotFound:
		o.owned.Missing, o.current = true, false
		if o.refused == nil {
			return r.seal(ctx, p, sc, o)
		}
	case err != nil:
		o.trouble = err
	default:
		o.owned = owned
		r.tell(ctx, sc, "Reencrypted", "Rotate", fmt.Sprintf("the same values are sealed anew as version %d", owned.Version))
	}
	return nil
}

// release ends the vault entry of an object that is going away, as its deletion policy says.
func (r *reconciler) release(ctx context.Context, sc *v1alpha1.SealedCredential) error {
	namespace, err := readNamespace(ctx, r.namespaces, sc.Namespace)
	if err != nil {
		return fmt.Errorf("reading namespace: %w", err)
	}
	p, err := r.principal(ctx, namespace.UID, sc.UID)
	if err != nil {
		return err
	}
	return r.vault.Release(ctx, p, string(sc.UID), !retained(sc))
}

// retained reports whether the vault entry outlives sc.
func retained(sc *v1alpha1.SealedCredential) bool {
	return sc.Spec.DeletionPolicy == v1alpha1.DeletionRetain || abandoned(sc)
}

func abandoned(sc *v1alpha1.SealedCredential) bool {
	return sc.Annotations[abandonAnnotation] == "true"
}

// letGo removes the finalizer once the vault entry has been released, or err, the reason why it has not, no longer
// matters.
func (r *reconciler) letGo(ctx context.Context, sc *v1alpha1.SealedCredential, err error) (*outcome, error) {
	note := "the vault entry is deleted"
	switch {
	case err != nil && !abandoned(sc):
		return &outcome{trouble: err}, nil
	case err != nil:
		log.FromContext(ctx).Error(err, "the vault entry could not be released")
		note = "the vault entry is abandoned: it could not be released yet"
	case retained(sc):
		note = "the vault entry is kept, and no longer tied to this object"
	}
	before := sc.DeepCopy()
	controllerutil.RemoveFinalizer(sc, v1alpha1.Finalizer)
	if err := r.client.Patch(ctx, sc, changes(before)); client.IgnoreNotFound(err) != nil {
		return nil, fmt.Errorf("removing finalizer: %w", err)
	}
	r.tell(ctx, sc, "Released", "Release", note)
	return nil, nil
}

// maxNote is the length of the longest note of an event that the API server takes, in bytes.
const maxNote = 1024

// report writes the status when it is another one, and says so in an event when sc has become stalled or is stalled for
// another reason.
func (r *reconciler) report(ctx context.Context, sc *v1alpha1.SealedCredential, o *outcome, now time.Time) error {
	status := o.status(sc, now)
	if apiequality.Semantic.DeepEqual(status, sc.Status) {
		return nil
	}
	before := sc.DeepCopy()
	sc.Status = status
	if err := r.client.Status().Patch(ctx, sc, changes(before)); err != nil {
		return fmt.Errorf("writing status: %w", err)
	}
	was := meta.FindStatusCondition(before.Status.Conditions, v1alpha1.ConditionStalled)
	is := meta.FindStatusCondition(status.Conditions, v1alpha1.ConditionStalled)
	if is != nil && (was == nil || was.Message != is.Message) {
		note := is.Message[:min(len(is.Message), maxNote)]
		r.events.Eventf(sc, nil, corev1.EventTypeWarning, "Stalled", "Seal", "%s", strings.ToValidUTF8(note, ""))
	}
	return nil
}

// nextLook returns when an object is due again if nothing happens to it.
func nextLook(s v1alpha1.SealedCredentialStatus, now time.Time) time.Time {
	next := now.Add(recheck - rand.N(recheck/5))
	for _, t := range []*metav1.Time{s.NextRotationTime, s.ExpiresAt} {
		if t != nil && t.After(now) && t.Time.Before(next) {
			next = t.Time
		}
	}
	return next
}

// fail records why sc could not be sealed: as its author's mistake, or as trouble that passes.
func (o *outcome) fail(err error) {
	if fault.Of(err) == fault.Invalid {
		o.refused = &refusal{v1alpha1.ReasonInvalidSealed, err}
	} else {
		o.trouble = err
	}
}

// missing reports that the vault has no entry for the object.
func (o *outcome) missing() bool { return o.owned == nil || o.owned.Missing }

// holds reports whether the vault entry was made from the spec of sc.
func holds(owned *vault.Owned, sc *v1alpha1.SealedCredential) bool {
	return owned != nil && !owned.Missing && owned.SpecDigest == sealing.SpecDigest(sc)
}
