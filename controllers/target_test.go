package controllers_test

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/latticekeep/latticekeep/api/v1beta1"
)

// awaitTarget waits until the target Secret holds exactly these values, and the object's status
// says so.
func (w *world) awaitTarget(sc *v1beta1.SealedCredential, version int64, want map[string]string) (*v1beta1.SealedCredential, *corev1.Secret) {
	w.t.Helper()
	sc = w.awaitThat(sc, fmt.Sprintf("the target of %s to hold version %d", sc.Name, version), func(now *v1beta1.SealedCredential) bool {
		return now.Generation >= sc.Generation && now.Status.ObservedGeneration == now.Generation && now.Status.Version == version &&
			now.Status.Target != nil && now.Status.Target.Version == version && now.Status.Audit != nil && now.Status.Target.Audit == now.Status.Audit.Hash &&
			meta.IsStatusConditionTrue(now.Status.Conditions, v1beta1.ConditionTargetSynced) &&
			meta.IsStatusConditionTrue(now.Status.Conditions, v1beta1.ConditionReady)
	})
	s := new(corev1.Secret)
	must(w.t, w.admin.Get(w.t.Context(), client.ObjectKey{Namespace: sc.Namespace, Name: sc.Status.Target.Name}, s))
	if s.UID != sc.Status.Target.UID || s.ResourceVersion != sc.Status.Target.ResourceVersion {
		w.t.Errorf("the status names Secret %+v, it is %s %s", sc.Status.Target, s.UID, s.ResourceVersion)
	}
	if s.Annotations["latticekeep.dev/owner"] != string(sc.UID) || s.Annotations["latticekeep.dev/version"] != fmt.Sprint(version) {
		w.t.Errorf("the Secret has the annotations %v", s.Annotations)
	}
	if len(s.Data) != len(want) {
		w.t.Errorf("the Secret has %d keys, want %d", len(s.Data), len(want))
	}
	for k, v := range want {
		if string(s.Data[k]) != v {
			w.t.Errorf("the Secret's %s is another one", k)
		}
	}
	return sc, s
}

