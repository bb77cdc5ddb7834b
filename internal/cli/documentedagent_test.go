package cli

import (
	"encoding/json"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/latticekeep/latticekeep/internal/cli/command"
	"github.com/latticekeep/latticekeep/test/machine"
	"github.com/latticekeep/latticekeep/test/servertest"
)

const agentPage = "docs/guides/agent.md"

// A cluster takes what the guide applies, and the agent writes its files from a vault.
func followAgent(f *documented) {
	c := f.cluster()
	c.kubectl(`{"apiVersion":"v1","kind":"Namespace","metadata":{"name":"shop","labels":{"pod-security.kubernetes.io/enforce":"restricted"}}}`, "apply", "-f", "-")
	c.kubectl("", "create", "secret", "generic", "latticekeep-tls", "--namespace", namespace, "--from-literal=ca.crt=a certificate")
	f.run("kubectl create serviceaccount orders", "created")
	mayRead := func() string {
		out, _ := c.try("", "auth", "can-i", "unseal", "sealedcredentials.latticekeep.dev/orders-database", "--namespace", "shop", "--as", "system:serviceaccount:shop:orders")
		return out
	}
	if out := mayRead(); !strings.Contains(out, "no") {
		f.Error(out)
	}
	f.run("kubectl create role unseal-orders-database", "created")
	f.run("kubectl create rolebinding unseal-orders-database", "created")
	if out := mayRead(); !strings.Contains(out, "yes") {
		f.Error("what the text of a denial says does not open the credential:", out)
	}
	f.run("kubectl get secret latticekeep-tls")
	if got := readText(f.T, f.path("ca.crt")); got != "a certificate" {
		f.Errorf("%q", got)
	}
	f.run("kubectl create configmap latticekeep-ca", "created")
	text := manifest(f.T, f.page, "kind: ConfigMap")
	if out := c.kubectl(text, "apply", "-f", "-"); !strings.Contains(out, "pod/orders created") || strings.Contains(out, "Warning") {
		f.Error(out)
	}

	s := servertest.Start(f.T)
	s.Post("/api/v2/vault/seal", `{"name":"orders-database","credential_type":"database","values":{"username":"orders","password":"a/b"}}`).Want(f.T, http.StatusCreated)
	f.set("LATTICEKEEP_URL", s.URL)
	machine.WriteFile(f.T, f.path("orders.key"), []byte(s.Key+"\n"))
	list, pod := podOf(f.T, text)
	machine.WriteFile(f.T, f.path("files.yaml"), []byte(list))
	here := strings.NewReplacer("https://latticekeep.latticekeep-system.svc:8200", s.URL, "--token-file=/var/run/latticekeep/token", "--api-key-file="+f.path("orders.key"),
		"/var/run/latticekeep", f.dir, "/credentials", folderInMemory(f.T))
	var args []string
	for _, arg := range pod.Spec.InitContainers[0].Args {
		if !strings.HasPrefix(arg, "--ca-file=") { // this server has no TLS
			args = append(args, here.Replace(arg))
		}
	}
	if out, err := run(f.T, args...); err != nil {
		f.Errorf("%q: %v: %s", args, err, out)
	}
	written := here.Replace("/credentials")
	if got := readText(f.T, written+"/password") + " " + readText(f.T, written+"/url"); got != "a/b postgres://orders:a%2Fb@db/orders" {
		f.Error(got)
	}

	// The program in the container of the agent is started with the flags of the sidecar.
	for _, arg := range pod.Spec.InitContainers[1].Args {
		if !slices.Contains(strings.Fields(f.left[0]), arg) {
			f.Errorf("the agent that starts a program lacks %s", arg)
		}
	}
	into := folderInMemory(f.T)
	must(f.T, os.WriteFile(f.path("orders"), []byte("#!/bin/sh\ncat "+into+"/url; echo \" $*\"\n"), 0o700)) //nolint:gosec // it is a program
	f.runAs("/latticekeep agent", []string{"/latticekeep agent", "latticekeep agent", "https://latticekeep.latticekeep-system.svc:8200", s.URL,
		"--ca-file=/var/run/latticekeep/ca.crt", "", "--token-file=/var/run/latticekeep/token", "--api-key-file=orders.key",
		"/var/run/latticekeep/files.yaml", "files.yaml", "/credentials", into}, "postgres://orders:a%2Fb@db/orders --port 8080")

	// The key of a machine reads the credential of its policy, by its path, and no other.
	f.set("LATTICEKEEP_API_KEY", s.Key)
	s.Post("/api/v2/vault/seal", `{"name":"shop/orders-database","credential_type":"database","values":{"password":"of the machine"}}`).Want(f.T, http.StatusCreated)
	f.run("latticekeep access put orders-read", "shop/orders-database=read")
	id := regexp.MustCompile(`key_\w+`).FindString(f.run("(umask 077; latticekeep apikey create orders"))
	f.runAs("latticekeep access bind", []string{"key_…", id}, "1 of the policies")
	read := func(plan string) (string, error) {
		dir := folderInMemory(f.T)
		machine.WriteFile(f.T, f.path("machine.yaml"), []byte(plan))
		if _, err := run(f.T, "agent", "--once", "--url", s.URL, "--api-key-file", f.path("latticekeep.key"), "--files", f.path("machine.yaml"), "--into", dir); err != nil {
			return "", err
		}
		return readText(f.T, dir+"/password"), nil
	}
	plan := manifest(f.T, f.page, "credential: shop/orders-database")
	if got, err := read(plan); err != nil || got != "of the machine" {
		f.Errorf("%q %v", got, err)
	}
	if got, err := read(strings.Replace(plan, "shop/orders-database", "orders-database", 1)); ExitStatus(err) != command.StatusRefused {
		f.Errorf("%q %v", got, err)
	}
	f.pass("systemctl restart orders-credentials.service", "it needs systemd as the first process")
}

