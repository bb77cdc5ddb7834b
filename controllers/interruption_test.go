package controllers_test

import (
	"fmt"
	"math"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/vault"
)

func withTarget(sc *v1beta1.SealedCredential) { sc.Spec.Target = &v1beta1.Target{} }

func withImport(sc *v1beta1.SealedCredential) {
	sc.Spec.Sealed = nil
	sc.Spec.ValuesFrom = &v1beta1.ValuesFrom{SecretRef: v1beta1.SecretReference{Name: "plain"}, DeleteAfterImport: true}
}

func withGeneratedTarget(sc *v1beta1.SealedCredential) {
	withGenerate(sc)
	withTarget(sc)
}

// withMigration imports the Secret that is the target, in place.
func withMigration(sc *v1beta1.SealedCredential) {
	sc.Spec.Sealed, sc.Spec.Target = nil, &v1beta1.Target{}
	sc.Spec.ValuesFrom = &v1beta1.ValuesFrom{SecretRef: v1beta1.SecretReference{Name: sc.Name}}
}

func withGenerate(sc *v1beta1.SealedCredential) {
	sc.Spec.Sealed, sc.Spec.Generate = nil, []v1beta1.Generator{{Key: "token", Random: &v1beta1.Random{}}}
}

// TestAReconcileMayBeCutOffAtAnyStep ends the operator at each durable step of each kind of reconcile, once before the step
// has happened and once after, and finds the same end state when it is started again. A start is mostly waiting for caches, so
// this goes on beside the other tests.
func TestAReconcileMayBeCutOffAtAnyStep(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.start(nil)
	w.published()
	w.halt()
	for _, c := range []struct {
		name    string
		steps   int64                                        // that the operator takes, and no more
		sealed  bool                                         // the object has been sealed before
		object  func(sc *v1beta1.SealedCredential)           // what it is beside a sealed value; nil for nothing
		act     func(w *world, sc *v1beta1.SealedCredential) // while the operator is away
		version int64                                        // in the end; 0 for none
		history []audit.EventType
	}{
		{
			name: "create", steps: 4, // tenant, finalizer, entry, status
			act:     func(w *world, sc *v1beta1.SealedCredential) { w.create(sc) },
			version: 1, history: []audit.EventType{audit.CredentialSealed},
		},
		{
			name: "change", steps: 2, sealed: true, // entry, status
			act: func(w *world, sc *v1beta1.SealedCredential) {
				w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.TTLDays = 30 })
			},
			version: 2, history: []audit.EventType{audit.CredentialSealed, audit.CredentialReencrypted},
		},
		{
			name: "rotate", steps: 2, sealed: true, // entry, status
			act: func(w *world, sc *v1beta1.SealedCredential) {
				w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.Rotation = &v1beta1.Rotation{Trigger: "now"} })
			},
			version: 2, history: []audit.EventType{audit.CredentialSealed, audit.CredentialReencrypted},
		},
		{
			name: "delete", steps: 2, sealed: true, // entry, finalizer
			act:     func(w *world, sc *v1beta1.SealedCredential) { must(w.t, w.admin.Delete(w.t.Context(), sc)) },
			history: []audit.EventType{audit.CredentialSealed, audit.CredentialDeleted},
		},
		{
			name: "create-with-target", steps: 5, object: withTarget, // tenant, finalizer, entry, Secret, status
			act:     func(w *world, sc *v1beta1.SealedCredential) { w.create(sc) },
			version: 1, history: []audit.EventType{audit.CredentialSealed},
		},
		{
			name: "rotate-with-target", steps: 5, sealed: true, object: withTarget, // entry, the reading of it, who manages the Secret, Secret, status
			act: func(w *world, sc *v1beta1.SealedCredential) {
				w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.Rotation = &v1beta1.Rotation{Trigger: "now"} })
			},
			version: 2, history: []audit.EventType{audit.CredentialSealed, audit.CredentialReencrypted},
		},
		{
			name: "adopt", steps: 3, sealed: true, // the reading of the entry, Secret, status
			act: func(w *world, sc *v1beta1.SealedCredential) {
				w.secret(sc.Namespace, sc.Name, map[string]string{v1beta1.AnnotationAdopt: sc.Name}, map[string]string{"token": "theirs"})
				w.change(sc, withTarget)
			},
			version: 1, history: []audit.EventType{audit.CredentialSealed},
		},
		{
			name: "regenerate-with-target", steps: 4, sealed: true, object: withGeneratedTarget, // entry, who manages the Secret, Secret, status
			act: func(w *world, sc *v1beta1.SealedCredential) {
				w.change(sc, func(sc *v1beta1.SealedCredential) {
					sc.Spec.Rotation = &v1beta1.Rotation{Policy: v1beta1.RotationRegenerate, Trigger: "now"}
				})
			},
			version: 2, history: []audit.EventType{audit.CredentialSealed, audit.CredentialRotated},
		},
		{
			name: "retype-target", steps: 4, sealed: true, object: withTarget, // the reading of the entry, the Secret's end, the next one, status
			act: func(w *world, sc *v1beta1.SealedCredential) {
				w.change(sc, func(sc *v1beta1.SealedCredential) {
					sc.Spec.Target.Type, sc.Spec.Target.Keys = "kubernetes.io/basic-auth", []v1beta1.TargetKey{{To: "password", From: "token"}}
				})
			},
			version: 1, history: []audit.EventType{audit.CredentialSealed},
		},
		{
			name: "migrate", steps: 6, object: withMigration, // tenant, finalizer, entry, a Secret in vain, the one that is there, status
			act:     func(w *world, sc *v1beta1.SealedCredential) { w.create(sc) },
			version: 1, history: []audit.EventType{audit.CredentialSealed},
		},
		{
			name: "drop-target", steps: 2, sealed: true, object: withTarget, // Secret, status
			act: func(w *world, sc *v1beta1.SealedCredential) {
				w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.Target = nil })
			},
			version: 1, history: []audit.EventType{audit.CredentialSealed},
		},
		{
			name: "delete-with-target", steps: 3, sealed: true, object: withTarget, // Secret, entry, finalizer
			act:     func(w *world, sc *v1beta1.SealedCredential) { must(w.t, w.admin.Delete(w.t.Context(), sc)) },
			history: []audit.EventType{audit.CredentialSealed, audit.CredentialDeleted},
		},
		{
			name: "import", steps: 5, object: withImport, // tenant, finalizer, entry, the Secret's end, status
			act:     func(w *world, sc *v1beta1.SealedCredential) { w.create(sc) },
			version: 1, history: []audit.EventType{audit.CredentialSealed},
		},
		{
			name: "generate", steps: 4, object: withGenerate, // tenant, finalizer, entry, status
			act:     func(w *world, sc *v1beta1.SealedCredential) { w.create(sc) },
			version: 1, history: []audit.EventType{audit.CredentialSealed},
		},
		{
			name: "regenerate", steps: 2, sealed: true, object: withGenerate, // entry, status
			act: func(w *world, sc *v1beta1.SealedCredential) {
				w.change(sc, func(sc *v1beta1.SealedCredential) {
					sc.Spec.Rotation = &v1beta1.Rotation{Policy: v1beta1.RotationRegenerate, Trigger: "now", Overlap: &metav1.Duration{Duration: time.Hour}}
				})
			},
			version: 2, history: []audit.EventType{audit.CredentialSealed, audit.CredentialRotated},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			w, _ := w.in(t)
			// prepare returns an object that the operator, not running now, has something to do for.
			type prepared struct {
				sc     *v1beta1.SealedCredential
				values map[string]string
			}
			var all []prepared
			for range 1 + 2*c.steps { // the whole reconcile, and each that is cut off
				values := w.values("token")
				sc := w.manifest(w.namespace(), c.name, values)
				if c.object != nil {
					c.object(sc)
				}
				if sc.Spec.ValuesFrom != nil {
					w.secret(sc.Namespace, sc.Spec.ValuesFrom.SecretRef.Name, map[string]string{
						v1beta1.AnnotationImport: sc.Name, v1beta1.AnnotationAdopt: sc.Name,
					}, values)
				}
				all = append(all, prepared{sc, values})
			}
			if c.sealed {
				w.start(nil)
				for i := range all {
					all[i].sc = w.create(all[i].sc)
				}
				for i := range all {
					all[i].sc = w.awaitReady(all[i].sc, 1)
				}
				w.halt()
			}
			prepare := func() (*v1beta1.SealedCredential, map[string]string) {
				p := all[0]
				all = all[1:]
				c.act(w, p.sc)
				return p.sc, p.values
			}
			finish := func(sc *v1beta1.SealedCredential) {
				t.Helper()
				if c.version == 0 {
					w.awaitGone(sc)
				} else {
					now := new(v1beta1.SealedCredential)
					must(t, w.admin.Get(t.Context(), client.ObjectKeyFromObject(sc), now))
					w.awaitReady(now, c.version)
				}
			}
			check := func(sc *v1beta1.SealedCredential, values map[string]string) {
				t.Helper()
				list, _, err := w.vault.List(t.Context(), w.tenant(sc.Namespace), vault.ListQuery{})
				must(t, err)
				if c.version == 0 {
					if len(list) != 0 {
						t.Errorf("%d credentials are left", len(list))
					}
				} else {
					must(t, w.admin.Get(t.Context(), client.ObjectKeyFromObject(sc), sc))
					if len(list) != 1 || list[0].ID != sc.Status.CredentialID {
						t.Errorf("the vault holds %v, the status names %q", list, sc.Status.CredentialID)
					}
					if !controllerutil.ContainsFinalizer(sc, v1beta1.Finalizer) {
						t.Error("the object has no finalizer")
					}
					if len(sc.Spec.Generate) > 0 {
						values = w.unsealed(sc)
					}
					w.checkUnseals(sc, values)
					w.checkAuditReference(sc)
					if t := sc.Spec.Target; t != nil {
						want := values
						if len(t.Keys) > 0 {
							want = map[string]string{t.Keys[0].To: values[t.Keys[0].From]}
						}
						w.awaitTarget(sc, c.version, want)
					}
				}
				w.checkHistory(sc, c.history...)
			}

			whole := newCrash(math.MaxInt64, false)
			sc, _ := prepare()
			w.start(whole)
			finish(sc)
			w.halt()
			steps := whole.count.Load()
			if steps != c.steps {
				t.Fatalf("the reconcile took %d durable steps, want %d", steps, c.steps)
			}
			for at := int64(1); at <= steps; at++ {
				for _, after := range []bool{false, true} {
					t.Run(fmt.Sprintf("at %d, after %v", at, after), func(t *testing.T) {
						w.t = t
						defer func() { w.t = t }()
						sc, values := prepare()
						cut := newCrash(at, after)
						w.start(cut)
						select {
						case <-cut.ended:
						case <-time.After(patience):
							t.Fatalf("the operator did not come to step %d\n%s", at, w.logs.tail())
						}
						w.halt()
						w.start(nil)
						finish(sc)
						check(sc, values)
						w.halt()
					})
				}
			}
		})
	}
	t.Run("the chain holds", w.testChain)
	t.Run("nothing secret is written anywhere", w.testNothingLeaks)
}
