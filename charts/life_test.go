package charts_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/latticekeep/latticekeep/api/v1beta1"
)

// The whole life of objects of each source, with the rights that the chart grants and no others: whatever is refused to a ServiceAccount of the
// chart fails the test, as does a verb that nothing here has a use for.
func TestEverythingWorksWithTheGrantedRightsAndEachOfThemIsUsed(t *testing.T) {
	l := &life{installation: install(t, installValues)}
	defer l.checkRefused() // also when something waits in vain for what was refused
	l.kubectl(people, "apply", "-f", "-")
	l.step("the CRD", l.definition)
	l.apply(payroll)
	// At its first start it lists before it watches, as client-go does with an API server of Kubernetes 1.30; later ones send all in the watch.
	server, identity := l.startServer("KUBE_FEATURE_WatchListClient=false")
	l.identity = identity
	l.step("an object that goes while the server is down", func() { server = l.lost(server) })
	l.systemKey = l.secret(namespace, "latticekeep-system-key")["system-key"]
	l.step("the webhook", func() {
		l.startWebhook()
		l.awaitThat(func() string { return "the API server does not call the webhook" }, func() bool { return l.webhookCalled() })
	})

	l.step("generate", l.generate)
	l.step("sealed", l.sealed)
	l.step("valuesFrom", l.valuesFrom)
	l.step("target Secrets", l.targets)
	l.step("suspend", l.suspend)
	l.step("new values with an overlap", l.overlap)
	l.step("deletion", l.deletion)
	l.step("adoption", l.adoption)
	l.step("workloads read", l.workloads)
	former := l.seal("retired", "retired") // for a key that is going to be
	l.step("sealing keys", func() { l.sealingKeys(former) })
	l.step("workloads are restarted", l.restarted)
	l.step("backup", func() {
		recipient := strings.TrimSpace(l.latticekeep("backup", "keygen", "--output", filepath.Join(l.dir, "backup.identity")))
		l.latticekeep("backup", "--url", l.url, "--recipient", recipient, "--output", filepath.Join(l.dir, "backup"))
	})
	l.part("manifests of the documentation", l.documented)
	l.step("helm test", func() { l.finish(l.start("Pod", "latticekeep-test")) })

	l.part("exploits with the webhook", func() { l.exploits(former, true) })
	l.kubectl("", "delete", "validatingwebhookconfiguration", "latticekeep-webhook")
	l.awaitThat(func() string { return "the API server goes on calling the webhook" }, func() bool { return !l.webhookCalled() })
	l.part("exploits without the webhook", func() { l.exploits(former, false) })

	l.step("a Secret that is imported again", l.handed)
	l.awaitUses(server)
	l.step("uninstall", func() { l.uninstall(server) })
	for _, line := range l.unused(func(string) bool { return true }) {
		t.Error(line)
	}
}

// hooks applies what the jobs of hooks run with.
func (l *life) hooks() {
	var all []unstructured.Unstructured
	for _, o := range l.all {
		if hook(o) && o.GetKind() != "Job" && o.GetKind() != "Pod" {
			all = append(all, o)
		}
	}
	l.kubectl(text(l.t, all), "apply", "-f", "-")
}

// definition runs the hook before an installation, and the one before an upgrade from a release whose CRD had one version.
func (l *life) definition() {
	l.hooks()
	l.kubectl("", "delete", "crd", crdName)
	l.kubectl(string(crdBefore(l.t)), "apply", "--server-side", "-f", "-")
	if err := l.plane.AwaitCRDs(l.t.Context()); err != nil {
		l.t.Fatal(err)
	}
	l.kubectl(deprecated(generated("kube-system")), "create", "-f", "-") // which the webhook is not for, which does not run yet
	if said := l.finish(l.start("Job", "latticekeep-crd")); !strings.Contains(said, "1 rewritten in version v1beta1, 0 failed") || !strings.Contains(said, "stored in version v1beta1 alone") {
		l.t.Errorf("the hook does not bring the object to the new version:\n%s", said)
	}
	l.kubectl("", "delete", "crd", crdName)
	if said := l.finish(l.start("Job", "latticekeep-crd")); !strings.Contains(said, "applied, schema") {
		l.t.Errorf("the hook does not bring the CRD:\n%s", said)
	}
}

