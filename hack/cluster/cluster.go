package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/test/kubetest"
)

const (
	configRBAC = "config/rbac"
	sample     = "config/samples/database-secret.plain"
	name       = "database" // name of the sample, in namespace default

	// serverGrace is the time that requests in flight have when latticekeep is stopped.
	serverGrace = 20 * time.Second
	// readyTimeout bounds the time in which anything here becomes ready.
	readyTimeout = time.Minute
)

// operator is the ServiceAccount of config/rbac. With it this program runs with exactly the rights
// of a real installation.
var operator = []string{"system:serviceaccount:latticekeep-system:latticekeep", "system:serviceaccounts", "system:serviceaccounts:latticekeep-system"}

// A cluster is a control plane and a latticekeep that serves it. A nil field is not started yet.
type cluster struct {
	binary string // path of latticekeep
	out    io.Writer
	dir    string // removed by stop
	plane  *kubetest.ControlPlane
	server *kubetest.Process
	ready  announcement
}

// An announcement is the output of `latticekeep server --dev` once it serves.
type announcement struct {
	// From the JSON line on standard output.
	BaseURL  string `json:"base_url"`
	TenantID string `json:"tenant_id"`
	APIKey   string `json:"api_key"`
	// From separate lines on standard error. They are pinned, as a user would pin them: data
	// fetched over HTTP later has to match them.
	identity string // fingerprint of the key that signs sealing keys
	chain    string // fingerprint of the audit chain
}

// start returns a cluster. The caller must stop it even after an error.
func start(ctx context.Context, binary string, out io.Writer) (*cluster, error) {
	c := &cluster{binary: binary, out: out}
	var err error
	if c.dir, err = os.MkdirTemp("", "latticekeep-cluster-"); err != nil {
		return c, fmt.Errorf("making a temporary directory: %w", err)
	}
	c.say("Starting etcd and kube-apiserver, and installing config/crd")
	if c.plane, err = kubetest.Start(ctx); err != nil {
		return c, fmt.Errorf("starting the control plane: %w", err)
	}
	c.say("Giving the operator its rights")
	if _, err := c.kubectl(ctx, nil, "apply", "-k", configRBAC); err != nil {
		return c, err
	}
	c.say("Starting latticekeep with its operator")
	if err := c.startServer(ctx); err != nil {
		return c, err
	}
	return c, nil
}

func (c *cluster) startServer(ctx context.Context) error {
	kubeconfig, err := c.plane.KubeconfigFor(operator[0], operator[1:]...)
	if err != nil {
		return err
	}
	stdout, err := os.Create(c.stdoutFile())
	if err != nil {
		return fmt.Errorf("creating a file for what latticekeep prints: %w", err)
	}
	defer stdout.Close()
	log, err := os.Create(c.logFile())
	if err != nil {
		return fmt.Errorf("creating the log: %w", err)
	}
	defer log.Close()
	cmd := exec.Command(c.binary, "server", "--dev", "--kubeconfig", kubeconfig,
		"--listen", "127.0.0.1:0", "--data-dir", filepath.Join(c.dir, "data"))
	cmd.Stdout, cmd.Stderr = stdout, log
	c.echo(cmd)
	if c.server, err = kubetest.StartProcess(cmd); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	ticker := time.NewTicker(50 * time.Millisecond)
	defer ticker.Stop()
	for !c.announced() {
		select {
		case <-ticker.C:
		case <-c.server.Done():
			return fmt.Errorf("latticekeep ended while starting: %s", c.logTail())
		case <-ctx.Done():
			return fmt.Errorf("waiting for latticekeep to be ready: %w: %s", ctx.Err(), c.logTail())
		}
	}
	fmt.Fprintf(c.out, "  serving at %s for tenant %s\n", c.ready.BaseURL, c.ready.TenantID)
	return nil
}

