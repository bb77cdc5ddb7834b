package charts_test

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"net/http"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"github.com/latticekeep/latticekeep/api/v1beta1"
)

// A life is an installation with people who use it.
type life struct {
	*installation
	identity  string // fingerprint, as the server printed it
	systemKey string
}

// people are three teams, of whom dev may edit what they have, with the roles of the chart for SealedCredentials, and administers
// the chart's namespace. The roles view and edit get their rules from the controller manager, which is not here.
var people = func() string {
	var b strings.Builder
	b.WriteString(`
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: team}
rules: [{apiGroups: ["", apps], resources: [secrets, configmaps, pods, deployments], verbs: [get, list, watch, create, update, patch, delete, deletecollection]}]
`)
	for _, ns := range []string{"shop", "bank", "platform", namespace} {
		if ns != namespace {
			fmt.Fprintf(&b, "---\n{apiVersion: v1, kind: Namespace, metadata: {name: %s}}\n", ns)
		}
		for _, role := range []string{"team", "latticekeep-view", "latticekeep-edit"} {
			fmt.Fprintf(&b, `---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {namespace: %s, name: %s}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: %[2]s}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: dev}]
`, ns, role)
		}
	}
	return b.String()
}()

// as runs kubectl as dev.
func (l *life) as(stdin string, args ...string) (string, error) {
	l.t.Helper()
	return kubectl(l.t, l.plane, stdin, append([]string{dev}, args...)...)
}

