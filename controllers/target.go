package controllers

import (
	"bytes"
	"context"
	"crypto/sha3"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"strconv"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/latticekeep/latticekeep/api/v1alpha1"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/vault"
)

// targets makes Secrets hold what the vault holds.
//
// Secrets are neither listed nor watched nor cached. A Secret that was seen to be right is known by its resourceVersion,
// which the status shows; while that stays, nothing is unsealed, and nothing has to be recorded. Drift is looked for once
// in every recheck, at times that are spread.
//
// A Secret that exists is the object's when its annotation names the object's UID. Another one is never touched, unless
// it names the object in an annotation of its own: then everything about it becomes what the object says.
type targets struct {
	client client.Client // writes
	live   client.Reader // asks the API server
	now    func() time.Time

	mu    sync.Mutex
	known map[types.NamespacedName]*knownTarget // by object
}

// knownTarget is what is remembered of a target, so that nothing is read, and above all nothing is unsealed, in vain.
type knownTarget struct {
	object  types.UID
	next    time.Time // when to look for drift
	refused *refusal  // why this spec cannot be made of the values of this version
	of      source
	wary    bool // it could not be written the last time: the API server is asked first whether it would take it

	// What it was when it was written or seen: the status, which says so too, may not have been written since.
	seen *v1alpha1.TargetStatus
}

// source is what a target is made of: the digest of spec.target, and the hash of the audit entry of the version.
type source struct{ spec, audit string }

func sourceOf(sc *v1alpha1.SealedCredential, owned *vault.Owned) source {
	return source{targetDigest(sc), owned.Audit.Hash}
}

// targetDigest is the SHA3-256 digest of spec.target, in lower-case hex; empty without one. It covers no value.
func targetDigest(sc *v1alpha1.SealedCredential) string {
	if sc.Spec.Target == nil {
		return ""
	}
	b, err := json.Marshal(sc.Spec.Target) // maps are sorted
	if err != nil {
		return ""
	}
	sum := sha3.Sum256(b)
	return hex.EncodeToString(sum[:])
}

func targetName(sc *v1alpha1.SealedCredential) string {
	if sc.Spec.Target == nil {
		return ""
	}
	if sc.Spec.Target.Name != "" {
		return sc.Spec.Target.Name
	}
	return sc.Name
}

// deliver makes the target Secret of sc hold the version that the vault holds, and lets a former target go.
func (r *reconciler) deliver(ctx context.Context, p authz.Principal, sc *v1alpha1.SealedCredential, o *outcome, now time.Time) error {
	former := r.targets.former(sc)
	unchanged := former != nil && former.Spec == targetDigest(sc)
	if !o.current && !unchanged {
		return nil // a spec that is refused changes nothing
	}
	if former != nil && former.Name != targetName(sc) {
		if err := r.targets.remove(ctx, sc, former.Name); err != nil {
			return o.late(err)
		}
		r.targets.forget(client.ObjectKeyFromObject(sc))
		o.dropped = true
		former, unchanged = nil, false
	}
	if sc.Spec.Target == nil || o.missing() {
		return nil
	}
	of := sourceOf(sc, o.owned)
	settled := unchanged && former.Audit == of.audit
	if settled {
		intact, err := r.targets.intact(ctx, sc, former)
		if err != nil {
			return o.late(err)
		}
		if intact {
			o.target = former
			return nil
		}
	}
	if o.astray = r.targets.refusedBefore(sc, of); o.astray != nil {
		return nil
	}
	fresh := former == nil && o.values != nil
	seen, what, err := r.targets.sync(ctx, sc, o.owned, fresh, func() (map[string]secret.Bytes, error) {
		if o.values != nil {
			return o.values, nil
		}
		values, err := r.vault.UnsealOwned(ctx, p, string(sc.UID), o.owned.Version)
		o.take(values)
		o.trouble = err
		return values, err
	})
	switch {
	case fault.Of(o.trouble) == fault.NotFound:
		if err := r.restore(ctx, p, sc, o); err != nil || o.values == nil {
			return err
		}
		return r.deliver(ctx, p, sc, o, now)
	case o.trouble != nil:
		return nil
	case errors.As(err, &o.astray):
		r.targets.remember(sc, of, o.astray)
		return nil
	case err != nil:
		r.targets.set(sc, &knownTarget{wary: true})
		o.undelivered = true
		return o.late(err)
	}
	o.target = seen
	r.targets.lookAt(sc, now, seen)
	switch {
	case settled && what != "":
		what = "Repaired"
	case what == "Created", what == "Updated":
		what = "" // the event of the version says it
	}
	if what != "" {
		r.tell(ctx, sc, "Target"+what, "Deliver", fmt.Sprintf("the target Secret holds version %d", o.owned.Version))
	}
	return nil
}

