package cli

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/test/kubetest"
	"github.com/latticekeep/latticekeep/test/machine"
)

// operations returns the URL of a server's operations, which only its log contains.
func (s *site) operations() string {
	s.t.Helper()
	for text := range strings.Lines(s.log.String()) {
		var line struct{ Msg, Operations string }
		if json.Unmarshal([]byte(text), &line) == nil && line.Msg == "ready" && line.Operations != "" {
			return line.Operations
		}
	}
	s.t.Fatal("no operations in the log: ", s.log.String())
	return ""
}

// inCluster is a site whose server is the operator of plane, with everything that this needs.
func inCluster(t *testing.T, plane *kubetest.ControlPlane) *site {
	t.Helper()
	t.Setenv("LATTICEKEEP_SYSTEM_KEY_FILE", "")
	return newSite(t, closed+fmt.Sprintf(`
systemKeySecret: first-key
operations: {listen: '127.0.0.1:0'}
kubernetes:
  kubeconfig: %s
  namespace: vault
  workers: 2
  policy: {types: [database], maxTTLDays: 60}
`, plane.Kubeconfig))
}

const outOfPolicy = `{"apiVersion":"latticekeep.dev/v1beta1","kind":"SealedCredential","metadata":{"name":"db","namespace":"default"},
"spec":{"credentialType":"api_key","ttlDays":60,"generate":[{"key":"k","random":{"length":32}}]}}`

func TestAProductionServerIsOperatedInItsCluster(t *testing.T) {
	plane := kubetest.ForTest(t)
	kubectl := func(input string, args ...string) string {
		t.Helper()
		cmd := plane.Kubectl(t.Context(), args...)
		cmd.Stdin = strings.NewReader(input)
		out, err := cmd.Output()
		if failed := new(exec.ExitError); errors.As(err, &failed) {
			t.Fatalf("kubectl %v: %v\n%s", args, err, failed.Stderr)
		} else if err != nil {
			t.Fatal(err)
		}
		return string(out)
	}
	s := inCluster(t, plane)
	if _, err := run(t, "server", "--config", s.file); err == nil || !strings.Contains(err.Error(), `namespaces "vault" not found`) {
		t.Fatal("without its namespace:", err)
	}
	kubectl("", "create", "namespace", "vault")
	line, stop := s.serve()

	encoded := kubectl("", "get", "secret", "-n", "vault", "first-key", "-o", "jsonpath={.data.system-key}")
	system, err := base64.StdEncoding.DecodeString(encoded)
	if err != nil {
		t.Fatal(err)
	}
	c := s.client()
	status, body := s.ask(c, "POST", line.BaseURL+"/api/v2/system/tenants", string(system), `{"name":"shop"}`)
	if status != http.StatusCreated {
		t.Fatal("the key of the Secret does not count:", status, body)
	}
	status, body = s.ask(c, "POST", line.BaseURL+"/api/v2/system/tenants/"+field(t, body, "tenant_id")+"/api-keys", string(system), `{"name":"k","scopes":["vault:write"]}`)
	if status != http.StatusCreated {
		t.Fatal(status, body)
	}
	key := field(t, body, "api_key")

	kubectl("", "wait", "--for=create", "--timeout=60s", "-n", "vault", "configmap/latticekeep-sealing-key")
	kubectl(outOfPolicy, "apply", "-f", "-")
	kubectl("", "wait", "--for=condition=Stalled", "--timeout=60s", "sealedcredential/db")
	if reason := kubectl("", "get", "sealedcredential/db", "-o", `jsonpath={.status.conditions[?(@.type=="Stalled")].reason}`); reason != v1beta1.ReasonPolicy {
		t.Error("the operator's policy:", reason)
	}
	const asked = `{"namespace":"default","name":"db","credential_type":"api_key","ttl_days":60}`
	if status, body := s.ask(c, "POST", line.BaseURL+"/api/v2/sealing-key/check", key, asked); status != http.StatusOK || !strings.Contains(body, "allows only database") {
		t.Error("the policy of the check:", status, body)
	}

	for _, path := range []string{"/healthz", "/readyz", "/metrics"} {
		if status, body := s.ask(c, "GET", line.BaseURL+path, "", ""); status != http.StatusNotFound {
			t.Errorf("%s of the interface: %d %s", path, status, body)
		}
		if status, body := s.ask(c, "GET", s.operations()+path, "", ""); status != http.StatusOK {
			t.Errorf("%s: %d %s", path, status, body)
		}
	}
	_, metrics := s.ask(c, "GET", s.operations()+"/metrics", "", "")
	for _, want := range []string{
		"\nlatticekeep_audit_sequence ",
		"\nlatticekeep_audit_entries_total{event_type=\"TENANT_CREATED\",outcome=\"success\"} ",
		"\nlatticekeep_sealing_key_objects{key_id=\"",
		"\nlatticekeep_sealedcredentials{condition=\"Stalled\",status=\"True\"} 1\n",
		"\nlatticekeep_tls_handshakes_total{group=\"X25519MLKEM768\"} ",
		"\nlatticekeep_http_requests_total{method=\"POST\",route=\"/api/v2/system/tenants\",status=\"201\"} 1\n",
		"\ncontroller_runtime_reconcile_total{controller=\"sealedcredential\",",
		"\ncontroller_runtime_max_concurrent_reconciles{controller=\"sealedcredential\"} 2\n",
		"\nworkqueue_depth{",
		"\nrest_client_requests_total{",
		"\ngo_goroutines ",
		"\nprocess_start_time_seconds ",
	} {
		if n := strings.Count(metrics, want); n == 0 || strings.HasSuffix(want, " ") && !strings.Contains(want, "{") && n != 1 {
			t.Errorf("%d times %q", n, want)
		}
	}
	doc, err := os.ReadFile("../../docs/reference/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range regexp.MustCompile(`(?m)^# HELP (latticekeep_\w+)`).FindAllStringSubmatch(metrics, -1) {
		if !strings.Contains(string(doc), "\n| `"+m[1]) {
			t.Errorf("%s has no row in docs/reference/metrics.md", m[1])
		}
	}
	stop()

	other := inCluster(t, plane)
	if _, err := run(t, "server", "--config", other.file); err == nil || !strings.Contains(err.Error(), "kubectl delete secret -n vault first-key") {
		t.Error("the Secret of somebody else:", err)
	}
	if again := kubectl("", "get", "secret", "-n", "vault", "first-key", "-o", "jsonpath={.data.system-key}"); again != encoded {
		t.Error("the Secret was overwritten")
	}
	kubectl("", "delete", "secret", "-n", "vault", "first-key") // as administrators should
	_, stop = s.serve()
	stop()
	for text := range strings.Lines(s.log.String()) {
		if !json.Valid([]byte(text)) {
			t.Errorf("not a JSON line: %s", text)
		}
	}
	for _, secret := range []string{string(system), encoded, key} {
		if strings.Contains(s.log.String(), secret) {
			t.Error("a key is in the log")
		}
	}
}

func TestASecretForTheSystemKeyNeedsACluster(t *testing.T) {
	t.Setenv("LATTICEKEEP_SYSTEM_KEY_FILE", "")
	s := newSite(t, closed+"systemKeySecret: first-key\n")
	if _, err := run(t, "server", "--config", s.file); err == nil || !strings.Contains(err.Error(), "systemKeySecret: there is no cluster") {
		t.Fatal(err)
	}
}

// An operator that cannot reach its cluster knows no objects, so it must not show a number or rely
// on one.
func TestWithoutItsClusterNobodyKnowsWhichSealingKeysAreNeeded(t *testing.T) {
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	machine.WriteFile(t, kubeconfig, []byte(`{"apiVersion":"v1","kind":"Config","current-context":"c","contexts":[{"name":"c","context":{"cluster":"c"}}],
"clusters":[{"name":"c","cluster":{"server":"https://127.0.0.1:1"}}]}`))
	s := newSite(t, closed+"kubernetes: {kubeconfig: "+kubeconfig+"}\noperations: {listen: '127.0.0.1:0'}\n")
	line, stop := s.serve()
	defer stop()
	c := s.client()
	if status, body := s.ask(c, "GET", line.BaseURL+"/api/v2/system/sealing-keys", s.systemKey(), ""); status != http.StatusServiceUnavailable {
		t.Error(status, body)
	}
	status, metrics := s.ask(c, "GET", s.operations()+"/metrics", "", "")
	if status != http.StatusOK || strings.Contains(metrics, "latticekeep_sealing_key_objects") || !strings.Contains(metrics, "latticekeep_audit_sequence") {
		t.Error(status, metrics)
	}
	if status, body := s.ask(c, "GET", s.operations()+"/readyz", "", ""); status != http.StatusOK {
		t.Error("the HTTP service needs no operator:", status, body)
	}
	patience := time.After(time.Minute)
	for !strings.Contains(s.log.String(), "operator stopped") {
		select {
		case <-time.After(10 * time.Millisecond):
		case <-patience:
			t.Fatal("waited in vain")
		}
	}
	for text := range strings.Lines(s.log.String()) {
		if !json.Valid([]byte(text)) {
			t.Errorf("not a JSON line: %s", text)
		}
	}
}

func TestASecretForTLSNeedsACluster(t *testing.T) {
	s := newSite(t, closed)
	config, err := os.ReadFile(s.file)
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for line := range strings.Lines(string(config)) {
		if !strings.HasPrefix(line, "tls:") {
			lines = append(lines, line)
		}
	}
	machine.WriteFile(t, s.file, fmt.Appendf(nil, "%s\ntls: {secretName: latticekeep-tls}\n", strings.Join(lines, "")))
	if _, err := run(t, "server", "--config", s.file); err == nil || !strings.Contains(err.Error(), "tls.secretName: there is no cluster") {
		t.Error(err)
	}
}
