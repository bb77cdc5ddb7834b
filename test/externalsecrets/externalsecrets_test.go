package externalsecrets

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/test/kubetest"
	"github.com/latticekeep/latticekeep/test/machine"
	"github.com/latticekeep/latticekeep/test/servertest"
)

const guide = "../../docs/guides/external-secrets.md"

// inCluster is the address of the server in the guide.
const inCluster = "https://latticekeep.latticekeep-system.svc:8200"

// site is a cluster with the operator, and a server of Latticekeep.
type site struct {
	*servertest.Service
	t     *testing.T
	plane *kubetest.ControlPlane
	dir   string // where the commands of the guide run
	url   string // of the server, with TLS
}

// newSite starts everything. It skips the test without EXTERNAL_SECRETS, the folder that hack/external-secrets.sh prints.
func newSite(t *testing.T) *site {
	t.Helper()
	folder := os.Getenv("EXTERNAL_SECRETS")
	if folder == "" {
		t.Skip("EXTERNAL_SECRETS does not name the folder of the operator: `make external-secrets` runs this")
	}
	s := &site{Service: servertest.Start(t), t: t, plane: kubetest.ForTest(t), dir: t.TempDir()}
	s.serveTLS()
	s.kubectl("", "create", "--filename", filepath.Join(folder, "crds.yaml"))
	if err := s.plane.AwaitCRDs(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.startOperator(filepath.Join(folder, "external-secrets"))
	return s
}

// release returns the release of the operator that hack/external-secrets.sh compiles.
func release(t *testing.T) string {
	t.Helper()
	script, err := os.ReadFile("../../hack/external-secrets.sh")
	if err != nil {
		t.Fatal(err)
	}
	version := regexp.MustCompile(`(?m)^version=v(.*)$`).FindSubmatch(script)
	if version == nil {
		t.Fatal("hack/external-secrets.sh has no version")
	}
	return string(version[1])
}

// serveTLS serves with a certificate, and puts its authority where the chart has it.
func (s *site) serveTLS() {
	s.t.Helper()
	certFile, keyFile, _ := machine.WriteCertificate(s.t, s.dir, 1)
	pair, err := tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil {
		s.t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		s.t.Fatal(err)
	}
	s.url = "https://" + l.Addr().String()
	ctx, stop := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() {
		served <- s.Server.Serve(ctx, tls.NewListener(l, &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS13}))
	}()
	s.t.Cleanup(func() {
		stop()
		if err := <-served; err != nil {
			s.t.Errorf("serving with TLS: %v", err)
		}
	})
	for _, namespace := range []string{"shop", "latticekeep-system"} {
		s.kubectl("", "create", "namespace", namespace)
	}
	s.kubectl("", "--namespace", "latticekeep-system", "create", "secret", "generic", "latticekeep-tls", "--from-file=ca.crt="+certFile)
}

// startOperator starts the operator, without its endpoints for metrics and probes: it listens nowhere.
func (s *site) startOperator(binary string) {
	s.t.Helper()
	log, err := os.Create(filepath.Join(s.dir, "operator.log"))
	if err != nil {
		s.t.Fatal(err)
	}
	defer log.Close()
	cmd := exec.Command(binary, "--metrics-addr=0", "--live-addr=0", "--concurrent=4", "--loglevel=error")
	cmd.Env = []string{"KUBECONFIG=" + s.plane.Kubeconfig, "HOME=" + s.dir, "SSL_CERT_FILE=" + os.DevNull}
	cmd.Stdout, cmd.Stderr = log, log
	operator, err := kubetest.StartProcess(cmd)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() {
		if err := operator.Stop(30 * time.Second); err != nil {
			s.t.Errorf("stopping the operator: %v", err)
		}
		if s.t.Failed() {
			output, _ := os.ReadFile(log.Name())
			s.t.Logf("the operator says:\n%s", output)
		}
	})
}

