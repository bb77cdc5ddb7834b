// Package charts holds the tests of the Helm chart: what `helm template` makes of it, and config/ beside it, which must be the same; and
// what it installs (see installation), run against a real API server with the rights that it grants.
//
// They run the helm of hack/helm, which `make test` compiles.
package charts_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"
)

const namespace = "latticekeep-system"

// helmTemplate returns what the chart makes of the values, given as flags of helm, or its refusal.
func helmTemplate(t *testing.T, flags ...string) (string, error) {
	t.Helper()
	if testing.Short() {
		t.Skip("-short: needs helm")
	}
	helm, err := filepath.Abs("../bin/tools/helm")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(helm); err != nil {
		t.Fatalf("there is no helm: run `make helm` first: %v", err)
	}
	cmd := exec.CommandContext(t.Context(), helm, append([]string{"template", "latticekeep", "latticekeep", "--namespace", namespace}, flags...)...)
	out, err := cmd.Output()
	if exit := new(exec.ExitError); errors.As(err, &exit) {
		return "", errors.New(string(exit.Stderr))
	} else if err != nil {
		t.Fatalf("running helm: %v", err)
	}
	return string(out), nil
}

func rendered(t *testing.T, flags ...string) []unstructured.Unstructured {
	t.Helper()
	out, err := helmTemplate(t, flags...)
	if err != nil {
		t.Fatalf("rendering the chart with %q: %v", flags, err)
	}
	return objects(t, out)
}

func kustomized(t *testing.T, folder string) []unstructured.Unstructured {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "kubectl", "kustomize", folder).Output()
	if err != nil {
		t.Fatalf("running kubectl kustomize: %v", err)
	}
	return objects(t, string(out))
}

func objects(t *testing.T, text string) (all []unstructured.Unstructured) {
	t.Helper()
	for _, document := range regexp.MustCompile(`(?m)^---$`).Split(text, -1) {
		var o unstructured.Unstructured
		if err := yaml.Unmarshal([]byte(document), &o.Object); err != nil {
			t.Fatalf("reading what was rendered: %v\n%s", err, document)
		}
		if len(o.Object) > 0 {
			all = append(all, o)
		}
	}
	if len(all) == 0 {
		t.Fatal("nothing was rendered")
	}
	return all
}

// find returns the object of that kind and name, and nil when there is none.
func find(all []unstructured.Unstructured, kind, name string) *unstructured.Unstructured {
	for i := range all {
		if all[i].GetKind() == kind && all[i].GetName() == name {
			return &all[i]
		}
	}
	return nil
}

// field returns a field of an object that must be there.
func field(t *testing.T, o *unstructured.Unstructured, path ...string) any {
	t.Helper()
	if o == nil {
		t.Fatalf("the object of %v is not rendered", path)
	}
	v, ok, err := unstructured.NestedFieldNoCopy(o.Object, path...)
	if err != nil || !ok {
		t.Fatalf("%s %s has no %s: %v", o.GetKind(), o.GetName(), strings.Join(path, "."), err)
	}
	return v
}

// everyRendering calls f with what each file of ci and config/default makes.
func everyRendering(t *testing.T, f func(t *testing.T, all []unstructured.Unstructured)) {
	files, err := filepath.Glob("latticekeep/ci/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("no values to test with: %v", err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) { f(t, rendered(t, "--values", file)) })
	}
	t.Run("config", func(t *testing.T) { f(t, kustomized(t, "../config/default")) })
}

