package controllers_test

import (
	"encoding/base64"
	"errors"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/controllers"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/sealing"
	"github.com/latticekeep/latticekeep/internal/vault"
)

func (w *world) testStalled(t *testing.T) {
	w, ns := w.in(t)
	values := w.values("token", "other")
	good := w.manifest(ns, "stalled", values)
	foreign, err := envelope.GenerateSealingKey(envelope.SuiteMLKEM768X25519)
	must(t, err)
	request := sealing.Request{Namespace: ns, Name: "stalled", CredentialType: "database"}
	unknown := w.sealed(foreign.Public(), request, values)

	spoil := func(change func(map[string]v1beta1.SealedValue)) *v1beta1.Sealed {
		sealed := good.Spec.Sealed.DeepCopy()
		change(sealed.Values)
		return sealed
	}
	flipped, err := base64.StdEncoding.DecodeString(good.Spec.Sealed.Values["token"].Data)
	must(t, err)
	flipped[len(flipped)/2] ^= 1
	var sc *v1beta1.SealedCredential
	for _, bad := range []struct {
		name    string
		sealed  *v1beta1.Sealed
		message string
	}{
		{"an unknown sealing key", unknown.Spec.Sealed, "no such sealing key"},
		{"values of another key", spoil(func(v map[string]v1beta1.SealedValue) { v["token"] = unknown.Spec.Sealed.Values["token"] }), "values[token]"},
		{"a flipped bit", spoil(func(v map[string]v1beta1.SealedValue) {
			v["token"] = v1beta1.SealedValue{SealedAt: v["token"].SealedAt, Data: base64.StdEncoding.EncodeToString(flipped)}
		}), "values[token]"},
		{"a cut value", spoil(func(v map[string]v1beta1.SealedValue) {
			v["token"] = v1beta1.SealedValue{SealedAt: v["token"].SealedAt, Data: v["token"].Data[:400]}
		}), "it was cut"},
		{"no base64", spoil(func(v map[string]v1beta1.SealedValue) {
			v["token"] = v1beta1.SealedValue{SealedAt: v["token"].SealedAt, Data: "?"}
		}), "not standard base64"},
		{"another time of sealing", spoil(func(v map[string]v1beta1.SealedValue) {
			v["token"] = v1beta1.SealedValue{SealedAt: metav1.NewTime(v["token"].SealedAt.Add(time.Second)), Data: v["token"].Data}
		}), "values[token]"},
		{"swapped values", spoil(func(v map[string]v1beta1.SealedValue) { v["token"], v["other"] = v["other"], v["token"] }), "values[other]"},
	} {
		if sc == nil {
			object := good.DeepCopy()
			object.Spec.Sealed = bad.sealed
			sc = w.create(object)
		} else {
			sc = w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.Sealed = bad.sealed })
		}
		sc = w.awaitStalled(sc, v1beta1.ReasonInvalidSealed)
		stalled := meta.FindStatusCondition(sc.Status.Conditions, v1beta1.ConditionStalled)
		if !strings.Contains(stalled.Message, bad.message) {
			t.Errorf("%s: the message %q does not say %q", bad.name, stalled.Message, bad.message)
		}
		for _, value := range sc.Spec.Sealed.Values {
			if len(value.Data) > 8 && strings.Contains(stalled.Message, value.Data[:8]) {
				t.Errorf("%s: the message quotes the value: %q", bad.name, stalled.Message)
			}
		}
		if sc.Status.CredentialID != "" || len(sc.Finalizers) != 0 {
			t.Errorf("%s left credential %q and finalizers %v", bad.name, sc.Status.CredentialID, sc.Finalizers)
		}
	}
	if list, _, err := w.vault.List(t.Context(), w.tenant(ns), vault.ListQuery{}); err != nil || len(list) != 0 {
		t.Errorf("bad data left %v in the vault: %v", list, err)
	}

	sc = w.awaitReady(w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.Sealed = good.Spec.Sealed }), 1)
	w.checkUnseals(sc, values)
	w.checkHistory(sc, audit.CredentialSealed)
}

