package controllers_test

import (
	"context"
	"slices"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/controllers"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
)

// Every replica shows a tenant the objects of the namespaces that the configuration gives it, and of no others: the one
// that works, and the one that waits for the Lease.
func TestEveryReplicaShowsTheObjectsOfATenant(t *testing.T) {
	w := newWorld(t)
	w.kubectl("create", "rolebinding", "election", "--namespace", controllers.DefaultNamespace, "--role=latticekeep-election",
		"--serviceaccount=latticekeep-system:latticekeep")
	w.open(nil)
	defer func() { must(t, w.store.Close()) }()
	shop, alsoShop, remade, own := w.namespace(), w.namespace(), w.namespace(), w.namespace()
	tenant, other := w.tenant(w.namespace()).Tenant, w.tenant(own).Tenant
	must(t, w.identity.MapNamespace(t.Context(), w.namespaceUID("kube-system"), remade, "the former's UID", tenant))

	views, metrics := [2]controllers.View{}, [2]*controllers.Metrics{}
	for i := range views {
		metrics[i] = controllers.NewMetrics()
		if _, err := views[i].SealedCredentials(t.Context(), tenant); fault.Of(err) != fault.Unavailable {
			t.Error("before it runs:", err)
		}
		if _, err := views[i].AcceptedValues(t.Context(), authz.Principal{Tenant: tenant}, new(v1beta1.SealedCredential)); fault.Of(err) != fault.Unavailable {
			t.Error("what was accepted, before it runs:", err)
		}
		options := w.options()
		options.Elect, options.Metrics, options.View = true, metrics[i], &views[i]
		options.Tenants.Names = map[string]authz.TenantID{shop: tenant, alsoShop: tenant, remade: tenant}
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() { done <- controllers.Run(ctx, w.operator, options) }()
		defer func() {
			cancel()
			must(t, <-done)
			if _, err := views[i].SealedCredentials(t.Context(), tenant); fault.Of(err) != fault.Unavailable {
				t.Error("after it has ended:", err)
			}
		}()
		if i == 0 {
			for deadline := time.Now().Add(patience); w.holder() == ""; {
				if time.Now().After(deadline) {
					t.Fatalf("nobody was elected\n%s", w.logs.tail())
				}
			}
		}
	}
	want := []string{}
	for _, namespace := range []string{shop, alsoShop, remade, own} {
		for _, name := range []string{"b", "a"} {
			w.create(w.manifest(namespace, name, w.values("token")))
		}
	}
	for _, namespace := range slices.Sorted(slices.Values([]string{shop, alsoShop})) {
		want = append(want, namespace+"/a", namespace+"/b")
	}
	for i := range views {
		late := time.Now().Add(patience) // for the cache to have all
		for {
			found, err := views[i].SealedCredentials(t.Context(), tenant)
			use, err2 := metrics[i].SealingKeyUse(t.Context())
			if err == nil && err2 == nil && slices.Equal(names(found), want) && use[found[0].Spec.Sealed.KeyID] == 8 {
				break
			}
			if time.Now().After(late) {
				t.Fatalf("replica %d shows %v, want %v, and %v objects of each key: %v %v", i, names(found), want, use, err, err2)
			}
		}
		for _, of := range []authz.TenantID{other, "ten_none", authz.SystemTenant} {
			if found, err := views[i].SealedCredentials(t.Context(), of); err != nil || len(found) != 0 {
				t.Errorf("replica %d shows %s %v: %v", i, of, names(found), err)
			}
		}
		// What was accepted is told to the tenant, and to a pod that may check objects of the
		// namespace.
		stored := w.awaitReady(&v1beta1.SealedCredential{ObjectMeta: metav1.ObjectMeta{Namespace: own, Name: "a"}}, 1)
		for who, p := range map[string]authz.Principal{
			"tenant": {Tenant: other, Kind: authz.APIKey}, "pod": {Tenant: authz.SystemTenant, Kind: authz.ServiceAccount}, "stranger": {Tenant: tenant, Kind: authz.APIKey},
		} {
			for _, uid := range []types.UID{stored.UID, ""} {
				ask := func(namespace, name string) map[string]time.Time {
					t.Helper()
					at, err := views[i].AcceptedValues(t.Context(), p, &v1beta1.SealedCredential{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: uid}})
					must(t, err)
					return at
				}
				at := ask(own, "a")
				if want := stored.Spec.Sealed.Values["token"].SealedAt.Time; (who != "stranger") != at["token"].Equal(want) {
					t.Errorf("replica %d tells a %s of %q %v", i, who, uid, at)
				}
				for _, o := range [][2]string{{own, "c"}, {alsoShop, "c"}, {"none", "a"}} {
					if at := ask(o[0], o[1]); at != nil {
						t.Errorf("replica %d tells a %s of %v and %q %v", i, who, o, uid, at)
					}
				}
			}
		}
	}
}

func names(all []v1beta1.SealedCredential) (names []string) {
	for _, sc := range all {
		names = append(names, sc.Namespace+"/"+sc.Name)
	}
	return names
}
