package credential

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/vault"
)

// targets writes the vault's values into target Secrets.
//
// It recognizes a correct Secret by its resourceVersion, which the status shows. While the
// resourceVersion stays the same, the vault opens no values and the audit log needs no entry. It
// does not list Secrets, and caches none: looks.go says when it looks at one.
//
// An object owns an existing Secret if the Secret's owner annotation names the object's UID. The
// operator never changes any other Secret, unless the Secret's adopt annotation names the object.
// It then replaces everything in the Secret with what the object says.
type targets struct {
	client client.Client // writes
	live   client.Reader // reads from the API server, not from the cache
	now    func() time.Time
	pace   *rate.Limiter // paces looks that nobody asked for

	mu       sync.Mutex
	memories map[types.NamespacedName]*targetMemory // keyed by object
}

// newTargets returns targets that look at looksPerMinute Secrets a minute unasked.
func newTargets(c client.Client, live client.Reader, looksPerMinute int, now func() time.Time) *targets {
	// A second's looks may come at once, so that the usual ones need not wait.
	pace := rate.NewLimiter(rate.Limit(looksPerMinute)/60, max(1, looksPerMinute/60))
	return &targets{client: c, live: live, now: now, pace: pace, memories: make(map[types.NamespacedName]*targetMemory)}
}

