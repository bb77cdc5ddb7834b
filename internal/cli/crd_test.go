package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/latticekeep/latticekeep/config/crd"
	"github.com/latticekeep/latticekeep/test/kubetest"
)

// crdRoles grant exactly the rights that the command uses.
const crdRoles = `
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: crd}
rules:
- {apiGroups: [apiextensions.k8s.io], resources: [customresourcedefinitions], resourceNames: [sealedcredentials.latticekeep.dev], verbs: [get, create, patch]}
- {apiGroups: [apiextensions.k8s.io], resources: [customresourcedefinitions/status], resourceNames: [sealedcredentials.latticekeep.dev], verbs: [patch]}
- {apiGroups: [latticekeep.dev], resources: [sealedcredentials], verbs: [list, patch]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: crd}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: crd}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: crd}]
`

// deadWebhook is one that nobody answers for, with a match condition.
const deadWebhook = `
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingWebhookConfiguration
metadata: {name: dead}
webhooks:
- name: dead.example.org
  admissionReviewVersions: [v1]
  sideEffects: None
  failurePolicy: Fail
  timeoutSeconds: 1
  clientConfig: {url: "https://127.0.0.1:1/"}
  rules: [{apiGroups: [latticekeep.dev], apiVersions: ["*"], operations: [UPDATE], resources: [sealedcredentials]}]
  matchConditions: [{name: which, expression: %q}]
`

// definitionNow is the definition of the cluster.
func (c *cluster) definitionNow() (d definition, stored []string) {
	c.t.Helper()
	object := new(unstructured.Unstructured)
	must(c.t, json.Unmarshal([]byte(c.kubectl("", "get", "crd", "sealedcredentials.latticekeep.dev", "-o", "json", "--show-managed-fields")), &object.Object))
	d, err := describe(object)
	must(c.t, err)
	stored, _, err = unstructured.NestedStringSlice(object.Object, "status", "storedVersions")
	must(c.t, err)
	return d, stored
}

// objectsNow are all objects as read in a version, without what their storage changes.
func (c *cluster) objectsNow(version string) (content, versions []string) {
	c.t.Helper()
	var list unstructured.UnstructuredList
	must(c.t, json.Unmarshal([]byte(c.kubectl("", "get", "--raw", "/apis/latticekeep.dev/"+version+"/sealedcredentials")), &list))
	for _, o := range list.Items {
		versions = append(versions, o.GetName()+"@"+o.GetResourceVersion())
		o.SetResourceVersion("")
		o.SetAPIVersion("")
		text, err := json.Marshal(o.Object)
		must(c.t, err)
		content = append(content, strings.ReplaceAll(string(text), `"apiVersion":"latticekeep.dev/v1alpha1"`, `"apiVersion":"latticekeep.dev/v1beta1"`)) // of managers
	}
	return content, versions
}

// former is the definition of the releases before this one: one version, no number.
func former(t *testing.T, labels ...string) string {
	t.Helper()
	d, err := readDefinition(crd.YAML)
	must(t, err)
	d.SetAnnotations(nil)
	for _, label := range labels {
		d.SetLabels(map[string]string{label: "x"})
	}
	versions, _, err := unstructured.NestedSlice(d.Object, "spec", "versions")
	must(t, err)
	alpha := versions[0].(map[string]any)
	alpha["storage"] = true
	delete(alpha, "deprecated")
	delete(alpha, "deprecationWarning")
	must(t, unstructured.SetNestedSlice(d.Object, []any{alpha}, "spec", "versions"))
	text, err := json.Marshal(d.Object)
	must(t, err)
	return string(text)
}

func TestManagersOfTwoVersionsBecomeOne(t *testing.T) {
	entry := func(manager, version, fields string) metav1.ManagedFieldsEntry {
		return metav1.ManagedFieldsEntry{Manager: manager, Operation: "Update", APIVersion: version, FieldsV1: metav1.NewFieldsV1(fields)}
	}
	const alpha, beta = "latticekeep.dev/v1alpha1", "latticekeep.dev/v1beta1"
	got, changed, err := inVersion([]metav1.ManagedFieldsEntry{
		entry("edit", alpha, `{"f:spec":{"f:suspend":{},"f:target":{".":{},"f:name":{}}}}`), entry("other", alpha, `{"f:spec":{"f:ttlDays":{}}}`),
		entry("edit", beta, `{"f:metadata":{"f:labels":{}},"f:spec":{"f:target":{"f:type":{}}}}`), entry("scale", "autoscaling/v1", `{}`),
	}, "latticekeep.dev", "v1beta1")
	want := []metav1.ManagedFieldsEntry{
		entry("edit", beta, `{"f:metadata":{"f:labels":{}},"f:spec":{"f:suspend":{},"f:target":{".":{},"f:name":{},"f:type":{}}}}`), entry("other", beta, `{"f:spec":{"f:ttlDays":{}}}`),
		entry("scale", "autoscaling/v1", `{}`),
	}
	if err != nil || !changed || !reflect.DeepEqual(got, want) {
		t.Errorf("%v %v %s", err, changed, got)
	}
	if again, changed, err := inVersion(want, "latticekeep.dev", "v1beta1"); err != nil || changed || !reflect.DeepEqual(again, want) {
		t.Errorf("%v %v %s", err, changed, again)
	}
}

