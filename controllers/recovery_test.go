package controllers_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/sealing"
	"github.com/latticekeep/latticekeep/internal/vault"
)

// targeted returns a sealed object with a target.
func (w *world) targeted(namespace, name string, values map[string]string) *v1beta1.SealedCredential {
	sc := w.manifest(namespace, name, values)
	sc.Spec.Target = &v1beta1.Target{}
	return sc
}

// unseals counts the audit entries of successful and failed reads of an object's values.
func (w *world) unseals(sc *v1beta1.SealedCredential) (n int) {
	w.t.Helper()
	entries, _, err := reader.New(w.log, guard.New(w.log)).Query(w.t.Context(), w.tenant(sc.Namespace), reader.Query{Limit: 1000})
	must(w.t, err)
	for _, e := range entries {
		if e.EventType == audit.CredentialUnsealed && e.Actor.ID == string(sc.UID) {
			n++
		}
	}
	return n
}

// forbidSecrets makes the API server refuse new Secrets, with a quota as its controller would write
// it.
func (w *world) forbidSecrets(namespace string) *corev1.ResourceQuota {
	w.t.Helper()
	none := corev1.ResourceList{corev1.ResourceSecrets: resource.MustParse("0")}
	q := &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "none"}, Spec: corev1.ResourceQuotaSpec{Hard: none}}
	must(w.t, w.admin.Create(w.t.Context(), q))
	q.Status = corev1.ResourceQuotaStatus{Hard: none, Used: none}
	must(w.t, w.admin.Status().Update(w.t.Context(), q))
	w.awaitVerdict(namespace, true)
	return q
}

// awaitVerdict waits until the API server refuses a new Secret, or accepts it. The API server reads
// quotas and policies from caches.
func (w *world) awaitVerdict(namespace string, refused bool) {
	w.t.Helper()
	for {
		must(w.t, w.t.Context().Err())
		probe := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "probe"}}
		if err := w.admin.Create(w.t.Context(), probe, client.DryRunAll); apierrors.IsForbidden(err) == refused {
			return
		}
	}
}

func unstructuredOf(apiVersion, kind, name string, spec map[string]any) *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": apiVersion, "kind": kind, "metadata": map[string]any{"name": name}, "spec": spec,
	}}
}