// announced reads the output of latticekeep so far and reports whether the announcement is
// complete.
func (c *cluster) announced() bool {
	stdout, err := os.ReadFile(c.stdoutFile())
	if err != nil {
		return false
	}
	log, err := os.ReadFile(c.logFile())
	if err != nil {
		return false
	}
	line, _, whole := bytes.Cut(stdout, []byte("\n"))
	if !whole || json.Unmarshal(line, &c.ready) != nil {
		return false
	}
	c.ready.identity, c.ready.chain = lineAfter(log, "identity: "), lineAfter(log, "chain: ")
	return c.ready.BaseURL != "" && c.ready.APIKey != "" && c.ready.identity != "" && c.ready.chain != ""
}

// lineAfter returns the rest of the first complete line that begins with prefix, or "".
func lineAfter(text []byte, prefix string) string {
	for line := range bytes.Lines(text) {
		if rest, ok := bytes.CutPrefix(line, []byte(prefix)); ok && bytes.HasSuffix(rest, []byte("\n")) {
			return string(bytes.TrimSpace(rest))
		}
	}
	return ""
}

// prove takes the sample through its whole life: it is sealed, applied, unsealed over REST, and
// found in the audit chain.
func (c *cluster) prove(ctx context.Context) error {
	c.say("Sealing %s and applying the result", sample)
	manifest, err := c.latticekeep(ctx, "seal", "-f", sample, "--type", "database", "--ttl-days", "30",
		"--url", c.ready.BaseURL, "--identity", c.ready.identity)
	if err != nil {
		return err
	}
	if _, err := c.kubectl(ctx, manifest, "apply", "-f", "-"); err != nil {
		return err
	}
	if _, err := c.kubectl(ctx, nil, "wait", "--for=condition=Ready", "sealedcredential/"+name, "--timeout="+readyTimeout.String()); err != nil {
		return errors.Join(err, c.describe(ctx))
	}
	if _, err := c.kubectl(ctx, nil, "get", "sealedcredential", name, "-o", "wide"); err != nil {
		return err
	}

	c.say("Unsealing it over REST, as a workload would")
	if err := c.unseal(ctx); err != nil {
		return err
	}

	c.say("Verifying the audit chain")
	_, err = c.latticekeep(ctx, "audit", "verify", "--url", c.ready.BaseURL, "--fingerprint", c.ready.chain)
	return err
}

func (c *cluster) unseal(ctx context.Context) error {
	id, err := c.plane.Kubectl(ctx, "get", "sealedcredential", name, "-o", "jsonpath={.status.credentialID}").Output()
	if err != nil {
		return fmt.Errorf("reading status.credentialID: %w", withStderr(err))
	}
	body, err := c.get(ctx, "/api/v2/vault/"+string(id))
	if err != nil {
		return err
	}
	var unsealed struct {
		Values map[string]string `json:"values"`
	}
	if err := json.Unmarshal(body, &unsealed); err != nil {
		return fmt.Errorf("decoding the unsealed credential: %w", err)
	}
	plain, err := c.plane.Kubectl(ctx, "create", "--dry-run=client", "-f", sample, "-o", "jsonpath={.stringData}").Output()
	if err != nil {
		return fmt.Errorf("reading %s: %w", sample, withStderr(err))
	}
	var want map[string]string
	if err := json.Unmarshal(plain, &want); err != nil {
		return fmt.Errorf("decoding %s: %w", sample, err)
	}
	if len(want) == 0 || !maps.Equal(unsealed.Values, want) {
		return fmt.Errorf("the unsealed values are not those of %s", sample)
	}
	fmt.Fprintf(c.out, "  unsealed %s: the values of %s are those of the sample\n", id, strings.Join(slices.Sorted(maps.Keys(want)), ", "))
	return nil
}

// explain prints the commands to try next.
func (c *cluster) explain() {
	fmt.Fprintf(c.out, `
All of it holds. It stays up until you press Ctrl-C; in another terminal, try:

  export KUBECONFIG=%s
  export BASE_URL=%s LATTICEKEEP_API_KEY=%s

  kubectl get sealedcredentials
  kubectl describe sealedcredential %s
  curl -s -H "X-API-Key: $LATTICEKEEP_API_KEY" $BASE_URL/api/v2/vault/list
  curl -s -H "X-API-Key: $LATTICEKEEP_API_KEY" $BASE_URL/api/v2/vault/$(kubectl get sealedcredential %s -o jsonpath='{.status.credentialID}')
  curl -s -H "X-API-Key: $LATTICEKEEP_API_KEY" "$BASE_URL/api/v2/audit/logs?event_type=CREDENTIAL_UNSEALED"
  %s audit verify --url $BASE_URL --fingerprint %s
  kubectl delete sealedcredential %s

latticekeep's log is %s
`, c.plane.Kubeconfig, c.ready.BaseURL, c.ready.APIKey, name, name, c.binary, c.ready.chain, name, c.logFile())
}

