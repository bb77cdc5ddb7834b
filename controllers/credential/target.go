package credential

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/latticekeep/latticekeep/api/v1alpha1"
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

	mu       sync.Mutex
	memories map[types.NamespacedName]*targetMemory // keyed by object
}

func newTargets(c client.Client, live client.Reader, now func() time.Time) *targets {
	return &targets{client: c, live: live, now: now, memories: make(map[types.NamespacedName]*targetMemory)}
}

// recheck is how often an object is looked at when nothing happens to it: a vault entry may have been
// deleted, or an unknown sealing key restored. A fifth of the time is jitter.
const recheck = 10 * time.Minute

// targetMemory is what is remembered of a target, so that nothing is read, and above all nothing is unsealed, in vain.
type targetMemory struct {
	object      types.UID
	nextCheck   time.Time // when to look for drift
	refused     *refusal  // why this spec cannot be made of the values of this version
	source      source
	dryRunFirst bool // it could not be written the last time: the API server is asked first whether it would take it

	// What it was when it was written or seen: the status, which says so too, may not have been written since.
	seen *v1alpha1.TargetStatus
}

// isUnchanged reports whether the Secret is as it was seen last, as far as it is time to look.
func (t *targets) isUnchanged(ctx context.Context, sc *v1alpha1.SealedCredential, seen *v1alpha1.TargetStatus) (bool, error) {
	now, at := t.now(), t.memory(sc).nextCheck
	if at.IsZero() { // the operator has just started: not all at once
		at = now.Add(rand.N(recheck))
		t.setMemory(sc, &targetMemory{nextCheck: at})
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
	t.scheduleCheck(sc, now, seen)
	return true, nil
}

// scheduleCheck has drift from what was seen looked for within a recheck from now.
func (t *targets) scheduleCheck(sc *v1alpha1.SealedCredential, now time.Time, seen *v1alpha1.TargetStatus) {
	t.setMemory(sc, &targetMemory{nextCheck: now.Add(recheck/2 + rand.N(recheck/4)), seen: seen})
}

// lastKnown returns the target that there is as far as is known, nil for none. One that is no longer wanted may never have got
// into the status, when the operator was ended just then: under the name by default it is found.
func (t *targets) lastKnown(sc *v1alpha1.SealedCredential) *v1alpha1.TargetStatus {
	if seen := t.memory(sc).seen; seen != nil {
		return seen
	}
	if sc.Status.Target == nil && sc.Spec.Target == nil && sc.Generation > 1 && sc.Status.ObservedGeneration != sc.Generation {
		return &v1alpha1.TargetStatus{Name: sc.Name}
	}
	return sc.Status.Target
}

// rememberRefusal keeps a refusal, unless something else than another spec or another version can mend it.
func (t *targets) rememberRefusal(sc *v1alpha1.SealedCredential, of source, refused *refusal) {
	if refused.transient {
		t.setMemory(sc, &targetMemory{dryRunFirst: true})
	} else {
		t.setMemory(sc, &targetMemory{refused: refused, source: of})
	}
}

func (t *targets) rememberedRefusal(sc *v1alpha1.SealedCredential, of source) *refusal {
	if k := t.memory(sc); k.source == of {
		return k.refused
	}
	return nil
}

func (t *targets) memory(sc *v1alpha1.SealedCredential) targetMemory {
	t.mu.Lock()
	defer t.mu.Unlock()
	if k := t.memories[client.ObjectKeyFromObject(sc)]; k != nil && k.object == sc.UID {
		return *k
	}
	return targetMemory{}
}

func (t *targets) setMemory(sc *v1alpha1.SealedCredential, k *targetMemory) {
	t.mu.Lock()
	defer t.mu.Unlock()
	key := client.ObjectKeyFromObject(sc)
	if former := t.memories[key]; former != nil && former.object == sc.UID {
		if k.seen == nil {
			k.seen = former.seen
		}
		if k.nextCheck.IsZero() { // it was time to look, and it still is
			k.nextCheck = former.nextCheck
		}
	}
	k.object = sc.UID
	t.memories[key] = k
}

func (t *targets) forget(object types.NamespacedName) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.memories, object)
}