// podOf returns the list of files and the pod of a manifest.
func podOf(t *testing.T, text string) (list string, pod corev1.Pod) {
	t.Helper()
	config, rest, _ := strings.Cut(text, "\n---\n")
	var files corev1.ConfigMap
	must(t, yaml.UnmarshalStrict([]byte(config), &files))
	must(t, yaml.UnmarshalStrict([]byte(rest), &pod))
	return files.Data["files.yaml"], pod
}

// The sidecar does what the init container has done, and goes on.
func TestTheGuideOfTheAgentHasOneSetOfFlags(t *testing.T) {
	_, pod := podOf(t, manifest(t, agentPage, "kind: ConfigMap"))
	once, agent := pod.Spec.InitContainers[0], pod.Spec.InitContainers[1]
	if want := slices.DeleteFunc(slices.Clone(once.Args), func(arg string) bool { return arg == "--once" }); !slices.Equal(agent.Args, want) || len(want) == len(once.Args) {
		t.Errorf("%q and %q", once.Args, agent.Args)
	}
	same := func(a, b any) bool {
		first, err := json.Marshal(a)
		must(t, err)
		second, err := json.Marshal(b)
		must(t, err)
		return string(first) == string(second)
	}
	if !same(once.SecurityContext, agent.SecurityContext) || !same(once.VolumeMounts, agent.VolumeMounts) || once.Image != agent.Image {
		t.Error("the containers differ")
	}
	if agent.RestartPolicy == nil || *agent.RestartPolicy != corev1.ContainerRestartPolicyAlways {
		t.Error("the agent is no sidecar")
	}
}

// systemd can read the units, and the program their command lines.
func TestTheUnitsOfTheGuideOfTheAgentAreValid(t *testing.T) {
	dir := t.TempDir()
	blocks := regexp.MustCompile("(?ms)^```ini\n(.*?)^```$").FindAllStringSubmatch(readText(t, "../../"+agentPage), -1)
	if len(blocks) != 3 {
		t.Fatal(len(blocks), "units")
	}
	var paths []string
	commands := 0
	for i, name := range []string{"orders-credentials", "orders", "orders-following"} {
		for line := range strings.Lines(blocks[i][1]) {
			command, ok := strings.CutPrefix(strings.TrimSpace(line), "ExecStart=/usr/local/bin/latticekeep ")
			if !ok {
				continue
			}
			commands++
			// All flags are known, so that the first thing which is wrong is the file that is not there.
			if _, err := run(t, strings.Fields(strings.ReplaceAll(command, "-- /usr/local/bin/orders", "-- true"))...); err == nil || !strings.Contains(err.Error(), "reading --files: ") {
				t.Errorf("%s: %v", command, err)
			}
		}
		path := filepath.Join(dir, name+".service")
		machine.WriteFile(t, path, []byte(regexp.MustCompile(`/usr/local/bin/(latticekeep|orders)`).ReplaceAllString(blocks[i][1], "/bin/true")))
		paths = append(paths, path)
	}
	if commands != 2 {
		t.Error(commands, "units run the agent")
	}
	analyze, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Skip("systemd-analyze is not installed")
	}
	if out, err := exec.CommandContext(t.Context(), analyze, append([]string{"verify", "--man=no"}, paths...)...).CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("%v: %s", err, out)
	}
}
