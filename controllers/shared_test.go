package controllers_test

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/latticekeep/latticekeep/api/v1beta1"
)

// managers returns who manages the fields of a Secret, and how.
func managers(s *corev1.Secret) (all []string) {
	for _, entry := range s.ManagedFields {
		all = append(all, string(entry.Operation)+" "+entry.Manager)
	}
	slices.Sort(all)
	return all
}

// testSharedTarget changes a target Secret as other controllers do.
func (w *world) testSharedTarget(t *testing.T) {
	w, ns := w.in(t)
	values := w.values("token")
	manifest := w.targeted(ns, "app", values)
	manifest.Spec.Target.Labels, manifest.Spec.Target.Annotations = map[string]string{"team": "a"}, map[string]string{"example.com/b": "c"}
	sc, s := w.awaitTarget(w.create(manifest), 1, values)
	uid := s.UID

	// looked asks for a look and returns the Secret when the status has seen it as it is.
	looked := func() {
		t.Helper()
		before := sc.Status.Target.ResourceVersion
		w.nudge(sc)
		sc = w.awaitThat(sc, "the change to be seen", func(sc *v1beta1.SealedCredential) bool { return sc.Status.Target.ResourceVersion != before })
		sc, s = w.awaitTarget(sc, sc.Status.Version, values)
	}
	check := func(what string, labels map[string]string) {
		t.Helper()
		if !maps.Equal(s.Labels, labels) || s.Annotations["example.com/b"] != "c" || s.Annotations["reflector"] != "on" || len(s.Annotations) != 5 ||
			len(s.OwnerReferences) != 0 || s.UID != uid {
			t.Errorf("%s: the Secret is %+v", what, s.ObjectMeta)
		}
	}

	theirs := "Update " + filepath.Base(os.Args[0]) // this test's own writes

	// Labels and annotations of others stay, and the values are not opened for them.
	unseals := w.unseals(sc)
	metav1.SetMetaDataLabel(&s.ObjectMeta, "theirs", "x")
	metav1.SetMetaDataAnnotation(&s.ObjectMeta, "reflector", "on")
	must(t, w.admin.Update(t.Context(), s))
	looked()
	check("after a foreign label", map[string]string{"team": "a", "theirs": "x"})
	if n := w.unseals(sc) - unseals; n != 0 {
		t.Errorf("a foreign label made %d unseals", n)
	}
	if got, want := managers(s), []string{theirs, "Update latticekeep"}; !slices.Equal(got, want) {
		t.Errorf("a Secret that was created and not changed is managed by %v, want %v", got, want)
	}

	// A new version is applied: what was created counts as applied from then on.
	values = w.values("token")
	renew := w.manifest(ns, "app", values)
	sc, s = w.awaitTarget(w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.Sealed = renew.Spec.Sealed }), 2, values)
	check("after a new version", map[string]string{"team": "a", "theirs": "x"})
	if got, want := managers(s), []string{"Apply latticekeep", theirs}; !slices.Equal(got, want) {
		t.Errorf("the Secret is managed by %v, want %v", got, want)
	}

	// The operator removes the labels that leave the spec, keeps those of others, and takes back one
	// that others changed.
	sc, s = w.awaitTarget(w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.Target.Labels = map[string]string{"tier": "db"} }), 2, values)
	check("after a change of the labels", map[string]string{"tier": "db", "theirs": "x"})
	s.Labels["tier"] = "changed"
	must(t, w.admin.Update(t.Context(), s))
	looked()
	check("after a label was changed", map[string]string{"tier": "db", "theirs": "x"})

	// Data and owners are not shared, whoever wrote them and how.
	no := false
	s.Data["token"], s.Data["more"] = []byte("x"), []byte("y")
	s.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "ConfigMap", Name: "gone", UID: "00000000-0000-0000-0000-000000000000", Controller: &no}}
	must(t, w.admin.Update(t.Context(), s))
	looked()
	check("after data and an owner were added", map[string]string{"tier": "db", "theirs": "x"})
	const applied = `{"apiVersion":"v1","kind":"Secret","metadata":{"labels":{"applied":"z"}},"data":{"token":"eA==","other":"eA=="}}`
	must(t, w.admin.Patch(t.Context(), s, client.RawPatch(types.ApplyPatchType, []byte(applied)), client.ForceOwnership, client.FieldOwner("somebody")))
	looked()
	check("after somebody applied data", map[string]string{"tier": "db", "theirs": "x", "applied": "z"})

	// Somebody takes the managedFields away.
	must(t, w.admin.Patch(t.Context(), s, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"managedFields":[{}]},"data":{"more":"eA=="}}`))))
	looked()
	check("after the managedFields were reset", map[string]string{"tier": "db", "theirs": "x", "applied": "z"})

	// A change between the read and the write is a conflict: the Secret is read again.
	var once sync.Once
	mend := w.wire.fail(func(c call) int {
		if c == (call{"patch", "secrets", ns, "app"}) {
			once.Do(func() {
				patch := []byte(`{"metadata":{"labels":{"theirs":"between"}},"data":{"between":"eA=="}}`)
				must(t, w.admin.Patch(t.Context(), s.DeepCopy(), client.RawPatch(types.MergePatchType, patch)))
			})
		}
		return 0
	})
	values = w.values("token")
	renew = w.manifest(ns, "app", values)
	sc, s = w.awaitTarget(w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.Sealed = renew.Spec.Sealed }), 3, values)
	mend()
	check("after a change in between", map[string]string{"tier": "db", "theirs": "between", "applied": "z"})

	// The next change is one write.
	writes := len(w.writes(ns))
	sc, s = w.awaitTarget(w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.Target.Labels = nil }), 3, values)
	check("at the end", map[string]string{"theirs": "between", "applied": "z"})
	if n := len(w.writes(ns)) - writes; n != 2 { // Secret and status
		t.Errorf("a change took %d writes: %v", n, w.writes(ns))
	}
}
