package controllers_test

import (
	"context"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/controllers"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/internal/sealing"
	"github.com/latticekeep/latticekeep/internal/vault"
)

func (w *world) testPublished(t *testing.T) {
	w, _ = w.in(t)
	key := client.ObjectKey{Namespace: controllers.DefaultNamespace, Name: "latticekeep-sealing-key"}
	want, err := w.keys.SealingDocument(t.Context())
	must(t, err)
	config := new(corev1.ConfigMap)
	repaired := func(after string) {
		t.Helper()
		await(w, key, new(corev1.ConfigMapList), "the sealing key after "+after, func(c *corev1.ConfigMap) bool {
			d, err := sealing.ParseDocument([]byte(c.Data["sealing-key.json"]))
			return err == nil && d.Key().ID() == want.Key().ID()
		})
	}
	must(t, w.admin.Get(t.Context(), key, config))
	config.Data["sealing-key.json"] = "{}"
	must(t, w.admin.Update(t.Context(), config))
	repaired("tampering")
	must(t, w.admin.Delete(t.Context(), config))
	w.clock.Advance(10 * time.Second)
	repaired("deletion")
}

// testPace changes the ConfigMap of an operator of its own each time that it has been looked at.
func (w *world) testPace(t *testing.T) {
	w, _ = w.in(t)
	admin, err := clientcmd.BuildConfigFromFlags("", w.plane.Kubeconfig)
	must(t, err)
	looked, writes := make(chan struct{}, 1000), new(atomic.Int64)
	admin.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			if strings.HasSuffix(r.URL.Path, "/configmaps/latticekeep-sealing-key") {
				if r.Method == http.MethodGet {
					looked <- struct{}{}
				} else {
					writes.Add(1)
				}
			}
			return next.RoundTrip(r)
		})
	})
	options := w.options()
	options.Namespace = w.namespace()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- controllers.Run(ctx, admin, options) }()
	config := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: options.Namespace, Name: "latticekeep-sealing-key"}}
	whole := func() {
		t.Helper()
		await(w, client.ObjectKeyFromObject(config), new(corev1.ConfigMapList), "the sealing key", func(c *corev1.ConfigMap) bool {
			_, err := sealing.ParseDocument([]byte(c.Data["sealing-key.json"]))
			return err == nil
		})
	}
	spoil := func(i int) {
		t.Helper()
		patch := fmt.Sprintf(`{"data":{"sealing-key.json":"%d"}}`, i)
		must(t, w.admin.Patch(t.Context(), config, client.RawPatch(types.MergePatchType, []byte(patch))))
	}
	whole()
	spoil(0)
	whole() // at once
	for i := range 10 {
		for len(looked) > 0 {
			<-looked
		}
		spoil(i + 1)
		select {
		case <-looked:
		case <-time.After(patience):
			t.Fatal("a changed ConfigMap is not looked at")
		}
	}
	if n := writes.Load(); n != 1 {
		t.Errorf("%d writes while no time passed, want 1", n)
	}
	w.clock.Advance(10 * time.Second)
	whole()
	if n := writes.Load(); n != 2 {
		t.Errorf("%d writes in ten seconds, want 2", n)
	}
	cancel()
	must(t, <-done)
}

