package controllers_test

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/tools/clientcmd"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/controllers"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/vault"
)

// testOrphans removes finalizers by hand while the operator is away.
func (w *world) testOrphans(t *testing.T) {
	w, ns := w.in(t)
	values := w.values("token")
	orphan := w.awaitReady(w.create(w.manifest(ns, "orphan", values)), 1)
	replaced := w.awaitReady(w.create(w.manifest(ns, "replaced", values)), 1)
	twin := w.manifest(ns, "replaced", values)
	w.checkEvents(replaced, "Sealed")
	// An object of another cluster, as far as the vault knows.
	elsewhere, err := w.vault.Apply(t.Context(), w.tenant(ns), "8c2b1c1e-0000-4000-8000-000000000001", 0, vault.Desired{
		Name: "elsewhere", Type: "database", TTLDays: 30, Values: map[string]secret.Bytes{"token": secret.Bytes("x")},
		Object: vault.Object{Cluster: "8c2b1c1e-0000-4000-8000-000000000002", Namespace: ns, Name: "elsewhere"},
	})
	must(t, err)
	w.halt()
	for _, sc := range []*v1beta1.SealedCredential{orphan, replaced} {
		w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Finalizers = nil })
		must(t, w.admin.Delete(t.Context(), sc))
		w.awaitGone(sc)
	}
	w.create(twin)
	w.start(nil)
	for _, sc := range []*v1beta1.SealedCredential{orphan, replaced} {
		w.checkEvents(sc, "Sealed", "Released")
		w.checkUnseals(sc, values)
		must(t, w.vault.Delete(t.Context(), w.tenant(ns), sc.Status.CredentialID))
		w.checkHistory(sc, audit.CredentialSealed, audit.CredentialReleased, audit.CredentialDeleted)
	}
	kept := []string{w.awaitReady(twin, 1).Status.CredentialID, elsewhere.ID}
	checkOwned := func() {
		t.Helper()
		for _, id := range kept {
			if err := w.vault.Delete(t.Context(), w.tenant(ns), id); !errors.Is(err, fault.Forbidden) {
				t.Errorf("an entry that has its object, or may have it in another cluster, can be deleted: %v", err)
			}
		}
	}
	checkOwned()

	// Nor is one released whose object is missing from a cache that is behind: this operator's has no object at all.
	looked := make(chan struct{}, 1000)
	admin, err := clientcmd.BuildConfigFromFlags("", w.plane.Kubeconfig)
	must(t, err)
	admin.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			if strings.HasSuffix(r.URL.Path, "/sealedcredentials") {
				r = r.Clone(r.Context())
				query := r.URL.Query()
				query.Set("fieldSelector", "metadata.name=none")
				r.URL.RawQuery = query.Encode()
			} else if strings.HasSuffix(r.URL.Path, "/namespaces/"+ns+"/sealedcredentials/replaced") {
				looked <- struct{}{}
			}
			return next.RoundTrip(r)
		})
	})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- controllers.Run(ctx, admin, w.options()) }()
	for range 2 { // when it looks again it is done with the first time
		select {
		case <-looked:
		case <-time.After(patience):
			t.Fatal("the API server is not asked for an object that the cache does not have")
		}
		w.clock.Advance(10 * time.Minute)
	}
	cancel()
	must(t, <-done)
	checkOwned()
}
