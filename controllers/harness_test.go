package controllers_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/controllers"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/identity"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/internal/sealing"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/internal/vault"
	"github.com/latticekeep/latticekeep/test/kubetest"
	"github.com/latticekeep/latticekeep/test/statetest"
)

// patience is how long a test waits for something that takes milliseconds on an idle machine.
const patience = 60 * time.Second

// clock is a clock that a test moves.
type clock struct{ micros atomic.Int64 }

func (c *clock) Now() time.Time          { return time.UnixMicro(c.micros.Load()).UTC() }
func (c *clock) Advance(d time.Duration) { c.micros.Add(d.Microseconds()) }

// in returns a time from now, as the API server shows it.
func (c *clock) in(d time.Duration) time.Time { return c.Now().Add(d).Truncate(time.Second) }

// world is a cluster and a deployment: a real API server, a data directory, and the operator
// between them, which can be stopped and started again.
type world struct {
	t        testing.TB
	plane    *kubetest.ControlPlane
	admin    client.WithWatch
	operator *rest.Config // with the rights of config/rbac and no others
	clock    clock
	dir      string
	watch    *statetest.Watch // fails the test for a row that is refused by mistake
	logs     logs
	canaries []string // every value sealed so far
	wire     wire
	metrics  *controllers.Metrics
	policy   sealing.Policy // the next start uses it
	restart  bool           // the next start restarts workloads
	pace     controllers.Pace
	watched  []string            // namespaces whose Secrets the next start watches
	tenants  controllers.Tenants // the next start uses them

	// These fields are set while the deployment is open.
	store    *flaky
	log      *writer.Log
	keys     *keyring.Ring
	identity *identity.Service
	vault    *vault.Vault
	stop     func() error
}

// unpaced lets all Secrets be looked at at once. While the clock stands, a look that waits for its
// turn waits for ever, and all tests of a world have their objects in it.
var unpaced = controllers.Pace{LooksPerMinute: 1_000_000}

func newWorld(t testing.TB, flags ...string) *world {
	w := &world{t: t, plane: kubetest.ForTest(t, flags...), dir: t.TempDir(), watch: statetest.New(t), metrics: controllers.NewMetrics(), pace: unpaced}
	w.clock.micros.Store(time.Now().Truncate(time.Second).UnixMicro() + 123456) // not a whole second

	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{v1beta1.AddToScheme, corev1.AddToScheme, eventsv1.AddToScheme, appsv1.AddToScheme} {
		must(t, add(scheme))
	}
	cfg, err := clientcmd.BuildConfigFromFlags("", w.plane.Kubeconfig)
	must(t, err)
	cfg.QPS = -1
	w.admin, err = client.NewWithWatch(cfg, client.Options{Scheme: scheme})
	must(t, err)

	w.kubectl("apply", "-k", "../config/rbac")
	kubeconfig, err := w.plane.KubeconfigFor("system:serviceaccount:latticekeep-system:latticekeep", "system:serviceaccounts")
	must(t, err)
	w.operator, err = clientcmd.BuildConfigFromFlags("", kubeconfig)
	must(t, err)

	must(t, kms.CreateLocal(filepath.Join(w.dir, "kms.key")))
	t.Cleanup(func() {
		if w.stop != nil {
			w.halt()
		}
	})
	return w
}

// open opens the deployment, and creates it the first time.
func (w *world) open(crash *crash) {
	w.t.Helper()
	ctx, now := context.Background(), w.clock.Now
	bound := w.watch.State()
	w.log = writer.New(now, bound)
	db, err := bolt.Open(filepath.Join(w.dir, "store.db"), bolt.Options{Hook: w.log.Commit})
	must(w.t, err)
	w.store = &flaky{Store: bound.Guard(db), raw: db, crash: crash}
	if w.counting() {
		w.store.looks = new(counts)
	}
	key, err := kms.OpenLocal(filepath.Join(w.dir, "kms.key"))
	must(w.t, err)
	w.identity, w.keys, err = identity.Open(ctx, w.store, w.log, guard.New(w.log), key, keyring.Config{CacheTTL: keyring.DefaultCacheTTL, Now: now})
	must(w.t, err)
	w.vault = vault.New(w.store, guard.New(w.log), w.keys, now)
}

