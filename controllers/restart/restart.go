// Package restart restarts workloads when the values of the SealedCredentials that they name
// change. A workload asks for it with the annotation restart-on.
package restart

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
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

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/controllers/requeue"
)

// coalesceDelay is how long a restart waits for more changes, so that values that change together
// restart a workload once.
const coalesceDelay = 10 * time.Second

// maxNames is the most objects that a workload may name.
const maxNames = 64

// shownNames bounds the names in an event, which has at most 1,024 bytes.
const shownNames = 8

// restarter restarts the workloads of one kind whose restart-on annotation names objects, when the
// values of those objects change. It writes the times of the last changes of values into one
// annotation of the pod template, and changes nothing else. Re-encrypting the same values restarts
// nothing.
//
// The annotation follows from the objects. So an interrupted restart is made later, and no restart
// is made twice. A workload that names an object for the first time is restarted once, unless all its
// pods were started with the current values. Their times are then written into the same annotation of
// the workload itself, which starts no pods.
type restarter struct {
	client   client.Client // reads metadata and SealedCredentials from the cache
	live     client.Reader // reads from the API server, not from the cache
	events   events.EventRecorder
	kind     string
	schedule *requeue.Schedule
	warned   warnings
	now      func() time.Time
}

// Add adds the controllers that restart Deployments, StatefulSets and DaemonSets.
func Add(mgr manager.Manager, now func() time.Time) error {
	for _, kind := range []string{"Deployment", "StatefulSet", "DaemonSet"} {
		r := &restarter{
			client: mgr.GetClient(), live: mgr.GetAPIReader(), events: mgr.GetEventRecorder(v1beta1.OperatorName),
			kind: kind, schedule: requeue.NewSchedule(now), now: now,
		}
		names := func(w client.Object) string { return w.GetAnnotations()[v1beta1.AnnotationRestartOn] }
		asks := predicate.NewPredicateFuncs(func(w client.Object) bool { return names(w) != "" })
		// What the operator writes to a workload must not schedule a look that divides later changes.
		asksAnew := predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool { return names(e.ObjectOld) != names(e.ObjectNew) }}
		err := builder.ControllerManagedBy(mgr).
			Named("restart-"+strings.ToLower(kind)).
			WatchesMetadata(r.newMetadata(), delayedHandler{r}, builder.WithPredicates(asks, asksAnew)).
			Watches(&v1beta1.SealedCredential{}, handler.Funcs{
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
	for name := range strings.SplitSeq(workload.GetAnnotations()[v1beta1.AnnotationRestartOn], ",") {
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
		r.warned.forget(req.NamespacedName)
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	names := namedObjects(known)
	if len(names) == 0 || !known.DeletionTimestamp.IsZero() {
		r.warned.forget(req.NamespacedName)
		return reconcile.Result{}, nil
	}
	workload, template := r.newWorkload()
	if err := r.live.Get(ctx, req.NamespacedName, workload); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	now, err := r.compare(ctx, workload, template, names)
	if err != nil {
		return reconcile.Result{}, err
	}
	r.warn(workload, now.missing)
	if !now.changed && !now.known {
		return reconcile.Result{}, nil
	}
	before := workload.DeepCopyObject().(client.Object)
	if now.changed {
		if template.Annotations == nil {
			template.Annotations = make(map[string]string)
		}
		template.Annotations[v1beta1.AnnotationValues] = now.values
	} else {
		annotations := workload.GetAnnotations() // it has restart-on
		annotations[v1beta1.AnnotationValues] = now.values
		workload.SetAnnotations(annotations)
	}
	err = r.client.Patch(ctx, workload, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}), client.FieldOwner(v1beta1.OperatorName))
	switch {
	case apierrors.IsConflict(err):
		return reconcile.Result{RequeueAfter: requeue.AfterConflict}, nil
	case apierrors.IsNotFound(err):
		return reconcile.Result{}, nil
	case err != nil:
		return reconcile.Result{}, fmt.Errorf("restarting a workload: %w", err)
	}
	if !now.changed {
		return reconcile.Result{}, nil
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

// comparison says what a workload runs with, compared with its objects.
type comparison struct {
	values  string   // time of the last change of values of each object, as comma-separated name=time pairs
	changed bool     // the workload runs with other values, or may do so: restart it
	known   bool     // it runs with the values of an object that it names for the first time
	missing []string // names of no object of the namespace
}

// compare compares the times that a workload has in its annotations with those of its objects. An
// object whose target Secret does not hold the values yet keeps its previous time. A name that is no
// longer in the list changes nothing.
func (r *restarter) compare(ctx context.Context, workload client.Object, template *corev1.PodTemplateSpec, names []string) (c comparison, err error) {
	former := valuesOf(workload.GetAnnotations())
	maps.Copy(former, valuesOf(template.Annotations))
	var pairs []string
	for _, name := range names {
		at := former[name]
		sc := new(v1beta1.SealedCredential)
		err := r.client.Get(ctx, types.NamespacedName{Namespace: workload.GetNamespace(), Name: name}, sc)
		if client.IgnoreNotFound(err) != nil {
			return c, fmt.Errorf("reading an object that a workload names: %w", err)
		}
		if err != nil {
			c.missing = append(c.missing, name)
		}
		s := sc.Status
		if err == nil && s.ValuesChangedAt != nil && (sc.Spec.Target == nil || s.Target != nil && s.Audit != nil && s.Target.Audit == s.Audit.Hash) {
			at = s.ValuesChangedAt.UTC().Format(time.RFC3339)
		}
		if at == "" {
			continue
		}
		pairs = append(pairs, name+"="+at)
		if at == former[name] {
			continue
		}
		started := false
		if former[name] == "" {
			if started, err = r.startedWith(ctx, workload, template, sc); err != nil {
				return c, err
			}
		}
		c.known, c.changed = c.known || started, c.changed || !started
	}
	c.values = strings.Join(pairs, ",")
	return c, nil
}

// valuesOf returns the times in an annotation, by the name of the object.
func valuesOf(annotations map[string]string) map[string]string {
	times := make(map[string]string)
	for pair := range strings.SplitSeq(annotations[v1beta1.AnnotationValues], ",") {
		name, at, _ := strings.Cut(pair, "=")
		times[name] = at
	}
	return times
}

// startedWith reports whether every pod of a workload was started with the current values of sc,
// which it names for the first time. That holds if the workload is younger than the values, or if
// there never were others. In doubt it does not hold.
func (r *restarter) startedWith(ctx context.Context, workload client.Object, template *corev1.PodTemplateSpec, sc *v1beta1.SealedCredential) (bool, error) {
	created, first := workload.GetCreationTimestamp(), sc.Status.Version == 1
	if sc.Spec.Target == nil {
		return first || created.After(sc.Status.ValuesChangedAt.Time), nil
	}
	secret := new(metav1.PartialObjectMetadata)
	secret.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Secret"))
	name := types.NamespacedName{Namespace: sc.Namespace, Name: sc.Status.Target.Name}
	if err := r.live.Get(ctx, name, secret); err != nil {
		if apierrors.IsNotFound(err) {
			return false, nil
		}
		return false, fmt.Errorf("reading the metadata of a target Secret: %w", err)
	}
	if secret.UID != types.UID(sc.Status.Target.UID) {
		return false, nil
	}
	ours, others := lastWrites(secret)
	if ours.IsZero() {
		return false, nil
	}
	// The operator created the Secret and has not changed it since; the two times of one request may
	// be a second apart. A pod that may start without the Secret may run without its values.
	unchanged := first && !ours.After(secret.CreationTimestamp.Add(time.Second)) && (others.IsZero() || others.After(ours)) && !mayLack(template, name.Name)
	return unchanged || created.After(ours), nil
}

// lastWrites returns when the operator wrote a Secret last, and when somebody else wrote it first, in
// whole seconds.
func lastWrites(secret client.Object) (ours, others time.Time) {
	for _, f := range secret.GetManagedFields() {
		switch {
		case f.Time == nil:
		case f.Manager == v1beta1.OperatorName:
			if f.Time.After(ours) {
				ours = f.Time.Time
			}
		case others.IsZero() || f.Time.Time.Before(others):
			others = f.Time.Time
		}
	}
	return ours, others
}

// mayLack reports whether a pod of the template may start before the Secret exists.
func mayLack(template *corev1.PodTemplateSpec, secret string) bool {
	optional := func(name string, o *bool) bool { return name == secret && o != nil && *o }
	spec := &template.Spec
	for _, c := range slices.Concat(spec.InitContainers, spec.Containers) {
		for _, e := range c.Env {
			if f := e.ValueFrom; f != nil && f.SecretKeyRef != nil && optional(f.SecretKeyRef.Name, f.SecretKeyRef.Optional) {
				return true
			}
		}
		for _, e := range c.EnvFrom {
			if f := e.SecretRef; f != nil && optional(f.Name, f.Optional) {
				return true
			}
		}
	}
	for _, v := range spec.Volumes {
		if v.Secret != nil && optional(v.Secret.SecretName, v.Secret.Optional) {
			return true
		}
		if v.Projected == nil {
			continue
		}
		for _, s := range v.Projected.Sources {
			if s.Secret != nil && optional(s.Secret.Name, s.Secret.Optional) {
				return true
			}
		}
	}
	return false
}

// warn records events about the annotation of a workload that asks for what cannot be done: names of
// no object, and too many of them.
func (r *restarter) warn(workload client.Object, missing []string) {
	key := client.ObjectKeyFromObject(workload)
	annotation := workload.GetAnnotations()[v1beta1.AnnotationRestartOn]
	warn := func(reason, note string) {
		if r.warned.isNew(key, reason, annotation+note) {
			r.events.Eventf(workload, nil, corev1.EventTypeWarning, reason, "Restart", "%s", note)
		}
	}
	if strings.Count(annotation, ",") >= maxNames {
		warn("TooManyNames", fmt.Sprintf("%s names more than %d objects: new values of the others restart nothing", v1beta1.AnnotationRestartOn, maxNames))
	}
	if len(missing) == 0 {
		return
	}
	var quoted []string
	for _, name := range missing[:min(shownNames, len(missing))] {
		quoted = append(quoted, fmt.Sprintf("%.80q", name))
	}
	text := strings.Join(quoted, ", ")
	if more := len(missing) - shownNames; more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	warn("NoSuchObject", fmt.Sprintf("%s names what is no SealedCredential of this namespace, and restarts nothing: %s", v1beta1.AnnotationRestartOn, text))
}

// warnings are the warnings about workloads that this process has recorded. An event is recorded
// again only when it says something else.
type warnings struct {
	mu  sync.Mutex
	all map[types.NamespacedName]map[string]string // text by reason
}

func (w *warnings) isNew(workload types.NamespacedName, reason, text string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.all[workload][reason] == text {
		return false
	}
	if w.all == nil {
		w.all = make(map[types.NamespacedName]map[string]string)
	}
	if w.all[workload] == nil {
		w.all[workload] = make(map[string]string)
	}
	w.all[workload][reason] = text
	return true
}

func (w *warnings) forget(workload types.NamespacedName) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.all, workload)
}
