package controllers_test

import (
	"fmt"
	"math"
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/latticekeep/latticekeep/api/v1alpha1"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/vault"
)

// testInterruptions ends the operator at each durable step of each kind of reconcile, once before the step has happened and
// once after, and finds the same end state when it is started again.
func (w *world) testInterruptions(t *testing.T) {
	for _, c := range []struct {
		name    string
		steps   int64                                         // that the operator takes, and no more
		sealed  bool                                          // the object has been sealed before
		act     func(w *world, sc *v1alpha1.SealedCredential) // while the operator is away
		version int64                                         // in the end; 0 for none
		history []audit.EventType
	}{
		{
			name: "create", steps: 4, // tenant, finalizer, entry, status
			act:     func(w *world, sc *v1alpha1.SealedCredential) { w.create(sc) },
			version: 1, history: []audit.EventType{audit.CredentialSealed},
		},
		{
			name: "change", steps: 2, sealed: true, // entry, status
			act: func(w *world, sc *v1alpha1.SealedCredential) {
				w.change(sc, func(sc *v1alpha1.SealedCredential) { sc.Spec.TTLDays = 30 })
			},
			version: 2, history: []audit.EventType{audit.CredentialSealed, audit.CredentialReencrypted},
		},
		{
			name: "rotate", steps: 2, sealed: true, // entry, status
			act: func(w *world, sc *v1alpha1.SealedCredential) {
				w.change(sc, func(sc *v1alpha1.SealedCredential) { sc.Spec.Rotation = &v1alpha1.Rotation{Trigger: "now"} })
			},
			version: 2, history: []audit.EventType{audit.CredentialSealed, audit.CredentialReencrypted},
		},
		{
			name: "delete", steps: 2, sealed: true, // entry, finalizer
			act:     func(w *world, sc *v1alpha1.SealedCredential) { must(w.t, w.admin.Delete(w.t.Context(), sc)) },
			history: []audit.EventType{audit.CredentialSealed, audit.CredentialDeleted},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			w, _ := w.in(t)
			// prepare returns an object that the operator, not running now, has something to do for.
			prepare := func() (*v1alpha1.SealedCredential, map[string]string) {
				values := w.values("token")
				sc := w.manifest(w.namespace(), c.name, values)
				if c.sealed {
					w.start(nil)
					sc = w.awaitReady(w.create(sc), 1)
					w.halt()
				}
				c.act(w, sc)
				return sc, values
			}
			finish := func(sc *v1alpha1.SealedCredential) {
				t.Helper()
				if c.version == 0 {
					w.awaitGone(sc)
				} else {
					now := new(v1alpha1.SealedCredential)
					must(t, w.admin.Get(t.Context(), client.ObjectKeyFromObject(sc), now))
					w.awaitReady(now, c.version)
				}
			}
			check := func(sc *v1alpha1.SealedCredential, values map[string]string) {
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
					if !controllerutil.ContainsFinalizer(sc, v1alpha1.Finalizer) {
						t.Error("the object has no finalizer")
					}
					w.checkUnseals(sc, values)
					w.checkAuditReference(sc)
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
}