// lost has an object go without its vault entry, which the server finds out when it starts again. It is in a namespace that the webhook is not for,
// which does not run yet.
func (l *life) lost(server *pod) *pod {
	l.kubectl(`
apiVersion: latticekeep.dev/v1beta1
kind: SealedCredential
metadata: {namespace: kube-system, name: lost}
spec: {credentialType: api-key, ttlDays: 30, generate: [{key: token, random: {}}]}
`, "apply", "-f", "-")
	l.await("kube-system", "lost", "ready", func(o *v1beta1.SealedCredential) bool {
		return meta.IsStatusConditionTrue(o.Status.Conditions, v1beta1.ConditionReady)
	})
	l.end(server)
	l.kubectl("", "patch", "sealedcredential", "lost", "--namespace", "kube-system", "--type=merge", "-p", `{"metadata":{"finalizers":null}}`)
	l.kubectl("", "delete", "sealedcredential", "lost", "--namespace", "kube-system")
	server, _ = l.startServer()
	l.line(server, server.log, "the object is gone and the vault entry is kept")
	return server
}

// webhookCalled asks with an object that the schema lets pass and the webhook does not.
func (l *life) webhookCalled() bool {
	l.t.Helper()
	out, err := l.as(sealedCredential("shop", "probe", "Strict"), "apply", "--dry-run=server", "-f", "-")
	return err != nil && strings.Contains(out, "denied the request")
}

// generatedManifest has values of each generator, and one that is composed of them.
const generatedManifest = `
apiVersion: latticekeep.dev/v1beta1
kind: SealedCredential
metadata: {namespace: shop, name: api}
spec:
  credentialType: api-key
  ttlDays: 30
  generate:
  - {key: token, random: {length: 40}}
  - {key: sign.key, keyPair: {algorithm: Ed25519, publicKeyName: sign.pub}}
  rotation: {policy: Regenerate, overlap: 1h}
  target: {keys: [{from: token, to: token}, {to: url, template: "https://api:$(token)@shop", encoding: URL}]}
`

// workload is one of each kind that is restarted on new values.
const workload = `
apiVersion: apps/v1
kind: %s
metadata: {namespace: shop, name: web, annotations: {latticekeep.dev/restart-on: api}}
spec:
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec: {containers: [{name: web, image: example.org/web}]}
---
`

func (l *life) generate() {
	l.apply(generatedManifest)
	l.ready("api", 1)
	l.holds("api", "url", "https://api:"+l.secret("shop", "api")["token"]+"@shop")
	var all strings.Builder
	for _, kind := range []string{"Deployment", "StatefulSet", "DaemonSet"} {
		fmt.Fprintf(&all, workload, kind)
	}
	l.kubectl(all.String(), "apply", "-f", "-")
}

// sealed has values sealed, changed, and sealed anew around the same values, twice.
func (l *life) sealed() {
	first := l.seal("db", "first")
	l.applyObject(first)
	l.ready("db", 1)
	l.holds("db", "password", "first")
	l.applyObject(l.later(first, "second"))
	l.ready("db", 2)
	l.holds("db", "password", "second")
	for n, trigger := range []string{"a", "b"} {
		l.patch("db", `{"spec":{"rotation":{"trigger":"`+trigger+`"}}}`)
		l.ready("db", int64(3+n))
	}
	l.holds("db", "password", "second")
}

func (l *life) valuesFrom() {
	l.apply(`---
{apiVersion: v1, kind: Secret, metadata: {namespace: shop, name: handed, annotations: {latticekeep.dev/import: imported}}, stringData: {password: imported}}
---
apiVersion: latticekeep.dev/v1beta1
kind: SealedCredential
metadata: {namespace: shop, name: imported}
spec:
  credentialType: database
  ttlDays: 30
  valuesFrom: {secretRef: {name: handed}, deleteAfterImport: true}
  target: {name: imported-values, deletionPolicy: Retain}
`)
	l.ready("imported", 1)
	l.holds("imported-values", "password", "imported")
	l.awaitGone("handed")
	l.apply(again + `---
apiVersion: latticekeep.dev/v1beta1
kind: SealedCredential
metadata: {namespace: shop, name: again}
spec: {credentialType: database, ttlDays: 30, valuesFrom: {secretRef: {name: again}, deleteAfterImport: true}}
`)
	l.awaitGone("again")
	l.hand(10 * time.Second)
}

// again is a Secret that is handed over more than once.
const again = `---
{apiVersion: v1, kind: Secret, metadata: {namespace: shop, name: again, annotations: {latticekeep.dev/import: again}}, stringData: {password: again}}
`