func TestCRDApplyTakesOverAndMigrates(t *testing.T) {
	t.Parallel()
	c := &cluster{t, kubetest.ForTest(t)}
	c.kubectl(crdRoles, "apply", "-f", "-")
	kubeconfig, err := c.plane.KubeconfigFor("crd")
	must(t, err)
	ours, err := readDefinition(crd.YAML)
	must(t, err)
	o := crdOptions{page: 2}
	connect := func() *rest.Config {
		cfg, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
		must(t, err)
		return cfg
	}
	apply := func(says ...string) string {
		t.Helper()
		var out, trouble bytes.Buffer
		if err := o.run(t.Context(), connect(), ours, &out, &trouble); err != nil {
			t.Fatal(err)
		}
		for _, want := range says {
			if !strings.Contains(out.String(), want) {
				t.Errorf("no %q in %s%s", want, &out, &trouble)
			}
		}
		return trouble.String()
	}
	quiet := func(trouble string) {
		t.Helper()
		if trouble != "" {
			t.Error("it warns:", trouble)
		}
	}
	const rewrites = "rewritten in version"

	// A cluster without it: as at the first installation.
	c.kubectl("", "delete", "crd", "sealedcredentials.latticekeep.dev")
	quiet(apply("applied, schema 1"))
	if _, stored := c.definitionNow(); !slices.Equal(stored, []string{"v1beta1"}) {
		t.Fatal("a new definition stores", stored)
	}

	// The definition of an earlier release of the chart, with objects.
	c.kubectl("", "delete", "crd", "sealedcredentials.latticekeep.dev")
	c.kubectl(former(t, "app.kubernetes.io/managed-by"), "apply", "--server-side", "--field-manager=helm", "-f", "-")
	c.kubectl("", "label", "crd", "sealedcredentials.latticekeep.dev", "team=platform", "--field-manager=kubectl-label")
	c.kubectl(former(t), "apply", "-f", "-") // somebody else has every field too
	c.kubectl("", "wait", "--for=condition=Established", "--timeout=60s", "crd/sealedcredentials.latticekeep.dev")
	var manifests strings.Builder
	for i := range 2 {
		fmt.Fprintf(&manifests, "apiVersion: v1\nkind: Namespace\nmetadata: {name: ns-%d}\n---\n", i)
	}
	for i := range 7 {
		fmt.Fprintf(&manifests, `{"apiVersion":"latticekeep.dev/v1alpha1","kind":"SealedCredential","metadata":{"namespace":"ns-%d","name":"o-%d","finalizers":["example.org/x"]},`+
			`"spec":{"credentialType":"database","generate":[{"key":"a","random":{}}]}}`+"\n---\n", i%2, i)
	}
	c.kubectl(manifests.String(), "apply", "-f", "-")
	content, before := c.objectsNow("v1alpha1")
	uid := func() string { d, _ := c.definitionNow(); return string(d.GetUID()) }
	was := uid()
	quiet(apply("applied, schema 1", "SealedCredentials: 7 rewritten in version v1beta1, 0 failed", "stored in version v1beta1 alone"))
	d, stored := c.definitionNow()
	if !slices.Equal(stored, []string{"v1beta1"}) || d.version != "v1beta1" || d.schema != 1 || string(d.GetUID()) != was {
		t.Fatalf("the definition was not taken over: version %s, schema %d, stored %s", d.version, d.schema, stored)
	}
	after, now := c.objectsNow("v1beta1")
	if !slices.Equal(after, content) {
		t.Errorf("objects were changed:\n%s\n%s", content, after)
	}
	if labels := d.GetLabels(); len(labels) != 1 || labels["team"] != "platform" {
		t.Errorf("a label of somebody is gone, or one of Helm is left: %s", labels)
	}
	for i := range now {
		if now[i] == before[i] {
			t.Errorf("%s was not stored again", now[i])
		}
	}
	for _, m := range d.GetManagedFields() {
		owns := strings.Contains(m.FieldsV1.GetRawString(), `"f:spec"`)
		if ours := m.Manager == "latticekeep" && m.Operation == "Apply"; ours != owns && m.Subresource == "" {
			t.Errorf("%s (%s) owns the spec: %v", m.Manager, m.Operation, owns)
		}
	}

	t.Run("again", func(t *testing.T) {
		var out bytes.Buffer
		must(t, o.run(t.Context(), connect(), ours, &out, &out))
		again, _ := c.definitionNow()
		if _, versions := c.objectsNow("v1beta1"); !slices.Equal(versions, now) || again.GetResourceVersion() != d.GetResourceVersion() || strings.Contains(out.String(), rewrites) {
			t.Errorf("it wrote something: %s", &out)
		}
	})

	// stale has the API server remember the version before, as if it had been left over.
	stale := func() {
		t.Helper()
		c.kubectl("", "patch", "crd", "sealedcredentials.latticekeep.dev", "--subresource=status", "--type=merge", "-p", `{"status":{"storedVersions":["v1alpha1","v1beta1"]}}`)
	}
	left := func() int {
		t.Helper()
		_, stored := c.definitionNow()
		return len(stored)
	}
	refuse := func(condition string) {
		t.Helper()
		c.kubectl(fmt.Sprintf(deadWebhook, condition), "apply", "-f", "-")
		for deadline := time.Now().Add(time.Minute); ; {
			out, err := c.try("", "patch", "sealedcredential", "o-1", "-n", "ns-1", "--type=merge", "--dry-run=server", "-p", `{"spec":{"ttlDays":7}}`)
			if err != nil && strings.Contains(out, "dead.example.org") {
				return
			}
			if time.Now().After(deadline) {
				t.Fatal("the webhook is not called:", out)
			}
		}
	}
	t.Run("our webhook is down", func(t *testing.T) {
		stale()
		refuse("oldObject == null || object.spec != oldObject.spec") // as the chart has it
		quiet(apply("7 rewritten"))
		if left() != 1 {
			t.Error("it is not recorded")
		}
	})
	t.Run("a webhook of somebody else is down", func(t *testing.T) {
		stale()
		refuse("request.namespace == 'ns-1'")
		trouble := apply("4 rewritten in version v1beta1, 3 failed")
		if !strings.Contains(trouble, "warning: rewriting SealedCredential ns-1/o-1: ") || !strings.Contains(trouble, "tries again") || left() != 2 {
			t.Errorf("%d stored versions, and it says %s", left(), trouble)
		}
		c.kubectl("", "delete", "validatingwebhookconfiguration", "dead")
		for deadline := time.Now().Add(time.Minute); left() != 1; { // the API server needs some time to notice
			if apply(rewrites); time.Now().After(deadline) {
				t.Fatal("the next run does not bring it to an end")
			}
		}
	})
	t.Run("after an end anywhere", func(t *testing.T) {
		for _, at := range []int{0, 1, 2, 3, 6, 9, 12, 14, 15} { // of 16 requests
			stale()
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
			var out bytes.Buffer
			err := o.run(ctx, cfg, ours, &out, &out)
			if n <= at || err == nil && !strings.Contains(out.String(), "warning: ") {
				t.Errorf("ended at request %d: %d requests, %v, %s", at, n, err, &out)
			}
			quiet(apply())
			if left() != 1 {
				t.Errorf("ended at request %d: the next run leaves something", at)
			}
		}
	})

	t.Run("while others write", func(t *testing.T) {
		label := func(object, value string) {
			c.kubectl("", "patch", "sealedcredentials.v1alpha1.latticekeep.dev", "-n", "ns-1", object, "--type=merge", "--field-manager=team", "-p", `{"metadata":{"labels":{"team":"`+value+`"}}}`)
		}
		stale()
		label("o-3", "first")
		label("o-5", "first")
		cfg := connect()
		met := false
		cfg.Wrap(func(next http.RoundTripper) http.RoundTripper {
			return roundTripper(func(r *http.Request) (*http.Response, error) {
				if r.Method == http.MethodPatch && !met && strings.HasSuffix(r.URL.Path, "/o-3") {
					met = true
					label("o-3", "second")
					c.kubectl("", "patch", "sealedcredential", "-n", "ns-1", "o-5", "--type=merge", "-p", `{"metadata":{"finalizers":[]}}`)
					c.kubectl("", "delete", "sealedcredential", "-n", "ns-1", "o-5")
				}
				return next.RoundTrip(r)
			})
		})
		var out bytes.Buffer
		must(t, o.run(t.Context(), cfg, ours, &out, &out))
		if strings.Contains(out.String(), "warning") || !met || left() != 1 {
			t.Error(met, left(), out.String())
		}
		if text := c.kubectl("", "get", "--raw", "/apis/latticekeep.dev/v1beta1/namespaces/ns-1/sealedcredentials/o-3"); !strings.Contains(text, `"team":"second"`) || strings.Contains(text, `"latticekeep.dev/v1alpha1"`) {
			t.Error("what somebody wrote is lost, or still names the version before:", text)
		}
		c.kubectl("", "label", "sealedcredential", "-n", "ns-1", "o-3", "team-")
		content, _ = c.objectsNow("v1beta1")
	})

	t.Run("a right is missing", func(t *testing.T) {
		c.kubectl("", "patch", "clusterrole", "crd", "--type=json", "-p", `[{"op":"remove","path":"/rules/1"}]`)
		stale()
		for deadline := time.Now().Add(time.Minute); ; {
			trouble := apply("6 rewritten")
			if strings.Contains(trouble, "forbidden") && left() == 2 {
				break
			}
			if stale(); time.Now().After(deadline) {
				t.Fatal("it says", trouble)
			}
		}
		c.kubectl(crdRoles, "apply", "-f", "-")
		for deadline := time.Now().Add(time.Minute); left() != 1; {
			if apply(); time.Now().After(deadline) {
				t.Fatal("the next run does not bring it to an end")
			}
		}
	})
	t.Run("a version that may be stored does not go", func(t *testing.T) {
		stale()
		later := definition{ours.DeepCopy(), ours.schema, ours.version}
		versions, _, err := unstructured.NestedSlice(later.Object, "spec", "versions")
		must(t, err)
		must(t, unstructured.SetNestedSlice(later.Object, versions[1:], "spec", "versions"))
		if err := o.run(t.Context(), connect(), later, io.Discard, io.Discard); err == nil || !strings.Contains(err.Error(), "storedVersions") {
			t.Error("it is not refused:", err)
		}
		quiet(apply())
	})
	t.Run("what it no longer has goes", func(t *testing.T) {
		fewer := definition{ours.DeepCopy(), ours.schema, ours.version}
		unstructured.RemoveNestedField(fewer.Object, "spec", "names", "shortNames")
		var out bytes.Buffer
		must(t, o.run(t.Context(), connect(), fewer, &out, &out))
		if d, _ := c.definitionNow(); strings.Contains(fmt.Sprint(d.Object["spec"]), "slcred") {
			t.Error("the short name is still there")
		}
		quiet(apply())
	})
	// The proof that nothing is stored in the version before: without that version all can be read.
	t.Run("the version before goes", func(t *testing.T) {
		c.kubectl("", "patch", "crd", "sealedcredentials.latticekeep.dev", "--type=json", "-p", `[{"op":"test","path":"/spec/versions/0/name","value":"v1alpha1"},{"op":"remove","path":"/spec/versions/0"}]`)
		if got, _ := c.objectsNow("v1beta1"); !slices.Equal(got, content) {
			t.Errorf("%s", got)
		}
		// Fields whose owner wrote them in that version do not stand in the way of the next writer.
		c.kubectl(`{"apiVersion":"latticekeep.dev/v1beta1","kind":"SealedCredential","metadata":{"namespace":"ns-1","name":"o-1"},"spec":{"suspend":true}}`,
			"apply", "--server-side", "--field-manager=git", "-f", "-")
		quiet(apply())
	})
	t.Run("a newer schema is kept", func(t *testing.T) {
		c.kubectl("", "annotate", "--overwrite", "crd", "sealedcredentials.latticekeep.dev", "latticekeep.dev/schema=2")
		stale()
		before, _ := c.definitionNow()
		out, err := run(t, "crd", "apply", "--kubeconfig", kubeconfig)
		if err != nil || out != "CustomResourceDefinition sealedcredentials.latticekeep.dev: kept: its schema 2 is newer than schema 1 of this program\n" {
			t.Error(err, out)
		}
		if after, _ := c.definitionNow(); after.GetResourceVersion() != before.GetResourceVersion() || left() != 2 {
			t.Error("it was written")
		}
	})
	t.Run("a number that is none", func(t *testing.T) {
		c.kubectl("", "annotate", "--overwrite", "crd", "sealedcredentials.latticekeep.dev", "latticekeep.dev/schema=new")
		if out, err := run(t, "crd", "apply", "--kubeconfig", kubeconfig); err == nil || !strings.Contains(err.Error(), "remove it") {
			t.Error(err, out)
		}
	})
	if _, err := run(t, "crd", "apply"); err == nil || !strings.Contains(err.Error(), "--kubeconfig") {
		t.Error("without a cluster:", err)
	}
}
