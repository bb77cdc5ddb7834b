package controllers_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/authz"
)

// An object that comes back from a backup, another cluster or a second `kubectl apply` has a new
// UID. These tests show that it goes on with the values that it had, or says why not.
func TestRestoredObjectsKeepTheirValues(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.start(nil)
	for _, test := range []struct {
		behaviour string
		run       func(*testing.T)
	}{
		{"the same object made again goes on with its entry", w.testAgain},
		{"another form of it waits to be told", w.testFormer},
		{"what went on unasked goes nowhere else unasked", w.testBound},
		{"whoever sets adoptFrom needs the verb adopt", w.testAdoptVerb},
		{"a foreign entry and an absent one are the same answer", w.testForeignEntry},
		{"a Secret of a previous object is not overwritten by generated values", w.testFormerSecret},
		{"an object that went without its finalizer left its entry too", w.testWithoutFinalizer},
		{"a Secret that is newer than the entry is asked about", w.testNewerSecret},
		{"a target that moves to a Secret of a previous object takes its values", w.testMovedTarget},
		{"a namespace that is mapped to its previous tenant goes on", w.testMappedNamespace},
		{"an imported object made again asks before it begins anew", w.testFormerImport},
	} {
		t.Run(test.behaviour, test.run)
	}
	moved := w.beforeMove()
	w.halt()
	t.Run("the chain holds", w.testChain)
	t.Run("a store moved to another cluster goes on there", func(t *testing.T) { testMoved(t, moved) })
	t.Run("with a new vault, Secrets and manifests are all there is", func(t *testing.T) { testNewVault(t, moved) })
}

// generated returns a manifest whose password only the vault has, with a target.
func generated(ns, name string) *v1beta1.SealedCredential {
	sc := object(ns, name)
	sc.Spec.Generate = []v1beta1.Generator{{Key: "password", Random: &v1beta1.Random{}}}
	sc.Spec.DeletionPolicy = v1beta1.DeletionRetain
	sc.Spec.Target = &v1beta1.Target{}
	return sc
}

// made creates an object and returns it with its values, once its target holds them.
func (w *world) made(sc *v1beta1.SealedCredential) (*v1beta1.SealedCredential, map[string]string) {
	w.t.Helper()
	sc = w.awaitReady(w.create(sc), 1)
	values := w.unsealed(sc)
	sc, _ = w.awaitTarget(sc, 1, values)
	return sc, values
}

func (w *world) gone(sc *v1beta1.SealedCredential) {
	w.t.Helper()
	must(w.t, w.admin.Delete(w.t.Context(), sc))
	w.awaitGone(sc)
}

func (w *world) checkStalled(sc *v1beta1.SealedCredential, reason string, says ...string) *v1beta1.SealedCredential {
	w.t.Helper()
	sc = w.awaitStalled(sc, reason)
	message := meta.FindStatusCondition(sc.Status.Conditions, v1beta1.ConditionStalled).Message
	for _, s := range says {
		if !strings.Contains(message, s) {
			w.t.Errorf("%s is stalled with %q, which does not say %q", sc.Name, message, s)
		}
	}
	return sc
}

func (w *world) testAgain(t *testing.T) {
	w, ns := w.in(t)
	first, values := w.made(generated(ns, "pg"))
	w.gone(first)
	again, _ := w.awaitTarget(w.create(generated(ns, "pg")), 1, values)
	if again.Status.CredentialID != first.Status.CredentialID {
		t.Error("it has another entry")
	}
	w.checkUnseals(again, values)
	w.checkEvents(again, "Adopted")
	w.checkHistory(again, audit.CredentialSealed, audit.CredentialReleased, audit.CredentialAdopted)
	// It is the object's again: its rotation, its deletion, and nobody else may change it.
	again = w.awaitReady(w.change(again, func(sc *v1beta1.SealedCredential) { sc.Spec.Rotation = &v1beta1.Rotation{Trigger: "now"} }), 2)
	w.checkUnseals(again, values)
	if err := w.vault.Delete(t.Context(), w.tenant(ns), again.Status.CredentialID); err == nil {
		t.Error("its entry can be deleted over REST")
	}
	w.change(again, func(sc *v1beta1.SealedCredential) { sc.Spec.DeletionPolicy = v1beta1.DeletionDelete })
	w.gone(again)
	if got := w.history(ns, again.Status.CredentialID); got[len(got)-1] != string(audit.CredentialDeleted) {
		t.Errorf("deleted, the log has %v", got)
	}
	fresh, _ := w.made(generated(ns, "pg"))
	if fresh.Status.CredentialID == first.Status.CredentialID {
		t.Error("a deleted entry was taken up")
	}

	// Sealed values are the same object only with the same ciphertext.
	sealed := w.manifest(ns, "sealed", w.values("token"))
	sealed.Spec.DeletionPolicy = v1beta1.DeletionRetain
	copied := sealed.DeepCopy()
	kept := w.awaitReady(w.create(sealed), 1)
	w.gone(kept)
	if back := w.awaitReady(w.create(copied), 1); back.Status.CredentialID != kept.Status.CredentialID {
		t.Error("the same manifest has another entry")
	}
}