func (w *world) testLastGood(t *testing.T) {
	w, ns := w.in(t)
	values := w.values("token")
	manifest := w.manifest(ns, "good", values)
	manifest.Spec.TTLDays = 10
	sc := w.awaitReady(w.create(manifest), 1)
	good := sc.DeepCopy()

	sc = w.awaitStalled(w.change(sc, func(sc *v1beta1.SealedCredential) {
		sc.Spec.Sealed.Scope = v1beta1.ScopeCluster
		sc.Spec.TTLDays = 3650
		sc.Spec.Rotation = &v1beta1.Rotation{Before: &metav1.Duration{Duration: 1000 * day}}
	}), v1beta1.ReasonInvalidSealed)
	if sc.Status.Version != 1 || !sc.Status.ExpiresAt.Equal(good.Status.ExpiresAt) || sc.Status.CredentialID != good.Status.CredentialID {
		t.Errorf("the status forgets the version that is served: %+v", sc.Status)
	}
	w.checkUnseals(sc, values)

	// It is still rotated before its end.
	w.clock.Advance(sc.Status.NextRotationTime.Sub(w.clock.Now()))
	sc = w.awaitThat(sc, "the rotation of a stalled object", func(sc *v1beta1.SealedCredential) bool { return sc.Status.Version == 2 })
	sc = w.awaitStalled(sc, v1beta1.ReasonInvalidSealed)
	w.checkUnseals(sc, values)

	sc = w.awaitReady(w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec = *good.Spec.DeepCopy() }), 2)
	w.checkUnseals(sc, values)
	w.checkHistory(sc, audit.CredentialSealed, audit.CredentialReencrypted)
}

func (w *world) testScopes(t *testing.T) {
	w, ns := w.in(t)
	other := w.namespace()
	for _, c := range []struct {
		scope     v1beta1.Scope
		namespace string
		opens     bool
	}{
		{v1beta1.ScopeStrict, ns, false},
		{v1beta1.ScopeStrict, other, false},
		{v1beta1.ScopeNamespace, ns, true},
		{v1beta1.ScopeNamespace, other, false},
		{v1beta1.ScopeCluster, ns, true},
		{v1beta1.ScopeCluster, other, true},
	} {
		values := w.values("token")
		original := w.sealed(w.published().Key(), sealing.Request{Namespace: ns, Name: "original", CredentialType: "database", Scope: c.scope}, values)
		moved := original.DeepCopy()
		moved.Namespace, moved.Name = c.namespace, "moved"
		sc := w.create(moved)
		if c.opens {
			sc = w.awaitReady(sc, 1)
			w.checkUnseals(sc, values)
		} else {
			w.awaitStalled(sc, v1beta1.ReasonInvalidSealed)
			// Widening the scope by hand does not help, nor does an annotation.
			w.awaitStalled(w.change(sc, func(sc *v1beta1.SealedCredential) {
				sc.Spec.Sealed.Scope = v1beta1.ScopeCluster
				sc.Annotations = map[string]string{"latticekeep.dev/scope": "Cluster", "sealedsecrets.bitnami.com/cluster-wide": "true"}
			}), v1beta1.ReasonInvalidSealed)
		}
		must(t, w.admin.Delete(t.Context(), sc))
		w.awaitGone(sc)
	}

	// Two namespaces are two tenants, whatever the objects are called.
	values := w.values("token")
	sc := w.awaitReady(w.create(w.manifest(ns, "same", values)), 1)
	twin := w.awaitReady(w.create(w.manifest(other, "same", w.values("token"))), 1)
	if _, err := w.vault.Read(t.Context(), w.tenant(other), vault.ByID(sc.Status.CredentialID)); !errors.Is(err, fault.Forbidden) {
		t.Errorf("another tenant unseals: %v", err)
	}
	must(t, w.admin.Delete(t.Context(), twin))
	w.awaitGone(twin)
	w.checkUnseals(sc, values)
}