func (w *world) testTarget(t *testing.T) {
	w, ns := w.in(t)
	values := w.values("user", "password")
	manifest := w.manifest(ns, "delivered", values)
	manifest.Spec.Target = &v1beta1.Target{Labels: map[string]string{"team": "a"}, Annotations: map[string]string{"example.com/b": "c"}}
	manifest.Labels = map[string]string{"app.kubernetes.io/instance": "argo"}
	sc, s := w.awaitTarget(w.create(manifest), 1, values)
	if s.Name != "delivered" || s.Type != corev1.SecretTypeOpaque || s.Labels["team"] != "a" || len(s.Labels) != 1 || s.Annotations["example.com/b"] != "c" ||
		len(s.OwnerReferences) != 0 {
		t.Errorf("the target is %+v", s.ObjectMeta)
	}
	w.checkEvents(sc, "Sealed")
	first := s.UID

	// New values, re-encryption and another mapping all reach the Secret.
	values = w.values("user", "password")
	fresh := w.manifest(ns, "delivered", values)
	sc, _ = w.awaitTarget(w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.Sealed = fresh.Spec.Sealed }), 2, values)
	sc, _ = w.awaitTarget(w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.Rotation = &v1beta1.Rotation{Trigger: "now"} }), 3, values)
	sc, s = w.awaitTarget(w.change(sc, func(sc *v1beta1.SealedCredential) {
		sc.Spec.Target.Labels = nil
		sc.Spec.Target.Keys = []v1beta1.TargetKey{
			{To: "PGPASSWORD", From: "password"},
			{To: "url", Template: "postgres://$(user):$(password)@db/app", Encoding: v1beta1.EncodingURL},
		}
	}), 3, map[string]string{"PGPASSWORD": values["password"], "url": "postgres://" + values["user"] + ":" + values["password"] + "@db/app"})
	if len(s.Labels) != 0 || s.UID != first {
		t.Errorf("the target has labels %v, made again: %v", s.Labels, s.UID != first)
	}

	// The operator repairs drift without a change of the object: changed data, changed labels, a
	// deleted Secret.
	want := map[string]string{"PGPASSWORD": values["password"], "url": string(s.Data["url"])}
	const repairs = "latticekeep_target_repairs_total{}"
	before := w.gathered()[repairs]
	for i, drift := range []func(){
		func() {
			s.Data["PGPASSWORD"], s.Data["more"] = []byte("x"), []byte("y")
			must(t, w.admin.Update(t.Context(), s))
		},
		func() { s.Labels = map[string]string{"x": "y"}; must(t, w.admin.Update(t.Context(), s)) },
		func() { must(t, w.admin.Delete(t.Context(), s)) },
	} {
		drift()
		was := sc.Status.Target.ResourceVersion
		w.clock.Advance(10 * time.Minute)
		sc = w.awaitThat(sc, fmt.Sprintf("drift %d to be repaired", i), func(sc *v1beta1.SealedCredential) bool { return sc.Status.Target.ResourceVersion != was })
		sc, s = w.awaitTarget(sc, 3, want)
	}
	if n := w.gathered()[repairs] - before; n < 2 { // a label of somebody else's may stay
		t.Errorf("the repairs of data and of a deletion are counted as %v", n)
	}

	// Another type replaces the Secret under the same name.
	second := s.UID
	sc, s = w.awaitTarget(w.change(sc, func(sc *v1beta1.SealedCredential) {
		sc.Spec.Target.Type = "kubernetes.io/basic-auth"
		sc.Spec.Target.Keys = []v1beta1.TargetKey{{To: "username", From: "user"}, {To: "password", From: "password"}}
	}), 3, map[string]string{"username": values["user"], "password": values["password"]})
	if s.Type != corev1.SecretTypeBasicAuth || s.UID == second {
		t.Errorf("the target is of type %s", s.Type)
	}

	// A target that cannot be made is reported, and the Secret stays as it was.
	for _, bad := range []struct {
		target  v1beta1.Target
		message string
	}{
		{v1beta1.Target{Type: "kubernetes.io/tls"}, "needs the key tls.crt"},
		{v1beta1.Target{Type: "kubernetes.io/dockerconfigjson", Keys: []v1beta1.TargetKey{{To: ".dockerconfigjson", From: "user"}}}, "not a JSON object"},
		{v1beta1.Target{Keys: []v1beta1.TargetKey{{To: "a", From: "nobody"}}}, "no value with the key nobody"},
	} {
		sc = w.awaitStalled(w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.Target = &bad.target }), v1beta1.ReasonInvalidTarget)
		c := meta.FindStatusCondition(sc.Status.Conditions, v1beta1.ConditionTargetSynced)
		if c == nil || c.Status != metav1.ConditionFalse || !strings.Contains(c.Message, bad.message) {
			t.Errorf("TargetSynced is %+v, want %q", c, bad.message)
		}
	}
	sc, _ = w.awaitTarget(w.change(sc, func(sc *v1beta1.SealedCredential) {
		sc.Spec.Target = &v1beta1.Target{Type: "kubernetes.io/dockerconfigjson", Keys: []v1beta1.TargetKey{{
			To: ".dockerconfigjson", Encoding: v1beta1.EncodingJSON,
			Template: `{"auths":{"registry.example.com":{"username":"$(user)","password":"$(password)"}}}`,
		}}}
	}), 3, map[string]string{
		".dockerconfigjson": `{"auths":{"registry.example.com":{"username":"` + values["user"] + `","password":"` + values["password"] + `"}}}`,
	})

	// The Secret is deleted with its target, and with its object.
	sc = w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.Target = nil })
	w.awaitNoSecret(ns, "delivered")
	sc = w.awaitThat(sc, "the target to leave the status", func(sc *v1beta1.SealedCredential) bool { return sc.Status.Target == nil })
	sc, _ = w.awaitTarget(w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.Target = &v1beta1.Target{Name: "elsewhere"} }), 3, values)
	must(t, w.admin.Delete(t.Context(), sc))
	w.awaitGone(sc)
	w.awaitNoSecret(ns, "elsewhere")
}