// testMended breaks an object in each way that has a condition, applies the remedy, and expects the
// object to become ready. The operator keeps running.
func (w *world) testMended(t *testing.T) {
	w, ns := w.in(t)
	w.halt()
	w.policy = sealing.Policy{MaxTTLDays: 400}
	w.start(nil)
	defer func() { w.policy = sealing.Policy{} }()

	type broken struct {
		sc     *v1beta1.SealedCredential
		reason string
		mend   func(sc *v1beta1.SealedCredential)
	}
	var all []broken
	add := func(sc *v1beta1.SealedCredential, reason string, mend func(*v1beta1.SealedCredential)) {
		all = append(all, broken{sc, reason, mend})
	}
	spec := func(change func(*v1beta1.SealedCredential)) func(*v1beta1.SealedCredential) {
		return func(sc *v1beta1.SealedCredential) { w.change(sc, change) }
	}
	name := func(i string) string { return strings.ToLower(i) }
	values := w.values("token")

	sc := w.manifest(ns, name(v1beta1.ReasonInvalidSealed), values)
	good := sc.Spec.Sealed.DeepCopy()
	sc.Spec.Sealed.KeyID = strings.Repeat("0", 64)
	add(w.create(sc), v1beta1.ReasonInvalidSealed, spec(func(sc *v1beta1.SealedCredential) { sc.Spec.Sealed = good }))

	sc = object(ns, name(v1beta1.ReasonInvalidSpec))
	sc.Spec.Generate = []v1beta1.Generator{
		{Key: "a", KeyPair: &v1beta1.KeyPair{Algorithm: "Ed25519", PublicKeyName: "b"}}, {Key: "b", Random: &v1beta1.Random{}},
	}
	add(w.create(sc), v1beta1.ReasonInvalidSpec, spec(func(sc *v1beta1.SealedCredential) { sc.Spec.Generate[0].KeyPair.PublicKeyName = "c" }))

	sc = w.manifest(ns, name(v1beta1.ReasonPolicy), values)
	sc.Spec.TTLDays = 401
	add(w.create(sc), v1beta1.ReasonPolicy, spec(func(sc *v1beta1.SealedCredential) { sc.Spec.TTLDays = 400 }))

	older := w.awaitReady(w.create(w.manifest(ns, name(v1beta1.ReasonOlderValue), values)), 1)
	first := older.Spec.Sealed.DeepCopy()
	w.clock.Advance(time.Minute)
	older = w.renew(older, "token")
	add(w.change(older, func(sc *v1beta1.SealedCredential) { sc.Spec.Sealed = first }), v1beta1.ReasonOlderValue,
		spec(func(sc *v1beta1.SealedCredential) { sc.Spec.Sealed.AllowOlder = true }))

	// The operator notices a remedy outside the object by itself.
	sc = object(ns, name(v1beta1.ReasonSourceUnavailable))
	sc.Spec.ValuesFrom = &v1beta1.ValuesFrom{SecretRef: v1beta1.SecretReference{Name: "plain"}}
	add(w.create(sc), v1beta1.ReasonSourceUnavailable, func(sc *v1beta1.SealedCredential) {
		w.secret(ns, "plain", map[string]string{"latticekeep.dev/import": sc.Name}, values)
	})
	sc = object(ns, "no-values")
	sc.Spec.ValuesFrom = &v1beta1.ValuesFrom{SecretRef: v1beta1.SecretReference{Name: "empty"}}
	empty := w.secret(ns, "empty", map[string]string{"latticekeep.dev/import": sc.Name}, nil)
	add(w.create(sc), v1beta1.ReasonInvalidSpec, func(*v1beta1.SealedCredential) {
		empty.StringData = values
		must(t, w.admin.Update(t.Context(), empty))
	})
	sc = object(ns, name(v1beta1.ReasonSourceLost))
	sc.Spec.Generate = []v1beta1.Generator{{Key: "token", Random: &v1beta1.Random{}}}
	sc = w.awaitReady(w.create(sc), 1)
	must(t, w.vault.Delete(t.Context(), authz.SystemPrincipal(w.tenant(ns).Tenant), sc.Status.CredentialID))
	w.nudge(sc)
	add(sc, v1beta1.ReasonSourceLost, spec(func(sc *v1beta1.SealedCredential) {
		sc.Spec.Rotation = &v1beta1.Rotation{Policy: v1beta1.RotationRegenerate, Trigger: "now"}
	}))

	foreign := w.secret(ns, "foreign", nil, values)
	add(w.create(w.targeted(ns, "foreign", values)), v1beta1.ReasonTargetConflict, func(*v1beta1.SealedCredential) {
		must(t, w.admin.Delete(t.Context(), foreign))
	})
	leaving := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "leaving", Finalizers: []string{"example.com/held"}}}
	must(t, w.admin.Create(t.Context(), leaving))
	must(t, w.admin.Delete(t.Context(), leaving))
	add(w.create(w.targeted(ns, "leaving", values)), v1beta1.ReasonTargetConflict, func(*v1beta1.SealedCredential) {
		must(t, w.admin.Get(t.Context(), client.ObjectKeyFromObject(leaving), leaving))
		leaving.Finalizers = nil
		must(t, w.admin.Update(t.Context(), leaving))
	})
	full := w.namespace()
	quota := w.forbidSecrets(full)
	add(w.create(w.targeted(full, "quota", values)), v1beta1.ReasonTargetConflict, func(*v1beta1.SealedCredential) {
		must(t, w.admin.Delete(t.Context(), quota))
		w.awaitVerdict(full, false)
	})
	strict := w.namespace()
	policy := unstructuredOf("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicy", strict, map[string]any{
		"matchConstraints": map[string]any{"resourceRules": []any{map[string]any{
			"apiGroups": []any{""}, "apiVersions": []any{"v1"}, "operations": []any{"CREATE"}, "resources": []any{"secrets"},
		}}},
		"validations": []any{map[string]any{"expression": "object.metadata.namespace != '" + strict + "'", "reason": "Forbidden"}},
	})
	binding := unstructuredOf("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicyBinding", strict,
		map[string]any{"policyName": strict, "validationActions": []any{"Deny"}})
	must(t, w.admin.Create(t.Context(), policy))
	must(t, w.admin.Create(t.Context(), binding))
	w.awaitVerdict(strict, true)
	add(w.create(w.targeted(strict, "policy", values)), v1beta1.ReasonTargetConflict, func(*v1beta1.SealedCredential) {
		must(t, w.admin.Delete(t.Context(), binding))
		w.awaitVerdict(strict, false)
	})
	sc = w.targeted(ns, name(v1beta1.ReasonInvalidTarget), values)
	sc.Spec.Target.Type = "kubernetes.io/ssh-auth"
	add(w.create(sc), v1beta1.ReasonInvalidTarget, spec(func(sc *v1beta1.SealedCredential) {
		sc.Spec.Target.Keys = []v1beta1.TargetKey{{To: "ssh-privatekey", From: "token"}}
	}))

	for i := range all {
		all[i].sc = w.awaitStalled(all[i].sc, all[i].reason)
		if stalledMessage(all[i].sc) == "" {
			t.Errorf("%s: the condition has no message", all[i].sc.Name)
		}
		all[i].mend(all[i].sc)
	}
	w.clock.Advance(time.Minute)
	for _, b := range all {
		w.awaitThat(b.sc, b.sc.Name+" to be ready", func(now *v1beta1.SealedCredential) bool {
			s := now.Status
			return meta.IsStatusConditionTrue(s.Conditions, v1beta1.ConditionReady) && len(s.Conditions) == 2+min(1, len(targetOf(now))) &&
				s.ObservedGeneration == now.Generation
		})
	}
	must(t, w.admin.Delete(t.Context(), policy))

	// A refused spec neither deletes nor changes the Secret that workloads read.
	kept := w.targeted(ns, "kept", values)
	kept, _ = w.awaitTarget(w.create(kept), 1, values)
	kept = w.awaitStalled(w.change(kept, func(sc *v1beta1.SealedCredential) {
		sc.Spec.Target, sc.Spec.Sealed = nil, sc.Spec.Sealed.DeepCopy()
		sc.Spec.Sealed.Scope = v1beta1.ScopeCluster
	}), v1beta1.ReasonInvalidSealed)
	kept = w.awaitStalled(w.change(kept, func(sc *v1beta1.SealedCredential) {
		sc.Spec.Target = &v1beta1.Target{Name: "elsewhere", Keys: []v1beta1.TargetKey{{To: "a", From: "token"}}}
		sc.Spec.Rotation = &v1beta1.Rotation{Trigger: "now"}
	}), v1beta1.ReasonInvalidSealed)
	s := new(corev1.Secret)
	must(t, w.admin.Get(t.Context(), client.ObjectKey{Namespace: ns, Name: "kept"}, s))
	if kept.Status.Version != 2 || string(s.Data["token"]) != values["token"] || len(s.Data) != 1 {
		t.Errorf("at version %d the Secret has %d keys", kept.Status.Version, len(s.Data))
	}
	w.awaitNoSecret(ns, "elsewhere")
	_, _ = w.awaitTarget(w.change(kept, func(sc *v1beta1.SealedCredential) { sc.Spec.Sealed.Scope = v1beta1.ScopeStrict }), 2, map[string]string{"a": values["token"]})
	w.awaitNoSecret(ns, "kept")

	// A changed generator together with a request for new values produces new values.
	sc = object(ns, "renewed")
	sc.Spec.Generate = []v1beta1.Generator{{Key: "token", Random: &v1beta1.Random{}}}
	sc.Spec.Rotation = &v1beta1.Rotation{Policy: v1beta1.RotationRegenerate}
	sc = w.awaitReady(w.create(sc), 1)
	leaked := w.unsealed(sc)["token"]
	sc = w.awaitReady(w.change(sc, func(sc *v1beta1.SealedCredential) {
		sc.Spec.Generate = append(sc.Spec.Generate, v1beta1.Generator{Key: "more", Random: &v1beta1.Random{}})
		sc.Spec.Rotation.Trigger = "leaked"
	}), 2)
	if made := w.unsealed(sc); len(made) != 2 || made["token"] == leaked {
		t.Error("a trigger that came with another generator left the values as they were")
	}

	// The vault is down while an object with a target is deleted: the object stays until its entry
	// is gone. A target whose policy becomes Retain at the last moment stays.
	one, _ := w.awaitTarget(w.create(w.targeted(ns, "one", values)), 1, values)
	two, _ := w.awaitTarget(w.create(w.targeted(ns, "two", values)), 1, values)
	w.store.down.Store(true)
	must(t, w.admin.Delete(t.Context(), one))
	two = w.change(two, func(sc *v1beta1.SealedCredential) { sc.Spec.Target.DeletionPolicy = v1beta1.DeletionRetain })
	must(t, w.admin.Delete(t.Context(), two))
	one = w.awaitThat(one, "the outage to be shown", reconcilingCondition(v1beta1.ReasonDeleting))
	w.awaitThat(two, "the outage to be shown", reconcilingCondition(v1beta1.ReasonDeleting))
	w.store.down.Store(false)
	w.awaitGone(one)
	w.awaitGone(two)
	w.awaitNoSecret(ns, "one")
	must(t, w.admin.Get(t.Context(), client.ObjectKey{Namespace: ns, Name: "two"}, s))
	if len(s.OwnerReferences) != 0 || string(s.Data["token"]) != values["token"] {
		t.Errorf("the Secret that was to stay is %+v", s.ObjectMeta)
	}
	for _, sc := range []*v1beta1.SealedCredential{one, two} {
		w.checkHistory(sc, audit.CredentialSealed, audit.CredentialDeleted)
	}
	w.halt()
	w.policy = sealing.Policy{}
	w.start(nil)
}