// ensure makes the Secret what sc says with the values, and returns what it is and what was done: Created, Adopted, Replaced,
// Updated, or nothing. A refusal says what its author has to do. values is asked for once it is known that the Secret may
// be written. When nothing is known of a target and the values are at hand anyway, fresh, there is most likely no Secret: then
// the first write is the first call.
func (t *targets) ensure(ctx context.Context, sc *v1alpha1.SealedCredential, of *vault.Owned, fresh bool,
	values func() (map[string]secret.Bytes, error)) (*v1alpha1.TargetStatus, string, error) {
	var is *corev1.Secret
	wary := t.memory(sc).dryRunFirst
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
		if err := classifyWriteError(t.dryRun(ctx, sc, is, of.Version)); err != nil {
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
	want := desiredSecret(sc, of.Version, data)
	defer clearData(want)
	if is == nil {
		err = t.create(ctx, want)
		if !fresh || !apierrors.IsAlreadyExists(err) {
			return statusOfTarget(sc, want, of), what, classifyWriteError(err)
		}
		if is, what, err = t.claim(ctx, sc); err != nil || is == nil {
			return nil, "", errors.Join(err, errConflict)
		}
		defer clearData(is)
	}
	return t.update(ctx, sc, is, want, what, of)
}

// errConflict is a conflict with somebody who changes the same Secret.
var errConflict = apierrors.NewConflict(corev1.Resource("secrets"), "", errors.New("changed meanwhile"))

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
		return nil, "", refuseTarget(v1alpha1.ReasonTargetConflict, "a Secret of that name is being deleted, and is made again once its finalizers are removed")
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
		err = refuseTarget(v1alpha1.ReasonTargetConflict, "a Secret of that name exists and is not this object's: annotate it with %s=%s to hand it over, "+
			"or choose another name", v1alpha1.AnnotationAdopt, sc.Name)
	case is.Type != kind:
		err = refuseTarget(v1alpha1.ReasonTargetConflict, "the Secret to adopt has another type, which Kubernetes does not let be changed: set spec.target.type to it")
	case is.Immutable != nil && *is.Immutable:
		err = refuseTarget(v1alpha1.ReasonTargetConflict, "the Secret to adopt is immutable: delete it, and it is made again")
	default:
		return is, "Adopted", nil
	}
	clearData(is)
	return nil, "", err
}

// dryRun asks the API server whether it would take the Secret, with no value that it does not have: as long as a quota or a
// policy is in the way, nothing is unsealed.
func (t *targets) dryRun(ctx context.Context, sc *v1alpha1.SealedCredential, is *corev1.Secret, version uint64) error {
	data := make(map[string][]byte)
	for _, key := range requiredKeys[corev1.SecretType(sc.Spec.Target.Type)] {
		data[key] = []byte("{}")
	}
	want := desiredSecret(sc, version, data)
	switch {
	case is == nil:
		return t.client.Create(ctx, want, client.DryRunAll, client.FieldOwner(v1alpha1.OperatorName))
	case is.Type != want.Type || is.Immutable != nil && *is.Immutable:
		return nil // it is made again
	}
	is = is.DeepCopy()
	defer clearData(is)
	is.Labels, is.Annotations, is.OwnerReferences = want.Labels, want.Annotations, want.OwnerReferences
	return t.client.Update(ctx, is, client.DryRunAll, client.FieldOwner(v1alpha1.OperatorName))
}

