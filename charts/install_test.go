package charts_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/test/kubetest"
)

// installValues are what a platform team might say of its installation.
const installValues = `
config:
  publicURL: https://localhost:8200
  kubernetes:
    restartWorkloads: true
    policy: {maxTTLDays: 60, types: [database, api-key], scopes: [Strict, Namespace]}
admissionPolicies: {clusterScopeNamespaces: [platform]}
`

// patience bounds every wait, on a machine that is busy.
const patience = 2 * time.Minute

// An installation is the chart as `helm template` renders it, applied to a real API server, with its programs as processes of this machine. They
// have the tokens of their ServiceAccounts and nothing else, and the API server's audit log has everything that they did with them.
type installation struct {
	whole   *testing.T // and t is the part of it that runs
	t       *testing.T
	plane   *kubetest.ControlPlane
	all     []unstructured.Unstructured // what is rendered
	api     client.Client               // of an administrator
	program string
	dir     string // the file systems of the pods
	audited string // the API server's audit log
	url     string // of the server, once it runs
}

// auditPolicy has everything recorded that the installation does. Reviews of access say what was asked and answered; nothing else has a body,
// since there may be secrets in it.
const auditPolicy = `{"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"], "rules": [
  {"level": "RequestResponse", "userGroups": ["system:serviceaccounts:` + namespace + `"], "resources": [{"group": "authorization.k8s.io"}]},
  {"level": "Metadata", "userGroups": ["system:serviceaccounts:` + namespace + `"]},
  {"level": "None"}]}`

// install applies the chart with values, and starts nothing yet.
func install(t *testing.T, values string) *installation {
	t.Helper()
	i := &installation{whole: t, t: t, dir: t.TempDir()}
	i.audited, i.program = filepath.Join(i.dir, "audit.log"), filepath.Join(i.dir, "latticekeep")
	policy, file := i.file("policy.json", auditPolicy), i.file("values.yaml", values)
	build := exec.CommandContext(t.Context(), "go", "build", "-o", i.program, "..")
	built := make(chan error, 1)
	go func() {
		out, err := build.CombinedOutput()
		if err != nil {
			err = fmt.Errorf("building the program: %w\n%s", err, out)
		}
		built <- err
	}()
	i.plane = kubetest.ForTest(t, "--audit-policy-file", policy, "--audit-log-path", i.audited, "--audit-log-mode", "blocking",
		"--service-cluster-ip-range", "127.100.0.0/24") // where nobody listens, should the API server call a Service before it leads elsewhere
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientscheme.AddToScheme, v1beta1.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	admin, err := clientcmd.BuildConfigFromFlags("", i.plane.Kubeconfig)
	if err == nil {
		i.api, err = client.New(admin, client.Options{Scheme: scheme})
	}
	if err != nil {
		t.Fatal(err)
	}
	out, err := helmTemplate(t, "--values", file)
	if err != nil {
		t.Fatal(err)
	}
	i.all = objects(t, out)
	i.kubectl("", "create", "namespace", namespace)
	i.kubectl("", "label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
	// Server-side, since the CRD was there before; the hooks come when helm would run them.
	i.kubectl(text(t, slices.DeleteFunc(slices.Clone(i.all), hook)), "apply", "--server-side", "--force-conflicts", "-f", "-")
	if err := <-built; err != nil {
		t.Fatal(err)
	}
	return i
}

// hook reports whether helm applies an object at another time than the rest.
func hook(o unstructured.Unstructured) bool { return o.GetAnnotations()["helm.sh/hook"] != "" }

// text returns objects as a manifest.
func text(t *testing.T, all []unstructured.Unstructured) string {
	t.Helper()
	var b strings.Builder
	for _, o := range all {
		line, err := json.Marshal(o.Object)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&b, "---\n%s\n", line)
	}
	return b.String()
}

func (i *installation) file(name, content string) string {
	i.t.Helper()
	path := filepath.Join(i.dir, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		i.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		i.t.Fatal(err)
	}
	return path
}

// kubectl runs it as an administrator, and must succeed.
func (i *installation) kubectl(stdin string, args ...string) string {
	i.t.Helper()
	return must(i.t, i.plane, stdin, args...)
}

