package controllers_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/vault"
)

// object is an empty object of a namespace.
func object(namespace, name string) *v1beta1.SealedCredential {
	sc := &v1beta1.SealedCredential{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
	sc.Spec.CredentialType = "database"
	return sc
}

func (w *world) secret(namespace, name string, annotations, values map[string]string) *corev1.Secret {
	w.t.Helper()
	s := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Annotations: annotations}, Data: make(map[string][]byte)}
	for k, v := range values {
		s.Data[k] = []byte(v)
	}
	must(w.t, w.admin.Create(w.t.Context(), s))
	return s
}

// unsealed returns the values that the vault gives out, and forgets none of them: they may be nowhere else.
func (w *world) unsealed(sc *v1beta1.SealedCredential) map[string]string {
	w.t.Helper()
	got, err := w.vault.Read(w.t.Context(), w.tenant(sc.Namespace), vault.ByID(sc.Status.CredentialID))
	must(w.t, err)
	values := make(map[string]string)
	for k, v := range got.Values {
		values[k] = string(v)
		w.canaries = append(w.canaries, values[k])
	}
	return values
}

func (w *world) testImport(t *testing.T) {
	w, ns := w.in(t)
	values := w.values("user", "password")
	sc := object(ns, "imported")
	sc.Spec.ValuesFrom = &v1beta1.ValuesFrom{SecretRef: v1beta1.SecretReference{Name: "plain"}}

	// Neither a Secret that is missing nor one that names nobody, or somebody else, is imported.
	sc = w.awaitStalled(w.create(sc), v1beta1.ReasonSourceUnavailable)
	plain := w.secret(ns, "plain", map[string]string{"latticekeep.dev/import": "another"}, values)
	w.clock.Advance(2 * time.Minute)
	sc = w.awaitThat(sc, "the remedy to be named", func(sc *v1beta1.SealedCredential) bool {
		c := meta.FindStatusCondition(sc.Status.Conditions, v1beta1.ConditionStalled)
		return c != nil && strings.Contains(c.Message, "annotate the Secret with latticekeep.dev/import=imported")
	})
	if sc.Status.CredentialID != "" {
		t.Error("a Secret was imported that does not name the object")
	}
	plain.Annotations["latticekeep.dev/import"] = "imported"
	must(t, w.admin.Update(t.Context(), plain))
	w.clock.Advance(2 * time.Minute) // nobody touches the object
	sc = w.awaitReady(sc, 1)
	w.checkUnseals(sc, values)

	// The Secret changes, and so does the entry; what is no value of it changes nothing.
	values = w.values("user", "password", "port")
	plain.Data = map[string][]byte{}
	for k, v := range values {
		plain.Data[k] = []byte(v)
	}
	plain.Labels = map[string]string{"a": "b"}
	must(t, w.admin.Update(t.Context(), plain))
	w.clock.Advance(10 * time.Minute)
	sc = w.awaitReady(sc, 2)
	w.checkUnseals(sc, values)
	plain.Labels = map[string]string{"c": "d"}
	must(t, w.admin.Update(t.Context(), plain))
	w.nudge(sc)
	w.awaitReady(w.create(w.manifest(ns, "witness", values)), 1)

	// Without the Secret, another TTL is another version of the same values.
	must(t, w.admin.Delete(t.Context(), plain))
	sc = w.awaitReady(w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.TTLDays = 30 }), 3)
	w.checkUnseals(sc, values)

	// Imported and deleted: what is left is the vault's.
	values = w.values("user")
	w.secret(ns, "plain", map[string]string{"latticekeep.dev/import": "imported"}, values)
	sc = w.awaitReady(w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.ValuesFrom.DeleteAfterImport = true }), 4)
	w.checkUnseals(sc, values)
	w.awaitNoSecret(ns, "plain")
	w.checkHistory(sc, audit.CredentialSealed, audit.CredentialRotated, audit.CredentialReencrypted, audit.CredentialRotated)

	// With the entry gone and no Secret, nobody has the values.
	must(t, w.vault.Delete(t.Context(), authz.SystemPrincipal(w.tenant(ns).Tenant), sc.Status.CredentialID))
	w.nudge(sc)
	sc = w.awaitStalled(sc, v1beta1.ReasonSourceLost)
	w.secret(ns, "plain", map[string]string{"latticekeep.dev/import": "imported"}, values)
	w.clock.Advance(2 * time.Minute)
	sc = w.awaitReady(sc, 5)

	// From here on the values are in git.
	values = w.values("user")
	fresh := w.manifest(ns, "imported", values)
	sc = w.awaitReady(w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.ValuesFrom, sc.Spec.Sealed = nil, fresh.Spec.Sealed }), 6)
	w.checkUnseals(sc, values)
}