// ensure brings the Secret in line with sc, and returns the Secret's status and what it did:
// "Created", "Adopted", "Replaced", "Updated" or "" for nothing. A refusal tells the author what to
// do. ensure calls values only once it knows that the Secret may be written.
//
// fresh means that no target is known and the values are already open. The Secret then most likely
// does not exist, so ensure tries to create it before it reads anything.
func (t *targets) ensure(ctx context.Context, sc *v1beta1.SealedCredential, of *vault.Owned, fresh bool,
	values func() (map[string]secret.Bytes, error)) (*v1beta1.TargetStatus, string, error) {
	var is *corev1.Secret
	wary := t.memory(sc).dryRunFirst
	what, fresh := "Created", fresh && !wary
	if !fresh {
		var err error
		if is, what, err = t.claim(ctx, sc, of.AdoptedFrom); err != nil {
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
	if is != nil && t.holds(sc, is, of) {
		return t.update(ctx, sc, is, desiredSecret(sc, of.Version, is.Data), what, of)
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
		t.rememberData(sc, want)
		if !fresh || !apierrors.IsAlreadyExists(err) {
			return t.statusOf(sc, want, of), what, classifyWriteError(err)
		}
		if is, what, err = t.claim(ctx, sc, of.AdoptedFrom); err != nil || is == nil {
			return nil, "", errors.Join(err, errConflict)
		}
		defer clearData(is)
	}
	seen, what, err := t.update(ctx, sc, is, want, what, of)
	t.rememberData(sc, want)
	return seen, what, err
}

// errConflict means that another client changed the same Secret.
var errConflict = apierrors.NewConflict(corev1.Resource("secrets"), "", errors.New("changed meanwhile"))

// claim returns the existing Secret that is to become the target, with "Updated" or "Adopted". It
// returns nil and "Created" if there is no Secret yet, and a refusal if the object neither owns nor
// may adopt it. adoptedFrom is the UID of the object that the vault entry was adopted from: its
// Secret comes with the entry.
func (t *targets) claim(ctx context.Context, sc *v1beta1.SealedCredential, adoptedFrom string) (*corev1.Secret, string, error) {
	is := new(corev1.Secret)
	err := t.live.Get(ctx, client.ObjectKey{Namespace: sc.Namespace, Name: targetName(sc)}, is)
	switch {
	case apierrors.IsNotFound(err):
		return nil, "Created", nil
	case err != nil:
		return nil, "", fmt.Errorf("reading the target Secret: %w", err)
	case !is.DeletionTimestamp.IsZero():
		clearData(is)
		return nil, "", refuseTarget(v1beta1.ReasonTargetConflict, "a Secret of that name is being deleted, and is made again once its finalizers are removed")
	}
	owner, adopt := is.Annotations[v1beta1.AnnotationOwner], is.Annotations[v1beta1.AnnotationAdopt] == sc.Name
	own := owner == string(sc.UID) || owner != "" && owner == adoptedFrom
	kind := corev1.SecretType(sc.Spec.Target.Type)
	if kind == "" {
		kind = corev1.SecretTypeOpaque
	}
	switch {
	case own:
		return is, "Updated", nil
	case !adopt:
		err = refuseTarget(v1beta1.ReasonTargetConflict, "a Secret of that name exists and is not this object's: annotate it with %s=%s to hand it over, "+
			"or choose another name", v1beta1.AnnotationAdopt, sc.Name)
	case is.Type != kind:
		err = refuseTarget(v1beta1.ReasonTargetConflict, "the Secret to adopt has another type, which Kubernetes does not let be changed: set spec.target.type to it")
	case isImmutable(is):
		err = refuseTarget(v1beta1.ReasonTargetConflict, "the Secret to adopt is immutable: delete it, and it is made again")
	default:
		return is, "Adopted", nil
	}
	clearData(is)
	return nil, "", err
}

// dryRun asks the API server whether it would accept the Secret. It sends no value that the API
// server does not have already. So no values are opened while a quota or an admission policy stands
// in the way.
func (t *targets) dryRun(ctx context.Context, sc *v1beta1.SealedCredential, is *corev1.Secret, version uint64) error {
	data := make(map[string][]byte)
	for _, key := range requiredKeys[corev1.SecretType(sc.Spec.Target.Type)] {
		data[key] = []byte("{}")
	}
	want := desiredSecret(sc, version, data)
	switch {
	case is == nil:
		return t.client.Create(ctx, want, client.DryRunAll, client.FieldOwner(v1beta1.OperatorName))
	case is.Type != want.Type || isImmutable(is):
		return nil // update replaces it
	}
	is = is.DeepCopy()
	defer clearData(is)
	is.OwnerReferences = nil
	for key, value := range want.Labels {
		metav1.SetMetaDataLabel(&is.ObjectMeta, key, value)
	}
	for key, value := range want.Annotations {
		metav1.SetMetaDataAnnotation(&is.ObjectMeta, key, value)
	}
	return t.client.Update(ctx, is, client.DryRunAll, client.FieldOwner(v1beta1.OperatorName))
}

// update makes the existing Secret what want says. It replaces the Secret if it cannot change it.
func (t *targets) update(ctx context.Context, sc *v1beta1.SealedCredential, is, want *corev1.Secret, what string, of *vault.Owned) (*v1beta1.TargetStatus, string, error) {
	switch {
	case is.Type != want.Type || isImmutable(is) && !isAsWanted(is, want):
		return t.replace(ctx, sc, is, want, of)
	case isAsWanted(is, want):
		return t.statusOf(sc, is, of), "", nil
	case what == "Adopted":
		// Everything in it becomes the object's. From the managedFields of previous owners a later apply
		// would conclude that they still want theirs.
		want.UID, want.ResourceVersion, want.Finalizers = is.UID, is.ResourceVersion, is.Finalizers
		want.ManagedFields = []metav1.ManagedFieldsEntry{{}}
		if err := t.client.Update(ctx, want, client.FieldOwner(v1beta1.OperatorName)); err != nil {
			return nil, "", classifyWriteError(fmt.Errorf("adopting the target Secret: %w", err))
		}
	default:
		if err := t.apply(ctx, is, want); err != nil {
			return nil, "", classifyWriteError(err)
		}
	}
	return t.statusOf(sc, want, of), what, nil
}

// replace deletes a Secret that the object owns and creates it again, since the type of a Secret and
// an immutable Secret cannot be changed.
func (t *targets) replace(ctx context.Context, sc *v1beta1.SealedCredential, is, want *corev1.Secret, of *vault.Owned) (*v1beta1.TargetStatus, string, error) {
	// Delete only after a dry run has shown that the API server would accept the new Secret:
	// admission runs before the API server finds that the name exists.
	if err := t.client.Create(ctx, want.DeepCopy(), client.DryRunAll); err != nil && !apierrors.IsAlreadyExists(err) {
		return nil, "", classifyWriteError(fmt.Errorf("trying the next target Secret: %w", err))
	}
	if err := t.delete(ctx, is); err != nil {
		return nil, "", err
	}
	err := t.create(ctx, want)
	return t.statusOf(sc, want, of), "Replaced", classifyWriteError(err)
}

func (t *targets) create(ctx context.Context, want *corev1.Secret) error {
	if err := t.client.Create(ctx, want, client.FieldOwner(v1beta1.OperatorName)); err != nil {
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
func (t *targets) finalize(ctx context.Context, sc *v1beta1.SealedCredential) error {
	names := map[string]bool{targetName(sc): true}
	if last := t.lastKnown(sc); last != nil {
		names[last.Name] = true
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

// deleteOwned deletes a Secret if the object owns it, unless its deletion policy is Retain. Nothing
// else deletes it: it has no owner reference, so a Secret that was restored from a backup stays
// although its object has another UID now.
func (t *targets) deleteOwned(ctx context.Context, sc *v1beta1.SealedCredential, name string) error {
	m := new(metav1.PartialObjectMetadata)
	m.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Secret"))
	err := t.live.Get(ctx, client.ObjectKey{Namespace: sc.Namespace, Name: name}, m)
	if apierrors.IsNotFound(err) {
		return nil
	} else if err != nil {
		return fmt.Errorf("looking at the target Secret: %w", err)
	}
	if m.Annotations[v1beta1.AnnotationOwner] != string(sc.UID) || !m.DeletionTimestamp.IsZero() || outlivesTarget(m, sc) {
		return nil
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
		return refuseTarget(v1beta1.ReasonInvalidTarget, "the API server refuses the Secret as invalid: compare spec.target with what Kubernetes asks of this type")
	case !errors.As(err, &status):
		return err // no answer from the API server
	}
	code := status.Status().Code
	switch {
	case code < 400, code >= 500, code == http.StatusUnauthorized, code == http.StatusNotFound, code == http.StatusTooManyRequests:
		return fmt.Errorf("writing the target Secret: the API server answers %d %s", code, status.Status().Reason)
	}
	return refuseTarget(v1beta1.ReasonTargetConflict, "the API server refuses the Secret (%d): look for a quota, an admission policy, or a right that the operator lacks", code)
}
