package externalsecrets_test

import (
	"bytes"
	"context"
	"encoding/json"
	"encoding/pem"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/test/kubetest"
	"github.com/latticekeep/latticekeep/test/servertest"
)

const guide = "../../docs/guides/external-secrets.md"

// blocks returns the manifests of the guide.
func blocks(t *testing.T) (all []string) {
	t.Helper()
	text, err := os.ReadFile(guide)
	if err != nil {
		t.Fatal(err)
	}
	for _, part := range strings.Split(string(text), "```yaml\n")[1:] {
		block, _, _ := strings.Cut(part, "```")
		all = append(all, block)
	}
	if len(all) != 2 {
		t.Fatalf("the guide has %d manifests", len(all))
	}
	return all
}

// shop is a namespace of a cluster in which the controller runs.
type shop struct {
	*servertest.Service
	t     *testing.T
	plane *kubetest.ControlPlane
	tls   string // URL of a proxy that adds TLS
}

func newShop(t *testing.T) *shop {
	binaries := os.Getenv("EXTERNAL_SECRETS")
	if binaries == "" {
		t.Skip("EXTERNAL_SECRETS does not name the folder of the controller: run make external-secrets")
	}
	s := &shop{Service: servertest.Start(t), t: t, plane: kubetest.ForTest(t)}
	to, err := url.Parse(s.URL)
	if err != nil {
		t.Fatal(err)
	}
	over := httptest.NewTLSServer(&httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(to) }})
	t.Cleanup(over.Close)
	s.tls = over.URL
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: over.Certificate().Raw})
	s.kubectl("", "create", "-f", filepath.Join(binaries, "crds.yaml"))
	s.kubectl("", "wait", "--for=condition=Established", "crd", "--all", "--timeout=2m")
	s.kubectl("", "create", "namespace", "shop")
	s.kubectl(string(ca), "create", "configmap", "latticekeep-ca", "--namespace", "shop", "--from-file=ca.crt=/dev/stdin")
	s.kubectl(s.GrantKey(authz.VaultRead, authz.VaultWrite), "create", "secret", "generic", "latticekeep-api-key", "--namespace", "shop", "--from-file=key=/dev/stdin")
	s.kubectl("", "label", "secret", "latticekeep-api-key", "--namespace", "shop", "external-secrets.io/type=webhook")

	kubeconfig, err := s.plane.KubeconfigFor("external-secrets", "system:masters")
	if err != nil {
		t.Fatal(err)
	}
	log := new(bytes.Buffer)
	controller := exec.Command(filepath.Join(binaries, "external-secrets"), "--metrics-addr=127.0.0.1:0", "--live-addr=127.0.0.1:0")
	controller.Env = append(os.Environ(), "KUBECONFIG="+kubeconfig)
	controller.Stdout, controller.Stderr = log, log
	process, err := kubetest.StartProcess(controller)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := process.Stop(30 * time.Second); err != nil && !t.Failed() {
			t.Log("the controller ended with", err)
		}
		if t.Failed() {
			t.Logf("%s", log.Bytes()[max(0, log.Len()-8000):])
		}
	})
	return s
}

func (s *shop) try(stdin string, args ...string) (string, error) {
	cmd := s.plane.Kubectl(s.t.Context(), args...)
	cmd.Stdin = strings.NewReader(stdin)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func (s *shop) kubectl(stdin string, args ...string) string {
	s.t.Helper()
	out, err := s.try(stdin, args...)
	if err != nil {
		s.t.Fatalf("kubectl %s: %v: %s", strings.Join(args, " "), err, out)
	}
	return out
}

// apply applies a manifest of the guide to this service.
func (s *shop) apply(manifest string) {
	s.t.Helper()
	s.kubectl(strings.ReplaceAll(manifest, "https://latticekeep.latticekeep-system.svc:8200", s.tls), "apply", "-f", "-")
}

// until repeats a command until its output has a text.
func (s *shop) until(text string, args ...string) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), 2*time.Minute)
	defer cancel()
	for {
		out, err := s.try("", args...)
		if err == nil && strings.Contains(out, text) {
			return
		}
		if ctx.Err() != nil {
			events, _ := s.try("", "get", "events", "--namespace", "shop")
			s.t.Fatalf("kubectl %s: %v: %s, want %s\n%s", strings.Join(args, " "), err, out, text, events)
		}
	}
}

func (s *shop) put(password string) {
	s.t.Helper()
	s.Call(servertest.Request{
		Method: "PUT", Path: "/api/v2/vault/by-name/shop%2Forders-database", Key: s.Key, Body: `{"credential_type":"database","values":{"password":"` + password + `"}}`,
	})
}

var password = []string{"get", "secret", "orders-database", "--namespace", "shop", "--output=go-template={{.data.password | base64decode}}"}

// The controller reads, learns of a rotation, and says that it was refused.
func TestExternalSecretsReadsAndWritesCredentials(t *testing.T) {
	s := newShop(t)
	manifests := blocks(t)
	s.apply(manifests[0])
	s.until("endpoint gave error 403 Forbidden", "get", "events", "--namespace", "shop", "--field-selector", "involvedObject.name=orders-database")
	s.until("False", "get", "externalsecret", "orders-database", "--namespace", "shop", `--output=jsonpath={.status.conditions[?(@.type=="Ready")].status}`)
	s.put("first")
	s.kubectl("", "annotate", "externalsecret", "orders-database", "--namespace", "shop", "--overwrite", "force-sync=1")
	s.until("first", password...)
	s.put("second")
	s.kubectl("", "annotate", "externalsecret", "orders-database", "--namespace", "shop", "--overwrite", "force-sync=2")
	s.until("second", password...)

	s.kubectl("", "create", "secret", "generic", "legacy-api", "--namespace", "shop", "--from-literal=token=example", "--from-literal=user=o'hara \"x\"")
	s.apply(manifests[1])
	s.until("True", "get", "pushsecret", "legacy-api", "--namespace", "shop", `--output=jsonpath={.status.conditions[?(@.type=="Ready")].status}`)
	pushed := s.Get("/api/v2/vault/by-name/shop%2Flegacy-api").Want(t, http.StatusOK)["values"]
	if got := servertest.Marshal(t, pushed); got != `{"token":"example","user":"o'hara \"x\""}` {
		t.Error(got)
	}
}

// Without the controller, too, the paths of the guide lead to the values that an answer has.
func TestTheGuideReadsWhatTheInterfaceAnswers(t *testing.T) {
	manifests := blocks(t)
	for _, want := range []string{`/api/v2/vault/by-name/{{ .remoteRef.key }}"`, `X-API-Key`, `$.values["{{ .remoteRef.property }}"]`} {
		if !strings.Contains(manifests[0], want) {
			t.Errorf("the guide does not read by %s", want)
		}
	}
	s := servertest.Start(t)
	const body = `{"credential_type": "kubernetes", "values": {"token":"example"}}`
	if !strings.Contains(manifests[1], strings.Replace(body, `{"token":"example"}`, "{{ index .remoteRef .remoteRef.remoteKey }}", 1)) {
		t.Error("the guide writes another body")
	}
	s.Call(servertest.Request{Method: "PUT", Path: "/api/v2/vault/by-name/shop%2Flegacy-api", Key: s.Key, Body: body}).Want(t, http.StatusCreated)
	var answer struct{ Values map[string]string }
	if err := json.Unmarshal(s.Get("/api/v2/vault/by-name/shop%2Flegacy-api").Body, &answer); err != nil || answer.Values["token"] != "example" {
		t.Error(answer, err)
	}
}
