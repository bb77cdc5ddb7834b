package controllers_test

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/latticekeep/latticekeep/api/v1beta1"
)

// A store that is set back to a backup knows other versions of the same numbers: what the Secret holds is compared by more.
func (w *world) testSetBack(t *testing.T) {
	w, ns := w.in(t)
	made := func(name string) *v1beta1.SealedCredential {
		sc := object(ns, name)
		sc.Spec.Generate = []v1beta1.Generator{{Key: "token", Random: &v1beta1.Random{}}}
		sc.Spec.Rotation = &v1beta1.Rotation{Policy: v1beta1.RotationRegenerate, Trigger: "first"}
		sc.Spec.Target = &v1beta1.Target{}
		return sc
	}
	older := w.awaitReady(w.create(made("older")), 1)
	first := w.unsealed(older)
	w.halt()
	db := filepath.Join(w.dir, "store.db")
	backup, err := os.ReadFile(db)
	must(t, err)
	w.start(nil)
	newer := w.awaitReady(w.create(made("newer")), 1)
	kept := w.unsealed(newer)
	older = w.awaitReady(w.change(older, func(sc *v1beta1.SealedCredential) { sc.Spec.Rotation.Trigger = "second" }), 2)
	second := w.unsealed(older)
	older, _ = w.awaitTarget(older, 2, second)
	before := older.Status.Audit.Hash
	w.halt()
	must(t, os.WriteFile(db, backup, 0o600))
	w.start(nil)

	older = w.awaitThat(older, "the rotation to be made again", func(sc *v1beta1.SealedCredential) bool {
		return sc.Status.Version == 2 && sc.Status.Audit.Hash != before
	})
	third := w.unsealed(older)
	if third["token"] == first["token"] || third["token"] == second["token"] {
		t.Error("the rotation made no new values")
	}
	w.awaitTarget(older, 2, third)

	// What the store does not know is not silently made anew: the Secret has the only copy.
	newer = w.awaitStalled(newer, v1beta1.ReasonSourceLost)
	for range 3 {
		w.clock.Advance(2 * time.Minute)
		w.nudge(newer)
		newer = w.awaitStalled(newer, v1beta1.ReasonSourceLost)
		w.awaitReady(w.create(w.manifest(ns, "witness-"+strconv.Itoa(int(w.clock.Now().UnixMicro())), w.values("token"))), 1)
		s := new(corev1.Secret)
		must(t, w.admin.Get(t.Context(), client.ObjectKeyFromObject(newer), s))
		if string(s.Data["token"]) != kept["token"] {
			t.Fatal("the only copy of the values is gone")
		}
	}
	newer = w.awaitReady(w.change(newer, func(sc *v1beta1.SealedCredential) { sc.Spec.Rotation.Trigger = "second" }), 1)
	w.awaitTarget(newer, 1, w.unsealed(newer))
}

// While a spec is refused, the time and the trigger of its Regenerate are not used up by new keys around old values.
func (w *world) testRefusedRegenerate(t *testing.T) {
	w, ns := w.in(t)
	sc := object(ns, "refused")
	sc.Spec.Generate = []v1beta1.Generator{{Key: "token", Random: &v1beta1.Random{}}}
	sc.Spec.Rotation = &v1beta1.Rotation{Policy: v1beta1.RotationRegenerate, Trigger: "first"}
	sc = w.awaitReady(w.create(sc), 1)
	leaked := w.unsealed(sc)["token"]
	spoil := func(sc *v1beta1.SealedCredential) {
		sc.Spec.Generate = append(sc.Spec.Generate, v1beta1.Generator{Key: "pair", KeyPair: &v1beta1.KeyPair{Algorithm: "Ed25519", PublicKeyName: "token"}})
	}
	sc = w.change(sc, func(sc *v1beta1.SealedCredential) {
		sc.Spec.Rotation.Trigger = "leaked"
		spoil(sc)
	})
	sc = w.awaitStalled(sc, v1beta1.ReasonInvalidSpec)
	if sc.Status.Version != 1 || sc.Status.LastTrigger != "first" {
		t.Errorf("while it is refused: version %d, trigger %q", sc.Status.Version, sc.Status.LastTrigger)
	}
	mend := func(sc *v1beta1.SealedCredential) { sc.Spec.Generate = sc.Spec.Generate[:1] }
	sc = w.awaitReady(w.change(sc, mend), 2)
	if w.unsealed(sc)["token"] == leaked {
		t.Error("the trigger made no new values")
	}

	// Its time comes while it is refused: first it waits, then new keys keep it from ending, and new values are owed.
	sc = w.awaitStalled(w.change(sc, spoil), v1beta1.ReasonInvalidSpec)
	kept := w.unsealed(sc)["token"]
	w.clock.Advance(70 * day)
	sc = w.awaitThat(sc, "the late rotation to be told", func(sc *v1beta1.SealedCredential) bool {
		return meta.IsStatusConditionTrue(sc.Status.Conditions, v1beta1.ConditionExpiring) && sc.Status.Version == 2
	})
	w.clock.Advance(6 * day)
	sc = w.awaitThat(sc, "the last good version to go on", func(sc *v1beta1.SealedCredential) bool { return sc.Status.Version == 3 })
	if w.unsealed(sc)["token"] != kept || sc.Status.LastTrigger != "latticekeep.dev/owed" {
		t.Errorf("new values were made for an object that is refused, or its trigger %q was used up", sc.Status.LastTrigger)
	}
	sc = w.awaitReady(w.change(sc, mend), 4)
	if w.unsealed(sc)["token"] == kept {
		t.Error("the rotation that was waited for made no new values")
	}
	if sc.Status.LastTrigger != "leaked" {
		t.Errorf("the last trigger is %q", sc.Status.LastTrigger)
	}
}