func (w *world) testOlder(t *testing.T) {
	w, ns := w.in(t)
	older := w.values("token", "dropped")
	first := w.manifest(ns, "older", older)
	sc := w.awaitReady(w.create(first.DeepCopy()), 1)
	w.clock.Advance(time.Minute)
	newer := w.values("token")
	sc = w.awaitReady(w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.Sealed = w.manifest(ns, "older", newer).Spec.Sealed }), 2)
	w.clock.Advance(time.Minute)
	dropped := w.manifest(ns, "older", w.values("dropped")).Spec.Sealed.Values["dropped"]
	sc = w.awaitReady(w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.Sealed.Values["dropped"] = dropped }), 3)
	sc = w.awaitReady(w.change(sc, func(sc *v1beta1.SealedCredential) { delete(sc.Spec.Sealed.Values, "dropped") }), 4)

	sc = w.awaitStalled(w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.Sealed = first.Spec.Sealed }), v1beta1.ReasonOlderValue)
	w.checkUnseals(sc, newer)
	// A key that was dropped does not come back with an older value either.
	sc = w.awaitStalled(w.change(sc, func(sc *v1beta1.SealedCredential) {
		sc.Spec.Sealed = w.manifest(ns, "older", newer).Spec.Sealed
		sc.Spec.Sealed.Values["dropped"] = first.Spec.Sealed.Values["dropped"]
	}), v1beta1.ReasonOlderValue)
	if message := meta.FindStatusCondition(sc.Status.Conditions, v1beta1.ConditionStalled).Message; !strings.Contains(message, "dropped") || strings.Contains(message, "token") {
		t.Errorf("the message %q does not name the key", message)
	}
	w.checkUnseals(sc, newer)
	// A value of the future would keep out the correct ones after it.
	sc = w.awaitStalled(w.change(sc, func(sc *v1beta1.SealedCredential) {
		sc.Spec.Sealed = w.manifest(ns, "older", w.values("token")).Spec.Sealed
		v := sc.Spec.Sealed.Values["token"]
		v.SealedAt = metav1.NewTime(v.SealedAt.Add(sealing.MaxAhead + time.Minute))
		sc.Spec.Sealed.Values["token"] = v
	}), v1beta1.ReasonInvalidSealed)
	w.checkUnseals(sc, newer)
	sc = w.awaitReady(w.change(sc, func(sc *v1beta1.SealedCredential) {
		sc.Spec.Sealed = first.Spec.Sealed.DeepCopy()
		sc.Spec.Sealed.AllowOlder = true
	}), 5)
	w.checkUnseals(sc, older)
}

func (w *world) testLateKey(t *testing.T) {
	w, ns := w.in(t)
	early := w.published()
	w.addSealingKey(w.newSealingKey())
	w.clock.Advance(10 * time.Minute)
	await(w, client.ObjectKey{Namespace: controllers.DefaultNamespace, Name: "latticekeep-sealing-key"}, new(corev1.ConfigMapList),
		"the newer sealing key", func(c *corev1.ConfigMap) bool {
			d, err := sealing.ParseDocument([]byte(c.Data["sealing-key.json"]))
			return err == nil && d.Key().ID() != early.Key().ID()
		})
	late := w.published()
	values := w.values("token")
	request := sealing.Request{Namespace: ns, Name: "early", CredentialType: "database"}
	w.checkUnseals(w.awaitReady(w.create(w.sealed(early.Key(), request, values)), 1), values)

	w.store.hidden.Store(late.Key().ID())
	request.Name = "late"
	sc := w.awaitStalled(w.create(w.sealed(late.Key(), request, values)), v1beta1.ReasonInvalidSealed)
	w.store.hidden.Store("")
	w.clock.Advance(10 * time.Minute)
	w.checkUnseals(w.awaitReady(sc, 1), values)
}
