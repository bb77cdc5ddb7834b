// Package restart restarts workloads when the values of the SealedCredentials that they name
// change. A workload asks for it with the annotation restart-on.
package restart

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/latticekeep/latticekeep/api/v1alpha1"
	"github.com/latticekeep/latticekeep/controllers/requeue"
)

// coalesceDelay is how long a restart waits for more changes, so that values that change together
// restart a workload once.
const coalesceDelay = 10 * time.Second

// maxNames is the most objects that a workload may name.
const maxNames = 64

// restarter restarts the workloads of one kind whose restart-on annotation names objects, when the
// values of those objects change. It writes the times of the last changes of values into one
// annotation of the pod template, and changes nothing else. Re-encrypting the same values restarts
// nothing.
//
// The annotation follows from the objects. So an interrupted restart is made later, and no restart
// is made twice. A workload that names an object for the first time is restarted once, because
// nobody knows which values it runs with.
type restarter struct {
	client   client.Client // reads metadata and SealedCredentials from the cache
	live     client.Reader // reads from the API server, not from the cache
	events   events.EventRecorder
	kind     string
	schedule *requeue.Schedule
	now      func() time.Time
}

// Add adds the controllers that restart Deployments, StatefulSets and DaemonSets.
func Add(mgr manager.Manager, now func() time.Time) error {
	for _, kind := range []string{"Deployment", "StatefulSet", "DaemonSet"} {
		r := &restarter{
			client: mgr.GetClient(), live: mgr.GetAPIReader(), events: mgr.GetEventRecorder(v1alpha1.OperatorName),
			kind: kind, schedule: requeue.NewSchedule(now), now: now,
		}
		asks := predicate.NewPredicateFuncs(func(w client.Object) bool { return w.GetAnnotations()[v1alpha1.AnnotationRestartOn] != "" })
		err := builder.ControllerManagedBy(mgr).
			Named("restart-"+strings.ToLower(kind)).
			WatchesMetadata(r.newMetadata(), delayedHandler{r}, builder.WithPredicates(asks, predicate.AnnotationChangedPredicate{})).
			Watches(&v1alpha1.SealedCredential{}, handler.Funcs{
				UpdateFunc: func(ctx context.Context, e event.UpdateEvent, _ workqueue.TypedRateLimitingInterface[reconcile.Request]) {
					r.enqueueNaming(ctx, e.ObjectNew)
				},
			}).
			WatchesRawSource(r.schedule).
			WithOptions(controller.Options{RateLimiter: requeue.NewRateLimiter()}).
			Complete(r)
		if err != nil {
			return err
		}
	}
	return nil
}

func (r *restarter) newMetadata() *metav1.PartialObjectMetadata {
	m := new(metav1.PartialObjectMetadata)
	m.SetGroupVersionKind(appsv1.SchemeGroupVersion.WithKind(r.kind))
	return m
}

// delayedHandler schedules a reconcile of a workload after coalesceDelay, so that one restart
// covers all values that change together.
type delayedHandler struct{ r *restarter }

func (l delayedHandler) enqueue(o client.Object) {
	l.r.schedule.Advance(client.ObjectKeyFromObject(o), l.r.now().Add(coalesceDelay))
}

type queue = workqueue.TypedRateLimitingInterface[reconcile.Request]

// Create implements handler.EventHandler.
func (l delayedHandler) Create(_ context.Context, e event.CreateEvent, _ queue) { l.enqueue(e.Object) }

// Update implements handler.EventHandler.
func (l delayedHandler) Update(_ context.Context, e event.UpdateEvent, _ queue) {
	l.enqueue(e.ObjectNew)
}

// Delete implements handler.EventHandler.
func (l delayedHandler) Delete(context.Context, event.DeleteEvent, queue) {}

// Generic implements handler.EventHandler.
func (l delayedHandler) Generic(context.Context, event.GenericEvent, queue) {}

// enqueueNaming schedules the workloads that name an object.
func (r *restarter) enqueueNaming(ctx context.Context, sc client.Object) {
	list := new(metav1.PartialObjectMetadataList)
	list.SetGroupVersionKind(appsv1.SchemeGroupVersion.WithKind(r.kind + "List"))
	if err := r.client.List(ctx, list, client.InNamespace(sc.GetNamespace()), client.UnsafeDisableDeepCopy); err != nil {
		log.FromContext(ctx).Error(err, "workloads could not be listed", "kind", r.kind)
		return
	}
	for i := range list.Items {
		if slices.Contains(namedObjects(&list.Items[i]), sc.GetName()) {
			delayedHandler{r}.enqueue(&list.Items[i])
		}
	}
}