func TestValuesThatCannotRunAreRefused(t *testing.T) {
	for _, tc := range []struct{ set, want string }{
		{"replicas=2", "replicas: the embedded store has one writer"},
		{"replicas=2,config.store.url=postgres://vault@db/vault,config.compliance.reports=s3://r", "config.kms.url: replicas that share a database share a KMS key"},
		{"config.store.url=postgres://vault@db/vault,kms.existingSecret=kms", "config.compliance.reports: name a bucket"},
		{"config.backup.bucket=s3://backups", "config.backup.recipients: say who can open"},
		{"config.backup.bucket=file:///var/lib/latticekeep/backups,config.backup.recipients={age1pq1a}", "config.backup.bucket: name a bucket"},
		{"config.store.url=postgres://vault@db/vault,kms.existingSecret=kms,config.compliance.reports=file:///var/lib/latticekeep/r", "the servers have no volume"},
		{"config.store.url=postgres://vault:secret@db/vault", "url"},
		{"config.store.url=mysql://vault@db/vault", "url"},
		{"config.store.passwordFile=/etc/passwd", "'passwordFile' not allowed"},
		{"config.kms.url=file:///tmp/kms.key", "url"},
		{"config.kms.url=azurekeyvault://v/keys/k", "url"},
		{"postgres.existingSecret=db", "postgres.existingSecret: it goes with config.store.url"},
		{"kms.tokenSecret=a,config.kms.tokenFile=/run/vault/token", "kms.tokenSecret: config.kms.tokenFile names the token already"},
		{"replicas=-1", "replicas"},
		{"replica=1", "additional properties 'replica' not allowed"},
		{"config.listen=:80", "'listen' not allowed"},
		{"config.dataDir=/tmp", "'dataDir' not allowed"},
		{"config.tls.secretName=x", "'secretName' not allowed"},
		{"config.compliance.catalogues=/etc", "'catalogues' not allowed"},
		{"config.audit.signing=none", "signing"},
		{"config.log.level=trace", "level"},
		{"config.log.format=logfmt", "format"},
		{"config.audit.verification=24", "verification"},
		{"config.audit.anchor.configMap=other", "configMap"}, // for which there is no role
		{"config.audit.anchor.bucket=file:///var/lib/latticekeep/anchor", "bucket"},
		{"config.audit.anchor.bucket=https://example.org", "bucket"},
		{"config.audit.retention.archive=file:///tmp/archive", "archive"},
		{"config.audit.retention.keep=8760h", "config.audit.retention.archive: name the bucket"},
		{"config.audit.retention.maxEntries=20000", "config.audit.retention.archive: name the bucket"},
		{"config.audit.retention.archive=s3://archive,config.audit.retention.keep=0s,config.audit.retention.maxEntries=0", "config.audit.retention: nothing moves"},
		{"config.audit.retention.archive=s3://archive,config.audit.retention.maxEntries=-1", "maxEntries"},
		{"config.compliance.reports=s3://key@reports", "reports"},
		{"config.kms.cacheTTL=5", "cacheTTL"},
		{"config.publicURL=http://vault.example.org", "publicURL"},
		{"config.registration.closed=false", "config.registration.closed: opening it needs config.mail.smtp.address"},
		{"config.kubernetes.policy.scopes={Everywhere}", "scopes"},
		{"config.kubernetes.policy.maxTTLDays=3651", "maxTTLDays"},
		{"config.kubernetes.namespaces.shop=tenant", "shop"},
		{"image.digest=sha256:abc", "digest"},
		{"webhook.replicas=0", "webhook/replicas"},
		{"webhook.timeoutSeconds=31", "timeoutSeconds"},
		{"storage.existingClaim=a,storage.hostPath=/a", "storage: existingClaim and hostPath exclude each other"},
		{"storage.hostPath=/data,kms.storage.hostPath=/data/kms", "kms.storage.hostPath: it lies in storage.hostPath"},
		{"storage.hostPath=/data,kms.storage.hostPath=/data", "kms.storage.hostPath: it lies in storage.hostPath"},
		{"storage.existingClaim=a,kms.storage.existingClaim=a", "kms.storage.existingClaim: it is the claim of the database"},
		{"storage.hostPath=data", "hostPath"},
		{"admissionPolicies.clusterScopeNamespaces={a'b}", "clusterScopeNamespaces"},
		{"webhook.clientNames={api}", "webhook.clientNames: without webhook.clientCA no certificate is asked for"},
		{"webhook.clientCA=A_b", "clientCA"},
		{"podSecurityContext.runAsNonRoot=false", "runAsNonRoot"},
		{"podSecurityContext.runAsNonRoot=null", "runAsNonRoot"},
		{"podSecurityContext.runAsUser=0", "runAsUser"},
		{"podSecurityContext.seccompProfile=null", "seccompProfile"},
		{"podSecurityContext.seccompProfile.type=Unconfined", "seccompProfile"},
		{"securityContext.allowPrivilegeEscalation=true", "allowPrivilegeEscalation"},
		{"securityContext.allowPrivilegeEscalation=null", "allowPrivilegeEscalation"},
		{"securityContext.readOnlyRootFilesystem=false", "readOnlyRootFilesystem"},
		{"securityContext.privileged=true", "privileged"},
		{"securityContext.runAsUser=0", "runAsUser"},
		{"securityContext.capabilities.drop={NET_RAW}", "drop"},
		{"securityContext.capabilities.add={NET_ADMIN}", "add"},
		{"securityContext.capabilities=null", "capabilities"},
		{"commonLabels.app\\.kubernetes\\.io/name=vault", "commonLabels: app.kubernetes.io/name is a label of the chart's own"},
		{"server.podLabels.app\\.kubernetes\\.io/component=webhook", "server.podLabels: app.kubernetes.io/component is a label of the chart's own"},
		{"webhook.podLabels.helm\\.sh/chart=x", "webhook.podLabels: helm.sh/chart is a label of the chart's own"},
		{"commonAnnotations.helm\\.sh/hook=post-delete", "commonAnnotations: helm.sh/hook tells Helm"},
		{"buckets.serviceAccountAnnotations.a=b", "'serviceAccountAnnotations' not allowed"},
		{"server.serviceAccount.name=A_b", "name"},
		{"server.extraEnv.HTTPS_PROXY=x", "extraEnv"},
		{"server.extraVolumes[0].name=data", "server.extraVolumes: data is a volume of the chart's own"},
		{"webhook.extraVolumes[0].name=ca", "webhook.extraVolumes: ca is a volume of the chart's own"},
		{"server.strategy.type=Recreate", "server.strategy.type: the StatefulSet of the embedded store has RollingUpdate or OnDelete"},
		{"server.strategy.type=OnDelete,config.store.url=postgres://vault@db/vault,kms.existingSecret=kms,config.compliance.reports=s3://r", "server.strategy.type: the Deployment, with config.store.url, has"},
		{"server.service.type=ExternalName", "type"},
		{"server.service.nodePort=30200", "server.service.nodePort: it goes with type"},
		{"server.service.externalTrafficPolicy=Local", "server.service.externalTrafficPolicy: it goes with type"},
		{"server.service.type=NodePort,server.service.loadBalancerClass=x", "loadBalancerClass and loadBalancerSourceRanges go with type LoadBalancer"},
		{"autoscaling.enabled=true", "autoscaling.enabled: the embedded store has one writer"},
		{"autoscaling.minReplicas=6", "autoscaling.minReplicas: it is more than autoscaling.maxReplicas"},
		{"ingress.enabled=true", "config.publicURL: say where users reach the service"},
		{"httpRoute.enabled=true,httpRoute.parentRefs[0].name=a", "config.publicURL: say where users reach the service"},
		{"httpRoute.enabled=true,config.publicURL=https://vault.example.org", "httpRoute.parentRefs: name the Gateway"},
		{"ingress.hosts={vault_x}", "hosts"},
		{"monitoring.serviceMonitor.enabled=true,monitoring.podMonitor.enabled=true", "monitoring.podMonitor.enabled: with monitoring.serviceMonitor.enabled"},
		{"webhook.port=443", "port"},
		{"webhook.port=8444", "webhook.operationsPort: it is webhook.port"},
		{"server.dnsPolicy=Cluster", "dnsPolicy"},
	} {
		out, err := helmTemplate(t, "--set", tc.set)
		if err == nil {
			t.Errorf("%s: it was rendered:\n%s", tc.set, out[:min(len(out), 200)])
		} else if !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: refused with\n%v\nwithout %q", tc.set, err, tc.want)
		}
	}
}

