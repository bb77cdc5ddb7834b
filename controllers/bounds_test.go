package controllers_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/authz"
)

// writes are the calls in a namespace that change something, or would if they were taken.
func (w *world) writes(namespace string) (list []string) {
	w.wire.calls.mu.Lock()
	defer w.wire.calls.mu.Unlock()
	for what, n := range w.wire.calls.n {
		if strings.Contains(what, " "+namespace+"/") && !strings.HasPrefix(what, "get ") {
			list = append(list, slices.Repeat([]string{what}, n)...)
		}
	}
	slices.Sort(list)
	return list
}

// testBounded looks at objects in order, and at refused ones, again and again.
func (w *world) testBounded(t *testing.T) {
	w, ns := w.in(t)
	values := w.values("token")

	// A new object with a target is four writes: finalizer, Secret, status and one event.
	fresh := w.namespace()
	one, _ := w.awaitTarget(w.create(w.targeted(fresh, "one", values)), 1, values)
	w.checkEvents(one, "Sealed")
	if got, want := w.writes(fresh), []string{
		"create events " + fresh + "/", "create secrets " + fresh + "/", "patch sealedcredentials " + fresh + "/one", "patch sealedcredentials/status " + fresh + "/one",
	}; !slices.Equal(got, want) {
		t.Errorf("a new object took the writes %v, want %v", got, want)
	}

	settled := []*v1beta1.SealedCredential{one}
	w.secret(fresh, "plain", map[string]string{"latticekeep.dev/import": "imported"}, values)
	imported, generated := object(fresh, "imported"), object(fresh, "generated")
	imported.Spec.ValuesFrom = &v1beta1.ValuesFrom{SecretRef: v1beta1.SecretReference{Name: "plain"}}
	generated.Spec.Generate = []v1beta1.Generator{{Key: "token", Random: &v1beta1.Random{}}}
	for _, sc := range []*v1beta1.SealedCredential{imported, generated} {
		sc.Spec.Target = &v1beta1.Target{}
		sc.Spec.Rotation = &v1beta1.Rotation{MaxValueAge: &metav1.Duration{Duration: 30 * day}}
		settled = append(settled, w.awaitReady(w.create(sc), 1))
	}

	// Refused for what the author wrote, for a Secret that is somebody else's, and by the API server, for a new Secret and
	// for one that is there.
	w.secret(ns, "foreign", nil, values)
	bad := w.targeted(ns, "template", values)
	bad.Spec.Target.Keys = []v1beta1.TargetKey{{To: "a", From: "nobody"}}
	spec := w.targeted(ns, "spec", values)
	spec.Spec.Sealed.Scope = v1beta1.ScopeCluster
	refused := []*v1beta1.SealedCredential{
		w.awaitStalled(w.create(bad), v1beta1.ReasonInvalidTarget),
		w.awaitStalled(w.create(spec), v1beta1.ReasonInvalidSealed),
		w.awaitStalled(w.create(w.targeted(ns, "foreign", values)), v1beta1.ReasonTargetConflict),
	}
	full := w.namespace()
	quota := w.forbidSecrets(full)
	later := w.manifest(full, "later", values)
	later = w.awaitReady(w.create(later), 1)
	later = w.change(later, func(sc *v1beta1.SealedCredential) { sc.Spec.Target = &v1beta1.Target{} })
	tls := w.targeted(full, "tls", w.values("tls.crt", "tls.key"))
	tls.Spec.Target.Type = "kubernetes.io/tls"
	refused = append(refused,
		w.awaitStalled(w.create(w.targeted(full, "quota", values)), v1beta1.ReasonTargetConflict),
		w.awaitStalled(later, v1beta1.ReasonTargetConflict),
		w.awaitStalled(w.create(tls), v1beta1.ReasonTargetConflict))

	unseals := make(map[*v1beta1.SealedCredential]int)
	for _, sc := range refused {
		unseals[sc] = w.unseals(sc)
		w.nudge(sc)
	}
	before, entries := w.writes(fresh), w.entries(fresh)
	const rounds = 5 // of two looks
	for range rounds {
		w.lookAgain(append(settled, refused...)...)
	}
	if after := w.writes(fresh); !slices.Equal(before, after) {
		t.Errorf("objects in order were written to:\n%v\n%v", before, after)
	}
	if n := w.entries(fresh); n != entries {
		t.Errorf("%d audit entries of looking at what is in order", n-entries)
	}
	for _, sc := range settled { // it did look
		s := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: fresh, Name: sc.Name}}
		if n := w.wire.calls.of(callTo("get", s)); n < rounds {
			t.Errorf("%s was looked at %d times for drift", sc.Name, n)
		}
	}
	for _, sc := range refused {
		if n := w.unseals(sc) - unseals[sc]; n != 0 {
			t.Errorf("%s was unsealed %d times while it was refused", sc.Name, n)
		}
	}
	for what, most := range map[string]int{
		"create secrets " + full + "/": len(refused), "patch sealedcredentials/status " + ns + "/template": 1,
		"patch sealedcredentials/status " + ns + "/spec": 1, "patch sealedcredentials/status " + ns + "/foreign": 1,
	} {
		if n := w.wire.calls.of(what); n > most {
			t.Errorf("%d times %s, want at most %d", n, what, most)
		}
	}
	// What was in the way goes, and so does the refusal.
	must(t, w.admin.Delete(t.Context(), quota))
	w.awaitVerdict(full, false)
	w.clock.Advance(time.Minute)
	for _, sc := range refused[3:] {
		w.awaitReady(sc, 1)
	}
	must(t, w.admin.Delete(t.Context(), bad)) // each start would unseal it once
	w.awaitGone(bad)
}