// namedObjects returns the objects that a workload names, sorted and at most maxNames.
func namedObjects(workload client.Object) []string {
	var names []string
	for name := range strings.SplitSeq(workload.GetAnnotations()[v1alpha1.AnnotationRestartOn], ",") {
		if name = strings.TrimSpace(name); name != "" && len(names) < maxNames {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// Reconcile implements reconcile.Reconciler.
func (r *restarter) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	known := r.newMetadata()
	if err := r.client.Get(ctx, req.NamespacedName, known); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	names := namedObjects(known)
	if len(names) == 0 || !known.DeletionTimestamp.IsZero() {
		return reconcile.Result{}, nil
	}
	workload, template := r.newWorkload()
	if err := r.live.Get(ctx, req.NamespacedName, workload); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	if strings.Count(workload.GetAnnotations()[v1alpha1.AnnotationRestartOn], ",") >= maxNames {
		r.events.Eventf(workload, nil, corev1.EventTypeWarning, "TooManyNames", "Restart", "%s names more than %d objects: new values of the others restart nothing",
			v1alpha1.AnnotationRestartOn, maxNames)
	}
	was := template.Annotations[v1alpha1.AnnotationValues]
	is, changed, err := r.valuesAnnotation(ctx, req.Namespace, names, was)
	if err != nil || !changed {
		return reconcile.Result{}, err
	}
	before := workload.DeepCopyObject().(client.Object)
	if template.Annotations == nil {
		template.Annotations = make(map[string]string)
	}
	template.Annotations[v1alpha1.AnnotationValues] = is
	err = r.client.Patch(ctx, workload, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}), client.FieldOwner(v1alpha1.OperatorName))
	switch {
	case apierrors.IsConflict(err):
		return reconcile.Result{RequeueAfter: requeue.AfterConflict}, nil
	case apierrors.IsNotFound(err):
		return reconcile.Result{}, nil
	case err != nil:
		return reconcile.Result{}, fmt.Errorf("restarting a workload: %w", err)
	}
	const note = "restarted: the values of an object that it names have changed"
	log.FromContext(ctx).Info(note, "kind", r.kind, "workload", req.NamespacedName)
	r.events.Eventf(workload, nil, corev1.EventTypeNormal, "ValuesChanged", "Restart", note)
	return reconcile.Result{}, nil
}

// newWorkload returns an empty workload of the kind, and its pod template.
func (r *restarter) newWorkload() (client.Object, *corev1.PodTemplateSpec) {
	switch r.kind {
	case "StatefulSet":
		w := new(appsv1.StatefulSet)
		return w, &w.Spec.Template
	case "DaemonSet":
		w := new(appsv1.DaemonSet)
		return w, &w.Spec.Template
	default:
		w := new(appsv1.Deployment)
		return w, &w.Spec.Template
	}
}

// valuesAnnotation returns the time of the last change of values of each named object, as
// comma-separated name=time pairs. changed reports whether any time differs from the one in was. An
// object whose target Secret does not hold the values yet keeps its previous time. A name that is
// no longer in the list changes nothing.
func (r *restarter) valuesAnnotation(ctx context.Context, namespace string, names []string, was string) (is string, changed bool, err error) {
	former := make(map[string]string)
	for pair := range strings.SplitSeq(was, ",") {
		name, at, _ := strings.Cut(pair, "=")
		former[name] = at
	}
	var pairs []string
	for _, name := range names {
		at := former[name]
		sc := new(v1alpha1.SealedCredential)
		err := r.client.Get(ctx, types.NamespacedName{Namespace: namespace, Name: name}, sc)
		if client.IgnoreNotFound(err) != nil {
			return "", false, fmt.Errorf("reading an object that a workload names: %w", err)
		}
		s := sc.Status
		if err == nil && s.ValuesChangedAt != nil && (sc.Spec.Target == nil || s.Target != nil && s.Audit != nil && s.Target.Audit == s.Audit.Hash) {
			at = s.ValuesChangedAt.UTC().Format(time.RFC3339)
		}
		if at != "" {
			pairs = append(pairs, name+"="+at)
			changed = changed || at != former[name]
		}
	}
	return strings.Join(pairs, ","), changed, nil
}