// inspect tells whether the target Secret of an object that is left alone is still what it was.
func (r *reconciler) inspect(ctx context.Context, sc *v1alpha1.SealedCredential, o *outcome) error {
	former := r.targets.former(sc)
	if sc.Spec.Target == nil || former == nil {
		return nil
	}
	intact, err := r.targets.intact(ctx, sc, former)
	if err != nil {
		return o.late(err)
	}
	o.drifted = !intact
	return nil
}

// Error makes a refusal an error on its way out of a Secret.
func (r *refusal) Error() string { return r.err.Error() }

func (r *refusal) Unwrap() error { return r.err }

// astray is a refusal of a target: one that something beside the object may mend, unless the spec itself is wrong.
func astray(reason, format string, args ...any) *refusal {
	return &refusal{reason: reason, err: fault.New(fault.Invalid, "spec.target: "+fmt.Sprintf(format, args...)), passing: reason == v1alpha1.ReasonTargetConflict}
}

// intact reports whether the Secret is as it was seen last, as far as it is time to look.
func (t *targets) intact(ctx context.Context, sc *v1alpha1.SealedCredential, seen *v1alpha1.TargetStatus) (bool, error) {
	now, at := t.now(), t.get(sc).next
	if at.IsZero() { // the operator has just started: not all at once
		at = now.Add(rand.N(recheck))
		t.set(sc, &knownTarget{next: at})
	}
	if now.Before(at) {
		return true, nil
	}
	m := new(metav1.PartialObjectMetadata)
	m.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Secret"))
	err := t.live.Get(ctx, client.ObjectKey{Namespace: sc.Namespace, Name: seen.Name}, m)
	if apierrors.IsNotFound(err) {
		return false, nil
	} else if err != nil {
		return false, fmt.Errorf("looking at the target Secret: %w", err)
	}
	if m.UID != seen.UID || m.ResourceVersion != seen.ResourceVersion {
		return false, nil
	}
	t.lookAt(sc, now, seen)
	return true, nil
}

// lookAt has drift from what was seen looked for within a recheck from now.
func (t *targets) lookAt(sc *v1alpha1.SealedCredential, now time.Time, seen *v1alpha1.TargetStatus) {
	t.set(sc, &knownTarget{next: now.Add(recheck/2 + rand.N(recheck/4)), seen: seen})
}

// former returns the target that there is as far as is known, nil for none. One that is no longer wanted may never have got
// into the status, when the operator was ended just then: under the name by default it is found.
func (t *targets) former(sc *v1alpha1.SealedCredential) *v1alpha1.TargetStatus {
	if seen := t.get(sc).seen; seen != nil {
		return seen
	}
	if sc.Status.Target == nil && sc.Spec.Target == nil && sc.Generation > 1 && sc.Status.ObservedGeneration != sc.Generation {
		return &v1alpha1.TargetStatus{Name: sc.Name}
	}
	return sc.Status.Target
}

// remember keeps a refusal, unless something else than another spec or another version can mend it.
func (t *targets) remember(sc *v1alpha1.SealedCredential, of source, refused *refusal) {
	if refused.passing {
		t.set(sc, &knownTarget{wary: true})
	} else {
		t.set(sc, &knownTarget{refused: refused, of: of})
	}
}

func (t *targets) refusedBefore(sc *v1alpha1.SealedCredential, of source) *refusal {
	if k := t.get(sc); k.of == of {
		return k.refused
	}
	return nil
}

func (t *targets) get(sc *v1alpha1.SealedCredential) knownTarget {
	t.mu.Lock()
	defer t.mu.Unlock()
	if k := t.known[client.ObjectKeyFromObject(sc)]; k != nil && k.object == sc.UID {
		return *k
	}
	return knownTarget{}
}