// Catalogues and what opens the buckets reach the server.
func TestCataloguesAndBucketsReachTheServer(t *testing.T) {
	all := rendered(t, "--set", "catalogues.existingConfigMap=ours,buckets.existingSecret=keys")
	if text := field(t, find(all, "ConfigMap", "latticekeep-config"), "data", "config.yaml").(string); !strings.Contains(text, "catalogues: /etc/latticekeep/catalogues") {
		t.Errorf("the program does not look for catalogues:\n%s", text)
	}
	pod := field(t, find(all, "StatefulSet", "latticekeep"), "spec", "template", "spec").(map[string]any)
	container := pod["containers"].([]any)[0].(map[string]any)
	has := func(list any, want map[string]any) bool {
		return slices.ContainsFunc(list.([]any), func(o any) bool { return reflect.DeepEqual(o, want) })
	}
	if !has(container["volumeMounts"], map[string]any{"name": "catalogues", "mountPath": "/etc/latticekeep/catalogues", "readOnly": true}) ||
		!has(pod["volumes"], map[string]any{"name": "catalogues", "configMap": map[string]any{"name": "ours"}}) {
		t.Errorf("the catalogues are not there: %v", pod)
	}
	if !has(container["envFrom"], map[string]any{"secretRef": map[string]any{"name": "keys"}}) {
		t.Errorf("the server does not get what opens the buckets: %v", container["envFrom"])
	}
}

