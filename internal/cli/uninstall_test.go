package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/test/kubetest"
)

// uninstallRoles grant exactly the rights that the command uses when it stops a StatefulSet.
const uninstallRoles = `
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: uninstall}
rules:
- {apiGroups: [admissionregistration.k8s.io], resources: [validatingwebhookconfigurations], resourceNames: [latticekeep-webhook], verbs: [delete]}
- {apiGroups: [latticekeep.dev], resources: [sealedcredentials], verbs: [list, patch]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: uninstall}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: uninstall}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: uninstaller}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: uninstall, namespace: latticekeep-system}
rules: [{apiGroups: [apps], resources: [statefulsets/scale], resourceNames: [latticekeep], verbs: [get, patch]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: uninstall, namespace: latticekeep-system}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: uninstall}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: uninstaller}]
---
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: latticekeep, namespace: latticekeep-system}
spec:
  selector: {matchLabels: {a: b}}
  template: {metadata: {labels: {a: b}}, spec: {containers: [{name: c, image: i}]}}
`

func TestUninstallLetsGoOfTheCluster(t *testing.T) {
	t.Parallel()
	c := &cluster{t, kubetest.ForTest(t)}
	const namespaces = 3
	var objects strings.Builder
	for i := range namespaces {
		fmt.Fprintf(&objects, "apiVersion: v1\nkind: Namespace\nmetadata: {name: ns-%d}\n---\n", i)
	}
	objects.WriteString("apiVersion: v1\nkind: Namespace\nmetadata: {name: latticekeep-system}\n")
	c.kubectl(objects.String(), "apply", "-f", "-")
	c.kubectl(uninstallRoles, "apply", "-f", "-")
	create := func() {
		t.Helper()
		objects.Reset()
		for i := range 10 {
			finalizers := []string{v1beta1.Finalizer}
			switch i {
			case 3:
				finalizers = []string{"example.org/first", v1beta1.Finalizer, "example.org/last"}
			case 4:
				finalizers = []string{"example.org/first"}
			}
			text, err := json.Marshal(finalizers)
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(&objects, `{"apiVersion":"latticekeep.dev/v1beta1","kind":"SealedCredential","metadata":{"namespace":"ns-%d","name":"o-%d","finalizers":%s},`+
				`"spec":{"credentialType":"database","generate":[{"key":"a","random":{}}]}}`+"\n", i%namespaces, i, text)
		}
		objects.WriteString(`{"apiVersion":"admissionregistration.k8s.io/v1","kind":"ValidatingWebhookConfiguration","metadata":{"name":"latticekeep-webhook"}}`)
		c.kubectl(objects.String(), "apply", "-f", "-")
		c.kubectl("", "scale", "-n", "latticekeep-system", "statefulset/latticekeep", "--replicas=2")
	}
	finalizers := func() (all []string) {
		t.Helper()
		return strings.Fields(c.kubectl("", "get", "sealedcredentials", "-A", "-o", "jsonpath={.items[*].metadata.finalizers[*]}"))
	}
	kubeconfig, err := c.plane.KubeconfigFor("uninstaller")
	if err != nil {
		t.Fatal(err)
	}
	connect := func() *rest.Config {
		cfg, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
		if err != nil {
			t.Fatal(err)
		}
		return cfg
	}
	o := uninstallOptions{namespace: "latticekeep-system", webhook: "latticekeep-webhook", statefulSet: "latticekeep", page: 3}
	foreign := []string{"example.org/first", "example.org/first", "example.org/last"}
	sorted := func(all []string) []string { slices.Sort(all); return all }
	check := func(out string, says ...string) {
		t.Helper()
		for _, want := range says {
			if !strings.Contains(out, want) {
				t.Errorf("no %q in %s", want, out)
			}
		}
	}

	create()
	var out bytes.Buffer
	if err := o.run(t.Context(), connect(), &out); err != nil {
		t.Fatal(err)
	}
	check(out.String(), "StatefulSet latticekeep: stopped", "latticekeep-webhook: removed", "10 seen, 9 released, 0 failed")
	if all := sorted(finalizers()); !slices.Equal(all, foreign) {
		t.Error(all)
	}
	if n := c.kubectl("", "get", "statefulset", "-n", "latticekeep-system", "latticekeep", "-o", "jsonpath={.spec.replicas}"); n != "0" {
		t.Error("the server runs on:", n)
	}

	t.Run("again", func(t *testing.T) {
		var out bytes.Buffer
		if err := o.run(t.Context(), connect(), &out); err != nil {
			t.Fatal(err)
		}
		check(out.String(), "latticekeep-webhook: not found", "10 seen, 0 released")
	})

	// The command is interrupted at each request and then run to its end.
	t.Run("after an end anywhere", func(t *testing.T) {
		for _, at := range []int{0, 1, 2, 3, 4, 8, 12, 15} { // out of 16 requests
			create()
			cfg := connect()
			ctx, cancel := context.WithCancel(t.Context())
			n := 0
			cfg.Wrap(func(next http.RoundTripper) http.RoundTripper {
				return roundTripper(func(r *http.Request) (*http.Response, error) {
					if n++; n > at {
						cancel()
						return nil, context.Canceled
					}
					return next.RoundTrip(r)
				})
			})
			if err := o.run(ctx, cfg, &bytes.Buffer{}); err == nil {
				t.Errorf("%d requests are enough", at)
			}
			cancel()
			if err := o.run(t.Context(), connect(), &bytes.Buffer{}); err != nil {
				t.Fatal(at, err)
			}
			if all := sorted(finalizers()); !slices.Equal(all, foreign) {
				t.Fatal(at, all)
			}
		}
	})

	t.Run("while others change finalizers", func(t *testing.T) {
		create()
		cfg := connect()
		changed := false
		cfg.Wrap(func(next http.RoundTripper) http.RoundTripper {
			return roundTripper(func(r *http.Request) (*http.Response, error) {
				if r.Method == http.MethodPatch && strings.HasSuffix(r.URL.Path, "/o-5") && !changed {
					changed = true
					c.kubectl("", "patch", "sealedcredential", "-n", "ns-2", "o-5", "--type=merge", "-p",
						`{"metadata":{"finalizers":["example.org/added","`+v1beta1.Finalizer+`"]}}`)
				}
				return next.RoundTrip(r)
			})
		})
		if err := o.run(t.Context(), cfg, &bytes.Buffer{}); err != nil || !changed {
			t.Fatal(err, changed)
		}
		if all := sorted(finalizers()); !slices.Equal(all, append([]string{"example.org/added"}, foreign...)) {
			t.Error(all)
		}
	})

	t.Run("one object that cannot be changed", func(t *testing.T) {
		create()
		cfg := connect()
		cfg.Wrap(func(next http.RoundTripper) http.RoundTripper {
			return roundTripper(func(r *http.Request) (*http.Response, error) {
				if r.Method == http.MethodPatch && strings.HasSuffix(r.URL.Path, "/o-5") {
					r = r.Clone(r.Context())
					r.URL.Path = strings.Replace(r.URL.Path, "/sealedcredentials/", "/configmaps/", 1) // a forbidden path
				}
				return next.RoundTrip(r)
			})
		})
		var out bytes.Buffer
		if err := o.run(t.Context(), cfg, &out); err == nil || !strings.Contains(err.Error(), "ns-2/o-5") {
			t.Error(err)
		}
		check(out.String(), "8 released, 1 failed")
	})

	t.Run("without its right to", func(t *testing.T) {
		c.kubectl("", "delete", "rolebinding", "-n", "latticekeep-system", "uninstall")
		if err := o.run(t.Context(), connect(), &bytes.Buffer{}); err == nil || !strings.Contains(err.Error(), "stopping the server") {
			t.Error(err)
		}
	})

	t.Run("whose definition is gone", func(t *testing.T) {
		c.kubectl("", "patch", "sealedcredential", "-n", "ns-0", "o-3", "--type=merge", "-p", `{"metadata":{"finalizers":null}}`)
		for _, name := range []string{"ns-1/o-4", "ns-2/o-5"} {
			namespace, name, _ := strings.Cut(name, "/")
			c.kubectl("", "patch", "sealedcredential", "-n", namespace, name, "--type=merge", "-p", `{"metadata":{"finalizers":null}}`)
		}
		c.kubectl("", "delete", "--timeout=60s", "-k", "../../config/crd")
		o.statefulSet = ""
		var out bytes.Buffer
		if err := o.run(t.Context(), connect(), &out); err != nil {
			t.Error(err)
		}
		check(out.String(), "0 seen")
	})

	if _, err := run(t, "uninstall", "--webhook-configuration", "w"); err == nil || !strings.Contains(err.Error(), "--kubeconfig") {
		t.Error("without a cluster:", err)
	}
	if _, err := run(t, "uninstall"); err == nil || !strings.Contains(err.Error(), "webhook-configuration") {
		t.Error("without a webhook configuration:", err)
	}
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }
