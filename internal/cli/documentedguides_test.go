package cli

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/api/client"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/cli/transfer"
	"github.com/latticekeep/latticekeep/internal/offline"
	"github.com/latticekeep/latticekeep/test/machine"
	"github.com/latticekeep/latticekeep/test/pgtest"
)

// A stateful set, and the claim of its volume, as the chart makes them.
const installed = `{"apiVersion":"v1","kind":"List","items":[
{"apiVersion":"apps/v1","kind":"StatefulSet","metadata":{"name":"latticekeep","namespace":"latticekeep-system"},"spec":{"replicas":1,"serviceName":"latticekeep",
"selector":{"matchLabels":{"app":"latticekeep"}},"template":{"metadata":{"labels":{"app":"latticekeep"}},"spec":{"containers":[{"name":"server","image":"latticekeep"}]}}}},
{"apiVersion":"storage.k8s.io/v1","kind":"StorageClass","metadata":{"name":"fast"},"provisioner":"example.org/disk","allowVolumeExpansion":true},
{"apiVersion":"v1","kind":"PersistentVolumeClaim","metadata":{"name":"data-latticekeep-0","namespace":"latticekeep-system"},
"spec":{"storageClassName":"fast","volumeName":"v","accessModes":["ReadWriteOnce"],"resources":{"requests":{"storage":"10Gi"}}}}]}`

// install makes them until the returned function is called.
func (c *cluster) install() (remove func()) {
	c.t.Helper()
	c.kubectl(installed, "apply", "-f", "-")
	return func() {
		c.t.Helper()
		c.release("pvc/data-latticekeep-0")
		c.release("statefulset/latticekeep")
		c.kubectl("", "-n", namespace, "delete", "--ignore-not-found", "statefulset/latticekeep", "pvc/data-latticekeep-0")
	}
}

// release lets an object be deleted, as a controller does, which is not here.
func (c *cluster) release(object string) {
	c.t.Helper()
	if out, err := c.try("", "-n", namespace, "patch", object, "--type=merge", "-p", `{"metadata":{"finalizers":null}}`); err != nil && !strings.Contains(out, "NotFound") {
		c.t.Fatal(out)
	}
}

// The backup that is restored is the one that the page has taken; the cluster has no kubelet.
func followBackup(f *documented) {
	bucket := f.path("bucket")
	f.run("latticekeep backup keygen")
	e, at := newEstate(f.T, "")
	recipient := strings.TrimSpace(readText(f.T, f.path("backup.recipient")))
	e.more = fmt.Sprintf("backup: {recipients: [%s], bucket: 'file://%s', every: 24h, keep: 720h}\n", recipient, bucket)
	url, end := e.serve(at)
	f.at(url, e)
	f.set("CHAIN", e.ready.Chain)
	f.set("IDENTITY", e.ready.Identity)
	if _, err := exec.LookPath("age"); err == nil {
		f.run("age-keygen -pq", "age1pq1")
		f.run("age -d -i backup.identity")
	} else {
		f.pass("age-keygen -pq", "age is not installed; the tests of internal/backup open backups with its library")
		f.pass("age -d -i backup.identity", "age is not installed")
	}
	fetched := awaitFile(f.T, filepath.Join(bucket, "backup", "*", "*.backup.sig"))
	verified := []string{"FILE", strings.TrimSuffix(fetched, ".sig")}
	f.runAs("latticekeep backup verify --input FILE --verify-with backup.identity", verified, "the KMS key is in it")
	f.runAs("latticekeep backup verify --input FILE --verify-with backup.identity", verified, "the KMS key is in it")
	f.run("latticekeep backup --url $BASE")
	end()
	f.runAs("latticekeep backup --data-dir DIR --kms-key-file FILE …",
		[]string{"DIR", e.path("data"), "FILE", e.keyFile(), "…", "--recipient-file backup.recipient --output stopped.backup"})
	f.run("latticekeep backup verify --input latticekeep-2026-11-21.backup --identity")
	restored := f.path("restored")
	must(f.T, os.Remove(e.keyFile()))
	f.runAs("latticekeep restore --input latticekeep-2026-11-21.backup", []string{"/var/lib/latticekeep", restored, "/etc/latticekeep/kms/kms.key", e.keyFile()}, "restored: ")
	e.more = ""
	e.whole(offline.BoltScheme + restored)

	f.set("BUCKET", "file://"+bucket)
	f.runAs("latticekeep restore --bucket $BUCKET --to-time 2026-11-25T02:45:00Z", []string{
		"2026-11-25T02:45:00Z", time.Now().UTC().Format(time.RFC3339Nano), "/var/lib/latticekeep-0245", f.path("earlier"), "/etc/latticekeep/kms/kms.key", e.keyFile(),
	}, "restored to: ")
	f.pass("latticekeep restore --bucket $BUCKET --follow", "it goes on until it is stopped; TestACopyFollowsAndIsPromoted runs it")
	f.pass("latticekeep restore --promote", "TestACopyFollowsAndIsPromoted runs it on a copy")

	f.pass("kubectl taint node NODE", "the run on a real node has one node")
	f.onNode("kubectl -n latticekeep-system wait --for=condition=Ready pod/latticekeep-0", "kubectl wait --for=condition=Ready pod/latticekeep-0 ")
	f.pass("kubectl delete pod --force", "the page says not to")
	c := f.cluster()
	defer c.install()()
	f.run("kubectl -n latticekeep-system scale statefulset/latticekeep --replicas 0", "scaled")
	f.run("kubectl -n latticekeep-system wait --for=delete pod/latticekeep-0")
	c.release("pvc/data-latticekeep-0")
	f.run("kubectl -n latticekeep-system delete pvc data-latticekeep-0", "deleted")
	f.run("kubectl -n latticekeep-system create secret generic latticekeep-restore", "created")
	must(f.T, os.WriteFile(f.path("restore.yaml"), []byte(manifest(f.T, f.page, "kind: PersistentVolumeClaim")), 0o600))
	f.run("kubectl apply -f restore.yaml", "pod/latticekeep-restore created")
	f.onNode("kubectl -n latticekeep-system wait --for=condition=Ready pod/latticekeep-restore", "kubectl wait --for=condition=Ready pod/latticekeep-restore ")
	f.onNode("kubectl -n latticekeep-system attach -i latticekeep-restore", "kubectl attach --stdin latticekeep-restore ")
	f.onNode("kubectl -n latticekeep-system wait --for=jsonpath='{.status.phase}'=Succeeded pod/latticekeep-restore", "kubectl wait '--for=jsonpath={.status.phase}=Succeeded' pod/latticekeep-restore ")
	f.onNode("kubectl -n latticekeep-system logs latticekeep-restore", "kubectl logs latticekeep-restore ")
	f.run("kubectl -n latticekeep-system delete pod/latticekeep-restore secret/latticekeep-restore", "deleted")
	f.pass("kubectl exec POD -- cat", "it needs a kubelet, and a pod of another image")
}

// manifest returns the YAML block of a page that has this part, without its indentation.
func manifest(t *testing.T, page, part string) string {
	t.Helper()
	for _, m := range regexp.MustCompile("(?ms)^( *)```yaml\n(.*?)^ *```$").FindAllStringSubmatch(readText(t, "../../"+page), -1) {
		if strings.Contains(m[2], part) {
			return strings.ReplaceAll("\n"+m[2], "\n"+m[1], "\n")
		}
	}
	t.Fatalf("%s has no manifest with %q", page, part)
	return ""
}

// awaitFile waits until there is a file whose path has the form.
func awaitFile(t *testing.T, form string) string {
	t.Helper()
	for deadline := time.Now().Add(5 * time.Minute); ; time.Sleep(20 * time.Millisecond) {
		if found, err := filepath.Glob(form); err != nil || len(found) > 0 {
			must(t, err)
			return found[0]
		}
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain for %s", form)
		}
	}
}