func targetOf(sc *v1beta1.SealedCredential) string {
	switch {
	case sc.Spec.Target == nil:
		return ""
	case sc.Spec.Target.Name != "":
		return sc.Spec.Target.Name
	}
	return sc.Name
}

// testDamage damages entries whose values are needed.
func (w *world) testDamage(t *testing.T) {
	w, ns := w.in(t)
	values := w.values("token")
	plain := w.secret(ns, "plain", map[string]string{"latticekeep.dev/import": "imported"}, values)
	imported := object(ns, "imported")
	imported.Spec.ValuesFrom = &v1beta1.ValuesFrom{SecretRef: v1beta1.SecretReference{Name: "plain"}}
	generated, delivered := object(ns, "generated"), object(ns, "delivered")
	generated.Spec.Generate = []v1beta1.Generator{{Key: "token", Random: &v1beta1.Random{}}}
	delivered.Spec.Generate, delivered.Spec.Target = generated.Spec.Generate, &v1beta1.Target{}
	sealed, s := w.awaitTarget(w.create(w.targeted(ns, "sealed", values)), 1, values)
	imported, generated, delivered = w.awaitReady(w.create(imported), 1), w.awaitReady(w.create(generated), 1), w.awaitReady(w.create(delivered), 1)
	must(t, w.admin.Delete(t.Context(), plain))
	for _, sc := range []*v1beta1.SealedCredential{sealed, imported, generated, delivered} {
		damage(w, sc)
	}

	// The object has the values, so the entry is stored again before the Secret is written.
	for _, name := range []string{s.Name, "delivered"} {
		must(t, w.admin.Delete(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name}}))
	}
	imported = w.change(imported, func(sc *v1beta1.SealedCredential) { sc.Spec.TTLDays = 30 })
	generated = w.change(generated, func(sc *v1beta1.SealedCredential) {
		sc.Spec.Generate = append(sc.Spec.Generate, v1beta1.Generator{Key: "more", Random: &v1beta1.Random{}})
	})
	w.clock.Advance(10 * time.Minute)
	sealed, _ = w.awaitTarget(sealed, 2, values)
	w.checkUnseals(sealed, values)

	// Nothing else has the values: one condition says so, and the operator checks again at the
	// usual interval.
	for _, sc := range []*v1beta1.SealedCredential{imported, generated, delivered} {
		w.awaitStalled(sc, v1beta1.ReasonSourceLost)
	}
	before := w.entries(ns)
	w.lookAgain(imported, generated, delivered)
	if n := w.entries(ns) - before; n > 3*3 { // two reconciles, and one that may have begun
		t.Errorf("%d audit entries of two looks at three damaged entries", n)
	}
	for _, sc := range []*v1beta1.SealedCredential{generated, delivered} {
		w.unsealed(w.awaitReady(w.change(sc, func(sc *v1beta1.SealedCredential) {
			sc.Spec.Rotation = &v1beta1.Rotation{Policy: v1beta1.RotationRegenerate, Trigger: "now"}
		}), 2))
	}
	w.secret(ns, "plain", map[string]string{"latticekeep.dev/import": "imported"}, values)
	w.clock.Advance(time.Minute)
	w.checkUnseals(w.awaitReady(imported, 2), values)
}

