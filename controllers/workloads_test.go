package controllers_test

import (
	"crypto/rand"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/latticekeep/latticekeep/api/v1beta1"
)

const (
	restartOn     = "latticekeep.dev/restart-on"
	runsWith      = "latticekeep.dev/values"
	coalesceDelay = 10 * time.Second
)

// workload returns a workload that names objects, and its pod template.
func workload(kind, namespace, name string, names ...string) (client.Object, *corev1.PodTemplateSpec) {
	meta := metav1.ObjectMeta{Namespace: namespace, Name: name, Annotations: map[string]string{"example.com/own": "a"}}
	if names != nil {
		meta.Annotations[restartOn] = strings.Join(names, ",")
	}
	labels := map[string]string{"app": name}
	template := corev1.PodTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{Labels: labels, Annotations: map[string]string{"example.com/own": "b"}},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "app", Image: "example.com/app"}}},
	}
	selector := &metav1.LabelSelector{MatchLabels: labels}
	switch kind {
	case "StatefulSet":
		w := &appsv1.StatefulSet{ObjectMeta: meta, Spec: appsv1.StatefulSetSpec{Selector: selector, Template: template}}
		return w, &w.Spec.Template
	case "DaemonSet":
		w := &appsv1.DaemonSet{ObjectMeta: meta, Spec: appsv1.DaemonSetSpec{Selector: selector, Template: template}}
		return w, &w.Spec.Template
	default:
		w := &appsv1.Deployment{ObjectMeta: meta, Spec: appsv1.DeploymentSpec{Selector: selector, Template: template, Paused: true}}
		return w, &w.Spec.Template
	}
}

func callTo(verb string, o client.Object) string {
	resource := strings.ToLower(strings.TrimPrefix(fmt.Sprintf("%T", o), "*v1.")) + "s"
	return call{verb: verb, resource: resource, namespace: o.GetNamespace(), name: o.GetName()}.String()
}

func patchOf(o client.Object) string { return callTo("patch", o) }

func lookOf(o client.Object) string { return callTo("get", o) }

// since is what the operator writes for objects in this order.
func since(objects ...*v1beta1.SealedCredential) string {
	var pairs []string
	for _, sc := range objects {
		pairs = append(pairs, sc.Name+"="+sc.Status.ValuesChangedAt.UTC().Format(time.RFC3339))
	}
	return strings.Join(pairs, ",")
}

// renew seals new values for an object and waits until they are stored.
func (w *world) renew(sc *v1beta1.SealedCredential, keys ...string) *v1beta1.SealedCredential {
	w.t.Helper()
	fresh := w.manifest(sc.Namespace, sc.Name, w.values(keys...))
	return w.awaitReady(w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.Sealed = fresh.Spec.Sealed }), sc.Status.Version+1)
}

// running is a workload, its pod template, how it was after its last patch, and how often it was
// patched.
type running struct {
	client.Object
	template *corev1.PodTemplateSpec
	before   client.Object
	patches  int
}

func (w *world) run(kind, namespace, name string, names ...string) *running {
	w.t.Helper()
	return w.runWith(kind, namespace, name, corev1.PodSpec{}, names...)
}

// runWith runs a workload whose container has the environment of the spec.
func (w *world) runWith(kind, namespace, name string, spec corev1.PodSpec, names ...string) *running {
	w.t.Helper()
	o, template := workload(kind, namespace, name, names...)
	for _, c := range spec.Containers {
		template.Spec.Containers[0].EnvFrom = c.EnvFrom
	}
	must(w.t, w.admin.Create(w.t.Context(), o))
	return &running{Object: o, template: template, before: o.DeepCopyObject().(client.Object)}
}

// awaitRestart waits until a workload is restarted once more and holds all of it against what it was.
func (w *world) awaitRestart(r *running, want string) {
	w.t.Helper()
	w.awaitPatch(r, want, 1, func() map[string]string { return r.template.Annotations },
		fmt.Sprintf("map[spec:map[template:map[metadata:map[annotations:map[%s:%s]]]]]", runsWith, want))
}

