package server_test

import (
	"net/http"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/client-go/tools/clientcmd"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/identity/tokenreview"
	"github.com/latticekeep/latticekeep/test/kubetest"
	"github.com/latticekeep/latticekeep/test/servertest"
)

// cluster is a real API server beside the service, which has no more rights there than tokenreview says it needs.
type cluster struct {
	*service
	plane *kubetest.ControlPlane
	at    servertest.Clock // of what the service remembers of the cluster's answers
	wire  *way
}

// way is the way to the API server, which can be cut.
type way struct {
	next http.RoundTripper
	mu   sync.Mutex
	cut  bool
}

func (w *way) RoundTrip(r *http.Request) (*http.Response, error) {
	w.mu.Lock()
	cut := w.cut
	w.mu.Unlock()
	if cut {
		<-r.Context().Done()
		return nil, r.Context().Err()
	}
	return w.next.RoundTrip(r)
}

func (w *way) set(cut bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.cut = cut
}

const rights = `
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: reviewer}
rules:
- {apiGroups: [authentication.k8s.io], resources: [tokenreviews], verbs: [create]}
- {apiGroups: [authorization.k8s.io], resources: [subjectaccessreviews], verbs: [create]}
- {apiGroups: [""], resources: [namespaces], verbs: [get]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: reviewer}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: reviewer}
subjects: [{kind: ServiceAccount, namespace: latticekeep-system, name: latticekeep}]
`

// workload is a namespace with a pod, whose ServiceAccount may list and seal everything, and unseal what is called db.
const workload = `
apiVersion: v1
kind: Namespace
metadata: {name: NAMESPACE}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: app, namespace: NAMESPACE}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: app, namespace: NAMESPACE}
rules:
- {apiGroups: [latticekeep.dev], resources: [sealedcredentials], verbs: [list, seal]}
- {apiGroups: [latticekeep.dev], resources: [sealedcredentials], verbs: [unseal], resourceNames: [db]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: app, namespace: NAMESPACE}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: app}
subjects: [{kind: ServiceAccount, namespace: NAMESPACE, name: app}]
---
apiVersion: v1
kind: Pod
metadata: {name: app, namespace: NAMESPACE}
spec: {serviceAccountName: app, containers: [{name: app, image: app}]}
`

func newCluster(t *testing.T) *cluster {
	t.Helper()
	c := &cluster{service: newService(t), plane: kubetest.ForTest(t), wire: &way{}}
	c.Clock.Set(time.Now())
	c.kubectl(rights, "apply", "-f", "-")
	kubeconfig, err := c.plane.KubeconfigFor("system:serviceaccount:latticekeep-system:latticekeep")
	if err != nil {
		t.Fatal(err)
	}
	cfg, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	cfg.Wrap(func(next http.RoundTripper) http.RoundTripper { c.wire.next = next; return c.wire })
	reviewer, err := tokenreview.New(cfg, "latticekeep", c.at.Now)
	if err != nil {
		t.Fatal(err)
	}
	c.Identity.UseCluster(reviewer, map[string]authz.TenantID{"default": c.Tenant})
	return c
}

func (c *cluster) kubectl(stdin string, args ...string) string {
	c.T.Helper()
	cmd := c.plane.Kubectl(c.T.Context(), args...)
	cmd.Stdin = strings.NewReader(stdin)
	out, err := cmd.Output()
	if err != nil {
		message := ""
		if exit, ok := err.(*exec.ExitError); ok {
			message = string(exit.Stderr)
		}
		c.T.Fatalf("kubectl %s: %v\n%s", strings.Join(args, " "), err, message)
	}
	return strings.TrimSpace(string(out))
}

// workload makes a namespace with a pod and returns the token that the kubelet would put into it, and the pod's UID.
func (c *cluster) workload(namespace string) (token, pod string) {
	c.T.Helper()
	c.kubectl(strings.ReplaceAll(workload, "NAMESPACE", namespace), "apply", "-f", "-")
	pod = c.kubectl("", "get", "pod", "app", "-n", namespace, "-o", "jsonpath={.metadata.uid}")
	return c.token(namespace, "--bound-object-kind", "Pod", "--bound-object-name", "app", "--bound-object-uid", pod, "--audience", "latticekeep"), pod
}