func (w *world) testFormer(t *testing.T) {
	w, ns := w.in(t)
	w.kubectl("apply", "-k", "../config/admission")
	first, values := w.made(generated(ns, "pg"))
	w.gone(first)
	other := generated(ns, "pg")
	other.Spec.Target.Labels = map[string]string{"where": "elsewhere"}
	sc := w.checkStalled(w.create(other), v1beta1.ReasonFormerValues, first.Status.CredentialID, "adoptFrom")
	if sc.Status.CredentialID != "" {
		t.Error("it has an entry")
	}
	if err := w.admin.Get(t.Context(), client.ObjectKey{Namespace: ns, Name: "pg"}, new(corev1.Secret)); !apierrors.IsNotFound(err) {
		t.Errorf("its target exists: %v", err)
	}
	sc, _ = w.awaitTarget(w.change(sc, func(sc *v1beta1.SealedCredential) {
		sc.Spec.AdoptFrom = &v1beta1.AdoptFrom{CredentialID: first.Status.CredentialID}
	}), 1, values)
	w.checkHistory(sc, audit.CredentialSealed, audit.CredentialReleased, audit.CredentialAdopted)

	// The last accepted form counts, also when it came without a new version.
	sc = w.awaitThat(w.change(sc, func(sc *v1beta1.SealedCredential) {
		sc.Spec.AdoptFrom, sc.Spec.Target.Labels = nil, map[string]string{"where": "third"}
	}),
		"the third form", func(sc *v1beta1.SealedCredential) bool {
			return sc.Status.ObservedGeneration == sc.Generation && meta.IsStatusConditionTrue(sc.Status.Conditions, v1beta1.ConditionTargetSynced)
		})
	w.gone(sc)
	second := generated(ns, "pg")
	second.Spec.Target.Labels = map[string]string{"where": "elsewhere"}
	w.gone(w.checkStalled(w.create(second), v1beta1.ReasonFormerValues))
	third := generated(ns, "pg")
	third.Spec.Target.Labels = map[string]string{"where": "third"}
	sc, _ = w.awaitTarget(w.create(third), 1, values)
	w.gone(sc)

	// New values are a choice too, and leave the entry alone.
	fourth := generated(ns, "pg")
	fourth.Spec.Target, fourth.Spec.AdoptFrom = nil, &v1beta1.AdoptFrom{NewValues: true}
	fresh := w.awaitReady(w.create(fourth), 1)
	if fresh.Status.CredentialID == first.Status.CredentialID {
		t.Error("it went on with the former entry")
	}
	// An object with an entry does not change over to another one.
	w.checkStalled(w.change(fresh, func(sc *v1beta1.SealedCredential) {
		sc.Spec.AdoptFrom = &v1beta1.AdoptFrom{CredentialID: first.Status.CredentialID}
	}), v1beta1.ReasonFormerValues, "of its own")
	// Somebody deletes the entry: nothing is left to ask about.
	must(t, w.vault.Delete(t.Context(), w.tenant(ns), first.Status.CredentialID))
}