// dev runs kubectl as dev, and must succeed without a warning.
func (l *life) dev(stdin string, args ...string) string {
	l.t.Helper()
	out, err := l.as(stdin, args...)
	if err != nil || strings.Contains(out, "Warning") {
		l.t.Fatalf("kubectl %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return out
}

func (l *life) apply(manifest string) {
	l.t.Helper()
	l.dev(manifest, "apply", "-f", "-")
}

// try runs a command of the program as somebody with the system key.
func (l *life) try(args ...string) (string, error) {
	l.t.Helper()
	ca := l.file("ca.crt", l.secret(namespace, "latticekeep-tls")["ca.crt"])
	cmd := exec.CommandContext(l.t.Context(), l.program, args...)
	cmd.Dir = l.dir
	cmd.Env = []string{"SSL_CERT_FILE=" + ca, "LATTICEKEEP_IDENTITY=" + l.identity, "LATTICEKEEP_API_KEY=" + l.systemKey}
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		err = fmt.Errorf("%w: %s", err, stderr.String())
	}
	return string(out), err
}

func (l *life) latticekeep(args ...string) string {
	l.t.Helper()
	out, err := l.try(args...)
	if err != nil {
		l.t.Fatalf("latticekeep %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return out
}

// seal returns a manifest in shop of type database, with user and password, for 30 days. Flags that come later win.
func (l *life) seal(name, password string, flags ...string) *unstructured.Unstructured {
	l.t.Helper()
	out := l.latticekeep(append([]string{"seal", "--url", l.url, "--namespace", "shop", "--name", name, "--type", "database", "--ttl-days", "30",
		"--from-literal", "user=app", "--from-literal", "password=" + password}, flags...)...)
	o := new(unstructured.Unstructured)
	if err := yaml.Unmarshal([]byte(out), &o.Object); err != nil {
		l.t.Fatal(err)
	}
	set(l.t, o, map[string]any{}, "spec", "target")
	return o
}

func set(t *testing.T, o *unstructured.Unstructured, value any, path ...string) {
	t.Helper()
	if err := unstructured.SetNestedField(o.Object, value, path...); err != nil {
		t.Fatal(err)
	}
}

// applyObject applies an object from its file.
func (l *life) applyObject(o *unstructured.Unstructured) {
	l.t.Helper()
	file := l.file(filepath.Join("git", o.GetName()+".yaml"), text(l.t, []unstructured.Unstructured{*o}))
	l.dev("", "apply", "-f", file)
}

// await waits until an object is as it should be.
func (l *life) await(ns, name, what string, is func(*v1beta1.SealedCredential) bool) *v1beta1.SealedCredential {
	l.t.Helper()
	o := new(v1beta1.SealedCredential)
	l.awaitThat(func() string { return fmt.Sprintf("%s/%s is not %s: %+v", ns, name, what, o.Status) }, func() bool {
		o = new(v1beta1.SealedCredential)
		l.get(ns, name, o)
		return o.Status.ObservedGeneration == o.Generation && is(o)
	})
	return o
}

// ready waits until an object of shop serves that version, and its target holds it.
func (l *life) ready(name string, version int64) *v1beta1.SealedCredential {
	l.t.Helper()
	return l.await("shop", name, fmt.Sprintf("ready with version %d", version), func(o *v1beta1.SealedCredential) bool {
		synced := o.Spec.Target == nil || meta.IsStatusConditionTrue(o.Status.Conditions, v1beta1.ConditionTargetSynced)
		return o.Status.Version == version && synced && meta.IsStatusConditionTrue(o.Status.Conditions, v1beta1.ConditionReady)
	})
}

// stalled waits until an object is refused for a reason.
func (l *life) stalled(ns, name, reason string) *v1beta1.SealedCredential {
	l.t.Helper()
	return l.await(ns, name, "Stalled with reason "+reason, func(o *v1beta1.SealedCredential) bool {
		c := meta.FindStatusCondition(o.Status.Conditions, v1beta1.ConditionStalled)
		return c != nil && c.Reason == reason
	})
}

// patch changes an object of shop.
func (l *life) patch(name, change string) {
	l.t.Helper()
	l.dev("", "patch", "sealedcredential", name, "--namespace", "shop", "--type=merge", "-p", change)
}

// holds checks a value of a Secret of shop.
func (l *life) holds(name, key, want string) {
	l.t.Helper()
	if got := l.secret("shop", name)[key]; got != want {
		l.t.Errorf("%s of Secret %s is %q, want %q", key, name, got, want)
	}
}

// later seals a manifest with another password, whose time is a later one: times have whole seconds.
func (l *life) later(o *unstructured.Unstructured, password string) *unstructured.Unstructured {
	l.t.Helper()
	at := func(o *unstructured.Unstructured) any {
		return field(l.t, o, "spec", "sealed", "values", "password", "sealedAt")
	}
	next := l.seal(o.GetName(), password)
	for at(next) == at(o) {
		next = l.seal(o.GetName(), password)
	}
	return next
}

func (l *life) awaitGone(secret string) {
	l.t.Helper()
	l.awaitThat(func() string { return "Secret " + secret + " is still there" }, func() bool { return !l.secretThere("shop", secret) })
}

// readers are ServiceAccounts of workloads: of one that may read two credentials, of one that may read all, and of one that may read none.
const readers = `---
{apiVersion: v1, kind: ServiceAccount, metadata: {namespace: shop, name: app}}
---
{apiVersion: v1, kind: ServiceAccount, metadata: {namespace: shop, name: all}}
---
{apiVersion: v1, kind: ServiceAccount, metadata: {namespace: shop, name: none}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {namespace: shop, name: app}
rules: [{apiGroups: [latticekeep.dev], resources: [sealedcredentials], resourceNames: [db, kept, ended], verbs: [unseal]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {namespace: shop, name: app}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: app}
subjects: [{kind: ServiceAccount, name: app, namespace: shop}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {namespace: shop, name: all}
rules: [{apiGroups: [latticekeep.dev], resources: [sealedcredentials], verbs: [unseal]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {namespace: shop, name: all}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: all}
subjects: [{kind: ServiceAccount, name: all, namespace: shop}]
---
apiVersion: v1
kind: Pod
metadata: {namespace: shop, name: app}
spec: {serviceAccountName: app, containers: [{name: app, image: example.org/app}]}
`

// answer is what the REST interface says.
type answer struct {
	status int
	body   map[string]any
}

// call reads a path with a token, and is patient with an API server that is too busy to say who that is.
func (l *life) call(token, path string) (a answer) {
	l.t.Helper()
	l.awaitThat(func() string { return fmt.Sprintf("reading %s: %d %v", path, a.status, a.body["message"]) }, func() bool {
		a = l.callOnce(token, path)
		return a.status != http.StatusServiceUnavailable
	})
	return a
}

// callOnce trusts the CA that the operator published.
func (l *life) callOnce(token, path string) answer {
	l.t.Helper()
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM([]byte(l.secret(namespace, "latticekeep-tls")["ca.crt"])) {
		l.t.Fatal("there is no CA in Secret latticekeep-tls")
	}
	r, err := http.NewRequestWithContext(l.t.Context(), http.MethodGet, l.url+path, nil)
	if err != nil {
		l.t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer "+token)
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS13}}
	defer transport.CloseIdleConnections()
	response, err := transport.RoundTrip(r)
	if err != nil {
		l.t.Fatal(err)
	}
	defer response.Body.Close()
	a := answer{status: response.StatusCode}
	if err := json.NewDecoder(response.Body).Decode(&a.body); err != nil {
		l.t.Fatal(err)
	}
	return a
}

// value reads a value of a credential that the token may read, once the API server's authorizer has heard of the RoleBinding.
func (l *life) value(token, path, key string) any {
	l.t.Helper()
	var a answer
	l.awaitThat(func() string { return fmt.Sprintf("reading %s: %d %v", path, a.status, a.body["message"]) }, func() bool {
		a = l.callOnce(token, path)
		return a.status == http.StatusOK
	})
	values, _ := a.body["values"].(map[string]any)
	return values[key]
}

// apiKey is the file of a key of a tenant of its own, which may reseal and nothing else.
func (l *life) apiKey() string {
	l.t.Helper()
	var made struct {
		Tenant struct {
			ID string `json:"tenant_id"`
		}
	}
	if err := json.Unmarshal([]byte(l.latticekeep("tenant", "--json", "create", "ci", "--url", l.url)), &made); err != nil {
		l.t.Fatal(err)
	}
	return l.file("key", l.latticekeep("apikey", "create", "ci", "--url", l.url, "--tenant", made.Tenant.ID, "--scope", "vault:write"))
}
