// Package kubetest runs a real Kubernetes control plane, etcd and kube-apiserver, for tests and for
// `make cluster`.
//
// Everything listens on loopback or on a socket in a temporary directory, which also holds the
// certificates and the kubeconfigs. RBAC is on, and the custom resource definitions of config/crd
// are installed. Two things are promised: once Start has returned, the API answers and serves
// SealedCredentials; and both processes end with Stop, or with the process that started them.
//
// There is no controller manager, scheduler or kubelet. So no pod runs, no ServiceAccount token
// appears by itself, deleting an owner deletes nothing else, and a deleted namespace stays
// terminating. The package starts the processes itself, because envtest's processes outlive a
// killed test. It calls them through kubectl, so it needs no client library. No part of the product
// imports it.
package kubetest

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"time"
)

// startTimeout bounds Start when its context has no deadline. A start usually takes five seconds,
// but longer on a machine that also compiles.
const startTimeout = 3 * time.Minute

// ControlPlane is a running etcd and kube-apiserver.
type ControlPlane struct {
	// Kubeconfig is the path of a kubeconfig for a cluster administrator.
	Kubeconfig string

	dir  string // removed by Stop
	bin  string // folder of the programs
	more []string
	port string
	url  string
	ca   *authority
	etcd *Process
	api  *Process
}

// Start starts a control plane from the binaries that `make control-plane` compiled, or from those
// in KUBEBUILDER_ASSETS, and installs config/crd. The context bounds only the start. The working
// directory must be inside the repository. flags are additional flags for the API server.
func Start(ctx context.Context, flags ...string) (*ControlPlane, error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	root, err := repositoryRoot()
	if err != nil {
		return nil, err
	}
	bin, err := binaries(root)
	if err != nil {
		return nil, err
	}
	if _, err := exec.LookPath("kubectl"); err != nil {
		return nil, errors.New("kubectl is not on the PATH: install it (any version from 1.30 on)")
	}
	// The path is short because a socket's path has at most 107 bytes.
	dir, err := os.MkdirTemp("", "latticekeep-kube-")
	if err != nil {
		return nil, fmt.Errorf("making the control plane's directory: %w", err)
	}
	c := &ControlPlane{dir: dir, bin: bin, more: flags}
	if err := c.start(ctx, filepath.Join(root, "config", "crd")); err != nil {
		return nil, errors.Join(err, c.Stop())
	}
	return c, nil
}

func (c *ControlPlane) start(ctx context.Context, crds string) (err error) {
	if c.ca, err = newAuthority(); err != nil {
		return fmt.Errorf("making the certificate authority: %w", err)
	}
	if err := c.writeServerFiles(); err != nil {
		return fmt.Errorf("writing the API server's keys: %w", err)
	}
	if err := c.startEtcd(); err != nil {
		return err
	}
	// The API server cannot be given a listener. Another process may take the port after it was
	// found free and before the API server binds it.
	const attempts = 5
	for range attempts {
		if err = c.startAPIServer(ctx); err == nil || !errors.Is(err, errPortTaken) {
			break
		}
	}
	if err != nil {
		return err
	}
	if c.Kubeconfig, err = c.KubeconfigFor("admin", "system:masters"); err != nil {
		return err
	}
	return c.installCRDs(ctx, crds)
}

// KubeconfigFor writes a kubeconfig for a user with a client certificate and returns its path. A
// ServiceAccount is the user system:serviceaccount:<namespace>:<name>.
func (c *ControlPlane) KubeconfigFor(user string, groups ...string) (string, error) {
	cert, key, err := c.ca.clientPair(user, groups)
	if err != nil {
		return "", fmt.Errorf("issuing a client certificate: %w", err)
	}
	// JSON is valid YAML, and []byte becomes the base64 that the format requires.
	config, err := json.MarshalIndent(map[string]any{
		"apiVersion": "v1", "kind": "Config", "current-context": "latticekeep",
		"clusters": []any{map[string]any{"name": "latticekeep", "cluster": map[string]any{
			"server": c.url, "certificate-authority-data": c.ca.pem}}},
		"users": []any{map[string]any{"name": user, "user": map[string]any{
			"client-certificate-data": cert, "client-key-data": key}}},
		"contexts": []any{map[string]any{"name": "latticekeep", "context": map[string]any{
			"cluster": "latticekeep", "user": user, "namespace": "default"}}},
	}, "", "  ")
	if err != nil {
		return "", fmt.Errorf("encoding a kubeconfig: %w", err)
	}
	f, err := os.CreateTemp(c.dir, "*.kubeconfig") // mode 0600
	if err != nil {
		return "", fmt.Errorf("creating a kubeconfig: %w", err)
	}
	_, err = f.Write(config)
	if err := errors.Join(err, f.Close()); err != nil {
		return "", fmt.Errorf("writing a kubeconfig: %w", err)
	}
	return f.Name(), nil
}