// testBound has objects of the same form go on with kept values, and then change the form: in two
// steps too, those values get nowhere else unasked.
func (w *world) testBound(t *testing.T) {
	w, ns := w.in(t)
	w.kubectl("apply", "-k", "../config/admission")
	again := func(sc *v1beta1.SealedCredential) (*v1beta1.SealedCredential, map[string]string) {
		t.Helper()
		copied := sc.DeepCopy()
		first, values := w.made(sc)
		w.gone(first)
		back, _ := w.awaitTarget(w.create(copied), 1, values)
		if back.Status.CredentialID != first.Status.CredentialID {
			t.Fatalf("%s does not go on with its entry", sc.Name)
		}
		return back, values
	}
	// The name of a target cannot be changed, but a target can be removed and given again.
	changed := func(sc *v1beta1.SealedCredential, change func(*v1beta1.SealedCredential)) *v1beta1.SealedCredential {
		w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.Target = nil })
		return w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.Target = &v1beta1.Target{}; change(sc) })
	}
	elsewhere := func(sc *v1beta1.SealedCredential) { sc.Spec.Target.Name = sc.Name + "-elsewhere" }
	absent := func(name string) {
		t.Helper()
		if err := w.admin.Get(t.Context(), client.ObjectKey{Namespace: ns, Name: name}, new(corev1.Secret)); !apierrors.IsNotFound(err) {
			t.Errorf("the Secret %s exists: %v", name, err)
		}
	}

	// A changed target, its labels, another source and a Secret that hands over only half of it are
	// one answer. The last accepted target stays.
	two := generated(ns, "pg")
	two.Spec.Generate = append(two.Spec.Generate, v1beta1.Generator{Key: "token", Random: &v1beta1.Random{}})
	spec := two.Spec
	sc, values := again(two)
	mine := w.secret(ns, "mine", map[string]string{v1beta1.AnnotationAdopt: "pg"}, map[string]string{"password": "known"})
	for what, change := range map[string]func(*v1beta1.SealedCredential){
		"target": elsewhere,
		"labels": func(sc *v1beta1.SealedCredential) { sc.Spec.Target.Labels = map[string]string{"copy": "to-all"} },
		"keys": func(sc *v1beta1.SealedCredential) {
			sc.Spec.Target.Keys = []v1beta1.TargetKey{{To: "PGPASSWORD", From: "password"}}
		},
		"source": func(sc *v1beta1.SealedCredential) {
			sc.Spec.Generate = append(sc.Spec.Generate, v1beta1.Generator{Key: "more", Random: &v1beta1.Random{}})
		},
		"given half": func(sc *v1beta1.SealedCredential) { sc.Spec.Target.Name = "mine" },
		"no target":  func(sc *v1beta1.SealedCredential) { sc.Spec.Target = nil },
		"with the next version": func(sc *v1beta1.SealedCredential) {
			elsewhere(sc)
			sc.Spec.TTLDays, sc.Spec.Rotation = 20, &v1beta1.Rotation{Trigger: "now"}
		},
	} {
		sc = w.checkStalled(changed(sc, func(sc *v1beta1.SealedCredential) { sc.Spec = *spec.DeepCopy(); change(sc) }),
			v1beta1.ReasonFormerValues, sc.Status.CredentialID, "adoptFrom")
		target := new(corev1.Secret)
		must(t, w.admin.Get(t.Context(), client.ObjectKey{Namespace: ns, Name: "pg"}, target))
		if string(target.Data["password"]) != values["password"] {
			t.Errorf("%s: the last accepted target does not have the values any more", what)
		}
	}
	absent("pg-elsewhere")
	now := new(corev1.Secret)
	if must(t, w.admin.Get(t.Context(), client.ObjectKeyFromObject(mine), now)); now.ResourceVersion != mine.ResourceVersion {
		t.Error("the Secret that hands over one value was written")
	}
	// What is not accepted leaves no form: neither deleted nor made again does it get the values.
	sc = w.checkStalled(changed(sc, func(sc *v1beta1.SealedCredential) { sc.Spec = *spec.DeepCopy(); elsewhere(sc) }), v1beta1.ReasonFormerValues)
	w.gone(sc)
	moved := generated(ns, "pg")
	moved.Spec = *spec.DeepCopy()
	elsewhere(moved)
	w.gone(w.checkStalled(w.create(moved), v1beta1.ReasonFormerValues))
	back := generated(ns, "pg")
	back.Spec = *spec.DeepCopy()
	sc = w.awaitThat(w.create(back), "the same object made again", func(sc *v1beta1.SealedCredential) bool {
		return meta.IsStatusConditionTrue(sc.Status.Conditions, v1beta1.ConditionTargetSynced)
	})
	sc, _ = w.awaitTarget(sc, sc.Status.Version, values)

	// Whoever has the verb frees it, for good.
	sc, _ = w.awaitTarget(changed(sc, func(sc *v1beta1.SealedCredential) {
		elsewhere(sc)
		sc.Spec.AdoptFrom = &v1beta1.AdoptFrom{CredentialID: sc.Status.CredentialID}
	}), sc.Status.Version, values)
	if got := w.history(ns, sc.Status.CredentialID); got[len(got)-1] != string(audit.CredentialAdopted) {
		t.Errorf("freed, the log has %v", got)
	}
	w.awaitTarget(changed(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.AdoptFrom, sc.Spec.Target.Name = nil, "third" }), sc.Status.Version, values)

	// New keys are the same values; new values are the object's own.
	sc, values = again(generated(ns, "rotated"))
	sc, _ = w.awaitTarget(w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.Rotation = &v1beta1.Rotation{Trigger: "1"} }), 2, values)
	sc = w.checkStalled(changed(sc, elsewhere), v1beta1.ReasonFormerValues)
	sc, _ = w.awaitTarget(changed(sc, func(*v1beta1.SealedCredential) {}), 2, values)
	sc = w.awaitReady(w.change(sc, func(sc *v1beta1.SealedCredential) {
		sc.Spec.Rotation = &v1beta1.Rotation{Trigger: "2", Policy: v1beta1.RotationRegenerate}
	}), 3)
	fresh := w.unsealed(sc)
	if fresh["password"] == values["password"] {
		t.Fatal("the values are the same")
	}
	w.awaitTarget(changed(sc, elsewhere), 3, fresh)

	// Values that the object brings itself are not a previous object's.
	values = w.values("token")
	sealed := w.manifest(ns, "sealed", values)
	sealed.Spec.DeletionPolicy, sealed.Spec.Target = v1beta1.DeletionRetain, &v1beta1.Target{}
	sc, _ = again(sealed)
	sc, _ = w.awaitTarget(changed(sc, elsewhere), 2, values)
	w.awaitTarget(changed(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.Target.Name = "sealed-third" }), 2, values)

	imported := object(ns, "imp")
	imported.Spec.ValuesFrom = &v1beta1.ValuesFrom{SecretRef: v1beta1.SecretReference{Name: "source"}, DeleteAfterImport: true}
	imported.Spec.DeletionPolicy, imported.Spec.Target = v1beta1.DeletionRetain, &v1beta1.Target{}
	values = w.values("token")
	w.secret(ns, "source", map[string]string{v1beta1.AnnotationImport: "imp"}, values)
	sc, _ = again(imported)
	sc = w.checkStalled(changed(sc, elsewhere), v1beta1.ReasonFormerValues, sc.Status.CredentialID)
	absent("imp-elsewhere")
	w.secret(ns, "source", map[string]string{v1beta1.AnnotationImport: "imp"}, values)
	w.clock.Advance(2 * time.Minute)
	w.awaitTarget(sc, 2, values)
}