func (w *world) testAdoption(t *testing.T) {
	w, ns := w.in(t)
	foreign := w.secret(ns, "app", map[string]string{"kubectl.kubernetes.io/last-applied-configuration": "{}"}, map[string]string{"token": "theirs"})
	values := w.values("token")
	manifest := w.manifest(ns, "app", values)
	manifest.Spec.Target = &v1beta1.Target{DeletionPolicy: v1beta1.DeletionRetain}
	sc := w.awaitStalled(w.create(manifest), v1beta1.ReasonTargetConflict)
	untouched := func() {
		t.Helper()
		now := new(corev1.Secret)
		must(t, w.admin.Get(t.Context(), client.ObjectKeyFromObject(foreign), now))
		if now.ResourceVersion != foreign.ResourceVersion {
			t.Error("a foreign Secret was written to")
		}
	}
	untouched()
	w.checkUnseals(sc, values) // the vault has the values all the same

	// Neither another object's adopt annotation nor a forged owner reference gives the Secret to
	// this object.
	foreign.Annotations["latticekeep.dev/adopt"] = "another"
	foreign.Annotations["latticekeep.dev/owner"] = "00000000-0000-0000-0000-000000000000"
	must(t, w.admin.Update(t.Context(), foreign))
	w.nudge(sc)
	w.clock.Advance(2 * time.Minute)
	w.awaitReady(w.create(w.manifest(ns, "witness", values)), 1)
	untouched()

	foreign.Annotations["latticekeep.dev/adopt"] = "app"
	must(t, w.admin.Update(t.Context(), foreign))
	w.clock.Advance(2 * time.Minute)
	sc, s := w.awaitTarget(sc, 1, values)
	if s.UID != foreign.UID || len(s.Annotations) != 3 || len(s.OwnerReferences) != 0 {
		t.Errorf("the adopted Secret is %+v", s.ObjectMeta)
	}
	w.checkEvents(sc, "Sealed", "Stalled", "TargetAdopted")

	// With the policy Retain, the Secret outlives its object, and the next object of that name does
	// not own it.
	must(t, w.admin.Delete(t.Context(), sc))
	w.awaitGone(sc)
	must(t, w.admin.Get(t.Context(), client.ObjectKeyFromObject(s), s))
	again := w.manifest(ns, "app", values)
	again.Spec.Target = &v1beta1.Target{}
	w.awaitStalled(w.create(again), v1beta1.ReasonTargetConflict)

	// An immutable Secret is reported, and adoption does not replace a Secret of another type.
	immutable := true
	for name, s := range map[string]*corev1.Secret{
		"is immutable":     {Immutable: &immutable},
		"has another type": {Type: "example.com/own"},
	} {
		s.Namespace, s.Name, s.Annotations = ns, strings.Fields(name)[1], map[string]string{"latticekeep.dev/adopt": strings.Fields(name)[1]}
		must(t, w.admin.Create(t.Context(), s))
		m := w.manifest(ns, s.Name, values)
		m.Spec.Target = &v1beta1.Target{}
		sc := w.awaitStalled(w.create(m), v1beta1.ReasonTargetConflict)
		if c := meta.FindStatusCondition(sc.Status.Conditions, v1beta1.ConditionStalled); !strings.Contains(c.Message, name) {
			t.Errorf("the message is %q, want %q", c.Message, name)
		}
	}
}

// An object imports an existing Secret and then adopts it. Workloads that mount the Secret see its
// values throughout.
func (w *world) testMigration(t *testing.T) {
	w, ns := w.in(t)
	values := w.values("token")
	plain := w.secret(ns, "app", map[string]string{"latticekeep.dev/import": "app", "latticekeep.dev/adopt": "app"}, values)
	sc := object(ns, "app")
	sc.Spec.ValuesFrom = &v1beta1.ValuesFrom{SecretRef: v1beta1.SecretReference{Name: "app"}}
	sc.Spec.Target = &v1beta1.Target{}
	sc, s := w.awaitTarget(w.create(sc), 1, values)
	if s.UID != plain.UID {
		t.Error("the Secret was made again")
	}
	// A change in the Secret is now drift: the Secret is no longer a source.
	s.Data["token"] = []byte("drift")
	must(t, w.admin.Update(t.Context(), s))
	was := sc.Status.Target.ResourceVersion
	w.clock.Advance(10 * time.Minute)
	sc = w.awaitThat(sc, "the drift to be repaired", func(sc *v1beta1.SealedCredential) bool { return sc.Status.Target.ResourceVersion != was })
	sc, _ = w.awaitTarget(sc, 1, values)
	values = w.values("token")
	fresh := w.manifest(ns, "app", values)
	_, s = w.awaitTarget(w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.ValuesFrom, sc.Spec.Sealed = nil, fresh.Spec.Sealed }), 2, values)
	if s.UID != plain.UID || controllerutil.ContainsFinalizer(s, v1beta1.Finalizer) {
		t.Errorf("the Secret is %+v", s.ObjectMeta)
	}
}