// kubectl runs kubectl, which must succeed, and returns its output.
func (s *site) kubectl(stdin string, args ...string) string {
	s.t.Helper()
	cmd := s.plane.Kubectl(s.t.Context(), args...)
	cmd.Stdin = strings.NewReader(stdin)
	out, err := cmd.CombinedOutput()
	if err != nil {
		s.t.Fatalf("kubectl %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

// step runs a subtest, to whose t everything reports meanwhile.
func (s *site) step(name string, do func()) {
	s.t.Run(name, func(t *testing.T) {
		outer := s.t
		s.t, s.T = t, t
		defer func() { s.t, s.T = outer, outer }()
		do()
	})
}

// setUp does what the guide says before the first read.
func (s *site) setUp() (keyID string) {
	s.t.Helper()
	keyID = s.grant("shop-read", "shop/**", []string{"read"}, "vault:read")
	s.run("kubectl --namespace shop create secret generic latticekeep-api-key ")
	s.run("kubectl --namespace shop label secret latticekeep-api-key ")
	s.run("kubectl --namespace latticekeep-system get secret latticekeep-tls")
	s.run("kubectl --namespace shop create configmap")
	machine.WriteFile(s.t, filepath.Join(s.dir, "store.yaml"), []byte(s.here(manifest(s.t, "SecretStore", "latticekeep"))))
	machine.WriteFile(s.t, filepath.Join(s.dir, "database.yaml"), []byte(s.here(manifest(s.t, "ExternalSecret", "database"))))
	s.run("kubectl apply --filename store.yaml --filename database.yaml")
	s.run("kubectl --namespace shop wait --for=condition=Ready externalsecret/database")
	return keyID
}

// run runs the one command of the guide that begins so, and returns its output.
func (s *site) run(begin string) string {
	s.t.Helper()
	text, err := os.ReadFile(guide)
	if err != nil {
		s.t.Fatal(err)
	}
	commands := regexp.MustCompile(`(?m)^ *`+regexp.QuoteMeta(begin)+`.*$`).FindAllString(string(text), -1)
	if len(commands) != 1 {
		s.t.Fatalf("the guide has %d commands that begin with %q", len(commands), begin)
	}
	cmd := exec.CommandContext(s.t.Context(), "bash", "-euo", "pipefail", "-c", commands[0])
	cmd.Dir, cmd.Env = s.dir, append(os.Environ(), "KUBECONFIG="+s.plane.Kubeconfig, "HOME="+s.dir)
	out, err := cmd.CombinedOutput()
	if err != nil {
		s.t.Fatalf("%s: %v\n%s", commands[0], err, out)
	}
	return string(out)
}

// apply creates or changes what a manifest says, at the address of the server here, with further replacements.
func (s *site) apply(manifest string, replacements ...string) {
	s.t.Helper()
	s.kubectl(s.here(manifest, replacements...), "apply", "--filename", "-")
}

func (s *site) here(manifest string, replacements ...string) string {
	return strings.NewReplacer(append(replacements, inCluster, s.url)...).Replace(manifest)
}

// await runs kubectl until its output has this part.
func (s *site) await(want string, args ...string) {
	s.t.Helper()
	s.poll(func() (string, bool) {
		out, _ := s.plane.Kubectl(s.t.Context(), args...).CombinedOutput()
		return fmt.Sprintf("kubectl %s does not say %q, but:\n%s", strings.Join(args, " "), want, out), bytes.Contains(out, []byte(want))
	})
}

// poll asks until it is so. It fails the test with the last answer after a minute.
func (s *site) poll(ask func() (answer string, done bool)) {
	s.t.Helper()
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(time.Minute); ; <-tick.C {
		answer, done := ask()
		if done {
			return
		}
		if time.Now().After(deadline) {
			s.t.Fatal("waited in vain: " + answer)
		}
	}
}

// secretData prints the data of a Secret.
const secretData = `go-template={{range $k, $v := .data}}{{$k}}={{$v | base64decode}};{{end}}`

// awaitSecret waits for the data of a Secret.
func (s *site) awaitSecret(name, want string) {
	s.t.Helper()
	s.await(want, "--namespace", "shop", "get", "secret", name, "--output", secretData)
}

// wantSecret fails the test unless the Secret has this data now.
func (s *site) wantSecret(name, want string) {
	s.t.Helper()
	if got := s.kubectl("", "--namespace", "shop", "get", "secret", name, "--output", secretData); got != want {
		s.t.Errorf("the Secret %s has %q, want %q", name, got, want)
	}
}

// wantNoSecret fails the test if there is a Secret of this name.
func (s *site) wantNoSecret(name string) {
	s.t.Helper()
	if out, err := s.plane.Kubectl(s.t.Context(), "--namespace", "shop", "get", "secret", name).CombinedOutput(); err == nil || !bytes.Contains(out, []byte("NotFound")) {
		s.t.Errorf("the Secret %s: %v %s", name, err, out)
	}
}

// awaitFailure waits until an ExternalSecret has the condition of a failure, and an event that says why.
func (s *site) awaitFailure(name, why string) {
	s.t.Helper()
	object := []string{"--namespace", "shop", "get", "externalsecret", name, "--output"}
	s.await("SecretSyncedError False could not get secret data from provider",
		append(object, `jsonpath={range .status.conditions[?(@.type=="Ready")]}{.reason} {.status} {.message}{end}`)...)
	s.await(why, "--namespace", "shop", "get", "events", "--field-selector", "reason=UpdateFailed,involvedObject.name="+name)
}

// refresh lets the operator read an ExternalSecret again.
func (s *site) refresh(name string) {
	s.t.Helper()
	s.kubectl("", "--namespace", "shop", "annotate", "externalsecret", name, "force-sync="+rand.Text(), "--overwrite")
}

// put stores a credential, and returns its id. The path is percent-encoded.
func (s *site) put(path, values string) string {
	s.t.Helper()
	r := s.Call(servertest.Request{Method: "PUT", Path: "/api/v2/vault/by-name/" + path, Key: s.Key, Body: `{"credential_type":"database","values":` + values + `}`})
	if r.Status != http.StatusOK {
		r.Want(s.t, http.StatusCreated)
	}
	return r.Want(s.t, r.Status)["credential_id"].(string)
}

// grant makes an API key with the scopes that may do this on the paths of the glob, and writes it to api.key, as the
// commands of the guide do. It returns the key's id.
func (s *site) grant(name, glob string, verbs []string, scopes ...string) string {
	s.t.Helper()
	made := s.Post("/api/v2/api-keys", servertest.Marshal(s.t, map[string]any{"name": name, "scopes": scopes})).Want(s.t, http.StatusCreated)
	id := made["key_id"].(string)
	policy := s.Post("/api/v2/access/policies", servertest.Marshal(s.t, map[string]any{
		"name": name, "rules": []map[string]any{{"path": glob, "verbs": verbs}},
	})).Want(s.t, http.StatusCreated)["policy"].(map[string]any)["policy_id"]
	s.Call(servertest.Request{
		Method: "PUT", Path: "/api/v2/access/bindings/" + id, Key: s.Key, Body: fmt.Sprintf(`{"policies":[%q]}`, policy),
	}).Want(s.t, http.StatusOK)
	machine.WriteFile(s.t, filepath.Join(s.dir, "api.key"), []byte(made["api_key"].(string)+"\n"))
	return id
}

// giveKey stores api.key in a Secret that the operator reads.
func (s *site) giveKey(secret string) {
	s.t.Helper()
	s.kubectl("", "--namespace", "shop", "create", "secret", "generic", secret, "--from-file=key="+filepath.Join(s.dir, "api.key"))
	s.kubectl("", "--namespace", "shop", "label", "secret", secret, "external-secrets.io/type=webhook")
}

// reads returns how many reads of a credential the log has with this outcome.
func (s *site) reads(outcome string) int {
	s.t.Helper()
	return len(s.Entries("event_type=CREDENTIAL_UNSEALED&limit=100&outcome=" + outcome))
}

// manifests returns the blocks of YAML of the guide.
func manifests(t *testing.T) (all []string) {
	t.Helper()
	text, err := os.ReadFile(guide)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range regexp.MustCompile("(?ms)^```yaml\n(.*?)^```$").FindAllStringSubmatch(string(text), -1) {
		all = append(all, m[1])
	}
	return all
}

// manifest returns the one manifest of the guide of this kind and name.
func manifest(t *testing.T, kind, name string) string {
	t.Helper()
	var found []string
	for _, m := range manifests(t) {
		if strings.Contains(m, "kind: "+kind+"\nmetadata:\n  name: "+name+"\n") {
			found = append(found, m)
		}
	}
	if len(found) != 1 {
		t.Fatalf("the guide has %d manifests of a %s %s", len(found), kind, name)
	}
	return found[0]
}

// otherAuthority returns a certificate that signed nothing here.
func otherAuthority(t *testing.T) string {
	t.Helper()
	file, _, _ := machine.WriteCertificate(t, t.TempDir(), 2)
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
