package tokenreview

import (
	"errors"
	"io"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity"
	"github.com/latticekeep/latticekeep/test/kubetest"
)

const audience = "latticekeep"

// longest is how long a test waits for something that takes milliseconds on an idle machine.
const longest = time.Minute

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// clock stands still unless the test moves it.
type clock struct{ micros atomic.Int64 }

func (c *clock) Now() time.Time          { return time.UnixMicro(c.micros.Load()) }
func (c *clock) advance(d time.Duration) { c.micros.Add(d.Microseconds()) }

// wire is the connection to the API server. It counts requests by resource, and a test can make it
// fail.
type wire struct {
	next http.RoundTripper

	mu     sync.Mutex
	asked  map[string]int
	broken func(*http.Request) (*http.Response, error) // nil: it works
}

func (w *wire) RoundTrip(r *http.Request) (*http.Response, error) {
	resource := path.Base(r.URL.Path)
	if strings.Contains(r.URL.Path, "/namespaces/") {
		resource = "namespaces"
	}
	w.mu.Lock()
	w.asked[resource]++
	broken := w.broken
	w.mu.Unlock()
	if broken != nil {
		if answer, err := broken(r); answer != nil || err != nil {
			return answer, err
		}
	}
	return w.next.RoundTrip(r)
}

func (w *wire) fail(how func(*http.Request) (*http.Response, error)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.broken = how
}

// count returns how often a resource was asked for since the previous call.
func (w *wire) count(resource string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := w.asked[resource]
	delete(w.asked, resource)
	return n
}

// answering returns a failure of wire that is an answer with this status.
func answering(status int, body string, header ...string) func(*http.Request) (*http.Response, error) {
	return func(*http.Request) (*http.Response, error) {
		r := &http.Response{StatusCode: status, Header: http.Header{"Content-Type": {"application/json"}}, Body: io.NopCloser(strings.NewReader(body))}
		for i := 0; i < len(header); i += 2 {
			r.Header.Set(header[i], header[i+1])
		}
		return r, nil
	}
}

func hanging(r *http.Request) (*http.Response, error) {
	<-r.Context().Done()
	return nil, r.Context().Err()
}

// world is a real API server and a reviewer with the documented rights and no others.
type world struct {
	t     testing.TB
	plane *kubetest.ControlPlane
	admin kubernetes.Interface
	clock clock
	wire  wire
	cfg   *rest.Config
	*Reviewer
}

func newWorld(t testing.TB) *world {
	w := &world{t: t, plane: kubetest.ForTest(t), wire: wire{asked: make(map[string]int)}}
	w.clock.micros.Store(time.Now().UnixMicro())
	cfg, err := clientcmd.BuildConfigFromFlags("", w.plane.Kubeconfig)
	must(t, err)
	cfg.QPS = -1
	w.admin, err = kubernetes.NewForConfig(cfg)
	must(t, err)

	const name, user = "latticekeep-reviewer", "system:serviceaccount:latticekeep-system:latticekeep"
	_, err = w.admin.RbacV1().ClusterRoles().Create(t.Context(), &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: name}, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{"authentication.k8s.io"}, Resources: []string{"tokenreviews"}, Verbs: []string{"create"}},
		{APIGroups: []string{"authorization.k8s.io"}, Resources: []string{"subjectaccessreviews"}, Verbs: []string{"create"}},
		{APIGroups: []string{""}, Resources: []string{"namespaces"}, Verbs: []string{"get"}},
	}}, metav1.CreateOptions{})
	must(t, err)
	_, err = w.admin.RbacV1().ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: name}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name},
		Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: user}},
	}, metav1.CreateOptions{})
	must(t, err)
	kubeconfig, err := w.plane.KubeconfigFor(user)
	must(t, err)
	w.cfg, err = clientcmd.BuildConfigFromFlags("", kubeconfig)
	must(t, err)
	w.cfg.Wrap(func(next http.RoundTripper) http.RoundTripper { w.wire.next = next; return &w.wire })
	w.forget()
	return w
}

// forget replaces the reviewer by one that remembers nothing.
func (w *world) forget() {
	w.t.Helper()
	var err error
	w.Reviewer, err = New(w.cfg, audience, w.clock.Now)
	must(w.t, err)
}