func (t *targets) set(sc *v1alpha1.SealedCredential, k *knownTarget) {
	t.mu.Lock()
	defer t.mu.Unlock()
	key := client.ObjectKeyFromObject(sc)
	if former := t.known[key]; former != nil && former.object == sc.UID {
		if k.seen == nil {
			k.seen = former.seen
		}
		if k.next.IsZero() { // it was time to look, and it still is
			k.next = former.next
		}
	}
	k.object = sc.UID
	t.known[key] = k
}

func (t *targets) forget(object types.NamespacedName) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.known, object)
}

// sync makes the Secret what sc says with the values, and returns what it is and what was done: Created, Adopted, Replaced,
// Updated, or nothing. A refusal says what its author has to do. values is asked for once it is known that the Secret may
// be written. When nothing is known of a target and the values are at hand anyway, fresh, there is most likely no Secret: then
// the first write is the first call.
func (t *targets) sync(ctx context.Context, sc *v1alpha1.SealedCredential, of *vault.Owned, fresh bool,
	values func() (map[string]secret.Bytes, error)) (*v1alpha1.TargetStatus, string, error) {
	var is *corev1.Secret
	wary := t.get(sc).wary
	what, fresh := "Created", fresh && !wary
	if !fresh {
		var err error
		if is, what, err = t.claim(ctx, sc); err != nil {
			return nil, "", err
		}
	}
	if is != nil {
		defer clearData(is)
	}
	if wary {
		if err := refusedByServer(t.try(ctx, sc, is, of.Version)); err != nil {
			return nil, "", err
		}
	}
	plain, err := values()
	if err != nil {
		return nil, "", err
	}
	data, err := render(sc.Spec.Target, plain)
	if err != nil {
		return nil, "", err
	}
	want := wanted(sc, of.Version, data)
	defer clearData(want)
	if is == nil {
		err = t.create(ctx, want)
		if !fresh || !apierrors.IsAlreadyExists(err) {
			return seen(sc, want, of), what, refusedByServer(err)
		}
		if is, what, err = t.claim(ctx, sc); err != nil || is == nil {
			return nil, "", errors.Join(err, errRaced)
		}
		defer clearData(is)
	}
	return t.update(ctx, sc, is, want, what, of)
}

// errRaced is a conflict with somebody who changes the same Secret.
var errRaced = apierrors.NewConflict(corev1.Resource("secrets"), "", errors.New("changed meanwhile"))

// claim returns the Secret that is to become the target and what that would be, Updated or Adopted; and no Secret when
// there is none yet. A Secret that is not the object's is a refusal.
func (t *targets) claim(ctx context.Context, sc *v1alpha1.SealedCredential) (*corev1.Secret, string, error) {
	is := new(corev1.Secret)
	err := t.live.Get(ctx, client.ObjectKey{Namespace: sc.Namespace, Name: targetName(sc)}, is)
	switch {
	case apierrors.IsNotFound(err):
		return nil, "Created", nil
	case err != nil:
		return nil, "", fmt.Errorf("reading the target Secret: %w", err)
	case !is.DeletionTimestamp.IsZero():
		clearData(is)
		return nil, "", astray(v1alpha1.ReasonTargetConflict, "a Secret of that name is being deleted, and is made again once its finalizers are removed")
	}
	own, adopt := is.Annotations[v1alpha1.AnnotationOwner] == string(sc.UID), is.Annotations[v1alpha1.AnnotationAdopt] == sc.Name
	kind := corev1.SecretType(sc.Spec.Target.Type)
	if kind == "" {
		kind = corev1.SecretTypeOpaque
	}
	switch {
	case own:
		return is, "Updated", nil
	case !adopt:
		err = astray(v1alpha1.ReasonTargetConflict, "a Secret of that name exists and is not this object's: annotate it with %s=%s to hand it over, "+
			"or choose another name", v1alpha1.AnnotationAdopt, sc.Name)
	case is.Type != kind:
		err = astray(v1alpha1.ReasonTargetConflict, "the Secret to adopt has another type, which Kubernetes does not let be changed: set spec.target.type to it")
	case is.Immutable != nil && *is.Immutable:
		err = astray(v1alpha1.ReasonTargetConflict, "the Secret to adopt is immutable: delete it, and it is made again")
	default:
		return is, "Adopted", nil
	}
	clearData(is)
	return nil, "", err
}