// part is a test of its own, and step one without which what follows makes no sense.
func (i *installation) part(name string, f func()) bool {
	outer := i.t
	defer func() { i.t = outer }()
	return outer.Run(name, func(t *testing.T) { i.t = t; f() })
}

func (i *installation) step(name string, f func()) {
	if !i.part(name, f) {
		i.t.FailNow()
	}
}

// awaitThat calls done until it is true, as often as an eager person would look.
func (i *installation) awaitThat(what func() string, done func() bool) {
	i.t.Helper()
	ctx, cancel := context.WithTimeout(i.t.Context(), patience)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for !done() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			i.t.Fatalf("waited in vain: %s", what())
		}
	}
}

// A pod is the container of a rendered one, as a process.
type pod struct {
	*kubetest.Process
	name           string
	stdout, stderr *os.File
}

// start runs the container of a rendered pod. What differs from a pod in a cluster is all here: its folders are below a temporary one, wherever
// arguments, environment and configuration name them; it listens at free ports of 127.0.0.1; the server's name is localhost, and its
// port is the one that it got; and the token for the API server is in a kubeconfig, instead of a folder that only a pod can have.
func (i *installation) start(kind, name string, env ...string) *pod {
	i.t.Helper()
	o := find(i.all, kind, name)
	path := []string{"spec", "template", "spec"}
	if kind == "Pod" {
		path = path[:1]
	}
	var spec corev1.PodSpec
	b, err := json.Marshal(field(i.t, o, path...))
	if err == nil {
		err = json.Unmarshal(b, &spec)
	}
	if err != nil {
		i.t.Fatalf("reading the pod of %s %s: %v", kind, name, err)
	}
	if len(spec.Containers) != 1 || spec.InitContainers != nil || spec.AutomountServiceAccountToken == nil {
		i.t.Fatalf("%s %s is more than one process, or does not say whether it has a token", kind, name)
	}
	c, root := spec.Containers[0], filepath.Join(i.dir, "pods", name)
	listen := regexp.MustCompile(`(?m)(listen[=:] ?"?):\d+`)
	server := strings.NewReplacer("https://latticekeep."+namespace+".svc:8200", i.url)
	slices.SortFunc(c.VolumeMounts, func(a, b corev1.VolumeMount) int { return strings.Compare(b.MountPath, a.MountPath) })
	var folders []string // one that begins with another comes first
	for _, m := range c.VolumeMounts {
		folders = append(folders, m.MountPath, filepath.Join(root, m.MountPath))
	}
	here := func(s string) string {
		return server.Replace(listen.ReplaceAllString(strings.NewReplacer(folders...).Replace(s), "${1}127.0.0.1:0"))
	}

	if err := os.MkdirAll(root, 0o700); err != nil {
		i.t.Fatal(err)
	}
	for _, m := range c.VolumeMounts {
		at := slices.IndexFunc(spec.Volumes, func(v corev1.Volume) bool { return v.Name == m.Name })
		files := make(map[string]string) // of a claim there are none
		if at >= 0 {
			files = i.volume(spec.ServiceAccountName, spec.Volumes[at].VolumeSource)
		}
		to := filepath.Join(root, m.MountPath)
		if m.SubPath != "" {
			files, to = map[string]string{filepath.Base(to): files[m.SubPath]}, filepath.Dir(to)
		}
		if err := os.MkdirAll(to, 0o700); err != nil {
			i.t.Fatal(err)
		}
		for file, content := range files {
			relative, err := filepath.Rel(i.dir, filepath.Join(to, file))
			if err != nil {
				i.t.Fatal(err)
			}
			i.file(relative, here(content))
		}
	}
	cmd := exec.Command(i.program)
	for _, arg := range c.Args {
		cmd.Args = append(cmd.Args, here(arg))
	}
	cmd.Dir, cmd.Env = root, append(env, "HOME="+root)
	if *spec.AutomountServiceAccountToken {
		config := i.kubeconfig(spec.ServiceAccountName)
		if cmd.Args[1] == "server" {
			cmd.Env = append(cmd.Env, "LATTICEKEEP_KUBERNETES_KUBECONFIG="+config)
		} else {
			cmd.Args = append(cmd.Args, "--kubeconfig="+config)
		}
	}
	for _, e := range c.Env {
		value := here(e.Value)
		if e.ValueFrom != nil {
			ref := e.ValueFrom.SecretKeyRef
			value = i.secret(namespace, ref.Name)[ref.Key]
		}
		cmd.Env = append(cmd.Env, e.Name+"="+value)
	}
	return i.run(name, cmd)
}