// stop stops everything in reverse order and removes every file.
func (c *cluster) stop() error {
	var errs []error
	if c.server != nil {
		if err := c.server.Stop(serverGrace); err != nil {
			errs = append(errs, fmt.Errorf("stopping latticekeep: %w: %s", err, c.logTail()))
		}
	}
	if c.plane != nil {
		if err := c.plane.Stop(); err != nil {
			errs = append(errs, fmt.Errorf("stopping the control plane: %w", err))
		}
	}
	return errors.Join(append(errs, os.RemoveAll(c.dir))...)
}

// get sends an authenticated GET to a path of the REST API.
func (c *cluster) get(ctx context.Context, path string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	fmt.Fprintf(c.out, "$ curl -H \"X-API-Key: $LATTICEKEEP_API_KEY\" %s%s\n", c.ready.BaseURL, path)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.ready.BaseURL+path, nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("X-API-Key", c.ready.APIKey)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, fmt.Errorf("reading the answer of %s: %w", path, err)
	}
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("GET %s answered %s: %s", path, resp.Status, body)
	}
	return body, nil
}

func (c *cluster) kubectl(ctx context.Context, stdin []byte, args ...string) ([]byte, error) {
	cmd := c.plane.Kubectl(ctx, args...)
	cmd.Stdin = bytes.NewReader(stdin)
	fmt.Fprintf(c.out, "$ kubectl %s\n", strings.Join(args, " "))
	return c.output(cmd)
}

func (c *cluster) latticekeep(ctx context.Context, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, c.binary, args...)
	cmd.Env = append(os.Environ(), "LATTICEKEEP_API_KEY="+c.ready.APIKey)
	c.echo(cmd)
	return c.output(cmd)
}

// output runs a command, returns its output and shows it, except for a manifest, which is long.
func (c *cluster) output(cmd *exec.Cmd) ([]byte, error) {
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", filepath.Base(cmd.Path), withStderr(err))
	}
	if bytes.HasPrefix(out, []byte("apiVersion:")) {
		fmt.Fprintf(c.out, "  (a manifest of %d bytes)\n", len(out))
		return out, nil
	}
	for line := range bytes.Lines(out) {
		fmt.Fprintf(c.out, "  %s", line)
	}
	return out, nil
}

// describe prints the cluster's description of an object that did not become ready.
func (c *cluster) describe(ctx context.Context) error {
	out, err := c.plane.Kubectl(ctx, "describe", "sealedcredential", name).CombinedOutput()
	if err != nil {
		return err
	}
	return fmt.Errorf("%s\n%s", out, c.logTail())
}

func (c *cluster) stdoutFile() string { return filepath.Join(c.dir, "latticekeep.out") }
func (c *cluster) logFile() string    { return filepath.Join(c.dir, "latticekeep.log") }

// logTail returns the end of latticekeep's log.
func (c *cluster) logTail() string {
	data, err := os.ReadFile(c.logFile())
	if err != nil {
		return err.Error()
	}
	return string(data[max(0, len(data)-4096):])
}

func (c *cluster) say(format string, args ...any) {
	fmt.Fprintf(c.out, "\n==> "+format+"\n", args...)
}

func (c *cluster) echo(cmd *exec.Cmd) {
	fmt.Fprintf(c.out, "$ %s\n", strings.Join(append([]string{"latticekeep"}, cmd.Args[1:]...), " "))
}

// withStderr adds what a command printed on stderr to its error.
func withStderr(err error) error {
	var exit *exec.ExitError
	if errors.As(err, &exit) && len(exit.Stderr) > 0 {
		return fmt.Errorf("%w: %s", err, bytes.TrimSpace(exit.Stderr))
	}
	return err
}