// namespace makes a namespace with the ServiceAccount app.
func (w *world) namespace(name string) *corev1.Namespace {
	w.t.Helper()
	n, err := w.admin.CoreV1().Namespaces().Create(w.t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
	must(w.t, err)
	w.account(name, "app")
	return n
}

func (w *world) account(namespace, name string) *corev1.ServiceAccount {
	w.t.Helper()
	var a *corev1.ServiceAccount
	eventually(w.t, "the API server takes the namespace for the new one", func() bool {
		var err error
		a, err = w.admin.CoreV1().ServiceAccounts(namespace).Create(w.t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
		if apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
			return false
		}
		must(w.t, err)
		return true
	})
	return a
}

// remove deletes a namespace completely, because no controller runs here.
func (w *world) remove(name string) {
	w.t.Helper()
	ctx := w.t.Context()
	must(w.t, w.admin.CoreV1().ServiceAccounts(name).DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{}))
	must(w.t, w.admin.CoreV1().Namespaces().Delete(ctx, name, metav1.DeleteOptions{}))
	n, err := w.admin.CoreV1().Namespaces().Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return
	}
	must(w.t, err)
	n.Spec.Finalizers = nil
	_, err = w.admin.CoreV1().Namespaces().Finalize(ctx, n, metav1.UpdateOptions{})
	must(w.t, err)
}

// pod makes a pod of the ServiceAccount app. The pod never runs.
func (w *world) pod(namespace, name string) *corev1.Pod {
	w.t.Helper()
	p, err := w.admin.CoreV1().Pods(namespace).Create(w.t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       corev1.PodSpec{ServiceAccountName: "app", Containers: []corev1.Container{{Name: "app", Image: "app"}}},
	}, metav1.CreateOptions{})
	must(w.t, err)
	return p
}

// token requests a token of the ServiceAccount app, bound to the pod unless that is nil.
func (w *world) token(namespace string, pod *corev1.Pod, audiences ...string) string {
	w.t.Helper()
	spec := authenticationv1.TokenRequestSpec{Audiences: audiences}
	if pod != nil {
		spec.BoundObjectRef = &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID}
	}
	r, err := w.admin.CoreV1().ServiceAccounts(namespace).CreateToken(w.t.Context(), "app", &authenticationv1.TokenRequest{Spec: spec}, metav1.CreateOptions{})
	must(w.t, err)
	return r.Status.Token
}

// resign changes the claims of a token and signs it with key, or with the API server's own key if
// that is nil.
func (w *world) resign(token string, key any, change func(jwt.MapClaims)) string {
	w.t.Helper()
	claims := jwt.MapClaims{}
	parsed, _, err := jwt.NewParser().ParseUnverified(token, claims)
	must(w.t, err)
	if key == nil {
		b, err := os.ReadFile(filepath.Join(filepath.Dir(w.plane.Kubeconfig), "tokens.key"))
		must(w.t, err)
		key, err = jwt.ParseECPrivateKeyFromPEM(b)
		must(w.t, err)
	}
	change(claims)
	fresh := jwt.NewWithClaims(parsed.Method, claims)
	fresh.Header["kid"] = parsed.Header["kid"]
	signed, err := fresh.SignedString(key)
	must(w.t, err)
	return signed
}

// review repeats the question until there is an answer, because the machine may be busy.
func (w *world) review(token string) (identity.ServiceAccount, error) {
	w.t.Helper()
	return patient(w.t, func() (identity.ServiceAccount, error) { return w.Review(w.t.Context(), token, true) })
}

func (w *world) allowed(a identity.ServiceAccount, verb, namespace, name string) bool {
	w.t.Helper()
	allowed, err := patient(w.t, func() (bool, error) { return w.Allowed(w.t.Context(), a, verb, namespace, name) })
	must(w.t, err)
	return allowed
}

func patient[T any](t testing.TB, ask func() (T, error)) (T, error) {
	t.Helper()
	for end := time.Now().Add(longest); ; {
		v, err := ask()
		if !errors.Is(err, fault.Unavailable) || time.Now().After(end) {
			return v, err
		}
	}
}

// eventually repeats a check that the API server's own caches delay.
func eventually(t testing.TB, what string, holds func() bool) {
	t.Helper()
	for end := time.Now().Add(longest); !holds(); {
		if time.Now().After(end) {
			t.Fatalf("it never came to this: %s", what)
		}
	}
}

// grant gives the ServiceAccount app rights to SealedCredentials.
func (w *world) grant(namespace, role string, rules ...rbacv1.PolicyRule) {
	w.t.Helper()
	ctx := w.t.Context()
	_, err := w.admin.RbacV1().Roles(namespace).Create(ctx, &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Name: role}, Rules: rules}, metav1.CreateOptions{})
	must(w.t, err)
	_, err = w.admin.RbacV1().RoleBindings(namespace).Create(ctx, &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: role}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: role},
		Subjects: []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: namespace, Name: "app"}},
	}, metav1.CreateOptions{})
	must(w.t, err)
}

func rule(verbs string, names ...string) rbacv1.PolicyRule {
	return rbacv1.PolicyRule{APIGroups: []string{group}, Resources: []string{resource}, Verbs: strings.Fields(verbs), ResourceNames: names}
}