// counting reports whether calls are counted. They are not counted while memory is measured.
func (w *world) counting() bool {
	_, benchmark := w.t.(*testing.B)
	return !benchmark
}

func (w *world) newSealingKey() *keyring.NewSealingKey {
	key, err := w.keys.NewSealingKey(context.Background(), envelope.SuiteMLKEM768X25519)
	must(w.t, err)
	return key
}

func (w *world) addSealingKey(key *keyring.NewSealingKey) {
	w.commit(key.Put)
}

// commit changes rows without the operator, with an entry.
func (w *world) commit(change func(tx store.Tx) error) {
	w.t.Helper()
	must(w.t, w.store.Store.Update(context.Background(), func(tx store.Tx) error {
		_, err := w.log.Append(tx, audit.Event{
			Type: audit.SealingKeyListed, Outcome: audit.Success, Principal: authz.SystemPrincipal(authz.SystemTenant),
			Resource: audit.Resource{Type: audit.SealingKeyResource},
		})
		return errors.Join(change(tx), err)
	}))
}

// start opens the deployment and runs the operator. crash, if not nil, ends the operator.
func (w *world) start(crash *crash) {
	w.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	cfg := rest.CopyConfig(w.operator)
	if w.counting() {
		cfg.Wrap(w.wire.transport)
	}
	if crash != nil {
		crash.kill = cancel
		cfg.Wrap(crash.transport)
	}
	w.open(crash)
	done := make(chan error, 1)
	go func() {
		options := w.options()
		options.Metrics = w.metrics
		done <- controllers.Run(ctx, cfg, options)
	}()
	w.stop = func() error {
		cancel()
		return errors.Join(<-done, w.store.Close())
	}
}

func (w *world) options() controllers.Options {
	return controllers.Options{
		Vault: w.vault, Identity: w.identity, Keys: w.keys, Policy: w.policy, Pace: w.pace, Rights: controllers.Rights{RestartWorkloads: w.restart, WatchSecrets: w.watched}, Tenants: w.tenants,
		Logger: slog.New(slog.NewTextHandler(&w.logs, nil)), Now: w.clock.Now,
	}
}

// halt stops the operator and closes the deployment.
func (w *world) halt() {
	w.t.Helper()
	stop := w.stop
	w.stop = nil
	if err := stop(); err != nil {
		w.t.Errorf("stopping the operator: %v\n%s", err, w.logs.tail())
	}
}

// logs keeps what the operator logs.
type logs struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logs) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

func (l *logs) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