// hand has the Secret imported once more while nothing about the object changes, and hands it over yet again: the operator looks at the object for
// an annotation, and then when its values come to be too old. That is the same Event twice, which is counted instead of being written anew.
func (l *life) hand(wait time.Duration) {
	l.t.Helper()
	o := l.ready("again", 1)
	age := time.Since(o.Status.ValuesChangedAt.Time) + wait
	l.patch("again", fmt.Sprintf(`{"spec":{"rotation":{"maxValueAge":"%ds"}}}`, int(age.Seconds())))
	l.await("shop", "again", "of an age", func(o *v1beta1.SealedCredential) bool { return stale(o) != nil })
	l.apply(again)
	l.dev("", "annotate", "--overwrite", "sealedcredential", "again", "--namespace", "shop", "example.org/look="+wait.String())
	l.awaitGone("again")
	l.apply(again)
}

// handed waits until the Secret is imported that hand left; when the values were too old before it was there, all begins anew.
func (l *life) handed() {
	for wait := 20 * time.Second; ; wait *= 2 {
		late := false
		o := new(v1beta1.SealedCredential)
		l.awaitThat(func() string { return fmt.Sprintf("nobody looked: %+v", o.Status) }, func() bool {
			l.get("shop", "again", o)
			late = stale(o).Status == metav1.ConditionTrue && l.secretThere("shop", "again")
			return late || !l.secretThere("shop", "again")
		})
		if !late {
			return
		}
		l.hand(wait)
	}
}

func stale(o *v1beta1.SealedCredential) *metav1.Condition {
	return meta.FindStatusCondition(o.Status.Conditions, v1beta1.ConditionValuesStale)
}

// targets has a Secret adopted, and made right again after somebody changed it.
func (l *life) targets() {
	l.apply(`---
{apiVersion: v1, kind: Secret, metadata: {namespace: shop, name: legacy, annotations: {latticekeep.dev/adopt: legacy}}, stringData: {password: old}}`)
	before := new(corev1.Secret)
	l.get("shop", "legacy", before)
	l.applyObject(l.seal("legacy", "adopted"))
	if o := l.ready("legacy", 1); o.Status.Target.UID != before.UID {
		l.t.Error("the Secret is another one than before")
	}
	l.holds("legacy", "password", "adopted")
	l.dev("", "patch", "secret", "legacy", "--namespace", "shop", "--type=merge", "-p", `{"stringData":{"password":"drifted"}}`)
	l.patch("legacy", `{"spec":{"target":{"labels":{"team":"shop"}}}}`)
	l.ready("legacy", 1)
	l.holds("legacy", "password", "adopted")
}

func (l *life) suspend() {
	l.patch("legacy", `{"spec":{"suspend":true,"rotation":{"trigger":"now"}}}`)
	l.await("shop", "legacy", "suspended", func(o *v1beta1.SealedCredential) bool {
		return meta.FindStatusCondition(o.Status.Conditions, v1beta1.ConditionReady).Reason == v1beta1.ReasonSuspended && o.Status.Version == 1
	})
	l.patch("legacy", `{"spec":{"suspend":false}}`)
	l.ready("legacy", 2)
}

// overlap makes new values, and reads the former ones beside them.
func (l *life) overlap() {
	former := l.secret("shop", "api")["token"]
	l.patch("api", `{"spec":{"rotation":{"trigger":"now"}}}`)
	o := l.ready("api", 2)
	now := l.secret("shop", "api")["token"]
	if now == former || o.Status.Previous == nil || o.Status.Previous.Version != 1 {
		l.t.Fatalf("there are no new values, or the former ones are gone: %+v", o.Status)
	}
	l.kubectl(readers, "apply", "-f", "-")
	token := l.token("shop", "all", "--audience=latticekeep")
	for path, want := range map[string]string{"": now, "?version=1": former} {
		if got := l.value(token, "/api/v2/vault/"+o.Status.CredentialID+path, "token"); got != want {
			l.t.Errorf("%q reads %q, want %q", path, got, want)
		}
	}
}

// deletion keeps what is to be kept, in the vault and as a Secret, and nothing else.
func (l *life) deletion() {
	kept := l.seal("kept", "kept")
	set(l.t, kept, "Retain", "spec", "deletionPolicy")
	l.applyObject(kept)
	l.applyObject(l.seal("ended", "ended"))
	l.ready("kept", 1)
	l.ready("ended", 1)
	l.dev("", "delete", "--timeout=60s", "--namespace", "shop", "sealedcredential", "kept", "ended", "imported")
	if !l.secretThere("shop", "imported-values") {
		l.t.Error("a Secret that is retained is gone")
	}
	if l.secretThere("shop", "kept") || l.secretThere("shop", "ended") {
		l.t.Error("a Secret is left over")
	}
}