func (w *world) awaitNoSecret(namespace, name string) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), patience)
	defer cancel()
	events, err := w.admin.Watch(ctx, new(corev1.SecretList), client.InNamespace(namespace), client.MatchingFields{"metadata.name": name})
	must(w.t, err)
	defer events.Stop()
	for {
		err := w.admin.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, new(corev1.Secret))
		if apierrors.IsNotFound(err) {
			return
		}
		must(w.t, err)
		if _, ok := <-events.ResultChan(); !ok {
			w.t.Fatalf("waited in vain for the Secret %s to be gone\n%s", name, w.logs.tail())
		}
	}
}

func (w *world) testGenerate(t *testing.T) {
	w, ns := w.in(t)
	sc := object(ns, "made")
	sc.Spec.Generate = []v1beta1.Generator{
		{Key: "password", Random: &v1beta1.Random{Length: 40, Charset: "Base64URL"}},
		{Key: "signing", KeyPair: &v1beta1.KeyPair{Algorithm: "Ed25519"}},
	}
	sc = w.awaitReady(w.create(sc), 1)
	first := w.unsealed(sc)
	if len(first) != 3 || len(first["password"]) != 40 || !strings.Contains(first["signing"], "PRIVATE KEY") || !strings.Contains(first["signing.pub"], "PUBLIC KEY") {
		t.Fatalf("the vault made %d values", len(first))
	}

	// What is added is made, what is dropped goes, and the rest stays as it was, whatever its generator says now.
	sc = w.awaitReady(w.change(sc, func(sc *v1beta1.SealedCredential) {
		sc.Spec.Generate = []v1beta1.Generator{{Key: "password", Random: &v1beta1.Random{Length: 16}}, {Key: "token", Random: &v1beta1.Random{}}}
	}), 2)
	second := w.unsealed(sc)
	if len(second) != 2 || second["password"] != first["password"] || len(second["token"]) != 32 {
		t.Errorf("the vault holds %d values, the same password: %v", len(second), second["password"] == first["password"])
	}

	// Reencrypt keeps values.
	sc = w.awaitReady(w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.Rotation = &v1beta1.Rotation{Trigger: "one"} }), 3)
	if third := w.unsealed(sc); third["token"] != second["token"] || !sc.Status.ValuesChangedAt.Time.Equal(w.clock.in(0)) {
		t.Error("Reencrypt made new values")
	}
	// Regenerate makes new ones, and the former stay readable as long as the spec says.
	w.clock.Advance(time.Hour)
	sc = w.awaitReady(w.change(sc, func(sc *v1beta1.SealedCredential) {
		sc.Spec.Rotation = &v1beta1.Rotation{Policy: v1beta1.RotationRegenerate, Trigger: "two", Overlap: &metav1.Duration{Duration: 48 * time.Hour}}
	}), 4)
	fourth := w.unsealed(sc)
	if fourth["token"] == second["token"] || len(fourth["password"]) != 16 || !sc.Status.ValuesChangedAt.Time.Equal(w.clock.in(0)) {
		t.Error("Regenerate kept values, or does not follow the generators as they are now")
	}
	former := func() (string, error) {
		u, err := w.vault.Read(t.Context(), w.tenant(ns), vault.ByVersion(sc.Status.CredentialID, 3))
		return string(u.Values["token"]), err
	}
	if p := sc.Status.Previous; p == nil || p.Version != 3 || !p.ReadableUntil.Time.Equal(w.clock.in(48*time.Hour)) {
		t.Errorf("the status says %+v of the version before", p)
	}
	if token, err := former(); err != nil || token != second["token"] {
		t.Errorf("the former version: %v", err)
	}
	w.clock.Advance(48*time.Hour + time.Second)
	if _, err := former(); !errors.Is(err, fault.Forbidden) {
		t.Errorf("the former version after its end: %v", err)
	}
	w.awaitThat(sc, "the former version to leave the status", func(sc *v1beta1.SealedCredential) bool { return sc.Status.Previous == nil })

	// By itself too.
	w.clock.Advance(sc.Status.NextRotationTime.Sub(w.clock.Now()))
	sc = w.awaitReady(sc, 5)
	if fifth := w.unsealed(sc); fifth["token"] == fourth["token"] {
		t.Error("the rotation made no new values")
	}
	w.checkHistory(sc, audit.CredentialSealed, audit.CredentialRotated, audit.CredentialReencrypted, audit.CredentialRotated, audit.CredentialRotated)

	// An entry that is gone is not silently made of new values.
	must(t, w.vault.Delete(t.Context(), authz.SystemPrincipal(w.tenant(ns).Tenant), sc.Status.CredentialID))
	w.nudge(sc)
	sc = w.awaitStalled(sc, v1beta1.ReasonSourceLost)
	sc = w.awaitReady(w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.Rotation.Trigger = "new values" }), 6)
	w.unsealed(sc)
}