func (l *logs) tail() string {
	s := l.String()
	return s[max(0, len(s)-4096):]
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (w *world) kubectl(args ...string) string {
	w.t.Helper()
	out, err := w.plane.Kubectl(w.t.Context(), args...).CombinedOutput()
	if err != nil {
		w.t.Fatalf("kubectl %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

// in returns the world for one test, in a namespace of its own.
func (w *world) in(t *testing.T) (*world, string) {
	t.Helper()
	parent := w.t
	w.t = t
	t.Cleanup(func() { w.t = parent })
	return w, w.namespace()
}

func (w *world) namespace() string {
	w.t.Helper()
	n := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "test-"}}
	must(w.t, w.admin.Create(w.t.Context(), n))
	return n.Name
}

// values returns values that occur nowhere else.
func (w *world) values(keys ...string) map[string]string {
	values := make(map[string]string)
	for _, key := range keys {
		values[key] = "canary-" + rand.Text()
		w.canaries = append(w.canaries, values[key])
	}
	return values
}

// manifest seals values now with the key that the cluster publishes.
func (w *world) manifest(namespace, name string, values map[string]string) *v1beta1.SealedCredential {
	w.t.Helper()
	return w.sealed(w.published().Key(), sealing.Request{Namespace: namespace, Name: name, CredentialType: "database"}, values)
}

func (w *world) sealed(key *envelope.SealingPublicKey, r sealing.Request, values map[string]string) *v1beta1.SealedCredential {
	w.t.Helper()
	r.Values = make(map[string]secret.Bytes)
	for k, v := range values {
		r.Values[k] = secret.Bytes(v)
	}
	sc, err := sealing.Seal(key, r, w.clock.Now())
	must(w.t, err)
	return sc
}

// published returns the sealing key document in the cluster.
func (w *world) published() sealing.Document {
	w.t.Helper()
	var document sealing.Document
	key := client.ObjectKey{Namespace: controllers.DefaultNamespace, Name: "latticekeep-sealing-key"}
	await(w, key, new(corev1.ConfigMapList), "the sealing key to be published", func(c *corev1.ConfigMap) bool {
		var err error
		document, err = sealing.ParseDocument([]byte(c.Data["sealing-key.json"]))
		return err == nil
	})
	must(w.t, document.CheckIdentity(w.keys.Identity().ID()))
	return document
}

func (w *world) create(sc *v1beta1.SealedCredential) *v1beta1.SealedCredential {
	w.t.Helper()
	must(w.t, w.admin.Create(w.t.Context(), sc))
	return sc
}

// change applies a change to the current object.
func (w *world) change(sc *v1beta1.SealedCredential, change func(*v1beta1.SealedCredential)) *v1beta1.SealedCredential {
	w.t.Helper()
	for {
		now := new(v1beta1.SealedCredential)
		must(w.t, w.admin.Get(w.t.Context(), client.ObjectKeyFromObject(sc), now))
		change(now)
		err := w.admin.Update(w.t.Context(), now)
		if apierrors.IsConflict(err) {
			continue
		}
		must(w.t, err)
		return now
	}
}

// await waits until ok holds for the object with that key, and returns the object. If the key has
// no name, any object in the namespace will do.
func await[T client.Object](w *world, key client.ObjectKey, list client.ObjectList, what string, ok func(T) bool) T {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), patience)
	defer cancel()
	var last T
	for ctx.Err() == nil {
		// Without a version, the watch begins with the current object.
		options := []client.ListOption{client.InNamespace(key.Namespace)}
		if key.Name != "" {
			options = append(options, client.MatchingFields{"metadata.name": key.Name})
		}
		events, err := w.admin.Watch(ctx, list, options...)
		if err != nil {
			if ctx.Err() == nil {
				must(w.t, err)
			}
			break
		}
		for event := range events.ResultChan() {
			object, is := event.Object.(T)
			if !is {
				break
			}
			if last = object; event.Type != watch.Deleted && ok(object) {
				events.Stop()
				return object
			}
		}
		events.Stop()
	}
	text, _ := json.MarshalIndent(last, "", "  ")
	w.t.Fatalf("waited in vain for %s\n%s\n%s", what, text, w.logs.tail())
	return last
}

func (w *world) awaitThat(sc *v1beta1.SealedCredential, what string, ok func(*v1beta1.SealedCredential) bool) *v1beta1.SealedCredential {
	w.t.Helper()
	return await(w, client.ObjectKeyFromObject(sc), new(v1beta1.SealedCredentialList), what, ok)
}

// awaitReady waits until the object as last written is sealed as version, and its conditions say
// only that.
func (w *world) awaitReady(sc *v1beta1.SealedCredential, version int64) *v1beta1.SealedCredential {
	w.t.Helper()
	return w.awaitThat(sc, fmt.Sprintf("%s to be ready as version %d", sc.Name, version), func(now *v1beta1.SealedCredential) bool {
		s := now.Status
		return now.Generation >= sc.Generation && s.ObservedGeneration == now.Generation && s.Version == version &&
			meta.IsStatusConditionTrue(s.Conditions, v1beta1.ConditionReady) && !meta.IsStatusConditionTrue(s.Conditions, v1beta1.ConditionExpiring) &&
			meta.FindStatusCondition(s.Conditions, v1beta1.ConditionReconciling) == nil && meta.FindStatusCondition(s.Conditions, v1beta1.ConditionStalled) == nil
	})
}

