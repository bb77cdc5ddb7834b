package controllers_test

import (
	"net/http"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/vault"
)

// testServerFaults has the API server fail in each way, for each kind of call that an object's life takes. Each object has a
// namespace of its own, which is where its calls fail.
func (w *world) testServerFaults(t *testing.T) {
	w, _ = w.in(t)
	values := w.values("token")
	creates := func(sc *v1beta1.SealedCredential) { w.create(sc) }
	rotates := func(sc *v1beta1.SealedCredential) {
		w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.Rotation = &v1beta1.Rotation{Trigger: "now"} })
	}
	deletes := func(sc *v1beta1.SealedCredential) { must(w.t, w.admin.Delete(w.t.Context(), sc)) }
	type faulty struct {
		sc      *v1beta1.SealedCredential
		call    string
		status  int
		version int64 // in the end; 0: gone
		act     func(*v1beta1.SealedCredential)
	}
	all := make(map[string]*faulty) // by namespace
	for _, c := range []faulty{
		{call: "get namespaces", version: 1, act: creates},
		{call: "patch sealedcredentials", version: 1, act: creates},
		{call: "create secrets", version: 1, act: creates},
		{call: "patch sealedcredentials/status", version: 1, act: creates},
		{call: "create events", version: 1, act: creates},
		{call: "get secrets", version: 2, act: rotates},
		{call: "patch secrets", version: 2, act: rotates},
		{call: "delete secrets", act: deletes},
		{call: "patch sealedcredentials", act: deletes},
	} {
		for _, status := range []int{http.StatusConflict, http.StatusTooManyRequests, http.StatusInternalServerError, hang} {
			c := c
			ns := w.namespace()
			c.sc, c.status = w.targeted(ns, "app", values), status
			if c.version != 1 {
				c.sc, _ = w.awaitTarget(w.create(c.sc), 1, values)
			}
			all[ns] = &c
		}
	}
	fails := func(c call) *faulty {
		ns := c.namespace
		if c.resource == "namespaces" {
			ns = c.name
		}
		verb := strings.TrimPrefix(c.verb, "try to ")
		if f := all[ns]; f != nil && f.call == verb+" "+c.resource {
			return f
		}
		return nil
	}
	var failed counts
	mend := w.wire.fail(func(c call) int {
		f := fails(c)
		if f == nil {
			return 0
		}
		failed.add(f.sc.Namespace)
		return f.status
	})
	defer mend()
	began := time.Now()
	for _, f := range all {
		f.act(f.sc)
	}
	for ns, f := range all {
		if f.status == hang || f.call == "create events" {
			failed.await(t, ns, 1)
		} else {
			failed.await(t, ns, 3)
		}
	}
	// Others go on meanwhile, and what cannot be delivered is told.
	_, _ = w.awaitTarget(w.create(w.targeted(w.namespace(), "witness", values)), 1, values)
	for _, f := range all {
		if (f.call == "create secrets" || f.call == "patch secrets") && f.status >= 429 {
			sc := w.awaitThat(f.sc, "the trouble to be told", reconcilingCondition(v1beta1.ReasonPending))
			c := meta.FindStatusCondition(sc.Status.Conditions, v1beta1.ConditionTargetSynced)
			if c == nil || c.Status != metav1.ConditionFalse || meta.IsStatusConditionTrue(sc.Status.Conditions, v1beta1.ConditionReady) {
				t.Errorf("with %s failing: %+v", f.call, sc.Status.Conditions)
			}
		}
	}
	// Retries slow down: each waits twice as long as the one before, but for a conflict, which is looked at again at once.
	for ns, f := range all {
		took, n := time.Since(began), failed.of(ns)
		most := 2 + int(took/(100*time.Millisecond))
		if f.status != http.StatusConflict {
			most = 3
			for wait := 100 * time.Millisecond; wait < took; wait *= 2 {
				most++
			}
		}
		if n > most && f.call != "create events" {
			t.Errorf("%s answered with %d was called %d times in %v, want at most %d", f.call, f.status, n, took, most)
		}
	}
	mend()
	for _, f := range all {
		switch f.version {
		case 0:
			w.awaitGone(f.sc)
			w.awaitNoSecret(f.sc.Namespace, "app")
			if list, _, err := w.vault.List(t.Context(), w.tenant(f.sc.Namespace), vault.ListQuery{}); err != nil || len(list) != 0 {
				t.Errorf("%s, %d: %d entries are left: %v", f.call, f.status, len(list), err)
			}
			w.checkHistory(f.sc, audit.CredentialSealed, audit.CredentialDeleted)
		case 1:
			sc, _ := w.awaitTarget(f.sc, 1, values)
			w.checkHistory(sc, audit.CredentialSealed)
		default:
			sc, _ := w.awaitTarget(f.sc, 2, values)
			w.checkHistory(sc, audit.CredentialSealed, audit.CredentialReencrypted)
		}
	}

	// The Secret is written, the status is not, and then there is to be no Secret: it goes, also when the operator was ended
	// in between.
	for name, ended := range map[string]bool{"elsewhere": false, "app": true} {
		ns := w.namespace()
		mend := w.wire.fail(func(c call) int {
			if c.namespace == ns && c.resource == "sealedcredentials/status" {
				return http.StatusInternalServerError
			}
			return 0
		})
		defer mend()
		sc := w.targeted(ns, "app", values)
		sc.Spec.Target.Name = name
		sc = w.create(sc)
		w.wire.calls.await(t, "patch sealedcredentials/status "+ns+"/app", 1)
		must(t, w.admin.Get(t.Context(), client.ObjectKey{Namespace: ns, Name: name}, new(corev1.Secret)))
		if ended {
			w.halt()
		}
		sc = w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.Target = nil })
		if ended {
			w.start(nil)
		}
		mend()
		w.awaitReady(sc, 1)
		w.awaitNoSecret(ns, name)
	}
}