// try asks the API server whether it would take the Secret, with no value that it does not have: as long as a quota or a
// policy is in the way, nothing is unsealed.
func (t *targets) try(ctx context.Context, sc *v1alpha1.SealedCredential, is *corev1.Secret, version uint64) error {
	data := make(map[string][]byte)
	for _, key := range needed[corev1.SecretType(sc.Spec.Target.Type)] {
		data[key] = []byte("{}")
	}
	want := wanted(sc, version, data)
	switch {
	case is == nil:
		return t.client.Create(ctx, want, client.DryRunAll, client.FieldOwner(operatorName))
	case is.Type != want.Type || is.Immutable != nil && *is.Immutable:
		return nil // it is made again
	}
	is = is.DeepCopy()
	defer clearData(is)
	is.Labels, is.Annotations, is.OwnerReferences = want.Labels, want.Annotations, want.OwnerReferences
	return t.client.Update(ctx, is, client.DryRunAll, client.FieldOwner(operatorName))
}

// update makes the Secret is what it should be.
func (t *targets) update(ctx context.Context, sc *v1alpha1.SealedCredential, is, want *corev1.Secret, what string, of *vault.Owned) (*v1alpha1.TargetStatus, string, error) {
	// Neither the type nor an immutable Secret can be changed, but the object's own can be made again.
	if is.Type != want.Type || is.Immutable != nil && *is.Immutable && !same(is, want) {
		// Not before it is known that the next one would be taken: admission comes before the name is found to be taken.
		if err := t.client.Create(ctx, want.DeepCopy(), client.DryRunAll); err != nil && !apierrors.IsAlreadyExists(err) {
			return nil, "", refusedByServer(fmt.Errorf("trying the next target Secret: %w", err))
		}
		if err := t.delete(ctx, is); err != nil {
			return nil, "", err
		}
		err := t.create(ctx, want)
		return seen(sc, want, of), "Replaced", refusedByServer(err)
	}
	if same(is, want) {
		return seen(sc, is, of), "", nil
	}
	is.Labels, is.Annotations, is.OwnerReferences = want.Labels, want.Annotations, want.OwnerReferences
	is.Data, want.Data = want.Data, is.Data // both are overwritten in the end
	if err := t.client.Update(ctx, is, client.FieldOwner(operatorName)); err != nil {
		return nil, "", refusedByServer(fmt.Errorf("updating the target Secret: %w", err))
	}
	return seen(sc, is, of), what, nil
}

func (t *targets) create(ctx context.Context, want *corev1.Secret) error {
	if err := t.client.Create(ctx, want, client.FieldOwner(operatorName)); err != nil {
		return fmt.Errorf("creating the target Secret: %w", err)
	}
	return nil
}

// delete deletes exactly the Secret that was read.
func (t *targets) delete(ctx context.Context, is client.Object) error {
	uid, resourceVersion := is.GetUID(), is.GetResourceVersion()
	err := t.client.Delete(ctx, is, client.Preconditions{UID: &uid, ResourceVersion: &resourceVersion})
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("deleting the target Secret: %w", err)
	}
	return nil
}

// release deletes the target Secret of an object that is going away, if it is to go with it.
func (t *targets) release(ctx context.Context, sc *v1alpha1.SealedCredential) error {
	names := map[string]bool{targetName(sc): true}
	if former := t.former(sc); former != nil {
		names[former.Name] = true
	}
	for name := range names {
		if name == "" {
			continue
		}
		if err := t.remove(ctx, sc, name); err != nil {
			return err
		}
	}
	return nil
}

// keep drops the owner reference of a Secret that was to go with sc and is to stay: sc says so since it was written last.
func (t *targets) keep(ctx context.Context, sc *v1alpha1.SealedCredential, secret types.UID) error {
	is := new(corev1.Secret)
	if err := t.live.Get(ctx, client.ObjectKey{Namespace: sc.Namespace, Name: targetName(sc)}, is); apierrors.IsNotFound(err) {
		return nil
	} else if err != nil {
		return fmt.Errorf("reading the target Secret: %w", err)
	}
	defer clearData(is)
	if is.UID != secret {
		return nil
	}
	is.OwnerReferences = nil
	if err := t.client.Update(ctx, is, client.FieldOwner(operatorName)); err != nil {
		return fmt.Errorf("updating the target Secret: %w", err)
	}
	return nil
}