func (w *world) testValueAge(t *testing.T) {
	w, ns := w.in(t)
	manifest := w.manifest(ns, "aging", w.values("token"))
	manifest.Spec.Rotation = &v1beta1.Rotation{MaxValueAge: &metav1.Duration{Duration: 10 * day}, Before: &metav1.Duration{Duration: 85 * day}}
	stale := func(want metav1.ConditionStatus) func(*v1beta1.SealedCredential) bool {
		return func(sc *v1beta1.SealedCredential) bool {
			return meta.IsStatusConditionPresentAndEqual(sc.Status.Conditions, v1beta1.ConditionValuesStale, want) &&
				meta.IsStatusConditionTrue(sc.Status.Conditions, v1beta1.ConditionReady)
		}
	}
	sc := w.awaitThat(w.create(manifest), "fresh values", stale(metav1.ConditionFalse))
	w.clock.Advance(10 * day) // rotated meanwhile, which makes no value younger
	sc = w.awaitThat(sc, "old values to be told", func(sc *v1beta1.SealedCredential) bool {
		return stale(metav1.ConditionTrue)(sc) && sc.Status.Version == 2
	})
	w.checkEvents(sc, "Sealed", "Reencrypted", "ValuesStale")
	fresh := w.manifest(ns, "aging", w.values("token"))
	w.awaitThat(w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.Sealed = fresh.Spec.Sealed }), "fresh values", stale(metav1.ConditionFalse))
}

func (w *world) testExpiring(t *testing.T) {
	w, ns := w.in(t)
	manifest := w.manifest(ns, "expiring", w.values("token"))
	sc := w.awaitReady(w.create(manifest), 1)
	sc = w.awaitThat(w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.Suspend = true }), "suspension", suspended(metav1.ConditionTrue))
	because := func(reason string) func(*v1beta1.SealedCredential) bool {
		return func(sc *v1beta1.SealedCredential) bool {
			c := meta.FindStatusCondition(sc.Status.Conditions, v1beta1.ConditionExpiring)
			return c != nil && c.Reason == reason && (c.Status == metav1.ConditionTrue) == (reason != v1beta1.ReasonOnSchedule)
		}
	}
	w.clock.Advance(61 * day)
	sc = w.awaitThat(sc, "the late rotation to be told", because(v1beta1.ReasonRotationOverdue))
	w.clock.Advance(30 * day)
	sc = w.awaitThat(sc, "the end to be told", because(v1beta1.ReasonExpired))
	sc = w.awaitThat(w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.Suspend = false }), "the schedule", because(v1beta1.ReasonOnSchedule))
	w.awaitReady(sc, 2)
	w.checkEvents(sc, "Sealed", "Expiring", "Expiring", "Reencrypted")
}