// awaitStalled waits until the object as last written is refused with reason.
func (w *world) awaitStalled(sc *v1beta1.SealedCredential, reason string) *v1beta1.SealedCredential {
	w.t.Helper()
	return w.awaitThat(sc, sc.Name+" to be stalled by "+reason, func(now *v1beta1.SealedCredential) bool {
		stalled := meta.FindStatusCondition(now.Status.Conditions, v1beta1.ConditionStalled)
		return now.Generation >= sc.Generation && now.Status.ObservedGeneration == now.Generation &&
			meta.IsStatusConditionFalse(now.Status.Conditions, v1beta1.ConditionReady) && stalled != nil && stalled.Reason == reason
	})
}

// awaitGone waits until the object no longer exists.
func (w *world) awaitGone(sc *v1beta1.SealedCredential) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), patience)
	defer cancel()
	events, err := w.admin.Watch(ctx, new(v1beta1.SealedCredentialList), client.InNamespace(sc.Namespace), client.MatchingFields{"metadata.name": sc.Name})
	must(w.t, err)
	defer events.Stop()
	now := new(v1beta1.SealedCredential)
	err = w.admin.Get(ctx, client.ObjectKeyFromObject(sc), now)
	if apierrors.IsNotFound(err) {
		return
	}
	must(w.t, err)
	for event := range events.ResultChan() {
		if event.Type == watch.Deleted {
			return
		}
	}
	w.t.Fatalf("waited in vain for %s to be gone\n%s", sc.Name, w.logs.tail())
}

// tenant returns a principal with all rights in the tenant of a namespace.
func (w *world) tenant(namespace string) authz.Principal {
	w.t.Helper()
	tenant, err := w.identity.NamespaceTenant(w.t.Context(), w.namespaceUID("kube-system"), w.namespaceUID(namespace))
	must(w.t, err)
	return authz.Principal{
		Tenant: tenant, Kind: authz.APIKey, ID: authz.NewID("key"), Scopes: authz.TenantScopes(), RequestID: authz.NewID("req"),
	}
}

func (w *world) namespaceUID(name string) string {
	w.t.Helper()
	n := new(corev1.Namespace)
	must(w.t, w.admin.Get(w.t.Context(), client.ObjectKey{Name: name}, n))
	return string(n.UID)
}

// checkUnseals compares the values that the vault returns with those that were sealed.
func (w *world) checkUnseals(sc *v1beta1.SealedCredential, want map[string]string) {
	w.t.Helper()
	got, err := w.vault.Read(w.t.Context(), w.tenant(sc.Namespace), vault.ByID(sc.Status.CredentialID))
	if err != nil {
		w.t.Errorf("unsealing %s: %v", sc.Name, err)
		return
	}
	if int64(got.Version) != sc.Status.Version || !got.ExpiresAt.Truncate(time.Second).Equal(sc.Status.ExpiresAt.Time) ||
		got.Name != sc.Name || got.Type != sc.Spec.CredentialType {
		w.t.Errorf("the vault holds %+v, the status says %+v", got.Credential, sc.Status)
	}
	if len(got.Values) != len(want) {
		w.t.Errorf("the vault holds %d values, want %d", len(got.Values), len(want))
	}
	for key, value := range want {
		if string(got.Values[key]) != value {
			w.t.Errorf("the value of %s is another one", key)
		}
	}
}

// history returns the successful audit events of a credential, oldest first, without reads.
func (w *world) history(namespace, credential string) []string {
	w.t.Helper()
	entries, _, err := reader.New(w.log, guard.New(w.log)).Query(w.t.Context(), w.tenant(namespace), reader.Query{Limit: 1000})
	must(w.t, err)
	var types []string
	for _, e := range entries {
		if e.Resource.ID == credential && e.Outcome == audit.Success && e.EventType != audit.CredentialUnsealed {
			types = append([]string{string(e.EventType)}, types...)
		}
	}
	return types
}

func (w *world) checkHistory(sc *v1beta1.SealedCredential, want ...audit.EventType) {
	w.t.Helper()
	if got := w.history(sc.Namespace, sc.Status.CredentialID); fmt.Sprint(got) != fmt.Sprint(want) {
		w.t.Errorf("the audit log has %v of %s, want %v", got, sc.Name, want)
	}
}