// awaitKnown waits until a workload says of itself what it was started with, and goes on.
func (w *world) awaitKnown(r *running, want string) {
	w.t.Helper()
	generations := int64(0)
	if _, counts := r.Object.(*appsv1.Deployment); counts {
		generations = 1 // of a Deployment the API server counts annotations too, which start no pods
	}
	w.awaitPatch(r, want, generations, func() map[string]string { return r.GetAnnotations() }, fmt.Sprintf("map[metadata:map[annotations:map[%s:%s]]]", runsWith, want))
}

// awaitPatch waits until a workload is patched once more, and holds all of it against what it was.
func (w *world) awaitPatch(r *running, want string, generations int64, annotations func() map[string]string, patch string) {
	w.t.Helper()
	r.patches++
	w.wire.calls.await(w.t, patchOf(r.Object), r.patches, func() { w.clock.Advance(coalesceDelay) })
	for late := time.Now().Add(patience); annotations()[runsWith] != want; { // the call has been made, and will have been answered
		if must(w.t, w.t.Context().Err()); time.Now().After(late) {
			w.t.Fatalf("%T %s was patched by %s, want %s", r.Object, r.GetName(), w.wire.body(patchOf(r.Object)), patch)
		}
		must(w.t, w.admin.Get(w.t.Context(), client.ObjectKeyFromObject(r.Object), r.Object))
		w.checkPatches(r)
	}
	was, is := r.before, r.Object.DeepCopyObject().(client.Object)
	if is.GetGeneration() != was.GetGeneration()+generations {
		w.t.Errorf("%T has generation %d, it had %d", is, is.GetGeneration(), was.GetGeneration())
	}
	r.before = r.Object.DeepCopyObject().(client.Object)
	for _, o := range []client.Object{was, is} {
		o.SetResourceVersion("")
		o.SetGeneration(0)
		o.SetManagedFields(nil)
		delete(templateOf(o).Annotations, runsWith)
		delete(o.GetAnnotations(), runsWith)
		delete(o.GetAnnotations(), appsv1.DeprecatedTemplateGeneration) // the API server's own, which follows the generation
	}
	if !apiequality.Semantic.DeepEqual(was, is) {
		w.t.Errorf("more than one annotation was changed:\n%+v\n%+v", was, is)
	}
	var body map[string]any
	must(w.t, json.Unmarshal([]byte(w.wire.body(patchOf(r.Object))), &body))
	metadata, _ := body["metadata"].(map[string]any)
	if metadata["resourceVersion"] == nil {
		w.t.Errorf("the patch is %v", body)
	}
	if delete(metadata, "resourceVersion"); len(metadata) == 0 {
		delete(body, "metadata")
	}
	if got := fmt.Sprint(body); got != patch {
		w.t.Errorf("the patch is %s, want %s", got, patch)
	}
}

// checkPatches counts them.
func (w *world) checkPatches(all ...*running) {
	w.t.Helper()
	for _, r := range all {
		if n := w.wire.calls.of(patchOf(r.Object)); n != r.patches {
			w.t.Fatalf("%T %s was patched %d times, want %d; it ran with %q", r.Object, r.GetName(), n, r.patches, r.template.Annotations[runsWith])
		}
	}
}

// checkNoSuchObject checks that one event about a workload names what is no object.
func (w *world) checkNoSuchObject(r *running, names string) {
	w.t.Helper()
	await(w, client.ObjectKey{Namespace: r.GetNamespace()}, new(eventsv1.EventList), "the names of nothing to be told", func(e *eventsv1.Event) bool {
		return e.Reason == "NoSuchObject" && e.Regarding.UID == r.GetUID()
	})
	list := new(eventsv1.EventList)
	must(w.t, w.admin.List(w.t.Context(), list, client.InNamespace(r.GetNamespace())))
	n := 0
	for _, e := range list.Items {
		if e.Reason == "NoSuchObject" && e.Regarding.UID == r.GetUID() {
			if n++; n > 1 || e.Series != nil || e.Type != corev1.EventTypeWarning || !strings.HasSuffix(e.Note, ": "+names) {
				w.t.Errorf("%d events about %s, the last is %+v", n, r.GetName(), e)
			}
		}
	}
}

