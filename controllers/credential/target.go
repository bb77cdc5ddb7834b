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

// targets writes the vault's values into target Secrets.
//
// It does not list, watch or cache Secrets. It recognizes a correct Secret by its resourceVersion,
// which the status shows. While the resourceVersion stays the same, the vault opens no values and
// the audit log needs no entry. The operator checks for drift once in every recheck interval, at
// jittered times.
//
// An object owns an existing Secret if the Secret's owner annotation names the object's UID. The
// operator never changes any other Secret, unless the Secret's adopt annotation names the object.
// It then replaces everything in the Secret with what the object says.
type targets struct {
	client client.Client // writes
	live   client.Reader // reads from the API server, not from the cache
	now    func() time.Time

	mu       sync.Mutex
	memories map[types.NamespacedName]*targetMemory // keyed by object
}

func newTargets(c client.Client, live client.Reader, now func() time.Time) *targets {
	return &targets{client: c, live: live, now: now, memories: make(map[types.NamespacedName]*targetMemory)}
}

// recheck is the interval between reconciles of an unchanged object. It finds, for example, a
// deleted vault entry or a restored sealing key. A fifth of the interval is jitter.
const recheck = 10 * time.Minute

// targetMemory is what targets remembers about a target, to avoid needless reads and, above all,
// needless opening of values.
type targetMemory struct {
	object      types.UID
	nextCheck   time.Time // time of the next drift check
	refused     *refusal  // why the values of source cannot make this target
	source      source
	dryRunFirst bool // the last write failed: test the next one with a dry run

	// seen is the target as last written or observed. The status has it too, but may not have been
	// written since.
	seen *v1alpha1.TargetStatus
}

// isUnchanged reports whether the Secret is as last seen. It returns true without looking until the
// next drift check is due.
func (t *targets) isUnchanged(ctx context.Context, sc *v1alpha1.SealedCredential, seen *v1alpha1.TargetStatus) (bool, error) {
	now, at := t.now(), t.memory(sc).nextCheck
	if at.IsZero() { // the operator has just started: spread the checks
		at = now.Add(rand.N(recheck)) //nolint:gosec // spreads checks, hides nothing
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

// scheduleCheck remembers what was seen and schedules the next drift check, between a half and
// three quarters of a recheck interval from now.
func (t *targets) scheduleCheck(sc *v1alpha1.SealedCredential, now time.Time, seen *v1alpha1.TargetStatus) {
	next := now.Add(recheck/2 + rand.N(recheck/4)) //nolint:gosec // spreads checks, hides nothing
	t.setMemory(sc, &targetMemory{nextCheck: next, seen: seen})
}

// lastKnown returns the last known target, or nil for none. The operator may have stopped after it
// wrote a target and before it wrote the status. If the spec no longer has a target, lastKnown then
// assumes a Secret with the default name.
func (t *targets) lastKnown(sc *v1alpha1.SealedCredential) *v1alpha1.TargetStatus {
	if seen := t.memory(sc).seen; seen != nil {
		return seen
	}
	if sc.Status.Target == nil && sc.Spec.Target == nil && sc.Generation > 1 && sc.Status.ObservedGeneration != sc.Generation {
		return &v1alpha1.TargetStatus{Name: sc.Name}
	}
	return sc.Status.Target
}

// rememberRefusal remembers a refusal until the spec or the version changes. It remembers no
// transient refusal, but requires a dry run before the next write.
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
		if k.nextCheck.IsZero() { // keep the scheduled check
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

// ensure brings the Secret in line with sc, and returns the Secret's status and what it did:
// "Created", "Adopted", "Replaced", "Updated" or "" for nothing. A refusal tells the author what to
// do. ensure calls values only once it knows that the Secret may be written.
//
// fresh means that no target is known and the values are already open. The Secret then most likely
// does not exist, so ensure tries to create it before it reads anything.
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

// errConflict means that another client changed the same Secret.
var errConflict = apierrors.NewConflict(corev1.Resource("secrets"), "", errors.New("changed meanwhile"))

// claim returns the existing Secret that is to become the target, with "Updated" or "Adopted". It
// returns nil and "Created" if there is no Secret yet, and a refusal if the object neither owns nor
// may adopt it.
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

// dryRun asks the API server whether it would accept the Secret. It sends no value that the API
// server does not have already. So no values are opened while a quota or an admission policy stands
// in the way.
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
		return nil // update replaces it
	}
	is = is.DeepCopy()
	defer clearData(is)
	is.Labels, is.Annotations, is.OwnerReferences = want.Labels, want.Annotations, want.OwnerReferences
	return t.client.Update(ctx, is, client.DryRunAll, client.FieldOwner(v1alpha1.OperatorName))
}

// update makes the existing Secret equal to want. It replaces the Secret if it cannot change it.
func (t *targets) update(ctx context.Context, sc *v1alpha1.SealedCredential, is, want *corev1.Secret, what string, of *vault.Owned) (*v1alpha1.TargetStatus, string, error) {
	// The type of a Secret and an immutable Secret cannot be changed. The object owns this Secret,
	// so it is deleted and created again.
	if is.Type != want.Type || is.Immutable != nil && *is.Immutable && !equalSecrets(is, want) {
		// Delete only after a dry run has shown that the API server would accept the new Secret:
		// admission runs before the API server finds that the name exists.
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
	is.Data, want.Data = want.Data, is.Data // deferred calls clear both
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

// delete deletes the Secret only if it is exactly the one that was read.
func (t *targets) delete(ctx context.Context, is client.Object) error {
	uid, resourceVersion := is.GetUID(), is.GetResourceVersion()
	err := t.client.Delete(ctx, is, client.Preconditions{UID: &uid, ResourceVersion: &resourceVersion})
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("deleting the target Secret: %w", err)
	}
	return nil
}

// finalize deletes the target Secrets of an object that is being deleted, unless they are to be
// retained.
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

// retain removes the owner reference of a Secret whose deletion policy became Retain after the
// Secret was last written.
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

// deleteOwned deletes a Secret if the object owns and controls it. A Secret with the policy Retain
// loses its owner reference instead. Any other Secret stays as it is.
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

// classifyWriteError turns an error of writing a Secret into a refusal or an error to retry. It
// leaves out the API server's own message, which may quote the Secret: an admission webhook may do
// that.
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
		return err // no answer from the API server
	}
	code := status.Status().Code
	switch {
	case code < 400, code >= 500, code == http.StatusUnauthorized, code == http.StatusNotFound, code == http.StatusTooManyRequests:
		return fmt.Errorf("writing the target Secret: the API server answers %d %s", code, status.Status().Reason)
	}
	return refuseTarget(v1alpha1.ReasonTargetConflict, "the API server refuses the Secret (%d): look for a quota, an admission policy, or a right that the operator lacks", code)
}
