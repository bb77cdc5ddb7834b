package charts_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/latticekeep/latticekeep/test/kubetest"
)

// applied is a control plane that has what the chart makes of everything that can be turned on, but for the kinds of other projects. Namespaces
// shop, platform and sealed are people's; dev may do in each what edit allows, in the chart's own namespace too.
func applied(t *testing.T) *kubetest.ControlPlane {
	t.Helper()
	c := kubetest.ForTest(t)
	out := text(t, slices.DeleteFunc(rendered(t, "--values", "latticekeep/ci/full-values.yaml", "--no-hooks", "--set", "csiProvider.enabled=false", "--set", "crd.install=false",
		"--set", "webhook.enabled=false"), foreign)) // nothing would answer there
	must(t, c, "", "create", "namespace", namespace)
	for _, mode := range []string{"enforce", "warn"} {
		must(t, c, "", "label", "namespace", namespace, "pod-security.kubernetes.io/"+mode+"=restricted")
	}
	if said := must(t, c, out, "apply", "-f", "-"); strings.Contains(said, "Warning") {
		t.Errorf("the API server warns:\n%s", said)
	}
	// The role edit gets its rules from the controller manager, which is not here.
	must(t, c, "", "create", "clusterrole", "dev", "--verb=get,list,create,update,patch,delete,deletecollection",
		"--resource=sealedcredentials.latticekeep.dev,secrets,configmaps")
	for _, ns := range []string{"shop", "platform", "sealed", namespace} {
		if ns != namespace {
			must(t, c, "", "create", "namespace", ns)
		}
		must(t, c, "", "create", "rolebinding", "dev", "--namespace", ns, "--clusterrole=dev", "--user=dev")
	}
	must(t, c, "", "label", "namespace", "sealed", "latticekeep.dev/sealed-only=true")
	return c
}

// foreign reports whether an object is of a kind of another project, which the control plane does not know.
func foreign(o unstructured.Unstructured) bool {
	return slices.Contains([]string{"monitoring.coreos.com", "cert-manager.io", "gateway.networking.k8s.io", "route.openshift.io"}, o.GroupVersionKind().Group)
}