// remove deletes a Secret if it is the object's and its owner reference says that it goes with it; otherwise it stays as it
// is.
func (t *targets) remove(ctx context.Context, sc *v1alpha1.SealedCredential, name string) error {
	m := new(metav1.PartialObjectMetadata)
	m.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Secret"))
	err := t.live.Get(ctx, client.ObjectKey{Namespace: sc.Namespace, Name: name}, m)
	if apierrors.IsNotFound(err) {
		return nil
	} else if err != nil {
		return fmt.Errorf("looking at the target Secret: %w", err)
	}
	if m.Annotations[v1alpha1.AnnotationOwner] != string(sc.UID) || !metav1.IsControlledBy(m, sc) || !m.DeletionTimestamp.IsZero() {
		return nil
	}
	if sc.Spec.Target != nil && name == targetName(sc) && sc.Spec.Target.DeletionPolicy == v1alpha1.DeletionRetain {
		return t.keep(ctx, sc, m.UID)
	}
	return t.delete(ctx, m)
}

// wanted returns the Secret that sc asks for.
func wanted(sc *v1alpha1.SealedCredential, version uint64, data map[string][]byte) *corev1.Secret {
	target := sc.Spec.Target
	s := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: sc.Namespace, Name: targetName(sc), Labels: maps.Clone(target.Labels), Annotations: maps.Clone(target.Annotations),
		},
		Type: corev1.SecretType(target.Type), Data: data,
	}
	if s.Type == "" {
		s.Type = corev1.SecretTypeOpaque
	}
	if s.Annotations == nil {
		s.Annotations = make(map[string]string)
	}
	s.Annotations[v1alpha1.AnnotationOwner] = string(sc.UID)
	s.Annotations[v1alpha1.AnnotationVersion] = strconv.FormatUint(version, 10)
	if target.DeletionPolicy != v1alpha1.DeletionRetain {
		controller := true
		s.OwnerReferences = []metav1.OwnerReference{{
			APIVersion: v1alpha1.GroupVersion.String(), Kind: v1alpha1.KindSealedCredential, Name: sc.Name, UID: sc.UID, Controller: &controller,
		}}
	}
	return s
}

// same reports whether a Secret is what it should be.
func same(is, want *corev1.Secret) bool {
	if len(is.OwnerReferences) != len(want.OwnerReferences) || len(want.OwnerReferences) == 1 && is.OwnerReferences[0].UID != want.OwnerReferences[0].UID {
		return false
	}
	return maps.Equal(is.Labels, want.Labels) && maps.Equal(is.Annotations, want.Annotations) && maps.EqualFunc(is.Data, want.Data, bytes.Equal)
}

func seen(sc *v1alpha1.SealedCredential, is *corev1.Secret, owned *vault.Owned) *v1alpha1.TargetStatus {
	of := sourceOf(sc, owned)
	return &v1alpha1.TargetStatus{
		Name: is.Name, UID: is.UID, ResourceVersion: is.ResourceVersion, Version: int64(owned.Version), Audit: of.audit, Spec: of.spec,
	}
}

// refusedByServer turns the API server's refusal of a Secret into the condition that it is. What the API server says is
// left out, here and in the error of anything else: it may quote the Secret, as an admission webhook may.
func refusedByServer(err error) error {
	status := apierrors.APIStatus(nil)
	switch {
	case err == nil:
		return nil
	case isTerminating(err):
		return errTerminating
	case apierrors.IsAlreadyExists(err), apierrors.IsConflict(err):
		return errRaced
	case apierrors.IsInvalid(err):
		return astray(v1alpha1.ReasonInvalidTarget, "the API server refuses the Secret as invalid: compare spec.target with what Kubernetes asks of this type")
	case !errors.As(err, &status):
		return err // it did not answer
	}
	code := status.Status().Code
	switch {
	case code < 400, code >= 500, code == http.StatusUnauthorized, code == http.StatusNotFound, code == http.StatusTooManyRequests:
		return fmt.Errorf("writing the target Secret: the API server answers %d %s", code, status.Status().Reason)
	}
	return astray(v1alpha1.ReasonTargetConflict, "the API server refuses the Secret (%d): look for a quota, an admission policy, or a right that the operator lacks", code)
}