// entries counts the audit entries of a namespace's tenant, except those that the count itself
// makes.
func (w *world) entries(namespace string) (n int) {
	w.t.Helper()
	entries, _, err := reader.New(w.log, guard.New(w.log)).Query(w.t.Context(), w.tenant(namespace), reader.Query{Limit: 1000})
	must(w.t, err)
	for _, e := range entries {
		if e.EventType != audit.AuditRead {
			n++
		}
	}
	return n
}

// awaitAsTimePasses checks the object at each recheck interval until ok holds.
func (w *world) awaitAsTimePasses(sc *v1beta1.SealedCredential, ok func(*v1beta1.SealedCredential) bool) *v1beta1.SealedCredential {
	w.t.Helper()
	now := new(v1beta1.SealedCredential)
	for range 20 {
		must(w.t, w.admin.Get(w.t.Context(), client.ObjectKeyFromObject(sc), now))
		if ok(now) {
			return now
		}
		w.lookAgain(sc)
	}
	w.t.Fatalf("%s has been looked at in vain: %+v", sc.Name, now.Status)
	return nil
}

// testAnyOrder applies the changes to an object, to its target Secret and to another object's
// source Secret in random orders from a seed. Each order must end in the same state as the sorted
// one.
func (w *world) testAnyOrder(t *testing.T) {
	w, _ = w.in(t)
	type run struct {
		ns            string
		app, imported *v1beta1.SealedCredential
		values, plain map[string]string
		shuffled      []int
	}
	var runs []*run
	for seed := range uint64(6) {
		r := &run{ns: w.namespace(), values: w.values("token"), plain: w.values("token")}
		runs = append(runs, r)
		get := func(o client.Object) bool {
			return client.IgnoreNotFound(w.admin.Get(t.Context(), client.ObjectKeyFromObject(o), o)) == nil && o.GetUID() != ""
		}
		secret := func(name string) *corev1.Secret {
			return &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: r.ns, Name: name}}
		}
		edit := func(name string, change func(*corev1.Secret)) func() {
			return func() {
				for s := secret(name); get(s); s = secret(name) {
					change(s)
					if err := w.admin.Update(t.Context(), s); !apierrors.IsConflict(err) {
						must(t, client.IgnoreNotFound(err))
						return
					}
				}
			}
		}
		deleteIt := func(o client.Object) { must(t, client.IgnoreNotFound(w.admin.Delete(t.Context(), o))) }
		create := func(s *corev1.Secret, values map[string]string) {
			s.StringData = values
			if err := w.admin.Create(t.Context(), s); !apierrors.IsAlreadyExists(err) {
				must(t, err)
			}
		}
		object1 := w.targeted(r.ns, "app", w.values("token"))
		object2 := w.targeted(r.ns, "app", r.values)
		object2.Spec.TTLDays = 30
		tracks := [][]func(){
			{
				func() { w.create(object1.DeepCopy()) },
				func() { w.change(object1, func(sc *v1beta1.SealedCredential) { sc.Spec.TTLDays = 10 }) },
				func() { w.change(object1, func(sc *v1beta1.SealedCredential) { sc.Spec.Target = nil }) },
				func() { deleteIt(object1); w.awaitGone(object1) },
				func() { r.app = w.create(object2.DeepCopy()) },
				func() {
					r.app = w.change(object2, func(sc *v1beta1.SealedCredential) {
						sc.Spec.Rotation = &v1beta1.Rotation{MaxValueAge: &metav1.Duration{Duration: day}}
					})
				},
			},
			{
				func() { create(secret("app"), w.values("theirs")) },
				edit("app", func(s *corev1.Secret) { s.Annotations = map[string]string{"latticekeep.dev/adopt": "app"} }),
				edit("app", func(s *corev1.Secret) { s.StringData = map[string]string{"token": "drift"} }),
				func() { deleteIt(secret("app")) },
			},
			{
				func() {
					s := secret("plain")
					s.Annotations = map[string]string{"latticekeep.dev/import": "imported"}
					create(s, w.values("token"))
				},
				edit("plain", func(s *corev1.Secret) { s.StringData = r.plain }),
			},
			{func() {
				r.imported = object(r.ns, "imported")
				r.imported.Spec.ValuesFrom = &v1beta1.ValuesFrom{SecretRef: v1beta1.SecretReference{Name: "plain"}}
				w.create(r.imported)
			}},
		}
		random := rand.New(rand.NewPCG(seed, 0))
		for len(tracks) > 0 {
			i := 0 // the first run uses the sorted order
			if seed > 0 {
				i = random.IntN(len(tracks))
			}
			tracks[i][0]()
			r.shuffled = append(r.shuffled, i)
			if tracks[i] = tracks[i][1:]; len(tracks[i]) == 0 {
				tracks = append(tracks[:i], tracks[i+1:]...)
			}
		}
	}
	var objects []*v1beta1.SealedCredential
	for _, r := range runs {
		objects = append(objects, r.app, r.imported)
	}
	w.lookAgain(objects...)
	for seed, r := range runs {
		what := fmt.Sprintf("seed %d, order %v", seed, r.shuffled)
		now := func(sc *v1beta1.SealedCredential) *v1beta1.SealedCredential {
			t.Log(what)
			return w.awaitAsTimePasses(sc, func(now *v1beta1.SealedCredential) bool {
				return now.Status.ObservedGeneration == now.Generation && meta.IsStatusConditionTrue(now.Status.Conditions, v1beta1.ConditionReady)
			})
		}
		app, imported := now(r.app), now(r.imported)
		if app.UID != r.app.UID || app.Status.Version != 1 {
			t.Errorf("%s: app is version %d", what, app.Status.Version)
		}
		_, s := w.awaitTarget(app, 1, r.values)
		if len(s.OwnerReferences) != 0 || len(s.Annotations) != 3 {
			t.Errorf("%s: the target is %+v", what, s.ObjectMeta)
		}
		w.checkUnseals(app, r.values)
		w.checkUnseals(imported, r.plain)
		if list, _, err := w.vault.List(t.Context(), w.tenant(r.ns), vault.ListQuery{}); err != nil || len(list) != 2 {
			t.Errorf("%s: the vault holds %d entries: %v", what, len(list), err)
		}
		w.checkHistory(app, audit.CredentialSealed)
		r.app, r.imported = app, imported
	}

	// The namespace is deleted, before its objects or after some of them, and another namespace
	// with its name is created.
	var formers []authz.Principal
	for i, r := range runs {
		former := w.tenant(r.ns)
		namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: r.ns}}
		steps := []client.Object{namespace, r.app, r.imported}
		rand.New(rand.NewPCG(uint64(i), 1)).Shuffle(len(steps), func(a, b int) { steps[a], steps[b] = steps[b], steps[a] })
		for _, o := range steps {
			must(t, w.admin.Delete(t.Context(), o))
		}
		w.awaitGone(r.app)
		w.awaitGone(r.imported)
		w.remakeNamespace(r.ns)
		w.create(w.manifest(r.ns, "app", r.values))
		formers = append(formers, former)
	}
	for i, r := range runs {
		w.checkUnseals(w.awaitReady(object(r.ns, "app"), 1), r.values)
		var list []vault.Credential
		var err error
		for end := time.Now().Add(patience); time.Now().Before(end); {
			if list, _, err = w.vault.List(t.Context(), formers[i], vault.ListQuery{}); err == nil && len(list) == 0 {
				break
			}
		}
		if err != nil || len(list) != 0 {
			t.Errorf("seed %d: the former tenant has the entries %+v: %v", i, list, err)
		}
	}
}

// remakeNamespace ends a namespace as the namespace controller does once all objects in it are
// deleted, makes another one of its name, and waits until the API server takes objects into it:
// its own cache may have the former one for a moment.
func (w *world) remakeNamespace(name string) {
	w.t.Helper()
	n := new(corev1.Namespace)
	must(w.t, w.admin.Get(w.t.Context(), client.ObjectKey{Name: name}, n))
	n.Spec.Finalizers = nil
	must(w.t, w.admin.SubResource("finalize").Update(w.t.Context(), n))
	must(w.t, w.admin.Create(w.t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}))
	must(w.t, wait.PollUntilContextTimeout(w.t.Context(), 20*time.Millisecond, patience, true, func(ctx context.Context) (bool, error) {
		err := w.admin.Create(ctx, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: name, Name: "probe"}}, client.DryRunAll)
		if apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
			return false, nil
		}
		return err == nil, err
	}))
}