// adoption has a new object go on with the values of a previous one. That takes a verb which dev does not have.
func (l *life) adoption() {
	const manifest = `
apiVersion: latticekeep.dev/v1beta1
kind: SealedCredential
metadata: {namespace: shop, name: heir}
spec:
  credentialType: api-key
  ttlDays: 30
  deletionPolicy: Retain
  generate: [{key: token, random: {}}]
  target: {%s}
`
	l.apply(fmt.Sprintf(manifest, ""))
	entry, token := l.ready("heir", 1).Status.CredentialID, l.secret("shop", "heir")["token"]
	l.dev("", "delete", "--timeout=60s", "--namespace", "shop", "sealedcredential", "heir")
	changed := fmt.Sprintf(manifest, "labels: {app: web}")
	l.apply(changed)
	l.stalled("shop", "heir", v1beta1.ReasonFormerValues)
	changed += fmt.Sprintf("  adoptFrom: {credentialID: %s}\n", entry)
	out, err := l.as(changed, "apply", "-f", "-")
	check(l.t, "adoptFrom without the verb", out, err, "the verb adopt")
	l.kubectl(changed, "apply", "-f", "-")
	if got := l.ready("heir", 1).Status.CredentialID; got != entry {
		l.t.Errorf("it goes on with %s, want %s", got, entry)
	}
	l.holds("heir", "token", token)
}

// workloads read by name with the token of their pod, as far as the cluster's RBAC lets them.
func (l *life) workloads() {
	app := l.token("shop", "app", "--audience=latticekeep", "--bound-object-kind=Pod", "--bound-object-name=app")
	const path = "/api/v2/vault/by-name/"
	for name, want := range map[string]string{"db": "second", "kept": "kept"} {
		if got := l.value(app, path+name, "password"); got != want {
			l.t.Errorf("%s reads %q, want %q", name, got, want)
		}
	}
	for what, refused := range map[string]struct {
		token, name string
		status      int
	}{
		"a name that its role does not have": {app, "legacy", http.StatusForbidden},
		"what was deleted with its object":   {app, "ended", http.StatusForbidden},
		"no role":                            {l.token("shop", "none", "--audience=latticekeep"), "db", http.StatusForbidden},
		"a token of the API server":          {l.token("shop", "app"), "db", http.StatusUnauthorized},
	} {
		if a := l.call(refused.token, path+refused.name); a.status != refused.status || a.body["values"] != nil {
			l.t.Errorf("%s: %d", what, a.status)
		}
	}
}

// sealingKeys makes a new key and retires the former one, once no object needs it.
func (l *life) sealingKeys(base *unstructured.Unstructured) {
	var list struct {
		SealingKeys []struct {
			KeyID   string `json:"key_id"`
			Objects int
		} `json:"sealing_keys"`
	}
	if err := json.Unmarshal([]byte(l.latticekeep("sealing-key", "list", "--json", "--url", l.url)), &list); err != nil {
		l.t.Fatal(err)
	}
	if len(list.SealingKeys) != 1 || list.SealingKeys[0].Objects == 0 {
		l.t.Fatalf("before anything is rotated the keys are %+v", list)
	}
	old := list.SealingKeys[0].KeyID
	published := func() string {
		m := new(corev1.ConfigMap)
		l.get(namespace, "latticekeep-sealing-key", m)
		return m.Data["sealing-key.json"]
	}
	former := published()
	l.latticekeep("sealing-key", "rotate", "--url", l.url)
	l.awaitThat(func() string { return "the new key is not published" }, func() bool { return published() != former })
	if out, err := l.try("sealing-key", "retire", old, "--url", l.url); err == nil || !strings.Contains(err.Error(), "still needed") {
		l.t.Fatalf("a key that is needed is retired: %v\n%s", err, out)
	}
	key := l.apiKey()
	l.oracle(base, key)
	for _, name := range []string{"db", "legacy"} {
		file := filepath.Join(l.dir, "git", name+".yaml")
		l.latticekeep("reseal", file, "--url", l.url, "--api-key-file", key)
		l.dev("", "apply", "-f", file)
		l.await("shop", name, "sealed for the new key", func(o *v1beta1.SealedCredential) bool {
			return o.Status.SealingKeyID != old && meta.IsStatusConditionTrue(o.Status.Conditions, v1beta1.ConditionReady)
		})
	}
	l.holds("db", "password", "second")
	l.latticekeep("sealing-key", "retire", old, "--url", l.url)
}