// A failed repair is retried and not treated as done.
func (w *world) testFailedRepair(t *testing.T) {
	w, ns := w.in(t)
	values := w.values("token")
	manifest := w.manifest(ns, "app", values)
	manifest.Spec.Target = &v1beta1.Target{}
	sc, s := w.awaitTarget(w.create(manifest), 1, values)
	w.halt()
	failed := make(chan struct{})
	was := w.operator.WrapTransport
	var once sync.Once
	w.operator.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			fail := false
			if r.Method == http.MethodPost && strings.HasSuffix(r.URL.Path, ns+"/secrets") {
				once.Do(func() { fail = true; close(failed) })
			}
			if fail {
				return nil, errors.New("the first write is lost")
			}
			return next.RoundTrip(r)
		})
	})
	w.start(nil)
	defer func() { w.operator.WrapTransport = was }()
	w.nudge(sc)
	w.awaitReady(w.create(w.manifest(ns, "witness", values)), 1) // reconciled once since the start
	must(t, w.admin.Delete(t.Context(), s))
	w.clock.Advance(10 * time.Minute)
	select {
	case <-failed:
	case <-time.After(patience):
		t.Fatal("the Secret was not missed")
	}
	gone := s.UID
	sc = w.awaitThat(sc, "the repair to be made without another look at the clock", func(sc *v1beta1.SealedCredential) bool {
		return sc.Status.Target != nil && sc.Status.Target.UID != gone
	})
	w.awaitTarget(sc, 1, values)
	w.halt()
	w.operator.WrapTransport = was
	w.start(nil)
}