// Whatever keeps the source Secret from being read, what the vault holds is rotated in time.
func (w *world) testUnreadableSource(t *testing.T) {
	w, ns := w.in(t)
	values := w.values("token")
	w.secret(ns, "plain", map[string]string{v1beta1.AnnotationImport: "imported"}, values)
	sc := object(ns, "imported")
	sc.Spec.ValuesFrom = &v1beta1.ValuesFrom{SecretRef: v1beta1.SecretReference{Name: "plain"}}
	sc = w.awaitReady(w.create(sc), 1)
	w.halt()
	was := w.operator.WrapTransport
	w.operator.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			if r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, "/secrets/plain") {
				return nil, fmt.Errorf("no Secret is read: %w", context.DeadlineExceeded)
			}
			return next.RoundTrip(r)
		})
	})
	w.start(nil)
	w.clock.Advance(61 * day)
	sc = w.awaitThat(sc, "the rotation, and why it is not all well", func(sc *v1beta1.SealedCredential) bool {
		return sc.Status.Version == 2 && meta.FindStatusCondition(sc.Status.Conditions, v1beta1.ConditionReconciling) != nil
	})
	w.checkUnseals(sc, values)
	w.halt()
	w.operator.WrapTransport = was
	w.start(nil)
	w.awaitReady(sc, 2)
}

// An object that is left alone says when its Secret is gone; one that is refused for its values has it repaired.
func (w *world) testDriftOfTheRefused(t *testing.T) {
	w, ns := w.in(t)
	values := w.values("token")
	manifest := w.manifest(ns, "app", values)
	manifest.Spec.Target = &v1beta1.Target{}
	sc, s := w.awaitTarget(w.create(manifest), 1, values)

	sc = w.awaitThat(w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.Suspend = true }), "suspension", suspended(metav1.ConditionTrue))
	must(t, w.admin.Delete(t.Context(), s))
	w.clock.Advance(10 * time.Minute)
	sc = w.awaitThat(sc, "the loss to be told", func(sc *v1beta1.SealedCredential) bool {
		return meta.IsStatusConditionFalse(sc.Status.Conditions, v1beta1.ConditionTargetSynced)
	})
	sc = w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.Suspend = false })
	sc, s = w.awaitTarget(sc, 1, values)

	sc = w.awaitStalled(w.change(sc, func(sc *v1beta1.SealedCredential) {
		v := sc.Spec.Sealed.Values["token"]
		v.SealedAt = metav1.NewTime(v.SealedAt.Add(-time.Hour))
		sc.Spec.Sealed.Values["token"] = v
	}), v1beta1.ReasonOlderValue)
	must(t, w.admin.Delete(t.Context(), s))
	was := sc.Status.Target.UID
	w.clock.Advance(10 * time.Minute)
	sc = w.awaitThat(sc, "the Secret to be made again", func(sc *v1beta1.SealedCredential) bool { return sc.Status.Target.UID != was })
	must(t, w.admin.Get(t.Context(), client.ObjectKeyFromObject(sc), s))
	if string(s.Data["token"]) != values["token"] {
		t.Error("the Secret holds another value")
	}
}
