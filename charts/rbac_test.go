package charts_test

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
)

var update = flag.Bool("update", false, "write testdata/rbac.golden anew")

// A grant is one rule of a role as somebody has it.
type grant struct {
	subject   string // ServiceAccount, or the roles that the rule is aggregated to
	namespace string // where; "" is everywhere
	rule      rbacv1.PolicyRule
}

func (g grant) String() string {
	where := "everywhere"
	if g.namespace != "" {
		where = "in " + g.namespace
	}
	names := ""
	if len(g.rule.ResourceNames) > 0 {
		names = " " + strings.Join(slices.Sorted(slices.Values(g.rule.ResourceNames)), ",")
	}
	var resources []string
	for _, group := range g.rule.APIGroups {
		for _, resource := range g.rule.Resources {
			if group != "" {
				resource += "." + group
			}
			resources = append(resources, resource)
		}
	}
	slices.Sort(resources)
	resources = append(resources, g.rule.NonResourceURLs...)
	return fmt.Sprintf("%s, %s: %s%s: %s", g.subject, where, strings.Join(resources, " "), names, strings.Join(slices.Sorted(slices.Values(g.rule.Verbs)), " "))
}

// grants returns every rule that a rendering gives to somebody. A role that nobody has is an error, unless config/restart binds it, only
// several replicas need it, which config/ does not have, or people bind it.
func grants(t *testing.T, all []unstructured.Unstructured) (list []grant) {
	t.Helper()
	roles := make(map[string][]rbacv1.PolicyRule)
	bound := map[string]bool{"ClusterRole//latticekeep-restart": true, "ClusterRole//latticekeep-reader": true, "Role/" + namespace + "/latticekeep-election": true}
	for _, o := range all {
		switch o.GetKind() {
		case "ClusterRole", "Role":
			var r rbacv1.ClusterRole // a Role has the same fields
			convert(t, o, &r)
			id := o.GetKind() + "/" + o.GetNamespace() + "/" + o.GetName()
			roles[id] = r.Rules
			if r.AggregationRule != nil {
				t.Errorf("%s takes rules from others", id)
			}
			var into []string
			for label := range o.GetLabels() {
				if to, ok := strings.CutPrefix(label, "rbac.authorization.k8s.io/aggregate-to-"); ok {
					into = append(into, to)
				}
			}
			slices.Sort(into)
			if len(into) > 0 {
				bound[id] = true
				for _, rule := range r.Rules {
					list = append(list, grant{"people with " + strings.Join(into, ", "), "", rule})
				}
			}
		}
	}
	for _, o := range all {
		switch o.GetKind() {
		case "ClusterRoleBinding", "RoleBinding":
			var b rbacv1.ClusterRoleBinding // a RoleBinding has the same fields
			convert(t, o, &b)
			id := b.RoleRef.Kind + "//" + b.RoleRef.Name
			if b.RoleRef.Kind == "Role" {
				id = b.RoleRef.Kind + "/" + o.GetNamespace() + "/" + b.RoleRef.Name
			}
			rules, ok := roles[id]
			if !ok {
				t.Errorf("%s %s binds %s, which is not rendered", o.GetKind(), o.GetName(), id)
			}
			bound[id] = true
			for _, s := range b.Subjects {
				if s.Kind != rbacv1.ServiceAccountKind || s.Namespace != namespace {
					t.Errorf("%s %s is for %s %s/%s", o.GetKind(), o.GetName(), s.Kind, s.Namespace, s.Name)
				}
				for _, rule := range rules {
					list = append(list, grant{s.Name, o.GetNamespace(), rule})
				}
			}
		}
	}
	for id := range roles {
		if !bound[id] {
			t.Errorf("nobody has %s", id)
		}
	}
	return list
}

func convert(t *testing.T, o unstructured.Unstructured, into any) {
	t.Helper()
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, into); err != nil {
		t.Fatalf("reading %s %s: %v", o.GetKind(), o.GetName(), err)
	}
}

func lines(list []grant) []string {
	var all []string
	for _, g := range list {
		all = append(all, g.String())
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// Every verb that anything of the chart has is written down in testdata/rbac.golden, so that a new one shows in review.
func TestRBACIsPinned(t *testing.T) {
	plain := lines(grants(t, rendered(t)))
	var text strings.Builder
	fmt.Fprintf(&text, "# Who may do what. `go test ./charts -run RBAC -update` writes it anew.\n%s\n\n# With config.kubernetes.restartWorkloads also:\n",
		strings.Join(plain, "\n"))
	for _, line := range lines(grants(t, rendered(t, "--set", "config.kubernetes.restartWorkloads=true"))) {
		if !slices.Contains(plain, line) {
			text.WriteString(line + "\n")
		}
	}
	text.WriteString("\n# With config.kubernetes.watchSecrets={shop} also:\n")
	for _, line := range lines(grants(t, rendered(t, "--set", "config.kubernetes.watchSecrets={shop}"))) {
		if !slices.Contains(plain, line) {
			text.WriteString(line + "\n")
		}
	}
	text.WriteString("\n# With config.store.url also:\n")
	for _, line := range lines(grants(t, rendered(t, "--values", "latticekeep/ci/postgres-values.yaml"))) {
		if !slices.Contains(plain, line) {
			text.WriteString(line + "\n")
		}
	}
	const file = "testdata/rbac.golden"
	if *update {
		if err := os.WriteFile(file, []byte(text.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if text.String() != string(want) {
		t.Errorf("the chart grants\n%s\n%s has\n%s", text.String(), file, want)
	}
}

// The webhook's configuration is touched by who makes the certificate, and nobody may touch one that somebody else will make.
func TestOnlyWhoMakesTheCertificateMayTouchTheWebhook(t *testing.T) {
	for set, want := range map[string]bool{"replicas=1": true, "webhook.enabled=false": false, "certManager.enabled=true": false} {
		may := false
		for _, g := range grants(t, rendered(t, "--set", set)) {
			may = may || g.subject == "latticekeep" && slices.Contains(g.rule.Resources, "validatingwebhookconfigurations")
		}
		if may != want {
			t.Errorf("with %s the operator may write webhook configurations: %v", set, may)
		}
	}
}

// A deployment that keeps its anchors elsewhere may not write the ConfigMap.
func TestOnlyWhoKeepsTheAnchorThereMayWriteIt(t *testing.T) {
	for set, want := range map[string]bool{"replicas=1": true, "config.audit.anchor.configMap=": false} {
		may := false
		for _, g := range grants(t, rendered(t, "--set", set)) {
			may = may || slices.Contains(g.rule.ResourceNames, "latticekeep-audit-anchor")
		}
		if may != want {
			t.Errorf("with %s the operator may write the anchor: %v", set, may)
		}
	}
}

// config/ grants what the chart does, but for the jobs that helm alone runs.
func TestConfigGrantsWhatTheChartGrants(t *testing.T) {
	var chart []grant
	for _, g := range grants(t, rendered(t)) {
		if g.subject != "latticekeep-uninstall" && g.subject != "latticekeep-crd" {
			chart = append(chart, g)
		}
	}
	if got, want := lines(grants(t, kustomized(t, "../config/default"))), lines(chart); !slices.Equal(got, want) {
		t.Errorf("config/default grants\n%s\nthe chart grants\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// What no role may come to grant, whatever the golden file says.
func TestNothingIsGrantedThatOpensTheCluster(t *testing.T) {
	everyRendering(t, func(t *testing.T, all []unstructured.Unstructured) {
		list := grants(t, all)
		if len(list) == 0 {
			t.Fatal("no grants were found")
		}
		for _, g := range list {
			r := g.rule
			has := func(verbs ...string) bool {
				return slices.ContainsFunc(verbs, func(v string) bool { return slices.Contains(r.Verbs, v) })
			}
			on := func(resource string) bool { return slices.Contains(r.Resources, resource) }
			for _, part := range slices.Concat(r.Verbs, r.Resources, r.APIGroups, r.ResourceNames) {
				if strings.Contains(part, "*") {
					t.Errorf("a wildcard: %s", g)
				}
			}
			switch {
			case has("escalate", "bind", "impersonate"):
				t.Errorf("a way to more rights: %s", g)
			case len(r.NonResourceURLs) > 0:
				t.Errorf("a path of the API server: %s", g)
			case g.namespace == "default" && slices.Equal(r.Resources, []string{"secrets"}) && slices.Equal(r.Verbs, []string{"list", "watch"}):
				// ci/full-values.yaml asks for it, by config.kubernetes.watchSecrets.
			case on("secrets") && has("list", "watch", "deletecollection") && len(r.ResourceNames) == 0:
				t.Errorf("reads Secrets without knowing their names: %s", g)
			case on("serviceaccounts/token"), on("pods/exec"), on("pods"), on("nodes/proxy"):
				t.Errorf("a way to others' credentials: %s", g)
			case slices.Contains(r.APIGroups, "rbac.authorization.k8s.io"), slices.Contains(r.APIGroups, "certificates.k8s.io"):
				t.Errorf("a way to more rights: %s", g)
			case slices.Contains(r.APIGroups, "admissionregistration.k8s.io") && !has("create") && len(r.ResourceNames) == 0:
				t.Errorf("others' webhooks: %s", g)
			case slices.Contains(r.APIGroups, "admissionregistration.k8s.io") && has("create"):
				t.Errorf("webhooks of its own making: %s", g)
			case strings.HasPrefix(g.subject, "people") && has("unseal", "adopt", "check"):
				t.Errorf("what editing a namespace does not include: %s", g)
			case g.subject == "latticekeep-webhook" && (!slices.Equal(r.Verbs, []string{"check"}) || !slices.Equal(r.Resources, []string{"sealedcredentials"})):
				t.Errorf("the webhook, which anything in the cluster can reach, may do more than ask: %s", g)
			}
		}
	})
}

// The pods that need nothing of the API server have no token for it.
func TestOnlyServerAndJobsHaveATokenForTheAPIServer(t *testing.T) {
	everyRendering(t, func(t *testing.T, all []unstructured.Unstructured) {
		for _, o := range all {
			path := []string{"spec", "template", "spec"}
			switch o.GetKind() {
			case "Pod":
				path = path[:1]
			case "StatefulSet", "Deployment", "DaemonSet", "Job":
			default:
				continue
			}
			got := field(t, &o, append(path, "automountServiceAccountToken")...)
			want := o.GetName() == "latticekeep" || o.GetKind() == "Job"
			if got != want {
				t.Errorf("%s %s: automountServiceAccountToken is %v", o.GetKind(), o.GetName(), got)
			}
		}
	})
}

// Nobody gets a verb with which values are read, or another's values are taken over, by being able to view or edit a namespace. A role for
// reading is there to be bound.
func TestPeopleAndReadersMayDoOnlyWhatTheirRolesSay(t *testing.T) {
	c := applied(t)
	for user, role := range map[string]string{"viewer": "latticekeep-view", "editor": "latticekeep-edit", "orders": "latticekeep-reader"} {
		must(t, c, "", "create", "rolebinding", user, "--namespace", "shop", "--clusterrole="+role, "--user="+user)
	}
	may := map[string][]string{
		"viewer": {"get", "list", "watch"}, "editor": {"create", "update", "patch", "delete", "deletecollection"}, "orders": {"unseal"},
	}
	for user, verbs := range may {
		for _, verb := range []string{"get", "list", "watch", "create", "update", "patch", "delete", "deletecollection", "unseal", "adopt", "check", "reseal", "*"} {
			for _, ns := range []string{"shop", "platform"} {
				out, err := kubectl(t, c, "", "auth", "can-i", verb, "sealedcredentials.latticekeep.dev", "--as="+user, "--namespace", ns)
				if want := ns == "shop" && slices.Contains(verbs, verb); (err == nil) != want {
					t.Errorf("may %s %s in %s: %v %s", user, verb, ns, err, out)
				}
			}
		}
	}
}

// Without aggregation the roles are there, and nobody has them.
func TestRolesForPeopleNeedNotBeAggregated(t *testing.T) {
	names := make(map[string]bool)
	for _, o := range rendered(t, "--set", "rbac.aggregate=false") {
		if o.GetKind() != "ClusterRole" {
			continue
		}
		names[o.GetName()] = true
		for label := range o.GetLabels() {
			if strings.HasPrefix(label, "rbac.authorization.k8s.io/") {
				t.Errorf("%s has %s", o.GetName(), label)
			}
		}
	}
	if !names["latticekeep-view"] || !names["latticekeep-edit"] || !names["latticekeep-reader"] {
		t.Errorf("the roles are %v", names)
	}
}