// The embedded store moves to a PostgreSQL that asks for a password.
func followPostgres(f *documented) {
	e, at := newEstate(f.T, "")
	server := pgtest.Shared(f.T)
	plain := withoutPassword(f.T, server.URL(), f.path("password"))
	f.bind("/var/lib/latticekeep", e.path("data"))
	f.bind("postgres://latticekeep@db.example.org/latticekeep?sslmode=verify-full", plain)
	f.bind("/etc/latticekeep/postgres/password", f.path("password"))
	f.run("latticekeep migrate --from bolt:/var/lib/latticekeep --to", "head")
	e.refused(at, "was moved")
	e.whole(server.URL())

	other, from := newEstate(f.T, "")
	to := offline.BoltScheme + other.path("target")
	source, err := offline.Open(f.Context(), offline.Location{URL: from})
	must(f.T, err)
	m := &transfer.Migration{From: source, Source: offline.Location{URL: from}, Target: offline.Location{URL: to}}
	must(f.T, errors.Join(m.Begin(f.Context()), source.Close()))
	other.refused(from, "is being moved")
	f.runAs("latticekeep migrate --from bolt:/var/lib/latticekeep --abandon", []string{"/var/lib/latticekeep", other.path("data")})
	other.whole(from)

	c := f.cluster()
	defer c.install()()
	f.run("kubectl -n latticekeep-system scale statefulset/latticekeep --replicas 0", "scaled")
	machine.WriteFile(f.T, f.path("ca.crt"), []byte("a certificate"))
	f.run("kubectl -n latticekeep-system create secret generic latticekeep-postgres", "created")
}

// A deployment wraps its keys anew, and moves to another key file.
func followKMS(f *documented) {
	f.pass("gcloud iam roles create", "there is no Google Cloud here; test/kmstest stands for it elsewhere")
	f.pass("gcloud kms keys add-iam-policy-binding", "there is no Google Cloud here")
	c := newCustodian(f.T, 2)
	at := func() {
		f.Helper()
		f.set("BASE", c.url)
		f.set("LATTICEKEEP_URL", c.url)
		f.set("LATTICEKEEP_API_KEY", c.systemKey())
		machine.WriteFile(f.T, f.path("system.key"), []byte(c.systemKey()))
	}
	at()
	f.run("latticekeep kms rewrap --again", "0 remain")
	f.run("(umask 077; printf")
	must(f.T, os.Rename(f.path("new.key"), c.keyFile("b")))
	c.kill()
	c.configure("b", "a")
	c.start()
	at()
	f.run("latticekeep kms rewrap --url $BASE", "0 remain")
	f.runAs("latticekeep kms rewrap --destroy-old", []string{"--destroy-old", "--destroy-old --yes"}, "destroyed")
	c.kill()
	c.configure("b")
	c.start()
	c.unsealAll()
}

// Somebody has put back a database, whose loss is accepted.
func followAnchors(f *documented) {
	anchors := "file://" + f.path("anchors")
	e, at := newEstate(f.T, fmt.Sprintf("audit: {anchor: {bucket: %q}}\n", anchors))
	_, end := e.serve(at)
	awaitFile(f.T, f.path("anchors/anchor/*/checkpoint"))
	end()
	must(f.T, os.CopyFS(e.path("older"), os.DirFS(e.path("data"))))
	url, end := e.serve(at)
	e.seal(url, 3)
	note := e.noteOf(url)
	end()
	keepNote(f.T, anchors, note)
	must(f.T, errors.Join(os.RemoveAll(e.path("data")), os.Rename(e.path("older"), e.path("data"))))
	url, end = e.serve(at)
	f.at(url, e)
	c := e.connect(url, e.tenant)
	if _, err := c.UnsealCredential(f.Context(), e.ids[0]); err == nil || !strings.Contains(err.Error(), "503") {
		f.Error("a database behind its anchor is served: ", err)
	}
	f.run("latticekeep audit accept-rollback --url $BASE", "are lost\nepoch 2 begins")
	if _, err := c.UnsealCredential(f.Context(), e.ids[0]); err != nil {
		f.Error("after the loss was accepted: ", err)
	}
	f.run("latticekeep audit export --url $BASE", `"ANCHOR_STARTED"`)
	end()
	f.pass("latticekeep audit verify --since", "it is whole in docs/guides/verify-the-log.md")
	f.runAs("latticekeep audit verify --data-dir DIR", []string{"DIR", e.path("data")}, "ok: ")
}