// Replicas that share a database have no volumes, agree on who works as the operator, and are not all evicted at once.
func TestReplicasThatShareADatabase(t *testing.T) {
	all := rendered(t, "--values", "latticekeep/ci/postgres-values.yaml")
	deployment := find(all, "Deployment", "latticekeep")
	if got := field(t, deployment, "spec", "replicas"); got != float64(3) && got != int64(3) {
		t.Errorf("replicas is %v", got)
	}
	for _, v := range field(t, deployment, "spec", "template", "spec", "volumes").([]any) {
		if v := v.(map[string]any); v["persistentVolumeClaim"] != nil || v["hostPath"] != nil {
			t.Errorf("there is a volume: %v", v)
		}
	}
	text := field(t, find(all, "ConfigMap", "latticekeep-config"), "data", "config.yaml").(string)
	for _, want := range []string{"passwordFile: /etc/latticekeep/postgres/password", "tokenFile: /etc/latticekeep/kms-token/token", "url: hashivault://"} {
		if !strings.Contains(text, want) {
			t.Errorf("the configuration lacks %s:\n%s", want, text)
		}
	}
	for _, o := range [][2]string{{"PodDisruptionBudget", "latticekeep"}, {"Role", "latticekeep-election"}, {"RoleBinding", "latticekeep-election"}} {
		if find(all, o[0], o[1]) == nil {
			t.Errorf("there is no %s %s", o[0], o[1])
		}
		if find(rendered(t), o[0], o[1]) != nil {
			t.Errorf("there is a %s %s for one replica", o[0], o[1])
		}
	}
	if find(all, "StatefulSet", "latticekeep") != nil {
		t.Error("there is a StatefulSet, too")
	}
}

// A server that is stopped for a restore keeps its volumes.
func TestReplicasMayBeNone(t *testing.T) {
	set := find(rendered(t, "--set", "replicas=0"), "StatefulSet", "latticekeep")
	if got := field(t, set, "spec", "replicas"); got != float64(0) && got != int64(0) {
		t.Errorf("replicas is %v", got)
	}
	for _, when := range []string{"whenDeleted", "whenScaled"} {
		if got := field(t, set, "spec", "persistentVolumeClaimRetentionPolicy", when); got != "Retain" {
			t.Errorf("%s is %v", when, got)
		}
	}
}

// Reviews are taken from the API servers alone where it is said how they are known.
func TestWebhookIsForTheAPIServersThatAreNamed(t *testing.T) {
	from := func(flags ...string) any {
		t.Helper()
		policy := find(rendered(t, flags...), "NetworkPolicy", "latticekeep-webhook")
		return field(t, policy, "spec", "ingress").([]any)[0].(map[string]any)["from"]
	}
	if got := from(); got != nil {
		t.Errorf("by default reviews come from %v", got)
	}
	const outward, inward = "networkPolicy.egress.apiServer[0].ipBlock.cidr=10.0.0.1/32", "networkPolicy.apiServer[0].ipBlock.cidr=10.0.0.2/32"
	for cidr, flags := range map[string][]string{"10.0.0.1/32": {"--set", outward}, "10.0.0.2/32": {"--set", outward, "--set", inward}} {
		want := []any{map[string]any{"ipBlock": map[string]any{"cidr": cidr}}}
		if got := from(flags...); !reflect.DeepEqual(got, want) {
			t.Errorf("reviews come from %v, want %v", got, want)
		}
	}
	pod := field(t, find(rendered(t, "--set", "webhook.clientCA=authority,webhook.clientNames={a,b}"), "Deployment", "latticekeep-webhook"), "spec", "template", "spec").(map[string]any)
	container := pod["containers"].([]any)[0].(map[string]any)
	for _, arg := range []any{"--client-ca-file=/etc/latticekeep/client-ca/ca.crt", "--client-name=a", "--client-name=b"} {
		if !slices.Contains(container["args"].([]any), arg) {
			t.Errorf("the webhook is not started with %s", arg)
		}
	}
	has := func(list any, want map[string]any) bool {
		return slices.ContainsFunc(list.([]any), func(o any) bool { return reflect.DeepEqual(o, want) })
	}
	if !has(container["volumeMounts"], map[string]any{"name": "client-ca", "mountPath": "/etc/latticekeep/client-ca", "readOnly": true}) ||
		!has(pod["volumes"], map[string]any{"name": "client-ca", "configMap": map[string]any{"name": "authority",
			"items": []any{map[string]any{"key": "ca.crt", "path": "ca.crt"}}}}) {
		t.Errorf("the authority is not there: %v", pod)
	}
}