// volume returns the files of a volume, as kubelet would write them.
func (i *installation) volume(account string, v corev1.VolumeSource) map[string]string {
	i.t.Helper()
	pick := func(all map[string]string, items []corev1.KeyToPath) map[string]string {
		if items == nil {
			return all
		}
		picked := make(map[string]string)
		for _, item := range items {
			content, ok := all[item.Key]
			if !ok {
				i.t.Fatalf("there is no %s for a volume", item.Key)
			}
			picked[item.Path] = content
		}
		return picked
	}
	switch {
	case v.ConfigMap != nil:
		m := new(corev1.ConfigMap)
		i.get(namespace, v.ConfigMap.Name, m)
		return pick(m.Data, v.ConfigMap.Items)
	case v.Secret != nil:
		i.awaitSecret(namespace, v.Secret.SecretName)
		return pick(i.secret(namespace, v.Secret.SecretName), v.Secret.Items)
	case v.Projected != nil:
		files := make(map[string]string)
		for _, source := range v.Projected.Sources {
			token := source.ServiceAccountToken // the API server's own audience, unless it says another
			files[token.Path] = i.token(namespace, account, "--audience="+token.Audience, fmt.Sprintf("--duration=%ds", *token.ExpirationSeconds))
		}
		return files
	case v.EmptyDir != nil:
		return nil
	}
	i.t.Fatalf("a volume of a kind that this test does not know: %v", v)
	return nil
}

// token asks the API server for a token of a ServiceAccount.
func (i *installation) token(ns, account string, flags ...string) string {
	i.t.Helper()
	return strings.TrimSpace(i.kubectl("", append([]string{"create", "token", account, "--namespace", ns}, flags...)...))
}

// kubeconfig is how a pod that has a token for the API server reaches it.
func (i *installation) kubeconfig(account string) string {
	i.t.Helper()
	var config map[string]any
	b, err := os.ReadFile(i.plane.Kubeconfig)
	if err == nil {
		err = yaml.Unmarshal(b, &config)
	}
	if err != nil {
		i.t.Fatal(err)
	}
	token := i.file(account+".token", i.token(namespace, account, "--duration=1h"))
	config["users"] = []any{map[string]any{"name": "admin", "user": map[string]any{"tokenFile": token}}}
	if b, err = json.Marshal(config); err != nil {
		i.t.Fatal(err)
	}
	return i.file(account+".kubeconfig", string(b))
}

// run starts a process, which the end of the whole test ends if nothing else does.
func (i *installation) run(name string, cmd *exec.Cmd) *pod {
	i.t.Helper()
	p := &pod{name: name}
	var err error
	if p.stdout, err = os.CreateTemp(i.dir, name+"-out-"); err == nil {
		p.stderr, err = os.CreateTemp(i.dir, name+"-log-")
	}
	if err != nil {
		i.t.Fatal(err)
	}
	cmd.Stdout, cmd.Stderr = p.stdout, p.stderr
	if p.Process, err = kubetest.StartProcess(cmd); err != nil {
		i.t.Fatal(err)
	}
	i.whole.Cleanup(func() {
		_ = p.Stop(0) // it has ended, mostly
		p.stdout.Close()
		p.stderr.Close()
	})
	return p
}

// out is what a process has printed, and log what it has logged.
func (p *pod) out() string { return content(p.stdout) }
func (p *pod) log() string { return content(p.stderr) }

func content(f *os.File) string {
	b, err := os.ReadFile(f.Name()) // a failure is shown where the text would be
	if err != nil {
		return err.Error()
	}
	return string(b)
}

// line waits until a process has printed or logged a line with words, and returns it.
func (i *installation) line(p *pod, of func() string, words string) (line string) {
	i.t.Helper()
	i.awaitThat(func() string { return fmt.Sprintf("%s does not say %q:\n%s%s", p.name, words, p.out(), p.log()) }, func() bool {
		for line = range strings.Lines(of()) {
			if strings.Contains(line, words) && strings.HasSuffix(line, "\n") {
				return true
			}
		}
		select {
		case <-p.Done():
			i.t.Fatalf("%s ended before it said %q:\n%s%s", p.name, words, p.out(), p.log())
		default:
		}
		return false
	})
	return line
}