func (w *world) testAdoptVerb(t *testing.T) {
	w, ns := w.in(t)
	w.kubectl("delete", "-k", "../config/admission", "--ignore-not-found")
	first, values := w.made(generated(ns, "pg"))
	w.gone(first)
	sc := generated(ns, "pg")
	sc.Spec.Target.Labels, sc.Spec.AdoptFrom = map[string]string{"a": "b"}, &v1beta1.AdoptFrom{CredentialID: first.Status.CredentialID}
	stalled := w.checkStalled(w.create(sc), v1beta1.ReasonFormerValues, "does not check who sets it", "latticekeep-adopt")

	w.kubectl("apply", "-k", "../config/admission")
	w.kubectl("create", "role", "developer", "-n", ns, "--verb=create,update,patch,delete,get", "--resource=sealedcredentials.latticekeep.dev")
	w.kubectl("create", "rolebinding", "developer", "-n", ns, "--role=developer", "--user=dev")
	kubeconfig, err := w.plane.KubeconfigFor("dev")
	must(t, err)
	cfg, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	must(t, err)
	dev, err := client.New(cfg, client.Options{Scheme: w.admin.Scheme()})
	must(t, err)
	try := generated(ns, "another")
	try.Spec.AdoptFrom = &v1beta1.AdoptFrom{CredentialID: first.Status.CredentialID}
	// The policy takes effect a moment after it was made.
	refused := func(what string, do func() error) {
		t.Helper()
		deadline := time.Now().Add(patience)
		for {
			err := do()
			if apierrors.IsForbidden(err) && strings.Contains(err.Error(), "verb adopt") {
				return
			}
			if time.Now().After(deadline) {
				t.Fatalf("%s without the verb: %v", what, err)
			}
		}
	}
	refused("creating", func() error { return dev.Create(t.Context(), try.DeepCopy(), client.DryRunAll) })
	plain := generated(ns, "plain")
	must(t, dev.Create(t.Context(), plain))
	refused("changing", func() error {
		return dev.Patch(t.Context(), plain, client.RawPatch("application/merge-patch+json", []byte(`{"spec":{"adoptFrom":{"credentialID":"`+first.Status.CredentialID+`"}}}`)), client.DryRunAll)
	})
	// An object that has the field already may be labelled. Its target may not be moved: it says where the values go.
	now := new(v1beta1.SealedCredential)
	must(t, dev.Get(t.Context(), client.ObjectKeyFromObject(stalled), now))
	now.Labels = map[string]string{"some": "label"}
	must(t, dev.Update(t.Context(), now))
	refused("moving the target", func() error {
		return dev.Patch(t.Context(), stalled.DeepCopy(), client.RawPatch("application/merge-patch+json", []byte(`{"spec":{"target":{"labels":{"c":"d"}}}}`)), client.DryRunAll)
	})
	// With the verb it is let in, and with the policy it counts.
	w.kubectl("create", "role", "adopter", "-n", ns, "--verb=adopt", "--resource=sealedcredentials.latticekeep.dev")
	w.kubectl("create", "rolebinding", "adopter", "-n", ns, "--role=adopter", "--user=dev")
	w.clock.Advance(2 * time.Minute)
	w.awaitTarget(stalled, 1, values)
}