func (c *cluster) token(namespace string, args ...string) string {
	c.T.Helper()
	return c.kubectl("", append([]string{"create", "token", "app", "-n", namespace}, args...)...)
}

// as calls with a token until there is an answer: the machine may be busy.
func (c *cluster) as(token, method, path, body string) servertest.Reply {
	c.T.Helper()
	for end := time.Now().Add(time.Minute); ; {
		r := c.Call(servertest.Request{Method: method, Path: path, Bearer: token, Body: body})
		if r.Status != http.StatusServiceUnavailable || time.Now().After(end) {
			return r
		}
	}
}

// soon repeats a call until it is answered with the status: the API server takes its time to notice what it was told. Nothing is
// remembered from one call to the next.
func (c *cluster) soon(status int, token, method, path, body string) servertest.Reply {
	c.T.Helper()
	for end := time.Now().Add(time.Minute); ; {
		r := c.as(token, method, path, body)
		if r.Status == status || time.Now().After(end) {
			r.Want(c.T, status)
			return r
		}
		c.at.Advance(10 * time.Second)
	}
}

const (
	listPath = "/api/v2/vault/list"
	sealPath = "/api/v2/vault/seal"
	namePath = "/api/v2/vault/by-name/"
)

func sealBody(name, value string) string {
	return `{"name":"` + name + `","credential_type":"database","values":{"password":"` + value + `"}}`
}