// finish waits for a process that ends by itself, and returns what it printed.
func (i *installation) finish(p *pod) string {
	i.t.Helper()
	select {
	case <-p.Done():
	case <-time.After(patience):
		_ = p.Stop(0)
		i.t.Fatalf("%s does not end:\n%s%s", p.name, p.out(), p.log())
	}
	if err := p.Stop(time.Minute); err != nil {
		i.t.Fatalf("%s: %v\n%s%s", p.name, err, p.out(), p.log())
	}
	return p.out()
}

// end ends a process as kubelet would.
func (i *installation) end(p *pod) {
	i.t.Helper()
	if err := p.Stop(time.Minute); err != nil {
		i.t.Errorf("%s: %v\n%s", p.name, err, p.log())
	}
}

// startServer runs the server, with variables for its libraries, and returns once it serves.
func (i *installation) startServer(env ...string) (p *pod, identity string) {
	i.t.Helper()
	p = i.start("StatefulSet", "latticekeep", env...)
	var ready struct {
		BaseURL  string `json:"base_url"`
		Identity string
	}
	line := i.line(p, p.out, `"base_url"`)
	if err := json.Unmarshal([]byte(line), &ready); err != nil {
		i.t.Fatalf("%v: %s", err, line)
	}
	i.url = strings.Replace(ready.BaseURL, "127.0.0.1", "localhost", 1) // the name that its certificate has
	return p, ready.Identity
}

// startWebhook runs the webhook and has the API server call it: its Service leads to this machine.
func (i *installation) startWebhook() *pod {
	i.t.Helper()
	p := i.start("Deployment", "latticekeep-webhook")
	var listening struct{ Address string }
	if line := i.line(p, p.log, `"listening"`); json.Unmarshal([]byte(line), &listening) != nil {
		i.t.Fatal(line)
	}
	i.line(p, p.log, `"ready"`)
	_, port, err := net.SplitHostPort(listening.Address)
	if err != nil {
		i.t.Fatal(err)
	}
	i.kubectl("", "patch", "service", "latticekeep-webhook", "--namespace", namespace, "--type=merge", "-p",
		`{"spec": {"type": "ExternalName", "externalName": "localhost", "clusterIP": null, "clusterIPs": null, "selector": null, "ports": [{"name": "webhook", "port": `+port+`}]}}`)
	i.kubectl("", "patch", "validatingwebhookconfiguration", "latticekeep-webhook", "--type=json", "-p",
		`[{"op": "replace", "path": "/webhooks/0/clientConfig/service/port", "value": `+port+`}]`)
	i.kubectl("", "wait", "--for=jsonpath={.webhooks[0].clientConfig.caBundle}", "--timeout=2m", "validatingwebhookconfiguration/latticekeep-webhook")
	return p
}

func readFile(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// get reads an object, which must be there.
func (i *installation) get(ns, name string, into client.Object) {
	i.t.Helper()
	if err := i.api.Get(i.t.Context(), client.ObjectKey{Namespace: ns, Name: name}, into); err != nil {
		i.t.Fatal(err)
	}
}

// awaitSecret waits until a Secret is there.
func (i *installation) awaitSecret(ns, name string) {
	i.t.Helper()
	i.awaitThat(func() string { return "there is no Secret " + name }, func() bool { return i.secretThere(ns, name) })
}

func (i *installation) secretThere(ns, name string) bool {
	i.t.Helper()
	err := i.api.Get(i.t.Context(), client.ObjectKey{Namespace: ns, Name: name}, new(corev1.Secret))
	if client.IgnoreNotFound(err) != nil {
		i.t.Fatal(err)
	}
	return err == nil
}

// secret returns the values of a Secret.
func (i *installation) secret(ns, name string) map[string]string {
	i.t.Helper()
	s := new(corev1.Secret)
	i.get(ns, name, s)
	values := make(map[string]string)
	for key, value := range s.Data {
		values[key] = string(value)
	}
	return values
}