// update makes the Secret is what it should be.
func (t *targets) update(ctx context.Context, sc *v1alpha1.SealedCredential, is, want *corev1.Secret, what string, of *vault.Owned) (*v1alpha1.TargetStatus, string, error) {
	// Neither the type nor an immutable Secret can be changed, but the object's own can be made again.
	if is.Type != want.Type || is.Immutable != nil && *is.Immutable && !equalSecrets(is, want) {
		// Not before it is known that the next one would be taken: admission comes before the name is found to be taken.
		if err := t.client.Create(ctx, want.DeepCopy(), client.DryRunAll); err != nil && !apierrors.IsAlreadyExists(err) {
			return nil, "", classifyWriteError(fmt.Errorf("trying the next target Secret: %w", err))
		}
		if err := t.delete(ctx, is); err != nil {
			return nil, "", err
		}
		err := t.create(ctx, want)
		return statusOfTarget(sc, want, of), "Replaced", classifyWriteError(err)
	}
	if equalSecrets(is, want) {
		return statusOfTarget(sc, is, of), "", nil
	}
	is.Labels, is.Annotations, is.OwnerReferences = want.Labels, want.Annotations, want.OwnerReferences
	is.Data, want.Data = want.Data, is.Data // both are overwritten in the end
	if err := t.client.Update(ctx, is, client.FieldOwner(v1alpha1.OperatorName)); err != nil {
		return nil, "", classifyWriteError(fmt.Errorf("updating the target Secret: %w", err))
	}
	return statusOfTarget(sc, is, of), what, nil
}

func (t *targets) create(ctx context.Context, want *corev1.Secret) error {
	if err := t.client.Create(ctx, want, client.FieldOwner(v1alpha1.OperatorName)); err != nil {
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

// finalize deletes the target Secret of an object that is going away, if it is to go with it.
func (t *targets) finalize(ctx context.Context, sc *v1alpha1.SealedCredential) error {
	names := map[string]bool{targetName(sc): true}
	if former := t.lastKnown(sc); former != nil {
		names[former.Name] = true
	}
	for name := range names {
		if name == "" {
			continue
		}
		if err := t.deleteOwned(ctx, sc, name); err != nil {
			return err
		}
	}
	return nil
}

// retain drops the owner reference of a Secret that was to go with sc and is to stay: sc says so since it was written last.
func (t *targets) retain(ctx context.Context, sc *v1alpha1.SealedCredential, secret types.UID) error {
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
	if err := t.client.Update(ctx, is, client.FieldOwner(v1alpha1.OperatorName)); err != nil {
		return fmt.Errorf("updating the target Secret: %w", err)
	}
	return nil
}

// deleteOwned deletes a Secret if it is the object's and its owner reference says that it goes with it; otherwise it stays as it
// is.
func (t *targets) deleteOwned(ctx context.Context, sc *v1alpha1.SealedCredential, name string) error {
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
		return t.retain(ctx, sc, m.UID)
	}
	return t.delete(ctx, m)
}

// classifyWriteError turns the API server's refusal of a Secret into the condition that it is. What the API server says is
// left out, here and in the error of anything else: it may quote the Secret, as an admission webhook may.
func classifyWriteError(err error) error {
	status := apierrors.APIStatus(nil)
	switch {
	case err == nil:
		return nil
	case isTerminating(err):
		return errTerminating
	case apierrors.IsAlreadyExists(err), apierrors.IsConflict(err):
		return errConflict
	case apierrors.IsInvalid(err):
		return refuseTarget(v1alpha1.ReasonInvalidTarget, "the API server refuses the Secret as invalid: compare spec.target with what Kubernetes asks of this type")
	case !errors.As(err, &status):
		return err // it did not answer
	}
	code := status.Status().Code
	switch {
	case code < 400, code >= 500, code == http.StatusUnauthorized, code == http.StatusNotFound, code == http.StatusTooManyRequests:
		return fmt.Errorf("writing the target Secret: the API server answers %d %s", code, status.Status().Reason)
	}
	return refuseTarget(v1alpha1.ReasonTargetConflict, "the API server refuses the Secret (%d): look for a quota, an admission policy, or a right that the operator lacks", code)
}