func TestPodsOfARealClusterReachWhatTheirNamespaceMay(t *testing.T) {
	c := newCluster(t)
	shop, pod := c.workload("shop")
	other, _ := c.workload("other")
	system := c.SystemKey()
	tenants := func() int {
		return len(c.Call(servertest.Request{Method: "GET", Path: "/api/v2/system/tenants", Key: system}).Want(t, http.StatusOK)["tenants"].([]any))
	}
	before := tenants()

	// Who it is, but not what for.
	for name, token := range map[string]string{
		"for the API server":   c.token("shop"),
		"for another audience": c.token("shop", "--audience", "vault"),
		"changed":              shop[:len(shop)-8] + "AAAAAAAA",
	} {
		if r := c.as(token, "GET", listPath, ""); r.Status != http.StatusUnauthorized {
			t.Errorf("a token %s: %d %s", name, r.Status, r.Body)
		}
	}
	if r := c.as(shop, "DELETE", "/api/v2/vault/x", ""); r.Status != http.StatusForbidden || tenants() != before {
		t.Errorf("what RBAC does not allow: %d %s, %d tenants more", r.Status, r.Body, tenants()-before)
	}

	id := c.soon(http.StatusCreated, shop, "POST", sealPath, sealBody("db", "of shop")).Want(t, http.StatusCreated)["credential_id"].(string)
	if n := tenants(); n != before+1 {
		t.Errorf("%d tenants more", n-before)
	}
	c.as(shop, "POST", sealPath, sealBody("hidden", "x")).Want(t, http.StatusCreated)
	read := c.as(shop, "GET", namePath+"db", "")
	if got := read.Want(t, http.StatusOK)["values"].(map[string]any)["password"]; got != "of shop" {
		t.Errorf("the pod reads %v", got)
	}
	c.as(shop, "GET", listPath, "").Want(t, http.StatusOK)
	for _, path := range []string{"/api/v2/vault/" + id, namePath + "hidden", namePath + "nothing", "/api/v2/vault/" + id + "/versions", "/api/v2/auth/me"} {
		c.as(shop, "GET", path, "").Message(t, http.StatusForbidden)
	}

	// Its entry, in the namespace's own history.
	c.kubectl(`{"apiVersion":"rbac.authorization.k8s.io/v1","kind":"Role","metadata":{"name":"audit","namespace":"shop"},
		"rules":[{"apiGroups":["latticekeep.dev"],"resources":["sealedcredentials"],"verbs":["read_audit"]}]}`, "apply", "-f", "-")
	c.kubectl("", "create", "rolebinding", "audit", "-n", "shop", "--role=audit", "--serviceaccount=shop:app")
	log := c.soon(http.StatusOK, shop, "GET", "/api/v2/audit/logs?event_type=CREDENTIAL_UNSEALED&limit=100", "").Want(t, http.StatusOK)
	account := c.kubectl("", "get", "serviceaccount", "app", "-n", "shop", "-o", "jsonpath={.metadata.uid}")
	found := 0
	for _, e := range log["entries"].([]any) {
		e := e.(map[string]any)
		actor, attributes := e["actor"].(map[string]any), e["attributes"].(map[string]any)
		if actor["type"] != "service_account" || actor["id"] != account || attributes["pod_uid"] != pod {
			t.Errorf("an entry of %v with %v", actor, attributes)
		}
		if e["request_id"] == read.Header.Get("X-Request-ID") && e["outcome"] == "success" {
			found++
		}
	}
	if found != 1 {
		t.Errorf("%d entries of what was read", found)
	}

	// Another namespace has the same names, and nothing of this one.
	c.as(other, "GET", namePath+"db", "").Message(t, http.StatusForbidden)
	c.as(other, "POST", sealPath, sealBody("db", "of other")).Want(t, http.StatusCreated)
	if got := c.as(other, "GET", namePath+"db", "").Want(t, http.StatusOK)["values"].(map[string]any)["password"]; got != "of other" {
		t.Errorf("the other pod reads %v", got)
	}
	if n := len(c.as(other, "GET", listPath, "").Want(t, http.StatusOK)["credentials"].([]any)); n != 1 {
		t.Errorf("the other pod lists %d", n)
	}
	// A binding in one namespace for a ServiceAccount of another gives that nothing here: it acts in its own.
	c.kubectl("", "create", "rolebinding", "guest", "-n", "shop", "--clusterrole=cluster-admin", "--serviceaccount=other:app")
	c.as(other, "GET", "/api/v2/vault/"+id, "").Message(t, http.StatusForbidden)
	// Not in version 1, and not as a cookie.
	if r := c.as(shop, "GET", "/v1/keys", ""); r.Status != http.StatusUnauthorized {
		t.Errorf("version 1: %d", r.Status)
	}
	if r := c.Call(servertest.Request{Method: "GET", Path: listPath, Header: servertest.Cookies("accessToken", shop)}); r.Status != http.StatusUnauthorized {
		t.Errorf("as a cookie: %d", r.Status)
	}

	// A right that is taken away ends, ten seconds later at most.
	c.kubectl("", "delete", "rolebinding", "app", "-n", "shop")
	c.as(shop, "GET", namePath+"db", "").Want(t, http.StatusOK)
	c.at.Advance(10 * time.Second)
	c.soon(http.StatusForbidden, shop, "GET", namePath+"db", "")

	// A pod that is deleted is nobody. (The API server would remember a token that was used before.)
	unused := c.token("other", "--bound-object-kind", "Pod", "--bound-object-name", "app", "--audience", "latticekeep")
	c.kubectl("", "delete", "pod", "app", "-n", "other", "--grace-period=0", "--force")
	c.soon(http.StatusUnauthorized, unused, "GET", listPath, "")

	if strings.Contains(c.Logged.String(), strings.Split(shop, ".")[2]) {
		t.Error("a token is in the log")
	}
}

func TestAConfiguredNamespaceOfARealClusterIsItsTenants(t *testing.T) {
	c := newCluster(t)
	c.kubectl("", "create", "serviceaccount", "app", "-n", "default")
	c.kubectl("", "create", "clusterrole", "reader", "--verb=unseal", "--resource=sealedcredentials.latticekeep.dev")
	c.kubectl("", "create", "rolebinding", "reader", "-n", "default", "--clusterrole=reader", "--serviceaccount=default:app")
	token := c.token("default", "--audience", "latticekeep")
	c.soon(http.StatusOK, token, "GET", "/api/v2/vault/"+c.Seal("sealed with the tenant's key"), "")
}