// restarted waits until the workloads of each kind have been restarted for the values of now.
func (l *life) restarted() {
	o := new(v1beta1.SealedCredential)
	l.get("shop", "api", o)
	want := "api=" + o.Status.ValuesChangedAt.UTC().Format("2006-01-02T15:04:05Z")
	deployment, set, daemons := new(appsv1.Deployment), new(appsv1.StatefulSet), new(appsv1.DaemonSet)
	l.awaitThat(func() string { return "a workload is not restarted for " + want }, func() bool {
		l.get("shop", "web", deployment)
		l.get("shop", "web", set)
		l.get("shop", "web", daemons)
		for _, template := range []corev1.PodTemplateSpec{deployment.Spec.Template, set.Spec.Template, daemons.Spec.Template} {
			if template.Annotations["latticekeep.dev/values"] != want {
				return false
			}
		}
		return true
	})
}

// uninstall runs the hook, as helm and the cluster would: the StatefulSet has one pod until its replicas are none.
func (l *life) uninstall(server *pod) {
	var configuration []unstructured.Unstructured
	for _, o := range l.all {
		if o.GetKind() == "ValidatingWebhookConfiguration" {
			configuration = append(configuration, o)
		}
	}
	pods := func(n string) {
		l.kubectl("", "patch", "statefulset", "latticekeep", "--namespace", namespace, "--subresource=status", "--type=merge", "-p", `{"status":{"replicas":`+n+`}}`)
	}
	l.kubectl(text(l.t, configuration), "apply", "-f", "-")
	pods("1")
	job := l.start("Job", "latticekeep-uninstall")
	l.kubectl("", "wait", "--for=jsonpath={.spec.replicas}=0", "--timeout=2m", "statefulset/latticekeep", "--namespace", namespace)
	l.end(server)
	pods("0")
	said := l.finish(job)
	for _, want := range []string{"stopped", "webhook configuration latticekeep-webhook: removed", ", 0 failed"} {
		if !strings.Contains(said, want) {
			l.t.Errorf("the hook does not say %q:\n%s", want, said)
		}
	}
	if got := l.secret("shop", "db")["password"]; got != "second" {
		l.t.Errorf("the Secret of a workload holds %q", got)
	}
	l.dev("", "delete", "--timeout=60s", "--namespace", "shop", "sealedcredentials", "--all") // nothing holds them back
	if _, err := os.Stat(filepath.Join(l.dir, "pods", "latticekeep", "var", "lib", "latticekeep", "latticekeep.db")); err != nil {
		l.t.Errorf("the database is not where the volume is: %v", err)
	}
}

// documented has the API server judge what the manual tells people to apply, without a warning; their claims are those of the chart.
func (l *life) documented() {
	l.kubectl("", "label", "namespace", namespace, "pod-security.kubernetes.io/warn=restricted")
	manual := readFile(l.t, "../docs/get-started/workload.md") + readFile(l.t, "../docs/guides/backup.md")
	claims := make(map[string]bool)
	for _, c := range field(l.t, find(l.all, "StatefulSet", "latticekeep"), "spec", "volumeClaimTemplates").([]any) {
		claims[c.(map[string]any)["metadata"].(map[string]any)["name"].(string)+"-latticekeep-0"] = true
	}
	named := regexp.MustCompile(`claimName: ([a-z0-9-]+)`)
	for _, kind := range []string{"Role", "Pod/orders", "PersistentVolumeClaim"} {
		kind, name, _ := strings.Cut(kind, "/")
		block := regexp.MustCompile(`(?ms)^( *)` + "```yaml\n *apiVersion: [a-z0-9./]+\n *kind: " + kind + `\n.*?^ *` + "```$").FindString(manual)
		if !strings.Contains(block, name) {
			l.t.Errorf("there is no manifest of a %s %s in the manual", kind, name)
			continue
		}
		_, block, _ = strings.Cut(block, "\n")
		indent := block[:strings.Index(block, "apiVersion")]
		block = strings.ReplaceAll("\n"+strings.TrimSuffix(strings.TrimRight(block, " `"), "\n"), "\n"+indent, "\n")
		if out := l.kubectl(block, "apply", "--dry-run=server", "-f", "-"); strings.Contains(out, "Warning") {
			l.t.Errorf("applying the %s of the manual: %s", kind, out)
		}
		for _, c := range named.FindAllStringSubmatch(block, -1) {
			if !claims[c[1]] {
				l.t.Errorf("the chart makes no claim %s, which the %s of the manual mounts", c[1], kind)
			}
		}
	}
}