// A target Secret is deleted with its target by the operator alone, and only by the UID of its
// object.
func (w *world) testTargetDeletion(t *testing.T) {
	w, ns := w.in(t)
	values := w.values("token")
	made := func(name string, policy v1beta1.DeletionPolicy) (*v1beta1.SealedCredential, *corev1.Secret) {
		sc := w.targeted(ns, name, values)
		sc.Spec.Target.DeletionPolicy = policy
		return w.awaitTarget(w.create(sc), 1, values)
	}
	exists := func(s *corev1.Secret) {
		t.Helper()
		now := new(corev1.Secret)
		must(t, w.admin.Get(t.Context(), client.ObjectKeyFromObject(s), now))
		if now.UID != s.UID || len(now.OwnerReferences) != 0 {
			t.Errorf("the Secret %s is another one, or has an owner: %+v", s.Name, now.ObjectMeta)
		}
	}
	kept, keptSecret := made("kept", v1beta1.DeletionRetain)
	dropped, _ := made("dropped", v1beta1.DeletionDelete)
	down, _ := made("down", v1beta1.DeletionDelete)
	byHand, byHandSecret := made("by-hand", v1beta1.DeletionDelete)
	older, olderSecret := made("older", v1beta1.DeletionDelete)
	olderKept, olderKeptSecret := made("older-kept", v1beta1.DeletionRetain)
	olderGone, olderGoneSecret := made("older-gone", v1beta1.DeletionDelete)

	// When the target leaves the spec, the Secret says what is to become of it.
	for _, sc := range []*v1beta1.SealedCredential{kept, dropped} {
		sc = w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.Target = nil })
		w.awaitThat(sc, "the target to leave the status", func(sc *v1beta1.SealedCredential) bool { return sc.Status.Target == nil })
	}
	exists(keptSecret)
	w.awaitNoSecret(ns, "dropped")

	// While the operator is down: an object is deleted, another loses its finalizer by hand, and
	// three Secrets become what earlier releases wrote.
	w.halt()
	must(t, w.admin.Delete(t.Context(), down))
	w.change(byHand, func(sc *v1beta1.SealedCredential) { sc.Finalizers = nil })
	must(t, w.admin.Delete(t.Context(), byHand))
	w.awaitGone(byHand)
	controller := true
	for _, o := range []struct {
		sc *v1beta1.SealedCredential
		s  *corev1.Secret
	}{{older, olderSecret}, {olderKept, olderKeptSecret}, {olderGone, olderGoneSecret}} {
		delete(o.s.Annotations, v1beta1.AnnotationDeletionPolicy)
		if o.sc != olderKept {
			o.s.OwnerReferences = []metav1.OwnerReference{{
				APIVersion: "latticekeep.dev/v1alpha1", Kind: v1beta1.KindSealedCredential, Name: o.sc.Name, UID: o.sc.UID, Controller: &controller,
			}}
		}
		must(t, w.admin.Update(t.Context(), o.s))
		o.sc.Status.Target.ResourceVersion = o.s.ResourceVersion
		must(t, w.admin.Status().Update(t.Context(), o.sc))
	}
	for _, sc := range []*v1beta1.SealedCredential{olderKept, olderGone} {
		w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.Target = nil })
	}
	w.start(nil)
	w.awaitGone(down)
	w.awaitNoSecret(ns, "down")
	w.awaitNoSecret(ns, "older-gone")
	w.checkEvents(byHand, "Sealed", "Released")
	exists(byHandSecret)
	w.awaitThat(olderKept, "the target to leave the status", func(sc *v1beta1.SealedCredential) bool { return sc.Status.Target == nil })
	exists(olderKeptSecret)

	// The next look takes the owner reference away, in place.
	was := older.Status.Target.ResourceVersion
	w.clock.Advance(10 * time.Minute)
	older = w.awaitThat(older, "the Secret to be written as this release does", func(sc *v1beta1.SealedCredential) bool {
		return sc.Status.Target.ResourceVersion != was
	})
	older, olderSecret = w.awaitTarget(older, 1, values)
	exists(olderSecret)
	if olderSecret.Annotations[v1beta1.AnnotationDeletionPolicy] != "Delete" {
		t.Errorf("the Secret has the annotations %v", olderSecret.Annotations)
	}
	must(t, w.admin.Delete(t.Context(), older))
	w.awaitGone(older)
	w.awaitNoSecret(ns, "older")
}

// An immutable target is made again for new values, and when it is to be mutable again.
func (w *world) testImmutable(t *testing.T) {
	w, ns := w.in(t)
	values := w.values("token")
	sc := w.manifest(ns, "fixed", values)
	sc.Spec.Target = &v1beta1.Target{Immutable: true}
	sc, first := w.awaitTarget(w.create(sc), 1, values)
	if first.Immutable == nil || !*first.Immutable {
		t.Fatal("the target is not immutable")
	}
	w.clock.Advance(time.Minute)
	values = w.values("token")
	next := w.manifest(ns, "fixed", values)
	sc, second := w.awaitTarget(w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.Sealed = next.Spec.Sealed }), 2, values)
	if second.UID == first.UID || second.Immutable == nil || !*second.Immutable {
		t.Errorf("new values: the same Secret %v, immutable %v", second.UID == first.UID, second.Immutable)
	}
	w.checkEvents(sc, "Sealed", "Rotated", "TargetReplaced")
	sc = w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.Target.Immutable = false })
	third := await(w, client.ObjectKeyFromObject(sc), new(corev1.SecretList), "a Secret that may be changed", func(s *corev1.Secret) bool {
		return s.UID != second.UID && s.Immutable == nil
	})
	// Any Secret becomes immutable as it is.
	w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.Target.Immutable = true })
	await(w, client.ObjectKeyFromObject(sc), new(corev1.SecretList), "it to be immutable again", func(s *corev1.Secret) bool {
		return s.UID == third.UID && s.Immutable != nil && *s.Immutable
	})
	w.gone(sc)
}