func kubectl(t *testing.T, c *kubetest.ControlPlane, stdin string, args ...string) (string, error) {
	t.Helper()
	cmd := c.Kubectl(t.Context(), args...)
	cmd.Stdin = strings.NewReader(stdin)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func must(t *testing.T, c *kubetest.ControlPlane, stdin string, args ...string) string {
	t.Helper()
	out, err := kubectl(t, c, stdin, args...)
	if err != nil {
		t.Fatalf("kubectl %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return out
}

const (
	dev      = "--as=dev"
	operator = "--as=system:serviceaccount:" + namespace + ":latticekeep"
)

func sealedCredential(ns, name, scope string) string {
	return fmt.Sprintf(`
apiVersion: latticekeep.dev/v1beta1
kind: SealedCredential
metadata: {namespace: %s, name: %s}
spec:
  credentialType: test
  sealed: {version: 1, suite: MLKEM768, keyID: "%064d", scope: %s, values: {k: {sealedAt: "2026-01-01T00:00:00Z", data: AAAA}}}
`, ns, name, 0, scope)
}

// deprecated returns a manifest in the version of the API before this one.
func deprecated(manifest string) string {
	return strings.Replace(manifest, "latticekeep.dev/v1beta1", "latticekeep.dev/v1alpha1", 1)
}

func secret(ns, name, kind string, annotations ...string) string {
	var all []string
	for _, a := range annotations {
		all = append(all, "latticekeep.dev/"+a+": x")
	}
	return fmt.Sprintf("apiVersion: v1\nkind: Secret\nmetadata: {namespace: %s, name: %s, annotations: {%s}}\ntype: %s", ns, name, strings.Join(all, ", "), kind)
}

func configMap(name, value string) string {
	return fmt.Sprintf("apiVersion: v1\nkind: ConfigMap\nmetadata: {namespace: %s, name: %s}\ndata: {k: %s}", namespace, name, value)
}

// The policies need no webhook, so they are all that stands there while it is down.
func TestPoliciesRefuseWithoutTheWebhook(t *testing.T) {
	c := applied(t)
	awaitPolicies(t, c)
	// In this order: each step finds what the ones before it left.
	for _, step := range []struct {
		name, stdin, refused string
		args                 []string
	}{
		{"scope Strict anywhere", sealedCredential("shop", "strict", "Strict"), "", []string{"create", dev}},
		{"scope Cluster where it was not agreed", sealedCredential("shop", "wide", "Cluster"), "Cluster is not allowed in this namespace", []string{"create", dev}},
		{"the same by somebody who may do everything", sealedCredential("shop", "wide", "Cluster"), "Cluster is not allowed in this namespace", []string{"create"}},
		{"widening", sealedCredential("shop", "strict", "Cluster"), "Cluster is not allowed in this namespace", []string{"apply", dev}},
		{"the same in the deprecated version", deprecated(sealedCredential("shop", "wide", "Cluster")), "Cluster is not allowed in this namespace", []string{"create", dev}},
		{"widening in the deprecated version", deprecated(sealedCredential("shop", "strict", "Cluster")), "Cluster is not allowed in this namespace", []string{"apply", dev}},
		{"scope Cluster where it was agreed", sealedCredential("platform", "wide", "Cluster"), "", []string{"create", dev}},
		{"another source", generated("shop"), "", []string{"create", dev}},

		{"the operator publishes the key", configMap("latticekeep-sealing-key", "ours"), "", []string{"create", operator}},
		{"somebody forges it", configMap("latticekeep-sealing-key", "forged"), "written by the operator alone", []string{"apply", dev}},
		{"an administrator replaces it", configMap("latticekeep-sealing-key", "forged"), "written by the operator alone", []string{"replace"}},
		{"another ServiceAccount of that name", configMap("latticekeep-sealing-key", "forged"), "written by the operator alone",
			[]string{"replace", "--as=system:serviceaccount:shop:latticekeep", "--as-group=system:masters"}},
		{"the operator writes the anchor", configMap("latticekeep-audit-anchor", "ours"), "", []string{"create", operator}},
		{"the operator writes a newer one", configMap("latticekeep-audit-anchor", "newer"), "", []string{"replace", operator}},
		{"somebody puts an older one back", configMap("latticekeep-audit-anchor", "ours"), "written by the operator alone", []string{"apply", dev}},
		{"an administrator does", configMap("latticekeep-audit-anchor", "ours"), "written by the operator alone", []string{"replace"}},
		{"other ConfigMaps", configMap("other", "x"), "", []string{"create", dev}},

		{"a plain Secret where all are sealed", secret("sealed", "a", "Opaque"), "takes no plain Secrets", []string{"create", dev}},
		{"one with a type of its own", secret("sealed", "a", "example.org/x"), "takes no plain Secrets", []string{"create", dev}},
		{"a release of helm", secret("sealed", "sh.helm.release.v1.h.v1", "helm.sh/release.v1") + "\ndata: {release: AAAA}", "", []string{"create", dev}},
		{"anything else by its type", secret("sealed", "h", "helm.sh/release.v1") + "\ndata: {release: AAAA}", "takes no plain Secrets", []string{"create", dev}},
		{"a password beside a release", secret("sealed", "sh.helm.release.v1.h.v2", "helm.sh/release.v1") + "\nstringData: {release: x, password: x}",
			"takes no plain Secrets", []string{"create", dev}},
		{"a target of the operator", secret("sealed", "t", "Opaque", "owner"), "", []string{"create", operator}},
		{"a plain Secret elsewhere", secret("shop", "a", "Opaque"), "", []string{"create", dev}},
	} {
		out, err := kubectl(t, c, step.stdin, append(step.args, "-f", "-")...)
		check(t, step.name, out, err, step.refused)
	}
	for _, step := range []struct {
		name, refused string
		args          []string
	}{
		{"somebody deletes the key", "written by the operator alone", []string{"delete", dev, "configmap", "latticekeep-sealing-key", "--namespace", namespace}},
		{"somebody deletes the anchor", "written by the operator alone", []string{"delete", dev, "configmap", "latticekeep-audit-anchor", "--namespace", namespace}},
		{"with all others in one request", "written by the operator alone", []string{"delete", dev, "--raw", "/api/v1/namespaces/" + namespace + "/configmaps"}},
		{"among all others", "written by the operator alone", []string{"delete", dev, "configmap", "--all", "--namespace", namespace}},
		{"an old Secret is changed", "", []string{"label", dev, "secret", "sh.helm.release.v1.h.v1", "a=b", "--namespace", "sealed"}},
		{"an administrator deletes the key", "", []string{"delete", "configmap", "latticekeep-sealing-key", "--namespace", namespace}},
		{"an administrator deletes the anchor", "", []string{"delete", "configmap", "latticekeep-audit-anchor", "--namespace", namespace}},
	} {
		out, err := kubectl(t, c, "", step.args...)
		check(t, step.name, out, err, step.refused)
	}
}

// The operator is who the policies say, and with another ServiceAccount nobody else is.
func TestPoliciesKnowTheOperatorByTheNameThatItWasGiven(t *testing.T) {
	c := kubetest.ForTest(t)
	must(t, c, "", "create", "namespace", namespace)
	out, err := helmTemplate(t, "--no-hooks", "--set", "crd.install=false,webhook.enabled=false,server.serviceAccount.name=vault")
	if err != nil {
		t.Fatal(err)
	}
	must(t, c, out, "apply", "-f", "-")
	const vault = "--as=system:serviceaccount:" + namespace + ":vault"
	awaitRefusal(t, c, configMap("latticekeep-sealing-key", "probe"))
	for _, may := range []string{"create configmaps --namespace " + namespace, "create secrets --namespace shop", "list sealedcredentials.latticekeep.dev --all-namespaces"} {
		if out, err := kubectl(t, c, "", append([]string{"auth", "can-i", vault}, strings.Fields(may)...)...); err != nil {
			t.Errorf("%s may not %s: %v %s", vault, may, err, out)
		}
	}
	// Even one that holds the same roles.
	must(t, c, "", "create", "rolebinding", "former", "--namespace", namespace, "--clusterrole=admin", "--serviceaccount="+namespace+":latticekeep")
	out, err = kubectl(t, c, configMap("latticekeep-sealing-key", "forged"), "create", "--as=system:serviceaccount:"+namespace+":latticekeep", "--as-group=system:masters", "-f", "-")
	check(t, "the default name", out, err, "written by the operator alone")
	out, err = kubectl(t, c, configMap("latticekeep-sealing-key", "ours"), "create", vault, "-f", "-")
	check(t, "the name that it was given", out, err, "")
}

// RBAC lets the operator write every Secret. Whoever got hold of its token could else make themselves one of any ServiceAccount.
func TestPoliciesHoldTheOperatorToItsOwnSecrets(t *testing.T) {
	c := applied(t)
	must(t, c, "", "create", "clusterrolebinding", "server", "--clusterrole=latticekeep-operator", "--user=other")
	for _, object := range []string{
		secret("shop", "theirs", "Opaque"), secret("shop", "adopted", "Opaque", "adopt"), secret("shop", "imported", "Opaque", "import"),
		secret("shop", "tokens", "kubernetes.io/service-account-token", "adopt"), secret(namespace, "latticekeep-kms", "Opaque"),
		secret("shop", "latticekeep-ca", "Opaque"),
	} {
		must(t, c, strings.Replace(object, "annotations: {", "annotations: {kubernetes.io/service-account.name: default, ", 1), "create", "-f", "-")
	}
	awaitRefusal(t, c, secret("shop", "probe", "Opaque"), operator)
	const refused = "nobody else's, and none of another type"
	const pair = "\nstringData: {tls.crt: x, tls.key: x}"
	create, replace := []string{"create", operator, "-f", "-"}, []string{"replace", operator, "-f", "-"}
	del := func(ns, name string) []string { return []string{"delete", operator, "secret", name, "--namespace", ns} }
	// In this order: each step finds what the ones before it left.
	for _, step := range []struct {
		name, stdin, refused string
		args                 []string
	}{
		{"a target", secret("shop", "target", "Opaque", "owner"), "", create},
		{"a target for TLS", secret("shop", "tls", "kubernetes.io/tls", "owner") + pair, "", create},
		{"a target for images", secret("shop", "images", "kubernetes.io/dockerconfigjson", "owner") + "\nstringData: {.dockerconfigjson: '{}'}", "", create},
		{"a target for a user", secret("shop", "user", "kubernetes.io/basic-auth", "owner") + "\nstringData: {username: x}", "", create},
		{"a target for SSH", secret("shop", "ssh", "kubernetes.io/ssh-auth", "owner") + "\nstringData: {ssh-privatekey: x}", "", create},
		{"a target beside the operator", secret(namespace, "target", "Opaque", "owner"), "", create},
		{"a target changes", secret("shop", "target", "Opaque", "owner", "version"), "", replace},
		{"a target is nobody's any more", secret("shop", "target", "Opaque", "version"), refused, replace},
		{"a target is made again", "", "", del("shop", "target")},
		{"a Secret is adopted", secret("shop", "adopted", "Opaque", "owner"), "", replace},
		{"a Secret is imported", "", "", del("shop", "imported")},
		{"a token of a ServiceAccount",
			strings.Replace(secret("kube-system", "token", "kubernetes.io/service-account-token", "owner"), "{latticekeep", "{kubernetes.io/service-account.name: default, latticekeep", 1),
			refused, create},
		{"a token to join the cluster", secret("kube-system", "bootstrap-token-abcdef", "bootstrap.kubernetes.io/token", "owner"), refused, create},
		{"a type of somebody's own", secret("shop", "typed", "example.org/x", "owner"), refused, create},
		{"a Secret of no object", secret("shop", "free", "Opaque"), refused, create},
		{"a Secret of no object beside the operator", secret(namespace, "free", "Opaque"), refused, create},
		{"a foreign Secret is taken", secret("shop", "theirs", "Opaque", "owner"), refused, replace},
		{"a foreign Secret is taken by saying that it was handed over", secret("shop", "theirs", "Opaque", "owner", "adopt"), refused, replace},
		{"a foreign Secret is deleted", "", refused, del("shop", "theirs")},
		{"a token that was handed over",
			strings.Replace(secret("shop", "tokens", "kubernetes.io/service-account-token", "owner"), "{latticekeep", "{kubernetes.io/service-account.name: default, latticekeep", 1),
			refused, replace},
		{"the KMS key is replaced", secret(namespace, "latticekeep-kms", "Opaque", "owner"), refused, replace},
		{"the KMS key is deleted", "", refused, del(namespace, "latticekeep-kms")},

		{"the authority", secret(namespace, "latticekeep-ca", "kubernetes.io/tls") + pair, "", create},
		{"the certificate", secret(namespace, "latticekeep-tls", "kubernetes.io/tls") + pair, "", create},
		{"the webhook's", secret(namespace, "latticekeep-webhook-tls", "kubernetes.io/tls") + pair, "", create},
		{"it is renewed", secret(namespace, "latticekeep-webhook-tls", "kubernetes.io/tls", "version") + pair, "", replace},
		{"the system key", secret(namespace, "latticekeep-system-key", "Opaque"), "", create},
		{"the system key is replaced", secret(namespace, "latticekeep-system-key", "Opaque", "version"), refused, replace},
		{"the system key is deleted", "", refused, del(namespace, "latticekeep-system-key")},
		{"a Secret of such a name elsewhere", secret("shop", "latticekeep-tls", "kubernetes.io/tls") + pair, refused, create},
		{"one that is there elsewhere", secret("shop", "latticekeep-ca", "Opaque"), refused, replace},

		{"others are no concern of it", secret("shop", "free", "Opaque"), "", []string{"create", "--as=other", "-f", "-"}},
	} {
		out, err := kubectl(t, c, step.stdin, step.args...)
		check(t, step.name, out, err, step.refused)
		if step.refused != "" && !strings.Contains(out, "orbidden") { // which the operator takes for what it is
			t.Errorf("%s: refused with %s", step.name, out)
		}
	}
}

// What was allowed when it was made can still be suspended, released and deleted, but takes no new values.
func TestPoliciesLeaveOldObjectsAlone(t *testing.T) {
	c := applied(t)
	must(t, c, sealedCredential("platform", "wide", "Cluster"), "create", dev, "-f", "-")
	out, err := helmTemplate(t, "--show-only", "templates/admission.yaml")
	if err != nil {
		t.Fatal(err)
	}
	must(t, c, out, "apply", "-f", "-")
	awaitRefusal(t, c, sealedCredential("platform", "other", "Cluster"))
	said, err := kubectl(t, c, "", "patch", dev, "sealedcredential", "wide", "--namespace", "platform", "--type=merge", "-p", `{"spec":{"sealed":{"values":{"k":{"data":"BBBB"}}}}}`)
	check(t, "new values", said, err, "Cluster is not allowed in this namespace")
	for _, change := range []string{`{"spec":{"suspend":true}}`, `{"metadata":{"finalizers":["example.org/x"]}}`} {
		must(t, c, "", "patch", dev, "sealedcredential", "wide", "--namespace", "platform", "--type=merge", "-p", change)
	}
	must(t, c, "", "delete", dev, "sealedcredential", "wide", "--namespace", "platform", "--wait=false")
	must(t, c, "", "patch", dev, "sealedcredential", "wide", "--namespace", "platform", "--type=merge", "-p", `{"metadata":{"finalizers":[]}}`)
}

func generated(ns string) string {
	return fmt.Sprintf("apiVersion: latticekeep.dev/v1beta1\nkind: SealedCredential\nmetadata: {namespace: %s, name: generated}\n"+
		"spec: {credentialType: test, generate: [{key: k, random: {}}]}", ns)
}

func check(t *testing.T, name, out string, err error, refused string) {
	t.Helper()
	switch {
	case refused == "" && err != nil:
		t.Errorf("%s: refused: %s", name, out)
	case refused != "" && err == nil:
		t.Errorf("%s: it was done: %s", name, out)
	case refused != "" && !strings.Contains(out, refused):
		t.Errorf("%s: refused with %s", name, out)
	}
}

// awaitPolicies waits until the API server refuses by each policy.
func awaitPolicies(t *testing.T, c *kubetest.ControlPlane) {
	t.Helper()
	for _, probe := range []string{
		sealedCredential("shop", "probe", "Cluster"), configMap("latticekeep-sealing-key", "probe"), secret("sealed", "probe", "Opaque"),
	} {
		awaitRefusal(t, c, probe)
	}
}

// awaitRefusal waits until a policy refuses the object: the API server reads policies a moment after they are written.
func awaitRefusal(t *testing.T, c *kubetest.ControlPlane, object string, as ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for {
		out, err := kubectl(t, c, object, append(as, "create", "--dry-run=server", "-f", "-")...)
		if err != nil && strings.Contains(out, "ValidatingAdmissionPolicy") {
			return
		}
		if ctx.Err() != nil {
			t.Fatalf("no policy refuses\n%s\n%s", object, out)
		}
	}
}

// guide returns the values files that the guide shows.
func guide(t *testing.T) (all []string) {
	t.Helper()
	text, err := os.ReadFile("../docs/guides/platform.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, block := range regexp.MustCompile("(?s)\n```yaml\n(.*?)\n```\n").FindAllStringSubmatch(string(text), -1) {
		all = append(all, block[1])
	}
	if len(all) < 9 {
		t.Fatalf("the guide shows %d values files", len(all))
	}
	return all
}

// What a real API server would say of each rendering, hooks and webhook included, down to the CEL of the match conditions.
func TestRealAPIServerTakesEveryRendering(t *testing.T) {
	c := kubetest.ForTest(t)
	must(t, c, "", "create", "namespace", namespace)
	must(t, c, "", "label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted", "pod-security.kubernetes.io/warn=restricted")
	files, err := filepath.Glob("latticekeep/ci/*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		out := text(t, slices.DeleteFunc(rendered(t, "--values", file), foreign))
		// A directory of the node, and its network, are all that the chart offers beyond the restricted profile.
		said := must(t, c, out, "apply", "--dry-run=server", "-f", "-")
		if warns := strings.Contains(said, "Warning"); warns != (strings.Contains(file, "one-node") || strings.Contains(file, "full") || strings.Contains(file, "airgapped") || strings.Contains(file, "host-network")) {
			t.Errorf("%s: the API server warns: %v\n%s", file, warns, said)
		}
	}
	for i, values := range guide(t) {
		out := text(t, slices.DeleteFunc(renderedWith(t, values, "--set", "crd.install=false"), foreign))
		said := must(t, c, out, "apply", "--dry-run=server", "-f", "-")
		if warns := strings.Contains(said, "Warning"); warns != strings.Contains(values, "hostNetwork") {
			t.Errorf("docs/guides/platform.md, values %d: the API server warns: %v\n%s", i+1, warns, said)
		}
	}
	config, err := exec.CommandContext(t.Context(), "kubectl", "kustomize", "../config/default").Output()
	if err != nil {
		t.Fatal(err)
	}
	if said := must(t, c, string(config), "apply", "--dry-run=server", "--server-side", "--force-conflicts", "-f", "-"); strings.Contains(said, "Warning") {
		t.Errorf("config/default: the API server warns:\n%s", said)
	}
	samples, err := filepath.Glob("../config/samples/*.yaml")
	if err != nil || len(samples) < 4 {
		t.Fatalf("there are no samples: %v", err)
	}
	for _, file := range samples {
		if filepath.Base(file) == "kustomization.yaml" {
			continue
		}
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		must(t, c, string(text), "create", "--dry-run=server", "-f", "-")
	}
}