// Somebody has removed a row, and put back another.
func followVerification(f *documented) {
	d := newDamaged(f.T)
	other, at := newEstate(f.T, "")
	to := pgtest.Shared(f.T).URL()
	mustRun(f.T, "migrate", "--from", at, "--to", to)
	verify := func(e *estate, at string) (end func()) {
		f.Helper()
		url, end := e.serve(at)
		f.at(url, e)
		f.set("KEY", e.tenant)
		f.set("CHAIN", e.ready.Chain)
		return end
	}
	end := verify(d.estate, d.at)
	f.run("latticekeep audit verify --url $BASE", "ok: the log of tenant")
	end()
	must(f.T, os.CopyFS(f.path(".latticekeep"), os.DirFS(d.path("data"))))
	must(f.T, copyFile(d.keyFile(), f.path(".latticekeep/kms.key"))) // where a development server has it
	f.run("latticekeep audit verify --data-dir .latticekeep", "ok: the whole log")
	f.run("latticekeep audit export --data-dir .latticekeep")
	f.run("latticekeep audit verify --file log.jsonl", "ok: the whole log")
	end = verify(other, to)
	end()
	f.set("KMS_URL", "file://"+other.keyFile())
	f.runAs("latticekeep audit verify --store", []string{"postgres://latticekeep@db/latticekeep", to}, "those that decide are what the log commits to")

	must(f.T, copyFile(d.keyFile(), f.path("kms.key")))
	f.bind("/var/lib/latticekeep", d.path("data"))
	hash := d.find(d.before, "apikey/hash/", d.revoked)
	d.put(hash, d.before[hash])
	tenant := d.find(d.rows(d.at), "tenant/ten_", "")
	d.remove(tenant)
	f.fails("latticekeep doctor --data-dir", fmt.Sprintf("%+q", hash), fmt.Sprintf("%+q", tenant))
	f.runAs("latticekeep doctor --data-dir", []string{`"user/row/ten_…/usr_…"`, fmt.Sprintf("%+q", hash)}, "API_KEY_REVOKED")
	f.runAs("latticekeep doctor --data-dir", []string{`"tenant/ten_…"@absent`, fmt.Sprintf("%+q@absent", tenant)}, "rows accepted: 1")
	f.runAs("latticekeep doctor --data-dir", []string{`"apikey/hash/1/9f…"@41d0c2e97b3a5f68`, d.named(hash)}, "rows removed: 1")

	defer verify(other, to)()
	f.run("latticekeep audit checkpoint --url $BASE")
	f.run("latticekeep audit verify --url $BASE", "ok: ")
	f.run("latticekeep audit export --url $BASE")
	root, err := filepath.Abs("../..")
	must(f.T, err)
	f.bind("hack/verify_audit.py", root+"/hack/verify_audit.py")
	f.run("python3 hack/verify_audit.py mine.jsonl")
	f.run("latticekeep compliance score --framework soc2")
}

