package charts_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	yamlv3 "go.yaml.in/yaml/v3"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/util/jsonpath"
	"sigs.k8s.io/yaml"
)

// renderedWith returns what the chart makes of values, given as YAML.
func renderedWith(t *testing.T, values string, flags ...string) []unstructured.Unstructured {
	t.Helper()
	file := filepath.Join(t.TempDir(), "values.yaml")
	if err := os.WriteFile(file, []byte(values), 0o600); err != nil {
		t.Fatal(err)
	}
	return rendered(t, append([]string{"--values", file}, flags...)...)
}

// at returns what a JSONPath finds in an object, as JSON, or nothing.
func at(t *testing.T, all []unstructured.Unstructured, kind, name, path string) string {
	t.Helper()
	o := find(all, kind, name)
	if o == nil {
		return ""
	}
	p := jsonpath.New(path).AllowMissingKeys(true)
	if err := p.Parse("{" + path + "}"); err != nil {
		t.Fatalf("reading the path %s: %v", path, err)
	}
	found, err := p.FindResults(o.Object)
	if err != nil || len(found) != 1 || len(found[0]) != 1 {
		return ""
	}
	text, err := json.Marshal(found[0][0].Interface())
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// asJSON returns YAML in the form in which at returns what it finds.
func asJSON(t *testing.T, text string) string {
	t.Helper()
	var v any
	if err := yaml.Unmarshal([]byte(text), &v); err != nil {
		t.Fatalf("reading %s: %v", text, err)
	}
	out, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// Paths to what the two programs run in.
const (
	podPath       = ".spec.template.spec"
	serverPath    = podPath + `.containers[?(@.name=="latticekeep")]`
	webhookPath   = podPath + `.containers[?(@.name=="webhook")]`
	templateLabel = ".spec.template.metadata.labels"
)

// postgres are values with which the server is a Deployment.
const postgres = `
config: {store: {url: "postgres://vault@db/vault"}, compliance: {reports: "s3://reports"}}
kms: {existingSecret: kms}
`

// alerts are values with which there are alerts, and missingReplicas is a path in them.
const (
	alerts          = "monitoring: {prometheusRule: {enabled: true}}\n"
	missingReplicas = `.spec.groups[0].rules[?(@.alert=="LatticekeepReplicasMissing")].expr`
)

// reachable are values with which the service has a name outside.
const reachable = "config: {publicURL: 'https://vault.example.org:8443'}\n"

// Each value reaches the one place that it is for.
func TestValuesReachTheirPlace(t *testing.T) {
	byDefault := rendered(t)
	for _, tc := range []struct{ values, kind, name, path, want string }{
		{"commonLabels: {team: vault}", "StatefulSet", "latticekeep", ".metadata.labels.team", "vault"},
		{"commonAnnotations: {team: vault}", "StatefulSet", "latticekeep", ".metadata.annotations.team", "vault"},
		{"podSecurityContext: {runAsUser: 1000650000}", "StatefulSet", "latticekeep", podPath + ".securityContext.runAsUser", "1000650000"},
		{"podSecurityContext: {supplementalGroups: [7]}", "Deployment", "latticekeep-webhook", podPath + ".securityContext.supplementalGroups", "[7]"},
		{"securityContext: {seccompProfile: {type: Localhost, localhostProfile: a}}", "StatefulSet", "latticekeep", serverPath + ".securityContext.seccompProfile.localhostProfile", "a"},
		{"securityContext: {runAsUser: 7}", "Deployment", "latticekeep-webhook", webhookPath + ".securityContext.runAsUser", "7"},
		{"server: {podLabels: {a: b}}", "StatefulSet", "latticekeep", templateLabel + ".a", "b"},
		{"server: {podAnnotations: {a: b}}", "StatefulSet", "latticekeep", ".spec.template.metadata.annotations.a", "b"},
		{"server: {podLabels: {a: b}}", "Job", "latticekeep-uninstall", templateLabel + ".a", "b"},
		{"server: {podLabels: {a: b}}", "Job", "latticekeep-crd", templateLabel + ".a", "b"},
		{"server: {podAnnotations: {a: b}}", "Pod", "latticekeep-test", ".metadata.annotations.a", "b"},
		{"server: {serviceAccount: {annotations: {a: b}}}", "ServiceAccount", "latticekeep", ".metadata.annotations.a", "b"},
		{"webhook: {podLabels: {a: b}}", "Deployment", "latticekeep-webhook", templateLabel + ".a", "b"},
		{"webhook: {podAnnotations: {a: b}}", "Deployment", "latticekeep-webhook", ".spec.template.metadata.annotations.a", "b"},
		{"server: {service: {annotations: {a: b}}}", "Service", "latticekeep", ".metadata.annotations.a", "b"},
		{"server: {service: {type: NodePort}}", "Service", "latticekeep", ".spec.type", "NodePort"},
		{"server: {service: {type: NodePort, nodePort: 30200}}", "Service", "latticekeep", ".spec.ports[0].nodePort", "30200"},
		{"server: {service: {type: LoadBalancer, loadBalancerClass: a/b}}", "Service", "latticekeep", ".spec.loadBalancerClass", "a/b"},
		{"server: {service: {type: LoadBalancer, loadBalancerSourceRanges: [10.0.0.0/8]}}", "Service", "latticekeep", ".spec.loadBalancerSourceRanges", "[10.0.0.0/8]"},
		{"server: {service: {type: LoadBalancer, externalTrafficPolicy: Local}}", "Service", "latticekeep", ".spec.externalTrafficPolicy", "Local"},
		{"server: {service: {ipFamilyPolicy: RequireDualStack}}", "Service", "latticekeep", ".spec.ipFamilyPolicy", "RequireDualStack"},
		{"server: {service: {ipFamilies: [IPv6, IPv4]}}", "Service", "latticekeep", ".spec.ipFamilies", "[IPv6, IPv4]"},
		{"server: {strategy: {type: OnDelete}}", "StatefulSet", "latticekeep", ".spec.updateStrategy", "{type: OnDelete}"},
		{postgres + "server: {strategy: {type: Recreate}}", "Deployment", "latticekeep", ".spec.strategy", "{type: Recreate}"},
		{"server: {topologySpreadConstraints: [{maxSkew: 2}]}", "StatefulSet", "latticekeep", podPath + ".topologySpreadConstraints", "[{maxSkew: 2}]"},
		{"server: {runtimeClassName: gvisor}", "Job", "latticekeep-uninstall", podPath + ".runtimeClassName", "gvisor"},
		{"server: {runtimeClassName: gvisor}", "Job", "latticekeep-crd", podPath + ".runtimeClassName", "gvisor"},
		{"webhook: {hostNetwork: true}", "Deployment", "latticekeep-webhook", podPath + ".hostNetwork", "true"},
		{"webhook: {hostNetwork: true}", "Deployment", "latticekeep-webhook", podPath + ".dnsPolicy", "ClusterFirstWithHostNet"},
		{"webhook: {hostNetwork: true, dnsPolicy: Default}", "Deployment", "latticekeep-webhook", podPath + ".dnsPolicy", "Default"},
		{"webhook: {hostNetwork: true}", "Deployment", "latticekeep-webhook", ".spec.strategy.rollingUpdate", "{maxUnavailable: 1, maxSurge: 0}"},
		{"webhook: {strategy: {type: Recreate}}", "Deployment", "latticekeep-webhook", ".spec.strategy", "{type: Recreate}"},
		{"webhook: {topologySpreadConstraints: [{maxSkew: 2}]}", "Deployment", "latticekeep-webhook", podPath + ".topologySpreadConstraints", "[{maxSkew: 2}]"},
		{"webhook: {topologySpreadConstraints: [{maxSkew: 2}], affinity: {podAntiAffinity: {}}}", "Deployment", "latticekeep-webhook", podPath + ".topologySpreadConstraints", "[{maxSkew: 2}]"},
		{"webhook: {service: {annotations: {a: b}}}", "Service", "latticekeep-webhook", ".metadata.annotations.a", "b"},
		{"webhook: {port: 10443}", "Deployment", "latticekeep-webhook", webhookPath + ".args[1]", "--listen=:10443"},
		{"webhook: {port: 10443}", "Deployment", "latticekeep-webhook", webhookPath + `.ports[?(@.name=="webhook")].containerPort`, "10443"},
		{"webhook: {operationsPort: 10444}", "Deployment", "latticekeep-webhook", webhookPath + ".args[2]", "--operations-listen=:10444"},
		{"webhook: {operationsPort: 10444}", "Deployment", "latticekeep-webhook", webhookPath + `.ports[?(@.name=="operations")].containerPort`, "10444"},
		{"config: {log: {level: warn}}", "Deployment", "latticekeep-webhook", webhookPath + ".args[8]", "--log-level=warn"},
		{"config: {log: {format: text}}", "Deployment", "latticekeep-webhook", webhookPath + ".args[8]", "--log-format=text"},
		{reachable + "ingress: {enabled: true}", "Ingress", "latticekeep", ".spec.rules[*].host", "vault.example.org"},
		{reachable + "ingress: {enabled: true}", "Ingress", "latticekeep", ".spec.rules[0].http.paths", "[{path: /, pathType: Prefix, backend: {service: {name: latticekeep, port: {name: https}}}}]"},
		{reachable + "ingress: {enabled: true, pathType: ImplementationSpecific}", "Ingress", "latticekeep", ".spec.rules[0].http.paths[0].pathType", "ImplementationSpecific"},
		{reachable + "ingress: {enabled: true, hosts: [a.example.org, b.example.org]}", "Ingress", "latticekeep", ".spec.rules[1].host", "b.example.org"},
		{reachable + "ingress: {enabled: true, ingressClassName: nginx}", "Ingress", "latticekeep", ".spec.ingressClassName", "nginx"},
		{reachable + "ingress: {enabled: true, annotations: {a: b}}", "Ingress", "latticekeep", ".metadata.annotations", "{a: b}"},
		{reachable + "ingress: {enabled: true, tls: [{secretName: a}]}", "Ingress", "latticekeep", ".spec.tls", "[{secretName: a}]"},
		{reachable + "httpRoute: {enabled: true, parentRefs: [{name: a}]}", "HTTPRoute", "latticekeep", ".spec", "{parentRefs: [{name: a}], hostnames: [vault.example.org], rules: [{backendRefs: [{name: latticekeep, port: 8200}]}]}"},
		{reachable + "httpRoute: {enabled: true, parentRefs: [{name: a}], hostnames: [b.example.org]}", "HTTPRoute", "latticekeep", ".spec.hostnames", "[b.example.org]"},
		{reachable + "httpRoute: {enabled: true, parentRefs: [{name: a}], annotations: {a: b}}", "HTTPRoute", "latticekeep", ".metadata.annotations", "{a: b}"},
		{postgres + "autoscaling: {enabled: true}", "HorizontalPodAutoscaler", "latticekeep", ".spec", `
scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: latticekeep}
minReplicas: 2
maxReplicas: 5
metrics: [{type: Resource, resource: {name: cpu, target: {type: Utilization, averageUtilization: 80}}}]`},
		{postgres + "autoscaling: {enabled: true, minReplicas: 3}", "HorizontalPodAutoscaler", "latticekeep", ".spec.minReplicas", "3"},
		{postgres + "autoscaling: {enabled: true, maxReplicas: 9}", "HorizontalPodAutoscaler", "latticekeep", ".spec.maxReplicas", "9"},
		{postgres + "autoscaling: {enabled: true, targetCPUUtilizationPercentage: 50}", "HorizontalPodAutoscaler", "latticekeep", ".spec.metrics[0].resource.target.averageUtilization", "50"},
		{postgres + "autoscaling: {enabled: true, metrics: [{type: Pods}]}", "HorizontalPodAutoscaler", "latticekeep", ".spec.metrics", "[{type: Pods}]"},
		{postgres + "autoscaling: {enabled: true, behavior: {scaleDown: {selectPolicy: Disabled}}}", "HorizontalPodAutoscaler", "latticekeep", ".spec.behavior.scaleDown.selectPolicy", "Disabled"},
		{postgres + "autoscaling: {enabled: true}", "PodDisruptionBudget", "latticekeep", ".spec.maxUnavailable", "1"},
		{postgres + "autoscaling: {enabled: true}\nreplicas: 0", "Deployment", "latticekeep", ".spec.replicas", "0"},
		{postgres + alerts + "replicas: 3", "PrometheusRule", "latticekeep", missingReplicas, "count(latticekeep_build_info) < 3"},
		{postgres + alerts + "autoscaling: {enabled: true, minReplicas: 4}", "PrometheusRule", "latticekeep", missingReplicas, "count(latticekeep_build_info) < 4"},
		{"extraObjects: [{kind: ConfigMap, metadata: {name: a, namespace: '{{ .Release.Namespace }}'}}]", "ConfigMap", "a", ".metadata.namespace", namespace},
		{"extraObjects: ['{kind: ConfigMap, metadata: {name: a, namespace: {{ .Release.Namespace }}}}']", "ConfigMap", "a", ".metadata.namespace", namespace},
		{"webhook: {serviceAccount: {annotations: {a: b}}}", "ServiceAccount", "latticekeep-webhook", ".metadata.annotations.a", "b"},
	} {
		got, want := at(t, renderedWith(t, tc.values), tc.kind, tc.name, tc.path), asJSON(t, tc.want)
		if got != want {
			t.Errorf("%s: %s of %s %s is\n%s\nwant\n%s", tc.values, tc.path, tc.kind, tc.name, got, want)
		}
		if before := at(t, byDefault, tc.kind, tc.name, tc.path); before == want {
			t.Errorf("%s: %s of %s %s is %s without it, too", tc.values, tc.path, tc.kind, tc.name, before)
		}
	}
}

// Both programs take what a site adds to a pod.
func TestBothProgramsTakeMoreOfEverything(t *testing.T) {
	for component, o := range map[string]struct{ kind, name, container, args string }{
		"server":  {"StatefulSet", "latticekeep", serverPath, ".args[3]"},
		"webhook": {"Deployment", "latticekeep-webhook", webhookPath, ".args[8]"},
	} {
		for _, tc := range []struct{ values, path, want string }{
			{"extraArgs: [--flag=x]", o.container + o.args, "--flag=x"},
			{"extraEnv: [{name: A, value: b}]", o.container + ".env", "[{name: A, value: b}]"},
			{"extraEnvFrom: [{secretRef: {name: a}}]", o.container + ".envFrom", "[{secretRef: {name: a}}]"},
			{"extraVolumes: [{name: a, emptyDir: {}}]", podPath + `.volumes[?(@.name=="a")]`, "{name: a, emptyDir: {}}"},
			{"extraVolumeMounts: [{name: a, mountPath: /a}]", o.container + `.volumeMounts[?(@.name=="a")]`, "{name: a, mountPath: /a}"},
			{"initContainers: [{name: a, image: b}]", podPath + ".initContainers", "[{name: a, image: b}]"},
			{"extraContainers: [{name: a, image: b}]", podPath + ".containers[1]", "{name: a, image: b}"},
			{"priorityClassName: a", podPath + ".priorityClassName", "a"},
			{"nodeSelector: {a: b}", podPath + ".nodeSelector", "{a: b}"},
			{"tolerations: [{key: a}]", podPath + ".tolerations", "[{key: a}]"},
			{"affinity: {nodeAffinity: {}}", podPath + ".affinity", "{nodeAffinity: {}}"},
			{"runtimeClassName: gvisor", podPath + ".runtimeClassName", "gvisor"},
			{"dnsPolicy: Default", podPath + ".dnsPolicy", "Default"},
			{"dnsConfig: {searches: [a]}", podPath + ".dnsConfig", "{searches: [a]}"},
			{"hostAliases: [{ip: 10.0.0.1}]", podPath + ".hostAliases", "[{ip: 10.0.0.1}]"},
			{"resources: {limits: {cpu: 1}}", o.container + ".resources.limits.cpu", "1"},
		} {
			values := component + ": {" + tc.values + "}"
			if got, want := at(t, renderedWith(t, values), o.kind, o.name, tc.path), asJSON(t, tc.want); got != want {
				t.Errorf("%s: %s of %s %s is\n%s\nwant\n%s", values, tc.path, o.kind, o.name, got, want)
			}
		}
	}
	both := at(t, renderedWith(t, "server: {extraEnvFrom: [{secretRef: {name: a}}]}\nbuckets: {existingSecret: b}"), "StatefulSet", "latticekeep", serverPath+".envFrom")
	if want := asJSON(t, "[{secretRef: {name: b}}, {secretRef: {name: a}}]"); both != want {
		t.Errorf("the environment comes from %s, want %s", both, want)
	}
}

// An autoscaler and a fixed number of replicas would each undo what the other does.
func TestAutoscalerDecidesOnTheReplicas(t *testing.T) {
	if got := at(t, renderedWith(t, postgres+"autoscaling: {enabled: true}"), "Deployment", "latticekeep", ".spec.replicas"); got != "" {
		t.Errorf("the Deployment has %s replicas", got)
	}
}

// Both kinds of monitor read the same, in the same way.
func TestMonitorsTakeWhatPrometheusWants(t *testing.T) {
	for value, o := range map[string]struct{ kind, endpoints string }{
		"serviceMonitor": {"ServiceMonitor", ".spec.endpoints"},
		"podMonitor":     {"PodMonitor", ".spec.podMetricsEndpoints"},
	} {
		for _, tc := range []struct{ values, path, want string }{
			{"labels: {release: a}", ".metadata.labels.release", "a"},
			{"annotations: {a: b}", ".metadata.annotations", "{a: b}"},
			{"interval: 10s", o.endpoints, "[{port: operations, path: /metrics, interval: 10s, honorLabels: true}]"},
			{"scrapeTimeout: 5s", o.endpoints + "[0].scrapeTimeout", "5s"},
			{"relabelings: [{action: labeldrop, regex: pod}]", o.endpoints + "[0].relabelings", "[{action: labeldrop, regex: pod}]"},
			{"metricRelabelings: [{action: drop, regex: go_.*}]", o.endpoints + "[0].metricRelabelings", "[{action: drop, regex: go_.*}]"},
		} {
			values := "monitoring: {" + value + ": {enabled: true, " + tc.values + "}}"
			if got, want := at(t, renderedWith(t, values), o.kind, "latticekeep", tc.path), asJSON(t, tc.want); got != want {
				t.Errorf("%s: %s is\n%s\nwant\n%s", values, tc.path, got, want)
			}
		}
	}
}

// A cluster without a way out takes all images from its own registry, those of hooks and tests too, and asks for nothing outside.
func TestNothingOfAnAirGappedInstallationIsOutside(t *testing.T) {
	out, err := helmTemplate(t, "--values", "latticekeep/ci/airgapped-values.yaml")
	if err != nil {
		t.Fatal(err)
	}
	images := regexp.MustCompile(`(?m)^\s+(?:- )?image: (\S+)$`).FindAllStringSubmatch(out, -1)
	if len(images) < 4 {
		t.Fatalf("there are %d images", len(images))
	}
	for _, image := range images {
		if !strings.HasPrefix(image[1], "registry.internal:5000/") {
			t.Errorf("the image %s is outside", image[1])
		}
	}
	for _, o := range objects(t, out) {
		switch o.GetKind() {
		case "CustomResourceDefinition", "PrometheusRule":
			continue // their links are for people, not for the cluster
		}
		for _, url := range regexp.MustCompile(`https?://[^\s"\\]+`).FindAllString(text(t, []unstructured.Unstructured{o}), -1) {
			if !strings.HasPrefix(url, "https://latticekeep."+namespace+".svc:8200") {
				t.Errorf("%s %s names %s", o.GetKind(), o.GetName(), url)
			}
		}
		if o.GetKind() == "NetworkPolicy" && !strings.Contains(fmt.Sprint(field(t, &o, "spec", "policyTypes")), "Egress") {
			t.Errorf("NetworkPolicy %s lets its pods connect to anything", o.GetName())
		}
	}
}

// Labels and annotations of the chart's own stay beside them: selectors and Helm need those.
func TestCommonLabelsAndAnnotationsAreOfEveryObject(t *testing.T) {
	files, err := filepath.Glob("latticekeep/ci/*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	type metadata interface {
		GetLabels() map[string]string
		GetAnnotations() map[string]string
	}
	compare := func(what string, own, got metadata) {
		t.Helper()
		labels, annotations := map[string]string{"team": "vault"}, map[string]string{"contact": "vault@example.org", "kubectl.kubernetes.io/default-container": "other"}
		maps.Copy(labels, own.GetLabels())
		maps.Copy(annotations, own.GetAnnotations())
		if !maps.Equal(got.GetLabels(), labels) || !maps.Equal(got.GetAnnotations(), annotations) {
			t.Errorf("%s has labels %v and annotations %v", what, got.GetLabels(), got.GetAnnotations())
		}
	}
	for _, file := range files {
		const values = "commonLabels: {team: vault}\ncommonAnnotations: {contact: vault@example.org, kubectl.kubernetes.io/default-container: other}"
		all := renderedWith(t, values, "--values", file)
		for _, own := range rendered(t, "--values", file) {
			if own.GetLabels()["app.kubernetes.io/name"] == "" {
				continue // one of extraObjects, which is the user's
			}
			got, what := find(all, own.GetKind(), own.GetName()), fmt.Sprintf("%s: %s %s", file, own.GetKind(), own.GetName())
			compare(what, &own, got)
			if pod, ok, _ := unstructured.NestedMap(own.Object, "spec", "template"); ok {
				given, _, _ := unstructured.NestedMap(got.Object, "spec", "template")
				compare(what+", its pods", &unstructured.Unstructured{Object: pod}, &unstructured.Unstructured{Object: given})
			}
		}
	}
}

// Who the operator is, RBAC and the admission policies say alike.
func TestServiceAccountsCanHaveOtherNames(t *testing.T) {
	values := "server: {serviceAccount: {name: vault}}\nwebhook: {serviceAccount: {name: vault-reviews}}"
	all := renderedWith(t, values)
	bound := make(map[string]int)
	for _, o := range all {
		subjects, _, _ := unstructured.NestedSlice(o.Object, "subjects")
		for _, s := range subjects {
			bound[s.(map[string]any)["name"].(string)]++
		}
	}
	if bound["latticekeep"]+bound["latticekeep-webhook"] > 0 || bound["vault"] < 2 || bound["vault-reviews"] == 0 {
		t.Errorf("roles are bound to %v", bound)
	}
	text := text(t, all)
	if strings.Contains(text, serviceAccount+"latticekeep'") || strings.Count(text, serviceAccount+"vault'") < 2 {
		t.Error("the admission policies know the operator by another name")
	}
	for _, o := range [][4]string{
		{"StatefulSet", "latticekeep", podPath + ".serviceAccountName", `"vault"`},
		{"Deployment", "latticekeep-webhook", podPath + ".serviceAccountName", `"vault-reviews"`},
		{"ServiceAccount", "vault", ".metadata.name", `"vault"`},
		{"ServiceAccount", "vault-reviews", ".metadata.name", `"vault-reviews"`},
	} {
		if got := at(t, all, o[0], o[1], o[2]); got != o[3] {
			t.Errorf("%s of %s %s is %s, want %s", o[2], o[0], o[1], got, o[3])
		}
	}
	all = renderedWith(t, values, "--set", "server.serviceAccount.create=false,webhook.serviceAccount.create=false")
	for _, name := range []string{"vault", "vault-reviews"} {
		if find(all, "ServiceAccount", name) != nil {
			t.Errorf("ServiceAccount %s is made all the same", name)
		}
	}
}

// A platform that chooses user and groups itself, as OpenShift does, refuses those of a pod.
func TestUserAndGroupsCanBeLeftToThePlatform(t *testing.T) {
	for _, o := range renderedWith(t, "podSecurityContext: {runAsUser: null, runAsGroup: null, fsGroup: null}") {
		for _, path := range [][]string{{"spec"}, {"spec", "template", "spec"}} {
			security, ok, _ := unstructured.NestedMap(o.Object, append(path, "securityContext")...)
			if !ok {
				continue
			}
			want := map[string]any{"runAsNonRoot": true, "fsGroupChangePolicy": "OnRootMismatch", "seccompProfile": map[string]any{"type": "RuntimeDefault"}}
			if !reflect.DeepEqual(security, want) {
				t.Errorf("%s %s has %v, want %v", o.GetKind(), o.GetName(), security, want)
			}
		}
	}
}

// Without a group for volumes the files of a Secret belong to root and its group, which is what a platform without fsGroup leaves a pod.
func TestFilesOfSecretsCanBeReadByTheirGroup(t *testing.T) {
	everyRendering(t, func(t *testing.T, all []unstructured.Unstructured) {
		for _, o := range all {
			volumes, _, _ := unstructured.NestedSlice(o.Object, "spec", "template", "spec", "volumes")
			for _, v := range volumes {
				mode, given, _ := unstructured.NestedFieldNoCopy(v.(map[string]any), "secret", "defaultMode")
				if given && fmt.Sprint(mode) != fmt.Sprint(0o440) {
					t.Errorf("%s %s: volume %v", o.GetKind(), o.GetName(), v)
				}
			}
		}
	})
}

// Whoever reads values.yaml reads all there is, and the schema refuses the rest. The settings of the program are in the schema and in
// docs/reference/configuration.md, and TestValuesHaveEverySetting holds those together.
func TestEveryValueIsDescribedAndInTheSchema(t *testing.T) {
	text, err := os.ReadFile("latticekeep/values.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var document yamlv3.Node
	if err := yamlv3.Unmarshal(text, &document); err != nil {
		t.Fatal(err)
	}
	described := make(map[string]bool)
	var walk func(path string, n *yamlv3.Node)
	walk = func(path string, n *yamlv3.Node) {
		for i := 0; i+1 < len(n.Content); i += 2 {
			key, value := n.Content[i], n.Content[i+1]
			name := strings.TrimPrefix(path+"."+key.Value, ".")
			if strings.Contains(key.HeadComment, "# -- ") {
				described[name] = true
			} else if value.Kind == yamlv3.MappingNode && len(value.Content) > 0 {
				walk(name, value)
			} else {
				t.Errorf("values.yaml does not describe %s", name)
			}
		}
	}
	walk("", document.Content[0])

	reference, err := os.ReadFile("../docs/reference/chart.md")
	if err != nil {
		t.Fatal(err)
	}
	for name := range described {
		if !strings.Contains(string(reference), "\n| `"+name+"` |") {
			t.Errorf("docs/reference/chart.md lacks %s: run `make generate`", name)
		}
	}
	known := schemaNames(t)
	for name := range described {
		if !slices.Contains(known, name) {
			t.Errorf("values.schema.json lacks %s", name)
		}
	}
	for _, name := range known {
		if !described[name] && name != "global" && !strings.HasPrefix(name, "config.") {
			t.Errorf("values.schema.json has %s, which values.yaml does not describe", name)
		}
	}
}

// schemaNames returns every value in the schema. Below what Kubernetes defines it does not go.
func schemaNames(t *testing.T) (names []string) {
	t.Helper()
	text, err := os.ReadFile("latticekeep/values.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	var root map[string]any
	if err := json.Unmarshal(text, &root); err != nil {
		t.Fatal(err)
	}
	var walk func(path string, s map[string]any)
	walk = func(path string, s map[string]any) {
		if ref, ok := s["$ref"].(string); ok {
			s = root["definitions"].(map[string]any)[strings.TrimPrefix(ref, "#/definitions/")].(map[string]any)
		}
		properties, _ := s["properties"].(map[string]any)
		if len(properties) == 0 || s["additionalProperties"] == nil || path == "certManager.issuerRef" {
			names = append(names, path)
			return
		}
		for name, p := range properties {
			walk(strings.TrimPrefix(fmt.Sprintf("%s.%s", path, name), "."), p.(map[string]any))
		}
	}
	walk("", root)
	return names
}