func (w *world) testForeignEntry(t *testing.T) {
	w, ns := w.in(t)
	theirs := w.namespace()
	entry, _ := w.made(generated(theirs, "pg"))
	w.gone(entry)
	var said []string
	for name, id := range map[string]string{"foreign": entry.Status.CredentialID, "absent": authz.NewID("cred"), "taken": ""} {
		sc := generated(ns, name)
		if name == "taken" {
			live, _ := w.made(generated(ns, "live"))
			id = live.Status.CredentialID
		}
		sc.Spec.AdoptFrom = &v1beta1.AdoptFrom{CredentialID: id}
		sc = w.checkStalled(w.create(sc), v1beta1.ReasonFormerValues, "spec.adoptFrom.credentialID")
		said = append(said, meta.FindStatusCondition(sc.Status.Conditions, v1beta1.ConditionStalled).Message)
		if sc.Status.CredentialID != "" {
			t.Errorf("%s: it has an entry", name)
		}
	}
	if said[0] != said[1] || said[1] != said[2] {
		t.Errorf("the answers tell them apart: %q", said)
	}
}

func (w *world) testFormerSecret(t *testing.T) {
	w, ns := w.in(t)
	for name, keys := range map[string][]v1beta1.TargetKey{
		"plain": nil, "mapped": {{To: "PGPASSWORD", From: "password"}, {To: "url", Template: "postgres://app:$(password)@db"}},
	} {
		sc := generated(ns, name)
		sc.Spec.DeletionPolicy, sc.Spec.Target.DeletionPolicy, sc.Spec.Target.Keys = v1beta1.DeletionDelete, v1beta1.DeletionRetain, keys
		again := sc.DeepCopy()
		first := w.awaitReady(w.create(sc), 1)
		values := w.unsealed(first)
		first = w.awaitThat(first, "its target", func(sc *v1beta1.SealedCredential) bool {
			return meta.IsStatusConditionTrue(sc.Status.Conditions, v1beta1.ConditionTargetSynced)
		})
		w.gone(first)
		kept := new(corev1.Secret)
		key := client.ObjectKey{Namespace: ns, Name: name}
		must(t, w.admin.Get(t.Context(), key, kept))

		stalled := w.checkStalled(w.create(again), v1beta1.ReasonFormerValues, name, "latticekeep.dev/adopt="+name)
		now := new(corev1.Secret)
		must(t, w.admin.Get(t.Context(), key, now))
		if now.ResourceVersion != kept.ResourceVersion || stalled.Status.CredentialID != "" {
			t.Errorf("%s: the Secret was written, or values were generated for nothing", name)
		}
		now.Annotations[v1beta1.AnnotationAdopt] = name
		must(t, w.admin.Update(t.Context(), now))
		w.clock.Advance(2 * time.Minute)
		back := w.awaitReady(stalled, 1)
		w.checkUnseals(back, values)
		await(w, key, new(corev1.SecretList), "the Secret to be adopted", func(s *corev1.Secret) bool {
			return s.Annotations[v1beta1.AnnotationOwner] == string(back.UID)
		})
	}
	// A Secret that was handed over comes before what the vault kept for another form.
	first, values := w.made(func() *v1beta1.SealedCredential {
		sc := generated(ns, "both")
		sc.Spec.Target.DeletionPolicy = v1beta1.DeletionRetain
		return sc
	}())
	w.gone(first)
	both := w.checkStalled(w.create(generated(ns, "both")), v1beta1.ReasonFormerValues, first.Status.CredentialID, "latticekeep.dev/adopt=both")
	kept := new(corev1.Secret)
	must(t, w.admin.Get(t.Context(), client.ObjectKeyFromObject(first), kept))
	kept.Annotations[v1beta1.AnnotationAdopt] = "both"
	must(t, w.admin.Update(t.Context(), kept))
	w.clock.Advance(2 * time.Minute)
	both, _ = w.awaitTarget(both, 1, values)
	if both.Status.CredentialID == first.Status.CredentialID {
		t.Error("it went on with the entry of another form")
	}
	// Values that stand only within a template cannot be taken back.
	sc := generated(ns, "template")
	sc.Spec.DeletionPolicy, sc.Spec.Target.DeletionPolicy = v1beta1.DeletionDelete, v1beta1.DeletionRetain
	sc.Spec.Target.Keys = []v1beta1.TargetKey{{To: "url", Template: "postgres://app:$(password)@db"}}
	w.secret(ns, "template", map[string]string{v1beta1.AnnotationOwner: "former", v1beta1.AnnotationAdopt: "template"}, map[string]string{"url": "postgres://app:old@db"})
	w.checkStalled(w.create(sc), v1beta1.ReasonFormerValues, "password", "spec.target.keys")

	// A Secret that was never the operator's is handed over with its values too, and what it lacks is made.
	w.secret(ns, "theirs", map[string]string{v1beta1.AnnotationAdopt: "theirs"}, map[string]string{"password": "in use", "other": "goes"})
	two := generated(ns, "theirs")
	two.Spec.Generate = append(two.Spec.Generate, v1beta1.Generator{Key: "token", Random: &v1beta1.Random{}})
	if values := w.unsealed(w.awaitReady(w.create(two), 1)); values["password"] != "in use" || len(values["token"]) != 32 {
		t.Errorf("handed over with %d values, the password the same: %v", len(values), values["password"] == "in use")
	}
}