// Kubectl returns a kubectl command for the cluster administrator, not yet started. It does not
// touch the caches and the configuration of the user who runs it.
func (c *ControlPlane) Kubectl(ctx context.Context, args ...string) *exec.Cmd {
	global := []string{"--kubeconfig", c.Kubeconfig, "--cache-dir", filepath.Join(c.dir, "cache")}
	return exec.CommandContext(ctx, "kubectl", append(global, args...)...)
}

// Stop kills both processes, waits until they are gone and removes all their files. Nothing needs a
// graceful end because the data is temporary.
func (c *ControlPlane) Stop() error {
	var errs []error
	for _, p := range []*Process{c.api, c.etcd} {
		if p != nil {
			errs = append(errs, p.Stop(0))
		}
	}
	return errors.Join(append(errs, os.RemoveAll(c.dir))...)
}

func (c *ControlPlane) path(name string) string { return filepath.Join(c.dir, name) }

func (c *ControlPlane) writeServerFiles() error {
	cert, key, err := c.ca.servingPair()
	if err != nil {
		return err
	}
	tokens, err := newKey()
	if err != nil {
		return err
	}
	for name, data := range map[string][]byte{"ca.crt": c.ca.pem, "api.crt": cert, "api.key": key, "tokens.key": tokens} {
		if err := os.WriteFile(c.path(name), data, 0o600); err != nil {
			return err
		}
	}
	return nil
}

// startEtcd does not wait, because the API server retries until etcd answers. Sockets need no free
// port, and other users of the machine cannot read the cluster's data through them.
func (c *ControlPlane) startEtcd() (err error) {
	client, peer := "unix://"+c.path("etcd.sock"), "unix://"+c.path("peer.sock")
	c.etcd, err = c.run(filepath.Join(c.bin, "etcd"),
		"--data-dir", c.path("etcd"), "--unsafe-no-fsync",
		"--listen-client-urls", client, "--advertise-client-urls", client,
		"--listen-peer-urls", peer)
	return err
}

var errPortTaken = errors.New("port taken")

func (c *ControlPlane) startAPIServer(ctx context.Context) (err error) {
	if c.port, err = freePort(); err != nil {
		return fmt.Errorf("finding a free port: %w", err)
	}
	c.url = "https://127.0.0.1:" + c.port
	if err := c.runAPIServer(); err != nil {
		return err
	}
	return c.AwaitReady(ctx)
}

// RestartAPIServer kills the API server and starts it again, at the same address and with the same
// flags. It does not wait: AwaitReady does.
func (c *ControlPlane) RestartAPIServer() error {
	_ = c.api.Stop(0) // nil: it was killed
	return c.runAPIServer()
}

func (c *ControlPlane) runAPIServer() (err error) {
	const issuer = "https://kubernetes.default.svc.cluster.local"
	c.api, err = c.run(filepath.Join(c.bin, "kube-apiserver"), append([]string{
		"--etcd-servers", "unix://" + c.path("etcd.sock"),
		"--bind-address", "127.0.0.1", "--secure-port", c.port,
		// Without these two flags the API server looks for the address of a network card, and there
		// may be none.
		"--advertise-address", "127.0.0.1", "--endpoint-reconciler-type", "none",
		"--cert-dir", c.dir, "--tls-cert-file", c.path("api.crt"), "--tls-private-key-file", c.path("api.key"),
		"--client-ca-file", c.path("ca.crt"), "--authorization-mode", "RBAC",
		"--service-account-issuer", issuer,
		"--service-account-key-file", c.path("tokens.key"), "--service-account-signing-key-file", c.path("tokens.key"),
		// This plugin requires a ServiceAccount in every namespace, which the controller manager
		// would create.
		"--disable-admission-plugins", "ServiceAccount",
		"--service-cluster-ip-range", "10.0.0.0/24",
	}, c.more...)...)
	return err
}

// AwaitReady returns when the API server is ready and has created its first namespace. It fails if a
// process ends before that.
func (c *ControlPlane) AwaitReady(ctx context.Context) error {
	client, err := c.adminClient()
	if err != nil {
		return err
	}
	defer client.CloseIdleConnections()
	ticker := time.NewTicker(50 * time.Millisecond)
	defer ticker.Stop()
	for _, path := range []string{"/readyz", "/api/v1/namespaces/default"} {
		for !answers(ctx, client, c.url+path) {
			select {
			case <-ticker.C:
			case <-c.etcd.Done():
				return fmt.Errorf("etcd ended while starting: %s", c.logTail("etcd"))
			case <-c.api.Done():
				tail := c.logTail("kube-apiserver")
				if bytes.Contains(tail, []byte("address already in use")) {
					return fmt.Errorf("starting kube-apiserver at %s: %w", c.url, errPortTaken)
				}
				return fmt.Errorf("kube-apiserver ended while starting: %s", tail)
			case <-ctx.Done():
				return fmt.Errorf("waiting for %s%s: %w: %s", c.url, path, ctx.Err(), c.logTail("kube-apiserver"))
			}
		}
	}
	return nil
}

