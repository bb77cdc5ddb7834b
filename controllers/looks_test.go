package controllers_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/controllers"
)

// testLooks changes target Secrets while the clock stands, so that nothing is repaired by the timer.
func (w *world) testLooks(t *testing.T) {
	w, ns := w.in(t)
	values := w.values("token")
	sc, s := w.awaitTarget(w.create(w.targeted(ns, "app", values)), 1, values)

	// Every change of the object's metadata is a reason to look.
	for i, touch := range []func(*v1beta1.SealedCredential){
		func(sc *v1beta1.SealedCredential) { sc.Labels = map[string]string{"team": "a"} },
		func(sc *v1beta1.SealedCredential) {
			metav1.SetMetaDataAnnotation(&sc.ObjectMeta, "example.com/touched", "")
		},
		func(sc *v1beta1.SealedCredential) {
			metav1.SetMetaDataAnnotation(&sc.ObjectMeta, v1beta1.AnnotationSync, "any")
		},
	} {
		must(t, w.admin.Delete(t.Context(), s))
		gone := s.UID
		sc = w.awaitThat(w.change(sc, touch), fmt.Sprintf("change %d to bring the Secret back", i), func(sc *v1beta1.SealedCredential) bool {
			return sc.Status.Target.UID != gone
		})
		sc, s = w.awaitTarget(sc, 1, values)
	}
	if sc.Status.Target.Sync != "any" {
		t.Errorf("the status does not say that the look was made: %+v", sc.Status.Target)
	}

	// A look that finds nothing is told if the author asked for it, and only then.
	w.clock.Advance(time.Minute)
	unseals, seen := w.unseals(sc), sc.Status.Target.SeenAt
	w.nudge(sc)
	w.settle(ns)
	must(t, w.admin.Get(t.Context(), client.ObjectKeyFromObject(sc), sc))
	if !sc.Status.Target.SeenAt.Equal(seen) {
		t.Error("a look that found nothing was written to the status")
	}
	sc = w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Annotations[v1beta1.AnnotationSync] = "again" })
	sc = w.awaitThat(sc, "the look to be told", func(sc *v1beta1.SealedCredential) bool { return sc.Status.Target.Sync == "again" })
	c := meta.FindStatusCondition(sc.Status.Conditions, v1beta1.ConditionTargetSynced)
	if at := sc.Status.Target.SeenAt; !at.Time.Equal(w.clock.in(0)) || c.Message != "the Secret holds version 1, seen at "+at.UTC().Format(time.RFC3339) {
		t.Errorf("the Secret was seen at %v: %+v", at, c)
	}
	if n := w.unseals(sc) - unseals; n != 0 {
		t.Errorf("%d unseals of looks that found nothing", n)
	}

	// A finalizer that somebody removed is put back.
	w.awaitThat(w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Finalizers = nil }), "the finalizer to be put back",
		func(sc *v1beta1.SealedCredential) bool { return slices.Contains(sc.Finalizers, v1beta1.Finalizer) })
}

// Looks after a start are paced: of eight Secrets that were lost while the operator was down, one a
// second comes back. Until then the status does not begin to say anything.
func TestLooksArePaced(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.start(nil)
	ns, values := w.namespace(), w.values("token")
	var objects []*v1beta1.SealedCredential
	for i := range 8 {
		sc, _ := w.awaitTarget(w.create(w.targeted(ns, fmt.Sprintf("app-%d", i), values)), 1, values)
		objects = append(objects, sc)
	}
	suspended := w.change(objects[0], func(sc *v1beta1.SealedCredential) { sc.Spec.Suspend = true })
	secrets := func() (n int) {
		t.Helper()
		list := new(corev1.SecretList)
		must(t, w.admin.List(t.Context(), list, client.InNamespace(ns)))
		return len(list.Items)
	}
	w.awaitThat(suspended, "suspension", func(sc *v1beta1.SealedCredential) bool { return sc.Status.ObservedGeneration == sc.Generation })
	w.halt()
	must(t, w.admin.DeleteAllOf(t.Context(), new(corev1.Secret), client.InNamespace(ns)))
	w.pace = controllers.Pace{LooksPerMinute: 60}
	w.start(nil)
	for _, sc := range objects {
		w.store.looks.await(t, string(sc.UID), 1)
	}
	// The first look is at once. It may be that at the Secret of the suspended object, which stays away.
	for second := range len(objects) {
		w.settle(ns)
		if n := secrets(); n > second+1 {
			t.Fatalf("%d Secrets are back after %d s", n, second)
		}
		w.clock.Advance(time.Second)
	}
	for _, sc := range objects[1:] {
		w.awaitThat(sc, "the Secret to be back", func(now *v1beta1.SealedCredential) bool { return now.Status.Target.UID != sc.Status.Target.UID })
	}
	suspended = w.awaitThat(suspended, "the loss to be told", func(sc *v1beta1.SealedCredential) bool {
		return meta.IsStatusConditionFalse(sc.Status.Conditions, v1beta1.ConditionTargetSynced)
	})
	const oldest = "latticekeep_target_oldest_look_timestamp_seconds{}"
	if at, is := w.gathered()[oldest]; !is || float64(w.clock.Now().Unix())-at > 20 {
		t.Errorf("the oldest look is at %v: %v", at, is)
	}
	w.clock.Advance(time.Minute)
	if at := w.gathered()[oldest]; float64(w.clock.Now().Unix())-at < 60 {
		t.Errorf("a minute later the oldest look is at %v", at)
	}

	// After a start, the operator does not claim that a wrong target is right, and it looks at
	// settled ones without a write.
	w.halt()
	before := w.writes(ns)
	w.pace = unpaced
	w.start(nil)
	w.lookAgain(objects...)
	if after := w.writes(ns); !slices.Equal(before, after) {
		t.Errorf("looks at settled objects wrote:\n%v\n%v", before, after)
	}
	must(t, w.admin.Get(t.Context(), client.ObjectKeyFromObject(suspended), suspended))
	if !meta.IsStatusConditionFalse(suspended.Status.Conditions, v1beta1.ConditionTargetSynced) {
		t.Error("a lost Secret is said to be there")
	}
}