// testWithoutFinalizer has objects go without the operator, and come back before the sweeper has
// found their entries.
func (w *world) testWithoutFinalizer(t *testing.T) {
	w, ns := w.in(t)
	for _, name := range []string{"away", "running"} {
		first, values := w.made(generated(ns, name))
		if name == "away" {
			w.halt()
		}
		w.vanish(first)
		must(t, client.IgnoreNotFound(w.admin.Delete(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name}})))
		w.create(generated(ns, name))
		if name == "away" {
			w.start(nil)
		}
		again, _ := w.awaitTarget(first, 1, values)
		if again.UID == first.UID || again.Status.CredentialID != first.Status.CredentialID {
			t.Errorf("%s: it has another entry", name)
		}
	}
}

// vanish removes the finalizer of an object by hand, and the object with it.
func (w *world) vanish(sc *v1beta1.SealedCredential) {
	w.t.Helper()
	must(w.t, w.admin.Delete(w.t.Context(), sc, client.PropagationPolicy(metav1.DeletePropagationBackground)))
	for {
		now := new(v1beta1.SealedCredential)
		err := w.admin.Get(w.t.Context(), client.ObjectKeyFromObject(sc), now)
		if apierrors.IsNotFound(err) {
			return
		}
		must(w.t, err)
		now.Finalizers = nil
		if err := w.admin.Update(w.t.Context(), now); !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
			must(w.t, err)
		}
	}
}

func (w *world) testNewerSecret(t *testing.T) {
	w, ns := w.in(t)
	for version, newer := range map[string]bool{"5": true, "1": true, "0": false} { // the vault has version 1
		name := "v" + version
		first, values := w.made(generated(ns, name))
		w.gone(first)
		s := w.secret(ns, name, map[string]string{v1beta1.AnnotationOwner: string(first.UID), v1beta1.AnnotationVersion: version}, map[string]string{"password": "another"})
		sc := w.create(generated(ns, name))
		if !newer {
			w.awaitTarget(sc, 1, values)
			continue
		}
		sc = w.checkStalled(sc, v1beta1.ReasonFormerValues, "may be newer", "latticekeep.dev/adopt="+name)
		now := new(corev1.Secret)
		must(t, w.admin.Get(t.Context(), client.ObjectKeyFromObject(s), now))
		if string(now.Data["password"]) != "another" {
			t.Fatal("it was overwritten")
		}
		now.Annotations[v1beta1.AnnotationAdopt] = name
		must(t, w.admin.Update(t.Context(), now))
		w.clock.Advance(2 * time.Minute)
		sc, _ = w.awaitTarget(sc, 2, map[string]string{"password": "another"})
		if sc.Status.CredentialID != first.Status.CredentialID {
			t.Error("it has another entry")
		}
	}
}

func (w *world) testMovedTarget(t *testing.T) {
	w, ns := w.in(t)
	sc, _ := w.made(generated(ns, "pg"))
	w.secret(ns, "old", map[string]string{v1beta1.AnnotationOwner: "a previous one", v1beta1.AnnotationAdopt: "pg"}, map[string]string{"password": "only copy"})
	release := w.wire.hold("secrets") // the operator sees both changes as one
	w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.Target = nil })
	sc = w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.Target = &v1beta1.Target{Name: "old"} })
	release()
	sc = w.awaitThat(sc, "the target to move", func(sc *v1beta1.SealedCredential) bool {
		return sc.Status.Target != nil && sc.Status.Target.Name == "old"
	})
	w.checkUnseals(sc, map[string]string{"password": "only copy"})
}

// remake deletes a namespace with everything in it, as the namespace controller does, and makes it
// again.
func (w *world) remake(ns string) {
	w.t.Helper()
	must(w.t, w.admin.DeleteAllOf(w.t.Context(), new(corev1.Secret), client.InNamespace(ns)))
	must(w.t, w.admin.Delete(w.t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}}))
	w.remakeNamespace(ns)
}