// testClaim has another deployment, with a store of its own, meet this one.
func (w *world) testClaim(t *testing.T) {
	w, _ = w.in(t)
	other := &world{t: t, dir: t.TempDir()}
	other.clock.micros.Store(w.clock.micros.Load())
	must(t, kms.CreateLocal(filepath.Join(other.dir, "kms.key")))
	other.open(nil)
	defer other.store.Close()
	ctx, cancel := context.WithTimeout(t.Context(), patience) // an operator that runs against expectation ends
	defer cancel()
	err := controllers.Run(ctx, w.operator, other.options())
	if err == nil || !strings.Contains(err.Error(), "kubectl delete configmap -n latticekeep-system latticekeep-sealing-key") {
		t.Errorf("on a cluster that belongs to another deployment: %v", err)
	}
	w.published() // by this one

	// The claim is lost to someone who does not ask.
	admin, err := clientcmd.BuildConfigFromFlags("", w.plane.Kubeconfig)
	must(t, err)
	options := w.options()
	options.Namespace = w.namespace()
	done := make(chan error, 1)
	go func() { done <- controllers.Run(ctx, admin, options) }()
	key := client.ObjectKey{Namespace: options.Namespace, Name: "latticekeep-sealing-key"}
	config := await(w, key, new(corev1.ConfigMapList), "the sealing key", func(*corev1.ConfigMap) bool { return true })
	document, err := other.keys.SealingDocument(t.Context())
	must(t, err)
	b, err := document.MarshalJSON()
	must(t, err)
	config.Data["sealing-key.json"] = string(b)
	must(t, w.admin.Update(t.Context(), config))
	if err := <-done; err == nil || !strings.Contains(err.Error(), "belongs to another deployment") {
		t.Errorf("an operator that lost its claim ended with %v", err)
	}
	must(t, w.admin.Get(t.Context(), key, config))
	if config.Data["sealing-key.json"] != string(b) {
		t.Error("another deployment's sealing key was overwritten")
	}
}

// testTwice runs a second operator on the same store, which is configured otherwise, beside the first.
func (w *world) testTwice(t *testing.T) {
	w, ns := w.in(t)
	admin, err := clientcmd.BuildConfigFromFlags("", w.plane.Kubeconfig)
	must(t, err)
	tenant := w.tenant(w.namespace())
	options := w.options()
	options.Namespace, options.Tenants.Names = "not-there-yet", map[string]authz.TenantID{"no-such-namespace": tenant.Tenant}
	if err := controllers.Run(t.Context(), admin, options); err == nil || !strings.Contains(err.Error(), "no-such-namespace") {
		t.Errorf("with a tenant for a missing namespace: %v", err)
	}
	// A namespace whose name had another UID when it was made part of the tenant is not the one that is configured.
	remade := w.namespace()
	must(t, w.identity.MapNamespace(t.Context(), w.namespaceUID("kube-system"), remade, "the former's UID", tenant.Tenant))
	options.Tenants.Names = map[string]authz.TenantID{ns: tenant.Tenant, remade: tenant.Tenant}
	started := len(w.logs.String())
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- controllers.Run(ctx, admin, options) }()
	await(w, client.ObjectKey{Namespace: options.Namespace, Name: "latticekeep-sealing-key"}, new(corev1.ConfigMapList),
		"the sealing key in a new namespace", func(c *corev1.ConfigMap) bool { return c.Data["sealing-key.json"] != "" })

	if logged := w.logs.String()[started:]; !strings.Contains(logged, "a configured namespace is not part of its tenant") || !strings.Contains(logged, remade) {
		t.Errorf("nothing is said of a namespace that was made again:\n%s", logged)
	}
	if own := w.tenant(remade); own.Tenant == tenant.Tenant {
		t.Error("a namespace that was made again is part of the tenant of the former")
	}
	before := len(w.logs.String())
	values := w.values("token")
	var objects []*v1beta1.SealedCredential
	for i := range 10 {
		objects = append(objects, w.create(w.manifest(ns, fmt.Sprint("twice-", i), values)))
	}
	for i, sc := range objects {
		sc = w.awaitReady(sc, 1)
		objects[i] = w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.Rotation = &v1beta1.Rotation{Trigger: "now"} })
	}
	for _, sc := range objects {
		sc = w.awaitReady(sc, 2)
		w.checkUnseals(sc, values)
		w.checkHistory(sc, audit.CredentialSealed, audit.CredentialReencrypted)
	}
	if got, err := w.vault.Read(t.Context(), tenant, vault.ByID(w.awaitReady(objects[0], 2).Status.CredentialID)); err != nil || string(got.Values["token"]) != values["token"] {
		t.Errorf("the tenant that the namespace is mapped to does not unseal: %v", err)
	}
	cancel()
	must(t, <-done)
	if logged := w.logs.String()[before:]; strings.Contains(logged, "level=ERROR") {
		t.Errorf("losing to the other operator is told as an error:\n%s", logged)
	}
}
