package credential

import (
	"context"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/latticekeep/latticekeep/api/v1beta1"
)

// objects writes finalizers, statuses and events of SealedCredentials.
type objects struct {
	client client.Client
	events events.EventRecorder
}

// ensureFinalizer adds the finalizer to sc, so that sc is not deleted without its vault entry.
func (w *objects) ensureFinalizer(ctx context.Context, sc *v1beta1.SealedCredential) error {
	if controllerutil.ContainsFinalizer(sc, v1beta1.Finalizer) {
		return nil
	}
	before := sc.DeepCopy()
	controllerutil.AddFinalizer(sc, v1beta1.Finalizer)
	if err := w.patch(ctx, w.client, before, sc); err != nil {
		return fmt.Errorf("adding finalizer: %w", err)
	}
	return nil
}

// removeFinalizer removes the finalizer, so that sc can be deleted. It ignores an object that is
// already gone.
func (w *objects) removeFinalizer(ctx context.Context, sc *v1beta1.SealedCredential) error {
	before := sc.DeepCopy()
	controllerutil.RemoveFinalizer(sc, v1beta1.Finalizer)
	if err := w.patch(ctx, w.client, before, sc); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("removing finalizer: %w", err)
	}
	return nil
}

// patchStatus writes the status of sc. before is the object as it was read.
func (w *objects) patchStatus(ctx context.Context, before, sc *v1beta1.SealedCredential) error {
	if err := w.patch(ctx, statusPatcher{w.client.Status()}, before, sc); err != nil {
		return fmt.Errorf("writing status: %w", err)
	}
	return nil
}

// patcher patches objects or their statuses.
type patcher interface {
	Patch(ctx context.Context, obj client.Object, patch client.Patch, opts ...client.PatchOption) error
}

type statusPatcher struct{ client.SubResourceWriter }

// Patch implements patcher.
func (p statusPatcher) Patch(ctx context.Context, obj client.Object, patch client.Patch, _ ...client.PatchOption) error {
	return p.SubResourceWriter.Patch(ctx, obj, patch)
}

// patch writes the differences between before and sc in the finalizers and the status, unless the
// object has changed since before. It neither compares nor sends the sealed values, which are most
// of an object.
func (w *objects) patch(ctx context.Context, to patcher, before, sc *v1beta1.SealedCredential) error {
	slim := func(sc *v1beta1.SealedCredential) *v1beta1.SealedCredential {
		return &v1beta1.SealedCredential{
			ObjectMeta: metav1.ObjectMeta{Namespace: sc.Namespace, Name: sc.Name, ResourceVersion: sc.ResourceVersion, Finalizers: sc.Finalizers},
			Status:     sc.Status,
		}
	}
	data, err := client.MergeFromWithOptions(slim(before), client.MergeFromWithOptimisticLock{}).Data(slim(sc))
	if err != nil {
		return err
	}
	m := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Namespace: sc.Namespace, Name: sc.Name}}
	m.SetGroupVersionKind(v1beta1.GroupVersion.WithKind(v1beta1.KindSealedCredential))
	if err := to.Patch(ctx, m, client.RawPatch(types.MergePatchType, data)); err != nil {
		return err
	}
	sc.ResourceVersion, sc.Finalizers = m.ResourceVersion, m.Finalizers
	return nil
}

// recordEvent records an action on sc in an event and in the log.
func (w *objects) recordEvent(ctx context.Context, sc *v1beta1.SealedCredential, reason, action, note string) {
	log.FromContext(ctx).Info(note, "reason", reason)
	w.events.Eventf(sc, nil, corev1.EventTypeNormal, reason, action, "%s", note)
}

// maxNote is the longest event note that the API server accepts, in bytes.
const maxNote = 1024

// recordWarning records a condition in a warning event.
func (w *objects) recordWarning(sc *v1beta1.SealedCredential, condition, message string) {
	note := strings.ToValidUTF8(message[:min(len(message), maxNote)], "")
	w.events.Eventf(sc, nil, corev1.EventTypeWarning, condition, "Reconcile", "%s", note)
}