func (w *world) testMappedNamespace(t *testing.T) {
	w, ns := w.in(t)
	former := w.tenant(ns)
	first, values := w.made(generated(ns, "pg"))
	w.gone(first)
	given := w.values("token")
	manifest := w.manifest(ns, "sealed", given)
	manifest.Spec.Target = &v1beta1.Target{}
	sealed, _ := w.awaitTarget(w.create(manifest.DeepCopy()), 1, given)
	w.gone(sealed)
	w.remake(ns)
	sc := w.checkStalled(w.create(generated(ns, "pg")), v1beta1.ReasonFormerValues, "kubernetes.namespacesByUID")
	// Sealed values come with the manifest, and only the Secret that Velero put back stands in the way.
	s := w.secret(ns, "sealed", map[string]string{v1beta1.AnnotationOwner: string(sealed.UID)}, given)
	sealed = w.checkStalled(w.create(manifest.DeepCopy()), v1beta1.ReasonTargetConflict, "latticekeep.dev/adopt=sealed")
	s.Annotations[v1beta1.AnnotationAdopt] = "sealed"
	must(t, w.admin.Update(t.Context(), s))
	w.clock.Advance(2 * time.Minute)
	w.awaitTarget(sealed, 1, given)
	if message := meta.FindStatusCondition(sc.Status.Conditions, v1beta1.ConditionStalled).Message; strings.Contains(message, "ten_") || strings.Contains(message, "cred_") {
		t.Errorf("the condition names what belongs to the former namespace: %s", message)
	}
	if !strings.Contains(w.logs.String(), string(former.Tenant)) {
		t.Error("the log does not name the former tenant")
	}
	interim := w.tenant(ns)
	if interim.Tenant == former.Tenant {
		t.Fatal("the namespace that was made again is the same tenant")
	}
	w.halt()
	w.tenants.UIDs = map[string]authz.TenantID{w.namespaceUID(ns): former.Tenant}
	w.start(nil)
	sc, _ = w.awaitTarget(sc, 1, values)
	if sc.Status.CredentialID != first.Status.CredentialID || w.tenant(ns).Tenant != former.Tenant {
		t.Error("it does not go on with the former tenant's entry")
	}
	for _, p := range []authz.Principal{former, interim} {
		entries, _, err := reader.New(w.log, guard.New(w.log)).Query(t.Context(), p, reader.Query{Limit: 1000})
		must(t, err)
		mapped := 0
		for _, e := range entries {
			if e.EventType == audit.NamespaceMapped && e.Attributes["namespace_uid"] == w.namespaceUID(ns) {
				mapped++
			}
		}
		if want := map[authz.TenantID]int{former.Tenant: 1, interim.Tenant: 2}[p.Tenant]; mapped != want {
			t.Errorf("%s has %d entries of this namespace, want %d", p.Tenant, mapped, want)
		}
	}
}

func (w *world) testFormerImport(t *testing.T) {
	w, ns := w.in(t)
	w.kubectl("apply", "-k", "../config/admission")
	imported := func() *v1beta1.SealedCredential {
		sc := object(ns, "imp")
		sc.Spec.ValuesFrom = &v1beta1.ValuesFrom{SecretRef: v1beta1.SecretReference{Name: "source"}, DeleteAfterImport: true}
		sc.Spec.DeletionPolicy = v1beta1.DeletionRetain
		return sc
	}
	w.secret(ns, "source", map[string]string{v1beta1.AnnotationImport: "imp"}, map[string]string{"token": "canary-imported"})
	first := w.awaitReady(w.create(imported()), 1)
	w.gone(first)
	back := w.awaitReady(w.create(imported()), 1)
	w.checkUnseals(back, map[string]string{"token": "canary-imported"})
	w.gone(back)
	other := imported()
	other.Spec.Target = &v1beta1.Target{}
	w.checkStalled(w.create(other), v1beta1.ReasonFormerValues, first.Status.CredentialID)
}

// moved is what a cluster had before its store was moved.
type moved struct {
	at             time.Time
	dir            string
	ns             string
	tenant         authz.TenantID
	owned, waiting map[string]string // values of objects pg and waits
	given          map[string]string // values of objects sealed and imported
	sealed         *v1beta1.SealedCredential
	entry          string // id of the entry of object sealed
	uid            string // UID of object waits
	sealedUID      string
}

// imported returns a manifest whose values come from a Secret that is then gone.
func imported(ns string) *v1beta1.SealedCredential {
	sc := object(ns, "imported")
	sc.Spec.ValuesFrom = &v1beta1.ValuesFrom{SecretRef: v1beta1.SecretReference{Name: "source"}, DeleteAfterImport: true}
	return sc
}