// A cluster has objects of the earlier version of the API.
func followUpgrade(f *documented) {
	c := f.cluster()
	root, err := filepath.Abs("../..")
	must(f.T, err)
	f.bind("config/crd", root+"/config/crd")
	f.set("PATH", root+"/bin/tools:"+os.Getenv("PATH"))
	f.onNode("helm upgrade latticekeep charts/latticekeep", "helm upgrade latticekeep charts/latticekeep --namespace latticekeep-system --values")
	f.run("latticekeep version --formats")
	f.pass("kubectl -n latticekeep-system exec POD -- /latticekeep version --formats", "only a kubelet runs commands in pods")
	f.pass("kubectl -n latticekeep-system logs job/latticekeep-crd", "only a kubelet has logs")
	f.run("kubectl get crd sealedcredentials.latticekeep.dev", "v1beta1")
	f.pass("helm upgrade latticekeep older/charts/latticekeep", "the chart of an earlier release is not here")
	f.pass("helm upgrade --no-hooks", "the text only names it")
	f.run("kubectl apply --server-side --force-conflicts -k config/crd", "serverside-applied")
	f.runAs("latticekeep crd apply --kubeconfig FILE", []string{"FILE", c.plane.Kubeconfig})

	server := start(f.T, f.path(".latticekeep"))
	defer server.end()
	api, err := client.New(server.BaseURL)
	must(f.T, err)
	const email, password = "ada@example.org", "correct horse battery staple"
	_, err = api.V2.RegisterUser(f.Context(), v2.RegisterRequest{Email: email, Password: password, TenantName: "Example Ltd"})
	must(f.T, err)
	machine.WriteFile(f.T, f.path("password"), []byte(password+"\n"))
	_, session, err := call(server.DevReady, "POST", "/api/v2/auth/login", fmt.Sprintf(`{"email":%q,"password":%q}`, email, password))
	must(f.T, err)
	f.set("BASE", server.BaseURL)
	f.set("KEY", server.APIKey)
	f.set("TOKEN", fmt.Sprint(session["access_token"]))
	asked := []string{"--email ada@example.org", "--email ada@example.org --password-file password"}
	f.runAs("latticekeep audit review --url $BASE", asked, "last review of log: -")
	f.runAs("latticekeep audit review denials --url $BASE", asked, "acknowledged")
	waits := f.run(`curl -s "$BASE/api/v2/audit/reviews"`, `"denials"`)
	asks := regexp.MustCompile(`"(from|to)":(\d+)`).FindAllStringSubmatch(waits, -1)
	if len(asks) != 2 {
		f.Fatalf("no range waits: %s", waits)
	}
	f.runAs(`curl -s "$BASE/api/v2/audit/reviews"`, []string{`"from":31,"to":57`, asks[0][0] + "," + asks[1][0]}, `"success":true`)
	f.pass("latticekeep seal -f secret.yaml", "README.md and docs/get-started/kubectl.md have it, and are followed")
	f.run(`curl -s "$BASE/api/v2/audit/logs?outcome=failure&limit=100"`, `"entries"`)

	must(f.T, os.Mkdir(f.path("deploy"), 0o700))
	machine.WriteFile(f.T, f.path("deploy/db.yaml"), []byte("apiVersion: latticekeep.dev/v1alpha1\n"))
	f.run("grep -rl latticekeep.dev/v1alpha1 deploy")
	if got := readText(f.T, f.path("deploy/db.yaml")); got != "apiVersion: latticekeep.dev/v1beta1\n" {
		f.Error(got)
	}
	c.kubectl("", "get", "sealedcredentials.v1alpha1.latticekeep.dev", "-A")
	f.run("kubectl get --raw /metrics", "v1alpha1")
	f.pass("kubectl apply -k", "the text only names it")
	f.pass("helm template latticekeep charts/latticekeep", "the tests of charts render it, and an API server judges it there")
	f.pass("helm install latticekeep charts/latticekeep", "without a kubelet its job does not end; the tests of charts install it otherwise")
	f.run("kubectl apply -k config/crd", "sealedcredentials.latticekeep.dev")
	defer c.install()()
	f.runAs("kubectl -n latticekeep-system delete statefulset latticekeep --cascade=orphan", []string{"=orphan", "=orphan --wait=false"}, "deleted")
}

// The tests of test/externalsecrets run the operator, and the commands that need it.
func followExternalSecrets(f *documented) {
	e, at := newEstate(f.T, "")
	url, end := e.serve(at)
	defer end()
	f.at(url, e)
	tenants, err := e.connect(url, e.systemKey()).ListTenants(f.Context(), nil)
	must(f.T, err)
	admin, err := e.connect(url, e.systemKey()).CreateTenantAPIKey(f.Context(), tenants.Tenants[0].TenantId, v2.CreateAPIKeyRequest{
		Name: "admin", Scopes: []v2.Scope{"account:admin", "vault:read", "audit:read"},
	})
	must(f.T, err)
	f.set("LATTICEKEEP_API_KEY", admin.ApiKey)

	f.run("latticekeep access put shop-read", "shop/**=read")
	id := regexp.MustCompile(`key_\w+`).FindString(f.run("(umask 077; latticekeep apikey create external-secrets-shop"))
	f.runAs("latticekeep access bind", []string{"key_…", id}, "1 of the policies")
	const elsewhere = "the operator and its types are not here; `make external-secrets` runs it"
	for strings.HasPrefix(f.left[0], "kubectl ") {
		f.pass("kubectl ", elsewhere)
	}
	f.run("latticekeep audit search")
	for len(f.left) > 0 {
		f.pass("kubectl ", elsewhere)
	}
}