// gathered returns the operator's metrics by name and labels, such as "a{x=y}".
func (w *world) gathered() map[string]float64 {
	w.t.Helper()
	registry := prometheus.NewPedanticRegistry()
	must(w.t, registry.Register(w.metrics))
	families, err := registry.Gather()
	must(w.t, err)
	problems, err := promlint.NewWithMetricFamilies(families).Lint()
	must(w.t, err)
	if len(problems) > 0 {
		w.t.Errorf("promtool would complain: %v", problems)
	}
	all := make(map[string]float64)
	for _, f := range families {
		for _, m := range f.GetMetric() {
			var labels []string
			for _, l := range m.GetLabel() {
				labels = append(labels, l.GetName()+"="+l.GetValue())
			}
			all[f.GetName()+"{"+strings.Join(labels, ",")+"}"] = m.GetGauge().GetValue() + m.GetCounter().GetValue()
		}
	}
	return all
}

// unready returns how many objects the API server has that are not ready.
func (w *world) unready() (n float64) {
	w.t.Helper()
	var all v1beta1.SealedCredentialList
	must(w.t, w.admin.List(w.t.Context(), &all))
	for _, sc := range all.Items {
		if meta.IsStatusConditionFalse(sc.Status.Conditions, v1beta1.ConditionReady) {
			n++
		}
	}
	return n
}

func (w *world) testMetrics(t *testing.T) {
	w, ns := w.in(t)
	const states, changes = "latticekeep_sealedcredentials", "latticekeep_credential_changes_total"
	before := w.gathered()
	// The cache may still have what the test before has deleted.
	for late := time.Now().Add(patience); before[states+"{condition=Ready,status=False}"] != w.unready(); before = w.gathered() {
		if time.Now().After(late) {
			t.Fatal("the cache has other objects than the API server")
		}
	}
	rose := func(name string, by float64) { // once the cache has it
		t.Helper()
		late := time.Now().Add(patience)
		for after := w.gathered(); after[name]-before[name] != by; after = w.gathered() {
			if time.Now().After(late) {
				t.Fatalf("%s rose by %v, want %v", name, after[name]-before[name], by)
			}
		}
	}
	use, err := w.metrics.SealingKeyUse(t.Context())
	must(t, err)
	values := w.values("token")
	sc, _ := w.awaitTarget(w.create(w.targeted(ns, "app", values)), 1, values)
	made := object(ns, "made")
	made.Spec.Generate = []v1beta1.Generator{{Key: "token", Random: &v1beta1.Random{}}}
	made = w.awaitReady(w.create(made), 1)
	bad := w.manifest(ns, "bad", values)
	bad.Spec.Sealed.Scope = v1beta1.ScopeCluster
	w.awaitStalled(w.create(bad), v1beta1.ReasonInvalidSealed)
	rose(changes+"{change=sealed}", 2)
	rose(states+"{condition=Ready,status=True}", 2)
	rose(states+"{condition=Ready,status=False}", 1)
	rose(states+"{condition=Stalled,status=True}", 1)
	rose(states+"{condition=TargetSynced,status=True}", 1)
	rose(states+"{condition=Expiring,status=False}", 3)
	if got := w.gathered()["latticekeep_credential_expiry_timestamp_seconds{name=app,namespace="+ns+"}"]; int64(got) != sc.Status.ExpiresAt.Unix() {
		t.Errorf("app expires at %v, want %v", got, sc.Status.ExpiresAt.Unix())
	}
	now, err := w.metrics.SealingKeyUse(t.Context())
	must(t, err)
	if key := sc.Spec.Sealed.KeyID; now[key] != use[key]+2 { // bad needs its key too, once it is mended
		t.Errorf("%d objects need the key, there were %d", now[key], use[key])
	}

	w.clock.Advance(time.Second)
	sc = w.renew(sc, "token")
	sc = w.awaitReady(w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.Rotation = &v1beta1.Rotation{Trigger: "now"} }), 3)
	must(t, w.vault.Delete(t.Context(), authz.SystemPrincipal(w.tenant(ns).Tenant), sc.Status.CredentialID))
	w.nudge(sc)
	w.awaitReady(sc, 4)
	for change, by := range map[string]float64{"sealed": 2, "rotated": 1, "reencrypted": 1, "recreated": 1} {
		rose(changes+"{change="+change+"}", by)
	}
	must(t, w.admin.Delete(t.Context(), made))
	w.awaitGone(made)
	w.settle(ns)
	if _, there := w.gathered()["latticekeep_credential_expiry_timestamp_seconds{name=made,namespace="+ns+"}"]; there {
		t.Error("an object that is gone has an expiry")
	}
	w.halt()
	if use, err := w.metrics.SealingKeyUse(t.Context()); err == nil {
		t.Errorf("without an operator, the keys in use are %v", use)
	}
	for name := range w.gathered() {
		if strings.HasPrefix(name, states) {
			t.Errorf("without an operator there is %s", name)
		}
	}
	w.start(nil)
}