func (w *world) beforeMove() moved {
	w.t.Helper()
	ns := w.namespace()
	_, values := w.made(generated(ns, "pg"))
	waits, waiting := w.made(generated(ns, "waits"))
	given := w.values("token")
	sealed := w.manifest(ns, "sealed", given)
	sealed.Spec.Target = &v1beta1.Target{}
	manifest := sealed.DeepCopy()
	sealed, _ = w.awaitTarget(w.create(sealed), 1, given)
	w.secret(ns, "source", map[string]string{v1beta1.AnnotationImport: "imported"}, given)
	w.awaitReady(w.create(imported(ns)), 1)
	return moved{
		at: w.clock.Now(), dir: w.dir, ns: ns, tenant: w.tenant(ns).Tenant, owned: values, waiting: waiting, given: given,
		sealed: manifest, entry: sealed.Status.CredentialID, uid: string(waits.UID), sealedUID: string(sealed.UID),
	}
}

// testMoved serves a copy of the store in another cluster, as after a disaster. Its objects are
// still owned by those of the cluster that is gone.
func testMoved(t *testing.T, from moved) {
	w := newWorld(t)
	w.clock.Advance(from.at.Sub(w.clock.Now()))
	for _, file := range []string{"store.db", "kms.key"} {
		b, err := os.ReadFile(filepath.Join(from.dir, file))
		must(t, err)
		must(t, os.RemoveAll(filepath.Join(w.dir, file)))
		must(t, os.WriteFile(filepath.Join(w.dir, file), b, 0o600))
	}
	must(t, w.admin.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: from.ns}}))
	w.start(nil)
	sc := w.checkStalled(w.create(generated(from.ns, "pg")), v1beta1.ReasonFormerValues, "kubernetes.namespacesByUID")
	w.checkStalled(w.create(imported(from.ns)), v1beta1.ReasonFormerValues, "kubernetes.namespacesByUID")
	w.secret(from.ns, "sealed", map[string]string{v1beta1.AnnotationOwner: from.sealedUID}, from.given)
	sealed := w.checkStalled(w.create(from.sealed.DeepCopy()), v1beta1.ReasonTargetConflict)
	w.halt()
	w.tenants.UIDs = map[string]authz.TenantID{w.namespaceUID(from.ns): from.tenant}
	w.start(nil)
	sc, _ = w.awaitTarget(sc, 1, from.owned)
	w.checkUnseals(w.awaitReady(imported(from.ns), 1), from.given)
	if sealed, _ = w.awaitTarget(sealed, 1, from.given); sealed.Status.CredentialID != from.entry {
		t.Error("the sealed object does not go on with its entry")
	}
	w.checkUnseals(sc, from.owned)
	// Velero puts the Secrets back first, with the mark of the former object.
	w.secret(from.ns, "waits", map[string]string{v1beta1.AnnotationOwner: from.uid}, from.waiting)
	w.awaitTarget(w.create(generated(from.ns, "waits")), 1, from.waiting)
	_, previous, err := w.vault.Objects(t.Context(), w.namespaceUID("kube-system"))
	must(t, err)
	for _, f := range previous {
		if f.Name == "pg" && f.Namespace == from.ns {
			t.Error("the object of the former cluster still owns the entry")
		}
	}
	w.halt()
	w.testChain(t)
}

// testNewVault puts Secrets and manifests into another cluster whose vault is new: by Velero's rules,
// Secrets first, and by manifests alone.
func testNewVault(t *testing.T, from moved) {
	w := newWorld(t)
	w.clock.Advance(from.at.Sub(w.clock.Now()))
	must(t, w.admin.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: from.ns}}))
	w.start(nil)
	s := w.secret(from.ns, "waits", map[string]string{v1beta1.AnnotationOwner: from.uid, v1beta1.AnnotationVersion: "1"}, from.waiting)
	sc := w.checkStalled(w.create(generated(from.ns, "waits")), v1beta1.ReasonFormerValues, "the Secret waits")
	s.Annotations[v1beta1.AnnotationAdopt] = "waits"
	must(t, w.admin.Update(t.Context(), s))
	w.clock.Advance(2 * time.Minute)
	sc, _ = w.awaitTarget(sc, 1, from.waiting)
	w.checkUnseals(sc, from.waiting)

	if _, values := w.made(generated(from.ns, "pg")); values["password"] == from.owned["password"] {
		t.Error("a new vault knows a value of the former one")
	}
	w.checkStalled(w.create(imported(from.ns)), v1beta1.ReasonSourceUnavailable, v1beta1.AnnotationImport)
	w.checkStalled(w.create(from.sealed.DeepCopy()), v1beta1.ReasonInvalidSealed, "spec.sealed.keyID")
}