// One replica that restarts must not stop every deployment of the cluster, and must not stop a drain.
func TestWebhookFailsClosedOnlyWithSeveralReplicas(t *testing.T) {
	for replicas, want := range map[string]string{"1": "Ignore", "2": "Fail", "3": "Fail"} {
		all := rendered(t, "--set", "webhook.replicas="+replicas)
		webhooks := field(t, find(all, "ValidatingWebhookConfiguration", "latticekeep-webhook"), "webhooks").([]any)
		for _, w := range webhooks {
			w := w.(map[string]any)
			if w["failurePolicy"] != want {
				t.Errorf("with %s replicas the webhook has failurePolicy %v", replicas, w["failurePolicy"])
			}
			if _, ok := w["clientConfig"].(map[string]any)["caBundle"]; ok {
				t.Error("a CA bundle is rendered, which an upgrade would put back")
			}
		}
		if budget := find(all, "PodDisruptionBudget", "latticekeep-webhook"); (budget != nil) != (want == "Fail") {
			t.Errorf("with %s replicas there is a PodDisruptionBudget: %v", replicas, budget != nil)
		}
	}
}

// In a release's manifest, `helm rollback` would put an older CRD back.
func TestTheCRDIsBroughtByAHookAndInNoManifest(t *testing.T) {
	everyRendering(t, func(t *testing.T, all []unstructured.Unstructured) {
		for _, o := range all {
			if o.GetKind() == "CustomResourceDefinition" && o.GetLabels()["app.kubernetes.io/instance"] != "" {
				t.Errorf("%s is in the manifest", o.GetName())
			}
		}
	})
	for _, o := range rendered(t) {
		if o.GetName() != "latticekeep-crd" {
			continue
		}
		if hook := o.GetAnnotations()["helm.sh/hook"]; hook != "pre-install,pre-upgrade" {
			t.Errorf("%s runs at %q: before what needs it, and never at a rollback", o.GetKind(), hook)
		}
		if weight := o.GetAnnotations()["helm.sh/hook-weight"]; (weight == "-1") == (o.GetKind() == "Job") {
			t.Errorf("%s has the weight %q: the job needs its rights before it runs", o.GetKind(), weight)
		}
	}
	job := find(rendered(t), "Job", "latticekeep-crd")
	if args := field(t, &unstructured.Unstructured{Object: field(t, job, "spec", "template", "spec", "containers").([]any)[0].(map[string]any)}, "args"); !reflect.DeepEqual(args, []any{"crd", "apply"}) {
		t.Error("the job runs", args)
	}
	for _, o := range rendered(t, "--set", "crd.install=false") {
		if o.GetName() == "latticekeep-crd" {
			t.Errorf("crd.install=false renders %s", o.GetKind())
		}
	}
}

// The KMS key opens the database, so a copy of the one volume must not be a copy of the other.
func TestKMSKeyIsNotBesideTheDatabase(t *testing.T) {
	everyRendering(t, func(t *testing.T, all []unstructured.Unstructured) {
		var config struct {
			DataDir string
			KMS     struct{ URL string }
		}
		text := field(t, find(all, "ConfigMap", "latticekeep-config"), "data", "config.yaml").(string)
		if err := yaml.Unmarshal([]byte(text), &config); err != nil {
			t.Fatal(err)
		}
		if find(all, "StatefulSet", "latticekeep") == nil {
			t.Skip("the database is elsewhere")
		}
		containers := field(t, find(all, "StatefulSet", "latticekeep"), "spec", "template", "spec", "containers").([]any)
		volume := func(path string) (name string) {
			for _, m := range containers[0].(map[string]any)["volumeMounts"].([]any) {
				m := m.(map[string]any)
				if mount := m["mountPath"].(string); path == mount || strings.HasPrefix(path, mount+"/") {
					name = m["name"].(string)
				}
			}
			return name
		}
		data, key := volume(config.DataDir), volume(strings.TrimPrefix(config.KMS.URL, "file://"))
		if data == "" || key == "" || data == key {
			t.Errorf("the database lies on volume %q, the KMS key on %q", data, key)
		}
	})
}