// awaitSecondAfter waits until the API server's clock, which shows seconds, is past the last change
// of an object's target.
func (w *world) awaitSecondAfter(sc *v1beta1.SealedCredential) {
	w.t.Helper()
	s := new(corev1.Secret)
	must(w.t, w.admin.Get(w.t.Context(), client.ObjectKey{Namespace: sc.Namespace, Name: sc.Status.Target.Name}, s))
	for {
		now := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: sc.Namespace, Name: "now"}}
		must(w.t, w.admin.Create(w.t.Context(), now, client.DryRunAll))
		if !slices.ContainsFunc(s.ManagedFields, func(f metav1.ManagedFieldsEntry) bool { return !now.CreationTimestamp.After(f.Time.Time) }) {
			return
		}
	}
}

// settle waits until the operator has seen everything that was there before.
func (w *world) settle(namespace string) {
	w.t.Helper()
	name := "witness-" + strings.ToLower(rand.Text())
	w.awaitReady(w.create(w.manifest(namespace, name, w.values("token"))), 1)
}

func (w *world) testRestart(t *testing.T) {
	w, ns := w.in(t)
	other := w.namespace()
	manifest := func(name string) *v1beta1.SealedCredential { return w.manifest(ns, name, w.values("token")) }
	// One may run without the Secret, so it is restarted when there are values. It is older than they
	// are. The others are started with them.
	optional := corev1.EnvFromSource{SecretRef: &corev1.SecretEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "one"}, Optional: new(true)}}
	lacking := w.runWith("Deployment", ns, "lacking", corev1.PodSpec{Containers: []corev1.Container{{EnvFrom: []corev1.EnvFromSource{optional}}}}, "one")
	one := manifest("one")
	one.Spec.Target = &v1beta1.Target{}
	one, two := w.awaitReady(w.create(one), 1), w.awaitReady(w.create(manifest("two")), 1)

	// Off, nothing of it is listed, watched, read or patched: these are the first workloads that are.
	for _, verb := range []string{"list", "watch", "get", "patch"} {
		for _, resource := range []string{"deployments", "statefulsets", "daemonsets"} {
			if n := w.wire.calls.sum(verb + " " + resource); n != 0 {
				t.Errorf("with restarts off: %d calls to %s %s", n, verb, resource)
			}
		}
	}
	w.kubectl("apply", "-k", "../config/restart")
	w.halt()
	w.restart = true
	w.start(nil)

	// They name the same objects, and what nothing has or is nobody's.
	var all []*running
	for _, kind := range []string{"Deployment", "StatefulSet", "DaemonSet"} {
		all = append(all, w.run(kind, ns, strings.ToLower(kind), " two", "one", "missing", other+"/one", "../one", "a=b", "", "two"))
	}
	w.awaitRestart(lacking, since(one))
	for _, r := range all {
		w.awaitKnown(r, since(one, two))
	}
	w.clock.Advance(coalesceDelay)
	w.settle(ns)
	for _, r := range all {
		w.checkNoSuchObject(r, fmt.Sprintf(`"../one", "a=b", "missing", %q`, other+"/one"))
	}

	// Many changes within ten seconds are one restart.
	for range 3 {
		w.clock.Advance(time.Second)
		one, two = w.renew(one, "token"), w.renew(two, "token")
	}
	w.settle(ns)
	w.clock.Advance(coalesceDelay)
	for _, r := range all {
		w.awaitRestart(r, since(one, two))
	}
	w.awaitRestart(lacking, since(one))

	// A workload that is made after the values that its Secret has, whatever others it had before, runs with them.
	w.awaitSecondAfter(one)
	young := w.run("Deployment", ns, "young", "one", "nothing")
	w.awaitKnown(young, since(one))
	one = w.awaitReady(w.change(one, func(sc *v1beta1.SealedCredential) { sc.Spec.Rotation = &v1beta1.Rotation{Trigger: "now"} }), one.Status.Version+1)
	w.settle(ns)
	w.clock.Advance(coalesceDelay)

	// What restarts nothing: new keys around the same values; values that have not reached the target; objects of another
	// namespace; a name that is dropped; workloads that are not asking any more, or are going away; more names than there may be.
	w.secret(ns, "late", nil, map[string]string{"token": "theirs"})
	late := manifest("late")
	late.Spec.Target = &v1beta1.Target{}
	late = w.awaitStalled(w.create(late), v1beta1.ReasonTargetConflict)
	waiting, far := w.run("Deployment", ns, "waiting", "late"), w.run("Deployment", other, "far", "one", "two")
	many := w.run("Deployment", ns, "many", append(slices.Repeat([]string{"missing"}, 64), "one")...)
	silent, held := w.run("Deployment", ns, "silent", "two"), w.run("Deployment", ns, "held", "two")
	edit := func(r *running, change func()) {
		t.Helper()
		must(t, w.admin.Get(t.Context(), client.ObjectKeyFromObject(r.Object), r.Object))
		change()
		must(t, w.admin.Update(t.Context(), r.Object))
	}
	edit(silent, func() { silent.SetAnnotations(nil) })
	edit(held, func() { held.SetFinalizers([]string{"example.com/held"}) })
	must(t, w.admin.Delete(t.Context(), held.Object))
	edit(all[0], func() { all[0].GetAnnotations()[restartOn] = "two" })
	last := w.run("Deployment", ns, "zz-last", "one")
	two = w.awaitReady(w.change(two, func(sc *v1beta1.SealedCredential) { sc.Spec.Rotation = &v1beta1.Rotation{Trigger: "now"} }), two.Status.Version+1)
	w.clock.Advance(time.Second)
	one = w.renew(one, "token")
	w.settle(ns)
	w.clock.Advance(coalesceDelay)
	w.awaitRestart(last, since(one))
	w.awaitRestart(young, since(one))
	w.awaitRestart(lacking, since(one))
	w.awaitRestart(all[1], since(one, two))
	w.awaitRestart(all[2], since(one, two))
	nothing := []*running{far, many, silent, held, all[0]}
	w.checkPatches(append(nothing, waiting)...)
	await(w, client.ObjectKey{Namespace: ns}, new(eventsv1.EventList), "the names that are too many to be told", func(e *eventsv1.Event) bool {
		return e.Reason == "TooManyNames" && e.Regarding.UID == many.GetUID()
	})

	// Once the Secret is handed over it holds the values, and so the workload may have them.
	s := new(corev1.Secret)
	must(t, w.admin.Get(t.Context(), client.ObjectKeyFromObject(late), s))
	s.Annotations = map[string]string{"latticekeep.dev/adopt": "late"}
	must(t, w.admin.Update(t.Context(), s))
	w.clock.Advance(2 * time.Minute)
	late = w.awaitReady(late, 1)
	w.settle(ns)
	w.clock.Advance(coalesceDelay)
	w.awaitRestart(waiting, since(late))

	// The operator is ended before and after the patch: there is one restart all the same.
	for i, after := range []bool{false, true} {
		w.halt()
		w.clock.Advance(time.Minute)
		fresh := w.manifest(ns, "late", w.values("token"))
		late = w.change(late, func(sc *v1beta1.SealedCredential) { sc.Spec.Sealed = fresh.Spec.Sealed })
		cut := newCrash(int64(5-i), after) // entry, at first who manages what in the Secret, Secret, status, workload
		w.start(cut)
		late = w.awaitReady(late, late.Status.Version+1)
		w.clock.Advance(coalesceDelay)
		select {
		case <-cut.ended:
		case <-time.After(patience):
			t.Fatalf("the operator did not come to the workload\n%s", w.logs.tail())
		}
		w.halt()
		looked := w.wire.calls.of(lookOf(waiting.Object))
		w.start(nil)
		w.wire.calls.await(t, lookOf(waiting.Object), looked+1, func() { w.clock.Advance(coalesceDelay) })
		w.awaitRestart(waiting, since(late))
	}
	w.halt()
	w.checkPatches(append(nothing, waiting)...)
	w.restart = false
	w.start(nil)
}

func templateOf(o client.Object) *corev1.PodTemplateSpec {
	switch w := o.(type) {
	case *appsv1.StatefulSet:
		return &w.Spec.Template
	case *appsv1.DaemonSet:
		return &w.Spec.Template
	default:
		return &o.(*appsv1.Deployment).Spec.Template
	}
}