func TestANamespaceMadeAgainSeesNothingOfTheFormer(t *testing.T) {
	c := newCluster(t)
	former, _ := c.workload("shop")
	id := c.soon(http.StatusCreated, former, "POST", sealPath, sealBody("db", "of the former")).Want(t, http.StatusCreated)["credential_id"].(string)
	c.as(former, "GET", namePath+"db", "").Want(t, http.StatusOK)

	// What the controllers of a cluster do when a namespace is deleted.
	c.kubectl("", "delete", "all,serviceaccounts,roles,rolebindings", "--all", "-n", "shop", "--grace-period=0", "--force")
	c.kubectl("", "delete", "namespace", "shop", "--wait=false")
	c.kubectl(`{"apiVersion":"v1","kind":"Namespace","metadata":{"name":"shop"},"spec":{"finalizers":[]}}`, "replace", "--raw", "/api/v1/namespaces/shop/finalize", "-f", "-")
	fresh, _ := c.workload("shop")

	c.at.Advance(10 * time.Second)
	c.soon(http.StatusUnauthorized, former, "GET", namePath+"db", "")
	c.soon(http.StatusOK, fresh, "GET", listPath, "")
	if n := len(c.as(fresh, "GET", listPath, "").Want(t, http.StatusOK)["credentials"].([]any)); n != 0 {
		t.Errorf("%d credentials of the former namespace are listed", n)
	}
	c.as(fresh, "GET", namePath+"db", "").Message(t, http.StatusForbidden)
	c.as(fresh, "POST", sealPath, sealBody("db", "of the new one")).Want(t, http.StatusCreated)
	if got := c.as(fresh, "GET", namePath+"db", "").Want(t, http.StatusOK)["values"].(map[string]any)["password"]; got != "of the new one" {
		t.Errorf("the new pod reads %v", got)
	}
	c.as(fresh, "GET", "/api/v2/vault/"+id, "").Message(t, http.StatusForbidden)
}

func TestAnAPIServerThatIsAwayIsA503AndNoMore(t *testing.T) {
	c := newCluster(t)
	token, _ := c.workload("shop")
	c.soon(http.StatusCreated, token, "POST", sealPath, sealBody("db", "value"))
	c.as(token, "GET", namePath+"db", "").Want(t, http.StatusOK)
	fresh := c.token("shop", "--audience", "latticekeep")
	away := func(what, token string) {
		t.Helper()
		r := c.Call(servertest.Request{Method: "GET", Path: namePath + "db", Bearer: token})
		if m := r.Message(t, http.StatusServiceUnavailable); strings.Contains(m, "cluster") {
			t.Errorf("%s: %s", what, m)
		}
	}
	c.wire.set(true) // it hangs
	c.Call(servertest.Request{Method: "GET", Path: namePath + "db", Bearer: token}).Want(t, http.StatusOK)
	away("a token that it was not asked about", fresh)
	c.at.Advance(10 * time.Second)
	away("a token that it was asked about before", token)
	c.Get(listPath).Want(t, http.StatusOK)
	if r := c.Call(servertest.Request{Method: "GET", Path: listPath, Bearer: "junk"}); r.Status != http.StatusUnauthorized {
		t.Errorf("junk: %d", r.Status)
	}
	c.wire.set(false)
	c.soon(http.StatusOK, token, "GET", namePath+"db", "")
	c.soon(http.StatusForbidden, token, "GET", namePath+"other", "")
	if err := c.plane.Stop(); err != nil {
		t.Fatal(err)
	}
	c.at.Advance(10 * time.Second)
	away("for good", token)
	c.Get(listPath).Want(t, http.StatusOK)
}