// A container that is broken into finds nothing to write to but the volumes.
func TestContainersCannotWriteTheirImage(t *testing.T) {
	everyRendering(t, func(t *testing.T, all []unstructured.Unstructured) {
		for _, o := range all {
			path := []string{"spec", "template", "spec", "containers"}
			switch o.GetKind() {
			case "Pod":
				path = []string{"spec", "containers"}
			case "StatefulSet", "Deployment", "DaemonSet", "Job":
			default:
				continue
			}
			for _, c := range field(t, &o, path...).([]any) {
				if security, _ := c.(map[string]any)["securityContext"].(map[string]any); security["readOnlyRootFilesystem"] != true {
					t.Errorf("%s %s can write its image", o.GetKind(), o.GetName())
				}
			}
		}
	})
}

var (
	metricName      = regexp.MustCompile(`\blatticekeep_[a-z_]+`)
	histogramSuffix = regexp.MustCompile(`_(bucket|count|sum)$`)
)

// An alert on a metric that nobody has never fires.
func TestAlertsAndDashboardUseMetricsThatExist(t *testing.T) {
	exist := make(map[string]bool)
	for _, pattern := range []string{"../server/*.go", "../controllers/*.go", "../controllers/*/*.go", "../internal/*/*.go", "../internal/*/*/*.go"} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			if strings.HasSuffix(file, "_test.go") {
				continue
			}
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for _, name := range metricName.FindAllString(string(text), -1) {
				exist[name] = true
			}
		}
	}
	for _, file := range []string{"latticekeep/files/alerts.yaml", "latticekeep/files/dashboard.json"} {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		names := metricName.FindAllString(string(text), -1)
		if len(names) == 0 {
			t.Errorf("%s uses no metric", file)
		}
		for _, name := range names {
			if base := histogramSuffix.ReplaceAllString(name, ""); !exist[name] && !exist[base] {
				t.Errorf("%s uses %s, which does not exist", file, name)
			}
		}
	}
}

// A network file system breaks the promises of the database, so that whoever chooses one is told.
func TestNotesWarnOfNetworkFileSystems(t *testing.T) {
	for class, want := range map[string]bool{"nfs-client": true, "azurefile": true, "efs-sc": true, "local-path": false, "gp3": false} {
		notes := notesOf(t, "--set", "storage.storageClassName="+class)
		if got := strings.Contains(notes, "network file system"); got != want {
			t.Errorf("storage class %s: the notes warn: %v", class, got)
		}
	}
}

// What is reachable from elsewhere must be let in there, too.
func TestNotesWarnOfNetworks(t *testing.T) {
	for set, want := range map[string]string{
		"webhook.hostNetwork=true":         "the webhook runs in the network of its nodes",
		"server.service.type=LoadBalancer": "networkPolicy.clients names nobody there",
		"server.service.type=NodePort":     "networkPolicy.clients names nobody there",
	} {
		if notes := notesOf(t, "--set", set); !strings.Contains(notes, want) {
			t.Errorf("%s: the notes do not say that %s:\n%s", set, want, notes)
		}
	}
	const outside = "networkPolicy.clients[0].ipBlock.cidr=10.0.0.0/8"
	for _, set := range []string{"replicas=1", "server.service.type=NodePort," + outside, "server.service.type=NodePort,networkPolicy.enabled=false"} {
		if notes := notesOf(t, "--set", set); strings.Contains(notes, "WARNING") {
			t.Errorf("%s: the notes warn:\n%s", set, notes)
		}
	}
}

// notesOf returns what helm tells after an installation.
func notesOf(t *testing.T, flags ...string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "../bin/tools/helm", append([]string{"install", "latticekeep", "latticekeep", "--namespace", namespace,
		"--dry-run=client"}, flags...)...).CombinedOutput()
	if err != nil {
		t.Fatalf("running helm install --dry-run=client: %v\n%s", err, out)
	}
	_, notes, ok := strings.Cut(string(out), "NOTES:")
	if !ok {
		t.Fatal("there are no notes")
	}
	return notes
}