func (c *ControlPlane) adminClient() (*http.Client, error) {
	cert, key, err := c.ca.clientPair("admin", []string{"system:masters"})
	if err != nil {
		return nil, err
	}
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	roots.AddCert(c.ca.cert)
	// The certificate also distinguishes our server from another one that took the port.
	config := &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS13}
	return &http.Client{Transport: &http.Transport{TLSClientConfig: config}, Timeout: 5 * time.Second}, nil
}

func answers(ctx context.Context, client *http.Client, url string) bool {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return false
	}
	resp, err := client.Do(req)
	if err != nil {
		return false
	}
	resp.Body.Close()
	return resp.StatusCode == http.StatusOK
}

func (c *ControlPlane) installCRDs(ctx context.Context, folder string) error {
	if out, err := c.Kubectl(ctx, "apply", "-k", folder).CombinedOutput(); err != nil {
		return fmt.Errorf("installing config/crd: kubectl apply: %w: %s", err, out)
	}
	return c.AwaitCRDs(ctx)
}

// AwaitCRDs returns when all custom resource definitions are established. kubectl wait cannot do
// that: it fails at once while their conditions are null, as they are when they have just been made.
func (c *ControlPlane) AwaitCRDs(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		out, err := c.Kubectl(ctx, "get", "crd", "-o", "json").Output()
		if err != nil {
			return fmt.Errorf("looking for custom resource definitions: %w", err)
		}
		var list struct {
			Items []struct {
				Status struct {
					Conditions []struct{ Type, Status string }
				}
			}
		}
		if err := json.Unmarshal(out, &list); err != nil {
			return fmt.Errorf("looking for custom resource definitions: %w", err)
		}
		established := 0
		for _, crd := range list.Items {
			for _, is := range crd.Status.Conditions {
				if is.Type == "Established" && is.Status == "True" {
					established++
				}
			}
		}
		if established == len(list.Items) {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("waiting for custom resource definitions to be established: %w: %s", ctx.Err(), c.logTail("kube-apiserver"))
		}
	}
}

// run starts a program with its output in a file of the same name.
func (c *ControlPlane) run(program string, args ...string) (*Process, error) {
	log, err := os.Create(c.path(filepath.Base(program) + ".log"))
	if err != nil {
		return nil, fmt.Errorf("creating a log: %w", err)
	}
	defer log.Close() // the child has its own descriptor
	cmd := exec.Command(program, args...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = c.dir, log, log
	return StartProcess(cmd)
}

// logTail returns the end of a program's output, which usually says why it ended.
func (c *ControlPlane) logTail(program string) []byte {
	data, err := os.ReadFile(c.path(program + ".log"))
	if err != nil {
		return []byte(err.Error())
	}
	return data[max(0, len(data)-4096):]
}

func freePort() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer l.Close()
	return strconv.Itoa(l.Addr().(*net.TCPAddr).Port), nil
}

// repositoryRoot returns the nearest directory, from the working directory up, that contains
// versionFile.
func repositoryRoot() (string, error) {
	start, err := os.Getwd()
	if err != nil {
		return "", fmt.Errorf("finding the working directory: %w", err)
	}
	for dir := start; ; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, versionFile)); err == nil {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", fmt.Errorf("%s is not inside the repository: no directory above it has %s", start, versionFile)
		}
	}
}

// versionFile is the only place that names the version of Kubernetes. hack/control-plane.sh reads
// it too.
const versionFile = "hack/k8s/go.mod"

// binaries returns the directory of kube-apiserver and etcd. Its error names the remedy.
func binaries(root string) (string, error) {
	dir, remedy := os.Getenv("KUBEBUILDER_ASSETS"), "correct KUBEBUILDER_ASSETS, or unset it and run `make control-plane`"
	if dir == "" {
		mod, err := os.ReadFile(filepath.Join(root, versionFile))
		if err != nil {
			return "", fmt.Errorf("reading the version of Kubernetes: %w", err)
		}
		version := regexp.MustCompile(`(?m)^\s*k8s\.io/kubernetes (v\S+)`).FindSubmatch(mod)
		if version == nil {
			return "", fmt.Errorf("%s requires no k8s.io/kubernetes", versionFile)
		}
		dir, remedy = filepath.Join("bin", "k8s", string(version[1])), "run `make control-plane`"
	}
	// Tests run in the directory of their package, so a relative path is relative to the
	// repository's root.
	if !filepath.IsAbs(dir) {
		dir = filepath.Join(root, dir)
	}
	for _, name := range []string{"kube-apiserver", "etcd"} {
		if _, err := exec.LookPath(filepath.Join(dir, name)); err != nil {
			return "", fmt.Errorf("%s cannot be run (%w): %s", name, err, remedy)
		}
	}
	return dir, nil
}