// With the right to watch Secrets in a namespace, the operator mends targets there when they change.
// The clock stands, so no timer does it.
func TestWatchedTargetsAreMendedAtOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ns, other := w.namespace(), w.namespace()
	w.watched = []string{ns}
	w.open(nil)
	err := controllers.Run(t.Context(), w.operator, w.options())
	if err == nil || !strings.Contains(err.Error(), "may not list Secrets in the namespace "+ns) {
		t.Errorf("without the right, the operator ends with: %v", err)
	}
	must(t, w.store.Close())
	w.kubectl("create", "role", "watch", "--namespace", ns, "--verb=list,watch", "--resource=secrets")
	w.kubectl("create", "rolebinding", "watch", "--namespace", ns, "--role=watch", "--serviceaccount=latticekeep-system:latticekeep")
	w.start(nil)

	values := w.values("token")
	sc, s := w.awaitTarget(w.create(w.targeted(ns, "app", values)), 1, values)
	for i, drift := range []func(){
		func() { must(t, w.admin.Delete(t.Context(), s)) },
		func() { s.Data["token"] = []byte("x"); must(t, w.admin.Update(t.Context(), s)) },
		func() { s.Labels = map[string]string{"theirs": "x"}; must(t, w.admin.Update(t.Context(), s)) },
	} {
		was, began := sc.Status.Target.ResourceVersion, time.Now()
		drift()
		sc = w.awaitThat(sc, fmt.Sprintf("change %d to be seen", i), func(sc *v1beta1.SealedCredential) bool { return sc.Status.Target.ResourceVersion != was })
		if took := time.Since(began); took > patience/2 {
			t.Errorf("change %d was seen after %v", i, took)
		}
		sc, s = w.awaitTarget(sc, 1, values)
	}

	// A Secret that somebody else made stands in the way until it goes.
	foreign := w.secret(ns, "foreign", nil, values)
	waiting := w.awaitStalled(w.create(w.targeted(ns, "foreign", values)), v1beta1.ReasonTargetConflict)
	must(t, w.admin.Delete(t.Context(), foreign))
	w.awaitTarget(waiting, 1, values)

	// The operator's own writes do not keep it busy, and neither does a start.
	looks := func() int { return w.store.looks.of(string(sc.UID)) }
	w.settle(ns)
	before := looks()
	sc, _ = w.awaitTarget(w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.Rotation = &v1beta1.Rotation{Trigger: "now"} }), 2, values)
	for range 5 {
		w.settle(ns)
	}
	if n := looks() - before; n > 6 { // the cache may be behind the operator's own writes, which is one more reconcile each
		t.Errorf("%d reconciles of one change", n)
	}
	if before := looks(); before > 0 {
		for range 5 {
			w.settle(ns)
		}
		if n := looks() - before; n != 0 {
			t.Errorf("%d reconciles of nothing", n)
		}
	}

	// The operator also brings back a Secret that was deleted while it was down. It lists and
	// watches nothing else.
	w.halt()
	must(t, w.admin.Delete(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "app"}}))
	w.start(nil)
	gone := sc.Status.Target.UID
	sc = w.awaitThat(sc, "the Secret to be back", func(sc *v1beta1.SealedCredential) bool { return sc.Status.Target.UID != gone })
	w.awaitTarget(sc, 2, values)
	for _, verb := range []string{"list", "watch"} {
		for _, namespace := range []string{"", other} {
			if n := w.wire.calls.of(verb + " secrets " + namespace + "/"); n != 0 {
				t.Errorf("%d calls to %s Secrets in %q", n, verb, namespace)
			}
		}
	}
	if w.wire.calls.of("watch secrets "+ns+"/") == 0 {
		t.Error("the Secrets are not watched")
	}
}
